"""The parts of `gpu_report.py`, each run in a process of its own: it writes rows of numbers as lines of JSON.

A row whose measurement fails has a column `error` instead of numbers, and the part goes on.
"""

import argparse
import importlib.util
import itertools
import json
import math
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import benchmarking as bench
import torch

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = bench.FAMILIES
PACKAGES = ("triton", "transformers", "fla", "accelerated_scan", "mamba_ssm", "causal_conv1d", "matplotlib")
TESTS = ("modeling/test_linear_scan_triton.py", "modeling/test_captured_step.py", "modeling/test_linear_scan.py")
Row = dict
_LONGEST_ERROR = 160


class Sizes:
    """Sizes of the measurements: those of a GPU, or the tiny ones of a rehearsal."""

    def __init__(self, rehearse: bool):
        self.rehearse = rehearse
        self.rows = ["selective-copying"] if rehearse else ["s0", "s4"]
        self.shapes = [(2, 32, 16)] if rehearse else [(8, 2048, 768), (64, 1024, 768), (1, 65_536, 768), (8, 128, 192)]
        self.repetitions = 2 if rehearse else 20
        self.streams, self.block_size = (2, 16) if rehearse else (32, 1024)
        self.matrix = 64 if rehearse else 8192
        self.bandwidth_bytes = 1 << 20 if rehearse else 1 << 30
        self.generated = (1, 4) if rehearse else (1, 64, 1024)
        self.new_bytes, self.position = (4, 16) if rehearse else (64, 1024)
        self.rtrl_streams = (1, 2) if rehearse else (1, 64, 1024)
        self.precisions = ("float32", "bfloat16")


def attempt(known: Row, measure: Callable[[], Row]) -> Row:
    """A row: what is known, and what is measured, or why it could not be."""
    try:
        return known | measure()
    except Exception as error:  # of packages, kernels and memory of every kind
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return known | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_ERROR]}


def missing(*modules: str) -> str | None:
    """The first of some modules that is not installed."""
    return next((module for module in modules if importlib.util.find_spec(module) is None), None)


