"""Build the pages of the public API from the docstrings, with pdoc; warnings are errors.

python scripts/build_api_docs.py --output_dir site
"""

import argparse
import re
import sys
import typing
import warnings
from pathlib import Path

import hf_recurrent


def build(directory: Path) -> list[str]:
    """Write the site, and return the warnings of pdoc."""
    import pdoc

    for name in hf_recurrent.__all__:
        if name.endswith("Config"):
            # The `__init__` that transformers generates is annotated with a name that it does not import here.
            vars(sys.modules[getattr(hf_recurrent, name).__module__]).setdefault("Literal", typing.Literal)
    pdoc.render.configure(
        docformat="google", show_source=False, footer_text=f"hf_recurrent {hf_recurrent.__version__}"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc("hf_recurrent", output_directory=directory)
    page = directory / "hf_recurrent.html"
    page.write_text(without_brackets(page.read_text(encoding="utf-8")), encoding="utf-8")
    return [str(warning.message) for warning in caught if "pdoc" in Path(warning.filename).parts]


def without_brackets(page: str) -> str:
    """The page with `Name` for each [`Name`] of the docstrings; pdoc has made links of the public ones."""
    return re.sub(r"\[(<code>(?:<a [^>]*>)?[\w.()]+(?:</a>)?</code>)\]", r"\1", page)


def missing_names(directory: Path) -> list[str]:
    """Public names without an entry on the page."""
    page = (directory / "hf_recurrent.html").read_text(encoding="utf-8")
    return [name for name in hf_recurrent.__all__ if name != "__version__" and f'id="{name}"' not in page]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output_dir", type=Path, default=Path("site"))
    directory = parser.parse_args().output_dir
    faults = build(directory) + [f"`{name}` is not on the page." for name in missing_names(directory)]
    for fault in faults:
        print(fault, file=sys.stderr)
    raise SystemExit(1 if faults else print(directory / "index.html"))


if __name__ == "__main__":
    main()
