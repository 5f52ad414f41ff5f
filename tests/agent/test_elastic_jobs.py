"""Elastic jobs on this machine and on virtual nodes: ranks are lost and join, results stay."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_jobs import HSGD, JOB_S, TRAIN, lines, watched
from toolkit.cluster import Cluster
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.timeout(3 * JOB_S)


STEPS = 30


class Training:
    """TRAIN as a file, and the file that lets it go on from its middle."""

    def __init__(self, folder: Path) -> None:
        self.script, self._go = folder / "train.py", folder / "go"
        self.script.write_text(TRAIN)

    def command(self, options: str, most: int = 99) -> list[str]:
        """A job of it. most: ranks that commit in the middle."""
        words = [sys.executable, str(self.script), str(STEPS), str(self._go), str(most)]
        return [*HSGD, "run", *options.split(), *words]

    def go(self) -> None:
        self._go.touch()


@pytest.fixture
def train(tmp_path: Path) -> Training:
    return Training(tmp_path)


def here(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def undisturbed() -> list[float]:
    """The weights of TRAIN at its end, computed by the formula of SGD."""
    weight, momentum = 1.0, 0.0
    for step in range(STEPS):
        momentum = 0.5 * momentum + 2 * step / STEPS
        weight -= 0.01 * momentum
    return [weight] * 3


def check_weights(text: str, ranks: int) -> None:
    done = lines(text, "done")
    assert len(done) == ranks, text[-3000:]
    for _, size, *weights in done:
        assert int(size) == ranks
        assert [float(each) for each in weights] == pytest.approx(undisturbed(), abs=2e-6)


def pids(text: str, size: int) -> dict[int, int]:
    """Process of each rank in the last world of that size, when all have entered it."""
    found = {int(rank): int(pid) for rank, n, pid, _ in lines(text, "enter") if int(n) == size}
    return found if len(found) >= size else {}


def entered(count: int) -> Callable[[str], bool]:
    """Whether ranks have entered the training so often."""
    return lambda text: len(lines(text, "enter")) >= count


def test_a_job_without_faults_is_an_ordinary_job(train: Training) -> None:
    train.go()
    done = run_marked(train.command("-np 2 --min-np 1"), here(), JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    check_weights(done.stdout, 2)
    assert "hsgd:" not in done.stderr
    assert "nanobind" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_go_on_from_their_commit_and_a_new_rank_joins(
    train: Training, victim: int
) -> None:
    with watched(train.command("-np 3 --min-np 2"), here()) as job:
        job.wait_for(lambda text: pids(text, 3))
        before = pids(job.text, 3)
        os.kill(before[victim], signal.SIGKILL)
        job.wait_for(lambda text: pids(text, 2))
        assert set(pids(job.text, 2).values()) == set(before.values()) - {before[victim]}
        job.wait_for(entered(8))  # three, two, three
        train.go()
        assert job.end() == 0, job.text[-3000:]
    joined = {int(pid) for *_, pid, _ in lines(job.text, "enter")[-3:]}
    assert len(joined - set(before.values())) == 1
    check_weights(job.text, 3)
    told = f"hsgd: rank {victim} ({before[victim]} on "
    assert told in job.text and "was ended by SIGKILL" in job.text


@pytest.mark.long
def test_a_new_rank_has_the_state_from_the_moment_it_joins(train: Training) -> None:
    with watched(train.command("-np 2 --min-np 1", most=1), here()) as job:
        job.wait_for(lambda text: pids(text, 2))
        first = pids(job.text, 2)
        os.kill(first[1], signal.SIGKILL)
        job.wait_for(entered(5))  # two, one, two, which commit no more
        os.kill(first[0], signal.SIGKILL)  # the last that ever committed
        job.wait_for(entered(6))
        train.go()
        assert job.end() == 0, job.text[-3000:]
    assert int(lines(job.text, "enter")[5][3]) == STEPS // 2  # not from the beginning
    for _, _, *weights in lines(job.text, "done"):
        assert [float(each) for each in weights] == pytest.approx(undisturbed(), abs=2e-6)


@pytest.mark.long
def test_a_rank_that_hangs_is_ended_at_the_deadline(train: Training) -> None:
    with watched(train.command("-np 2 --min-np 1"), here(HSGD_TIMEOUT_S="3")) as job:
        job.wait_for(lambda text: pids(text, 2))
        os.kill(pids(job.text, 2)[1], signal.SIGSTOP)
        job.wait_for(lambda text: pids(text, 1))
        train.go()
        assert job.end() == 0, job.text[-3000:]
    assert "hsgd: rank 1 did not leave the old world in time, and is killed" in job.text
    assert lines(job.text, "done")


@pytest.mark.long
def test_fewer_than_the_least_ranks_wait_for_a_new_one(train: Training) -> None:
    with watched(train.command("-np 2 --min-np 2"), here()) as job:
        job.wait_for(lambda text: pids(text, 2))
        os.kill(pids(job.text, 2)[0], signal.SIGKILL)
        job.wait_for(entered(4))
        train.go()
        assert job.end() == 0, job.text[-3000:]
    assert "hsgd: 1 rank of 2: waiting for more" in job.text
    assert all(size == "2" for _, size, *_ in lines(job.text, "enter"))
    check_weights(job.text, 2)


ENDS = """
import sys
import torch
import hsgd.torch as hvd

