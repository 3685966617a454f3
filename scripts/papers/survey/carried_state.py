"""Value of a carried state in long documents, and distance at which a passage is remembered (our own)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_recurrent import Corpus
from papers.engine.experiment import Experiment, Settings
from papers.engine.tables import in_interval
from papers.engine.training import build_model, train
from papers.survey.scaling import CONTEXTS

# Long texts → value of a row's `text`, and lines → fields and regime. The counts forget what is older than W bytes.
TEXTS = {"packages": "packages", "book": "book.txt"}
MODELS: dict[str, Settings] = {
    "Memora, streams": {"fields": {}, "regime": "multi_stream"},
    "Memora, IID": {"fields": {}, "regime": "iid"},
    "Memora with counts and n-grams, W = 8,192": {"fields": CONTEXTS, "regime": "multi_stream"},
    "Memora with counts and n-grams, W = 131,072": {
        "fields": CONTEXTS | {"count_memory_window": 1 << 17},
        "regime": "multi_stream",
    },
}
_BLOCK = 512


class CarriedState(Experiment):
    shared = {"block_size": 16, "step_bytes": 512, "learning_rate": 3e-3, "passage": 200, "passages": 4}
    sizes = {
        "small": {
            "widths": {"hidden_size": 64, "state_size": 96}, "bytes": 262_144, "tested": 100_000,
            "lengths": [16, 1000, 100_000], "distances": [1000, 100_000],
        },
        "paper": {
            "widths": {"hidden_size": 256, "state_size": 384}, "bytes": 29_360_128, "tested": 1_000_000,
            "lengths": [16, 1000, 100_000, 1_000_000], "distances": [1000, 100_000, 1_000_000],
        },
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        return [
            {"label": f"{name}: {label}", "text": text, **model, **self.size_settings(size)}
            for name, text in TEXTS.items()
            for label, model in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        documents, held_out = long_texts(settings["text"])
        model = build_model("memora-tiny", 256, settings["seed"], **settings["widths"], **settings["fields"])
        results = train(
            model,
            Corpus.from_documents(documents, name=settings["text"]),
            settings,
            steps=settings["bytes"] // settings["step_bytes"],
            regime=settings["regime"],
            block_size=settings["block_size"],
            per_device_train_batch_size=settings["step_bytes"] // settings["block_size"],
        )
        tested = held_out[: settings["tested"]]
        value = {str(length): bits_in_documents(model, tested, length) for length in settings["lengths"]}
        return {**results, "value": value, "recall": recall(model, held_out, settings)}

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        return {
            f"recalled after {int(distance):,}": in_interval([row["recall"][distance] for row in rows], "+.2f")
            for distance in rows[0]["recall"]
        }


def long_texts(source: str) -> tuple[list[bytes], bytes]:
    """Documents to train on, and held-out text.

    Of "packages" each tenth package of the standard library is held out, of a file its last tenth. The rest of a file
    is cut into 32 documents, as all streams would begin alike in a single one.

    Raises:
        FileNotFoundError: the file is not there.
    """
    if source == "packages":
        folders = sorted(path.parent for path in Path(os.__file__).parent.glob("*/__init__.py"))
        texts = [b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))) for folder in folders]
        texts = [text.replace(b"\0", b"") for text in texts]
        return [text for number, text in enumerate(texts) if number % 10], b"\n".join(texts[::10])
    if not Path(source).is_file():
        raise FileNotFoundError(f"`text` is {source!r}, not a file; name one with --override text=FILE --only book.")
    text = Path(source).read_bytes().replace(b"\0", b"")
    trained = text[: len(text) * 9 // 10]
    part = -(-len(trained) // 32)
    return [trained[start : start + part] for start in range(0, len(trained), part)], text[len(trained) :]


def bits_in_documents(model: Any, text: bytes, length: int) -> float:
    """Mean bits per byte of a text with the state zero before each `length` bytes."""
    streams = max(len(text) // max(length, len(text) // 8), 1)
    ids = np.frombuffer(text, np.uint8)[: len(text) // streams * streams].reshape(streams, -1)
    bits, _ = read(model, ids, np.arange(ids.shape[1]) % length == 0)
    return float(bits.mean())


@torch.no_grad()
def read(model: Any, ids: np.ndarray, resets: np.ndarray, state: Any = None) -> tuple[np.ndarray, Any]:
    """Bits of each byte but the first of streams (B, T), and the state before the last byte.

    Args:
        resets: (T,), true where the state before a byte is zero.
        state: the state before the first byte; by default zero.
    """
    model.eval()
    inputs, resets = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(resets).expand(len(ids), -1)
    bits = []
    for start in range(0, ids.shape[1] - 1, _BLOCK):
        block = slice(start, min(start + _BLOCK, ids.shape[1] - 1))
        output = model(input_ids=inputs[:, block], state=state, reset_mask=resets[:, block], use_cache=True)
        state, targets = output.state, inputs[:, 1:][:, block]
        nats = torch.nn.functional.cross_entropy(output.logits.transpose(1, 2).float(), targets, reduction="none")
        bits.append(nats.numpy() / np.log(2))
    return np.concatenate(bits, 1), state


def recall(model: Any, held_out: bytes, settings: Settings) -> dict[str, float]:
    """Distance → bits per byte that the second reading of a passage saves, the state carried.

    Each stream has, for each distance, a passage that far before its end. Then it reads its own passages, or another
    stream's, which differ in nothing but that they are new to it.
    """
    size, streams, distances = (settings[key] for key in ("passage", "passages", "distances"))
    text = np.frombuffer(held_out, np.uint8)
    tested, needed = settings["tested"], size * streams * len(distances)
    if len(text) < tested + needed:
        raise ValueError(f"`tested` is {tested}; with {needed} bytes of passages, {len(text)} held-out bytes are few.")
    passages = text[tested : tested + needed].reshape(len(distances), streams, size)
    total = max(distances) + size
    turned = (np.roll(text[:tested], -number * tested // streams) for number in range(streams))
    before = np.stack([np.resize(each, total) for each in turned])
    for passage, distance in zip(passages, distances, strict=True):
        before[:, total - distance - size : total - distance] = passage
    _, state = read(model, before, np.arange(total) == 0)
    saved = {}
    for passage, distance in zip(passages, distances, strict=True):
        own, new = (
            read(model, np.concatenate([before[:, -1:], each], 1), np.zeros(size + 1, bool), state)[0]
            for each in (passage, np.roll(passage, 1, axis=0))
        )
        # The first bytes only say which passage it is.
        saved[str(distance)] = float((new - own)[:, size // 10 :].mean())
    return saved
