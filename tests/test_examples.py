"""The notebooks of `examples/notebooks/` run from the first cell to the last, and are saved clean."""

import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra dev")
nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra dev")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# What is replaced, so that each takes some seconds.
SHORTER = {
    "train": ("STEPS = 600", "STEPS = 8"),
    "adapt": ("LINES = 3000", "LINES = 400"),
    "compress": ("SIZE = 30_000", "SIZE = 5_000"),
}
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_is_a_notebook_for_each_task():
    assert {path.stem for path in NOTEBOOKS} == {"train", "generate", "adapt", "compress", "watch", "serve"}


@pytest.mark.long
@each_notebook
def test_it_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    before, after = SHORTER.get(path.stem, ("", ""))
    assert any(before in cell.source for cell in code)
    for cell in code:
        cell.source = cell.source.replace(before, after) if before else cell.source
    work = tmp_path / "examples" / "notebooks"
    work.mkdir(parents=True)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    # The kernel of this interpreter, whatever kernels are installed for the user.
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(work)}})
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable
    client.execute()
    assert all(cell.execution_count for cell in code)


@each_notebook
def test_it_was_run_in_order_and_names_no_local_path(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    text = path.read_text(encoding="utf-8")
    assert not any(place in text for place in ("/home/", "/tmp/", "/Users/", "C:\\\\"))
