"""Loading of the compiled kernels, which are optional: plain C, called through ctypes."""

import ctypes
import importlib.util


def load_library(name: str, version_function: str, version: int) -> ctypes.CDLL:
    """The library `name` of this package, whose `version_function` gives `version`.

    Raises:
        ImportError: it was not built, cannot be loaded, or was built from another version of its source.
    """
    spec = importlib.util.find_spec(f"{__package__}.{name}")
    if spec is None or spec.origin is None:
        raise ImportError("the kernel was not built when hf-recurrent was installed")
    try:
        library = ctypes.CDLL(spec.origin)
        function = getattr(library, version_function)
    except (OSError, AttributeError) as error:
        raise ImportError(f"the kernel in {spec.origin} cannot be loaded: {error}") from error
    function.restype = ctypes.c_int64
    if (found := function()) != version:
        raise ImportError(f"the kernel in {spec.origin} has version {found}, not {version}: build it again")
    return library
