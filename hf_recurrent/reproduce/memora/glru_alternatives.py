"""Memora with other recurrent units on text (Memora, section 5.6 and appendix F.7)."""

from typing import Any

from hf_recurrent import evaluate_bits_per_byte
from hf_recurrent.reproduce.engine.experiment import Experiment, Settings
from hf_recurrent.reproduce.engine.training import CONSTANT_RATE, build_model, split_corpus, steps_of, train

# The appendix has a dense map out of complex GLRU; the recorded rows of the small size are from before it was here.
OF_PAPER: dict[str, Settings] = {
    "complex GLRU": {"recurrent_unit": "complex_glru_read_out"},
    "restricted complex GLRU": {"recurrent_unit": "complex_glru_conjugate_read_out"},
}


class GLRUAlternatives(Experiment):
    name = "glru-alternatives"
    source = "Memora, Figure 6"
    claim = (
        "The paper's order on text: the real GLRU below (better than) the complex one, all GLRU below minGRU and LRU, "
        "and no benefit from conjugate pairs."
    )
    note = (
        "Memora of M {hidden_size}, S {state_size}, N {num_hidden_layers} after {bytes:,} bytes of `{corpus}` in "
        "{streams} streams, T = {block_size}, learning rate {learning_rate:g}."
    )
    metric = "held-out bits per byte"
    reference = "real GLRU"
    paper_seeds = 3
    lines = {
        "real GLRU": {"recurrent_unit": "glru"},
        "complex GLRU": {"recurrent_unit": "complex_glru"},
        "restricted complex GLRU": {"recurrent_unit": "complex_glru_conjugate"},
        "minGRU": {"recurrent_unit": "mingru"},
        "real LRU": {"recurrent_unit": "real_lru"},
        "complex LRU": {"recurrent_unit": "complex_lru"},
        "restricted complex LRU": {"recurrent_unit": "complex_lru_conjugate"},
    }
    sizes = {
        "small": {
            "hidden_size": 64, "state_size": 96, "num_hidden_layers": 2, "learning_rate": 3e-3,
            "bytes": 8_000_000, "streams": 32, "block_size": 64, "corpus": "python", "eval_bytes": 500_000,
        },
        "paper": {
            "hidden_size": 512, "state_size": 768, "num_hidden_layers": 12, "learning_rate": 3e-4,
            "epochs": 2.0, "streams": 256, "block_size": 512, "arguments": CONSTANT_RATE,
            "corpus": "hub:roneneldan/TinyStories", "held_out_split": "validation", "eval_bytes": 10_000_000,
        },
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        rows = super().rows(size)
        return [row | OF_PAPER.get(row["label"], {}) for row in rows] if size == "paper" else rows

    def run(self, settings: Settings) -> dict[str, Any]:
        corpus, held_out = split_corpus(settings)
        widths = {key: settings[key] for key in ("hidden_size", "state_size", "num_hidden_layers", "recurrent_unit")}
        model = build_model("memora-tiny", corpus.vocab_size, settings["seed"], **widths)
        step_bytes = settings["streams"] * settings["block_size"]
        steps = steps_of(settings, corpus, step_bytes)
        results = train(
            model,
            corpus,
            settings,
            steps=steps,
            per_device_train_batch_size=settings["streams"],
            block_size=settings["block_size"],
        )
        measured = evaluate_bits_per_byte(model, held_out, num_streams=32, block_size=512, progress=False)
        return {"bytes": settings.get("bytes", steps * step_bytes), **results, "value": measured["bits_per_byte"]}
