"""A rank that leaves a ParameterBox of several nodes: the others are told that it left, and no
collective of theirs succeeds because it leaves.

Run under mpirun, this file is the program of the ranks: `python test_box_leaving.py CASE`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolkit.cluster import Cluster

__all__: list[str] = []

JOB_S = 120.0  # far below the deadline of a collective
FAULT_TIMEOUT_S = 20.0


def run_job(nodes: Cluster, hosts: str, *words: str, ft: bool = False) -> Any:
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    argv = [sys.executable, __file__, *words]
    options = ["--with-ft", "ulfm"] if ft else []
    return nodes.mpirun(size, argv, hosts=hosts, options=options, timeout_s=JOB_S)


def said(done: Any) -> list[dict[str, Any]]:
    """What the ranks reported, in their order."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda line: line["of"])


PAIR, THREE = "node1:1,node2:1", "node1:2,node2:1"


@pytest.mark.parametrize(
    ("hosts", "network"),
    [(PAIR, "sockets"), (THREE, "sockets"), (PAIR, "mpi"), (THREE, "mpi")],
)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("raise", "raised RuntimeError: this rank fails"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("with", "raised RuntimeError: this rank fails"),
        ("exit", "closed its communicator"),
    ],
)
def test_a_rank_that_leaves_by_an_exception_is_lost_to_a_barrier_that_it_never_called(
    cluster: Callable[..., Cluster], case: str, words: str, hosts: str, network: str
) -> None:
    done = run_job(cluster(2), hosts, case, network)
    assert done.returncode != 0
    reports = said(done)
    others = list(range(1, 2 + hosts.count(":2")))
    assert [report["of"] for report in reports] == others, done.stderr
    for report in reports:
        assert report["kind"] == "PeerLost" and report["rank"] == 0, report
        assert words in report["line"]
    assert "SignatureMismatch" not in done.stderr and "nanobind" not in done.stderr


@pytest.mark.parametrize("network", ["sockets", "mpi"])
def test_a_rank_whose_with_block_failed_goes_on_without_waiting(
    cluster: Callable[..., Cluster], network: str
) -> None:
    """The communicator is as good as before; the other rank closes the box when it hears of it."""
    done = run_job(cluster(2), PAIR, "caught", network)
    assert done.returncode == 0, done.stderr
    assert [report["sum"] for report in said(done)] == [2.0, 2.0]


def test_an_owner_that_closes_early_serves_the_others_until_they_close(
    cluster: Callable[..., Cluster],
) -> None:
    done = run_job(cluster(2), "node1:1,node2:2", "early")
    assert done.returncode == 0, done.stderr
    assert said(done) == [{"of": rank, "sums": [25.0]} for rank in (1, 2)]


def test_a_box_closes_without_a_rank_that_was_killed(cluster: Callable[..., Cluster]) -> None:
    done = run_job(cluster(3), "node1:1,node2:1,node3:1", "killed", ft=True)
    assert [(report["of"], report["closed"]) for report in said(done)] == [(1, ""), (2, "")], (
        done.stdout + done.stderr
    )


@pytest.mark.long
def test_who_waits_in_vain_for_others_to_close_is_told_who_did_not(
    cluster: Callable[..., Cluster],
) -> None:
    done = run_job(cluster(2), "node1:1,node2:1", "open")
    line = "ParameterBox.close: after 2 s rank 1 had not closed it; close it on every rank"
    assert said(done) == [{"of": 0, "kind": "CollectiveTimeout", "line": line}], done.stderr


# --- the program of the ranks ---


def report(of: int, **facts: Any) -> None:
    print(json.dumps({"of": of, **facts}), flush=True)


def leave(comm: Any, box: Any, case: str) -> None:
    """Rank 0 does, the others go on into a barrier."""
    from hsgd import HsgdError

    if comm.rank == 0:
        if case == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10.0)
        if case == "exit":
            sys.exit(3)
        raise RuntimeError("this rank fails")
    try:
        comm.barrier()
    except HsgdError as error:
        kind = type(error).__name__
        report(comm.rank, kind=kind, rank=getattr(error, "rank", -1), line=str(error))
    else:
        report(comm.rank, kind="no error", rank=-1, line="")


def early(comm: Any, box: Any) -> None:
    """Rank 0 is in close() when the others begin; each adds 10 times half its number plus one."""
    values = np.zeros(100, np.float32)
    others = comm.mpi.Split(min(comm.rank, 1), comm.rank)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.mpi.Send(bytearray(1), rank)
        box.close()
        return
    comm.mpi.Recv(bytearray(1), 0)
    for _ in range(10):
        box.accumulate(np.full(100, 0.5 * (comm.rank + 1), np.float32), 0)
    others.Barrier()
    box.refresh()
    box.read(values)
    report(comm.rank, sums=sorted({float(value) for value in values}))
    others.Barrier()
    box.close()


def killed(comm: Any, box: Any) -> None:
    from hsgd import HsgdError

    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    result = ""
    try:
        box.close()
    except HsgdError as error:
        result = f"{type(error).__name__}: {error}"
    report(comm.rank, closed=result)
    os._exit(0)  # MPI cannot be finalized without the victim


def left_open(comm: Any, box: Any) -> None:
    from hsgd import HsgdError

    if comm.rank == 0:
        try:
            box.close()
        except HsgdError as error:
            report(0, kind=type(error).__name__, line=str(error))
        os._exit(1)
    signal.pause()


def caught(comm: Any, box: Any) -> None:
    """Both ranks leave the block by an exception, rank 1 when rank 0 has left it."""
    try:
        with box:
            if comm.rank == 1:
                comm.mpi.Recv(bytearray(1), 0)
            raise RuntimeError("this block fails")
    except RuntimeError:
        if comm.rank == 0:
            comm.mpi.Send(bytearray(1), 1)
    report(comm.rank, sum=float(comm.allreduce(np.ones(1))[0]))


def main() -> None:
    from hsgd import Comm, ParameterBox
    from hsgd.config import Config

    case = sys.argv[1]
    # Over MPI who closes its box waits for one that left.
    comm = Comm(config=Config(timeout_s=600.0, abort_after_s=1.0))
    limit_s = {"killed": FAULT_TIMEOUT_S, "open": 2.0}.get(case, 600.0)
    network = (*sys.argv[2:], "sockets")[0]
    zeros = np.zeros(100, np.float32)
    box = ParameterBox.over(comm, zeros, timeout_s=limit_s, network=network)
    box.accumulate(np.zeros(100, np.float32))
    comm.barrier()
    if case == "with":
        with box:
            leave(comm, box, case)
    elif case in ("early", "killed", "open", "caught"):
        {"early": early, "killed": killed, "open": left_open, "caught": caught}[case](comm, box)
    else:
        leave(comm, box, case)


if __name__ == "__main__":
    main()
