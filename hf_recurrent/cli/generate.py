"""`hf-recurrent generate MODEL`: continue prompts, books and saved states.

A state file holds what the model remembers of everything read so far, and each row's pending token: the last one,
which has been read or generated but not yet fed to the model. Continuing feeds it first, so that two runs joined are
one run.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.cli.loading import add_loading_arguments, load_model_and_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from hf_recurrent.modeling.recurrent_state import RecurrentState

CHUNK = 4096
_FORMAT = "hf_recurrent.text_state.1"


@dataclass
class TextState:
    """B texts, read up to but without their pending token.

    Args:
        state: what the model remembers, B rows.
        pending: the last token of each text, or None where the text has ended (or nothing was read yet).
    """

    state: "RecurrentState"
    pending: "list[int | None]"


def model_identity(model: "PreTrainedModel") -> dict[str, str]:
    """Fingerprints of the architecture (names and shapes of the weights) and of the weights.

    The second looks at 64 values of each weight, in bfloat16, so that loading in another type changes nothing.
    """
    import torch

    architecture = hashlib.sha256(model.config.model_type.encode())
    weights = hashlib.sha256()
    for name, weight in model.named_parameters():
        architecture.update(f"{name} {tuple(weight.shape)}".encode())
        flat = weight.detach().flatten()
        places = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].to("cpu", torch.bfloat16)
        weights.update(sample.view(torch.int16).numpy().tobytes())
    return {"architecture": architecture.hexdigest(), "weights": weights.hexdigest()}


def save_text_state(model: "PreTrainedModel", text: TextState, path: str | Path) -> None:
    """Write texts to one safetensors file, with the model's identity and the pending tokens as metadata.

    Raises:
        FileNotFoundError: the directory of `path` does not exist.
    """
    from hf_recurrent.modeling.recurrent_state import save_state

    _check_directory("path", path)
    metadata = {"format": _FORMAT, "pending": json.dumps(text.pending), **model_identity(model)}
    save_state(text.state, path, metadata)


def load_text_state(model: "PreTrainedModel", path: str | Path) -> TextState:
    """Read texts that [`save_text_state`] wrote, for the same model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is no saved text, or was written by another model.
    """
    from safetensors import safe_open

    from hf_recurrent.modeling.recurrent_state import check_state, load_state

    state = load_state(path, model.device)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"`{path}` is no state that `--save_state` wrote.")
    identity = model_identity(model)
    for part in ("architecture", "weights"):
        if metadata.get(part) != identity[part]:
            raise ValueError(f"`{path}` was saved by a model with another {part}; a state is of use to its own only.")
    try:
        pending = json.loads(metadata["pending"])
        valid = isinstance(pending, list) and all(
            token is None or (isinstance(token, int) and 0 <= token < model.config.vocab_size) for token in pending
        )
    except (KeyError, ValueError):
        valid = False
    if not valid or not pending:
        raise ValueError(f"`{path}` is damaged: its pending tokens cannot be read.")
    try:
        check_state(state, model.model.state_shapes(len(pending)))
    except ValueError as error:
        raise ValueError(f"`{path}` is damaged: {error}") from error
    return TextState(state, pending)


def repeat_text(text: TextState, times: int) -> TextState:
    """One text as `times` equal ones."""
    rows = {name: tensor.repeat_interleave(times, 0) for name, tensor in text.state.items()}
    return TextState(rows, text.pending * times)


def read_texts(
    model: "PreTrainedModel",
    texts: "Sequence[np.ndarray]",
    start: TextState | None = None,
    *,
    chunk: int = CHUNK,
    progress: bool = False,
) -> TextState:
    """Read token ids into the state, in constant memory whatever their length.

    Args:
        model: a recurrent model.
        texts: B rows of token ids of any lengths, mapped from a file or not.
        start: B texts that these continue; new ones by default. A text that has ended begins anew.
        chunk: tokens of each row per call of the model.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a text has no token at all, or `start` has another number of rows.
    """
    import numpy as np
    import torch
    from tqdm.auto import tqdm

    if start is None:
        start = TextState(model.init_state(len(texts)), [None] * len(texts))
    if len(start.pending) != len(texts):
        raise ValueError(f"There are {len(texts)} texts for a state of {len(start.pending)}.")
    if any(token is None and not len(ids) for token, ids in zip(start.pending, texts, strict=True)):
        raise ValueError("A text is empty, and there is nothing to continue; give a prompt of at least one byte.")
    # The pending token of each row and then all its tokens but the last, aligned on the right.
    lengths = [len(ids) - (token is None) for token, ids in zip(start.pending, texts, strict=True)]
    longest = max(lengths)
    state = start.state
    with torch.inference_mode(), tqdm(total=sum(lengths), unit="B", unit_scale=True, disable=not progress) as bar:
        bar.set_description("reading")
        for begin in range(0, longest, chunk):
            width = min(chunk, longest - begin)
            ids = np.zeros((len(texts), width), dtype=np.int64)
            mask = np.zeros((len(texts), width), dtype=np.int64)
            for row, (token, tokens, length) in enumerate(zip(start.pending, texts, lengths, strict=True)):
                first = max(begin - (longest - length), 0)  # place in this row, its pending token being 0
                last = begin + width - (longest - length)
                if last <= first:
                    continue
                shift = 0 if token is None else 1
                part = tokens[max(first - shift, 0) : last - shift]
                part = [token, *part] if shift and first == 0 else part
                ids[row, width - len(part) :] = part
                mask[row, width - len(part) :] = 1
            inputs = torch.from_numpy(ids).to(model.device)
            attention_mask = None if mask.all() else torch.from_numpy(mask).to(model.device)
            state = model(
                input_ids=inputs, attention_mask=attention_mask, state=state, use_cache=True, logits_to_keep=1
            ).state
            bar.update(int(mask.sum()))
    # A row without new tokens keeps its pending one: it was not fed.
    pending = [int(ids[-1]) if len(ids) else token for token, ids in zip(start.pending, texts, strict=True)]
    return TextState(state, pending)


def continue_texts(
    model: "PreTrainedModel", text: TextState, *, streamer: Any = None, **generation_arguments: Any
) -> "tuple[list[torch.Tensor], TextState]":
    """Generate after each text.

    Args:
        model: a recurrent model.
        text: B texts; one that has ended stays as it is.
        streamer: gets the new tokens as they come; for one text and one beam.
        generation_arguments: those of `generate()`, such as `max_new_tokens` and `do_sample`.

    Returns:
        The new tokens of each text, the end token included if it came, and the texts after them.
    """
    import torch

    from hf_recurrent.modeling.recurrent_state import select_state

    rows = [row for row, token in enumerate(text.pending) if token is not None]
    new = [torch.empty(0, dtype=torch.long) for _ in text.pending]
    if not rows:
        return new, text
    start = TextState(
        select_state(text.state, torch.tensor(rows)) if len(rows) < len(text.pending) else text.state,
        [text.pending[row] for row in rows],
    )
    inputs = torch.tensor(start.pending, device=model.device).unsqueeze(1)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        state=start.state,
        streamer=streamer,
        return_dict_in_generate=True,
        **generation_arguments,
    )
    end = model.generation_config.eos_token_id
    generated = [_until_end(sequence[1:].cpu(), end) for sequence in output.sequences]
    ended = [_ends(ids, end) for ids in generated]
    if generation_arguments.get("num_beams", 1) > 1:
        # The beams' states are those of the last step, not of the best beam: read its tokens once more.
        after = read_texts(model, [ids.numpy() for ids in generated], start).state
    else:
        after = output.past_key_values
    state = {name: tensor.clone() for name, tensor in text.state.items()}
    pending = list(text.pending)
    for place, row in enumerate(rows):
        new[row] = generated[place]
        pending[row] = None if ended[place] else int(generated[place][-1])
        for name, tensor in state.items():
            # After its end a text remembers nothing: what comes next is a new episode.
            tensor[row] = 0 if ended[place] else after[name][place]
    return new, TextState(state, pending)


def _end_ids(end: int | list[int] | None) -> list[int]:
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def _until_end(ids: "torch.Tensor", end: int | list[int] | None) -> "torch.Tensor":
    """The tokens up to and with the first end token; what follows is padding."""
    import torch

    places = torch.isin(ids, torch.tensor(_end_ids(end), dtype=ids.dtype)).nonzero()
    return ids[: int(places[0]) + 1] if len(places) else ids


def _ends(ids: "torch.Tensor", end: int | list[int] | None) -> bool:
    return bool(len(ids)) and int(ids[-1]) in _end_ids(end)


def _check_directory(name: str, path: str | Path) -> None:
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"{name} is `{path}`, whose directory does not exist.")


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
    if arguments.save_state is not None:
        _check_directory("--save_state", arguments.save_state)


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
        _show(arguments, tokenizer, [_until_end(row[longest:].cpu(), end) for row in output])


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
