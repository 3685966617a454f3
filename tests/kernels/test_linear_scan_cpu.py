"""The compiled CPU kernel: every type and instruction set, strides, threads and processes."""

import gc
import os
import random
import threading

import pytest
import torch
from test_linear_scan import TOLERANCE, assert_close, expected, make_inputs, run

from hf_recurrent.kernels.output_memory import OutputMemory
from hf_recurrent.modeling.scan.linear_scan import available_backends, linear_scan

try:
    from hf_recurrent.kernels import linear_scan_cpu as kernels
except ImportError as error:
    kernels, missing = None, str(error)
else:
    missing = ""
needs_kernel = pytest.mark.skipif(kernels is None, reason=f"no compiled kernel here: {missing}")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

LEVELS = (0, 1, 2)  # of instructions; see instruction_level
SHARED = (5, 23, 771)  # more elements than one thread keeps for itself, fewer streams than a multiple of threads
PAST_THE_CACHE = (2, 1400, 768)  # results so large that they are written past the cache


@pytest.fixture(params=LEVELS)
def level(request):
    if kernels is None:
        pytest.skip(f"no compiled kernel here: {missing}")
    before = kernels.instruction_level()
    try:
        if kernels.instruction_level(request.param) != request.param:
            pytest.skip("this CPU does not have these instructions")
        yield request.param
    finally:
        kernels.instruction_level(before)


