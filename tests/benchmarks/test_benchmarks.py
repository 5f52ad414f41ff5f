"""Benchmarks run, check their results, and write what they promise. No figure is judged here.

Owns nothing of the benchmarks themselves; candidates that are not installed are left out, as they
are for a user, and nothing is installed for a test.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce
import node_shared
from harness import (
    candidates,
    command,
    installing,
    jobs,
    layouts,
    operations,
    pattern,
    peers,
    ratios,
    report,
    turns,
)
from toolkit import cluster
from toolkit.processes import run_marked
from workers import worker

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
CASE = ("np2", "allreduce", 8)
# Other programs may want the cores.
CROWDED = {"OMPI_MCA_mpi_yield_when_idle": "1", **candidates.MPICH_YIELDS}


def run(
    *words: str, program: str = "allreduce", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    file = str(ROOT / "benchmarks" / f"{program}.py")
    everything = {**os.environ, **CROWDED, **(env or {})}
    return run_marked([sys.executable, file, *words], everything, LIMIT_S)


def plan(*names: str, sizes: tuple[int, ...] = (8,), **more: Any) -> turns.MeasurementPlan:
    collectives = more.setdefault("collectives", ("allreduce",))
    places = more.pop("layouts", (layouts.on_one_node(2),))
    chosen = candidates.select(names, collectives) if names else ()
    return turns.MeasurementPlan(sizes, places, chosen, **{"rounds": 1, "budget_s": 0.1, **more})


def row(name: str, nbytes: int, median_us: float, layout: str = "np2") -> dict[str, Any]:
    kind = next(c.kind for c in candidates.CANDIDATES if c.name == name)
    return {
        "candidate": name,
        "kind": kind,
        "collective": "allreduce",
        "layout": layout,
        "bytes": nbytes,
        "median_us": median_us,
    }


@pytest.mark.long
def test_a_quick_run_writes_facts_rows_ratios_a_table_and_a_plot(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    names = ("hsgd-c", "mpi-c", "limit-line", "limit", "hsgd", "mpi4py")
    done = run(
        *("--quick", "--rounds", "2", "--sizes", "8", "16KB", "--json", str(file)),
        *("--png", str(png), "--candidates", *names),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    meta = document["meta"]
    assert {"benchmark", "commit", "date", "host", "machine", "settings", "versions"} <= meta.keys()
    state = {"store", "mpi", "shared_last_level_cache", "memory_gb_s"}
    assert state <= meta["machine"]["np2"].keys()
    assert meta["launches"]["np2"].keys() == {"native", "python"}
    assert meta["settings"]["crowded"] == ["np2"] * layouts.on_one_node(2).crowded
    measured = {(r["candidate"], r["bytes"]) for r in document["results"]}
    expected = {(n, b) for n in ("hsgd-c", "mpi-c", "hsgd", "mpi4py") for b in (8, 16384)}
    lines = set() if layouts.on_one_node(2).crowded else {("limit-line", 8)}
    assert measured == expected | {("limit", 16384)} | lines
    for r in document["results"]:
        assert r["layout"] == "np2" and r["ranks"] == 2 and r["samples"] > 0
        assert 0 < r["min_us"] <= r["median_us"] <= r["p99_us"] <= r["max_us"]
    peers_of = {"allreduce": ("peer", "mpi-c", "mpi4py"), "allreduce_python": ("peer", "mpi4py")}
    cases = {
        f"vs_{peer}/{subject}/np2/{size}"
        for subject, named in peers_of.items()
        for peer in named
        for size in ("8B", "16KB")
    }
    limits = {f"vs_limit/allreduce/np2/{size}" for size in ["8B"] * bool(lines) + ["16KB"]}
    assert document["ratios"].keys() == cases | limits | {"vs_goal/setup/np2"}
    assert "hsgd (C)" in done.stdout and "16KB" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_all_collectives_are_measured_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    names = ("hsgd-c", "mpi-c", "hsgd", "mpi4py")
    words = ("--quick", "--rounds", "1", "--sizes", "100", "--np", "3", "--json", str(file))
    done = run(*words, "--candidates", *names, program="collectives")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    measured = {(r["collective"], r["candidate"]) for r in document["results"]}
    others = {name for name in operations.OPERATIONS if name != "allreduce"}
    assert measured == {(collective, name) for collective in others for name in names}
    assert "vs_peer/broadcast/np3/100B" in document["ratios"]
    assert "barrier, 3 ranks, median microseconds per call" in done.stdout


@pytest.mark.bench
def test_steps_of_lars_are_measured_and_compared(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ("--models", "1000x256", "--threads", "1", "2", "--rounds", "1")
    done = run(*words, "--json", str(file), "--png", str(png), program="lars")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert [line for line in document["failures"] if "timm" not in line] == []
    assert {row["threads"] for row in document["results"]} == {1, 2}
    cases = {f"{vs}/1000x256/{n}threads" for vs in ("vs_peer", "vs_limit") for n in (1, 2)}
    assert cases <= document["ratios"].keys()
    assert "one step, median milliseconds" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_rare_communication_is_compared_with_synchronous_training(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ("--quick", "--steps", "20", "--batch", "1")
    done = run(*words, "--json", str(file), "--png", str(png), program="rarely")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    rows = {row["candidate"]: row for row in document["results"]}
    assert list(rows) == ["synchronous", "diloco-10", "diloco-30-int8"]
    model = 4 * rows["synchronous"]["parameters"]
    assert 1.0 <= rows["synchronous"]["sent_bytes"] / (2 * model * 20) < 1.1
    assert 1.0 <= rows["diloco-10"]["sent_bytes"] / (2 * model * 2) < 1.1
    assert rows["diloco-30-int8"]["sent_bytes"] < model / 10  # 20 steps: nothing is exchanged
    assert all(len(row["curve"]) == 10 and row["loss"] < 5.5 for row in rows.values())
    assert "vs_peer/bytes/diloco-10/2x1" in document["ratios"]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_accuracy_is_compared_against_the_size_of_the_batch(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ("--batches", "700", "5000", "--seeds", "2", "--epochs", "2", "--rates", "3")
    done = run("--accuracy", *words, "--json", str(file), "--png", str(png), program="lars")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    rows = document["results"]
    whole = rows[-1]["batch"]  # all images there are
    found = [(row["candidate"], row["batch"], row["steps"]) for row in rows]
    steps = {700: 2 * -(-whole // 700), whole: 2}
    assert found == [(name, n, steps[n]) for n in (700, whole) for name in ("sgd", "lars")]
    for sgd, lars in ((rows[0], rows[1]), (rows[2], rows[3])):
        gaps = [a - b for a, b in zip(lars["accuracies"], sgd["accuracies"], strict=True)]
        assert lars["difference"] == pytest.approx(sum(gaps) / 2, abs=2e-3)
        assert document["ratios"][f"difference/{lars['batch']}"] == lars["difference"]
    assert "LARS - SGD" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_confidence_interval_is_students() -> None:
    assert report.half_width([5.0]) == 0.0
    assert report.half_width([0.0, 2.0]) == pytest.approx(12.7062, rel=1e-4)
    assert report.half_width([0.0, 1.0, 2.0]) == pytest.approx(4.30265 / 3**0.5, rel=1e-4)
    # t(0.975, 9) = 2.262; the standard deviation of 0..9 is 3.0277
    assert report.half_width([float(n) for n in range(10)]) == pytest.approx(2.1659, rel=2e-3)


def test_node_shared_is_compared_in_time_and_memory() -> None:
    def result(name: str, spent_us: float, job_bytes: int | None) -> dict[str, Any]:
        way = next(way for way in node_shared.WAYS if way.name == name)
        case = {"case": "resnet50+sgd", "layout": "np2", "candidate": name, "label": way.label}
        times = {"median_us": 9.0, "p99_us": 9.0, "spent_us": spent_us}
        return {**case, "kind": way.kind, **times, "rank_bytes": 1, "job_bytes": job_bytes}

    results = [
        result("hsgd-node-shared", 10.0, 100),
        result("hsgd", 15.0, 150),
        result("horovod", 60.0, 200),
        result("ddp", 40.0, None),
    ]
    found = node_shared.ratios(results)
    assert found == {
        "vs_hsgd/resnet50+sgd/np2": 1.5,
        "vs_horovod/resnet50+sgd/np2": 6.0,
        "vs_ddp/resnet50+sgd/np2": 4.0,
        "vs_peer/resnet50+sgd/np2": 4.0,
        "memory_vs_hsgd/resnet50+sgd/np2": 1.5,
        "memory_vs_horovod/resnet50+sgd/np2": 2.0,
    }
    meta = {"settings": {"layouts": {"np2": "2 ranks"}}}
    assert "vs_peer/resnet50+sgd/np2: 4" in node_shared.tables(
        {"meta": meta, "results": results, "ratios": found}
    )


@pytest.mark.bench
def test_communication_of_ddp_is_measured_and_checked(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ("--models", "1000x256", "--rounds", "2", "--json", str(file), "--png", str(png))
    done = run(*words, program="ddp")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert {row["candidate"] for row in document["results"]} == {"hsgd", "gloo", "nothing"}
    assert "vs_peer_step/1000x256" in document["ratios"]
    assert "exposed hsgd" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_ddp_is_measured_between_virtual_nodes(tmp_path: Path, virtual_nodes: None) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ("--models", "1000x256", "--rounds", "2", "--nodes", "2+1@1gbit", "--json", str(file))
    done = run(*words, "--png", str(png), program="ddp")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert {row["candidate"] for row in document["results"]} == {"hsgd", "gloo", "nothing"}
    assert "vs_peer_step/1000x256/2+1@1gbit" in document["ratios"]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_virtual_nodes_are_measured_against_the_link(tmp_path: Path, virtual_nodes: None) -> None:
    file = tmp_path / "a.json"
    words = ("--quick", "--rounds", "1", "--sizes", "64KB", "--nodes", "2+1@1gbit")
    names = ("hsgd-c", "hsgd-bf16-c", "mpi-c", "hsgd-tcp", "limit-link", "limit")
    done = run(*words, "--json", str(file), "--candidates", *names)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert {r["candidate"] for r in document["results"]} == set(names[:-1])
    assert "vs_limit/allreduce/2+1@1gbit/64KB" in document["ratios"]
    assert "vs_limit/allreduce_tcp/2+1@1gbit/64KB" in document["ratios"]
    assert document["meta"]["machine"]["2+1@1gbit"]["nodes"] == 2
    assert "btl_tcp_links" in document["meta"]["launches"]["2+1@1gbit"]["native"]


@pytest.mark.bench
def test_every_candidate_is_measured_or_left_out_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    done = run("--quick", "--rounds", "1", "--sizes", "16KB", "--json", str(file))
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    measured = {r["candidate"] for r in document["results"]}
    failed = {failure["candidate"]: failure["reason"] for failure in document["failures"]}
    here = layouts.on_one_node(2)
    known = (c for c in candidates.CANDIDATES if not c.only_named)
    planned = {c.name for c in known if c.fits(here, "allreduce", 16384)}
    assert measured | failed.keys() == planned
    assert {"hsgd-c", "mpi-c", "hsgd", "mpi4py", "horovod", "horovod-plugin"} <= measured, failed
    assert all(f"left out: {name}: " in done.stderr for name in failed)


def test_what_cannot_be_measured_is_left_out_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = ("--quick", "--rounds", "1", "--sizes", "8", "--candidates", "hsgd-c", "mpi4py")
    done = run(*words, "--json", str(file), env={"MPICC": "/nowhere/mpicc"})
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert {r["candidate"] for r in document["results"]} == {"mpi4py"}
    assert [failure["candidate"] for failure in document["failures"]] == ["hsgd-c"]
    assert [line for line in done.stderr.splitlines() if "hsgd-c" in line and "no mpicc" in line]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--sizes", "1 apple"], "is no size"),
        (["--sizes", "6"], "multiples of 4"),
        (["--candidates", "carrier-pigeon"], "no candidate carrier-pigeon"),
        (["--np", "1"], "1 ranks: 2 to"),
        (["--nodes", "2by2"], '"2by2" is no layout'),
        (["--nodes", "1x4@1gbit"], "2 nodes or more"),
        (["--json", "/nowhere/a.json"], "no folder"),
    ],
)
def test_bad_arguments_get_one_line_before_anything_starts(words: list[str], cause: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert cause in done.stderr.splitlines()[-1]


def test_the_check_finds_a_single_wrong_element() -> None:
    expected = pattern.Pattern(3).expected(1, 1000)
    result = expected.copy()
    assert pattern.difference(result, expected) is None
    result[457] = np.nextafter(result[457], np.float32(9))
    text = pattern.difference(result, expected)
    assert text is not None and text.startswith("1 of 1000 elements differ, the first is 457:")
    assert pattern.digest(result) != pattern.digest(expected)


def test_rounded_sums_pass_within_their_tolerance_only() -> None:
    expected = pattern.Pattern(2).expected(0, 100) + np.float32(1)
    near, far = expected * np.float32(1.007), expected * np.float32(1.009)
    assert pattern.difference(near, expected, 2 / 256) is None
    assert "100 of 100" in str(pattern.difference(far, expected, 2 / 256))
    assert "100 of 100" in str(pattern.difference(near, expected))
    assert pattern.difference(np.full(100, np.nan, np.float32), expected, 2 / 256) is not None


def test_the_check_finds_not_a_number_and_wrong_shapes() -> None:
    expected = pattern.Pattern(2).expected(0, 8)
    assert "8 of 8" in str(pattern.difference(np.full(8, np.nan, np.float32), expected))
    assert "expected float32(8,)" in str(pattern.difference(expected[:7], expected))


def test_inputs_differ_between_ranks_and_buffers_and_sum_up_exactly() -> None:
    numbers = pattern.Pattern(4)
    given = [numbers.given(rank, 2, 5000).astype(np.float64) for rank in range(4)]
    assert all(not np.array_equal(given[0], other) for other in given[1:])
    assert not np.array_equal(numbers.given(0, 0, 5000), numbers.given(0, 1, 5000))
    assert np.array_equal(sum(given[::-1]), numbers.expected(2, 5000))


@pytest.mark.long
def test_the_program_in_c_expects_what_the_pattern_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    native, numbers = candidates.JOBS[0], pattern.Pattern(3)
    place = layouts.Testbed(layouts.on_one_node(3))
    tools = jobs.prepare(native, tmp_path, install=False)
    with jobs.WorkerJob(native, place, tmp_path, tools) as job:
        job.connect()
        job.order("setup mpi-c")
        for name, operation in operations.OPERATIONS.items():
            answers = job.order(f"measure mpi-c {name} 4096 2 2 4")
            count = operation.counts(3, 4096)[1]
            for rank, answer in enumerate(answers):
                results = [operation.expected(numbers, rank, buffer, count) for buffer in (2, 3)]
                assert answer["digest"] == sum(map(pattern.digest, results)), (name, rank)
        job.order("end")
        with pytest.raises(jobs.JobFailed, match=r"native job (died|broke off) at"):
            job.order("measure mpi-c allreduce 4096 2 2 4")


@pytest.mark.parametrize("name", operations.OPERATIONS)
@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 4), (3, 100), (4, 4096)])
def test_expected_results_fill_the_outputs(name: str, ranks: int, nbytes: int) -> None:
    operation, numbers = operations.OPERATIONS[name], pattern.Pattern(ranks)
    given, taken = operation.counts(ranks, nbytes)
    results = [operation.expected(numbers, rank, 1, taken) for rank in range(ranks)]
    assert {result.size for result in results} == {taken}
    alike = len({pattern.digest(result) for result in results}) == 1
    assert alike == operation.alike
    assert max(given, taken) * 4 <= max(nbytes, 4 * ranks)


def test_the_expected_blocks_are_those_of_their_senders() -> None:
    numbers = pattern.Pattern(3)
    given = [numbers.given(rank, 0, 6) for rank in range(3)]
    all_of = {name: op.expected for name, op in operations.OPERATIONS.items()}
    exchanged = all_of["alltoall"](numbers, 1, 0, 6)
    assert np.array_equal(exchanged, np.concatenate([array[2:4] for array in given]))
    scattered = all_of["reduce_scatter"](numbers, 2, 0, 2)
    assert np.array_equal(scattered, (given[0] + given[1] + given[2])[4:6])


class FakeJob:
    """A job that gives prepared answers."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)

    def order(self, text: str) -> list[dict[str, Any]]:
        return self.answers


