"""`hf-recurrent push-to-hub PATH REPO_ID`: upload a checkpoint with its tokenizer, its code and a model card."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from hf_recurrent.checkpoints.privacy import hub_name
from hf_recurrent.cli.imports import import_libraries
from hf_recurrent.cli.parsing import CommandParser, add_json_argument, check_checkpoint, command

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command, without the token: arguments are visible in the list of processes."""
    parser = CommandParser(
        prog="hf-recurrent push-to-hub",
        description="Upload a checkpoint with its tokenizer, its code and a model card. The token is read from "
        "HF_TOKEN, or from the login of `hf auth login`.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="directory of a checkpoint")
    parser.add_argument("repo_id", metavar="REPO_ID", help="repository on the Hub, as owner/name")
    parser.add_argument("--private", action="store_true", help="if the repository is new, make it private")
    parser.add_argument("--base_model", help="owner/name on the Hub of the model that training began with")
    parser.add_argument("--license", help="licence of the weights, as an identifier of the Hub")
    parser.add_argument("--commit_message", default="Upload model, tokenizer, code and card")
    code = "run the code in PATH of a user-defined recurrent unit"
    parser.add_argument("--trust_remote_code", action="store_true", help=code)
    parser.add_argument("--dry_run", action="store_true", help="print the files and the card without uploading")
    add_json_argument(parser)
    return parser


def _push(arguments: argparse.Namespace) -> None:
    validate_repo_id(arguments.repo_id)
    if arguments.base_model is not None and not hub_name(arguments.base_model):
        raise ValueError(f"`--base_model` is {arguments.base_model!r}; it must be owner/name on the Hub.")
    check_checkpoint("PATH", arguments.path)

    import_libraries()
    from hf_recurrent.checkpoints.hub_repositories import is_connection_error, unreachable
    from hf_recurrent.hub import checkpoint
    from hf_recurrent.hub.loading import auto_class_of, load_model, load_tokenizer
    from hf_recurrent.hub.model_card import Statements, create_model_card, name_repository

    trust = arguments.trust_remote_code
    model = load_model(auto_class_of(arguments.path), arguments.path, argument="PATH", trust_remote_code=trust)
    tokenizer = load_tokenizer(arguments.path, argument="PATH")
    _name_base(model, arguments)
    written = arguments.path / "README.md"
    if written.is_file() and not (arguments.base_model or arguments.license):
        text = name_repository(written.read_text(encoding="utf-8"), arguments.repo_id)
        card = ModelCard(text, ignore_metadata_errors=True)
    else:
        statements = Statements(arguments.repo_id, license=arguments.license, base_model=arguments.base_model)
        card = create_model_card(model, statements=statements, curve=True)
    # As small as they are in PATH.
    weights = checkpoint.narrow_weights(model) if checkpoint.stores_bfloat16(arguments.path) else None
    if arguments.dry_run:
        with tempfile.TemporaryDirectory() as directory:
            names = checkpoint.save_checkpoint_for_hub(model, tokenizer, directory, card, state_dict=weights)
            if arguments.json:
                sizes = {name: Path(directory, name).stat().st_size for name in names}
                print(json.dumps({"repo_id": arguments.repo_id, "url": None, "bytes": sizes}))
                return
            print(f"Would upload to {arguments.repo_id}:")
            for name in names:
                print(f"{Path(directory, name).stat().st_size:>12,}  {name}")
            print(f"\n{Path(directory, 'README.md').read_text(encoding='utf-8')}")
        return
    options = {"state_dict": weights, "private": arguments.private or None, "commit_message": arguments.commit_message}
    try:
        url = checkpoint.push_checkpoint_to_hub(model, tokenizer, arguments.repo_id, card, **options)
    except Exception as error:  # errors of the Hub are an OSError that says why
        if not is_connection_error(error):
            raise
        raise unreachable(error) from error
    print(json.dumps({"repo_id": arguments.repo_id, "url": url}) if arguments.json else url)


def _name_base(model: "PreTrainedModel", arguments: argparse.Namespace) -> None:
    """Let an adapter name its base model on the Hub; a ValueError if only its local directory is known."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        config.base_model_name_or_path = arguments.base_model or config.base_model_name_or_path
        if not hub_name(config.base_model_name_or_path):
            raise ValueError(
                f"`PATH` is {str(arguments.path)!r}, an adapter of {config.base_model_name_or_path!r}, which is not on"
                " the Hub; name its repository with --base_model owner/name."
            )


main = command(build_parser, _push)
