"""Models whose steps are exported, and the comparison of a step with `forward`."""

import torch
from model_cases import VARIANTS, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_recurrent import config_from_preset
from hf_recurrent.export.step_module import StepModule

BYTES = 400
# Presets of classifiers, and of models with other convolutions.
CLASSIFIERS = (
    "mgrade-smnist", "mgrade-scifar", "mgrade-scifar-learned", "tcn-smnist", "tcn-scifar", "mingru-smnist",
    "lru-scifar", "lru-imdb",
)  # fmt: skip
CASES = [*VARIANTS, *CLASSIFIERS, "memora base"]


def build(case, seed=0):
    """A tiny model in evaluation mode: of a variant, a classifier's preset with two layers, or without a head."""
    torch.manual_seed(seed)
    if case in CLASSIFIERS:
        config = config_from_preset(case, num_hidden_layers=2)
        model = AutoModelForSequenceClassification.from_config(config)
    elif case.endswith(" base"):
        config = tiny_model(case.removesuffix(" base"), num_hidden_layers=1).config
        model = AutoModel.from_config(config)
    else:
        model = tiny_model(case, num_hidden_layers=1)
        model = AutoModelForCausalLM.from_config(model.config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are 0 and 1 at first
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def run_card(folder, monkeypatch):
    """Run the Python examples of a folder's card."""
    monkeypatch.chdir(folder)
    examples = (folder / "README.md").read_text().split("```python")[1:]
    for example in examples:
        names = {}
        exec(example.split("```")[0], names)
        assert names["outputs"].shape[0] == 1
    return len(examples)


def random_inputs(model, *shape):
    """Token ids, or the real values that the model reads."""
    width = getattr(model.config, "input_size", None)
    if width is None:
        return torch.randint(1, model.config.vocab_size, shape)
    return torch.randn(*shape, width, dtype=model.dtype)


def state_of(model, streams, steps=0):
    """The state after random inputs."""
    backbone = getattr(model, "model", model)
    if not steps:
        return backbone.init_state(streams)
    with torch.no_grad():
        module = StepModule(model, takes_blocks=True)
        _, *state = module(random_inputs(model, streams, steps), *backbone.init_state(streams).values())
    return dict(zip(module.state_names, state, strict=True))


@torch.no_grad()
def check_step(step, model, tolerance=2e-4, count=BYTES, all_streams=(1, 3)):
    """`step`, as a function of inputs and state, gives the model's outputs and states, up to rounding that adds up."""
    forward = StepModule(model)
    # Here rounding grows from step to step, so each step starts from the model's own state.
    grows = getattr(model.config, "backbone", None) == "mlp"
    for streams in all_streams:
        state = expected_state = state_of(model, streams)
        for inputs in random_inputs(model, count // streams, streams):
            outputs, state = step(inputs, expected_state if grows else state)
            expected, *parts = forward(inputs, *expected_state.values())
            expected_state = dict(zip(expected_state, parts, strict=True))
            torch.testing.assert_close(outputs, expected, atol=tolerance, rtol=tolerance)
        assert list(state) == list(expected_state)
        for name in state:
            torch.testing.assert_close(state[name], expected_state[name], atol=tolerance, rtol=tolerance)


def as_step(program, model):
    """A program of `export_step` as a function of inputs and state."""
    module, names = program.module(), StepModule(model).state_names

    def step(inputs, state):
        outputs, *parts = module(inputs, *(state[name] for name in names))
        return outputs, dict(zip(names, parts, strict=True))

    return step
