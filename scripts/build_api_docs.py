"""Build the pages of the public API from the docstrings, with pdoc; warnings, broken links and names that the search
does not find are errors.

python scripts/build_api_docs.py --output_dir site
"""

import argparse
import json
import re
import sys
import tempfile
import typing
import warnings
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import hf_recurrent

# pdoc leaves the search out where only one module is documented.
_TEMPLATE = """{% extends "default/module.html.jinja2" %}
{% block search_box %}
<input type="search" placeholder="Search..." role="searchbox" aria-label="search" pattern=".+" required>
{% endblock %}
{% block search_js %}{% include "search.html.jinja2" %}{% endblock %}
"""


def build(directory: Path) -> list[str]:
    """Write the site, and return the warnings of pdoc."""
    import pdoc

    for name in hf_recurrent.__all__:
        if name.endswith("Config"):
            # The `__init__` that transformers generates is annotated with a name that it does not import here.
            vars(sys.modules[getattr(hf_recurrent, name).__module__]).setdefault("Literal", typing.Literal)
    with tempfile.TemporaryDirectory() as templates, warnings.catch_warnings(record=True) as caught:
        Path(templates, "module.html.jinja2").write_text(_TEMPLATE, encoding="utf-8")
        footer = f"hf_recurrent {hf_recurrent.__version__}"
        pdoc.render.configure(
            docformat="google", show_source=False, footer_text=footer, template_directory=Path(templates)
        )
        warnings.simplefilter("always")
        pdoc.pdoc("hf_recurrent", output_directory=directory)
    page = directory / "hf_recurrent.html"
    page.write_text(without_dead_links(without_brackets(page.read_text(encoding="utf-8"))), encoding="utf-8")
    return [str(warning.message) for warning in caught if "pdoc" in Path(warning.filename).parts]


def without_brackets(page: str) -> str:
    """The page with `Name` for each [`Name`] of the docstrings; pdoc has made links of the public ones."""
    return re.sub(r"\[(<code>(?:<a [^>]*>)?[\w.()]+(?:</a>)?</code>)\]", r"\1", page)


def without_dead_links(page: str) -> str:
    """The page without links to members that it does not describe, such as inherited ones; pdoc links these, too."""
    anchors = _Page(page).anchors
    return re.sub(r'<a href="#([\w.]+)">([^<]*)</a>', lambda link: link[0 if link[1] in anchors else 2], page)


def missing_names(directory: Path) -> list[str]:
    """Public names without an entry on the page."""
    page = (directory / "hf_recurrent.html").read_text(encoding="utf-8")
    return [name for name in hf_recurrent.__all__ if name != "__version__" and f'id="{name}"' not in page]


class _Page(HTMLParser):
    """The targets of a page's links, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src"):
                self.links.append(value or "")
            elif name == "id":
                self.anchors.add(value or "")


def broken_links(directory: Path) -> list[str]:
    """A sentence for each link to a file or an anchor that the site does not have; other sites are not asked."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in directory.rglob("*.html")}
    faults = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file():
                faults.append(f"{path.name} links to {link!r}; there is no such file.")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                faults.append(f"{path.name} links to {link!r}; that page has no such anchor.")
    return faults


def unsearchable_names(directory: Path) -> list[str]:
    """A sentence for each public name that the index of the search lacks, and for a page without a search box."""
    index = directory / "search.js"
    page = (directory / "hf_recurrent.html").read_text(encoding="utf-8")
    if not index.is_file() or 'type="search"' not in page or "search.js" not in page:
        return ["The page has no search."]
    text = index.read_text(encoding="utf-8")
    docs, _ = json.JSONDecoder().raw_decode(text, text.index("const docs = ") + len("const docs = "))
    # With Node.js, pdoc stores the compiled index.
    found = set(docs["documentStore"]["docs"]) if isinstance(docs, dict) else {entry["fullname"] for entry in docs}
    names = (f"hf_recurrent.{name}" for name in hf_recurrent.__all__ if name != "__version__")
    return [f"The search does not find `{name}`." for name in names if name not in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output_dir", type=Path, default=Path("site"))
    directory = parser.parse_args().output_dir
    faults = build(directory) + [f"`{name}` is not on the page." for name in missing_names(directory)]
    faults += broken_links(directory) + unsearchable_names(directory)
    for fault in faults:
        print(fault, file=sys.stderr)
    raise SystemExit(1 if faults else print(directory / "index.html"))


if __name__ == "__main__":
    main()
