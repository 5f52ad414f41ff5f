"""The benchmark of encoded images runs, checks its arguments, and writes what it promises."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import io_images
from images.image_files import make_images
from images.image_loaders import CANDIDATES
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

PROGRAM = str(Path(__file__).resolve().parents[2] / "benchmarks" / "io_images.py")


def test_images_are_the_same_in_each_run_and_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    first = make_images(tmp_path / "a", 6, set()).encoded()
    assert first == make_images(tmp_path / "b", 6, set()).encoded()
    assert len(set(first)) == 6
    assert all(100_000 < len(data) <= 150_000 for data in first)


@pytest.mark.bench
def test_a_quick_run_writes_rates_processor_time_ratios_and_memory(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--quick", "--images", "70", "--rounds", "1", "--memory-epochs", "6"]
    words += ["--json", str(file), "--png", str(png)]
    done = run_marked([sys.executable, PROGRAM, *words], dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    names = [candidate.name for candidate in CANDIDATES if candidate.quick]
    rows = [(row["case"], row["candidate"]) for row in document["results"]]
    assert rows == [(case, name) for case in io_images.CASES for name in names]
    assert all(row["images_per_s"] > 0 < row["cpu_ms_per_image"] for row in document["results"])
    others = [name for name in names if name.startswith("loader")]
    kinds = [f"vs_{name}" for name in ("peer", "limit", "limit-scaled", *others)]
    expected = {
        f"{cpu}{kind}/{case}" for cpu in ("", "cpu/") for kind in kinds for case in io_images.CASES
    }
    assert document["ratios"].keys() == expected | {
        f"flat_memory/{case}" for case in io_images.CASES
    }
    assert all(len(each["rss_mb"]) == 2 for each in document["memory"].values())
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_candidate_that_nobody_knows_is_an_error_of_use(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        io_images.main(["--candidates", "nobody"])
    assert caught.value.code == 2
    assert "nobody is called nobody" in capsys.readouterr().err
