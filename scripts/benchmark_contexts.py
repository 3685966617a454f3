"""Bits per byte of counts, network and both by kind of byte, with a picture.

    python scripts/benchmark_contexts.py runs/memora-tiny-python

MODEL has a count memory and was trained by `hf-recurrent pretrain`; counts alone read the same bytes. All methods
adapt inside each held-out document. The rows go to --output as JSON, the plot next to it as SVG.
"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from benchmarking import load_with_training_bytes, markdown_table

from hf_recurrent.evaluation.byte_kinds import bits_by_kind
from hf_recurrent.evaluation.counts_alone import CountsAlone, learn_counts
from hf_recurrent.plotting import require_pyplot

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
COLOURS = {"counts alone": "#9ca3af", "network alone": "#1f77b4", "both": "#d9480f"}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model, held_out, read = load_with_training_bytes(
        arguments.model, arguments.corpus, arguments.split_seed, arguments.max_eval_bytes
    )
    counts = CountsAlone(learn_counts(model.count_memory.shape, read))
    found = bits_by_kind({"both": model, "counts alone": counts}, held_out, b"".join(read.documents()))
    bits = found["bits_per_byte"]
    ordered = {"counts alone": bits["counts alone"], "network alone": bits["both, network"], "both": bits["both"]}
    sizes = {"train_bytes": read.num_bytes, "held_out_bytes": held_out.num_bytes, "documents": len(held_out)}
    return {"bits_per_byte": ordered, "shares": found["shares"], **sizes}


def draw(found: dict[str, Any], path: Path) -> None:
    pyplot = require_pyplot()
    pyplot.rcParams["svg.hashsalt"] = "contexts"  # the same file from the same numbers
    kinds, methods = list(found["shares"]), list(found["bits_per_byte"])
    figure, axes = pyplot.subplots(figsize=(9.5, 4))
    for number, method in enumerate(methods):
        places = [index + (number - 1) * 0.27 for index in range(len(kinds))]
        heights = [found["bits_per_byte"][method][kind] for kind in kinds]
        bars = axes.bar(places, heights, 0.25, label=method, color=COLOURS[method])
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    labels = [f"{textwrap.fill(kind, 14)}\n{found['shares'][kind]:.0%}" for kind in kinds]
    axes.set_xticks(range(len(kinds)), labels, fontsize=8)
    axes.set_ylabel("held-out bits per byte")
    axes.set_title(f"After {found['train_bytes'] / 1e6:.1f} MB of training bytes", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--corpus", nargs="+", default=["python"], help="as in the run")
    parser.add_argument("--split_seed", type=int, default=0, help="as in the run")
    parser.add_argument("--max_eval_bytes", type=float, help="bytes of whole held-out documents")
    parser.add_argument("--output", type=Path, default=RESULTS / "counts_and_network.json")
    arguments = parser.parse_args()
    found = measure(arguments)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, arguments.output.with_suffix(".svg"))
    bits, shares = found["bits_per_byte"], found["shares"]
    rows = [[kind, f"{shares[kind]:.1%}", *(f"{bits[method][kind]:.3f}" for method in bits)] for kind in shares]
    print(markdown_table(["kind of byte", "share", *bits], rows))


if __name__ == "__main__":
    main()
