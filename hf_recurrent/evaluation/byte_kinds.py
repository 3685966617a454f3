"""Losses by kind of byte: at the beginning of a word or inside it, and after contexts that are known or new.

Shape letters: T bytes of a document.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_losses import carried_token_losses, evaluation_mode, has_count_memory
from hf_recurrent.data.streams import EvaluationStreams
from hf_recurrent.evaluation.byte_windows import KnownWindows, is_repeated, window_hashes
from hf_recurrent.modeling.contexts.count_memory_contexts import WORD_BYTES

CONTEXT = 12  # bytes before a byte that make its context known
ALL = "all bytes"
KINDS = ("first byte of a word", "inside a word", "space or line end", "punctuation")
CONTEXTS = ("context repeated in the document", "context only in training data", "context new")
_BLOCK = 4096


def byte_kinds(document: bytes) -> np.ndarray:
    """Index in [`KINDS`] of the bytes from the second on: (T - 1,)."""
    values = np.frombuffer(document, np.uint8)
    letters = np.zeros(256, dtype=bool)
    letters[[*WORD_BYTES]] = True
    in_word = letters[values]
    is_space = np.isin(values, np.frombuffer(b" \t\r\n", np.uint8))
    others = np.where(is_space, 2, 3)
    return np.where(in_word[1:], in_word[:-1].astype(np.int64), others[1:])


def context_kinds(document: bytes, training: KnownWindows) -> np.ndarray:
    """Index in [`CONTEXTS`] of the bytes from the second on: (T - 1,)."""
    kinds = np.full(max(len(document) - 1, 0), 2)
    hashes = window_hashes(document, training.length)[:-1]  # the last is followed by no byte
    known = np.where(training.contains(hashes), 1, 2)
    kinds[training.length - 1 :] = np.where(is_repeated(hashes), 0, known)
    return kinds


def document_losses(model: Any, document: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Nats of a corpus of one document from the second byte on, by model and network alone: (T - 1,) each."""
    parts = []
    with evaluation_mode(model), torch.inference_mode():
        for block in carried_token_losses(model, EvaluationStreams(document, 1, _BLOCK), 1):
            network = block.network if has_count_memory(model) else block.nats
            parts.append(torch.stack([block.nats[0], network[0]]).double().cpu().numpy())
    nats, network = np.concatenate(parts, 1)[:, : document.num_bytes - 1]
    return nats, network


def bits_by_kind(
    models: Mapping[str, Any], held_out: Corpus, training: bytes, *, progress: bool = True
) -> dict[str, Any]:
    """Bits per byte of every kind of byte, for every model, or counts alone, and its network.

    Returns:
        `shares`, {kind: share of the bytes}; `bits_per_byte`, {name: {kind: bits per byte}}, with the names of the
        models and for those with a network f"{name}, network".
    """
    known = KnownWindows(training, CONTEXT)
    names = (ALL, *KINDS, *CONTEXTS)
    counts, sums = np.zeros(len(names)), {}
    bar = tqdm(total=held_out.num_bytes * len(models), unit="B", unit_scale=True, desc="kinds", disable=not progress)
    with bar:
        for index, episode in enumerate(held_out):
            data, document = episode.tobytes(), held_out.select([index])
            members = _members(byte_kinds(data), context_kinds(data, known))
            counts += members.sum(1)
            for name, model in models.items():
                nats, network = document_losses(model, document)
                for label, losses in ((name, nats), (f"{name}, network", network)):
                    sums[label] = sums.get(label, 0) + members @ losses
                bar.update(len(data))
    bits = {name: total / np.log(2) / np.maximum(counts, 1) for name, total in sums.items()}
    shares = counts / max(counts[0], 1)
    return {
        "shares": dict(zip(names, shares.tolist(), strict=True)),
        "bits_per_byte": {name: dict(zip(names, values.tolist(), strict=True)) for name, values in bits.items()},
    }


def _members(kinds: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """1 where a byte is of a kind, in the order of the names: (kinds, T - 1)."""
    kinds_of, contexts_of = (np.arange(len(names))[:, None] for names in (KINDS, CONTEXTS))
    return np.concatenate([np.ones((1, len(kinds))), kinds == kinds_of, contexts == contexts_of])
