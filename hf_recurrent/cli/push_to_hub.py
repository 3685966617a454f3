"""`hf-recurrent push_to_hub PATH REPO_ID`: upload a checkpoint with its tokenizer, code and model card."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command. There is none for the token: it would show in the list of processes."""
    parser = argparse.ArgumentParser(
        prog="hf-recurrent push_to_hub",
        description="Upload a checkpoint with its tokenizer, the code that it needs and a model card. The token is "
        "read from HF_TOKEN or from what `hf auth login` stored.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="directory of a checkpoint that pretrain wrote")
    parser.add_argument("repo_id", metavar="REPO_ID", help="repository on the Hub, as owner/name")
    parser.add_argument("--private", action="store_true", help="make the repository private when it is created")
    parser.add_argument("--corpus_name", help="what it was trained on, for the card (python, hub:owner/name, a path)")
    parser.add_argument("--metrics", type=Path, help="JSON file with the measured bits_per_byte, for the card")
    parser.add_argument("--commit_message", default="Upload model, tokenizer, code and card")
    parser.add_argument("--dry_run", action="store_true", help="show the files and the card, and upload nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the process's arguments. Bad input ends it with one sentence."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        _push(arguments)
    except LocalTokenNotFoundError:
        parser.error("there is no token: set HF_TOKEN or run `hf auth login` first.")
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = " Check that the token may write there." if status in (401, 403) else ""
        parser.exit(1, f"{parser.prog}: error: the Hub refused `{arguments.repo_id}` with status {status}.{hint}\n")
    except (FileNotFoundError, HFValidationError, ValueError) as error:
        parser.error(str(error))


def _push(arguments: argparse.Namespace) -> None:
    validate_repo_id(arguments.repo_id)
    if not (arguments.path / "config.json").is_file():
        raise FileNotFoundError(f"PATH is `{arguments.path}`, where no checkpoint is: it has no `config.json`.")
    metrics = _read_metrics(arguments.metrics) if arguments.metrics else None

    # Loading torch takes seconds, so it comes after what can go wrong at once.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_recurrent  # noqa: F401 (registers our classes)
    from hf_recurrent.hub.checkpoint import push_checkpoint_to_hub, save_checkpoint_for_hub
    from hf_recurrent.hub.model_card import create_model_card, unnamed_repository

    model = AutoModelForCausalLM.from_pretrained(arguments.path)
    tokenizer = AutoTokenizer.from_pretrained(arguments.path)
    written = arguments.path / "README.md"
    if written.is_file() and metrics is None and arguments.corpus_name is None:
        text = written.read_text(encoding="utf-8").replace(unnamed_repository(model), arguments.repo_id)
        card = ModelCard(text, ignore_metadata_errors=True)
    else:
        card = create_model_card(model, None, arguments.corpus_name, metrics, repo_id=arguments.repo_id)
    if arguments.dry_run:
        with tempfile.TemporaryDirectory() as directory:
            names = save_checkpoint_for_hub(model, tokenizer, directory, card)
            print(f"Would upload to {arguments.repo_id}:")
            for name in names:
                print(f"{Path(directory, name).stat().st_size:>12,}  {name}")
            print(f"\n{Path(directory, 'README.md').read_text(encoding='utf-8')}")
        return
    print(
        push_checkpoint_to_hub(
            model,
            tokenizer,
            arguments.repo_id,
            card,
            private=arguments.private or None,
            commit_message=arguments.commit_message,
        )
    )


def _read_metrics(path: Path) -> dict[str, float]:
    if not path.is_file():
        raise FileNotFoundError(f"--metrics is `{path}`, which is no file.")
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--metrics is `{path}`, which is no JSON: {error}.") from error
    if not isinstance(metrics, dict) or not {"bits_per_byte", "eval_bits_per_byte"} & metrics.keys():
        raise ValueError(f"--metrics is `{path}`, which has no `bits_per_byte`.")
    return metrics
