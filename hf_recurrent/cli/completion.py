"""`hf-recurrent completion bash`: a script with which a shell completes commands, flags and their values.

The script holds everything that it completes, so that pressing Tab starts no Python. shtab writes it from the parsers.
"""

import argparse
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_recurrent.cli.parsing import CommandParser, command
from hf_recurrent.cli.reproduce import load_papers

PROG = "hf-recurrent"
SHELLS = ("bash", "zsh", "fish")
# Arguments that are files or directories, although their type is text.
_FILES = {
    "model", "corpus", "validation_corpus", "files", "logs", "source", "held_out", "output_dir", "draft", "teacher",
    "recipe", "tokenizer", "resume_from_checkpoint",
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = CommandParser(
        prog="hf-recurrent completion",
        description="Print a script that completes commands, flags and values in a shell.",
        epilog="examples:\n"
        "  cd ~/.local/share/bash-completion/completions\n"
        "  hf-recurrent completion bash > hf-recurrent\n"
        "  hf-recurrent completion zsh > ~/.zfunc/_hf-recurrent  # a folder of fpath\n"
        "  cd ~/.config/fish/completions\n"
        "  hf-recurrent completion fish > hf-recurrent.fish\n\n"
        "Repeat it after an update.",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def _print_script(arguments: argparse.Namespace) -> None:
    print(script(arguments.shell))


def script(shell: str) -> str:
    """The script for a shell.

    Raises:
        ImportError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ImportError("completion needs the shtab package: pip install 'hf-recurrent[completion]'") from error
    return shtab.complete(whole_parser(shtab.FILE), shell)


def whole_parser(file: Any) -> argparse.ArgumentParser:
    """All commands as sub-commands of one parser; `file` marks the arguments that are files."""
    from hf_recurrent.cli.main import COMMANDS

    parser = argparse.ArgumentParser(prog=PROG)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, text in COMMANDS.items():
        parents = _parsers(name)
        for action in (action for parent in parents for action in parent._actions):
            if action.choices is None and (action.type is Path or action.dest in _FILES):
                action.complete = file
        commands.add_parser(name, help=text, parents=parents, add_help=not parents, conflict_handler="resolve")
    return parser


def _parsers(name: str) -> list[argparse.ArgumentParser]:
    """The parsers of a command, one for each of its forms; none for one that has no parser of ours."""
    from hf_recurrent.cli.main import FOREIGN

    if name in FOREIGN or (name == "reproduce" and load_papers() is None):
        return []
    if name != "pretrain":
        parser = importlib.import_module(f"hf_recurrent.cli.{name.replace('-', '_')}").build_parser()
        if name == "reproduce":
            _set_choices(parser, "name", [*load_papers().EXPERIMENTS, *load_papers().STUDIES])
        return [parser]
    return [_pretrain_parser()]


def _pretrain_parser() -> argparse.ArgumentParser:
    """The arguments of all methods, from their source: their dataclasses would import torch."""
    from hf_recurrent.cli.pretrain_help import DEFAULT_METHOD, DMT, METHODS, SMT, all_arguments, recipe_help
    from hf_recurrent.cli.recipes import recipe_names
    from hf_recurrent.cli.threads import add_threads_argument
    from hf_recurrent.presets import preset_names

    parser = CommandParser(prog="hf-recurrent pretrain")
    parser.add_argument("--recipe", help=recipe_help(), choices=recipe_names())
    parser.add_argument("--help_all", action="help", help="show all arguments")
    add_threads_argument(parser)
    arguments = {}
    for method in (METHODS[1], SMT, DMT, DEFAULT_METHOD):
        arguments |= all_arguments(method)
    arguments.pop("method", None)
    parser.add_argument("--method", help="how to train", choices=METHODS)
    for argument in arguments.values():
        argument.add_to(parser)
    _set_choices(parser, "model", preset_names())
    return parser


def _set_choices(parser: argparse.ArgumentParser, name: str, choices: Iterable[str]) -> None:
    """Complete the values of an argument, whatever else it accepts."""
    for action in parser._actions:
        if action.dest == name:
            action.choices = list(choices)


main = command(build_parser, _print_script)
