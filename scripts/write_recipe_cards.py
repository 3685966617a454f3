"""Write model_cards/RECIPE.md: one card per recipe, with measured numbers only.

    python scripts/write_recipe_cards.py

The numbers are in docs/performance.md or in the recipe; recipes without a finished run say so.
"""

from pathlib import Path

from hf_recurrent.cli.recipes import recipe_names

FOLDER = Path(__file__).resolve().parents[1] / "model_cards"
# Bits per byte on held-out files of Python 3.11.7's standard library, and the run.
_WHOLE = "all 88 held-out files (gzip -9 of each file alone 1.704, bz2 -9 1.588, xz -9 1.595)"
MEASURED = {
    "default": (2.027, f"{_WHOLE}; 3,418 updates, 3 min 38 s on two idle CPU cores"),
    "memora-s0": (
        1.458,
        f"{_WHOLE}; 9,766 updates, 63 minutes on one busy CPU core; in float32: [weights](memora-s0-python)",
    ),
    "smt": (2.57, "held-out files; about 5 minutes on one CPU core; a longer run: [weights](smt-rnn-tiny-python)"),
}


def card_of(name: str) -> str:
    """The card of a recipe."""
    result = "No finished run of this recipe is recorded, so there are no weights and no measured numbers."
    if name in MEASURED:
        bits, run = MEASURED[name]
        result = f"**{bits} bits per byte** on {run}."
    return f"# {name}\n\n{result}\n\nRun it with `hf-recurrent pretrain --recipe {name}`.\n"


def main() -> None:
    """Write all cards."""
    for name in recipe_names():
        FOLDER.joinpath(f"{name}.md").write_text(card_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
