"""Virtual nodes are what they claim to be: apart, joined by limited links, gone without a trace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cluster import Cluster, ClusterError
from toolkit.processes import MARK, CommandTimeout, marked, outliving, run_marked

__all__: list[str] = []

MakeCluster = Callable[..., Cluster]
ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as s:
    block = bytes(1 << 16)
    for _ in range(int(sys.argv[2]) // len(block)):
        s.sendall(block)
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
"""
RECEIVE = """
import socket
with socket.create_server(("", 5001)) as server:
    print("listening", flush=True)
    with server.accept()[0] as s:
        total = 0
        while data := s.recv(1 << 16):
            total += len(data)
        s.sendall(b"!")
print(total)
"""
LOCALITY = """
import json, os
from mpi4py import MPI
local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
seen = MPI.COMM_WORLD.gather((os.uname().nodename, local.size, os.environ.get("GREETING")))
if seen:
    print(json.dumps(seen))
"""
CUT_OFF = """
import os, sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
MPI.COMM_WORLD.Barrier()
print(rank, "here", flush=True)
while not os.path.exists(f"{sys.argv[1]}/cut"):
    time.sleep(0.05)
time.sleep(1)
print(rank, "ends", flush=True)
os._exit(0)  # MPI_Finalize would wait for the other side
"""
HOROVOD = """
import os, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank())), op=hvd.Sum)
assert total.eq(sum(range(hvd.size()))).all(), total
print("rank", hvd.rank(), "local", hvd.local_rank(), hvd.local_size(), os.uname().nodename)
"""


CONTROLLER = """
import signal, subprocess
from toolkit.cluster import Cluster
cluster = Cluster(2, "1gbit", pid=True)
argv = ["sh", "-c", "echo started; setsid sleep 1000; true"]
for node in (None, 1, 2):
    command = cluster.command(argv, node)
    shell = subprocess.Popen(command, env=cluster.environment(), stdout=subprocess.PIPE)
    shell.stdout.readline()
print(cluster.pid, flush=True)
signal.pause()
"""


