"""mGRADE against loops from its equations, its counts against appendix B and Tables 1 and 2, and its baselines."""

import itertools
import math

import pytest
import torch
from model_cases import TOLERANCES, each_dtype, relative_difference
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_recurrent import (
    MgradeConfig,
    MgradeForCausalLM,
    MgradeForSequenceClassification,
    MgradeModel,
    config_from_preset,
    preset_names,
)

M, K, STEPS = 12, 4, 40
CASES = {
    "learned": {"receptive_field": 9},
    "learned, far": {"receptive_field": 64, "position_init": "uniform"},
    "constant": {"spacing": "constant", "dilation": 3},
    "exponential": {"spacing": "exponential", "dilation": 2},
    "many taps": {"spacing": "constant", "conv_kernel": 28},
    "tcn": {"spacing": "exponential", "recurrent_unit": None},
    "tcn, one linear map": {"spacing": "constant", "recurrent_unit": None, "mlp_layers": 1},
    "mingru": {"spacing": None},
    "section 4": {"receptive_field": 9, "mlp_layers": 0, "layer_norm": False},
}
each_case = pytest.mark.parametrize("case", CASES)


def config(case: str, **overrides) -> MgradeConfig:
    return MgradeConfig(**{"hidden_size": M, "num_hidden_layers": 3, "conv_kernel": K} | CASES[case] | overrides)


