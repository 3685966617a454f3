"""Sizes of SMT's models, and the names of its methods."""

from collections.abc import Iterator

from torch import Tensor
from transformers import set_seed

from hf_recurrent import SmtRnnConfig, SmtRnnForCausalLM, SmtTeacherConfig, SmtTeacherModel, teacher_fields
from papers.engine.experiment import Settings

Pair = tuple[SmtRnnForCausalLM, SmtTeacherModel]
BPTT, SMT, DMT, SMT_DMT, TEACHER = "BPTT", "SMT", "DMT", "SMT→DMT", "teacher"
# Fields of `SmtRnnConfig`; the teacher's encoder is as deep as the update, as in appendix E.
SMALL_MODEL: Settings = {
    "hidden_size": 32, "num_memory_tokens": 4, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_readout_layers": 1,
}  # fmt: skip
PAPER_MODEL: Settings = {
    "hidden_size": 256, "num_memory_tokens": 16, "num_attention_heads": 8, "num_hidden_layers": 8,
    "num_readout_layers": 4,
}  # fmt: skip


def build_pair(sizes: Settings, vocab_size: int, seed: int) -> Pair:
    """A new RNN and its teacher, initialised with the seed.

    Args:
        sizes: fields of `SmtRnnConfig`.
    """
    set_seed(seed)
    rnn = SmtRnnConfig(vocab_size=vocab_size, **sizes)
    return SmtRnnForCausalLM(rnn), SmtTeacherModel(SmtTeacherConfig(**teacher_fields(rnn)))


def memories_of(rnn: SmtRnnForCausalLM, ids: Tensor) -> Iterator[Tensor]:
    """The memories (B, Z, D) after each token of sequences (B, T)."""
    memory = rnn.init_state(len(ids))["memory"]
    for tokens in ids.T:
        memory = rnn.update(memory, tokens)
        yield memory
