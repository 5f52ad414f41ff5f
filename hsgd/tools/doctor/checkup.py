"""`hsgd doctor`: trials of this machine in child processes, with verdicts and remedies."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from hsgd.errors import LaunchError, MissingExtra
from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.launch import launch
from hsgd.jobs.launch.allocation import allocation
from hsgd.jobs.stores.sealed_store import JOB_SECRET
from hsgd.tools import on_hosts
from hsgd.tools.doctor import info, leftovers, probe
from hsgd.tools.status import stacks

__all__ = ["Trial", "examine", "examine_hosts", "lines", "other_hosts"]

State = Literal["ok", "note", "fail"]
_FEWEST_FILES = 1024
_COLOURS = {"ok": "32", "note": "33", "fail": "31"}
# Parts of the last line of a failed job, and remedies.
_JOB_REMEDIES = (
    (
        "run as root",
        "As root Open MPI wants OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
    ("not enough slots", "Give mpirun a host with two slots: hsgd run -np 2 -H localhost:2 ..."),
    (
        "no answer within",
        "mpirun hangs: look at the host's name (getent hosts $(hostname)) and at "
        "the firewall on the loopback interface",
    ),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of a trial; "fail" prevents use of hsgd or an installed part, "note" informs."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> list[Trial] | None:
    """Run all trials, some ten seconds; blocking. Under mpirun only rank 0 gets the list."""
    with ThreadPoolExecutor() as pool:
        report = pool.submit(info.gather)
        trials = [pool.submit(trial) for trial in _TRIALS]
        gathered = report.result()
        found = [trial.result() for trial in trials]
    if gathered is None:
        return None
    return [*_versions(gathered), *filter(None, found), *_leftovers(), *_problems(gathered)]


def other_hosts() -> list[str]:
    """Return the hosts of this allocation except this one; local. LaunchError without one."""
    found = allocation(os.environ, 1)
    if found is None:
        raise LaunchError("--all-nodes: there is no allocation here; name the hosts with -H")
    return [host.name for host in found.hosts if not host.is_here]


def examine_hosts(hosts: Sequence[str]) -> list[Trial]:
    """Run `hsgd doctor` on other hosts: their problems, or one line each if all is well."""
    found: list[Trial] = []
    for host, answer, reason in on_hosts.ask(hosts, ["doctor", "--json"]):
        try:
            trials = [Trial(**row) for row in answer or ()]
        except TypeError:
            trials, answer, reason = [], None, "its hsgd has another version"
        bad = [dataclasses.replace(t, name=f"{host}: {t.name}") for t in trials if t.state != "ok"]
        if answer is None:
            found.append(Trial(host, "fail", reason, "Install the same hsgd there, reachable"))
        elif not bad:
            found.append(Trial(host, "ok", "all is well"))
        found += bad
    return found


def _versions(report: info.Report) -> Iterator[Trial]:
    for name, section, fact in (
        ("hsgd", "hsgd", "version"),
        ("MPI", "MPI", "launcher"),
        ("mpi4py", "MPI", "mpi4py"),
        ("torch", "Python", "torch"),
        ("Horovod", "Horovod", "version"),
        ("h5py", "Python", "h5py"),
    ):
        value = dict(report.sections.get(section, ())).get(fact, "not found")
        missing = value.startswith("not ") or value.endswith("does not load")
        yield Trial(name, "note" if missing else "ok", value)


def _problems(report: info.Report) -> Iterator[Trial]:
    for problem in report.problems:
        state: State = "fail" if problem.stops else "note"
        yield Trial("installation", state, problem.text, problem.remedy)


def _shared_memory() -> Trial:
    """Try a sum of two processes in shared memory."""
    found = probe.sums(2)
    if found.error:
        return Trial(
            "shared memory",
            "fail",
            f"2 processes of this node cannot sum an array: {found.error}",
            "Look for limits of the container: memory (cgroup), memfd_create and UNIX sockets "
            "(seccomp)",
        )
    return Trial("shared memory", "ok", f"2 processes summed 1 MiB, checked, in {found.line} ms")


def _job() -> Trial | None:
    """Try two ranks under the launcher, as `hsgd run` starts them."""
    name = "MPI job"
    if launcher_variables.mpi_size() is not None:
        return Trial(name, "note", "not tried within a job", "Call hsgd doctor without mpirun")
    command = [sys.executable, "-c", probe.JOB]
    try:
        words, added = launch.plan_run(command, 2, None, [], os.environ)
    except LaunchError as error:
        return Trial(
            name,
            "note",
            str(error),
            "Without MPI jobs start with torch: pip install torch, hsgd run --launcher torchrun",
        )
    found = probe.job(words, added)
    if found.error:
        known = (remedy for sign, remedy in _JOB_REMEDIES if sign in found.error.lower())
        remedy = next(
            known,
            f"Try it by itself: hsgd run -np 2 {sys.executable} -m mpi4py.bench "
            "helloworld; hsgd info shows which MPI is used",
        )
        return Trial(name, "fail", f"{Path(words[0]).name} with 2 ranks: {found.error}", remedy)
    return Trial(name, "ok", f"{Path(words[0]).name} started 2 ranks, allreduce checked")


def _links() -> Trial:
    """Try a connection to each address of this host, as leaders over TCP need it."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    refused = []
    addresses = [*dict.fromkeys(_own_addresses())]
    for address in addresses:
        try:
            with socket.create_server((address, 0)) as server:
                port = server.getsockname()[1]
                socket.create_connection((address, port), timeout=3).close()
        except OSError as error:
            refused.append(f"{address}: {error.strerror or error}")
    if refused:
        return Trial(
            "links",
            "note",
            f"no TCP connection to {'; '.join(refused)}",
            "Open the firewall between the nodes, or name other interfaces in HSGD_INTERFACES: "
            + ", ".join(names),
        )
    if not addresses:
        return Trial("links", "note", "no network address besides loopback: one node only")
    return Trial("links", "ok", f"TCP at {', '.join(addresses)}; interfaces {', '.join(names)}")