def model_of(case: str, dtype: torch.dtype = torch.float64, model_class=MgradeForCausalLM, **overrides):
    torch.manual_seed(0)
    model = model_class(config(case, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model.to(dtype).eval()


def block(batch: int = 3, steps: int = STEPS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 256, (batch, steps), generator=generator)
    return ids, torch.rand(batch, steps, generator=generator) < 0.12


def layer_by_equations(layer, config, u):
    """Figure 1B and equations 7 to 10 for one row without resets, (T, M), one step at a time."""
    steps = len(u)
    if layer.convolution is not None:
        x = torch.zeros_like(u)
        for t, tap, channel in itertools.product(range(steps), range(config.conv_kernel), range(M)):
            weight = layer.convolution.weight[tap, channel]
            for n in range(t + 1):
                if config.spacing == "learned":
                    position = layer.convolution.positions[tap, channel].item()
                    c = math.exp(-0.5 * ((n - position) / config.interpolation_width) ** 2)
                    c *= n <= layer.convolution.receptive_field
                else:
                    c = float(n == layer.convolution.initial_positions[tap])
                if c > 1e-20:
                    x[t, channel] += weight * c * u[t - n, channel]
    else:
        x = u
    if layer.recurrent_unit is not None:
        unit, h, states = layer.recurrent_unit, torch.zeros(M, dtype=u.dtype), []
        for t in range(steps):
            z = torch.sigmoid(unit.update_gate.weight @ x[t] + unit.update_gate.bias)
            h = (1 - z) * h + z * (unit.candidate.weight @ x[t] + unit.candidate.bias)
            states.append(h)
        x = x + torch.stack(states)
    if config.mlp_layers == 2:
        up, down = layer.mlp.up_proj, layer.mlp.down_proj
        inner = x @ up.weight.T + up.bias
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + inner @ down.weight.T + down.bias
    elif config.mlp_layers == 1:
        inner = x @ layer.mlp.up_proj.weight.T + layer.mlp.up_proj.bias
        x = x + inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    if config.layer_norm:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + config.norm_eps) * layer.norm.weight + layer.norm.bias
    return x


@each_case
@torch.no_grad()
def test_layers_are_their_equations(case):
    model = model_of(case, num_hidden_layers=2)
    ids = block(1, 12)[0]
    hidden = model.model.embed_tokens.weight[ids[0]]
    for layer in model.model.layers:
        hidden = layer_by_equations(layer, model.config, hidden)
    torch.testing.assert_close(model(ids).logits[0], hidden @ model.lm_head.weight.T, rtol=1e-10, atol=1e-10)


def test_dilation_grows_with_depth_only_where_it_should():
    assert [config("exponential").tap_positions(layer) for layer in range(3)] == [
        [0, 2, 4, 6],
        [0, 4, 8, 12],
        [0, 8, 16, 24],
    ]
    assert config("constant").tap_positions(2) == [0, 3, 6, 9]
    # Table 2's K = 8, Γ = 256 starts where mGRADE-CD with d = 32 stays.
    assert config_from_preset("mgrade-scifar-learned").tap_positions(0) == [32 * tap for tap in range(8)]
    assert config("learned", receptive_field=None, dilation=5).receptive_fields() == [15, 15, 15]


@pytest.mark.sampled(4)
@each_case
@each_dtype
@pytest.mark.parametrize("cuts", [range(1, STEPS), [7, 19], [1, 2, 30]], ids=["steps", "chunks", "uneven"])
def test_any_cut_equals_the_whole(case, dtype, cuts):
    model = model_of(case, dtype)
    ids, reset_mask = block()

    def run(borders):
        model.zero_grad()
        state, logits = None, []
        for start, end in itertools.pairwise([0, *borders, STEPS]):
            output = model(ids[:, start:end], state=state, reset_mask=reset_mask[:, start:end])
            state = output.state
            logits.append(output.logits)
        whole = torch.cat(logits, 1)
        (whole**2).mean().backward()
        return {
            "logits": whole.detach(),
            **{name: tensor.detach() for name, tensor in state.items() if tensor.numel()},
            **{name: parameter.grad.clone() for name, parameter in model.named_parameters()},
        }

    expected = run([])
    for name, tensor in run(cuts).items():
        assert relative_difference(tensor, expected[name]) <= TOLERANCES[dtype], name


@each_case
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_each_alone(case, side):
    model = model_of(case)
    ids, reset_mask = block()
    start = model(ids).state
    lengths = [1, 13, STEPS]
    mask = torch.zeros(3, STEPS, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, slice(STEPS - length, None) if side == "left" else slice(0, length)] = 1
    together = model(ids, mask, state=start, reset_mask=reset_mask)
    for row in range(3):
        real = mask[row].bool()
        alone = model(
            ids[row : row + 1, real],
            state={name: tensor[row : row + 1] for name, tensor in start.items()},
            reset_mask=reset_mask[row : row + 1, real],
        )
        torch.testing.assert_close(together.logits[row, real], alone.logits[0], rtol=1e-10, atol=1e-10)
        for name, tensor in alone.state.items():
            torch.testing.assert_close(together.state[name][row], tensor[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("preset", ["mgrade-scifar-learned-uniform", "mgrade-scifar-exponential", "tcn-scifar"])
@torch.no_grad()
def test_pixel_by_pixel_equals_the_whole_at_the_papers_size(preset):
    torch.manual_seed(0)
    model = MgradeModel(config_from_preset(preset))
    pixels = torch.rand(1, 150, 1)
    whole = model(input_values=pixels).last_hidden_state
    state, steps = None, []
    for pixel in pixels.split(1, 1):
        output = model(input_values=pixel, state=state)
        state = output.state
        steps.append(output.last_hidden_state)
    assert relative_difference(torch.cat(steps, 1), whole) <= 1e-5


def appendix_b(config, inputs: int, outputs: int) -> int:
    """Equations 11 to 17."""
    width, taps = config.hidden_size, config.conv_kernel
    convolution = {None: 0, "learned": 2 * taps * width}.get(config.spacing, taps * width)
    recurrence = 0 if config.recurrent_unit is None else 2 * width**2 + 2 * width
    mlp, norm = 4 * width**2 + 3 * width, 2 * width
    layers = config.num_hidden_layers * (convolution + recurrence + mlp + norm)
    return inputs * width + layers + width * outputs


@pytest.mark.parametrize("case", ["learned", "constant", "exponential", "tcn", "mingru"])
@pytest.mark.parametrize(("width", "taps", "layers"), [(12, 4, 3), (32, 8, 6), (7, 1, 1), (20, 16, 2)])
def test_parameters_are_those_of_appendix_b(case, width, taps, layers):
    sizes = {"hidden_size": width, "conv_kernel": taps, "num_hidden_layers": layers}
    bytes_model = MgradeForCausalLM(config(case, **sizes))
    assert bytes_model.num_parameters() == appendix_b(bytes_model.config, 256, 256)
    pixel_model = MgradeForSequenceClassification(config(case, **sizes, input_size=3, num_labels=10))
    assert pixel_model.num_parameters() == appendix_b(pixel_model.config, 3, 10)


# Tables 1 and 2, in thousands. The tables round up; the two rows of Table 2 with learned positions are printed with
# three numbers a tap (44 K and 48 K), where appendix B counts two.
PRINTED = {
    "mgrade-smnist": (3_100, 3),
    "mgrade-smnist-exponential": (3_100, 3),
    "tcn-smnist": (2_898, 3),
    "tcn-smnist-exponential": (2_898, 3),
    "mingru-smnist": (3_225, 3),
    "mgrade-scifar": (40_096, 41),
    "mgrade-scifar-exponential": (41_632, 42),
    "tcn-scifar": (38_176, 39),
    "tcn-scifar-exponential": (38_176, 39),
    "mingru-scifar": (38_560, 39),
}


@pytest.mark.parametrize("preset", PRINTED)
def test_parameters_are_those_of_table_1(preset):
    model = AutoModelForSequenceClassification.from_config(config_from_preset(preset))
    parameters, thousands = PRINTED[preset]
    assert model.memory_footprint().parameters == model.num_parameters() == parameters
    # Within the table's rounding: sMNIST is called "around 3k", sCIFAR is rounded up.
    assert thousands == (round(parameters / 1000) if "smnist" in preset else math.ceil(parameters / 1000))


@pytest.mark.parametrize(
    ("preset", "buffer"),
    [
        ("mgrade-scifar", 32 * 6 * 32 * 7),
        ("tcn-scifar", 32 * 6 * 63),
        ("mgrade-scifar-exponential", 32 * 2 * 15 * 63),
        ("mgrade-scifar-learned", 32 * 6 * 256),
        ("mingru-scifar", 0),
    ],
)
def test_the_buffer_is_that_of_appendix_b_and_is_what_is_carried(preset, buffer):
    model = AutoModelForSequenceClassification.from_config(config_from_preset(preset))
    footprint = model.memory_footprint()
    assert footprint.buffer == buffer
    assert footprint.total == footprint.parameters + buffer
    with torch.no_grad():
        state = model.model(input_values=torch.rand(1, 3, 1)).state
        state = model.model(input_values=torch.rand(1, 1, 1), state=state).state
    carried = [tensor for name, tensor in state.items() if name.endswith("convolution")]
    assert sum(tensor.untyped_storage().nbytes() for tensor in carried) == 4 * buffer
    recurrent = [tensor for name, tensor in state.items() if name.endswith("recurrent")]
    assert sum(tensor.numel() for tensor in recurrent) == (0 if preset.startswith("tcn") else 6 * 32)
    assert len(state) == len(carried) + len(recurrent)


def test_total_memory_of_table_1():
    # The rows that follow from appendix B: 84 k and 51 k, rounded up.
    for preset, printed in (("mgrade-scifar", 84), ("tcn-scifar", 51)):
        model = AutoModelForSequenceClassification.from_config(config_from_preset(preset))
        assert math.ceil(model.memory_footprint().total / 1000) == printed


@each_case
def test_every_configuration_is_loaded_as_it_was_saved(case, tmp_path):
    model = model_of(case, torch.float32)
    model.save_pretrained(tmp_path)
    loaded_config = AutoConfig.from_pretrained(tmp_path)
    assert loaded_config.to_json_string() == model.config.to_json_string()
    assert loaded_config.spacing == model.config.spacing
    assert loaded_config.recurrent_unit == model.config.recurrent_unit
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = block()[0]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(ids).last_hidden_state, model(ids, output_hidden_states=True).hidden_states[-1])


def test_positions_stay_exact_in_a_model_loaded_in_bfloat16(tmp_path):
    model = model_of("learned, far", torch.float32)
    model.save_pretrained(tmp_path)
    loaded = MgradeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    for mine, theirs in zip(loaded.model.layers, model.model.layers, strict=True):
        assert torch.equal(mine.convolution.positions, theirs.convolution.positions)
    output = loaded(block()[0])
    assert output.logits.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in output.state.values()} == {torch.float32}
    assert relative_difference(output.logits.float(), model(block()[0]).logits) < 0.1


def test_the_embedding_is_tied_only_on_request(tmp_path):
    assert model_of("learned").lm_head.weight is not model_of("learned").model.embed_tokens.weight
    tied = model_of("learned", torch.float32, tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    tied.save_pretrained(tmp_path)
    loaded = MgradeForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_initialisation_reaches_every_part():
    torch.manual_seed(0)
    model = MgradeForSequenceClassification(config("learned", hidden_size=200, input_size=4, num_labels=50))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.std().item() == pytest.approx(module.in_features**-0.5, rel=0.1), name
            assert module.bias is None or not module.bias.any()
    layer = model.model.layers[1]
    assert torch.equal(layer.norm.weight, torch.ones(200))
    assert not layer.norm.bias.any()
    assert layer.convolution.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(layer.convolution.positions[:, 7], 9 / 4 * torch.arange(4))


def test_next_values_of_a_trajectory_can_be_predicted():
    torch.manual_seed(0)
    model = MgradeModel(config("learned", input_size=1, num_hidden_layers=1)).train()
    head = torch.nn.Linear(M, 1)
    wave = torch.sin(torch.arange(120) * 0.3).view(1, -1, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
    start = model.layers[0].convolution.positions.detach().clone()
    losses = []
    for _ in range(60):
        output = head(model(input_values=wave[:, :-1]).last_hidden_state)
        loss = torch.nn.functional.mse_loss(output, wave[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert (model.layers[0].convolution.positions - start).abs().max() > 0.01


def test_real_values_and_tokens_are_not_mixed_up():
    values, ids = torch.rand(2, 5, 3), block(2, 5)[0]
    real = model_of("learned", torch.float32, MgradeModel, input_size=3)
    token = model_of("learned", torch.float32, MgradeModel)
    embedded = real.get_input_embeddings()(values)
    same = real(inputs_embeds=embedded).last_hidden_state
    assert torch.equal(real(input_values=values).last_hidden_state, same)
    with pytest.raises(ValueError, match="reads real values"):
        real(ids)
    with pytest.raises(ValueError, match="reads tokens"):
        token(input_values=values)
    with pytest.raises(ValueError, match=r"`input_values` has shape \(2, 5, 2\).*\(B, T, 3\)"):
        real(input_values=values[..., :2])
    with pytest.raises(ValueError, match=r"`input_values` has shape \(2, 5\)"):
        real(input_values=values[..., 0])
    with pytest.raises(ValueError, match="exactly one"):
        real(input_values=values, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="T ≥ 1"):
        real(input_values=values[:, :0])
    with pytest.raises(ValueError, match=r"`input_size` is 3.*language model"):
        MgradeForCausalLM(config("learned", input_size=3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spacing": "random"}, "`spacing` is 'random'.*learned, constant, exponential"),
        ({"conv_kernel": 0}, "`conv_kernel` is 0"),
        ({"spacing": "constant", "dilation": 0}, "`dilation` is 0"),
        ({"spacing": "constant", "dilation": 1.5}, "`dilation` is 1.5"),
        ({"receptive_field": 0}, "`receptive_field` is 0"),
        ({"dilation": 4, "receptive_field": 11}, r"position 12, outside the receptive field \[0, 11\]"),
        ({"spacing": "constant", "receptive_field": 9}, "`receptive_field` is 9.*leave it out"),
        ({"position_init": "zero"}, "`position_init` is 'zero'"),
        ({"interpolation_width": 0.0}, "`interpolation_width` is 0.0"),
        ({"spacing": None, "recurrent_unit": None}, "both None"),
        ({"mlp_layers": 3}, "`mlp_layers` is 3"),
        ({"pooling": "max"}, "`pooling` is 'max'"),
        ({"input_size": 0}, "`input_size` is 0"),
        ({"state_size": 24}, "`state_size` is 24 and `hidden_size` 16"),
    ],
)
def test_what_cannot_be_built_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        MgradeConfig(**{"hidden_size": 16, "conv_kernel": 4} | fields)


def test_an_unknown_unit_is_named():
    with pytest.raises(ValueError, match=r"'lstm'.*mingru"):
        MgradeModel(config("learned", recurrent_unit="lstm"))


def test_presets_of_the_paper_build_what_they_say():
    names = {name for name in preset_names() if name.split("-")[0] in ("mgrade", "tcn", "mingru")}
    assert {"mgrade-tiny", *PRINTED} <= names
    for name in names:
        preset = config_from_preset(name)
        assert (preset.recurrent_unit is None) == name.startswith("tcn")
        assert (preset.spacing is None) == name.startswith("mingru")
    assert config_from_preset("mgrade-smnist", hidden_size=24).hidden_size == 24


PROGRAM = """
import sys
for name in ("hf_recurrent", "modeling"):
    sys.modules[name] = None  # every import of it raises
import torch
from transformers import AutoModelForSequenceClassification
classifier = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(classifier).__module__.startswith("transformers_modules.")
print(classifier(input_values=torch.ones(1, 5, 2)).logits.sum().item())
"""


@torch.no_grad()
def test_classifiers_of_real_values_load_without_the_package(tmp_path, bare_python):
    classifier = model_of("tcn", torch.float32, MgradeForSequenceClassification, input_size=2, num_labels=4)
    classifier.save_pretrained(tmp_path)
    result = bare_python.python(["-c", PROGRAM, str(tmp_path)], tmp_path)
    assert result.returncode == 0, result.stderr
    expected = classifier(input_values=torch.ones(1, 5, 2)).logits.sum().item()
    assert float(result.stdout.split()[-1]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
