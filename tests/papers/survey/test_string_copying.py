"""Examples until strings are copied, and the Transformer without positions."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from papers.survey.string_copying import MODELS, SMALL, examples_needed, means


def test_examples_needed():
    rows = [{"curve": {"320": first, "640": second}} for first, second in ((0.95, 1.0), (0.1, 0.9), (0.0, 0.89))]
    assert examples_needed(rows[:1]) == "320"
    assert examples_needed(rows[:2]) == "320 to 640"
    assert examples_needed(rows) == "320 to 640; never in 1 of 3"
    assert examples_needed(rows[2:]) == "never"


def test_means_of_seeds():
    assert means([{"8": 1.0, "16": 0.5}, {"8": 0.5, "16": 0.0}]) == ([8.0, 16.0], [75.0, 25.0])


@pytest.mark.parametrize(("label", "knows_positions"), [("Llama, RoPE", True), ("Llama, no positions", False)])
@torch.no_grad()
def test_one_layer_without_positions_sees_a_set(label, knows_positions):
    torch.manual_seed(0)
    fields = SMALL["llama"]["widths"] | MODELS[label][1] | {"num_hidden_layers": 1}
    config = config_from_preset("llama-s0", 28, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(1, 13)[None]
    shuffled = torch.cat([ids[:, torch.randperm(11)], ids[:, -1:]], 1)
    last, other = (model(each).logits[0, -1] for each in (ids, shuffled))
    assert torch.allclose(last, other, atol=1e-4) != knows_positions
