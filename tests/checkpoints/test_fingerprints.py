"""Fingerprints of weights, and the provenance that is found by them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import OnlineLearner, config_from_preset
from hf_recurrent.checkpoints.fingerprints import base_weights_fingerprint, weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import (
    CHANGED,
    base_of,
    find_provenance,
    remember_provenance,
    write_provenance,
)
from hf_recurrent.checkpoints.records import Data, Phase, Provenance, Segment


def tiny(seed=0):
    torch.manual_seed(seed)
    config = config_from_preset("hawk-tiny", hidden_size=16, state_size=16, num_hidden_layers=1)
    return AutoModelForCausalLM.from_config(config)


def described(model) -> Provenance:
    segment = Segment(0, 2, 20, 1, {}, [], {}, "a processor", "2026-01-01")
    return Provenance([Phase("bptt", [Data("notes", "abc")], [segment])], weights=weights_fingerprint(model))


def test_a_fingerprint_knows_the_weights(tmp_path):
    model = tiny()
    before = weights_fingerprint(model)
    assert before == weights_fingerprint(tiny()) != weights_fingerprint(tiny(1))
    model.save_pretrained(tmp_path)
    assert weights_fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == before
    half = tiny().bfloat16()
    assert weights_fingerprint(half) == weights_fingerprint(half.float()) != before
    with torch.no_grad():
        weight = next(model.parameters())
        weight.view(-1)[3] = torch.nextafter(weight.view(-1)[3], torch.tensor(9.0))  # the smallest change
    assert weights_fingerprint(model) != before


def test_an_adapter_has_its_own(tmp_path):
    peft = pytest.importorskip("peft")
    tiny().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = weights_fingerprint(base)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    assert base_weights_fingerprint(model) == before != weights_fingerprint(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert weights_fingerprint(loaded) == weights_fingerprint(model)
    assert base_weights_fingerprint(loaded) == before

    # A new adapter has the provenance of its base, a trained one of unknown origin has a gap.
    remember_provenance(model.get_base_model(), described_as(before))
    assert find_provenance(model).phases and find_provenance(model).gaps == []
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name).fill_(1)
    assert find_provenance(model).gaps == ["Whether the adapter was trained before is not recorded."]


def described_as(fingerprint: str) -> Provenance:
    provenance = described(tiny())
    provenance.weights = fingerprint
    return provenance


def test_provenance_is_found_and_checked(tmp_path, caplog):
    assert find_provenance(tiny()).is_empty and base_of(tiny()) is None  # new weights
    tiny().save_pretrained(tmp_path / "hawk")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hawk")
    assert find_provenance(loaded).gaps == ["The training of `hawk` was not recorded."]
    assert (base_of(loaded).name, base_of(loaded).license) == ("hawk", None)

    write_provenance(described(loaded), tmp_path / "hawk")
    (tmp_path / "hawk" / "README.md").write_text("---\nlicense: mit\n---\n")
    found = find_provenance(loaded)
    assert found == described(loaded) and base_of(loaded).license == "mit"
    found.phases.clear()  # a copy
    with torch.no_grad():
        next(loaded.parameters()).add_(1)
    assert find_provenance(loaded).gaps == [CHANGED] and find_provenance(loaded).phases

    (tmp_path / "hawk" / "provenance.json").write_text('{"of": "another program"}')
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "hawk")
    assert find_provenance(fresh).gaps == ["The training of `hawk` was not recorded."]
    assert "is damaged" in caplog.text


def test_a_learner_that_is_cut_and_saved_records_the_same(tmp_path):
    stream = b"a stream of bytes, cut anywhere. " * 3
    whole = OnlineLearner(tiny(), learning_rate=1e-3)
    whole.read(stream)
    parts = OnlineLearner(tiny(), learning_rate=1e-3)
    parts.read(stream[:11])
    parts.read(stream[11:40])
    parts.save(tmp_path / "saved")
    parts = OnlineLearner.load(tmp_path / "saved")
    parts.read(stream[40:])
    (one,), (other,) = whole.record_training().phases, parts.record_training().phases
    assert one.data == other.data and one.data[0].read == len(stream) and one.steps == other.steps == whole.updates
    assert [segment.resumed for segment in other.segments] == [1] and one.method == "rtrl"

    parts.training_record.name_source("/var/log/server.log")
    parts.read(b"more")
    assert [(data.name, data.read) for data in parts.record_training().phases[0].data] == [
        ("a stream of bytes", len(stream)),
        ("server.log", 4),
    ]
    changed = OnlineLearner.load(tmp_path / "saved", learning_rate=1e-4)
    changed.read(stream[40:])
    (phase,) = changed.record_training().phases
    assert [segment.rates[0].last for segment in phase.segments] == [1e-3, 1e-4]
    silent = OnlineLearner(tiny(), learn=False)
    silent.read(stream)
    assert silent.record_training().phases == []  # nothing was trained
