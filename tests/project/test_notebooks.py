"""The notebooks of docs/ run, and are kept with what they print."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from toolkit.processes import launch_environ

__all__: list[str] = []

pytestmark = pytest.mark.long

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))
CELL_S = 120


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_ran(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.timeout(2 * CELL_S)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launch_environ().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=CELL_S, kernel_name="python3").execute()
    printed = [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]
    assert printed and not any("Traceback" in text or "hsgd: error" in text for text in printed)
