"""Seat: what the program of a rank sees of its job, and how it tells the controller.

Owns the connection to the controller and the ways in which ranks find one another. Never judges.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from hsgd import Comm
from hsgd.config import Config
from hsgd.onesided.networks import Network

__all__ = ["Seat", "WrongResult", "check"]


class WrongResult(AssertionError):
    """A collective gave something else than it must."""


def check(found: Any, wanted: Any, what: str = "result") -> None:
    """Raise WrongResult unless an array or a tensor is as wanted, of this shape if not a number."""
    same_shape = getattr(wanted, "shape", found.shape) == found.shape
    if not same_shape or not bool((found == wanted).all()):
        raise WrongResult(f"{what}: {found.flatten()[:4].tolist()}..., not {wanted}")


class Seat:
    """A rank of a job.

    nodes: the node of each rank. folder: one that all ranks see.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.rank: int = order["rank"]
        self.nodes: list[int] = order["nodes"]
        self.size = len(self.nodes)
        self.node_count = len(set(self.nodes))
        self.timeout_s: float = order["timeout_s"]
        self.folder = Path(order["folder"])
        self._meets: str = order["meets"]
        self._pretends: bool = order["pretends"]
        self._secret: str = order["secret"]
        self._store_address = order["store"]
        self._store: Any = None
        self._meetings = itertools.count()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(str(self.folder / "controller"))
        self.say("here", rank=self.rank, pid=os.getpid())

    @property
    def network(self) -> Network:
        """The network of one-sided writes."""
        return "sockets" if self.node_count > 1 else "auto"

    def communicator(self, config: Config | None = None) -> Comm:
        """Make one of all ranks, on the nodes of the job; collective, blocking."""
        config = config or Config(timeout_s=self.timeout_s)
        if self._meets == "mpi":
            return Comm(config=config)
        if self._meets == "path":
            # A name for each: a rank may be at the next meeting while rank 0 still ends the last.
            name = f"@hsgd-{self._secret[:8]}-{next(self._meetings)}"
            return Comm.local(f"{name}#{self._secret}", self.rank, self.size, config)
        self._pretend_nodes()
        return Comm.over_store(self.store(), self.rank, self.size, config=config)

    def store(self) -> Any:
        """Connect to the store of this job alone, which the controller serves."""
        if self._store is None:
            import torch.distributed

            dist: Any = torch.distributed
            limit = timedelta(seconds=self.timeout_s)
            served = dist.TCPStore(*self._store_address, timeout=limit)
            self._store = dist.PrefixStore(self._secret, served)
        return self._store

    def join_torch(self, backend: str = "hsgd") -> None:
        """Make torch's process group of all ranks; collective, blocking."""
        import torch.distributed

        if backend == "hsgd":
            import hsgd.c10d

            hsgd.c10d.register()
            self._pretend_nodes()
        dist: Any = torch.distributed
        limit = timedelta(seconds=self.timeout_s)
        dist.init_process_group(
            backend, store=self.store(), rank=self.rank, world_size=self.size, timeout=limit
        )

    def _pretend_nodes(self) -> None:
        """Make ranks believe that they are on the nodes of the job, and speak TCP between them;
        where these are virtual, they find them by themselves.
        """
        if self._pretends and self.node_count > 1:
            from hsgd.comm.connect import tcp_meeting

            nodes = list(self.nodes)
            vars(tcp_meeting)["find_nodes"] = lambda *_: nodes

    def report(self) -> dict[str, Any]:
        """Return what is told of this rank when its program has ended."""
        return {}

    def say(self, what: str, **more: Any) -> None:
        """Tell the controller; when it is gone, there is nobody to tell."""
        text = json.dumps({"what": what, "at": time.monotonic(), **more})
        with contextlib.suppress(OSError):
            self._line.send(text.encode())
