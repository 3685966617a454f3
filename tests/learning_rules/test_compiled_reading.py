"""Single bytes in the kernel of blocks, against `forward`, in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.learning_rules import compiled_program
from hf_recurrent.learning_rules.compiled_program import CompiledReading, Uncompilable
from hf_recurrent.modeling.block.recurrent_state import detach_state
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS

pytest.importorskip("hf_recurrent.kernels.block_cpu")

# Widths that no vector divides.
SIZES = {"hidden_size": 12, "state_size": 12, "intermediate_size": 11, "num_hidden_layers": 2, "vocab_size": 37}


def build(family="memora", **fields):
    torch.manual_seed(0)
    config = config_from_preset(f"{family}-tiny", **SIZES | fields)
    return AutoModelForCausalLM.from_config(config).eval().double()


def check(model):
    """Some bytes, and again after the weights have changed in place."""
    reading = CompiledReading(model)
    expected = model.init_state(1)
    for token in range(6):
        if token == 3:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.1 * torch.randn_like(weight))
        reading.read(token)
        # With gradients, so that plain `forward` runs.
        output = model(torch.tensor([[token]]), state=expected, use_cache=True)
        expected = detach_state(output.state)
        torch.testing.assert_close(reading.logits[0], output.logits[0, 0].detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(reading.state, dict(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("unit", sorted(RECURRENT_UNITS))
def test_every_unit(unit):
    check(build(recurrent_unit=unit))


@pytest.mark.parametrize("family", ["hawk", "lru"])
def test_other_families(family):
    fields = {"intermediate_size": None} if family == "lru" else {}
    sizes = {name: value for name, value in SIZES.items() if name not in fields}
    config = config_from_preset(f"{family}-tiny", **sizes)
    torch.manual_seed(0)
    check(AutoModelForCausalLM.from_config(config).eval().double())


def test_what_the_kernel_cannot_compute_is_said(monkeypatch):
    with pytest.raises(Uncompilable, match="unsupported operator: aten"):
        CompiledReading(AutoModelForCausalLM.from_config(config_from_preset("mgrade-tiny")).eval())
    with pytest.raises(Uncompilable, match="the model is bfloat16 on cpu"):
        CompiledReading(build().bfloat16())
    monkeypatch.setattr(compiled_program, "block_cpu", None)
    with pytest.raises(Uncompilable, match="was not built"):
        CompiledReading(build())
