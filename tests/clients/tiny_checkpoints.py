"""Tiny models and checkpoints that the rows try the clients on."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from hf_recurrent import ByteTokenizer, config_from_preset

TEXTS = ["def main():", "import os", "café", "x = 1"]


def tiny_model(family: str = "memora", **overrides) -> PreTrainedModel:
    """A language model of two layers, always the same weights, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 2} | overrides
    return AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **sizes)).eval()


def tiny_classifier(**overrides) -> PreTrainedModel:
    """A sequence classifier with the same sizes and padding id."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 2, "pad_token_id": 0} | overrides
    return AutoModelForSequenceClassification.from_config(config_from_preset("memora-tiny", **sizes)).eval()


def save_checkpoint(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """A checkpoint of `model`, by default [`tiny_model`], with its tokenizer and code."""
    (tiny_model() if model is None else model).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def batch(texts: list[str] = TEXTS):
    """The texts, padded on the left: `input_ids` and `attention_mask` (B, T)."""
    return ByteTokenizer()(texts, padding=True, return_tensors="pt")


def token_rows(texts: list[str] = TEXTS) -> list[dict[str, list[int]]]:
    """One row per text, for trainers."""
    return [{"input_ids": ids} for ids in ByteTokenizer()(texts)["input_ids"]]
