"""Memora learning byte by byte, by RTRL and by one-step BPTT (Memora, Figure 5)."""

from collections.abc import Sequence
from typing import Any

from hf_recurrent import OnlineTrainer, OnlineTrainingArguments
from papers.engine.experiment import Curves, Experiment, Settings
from papers.engine.training import TINY_STORIES, build_model, logged, split_corpus, steps_of, train

METHODS = {"RTRL": "rtrl", "one-step BPTT": "truncated"}
# Settings of all rows. Short streams of whole files would each hold one file, so the small size has excerpts.
SIZES: dict[str, Settings] = {
    "small": {
        "hidden_size": 64, "state_size": 96, "num_hidden_layers": 2,
        "corpus": "python", "episode_bytes": 1000, "eval_bytes": 50_000, "optim": "adamw_torch",
    },
    "paper": {
        "hidden_size": 384, "state_size": 512, "num_hidden_layers": 6,
        "episode_bytes": 0, "optim": "adamw_torch", "bf16": True, **TINY_STORIES,
    },
}  # fmt: skip
_SINGLE_STREAM: Settings = {
    "streams": 1, "steps": 20_000_000, "hidden_size": 512, "state_size": 768, "optim": "rmsprop",
    "arguments": {"weight_decay": 0.0, "max_grad_norm": 0.0},
}  # fmt: skip
_SLOW = {"adam_beta2": 0.9999, "warmup_steps": 500, "lr_scheduler_type": "cosine"}
# Learning rates of METHODS, and settings: of many streams, then of a single one.
STREAMS: dict[str, list[tuple[tuple[float, float], Settings]]] = {
    "small": [
        ((1e-3, 1e-3), {"streams": 64, "steps": 6000}),
        ((3e-4, 3e-4), {"streams": 1, "steps": 16_000, "arguments": _SLOW}),
    ],
    "paper": [
        ((3e-5, 3e-5), {"streams": 1024, "epochs": 2.0}),
        ((3e-5, 3e-7), _SINGLE_STREAM),
    ],
}
EVALUATIONS = 5
# Bits per byte of the bytes read since the last evaluation, each predicted before it was learned from.
WHILE_READING = "while reading"


class OnlineMemora(Experiment):
    def rows(self, size: str) -> list[Settings]:
        rows = [
            {"label": f"{name}, B = {kind['streams']}", "method": method, "learning_rate": rate, **SIZES[size], **kind}
            for rates, kind in STREAMS[size]
            for (name, method), rate in zip(METHODS.items(), rates, strict=True)
        ]
        # Figure 5a has Hawk in many streams.
        hawk = {"preset": "hawk-online", **({"learning_rate": 3e-7} if size == "paper" else {})}
        many = [row for row in rows if row["streams"] > 1]
        return [*rows, *({**row, "label": f"{row['label']}, Hawk", **hawk} for row in many)]

    def run(self, settings: Settings) -> dict[str, Any]:
        corpus, held_out = split_corpus(settings)
        widths = {key: settings[key] for key in ("hidden_size", "state_size", "num_hidden_layers")}
        fields = {**widths, **settings.get("fields", {})}
        model = build_model(settings.get("preset", "memora-online"), corpus.vocab_size, settings["seed"], **fields)
        steps = steps_of(settings, corpus, settings["streams"])
        between = max(steps // EVALUATIONS, 1)
        results = train(
            model,
            corpus,
            settings,
            held_out,
            OnlineTrainer,
            OnlineTrainingArguments,
            steps=steps,
            measure=lambda trainer: [logged(trainer, name) for name in ("eval_bits_per_byte", "bits_per_byte")],
            block_size=1,
            per_device_train_batch_size=settings["streams"],
            eval_strategy="steps",
            eval_steps=between,
            logging_steps=between,
            per_device_eval_batch_size=32,
            eval_block_size=512,
            bf16=settings.get("bf16", False),
            method=settings["method"],
            optim=settings["optim"],
        )
        for key, curve in zip(("value", WHILE_READING), results.pop("measured"), strict=True):
            results[key] = {f"{step * settings['streams'] / 1000:g}": bits for step, bits in curve.items()}
        return {"steps": steps, **results}

    def curves(self, rows: Sequence[Settings]) -> Curves:
        reading = [{"label": f"{row['label']}, {WHILE_READING}", "value": row[WHILE_READING]} for row in rows]
        return super().curves([*rows, *reading])
