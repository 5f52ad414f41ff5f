"""benchmarks/overlap.py runs, compares weights and counts its ratios right. No figure is judged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import overlap
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0


def test_a_short_run_writes_json_and_a_plot(tmp_path: Path, virtual_nodes: None) -> None:
    words = ["--layouts", "2x1", "--models", "mlp", "--width", "16", "--rounds", "1"]
    words += ["--no-horovod", "--json", str(tmp_path / "o.json"), "--png", str(tmp_path / "o.png")]
    program = str(ROOT / "benchmarks" / "overlap.py")
    done = run_marked([sys.executable, program, *words], dict(os.environ), LIMIT_S)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["failures"] == []
    candidates = {row.get("candidate") for row in report["results"]}
    assert candidates >= {"communication", *overlap.CANDIDATES}
    assert {"vs_ddp/tree_overlap/2x1/mlp", "vs_peer/put_notify/1MB"} <= report["ratios"].keys()
    assert (tmp_path / "o.png").stat().st_size > 0


def test_ratios_compare_with_the_bound_and_with_peers() -> None:
    times = {"compute": 30.0, "communication": 40.0, "horovod": 90.0, "tree": 50.0}
    same = {"model": "mlp", "batch": 4}
    rows = [
        {"layout": "2x1", "ranks": 2, **same, "candidate": name, "median_us": us}
        for name, us in times.items()
    ]
    rows += [
        {"layout": "np2", "put_notify": kind, "bytes": 8, "median_us": us}
        for kind, us in {"shared memory": 2.0, "mpi": 9.0}.items()
    ]
    assert overlap.ratios(rows) == pytest.approx(
        {
            "vs_limit/tree/2x1/mlp": 0.8,
            "vs_compute/tree/2x1/mlp": 0.6,
            "vs_horovod/tree/2x1/mlp": 1.8,
            "vs_peer/tree/2x1/mlp": 1.8,
            "vs_peer/put_notify/8B": 4.5,
        }
    )
