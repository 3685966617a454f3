"""Exported steps and blocks against the model: outputs and states, of every family, unit, backbone and classifier."""

import pytest
import torch
from export_cases import CASES, as_step, build, check_step, random_inputs, state_of

from hf_recurrent import export_block, export_step
from hf_recurrent.export.programs import scan_by_doubling
from hf_recurrent.export.step_module import StepModule
from hf_recurrent.modeling.scan.linear_scan import linear_scan_reference
from hf_recurrent.modeling.step import single_step


def cases(*quick):
    """All cases, of which a few belong to the default run."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in CASES]


@pytest.mark.parametrize("case", cases("lru"))
def test_a_step_is_that_of_the_model(case):
    model = build(case)
    program = export_step(model)
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(value.is_complex() for value in values if isinstance(value, torch.Tensor))
    check_step(as_step(program, model), model)


@pytest.mark.long
@pytest.mark.parametrize("case", cases("mgrade", "memora+indrnn"))
def test_a_block_is_that_of_the_model(case):
    model = build(case).double()
    program, forward = export_block(model), StepModule(model, takes_blocks=True)
    module = program.module()
    for streams, steps in ((1, 1), (3, 1), (3, 2), (1, 5), (3, 50)):
        inputs, state = random_inputs(model, streams, steps), state_of(model, streams, 7)
        with torch.no_grad():
            found, expected = module(inputs, *state.values()), forward(inputs, *state.values())
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_scan_by_doubling(steps, dtype):
    a, b = torch.randn(2, 2, steps, 5, dtype=dtype)
    a[:, ::3, 0] = 0
    state, resets = torch.randn(2, 5, dtype=dtype), torch.rand(2, steps) < 0.2
    for mask in (None, resets):
        found, expected = scan_by_doubling(a, b, state, mask), linear_scan_reference(a, b, state, mask)
        torch.testing.assert_close(found, expected)


def test_a_classifier_gives_the_logits_of_each_step():
    model = build("mgrade-smnist").train()
    program = export_step(model).module()
    assert all(part.training for part in model.modules())
    model.eval()
    values = torch.randn(2, 30, model.config.input_size)
    state, logits = list(model.model.init_state(2).values()), []
    with torch.no_grad():
        for value in values.unbind(1):
            step, *state = program(value, *state)
            logits.append(step)
        pooled = torch.stack(logits).mean(0) if model.config.pooling == "mean" else logits[-1]
        torch.testing.assert_close(pooled, model(input_values=values).logits, atol=1e-5, rtol=1e-5)


def test_models_that_cannot_be_exported_are_named():
    with pytest.raises(TypeError, match="`model` is a Linear; it must be a recurrent model"):
        export_step(torch.nn.Linear(2, 2))
    for export in (export_step, export_block):
        with pytest.raises(ValueError, match="`weights` is 'int3'; it must be one of 'bfloat16', 'int8', or None"):
            export(build("memora"), weights="int3")


def test_the_recorded_graph_and_the_exported_one_compute_the_same():
    model = build("hawk")
    module = StepModule(model)
    ids, state = torch.tensor([[65], [66]]), model.init_state(2)
    with torch.no_grad():
        compiled = single_step.find_single_step(model, ids)
        if compiled is None:
            pytest.skip("the kernel was not built")
        logits, new_state = compiled.run(model, ids, state)
        expected, *parts = export_step(model).module()(ids[:, 0], *state.values())
    torch.testing.assert_close(logits[:, 0], expected, atol=1e-5, rtol=1e-5)
    for name, part in zip(module.state_names, parts, strict=True):
        torch.testing.assert_close(new_state[name], part, atol=1e-5, rtol=1e-5)
