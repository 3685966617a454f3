"""Streams against IID blocks over the update stride T, at equal bytes (Memora, section 5.2)."""

from collections.abc import Iterator, Sequence
from typing import Any

from hf_recurrent import with_state
from papers.engine.experiment import Curves, Experiment, Settings
from papers.engine.training import CONSTANT_RATE, TINY_STORIES, held_out_bits, train_in_streams

# Stock code pads blocks to whole chunks: on a CPU, the default of 256 steps takes gigabytes at small strides, and at
# T = 2 even 16 take minutes.
_SMALL_MAMBA2 = {
    "hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "num_hidden_layers": 2, "chunk_size": 16
}  # fmt: skip
# Size → family → preset, and fields that replace the preset's.
MODELS: dict[str, dict[str, tuple[str, dict[str, int]]]] = {
    "small": {
        "memora": ("memora-tiny", {"hidden_size": 64, "state_size": 96}),
        "hawk": ("hawk-tiny", {"hidden_size": 64, "state_size": 96}),
        "llama": ("llama-s0", {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}),
        "mamba2": ("mamba2-s0", _SMALL_MAMBA2),
    },
    "paper": {family: (f"{family}-tinystories", {}) for family in ("memora", "hawk", "llama", "mamba2")},
}
STRIDES = {"small": (2, 16), "paper": (2, 8, 32, 128, 512, 1024)}
NAMES = {"memora": "Memora", "hawk": "Hawk", "llama": "Llama", "mamba2": "Mamba2"}
WITH_STATE = ("memora", "hawk", "mamba2")
# Memora in streams also after a part of the bytes.
BUDGETS = {"": 1, ", half of the bytes": 2, ", a quarter of the bytes": 4}
STATE_CARRIED, STATE_ZERO = "state carried", "state zero at each block"


class StrideSweep(Experiment):
    shared = {"accumulation": 1}
    sizes = {
        "small": {
            # Many steps: after 200 of them, all models are far from what they can learn (docs/log.md).
            "bytes": 1_600_000, "step_bytes": 512, "learning_rate": 3e-3,
            "corpus": "python", "eval_bytes": 100_000, "bf16": False,
        },
        "paper": {
            "epochs": 2.0, "step_bytes": 131_072, "learning_rate": 3e-4, "arguments": CONSTANT_RATE,
            "bf16": True, **TINY_STORIES,
        },
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        budget = "bytes" if "bytes" in shared else "epochs"
        return [
            {
                "label": f"{NAMES[family]}, {'streams' if regime == 'multi_stream' else 'IID'}{words}",
                "family": family,
                "regime": regime,
                "stride": stride,
                "model_size": size,
                **shared,
                budget: type(shared[budget])(shared[budget] / share),
            }
            for words, share in BUDGETS.items()
            for stride in STRIDES[size]
            for family in MODELS[size]
            for regime in ("multi_stream", "iid")
            if share == 1 or (family == "memora" and regime == "multi_stream")
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        stride, accumulation = settings["stride"], settings["accumulation"]
        if settings["step_bytes"] % (stride * accumulation):
            raise ValueError(
                f"`step_bytes` is {settings['step_bytes']}; T = {stride} times {accumulation} accumulation steps must "
                "divide it."
            )
        preset, widths = MODELS[settings["model_size"]][settings["family"]]
        if "chunk_size" in widths:
            widths = widths | {"chunk_size": min(widths["chunk_size"], stride)}
        return train_in_streams(
            preset,
            widths,
            settings | {"streams": settings["step_bytes"] // stride // accumulation},
            stride,
            evaluate=lambda model, held_out: measure(model, held_out, settings["regime"], stride),
            regime=settings["regime"],
            gradient_accumulation_steps=accumulation,
            bf16=settings["bf16"],
        )

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for kind, value in row["value"].items():
            label = row["label"] + (f", {kind}" if row["regime"] == "iid" and row["family"] in WITH_STATE else "")
            yield label, row["stride"], value

    def curves(self, rows: Sequence[Settings]) -> Curves:
        return super().curves(sorted(rows, key=lambda row: row["label"], reverse=True))


def measure(model: Any, held_out: Any, regime: str, stride: int) -> dict[str, float]:
    """Held-out bits per byte: with the state carried, and for IID training or without a state from zero at each block
    of T."""
    kinds = {}
    if hasattr(with_state(model), "init_state"):
        kinds[STATE_CARRIED] = {}
    if regime == "iid" or not kinds:  # a model without state
        streams = max(16_384 // stride, 1)
        kinds[STATE_ZERO] = {"num_streams": streams, "block_size": stride, "carry_state": False}
    return {kind: held_out_bits(model, held_out, **options) for kind, options in kinds.items()}
