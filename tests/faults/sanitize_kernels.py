"""Run all compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/faults/sanitize_kernels.py --cases 1000

The kernels are compiled into a temporary folder, once as usual and once without instruction sets beyond the baseline,
and run on many shapes, types and values, and on the cases of fuzz_forward.py. Without a compiler that has sanitizers,
this is said and nothing runs.
"""

import argparse
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hf_recurrent" / "kernels"
NAMES = (
    "count_memory_cpu", "count_memory_large_cpu", "count_memory_small_cpu", "linear_scan_cpu", "sensitivities_cpu",
    "step_cpu", "thread_pool_cpu", "training_cpu",
)  # fmt: skip
FLAGS = [
    "-std=c11", "-O1", "-g", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-fPIC",
    "-shared", "-D_GNU_SOURCE", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
]  # fmt: skip
INSTRUCTION_SETS = "#if defined(__x86_64__) && defined(__GNUC__)\n"


def compiler() -> tuple[str, list[str]]:
    """The C compiler, and the libraries that a program needs from its start; exits where there are none."""
    command = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) or shutil.which("cc")
    if command is None:
        leave("there is no C compiler")
    libraries = []
    for name in ("libasan.so", "libstdc++.so.6"):  # the second, because torch throws exceptions
        found = subprocess.run([command, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(found) or not os.path.exists(found):
            leave(f"{command} has no {name}")
        libraries.append(os.path.realpath(found))
    return command, libraries


def leave(reason: str) -> None:
    print(f"not run: {reason}")
    sys.exit()


def build(command: str, folder: Path, *, baseline: bool) -> None:
    """Compile the kernels into `folder`."""
    for source in SOURCES.glob("*.[ch]"):
        text = source.read_text(encoding="utf-8")
        text = text.replace(INSTRUCTION_SETS, "#if 0\n") if baseline else text
        (folder / source.name).write_text(text, encoding="utf-8")
    for name in NAMES:
        source = folder / f"{name}.c"
        library = folder / f"_{name}.so"
        done = subprocess.run([command, *FLAGS, source, "-o", library, "-lm"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{source.name} does not compile: {done.stderr}")


# ---- In the process with the sanitizers ----------------------------------------------------------------------------


def use_libraries(folder: Path) -> None:
    """From here on, the package loads the kernels of that folder."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None):
        if not name.startswith("hf_recurrent.kernels._"):
            return find_spec(name, package)
        return SimpleNamespace(origin=str(folder / f"{name.rpartition('.')[2]}.so"))

    importlib.util.find_spec = find


def exercise(folder: Path, cases: int) -> None:
    use_libraries(folder)
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests" / "modeling")]
    import torch

    from hf_recurrent.kernels import (
        block_cpu,
        count_memory_cpu,
        linear_scan_cpu,
        sensitivities_cpu,
        step_cpu,
        thread_pool,
        training_cpu,
    )

    for kernel in (
        block_cpu, count_memory_cpu, linear_scan_cpu, sensitivities_cpu, step_cpu, thread_pool, training_cpu
    ):  # fmt: skip
        assert kernel._library._name.startswith(str(folder)), kernel._library
    torch.manual_seed(0)
    torch.set_num_threads(3)
    counts = scan_everything(linear_scan_cpu), run_programs(step_cpu), advance_everything(sensitivities_cpu)
    counts += (train_everything(training_cpu, thread_pool),)
    torch.set_num_threads(1)
    counts += (learn_blocks(), learn_streams())
    assert count_memory_cpu.large_library()._name.startswith(str(folder))
    sizes = {}, {"large": True}, {"small": True}
    counts += tuple(sum(run(count_memory_cpu, size) for size in sizes) for run in (read_counts, code_bytes))
    import fuzz_forward

    fuzz_forward.prepare()
    for number in range(cases):
        fuzz_forward.judge(fuzz_forward.case_of(7, number))
    kinds = "{} scans, {} programs, {} passes, {} parts of training steps, {} blocks, {} streams, "
    kinds += "{} read blocks, {} coded pieces,"
    print(kinds.format(*counts), cases, "fuzzed cases")


def train_everything(kernel, pool) -> int:
    """Every part, type and instruction set, in the pool and on OpenMP's threads, on shapes with and without rests."""
    import torch

    count = 0
    kernel._SERIAL_ELEMENTS = kernel._SERIAL_PRODUCTS = 64  # threads from here on
    shapes = [(1, 1), (15, 33), (65, 17), (130, 96)]
    for dtype, (rows, width), level in itertools.product(kernel._TYPES, shapes, range(3)):
        if kernel.instruction_level(level) != level:
            continue
        pool.use_team(rows == 65)
        x, y, z, grad, other = (odd_values(torch.randn(rows, width, dtype=dtype)) for _ in range(5))
        for columns in (1, 33, 70):
            weight, of_output = torch.randn(columns, width, dtype=dtype), torch.randn(rows, columns, dtype=dtype)
            output, of_weight, of_x = (
                torch.empty(*size, dtype=dtype) for size in (of_output.shape, weight.shape, x.shape)
            )
            gradients = [(of_output, weight, of_x, False), (of_output, weight, of_x, True)]
            gradients.append((of_output.T, x, of_weight, False))
            for rounded in {False, dtype == torch.float32 and kernel.has_bf16_products()}:
                kernel.multiply([(x, weight.T, output, False)], rounded=rounded)
                kernel.multiply(gradients, rounded=rounded)
        output, moments = kernel.gated_norm(x, y, 1e-6)
        kernel.gated_norm_backward(x, y, moments, grad, 1e-6)
        kernel.gated_gelu(x, y)
        kernel.gated_gelu_backward(x, y, grad)
        kernel.gate_coefficients(x, y[0].abs(), y, z)
        kernel.gate_coefficients_backward(x, y[0].abs(), y, z, grad, other)
        for vector in (None, y[0]):
            output, scales = kernel.rms_norm(x, vector, 1e-6)
            kernel.rms_norm_backward(x, vector, scales, grad, 1e-6)
        for mask in (None, torch.rand(1, rows) < 0.3):
            convolution = (
                x[None],
                z[None, :3].repeat(1, 3, 1)[:, :3].contiguous(),
                torch.randn(4, width, dtype=dtype),
                mask,
            )
            kernel.temporal_convolution(*convolution)
            kernel.temporal_convolution_backward(*convolution, grad[None])
        targets = torch.randint(0, width, (rows,))
        targets[0] = -100
        kept = kernel.cross_entropy(x, targets, -100)[1]
        kernel.cross_entropy_backward(x, targets, kept, grad[:, 0])
        lookups = torch.randint(0, rows, (2 * rows, 3))
        kernel.table_sum(x, lookups)
        found, values = kernel.table_gradient(x, lookups, torch.randn(2 * rows, width, dtype=dtype))
        kernel.add_rows([(found, values), (found[1:], values[1:])])
        kernel.table_adagrad(x, torch.ones(rows, dtype=dtype), found, values, 0.1, 1e-10)
        count += 1
    pool.use_team(False)
    return count + run_layers(kernel)


def run_layers(kernel) -> int:
    """Layers of odd sizes, with resets, in every type and instruction set."""
    import torch

    from hf_recurrent.kernels import hawk_layer_cpu, layer_cpu, memora_layer_cpu
    from hf_recurrent.kernels.chains import Rows

    count, families, blocks = 0, [(memora_layer_cpu, 0), (hawk_layer_cpu, 4)], [(5, 64), (3, 128), (7, 16), (67, 1)]
    for (family, lags), dtype, block, level in itertools.product(families, kernel._TYPES, blocks, range(3)):
        if kernel.instruction_level(level) != level:
            continue
        sizes = layer_cpu.Sizes(Rows(*block), 17, 35, 50, lags, dtype)
        of_weights, of_states, of_last = family.KIND.shapes(sizes)
        weights = family.Weights(*(torch.randn(shape, dtype=dtype) for shape in of_weights))
        weights.rate.abs_()
        hidden, grad = (torch.randn(*block, sizes.model, dtype=dtype) for _ in range(2))
        states, grad_last = ([torch.randn(shape, dtype=dtype) for shape in each] for each in (of_states, of_last))
        eps, wanted = family.Epsilons(*[1e-6] * len(family.Epsilons._fields)), [True] * len(weights)
        for mask, rounded in itertools.product([None, torch.rand(block) < 0.1], [False, True]):
            if rounded and not (dtype == torch.float32 and kernel.has_bf16_products()):
                continue
            given = family.KIND, hidden, states, mask, weights, eps
            layer_cpu.layer(*given, rounded=rounded, keeps=False)
            *_, kept = layer_cpu.layer(*given, rounded=rounded, keeps=True)
            of_last_states = grad_last if mask is not None else [None] * len(grad_last)
            layer_cpu.layer_backward(*given, kept, grad, of_last_states, wanted, rounded=rounded)
        count += 1
    return count


def scan_everything(kernel) -> int:
    """Every type, instruction set, kind of strides and number of threads, on shapes with and without remainders."""
    import torch

    count = 0
    kernel._SERIAL_ELEMENTS = 64  # threads from here on
    shapes = [(1, 1, 1), (3, 1, 65), (1, 7, 1), (2, 5, 31), (5, 3, 130), (2, 1030, 3), (1, 2, 4097), (2, 1400, 768)]
    kinds = itertools.product(kernel._TYPES, shapes, (None, 0.0, 0.4, 1.0), (False, True), range(3))
    for dtype, shape, resets, strided, level in kinds:
        if kernel.instruction_level(level) != level or (shape[1] == 1400 and (resets or dtype.is_complex)):
            continue
        wide = torch.promote_types(dtype, torch.float32)
        a, b, grad_h = (odd_values(torch.randn(shape, dtype=wide)).to(dtype) for _ in range(3))
        if strided:
            a, b = (torch.stack([x, x], 1)[:, 1] for x in (a, b))
            grad_h = grad_h.transpose(0, 1).contiguous().transpose(0, 1)
        state = torch.randn(shape[0], shape[2], dtype=wide)
        mask = None if resets is None else torch.rand(shape[:2]) < resets
        h, final = kernel.scan_forward(a, b, state, mask)
        kernel.scan_backward(a, h, state, mask, grad_h, final)
        kernel.scan_backward(a, h, state, mask, None, None)
        count += 1
    kernel.instruction_level(2)
    return count


def run_programs(kernel) -> int:
    """Every operation, on widths with and without remainders, few and many streams, and odd numbers."""
    import torch
    from torch.nn import functional

    from hf_recurrent.kernels.step_trace import StepTrace

    def step(x, state, taps, weight, square):
        width = state.shape[1]
        normed = functional.rms_norm(x, x.shape[1:], weight=weight[0], eps=1e-6)
        hidden = functional.linear(normed, weight, square[0])
        gate = functional.gelu(functional.layer_norm(hidden, hidden.shape[1:], eps=1e-6))
        other = functional.linear(gate * hidden, square)
        kept = torch.cat([taps, other.unsqueeze(1)], 1)
        mixed = (kept * square[0]).sum(1) + functional.softplus(other.exp().log1p()).tanh() * torch.sigmoid(hidden)
        heads = torch.stack([mixed, other, gate], 1).unsqueeze(1)
        mixed = functional.scaled_dot_product_attention(heads, heads.flip(2), heads.roll(1, 3)).sum((1, 2)) + mixed
        squares = torch.bmm(mixed.unsqueeze(2), other.unsqueeze(1)).softmax(-1).amax(2)
        new_state = torch.where(state > 0, state, mixed.clamp(-1, 1)).expm1() + squares.sin().sqrt().log()
        output = functional.linear(new_state.view(1, width, 1), weight[:, :1].contiguous()).mean(1)
        return output, new_state, kept[:, 1:].clone()

    count = 0
    types = ((torch.float32, None), (torch.float64, None), (torch.float32, "int8"), (torch.float32, "bfloat16"))
    for (dtype, kind), width, depth, taps in itertools.product(
        types, (1, 2, 5, 16, 37, 300), (1, 3, 8, 21, 70), (1, 4)
    ):
        weight, square = torch.randn(width, depth, dtype=dtype), torch.randn(width, width, dtype=dtype)
        one = {"x": torch.randn(1, depth), "state": torch.randn(1, width), "taps": torch.randn(1, taps - 1, width)}
        one = {name: tensor.to(dtype) for name, tensor in one.items()}
        with torch.no_grad(), (trace := StepTrace(dtype, one)):
            output, state, kept = step(*one.values(), weight, square)
        outputs = {"output": trace.value(output), "state": trace.value(state), "taps": trace.value(kept)}
        program = kernel.StepProgram(trace.graph, outputs, trace.guards, kind)
        for streams in (1, 3, 4, 9, 24):
            tensors = {name: odd_values(torch.cat([tensor] * streams)) for name, tensor in one.items()}
            program.run(tensors, streams)
            states = {name: one[name] for name in ("state", "taps")}
            program.run_chain({"x": tensors["x"]}, states, streams)
            count += 1
    return count


def advance_everything(kernel) -> int:
    """Few and many rows, with and without a gradient, by one thread and by several."""
    import torch

    count = 0
    kinds = itertools.product((torch.float32, torch.float64), (1, 2, 7), (1, 2), (1, 7), (1, 19, 64), (0, 1 << 22))
    for dtype, streams, rows, groups, columns, serial in kinds:
        kernel._SERIAL_ELEMENTS = serial
        sizes = (streams, 1, rows, groups, columns), (streams, 1, 1, groups), (streams, 1, 1, rows, groups)
        tensors = [odd_values(torch.randn(size, dtype=dtype)) for size in (*sizes, (streams, 1, columns))]
        kernel.advance(*tensors, None, None)
        kernel.advance(
            *tensors, torch.randn(streams, 1, groups, dtype=dtype), torch.zeros(rows, groups, columns, dtype=dtype)
        )
        count += 1
    return count


def learn_blocks() -> int:
    """Blocks of real, complex and sequential units and their updates, on few and many steps, narrow and wide."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_recurrent import config_from_preset
    from hf_recurrent.learning_rules.block_learning import CompiledUpdate, GradientMemory
    from hf_recurrent.learning_rules.compiled_block import CompiledBlock
    from hf_recurrent.learning_rules.rules import build_learning_rule

    count = 0
    units = [("glru", "rtrl"), ("complex_glru_conjugate", "rtrl"), ("indrnn", "truncated"), ("gru", "snap1")]
    kinds = itertools.product(units, ((5, 4, 3), (33, 36, 70)), (1, 4, 19), (torch.float32, torch.float64))
    for (unit, rule), (width, states, inner), steps, dtype in kinds:
        sizes = {"hidden_size": width, "state_size": states, "intermediate_size": inner, "vocab_size": 29}
        config = config_from_preset("memora-tiny", num_hidden_layers=1, recurrent_unit=unit, **sizes)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        learned_by = build_learning_rule(rule, model)
        compiled = CompiledBlock(learned_by, steps, steps, factored=True)  # of one step, products are not written
        memory = GradientMemory({name: compiled.parameters[name] for name in compiled.gradients}, compiled.factors)
        carried = {name: odd_values(tensor) for name, tensor in learned_by.init_carried(1).items()}
        ids = torch.randint(29, (1, steps + 1))
        block = ids[:, :-1], ids[:, 1:], torch.rand(1, steps) < 0.3
        compiled.learn(carried, model.init_state(1), block, memory.unfactored_views)
        memory.is_factored = bool(compiled.factors)
        for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.RMSprop(model.parameters())):
            update = CompiledUpdate(optimizer, memory)
            update.norm()
            update.step(0.5)
        count += 1
    return count


def learn_streams() -> int:
    """Many blocks in one call: with and without tables and counts, with resets, to the end and to a loss of NaN."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_recurrent import OnlineLearner, config_from_preset

    contexts = {"ngram_orders": [2, 3], "ngram_rows": 64, "ngram_output": True, "count_memory_slots": 256}
    contexts |= {"count_memory_text": 4096, "count_memory_window": 256}
    stream, count = bytes(i * i % 91 for i in range(401)), 0
    kinds = itertools.product(
        ({}, contexts), (1, 3), ("adamw", "rmsprop"), (1e-3, 1e6), (torch.float32, torch.float64)
    )
    for fields, stride, optimizer, rate, dtype in kinds:
        sizes = {"hidden_size": 13, "state_size": 12, "intermediate_size": 11, "num_hidden_layers": 2}
        model = AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes, **fields)).to(dtype)
        learner = OnlineLearner(model, stride=stride, optimizer=optimizer, learning_rate=rate)
        assert learner.step.blocks_at_once == 64
        with suppress(ValueError):
            learner.read(stream)
            learner.flush()
        assert learner.slow_because is None and learner.updates
        count += 1
    return count


def read_counts(kernel, size: dict[str, bool]) -> int:
    """Small and large windows, frozen and learning, with every kind of network; states and arrays of damaged files."""
    import numpy as np
    from count_memory_cases import KINDS, hostile_states, new_arrays, new_block, new_states

    from hf_recurrent.modeling.contexts.count_memory_layout import MemoryShape, Rates

    count = 0
    sizes = ((0, 0), (0, 64), (512, 1), (4096, 64), (1 << 17, 16))
    all_rates = (Rates(), Rates(first_weights=0.02, learns=True), Rates(inserts=True))
    for (window, rows), rates, network, damaged in itertools.product(sizes, all_rates, (0, 8, 256), range(3)):
        shape = MemoryShape(16 if window == 512 else 128, 256, window, rows, **size)
        arrays = new_arrays(kernel.Memory, shape)
        random = np.random.default_rng(count)
        if damaged == 2:
            for name, array in arrays.items():
                arrays[name] = np.frombuffer(bytearray(random.bytes(array.nbytes)), array.dtype).reshape(array.shape)
        states = hostile_states(shape, 3, count) if damaged else new_states(shape, 3)
        for kind in (*KINDS, "brackets"):
            pending = 9 * rates.learns
            block = new_block(
                3, 40, kind=kind, network=network, targets=count % 4 > 0, first=30, pending=pending, seed=count
            )
            if damaged and pending:
                block.pending_used[:] = random.integers(-20, 20, 3)
            kernel.Memory(arrays, shape).read(states, rates, block)
            count += 1
    return count


def code_bytes(kernel, size: dict[str, bool]) -> int:
    """Encoders, also without room, and decoders of their codes and of random ones; memories and states as above."""
    import numpy as np
    from count_memory_cases import KINDS, bytes_of, hostile_states, new_arrays, new_states

    from hf_recurrent.modeling.contexts.count_memory_layout import MemoryShape, Rates

    count = 0
    kinds = itertools.product((0, 512, 1 << 17), (0, 16), (False, True), (False, True), (*KINDS, "brackets"))
    for window, rows, learns, damaged, kind in kinds:
        shape = MemoryShape(16 if window == 512 else 128, 256, window, rows, **size)
        random = np.random.default_rng(count)
        symbols = np.ascontiguousarray(bytes_of(kind, 160).reshape(2, 80).T)
        network = (random.normal(size=(80, 2, 256)) * 5).astype(np.float32) if count % 3 else None
        if damaged and network is not None:
            network[::7, :, ::3] = np.nan
        code = None
        for given in (None, None, "own", b"", random.bytes(50)):
            arrays = new_arrays(kernel.Memory, shape)
            memory, states = kernel.Memory(arrays, shape), new_states(shape, 2)
            if damaged:
                states = hostile_states(shape, 2, count)
            coder = kernel.Coder(code if given == "own" else given, room=0 if code is None else 4000)
            found = symbols.copy()
            coder.code(found, network, memory, states, Rates(inserts=learns, learns=learns))
            if given is None:
                code = coder.finish()
            elif given == "own" and not damaged:
                assert np.array_equal(found, symbols)
            if network is not None:
                kernel.Coder(given if isinstance(given, bytes) else None, room=9).code(found, network)
            count += 1
    return count


def odd_values(tensor):
    """Some of the numbers are zero, tiny, huge, infinite or NaN."""
    import torch

    flat = tensor.flatten()
    if flat.numel() > 8:
        for place, value in enumerate((0.0, 1e-42, 1e30, -1e30, float("inf"), float("nan"))):
            flat[place::97] = torch.tensor(value)
    return flat.view(tensor.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of fuzz_forward.py, with each build")
    parser.add_argument("--libraries", type=Path, help=argparse.SUPPRESS)  # of the process with the sanitizers
    arguments = parser.parse_args()
    if arguments.libraries is not None:
        exercise(arguments.libraries, arguments.cases)
        return
    command, libraries = compiler()
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1:handle_segv=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "1000",  # kernels in the pool, which does not wait for threads on busy cores
    }
    for baseline in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            build(command, Path(folder), baseline=baseline)
            program = [sys.executable, __file__, "--cases", str(arguments.cases), "--libraries", folder]
            print("baseline instructions:" if baseline else "all instructions:", flush=True)
            done = subprocess.run(program, env=environment)
            if done.returncode:
                sys.exit(f"the kernels failed with status {done.returncode}")


if __name__ == "__main__":
    main()
