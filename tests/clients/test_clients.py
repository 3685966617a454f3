"""Every row of the table of clients, where its packages are installed; the documentation has the same rows."""

import pytest
from client_rows import all_rows

ROWS = all_rows()


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.slow else []) for row in ROWS]
)
def test_row(row, tmp_path, monkeypatch):
    if missing := row.missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    row.run(tmp_path)
