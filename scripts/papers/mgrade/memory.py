"""Memory of mGRADE and TCNs: parameters and buffers over the size of the kernels, and accuracy against memory over
taps and delays of the convolutions (mGRADE, section 5.3, figures 4 and S2 to S4)."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from hf_recurrent import config_from_preset
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import draw_grid, split_axes
from papers.engine.training import measured_run
from papers.mgrade.pixel_classification import PixelClassification

PARAMETERS, BUFFERS, TOTAL = "parameters", "buffers", "total"
# With this longest delay in steps, half the length of grey sCIFAR, appendix B yields the totals that are printed.
LONGEST_DELAY = 512
LIMITED = f"total, no delay above {LONGEST_DELAY}"
# Γ_0, the longest delay of the first layer.
BASE_KERNEL_SIZES = (8, 16, 32, 64, 128)
BASE_DILATIONS = (1, 4)
# The growth that section 5.3 prints is from the one to the other.
_FROM, _TO = 16, 64
DILATION, BASE_DILATION, GAMMA = "d", "d_b", "Γ"
_FIELDS = {DILATION: "dilation", BASE_DILATION: "dilation", GAMMA: "receptive_field"}
FROZEN = "mGRADE-L, frozen weights"
# Label → preset of the paper's grey sCIFAR, the setting that its grid varies as it does K, colour and line style.
ARCHITECTURES = {
    "TCN-CD": ("tcn-scifar", DILATION, "tab:orange", "--"),
    "mGRADE-CD": ("mgrade-scifar", DILATION, "tab:blue", "--"),
    "TCN-EID": ("tcn-scifar-exponential", BASE_DILATION, "tab:orange", "-"),
    "mGRADE-EID": ("mgrade-scifar-exponential", BASE_DILATION, "tab:blue", "-"),
    FROZEN: ("mgrade-scifar-learned", GAMMA, "tab:green", ":"),
    "mGRADE-L": ("mgrade-scifar-learned", GAMMA, "tab:green", "-"),
    "mGRADE-L, random positions": ("mgrade-scifar-learned-uniform", GAMMA, "tab:green", "--"),
}
# The paper's grids are in its pictures only; these contain the settings of its tables.
_PAPER_TAPS = (4, 8, 16, 32, 64)
# Size → delay → values of K, values of the delay. With d 14 the taps see one column of the small digits, as with d 32
# one of CIFAR; d_b 6 needs as much memory.
GRIDS = {
    "small": {DILATION: ((4, 8), (2, 14)), BASE_DILATION: ((4, 8), (1, 6)), GAMMA: ((8,), (16, 112))},
    "paper": {
        DILATION: (_PAPER_TAPS, (1, 2, 8, 32)),
        BASE_DILATION: (_PAPER_TAPS, (1, 2, 4, 8)),
        GAMMA: (_PAPER_TAPS, (64, 128, 256)),
    },
}
# Largest d (K-1) and d_b (K-1), by the largest of the tables and of figure 4A.
_LARGEST_DELAYS = {DILATION: 256, BASE_DILATION: 64}
# Architecture → K, delay, test accuracy in tables 1 and 2.
PRINTED = {
    "TCN-CD": (64, 1, "77.1 ± 0.6"),
    "mGRADE-CD": (8, 32, "81.9 ± 0.4"),
    "TCN-EID": (64, 1, "81.6 ± 0.3"),
    "mGRADE-EID": (16, 2, "82.6 ± 0.1"),
    "mGRADE-L": (8, 256, "82.9 ± 0.6"),
    "mGRADE-L, random positions": (16, 128, "81.8 ± 0.6"),
}
Place = tuple[int, int]  # K, and dilation or longest delay


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
    halves = ((delay >> times for times in itertools.count()) for delay in delays)
    return [next(delay for delay in of_layer if delay <= longest) for of_layer in halves]


def row_label(size: str, architecture: str, taps: int, delay: int) -> str:
    """Label of one place of a grid; at the paper's size with its data, which the numbers of its tables are for."""
    data = "" if size == "small" else "grey sCIFAR, "
    return f"{data}{architecture}: K {taps}, {ARCHITECTURES[architecture][1]} {delay}"


