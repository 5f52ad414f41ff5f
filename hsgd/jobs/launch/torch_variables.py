"""Variables of torch.distributed for ranks that an mpirun starts; torch is not imported."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping, Sequence

from hsgd.config import Config
from hsgd.errors import LaunchError
from hsgd.jobs.environment.launchers import LAUNCHERS
from hsgd.jobs.launch.allocation import allocation
from hsgd.jobs.launch.mpirun import Host, Launcher

__all__ = ["command_of_rank", "free_port", "meeting"]

_ROWS = {
    kind: next(row for row in LAUNCHERS if row.rank == rank)
    for kind, rank in (
        ("Open MPI", "OMPI_COMM_WORLD_RANK"),
        ("MPICH", "PMI_RANK"),
        ("Intel MPI", "PMI_RANK"),
    )
}


def command_of_rank(launcher: Launcher, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a rank, which sets its variables first; local."""
    row = _ROWS.get(launcher.kind)
    if row is None:
        return tuple(command)
    names = {
        "RANK": row.rank,
        "WORLD_SIZE": row.sizes[0],
        "LOCAL_RANK": row.local_rank,
        "LOCAL_WORLD_SIZE": row.local_size,
    }
    words = " ".join(f'{name}="${theirs}"' for name, theirs in names.items())
    return ("sh", "-c", f'export {words}; exec "$@"', "sh", *command)


def meeting(
    hosts: Sequence[Host], environ: Mapping[str, str], *, placed: bool = False
) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT; values of the user come first; local.

    `hosts` are those of the ranks, the first one that of rank 0; if empty, a resource manager's.
    Returns {} if the host of rank 0 is unknown, or `placed` by the user's arguments for mpirun.
    """
    given = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    if len(given) == 2:
        return given
    if placed:
        return {}
    if not hosts:
        with contextlib.suppress(LaunchError):  # mpirun may know better
            found = allocation(environ, 1)
            hosts = found.hosts if found else ()
    if not hosts:
        return {}
    first, is_alone = hosts[0], all(host.is_here for host in hosts)
    address = "127.0.0.1" if is_alone else socket.gethostname() if first.is_here else first.name
    ports = Config.from_env().port_range
    port = free_port() if first.is_here else random.SystemRandom().choice(ports)
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), **given}


def free_port() -> int:
    """Return a TCP port of this host that is free now, in HSGD_PORTS if set; local. LaunchError."""
    config = Config.from_env()
    ports = [0] if config.ports == "any" else list(config.port_range)
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise LaunchError(f"HSGD_PORTS={config.ports}: none of these ports is free here")
