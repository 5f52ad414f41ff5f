"""A rank that closes its communicator, or ends, is told to the other nodes: collectives that all
had called end well, later ones name it, and nobody waits for anybody at the end.

Nothing here asserts on time: collectives have half an hour, and jobs are ended long before. Run
under mpirun, this file is the program of the ranks: `python test_leaving.py CASE [LEAVER SKEW]`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from toolkit.cluster import Cluster

__all__: list[str] = []

JOB_S = 300.0  # far below the deadline of a collective
JOBS_AT_ONCE = 2
SKEW_S = 0.5
COUNTS = (3, 70_001, 0, 500)
ROUNDS = 24
PROBES = 64  # more communicators than may be kept


class Way(NamedTuple):
    """Who leaves, and whether others are still behind or wait already."""

    case: str
    hosts: tuple[int, ...]
    leaver: int
    skew: str

    def __str__(self) -> str:
        return f"{self.case}-{'+'.join(map(str, self.hosts))}-{self.leaver}-{self.skew}"


WAYS = [
    Way("blocking", (1, 1), 0, "ahead"),
    Way("blocking", (1, 1), 1, "behind"),
    Way("blocking", (2, 1), 0, "behind"),  # a leader, with a rank beside it
    Way("blocking", (2, 1), 1, "ahead"),  # no leader
    Way("blocking", (2, 1), 1, "behind"),
    Way("blocking", (2, 1), 2, "ahead"),  # a whole node
    Way("blocking", (2, 2), 3, "behind"),  # one of two leaders
    Way("async", (1, 1), 1, "behind"),
    Way("async", (2, 2), 2, "ahead"),
    Way("parts", (2, 2), 3, "behind"),
    Way("parts", (2, 2), 2, "ahead"),
    Way("request", (1, 1), 1, "ahead"),
    Way("exchange", (1, 1), 0, "ahead"),
]


def run_job(nodes: Cluster, hosts: tuple[int, ...], *words: str) -> Any:
    names = ",".join(f"node{k}:{count}" for k, count in enumerate(hosts, 1))
    argv = [sys.executable, __file__, *words]
    return nodes.mpirun(sum(hosts), argv, hosts=names, timeout_s=JOB_S)


def said(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What the ranks reported, in their order."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda line: line["of"])


@pytest.fixture(scope="module")
def jobs(cluster: Callable[..., Cluster]) -> dict[Way, subprocess.CompletedProcess[str]]:
    """They mostly wait, so some run beside one another."""
    nodes = cluster(2)

    def job(way: Way) -> subprocess.CompletedProcess[str]:
        return run_job(nodes, way.hosts, way.case, str(way.leaver), way.skew)

    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        return dict(zip(WAYS, pool.map(job, WAYS), strict=True))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_rank_that_ends_by_an_exception_is_named_to_all_and_the_job_ends(
    jobs: dict[Way, subprocess.CompletedProcess[str]], way: Way
) -> None:
    done = jobs[way]
    assert done.returncode != 0
    assert "RuntimeError: this rank fails" in done.stderr
    reports = said(done)
    assert [report["of"] for report in reports] == [
        rank for rank in range(sum(way.hosts)) if rank != way.leaver
    ], done.stderr[-3000:]
    for report in reports:
        assert report["rank"] == way.leaver, report
        assert f"rank {way.leaver} (pid " in report["line"], report
        assert "raised RuntimeError: this rank fails" in report["line"], report


@pytest.mark.long
def test_ranks_that_end_seconds_apart_end_well(cluster: Callable[..., Cluster]) -> None:
    done = run_job(cluster(2), (2, 1), "end")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [report["of"] for report in said(done)] == [0, 1, 2]
    assert "Error" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("hosts", [(1, 1), (2, 2)], ids=str)
def test_communicators_come_and_go_and_leave_nothing_behind(
    cluster: Callable[..., Cluster], hosts: tuple[int, ...]
) -> None:
    """Ranks close them at different times; MPI gives their numbers to the next ones."""
    done = run_job(cluster(2), hosts, "rounds")
    assert done.returncode == 0, done.stderr[-3000:]
    reports = said(done)
    assert [report["of"] for report in reports] == list(range(sum(hosts)))
    for report in reports:
        assert report["kept"] <= 2, report  # those of the last round may be


# --- the program of the ranks ---


def report(of: int, **facts: Any) -> None:
    print(json.dumps({"of": of, **facts}), flush=True)


def work(comm: Any) -> None:
    for count in COUNTS:
        assert (comm.allreduce(np.ones(count)) == comm.size).all()


def leave(comm: Any, leaver: int, skew: str) -> None:
    """`leaver` fails; the others go on."""
    if comm.rank == leaver:
        if skew == "behind":
            time.sleep(SKEW_S)
        raise RuntimeError("this rank fails")
    if skew == "ahead":
        time.sleep(SKEW_S)


def run_blocking(comm: Any, leaver: int, skew: str) -> None:
    work(comm)
    leave(comm, leaver, skew)
    work(comm)


def run_async(comm: Any, leaver: int, skew: str) -> None:
    data = [np.ones(count) for count in COUNTS]
    handles = [comm.allreduce_async(array) for array in data]
    if comm.rank != leaver:
        more = comm.allreduce_async(np.ones(100_000))
    for handle in handles:
        assert (handle.wait() == comm.size).all()
    leave(comm, leaver, skew)
    more.wait()


def run_parts(comm: Any, leaver: int, skew: str) -> None:
    """Two communicators of one rank of each node; one goes on while the other lost a rank."""
    from hsgd import PeerLost

    part = comm.split(comm.local_rank)
    work(part)
    leave(comm, leaver, skew)
    if comm.local_rank != leaver % 2:
        work(part)
    else:
        with pytest.raises(PeerLost, match="raised RuntimeError: this rank fails") as raised:
            work(part)
        assert raised.value.rank == leaver // 2
    work(comm)


def run_request(comm: Any, leaver: int, skew: str) -> None:
    """The older communicator has a request open that only the failing rank made."""
    part = comm.split(0)
    if comm.rank == leaver:
        comm.allreduce_async(np.ones(3))
    leave(comm, leaver, skew)
    work(part)


def run_exchange(comm: Any, leaver: int, skew: str) -> None:
    """The older communicator has an exchange, which all close together."""
    from hsgd import NotifiedWindow

    exchange = NotifiedWindow(comm, 4096, 1)
    part = comm.split(0)
    leave(comm, leaver, skew)
    work(part)
    exchange.close()


def run_end(comm: Any) -> None:
    work(comm)
    time.sleep(2.0 * SKEW_S * ((comm.rank + 1) % comm.size))
    report(comm.rank)


def run_rounds(comm: Any) -> None:
    from mpi4py import MPI

    def used_numbers() -> int:
        """How many are taken, apart from a constant: a leak may lie above a free one."""
        probes = [MPI.COMM_SELF.Dup() for _ in range(PROBES)]
        numbers = [probe.py2f() for probe in probes]
        for probe in probes:
            probe.Free()
        return max(numbers)

    def least_used() -> int:
        """Without those that wait for a message which is on its way; collective."""
        least = used_numbers()
        for _ in range(5):
            comm.barrier()
            comm.split(0).close()
            comm.barrier()
            least = min(least, used_numbers())
        return least

    own = random.Random(comm.rank)
    before = 0
    for turn in range(ROUNDS):
        if turn == ROUNDS // 4:
            before = least_used()
        part = comm.split(0 if turn % 3 else comm.local_rank, key=-comm.rank)
        for array in (np.ones(5), np.ones(40_000)):
            assert (part.allreduce(array) == part.size).all()
        if own.random() < 0.5:
            time.sleep(own.random() / 50)
        part.close()
    report(comm.rank, kept=least_used() - before)


def main() -> None:
    from hsgd import Comm, PeerLost
    from hsgd.config import Config

    case, *words = sys.argv[1:]
    comm = Comm(config=Config(wire_chunk_bytes=65536, oneshot_bytes=1024, store="ordinary"))
    if not words:
        {"end": run_end, "rounds": run_rounds}[case](comm)
        return
    leaver, skew = int(words[0]), words[1]
    cases = {
        "blocking": run_blocking,
        "async": run_async,
        "parts": run_parts,
        "request": run_request,
        "exchange": run_exchange,
    }
    try:
        cases[case](comm, leaver, skew)
    except PeerLost as error:
        report(comm.rank, rank=error.rank, line=str(error))


if __name__ == "__main__":
    main()
