"""Parity beyond the training length, with and without negative eigenvalues (Grazzi et al. 2024); induction heads and
associative recall (survey, section 7.8, Table 6)."""

from typing import Any

from hf_recurrent import AssociativeRecall, InductionHeads, Parity, evaluate_task
from papers.engine.experiment import Experiment, Settings
from papers.engine.training import build_model, train_on_task

RECURRENT = {"hidden_size": 48, "state_size": 96, "num_hidden_layers": 2}
# Initial weights for narrow layers: at a scale of 0.02 attention does not begin to learn (docs/log.md).
LLAMA = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
# Shorter chunks take less time in plain torch (docs/log.md).
MAMBA2 = {"hidden_size": 64, "num_heads": 2, "state_size": 64, "num_hidden_layers": 2, "chunk_size": 32}
# Units with four numbers of state for each of the output.
_OF_FOUR = {"hidden_size": 32, "state_size": 256, "num_hidden_layers": 2}
# Label → settings of its rows. Attention learns at the same rate at both sizes.
MODELS: dict[str, Settings] = {
    "Transformer (Llama)": {"preset": "llama-s0", "widths": LLAMA, "learning_rate": 1e-3},
    "S4D (s5 unit)": {"preset": "memora-tiny", "widths": RECURRENT | {"recurrent_unit": "s5"}},
    "GSS": {"preset": "memora-tiny", "widths": RECURRENT | {"recurrent_unit": "gss"}},
    # As many channels as the model is wide, as published: four numbers of state each.
    "H3": {"preset": "memora-tiny", "widths": RECURRENT | {"recurrent_unit": "h3", "state_size": 192}},
    "Memora with minGRU": {"preset": "memora-tiny", "widths": RECURRENT | {"recurrent_unit": "mingru"}},
    "Memora with GLRU": {"preset": "memora-tiny", "widths": RECURRENT | {"recurrent_unit": "glru"}},
    "Memora with gated_delta": {"preset": "memora-tiny", "widths": _OF_FOUR | {"recurrent_unit": "gated_delta"}},
    "Memora with rwkv7": {"preset": "memora-tiny", "widths": _OF_FOUR | {"recurrent_unit": "rwkv7"}},
    "Hawk": {"preset": "hawk-tiny", "widths": RECURRENT},
    "Mamba (Mamba2)": {"preset": "mamba2-s0", "widths": MAMBA2},
}
TASKS: dict[str, dict[str, Settings]] = {
    "small": {
        "induction heads": {"length": 32, "vocab_size": 16},
        "associative recall": {"num_pairs": 4, "num_keys": 8, "num_values": 8, "num_queries": 8},
    },
    "paper": {
        "induction heads": {"length": 256, "vocab_size": 16},
        "associative recall": {"num_pairs": 16, "num_keys": 32, "num_values": 32, "num_queries": 8},
    },
}
SIZES: dict[str, Settings] = {
    "small": {"steps": 1200, "batch_size": 32, "learning_rate": 2e-3, "num_tested": 2000},
    "paper": {"steps": 100_000, "batch_size": 64, "learning_rate": 1e-3, "num_tested": 2000},
}
# Label → accuracy in Table 6: induction heads, associative recall.
PRINTED = {
    "Transformer (Llama)": ("100", "100"),
    "S4D (s5 unit)": ("35.6", "86.0"),
    "GSS": ("6.8", "78.0"),
    "H3": ("100", "99.8"),
    "Mamba (Mamba2)": ("100", "100"),
}
UNITS = {"GLRU": "glru", "minGRU": "mingru", "HGRN": "hgrn"}


class RecallTable(Experiment):
    paper = {
        f"{task}: {label}": numbers[place]
        for place, task in enumerate(TASKS["small"])
        for label, numbers in PRINTED.items()
    }

    def rows(self, size: str) -> list[Settings]:
        return [
            {"label": f"{task}: {label}", "task": task, "task_options": options, **SIZES[size], **model}
            for task, options in TASKS[size].items()
            for label, model in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        kind = {"induction heads": InductionHeads, "associative recall": AssociativeRecall}[settings["task"]]
        task = kind(**settings["task_options"], seed=settings["seed"])
        model = build_model(settings["preset"], task.vocab_size, settings["seed"], **settings["widths"])
        results = train_on_task(model, task, settings)
        return {**results, "value": evaluate_task(model, task, num_examples=settings["num_tested"])["accuracy"]}


class ParityLengths(Experiment):
    lines = {
        label + suffix: {"recurrent_unit": unit, "allow_negative_eigenvalues": bool(suffix)}
        for label, unit in UNITS.items()
        for suffix in ("", ", negative eigenvalues")
    }
    shared = {"length": 40, "num_tested": 2000}
    sizes = {
        "small": {"steps": 1500, "batch_size": 64, "learning_rate": 2e-3, "longest": 640},
        "paper": {"steps": 20_000, "batch_size": 256, "learning_rate": 1e-3, "longest": 2560},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        seed, length = settings["seed"], settings["length"]
        options = {key: settings[key] for key in ("recurrent_unit", "allow_negative_eigenvalues")}
        widths = {"hidden_size": 32, "state_size": 64, "num_hidden_layers": 2}
        model = build_model("memora-tiny", 2, seed, **widths, **options)
        results = train_on_task(model, Parity(length=length, seed=seed), settings)
        value, tested = {}, length
        while tested <= settings["longest"]:
            task = Parity(length=tested, seed=seed, final_only=True)
            measured = evaluate_task(model, task, num_examples=settings["num_tested"], block_size=512)
            value[str(tested)] = measured["accuracy"]
            tested *= 2
        return {**results, "value": value}
