"""Hosts of this job by the variables of Slurm, PBS, LSF, Grid Engine, OAR or Cobalt."""

from __future__ import annotations

import itertools
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hsgd.errors import LaunchError
from hsgd.jobs.environment.host_list import expanded
from hsgd.jobs.environment.launchers import number
from hsgd.jobs.launch.mpirun import MOST_RANKS, Host

__all__ = ["Allocation", "allocation", "is_managed", "spread", "tasks"]

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "PE_HOSTFILE", "OAR_JOB_ID")
_NODE_FILES = ("PBS_NODEFILE", "OAR_NODEFILE", "COBALT_NODEFILE")


@dataclass(frozen=True)
class Allocation:
    """Allocated hosts; `source` is the variable that names them, with its value."""

    source: str
    hosts: tuple[Host, ...]


def is_managed(environ: Mapping[str, str]) -> bool:
    """Return whether a resource manager started this job; local."""
    return any(name in environ for name in _JOBS)


def tasks(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the requested tasks (Slurm) or all slots, and their variable, or None; LaunchError."""
    if (asked := number(environ, "SLURM_NTASKS")) and "SLURM_JOB_ID" in environ:
        return asked, f"SLURM_NTASKS={asked}"
    found = allocation(environ, 1)
    return (sum(host.slots for host in found.hosts), found.source) if found else None


def spread(environ: Mapping[str, str], ranks: int, *, fill: bool = False) -> tuple[Host, ...]:
    """Return hosts of the allocation with even numbers of ranks; local.

    Empty if there is no allocation, or it is only this host. With `fill` the hosts get all slots,
    which are at least `ranks`. Raises LaunchError if there are too few slots, or the allocation
    cannot be read.
    """
    found = allocation(environ, ranks)
    if found is None or (len(found.hosts) == 1 and found.hosts[0].is_here):
        return ()
    slots = sum(host.slots for host in found.hosts)
    if slots < ranks:
        places = ", ".join(map(str, found.hosts))
        raise LaunchError(
            f"{ranks} ranks, and {found.source} has {slots} slots ({places}); lower the number of "
            "ranks, ask for more, or give hosts and slots with -H"
        )
    if fill:
        return found.hosts
    counts = dict.fromkeys(found.hosts, 0)
    while ranks:
        free = [host for host in found.hosts if counts[host] < host.slots]
        share = max(
            1, min(ranks // len(free), *(host.slots - counts[host] for host in free), ranks)
        )
        for host in free[:ranks]:
            counts[host] += share
            ranks -= share
    return tuple(Host(host.name, count) for host, count in counts.items() if count)


def allocation(environ: Mapping[str, str], ranks: int) -> Allocation | None:
    """Return the allocated hosts, Slurm's with slots for `ranks`; None without; LaunchError."""
    if "SLURM_JOB_ID" in environ:
        return _slurm(environ, ranks)
    for name in _NODE_FILES:
        if path := environ.get(name):
            words = [line.split()[0] for line in _lines(name, path)]
            return _counted(f"{name}={path}", words)
    if path := environ.get("PE_HOSTFILE"):
        rows = [line.split() for line in _lines("PE_HOSTFILE", path)]
        words = [row[0] for row in rows for _ in range(_slots("PE_HOSTFILE", row[1:2]))]
        return _counted(f"PE_HOSTFILE={path}", words)
    if text := environ.get("LSB_MCPU_HOSTS"):
        pairs = text.split()
        rows = [pairs[at : at + 2] for at in range(0, len(pairs), 2)]
        words = [row[0] for row in rows for _ in range(_slots("LSB_MCPU_HOSTS", row[1:]))]
        return _counted(f"LSB_MCPU_HOSTS={text}", words)
    if text := environ.get("LSB_HOSTS"):
        return _counted(f"LSB_HOSTS={text}", text.split())
    return None


def _slurm(environ: Mapping[str, str], ranks: int) -> Allocation | None:
    text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not text:
        return None
    source = f"SLURM_JOB_NODELIST={text}"
    names = list(itertools.islice(expanded(source, text), MOST_RANKS))
    own = environ.get("SLURMD_NODENAME", "")  # Slurm's name may be none of this host's names
    if own in names and not Host(own, 1).is_here:
        names[names.index(own)] = socket.gethostname()
    found: list[int] = []
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"):
        counts = _repeated(name, environ[name]) if environ.get(name) else []
        if len(counts) == len(names):
            found = [max(each) for each in zip(counts, found or counts, strict=True)]
        if sum(found) >= ranks:
            break
    if not found:
        raise LaunchError(
            f"{source}: neither SLURM_TASKS_PER_NODE nor SLURM_JOB_CPUS_PER_NODE has a number for "
            f"each of these {len(names)} hosts; give hosts and slots with -H"
        )
    return Allocation(source, tuple(map(Host, names, found)))


def _repeated(name: str, text: str) -> list[int]:
    numbers: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", item)
        if match is None:
            raise LaunchError(f'{name}={text}: "{item}" is no number of tasks; give hosts with -H')
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _slots(name: str, words: list[str]) -> int:
    if not words or not words[0].isdigit() or int(words[0]) > MOST_RANKS:
        raise LaunchError(f"{name}: a host has no number of slots; give hosts and slots with -H")
    return int(words[0])


def _lines(name: str, path: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"{name}={path}, the hosts of this job, cannot be read ({error}); give them with -H"
        ) from None


def _counted(source: str, names: list[str]) -> Allocation:
    if not names:
        raise LaunchError(f"{source} names no host; give hosts and slots with -H")
    return Allocation(source, tuple(Host(*pair) for pair in Counter(names).items()))
