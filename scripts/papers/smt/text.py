"""Text byte by byte: BPTT against SMT→DMT at equal steps, sequential operations and time (SMT, section 3.3)."""

from collections.abc import Iterator, Sequence
from typing import Any

from hf_recurrent import Corpus
from papers.engine.experiment import Settings
from papers.engine.training import split_corpus
from papers.smt.models import BPTT, PAPER_MODEL, SMALL_MODEL, SMT_DMT, Pair, build_pair
from papers.smt.operations import step_operations
from papers.smt.training import MethodComparison, method_values, smt_dmt_operations, train_bptt, train_smt_dmt

EQUAL_STEPS, EQUAL_OPERATIONS, EQUAL_TIME = "equal steps", "equal sequential operations", "equal time"
# As many for both methods; SMT→DMT's second one is DMT's.
RATES = {"small": (1e-3, 3e-3, 1e-2), "paper": (1e-4, 3e-4, 1e-3)}
# Steps of BPTT for each of SMT→DMT in equal time, by the times per step on one CPU core (docs/log.md).
EQUAL_TIME_SHARE = {"small": 0.26, "paper": 0.07}


class TextMethods(MethodComparison):
    sizes = {
        "small": {
            "sizes": SMALL_MODEL | {"hidden_size": 64, "num_readout_layers": 4}, "corpus": "python",
            "steps": 500, "dmt_steps": 80, "batch_size": 16,
            "context_length": 32, "future_length": 16, "rollout_length": 32,
            "timesteps": 1, "dmt_timesteps": 8, "eval_windows": 128, "eval_bytes": 20_000,
        },
        "paper": {
            "sizes": PAPER_MODEL, "corpus": "hub:roneneldan/TinyStories",
            "steps": 151_500, "dmt_steps": 1500, "batch_size": 128, "dmt_batch_size": 32,
            "context_length": 256, "future_length": 64, "rollout_length": 256,
            "timesteps": 1, "dmt_timesteps": 16, "eval_windows": 512, "eval_bytes": 1_000_000,
        },
    }  # fmt: skip
    tuning = {
        "small": {"steps": 160, "dmt_steps": 25, "eval_bytes": 10_000},
        "paper": {"steps": 50_500, "dmt_steps": 500},
    }

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        smt = [{"learning_rate": rate, "dmt_learning_rate": rate / 3} for rate in RATES[size]]
        bptt = {"method": BPTT, "candidates": [{"bptt_learning_rate": rate} for rate in RATES[size]], **shared}
        return [
            {"label": SMT_DMT, "method": SMT_DMT, "candidates": smt, **shared},
            {"label": f"{BPTT}, {EQUAL_OPERATIONS}", **bptt},
            {"label": f"{BPTT}, {EQUAL_TIME}", **bptt, "bptt_share": EQUAL_TIME_SHARE[size]},
            {"label": f"{BPTT}, {EQUAL_STEPS}", **bptt, "bptt_share": 1.0},
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, _ = train_on_text(settings)
        return {**results, "value": method_values(results, "bits_per_byte")}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for part, value in row["value"].items():
            yield row["label"] if part == row["method"] else part, None, value

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        steps = {"optimizer steps": f"{rows[-1].get('bptt_steps', rows[-1]['steps']):,}"}
        seconds = [row["core_seconds"] for row in rows if "core_seconds" in row]
        time = {"core seconds": f"{min(seconds):,.0f}"} if seconds else {}
        return {**super().details(rows), **steps, **time}


def train_on_text(settings: Settings) -> tuple[dict[str, Any], Pair, Corpus]:
    """Train an RNN on a row's `corpus` by its `method`.

    Args:
        settings: a row with settings of training. BPTT has `bptt_share` of the steps of SMT→DMT, or without it as many
            as take its sequential operations.

    Returns:
        Results, (RNN, teacher), held-out text.
    """
    corpus, held_out = split_corpus(settings)
    pair = build_pair(settings["sizes"], corpus.vocab_size, settings["seed"])
    lengths = {key: settings[key] for key in ("context_length", "future_length", "rollout_length")}
    if settings["method"] == SMT_DMT:
        return train_smt_dmt(pair, corpus, held_out, settings, lengths), pair, held_out
    # As many bytes of each sequence as a step of SMT reads.
    block_size = settings["context_length"] + settings["future_length"]
    if "bptt_share" in settings:
        steps = round(settings["steps"] * settings["bptt_share"])
    else:
        steps = smt_dmt_operations(pair, settings, lengths) // step_operations(*pair, BPTT, block_size)
    steps = max(steps, 1)
    results = train_bptt(pair[0], corpus, held_out, {**settings, "steps": steps}, block_size=block_size)
    return {**results, "bptt_steps": steps}, pair, held_out
