"""Time of a training step with each recurrent unit, compared with GLRU at equal widths.

    python scripts/benchmark_units.py                         # Memora S0's widths, 2 layers, B 8, T 512
    python scripts/benchmark_units.py --preset memora-s4 --streams 32 --block_size 1024 --device cuda

All units run in turns, several times, and the best time of each counts. One CPU thread is measured in CPU time. RG-LRU
does not work in Memora's block; it runs in Hawk's, whose other parts differ.
"""

import statistics

import torch
from benchmarking import CPU, build_model, option_parser, seconds_in_turns

from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS


def main() -> None:
    """Print one row per unit."""
    defaults = {"preset": "memora-s0", "layers": 2, "streams": 8, "block_size": 512, "rounds": 8, "device": CPU}
    options = option_parser(__doc__, **defaults).parse_args()
    input_ids = torch.randint(256, (options.streams, options.block_size), device=options.device)
    models = {}
    for unit in RECURRENT_UNITS:
        preset = options.preset if unit != "rg_lru" else options.preset.replace("memora", "hawk")
        models[unit] = build_model(preset, options.device, recurrent_unit=unit, num_hidden_layers=options.layers)
    steps = {
        unit: lambda model=model: model(input_ids, labels=input_ids).loss.backward() for unit, model in models.items()
    }
    seconds = seconds_in_turns(steps, options.rounds, options.device)
    print(f"{'unit':24}{'parameters':>12}{'best ms':>10}{'median ms':>11}{'of GLRU':>9}")
    for unit, times in seconds.items():
        ratio = min(times) / min(seconds["glru"])
        median = statistics.median(times)
        print(f"{unit:24}{models[unit].num_parameters():12,}{min(times) * 1e3:10.1f}{median * 1e3:11.1f}{ratio:9.2f}")


if __name__ == "__main__":
    main()
