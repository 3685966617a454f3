"""Configurations of every row of the papers' tables, ours and the stock baselines.

Sizes from Memora's Table 4 (S0 to S8) and appendices F.1 (selective copying), F.2 (TinyStories), F.5 (one byte at a
time). `tiny` is ours: it trains to readable samples on two cores within minutes.

mGRADE and its baselines `tcn` and `mingru`: Tables 1 and 2 of mGRADE, classifiers of grey images read pixel by pixel
(`AutoModelForSequenceClassification`). Its sMNIST counts are those of layers without an MLP, of which TCN keeps one
linear map; the sCIFAR counts are those of appendix B, rounded up.

LRU: Tables 4 and 6 of "Online learning of long-range dependencies"; `lru-scifar`, `lru-imdb` and `lru-listops` are
classifiers.

SMT: `smt-rnn-paper` and its teacher `smt-teacher-paper`, the sizes of appendix E; the other backbones with
`backbone="mlp"` or `"gru"`. `smt-rnn-tiny` and `smt-teacher-tiny`, which fit together, are ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Names of a family's rows → (model width M, state width S, layers N).
RECURRENT_SIZES = {
    "tiny": (128, 192, 2),
    "s0": (128, 192, 6),
    "s1": (192, 256, 6),
    "s2": (256, 384, 6),
    "s3": (384, 512, 6),
    "s4": (512, 768, 12),
    "s5": (768, 1024, 12),
    "s6": (1024, 1536, 12),
    "s7": (1536, 2048, 12),
    "s8": (2048, 2560, 18),
    "tinystories": (512, 768, 14),
    "selective-copying": (64, 256, 2),
    "online": (384, 512, 6),
}
# (model width M, heads, layers N)
LLAMA_SIZES = {
    "s0": (128, 4, 6),
    "s1": (192, 4, 6),
    "s2": (256, 4, 6),
    "s3": (384, 6, 6),
    "s4": (512, 8, 12),
    "s5": (768, 12, 12),
    "s6": (1024, 16, 12),
    "s7": (1536, 16, 12),
    "s8": (2048, 16, 18),
    "tinystories": (512, 8, 18),
    "selective-copying": (192, 3, 2),
}
# (model width M, head width, layers N)
MAMBA2_SIZES = {
    "s0": (192, 64, 6),
    "s1": (256, 64, 6),
    "s2": (384, 64, 6),
    "s3": (512, 64, 12),
    "s4": (768, 64, 12),
    "s5": (1024, 64, 12),
    "s6": (1536, 64, 12),
    "s7": (2048, 64, 12),
    "s8": (2560, 64, 18),
    "tinystories": (768, 128, 16),
    "selective-copying": (192, 64, 2),
}
# Rows of mGRADE and of its two baselines → what differs from `MgradeConfig`.
_PIXELS = {"input_size": 1, "num_labels": 10}
_SMNIST = _PIXELS | {"conv_kernel": 4, "dilation": 16}
_SCIFAR = _PIXELS | {"hidden_size": 32, "num_hidden_layers": 6}
_SMNIST_MGRADE = _SMNIST | {"hidden_size": 20, "num_hidden_layers": 3, "mlp_layers": 0}
_SMNIST_TCN = _SMNIST | {"hidden_size": 18, "num_hidden_layers": 6, "mlp_layers": 1}
MGRADE_ROWS = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "conv_kernel": 4, "dilation": 4},
    "smnist": _SMNIST_MGRADE | {"spacing": "constant"},
    "smnist-exponential": _SMNIST_MGRADE | {"spacing": "exponential", "dilation": 4},
    "scifar": _SCIFAR | {"spacing": "constant", "conv_kernel": 8, "dilation": 32},
    "scifar-exponential": _SCIFAR | {"spacing": "exponential", "conv_kernel": 16, "dilation": 2},
    "scifar-learned": _SCIFAR | {"conv_kernel": 8, "receptive_field": 256},
    "scifar-learned-uniform": _SCIFAR | {"conv_kernel": 16, "receptive_field": 128, "position_init": "uniform"},
}
TCN_ROWS = {
    "smnist": _SMNIST_TCN | {"spacing": "constant"},
    "smnist-exponential": _SMNIST_TCN | {"spacing": "exponential", "dilation": 1},
    "scifar": _SCIFAR | {"spacing": "constant", "conv_kernel": 64, "dilation": 1},
    "scifar-exponential": _SCIFAR | {"spacing": "exponential", "conv_kernel": 64, "dilation": 1},
}
MINGRU_ROWS = {
    "smnist": _PIXELS | {"hidden_size": 15, "num_hidden_layers": 6, "mlp_layers": 0},
    "scifar": _SCIFAR,
}
# Rows of LRU → what differs from `LruConfig`.
_LRU_CLASSIFIER = {"hidden_size": 256, "state_size": 256, "per_step_loss": True}
LRU_ROWS = {
    "tiny": {"state_size": 192, "num_hidden_layers": 2},
    "copy": {"dropout": 0.1},
    "scifar": _LRU_CLASSIFIER | {"input_size": 3, "num_labels": 10, "r_min": 0.9, "r_max": 0.999, "dropout": 0.1},
    "imdb": _LRU_CLASSIFIER | {"num_labels": 2},
    "listops": _LRU_CLASSIFIER | {"num_labels": 10, "dropout": 0.1},
}
# Rows of SMT's RNN and of its teacher → what differs from their configurations.
_SMT_TINY = {"hidden_size": 64, "num_memory_tokens": 4, "num_attention_heads": 4}
SMT_RNN_ROWS = {"paper": {}, "tiny": _SMT_TINY | {"num_hidden_layers": 2, "num_readout_layers": 2}}
SMT_TEACHER_ROWS = {"paper": {}, "tiny": _SMT_TINY | {"num_encoder_layers": 2, "num_decoder_layers": 2}}


def _memora(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_memora import MemoraConfig

    width, state, layers = RECURRENT_SIZES[row]
    return MemoraConfig(**{"hidden_size": width, "state_size": state, "num_hidden_layers": layers} | options)


def _hawk(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_hawk import HawkConfig

    width, state, layers = RECURRENT_SIZES[row]
    return HawkConfig(**{"hidden_size": width, "state_size": state, "num_hidden_layers": layers} | options)


def _llama(row: str, **options) -> PreTrainedConfig:
    from transformers import LlamaConfig

    width, heads, layers = LLAMA_SIZES[row]
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": 256 * math.ceil(8 * width / 3 / 256),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return LlamaConfig(**sizes | options)


def _mamba2(row: str, **options) -> PreTrainedConfig:
    from transformers import Mamba2Config

    width, head_dim, layers = MAMBA2_SIZES[row]
    sizes = {
        "hidden_size": width,
        "head_dim": head_dim,
        "num_heads": 2 * width // head_dim,
        "num_hidden_layers": layers,
        "state_size": 128,
        "n_groups": 1,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return Mamba2Config(**sizes | options)


def _mgrade(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_mgrade import MgradeConfig

    return MgradeConfig(**MGRADE_ROWS[row] | options)


def _tcn(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_mgrade import MgradeConfig

    return MgradeConfig(**TCN_ROWS[row] | {"recurrent_unit": None} | options)


def _mingru(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_mgrade import MgradeConfig

    return MgradeConfig(**MINGRU_ROWS[row] | {"spacing": None} | options)


def _lru(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_lru import LruConfig

    return LruConfig(**LRU_ROWS[row] | options)


def _smt_rnn(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_smt_rnn import SmtRnnConfig

    return SmtRnnConfig(**SMT_RNN_ROWS[row] | options)


def _smt_teacher(row: str, **options) -> PreTrainedConfig:
    from hf_recurrent.modeling.configuration_smt_teacher import SmtTeacherConfig

    return SmtTeacherConfig(**SMT_TEACHER_ROWS[row] | options)


_FAMILIES = {
    "memora": (_memora, RECURRENT_SIZES),
    "hawk": (_hawk, RECURRENT_SIZES),
    "llama": (_llama, LLAMA_SIZES),
    "mamba2": (_mamba2, MAMBA2_SIZES),
    "mgrade": (_mgrade, MGRADE_ROWS),
    "tcn": (_tcn, TCN_ROWS),
    "mingru": (_mingru, MINGRU_ROWS),
    "lru": (_lru, LRU_ROWS),
    "smt-rnn": (_smt_rnn, SMT_RNN_ROWS),
    "smt-teacher": (_smt_teacher, SMT_TEACHER_ROWS),
}


def preset_names() -> list[str]:
    """All names that [`config_from_preset`] knows."""
    return [f"{family}-{row}" for family, (_, rows) in _FAMILIES.items() for row in rows]


def config_from_preset(name: str, vocab_size: int = 256, **overrides) -> PreTrainedConfig:
    """The configuration of a named row, for `from_config` of `AutoModelForCausalLM` or of the row's Auto class.

    Args:
        name: family and row, such as `memora-s0`, `hawk-tinystories`, `llama-s3`, `mamba2-s4`, `mgrade-smnist`,
            `smt-rnn-paper`.
        vocab_size: V; the paper's counts are for 256, 7 for DNA and 16 for selective copying.
        overrides: fields of the configuration that replace the row's.

    Raises:
        ValueError: there is no such row, or an override is no field of the configuration.
    """
    rows = {f"{family}-{row}": (build, row) for family, (build, rows) in _FAMILIES.items() for row in rows}
    if name.lower() not in rows:
        raise ValueError(f"`name` is {name!r}; the presets are {', '.join(preset_names())}.")
    build, row = rows[name.lower()]
    config = build(row, vocab_size=vocab_size, **overrides)
    known = type(config)()
    if unknown := sorted(name for name in overrides if not hasattr(known, name)):
        raise ValueError(f"{type(config).__name__} has no field {unknown[0]!r}; the preset {name!r} cannot set it.")
    return config
