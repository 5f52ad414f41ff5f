"""Virtual nodes: a small cluster on one Linux machine, for tests and benchmarks between nodes.

    controller (pytest, a benchmark, a shell)
      |  pipe + pidfd: when the controller ends, however it ends, so does all below
    login   own PID, network, mount, UTS and IPC namespaces; its PID 1 holds the cluster
      |     bridge "eth0" 10.99.0.254; private /etc/hosts, /dev/shm and /run with a stand-in for ssh
      +-- tbf == veth == tbf -- eth0 10.99.0.1   node1: own network, mount, UTS, IPC namespaces,
      +-- tbf == veth == tbf -- eth0 10.99.0.2   node2: own /dev/shm and TMPDIR; PID if asked for

Commands start on login and reach the nodes through `ssh`, as mpirun and horovodrun do on real
machines; like a real login, ssh passes no environment on. Files are shared, as if by NFS, but for
/dev/shm, /run and TMPDIR.

Owns every process that it starts. No namespace has a name and nothing is mounted or written
outside, so the kernel removes all of it with PID 1. Never touches /etc/hosts, /run/netns or the
interfaces of the machine, so any number of clusters live side by side. Needs root, iproute2 and
util-linux. Only bandwidth is limited; no latency is added.

python -m toolkit.cluster --nodes 2 --rate 1gbit -- CMD ...   runs CMD on the login of a new
cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.processes import CommandTimeout, run_marked

__all__ = ["Cluster", "ClusterError", "mpi_options"]

INSIDE = Path(__file__).resolve().with_name("virtual_nodes.py")
_LINK_STATES = {
    "down": 'ip link set "$0" down',
    "slow": 'tc qdisc replace dev "$0" root tbf rate 4mbit burst 64kb limit 20mb',
    # What waits in the queue of a slow link is kept.
    "up": """ip link set "$0" up
