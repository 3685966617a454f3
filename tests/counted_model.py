"""A tiny model with a count memory, and documents that repeat a few words."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import Corpus, config_from_preset

SIZES = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": False}
COUNTS = {"count_memory_slots": 256, "count_memory_text": 4096, "count_memory_window": 256, "count_memory_rows": 4}
WORDS = [b"def ", b"return ", b"self.", b"x = ", b"(1)\n", b"    "]


def word_corpus(sizes=(1, 40, 7, 90, 20), seed: int = 0) -> Corpus:
    """A document of so many words for each size."""
    rng = np.random.default_rng(seed)
    return Corpus.from_documents([b"".join(rng.choice(WORDS, size)) for size in sizes])


def counted_model(corpus: Corpus, documents=(3,)):
    """A model with new weights whose memory knows some documents."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **SIZES, **COUNTS)).eval()
    for number in documents:
        model.count_memory.insert(torch.from_numpy(np.array(corpus[number])), 0)
    return model
