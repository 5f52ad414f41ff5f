"""The benchmark of CUDA tensors, with host memory in place of a device, and its pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from studies import device_allreduce
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


def run(*words: str) -> subprocess.CompletedProcess[str]:
    file = str(ROOT / "benchmarks" / "allreduce.py")
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # whatever the machine has
    return run_marked([sys.executable, file, *words], hidden, LIMIT_S)


def test_without_a_device_it_ends_with_one_line() -> None:
    done = run("--device", "cuda", "--quick")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("allreduce: torch ") and done.stderr.count("\n") == 1


@pytest.mark.bench
def test_host_memory_in_place_of_a_device_is_measured_and_checked(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--device", "cpu", "--quick", "--rounds", "1", "--sizes", "64KB", "1MB"]
    words += ["--ranks", "2", "3", "--json", str(file)]
    done = run(*words, "--png", str(png))
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    names = {c.name for c in device_allreduce.CANDIDATES if not c.by_nccl}
    cases = [f"allreduce {size}, {n} ranks" for n in (2, 3) for size in ("64 KiB", "1 MiB")]
    found = {(row["case"], row["candidate"]) for row in document["results"]}
    assert found == {(case, name) for case in cases for name in names}
    for case in cases:
        assert {f"vs_peer/{case}", f"vs_limit/{case}", f"vs_gloo/{case}"} <= document[
            "ratios"
        ].keys()
    assert "allreduce, 3 ranks, host memory" in done.stdout and "of limit" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def row(candidate: str, kind: str, median_us: float) -> dict[str, Any]:
    case = "allreduce 64 MiB, 2 ranks"
    return {"case": case, "candidate": candidate, "kind": kind, "median_us": median_us}


def test_ratios_are_of_what_goes_through_host_memory() -> None:
    rows = [row("hsgd-staged", "hsgd", 10.0), row("gloo", "peer", 40.0), row("bus", "limit", 9.0)]
    rows += [row("pageable-hsgd", "peer", 30.0)]
    assert device_allreduce.ratios(rows) == {
        "vs_gloo/allreduce 64 MiB, 2 ranks": 4.0,
        "vs_pageable-hsgd/allreduce 64 MiB, 2 ranks": 3.0,
        "vs_peer/allreduce 64 MiB, 2 ranks": 3.0,
        "vs_limit/allreduce 64 MiB, 2 ranks": 0.9,
    }
