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
from studies.device_figures import hidden, plot_trace
from toolkit.processes import run_marked
from workers.device_trace import lane_of

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
    file, png, trace = (tmp_path / name for name in ("a.json", "a.png", "trace.png"))
    words = ["--device", "cpu", "--quick", "--rounds", "1", "--sizes", "64KB", "1MB"]
    words += ["--ranks", "2", "3", "--chunks", "1MB", "--json", str(file)]
    done = run(*words, "--png", str(png), "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    names = {c.name for c in device_allreduce.CANDIDATES if not c.by_nccl} | {"chunk-1048576"}
    cases = [f"allreduce {size}, {n} ranks" for n in (2, 3) for size in ("64 KiB", "1 MiB")]
    found = {(row["case"], row["candidate"]) for row in document["results"]}
    assert found == {(case, name) for case in cases for name in names}
    for case in cases:
        assert {f"vs_peer/{case}", f"vs_limit/{case}", f"vs_gloo/{case}"} <= document[
            "ratios"
        ].keys()
    assert "allreduce, 3 ranks, host memory" in done.stdout and "of limit" in done.stdout
    assert document["trace"]["compute_ms"] > 0
    for picture in (png, trace):
        assert picture.read_bytes().startswith(b"\x89PNG")


def row(candidate: str, kind: str, median_us: float) -> dict[str, Any]:
    case = "allreduce 64 MiB, 2 ranks"
    return {"case": case, "candidate": candidate, "kind": kind, "median_us": median_us}


def test_ratios_are_of_what_goes_through_host_memory() -> None:
    rows = [row("hsgd-staged", "hsgd", 10.0), row("gloo", "peer", 40.0), row("bus", "limit", 9.0)]
    rows += [row("pageable-hsgd", "peer", 30.0), row("chunk-1048576", "other", 5.0)]
    assert device_allreduce.ratios(rows) == {
        "vs_gloo/allreduce 64 MiB, 2 ranks": 4.0,
        "vs_pageable-hsgd/allreduce 64 MiB, 2 ranks": 3.0,
        "vs_peer/allreduce 64 MiB, 2 ranks": 3.0,
        "vs_limit/allreduce 64 MiB, 2 ranks": 0.9,
    }


def event(lane: str, begin_ms: float, ms: float) -> dict[str, Any]:
    return {"lane": lane, "begin_ms": begin_ms, "ms": ms, "name": ""}


def test_copies_hide_where_something_is_computed(tmp_path: Path) -> None:
    events = [event("compute", 0, 4), event("compute", 3, 3), event("down", 2, 2)]
    events += [event("up", 3, 2), event("up", 7, 1)]
    shares = {"step_ms": 8.0, "compute_ms": 6.0, "copy_ms": 4.0, "hidden_share": 0.75}
    assert hidden(events) == shares
    plot_trace(events, "a step", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "name", "lane"),
    [
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", "down"),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "up"),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "compute"),
        ("kernel", "sgemm", "compute"),
        ("kernel", "ncclDevKernel_AllReduce", None),
        ("cuda_runtime", "cudaLaunchKernel", None),
    ],
)
def test_what_the_profiler_saw_is_computing_or_copying(
    kind: str, name: str, lane: str | None
) -> None:
    assert lane_of({"cat": kind, "name": name}) == lane
