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
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hf_recurrent" / "kernels"
NAMES = ("linear_scan_cpu", "sensitivities_cpu", "step_cpu")
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
    for name in NAMES:
        source = folder / f"{name}.c"
        text = (SOURCES / source.name).read_text(encoding="utf-8")
        source.write_text(text.replace(INSTRUCTION_SETS, "#if 0\n") if baseline else text, encoding="utf-8")
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
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import torch

    from hf_recurrent.kernels import linear_scan_cpu, sensitivities_cpu, step_cpu

    for kernel in (linear_scan_cpu, sensitivities_cpu, step_cpu):
        assert kernel._library._name.startswith(str(folder)), kernel._library
    torch.set_num_threads(3)
    counts = scan_everything(linear_scan_cpu), run_programs(step_cpu), advance_everything(sensitivities_cpu)
    torch.set_num_threads(1)
    import fuzz_forward

    fuzz_forward.prepare()
    for number in range(cases):
        fuzz_forward.judge(fuzz_forward.case_of(7, number))
    print("{} scans, {} programs, {} passes,".format(*counts), cases, "fuzzed cases")


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

    count = 0
    dtypes, widths, depths = (torch.float32, torch.float64), (1, 2, 5, 16, 37), (1, 3, 8, 21)
    for dtype, width, depth, streams, taps in itertools.product(dtypes, widths, depths, (1, 3, 4, 9, 24), (1, 4)):
        program, Vector = kernel.StepProgram(dtype), kernel.Vector
        x, state = Vector(depth, "x"), Vector(width, "state")
        before, after = (Vector((taps - 1) * width, "taps", is_new=new) for new in (False, True))
        weight, square = torch.randn(width, depth, dtype=dtype), torch.randn(width, width, dtype=dtype)
        program.rms_norm(x, torch.rand(depth, dtype=dtype), 1e-6, to=x)
        hidden = program.linear(weight, x)
        gate = program.gelu(program.layer_norm(hidden, 1e-6))
        other = program.linear(square, hidden, program.multiply(gate, hidden))
        mixed = program.convolution(other, before, torch.randn(taps, width, dtype=dtype), after)
        rate = odd_values(torch.randn(width, dtype=dtype))
        for name, negative in itertools.product(("glru", "rg_lru"), (False, True)):
            new = Vector(width, "state", is_new=True)
            options = {"rate": rate, "scale": 8.0, "negative": negative}
            program.gated_unit(name, new, gate, other, mixed, state, **options)
        program.add(state, mixed)
        program.begin_layer()
        program.linear(weight.T.contiguous(), state, x)
        tensors = {
            "x": odd_values(torch.randn(streams, depth, dtype=dtype)),
            "state": odd_values(torch.randn(streams, width, dtype=dtype)),
            "taps": torch.randn(streams, taps - 1, width, dtype=dtype),
        }
        program.run(tensors, streams)
        count += 1
    return count


def advance_everything(kernel) -> int:
    """Few and many rows, with and without a gradient, by one thread and by several."""
    import torch

    count = 0
    kinds = itertools.product((torch.float32, torch.float64), (1, 2, 5), (1, 2), (1, 7), (1, 19, 64), (0, 1 << 22))
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