how = sys.argv[1]
if how == "early":
    raise ValueError("no data")
hvd.init()
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)

@hvd.elastic.run
def train(state):
    for _ in range(3):
        hvd.allreduce(torch.ones(3))
    if how == "all" or how == "one" and hvd.rank() == 1:
        raise ValueError("a bad step")
    for _ in range(3):
        hvd.allreduce(torch.ones(3))
    return hvd.size()

size = train(state)
if how == "late" and hvd.rank() == 0:
    raise OSError("the disk is full")
print(f"|done {hvd.rank()} {size}|", flush=True)
"""


WRAPPER = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


@pytest.mark.long
def test_a_wrapper_that_closes_the_line_is_named(tmp_path: Path, train: Training) -> None:
    wrapper = tmp_path / "job.py"
    wrapper.write_text(WRAPPER)
    words = train.command("-np 1 --min-np 1")
    words.insert(words.index(str(train.script)), str(wrapper))
    done = run_marked(words, here(RANK="3", WORLD_SIZE="7"), JOB_S)
    assert done.returncode == 1
    assert (
        "the connection to the agent of this node was closed before this rank began" in done.stderr
    )


BEGINS = """
import hsgd.torch as hvd
hvd.init()
print(f"|done {hvd.rank()} {hvd.size()}|", flush=True)
"""
ONE_IS_SLOW = """#!/bin/sh
mkdir {folder} 2>/dev/null && exec "$@"
exec sleep 600
"""


@pytest.mark.long
def test_ranks_begin_without_those_that_do_not_come(tmp_path: Path) -> None:
    script, wrapper = tmp_path / "train.py", tmp_path / "first.sh"
    script.write_text(BEGINS)
    wrapper.write_text(ONE_IS_SLOW.format(folder=tmp_path / "first"))
    wrapper.chmod(0o755)
    words = [*HSGD, "run", "-np", "2", "--min-np", "1", "--start-timeout", "8"]
    done = run_marked([*words, str(wrapper), sys.executable, str(script)], here(), JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert lines(done.stdout, "done") == [["0", "1"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code", "told", "done"),
    [
        ("early", 1, r"hsgd: error: a new rank \(\d+ on \S+\) ended with exit code 1 before", 0),
        ("all", 1, r"hsgd: error: no rank is left that had the state of the training; rank \d", 0),
        ("one", 0, r"hsgd: rank 1 \(\d+ on \S+\) ended with exit code 1", 1),
        ("late", 1, r"hsgd: rank 0 \(\d+ on \S+\) ended with exit code 1, when others had fin", 1),
    ],
)
def test_what_ends_a_job_and_what_does_not(
    tmp_path: Path, how: str, code: int, told: str, done: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDS)
    words = [*HSGD, "run", "-np", "2", "--min-np", "1", sys.executable, str(script), how]
    job = run_marked(words, here(), JOB_S)
    assert job.returncode == code, job.stderr[-3000:]
    assert re.search(told, job.stderr), job.stderr[-3000:]
    assert len(lines(job.stdout, "done")) == done


@pytest.mark.long
def test_a_signal_to_the_command_ends_all_ranks(train: Training) -> None:
    # Shells start what has a "&" with SIGINT ignored, and these tests perhaps.
    words = ["env", "--default-signal=INT", *train.command("-np 2 --min-np 1")]
    with watched(words, here()) as job:
        job.wait_for(lambda text: pids(text, 2))
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130, job.text[-3000:]
    for pid in pids(job.text, 2).values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.long
def test_a_job_under_nohup_outlives_its_terminal(train: Training) -> None:
    with watched(["nohup", *train.command("-np 1 --min-np 1")], here()) as job:
        job.wait_for(lambda text: pids(text, 1))
        job.process.send_signal(signal.SIGHUP)
        train.go()
        assert job.end() == 0, job.text[-3000:]
    check_weights(job.text, 1)


@pytest.mark.long
def test_ranks_end_when_their_agent_is_killed(train: Training) -> None:
    with watched(train.command("-np 2 --min-np 1"), here()) as job:
        job.wait_for(lambda text: pids(text, 2))
        job.process.kill()
        job.wait_for(lambda text: text.count("the agent of this node is gone") == 2)
        assert job.end() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        ("--min-np 3 -np 2", 1, "--min-np 3, -np 2, --max-np 1048576: give them in ascending"),
        ("--min-np 4 -H localhost:2", 1, "--min-np is 4, and the hosts have 2 slots"),
        ("--min-np 1 --host-discovery-script /nowhere", 1, "No such file or directory"),
        ("--min-np 1 --mpi-args=x", 2, "neither starts the ranks of an elastic job"),
        ("--min-np 1 --start-timeout x", 2, '"x" is not a number of seconds'),
        ("--max-np 2 -H a:1 --host-discovery-script x", 1, "both give hosts; leave one out"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    train: Training, options: str, code: int, told: str
) -> None:
    done = run_marked(train.command(options), here(), JOB_S)
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr.splitlines()[-1]


def test_a_command_that_does_not_start_is_named() -> None:
    with watched([*HSGD, "run", "--min-np", "1", "/nowhere"], os.environ) as job:
        assert job.end() == 1
    assert job.text == "hsgd: error: /nowhere does not start: No such file or directory\n"


# --- several nodes ---

KILL_NODE = """
import os
here = os.readlink("/proc/self/ns/net")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read()
        if os.readlink(f"/proc/{pid}/ns/net") == here and ("hsgd" in words or "train.py" in words):
            os.kill(int(pid), 9)
    except OSError:
        pass
