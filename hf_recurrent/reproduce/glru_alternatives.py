"""Memora with other recurrent units on text (Memora, section 5.6 and appendix F.7)."""

from typing import Any

from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.training import build_model, train

# Label → recurrent unit, in the paper's words.
UNITS = {
    "real GLRU": "glru",
    "complex GLRU": "complex_glru",
    "restricted complex GLRU": "complex_glru_conjugate",
    "minGRU": "mingru",
    "real LRU": "real_lru",
    "complex LRU": "complex_lru",
    "restricted complex LRU": "complex_lru_conjugate",
}
SIZES: dict[str, Settings] = {
    "small": {
        "hidden_size": 64,
        "state_size": 96,
        "num_hidden_layers": 2,
        "bytes": 8_000_000,
        "streams": 32,
        "block_size": 64,
        "learning_rate": 3e-3,
        "corpus": "python",
        "eval_bytes": 500_000,
    },
    "paper": {
        "hidden_size": 512,
        "state_size": 768,
        "num_hidden_layers": 12,
        "bytes": 4_000_000_000,
        "streams": 256,
        "block_size": 512,
        "learning_rate": 3e-4,
        "corpus": "hub:roneneldan/TinyStories",
        "eval_bytes": 10_000_000,
    },
}


class GLRUAlternatives(Experiment):
    name = "glru-alternatives"
    source = "Memora, Figure 6"
    claim = (
        "The paper's order on text: the real GLRU below (better than) the complex one, all GLRU below minGRU and LRU, "
        "and no benefit from conjugate pairs."
    )
    metric = "held-out bits per byte"

    def rows(self, size: str) -> list[Settings]:
        return [{"label": label, "recurrent_unit": unit, **SIZES[size]} for label, unit in UNITS.items()]

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent import evaluate_bits_per_byte, load_corpus
        from hf_recurrent.cli.evaluate import limit_bytes

        corpus, held_out = load_corpus(settings["corpus"]).split()
        held_out = limit_bytes(held_out, settings["eval_bytes"])
        widths = {key: settings[key] for key in ("hidden_size", "state_size", "num_hidden_layers", "recurrent_unit")}
        model = build_model("memora-tiny", corpus.vocab_size, settings["seed"], **widths)
        results = train(
            model,
            corpus,
            steps=max(settings["bytes"] // (settings["streams"] * settings["block_size"]), 1),
            seed=settings["seed"],
            per_device_train_batch_size=settings["streams"],
            block_size=settings["block_size"],
            learning_rate=settings["learning_rate"],
        )
        measured = evaluate_bits_per_byte(model, held_out, num_streams=32, block_size=512, progress=False)
        return {**results, "value": measured["bits_per_byte"]}

    def note(self, rows: list[Settings]) -> str:
        row = rows[0]
        return (
            f"Memora of M {row['hidden_size']}, S {row['state_size']}, N {row['num_hidden_layers']} after "
            f"{row['bytes']:,} bytes of `{row['corpus']}` in {row['streams']} streams, T = {row['block_size']}, "
            f"learning rate {row['learning_rate']:g}."
        )


EXPERIMENT = GLRUAlternatives()
