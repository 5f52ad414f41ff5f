"""`hsgd status --all-nodes`: ranks know the hosts of all nodes, and these are asked, and no others.

Run under mpirun, this file is the program of the ranks of virtual nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd import Comm
from hsgd.comm.connect import tcp_meeting
from hsgd.tools.cli import main
from hsgd.tools.status.page import hosts_of
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat
from toolkit.cluster import Cluster

__all__: list[str] = []

NODES = [0, 0, 1, 1]
JOB_S = 120.0
LIMIT_S = 60.0
# Writes down which host it is asked for.
SSH = """#!/bin/sh
for word; do
  [ "$before" != "--" ] || echo "$word" >> "{log}"
  before="$word"
done
{run}
"""


def make_ssh(folder: Path, run: str) -> Path:
    """A stand-in for ssh in `folder`; returns where it writes the hosts."""
    log, path = folder / "asked", folder / "ssh"
    path.write_text(SSH.format(log=log, run=run))
    path.chmod(0o755)
    return log


def do_be_on_named_nodes(seat: Seat, folder: str, late: int) -> list[list[str]]:
    """The hosts that this rank knows with one communicator, and with a part of it as well. The
    first node has the name of this machine.
    """
    name = f"other{NODES[seat.rank]}" if NODES[seat.rank] else os.uname().nodename
    tcp_meeting.socket.gethostname = lambda: name  # type: ignore[assignment]
    with meet(seat, folder, NODES, PATIENT) as comm:
        found = [hosts_of(os.getpid())]
        part = comm.split(seat.rank % 2)
        assert part is not None
        with part:
            found.append(hosts_of(os.getpid()))
            if seat.rank == late:
                seat.tell("late")
                seat.pipe.recv()
            comm.allreduce(np.ones(100))
    return found


def test_the_other_hosts_of_a_job_are_asked_over_ssh(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = make_ssh(tmp_path, 'exec sh -c "$word"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ranks.start(do_be_on_named_nodes, str(tmp_path), 3)
    assert ranks.hear(3) == "late"
    pid = str(ranks.pid(0))
    assert main(["status", "--json", pid]) == 0
    assert not log.exists()
    capsys.readouterr()
    assert main(["status", "--all-nodes", "--json", pid]) == 0
    comms = json.loads(capsys.readouterr().out)["communicators"]
    assert sorted(comm["size"] for comm in comms) == [2, 2, 4]
    assert log.read_text().split() == ["other1"]
    monkeypatch.setattr("hsgd.tools.status.looking.hosts_of", lambda _: [])
    assert main(["status", "--all-nodes", pid]) == 1
    out, err = capsys.readouterr()
    assert "LATE" in out and "--all-nodes: the hosts of communicator " in err
    ranks.send(3, "go")
    found = [outcome.value for outcome in ranks.finish()]
    both = [os.uname().nodename, "other1"]
    # The first rank of a node alone knows, and the second one is the first one of its part.
    assert found == [[both, both], [[], both]] * 2


def test_ranks_of_one_node_tell_no_hosts(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(do_stay_on_one_node, str(tmp_path), on=range(2)) == [[], []]


def do_stay_on_one_node(seat: Seat, folder: str) -> list[str]:
    with meet(seat, folder, [0, 0], PATIENT):
        return hosts_of(os.getpid())


@pytest.mark.long
def test_over_mpi_the_last_rank_finds_all_nodes(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    nodes = cluster(3)
    log = make_ssh(tmp_path, 'exec /run/bin/ssh "$@"')
    command = [sys.executable, __file__, str(tmp_path)]
    done = nodes.mpirun(5, command, timeout_s=JOB_S)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = log.read_text().split()
    assert {*asked} == {"node1", "node2"} and asked[:2] in (["node1", "node2"], ["node2", "node1"])
    (comm,) = json.loads((tmp_path / "seen.json").read_text())["communicators"]
    assert (comm["held_up_by"], comm["unseen"], comm["nodes"]) == ([4], [], 3)
    assert [rank["standing"] for rank in comm["ranks"]] == ["waits"] * 4 + ["late"]


def run_rank(folder: Path) -> None:
    """The last rank asks who holds the others up, until they wait for it, and then comes."""
    with Comm() as comm:
        if comm.rank == comm.size - 1:
            (folder / "seen.json").write_text(json.dumps(ask_until_all_wait(folder, comm.size)))
        comm.barrier()


def ask_until_all_wait(folder: Path, size: int) -> dict[str, Any]:
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    words = ["-m", "hsgd", "status", "--all-nodes", "--json", str(os.getpid())]
    end = time.monotonic() + LIMIT_S
    while True:
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
        )
        assert time.monotonic() < end, done.stdout + done.stderr
        seen: dict[str, Any] = json.loads(done.stdout or '{"communicators": []}')
        waits = [
            rank["standing"] == "waits" for comm in seen["communicators"] for rank in comm["ranks"]
        ]
        if done.returncode == 0 and sum(waits) == size - 1:
            return seen


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
