"""Time of a training step with each recurrent unit, beside GLRU at equal widths.

    python scripts/benchmark_units.py                         # Memora S0's widths, 2 layers, B 8, T 512
    python scripts/benchmark_units.py --preset memora-s4 --streams 32 --block_size 1024 --device cuda

All units run in turns, several times, and the best time of each counts. RG-LRU cannot stand in Memora's block and runs
in Hawk's, whose other parts differ.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.modeling.recurrent_units import RECURRENT_UNITS


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="memora-s0", help="row whose widths are taken")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8, help="B")
    parser.add_argument("--block_size", "--block-size", type=int, default=512, help="T")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    return parser


def step_seconds(model: torch.nn.Module, input_ids: torch.Tensor) -> float:
    """Seconds of one forward and backward pass."""
    begin = time.perf_counter()
    model(input_ids, labels=input_ids).loss.backward()
    if input_ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Print one row a unit."""
    options = build_parser().parse_args()
    input_ids = torch.randint(256, (options.streams, options.block_size), device=options.device)
    models = {}
    for unit in RECURRENT_UNITS:
        preset = options.preset if unit != "rg_lru" else options.preset.replace("memora", "hawk")
        config = config_from_preset(preset, recurrent_unit=unit, num_hidden_layers=options.layers)
        models[unit] = AutoModelForCausalLM.from_config(config).to(options.device)
    seconds: dict[str, list[float]] = {unit: [] for unit in models}
    for number in range(options.rounds + 1):
        for unit, model in models.items():
            elapsed = step_seconds(model, input_ids)
            if number:  # the first round warms up
                seconds[unit].append(elapsed)
    print(f"{'unit':24}{'parameters':>12}{'best ms':>10}{'median ms':>11}{'of GLRU':>9}")
    for unit, times in seconds.items():
        ratio = min(times) / min(seconds["glru"])
        median = statistics.median(times)
        print(f"{unit:24}{models[unit].num_parameters():12,}{min(times) * 1e3:10.1f}{median * 1e3:11.1f}{ratio:9.2f}")


if __name__ == "__main__":
    main()
