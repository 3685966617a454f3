"""`hf-recurrent COMMAND ...`: the entry point of all commands."""

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import hf_recurrent
from hf_recurrent.cli import threads
from hf_recurrent.cli.flags import did_you_mean
from hf_recurrent.cli.imports import without_collection
from hf_recurrent.cli.pretrain_help import is_help, print_help
from hf_recurrent.cli.standard_output import checked_output

# Command → help; its code is in the module of the same name with underscores, imported on use.
COMMANDS = {
    "pretrain": "train a model on continuous streams of bytes",
    "plan": "count the memory of a run before it starts",
    "evaluate": "measure bits per byte on held-out documents, next to gzip and xz",
    "score": "print log-probabilities of bytes, lines or documents as JSON",
    "generate": "continue a prompt, a file or a saved state",
    "chat": "talk to a model that keeps everything in its state",
    "serve": "serve a model over HTTP: OpenAI's completions, and sessions",
    "watch": "show the unusual lines of logs as they grow",
    "learn": "read an endless stream and learn from every byte",
    "compress": "compress a file by counts of contexts, or with a model",
    "decompress": "restore a compressed file",
    "export": "write one step as a program for another runtime: ONNX, C, ...",
    "push-to-hub": "upload a trained model with its tokenizer, code and model card",
    "transformers": "run a command of transformers, such as serve, with our models",
    "lm-eval": "run lm-evaluation-harness with the state carried over documents",
    "reproduce": "measure a table of the papers next to the printed numbers",
    "completion": "print a script that completes commands in bash, zsh or fish",
    "hf-extension": "make the commands available as `hf recurrent`",
    "env": "print versions and compiled kernels, for bug reports",
}
# Commands of other programs, which have parsers of their own.
FOREIGN = ("transformers", "lm-eval")


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {command:<{width}}  {text}" for command, text in COMMANDS.items()]
    return "\n".join(["usage: hf-recurrent COMMAND [--help] ...", "       hf-recurrent --version", "", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name = command.replace("_", "-")
    prog = f"hf-recurrent {name}" if name in COMMANDS else "hf-recurrent"

    def fail(message: str) -> NoReturn:
        print(f"{prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    try:
        with checked_output(fail):
            if command in ("-h", "--help", "help"):
                print(usage())
            elif command in ("--version", "-V", "version"):
                print(f"hf-recurrent {hf_recurrent.__version__}")
            elif name not in COMMANDS:
                hint = did_you_mean(name, COMMANDS, otherwise="")
                fail(f"unknown command {command!r} (choose from {', '.join(COMMANDS)}){hint}")
            else:
                _run(name, rest)
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _run(name: str, words: Sequence[str]) -> None:
    if name == "pretrain" and is_help(words):  # without the imports of the command
        print_help(words)
        return
    if "torch" not in sys.modules:  # else it is too late, and the caller has chosen
        threads.observe()
    with without_collection():
        module = importlib.import_module(f"hf_recurrent.cli.{name.replace('-', '_')}")
    module.main(words)


if __name__ == "__main__":
    main()
