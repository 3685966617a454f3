"""`hf-recurrent completion bash`: a script with which a shell completes commands, flags and their values.

The script holds everything that it completes, so that pressing Tab starts no Python. shtab writes it from the parsers.
"""

import argparse
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_recurrent.argument_checks import import_optional
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
    message = "completion needs the shtab package: pip install 'hf-recurrent[completion]'"
    shtab = import_optional("shtab", message)
    print(shtab.complete(whole_parser(shtab.FILE), arguments.shell))


def whole_parser(file: Any) -> argparse.ArgumentParser:
    """All commands as sub-commands of one parser; `file` marks the arguments that are files."""
    from hf_recurrent.cli.main import COMMANDS

    parser = argparse.ArgumentParser(prog=PROG)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, text in COMMANDS.items():
        parents = _parsers(name)
        for action in (action for parent in parents for action in parent._actions):
            action.choices = action.choices and list(action.choices)  # of stock arguments, keys of a dictionary
            if action.choices is None and (action.type is Path or action.dest in _FILES):
                action.complete = file
        commands.add_parser(name, help=text, parents=parents, add_help=not parents, conflict_handler="resolve")
    return parser


def _parsers(name: str) -> list[argparse.ArgumentParser]:
    """The parsers of a command, one for each of its forms; none for one that has no parser of ours."""
    from hf_recurrent.cli.main import FOREIGN

    if name in FOREIGN or (name == "reproduce" and load_papers() is None):
        return []
    if name == "pretrain":
        return _pretrain_parsers()
    parser = importlib.import_module(f"hf_recurrent.cli.{name.replace('-', '_')}").build_parser()
    if name == "reproduce":
        _set_choices(parser, "name", [*load_papers().EXPERIMENTS, *load_papers().STUDIES])
    return [parser]


def _pretrain_parsers() -> list[argparse.ArgumentParser]:
    """The parsers of all methods; the last one has the choices of `--method`."""
    from hf_recurrent.cli.pretrain_arguments import build_parser as pretrain_parser
    from hf_recurrent.cli.pretrain_help import DEFAULT_METHOD, DMT, METHODS, SMT
    from hf_recurrent.cli.recipes import recipe_names
    from hf_recurrent.presets import preset_names

    parsers = [pretrain_parser(method) for method in (METHODS[1], SMT, DMT, DEFAULT_METHOD)]
    for parser in parsers:
        _set_choices(parser, "model", preset_names())
        _set_choices(parser, "recipe", recipe_names())
    return parsers


def _set_choices(parser: argparse.ArgumentParser, name: str, choices: Iterable[str]) -> None:
    """Complete the values of an argument, whatever else it accepts."""
    for action in parser._actions:
        if action.dest == name:
            action.choices = list(choices)


main = command(build_parser, _print_script)
