"""benchmarks/training.py runs, checks its results, and writes what it promises. No figure is judged
here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

import candidates
import layouts
import steps
import training
from processes import run_marked

__all__: list[str] = []

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "training.py"
LIMIT_S = 240


def row(candidate: str, exposed_us: float, median_us: float = 1e4, **more: Any) -> dict[str, Any]:
    fixed = {"candidate": candidate, "exposed_us": exposed_us, "median_us": median_us}
    return {"case": "resnet50", "layout": "np2", **fixed, **more}


def test_a_short_run_writes_rows_ratios_a_table_and_a_plot(tmp_path: Path) -> None:
    words = ["--cases", "small1000", "cnn", "--candidates", "hsgd", "ddp", "--turns", "1"]
    files = ["--json", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]
    environ = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = run_marked([sys.executable, str(PROGRAM), *words, *files], environ, LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["failures"] == []
    places = {(r["case"], r["candidate"]) for r in found["results"]}
    assert places == {(c, w) for c in ("small1000", "cnn") for w in ("hsgd", "ddp")}
    for result in found["results"]:
        assert result["samples"] == training.BATCH
        assert result["median_us"] > 0 and result["plain_us"] > 0 and "work_us" in result
        assert result["exposed_us"] == pytest.approx(
            result["median_us"] - result["plain_us"], rel=1e-3, abs=0.1
        )
    assert "vs_ddp/exposed/small1000/np2" in found["ratios"]
    assert found["meta"]["settings"]["layouts"] == {"np2": "2 ranks"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "vs_ddp/exposed/small1000/np2" in done.stdout


def test_horovod_is_the_best_of_its_settings() -> None:
    rows = [
        row("hsgd", 100.0),
        row("horovod", 900.0),
        row("horovod-fast", 500.0),
        row("ddp", 300.0),
    ]
    found = training.ratios(rows)
    assert found["vs_horovod/exposed/resnet50/np2"] == 5.0
    assert found["vs_ddp/exposed/resnet50/np2"] == 3.0
    assert found["vs_ddp/step/resnet50/np2"] == 1.0


def test_exposed_time_in_the_noise_counts_as_a_hundredth_of_the_step() -> None:
    found = training.ratios([row("hsgd", -50.0), row("ddp", 300.0)])
    assert found["vs_ddp/exposed/resnet50/np2"] == 3.0


def test_threads_are_compared_with_processes_on_links_of_one_rate() -> None:
    rows = [
        row("hsgd", 0, 600.0, case="cnn", layout="2x1@10gbit"),
        row("hsgd", 0, 400.0, case="cnn", layout="2x2@10gbit"),
        row("hsgd", 0, 500.0, case="cnn", layout="2x2@1gbit"),
    ]
    found = {k: v for k, v in training.ratios(rows).items() if k.startswith("processes")}
    assert found == {"processes_vs_threads/hsgd/2x2@10gbit": 1.5}


def test_shapes_are_those_of_the_models() -> None:
    shapes = steps.resnet50()
    assert len(shapes) == 161
    assert steps.payload_bytes("resnet50") == 4 * 25_557_032
    assert len(steps.bert()) == 199
    assert steps.payload_bytes("bert") == 4 * 109_482_240
    assert steps.payload_bytes("small1000") == 4 * 256_000


def test_every_way_is_a_job_that_the_helpers_know() -> None:
    for way in training.WAYS:
        assert isinstance(way.job(), candidates.Job)
    assert layouts.read_layout("2x2@10gbit").ranks == 4
