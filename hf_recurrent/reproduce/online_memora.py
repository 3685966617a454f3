"""Memora learning byte by byte, by real-time recurrent learning and by one-step backpropagation (Memora, Figure 5)."""

from collections.abc import Sequence
from typing import Any

from hf_recurrent.reproduce.experiment import Experiment, Settings

METHODS = {"RTRL": "rtrl", "one-step BPTT": "truncated"}
# Size → settings of all rows, then those of many streams and of a single one.
SIZES: dict[str, Settings] = {
    "small": {
        "hidden_size": 64,
        "state_size": 96,
        "num_hidden_layers": 2,
        "corpus": "python",
        "eval_bytes": 50_000,
    },
    "paper": {
        "hidden_size": 384,
        "state_size": 512,
        "num_hidden_layers": 6,
        "corpus": "hub:roneneldan/TinyStories",
        "eval_bytes": 10_000_000,
    },
}
STREAMS: dict[str, list[Settings]] = {
    "small": [
        {"streams": 64, "steps": 12_000, "optim": "adamw_torch", "learning_rates": {"rtrl": 1e-3, "truncated": 1e-3}},
        {"streams": 1, "steps": 30_000, "optim": "rmsprop", "learning_rates": {"rtrl": 3e-4, "truncated": 3e-4}},
    ],
    "paper": [
        {
            "streams": 1024,
            "steps": 4_000_000,
            "optim": "adamw_torch",
            "learning_rates": {"rtrl": 3e-5, "truncated": 3e-5},
        },
        {
            "streams": 1,
            "steps": 20_000_000,
            "optim": "rmsprop",
            "learning_rates": {"rtrl": 3e-5, "truncated": 3e-7},
            "hidden_size": 512,
            "state_size": 768,
        },
    ],
}
EVALUATIONS = 5


class OnlineMemora(Experiment):
    name = "online-memora"
    source = "Memora, Figure 5"
    claim = (
        "Learning at every byte, with an update after each (T = 1), real-time recurrent learning ends below one-step "
        "backpropagation, with many streams and with a single one."
    )
    metric = "held-out bits per byte"
    x_label = "kB read"
    logarithmic = True

    def rows(self, size: str) -> list[Settings]:
        rows = []
        for kind in STREAMS[size]:
            learning_rates = kind["learning_rates"]
            shared = SIZES[size] | {key: value for key, value in kind.items() if key != "learning_rates"}
            for name, method in METHODS.items():
                label = f"{name}, B = {kind['streams']}"
                rows.append({"label": label, "method": method, **shared, "learning_rate": learning_rates[method]})
        return rows

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent import OnlineTrainer, OnlineTrainingArguments, load_corpus
        from hf_recurrent.cli.evaluate import limit_bytes
        from hf_recurrent.reproduce.training import build_model, run_trainer

        corpus, held_out = load_corpus(settings["corpus"]).split()
        held_out = limit_bytes(held_out, settings["eval_bytes"])
        widths = {key: settings[key] for key in ("hidden_size", "state_size", "num_hidden_layers")}
        model = build_model("memora-online", corpus.vocab_size, settings["seed"], **widths)
        steps = settings["steps"]
        results = run_trainer(
            lambda args: OnlineTrainer(model, args, corpus, held_out),
            OnlineTrainingArguments,
            steps=steps,
            seed=settings["seed"],
            measure=held_out_curve,
            method=settings["method"],
            block_size=1,
            per_device_train_batch_size=settings["streams"],
            optim=settings["optim"],
            learning_rate=settings["learning_rate"],
            eval_strategy="steps",
            eval_steps=max(steps // EVALUATIONS, 1),
            per_device_eval_batch_size=32,
            eval_block_size=512,
            bf16=False,
        )
        curve = results.pop("measured")
        value = {f"{step * settings['streams'] / 1000:g}": bits for step, bits in curve.items()}
        return {**results, "value": value}

    def line_style(self, label: str) -> dict[str, Any]:
        colour = "tab:green" if label.startswith("RTRL") else "tab:orange"
        return {"color": colour, "linestyle": ":" if label.endswith(" 1") else "-"}

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        kinds = {(r["streams"], r["optim"], r["steps"]): f"{r['steps']:,} steps with B = {r['streams']}" for r in rows}
        rates = ", ".join(sorted({f"{r['label']}: {r['learning_rate']:g}" for r in rows}))
        return (
            f"Memora of M {row['hidden_size']}, S {row['state_size']}, N {row['num_hidden_layers']} on "
            f"`{row['corpus']}`, {' and '.join(kinds.values())}; AdamW, for a single stream RMSProp; learning rates "
            f"{rates}."
        )


def held_out_curve(trainer: Any) -> dict[int, float]:
    """Optimizer step → held-out bits per byte, of all evaluations of a run."""
    return {
        entry["step"]: entry["eval_bits_per_byte"]
        for entry in trainer.state.log_history
        if "eval_bits_per_byte" in entry
    }


EXPERIMENT = OnlineMemora()
