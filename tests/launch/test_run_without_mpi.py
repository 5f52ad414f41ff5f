"""`hsgd run` where there is no mpirun: torchrun starts the ranks, here and on virtual nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hsgd import LaunchError
from hsgd.jobs.launch import without_mpi
from hsgd.jobs.launch.remote_command import remote
from toolkit.cluster import Cluster
from toolkit.processes import run_marked

__all__: list[str] = []

JOB_S = 120.0
HSGD = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]
PROGRAM = """
import os, sys
import numpy as np
import hsgd

assert len(os.environ["HSGD_JOB_SECRET"]) == 64
with hsgd.Comm() as comm:
    total = comm.allreduce(np.full(100_000, comm.rank + 1.0))[-1]
    word = os.environ.get("HSGD_SLOTS", "-")
    print(f"|{comm.rank} {comm.size} {total:g} {comm.mpi} {comm.nodes} {word}|", flush=True)

"""
FAILING = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '3' else time.sleep(600)"


def lines(text: str) -> list[str]:
    return sorted(filter(None, (each.strip() for each in text.replace("|", "\n").split("\n"))))


@pytest.mark.parametrize("words", [["--launcher", "torchrun"], []], ids=["asked for", "no mpirun"])
def test_ranks_of_this_machine_meet_without_mpi(tmp_path: Path, words: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    # An interpreter that has no mpirun beside it, and is told of none.
    code = "import sys\nfrom hsgd.tools import cli\nfrom hsgd.jobs.launch import launch\n"
    if not words:
        code += "def none(_): raise launch.NoLauncher('none')\nlaunch.find_launcher = none\n"
    code += "sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", "-np", "3", *words, sys.executable, str(script)]
    done = run_marked(command, {"OMP_NUM_THREADS": "1", **os.environ, "HSGD_SLOTS": "5"}, JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert lines(done.stdout) == [f"{rank} 3 6 None [0, 0, 0] 5" for rank in range(3)]
    told = "hsgd: no mpirun was found: torchrun starts the ranks, without MPI" in done.stderr
    assert told == (not words)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "places"), [("node1:2,node2:2", "[0, 0, 1]"), ("node2:3", "[0, 0, 0]")]
)
def test_ranks_of_other_hosts_meet_without_mpi(
    tmp_path: Path, cluster: Callable[..., Cluster], hosts: str, places: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    words = ["run", "-np", "3", "-H", hosts, "--launcher", "torchrun"]
    env = {"HSGD_SLOTS": "5", "HSGD_INTERFACES": "eth0"}
    done = cluster(2).run(
        [*HSGD, *words, sys.executable, str(script)], node=1, env=env, timeout_s=JOB_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert lines(done.stdout) == [f"{rank} 3 6 None {places} 5" for rank in range(3)]


@pytest.mark.long
def test_a_rank_that_fails_ends_the_job_on_all_hosts(
    tmp_path: Path, cluster: Callable[..., Cluster]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    words = ["run", "-np", "4", "-H", "node1:2,node2:2", "--launcher", "torchrun"]
    nodes = cluster(2)
    done = nodes.run([*HSGD, *words, sys.executable, str(script)], node=1, timeout_s=JOB_S)
    assert done.returncode == 1
    assert "exitcode  : 7" in done.stderr
    for node in (1, 2):  # the brackets keep grep from finding itself
        look = f"grep -l '{tmp_path}/[t]rain' /proc/[0-9]*/cmdline; test $? -eq 1"
        left = nodes.run(["sh", "-c", look], node=node)
        assert left.returncode == 0, left.stdout


def test_a_remote_command_ends_with_its_ssh(tmp_path: Path) -> None:
    """What runs on the other host, without the host."""
    mark = tmp_path / "ended"
    job = f"trap 'touch {mark}; exit 5' TERM; echo up; while :; do sleep 0.05; done"
    script = remote("node1", ["sh", "-c", job])[-1]
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.stdin.close()
        assert process.wait(JOB_S) == 5
    assert mark.exists()
    failing = remote("node1", ["sh", "-c", "exit 9"])[-1]
    with subprocess.Popen(["sh", "-c", failing], stdin=subprocess.PIPE) as process:
        assert process.wait(JOB_S) == 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_commands(number: signal.Signals) -> None:
    code = (
        "import sys; from hsgd.jobs.launch import without_mpi\n"
        "sys.exit(without_mpi.run_all([['sh', '-c', 'echo $$; exec sleep 600']] * 2))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(JOB_S) == 128 + number
    deadline = time.monotonic() + JOB_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def test_hosts_without_a_rank_get_no_command() -> None:
    commands = without_mpi.plan(["x"], 3, "a:2,b:2,c:2", {"HSGD_SLOTS": "4"}, ["HSGD_SLOTS", "Y"])
    assert [words[:4] for words in commands] == [["ssh", "-x", "--", host] for host in "ab"]
    assert all("HSGD_SLOTS=4" in words[-1] and "--nnodes=2" in words[-1] for words in commands)
    assert "--nproc-per-node=2" in commands[0][-1] and "--nproc-per-node=1" in commands[1][-1]
    with pytest.raises(LaunchError, match="4 slots for 9 ranks"):
        without_mpi.plan(["x"], 9, "a:2,b:2", {}, [])


def test_words_for_mpirun_are_refused_with_torchrun() -> None:
    words = ["run", "-np", "2", "--launcher", "torchrun", "--mpi-args=--x", "true"]
    done = run_marked([*HSGD, *words], dict(os.environ), JOB_S)
    assert done.returncode == 2 and "--mpi-args are words for mpirun" in done.stderr