@pytest.mark.parametrize(
    "second",
    [
        pytest.param({"wrong": "buffer 0: 1 of 2 elements differ"}, id="a rank has a wrong sum"),
        pytest.param({"digest": 2, "seconds": [1e-6]}, id="ranks have different sums"),
    ],
)
def test_a_wrong_result_voids_all_figures_of_the_candidate(
    second: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    both = plan("hsgd", "mpi4py")
    earlier = ("np2", "allreduce", 4)
    found = turns.Run({(earlier, "hsgd"): [1.0], (earlier, "mpi4py"): [1.0]})
    group = turns.Jobs(both, both.layouts[0], found)
    fake = FakeJob({"digest": 1, "seconds": [1e-6]}, second)
    group.by_name["python"] = fake  # type: ignore[assignment]
    assert group.sample(both.candidates[0], CASE, 1, 1, 2) == []
    assert found.any_wrong
    assert [r["candidate"] for r in found.rows(both)] == ["mpi4py"]
    assert group.alive(CASE) == [both.candidates[1]]
    assert "error: hsgd: " in capsys.readouterr().err


def test_what_a_library_lacks_ends_one_collective_only() -> None:
    both = plan("hsgd", "mpi4py", collectives=("alltoall", "broadcast"))
    group = turns.Jobs(both, both.layouts[0], turns.Run())
    fake = FakeJob({"missing": "hsgd.Comm has no alltoall"}, {"missing": "the same"})
    group.by_name["python"] = fake  # type: ignore[assignment]
    assert group.sample(both.candidates[0], ("np2", "alltoall", 8), 1, 1, 2) == []
    assert not group.run.any_wrong
    assert [f["reason"] for f in group.run.failures] == ["hsgd.Comm has no alltoall"]
    assert [c.name for c in group.alive(("np2", "alltoall", 8))] == ["mpi4py"]
    assert [c.name for c in group.alive(("np2", "broadcast", 8))] == ["hsgd", "mpi4py"]


def test_the_slowest_rank_counts() -> None:
    one = plan("hsgd")
    group = turns.Jobs(one, one.layouts[0], turns.Run())
    fake = FakeJob({"digest": 1, "seconds": [1.0, 4.0]}, {"digest": 1, "seconds": [2.0, 3.0]})
    group.by_name["python"] = fake  # type: ignore[assignment]
    assert group.sample(one.candidates[0], CASE, 1, 2, 2) == [2.0, 4.0]


def test_a_layout_that_cannot_be_made_is_left_out_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster.Cluster, "reason_unavailable", lambda: "no root here")
    found = turns.Run()
    turns.measure(plan("mpi-c", layouts=(layouts.read_layout("2x2@1gbit"),)), found)
    assert [f["reason"] for f in found.failures] == ["no root here"]
    assert "left out: 2x2@1gbit: no root here" in capsys.readouterr().err.splitlines()