class MemoryAccuracy(PixelClassification):
    paper = {row_label("paper", name, *place): printed for name, (*place, printed) in PRINTED.items()}
    sizes = {
        "small": PixelClassification.sizes["small"] | {"epochs": 3},
        "paper": PixelClassification.sizes["paper"],
    }

    def rows(self, size: str) -> list[Settings]:
        small = size == "small"
        widths = {"hidden_size": 16, "num_hidden_layers": 3} if small else {}
        return [
            {
                "label": row_label(size, name, taps, delay),
                "architecture": name,
                "preset": preset,
                "options": {**widths, "conv_kernel": taps, _FIELDS[kind]: delay},
                "frozen": name == FROZEN,
                **self.sizes[size],
            }
            for name, (preset, kind, *_) in ARCHITECTURES.items()
            for taps, delay in itertools.product(*GRIDS[size][kind])
            if small or _is_in_the_grid(kind, taps, delay)
        ]

    def build(self, settings: Settings) -> Any:
        model = super().build(settings)
        if settings["frozen"]:
            freeze_convolutions(model)
        return model

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """One panel with a line for each architecture, and one with a grid for each."""
        lines, *panels = split_axes(axes, 2, 4, (19, 9))
        for panel, name in zip(panels, ARCHITECTURES, strict=True):
            cells = by_place([row for row in rows if row["architecture"] == name])
            if cells:
                _draw_line(lines, name, cells.values())
                _draw_grid(panel, name, cells)
            else:
                panel.axis("off")
        lines.set(xlabel="floats at inference", ylabel="accuracy (%)")
        lines.legend(fontsize="small")


def freeze_convolutions(model: Any) -> None:
    """Leave the weights of the convolutions as they are initialised; their positions are trained."""
    for name, parameter in model.named_parameters():
        if name.endswith("convolution.weight"):
            parameter.requires_grad_(False)


def _is_in_the_grid(kind: str, taps: int, delay: int) -> bool:
    """No longer delays than the paper's; learned taps are at least four steps apart at first."""
    return taps * 4 <= delay if kind == GAMMA else delay * (taps - 1) <= _LARGEST_DELAYS[kind]


def by_place(rows: Iterable[Settings]) -> dict[Place, Settings]:
    """One row for each place of a grid, with the mean of all seeds as its `value`, in per cent."""
    seeds: dict[Place, list[Settings]] = {}
    for row in rows:
        options = row["options"]
        delay = options["receptive_field"] if "receptive_field" in options else options["dilation"]
        seeds.setdefault((options["conv_kernel"], delay), []).append(row)
    return {
        place: same[0] | {"value": 100 * statistics.fmean(row["value"] for row in same)}
        for place, same in seeds.items()
    }


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (memory, accuracy) that are better than all with less or equal memory, by memory."""
    best: list[tuple[float, float]] = []
    for memory, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((memory, accuracy))
    return best


def _draw_line(panel: Any, name: str, cells: Iterable[Settings]) -> None:
    points = [(cell["total_memory"], cell["value"]) for cell in cells]
    _, _, colour, style = ARCHITECTURES[name]
    panel.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, alpha=0.5)
    panel.plot(*zip(*frontier(points), strict=True), color=colour, linestyle=style, marker="o", label=name)


def _draw_grid(panel: Any, name: str, cells: Mapping[Place, Settings]) -> None:
    """Accuracy, parameters and total memory at each place, as the paper prints them."""
    texts = {
        place: (
            cell["value"],
            f"{cell['value']:.1f}\np={cell['num_parameters']:,}\ntmf={cell['total_memory']:,}",
        )
        for place, cell in cells.items()
    }
    draw_grid(panel, texts, cmap="Greens", aspect="auto", fontsize="small")
    panel.set(xlabel=ARCHITECTURES[name][1], ylabel="K", title=name)
    panel.set_axisbelow(True)
