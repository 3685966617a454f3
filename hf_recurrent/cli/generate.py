"""`hf-recurrent generate MODEL`: continue prompts, files and saved states."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.loading import add_loading_arguments, check_byte_tokenizer, load_model_and_tokenizer
from hf_recurrent.cli.parsing import CommandParser, check_at_least, check_file, check_parent, run_command
from hf_recurrent.cli.threads import add_threads_argument, use_threads

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from hf_recurrent.generation.constraints import Constraint
    from hf_recurrent.server.text_state import TextState

# Logits divided by less would be infinite, and their differences NaN.
_LEAST_TEMPERATURE = 1e-6


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = CommandParser(
        prog="hf-recurrent generate",
        description="Continue texts. New text is printed to standard output, everything else to standard error.",
    )
    add_loading_arguments(parser)
    text = parser.add_argument_group("text to continue: the state, then the file, then the prompt")
    text.add_argument("--prompt", nargs="+", default=[], help="one or more texts")
    text.add_argument("--prompt_file", type=Path, help="a file of any size to read first")
    text.add_argument("--state", type=Path, help="a file written by --save_state")
    text.add_argument("--save_state", type=Path, help="save the state after the new text to this file")
    new = parser.add_argument_group("new text")
    new.add_argument("--max_new_tokens", type=int, default=200, help="0 only reads, for --save_state (default: 200)")
    new.add_argument("--temperature", type=float, default=1.0)
    new.add_argument("--top_k", type=int, default=0, help="sample only from the k most likely tokens; 0 for all")
    new.add_argument(
        "--top_p", type=float, default=1.0, help="sample only from the most likely tokens of this probability"
    )
    new.add_argument("--greedy", action="store_true", help="always take the most likely token")
    new.add_argument("--num_beams", type=int, default=1, help="beam search, printed when finished")
    new.add_argument("--seed", type=int, help="make sampling reproducible")
    new.add_argument("--num_continuations", type=int, default=1, help="of the text, which is read once")
    new.add_argument("--regex", help="a regular expression that the new text matches as a whole")
    new.add_argument("--json_schema", type=Path, help="a file with a JSON schema for the new text")
    new.add_argument(
        "--draft", help="a smaller recurrent model that proposes text; directory or owner/name on the Hub"
    )
    new.add_argument("--draft_tokens", type=int, default=3, help="tokens proposed at a time (default: 3)")
    add_threads_argument(new)
    new.add_argument(
        "--quantize", choices=["bfloat16", "int8"], help="type of the weights in single steps on a CPU, for speed"
    )
    new.add_argument("--quiet", action="store_true", help="hide the progress bar while reading")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the arguments of the process."""
    run_command(build_parser(), argv, _generate)


def _generate(arguments: argparse.Namespace) -> None:
    _check(arguments)
    constraint = _constraint(arguments)  # before the model is loaded
    model, tokenizer = load_model_and_tokenizer(arguments)
    use_threads(arguments.threads, quiet=arguments.quiet)

    from transformers import set_seed

    from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
    from hf_recurrent.stock_models.with_state import with_state

    if arguments.seed is not None:
        set_seed(arguments.seed)
    if arguments.quantize is not None:
        _quantize(arguments.quantize, model)
    if hasattr(tokenizer, "encode_bytes"):  # other stock models generate as text from their own cache
        with_state(model)
    generate = _generate_recurrent if supports_recurrent_state(model) else _generate_stock
    try:
        generate(arguments, model, tokenizer, constraint)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise ValueError(
            f"`MODEL` is {arguments.model!r}; its probabilities are NaN at `--temperature` {arguments.temperature}."
        ) from error


