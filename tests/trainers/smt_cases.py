"""Tiny models and tasks that the tests of training on memories share."""

from itertools import pairwise

import torch

from hf_recurrent import SmtRnnConfig, SmtRnnForCausalLM, SmtTeacherConfig, SmtTeacherModel

SHAPE = {"hidden_size": 16, "num_memory_tokens": 3, "num_attention_heads": 2}


def tiny_pair(vocab_size=8, backbone="transformer", seed=0, **shape):
    """An RNN and its teacher with fresh weights."""
    torch.manual_seed(seed)
    shape = {**SHAPE, "vocab_size": vocab_size, **shape}
    student = SmtRnnForCausalLM(SmtRnnConfig(backbone=backbone, num_hidden_layers=2, num_readout_layers=1, **shape))
    teacher = SmtTeacherModel(SmtTeacherConfig(num_encoder_layers=2, num_decoder_layers=1, **shape))
    return student, teacher


def random_batch(rows=3, steps=12, vocab_size=8, resets=(0, 5), seed=0):
    """Inputs, targets with holes, and resets that differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (rows, steps + 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(rows, steps, generator=generator) < 0.3, -100)
    reset_mask = torch.zeros(rows, steps, dtype=torch.bool)
    reset_mask[:, 0] = True
    for row in range(rows):
        for place in resets:
            if place:
                reset_mask[row, (place + row) % steps] = True
    return tokens[:, :-1].contiguous(), labels, reset_mask


def episodes(reset_mask):
    """(start, end) of the episode of each position, by going through it."""
    begins = [place for place, reset in enumerate(reset_mask.tolist()) if reset or place == 0] + [len(reset_mask)]
    return [next((a, b) for a, b in pairwise(begins) if a <= p < b) for p in range(len(reset_mask))]
