"""Accuracy against memory, over taps and delays of the convolutions (mGRADE, figures 4B and S2 to S4)."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from papers.engine.experiment import Settings
from papers.mgrade.memory_figure import draw_figure
from papers.mgrade.pixel_classification import PixelClassification

DILATION, BASE_DILATION, LONGEST_DELAY = "d", "d_b", "Γ"
_FIELDS = {DILATION: "dilation", BASE_DILATION: "dilation", LONGEST_DELAY: "receptive_field"}


class Architecture(NamedTuple):
    """One grid of figures S2 to S4.

    Args:
        preset: of the paper's grey sCIFAR.
        delay: the setting that the grid varies in addition to the number of taps.
        frozen: the weights of the convolutions are not trained; learned positions are.
    """

    preset: str
    delay: str
    frozen: bool = False


ARCHITECTURES = {
    "TCN-CD": Architecture("tcn-scifar", DILATION),
    "mGRADE-CD": Architecture("mgrade-scifar", DILATION),
    "TCN-EID": Architecture("tcn-scifar-exponential", BASE_DILATION),
    "mGRADE-EID": Architecture("mgrade-scifar-exponential", BASE_DILATION),
    "mGRADE-L, frozen weights": Architecture("mgrade-scifar-learned", LONGEST_DELAY, frozen=True),
    "mGRADE-L": Architecture("mgrade-scifar-learned", LONGEST_DELAY),
    "mGRADE-L, random positions": Architecture("mgrade-scifar-learned-uniform", LONGEST_DELAY),
}
# The paper's grids are in its pictures only; these contain the settings of its tables.
_PAPER_TAPS = (4, 8, 16, 32, 64)
# Size → delay → values of K, values of the delay. With d 14 the taps see one column of the small digits, as with d 32
# one of CIFAR; d_b 6 needs as much memory.
GRIDS = {
    "small": {DILATION: ((4, 8), (2, 14)), BASE_DILATION: ((4, 8), (1, 6)), LONGEST_DELAY: ((8,), (16, 112))},
    "paper": {
        DILATION: (_PAPER_TAPS, (1, 2, 8, 32)),
        BASE_DILATION: (_PAPER_TAPS, (1, 2, 4, 8)),
        LONGEST_DELAY: (_PAPER_TAPS, (64, 128, 256)),
    },
}
# Largest d (K-1) and d_b (K-1), by the largest of the tables and of figure 4A.
_LARGEST = {DILATION: 256, BASE_DILATION: 64}
# Architecture → K, delay, test accuracy in tables 1 and 2.
PRINTED = {
    "TCN-CD": (64, 1, "77.1 ± 0.6"),
    "mGRADE-CD": (8, 32, "81.9 ± 0.4"),
    "TCN-EID": (64, 1, "81.6 ± 0.3"),
    "mGRADE-EID": (16, 2, "82.6 ± 0.1"),
    "mGRADE-L": (8, 256, "82.9 ± 0.6"),
    "mGRADE-L, random positions": (16, 128, "81.8 ± 0.6"),
}


def row_label(size: str, architecture: str, taps: int, delay: int) -> str:
    """Label of one place of a grid; at the paper's size with its data, which the numbers of its tables are for."""
    data = "" if size == "small" else "grey sCIFAR, "
    return f"{data}{architecture}: K {taps}, {ARCHITECTURES[architecture].delay} {delay}"


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
                "preset": architecture.preset,
                "options": {**widths, "conv_kernel": taps, _FIELDS[architecture.delay]: delay},
                "frozen": architecture.frozen,
                **self.sizes[size],
            }
            for name, architecture in ARCHITECTURES.items()
            for taps, delay in itertools.product(*GRIDS[size][architecture.delay])
            if small or _is_in_the_grid(architecture.delay, taps, delay)
        ]

    def build(self, settings: Settings) -> Any:
        model = super().build(settings)
        if settings["frozen"]:
            freeze_convolutions(model)
        return model

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        draw_figure(axes, rows, {name: architecture.delay for name, architecture in ARCHITECTURES.items()})


def freeze_convolutions(model: Any) -> None:
    """Leave the weights of the convolutions as they are initialised; their positions are trained."""
    for name, parameter in model.named_parameters():
        if name.endswith("convolution.weight"):
            parameter.requires_grad_(False)


def _is_in_the_grid(kind: str, taps: int, delay: int) -> bool:
    """No longer delays than the paper's; learned taps are at least four steps apart at first."""
    return taps * 4 <= delay if kind == LONGEST_DELAY else delay * (taps - 1) <= _LARGEST[kind]
