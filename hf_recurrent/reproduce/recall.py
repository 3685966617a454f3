"""Induction heads and associative recall (survey, section 7.8, Table 6)."""

from collections.abc import Sequence
from typing import Any

from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.training import build_model, train_on_task

# Label → preset and recurrent unit.
MODELS = {
    "Transformer (Llama)": ("llama-s0", None),
    "S4D (s5 unit)": ("memora-tiny", "s5"),
    "Memora with minGRU": ("memora-tiny", "mingru"),
    "Memora with GLRU": ("memora-tiny", "glru"),
    "Hawk": ("hawk-tiny", None),
    "Mamba (Mamba2)": ("mamba2-s0", None),
}
WIDTHS: dict[str, Settings] = {
    # Weights as narrow layers need them: from a scale of 0.02 attention does not begin to learn (docs/log.md).
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    },
    # Shorter chunks take less time in plain torch (docs/log.md).
    "mamba2": {"hidden_size": 64, "num_heads": 2, "state_size": 64, "num_hidden_layers": 2, "chunk_size": 32},
    "hawk": {"hidden_size": 48, "state_size": 96, "num_hidden_layers": 2},
    "memora": {"hidden_size": 48, "state_size": 96, "num_hidden_layers": 2},
}
TASKS: dict[str, dict[str, Settings]] = {
    "small": {
        "induction heads": {"length": 64, "vocab_size": 16},
        "associative recall": {"num_pairs": 4, "num_keys": 8, "num_values": 8, "num_queries": 8},
    },
    "paper": {
        "induction heads": {"length": 256, "vocab_size": 16},
        "associative recall": {"num_pairs": 16, "num_keys": 32, "num_values": 32, "num_queries": 8},
    },
}
SIZES: dict[str, Settings] = {
    "small": {"steps": 3000, "batch_size": 32, "learning_rate": 2e-3, "num_tested": 2000},
    "paper": {"steps": 100_000, "batch_size": 64, "learning_rate": 1e-3, "num_tested": 2000},
}
# Smaller rates than those of the sizes, for attention.
RATES: dict[str, Settings] = {"llama": {"learning_rate": 1e-3}}
# Label → Table 6: induction heads, associative recall.
PRINTED = {
    "Transformer (Llama)": ("100", "100"),
    "S4D (s5 unit)": ("35.6", "86.0"),
    "Mamba (Mamba2)": ("100", "100"),
}


class RecallTable(Experiment):
    name = "recall"
    source = "Survey, Table 6"
    claim = (
        "Attention and selective recurrence find again what stood beside a token; a recurrence with a fixed decay "
        "does not."
    )
    metric = "accuracy"
    percent = True
    paper = {  # noqa: RUF012 (read only)
        f"{task}: {label}": numbers[place]
        for place, task in enumerate(TASKS["small"])
        for label, numbers in PRINTED.items()
    }

    def rows(self, size: str) -> list[Settings]:
        return [
            {
                "label": f"{task}: {label}",
                "task": task,
                "task_options": options,
                "preset": preset,
                "widths": WIDTHS[family] | ({} if unit is None else {"recurrent_unit": unit}),
                **SIZES[size],
                **RATES.get(family, {}),
            }
            for task, options in TASKS[size].items()
            for label, (preset, unit) in MODELS.items()
            for family in [preset.split("-")[0]]
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent import AssociativeRecall, InductionHeads, evaluate_task

        kind = {"induction heads": InductionHeads, "associative recall": AssociativeRecall}[settings["task"]]
        task = kind(**settings["task_options"], seed=settings["seed"])
        model = build_model(settings["preset"], task.vocab_size, settings["seed"], **settings["widths"])
        results = train_on_task(model, task, settings)
        return {**results, "value": evaluate_task(model, task, num_examples=settings["num_tested"])["accuracy"]}

    def note(self, rows: Sequence[Settings]) -> str:
        row, rates = rows[0], sorted({row["learning_rate"] for row in rows})
        rate = f"{rates[0]:g}" + (f" for attention, {rates[-1]:g} for the others" if len(rates) > 1 else "")
        options = {row["task"]: row["task_options"] for row in rows}
        sizes = {
            "induction heads": "{length} steps of induction heads",
            "associative recall": "{num_pairs} pairs and {num_queries} queries of associative recall",
        }
        words = ", ".join(sizes[task].format(**given) for task, given in options.items())
        return (
            f"Two layers each; {row['steps']:,} steps of {row['batch_size']} examples, learning rate {rate}; {words}."
        )


EXPERIMENT = RecallTable()
