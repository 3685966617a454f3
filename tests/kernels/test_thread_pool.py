"""The threads of kernels: their number, several calls at once, and a training whose bits do not depend on them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_recurrent.kernels.thread_count import beside_kernels, free_threads, num_threads, threads_for_kernels

pool = pytest.importorskip("hf_recurrent.kernels.thread_pool", reason="the kernel was not built")
training_cpu = pytest.importorskip("hf_recurrent.kernels.training_cpu", reason="the kernel was not built")


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_numbers_of_threads():
    torch.set_num_threads(3)
    assert num_threads() == free_threads() == 3
    with threads_for_kernels():
        assert torch.get_num_threads() == 1 and num_threads() == 3
        with beside_kernels():
            assert free_threads() == 2 and num_threads() == 3
        with threads_for_kernels():  # of an evaluation inside a training
            assert num_threads() == 3
    assert torch.get_num_threads() == num_threads() == 3
    torch.set_num_threads(1)
    with beside_kernels():
        assert free_threads() == 1


@pytest.mark.parametrize("uses_team", [False, True])
def test_calls_from_several_threads_while_the_cores_are_busy(uses_team):
    """More threads than cores, and programs that take the cores: the same bits, and every call ends."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 300, 300, generator=generator)

    def compute(_=None):
        product = torch.empty(300, 300)
        training_cpu.multiply([(x, weight.T, product, False)])
        return training_cpu.gated_norm(product, x, 1e-6)[0]

    torch.set_num_threads(1)
    expected, stop = compute(), threading.Event()

    def keep_busy():
        numbers = torch.ones(100_000)
        while not stop.is_set():
            numbers.mul_(1)

    try:
        pool.use_team(uses_team)
        torch.set_num_threads(3)
        with ThreadPoolExecutor(6) as threads:
            busy = [threads.submit(keep_busy) for _ in range(2)]
            found = list(threads.map(compute, range(200)))
            stop.set()
            assert [each.result() for each in busy] == [None, None]
    finally:
        stop.set()
        pool.use_team(pool.openmp_waits_long())
    assert all(torch.equal(each, expected) for each in found)