@pytest.fixture
def threads():
    """A function that sets torch's number of threads for the length of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def on_kernel(*inputs):
    return run(linear_scan, *inputs, backend="cpu")


def directly(a, b, state, mask, grad_h, grad_final):
    """The kernel itself, where linear_scan has a shorter way for small T = 1."""
    h, final = kernels.scan_forward(a, b, state, mask)
    return h, final, *kernels.scan_backward(a, h, state, mask, grad_h, grad_final)


def same(actual, wanted):
    return all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("resets", ["none", "random", "all", "first"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 3), (2, 33, 17), (1, 5, 257), (3, 2, 768)], ids=str)
def test_matches_the_loop_in_double_precision(shape, dtype, resets, level):
    inputs = make_inputs(shape, dtype, resets)
    h, final, *grads = outputs = directly(*inputs)
    assert h.dtype == dtype and final.dtype == torch.promote_types(dtype, torch.float32)
    assert [x.dtype for x in grads] == [dtype, dtype, final.dtype]
    assert_close(outputs, expected(inputs), TOLERANCE[dtype])


# Enough for one step to go through the kernel, however many threads there are.
LARGE_STEP = 1 << 19


@needs_kernel
def test_auto_takes_the_kernel(monkeypatch):
    assert "cpu" in available_backends()
    calls = []
    scan_forward = kernels.scan_forward
    monkeypatch.setattr(kernels, "scan_forward", lambda *args: calls.append(args[0].shape) or scan_forward(*args))
    for steps, width in ((2, 3), (1, LARGE_STEP), (1, 3)):
        linear_scan(torch.rand(1, steps, width), torch.rand(1, steps, width))
    compiled = torch.compile(linear_scan, fullgraph=True, backend="aot_eager")
    compiled(torch.rand(1, 4, 2), torch.rand(1, 4, 2))
    assert calls == [(1, 2, 3), (1, 1, LARGE_STEP), (1, 4, 2)]


@needs_kernel
@pytest.mark.parametrize("resets", ["none", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_one_large_step_through_autograd(dtype, resets):
    assert kernels.takes_single_steps(LARGE_STEP, False) and not kernels.takes_single_steps(1, True)
    inputs = make_inputs((2, 1, LARGE_STEP // 2), dtype, resets)
    assert_close(on_kernel(*inputs), expected(inputs), TOLERANCE[dtype])


def loop(a, b):
    """h of one stream from a state of zero, in numpy and float64."""
    a, h = a.double().numpy(), b.double().numpy().copy()
    for t in range(1, len(h)):
        h[t] += a[t] * h[t - 1]
    return torch.from_numpy(h)


@needs_kernel
@pytest.mark.parametrize("memory", [1e2, 1e4, 1e6])
def test_long_sequences(memory):
    """Decays down from 1 by 1 / memory at most: errors of that many steps would add up, and do not."""
    a, b, state, _, grad_h, grad_final = make_inputs((1, 65_536, 17))
    a = 1 - torch.rand(a.shape, generator=torch.Generator().manual_seed(1)) / memory
    inputs = (a, b, torch.zeros_like(state), None, grad_h, grad_final)
    outputs, exact = on_kernel(*inputs), on_kernel(*(x if x is None else x.double() for x in inputs))
    wanted = loop(a[0], b[0])
    assert (exact[0][0] - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    assert_close(outputs, exact, 1e-7)  # the exact gradients are tied to finite differences in test_linear_scan.py


@pytest.mark.sampled(3)
@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("width", [37, 1024])  # the wide one is written past the cache
def test_many_steps_are_rounded_once(width, dtype, level):
    wide = torch.complex128 if dtype.is_complex else torch.float64
    inputs = make_inputs((2, kernels._WIDE_STEPS, width), dtype=dtype, resets="random")
    outputs = on_kernel(*inputs)
    exact = on_kernel(*(x.to(wide) if x.dtype == dtype else x for x in inputs))
    assert {x.dtype for x in outputs} == {dtype}
    assert torch.equal(outputs[1], outputs[0][:, -1])
    assert_close(outputs, exact, 1.5e-7)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_are_computed_as_float32_and_rounded_once(dtype):
    inputs = make_inputs((2, 300, 40), dtype, "random")
    h, final, _, grad_b, grad_state = on_kernel(*inputs)
    wide = on_kernel(*(x if x.dtype == torch.bool else x.float() for x in inputs))
    assert torch.equal(h, wide[0].to(dtype)) and torch.equal(final, wide[1])
    assert torch.equal(grad_b, wide[3].to(dtype)) and torch.equal(grad_state, wide[4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_of_narrow_types(dtype, level):
    """Every number that such a type has comes back; float32 is rounded as torch does it."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 1, -1)
    nothing = torch.zeros(1, 2**16)
    h, final = kernels.scan_forward(torch.zeros_like(every), every, nothing, None)
    assert torch.equal(h.isnan(), every.isnan()) and torch.equal(h[~h.isnan()], every[~every.isnan()])
    assert torch.equal(final[0].nan_to_num(7), every[0, 0].float().nan_to_num(7))
    bits = torch.randint(-(2**31), 2**31, (1, 2**16), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    state = bits.to(torch.int32).view(torch.float32)
    near = torch.linspace(-70_000, 70_000, 2**15) * 2.0 ** torch.randint(-40, 1, (2**15,))
    halfway = every[0, 0].float()[: 2**13].nan_to_num(0, 0, 0) * (1 + 2.0**-9)  # ties of bfloat16
    state = torch.cat((state, near.view(1, -1), halfway.view(1, -1)), dim=1)
    ones = torch.ones(1, 1, state.shape[1], dtype=dtype)
    h, _ = kernels.scan_forward(ones, torch.zeros_like(ones), state, None)
    assert torch.equal(h[0, 0].nan_to_num(7), state[0].to(dtype).nan_to_num(7))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("width", [768, 771])  # rows of whole cache lines and others
def test_large_results_are_those_of_small_pieces(width, dtype, level, monkeypatch):
    """Large ones are written past the cache, into memory that is used again."""
    monkeypatch.setattr(kernels, "_WIDE_STEPS", 10**9)  # else the small ones are rounded more often
    batch, steps = 2, 2 * kernels._BYPASS_BYTES // (2 * width * dtype.itemsize) + 3
    wide = torch.promote_types(dtype, torch.float32)
    a = torch.rand(batch, steps, width).to(dtype)
    b, grad_h = (torch.randn(batch, steps, width).to(dtype) for _ in range(2))
    state = torch.randn(batch, width).to(wide)
    for _ in range(2):
        h, final = kernels.scan_forward(a, b, state, None)
        grad_a, grad_b, grad_state = kernels.scan_backward(a, h, state, None, grad_h, None)
    pieces = [slice(start, start + 97) for start in range(0, steps, 97)]
    carried, starts = state, []
    for piece in pieces:
        starts.append(carried)
        out, carried = kernels.scan_forward(a[:, piece], b[:, piece], carried, None)
        assert torch.equal(out, h[:, piece])
    assert torch.equal(carried, final)
    carried = None
    for piece, start in zip(reversed(pieces), reversed(starts), strict=True):
        part_a, part_b, carried = kernels.scan_backward(
            a[:, piece], h[:, piece], start, None, grad_h[:, piece], carried
        )
        assert torch.equal(part_b, grad_b[:, piece])
        first = int(piece.start > 0 and dtype != wide)  # there h_{t-1} is the start, which is not rounded
        assert torch.equal(part_a[:, first:], grad_a[:, piece][:, first:])
    assert torch.equal(carried, grad_state)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("steps", [1, 3, 50])
def test_a_reset_forgets_infinities_and_nan(steps, dtype):
    a, b, state, _, grad_h, grad_final = make_inputs((2, steps, 70), dtype)
    mask = torch.zeros(2, steps, dtype=torch.bool)
    mask[0, 0] = mask[1, steps // 2] = True
    state[0, 0], state[0, 1] = float("nan"), float("inf")
    if steps > 2:
        b[1, steps // 2 - 1] = float("nan")
    h, final, grad_a, grad_b, grad_state = directly(a, b, state, mask, grad_h, grad_final)
    assert h[0].isfinite().all() and h[1, steps // 2 :].isfinite().all() and final.isfinite().all()
    assert grad_b.isfinite().all() and grad_state.isfinite().all()
    assert (grad_a[mask] == 0).all() and (grad_state[0] == 0).all()
    grad_h[:, steps // 2 :] = float("nan")
    *_, grad_a, _, _ = directly(a, b, state, mask, grad_h, grad_final)
    assert (grad_a[mask] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


STRIDES = {
    "part of the steps": lambda x: x.repeat_interleave(3, 1)[:, ::3],
    "part of the streams": lambda x: x.repeat_interleave(2, 0)[::2],
    "part of the channels": lambda x: torch.cat((x, x), dim=2)[:, :, : x.shape[2]],
    "every other channel": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "steps first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", STRIDES)
def test_any_strides(layout, dtype):
    a, b, state, mask, grad_h, grad_final = inputs = make_inputs((3, 6, 70), dtype, "random")
    a, b, grad_h = (STRIDES[layout](x) for x in (a, b, grad_h))
    assert not a.is_contiguous()
    state, grad_final = (x.t().contiguous().t() for x in (state, grad_final))
    assert same(directly(a, b, state, mask.t().contiguous().t(), grad_h, grad_final), directly(*inputs))
    h, _ = kernels.scan_forward(*inputs[:4])
    outputs = kernels.scan_backward(a, STRIDES[layout](h), state, mask, grad_h, None)
    assert same(outputs, kernels.scan_backward(inputs[0], h, state, mask, inputs[4], None))


@needs_kernel
@pytest.mark.parametrize("shape", [(1, 1, 70), (3, 1, 1), (1, 6, 1), (1, 1, 1)], ids=str)
def test_expanded_inputs(shape):
    b, state, grad_final = torch.randn(3, 6, 70), torch.randn(1, 70).expand(3, 70), torch.randn(1).expand(3, 70)
    a, grad_h, mask = torch.rand(shape).expand_as(b), torch.randn(shape).expand_as(b), torch.ones(1, 1, dtype=bool)
    inputs = (a, b, state, mask.expand(3, 6), grad_h, grad_final)
    assert same(directly(*inputs), directly(*(x.contiguous() for x in inputs)))
    leaf = a.clone().requires_grad_()
    h, final = linear_scan(leaf, b, backend="cpu")
    (h.sum() + final.sum()).backward()  # whose gradients are expanded numbers
    wanted = expected((a.contiguous(), b, torch.zeros(3, 70), None, torch.ones_like(b), torch.ones(3, 70)))
    assert (leaf.grad - wanted[2]).abs().max() <= 2e-6 * wanted[2].abs().max()


@needs_kernel
def test_lazy_negation_and_conjugation():
    inputs = make_inputs((2, 9, 5), torch.complex64, "random")
    lazy = [x if x.dtype == torch.bool else x.conj() for x in inputs]
    assert same(directly(*lazy), directly(*(x.resolve_conj() for x in lazy)))
    negative = [x if x.dtype == torch.bool else x.imag for x in lazy]
    assert negative[0].is_neg()
    assert same(directly(*negative), directly(*(x.resolve_neg() for x in negative)))


@needs_kernel
def test_inference_mode_and_another_default_device():
    inputs = make_inputs(PAST_THE_CACHE)[:3]
    wanted = kernels.scan_forward(*inputs, None)
    with torch.inference_mode():
        assert same(linear_scan(*inputs), wanted)
    with torch.device("meta"):
        assert same(kernels.scan_forward(*inputs, None), wanted)


# ---------------------------------------------------------------------------------------------------------------------
# Threads and processes


@needs_kernel
@pytest.mark.parametrize("resets", ["none", "random"])
@pytest.mark.parametrize("shape", [SHARED, (300, 1, 768)], ids=str)
def test_threads_change_no_bit(shape, resets, threads):
    inputs = make_inputs(shape, resets=resets)
    threads(1)
    wanted = directly(*inputs)
    for number in (1, 2, 3, 7):
        threads(number)
        for _ in range(5):
            assert same(directly(*inputs), wanted)


@needs_kernel
def test_threads_treat_subnormal_numbers_as_their_caller(threads):
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        threads(4)
        a, b = torch.full(SHARED, 1e-3), torch.full(SHARED, 1e-36)
        h, _ = linear_scan(a * 0.5, b * 1e-2, backend="cpu")
        assert (h == 0).all()
    finally:
        torch.set_flush_denormal(False)


@needs_kernel
def test_several_python_threads_at_once(threads):
    threads(2)
    inputs = make_inputs(SHARED, resets="random")
    wanted, good = directly(*inputs), []

    def caller():
        torch.set_num_threads(2)
        good.append(all(same(directly(*inputs), wanted) for _ in range(25)))

    callers = [threading.Thread(target=caller, daemon=True) for _ in range(5)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=60)
    assert good == [True] * 5


# torch's own operations hang in a forked child that asks for more than one thread (libgomp cannot be forked): in the
# children below nothing but the kernel runs on tensors of this size.


class ScanDataset(torch.utils.data.Dataset):
    """Items that need the scan, computed in the loader's workers."""

    def __init__(self):
        self.decay, self.inputs = torch.full(SHARED, 0.5), [torch.full(SHARED, float(i)) for i in range(4)]

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        torch.set_num_threads(2)
        return kernels.scan_forward(self.decay, self.inputs[index], torch.zeros(SHARED[0], SHARED[2]), None)[1]


@needs_kernel
@needs_fork
def test_workers_of_a_data_loader(threads):
    threads(2)
    dataset = ScanDataset()
    wanted = [dataset[index] for index in range(4)]  # so that the parent has threads, which a fork does not copy
    loader = torch.utils.data.DataLoader(dataset, num_workers=2, multiprocessing_context="fork", timeout=20)
    assert torch.equal(torch.cat(list(loader)), torch.stack(wanted))


def send_scan(connection, inputs):
    torch.set_num_threads(2)
    connection.send_bytes(b"".join(x.numpy().tobytes() for x in directly(*inputs)))


@needs_kernel
@needs_fork
@pytest.mark.filterwarnings("ignore")  # the test forks a process with threads
def test_a_fork_while_other_threads_compute(threads):
    threads(2)
    inputs = make_inputs(SHARED)
    wanted = b"".join(x.numpy().tobytes() for x in directly(*inputs))
    stop = threading.Event()

    def keep_busy():
        torch.set_num_threads(2)
        while not stop.is_set():
            directly(*inputs)

    busy = threading.Thread(target=keep_busy, daemon=True)
    busy.start()
    context = torch.multiprocessing.get_context("fork")
    try:
        for _ in range(3):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=send_scan, args=(sender, inputs), daemon=True)
            child.start()
            answered = receiver.poll(20)
            if not answered:
                child.kill()
            assert answered, "the child hangs"
            assert receiver.recv_bytes() == wanted
            child.join(timeout=20)
            assert child.exitcode == 0
    finally:
        stop.set()
        busy.join(timeout=20)


# ---------------------------------------------------------------------------------------------------------------------
# Memory of large results


def make_memory(kept=1 << 24):
    fresh = []
    return OutputMemory(on_new=lambda block: fresh.append(block.nbytes), kept=kept), fresh


def test_memory_returns_with_its_last_tensor():
    memory, fresh = make_memory()
    shape = torch.Size((3, 1 << 18))
    first, second = memory.empty(shape, torch.float32), memory.empty(shape, torch.bfloat16)
    assert first.is_contiguous() and not first._is_view() and first.dtype == torch.float32 and first.shape == shape
    assert first.data_ptr() % 64 == 0 and len(fresh) == 2
    address, part = first.data_ptr(), first[2, 5:7]
    part.fill_(3)
    del first
    gc.collect()
    other = memory.empty(shape, torch.float32)
    assert other.data_ptr() != address and part.tolist() == [3, 3]
    del part
    gc.collect()
    assert memory._unused_bytes == fresh[0]
    assert memory.empty(shape, torch.float32).data_ptr() == address
    assert len(fresh) == 3 and second.dtype == torch.bfloat16


def test_blocks_of_other_sizes_do_not_pile_up():
    memory, fresh = make_memory(kept=1 << 30)
    generator, most = random.Random(0), 0
    sizes = [generator.randint(1 << 20, 1 << 24) for _ in range(200)]
    for size in sizes:
        tensor = memory.empty(torch.Size((size,)), torch.uint8)
        most = max(most, memory._used_bytes)
        del tensor
        assert memory._unused_bytes <= 1.125 * most
    assert len(fresh) < len(sizes)  # a tensor may lie in the memory of a larger one


def test_memory_from_several_threads():
    memory, errors = OutputMemory(on_new=lambda block: None, kept=1 << 22), []

    def work(seed):
        generator = random.Random(seed)
        try:
            kept = []
            for _ in range(400):
                tensor = memory.empty(torch.Size((generator.randint(1 << 15, 1 << 17),)), torch.float32)
                tensor[:: 1 << 12] = seed
                kept.append(tensor)
                if len(kept) > 5:
                    tensor = kept.pop(generator.randrange(5))
                    assert (tensor[:: 1 << 12] == seed).all()
        except Exception as error:  # shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert errors == [] and memory._used_bytes == 0 and memory._unused_bytes <= 1 << 22
    assert memory._unused_bytes == sum(block.nbytes for block in memory._free.values())


def test_unused_memory_is_limited():
    memory, fresh = make_memory(kept=5 << 20)
    tensors = [memory.empty(torch.Size((1 << 19,)), torch.float32) for _ in range(4)]
    assert fresh == [2 << 20] * 4
    last = tensors[-1].data_ptr()
    while tensors:
        tensors.pop(0)
    gc.collect()
    assert memory._unused_bytes == 4 << 20
    assert memory.empty(torch.Size((1 << 19,)), torch.float32).data_ptr() == last


def test_small_tensors_are_left_to_torch():
    memory, fresh = make_memory()
    assert memory.empty(torch.Size((2, 3)), torch.float64).shape == (2, 3) and fresh == []
