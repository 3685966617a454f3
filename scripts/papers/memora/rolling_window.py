"""Windows of T bytes that overlap, S bytes apart (Memora, section 3: the rolling window)."""

from typing import Any

from hf_recurrent import RollingWindowTrainer, RollingWindowTrainingArguments
from papers.engine.experiment import Experiment, Settings
from papers.engine.training import CONSTANT_RATE, build_model, held_out_bits, run_trainer, split_corpus, steps_of

EQUAL_BYTES, EQUAL_UPDATES = "equal bytes", "equal updates"
OVERLAPS = (1, 2, 4)  # T / S


class RollingWindow(Experiment):
    sizes = {
        "small": {
            "preset": "memora-tiny", "widths": {"hidden_size": 64, "state_size": 96, "num_hidden_layers": 2},
            "bytes": 1_000_000, "streams": 64, "window": 64, "learning_rate": 3e-3, "corpus": "python",
            "eval_bytes": 200_000,
        },
        # Appendix F.2, at T = 128.
        "paper": {
            "preset": "memora-tinystories",
            "widths": {"hidden_size": 512, "state_size": 768, "num_hidden_layers": 14},
            "bytes": 4_000_000_000, "streams": 1024, "window": 128, "learning_rate": 3e-4,
            "arguments": CONSTANT_RATE, "corpus": "hub:roneneldan/TinyStories", "held_out_split": "validation",
            "eval_bytes": 10_000_000,
        },
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        return [
            {
                "label": budget,
                "overlap": overlap,
                **shared,
                "bytes": shared["bytes"] // (overlap if budget == EQUAL_UPDATES else 1),
            }
            for budget in (EQUAL_BYTES, EQUAL_UPDATES)
            for overlap in OVERLAPS
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        corpus, held_out = split_corpus(settings)
        model = build_model(settings["preset"], corpus.vocab_size, settings["seed"], **settings["widths"])
        stride = settings["window"] // settings["overlap"]
        results = run_trainer(
            lambda args: RollingWindowTrainer(model, args, corpus),
            RollingWindowTrainingArguments,
            steps=steps_of(settings, corpus, settings["streams"] * stride),
            window=settings["window"],
            block_size=stride,
            per_device_train_batch_size=settings["streams"],
            learning_rate=settings["learning_rate"],
            seed=settings["seed"],
            **settings.get("arguments", {}),
        )
        return {**results, "value": held_out_bits(model, held_out)}
