"""`hf-recurrent generate MODEL`: continue prompts, files and saved states."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_recurrent.argument_checks import check_sampling
from hf_recurrent.cli.loading import add_loading_arguments, check_byte_tokenizer, load_model_and_tokenizer
from hf_recurrent.cli.parsing import (
    CommandParser,
    add_json_argument,
    check_at_least,
    check_file,
    check_parent,
    command,
    dataclass_of,
    read_text,
)
from hf_recurrent.cli.sampling_arguments import add_sampling_arguments, given_sampling, sampling_of
from hf_recurrent.cli.threads import add_threads_argument, use_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_recurrent.generation.constraints import Constraint


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent generate",
        description="Continue texts. New text is printed to standard output, everything else to standard error.",
    )
    add_loading_arguments(parser)
    add = parser.add_argument_group("text to continue: the state, then the file, then the prompt").add_argument
    add("--prompt", nargs="+", default=[], help="one or more texts")
    add("--prompt_file", type=Path, help="a file of any size to read first")
    add("--state", type=Path, help="a file written by --save_state")
    add("--save_state", type=Path, help="save the state after the new text to this file")
    new = parser.add_argument_group("new text")
    add = new.add_argument
    add("--max_new_tokens", type=int, default=200, help="0 only reads, for --save_state (default: 200)")
    add_sampling_arguments(new)
    add("--greedy", action="store_true", help="always take the most likely token")
    add("--num_beams", type=int, default=1, help="beam search, printed when finished")
    add("--num_continuations", type=int, default=1, help="of the text, which is read once")
    add("--regex", help="a regular expression that the new text matches as a whole")
    add("--json_schema", type=Path, help="a file with a JSON schema for the new text")
    add("--draft", help="a smaller recurrent model that proposes text; directory or owner/name on the Hub")
    add("--draft_tokens", type=int, default=3, help="tokens proposed at a time (default: 3)")
    add_threads_argument(new)
    add("--quantize", choices=["bfloat16", "int8"], help="type of the weights in single steps on a CPU, for speed")
    add("--quiet", action="store_true", help="hide the progress bar while reading")
    add_json_argument(new)
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    _check(arguments)
    constraint = _constraint(arguments)  # before the model is loaded
    model, tokenizer = load_model_and_tokenizer(arguments)
    use_threads(arguments.threads, quiet=arguments.quiet)

    from transformers import set_seed

    from hf_recurrent.generation.generate_texts import GenerateOptions, TextGenerator
    from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
    from hf_recurrent.stock_models.with_state import with_state

    if arguments.seed is not None:
        set_seed(arguments.seed)
    if arguments.quantize is not None:
        _quantize(arguments.quantize, model)
    if hasattr(tokenizer, "encode_bytes"):  # other stock models generate as text from their own cache
        with_state(model)
    vars(arguments).update(sampling_of(model) | given_sampling(arguments))
    generator = TextGenerator(dataclass_of(GenerateOptions, arguments), model, tokenizer, constraint)
    try:
        if supports_recurrent_state(model):
            check_byte_tokenizer("MODEL", arguments.model, tokenizer)
            generator.generate_recurrent(_draft(arguments))
        else:
            _check_stock(arguments, type(model).__name__)
            generator.generate_stock()
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise ValueError(
            f"`MODEL` is {arguments.model!r}; its probabilities are NaN at `--temperature` {arguments.temperature}."
        ) from error


def _quantize(weights: str, model: "PreTrainedModel") -> None:
    if not hasattr(model, "compile_step"):
        raise ValueError(f"`--quantize` is {weights!r}, but {type(model).__name__} has no compiled step.")
    try:
        model.compile_step(weights)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"`--quantize` is {weights!r}, but it cannot be used: {error}") from error


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.prompt and not arguments.prompt_file and not arguments.state:
        raise ValueError("There is nothing to continue; give --prompt, --prompt_file or --state.")
    check_at_least(0, arguments, "max_new_tokens")
    check_at_least(1, arguments, "num_beams", "num_continuations", "draft_tokens")
    for name, other in (("regex", "json_schema"), ("draft", "state")):
        if getattr(arguments, name) is not None and getattr(arguments, other) is not None:
            raise ValueError(f"`--{name}` cannot be combined with `--{other}`.")
    if arguments.draft is not None:
        counts = {"num_beams": arguments.num_beams, "num_continuations": arguments.num_continuations}
        for name, count in (counts | {"prompt": len(arguments.prompt)}).items():
            if count > 1:
                raise ValueError(f"`--{name}` has {count}; with `--draft`, it must be 1.")
    check_sampling(**given_sampling(arguments), prefix="--", instead_of_zero="--greedy")
    check_file("--prompt_file", arguments.prompt_file)
    check_file("--state", arguments.state)
    check_file("--json_schema", arguments.json_schema)
    check_parent("--save_state", arguments.save_state)


def _check_stock(arguments: argparse.Namespace, kind: str) -> None:
    """Raise a ValueError that names the first argument that needs a recurrent state."""
    given = {name: getattr(arguments, name) is not None for name in ("state", "save_state", "draft")}
    for name, is_given in (given | {"num_continuations": arguments.num_continuations > 1}).items():
        if is_given:
            raise ValueError(f"`--{name}` needs a recurrent model, but `MODEL` is a {kind}.")
    if not arguments.max_new_tokens:
        raise ValueError("`--max_new_tokens` is 0; without --save_state, it must be at least 1.")


def _draft(arguments: argparse.Namespace) -> "PreTrainedModel | None":
    if arguments.draft is None or not arguments.max_new_tokens:
        return None
    return load_model_and_tokenizer(argparse.Namespace(**vars(arguments) | {"model": arguments.draft}), "--draft")[0]


def _constraint(arguments: argparse.Namespace) -> "Constraint | None":
    if arguments.regex is None and arguments.json_schema is None:
        return None
    from hf_recurrent.generation.constraints import JsonSchemaConstraint, RegexConstraint

    if arguments.regex is not None:
        return RegexConstraint(arguments.regex)
    return JsonSchemaConstraint(read_text("--json_schema", arguments.json_schema))


main = command(build_parser, _generate)
