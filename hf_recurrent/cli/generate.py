"""`hf-recurrent generate MODEL`: continue prompts, books and saved states."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.loading import add_loading_arguments, load_model_and_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-recurrent generate",
        description="Continue texts. New text goes to standard output, everything else to standard error.",
    )
    add_loading_arguments(parser)
    text = parser.add_argument_group("what to continue: the state, then the file, then the prompt")
    text.add_argument("--prompt", nargs="+", default=[], help="one or several texts")
    text.add_argument("--prompt_file", type=Path, help="a file to read first, a book for instance, of any size")
    text.add_argument("--state", type=Path, help="a state that --save_state wrote")
    text.add_argument("--save_state", type=Path, help="write the state after the new text here")
    new = parser.add_argument_group("new text")
    new.add_argument("--max_new_tokens", type=int, default=200, help="0 reads only, for --save_state")
    new.add_argument("--temperature", type=float, default=1.0)
    new.add_argument("--top_k", type=int, default=0, help="sample from the best so many tokens; 0 for all")
    new.add_argument("--top_p", type=float, default=1.0, help="sample from the best tokens of this probability")
    new.add_argument("--greedy", action="store_true", help="always the most probable token")
    new.add_argument("--num_beams", type=int, default=1, help="beam search, shown when it is done")
    new.add_argument("--seed", type=int, help="makes sampling repeatable")
    new.add_argument("--quiet", action="store_true", help="no progress bar while reading")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the process's arguments. Bad input ends it with one sentence."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        _check(arguments)
        model, tokenizer = load_model_and_tokenizer(arguments)
        if arguments.seed is not None:
            from transformers import set_seed

            set_seed(arguments.seed)
        if getattr(model, "supports_recurrent_state", False):
            _generate_recurrent(arguments, model, tokenizer)
        else:
            _generate_stock(arguments, model, tokenizer)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.prompt and not arguments.prompt_file and not arguments.state:
        raise ValueError("There is nothing to continue: give --prompt, --prompt_file or --state.")
    for name, least in (("max_new_tokens", 0), ("top_k", 0), ("num_beams", 1)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} is {getattr(arguments, name)}; it must be at least {least}.")
    if not arguments.temperature > 0:
        raise ValueError(f"--temperature is {arguments.temperature}; it must be more than 0 (--greedy for the limit).")
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"--top_p is {arguments.top_p}; it must be more than 0 and at most 1.")
    for name in ("prompt_file", "state"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"--{name} is `{path}`, which is no file.")
    if arguments.save_state is not None and not arguments.save_state.absolute().parent.is_dir():
        raise FileNotFoundError(f"--save_state is `{arguments.save_state}`, whose directory does not exist.")


def _generation_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "num_beams": arguments.num_beams}
    if arguments.greedy or arguments.num_beams > 1:
        return options | {"do_sample": False}
    return options | {
        "do_sample": True,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
    }


def _generate_recurrent(arguments: argparse.Namespace, model: "PreTrainedModel", tokenizer: Any) -> None:
    from hf_recurrent.modeling.byte_streamer import ByteStreamer
    from hf_recurrent.sessions.text_state import (
        continue_texts,
        load_text_state,
        read_texts,
        repeat_text,
        save_text_state,
    )

    text = load_text_state(model, arguments.state) if arguments.state else None
    progress = not arguments.quiet
    if arguments.prompt_file:
        if not arguments.prompt_file.stat().st_size:
            raise ValueError(f"--prompt_file is `{arguments.prompt_file}`, which is empty.")
        if text is not None and len(text.pending) > 1:
            raise ValueError(f"--state holds {len(text.pending)} texts, but --prompt_file continues only one.")
        text = read_texts(model, [_FileTokens(arguments.prompt_file, tokenizer)], text, progress=progress)
    if arguments.prompt:
        prompts = [_encode(tokenizer, prompt) for prompt in arguments.prompt]
        if text is not None and len(text.pending) == 1:
            text = repeat_text(text, len(prompts))
        elif text is not None and len(text.pending) != len(prompts):
            raise ValueError(f"--state holds {len(text.pending)} texts, but there are {len(prompts)} prompts.")
        text = read_texts(model, prompts, text)
    if all(token is None for token in text.pending):
        raise ValueError("The text in --state has ended with the end byte; give a --prompt to begin a new one.")
    if arguments.max_new_tokens:
        stream = len(text.pending) == 1 and arguments.num_beams == 1
        streamer = ByteStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        new, text = continue_texts(model, text, streamer=streamer, **_generation_arguments(arguments))
        if not stream:
            _show(arguments, tokenizer, new)
    if arguments.save_state is not None:
        save_text_state(model, text, arguments.save_state)


def _generate_stock(arguments: argparse.Namespace, model: "PreTrainedModel", tokenizer: Any) -> None:
    """For models without a state: prompt and file in front of every new text, all of it in the cache."""
    import torch
    from transformers import TextStreamer

    from hf_recurrent.modeling.byte_streamer import ByteStreamer
    from hf_recurrent.sessions.text_state import until_end

    for name in ("state", "save_state"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} needs a recurrent model, but MODEL is a {type(model).__name__}.")
    if not arguments.max_new_tokens:
        raise ValueError("--max_new_tokens is 0, which is of use only with --save_state.")
    book = arguments.prompt_file.read_bytes() if arguments.prompt_file else b""
    texts = [book.decode("utf-8", "surrogateescape") + prompt for prompt in arguments.prompt or [""]]
    rows = [torch.as_tensor(tokenizer(text)["input_ids"], dtype=torch.long) for text in texts]
    longest = max(map(len, rows))
    if not min(map(len, rows)):
        raise ValueError("A prompt is empty; give at least one byte.")
    inputs = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    stream = len(rows) == 1 and arguments.num_beams == 1
    kind = ByteStreamer if hasattr(tokenizer, "decode_bytes") else TextStreamer
    output = model.generate(
        inputs.to(model.device),
        attention_mask=mask.to(model.device),
        streamer=kind(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None,
        **_generation_arguments(arguments),
    )
    if not stream:
        end = model.generation_config.eos_token_id
        _show(arguments, tokenizer, [until_end(row[longest:].cpu(), end) for row in output])


def _encode(tokenizer: Any, text: str) -> "np.ndarray":
    # Arguments that are not UTF-8 come from the shell with the same escapes that byte tokenizers use.
    return tokenizer.encode_bytes(text.encode("utf-8", "surrogateescape"))


def _show(arguments: argparse.Namespace, tokenizer: Any, rows: "Sequence[torch.Tensor]") -> None:
    for row, ids in enumerate(rows):
        if len(rows) > 1:
            name = repr(arguments.prompt[row]) if arguments.prompt else f"text {row}"
            print(f"=== {name}")
        options = {"errors": "replace"} if hasattr(tokenizer, "decode_bytes") else {}
        print(tokenizer.decode(ids, skip_special_tokens=True, **options))
    sys.stdout.flush()


class _FileTokens:
    """A file as a row of token ids that is never in memory as a whole."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        import numpy as np

        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: int | slice) -> "np.ndarray | int":
        if isinstance(index, slice):
            return self._tokenizer.encode_bytes(self._bytes[index])
        return int(self._tokenizer.encode_bytes(self._bytes[index : index + 1 or None])[0])

    def __iter__(self) -> Iterator[int]:
        return (int(token) for token in self[:])
