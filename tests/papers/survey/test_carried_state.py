"""Reading with the state carried: chunks, resets, and what a passage saves the second time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from papers.engine.training import build_model
from papers.survey import carried_state
from papers.survey.carried_state import bits_in_documents, long_texts, read, recall


class BytesSeen:
    """Predicts the bytes of its state, the counts of bytes seen, each of which fades by a factor per byte."""

    def __init__(self, fading):
        self.fading = fading

    def eval(self):
        pass

    def __call__(self, input_ids, state, reset_mask, use_cache):
        counts, logits = torch.zeros(len(input_ids), 256) if state is None else state, []
        for ids, resets in zip(input_ids.T, reset_mask.T, strict=True):
            counts = counts * ~resets[:, None] * self.fading + torch.nn.functional.one_hot(ids, 256)
            logits.append(torch.log(counts + 0.01))
        return SimpleNamespace(logits=torch.stack(logits, 1), state=counts)


@pytest.fixture(scope="module")
def model():
    return build_model("memora-tiny", 256, 0, hidden_size=16, state_size=24)


def test_blocks_do_not_change_the_bits(model, monkeypatch):
    ids = np.random.default_rng(0).integers(256, size=(2, 50))
    resets = np.arange(50) % 20 == 0
    whole, _ = read(model, ids, resets)
    monkeypatch.setattr(carried_state, "_BLOCK", 7)
    blocks, state = read(model, ids, resets)
    assert whole.shape == (2, 49) and np.allclose(whole, blocks, atol=1e-5)
    first, state = read(model, ids[:, :31], resets[:31])
    rest, _ = read(model, ids[:, 30:], resets[30:], state)
    assert np.allclose(np.concatenate([first, rest], 1), whole, atol=1e-5)


def test_a_reset_forgets(model):
    text = np.random.default_rng(0).integers(256, size=64).astype(np.uint8).tobytes()
    streams = np.frombuffer(text, np.uint8).reshape(8, 8)  # as many as `bits_in_documents` reads side by side
    assert bits_in_documents(model, text, 8) == pytest.approx(read(model, streams, np.arange(8) == 0)[0].mean())
    assert bits_in_documents(BytesSeen(1.0), b"ab" * 32, 64) < bits_in_documents(BytesSeen(1.0), b"ab" * 32, 1)


@pytest.mark.parametrize("fading, remembered", [(1.0, True), (0.8, False)])
def test_recall_is_of_what_the_state_still_has(fading, remembered):
    held_out = bytes([1, 2] * 300) + bytes(range(10, 90))  # passages of bytes that the rest does not have
    settings = {"passage": 20, "passages": 2, "distances": [40, 400], "tested": 600}
    saved = recall(BytesSeen(fading), held_out, settings)
    assert saved["40"] > (1 if remembered else -0.1)
    assert (saved["400"] > 0.5) is remembered
    with pytest.raises(ValueError, match="`tested` is 600"):
        recall(BytesSeen(fading), held_out[:650], settings)


def test_held_out_text_is_not_trained_on(tmp_path):
    documents, held_out = long_texts("packages")
    assert len(documents) > 10 and len(held_out) > 110_000
    assert not any(held_out[:5000] in document for document in documents)
    book = tmp_path / "book.txt"
    book.write_bytes(bytes(range(1, 251)) * 4)
    documents, held_out = long_texts(str(book))
    assert len(documents) == 32 and b"".join(documents) + held_out == book.read_bytes() and len(held_out) == 100
    with pytest.raises(FileNotFoundError, match="--override text=FILE"):
        long_texts("book-that-is-not-there.txt")
