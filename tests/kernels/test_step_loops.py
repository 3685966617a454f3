"""Loops of single steps look at all of the model every 64 bytes, and at once where it matters."""

import threading
from collections import Counter

import pytest
import torch
from model_cases import relative_difference, tiny_model
from test_compiled_step import needs_kernel
from torch import nn

from hf_recurrent import sample_continuations
from hf_recurrent.compression.predictors import FrozenPredictor
from hf_recurrent.modeling.step import single_step
from hf_recurrent.modeling.step.module_watch import ModuleWatch

pytestmark = needs_kernel
PROMPT = torch.tensor([list(b"import ")])
STEPS_PER_LOOK = 64  # as documented
CHANGED_AT = 2  # new bytes before a processor changes the model


@pytest.fixture
def looks(monkeypatch):
    """Counts complete looks at a model, by thread."""
    counts, look = Counter(), ModuleWatch.unchanged

    def unchanged(watch):
        counts[threading.get_ident()] += 1
        return look(watch)

    monkeypatch.setattr(ModuleWatch, "unchanged", unchanged)
    return counts


class At:
    """A logits processor that calls a function once, after some new bytes, and keeps the logits of all steps."""

    def __init__(self, function, new_bytes=CHANGED_AT):
        self.function, self.length, self.logits = function, PROMPT.shape[1] + new_bytes, []

    def __call__(self, input_ids, scores):
        self.logits.append(scores.clone())
        if input_ids.shape[1] == self.length:
            self.function()
        return scores


def generate(model, *processors, **options):
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 120} | options
    return model.generate(PROMPT, logits_processor=[*processors], **options)


def new_logits(model, text, first):
    """Logits (T, V) of the bytes from number `first` on, by the whole `forward` of the model as it is now."""
    with torch.no_grad():
        return model(text).logits[0, first:-1]


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"num_beams": 2}, {"return_dict_in_generate": True}, {"guidance_scale": 2.0}],
    ids=lambda options: "".join(options) or "greedy",
)
def test_few_bytes_look_at_all_of_the_model(options, looks):
    model = tiny_model("memora")
    generate(model, lambda input_ids, scores: scores, max_new_tokens=200, **options)
    loops = 2 if "guidance_scale" in options else 1
    assert 0 < sum(looks.values()) <= loops * (200 // STEPS_PER_LOOK + 1) + 2  # and after the loop


def test_other_loops_look_as_rarely(looks):
    model = tiny_model("memora")
    sample_continuations(model, PROMPT, 3, max_new_tokens=200, eos_token_id=None)
    assert 0 < sum(looks.values()) <= 200 // STEPS_PER_LOOK + 1
    looks.clear()
    predictor = FrozenPredictor(model)
    for byte in range(200):
        predictor.read(torch.tensor([byte]).numpy())
    assert 0 < sum(looks.values()) <= 200 // STEPS_PER_LOOK + 1


def change_in_place(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-0.7)


def replace_the_head(model):
    head = nn.Linear(16, 256, bias=False, dtype=model.dtype)
    head.weight.data = model.lm_head.weight.detach().roll(1, 0)
    model.lm_head = head


def add_a_hook(model):
    model.model.layers[0].recurrent_block.register_forward_hook(lambda module, inputs, output: (-output[0], output[1]))


def replace_a_map(model):
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Tanh())


def set_an_attribute(model):
    model.model.layers[1].recurrent_block.recurrent_unit.decay_scale = 0.1


def replace_a_tensor(model):
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = -weight.data


