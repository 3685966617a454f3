"""States of texts that a recurrent model reads and continues, in memory and in files.

A state comes with each row's pending token: the last one, read or generated but not yet fed to the model. Continuing
feeds it first, so that an interrupted run gives the same result as a single one.
"""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.state_files import (
    StateCheck,
    pack_state,
    read_state,
    save_state,
    unpack_state,
)
from hf_recurrent.generation.arguments import end_token_list
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, select_state
from hf_recurrent.stock_models.with_state import with_state

CHUNK = 4096


@dataclass
class TextState:
    """B texts, read up to but without their pending token."""

    state: RecurrentState  # B rows
    pending: list[int | None]  # the last token of each text; None if the text has ended or is empty


def save_text_state(model: PreTrainedModel, text: TextState, path: str | Path) -> None:
    """Write texts to a file of [`save_state`], with the pending tokens as metadata."""
    save_state(text.state, path, model, {"pending": json.dumps(text.pending)})


def pack_text_state(model: PreTrainedModel, text: TextState, check: StateCheck | None = None) -> bytes:
    """The content of a file of [`save_text_state`]; see [`unpack_state`] for `check`."""
    return pack_state(text.state, model, {"pending": json.dumps(text.pending)}, check)


def load_text_state(model: PreTrainedModel, path: str | Path) -> TextState:
    """Read a file of [`save_text_state`]; it works with the model that saved it only.

    Raises a FileNotFoundError, or a ValueError if it is damaged, not a saved text, or of other weights.
    """
    return _text_of(model, str(path), *read_state(path, model))


def unpack_text_state(
    model: PreTrainedModel, data: bytes, other_weights: Container[str] = (), check: StateCheck | None = None
) -> TextState:
    """The texts in the content of a file, which the body of a request holds; as [`load_text_state`].

    States of `other_weights`, given by their hashes, are allowed, too; see [`unpack_state`] for `check`.
    """
    state, metadata = unpack_state(data, "body", model, other_weights=other_weights, check=check)
    return _text_of(model, "body", state, metadata)


def _text_of(model: PreTrainedModel, name: str, state: RecurrentState, metadata: dict[str, str]) -> TextState:
    if "pending" not in metadata:
        raise ValueError(f"`{name}` is not the state of a text; it must be written by `--save_state`.")
    try:
        pending = json.loads(metadata["pending"])
        if not isinstance(pending, list) or len(pending) != len(next(iter(state.values()))):
            raise ValueError("it has not one pending token for each text.")
        vocab_size = model.config.get_text_config().vocab_size
        if not all(token is None or (type(token) is int and 0 <= token < vocab_size) for token in pending):
            raise ValueError("a pending token is outside the vocabulary.")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{name}` is damaged: {error}") from error
    return TextState(state, pending)


def repeat_text(text: TextState, times: int) -> TextState:
    """One text, repeated as `times` rows."""
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
        texts: B rows of token ids of any lengths, in memory or mapped from a file.
        start: B texts to continue; new ones by default. A text that has ended begins anew.
        chunk: T, tokens of each row per call of the model.
        progress: show a progress bar.

    Raises a ValueError if a text is empty or has a token outside the vocabulary, or `start` has other rows.
    """
    model = with_state(model)
    if start is None:
        start = TextState(model.init_state(len(texts)), [None] * len(texts))
    if len(start.pending) != len(texts):
        raise ValueError(f"`texts` has {len(texts)} rows; `start` has {len(start.pending)}.")
    if any(token is None and not len(ids) for token, ids in zip(start.pending, texts, strict=True)):
        raise ValueError("A text is empty; it must have at least one byte, because there is nothing to continue.")
    lengths = np.array([len(ids) - (token is None) for token, ids in zip(start.pending, texts, strict=True)])
    longest, state = int(lengths.max()), start.state
    bar = tqdm(total=int(lengths.sum()), unit="B", unit_scale=True, desc="reading", disable=not progress)
    with torch.inference_mode(), bar:
        for begin in range(0, longest, chunk):
            ids, mask = _fed_columns(texts, start.pending, lengths, range(begin, min(begin + chunk, longest)))
            _check_vocabulary(model, int(ids.max()))
            state = model(
                input_ids=torch.from_numpy(ids).to(model.device),
                attention_mask=None if mask.all() else torch.from_numpy(mask.astype(np.int64)).to(model.device),
                state=state,
                use_cache=True,
                logits_to_keep=1,
            ).state
            bar.update(int(mask.sum()))
    # A row without new tokens keeps its pending one, which was not fed.
    pending = [int(ids[-1:][0]) if len(ids) else token for token, ids in zip(start.pending, texts, strict=True)]
    _check_vocabulary(model, max(pending))
    return TextState(state, pending)


def _fed_columns(
    texts: Sequence[np.ndarray], pending: Sequence[int | None], lengths: np.ndarray, columns: range
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (B, T) of some columns, and the mask (B, T), False for padding.

    Each row is its pending token and all of its tokens but the last, aligned on the right.
    """
    offsets = lengths.max() - lengths
    mask = np.asarray(columns) >= offsets[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    for row in mask.any(1).nonzero()[0]:
        token, tokens = pending[row], texts[row]
        first, last = max(columns.start - int(offsets[row]), 0), columns.stop - int(offsets[row])  # in this row
        if token is None:
            ids[row, mask[row]] = tokens[first:last]
        else:
            ids[row, mask[row]] = tokens[first - 1 : last - 1] if first else [token, *tokens[: last - 1]]
    return ids, mask


def _check_vocabulary(model: PreTrainedModel, token: int) -> None:
    if token >= (size := model.config.vocab_size):
        raise ValueError(f"A text has the token {token}; it must be below the vocabulary size {size}.")


def continue_texts(
    model: PreTrainedModel, text: TextState, *, streamer: Any = None, **generation_arguments: Any
) -> tuple[list[torch.Tensor], TextState]:
    """Generate after each text.

    Args:
        model: a recurrent model.
        text: B texts; one that has ended is left unchanged.
        streamer: receives each new token at once; for one text and one beam.
        generation_arguments: arguments of `generate()`, such as `max_new_tokens` and `do_sample`.

    Returns:
        The new tokens of each text, including the end token, and the texts after them.
    """
    rows = [row for row, token in enumerate(text.pending) if token is not None]
    new = [torch.empty(0, dtype=torch.long) for _ in text.pending]
    if not rows:
        return new, text
    start = TextState(select_state(text.state, torch.tensor(rows)), [text.pending[row] for row in rows])
    inputs = torch.tensor(start.pending, device=model.device).unsqueeze(1)
    output = with_state(model).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        state=start.state,
        streamer=streamer,
        return_dict_in_generate=True,
        **generation_arguments,
    )
    end = model.generation_config.eos_token_id
    state = {name: tensor.clone() for name, tensor in text.state.items()}
    pending = list(text.pending)
    for place, row in enumerate(rows):
        new[row] = until_end(output.sequences[place, 1:].cpu(), end)
        last = int(new[row][-1])
        has_ended = last in end_token_list(end)
        pending[row] = None if has_ended else last
        for name, tensor in state.items():
            # After the end token, a new episode begins with a zero state.
            tensor[row] = 0 if has_ended else output.pending_state[name][place]
    return new, TextState(state, pending)


def until_end(ids: torch.Tensor, end: int | list[int] | None) -> torch.Tensor:
    """The tokens up to and including the first end token; the others are padding."""
    places = torch.isin(ids, torch.tensor(end_token_list(end), dtype=ids.dtype)).nonzero()
    return ids[: int(places[0]) + 1] if len(places) else ids
