"""Repositories of the Hub, asked for once: downloads of a missing one are retried for a minute."""

import os

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

# Seconds to wait for the answer.
_TIMEOUT = 10.0
# Libraries whose exceptions mean that a server did not answer, unless it is an HfHubHTTPError.
_CLIENTS = ("httpx", "httpx2", "httpcore", "requests", "urllib3")


def check_repository(name: str, kind: str = "model") -> None:
    """Raise an OSError of one sentence if the repository of a model or dataset is missing or the Hub does not answer.

    Nothing is asked for a directory, a repository in the cache, and in offline mode.
    """
    if os.path.isdir(name) or constants.HF_HUB_OFFLINE:
        return
    try:
        if kind == "model" and isinstance(try_to_load_from_cache(name, constants.CONFIG_NAME), str):
            return
        HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT)
    except HFValidationError as error:
        raise OSError(f"it must be a directory, or owner/name on the Hub: {error}") from error
    except RepositoryNotFoundError as error:
        raise OSError(f"there is no such {kind} on the Hub; if it is private, log in with `hf auth login`.") from error
    except HfHubHTTPError:
        return  # a gated repository or a busy server: the download says more
    except Exception as error:
        if not is_connection_error(error):
            raise
        raise unreachable(error) from error


def is_connection_error(error: BaseException) -> bool:
    """True for the errors with which the clients of the Hub report that there was no answer."""
    if isinstance(error, HfHubHTTPError):
        return False
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.split(".")[0] in _CLIENTS


def unreachable(error: BaseException) -> OSError:
    """The error for a Hub that does not answer."""
    return OSError(f"the Hub ({constants.ENDPOINT}) cannot be reached: {str(error) or type(error).__name__}")
