"""Presets: the configurations of all models in the papers' tables and of the stock baselines.

Sizes from Memora's Table 4 (S0 to S8) and appendices F.1 (selective copying), F.2 (TinyStories) and F.5 (one byte at a
time). `tiny` is not in the papers: it trains to readable samples within minutes on two cores.

mGRADE and its baselines `tcn` and `mingru`: Tables 1 and 2 of mGRADE, classifiers of grey images read pixel by pixel
(`AutoModelForSequenceClassification`). The sMNIST counts are for layers without an MLP (TCN: with one linear
map); the sCIFAR counts are appendix B's, rounded up.

LRU: Tables 4 and 6 of "Online learning of long-range dependencies"; `lru-scifar`, `lru-imdb` and `lru-listops` are
classifiers.

SMT: `smt-rnn-paper` and its teacher `smt-teacher-paper`, the sizes of appendix E; the other backbones with
`backbone="mlp"` or `"gru"`. `smt-rnn-tiny` and `smt-teacher-tiny` match each other and are not in the paper.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Memora and Hawk: M, S, N (model width, state width, layers). Llama: M, heads, N. Mamba2: M, head width, N.
_SIZES = {
    "tiny": ((128, 192, 2), None, None),
    "s0": ((128, 192, 6), (128, 4, 6), (192, 64, 6)),
    "s1": ((192, 256, 6), (192, 4, 6), (256, 64, 6)),
    "s2": ((256, 384, 6), (256, 4, 6), (384, 64, 6)),
    "s3": ((384, 512, 6), (384, 6, 6), (512, 64, 12)),
    "s4": ((512, 768, 12), (512, 8, 12), (768, 64, 12)),
    "s5": ((768, 1024, 12), (768, 12, 12), (1024, 64, 12)),
    "s6": ((1024, 1536, 12), (1024, 16, 12), (1536, 64, 12)),
    "s7": ((1536, 2048, 12), (1536, 16, 12), (2048, 64, 12)),
    "s8": ((2048, 2560, 18), (2048, 16, 18), (2560, 64, 18)),
    "tinystories": ((512, 768, 14), (512, 8, 18), (768, 128, 16)),
    "selective-copying": ((64, 256, 2), (192, 3, 2), (192, 64, 2)),
    "online": ((384, 512, 6), None, None),
}
# Fields that differ from the defaults of the configuration.
_PIXELS = {"input_size": 1, "num_labels": 10}
_SMNIST = _PIXELS | {"conv_kernel": 4, "dilation": 16}
_SCIFAR = _PIXELS | {"hidden_size": 32, "num_hidden_layers": 6}
_SMNIST_MGRADE = _SMNIST | {"hidden_size": 20, "num_hidden_layers": 3, "mlp_layers": 0}
_SMNIST_TCN = _SMNIST | {"hidden_size": 18, "num_hidden_layers": 6, "mlp_layers": 1, "recurrent_unit": None}
_SCIFAR_TCN = _SCIFAR | {"conv_kernel": 64, "dilation": 1, "recurrent_unit": None}
_MGRADE = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "conv_kernel": 4, "dilation": 4},
    "smnist": _SMNIST_MGRADE | {"spacing": "constant"},
    "smnist-exponential": _SMNIST_MGRADE | {"spacing": "exponential", "dilation": 4},
    "scifar": _SCIFAR | {"spacing": "constant", "conv_kernel": 8, "dilation": 32},
    "scifar-exponential": _SCIFAR | {"spacing": "exponential", "conv_kernel": 16, "dilation": 2},
    "scifar-learned": _SCIFAR | {"conv_kernel": 8, "receptive_field": 256},
    "scifar-learned-uniform": _SCIFAR | {"conv_kernel": 16, "receptive_field": 128, "position_init": "uniform"},
}
_TCN = {
    "smnist": _SMNIST_TCN | {"spacing": "constant"},
    "smnist-exponential": _SMNIST_TCN | {"spacing": "exponential", "dilation": 1},
    "scifar": _SCIFAR_TCN | {"spacing": "constant"},
    "scifar-exponential": _SCIFAR_TCN | {"spacing": "exponential"},
}
_MINGRU = {
    "smnist": _PIXELS | {"hidden_size": 15, "num_hidden_layers": 6, "mlp_layers": 0, "spacing": None},
    "scifar": _SCIFAR | {"spacing": None},
}
_LRU_CLASSIFIER = {"hidden_size": 256, "state_size": 256, "per_step_loss": True}
_LRU = {
    "tiny": {"state_size": 192, "num_hidden_layers": 2},
    "copy": {"dropout": 0.1},
    "scifar": _LRU_CLASSIFIER | {"input_size": 3, "num_labels": 10, "r_min": 0.9, "r_max": 0.999, "dropout": 0.1},
    "imdb": _LRU_CLASSIFIER | {"num_labels": 2},
    "listops": _LRU_CLASSIFIER | {"num_labels": 10, "dropout": 0.1},
}
_SMT_TINY = {"hidden_size": 64, "num_memory_tokens": 4, "num_attention_heads": 4}
_SMT_RNN = {"paper": {}, "tiny": _SMT_TINY | {"num_hidden_layers": 2, "num_readout_layers": 2}}
_SMT_TEACHER = {"paper": {}, "tiny": _SMT_TINY | {"num_encoder_layers": 2, "num_decoder_layers": 2}}
_STOCK = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}


def _recurrent(width: int, state: int, layers: int) -> dict[str, Any]:
    return {"hidden_size": width, "state_size": state, "num_hidden_layers": layers}


def _llama(width: int, heads: int, layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
    return _STOCK | sizes | {"intermediate_size": 256 * math.ceil(8 * width / 3 / 256)}


def _mamba2(width: int, head_dim: int, layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "head_dim": head_dim, "num_hidden_layers": layers}
    return _STOCK | sizes | {"num_heads": 2 * width // head_dim, "state_size": 128, "n_groups": 1}


# Family → (package and class of the configuration, fields of every preset).
_FAMILIES = {
    "memora": ("hf_recurrent.MemoraConfig", {row: _recurrent(*sizes[0]) for row, sizes in _SIZES.items()}),
    "hawk": ("hf_recurrent.HawkConfig", {row: _recurrent(*sizes[0]) for row, sizes in _SIZES.items()}),
    "llama": ("transformers.LlamaConfig", {row: _llama(*sizes[1]) for row, sizes in _SIZES.items() if sizes[1]}),
    "mamba2": ("transformers.Mamba2Config", {row: _mamba2(*sizes[2]) for row, sizes in _SIZES.items() if sizes[2]}),
    "mgrade": ("hf_recurrent.MgradeConfig", _MGRADE),
    "tcn": ("hf_recurrent.MgradeConfig", _TCN),
    "mingru": ("hf_recurrent.MgradeConfig", _MINGRU),
    "lru": ("hf_recurrent.LruConfig", _LRU),
    "smt-rnn": ("hf_recurrent.SmtRnnConfig", _SMT_RNN),
    "smt-teacher": ("hf_recurrent.SmtTeacherConfig", _SMT_TEACHER),
}
_PRESETS = {
    f"{family}-{row}": (config_class, fields)
    for family, (config_class, rows) in _FAMILIES.items()
    for row, fields in rows.items()
}


def preset_names() -> list[str]:
    """All names that [`config_from_preset`] accepts."""
    return list(_PRESETS)


def config_from_preset(name: str, vocab_size: int = 256, **overrides) -> PreTrainedConfig:
    """The configuration of a preset, for `from_config` of `AutoModelForCausalLM` or another Auto class.

    Args:
        name: family and size, such as `memora-s0`, `hawk-tinystories`, `llama-s3`, `mamba2-s4`, `mgrade-smnist`,
            `smt-rnn-paper`.
        vocab_size: V. The paper's parameter counts are for 256, and for 7 (DNA) and 16 (selective copying).
        overrides: fields of the configuration, instead of the preset's.

    Raises:
        ValueError: the preset does not exist, or the configuration has no such field.
    """
    if name.lower() not in _PRESETS:
        raise ValueError(f"`name` is {name!r}; it must be one of {', '.join(_PRESETS)}.")
    path, fields = _PRESETS[name.lower()]
    package, _, class_name = path.rpartition(".")
    config_class = getattr(importlib.import_module(package), class_name)
    known = {field.name for field in dataclasses.fields(config_class)} | {*config_class.attribute_map, "num_labels"}
    if unknown := sorted(overrides.keys() - known):
        raise ValueError(f"{class_name} has no field {unknown[0]!r}; the preset {name!r} cannot set it.")
    return config_class(**{"vocab_size": vocab_size, **fields, **overrides})
