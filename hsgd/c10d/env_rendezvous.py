"""env:// of torch.distributed for ranks of srun and mpirun, which set none of its variables.

torch knows RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only, and fails without them. Then the
ranks of the job meet as for Comm(), and rank 0 tells the others where its store will be.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

from hsgd.jobs.stores.sealed_store import JOB_SECRET

__all__ = ["install", "variables"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def install(rendezvous: Any) -> None:
    """Set missing variables before torch's handler of env:// reads them; local.

    `rendezvous` is the module torch.distributed.rendezvous. A second call does nothing.
    """
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    known: Callable[..., Any] | None = handlers.get("env")
    if known is None or hasattr(known, "sets_variables"):
        return

    last: list[Any] = []  # the store of the job's last group

    @functools.wraps(known)
    def handler(url: str, *arguments: Any, **named: Any) -> Any:
        if not any(name in os.environ for name in _NEEDED) and "?" not in url:
            os.environ.update(variables())
        for found in known(url, *arguments, **named):
            # Rank 0's store serves the next group, too: another rank may connect for that while
            # rank 0 still destroys this one.
            last[:] = [found[0]] if JOB_SECRET in os.environ else []
            yield found

    handler.sets_variables = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def variables() -> dict[str, str]:
    """Return torch's variables for this rank of a launcher that sets none; collective, blocking.

    Returns {} for a process that no launcher, or torchrun, started. Raises as Comm().
    """
    from hsgd.jobs.environment.launched_once import launched_once

    found = launched_once()
    if found is None or found.is_alone or "TORCHELASTIC_RUN_ID" in os.environ:
        return {}
    from hsgd.comm.communicator import Comm
    from hsgd.jobs.stores.sealed_store import draw_job_secret

    with Comm() as comm:
        told = (*_place(comm.cross_size == 1), draw_job_secret()) if comm.rank == 0 else None
        address, port, secret = comm.broadcast_object(told, name="MASTER_ADDR and MASTER_PORT")
        return {
            JOB_SECRET: os.environ.get(JOB_SECRET) or secret,  # for what ranks tell in the store
            "RANK": str(comm.rank),
            "WORLD_SIZE": str(comm.size),
            "LOCAL_RANK": str(comm.local_rank),
            "LOCAL_WORLD_SIZE": str(comm.local_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def _place(is_on_one_node: bool) -> tuple[str, int]:
    """Return an address of this host, and a port of it that is free now."""
    from hsgd.jobs.environment.scheduled_step import scheduled_step
    from hsgd.jobs.launch.torch_variables import free_port

    step = scheduled_step()  # Slurm knows names of its hosts by which they reach one another
    name = step.hosts[0] if step is not None and step.hosts else socket.gethostname()
    return "127.0.0.1" if is_on_one_node else name, free_port()
