"""Memora learning byte by byte, by real-time recurrent learning and by one-step backpropagation (Memora, Figure 5)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_recurrent.reproduce.experiment import Curves, Experiment, Settings

if TYPE_CHECKING:
    from hf_recurrent import Corpus

METHODS = {"RTRL": "rtrl", "one-step BPTT": "truncated"}
# Size → settings of all rows, then those of many streams and of a single one.
SIZES: dict[str, Settings] = {
    "small": {
        "hidden_size": 64,
        "state_size": 96,
        "num_hidden_layers": 2,
        "corpus": "python",
        "episode_bytes": 1000,
        "eval_bytes": 50_000,
    },
    "paper": {
        "hidden_size": 384,
        "state_size": 512,
        "num_hidden_layers": 6,
        "corpus": "hub:roneneldan/TinyStories",
        "episode_bytes": 0,
        "eval_bytes": 10_000_000,
    },
}
STREAMS: dict[str, list[Settings]] = {
    "small": [
        {"streams": 64, "steps": 6000, "optim": "adamw_torch", "learning_rates": {"rtrl": 1e-3, "truncated": 1e-3}},
        {
            "streams": 1,
            "steps": 16_000,
            "optim": "adamw_torch",
            "learning_rates": {"rtrl": 3e-4, "truncated": 3e-4},
            "arguments": {"adam_beta2": 0.9999, "warmup_steps": 500, "lr_scheduler_type": "cosine"},
        },
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
# The bytes that were read since the last evaluation, each predicted before it was learned from.
WHILE_READING = "while reading"


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
        if settings["episode_bytes"]:
            corpus, held_out = (cut_documents(part, settings["episode_bytes"]) for part in (corpus, held_out))
        held_out = limit_bytes(held_out, settings["eval_bytes"])
        widths = {key: settings[key] for key in ("hidden_size", "state_size", "num_hidden_layers")}
        model = build_model("memora-online", corpus.vocab_size, settings["seed"], **widths)
        steps = settings["steps"]
        results = run_trainer(
            lambda args: OnlineTrainer(model, args, corpus, held_out),
            OnlineTrainingArguments,
            steps=steps,
            seed=settings["seed"],
            measure=read_log,
            method=settings["method"],
            block_size=1,
            per_device_train_batch_size=settings["streams"],
            optim=settings["optim"],
            learning_rate=settings["learning_rate"],
            eval_strategy="steps",
            eval_steps=max(steps // EVALUATIONS, 1),
            logging_steps=max(steps // EVALUATIONS, 1),
            per_device_eval_batch_size=32,
            eval_block_size=512,
            bf16=False,
            **settings.get("arguments", {}),
        )
        held_out, while_reading = (
            {f"{step * settings['streams'] / 1000:g}": bits for step, bits in curve.items()}
            for curve in results.pop("measured")
        )
        return {**results, "value": held_out, WHILE_READING: while_reading}

    def curves(self, rows: Sequence[Settings]) -> Curves:
        result = super().curves(rows)
        for row in rows:
            line = result.setdefault(f"{row['label']}, {WHILE_READING}", {})
            for place, value in row[WHILE_READING].items():
                line.setdefault(float(place), []).append(value)
        return result

    def line_style(self, label: str) -> dict[str, Any]:
        colour = "tab:green" if label.startswith("RTRL") else "tab:orange"
        streams = label.split(", ")[1]
        line = ("-." if streams == "B = 1" else "--") if label.endswith(WHILE_READING) else "-"
        return {"color": colour, "linestyle": line, "marker": "o" if streams == "B = 1" else "s"}

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        cut = f" in excerpts of {row['episode_bytes']:,} bytes" if row["episode_bytes"] else ""
        kinds = " and ".join(dict.fromkeys(map(_describe, rows)))
        rates = ", ".join(sorted({f"{r['label']}: {r['learning_rate']:g}" for r in rows}))
        return (
            f"Memora of M {row['hidden_size']}, S {row['state_size']}, N {row['num_hidden_layers']} on "
            f"`{row['corpus']}`{cut}, {kinds}; learning rates {rates}. Lines {WHILE_READING!r}: the bytes read since "
            "the last column, each predicted before it was learned from."
        )


def _describe(row: Settings) -> str:
    """Steps, streams and optimizer of a row."""
    words = [row["optim"], *(f"{name} {value}" for name, value in row.get("arguments", {}).items())]
    return f"{row['steps']:,} steps with B = {row['streams']} ({', '.join(words)})"


def cut_documents(corpus: "Corpus", num_bytes: int) -> "Corpus":
    """Excerpts of so many bytes, about a story of the paper: a short stream of whole files would hold one."""
    from hf_recurrent import Corpus

    return Corpus.from_documents(
        document[start : start + num_bytes].tobytes()
        for document in corpus
        for start in range(0, len(document), num_bytes)
    )


def read_log(trainer: Any) -> tuple[dict[int, float], dict[int, float]]:
    """Optimizer step → held-out bits per byte at it, and → those of the bytes read since the last one."""
    history = trainer.state.log_history
    return tuple(
        {entry["step"]: entry[name] for entry in history if name in entry}
        for name in ("eval_bits_per_byte", "bits_per_byte")
    )


EXPERIMENT = OnlineMemora()