def _quantize(weights: str, model: "PreTrainedModel") -> None:
    """Compile the model's step with narrow weights."""
    if not hasattr(model, "compile_step"):
        raise ValueError(f"`--quantize` is {weights!r}, but {type(model).__name__} has no compiled step.")
    try:
        model.compile_step(weights)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"`--quantize` is {weights!r}, but it cannot be used: {error}") from error


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.prompt and not arguments.prompt_file and not arguments.state:
        raise ValueError("There is nothing to continue; give --prompt, --prompt_file or --state.")
    check_at_least(0, arguments, "max_new_tokens", "top_k")
    check_at_least(1, arguments, "num_beams", "num_continuations", "draft_tokens")
    for name, other in (("regex", "json_schema"), ("draft", "state")):
        if getattr(arguments, name) is not None and getattr(arguments, other) is not None:
            raise ValueError(f"`--{name}` cannot be combined with `--{other}`.")
    if arguments.draft is not None:
        for name, most in (("num_beams", 1), ("num_continuations", 1), ("prompt", 1)):
            given = getattr(arguments, name)
            if (count := given if isinstance(given, int) else len(given)) > most:
                raise ValueError(f"`--{name}` has {count}; with `--draft`, it must be 1.")
    if arguments.temperature < _LEAST_TEMPERATURE:
        raise ValueError(
            f"`--temperature` is {arguments.temperature}; it must be at least {_LEAST_TEMPERATURE}. "
            "For 0, use --greedy."
        )
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"`--top_p` is {arguments.top_p}; it must be more than 0 and at most 1.")
    check_file("--prompt_file", arguments.prompt_file)
    check_file("--state", arguments.state)
    check_file("--json_schema", arguments.json_schema)
    check_parent("--save_state", arguments.save_state)


def _generation_arguments(arguments: argparse.Namespace, constraint: "Constraint | None") -> dict[str, Any]:
    names = ["max_new_tokens", "num_beams"]
    sample = not arguments.greedy and arguments.num_beams == 1
    names += ["temperature", "top_k", "top_p"] if sample else []
    given = {"do_sample": sample} | {name: getattr(arguments, name) for name in names}
    return given if constraint is None else given | {"logits_processor": [constraint]}


def _constraint(arguments: argparse.Namespace) -> "Constraint | None":
    if arguments.regex is None and arguments.json_schema is None:
        return None
    from hf_recurrent.generation.constraints import JsonSchemaConstraint, RegexConstraint

    if arguments.regex is not None:
        return RegexConstraint(arguments.regex)
    return JsonSchemaConstraint(arguments.json_schema.read_text(encoding="utf-8"))


def _generate_recurrent(
    arguments: argparse.Namespace, model: "PreTrainedModel", tokenizer: Any, constraint: "Constraint | None"
) -> None:
    from hf_recurrent.modeling.tokenizer.byte_streamer import ByteStreamer
    from hf_recurrent.server import text_state

    check_byte_tokenizer("MODEL", arguments.model, tokenizer)
    text = _read(arguments, model, tokenizer)
    if all(token is None for token in text.pending):
        raise ValueError("The text in `--state` ends with the end byte; give a --prompt to begin a new text.")
    if arguments.num_continuations > 1:
        if len(text.pending) > 1:
            raise ValueError(f"`--num_continuations` is for one text; there are {len(text.pending)}.")
        text = text_state.repeat_text(text, arguments.num_continuations)
    if arguments.max_new_tokens:
        stream = len(text.pending) == 1 and arguments.num_beams == 1
        streamer = ByteStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        options = _generation_arguments(arguments, constraint)
        if arguments.draft is not None:
            text = _continue_with_draft(arguments, model, tokenizer, text, streamer, constraint)
        else:
            new, text = text_state.continue_texts(model, text, streamer=streamer, **options)
        if not stream:
            _show(arguments, tokenizer, new)
    if arguments.save_state is not None:
        text_state.save_text_state(model, text, arguments.save_state)


def _read(arguments: argparse.Namespace, model: "PreTrainedModel", tokenizer: Any) -> "TextState":
    """The state, then the file, then the prompts, read by the model."""
    from hf_recurrent.server import text_state

    text = text_state.load_text_state(model, arguments.state) if arguments.state else None
    progress = not arguments.quiet
    if arguments.prompt_file:
        if not arguments.prompt_file.stat().st_size:
            raise ValueError(f"`--prompt_file` is {str(arguments.prompt_file)!r}; it must not be empty.")
        if text is not None and len(text.pending) > 1:
            raise ValueError(f"`--state` has {len(text.pending)} texts; with --prompt_file, it must have one.")
        text = text_state.read_texts(model, [_FileTokens(arguments.prompt_file, tokenizer)], text, progress=progress)
    if arguments.prompt:
        prompts = [_encode(tokenizer, prompt) for prompt in arguments.prompt]
        if text is not None and len(text.pending) == 1:
            text = text_state.repeat_text(text, len(prompts))
        elif text is not None and len(text.pending) != len(prompts):
            raise ValueError(f"`--state` has {len(text.pending)} texts; `--prompt` must have as many, or one.")
        text = text_state.read_texts(model, prompts, text)
    return text


