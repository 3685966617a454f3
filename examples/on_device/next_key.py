"""Predict the next key while someone types: learn from every key, in 256 KB, and count how often it was right.

python next_key.py my_text.txt
python next_key.py                 # the help texts of Python, which every installation has
"""

import argparse
from pathlib import Path

import numpy as np
from compiled_learner import CompiledLearner
from count_model import CountModel

from hf_recurrent.plotting import require_pyplot

SIZES = ("hidden_size=8", "state_size=8", "num_hidden_layers=1")
COUNTS = {"slots": 64, "text": 1024, "window": 8192, "rows": 0, "small": "true"}
OVERRIDES = (*SIZES, *(f"count_memory_{name}={value}" for name, value in COUNTS.items()))
EXPORT = ("memora-tiny", "--optim", "sgd", "--learning_rate", "0.1", "--config_overrides", *OVERRIDES)
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "results" / "on_device_keys.png"
SHOWN = 3  # suggestions above the keyboard


def help_texts() -> bytes:
    """The topics of Python's `help()`: English prose about the language."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")


def ranks(data: bytes, learner: CompiledLearner, counts: CountModel) -> dict[str, np.ndarray]:
    """Rank of every key among the predictions of both, 0 for the first; 256 where there was none."""
    found = {"learner": [], "counts": []}
    for byte in data:
        predictions = {"counts": counts.probabilities}
        if found["learner"]:
            predictions["learner"] = learner.predict()
        for name, row in found.items():
            scores = predictions.get(name)
            row.append(256 if scores is None else int((scores > scores[byte]).sum()))
        learner.learn(byte)
        counts.learn(byte)
    return {name: np.array(row) for name, row in found.items()}


def draw(picture: Path, lines: dict[str, np.ndarray], window: int) -> None:
    """The share of keys among the first suggestions, by keys typed."""
    pyplot = require_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for color, (label, row) in enumerate(lines.items()):
        for most, style in ((1, "-"), (SHOWN, "--")):
            hits = (row[: len(row) // window * window] < most).reshape(-1, window).mean(1)
            places = (np.arange(len(hits)) + 1) * window / 1000
            axes.plot(places, 100 * hits, style, color=f"C{color}", label=f"{label}, first {most}")
    axes.set(xlabel="thousand keys typed", ylabel="% of keys suggested", ylim=(0, 100), xlim=(0, None))
    axes.legend(frameon=False, ncols=2)
    figure.tight_layout()
    figure.savefig(picture, dpi=90)


def main(argv=None) -> None:
    """Run the script with `argv`, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, help="what is typed; by default the help texts of Python")
    parser.add_argument("--keys", type=int, default=400_000, help="of the text (default: 400,000)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="PNG (default: in docs/results)")
    arguments = parser.parse_args(argv)
    data = (arguments.text.read_bytes() if arguments.text else help_texts())[: arguments.keys].replace(b"\0", b"")
    learner = CompiledLearner(*EXPORT)
    found = ranks(data, learner, CountModel(learner.memory, order=3))
    size = f"{learner.memory / 1000:.0f} kB"
    lines = {f"learner, {size}": found["learner"], f"order-3 counts, {size}": found["counts"]}
    tenth = max(1, len(data) // 10)
    print(f"{len(data):,} keys; % of the keys that were among the suggestions")
    print(f"{'':<26}{'first':>8}{f'first {SHOWN}':>10}   of the last tenth:{'first':>8}{f'first {SHOWN}':>10}")
    for label, row in lines.items():
        shares = [100 * (part < most).mean() for part in (row, row[-tenth:]) for most in (1, SHOWN)]
        print(f"{label:<26}{shares[0]:>8.1f}{shares[1]:>10.1f}{shares[2]:>29.1f}{shares[3]:>10.1f}")
    draw(arguments.picture, lines, min(10_000, tenth))


if __name__ == "__main__":
    main()