def _own_addresses() -> Iterator[str]:
    """Yield the IPv4 addresses at which others reach this host."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        found = []
    yield from (str(entry[4][0]) for entry in found if not str(entry[4][0]).startswith("127."))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as routed:
        try:
            routed.connect(("192.0.2.1", 9))  # chooses an interface, sends nothing
        except OSError:
            return
        yield str(routed.getsockname()[0])


def _store() -> Trial | None:
    """Check the store by which ranks connect without MPI."""
    if importlib.util.find_spec("torch") is None:
        return None
    if launcher_variables.torchrun() is not None and JOB_SECRET not in os.environ:
        return Trial(
            "torch's store",
            "note",
            "open: whoever reaches the port of this torchrun reads and writes what ranks tell one "
            "another",
            "Start the job with hsgd run --launcher torchrun, or keep others from the port "
            "(SECURITY.md)",
        )
    found = "sealed in jobs of hsgd run, open in those of torchrun itself (SECURITY.md)"
    return Trial("torch's store", "ok", found)


def _open_files() -> Trial:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # set-up raises the soft limit
    if hard < _FEWEST_FILES:
        ranks = max(0, (hard - 32) // 2)
        return Trial(
            "open files",
            "note",
            f"a process may open {hard} files: {ranks} ranks per node",
            "set a larger hard limit in /etc/security/limits.conf, or in the service's LimitNOFILE",
        )
    return Trial("open files", "ok", f"up to {hard} per process")


def _temporary_folder() -> Trial:
    try:
        with tempfile.TemporaryDirectory(prefix="hsgd-doctor-") as folder:
            path = Path(folder) / "socket"
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
    except OSError as error:
        return Trial(
            "temporary folder",
            "fail",
            f"no socket can be made in {tempfile.gettempdir()}: {error.strerror or error}",
            "Set TMPDIR to a folder on a local disk, with a short path, that you may write to",
        )
    return Trial("temporary folder", "ok", tempfile.gettempdir())


def _ptrace() -> Trial:
    """Check whether `hsgd status --stacks` can read other processes of the user."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope and os.geteuid() != 0:
        return Trial(
            "stacks of ranks",
            "note",
            f"kernel.yama.ptrace_scope is {scope}: hsgd status --stacks cannot read them",
            "sudo sysctl kernel.yama.ptrace_scope=0, or run hsgd status as root",
        )
    try:
        stacks.find_reader(native=False)
    except MissingExtra:
        return Trial(
            "stacks of ranks",
            "note",
            "py-spy is not installed: hsgd status --stacks cannot read them",
            "pip install py-spy",
        )
    return Trial("stacks of ranks", "ok", "may be read by hsgd status --stacks")


def _leftovers() -> Iterator[Trial]:
    if stale := leftovers.stale_sockets():
        yield Trial(
            "leftovers", "note", f"killed jobs left {len(stale)} sockets behind", "hsgd clean"
        )


_TRIALS = (_shared_memory, _job, _links, _store, _open_files, _temporary_folder, _ptrace)


def lines(trials: Sequence[Trial], *, coloured: bool) -> list[str]:
    """Return the list as text, one string per line; colours are for terminals."""
    paint: Callable[[State], str] = lambda state: (  # noqa: E731
        f"\x1b[{_COLOURS[state]}m{state:<4}\x1b[0m" if coloured else f"{state:<4}"
    )
    width = max(len(trial.name) for trial in trials)
    text = []
    for trial in trials:
        text.append(f"{paint(trial.state)}  {trial.name:<{width}}  {trial.found}")
        if trial.remedy:
            text.append(f"{'':<{width + 8}}-> {trial.remedy}")
    failed = sum(trial.state == "fail" for trial in trials)
    noted = sum(trial.state == "note" for trial in trials)
    verdict = f"{failed} to fix, {noted} worth knowing." if failed or noted else "All is well."
    return [*text, "", verdict]