@pytest.mark.parametrize(
    ("change", "most_late"),
    [
        (change_in_place, 0),
        (replace_the_head, 0),
        (add_a_hook, 0),
        (replace_a_map, STEPS_PER_LOOK),
        (set_an_attribute, STEPS_PER_LOOK),
        (replace_a_tensor, STEPS_PER_LOOK),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changes_within_a_call_and_between_calls(change, most_late):
    model, late_model = tiny_model("memora", torch.float64), tiny_model("memora", torch.float64)
    seen = At(lambda: change(model))
    within = generate(model, seen)
    # The state before the change is that of the model as it was, and so are the steps until the change is seen.
    with torch.no_grad():
        start = late_model(within[:, : PROMPT.shape[1] + CHANGED_AT]).state
        late = []
        for number in range(most_late + 1):
            change(changed := tiny_model("memora", torch.float64))
            rest = within[:, PROMPT.shape[1] + CHANGED_AT :]
            before = late_model(rest[:, :number], state=start).state if number else start
            logits = changed(rest[:, number:-1], state=before).logits[0]
            actual = torch.cat(seen.logits)[CHANGED_AT + 1 + number :]
            late.append(relative_difference(actual, logits.float()) < 1e-6)
    assert any(late), "the change was never seen, or later than documented"
    # Between two calls, every change acts at once.
    again = At(lambda: None)
    text = generate(model, again, max_new_tokens=10)
    change(changed := tiny_model("memora", torch.float64))
    expected = new_logits(changed, text, PROMPT.shape[1] - 1)
    assert relative_difference(torch.cat(again.logits), expected.float()) < 1e-6


def test_another_mode_and_another_type_of_weights_act_at_once():
    model = tiny_model("memora")
    found = []
    note = lambda: found.append((model.training, single_step._steps[model]))  # noqa: E731
    generate(model, At(model.train, 10), At(note, 12), At(lambda: model.compile_step("int8"), 13), At(note, 15))
    (is_training, before), (_, after) = found
    assert is_training and before.watch.training
    assert after is not before and [step.weights for step in after.steps.values()] == ["int8"]


def test_calls_of_a_processor_see_each_change():
    """A processor that switches something off for its own calls, such as an adapter, and on again."""
    model, other = tiny_model("memora", torch.float64), tiny_model("memora", torch.float64)
    set_an_attribute(other)
    unit, states, differences = model.model.layers[1].recurrent_block.recurrent_unit, {}, []

    def compare(input_ids, scores):
        if input_ids.shape[1] < PROMPT.shape[1] + 5:  # the loop has looked at the model by then
            return scores
        scale = unit.decay_scale
        unit.decay_scale = 0.1
        own = model(input_ids[:, -1:], state=states.get("own"))
        unit.decay_scale = scale
        expected = other(input_ids[:, -1:], state=states.get("expected"))
        states.update(own=own.state, expected=expected.state)
        differences.append(relative_difference(own.logits, expected.logits))
        return scores

    seen, alone = At(lambda: None), At(lambda: None)
    generate(model, seen, compare, max_new_tokens=12)
    generate(tiny_model("memora", torch.float64), alone, max_new_tokens=12)
    assert len(differences) == 7 and max(differences) < 1e-10
    assert relative_difference(torch.cat(seen.logits), torch.cat(alone.logits)) < 1e-6


class Stop(Exception):
    """Raised by a processor."""


def test_an_exception_leaves_nothing(looks):
    def stop():
        raise Stop

    model = tiny_model("memora")
    with pytest.raises(Stop):
        generate(model, At(stop))
    looks.clear()
    with torch.no_grad():
        state = model(PROMPT).state
        for number in range(1, 4):
            state = model(PROMPT[:, :1], state=state).state
            assert sum(looks.values()) == number


def test_other_threads_look_at_each_byte(looks):
    model, byte = tiny_model("memora"), PROMPT[:, :1]
    with torch.no_grad():
        state = model(byte).state
        set_an_attribute(changed := tiny_model("memora"))
        expected = changed(byte, state=state).logits
    found = []

    @torch.no_grad()
    def read():
        found.extend(model(byte, state=state).logits for _ in range(5))

    def change_and_read():
        set_an_attribute(model)
        (thread := threading.Thread(target=read)).start()
        thread.join()

    generate(model, At(change_and_read))
    assert all(relative_difference(logits, expected) < 1e-5 for logits in found)
    looks.pop(threading.get_ident())
    assert len(found) == 5 and sum(looks.values()) == 5


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj"])
@pytest.mark.parametrize("size", [0, 8])
def test_freed_weights_are_an_error(name, size):
    model = tiny_model("memora")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    storage = model.get_submodule(name).weight.untyped_storage()
    with pytest.raises(ValueError, match=f"`{name}.weight` needs .* its memory was freed or shrunk"):
        generate(model, At(lambda: storage.resize_(size)))


def test_weights_whose_memory_was_moved_are_read_where_they_are():
    model = tiny_model("memora", torch.float64)
    weight = model.model.layers[0].mlp.up_proj.weight
    others = []

    @torch.no_grad()
    def move():
        values, size = weight.clone(), weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        others.extend(torch.full((size // 8,), torch.nan, dtype=torch.float64) for _ in range(9))
        weight.untyped_storage().resize_(size)
        weight.copy_(values)

    expected = generate(tiny_model("memora", torch.float64))
    seen = At(move)
    assert torch.equal(generate(model, seen), expected)
    assert torch.isfinite(torch.cat(seen.logits)).all()


def test_a_model_with_another_forward_gets_no_loop():
    model, forward = tiny_model("memora"), type(tiny_model("memora")).forward
    model.forward = (
        lambda input_ids, state=None, use_cache=None, logits_to_keep=0, attention_mask=None, return_dict=None: forward(
            model, input_ids, attention_mask, state, use_cache=use_cache, return_dict=return_dict
        )
    )
    assert torch.equal(generate(model, max_new_tokens=9), generate(tiny_model("memora"), max_new_tokens=9))
