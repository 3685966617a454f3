"""The compiled pass over sensitivities against plain torch and float64, and its threads."""

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_recurrent.learning_rules import sensitivities as module


@pytest.mark.skipif(module.sensitivities_cpu is None, reason="the kernel was not built")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_compiled_kernel_is_plain_torch(dtype, threads, monkeypatch):
    monkeypatch.setattr(module.sensitivities_cpu, "_SERIAL_ELEMENTS", 0)
    torch.set_num_threads(threads)
    results = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(module, "sensitivities_cpu", None)
        generator = torch.Generator().manual_seed(0)

        def random(*shape, generator=generator):
            return torch.randn(*shape, generator=generator, dtype=dtype)

        # Odd sizes, streams that go past by four and one, and two rows of the map in each group.
        carried, gradient = random(7, 1, 2, 7, 19), random(2, 7, 19)
        derivative = module.Derivative(random(7, 1, 1, 2, 7), random(7, 1, 19))
        for with_gradient in (gradient, None):
            grad_state = None if with_gradient is None else random(7, 1, 7)
            module._advance_matrix(carried, random(7, 1, 1, 7), derivative, grad_state, with_gradient)
        results.append((carried, gradient))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(module.sensitivities_cpu is None, reason="the kernel was not built")
@pytest.mark.parametrize("streams", [1, 4, 6])
@pytest.mark.parametrize(("rows", "columns"), [(3, 15), (3, 16), (5, 33), (300, 512)])
def test_the_compiled_kernel_against_float64(streams, rows, columns):
    """Whole and partial lines and groups of streams; 300 rows of 512 are several parts."""
    shapes = [(streams, 1, 1, rows, columns), (streams, 1, 1, rows), (streams, 1, 1, 1, rows)]
    shapes += [(streams, 1, columns), (streams, 1, rows), (1, rows, columns)]
    given = [
        torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number, shape in enumerate(shapes)
    ]
    carried, transition, of_rows, inputs, grad_state, gradient = map(torch.Tensor.double, given)
    past = torch.einsum("bcg,bcrgi->rgi", grad_state, carried)
    after = transition[..., None] * carried + of_rows.view(transition.shape)[..., None] * inputs.view(
        streams, 1, 1, 1, -1
    )
    module.sensitivities_cpu.advance(*given)
    torch.testing.assert_close(given[0].double(), after, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given[5].double(), gradient + past, rtol=1e-6, atol=1e-6 * streams)


def test_threads_change_no_bit_of_the_compiled_kernel():
    """In the pool, on OpenMP's threads, and called from several threads at once."""
    kernel = pytest.importorskip("hf_recurrent.kernels.sensitivities_cpu")
    pool = importlib.import_module("hf_recurrent.kernels.thread_pool")

    def advance(_=None):
        generator = torch.Generator().manual_seed(0)
        shapes = [(8, 1, 2, 300, 64), (8, 1, 1, 300), (8, 1, 1, 2, 300), (8, 1, 64), (8, 1, 300), (2, 300, 64)]
        carried, *others, gradient = (torch.randn(shape, generator=generator) for shape in shapes)
        for _ in range(5):
            kernel.advance(carried, *others, gradient)
        return carried, gradient

    def same(results):
        return all(map(torch.equal, results, expected))

    torch.set_num_threads(1)
    expected = advance()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "_SERIAL_ELEMENTS", 0)
            for is_used in (False, True):
                pool.use_team(is_used)
                for threads in (2, 3, 16):
                    torch.set_num_threads(threads)
                    assert same(advance()), threads
                with ThreadPoolExecutor(4) as threads:
                    assert all(map(same, threads.map(advance, range(20))))
    finally:
        pool.use_team(pool.openmp_waits_long())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"GOMP_SPINCOUNT": "1000"}, False),
        ({"GOMP_SPINCOUNT": "infinity"}, True),
        ({"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "passive"}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "active"}, True),
    ],
)
def test_openmp_threads_are_used_where_they_wait_in_a_loop(variables, expected, monkeypatch):
    pool = importlib.import_module("hf_recurrent.kernels.thread_pool")
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert pool.openmp_waits_long() is expected


def test_what_the_compiled_kernel_leaves_to_torch():
    kernel = pytest.importorskip("hf_recurrent.kernels.sensitivities_cpu")
    assert kernel.can_advance(torch.zeros(2, 1, 1, 3, 4), 1)
    assert not kernel.can_advance(torch.zeros(2, 1, 1, 3, 4), 2)
    assert not kernel.can_advance(torch.zeros(2, 2, 2, 3, 4), 1)
    assert not kernel.can_advance(torch.zeros(2, 1, 1, 3, 4, dtype=torch.bfloat16), 1)
    assert not kernel.can_advance(torch.zeros(2, 1, 1, 4, 3).transpose(3, 4), 1)
