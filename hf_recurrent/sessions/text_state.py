"""Texts that a recurrent model has read and continues, and their files.

A text's file holds what the model remembers of everything read so far, and each row's pending token: the last one,
which has been read or generated but not yet fed to the model. Continuing feeds it first, so that two runs joined are
one run.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_recurrent.modeling.recurrent_state import RecurrentState, check_state, load_state, save_state, select_state

CHUNK = 4096
_FORMAT = "hf_recurrent.text_state.1"  # names what files hold, not this module


@dataclass
class TextState:
    """B texts, read up to but without their pending token.

    Args:
        state: what the model remembers, B rows.
        pending: the last token of each text, or None where the text has ended (or nothing was read yet).
    """

    state: RecurrentState
    pending: list[int | None]


def model_identity(model: PreTrainedModel) -> dict[str, str]:
    """Fingerprints of the architecture (names and shapes of the weights) and of the weights.

    The second looks at 64 values of each weight, in bfloat16, so that loading in another type changes nothing.
    """
    architecture = hashlib.sha256(model.config.model_type.encode())
    weights = hashlib.sha256()
    for name, weight in model.named_parameters():
        architecture.update(f"{name} {tuple(weight.shape)}".encode())
        flat = weight.detach().flatten()
        places = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].to("cpu", torch.bfloat16)
        weights.update(sample.view(torch.int16).numpy().tobytes())
    return {"architecture": architecture.hexdigest(), "weights": weights.hexdigest()}


def save_text_state(model: PreTrainedModel, text: TextState, path: str | Path) -> None:
    """Write texts to one safetensors file, with the model's identity and the pending tokens as metadata.

    Raises:
        FileNotFoundError: the directory of `path` does not exist.
    """
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"path is `{path}`, whose directory does not exist.")
    metadata = {"format": _FORMAT, "pending": json.dumps(text.pending), **model_identity(model)}
    save_state(text.state, path, metadata)


def load_text_state(model: PreTrainedModel, path: str | Path) -> TextState:
    """Read texts that [`save_text_state`] wrote, for the same model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is no saved text, or was written by another model.
    """

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
    model: PreTrainedModel,
    texts: Sequence[np.ndarray],
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
    model: PreTrainedModel, text: TextState, *, streamer: Any = None, **generation_arguments: Any
) -> tuple[list[torch.Tensor], TextState]:
    """Generate after each text.

    Args:
        model: a recurrent model.
        text: B texts; one that has ended stays as it is.
        streamer: gets the new tokens as they come; for one text and one beam.
        generation_arguments: those of `generate()`, such as `max_new_tokens` and `do_sample`.

    Returns:
        The new tokens of each text, the end token included if it came, and the texts after them.
    """

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
    generated = [until_end(sequence[1:].cpu(), end) for sequence in output.sequences]
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


def until_end(ids: torch.Tensor, end: int | list[int] | None) -> torch.Tensor:
    """The tokens up to and with the first end token; what follows is padding."""
    places = torch.isin(ids, torch.tensor(_end_ids(end), dtype=ids.dtype)).nonzero()
    return ids[: int(places[0]) + 1] if len(places) else ids


def _ends(ids: torch.Tensor, end: int | list[int] | None) -> bool:
    return bool(len(ids)) and int(ids[-1]) in _end_ids(end)
