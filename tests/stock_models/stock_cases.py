"""Tiny stock models of each family, and the stock call in float64."""

import torch
import transformers
from torch.overrides import TorchFunctionMode

_MAMBA = {"hidden_size": 12, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
CASES = {
    "mamba": ("Mamba", _MAMBA),
    "falcon_mamba": ("FalconMamba", _MAMBA | {"intermediate_size": 24}),
    "mamba2": (
        "Mamba2",
        {"hidden_size": 12, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 6, "n_groups": 2,
         "chunk_size": 8},
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {"hidden_size": 12, "lru_width": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 6,
         "num_key_value_heads": 1, "intermediate_size": 24, "attention_window_size": 7},
    ),
    "xlstm": (
        "xLSTM",
        # The stock cache needs widths that are multiples of 64.
        {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 4, "qk_dim_factor": 1.0},
    ),
}  # fmt: skip
TOKENS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}


def stock_model(family, dtype=torch.float64, vocab_size=256, **overrides):
    """A new model of the stock class, with weights that are larger than at the start, so that the state matters."""
    name, fields = CASES[family]
    config = getattr(transformers, f"{name}Config")(vocab_size=vocab_size, **TOKENS | fields | overrides)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model.to(dtype)


class Float64(TorchFunctionMode):
    """Keeps float64 where stock code casts to float32."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        is_double = bool(arguments) and isinstance(arguments[0], torch.Tensor) and arguments[0].dtype == torch.float64
        if is_double and function is torch.Tensor.float:
            return arguments[0]
        if is_double and function is torch.Tensor.to:
            arguments = tuple(part for part in arguments if part is not torch.float32)
            if options.get("dtype") is torch.float32:
                del options["dtype"]
            if len(arguments) == 1 and not options:
                return arguments[0]
        if is_double and function is torch.Tensor.type and arguments[1:] == (torch.float32,):
            return arguments[0]
        return function(*arguments, **options)
