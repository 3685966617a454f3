"""Models without memory of their own (meta device, fake tensors) and models in shards."""

import json
import math
from pathlib import Path

import pytest
import torch
from model_cases import each_family, tiny_config, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


def arguments(steps, device):
    ids = torch.ones(2, steps, dtype=torch.long, device=device)
    documents = {"position_ids": ids, "seq_idx": ids, "cu_seq_lens_q": ids.flatten()[:3]}
    return {"input_ids": ids, "labels": ids, "attention_mask": ids, "reset_mask": ids.bool(), **documents}


@each_family
def test_the_meta_device(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    output = model(**arguments(3, "meta"))
    output.loss.backward()
    assert output.logits.is_meta and output.logits.shape == (2, 3, 256)
    with torch.no_grad():
        assert model(torch.ones(2, 1, dtype=torch.long, device="meta"), state=output.state).logits.is_meta


@pytest.mark.sampled(3)
@each_family
@pytest.mark.parametrize("built_inside", [True, False])
def test_fake_tensors(family, built_inside):
    model = None if built_inside else tiny_model(family)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model or AutoModelForCausalLM.from_config(tiny_config(family))
        output = model(**arguments(3, "cpu"))
        output.loss.backward()
        with torch.no_grad():
            assert model(torch.ones(2, 1, dtype=torch.long)).logits.shape == (2, 1, 256)


def test_a_classifier_of_fake_tensors():
    with FakeTensorMode():
        config = tiny_config("memora")
        config.pooling = "last"
        model = AutoModelForSequenceClassification.from_config(config)
        ids = torch.ones(2, 4, dtype=torch.long)
        model(ids, attention_mask=ids, labels=ids[:, 0]).loss.backward()


@pytest.mark.long
def test_shards_are_initialised_and_saved_with_our_code(tmp_path, commands):
    program = Path(__file__).with_name("sharding_program.py")
    done = commands.python([program, tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for family, found in json.loads(done.stdout.splitlines()[-1]).items():
        name = found["architectures"][0]
        assert found["wrapper"] == f"FSDP{name}" and not name.startswith("FSDP")
        module = f"modeling_{family.replace('-', '_')}"
        assert found["auto_map"]["AutoModelForCausalLM"] == f"{module}.{name}"
        assert f"{module}.py" in found["code"] and "_fsdp_init.py" not in found["code"]
        assert found["difference"] < 1e-6
        for weight, (shards, plain) in found["spread"].items():
            # A constant, one number, or a sample from the same distribution.
            assert math.isnan(plain) or shards == pytest.approx(plain, rel=0.35, abs=1e-6), (family, weight)
