"""A small model that says small letters."""

import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset


def build(endless: bool = False, **options):
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": False}
    sizes |= {"eos_token_id": None} if endless else {}
    model = AutoModelForCausalLM.from_config(config_from_preset("hawk-tiny", **sizes)).double().eval()
    with torch.no_grad():  # it says small letters
        weight = torch.zeros_like(model.lm_head.weight)
        weight[97:123] = 2 * torch.randn(26, weight.shape[1])
        model.lm_head.weight.copy_(weight)
    return model, ByteTokenizer(**options)
