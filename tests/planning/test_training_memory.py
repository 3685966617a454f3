"""Memory of a training step, counted on tensors without memory."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import MultiStreamTrainingArguments, config_from_preset
from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.planning.report import changes
from hf_recurrent.planning.setting import Setting
from hf_recurrent.planning.training_memory import MemoryCounter, fake_memory
from hf_recurrent.trainers.sharding import ShardingSettings

SIZES = {"hidden_size": 32, "state_size": 48, "num_hidden_layers": 2}
SETTING = Setting(streams=4, block_size=16, stride=16)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return MultiStreamTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")


def build(**sizes):
    return AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **SIZES | sizes))


def test_live_memory_is_that_of_a_hand_count():
    with fake_memory() as memory:
        first = torch.nn.Parameter(torch.empty(5, 4))
        x = torch.empty(3, 4)
        hidden = x @ first.T  # (3, 5), kept by relu as its result
        kept = hidden.relu()
        assert memory.now == 4 * (20 + 12 + 15 + 15) == memory.peak
        del hidden
        assert memory.now == 4 * (20 + 12 + 15)
        kept.sum().backward()
        del kept
        assert memory.now == 4 * (20 + 12 + 20)  # parameters, inputs and the gradient


def test_parameters_optimizer_and_state_are_exact(arguments):
    memory = MemoryCounter(build, arguments).count(SETTING)
    model = build()
    assert memory.num_parameters == model.num_parameters() and memory.parameters == 4 * model.num_parameters()
    assert memory.optimizer == 2 * memory.parameters + 4 * len(list(model.parameters()))  # two moments, and the steps
    assert memory.state == 4 * 2 * 4 * 48 and memory.sensitivities == 0
    doubled = MemoryCounter(build, arguments).count(dataclasses.replace(SETTING, accumulation=2))
    assert doubled.state == 2 * memory.state and doubled.optimizer == memory.optimizer


def test_tables_cost_one_number_a_row_and_no_gradient(arguments):
    tables = {"ngram_orders": [2, 3], "ngram_rows": 4096}
    plain = MemoryCounter(build, arguments).count(SETTING)
    counter = MemoryCounter(lambda: build(**tables), arguments)
    memory, doubled = counter.count(SETTING), counter.count(dataclasses.replace(SETTING, accumulation=2))
    table_bytes = 4 * 2 * 4096 * SIZES["hidden_size"]
    assert memory.parameters == plain.parameters + table_bytes
    assert memory.optimizer == plain.optimizer + 4 * 2 * 4096 == doubled.optimizer
    assert memory.activations < plain.activations + table_bytes / 4
    sharded = dataclasses.replace(SETTING, processes=4, sharding=ShardingSettings())
    assert counter.count(sharded).parameters == -(-plain.parameters // 4) + table_bytes
    muon = dataclasses.replace(arguments, matrix_optimizer="muon")
    assert MemoryCounter(build, muon).count(SETTING).optimizer < 0.7 * plain.optimizer  # one moment


@pytest.mark.parametrize("unit, method", [("glru", "rtrl"), ("gru", "snap1"), ("glru", "truncated")])
def test_sensitivities_are_those_of_the_rule(arguments, unit, method):
    setting = dataclasses.replace(SETTING, method=method, block_size=8, stride=2)
    memory = MemoryCounter(lambda: build(recurrent_unit=unit), arguments).count(setting)
    carried = build_learning_rule(method, build(recurrent_unit=unit)).init_carried(4)
    assert memory.sensitivities == sum(tensor.nbytes for tensor in carried.values())
    assert (memory.sensitivities > 0) == (method != "truncated") and memory.activations > 0


@pytest.mark.long
def test_what_lowers_memory(arguments):
    counter = MemoryCounter(lambda: build(num_hidden_layers=6), arguments)
    setting = dataclasses.replace(SETTING, streams=16, block_size=64, stride=64, processes=4)
    found = {change.flags: change.memory for change in changes(setting, counter)}
    before = counter.count(setting)
    assert before.communication == before.parameters
    assert found["--gradient_checkpointing true"].activations < before.activations / 2
    fewer = found["--per_device_train_batch_size 8 --gradient_accumulation_steps 2"]
    assert fewer.activations < 0.7 * before.activations and fewer.state == before.state
    assert found["--config_file fsdp2.yaml"].optimizer == -(-before.optimizer // 4)
    assert all(memory.total < before.total for memory in found.values())
    offloaded = counter.count(dataclasses.replace(setting, sharding=ShardingSettings(offload=True)))
    assert offloaded.parameters == offloaded.optimizer == 0 and offloaded.host > 0