"""


class Hosts:
    """A script that prints hosts, at first node1 with a slot."""

    def __init__(self, folder: Path) -> None:
        self.script, self._names = folder / "hosts.sh", folder / "hosts"
        self.name("node1:1\n")
        self.script.write_text(f"#!/bin/sh\ncat {self._names}\n")
        self.script.chmod(0o755)

    def name(self, text: str) -> None:
        self._names.write_text(text)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("node", [1, 2])
def test_a_node_that_is_lost_is_replaced(
    train: Training, cluster: Callable[..., Cluster], node: int
) -> None:
    nodes = cluster(2)
    words = train.command("-np 4 --min-np 2 -H node1:2,node2:2")
    with watched(nodes.command(words), nodes.environment()) as job:
        job.wait_for(lambda text: pids(text, 4))
        nodes.run([sys.executable, "-c", KILL_NODE], node=node)
        job.wait_for(lambda text: pids(text, 2))
        job.wait_for(entered(10))  # four, two, four
        train.go()
        assert job.end() == 0, job.text[-3000:]
    assert f"hsgd: host node{node} was lost (its agent's exit code is -9)" in job.text
    check_weights(job.text, 4)


@pytest.mark.long
def test_a_node_whose_link_is_cut_is_left_behind_and_comes_back(
    train: Training, virtual_nodes: None
) -> None:
    """It cannot reach the job's store, and ends by itself."""
    with Cluster(2) as nodes:
        words = train.command("-np 4 --min-np 2 -H node1:2,node2:2")
        environment = nodes.environment({"HSGD_TIMEOUT_S": "4"})
        with watched(nodes.command(words), environment) as job:
            job.wait_for(lambda text: pids(text, 4))
            nodes.set_link(2, "down")
            job.wait_for(lambda text: pids(text, 2))
            job.wait_for(lambda text: "hsgd: host node2 was lost" in text)
            nodes.set_link(2, "up")
            job.wait_for(entered(10))  # four, two, four
            train.go()
            assert job.end() == 0, job.text[-3000:]
        check_weights(job.text, 4)