def environment(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """Names, versions and the limits of the machine."""
    yield {"what": "python", "value": platform.python_version()}
    yield {"what": "torch", "value": torch.__version__}
    yield {"what": "device", "value": bench.conditions(device)}
    for package in PACKAGES:
        found = missing(package) is None
        yield attempt({"what": package}, lambda package=package, found=found: {"value": _version(package, found)})
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield {"what": "memory GB", "value": properties.total_memory / 1e9}
        yield {"what": "multiprocessors", "value": properties.multi_processor_count}
        yield attempt({"what": "driver"}, lambda: {"value": _driver()})
    for precision in sizes.precisions:
        dtype = getattr(torch, precision)
        rate = lambda dtype=dtype: {"value": bench.matrix_rate(device, 5, sizes.matrix, dtype) / 1e12}  # noqa: E731
        yield attempt({"what": f"matrix product, {precision}, TFLOP/s"}, rate)
    yield attempt({"what": "copy, read and written, GB/s"}, lambda: {"value": copy_bandwidth(device, sizes) / 1e9})


def _version(package: str, found: bool) -> str:
    if not found:
        return "not installed"
    return str(getattr(importlib.import_module(package), "__version__", "installed"))


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def copy_bandwidth(device: torch.device, sizes: Sizes) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.ones(sizes.bandwidth_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.best_seconds(lambda: target.copy_(source), sizes.repetitions, device)


def tests(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """The files of tests that use a GPU where there is one."""
    for file in TESTS[1:2] if sizes.rehearse else TESTS:
        yield attempt({"file": file}, lambda file=file: _run_tests(file, max(end - time.monotonic(), 1)))


def _run_tests(file: str, seconds: float) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.xml")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={path}"]
        done = subprocess.run(
            [*words, str(ROOT / "tests" / file)], cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
        if not path.exists():
            raise RuntimeError((done.stdout + done.stderr).strip()[-_LONGEST_ERROR:])
        suite = ElementTree.parse(path).getroot().find("testsuite")
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    names = [case.get("name") for case in suite if case.find("failure") is not None or case.find("error") is not None]
    row = {"passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"]}
    return row | {"s": float(suite.get("time")), "failed tests": ", ".join(names[:3])}


def scan(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """Forward alone, and forward and backward, of all backends and peers."""
    from benchmark_scan import PASSES, PEERS, ready_scan

    names = ["triton", "hgrn-recurrent", "hgrn-chunk", "accelerated-scan", "torch"]
    names = [*names, *["cpu", "torch-loop"] * sizes.rehearse, "associative-scan"]
    needs = {"hgrn-recurrent": "fla", "hgrn-chunk": "fla", "accelerated-scan": "accelerated_scan", "triton": "triton"}
    copied, ready = copy_bandwidth(device, sizes), {}
    # The last one is compiled for minutes: what is cut off is then a peer, not half of the shapes of all.
    for name, shape, precision in itertools.product(names, sizes.shapes, sizes.precisions):
        known = {"shape": "x".join(map(str, shape)), "dtype": precision, "backend": name}
        peer = PEERS.get(name)
        if module := missing(needs.get(name, "torch")):
            if shape == sizes.shapes[0] and precision == sizes.precisions[0]:
                yield known | {"error": f"{module} is not installed"}
            continue
        if peer is not None and not peer.takes(shape):
            continue

        def measure(shape=shape, precision=precision, name=name, peer=peer) -> Row:
            if name not in ready:
                ready[name] = ready_scan(name, device)
            dtype = getattr(torch, precision)
            a, b = torch.rand(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)
            state = torch.randn(shape[0], shape[2], device=device)
            given = (a, b, state) if peer is None else peer.inputs(a, b, state)
            leaves = [leaf.detach().requires_grad_() for leaf in given]
            others = (None,) if peer is None else ()
            gradient = torch.randn_like(leaves[0])

            def forward() -> None:
                with torch.no_grad():
                    ready[name](*leaves, *others)

            def both() -> None:
                torch.autograd.grad(ready[name](*leaves, *others), leaves, gradient)

            passes, times = (3, PASSES), []
            for step in (forward, both):
                times.append(bench.best_seconds(step, sizes.repetitions, device))
            bounds = [count * a.nbytes / copied for count in passes]
            return {
                "forward ms": times[0] * 1e3,
                "of its bound": f"{bounds[0] / times[0]:.0%}",
                "forward + backward ms": times[1] * 1e3,
                "of the bound": f"{bounds[1] / times[1]:.0%}",
                "elements/s": a.numel() / times[1],
                "limit elements/s": a.numel() / bounds[1],
            }

        yield attempt(known, measure)


def training_options(sizes: Sizes, device: torch.device, **changed) -> argparse.Namespace:
    """The options of `benchmark_training.py`."""
    options = {"device": device, "streams": sizes.streams, "block_size": sizes.block_size, "compile": False}
    return argparse.Namespace(**options | {"bf16": False} | changed)


def training(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """Steps of all families, eager and compiled."""
    from benchmark_training import TrainedModel

    rates = {}
    # All sizes before any is compiled, which takes minutes.
    for compiled, row, precision, family in itertools.product(
        (False, True), sizes.rows, sizes.precisions[::-1], FAMILIES
    ):
        way = "compiled" if compiled else "eager"
        if family == "mamba2" and missing("mamba_ssm"):
            way += ", plain torch"
        if family == "mamba2" and compiled:
            continue  # its own kernels are compiled already, and its plain form compiles for minutes
        known = {"size": row, "precision": precision, "model and way": f"{family}, {way}"}

        def measure(row=row, precision=precision, compiled=compiled, family=family) -> Row:
            dtype = getattr(torch, precision)
            if precision not in rates:
                rates[precision] = bench.matrix_rate(device, 5, sizes.matrix, dtype)
            options = training_options(sizes, device, bf16=precision == "bfloat16", compile=compiled)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            begin = time.perf_counter()
            trained = TrainedModel(family, row, options)
            for _ in range(2):
                trained.step()
            first = time.perf_counter() - begin
            trained.seconds.clear()
            for _ in range(2 if sizes.rehearse else 8):
                trained.step()
            size, parameters = trained.input_ids.numel(), trained.model.num_parameters()
            result = {"streams": trained.streams, "bytes/s": size / min(trained.seconds)}
            result["limit bytes/s"] = rates[precision] / (6 * parameters)
            result["of the limit"] = f"{result['bytes/s'] / result['limit bytes/s']:.0%}"
            if device.type == "cuda":
                result["peak GB"] = torch.cuda.max_memory_allocated(device) / 1e9
            return result | {"first steps s": first}

        yield attempt(known, measure)


def profile(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """The operations of a step that take longest."""
    from benchmark_training import TrainedModel
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    for family in ("memora",) if sizes.rehearse else ("memora", "hawk"):
        trained = TrainedModel(family, sizes.rows[-1], training_options(sizes, device, bf16=True))
        trained.step()
        with torch.profiler.profile(activities=activities) as recorded:
            trained.step()
            bench.elapsed(device)
        name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, name))
        total = sum(getattr(event, name) for event in events) or 1
        for event in events[:8]:
            spent = getattr(event, name)
            known = {"model": f"{family}-{sizes.rows[-1]}", "operation": event.key[:60], "calls": event.count}
            yield known | {"ms": spent / 1e3, "share": f"{spent / total:.0%}"}


def generation(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """`generate()` with few and many streams."""
    from benchmark_generation import generate

    bandwidth = bench.read_bandwidth(device, 5, sizes.bandwidth_bytes)
    rate = bench.matrix_rate(device, 5, sizes.matrix)
    for row, streams, family in itertools.product(sizes.rows, sizes.generated, FAMILIES):
        if family == "llama" and streams > 64:
            continue  # its cache

        def measure(row=row, streams=streams, family=family) -> Row:
            model = bench.build_model(f"{family}-{row}", device).eval()
            options = argparse.Namespace(streams=streams, position=sizes.position, bytes=sizes.new_bytes)
            seconds, size = min(generate(model, options) for _ in range(2))
            weights = list(model.parameters())
            products = 2 * streams * sum(weight.numel() for weight in weights)
            bound = max(sum(weight.nbytes for weight in weights) / bandwidth, products / rate)
            result = {
                "bytes/s": streams / seconds,
                "limit bytes/s": streams / bound,
                "of the limit": f"{bound / seconds:.0%}",
            }
            return result | {"µs per step": seconds * 1e6, "state KiB per stream": size / 1024}

        yield attempt({"size": row, "streams": streams, "model": family}, measure)


def rtrl(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """A step of RTRL against a step of BPTT and the bandwidth."""
    from benchmark_rtrl import Reader

    from hf_recurrent.learning_rules.rules import build_learning_rule

    model = bench.build_model("memora-selective-copying" if sizes.rehearse else "memora-online", device)
    rules = {"bptt": build_learning_rule("truncated", model), "rtrl": build_learning_rule("rtrl", model)}
    for streams in sizes.rtrl_streams:

        def measure(streams=streams) -> Row:
            kinds = {kind: Reader(model, rule, streams, 1, 1) for kind, rule in rules.items()}
            carried = sum(tensor.nbytes for tensor in kinds["rtrl"].carried.values())
            flat = torch.ones(carried // 4, device=device)
            kinds["bound"] = lambda: flat.mul_(0.999)
            turns = bench.seconds_in_turns(kinds, sizes.repetitions, device)
            best = {kind: min(seconds) * 1e3 for kind, seconds in turns.items()}
            row = {"sensitivities MB": carried / 1e6, "BPTT ms": best["bptt"], "RTRL ms": best["rtrl"]}
            return row | {"bound ms": best["bound"], "RTRL / bound": best["rtrl"] / best["bound"]}

        yield attempt({"model": model.config.model_type, "streams": streams}, measure)


def smt(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """A step of SMT against plain modules."""
    import benchmark_smt

    words = ["--device", str(device), "--matrix_size", str(sizes.matrix), "--rounds", str(sizes.repetitions)]
    if sizes.rehearse:
        words += [
            "--hidden_size",
            "32",
            "--layers",
            "1",
            "--readout_layers",
            "1",
            "--context_length",
            "8",
            "--future_length",
            "4",
        ]
        words += ["--memory_tokens", "2", "--sequences", "2"]
    else:
        words += ["--sequences", "64", "--bf16"]
    options = benchmark_smt.build_parser().parse_args(words)
    names = ("step", "ms", "of the yardstick's time", "limit ms", "of the limit")
    for line in benchmark_smt.time_lines(benchmark_smt.build_losses(options), options):
        yield dict(zip(names, line, strict=True))


def memory(device: torch.device, sizes: Sizes, end: float) -> Iterator[Row]:
    """The plan of a training step next to what torch allocates."""
    from transformers import AutoModelForCausalLM

    from hf_recurrent import MultiStreamTrainingArguments, config_from_preset
    from hf_recurrent.planning.setting import Setting
    from hf_recurrent.planning.training_memory import MemoryCounter
    from hf_recurrent.planning.training_steps import bytes_per_second

    streams, size = sizes.streams, sizes.block_size
    cases = [("bptt", False, streams, size), ("bptt", True, streams, size), ("rtrl", False, streams, 1)]
    with tempfile.TemporaryDirectory() as folder:
        use_cpu = device.type == "cpu"
        arguments = MultiStreamTrainingArguments(output_dir=folder, use_cpu=use_cpu, report_to="none")
        for row, (method, bfloat16, streams, steps) in itertools.product(sizes.rows, cases):
            known = {
                "model": f"memora-{row}",
                "method": method,
                "bfloat16": str(bfloat16),
                "streams": streams,
                "T": steps,
            }

            def measure(row=row, method=method, bfloat16=bfloat16, streams=streams, steps=steps) -> Row:
                setting = Setting(method=method, streams=streams, block_size=steps, stride=steps, bfloat16=bfloat16)
                config = config_from_preset(f"memora-{row}")
                counter = MemoryCounter(lambda: AutoModelForCausalLM.from_config(config), arguments)
                planned = counter.count(setting).total
                result = {"planned GB": planned / 1e9}
                if device.type != "cuda":
                    return result
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                bytes_per_second(bench.build_model(f"memora-{row}", device), arguments, setting, 2)
                allocated = torch.cuda.max_memory_allocated(device) - before
                return result | {"allocated GB": allocated / 1e9, "planned / allocated": planned / allocated}

            yield attempt(known, measure)


PARTS = {part.__name__: part for part in (environment, tests, scan, training, profile, generation, rtrl, smt, memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", type=Path, required=True, help="file to append rows to")
    parser.add_argument("--device", type=torch.device, default=bench.CPU)
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit, known to the part")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    if hasattr(signal, "alarm"):  # a report that was killed cannot end its part
        signal.alarm(math.ceil(arguments.seconds) + 5)
    torch.manual_seed(0)
    if arguments.device.type == "cpu":
        torch.set_num_threads(1)
    with open(arguments.rows, "a", encoding="utf-8") as file:
        for row in PARTS[arguments.part](arguments.device, Sizes(arguments.rehearse), end):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
