"""Streams against IID blocks over the update stride T, at equal bytes (figure 2 of the Memora paper, smaller).

    python scripts/stride_sweep.py                                            # M 64, on a CPU
    python scripts/stride_sweep.py --model_size 60m --corpus hub:roneneldan/TinyStories --bytes 500e6   # on a GPU

Every row trains one model: a family, a regime, a stride, a seed. The bytes of an optimizer step are the same in all
rows (B = step bytes / T), so all take the same number of steps. Held-out bits per byte are measured over whole
episodes with the state carried, and for IID rows also as IID training sees text: the state zero at each block of T.
Rows go to a JSON file as they finish; started again, the script does only those that are missing.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Size → preset of each family, and what replaces the preset's fields.
MODELS: dict[str, dict[str, tuple[str, dict[str, int]]]] = {
    "tiny": {
        "memora": ("memora-tiny", {"hidden_size": 64, "state_size": 96}),
        "hawk": ("hawk-tiny", {"hidden_size": 64, "state_size": 96}),
        "llama": ("llama-s0", {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}),
    },
    "60m": {family: (f"{family}-tinystories", {}) for family in ("memora", "hawk", "llama")},
}
DEFAULTS = {
    "tiny": {"bytes": 3_000_000, "step_bytes": 4096, "learning_rate": 3e-3},
    "60m": {"bytes": 500_000_000, "step_bytes": 131_072, "learning_rate": 3e-4},
}
STRIDES = [2, 8, 32, 128, 512]
FAMILIES = ["memora", "hawk", "llama"]
# What a curve shows: label, family, regime, which measurement.
CURVES = [
    ("Memora, streams", "memora", "multi_stream", "carried"),
    ("Memora, IID, state carried", "memora", "iid", "carried"),
    ("Memora, IID, state zero at each block", "memora", "iid", "zero_state"),
    ("Hawk, streams", "hawk", "multi_stream", "carried"),
    ("Hawk, IID, state carried", "hawk", "iid", "carried"),
    ("Hawk, IID, state zero at each block", "hawk", "iid", "zero_state"),
    ("Llama, IID", "llama", "iid", "zero_state"),
]


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_size", "--model-size", default="tiny", choices=list(MODELS))
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--strides", nargs="+", type=int, default=STRIDES, help="values of T")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--bytes", type=float, help="bytes that each row trains on; 3e6 for tiny, 500e6 for 60m")
    parser.add_argument("--step_bytes", "--step-bytes", type=int, help="B·T, bytes of an optimizer step")
    parser.add_argument("--learning_rate", "--learning-rate", type=float, help="3e-3 for tiny, 3e-4 for 60m")
    parser.add_argument(
        "--gradient_accumulation_steps",
        type=int,
        default=1,
        help="cut a step into so many parts where it does not fit into memory; streams stay the same",
    )
    parser.add_argument("--corpus", default="python", help="python, a path, or hub:owner/name")
    parser.add_argument("--corpus_bytes", type=float, help="read so much of the corpus only")
    parser.add_argument("--eval_bytes", type=float, default=1e6, help="held-out bytes, in whole episodes")
    parser.add_argument("--output_dir", "--output-dir", type=Path, default=Path("docs/results"))
    return parser


def rows_to_train(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The settings of every row, which also tell it from all others. Llama has no state: IID only."""
    for seed in arguments.seeds:
        for stride in arguments.strides:
            for family in arguments.families:
                for regime in ("iid",) if family == "llama" else ("multi_stream", "iid"):
                    yield {**common_settings(arguments), **_row(family, regime, stride, seed)}


def _row(family: str, regime: str, stride: int, seed: int) -> dict[str, Any]:
    return {"family": family, "regime": regime, "stride": stride, "seed": seed}


