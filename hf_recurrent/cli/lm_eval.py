"""`hf-recurrent lm-eval ...`: the command line of lm-evaluation-harness, with the model "hf-recurrent"."""

import sys
from collections.abc import Sequence

from hf_recurrent.cli.parsing import CommandParser, run_command


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(prog="hf-recurrent lm-eval", add_help=False, allow_abbrev=False)
    words = run_command(parser, argv, lambda arguments, words: words, passes_on=True)
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        parser.error(f'{error}; install it with pip install "hf-recurrent[lm-eval]"')
    if "hf-recurrent" not in model_registry:
        model_registry.register("hf-recurrent", target="hf_recurrent.evaluation.lm_eval_model:RecurrentLM")
    sys.argv = ["lm-eval", *words]  # which it reads
    cli_evaluate()
