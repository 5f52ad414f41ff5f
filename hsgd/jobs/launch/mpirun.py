"""The mpirun command of a job, for Open MPI 4 and 5, MPICH and Intel MPI; users' settings win."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hsgd.base import mpi_abi
from hsgd.errors import LaunchError

__all__ = ["MOST_RANKS", "Host", "Job", "Launcher", "command_line", "filled", "parse_hosts"]

MOST_RANKS = 1 << 20  # of a job; launchers try any number, and use gigabytes for it
MOST_RANKS_ON_A_HOST = 4096
_ABIS = {"Open MPI": mpi_abi.OPEN_MPI, "MPICH": mpi_abi.MPICH, "Intel MPI": mpi_abi.MPICH}
LARGE_CLUSTER = 64  # hosts from which on ssh does not start through a tree, as in Horovod


@dataclass(frozen=True)
class Launcher:
    """An mpirun and its kind."""

    path: str
    kind: str  # "Open MPI", "MPICH", "Intel MPI" or "unknown MPI"
    version: str

    @property
    def description(self) -> str:
        return f"{self.kind} {self.version} ({self.path})"

    @property
    def abi(self) -> str | None:
        """The ABI of programs that it starts, unless that is the standard one; None if unknown."""
        return _ABIS.get(self.kind)

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0]) if self.version[:1].isdigit() else 0


@dataclass(frozen=True)
class Host:
    """One name of a host list and the ranks that may run there."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"

    @property
    def is_here(self) -> bool:
        own = socket.gethostname()
        if self.name in ("localhost", "127.0.0.1", own):
            return True
        # One of the two names may lack the domain; "10.0.0.1" is an address.
        short = own.split(".")[0]
        return self.name == short or ("." not in own and self.name.split(".")[0] == own)


@dataclass(frozen=True)
class Job:
    """Job to start: ranks, places and settings, independent of the MPI."""

    command: tuple[str, ...]
    ranks: int
    cores: int  # of one host; all hosts are assumed to be alike
    hosts: tuple[Host, ...] = ()  # empty: the launcher places ranks (resource manager, or mpi_args)
    export: tuple[str, ...] = ()  # names of variables for other hosts
    define: Mapping[str, str] = field(default_factory=dict)  # variables only of the ranks
    mpi_args: tuple[str, ...] = ()  # the user's own arguments, last
    binding_args: tuple[str, ...] = ()  # replace the default, no binding (Open MPI only)
    interfaces: tuple[str, ...] = ()
    ssh_args: tuple[str, ...] = ()
    horovod_transport: bool = False  # Horovod's setting for Open MPI: pml ob1
    tag_output: bool = False
    timestamp_output: bool = False
    output_path: str | None = None

    @property
    def most_ranks_on_a_host(self) -> int:
        return max((ranks for _, ranks in filled(self.hosts, self.ranks)), default=0)


def filled(hosts: Sequence[Host], ranks: int) -> list[tuple[Host, int]]:
    """Return the hosts that get some of the ranks; the first hosts are filled first; local."""
    places = []
    for host in hosts:
        count = min(ranks, host.slots)
        ranks -= count
        if count:
            places.append((host, count))
    return places


def parse_hosts(text: str, ranks: int) -> tuple[Host, ...]:
    """Read "node1:2,node2:2" (a name alone has one slot); local. LaunchError if invalid."""
    hosts = []
    for item in (item.strip() for item in text.split(",")):
        match = re.fullmatch(r"([\w.-]+)(?::([0-9]+))?", item)
        if match is None or match.group(2) == "0":
            problem = f'"{item}" is not name:slots; write it like node1:2,node2:2'
            raise LaunchError(f'host list "{text}": {problem}')
        hosts.append(Host(match.group(1), int(match.group(2) or 1)))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LaunchError(f'host list "{text}": {twice} is listed twice; name each host once')
    slots = sum(host.slots for host in hosts)
    if slots < ranks:
        raise LaunchError(
            f'host list "{text}": {slots} slots for {ranks} ranks; lower -np or add slots'
        )
    return tuple(hosts)