def transfer(cluster: Cluster, count_bytes: int) -> float:
    """Send bytes from node 1 to node 2 over one TCP connection; the seconds that it took."""
    receiver = subprocess.Popen(
        cluster.command([sys.executable, "-S", "-c", RECEIVE], node=2),
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        start = time.monotonic()
        argv = [sys.executable, "-S", "-c", SEND, "node2", str(count_bytes)]
        sent = cluster.run(argv, node=1, timeout_s=60)
        elapsed_s = time.monotonic() - start
        if sent.returncode:
            receiver.kill()
        assert sent.returncode == 0, sent.stderr
        assert int(receiver.stdout.read()) == count_bytes
    return elapsed_s


def namespaces_of(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES}
    except OSError:  # the process is gone
        return set()


def descendants(pid: int) -> set[int]:
    children = {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return {pid}.union(*map(descendants, children))


def test_nodes_have_their_own_hostname_and_shared_memory_folder(cluster: MakeCluster) -> None:
    c = cluster(3)
    assert c.nodes == ["node1", "node2", "node3"]
    for node in (1, 2, 3):
        done = c.run(["sh", "-c", "uname -n; ls /dev/shm; echo x > /dev/shm/mine"], node=node)
        assert (done.stdout, done.stderr) == (f"node{node}\n", "")
        c.run(["rm", "/dev/shm/mine"], node=node)
    assert c.run(["uname", "-n"]).stdout == "login\n"
    assert os.uname().nodename == socket.gethostname() not in ("login", *c.nodes)


def test_nodes_know_one_another_by_name_and_the_machine_does_not(cluster: MakeCluster) -> None:
    hosts_before = Path("/etc/hosts").read_text()
    c = cluster(2)
    argv = [sys.executable, "-S", "-c", "import socket; print(socket.gethostbyname('node2'))"]
    assert {c.run(argv, node=node).stdout for node in (None, 1, 2)} == {"10.99.0.2\n"}
    assert Path("/etc/hosts").read_text() == hosts_before
    assert "node2" not in hosts_before


def test_a_node_can_have_its_own_process_numbers(cluster: MakeCluster) -> None:
    count = "ls /proc | grep -c '^[0-9]'; ls /run/nodes | wc -l"
    shared = cluster(2).run(["sh", "-c", count], node=1).stdout.split()
    own = cluster(2, pid=True).run(["sh", "-c", count], node=1).stdout.split()
    assert int(own[0]) < int(shared[0])
    assert (shared[1], own[1]) == ("6", "0")
    assert cluster(2, pid=True).run(["ssh", "node2", "uname", "-n"]).stdout == "node2\n"
    refused = cluster(2, pid=True).run(["ssh", "node2", "true"], node=1)
    assert refused.returncode == 255
    assert refused.stderr == "ssh: no node named 'node2' can be reached from node1\n"


@pytest.mark.parametrize(
    "words",
    [
        ["node2"],
        ["-o", "A=b", "-p", "22", "-x", "node2"],
        ["node2", "-o", "A=b", "-p22", "-tt"],
        ["-oA=b", "root@node2", "-o", "A=b"],
        ["10.99.0.2"],
    ],
)
def test_ssh_takes_options_on_both_sides_of_the_host(
    cluster: MakeCluster, words: list[str]
) -> None:
    for node in (None, 1):
        done = cluster(2).run(["ssh", *words, "uname", "-n;", "echo 'a  b'"], node=node)
        assert (done.stdout, done.stderr) == ("node2\na  b\n", "")


def test_ssh_passes_the_exit_code_and_no_environment(cluster: MakeCluster) -> None:
    done = cluster(2).run(["ssh", "node1", 'echo "[$SECRET]"; exit 7'], env={"SECRET": "x"})
    assert (done.stdout, done.returncode) == ("[]\n", 7)
    assert cluster(2).run(["ssh", "node9", "true"]).returncode == 255


def test_links_are_limited_in_both_directions(cluster: MakeCluster) -> None:
    c = cluster(2, "100mbit")
    for node, device in ((1, "eth0"), (2, "eth0"), (None, "node1"), (None, "node2")):
        shown = c.run(["tc", "qdisc", "show", "dev", device], node=node).stdout
        assert "tbf" in shown and "rate 100mbit" in shown.lower()
    before = c.interface_bytes()
    elapsed_s = transfer(c, 8 << 20)
    moved = c.interface_bytes()["node1"][0] - before["node1"][0]
    burst = 2 * 256 * 1024  # one bucket at each end of the path
    assert moved - burst <= elapsed_s * 100e6 / 8


def test_interface_counters_count_a_transfer_within_5_percent(cluster: MakeCluster) -> None:
    c = cluster(2)
    before = c.interface_bytes()
    transfer(c, 8 << 20)
    after = c.interface_bytes()
    assert set(after) == {"node1", "node2"}
    assert after["node1"][0] - before["node1"][0] == pytest.approx(8 << 20, rel=0.05)
    assert after["node2"][1] - before["node2"][1] == pytest.approx(8 << 20, rel=0.05)
    assert after["node2"][0] - before["node2"][0] < 0.05 * (8 << 20)


def test_a_link_without_limit_has_no_tbf(cluster: MakeCluster) -> None:
    assert "tbf" not in cluster(2).run(["tc", "qdisc"], node=1).stdout


@pytest.mark.parametrize("pid", [False, True])
@pytest.mark.parametrize(("np", "second"), [(4, 2), (3, 1)])
def test_mpirun_sees_which_ranks_share_a_node(
    cluster: MakeCluster, pid: bool, np: int, second: int
) -> None:
    argv = [sys.executable, "-c", LOCALITY]
    greeting = "a,b; c='d' $HOME"
    done = cluster(2, pid=pid).mpirun(np, argv, env={"GREETING": greeting})
    assert done.returncode == 0, done.stderr
    expected = [["node1", 2, greeting]] * 2 + [["node2", second, greeting]] * second
    assert json.loads(done.stdout) == expected


def test_mpirun_starts_from_a_node_as_well(cluster: MakeCluster) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    options = ["--host", "node1:1,node2:1", "--prefix", str(mpirun.parent.parent)]
    done = cluster(2).run([str(mpirun), "-np", "2", *options, "uname", "-n"], node=1)
    assert sorted(done.stdout.split()) == ["node1", "node2"], done.stderr


@pytest.mark.long
def test_plain_horovodrun_runs_over_two_nodes(cluster: MakeCluster, tmp_path: Path) -> None:
    script = tmp_path / "allreduce.py"
    script.write_text(HOROVOD)
    done = cluster(2).horovodrun(4, [sys.executable, str(script)], hosts="node1:2,node2:2")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, node in enumerate(("node1", "node1", "node2", "node2")):
        assert f"rank {rank} local {rank % 2} 2 {node}" in done.stdout


@pytest.mark.long
def test_a_command_past_its_limit_is_ended_on_all_nodes(cluster: MakeCluster) -> None:
    code = "import time; print('started', flush=True); time.sleep(1000)"
    with pytest.raises(CommandTimeout) as caught:
        cluster(2).mpirun(2, [sys.executable, "-S", "-c", code], timeout_s=5)
    assert marked(f"{os.getpid()}.") == []
    said = str(caught.value)
    assert "not finished after 5 s" in said and "\nstarted\n" in said
    assert Path(sys.executable).resolve().name in caught.value.programs
    left = said.split("still ran:\n")[1].splitlines()
    assert sum(f"{sys.executable} -S -c import time" in line for line in left) >= 2


@pytest.mark.parametrize("rank", [False, True])
def test_a_job_of_which_only_the_launcher_is_left_is_run_once_more(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, rank: bool
) -> None:
    nodes, argv, commands = cluster(2), ["true"], []
    left = {"prterun", "prted", "sh"} | ({"python3.11"} if rank else set())

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if len(commands) == 1:
            raise CommandTimeout("not finished", left)
        return subprocess.CompletedProcess(command, 7, "", "")

    monkeypatch.setattr(nodes, "run", run)
    if rank:
        with pytest.raises(CommandTimeout):
            nodes.mpirun(2, argv)
    else:
        assert nodes.mpirun(2, argv).returncode == 7
    assert commands == [commands[0]] * (1 if rank else 2)


def test_every_command_has_a_temporary_folder_of_its_own(cluster: MakeCluster) -> None:
    # Open MPI 5.0 refuses to start where a killed mpirun of the same pid left its files.
    show = ["sh", "-c", 'cd "$TMPDIR" && pwd']
    here = [run_marked(show, os.environ, 20).stdout for _ in range(2)]
    nodes = [cluster(2).run(show, node=node).stdout for node in (None, None, 1, 1)]
    logins = [cluster(2).run(["ssh", "node1", "cd $TMPDIR && pwd"]).stdout for _ in range(2)]
    assert all(here + nodes + logins) and len({*here, *nodes, *logins}) == 8


def test_killing_the_controller_leaves_nothing(virtual_nodes: None) -> None:
    mounts, links = Path("/proc/self/mounts").read_text(), os.listdir("/sys/class/net")
    mark = f"{os.getpid()}.controller."
    with subprocess.Popen(
        [sys.executable, "-S", "-c", CONTROLLER],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    ) as controller:
        assert controller.stdout is not None
        anchor = int(controller.stdout.readline())
        members = {*descendants(anchor), *marked(mark)}
        spaces = set().union(*map(namespaces_of, members)) - namespaces_of(os.getpid())
        controller.kill()
    assert len(members) >= 1 + 3 + 3 * 2  # controller; anchors of login and nodes; shells, sleepers
    assert len(spaces) >= 3 * len(NAMESPACES)
    assert outliving(members, grace_s=30) == []
    assert not any(namespaces_of(int(p)) & spaces for p in os.listdir("/proc") if p.isdigit())
    assert (mounts, links) == (Path("/proc/self/mounts").read_text(), os.listdir("/sys/class/net"))


def test_clusters_live_side_by_side_and_close_at_once(virtual_nodes: None) -> None:
    with Cluster(1) as one, Cluster(1) as other:
        one.run(["touch", "/dev/shm/one"], node=1)
        assert other.run(["ls", "/dev/shm"], node=1).stdout == ""
        pids = [one.pid, other.pid]
    assert outliving(pids, grace_s=0) == []


@pytest.mark.long
def test_mpirun_outlives_a_cut_link_where_its_daemons_have_a_network_of_their_own(
    virtual_nodes: None, tmp_path: Path
) -> None:
    ranks = tmp_path / "rank.py"
    ranks.write_text(CUT_OFF)
    call = "import socket; socket.create_connection(('node2', 1), 1)"
    with Cluster(2, management=True) as c:
        argv = [sys.executable, str(ranks), str(tmp_path)]
        command = c.mpirun_command(2, argv, options=("--with-ft", "ulfm"))
        job = subprocess.Popen(c.command(command), env=c.environment(), stdout=subprocess.PIPE)
        assert job.stdout is not None
        assert {job.stdout.readline() for _ in range(2)} == {b"0 here\n", b"1 here\n"}
        assert "Refused" in c.run([sys.executable, "-c", call]).stderr
        c.set_link(2, "down")
        assert "Refused" not in c.run([sys.executable, "-c", call]).stderr
        (tmp_path / "cut").touch()
        assert {*job.communicate(timeout=60)[0].splitlines()} == {b"0 ends", b"1 ends"}
        assert job.returncode == 0


def test_a_rate_that_tc_does_not_know_is_an_error(virtual_nodes: None) -> None:
    with pytest.raises(ClusterError, match=r"cannot set up node1: .*fast"):
        Cluster(1, "fast")


def test_wrong_counts_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="1 to 250 nodes, not 0"):
        Cluster(0)


def test_hosts_fill_the_first_nodes_first(cluster: MakeCluster) -> None:
    assert cluster(2).hosts(3) == "node1:2,node2:1"
    assert cluster(3).hosts(2) == "node1:1,node2:1"
    with pytest.raises(ValueError, match="there is no node 3; nodes are 1 to 2"):
        cluster(2).command(["true"], node=3)


def test_the_command_line_runs_a_command_and_returns_its_exit_code(virtual_nodes: None) -> None:
    argv = [sys.executable, "-m", "toolkit.cluster", "--nodes", "2", "--node", "2", "--"]
    done = subprocess.run(
        [*argv, "sh", "-c", "uname -n; exit 3"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("node2\n", 3)


def test_mpirun_on_one_node_takes_more_ranks_than_cores(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "locality.py"
    script.write_text(LOCALITY)
    done = mpirun(5, script, env={"GREETING": "hello"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[os.uname().nodename, 5, "hello"]] * 5