if [ -n "$1" ]; then tc qdisc change dev "$0" root tbf rate "$1" burst 256kb latency 100ms
else tc qdisc change dev "$0" root tbf rate 40gbit burst 10mb limit 20mb 2> /dev/null || true; fi
shift
for pid in "$@"; do nsenter --net="/proc/$pid/ns/net" ip neigh flush dev eth0; done""",
}
# What mpirun over nodes consists of, beside the ranks.
_OF_MPIRUN = {"prterun", "prted", "nsenter", "sh", "dash", "bash", "busybox", "gone"}
ISOLATED = "--net --uts --ipc --mount --pid --fork --kill-child --mount-proc"
SETUP_S = 60.0  # bound on making a cluster, and on taking one down


class ClusterError(RuntimeError):
    """Virtual nodes cannot be made or used as asked."""


class Cluster:
    """`nodes` virtual nodes named node1, node2, ...; a context manager.

    `rate` limits each node's link in both directions ("100mbit", "1gbit", "10gbit"; None: no
    limit). With `pid` each node has its own PID namespace and /proc, as containers have; then only
    login can reach the nodes by ssh. With `management` login and nodes have a second network,
    "mgmt0", as many clusters do; mpirun's daemons then use that one, and MPI still "eth0". Raises
    ClusterError when the machine does not allow it.
    """

    def __init__(
        self,
        nodes: int = 2,
        rate: str | None = None,
        *,
        pid: bool = False,
        management: bool = False,
    ) -> None:
        if not 1 <= nodes <= 250:
            raise ValueError(f"a cluster has 1 to 250 nodes, not {nodes}")
        self.rate = rate
        self._management = management
        self._serial = itertools.count(1)
        self.nodes = [f"node{k}" for k in range(1, nodes + 1)]
        watch = os.pidfd_open(os.getpid())
        words = [str(watch), rate or "", "pid" if pid else "", "mgmt0" if management else ""]
        words += self.nodes
        try:
            self._anchor = subprocess.Popen(
                ["unshare", *ISOLATED.split(), sys.executable, "-BS", str(INSIDE), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[watch],
                cwd="/",
                env={"PATH": _search_path()},
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"virtual nodes: cannot start unshare: {error}") from error
        finally:
            os.close(watch)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Read the anchor's report: the pid of each node as login sees it, or what went wrong."""
        assert self._anchor.stdout is not None
        if not select.select([self._anchor.stdout], [], [], SETUP_S)[0]:
            self.close()
            raise ClusterError(f"virtual nodes: not ready after {SETUP_S:.0f} s")
        word, *pids = self._anchor.stdout.readline().split() or [""]
        if word != "ready":
            text = " ".join([word, *pids, self._anchor.stdout.read().strip()])
            self.close()
            raise ClusterError(f"virtual nodes: {text}")
        self._node_pids = [int(pid) for pid in pids]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down; returns when all processes of the cluster are gone."""
        assert self._anchor.stdin is not None and self._anchor.stdout is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            print(
                "end", file=self._anchor.stdin, flush=True
            )  # forked children may hold the pipe open
        with contextlib.suppress(BrokenPipeError):
            self._anchor.stdin.close()
        try:
            self._anchor.wait(SETUP_S)
        except subprocess.TimeoutExpired:
            self._anchor.kill()
            self._anchor.wait()
        self._anchor.stdout.close()

    @property
    def pid(self) -> int:
        """The process of the controller that holds the cluster."""
        return self._anchor.pid

    @staticmethod
    def reason_unavailable() -> str | None:
        """Why this machine cannot have virtual nodes, found by making one; None when it can."""
        return _reason_unavailable()

    def command(self, argv: Sequence[str], node: int | None = None) -> list[str]:
        """The command that runs argv, in this directory, on login or directly on node 1, 2, ...

        For processes that a test steers itself, with Popen and `env=cluster.environment()`.
        """
        enter = _enter(self.pid)
        if node is not None:
            if not 1 <= node <= len(self.nodes):
                raise ValueError(f"there is no node {node}; nodes are 1 to {len(self.nodes)}")
            enter += _enter(self._node_pids[node - 1])
        start = 'cd "$0" && mkdir -p "${TMPDIR:-/tmp}" && exec "$@"'
        return [*enter, "sh", "-c", start, os.getcwd(), *argv]

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of commands: the caller's, what the cluster needs, and `env` on top.

        TMPDIR is a new folder each time, which `command` makes: a killed mpirun leaves files.
        """
        needed = {
            "PATH": f"/run/bin:{Path(sys.executable).parent}:{_search_path()}",
            "TMPDIR": f"/run/tmp/{next(self._serial)}",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        return {"OMP_NUM_THREADS": "1", **os.environ, **needed, **(env or {})}

    def run(
        self,
        argv: Sequence[str],
        *,
        node: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run argv on login, or directly on a node (1, 2, ...), and wait.

        Raises CommandTimeout past the limit, after ending all that the command started on any node.
        """
        return run_marked(self.command(argv, node), self.environment(env), timeout_s)

    def hosts(self, np: int) -> str:
        """np ranks in blocks, the first nodes filled first: 3 on 2 nodes is node1:2,node2:1."""
        share, spare = divmod(np, len(self.nodes))
        counts = {name: share + (k < spare) for k, name in enumerate(self.nodes)}
        return ",".join(f"{name}:{count}" for name, count in counts.items() if count)

    def mpirun(
        self,
        np: int,
        argv: Sequence[str],
        *,
        hosts: str | None = None,
        mca: Mapping[str, str | int] | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run np ranks of argv under Open MPI 5, on "node1:2,node2:2" or spread by `hosts(np)`.

        `env` reaches the ranks; of the caller's environment only PATH, PYTHONPATH and
        OMP_NUM_THREADS do. A job past the limit of which all ranks have ended is run once more:
        after a rank has died the daemons of Open MPI 5 at times wait for ever
        (openpmix/prrte#1607).
        """
        launch = self.mpirun_command(np, argv, hosts=hosts, mca=mca, env=env, options=options)
        try:
            return self.run(launch, timeout_s=timeout_s)
        except CommandTimeout as late:
            if not late.programs <= _OF_MPIRUN:
                raise
            print(f"mpirun did not end after its ranks, run once more: {late}", file=sys.stderr)
        return self.run(launch, timeout_s=timeout_s)

    def mpirun_command(
        self,
        np: int,
        argv: Sequence[str],
        *,
        hosts: str | None = None,
        mca: Mapping[str, str | int] | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> list[str]:
        """What mpirun() runs on login."""
        local = self.environment()
        names = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")
        passed = {name: local[name] for name in names if name in local} | dict(env or {})
        launch = [str(_tool("mpirun")), "-np", str(np), "--host", hosts or self.hosts(np)]
        launch += [] if "--map-by" in options else ["--map-by", "slot"]
        launch += ["--bind-to", "none", *mpi_options(np, mca)]
        launch += ["--prtemca", "prte_if_include", "mgmt0"] if self._management else []
        launch += [word for item in passed.items() for word in ("-x", "=".join(item))]
        return [*launch, *options, *argv]

    def horovodrun(
        self,
        np: int,
        argv: Sequence[str],
        *,
        hosts: str | None = None,
        plugin: str | None = None,
        mca: Mapping[str, str | int] | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        timeout_s: float = 180.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run np ranks of argv under the real horovodrun --mpi, which passes all environment on.

        Without a plugin, plain Horovod 0.28 is given binding options that Open MPI 5 understands.
        """
        launch = [str(_tool("horovodrun")), "--mpi", "-np", str(np), "-H", hosts or self.hosts(np)]
        launch += ["--disable-cache"]  # no file in the home folder, no answer from a past cluster
        if plugin:
            launch += ["--plugin", plugin]
        else:
            launch += ["--binding-args=--bind-to none --map-by slot"]
        launch += [f"--mpi-args={shlex.join(mpi_options(np, mca))}", *options]
        return self.run([*launch, *argv], env=env, timeout_s=timeout_s)

    def set_link(self, node: int, state: str) -> None:
        """The link of node 1, 2, ...: "down", as if the cable were out; "slow", 4 Mbit/s towards
        the node; "up", as it was made.

        Raises ClusterError.
        """
        if state not in _LINK_STATES:
            raise ValueError(f"a link is one of {', '.join(_LINK_STATES)}, not {state}")
        words = ["sh", "-c", _LINK_STATES[state], self.nodes[node - 1], self.rate or ""]
        words += [str(pid) for pid in self._node_pids]  # which may hold one another for unreachable
        done = subprocess.run([*_enter(self.pid), *words], capture_output=True, text=True)
        if done.returncode != 0:
            raise ClusterError(f"link of {self.nodes[node - 1]}: {done.stderr.strip()}")

    def shared_files(self) -> list[tuple[str, Path]]:
        """What lies in the nodes' own /dev/shm, which begin empty: node, and file as seen here."""
        root = f"/proc/{self.pid}/root/proc"  # where nodes have the pids that login sees
        return [
            (name, path)
            for name, pid in zip(self.nodes, self._node_pids, strict=True)
            for path in sorted(Path(f"{root}/{pid}/root/dev/shm").iterdir())
        ]

    def remove_shared_files(self) -> None:
        """All of it."""
        for _, path in self.shared_files():
            path.unlink(missing_ok=True)

    def interface_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes that each node's interface has sent and received so far, as the kernel counts."""
        counted = {}
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()[2:]:
            name, numbers = line.split(":")
            received, sent = (int(numbers.split()[column]) for column in (0, 8))
            if (
                name.strip() in self.nodes
            ):  # login's end of the link: what it received, the node sent
                counted[name.strip()] = (received, sent)
        return counted


def mpi_options(np: int, mca: Mapping[str, str | int] | None = None) -> list[str]:
    """What mpirun of Open MPI 5 needs on virtual nodes: full-duplex TCP, yielding when crowded."""
    settings: dict[str, str | int] = {"btl_tcp_if_include": "eth0", "btl_tcp_links": 4}
    if np > len(os.sched_getaffinity(0)):
        settings["mpi_yield_when_idle"] = 1
    settings.update(mca or {})
    words = ["--prefix", str(_tool("mpirun").parent.parent)]
    return words + [
        word for name, value in settings.items() for word in ("--mca", name, str(value))
    ]


def _enter(pid: int) -> list[str]:
    ns = f"/proc/{pid}/ns"
    kinds = [f"--mount={ns}/mnt", f"--uts={ns}/uts", f"--ipc={ns}/ipc", f"--net={ns}/net"]
    return ["nsenter", *kinds, f"--pid={ns}/pid_for_children", "--"]


def _search_path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


def _tool(name: str) -> Path:
    """The program of this virtual environment, else the one on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = beside if beside.exists() else shutil.which(name)
    if found is None:
        raise ClusterError(f"{name} is neither beside {sys.executable} nor on PATH; install it")
    return Path(found)


@functools.cache
def _reason_unavailable() -> str | None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "virtual nodes need Linux and root"
    tools = ("ip", "tc", "nsenter", "unshare", "mount")
    missing = [tool for tool in tools if shutil.which(tool, path=_search_path()) is None]
    if missing:
        return f"virtual nodes need {', '.join(missing)}; install iproute2 and util-linux"
    try:
        Cluster(nodes=1, rate="1gbit").close()
    except ClusterError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command on a cluster of virtual nodes.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", help="limit of each link: 100mbit, 1gbit, ... (default: none)")
    parser.add_argument("--pid", action="store_true", help="give each node its own PID namespace")
    parser.add_argument("--node", type=int, help="run on this node (1, 2, ...) instead of login")
    parser.add_argument("argv", nargs="+", metavar="CMD", help="the command; put -- before it")
    options = parser.parse_args()
    try:
        with Cluster(options.nodes, options.rate, pid=options.pid) as cluster:
            command = cluster.command(options.argv, options.node)
            return subprocess.run(command, env=cluster.environment()).returncode
    except (ClusterError, ValueError) as error:
        parser.exit(2, f"cluster: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
