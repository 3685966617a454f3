"""Time of a training step with each recurrent unit, compared with GLRU at equal widths.

    python scripts/benchmark_units.py                         # Memora S0's widths, 2 layers, B 8, T 512
    python scripts/benchmark_units.py --preset memora-s4 --streams 32 --block_size 1024 --device cuda

All units run in turns, several times, and the best time of each counts. One CPU thread is measured in CPU time. RG-LRU
does not work in Memora's block; it runs in Hawk's, whose other parts differ.
"""

import argparse
import functools
import statistics

import torch
from benchmarking import seconds_in_turns
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.modeling.recurrent_units import RECURRENT_UNITS


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="memora-s0", help="preset of the widths")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8, help="B")
    parser.add_argument("--block_size", "--block-size", type=int, default=512, help="T")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    return parser


def step(model: torch.nn.Module, input_ids: torch.Tensor) -> None:
    """One forward and backward pass."""
    model(input_ids, labels=input_ids).loss.backward()


def main() -> None:
    """Print one row per unit."""
    options = build_parser().parse_args()
    input_ids = torch.randint(256, (options.streams, options.block_size), device=options.device)
    models = {}
    for unit in RECURRENT_UNITS:
        preset = options.preset if unit != "rg_lru" else options.preset.replace("memora", "hawk")
        config = config_from_preset(preset, recurrent_unit=unit, num_hidden_layers=options.layers)
        models[unit] = AutoModelForCausalLM.from_config(config).to(options.device)
    steps = {unit: functools.partial(step, model, input_ids) for unit, model in models.items()}
    seconds = seconds_in_turns(steps, options.rounds, options.device)
    print(f"{'unit':24}{'parameters':>12}{'best ms':>10}{'median ms':>11}{'of GLRU':>9}")
    for unit, times in seconds.items():
        ratio = min(times) / min(seconds["glru"])
        median = statistics.median(times)
        print(f"{unit:24}{models[unit].num_parameters():12,}{min(times) * 1e3:10.1f}{median * 1e3:11.1f}{ratio:9.2f}")


if __name__ == "__main__":
    main()
