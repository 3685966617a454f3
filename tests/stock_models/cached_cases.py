"""Tiny stock models of every cache class, with random weights."""

import pytest
import torch
import transformers
from packaging.version import Version
from stock_cases import CASES, stock_model

_HYBRID = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4}
HYBRIDS = {
    "rwkv": ("Rwkv", {"hidden_size": 16, "num_hidden_layers": 5, "rescale_every": 2}),
    "jamba": ("Jamba", _HYBRID | _EXPERTS | {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2,
                                             "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "bamba": ("Bamba", _HYBRID | _MAMBA2 | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", _HYBRID | {"head_dim": 8, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8,
                                         "mamba_d_state": 4, "mamba_chunk_size": 4, "mamba_n_groups": 1}),
    "qwen3_next": ("Qwen3Next", _HYBRID | _EXPERTS | {
        "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"]}),
    "granitemoehybrid": ("GraniteMoeHybrid", _HYBRID | _MAMBA2 | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 3, "num_experts_per_tok": 2,
        "shared_intermediate_size": 8}),
    "lfm2": ("Lfm2", _HYBRID | {"full_attn_idxs": [1]}),
}  # fmt: skip
FAMILIES = (*CASES, *HYBRIDS)
ATTENTION = {"recurrent_gemma", *HYBRIDS} - {"rwkv"}
VOCAB_SIZE = 300


def cached_model(family: str):
    """A new float32 model without an end token, in evaluation mode."""
    if family == "recurrent_gemma" and Version(transformers.__version__) < Version("5.21"):
        pytest.skip("refused with transformers 5.20")
    if family in CASES:
        model = stock_model(family, torch.float32, VOCAB_SIZE)
    else:
        name, fields = HYBRIDS[family]
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB_SIZE, **tokens | fields)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.2 * torch.randn_like(weight))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()
