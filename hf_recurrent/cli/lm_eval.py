"""`hf-recurrent lm-eval ...`: the command line of lm-evaluation-harness, with the model "hf-recurrent"."""

import sys
from collections.abc import Sequence

from hf_recurrent.cli.parsing import CommandParser
from hf_recurrent.cli.user_code import import_user_code


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(prog="hf-recurrent lm-eval", add_help=False, allow_abbrev=False)
    arguments, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        import_user_code(arguments.user_code)
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        parser.error(f'{error}; install it with pip install "hf-recurrent[lm-eval]"')
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if "hf-recurrent" not in model_registry:
        model_registry.register("hf-recurrent", target="hf_recurrent.evaluation.lm_eval_model:RecurrentLM")
    sys.argv = ["lm-eval", *words]  # which it reads
    cli_evaluate()
