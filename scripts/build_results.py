"""Compute the pages of results from the recorded rows: docs/results.md and docs/results/*.md.

python scripts/build_results.py
"""

from pathlib import Path

from hf_recurrent.cli.reproduce import load_papers

if __name__ == "__main__":
    load_papers()
    from papers.engine.pages import write_pages

    write_pages(Path(__file__).resolve().parents[1] / "docs" / "results.md")
