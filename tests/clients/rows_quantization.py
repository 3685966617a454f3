"""Rows: smaller weights."""

import contextlib

import torch
from client_rows import row
from tiny_checkpoints import batch, save_checkpoint, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig


def works_closely(model, distance: float, whole=None) -> None:
    """The logits stay within a relative distance of those of `whole`, and bytes are generated."""
    inputs = batch()
    expected, actual = (whole or tiny_model())(**inputs).logits, model(**inputs).logits.float()
    mask = inputs.attention_mask.bool()
    error = ((actual - expected)[mask].norm() / expected[mask].norm()).item()
    assert error < distance and (whole or error), error
    assert model.generate(**inputs, max_new_tokens=3, min_new_tokens=3).shape[1] == inputs.input_ids.shape[1] + 3
    single_steps_are_those_of_the_block(model)


@torch.no_grad()
def single_steps_are_those_of_the_block(model) -> None:
    """Single tokens, for which a model may have a compiled step, read the smaller weights as a block does."""
    ids = torch.randint(1, 256, (2, 12))
    expected = model(ids).logits.float()
    for weights in (None, "int8"):
        with contextlib.suppress(ValueError, RuntimeError):  # `forward` runs
            model.compile_step(weights)
        state = model.init_state(2)
        for place, token in enumerate(ids.split(1, 1)):
            output = model(token, state=state)
            state = output.state
            error = (output.logits[:, 0].float() - expected[:, place]).norm() / expected[:, place].norm()
            assert error < 0.1, (weights, place, error)


@row("torchao", "`from_pretrained(quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))`")
def torchao_int8(folder):
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    works_closely(AutoModelForCausalLM.from_pretrained(save_checkpoint(folder), quantization_config=config), 0.1)


@row("optimum-quanto", "`from_pretrained(quantization_config=QuantoConfig(weights='int8'))`")
def quanto_int8(folder):
    config = QuantoConfig(weights="int8")
    works_closely(AutoModelForCausalLM.from_pretrained(save_checkpoint(folder), quantization_config=config), 0.1)


@row("bitsandbytes", "`from_pretrained(quantization_config=BitsAndBytesConfig(load_in_8bit=True))`")
def bitsandbytes_int8(folder):
    config = BitsAndBytesConfig(load_in_8bit=True)
    works_closely(AutoModelForCausalLM.from_pretrained(save_checkpoint(folder), quantization_config=config), 0.1)


@row("bitsandbytes", "`BitsAndBytesConfig(load_in_4bit=True)`")
def bitsandbytes_int4(folder):
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit

    # On CPUs with AVX512-BF16 widths must be multiples of 64. Four bits of random weights are far from them, and the
    # layout depends on the CPU, so the same weights as floats are the reference.
    whole = tiny_model(hidden_size=64, state_size=64)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(save_checkpoint(folder, whole), quantization_config=config)
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert quantized
    for name, module in quantized.items():
        weight = whole.get_submodule(name).weight
        state = module.weight.quant_state
        weight.data = functional.dequantize_4bit(module.weight.data, state).reshape(weight.shape).to(weight.dtype)
    works_closely(model, 0.02, whole)


@row("torch", "`torch.ao.quantization.quantize_dynamic`")
def dynamic_quantization(folder):
    model = torch.ao.quantization.quantize_dynamic(tiny_model(), {torch.nn.Linear}, dtype=torch.qint8)
    works_closely(model, 0.2)
