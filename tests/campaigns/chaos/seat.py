"""Seat: what the program of a rank sees of its case, and how it tells the controller.

Owns the connection to the controller and the faults that a rank does to itself. Never judges.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from hsgd import Comm
from hsgd.config import Config
from hsgd.onesided.networks import Network

__all__ = ["Seat", "WrongResult"]

_COUNT = struct.Struct("q")


class WrongResult(AssertionError):
    """A collective gave something else than it must."""


class Seat:
    """A rank of a case.

    luck: the same draws on all ranks. own_luck: of this rank alone. nodes: the node of each rank.
    folder: one that all ranks see.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.rank: int = order["rank"]
        self.nodes: list[int] = order["nodes"]
        self.size = len(self.nodes)
        self.steps: int = order["steps"]
        self.timeout_s: float = order["timeout_s"]
        self.folder = Path(order["folder"])
        self._store_host, self._store_port = order["store"]
        self._under: str = order["under"]
        self.secret: str = order["secret"]
        self.luck = random.Random(order["number"])
        self.own_luck = random.Random(f"{order['number']} {self.rank}")
        self._fails = False
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(str(self.folder / "controller"))
        with (self.folder / "steps").open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), 0)
        self.say("here", rank=self.rank, pid=os.getpid())
        if order["is_victim"]:
            threading.Thread(target=self._listen, daemon=True).start()

    @property
    def config(self) -> Config:
        """Of all communicators."""
        return Config(timeout_s=self.timeout_s)

    @property
    def network(self) -> Network:
        """Of one-sided writes."""
        return "sockets" if self.node_count > 1 else "auto"

    @property
    def node_count(self) -> int:
        """Nodes of the job."""
        return len(set(self.nodes))

    def communicator(self) -> Comm:
        """Of all ranks, on the nodes of the case; collective."""
        if self._under == "mpirun":
            from mpi4py import MPI

            return Comm(MPI.COMM_WORLD, self.config)
        if self.node_count == 1:
            path = f"@hsgd-chaos-{self.secret[:8]}#{self.secret}"
            return Comm.local(path, self.rank, self.size, self.config)
        self.pretend_nodes()
        return Comm.over_store(self.store(), self.rank, self.size, config=self.config)

    def store(self) -> Any:
        """Of this case alone; the controller serves it, as torchrun's agent does."""
        import torch.distributed

        limit = timedelta(seconds=self.timeout_s)
        dist: Any = torch.distributed
        return dist.PrefixStore(
            self.secret, dist.TCPStore(self._store_host, self._store_port, timeout=limit)
        )

    def pretend_nodes(self) -> None:
        """Ranks believe that they are on the nodes of the case, and speak TCP between them; where
        these are virtual, they find them by themselves.
        """
        if self._under != "fork":
            return
        from hsgd.comm.connect import tcp_meeting

        nodes = list(self.nodes)
        vars(tcp_meeting)["find_nodes"] = lambda *_: nodes

    def loop(self) -> Iterator[int]:
        """The steps of a program, with pauses of different length: 0, 1, ..."""
        self.say("ready")
        for step in range(self.steps):
            if self.own_luck.random() < 0.5:
                time.sleep(self.own_luck.random() * 2e-3)
            if self._fails:
                raise RuntimeError("chaos: this rank fails")
            yield step
            _COUNT.pack_into(self._counts, self.rank * _COUNT.size, step + 1)
        self.say("ending")

    def say(self, what: str, **more: Any) -> None:
        """Tell the controller; when it is gone, there is nobody to tell."""
        text = json.dumps({"what": what, "at": time.monotonic(), **more})
        with contextlib.suppress(OSError):
            self._line.sendall(text.encode() + b"\n")

    def _listen(self) -> None:
        """Do what the controller orders: a fault that comes from within."""
        order = self._line.recv(64).decode()
        if order == "exit":
            os._exit(3)
        if order == "exception":
            self._fails = True
        if order == "gil":
            hold = ctypes.PyDLL(None).sleep
            while True:
                hold(1000)
        if order == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * mmap.PAGESIZE + (1 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        if order == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
