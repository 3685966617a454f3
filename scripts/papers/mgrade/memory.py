"""Parameters and buffers of a TCN over the size of its kernels (mGRADE, section 5.3 and figure 4A)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from hf_recurrent import config_from_preset
from papers.engine.experiment import Experiment, Settings
from papers.engine.training import measured_run

PARAMETERS, BUFFERS, TOTAL = "parameters", "buffers", "total"
# With this longest delay in steps, half the length of grey sCIFAR, appendix B yields the totals that are printed.
LONGEST_DELAY = 512
LIMITED = f"total, no delay above {LONGEST_DELAY}"
# Γ_0, the longest delay of the first layer.
BASE_KERNEL_SIZES = (8, 16, 32, 64, 128)
BASE_DILATIONS = (1, 4)
# The growth that section 5.3 prints is from the one to the other.
_FROM, _TO = 16, 64


class MemoryFootprint(Experiment):
    paper = {
        f"base dilation 1: {PARAMETERS}": f"+10% from {_FROM} to {_TO}",
        f"base dilation 1: {TOTAL}": f"+66% from {_FROM} to {_TO}",
    }
    sizes = {size: {"preset": "tcn-scifar-exponential", "longest_delay": LONGEST_DELAY} for size in ("small", "paper")}

    def rows(self, size: str) -> list[Settings]:
        return [
            {"label": f"base dilation {dilation}: {part}", "dilation": dilation, "part": part, "x": base}
            | self.sizes[size]
            for dilation in BASE_DILATIONS
            for part in (PARAMETERS, BUFFERS, TOTAL, LIMITED)
            for base in BASE_KERNEL_SIZES
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        taps = settings["x"] // settings["dilation"] + 1
        config = config_from_preset(settings["preset"], conv_kernel=taps, dilation=settings["dilation"])
        with measured_run() as record, torch.device("meta"):
            footprint = AutoModelForSequenceClassification.from_config(config).memory_footprint()
        limited = config.hidden_size * sum(limited_delays(config.receptive_fields(), settings["longest_delay"]))
        value = {
            PARAMETERS: footprint.parameters,
            BUFFERS: footprint.buffer,
            TOTAL: footprint.total,
            LIMITED: footprint.parameters + limited,
        }[settings["part"]]
        return {**record, "device": "the CPU", "value": value, "num_parameters": footprint.parameters}

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        values = {row["x"]: row["value"] for row in rows}
        if not {_FROM, _TO} <= values.keys():
            return {}
        return {f"from {_FROM} to {_TO}": f"{values[_TO] / values[_FROM] - 1:+.0%}"}


def limited_delays(delays: Iterable[int], longest: int) -> list[int]:
    """The longest delay Γ_l of each layer, halved until it is at most `longest`."""
    return [_limited(delay, longest) for delay in delays]


def _limited(delay: int, longest: int) -> int:
    while delay > longest:
        delay //= 2
    return delay