def test_layouts_say_where_ranks_run() -> None:
    spread = layouts.read_layout("2+1@10gbit")
    assert (spread.ranks_of_nodes, spread.rate, spread.ranks, spread.nodes) == (
        (2, 1),
        "10gbit",
        3,
        2,
    )
    assert layouts.read_layout("3x2").ranks_of_nodes == (2, 2, 2)
    assert str(spread) == "2 + 1 ranks on 2 nodes at 10gbit/s"
    assert layouts.Testbed(layouts.on_one_node(4)).hosts == "localhost:4"


def test_candidates_that_only_spin_are_left_out_where_cores_are_short() -> None:
    many = layouts.on_one_node(pattern.MAX_RANKS)
    names = {c.name for c in candidates.CANDIDATES if c.fits(many, "allreduce", 16)}
    assert "mpi-c" in names and not names & {"deepspeed", "mpi-sm-c", "limit-line"}


class FakeClock:
    """Time that passes only in pauses and calls."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += 2.0


def test_pauses_before_calls_differ_stay_below_a_cycle_and_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(worker, "time", clock)
    bench = worker.Bench.__new__(worker.Bench)
    bench.world, bench.pauses = types.SimpleNamespace(Barrier=lambda: None), random.Random(1)
    assert bench._time_apart([clock.call] * 8, 0.5) == pytest.approx(2.0)
    assert len(set(clock.pauses)) == 8 and all(0 <= pause < 0.5 for pause in clock.pauses)


def test_a_peer_counts_as_made_only_when_it_was_made_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSGD_CACHE", str(tmp_path))
    with pytest.raises(peers.PeerMissing, match="not there yet"):
        peers.mpich_environment(install=False)
    created = []

    def fail(what: str, words: list[str], environment: object = None) -> None:
        created.append(words)
        if len(created) == 2:
            raise peers.PeerMissing("MPICH: no network")

    monkeypatch.setattr(installing, "run", fail)
    with pytest.raises(peers.PeerMissing, match="no network"):
        peers.mpich_environment(install=True)
    folder = peers.mpich_environment(install=True)  # from the beginning
    assert len(created) == 4 and folder.parent == tmp_path / "peers"
    assert peers.mpich_environment(install=False) == folder and len(created) == 4


def test_ratios_compare_with_the_best_peer_of_each_case() -> None:
    rows = [
        row("hsgd-c", 1 << 20, 10),
        row("mpi-c", 1 << 20, 50),
        row("deepspeed", 1 << 20, 20),
        row("limit", 1 << 20, 8),
        row("limit-arena", 1 << 20, 4),
        row("hsgd", 1 << 20, 20),
        row("hsgd-arena-c", 1 << 20, 5),
        row("hsgd-arena", 1 << 20, 8),
        row("mpi4py", 1 << 20, 60),
        row("gloo", 1 << 20, 40),
        row("horovod", 1 << 20, 90),
        row("horovod-plugin", 1 << 20, 30),
        row("hsgd", 8, 5, layout="np4"),
        row("mpi4py", 8, 4, layout="np4"),
        row("hsgd-c", 8, 10, layout="2x2@1gbit"),
        row("limit-link", 8, 9, layout="2x2@1gbit"),
    ]
    found = ratios.ratios(rows)
    assert {key: value for key, value in found.items() if "vs_peer/" in key} == {
        "vs_peer/allreduce/np2/1MB": 4.0,  # DeepSpeed is compared by itself
        "vs_peer/allreduce_python/np2/1MB": 2.0,
        "vs_peer/allreduce_arena/np2/1MB": 8.0,
        "vs_peer/allreduce_arena_python/np2/1MB": 5.0,
        "vs_peer/allreduce_horovod_plugin/np2/1MB": 3.0,
        "vs_peer/allreduce_python/np4/8B": 0.8,
    }
    assert {key: value for key, value in found.items() if "vs_limit/" in key} == {
        "vs_limit/allreduce/np2/1MB": 0.8,
        "vs_limit/allreduce_arena/np2/1MB": 0.8,
        "vs_limit/allreduce/2x2@1gbit/8B": 0.9,
    }
    assert found["vs_deepspeed/allreduce/np2/1MB"] == 2.0
    assert found["vs_mpi-c/allreduce_arena/np2/1MB"] == 10.0
    assert "vs_mpi-c/allreduce_python/np2/1MB" not in found


def test_the_table_has_a_column_for_each_label_and_comparison() -> None:
    rows = [
        {**row("hsgd-c", 8, 1), "label": "hsgd (C)"},
        {**row("limit-line", 8, 0.5), "label": "limit"},
        {**row("limit", 16 << 10, 8), "label": "limit"},
    ]
    meta = {"settings": {"layouts": {"np2": "2 ranks"}}, "machine": {}}
    text = command.tables({"results": rows, "ratios": ratios.ratios(rows), "meta": meta})
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["bytes", "hsgd", "(C)", "limit", "of", "limit"],
        ["-----", "--------", "-----", "--------"],
        ["8B", "1.00", "0.50", "0.50"],
        ["16KB", "-", "8.00", "-"],
    ]


@pytest.mark.parametrize("nbytes", [4, 1000, 1024, 1536, 64 << 20, 1 << 30])
def test_labels_of_sizes_read_back(nbytes: int) -> None:
    assert report.read_size(report.size_label(nbytes)) == nbytes


def test_statistics_are_those_of_numpy() -> None:
    seconds = np.random.default_rng(1).random(137)
    found = report.statistics(list(seconds))
    assert found["median_us"] == pytest.approx(np.median(seconds) * 1e6, rel=1e-5)
    assert found["p99_us"] == pytest.approx(np.percentile(seconds, 99) * 1e6, rel=1e-5)
    assert report.statistics([2e-6])["p99_us"] == 2.0


def test_tiny_calls_are_measured_in_batches_and_large_ones_alone() -> None:
    shape = plan(rounds=4, budget_s=1.0)
    ours, gloo, horovod = (plan(n).candidates[0] for n in ("hsgd", "gloo", "horovod"))
    assert turns.batches(1e-7, shape, 4, ours)[0] == turns.MOST_CALLS
    assert turns.batches(1e-6, shape, 4, gloo)[0] == 4  # in place: each buffer once
    assert turns.batches(0.5, shape, 2, ours) == (1, turns.LEAST_BATCHES, 1)
    assert turns.batches(1e-3, shape, 16, horovod)[0] == turns.CYCLE_CALLS
    assert turns.batches(1e-3, shape, 4, horovod)[0] == 4  # in place, too
    assert turns.batches(0.1, shape, 4, horovod)[0] == 1
    assert [turns.buffer_count(n) for n in (0, 8, 8 << 10, 256 << 20)] == [16, 16, 4, 1]


def test_who_is_too_slow_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan("hsgd", "mpi4py", sizes=(8, 16), rounds=3)
    group = turns.Jobs(one, one.layouts[0], turns.Run())
    group.by_name["python"] = FakeJob()  # type: ignore[assignment]
    asked = []

    def sample(candidate: Any, case: Any, *_: int) -> list[float]:
        asked.append((candidate.name, case[2]))
        return [turns.LIMIT_S if candidate.name == "hsgd" else 1e-6]

    monkeypatch.setattr(group, "sample", sample)
    for case in one.cases(one.layouts[0]):
        turns._measure_case(one, group, case, turns._Progress(0))
    assert [size for name, size in asked if name == "hsgd"] == [8]
    assert group.run.samples[("np2", "allreduce", 8), "hsgd"] == [turns.LIMIT_S]
    assert [size for name, size in asked if name == "mpi4py"] == [8] * 4 + [16] * 4


def test_a_job_that_ends_takes_its_candidates_with_it() -> None:
    class Killed(FakeJob):
        def order(self, text: str) -> list[dict[str, Any]]:
            raise jobs.JobFailed("the job broke off")

    one = plan("hsgd", "mpi4py", sizes=(8, 16), rounds=3)
    group = turns.Jobs(one, one.layouts[0], turns.Run())
    group.by_name["python"] = Killed()  # type: ignore[assignment]
    for case in one.cases(one.layouts[0]):
        turns._measure_case(one, group, case, turns._Progress(0))
    assert not group.run.samples
    assert all(group.run.has_ended("np2", name) for name in ("hsgd", "mpi4py"))


def test_what_had_been_measured_is_kept_when_a_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_one(plan: turns.MeasurementPlan, found: turns.Run) -> None:
        found.samples[CASE, "hsgd-c"] = [2e-6]
        sys.exit(143)

    monkeypatch.setattr(command, "measure", measure_one)
    file = tmp_path / "a.json"
    words = ["--sizes", "8", "16", "--candidates", "hsgd-c", "mpi-c", "--json", str(file)]
    assert command.run(allreduce.ALLREDUCE, words) == 143
    document = json.loads(file.read_text())
    assert [(r["candidate"], r["bytes"]) for r in document["results"]] == [("hsgd-c", 8)]
    assert document["meta"]["interrupted"]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.long
def test_the_interposer_is_measured_where_calls_pass_and_where_they_are_taken(
    tmp_path: Path,
) -> None:
    file = tmp_path / "interposer.json"
    done = run("--quick", "--sizes", "1KB", "--json", str(file), program="interposer")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    names = {"allreduce", "bcast", "barrier", "allgather", "allgatherv", "reduce_scatter"}
    kinds = {row["kind"] for row in document["results"]}
    assert kinds == {"passed", "plain", "taken"}
    ratios_found = document["ratios"]
    for name in names:
        assert f"vs_limit/passed/{name}/64B" in ratios_found
        assert f"vs_peer/interposer/{name}/np2/1KB" in ratios_found
    for copy in ("cma", "no_cma"):
        mixes = {row["mix"] for row in document["mixes"] if row["copy"] == copy}
        assert {"messages", "short_lived", "puts", "pauses", "nonblocking"} <= mixes
        assert all(f"vs_peer/interposer_mix/{mix}/np2/{copy}" in ratios_found for mix in mixes)
    assert all(value > 0 for value in ratios_found.values())
