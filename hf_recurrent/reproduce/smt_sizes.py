"""Names and sizes that SMT's experiments share; light, as the list of experiments needs them."""

from hf_recurrent.reproduce.experiment import Settings

BPTT, SMT, DMT, SMT_DMT, TEACHER = "BPTT", "SMT", "DMT", "SMT→DMT", "teacher"
# Fields of `SmtRnnConfig`; the teacher's encoder is as deep as the update, as in appendix E.
SMALL_MODEL: Settings = {
    "hidden_size": 32,
    "num_memory_tokens": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_readout_layers": 1,
}
PAPER_MODEL: Settings = {
    "hidden_size": 256,
    "num_memory_tokens": 16,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_readout_layers": 4,
}
