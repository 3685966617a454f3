"""Shared by the benchmark scripts: options, clocks, limits of the machine, tables."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import config_from_preset
from hf_recurrent.checkpoints.provenance_files import find_provenance
from hf_recurrent.cli.data_arguments import DataArguments, load_training_sources
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.evaluation.counts_alone import TrainingBytes, bytes_read
from hf_recurrent.hub.loading import load_model, load_tokenizer
from hf_recurrent.modeling.block.training_kernels import training_kernels

# Order of the lines in tables: our models, then the stock models of the same row.
FAMILIES = ("memora", "hawk", "llama", "mamba2")
HGRN = "hgrn"  # the gated recurrent model of flash-linear-attention, whose kernels need a GPU
CPU = torch.device("cpu")
# Options of several scripts → help; those without help are for tests.
OPTIONS = {
    "rows": "model sizes",
    "preset": "preset; other options replace its fields",
    "layers": "N",
    "hidden_size": "M",
    "state_size": "S",
    "streams": "B",
    "block_size": "T",
    "rounds": "the best one counts",
    "threads": "CPU threads; one is fastest for a single small stream",
    "device": "torch device",
    "matrix_size": None,
    "bandwidth_bytes": None,
}


def option_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with some of the shared options; a default also gives the type, and a list takes several values."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        values = default if isinstance(default, list) else [default]
        parser.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")),
            type=type(values[0]),
            nargs="+" if values is default else None,
            default=default,
            help=f"{OPTIONS[name]} (default {' '.join(map(str, values))})" if OPTIONS[name] else argparse.SUPPRESS,
        )
    return parser


def shape_of(form: str) -> Callable[[str], tuple[int, ...]]:
    """A type of options that parses sizes in a form such as "BxT", as in 8x1024."""

    def parse(text: str) -> tuple[int, ...]:
        sizes = tuple(int(size) if size.isdecimal() else 0 for size in text.split("x"))
        if len(sizes) != len(form.split("x")) or min(sizes) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}, such as 8x1024 for BxT")
        return sizes

    return parse


def family_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """As [`option_parser`], with options for families of models, threads and device too."""
    parser = option_parser(description, **defaults, threads=1, device=CPU)
    parser.add_argument("--families", nargs="+", choices=(*FAMILIES, HGRN), default=list(FAMILIES))
    return parser


def parse_and_set_up(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return options


def build_model(preset: str, device: torch.device = CPU, **fields: Any) -> PreTrainedModel:
    """A new model of a preset, such as memora-s0, also with another unit or backbone, such as memora-s0+gru."""
    preset, _, option = preset.partition("+")
    if preset.startswith(HGRN):
        return build_hgrn(preset.replace(HGRN, "memora")).to(device)
    if option:
        fields["backbone" if preset.startswith("smt") else "recurrent_unit"] = option
    return AutoModelForCausalLM.from_config(config_from_preset(preset, **fields)).to(device)


def build_hgrn(preset: str) -> PreTrainedModel:
    """HGRN of flash-linear-attention (`pip install flash-linear-attention`), as wide, deep and large as a preset."""
    from fla.models import HGRNConfig, HGRNForCausalLM

    config = config_from_preset(preset)
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config).num_parameters()
    width, layers = config.hidden_size, config.num_hidden_layers
    maps = (wanted - 2 * config.vocab_size * width) // layers - 4 * width**2
    intermediate = round(maps / (3 * width))  # three maps, a norm's weights aside
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": intermediate}
    return HGRNForCausalLM(HGRNConfig(vocab_size=config.vocab_size, **sizes))


def elapsed(device: torch.device) -> float:
    """Elapsed seconds, after all work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def clock(device: torch.device) -> float:
    """Seconds: with one CPU thread its CPU time, which other jobs do not lengthen, else elapsed time."""
    return time.thread_time() if device.type != "cuda" and torch.get_num_threads() == 1 else elapsed(device)


def best_seconds(function: Callable[[], object], repetitions: int, device: torch.device) -> float:
    """The shortest of several runs, after one warm-up run."""
    return min(seconds_in_turns({"": function}, repetitions, device)[""])


def seconds_in_turns(
    steps: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each step in each round, the steps in turns, after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            begin = clock(device)
            step()
            times[name].append(clock(device) - begin)
    return {name: values[1:] for name, values in times.items()}


def read_bandwidth(device: torch.device, repetitions: int = 3, size: int = 1 << 28) -> float:
    """Read bandwidth in bytes per second, by the sum of a tensor of `size` bytes."""
    numbers = torch.ones(size // 4, device=device)
    return size / best_seconds(numbers.sum, repetitions, device)


def matrix_rate(
    device: torch.device, repetitions: int = 3, size: int = 1024, dtype: torch.dtype = torch.float32
) -> float:
    """Floating-point operations per second of a matrix product: the faster of torch's and, on a CPU, our kernel's.

    Products of float32 are in TF32 where torch allows it.
    """
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    result = left @ right
    ways = {"torch": lambda: torch.mm(left, right, out=result)}
    if (kernels := training_kernels(left)) is not None:
        ways["kernel"] = lambda: kernels.multiply([(left, right, result, False)])
    seconds = seconds_in_turns(ways, repetitions, device)
    return 2 * size**3 / min(map(min, seconds.values()))


def kept_bytes(loss: Callable[[], torch.Tensor]) -> int:
    """Bytes of the tensors that a forward pass keeps for the backward pass, without parameters."""
    storages = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        source = tensor if tensor._base is None else tensor._base
        if not (source.is_leaf and source.requires_grad):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = loss()  # alive, so that no storage is reused
    del kept
    return sum(storages.values())


def conditions(device: torch.device, threads: Sequence[int] | None = None) -> str:
    """Device, threads (by default those in use), torch version and load, for the title of a table."""
    counts = " and ".join(map(str, threads or [torch.get_num_threads()]))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {counts} thread(s)"
    load = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs" if hasattr(os, "getloadavg") else ""
    return f"{where}, torch {torch.__version__}{load}"


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(map(markdown_row, [columns, ["---"] * len(columns), *lines]))


def report(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    print(f"{title}\n\n{markdown_table(columns, lines)}\n", flush=True)


def load_with_training_bytes(
    name: str, corpus: list[str], split_seed: int, max_eval_bytes: float | None = None
) -> tuple[PreTrainedModel, Corpus, TrainingBytes]:
    """A model of `hf-recurrent pretrain`, its held-out documents, and the bytes that it was trained on, or exit."""
    options = {"argument": "MODEL", "trust_remote_code": False}
    model = load_model(AutoModelForCausalLM, name, **options).eval()
    data = DataArguments(corpus, split_seed=split_seed, max_eval_bytes=max_eval_bytes)
    train, held_out = load_training_sources(data, load_tokenizer(name, **options))
    read = bytes_read(find_provenance(model), train)
    if isinstance(read, str):
        raise SystemExit(f"the training bytes of {name} are not known: {read}")
    return model, held_out, read
