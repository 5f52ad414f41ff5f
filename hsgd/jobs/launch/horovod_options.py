"""Options of horovodrun that `hsgd run --horovod` accepts; those without meaning are ignored."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from hsgd.errors import LaunchError

__all__ = ["add_options", "read_host_lines", "read_hostfile", "variables", "without_meaning"]

_FLAGS = (
    *("--disable-cache", "--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    *("--hierarchical-allgather", "--no-hierarchical-allgather", "--autotune", "--mpi"),
    *("--no-stall-check", "--timeline-mark-cycles", "--log-without-timestamp"),
)
_WITH_VALUE = (
    *("--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity"),
    *("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample"),
    *("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
    *("--num-nccl-streams", "--thread-affinity", "--log-level"),
)


def add_options(run: Any) -> None:
    """Add them to the parser of `hsgd run`; local."""
    group = run.add_argument_group("options of horovodrun, with --horovod")
    group.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="file with one host per line: node1 slots=2"
    )
    group.add_argument(
        "--network-interfaces",
        "--network-interface",
        metavar="NAMES",
        help="network interfaces between hosts, for jobs without MPI: eth0,eth1",
    )
    group.add_argument("--timeline-filename", metavar="FILE", help="write a timeline to FILE")
    for name in _FLAGS:
        group.add_argument(name, action="append_const", const=name, dest="_idle", help=_HIDDEN)
    for name in _WITH_VALUE:
        group.add_argument(name, action=_Idle, dest="_idle", help=_HIDDEN)


_HIDDEN = argparse.SUPPRESS


class _Idle(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace._idle = [*(namespace._idle or ()), option]


def variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables for the ranks; local."""
    found = {
        "HOROVOD_TIMELINE": arguments.timeline_filename,
        "HSGD_INTERFACES": arguments.network_interfaces,
    }
    return {name: value for name, value in found.items() if value}


def without_meaning(arguments: argparse.Namespace) -> list[str]:
    """Return the given options that change nothing; local."""
    return list(arguments._idle or ())


def read_hostfile(path: str) -> str:
    """Return a host list from "node1 slots=2" or "node1:2" lines; local. LaunchError."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: {error.strerror}") from None
    hosts = read_host_lines(text, f"--hostfile {path}", slots=1)
    if not hosts:
        raise LaunchError(f"--hostfile {path} names no host")
    return hosts


def read_host_lines(text: str, source: str, slots: int) -> str:
    """Return a host list as read_hostfile(), perhaps empty; `slots` of hosts without a number."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match = re.fullmatch(r"([\w.-]+)(?:(?: slots=|:)([0-9]+))?", " ".join(words))
        if match is None:
            raise LaunchError(f'{source}, line {number}: "{line}"; write node1 slots=2')
        hosts.append(f"{match[1]}:{match[2] or slots}")
    return ",".join(hosts)