def command_line(launcher: Launcher, job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return the words that start `job`; local. LaunchError if the launcher's MPI is unknown."""
    if job.ranks > MOST_RANKS:
        raise LaunchError(f"{job.ranks} ranks are more than a job has; give 1 to {MOST_RANKS}")
    if job.most_ranks_on_a_host > MOST_RANKS_ON_A_HOST:
        raise LaunchError(
            f"{job.most_ranks_on_a_host} ranks on one host are more than the limit of "
            f"{MOST_RANKS_ON_A_HOST}; lower -np, or give more hosts"
        )
    if launcher.kind == "Open MPI":
        return _open_mpi(launcher, job, environ)
    if launcher.kind == "MPICH":
        return _mpich(launcher, job)
    if launcher.kind == "Intel MPI":
        return _intel_mpi(launcher, job, environ)
    raise LaunchError(
        f"{launcher.path} is of neither Open MPI, MPICH nor Intel MPI; start the ranks with your "
        "own launcher and LD_PRELOAD=$(hsgd preload)"
    )


def _open_mpi(launcher: Launcher, job: Job, environ: Mapping[str, str]) -> list[str]:
    # PRRTE, its launcher, has its own parameters, and two-dash options only.
    prrte = launcher.major >= 5
    words = [launcher.path, "-np", str(job.ranks)]
    if job.hosts:
        words += ["-H", ",".join(map(str, job.hosts))]
        words += _open_mpi_prefix(launcher, job)
    words += job.binding_args or [
        word
        for option, value in (("bind-to", "none"), ("map-by", "slot"))
        if not _mentions(job, option)
        for word in (f"--{option}", value)
    ]
    flag, component = ("--prtemca", "plm_ssh") if prrte else ("--mca", "plm_rsh")
    if job.ssh_args:
        words += [flag, f"{component}_args", " ".join(job.ssh_args)]
    if len(job.hosts) >= LARGE_CLUSTER:
        words += [flag, f"{component}_no_tree_spawn", "true"]
        words += [flag, f"{component}_num_concurrent", str(len(job.hosts))]
    for name, value in _open_mpi_settings(job).items():
        if not _user_set(name, job, environ):
            words += ["--mca", name, value]
    words += _open_mpi_output(job, prrte)
    for name in job.export:
        words += ["-x", name]
    for name, value in job.define.items():
        words += ["-x", f"{name}={value}"]
    return [*words, *job.mpi_args, *job.command]


def _open_mpi_prefix(launcher: Launcher, job: Job) -> list[str]:
    prefix = str(Path(launcher.path).parent.parent)
    return (
        []
        if _only_here(job) or prefix == "/usr" or _mentions(job, "prefix")
        else ["--prefix", prefix]
    )


def _open_mpi_settings(job: Job) -> dict[str, str]:
    settings = {}
    if not _only_here(job):  # with one link, both directions share its rate
        settings["btl_tcp_links"] = "4"
    if job.most_ranks_on_a_host > job.cores:
        settings["mpi_yield_when_idle"] = "1"  # a spinning rank holds the core that another needs
    if job.horovod_transport:
        settings["pml"] = "ob1"
    if job.interfaces:
        settings["btl_tcp_if_include"] = ",".join(job.interfaces)
    return settings


def _open_mpi_output(job: Job, prrte: bool) -> list[str]:
    tags = [*(["tag"] if job.tag_output else []), *(["timestamp"] if job.timestamp_output else [])]
    if not prrte:
        words = [{"tag": "--tag-output", "timestamp": "--timestamp-output"}[tag] for tag in tags]
        return words + (["--output-filename", job.output_path] if job.output_path else [])
    if job.output_path:
        tags.append(f"file={Path(job.output_path).absolute()}")
    return ["--output", ",".join(tags)] if tags else []


def _mpich(launcher: Launcher, job: Job) -> list[str]:
    words = [launcher.path, "-np", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", ",".join(map(str, job.hosts))]
    return [*words, "-bind-to", "none", *_hydra(job, job.define), *job.mpi_args, *job.command]


def _intel_mpi(launcher: Launcher, job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return the command for Intel's Hydra, with arguments for each host instead of slots."""
    unpinned = {} if "I_MPI_PIN" in environ else {"I_MPI_PIN": "off"}
    words = [launcher.path, *_hydra(job, {**unpinned, **job.define}), *job.mpi_args]
    if not job.hosts:
        return [*words, "-n", str(job.ranks), *job.command]
    for index, (host, ranks) in enumerate(filled(job.hosts, job.ranks)):
        words += [*([":"] if index else []), "-host", host.name, "-n", str(ranks), *job.command]
    return words


def _hydra(job: Job, variables: Mapping[str, str]) -> list[str]:
    """Return what MPICH's Hydra and Intel's have in common."""
    words = [*(["-l"] if job.tag_output else []), "-genvall"]
    if job.ssh_args:
        words += ["-bootstrap", "ssh", "-bootstrap-exec-args", " ".join(job.ssh_args)]
    if job.output_path:
        words += ["-outfile-pattern", job.output_path]
    for name, value in variables.items():
        words += ["-genv", name, value]
    return words


def _only_here(job: Job) -> bool:
    """Return whether all ranks run on this host; False without a host list."""
    return bool(job.hosts) and all(host.is_here for host in job.hosts)


def _mentions(job: Job, name: str) -> bool:
    return any(word.lstrip("-") == name for word in job.mpi_args + job.binding_args)


def _user_set(name: str, job: Job, environ: Mapping[str, str]) -> bool:
    names = (name, "btl_tcp_if_exclude") if name == "btl_tcp_if_include" else (name,)
    if any(_mentions(job, n) or f"OMPI_MCA_{n}" in environ for n in names):
        return True
    file = Path(environ.get("HOME", "/"), ".openmpi", "mca-params.conf")
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return False
    return any(re.search(rf"^\s*{re.escape(n)}\s*=", text, re.M) for n in names)
