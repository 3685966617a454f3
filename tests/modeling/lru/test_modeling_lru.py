"""The LRU model against loops from its paper's equations, its printed counts, its classifier, its learning rates."""

import cmath
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_recurrent import (
    ByteTokenizer,
    Corpus,
    LruConfig,
    LruForCausalLM,
    LruForSequenceClassification,
    LruModel,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    config_from_preset,
)

M, S, STEPS = 6, 8, 11


def model_of(model_class=LruModel, **fields):
    torch.manual_seed(0)
    model = model_class(LruConfig(**{"hidden_size": M, "state_size": S, "num_hidden_layers": 2} | fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "log_gamma")):
                parameter.normal_(std=0.5)
    return model.double().eval()


def gelu(number):
    return 0.5 * number * (1 + math.erf(number / math.sqrt(2)))


def layer_by_equations(layer, rows):
    """Equations 8 to 11 and figure 1, one step, one row and one complex number at a time: T lists of M numbers."""
    unit, states, outputs = layer.recurrent_unit, [0j] * (S // 2), []
    b, c = unit.input_projection.weight.tolist(), layer.read_out.state_map.weight.tolist()
    nu, theta, log_gamma = unit.nu.tolist(), unit.theta.tolist(), unit.log_gamma.tolist()
    for x in rows:
        mean = sum(x) / M
        scale = 1 / math.sqrt(sum((value - mean) ** 2 for value in x) / M + layer.norm.eps)
        u = [(value - mean) * scale * w + o for value, w, o in zip(x, layer.norm.weight, layer.norm.bias, strict=True)]
        for n in range(S // 2):
            eigenvalue = cmath.exp(-math.exp(nu[n]) + 1j * math.exp(theta[n]))
            of_input = sum(complex(b[n][i], b[n + S // 2][i]) * u[i].item() for i in range(M))
            states[n] = eigenvalue * states[n] + math.exp(log_gamma[n]) * of_input
        y = []
        for i in range(M):
            row = [complex(c[i][n], -c[i][n + S // 2]) for n in range(S // 2)]
            of_states = sum(weight * state for weight, state in zip(row, states, strict=True)).real
            y.append(gelu(of_states + layer.read_out.skip[i].item() * u[i].item()))
        glu = []
        for i in range(M):
            value, gate = (
                sum(linear.weight[i, j].item() * y[j] for j in range(M)) + linear.bias[i].item()
                for linear in (layer.glu.value_proj, layer.glu.gate_proj)
            )
            glu.append(value / (1 + math.exp(-gate)))
        outputs.append([value + added for value, added in zip(x, glu, strict=True)])
    return outputs


@torch.no_grad()
def test_the_model_is_its_equations():
    model = model_of(input_size=3)
    values = torch.randn(STEPS, 3, dtype=torch.float64)
    rows = (values @ model.embed_tokens.weight.T + model.embed_tokens.bias).tolist()
    for layer in model.layers:
        rows = layer_by_equations(layer, rows)
    actual = model(input_values=values[None]).last_hidden_state[0]
    torch.testing.assert_close(actual, torch.tensor(rows, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_gru_layers_have_no_read_out():
    fields = {"recurrent_unit": "gru", "recurrent_bias": True, "read_out": False, "state_size": M}
    model = model_of(num_hidden_layers=1, **fields)
    layer, ids = model.layers[0], torch.arange(1, 12)[None]
    hidden = model.embed_tokens(ids)
    states, _ = layer.recurrent_unit(layer.norm(hidden), torch.zeros(1, M).double())
    torch.testing.assert_close(model(ids).last_hidden_state, hidden + layer.glu(states))
    alone = model_of(num_hidden_layers=1, glu=False, **fields)
    layer = alone.layers[0]
    hidden = alone.embed_tokens(ids)
    states, _ = layer.recurrent_unit(layer.norm(hidden), torch.zeros(1, M).double())
    torch.testing.assert_close(alone(ids).last_hidden_state, hidden + states)


def parameters_of(decoder_outputs, **fields):
    """Parameters of the backbone, and of a decoder with bias."""
    config = LruConfig(**fields)
    with torch.device("meta"):
        backbone = LruModel(config)
    return backbone.num_parameters() + (config.hidden_size + 1) * decoder_outputs


def test_counts_of_table_5():
    """The copy task: 7 bits and the marker in, two logits a bit out."""
    bits = {"input_size": 8, "decoder_outputs": 14}
    gru = {"recurrent_unit": "gru", "recurrent_bias": True, "read_out": False}
    assert parameters_of(**bits) == 268_430
    assert parameters_of(**bits, recurrent_unit="dense_linear", state_size=64, hidden_size=146) == 267_956
    assert parameters_of(**bits, **gru, state_size=91, hidden_size=91) == 270_011
    # The single layer has no GLU and reads out through 1,072 hidden units.
    single = parameters_of(8, input_size=8, **gru, state_size=134, hidden_size=134, num_hidden_layers=1, glu=False)
    assert single - 135 * 8 + 135 * 1072 + 1073 * 14 == 269_488


def test_counts_of_appendix_b_2():
    """The linear RNN reads colour images; the 1,063,178 printed beside it is the LRU with the 20 inputs of ListOps."""
    sizes = {"input_size": 3, "state_size": 128, "hidden_size": 294, "recurrent_unit": "dense_linear"}
    assert parameters_of(10, **sizes) == 1_068_086
    assert parameters_of(10, input_size=20, state_size=256, hidden_size=256) == 1_063_178
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config_from_preset("lru-scifar"))
    assert model.num_parameters() == 1_063_178 - (20 - 3) * 256


@pytest.mark.parametrize("row", ["copy", "scifar", "imdb", "listops"])
def test_presets_are_those_of_the_tables(row):
    config = config_from_preset(f"lru-{row}")
    assert config.num_hidden_layers == 4
    assert (config.state_size, config.hidden_size) == ((128, 128) if row == "copy" else (256, 256))
    assert (config.r_min, config.r_max) == ((0.9, 0.999) if row == "scifar" else (0, 1))
    assert config.dropout == (0.0 if row == "imdb" else 0.1)
    assert config.per_step_loss == (row != "copy")
    assert config.learning_rate_factor == 0.5


def test_the_ring_of_the_configuration_is_where_eigenvalues_start():
    model = LruModel(
        LruConfig(hidden_size=4, state_size=400, num_hidden_layers=1, r_min=0.9, r_max=0.95, max_phase=0.1)
    )
    unit = model.layers[0].recurrent_unit
    radius, phase = torch.exp(-torch.exp(unit.nu)), torch.exp(unit.theta)
    assert 0.9 <= radius.min() < radius.max() <= 0.95
    assert 0 < phase.min() < phase.max() <= 0.1


def test_dropout_is_for_training_only():
    model = model_of(LruForCausalLM, dropout=0.5)
    ids = torch.arange(1, 12)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


# ---- Classifier ----


def classifier(**fields):
    return model_of(LruForSequenceClassification, num_labels=3, per_step_loss=True, **fields)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_every_step_is_asked_for_the_label(side):
    model = classifier()
    ids, labels = torch.randint(1, 256, (3, STEPS)), torch.tensor([2, 0, 1])
    lengths, mask = [STEPS, 4, 7], None
    if side is not None:
        mask = torch.zeros(3, STEPS, dtype=torch.long)
        for row, length in enumerate(lengths):
            mask[row, slice(STEPS - length, None) if side == "left" else slice(0, length)] = 1
    output = model(ids, mask, labels=labels)
    losses = []
    for row in range(3):
        kept = ids[row] if mask is None else ids[row, mask[row].bool()]
        hidden = model.model(kept[None]).last_hidden_state[0]
        steps = [-torch.log_softmax(model.score(step), -1)[labels[row]] for step in hidden]
        losses.append(sum(steps) / len(steps))
        torch.testing.assert_close(output.logits[row], model.score(hidden).mean(0))
    torch.testing.assert_close(output.loss, sum(losses) / 3)
    assert output.hidden_states is None
    half = model(ids, mask, labels=labels, num_items_in_batch=torch.tensor(6), return_dict=False)
    torch.testing.assert_close(half[0], sum(losses) / 6)
    torch.testing.assert_close(half[1], output.logits)
    assert len(model(ids, mask, labels=labels, output_hidden_states=True).hidden_states) == 3


def test_real_values_are_classified():
    model = classifier(input_size=2)
    values = torch.randn(2, STEPS, 2, dtype=torch.float64)
    output = model(input_values=values, labels=torch.tensor([0, 2]))
    assert output.logits.shape == (2, 3) and torch.isfinite(output.loss)
    with pytest.raises(ValueError, match="`input_size` is 2, but a language model reads tokens"):
        LruForCausalLM(model.config)


# ---- Learning rates ----


def test_eigenvalues_and_normalisers_learn_slower_and_are_not_decayed():
    model = model_of(LruForCausalLM, learning_rate_factor=0.25)
    slow = {
        f"model.layers.{layer}.recurrent_unit.{vector}"
        for layer in range(2)
        for vector in ("nu", "theta", "log_gamma")
    }
    assert model.parameter_learning_rate_factors() == dict.fromkeys(slow, 0.25)
    assert model.parameters_without_weight_decay() == slow


def test_trainers_learn_by_the_factors(tmp_path):
    model = model_of(LruForCausalLM, learning_rate_factor=0.25).float()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = MultiStreamTrainer(
        model,
        MultiStreamTrainingArguments(
            str(tmp_path),
            block_size=8,
            per_device_train_batch_size=4,
            warmup_steps=0,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.5,
            max_grad_norm=0,
            max_steps=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        Corpus.from_documents([bytes(range(1, 256))] * 4, ByteTokenizer(), name="bytes"),
    )
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert [group["lr"] for group in groups] == [1e-3, 1e-3, 2.5e-4]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(before)
    # AdamW's first step is the learning rate, whatever the gradient's size.
    for name, parameter in model.named_parameters():
        change = (parameter - before[name] * (1 if parameter.dim() == 1 else 1 - 0.5e-3)).abs().max().item()
        slow = name in model.parameter_learning_rate_factors()
        if "skip" not in name:
            assert change == pytest.approx(2.5e-4 if slow else 1e-3, rel=0.05), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r_min": 0.9, "r_max": 0.5}, "`r_min` is 0.9 and `r_max` 0.5"),
        ({"r_max": 1.5}, "`r_max` 1.5"),
        ({"r_min": 0, "r_max": 0}, "`r_max` 0"),
        ({"max_phase": 0.0}, "`max_phase` is 0.0"),
        ({"learning_rate_factor": -1.0}, "`learning_rate_factor` is -1.0"),
        ({"dropout": 1.0}, "`dropout` is 1.0"),
        ({"input_size": 0}, "`input_size` is 0"),
        ({"read_out": False, "state_size": 24}, "`state_size` is 24 and `hidden_size` 128"),
    ],
)
def test_what_cannot_be_built_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        LruConfig(**fields)


def test_gradients_reach_every_parameter():
    model = model_of(LruForCausalLM)
    ids = torch.randint(1, 256, (2, STEPS))
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