def common_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all rows of one sweep have in common."""
    return {
        "model_size": arguments.model_size,
        "bytes": int(arguments.bytes),
        "step_bytes": arguments.step_bytes,
        "learning_rate": arguments.learning_rate,
        "corpus": arguments.corpus,
        "corpus_bytes": None if arguments.corpus_bytes is None else int(arguments.corpus_bytes),
        "eval_bytes": int(arguments.eval_bytes),
    }


def train_row(settings: dict[str, Any], train: Any, held_out: Any, accumulation: int = 1) -> dict[str, Any]:
    """Train one model and measure it: the results of a row."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from hf_recurrent import MultiStreamTrainer, MultiStreamTrainingArguments, config_from_preset

    stride = settings["stride"]
    preset, overrides = MODELS[settings["model_size"]][settings["family"]]
    set_seed(settings["seed"])
    model = AutoModelForCausalLM.from_config(config_from_preset(preset, vocab_size=train.vocab_size, **overrides))
    steps = max(settings["bytes"] // settings["step_bytes"], 1)
    with tempfile.TemporaryDirectory() as directory:
        trainer = MultiStreamTrainer(
            model,
            MultiStreamTrainingArguments(
                output_dir=directory,
                regime=settings["regime"],
                block_size=stride,
                per_device_train_batch_size=settings["step_bytes"] // stride // accumulation,
                gradient_accumulation_steps=accumulation,
                max_steps=steps,
                learning_rate=settings["learning_rate"],
                seed=settings["seed"],
                bf16=torch.cuda.is_available(),
                logging_steps=max(steps // 10, 1),
                save_strategy="no",
                eval_strategy="no",
                report_to="none",
            ),
            train_corpus=train,
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    return {
        **measure(model, held_out, settings["regime"], stride),
        "steps": steps,
        "streams": settings["step_bytes"] // stride,
        "num_parameters": model.num_parameters(),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def measure(model: Any, held_out: Any, regime: str, stride: int) -> dict[str, float | None]:
    """Held-out bits per byte: `carried` for models with a state, `zero_state` for those that IID trained."""
    from hf_recurrent import evaluate_bits_per_byte
    from hf_recurrent.bits_per_byte import supports_recurrent_state

    def bits_per_byte(**options: Any) -> float:
        return evaluate_bits_per_byte(model, held_out, progress=False, **options)["bits_per_byte"]

    zero_state = {"num_streams": max(16_384 // stride, 1), "block_size": stride, "carry_state": False}
    return {
        "carried": bits_per_byte(num_streams=32, block_size=512) if supports_recurrent_state(model) else None,
        "zero_state": bits_per_byte(**zero_state) if regime == "iid" else None,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that an earlier run left.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is no list of rows")
    except ValueError as error:
        raise ValueError(f"`{path}` is damaged ({error}); move it away to begin a new sweep.") from error
    return rows


def write_text(text: str, path: Path) -> None:
    """Write beside and rename, so that an interruption leaves the old file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def curves(rows: list[dict[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """Label → stride → the measurements of all seeds, for the curves that there are rows for."""
    result: dict[str, dict[int, list[float]]] = {}
    for label, family, regime, measurement in CURVES:
        for row in sorted(rows, key=lambda row: row["stride"]):
            if (row["family"], row["regime"]) == (family, regime) and row[measurement] is not None:
                result.setdefault(label, {}).setdefault(row["stride"], []).append(row[measurement])
    return result


def markdown(rows: list[dict[str, Any]], common: dict[str, Any]) -> str:
    """The table: a line for each curve, a column for each stride; with several seeds mean and half the range."""
    lines_of = curves(rows)
    strides = sorted({stride for line in lines_of.values() for stride in line})
    parameters = {row["family"]: row["num_parameters"] for row in rows}
    devices = sorted({row["device"] for row in rows})
    sizes = ", ".join(f"{family.capitalize()} {count:,}" for family, count in sorted(parameters.items()))
    lines = [
        f"# Update stride, {common['model_size']} models",
        "",
        f"Held-out bits per byte after {common['bytes']:,} bytes of `{common['corpus']}`. An optimizer step reads "
        f"{common['step_bytes']:,} bytes, so B = {common['step_bytes']:,} / T; learning rate "
        f"{common['learning_rate']:g}; {len({row['seed'] for row in rows})} seed(s); on {', '.join(devices)}. "
        f"Parameters: {sizes}.",
        "",
        "| | " + " | ".join(f"T = {stride}" for stride in strides) + " |",
        "|---|" + "---|" * len(strides),
    ]
    for label, line in lines_of.items():
        lines.append(f"| {label} | " + " | ".join(_cell(line.get(stride)) for stride in strides) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float] | None) -> str:
    if not values:
        return "-"
    mean = sum(values) / len(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {(max(values) - min(values)) / 2:.3f}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The same as a picture: streams solid, IID dashed, and dotted with the state zero at each block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"Memora": "tab:blue", "Hawk": "tab:orange", "Llama": "tab:green"}
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, line in curves(rows).items():
        style = "-" if label.endswith("streams") else "--" if label.endswith("carried") else ":"
        means = [sum(values) / len(values) for values in line.values()]
        axes.plot(list(line), means, style, marker="o", color=colours[label.split(",")[0]], label=label)
    strides = sorted({row["stride"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(strides, [str(stride) for stride in strides])
    axes.set_xlabel("update stride T (bytes)")
    axes.set_ylabel("held-out bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def check(arguments: argparse.Namespace) -> None:
    """Fill in the defaults of the size, and raise ValueError for what cannot be trained."""
    for name, value in DEFAULTS[arguments.model_size].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.bytes < arguments.step_bytes:
        raise ValueError(f"--bytes is {arguments.bytes:g}; it must be at least one step of {arguments.step_bytes}.")
    if arguments.gradient_accumulation_steps < 1:
        raise ValueError(f"--gradient_accumulation_steps is {arguments.gradient_accumulation_steps}; at least 1.")
    for stride in arguments.strides:
        if stride < 1 or arguments.step_bytes % (stride * arguments.gradient_accumulation_steps):
            raise ValueError(
                f"--strides has {stride}; it must be at least 1, and times {arguments.gradient_accumulation_steps} "
                f"accumulation steps divide the {arguments.step_bytes} bytes of a step."
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Train the rows that are missing, then write table and plot."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        check(arguments)
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        base = arguments.output_dir / f"stride_sweep_{arguments.model_size}"
        sweep(arguments, base)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def sweep(arguments: argparse.Namespace, base: Path) -> None:
    """Do what is missing of the sweep whose files begin with `base`."""
    common = common_settings(arguments)
    stored = read_rows(base.with_suffix(".json"))

    def find(settings: dict[str, Any]) -> dict[str, Any] | None:
        return next((row for row in stored if settings.items() <= row.items()), None)

    wanted = list(rows_to_train(arguments))
    missing = [settings for settings in wanted if find(settings) is None]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} rows are done; {len(missing)} to train.")
    if missing:
        from hf_recurrent import load_corpus
        from hf_recurrent.cli.evaluate import limit_bytes

        train, held_out = load_corpus(arguments.corpus, max_bytes=common["corpus_bytes"]).split()
        held_out = limit_bytes(held_out, common["eval_bytes"])
        for number, settings in enumerate(missing, 1):
            results = train_row(settings, train, held_out, arguments.gradient_accumulation_steps)
            stored.append({**settings, **results})
            write_text(json.dumps(stored, indent=1) + "\n", base.with_suffix(".json"))
            measured = ", ".join(
                f"{name} {results[name]:.3f}" for name in ("carried", "zero_state") if results[name] is not None
            )
            print(
                f"[{number}/{len(missing)}] {settings['family']} {settings['regime']} T={settings['stride']} "
                f"seed {settings['seed']}: {measured} bits per byte, {results['seconds']} s",
                flush=True,
            )
    rows = [row for settings in wanted if (row := find(settings)) is not None]
    table = markdown(rows, common)
    write_text(table, base.with_suffix(".md"))
    plot(rows, base.with_suffix(".png"))
    print(f"\n{table}\nWritten: {base}.json, .md and .png")


if __name__ == "__main__":
    main()
