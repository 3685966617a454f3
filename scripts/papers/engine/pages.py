"""The pages of results, computed from the recorded rows: sections of experiments and studies, the table of claims."""

import re
import shlex
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.factors import AS_RECORDED, FactorStudy
from papers.engine.report import command_line, markdown_table, section, update_section, write_report
from papers.engine.rows_file import found_rows, read_rows, report_path, rows_path
from papers.engine.tables import confidence_interval, core_seconds, markdown

SIZE = "small"
CLAIMS = Path(__file__).parents[1] / "claims.toml"
_SECTION = re.compile(
    r"<!-- reproduce: (?P<name>[\w-]+) small -->\n(?P<text>.*?)<!-- end of (?P=name) small -->\n", re.DOTALL
)
_COMMAND = re.compile(r"```bash\n(.*?)\n```", re.DOTALL)


def recorded_rows(experiment: Experiment, seeds: Sequence[int], folder: Path) -> list[Settings]:
    """The finished rows of an experiment or study at the small size, in order."""
    stored = read_rows(rows_path(experiment, SIZE, folder))
    return found_rows(stored, [{**row, "seed": seed} for seed in seeds for row in experiment.rows(SIZE)])


def sections_of(page: Path) -> dict[str, str]:
    """Name of an experiment or study → its section in a page."""
    return {match["name"]: match["text"] for match in _SECTION.finditer(page.read_text(encoding="utf-8"))}


def computed_section(experiment: Experiment, folder: Path, text: str | None = None) -> str:
    """The section of an experiment from its rows.

    Args:
        text: the section so far, whose command says which seeds it has; by default the experiment's seeds.
    """
    command, seeds = _command_and_seeds(experiment, text)
    picture = report_path(experiment, SIZE, folder).with_suffix(".png").name
    return section(experiment, SIZE, recorded_rows(experiment, seeds, folder), picture, command)


def _command_and_seeds(experiment: Experiment, text: str | None) -> tuple[str, Sequence[int]]:
    seeds = experiment.default_seeds(SIZE)
    command = _COMMAND.search(text)[1] if text else command_line(experiment, SIZE, seeds, [], {})
    words = shlex.split(command)
    if "--seeds" in words:
        seeds = [int(word) for word in words[words.index("--seeds") + 1 :]]
    return command, seeds


def write_pages(results: Path) -> None:
    """Rewrite all pages in the folder of `results`, with sections for new studies, and the table of claims."""
    from papers import STUDIES, load_experiment

    folder = results.with_suffix("")
    pages = [page for page in sorted(folder.glob("*.md")) if sections_of(page)]
    for page in pages:
        old = sections_of(page)
        names = [*old, *(study.name for study in STUDIES.values() if study.rows_of in old and study.name not in old)]
        for name in names:
            experiment = load_experiment(name)
            rows = recorded_rows(experiment, _command_and_seeds(experiment, old.get(name))[1], folder)
            path = report_path(experiment, SIZE, folder)
            if not path.exists() or path.read_text(encoding="utf-8") != markdown_table(experiment, rows):
                write_report(experiment, rows, path)
            update_section(page, f"{name} {SIZE}", computed_section(experiment, folder, old.get(name)))
    update_section(results, "claims", claims_table(folder))


def read_claims() -> list[dict[str, Any]]:
    """The claims with their verdicts, see `claims.toml`."""
    return tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]


def claims_table(folder: Path) -> str:
    """One line per claim: verdict with its interval, what was seen, cause, seeds, figure, command, hours."""
    header = ["claim", "verdict", "seen", "cause", "seeds", "figure", "command", "core hours"]
    return markdown([header, *(list(_claim_cells(claim, folder)) for claim in read_claims())])


def _claim_cells(claim: dict[str, Any], folder: Path) -> Iterator[str]:
    from papers import load_experiment

    if "experiment" not in claim:
        yield from (_linked(claim, claim["page"]), claim["verdict"], claim["seen"], claim["cause"])
        yield from (str(claim["seeds"]), "-", f"`{claim['command']}`", "-")
        return
    experiment = load_experiment(claim["experiment"])
    rows = recorded_rows(experiment, range(10), folder)
    study = load_experiment(claim["study"]) if "study" in claim else None
    of_study = recorded_rows(study, study.seeds, folder) if study else []
    spent = [*rows, *(row for row in of_study if "level" in row)]
    shown = study or experiment
    verdict = claim["verdict"]
    if study:
        file = rows_path(study, SIZE, folder).name
        verdict += f": [{difference(study, of_study, claim.get('level', AS_RECORDED))}](results/{file})"
    yield from (_linked(claim, _place_of(shown, folder)), verdict, claim["seen"], claim["cause"] or "-")
    yield str(_seeds(rows))
    yield f"[figure](results/{report_path(shown, SIZE, folder).with_suffix('.png').name})"
    yield f"`reproduce {shown.name}`"
    yield f"[{sum(map(core_seconds, spent)) / 3600:.2f}](results/{rows_path(experiment, SIZE, folder).name})"


def _linked(claim: dict[str, Any], place: str) -> str:
    return f"[{claim['claim']}](results/{place}) ({claim['place']})"


def _seeds(rows: Sequence[Settings]) -> int:
    """Seeds that most labels have; a table shows the others without an interval."""
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(row["label"], set()).add(row["seed"])
    return statistics.mode(map(len, seeds.values()))


def difference(study: FactorStudy, rows: Sequence[Settings], level: str) -> str:
    """The difference of a study at a level with its 95 % interval, in words."""
    values, form = study.differences(study.levels(rows)[level]), study.form
    bounds = confidence_interval(values)
    # The unit of a metric such as "training loss, nats per bit", "held-out bits per byte" or "cosine to the …".
    unit = study.metric.rpartition(", ")[2].rpartition("held-out ")[2].partition(" to the ")[0]
    unit = "points" if study.percent else unit
    spread = f"({bounds[0]:+{form}} to {bounds[1]:+{form}})" if bounds else "(one seed)"
    return f"{statistics.fmean(values):+{form}} {spread} {unit}"


@cache
def _place_of(experiment: Experiment, folder: Path) -> str:
    """Page and anchor of an experiment's section."""
    page = next(page for page in sorted(folder.glob("*.md")) if experiment.name in sections_of(page))
    heading = re.sub(r"[^\w\- ]", "", f"{experiment.source}: {experiment.name}".lower())
    return f"{page.name}#{heading.replace(' ', '-')}"