def _continue_with_draft(
    arguments: argparse.Namespace,
    model: "PreTrainedModel",
    tokenizer: Any,
    text: "TextState",
    streamer: Any,
    constraint: "Constraint | None",
) -> "TextState":
    import torch

    from hf_recurrent.generation.speculative import generate_speculative
    from hf_recurrent.server.text_state import TextState

    draft, _ = load_model_and_tokenizer(argparse.Namespace(**vars(arguments) | {"model": arguments.draft}))
    options = _generation_arguments(arguments, None) | {"constraint": constraint}
    del options["num_beams"]
    output = generate_speculative(
        model,
        torch.tensor([text.pending]),
        draft=draft,
        draft_tokens=arguments.draft_tokens,
        state=text.state,
        draft_state=_read(arguments, draft, tokenizer).state,
        streamer=streamer,
        **options,
    )
    print(
        f"{output.accepted} of {output.proposed} proposed bytes accepted, {output.forwards} forward passes",
        file=sys.stderr,
    )
    last = int(output.sequences[0, -1])
    ended = last == model.generation_config.eos_token_id
    # After the end byte, a new episode begins with a zero state.
    return TextState(model.init_state(1) if ended else output.pending_state, [None if ended else last])


def _generate_stock(
    arguments: argparse.Namespace, model: "PreTrainedModel", tokenizer: Any, constraint: "Constraint | None"
) -> None:
    """For models without a state: file and prompt are the prefix of every new text, all of it in the cache."""
    import torch
    from transformers import TextStreamer

    from hf_recurrent.modeling.tokenizer.byte_streamer import ByteStreamer
    from hf_recurrent.server.text_state import until_end

    for name in ("state", "save_state", "draft"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"`--{name}` needs a recurrent model, but `MODEL` is a {type(model).__name__}.")
    if arguments.num_continuations > 1:
        raise ValueError(f"`--num_continuations` needs a recurrent model, but `MODEL` is a {type(model).__name__}.")
    if not arguments.max_new_tokens:
        raise ValueError("`--max_new_tokens` is 0; without --save_state, it must be at least 1.")
    book = arguments.prompt_file.read_bytes() if arguments.prompt_file else b""
    texts = [book.decode("utf-8", "surrogateescape") + prompt for prompt in arguments.prompt or [""]]
    rows = [torch.as_tensor(tokenizer(text)["input_ids"], dtype=torch.long) for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if len(row) and row.max() >= model.config.vocab_size:
            raise ValueError(
                f"The text {text[:20]!r} has the token {row.max()}; the model has {model.config.vocab_size}."
            )
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    if not lengths.min():
        raise ValueError("`--prompt` is empty; it must have at least one byte.")
    inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    stream = len(rows) == 1 and arguments.num_beams == 1
    kind = ByteStreamer if hasattr(tokenizer, "decode_bytes") else TextStreamer
    output = model.generate(
        inputs.to(model.device),
        attention_mask=mask.to(model.device),
        streamer=kind(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None,
        **_generation_arguments(arguments, constraint),
    )
    if not stream:
        end = model.generation_config.eos_token_id
        _show(arguments, tokenizer, [until_end(row[longest:].cpu(), end) for row in output])


def _encode(tokenizer: Any, text: str) -> "np.ndarray":
    # Arguments from the shell that are not UTF-8 hold surrogate escapes (PEP 383).
    return tokenizer.encode_bytes(text.encode("utf-8", "surrogateescape"))


def _show(arguments: argparse.Namespace, tokenizer: Any, rows: "Sequence[torch.Tensor]") -> None:
    for row, ids in enumerate(rows):
        if len(rows) > 1:
            name = repr(arguments.prompt[row]) if len(arguments.prompt) == len(rows) else f"text {row}"
            print(f"=== {name}")
        print(tokenizer.decode(ids, skip_special_tokens=True), flush=True)


class _FileTokens:
    """Token ids of a file, encoded slice by slice: the file is never in memory as a whole."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        import numpy as np

        self._bytes, self._tokenizer = np.memmap(path, dtype=np.uint8, mode="r"), tokenizer

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: slice) -> "np.ndarray":
        return self._tokenizer.encode_bytes(self._bytes[index])
