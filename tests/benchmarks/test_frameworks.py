"""What becomes of the figures of the programs in examples/frameworks, on figures made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import report
from programs import figures
from programs.table import PLACE, PROGRAMS

__all__: list[str] = []

pytestmark = pytest.mark.long


def made_up(gloo_ms: float, hsgd_ms: float, alone_ms: float) -> list[dict[str, object]]:
    runs = {"gloo": gloo_ms, "hsgd": hsgd_ms, "alone": alone_ms}
    steps = {name: [1e3 * value, 1e3 * value + 1, 1e3 * value - 1] for name, value in runs.items()}
    return figures.rows_of("bert", steps, 0.0)


def test_the_help_names_every_program() -> None:
    command = [sys.executable, str(PLACE.parents[1] / "benchmarks" / "frameworks.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"  {each.name} " in done.stdout for each in PROGRAMS)


def test_every_program_has_a_folder_with_pinned_requirements() -> None:
    for each in PROGRAMS:
        lines = (each.folder / "requirements.txt").read_text().splitlines()
        assert lines and all("==" in line for line in lines), each.name
        words = each.words(Path("bin"), 2)
        assert any((each.folder / word).is_file() for word in words), each.name


def test_no_program_knows_hsgd() -> None:
    texts = {path: path.read_text() for each in PROGRAMS for path in each.folder.iterdir()}
    assert [path.name for path, text in texts.items() if "hsgd" in text.lower()] == []


def test_losses_are_compared_relative_to_their_size() -> None:
    assert figures.difference([1.0, 0.0, -2.0], [1.0, 0.0, -2.0]) == 0.0
    assert figures.difference([100.0, 2.0], [101.0, 2.0]) == pytest.approx(1 / 101)
    nan = float("nan")
    for wrong in ([1.0], [], [1.0, nan]):
        assert figures.difference([1.0, 1.0], wrong) == float("inf")


def test_the_first_steps_are_left_out_of_the_median() -> None:
    assert figures.median_step_us([9.0] * figures.WARM_UP + [0.001, 0.002, 0.003]) == 2000.0
    assert figures.median_step_us([0.004]) == 4000.0


def test_exposed_communication_is_a_step_less_that_of_a_worker_alone() -> None:
    found = figures.ratios(made_up(20.0, 12.0, 10.0))
    assert found == {
        "vs_peer/bert": pytest.approx(1.6667),
        "vs_peer/bert_exposed": pytest.approx(5.0),
    }


def test_hidden_communication_counts_as_one_percent_of_a_step() -> None:
    assert figures.ratios(made_up(12.0, 9.0, 10.0))["vs_peer/bert_exposed"] == pytest.approx(20.0)


def test_little_exposed_communication_has_no_ratio() -> None:
    assert figures.ratios(made_up(10.2, 10.1, 10.0)) == {"vs_peer/bert": pytest.approx(1.0099)}


def test_the_table_shows_exposed_communication_and_its_ratio() -> None:
    lines = figures.table(made_up(20.0, 12.0, 10.0)).splitlines()
    cells = ["bert", "10.0", "20.0", "12.0", "1.67", "10.0", "2.0", "5.0", "0"]
    assert lines[-1].split() == cells
    assert len({len(line) for line in lines}) == 1


def test_the_document_is_json_with_a_row_on_each_line(tmp_path: Path) -> None:
    path, rows = tmp_path / "out.json", made_up(20.0, 12.0, 10.0)
    report.write_json(path, {"meta": {}, "ratios": figures.ratios(rows), "results": rows})
    assert json.loads(path.read_text())["results"] == rows
    assert sum("median_us" in line for line in path.read_text().splitlines()) == 3
