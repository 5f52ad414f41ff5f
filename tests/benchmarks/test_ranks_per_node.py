"""The benchmark of collectives by the ranks of a node, and what it added to the harness. No figure
is judged here.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import candidates, jobs, layouts, operations, pattern, setup_cost, turns
from toolkit.processes import run_marked

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
COLLECTIVES = ("allreduce", "broadcast", "allgather", "barrier")


def run(*words: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    file = str(ROOT / "benchmarks" / "ranks_per_node.py")
    more = {"HSGD_CACHE": str(cache)} if cache else {}
    return run_marked([sys.executable, file, "--quick", *words], {**os.environ, **more}, LIMIT_S)


@pytest.mark.long
def test_numbers_of_ranks_are_compared_in_each_collective(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    names = ("hsgd-c", "mpi-c", "impi-c")
    words = ("--np", "2", "3", "--sizes", "8", "--rounds", "1", "--candidates", *names)
    done = run(*words, "--json", str(file), "--png", str(png), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = [line for line in done.stderr.splitlines() if line.startswith("left out: impi-c: ")]
    assert len(missing) == 2  # a line for each number of ranks
    document = json.loads(file.read_text())
    assert {f["candidate"] for f in document["failures"]} == {"impi-c"}
    measured = {(r["collective"], r["ranks"], r["candidate"]) for r in document["results"]}
    assert measured == {(c, n, m) for c in COLLECTIVES for n in (2, 3) for m in names[:2]}
    sizes = {name: "0B" if name == "barrier" else "8B" for name in COLLECTIVES}
    cases = {f"vs_peer/{c}/np{n}/{size}" for c, size in sizes.items() for n in (2, 3)}
    assert cases | {"vs_goal/setup/np2", "vs_goal/setup/np3"} <= document["ratios"].keys()
    setups = {(row["candidate"], row["what"], row["ranks"]) for row in document["setup"]}
    ours = {("hsgd-c", "communicator", n) for n in (2, 3)}
    assert setups == ours | {("mpi-c", "MPI_Init", n) for n in (2, 3)}
    assert all(row["wall_s"] > 0 for row in document["setup"])
    assert "allreduce 8B, median microseconds per call" in done.stdout
    assert "barrier, median microseconds per call" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_ranks_get_by_with_few_descriptors(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = ("--np", "48", "--sizes", "8", "--rounds", "1", "--candidates", "hsgd-c", "mpi-c")
    done = run(*words, "--files", "160", "--json", str(file))
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert document["meta"]["settings"]["ulimit"] == "-n 160"


def test_candidates_from_python_are_refused() -> None:
    done = run("--candidates", "hsgd", "mpi4py")
    assert done.returncode == 2
    assert "--candidates: of " in done.stderr


def test_intel_mpi_is_measured_on_one_node() -> None:
    intel = next(c for c in candidates.CANDIDATES if c.name == "impi-c")
    job = next(j for j in candidates.JOBS if j.name == intel.job)
    assert job.peer == "impi" and job.crowded
    assert intel.fits_layout(layouts.on_one_node(256))
    assert not intel.fits_layout(layouts.read_layout("2x2"))


@pytest.mark.long
def test_sums_that_many_ranks_share_are_what_the_pattern_says(tmp_path: Path) -> None:
    ranks, nbytes = 18, 4096
    place = layouts.Testbed(layouts.on_one_node(ranks))
    native, numbers = candidates.JOBS[0], pattern.Pattern(ranks)
    tools = jobs.prepare(native, tmp_path, install=False)
    with jobs.WorkerJob(native, place, tmp_path, tools) as job:
        job.connect()
        job.order("setup mpi-c")
        answers = job.order(f"measure mpi-c allreduce {nbytes} 1 1 1")
        job.order("end")
    count = operations.OPERATIONS["allreduce"].counts(ranks, nbytes)[1]
    wanted = pattern.digest(numbers.expected(0, count))
    assert [answer["digest"] for answer in answers] == [wanted] * ranks


def test_a_batch_lasts_from_the_first_begin_to_the_last_end() -> None:
    answers: list[dict[str, Any]] = [
        {"begins": [10.0, 20.0], "seconds": [1.0, 0.5]},
        {"begins": [13.0, 20.0], "seconds": [0.25, 1.0]},
    ]
    assert turns.spans(answers, 4) == pytest.approx([1.0, 1.0])
    assert turns.spans(answers, 2) == pytest.approx([1.75, 1.0])


def test_set_up_is_summed_over_ranks_and_compared_with_the_goal() -> None:
    known = {c.name: c for c in candidates.CANDIDATES}
    place = layouts.on_one_node(4)
    answers = [
        {"setup": [0.5, 0.2], "init": [1.0, 0.1]},
        {"setup": [0.7, 0.31], "init": [2.0, 0.3]},
    ]
    rows = [
        row
        for name in ("hsgd-c", "impi-c", "limit", "hsgd")
        for row in setup_cost.setup_rows(known[name], place, answers if name != "hsgd" else [{}])
    ]
    assert [(row["candidate"], row["what"]) for row in rows] == [
        ("hsgd-c", "communicator"),
        ("impi-c", "MPI_Init"),
    ]
    assert rows[0]["wall_s"] == 0.7 and rows[0]["cpu_s"] == pytest.approx(0.51)
    assert setup_cost.setup_ratios(rows) == {"vs_goal/setup/np4": 2.0}
    assert "Intel MPI (C): MPI_Init" in setup_cost.setup_table(rows)


def test_buffers_of_many_ranks_are_fewer() -> None:
    assert turns.buffer_count(1 << 20) == turns.BUFFERS
    assert turns.buffer_count(1 << 20, 256) == 2
    assert turns.buffer_count(8, 256) == turns.buffer_count(8)


def test_a_rank_may_open_as_many_files_as_it_is_told() -> None:
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    command = (sys.executable, "-c", code)
    assert jobs.limited(command, "") == command
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for ulimit, wanted in (("-n 64", "64 64"), ("-Sn 64", f"64 {hard}")):
        words = jobs.limited(command, ulimit)
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == wanted