@pytest.mark.long
def test_hosts_come_and_go_as_the_script_says(
    hosts: Hosts, train: Training, cluster: Callable[..., Cluster]
) -> None:
    nodes = cluster(2)
    words = train.command(f"--min-np 1 --host-discovery-script {hosts.script}")
    with watched(nodes.command(words), nodes.environment()) as job:
        job.wait_for(lambda text: pids(text, 1))
        hosts.name("node1:1\nnode2:2  # two more\n")
        job.wait_for(lambda text: pids(text, 3))
        hosts.name("")  # no answer: all stay
        job.wait_for(lambda text: "printed no host" in text)
        hosts.name("node2:2\n")
        job.wait_for(lambda text: pids(text, 2))
        job.wait_for(lambda text: "hsgd: host node1 is out of the job" in text)
        hosts.name("node1:1\nnode2:2\n")  # node1 had been the first to look for others
        job.wait_for(entered(9))  # one, three, two, three
        train.go()
        assert job.end() == 0, job.text[-3000:]
    starts = [int(step) for *_, step in lines(job.text, "enter")]
    assert starts == [0, *[STEPS // 2] * (len(starts) - 1)]  # nothing was done twice
    check_weights(job.text, 3)


@pytest.mark.long
def test_one_host_takes_the_place_of_another_with_the_state(
    hosts: Hosts, train: Training, cluster: Callable[..., Cluster]
) -> None:
    nodes = cluster(2)
    words = train.command(f"--min-np 1 --host-discovery-script {hosts.script}")
    with watched(nodes.command(words), nodes.environment()) as job:
        job.wait_for(lambda text: pids(text, 1))
        hosts.name("node2:1\n")
        job.wait_for(lambda text: "hsgd: host node1 is out of the job" in text)
        job.wait_for(lambda text: len(lines(text, "enter")[-1:]) and pids(text, 2))
        train.go()
        assert job.end() == 0, job.text[-3000:]
    assert int(lines(job.text, "enter")[-1][3]) == STEPS // 2
    check_weights(job.text, 1)


@pytest.mark.long
def test_a_host_on_which_ranks_fail_does_not_end_the_job(
    tmp_path: Path, hosts: Hosts, train: Training, cluster: Callable[..., Cluster]
) -> None:
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\n[ "$(uname -n)" != node2 ] || exit 3\nexec "$@"\n')
    wrapper.chmod(0o755)
    nodes = cluster(2)
    words = train.command(f"--min-np 1 --host-discovery-script {hosts.script}")
    words.insert(words.index(sys.executable, 1), str(wrapper))
    with watched(nodes.command(words), nodes.environment()) as job:
        job.wait_for(lambda text: pids(text, 1))
        hosts.name("node1:1\nnode2:1\n")
        job.wait_for(lambda text: "on node2) ended with exit code 3" in text)
        train.go()
        assert job.end() == 0, job.text[-3000:]
    check_weights(job.text, 1)


@pytest.mark.long
def test_a_host_that_cannot_be_reached_ends_the_job_at_once(
    train: Training, cluster: Callable[..., Cluster]
) -> None:
    words = train.command("-np 2 --min-np 1 -H node1:1,node77:1")
    done = cluster(2).run(words, timeout_s=JOB_S)
    assert done.returncode == 1
    assert "hsgd: error: host node77 cannot be used: its agent ended with exit code" in done.stderr
