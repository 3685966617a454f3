"""`hf-recurrent VERB ...`: one command for everything that has a script."""

import importlib
import sys
from collections.abc import Sequence

# Verb → what it does; the code of each is in the module of that name and is loaded when it is used.
VERBS = {
    "pretrain": "train a model on continuous streams of bytes, from scratch or from a checkpoint",
    "evaluate": "bits per byte on held-out documents, beside gzip, bz2 and xz",
    "generate": "continue a prompt, a file or a saved state",
    "learn": "read an endless stream and learn from every byte of it",
    "push_to_hub": "upload a trained model with its tokenizer, code and card",
    "reproduce": "one table or figure of the papers, measured beside the printed numbers",
    "env": "versions and available scan backends, for bug reports",
}


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    return "\n".join(["usage: hf-recurrent VERB [--help] ...", "", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the verb that `argv`, by default the process's arguments, begins with."""
    verb, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(usage())
        return
    name = verb.replace("-", "_")
    if name not in VERBS:
        print(f"hf-recurrent: error: {verb!r} is no verb; there are {', '.join(VERBS)}.", file=sys.stderr)
        raise SystemExit(2)
    importlib.import_module(f"hf_recurrent.cli.{name}").main(rest)


if __name__ == "__main__":
    main()
