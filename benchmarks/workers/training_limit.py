"""What communication must cost a step at least: bytes that are moved, and nothing else.

On one node every rank copies as many bytes as it has gradients, all ranks at once, after backward:
a sum over gradients that lie in shared memory takes two accesses per byte, because each rank reads
its part of all gradients and writes that part of all results. Between nodes every node sends
2 (N - 1) / N of its gradients to the next one, and receives as many, by TCP, from the beginning of
the step on; as many ranks of each node as the smallest one has share that, with one connection
each.
"""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

__all__ = ["Link", "Transfer"]

LIMIT_S = 60.0  # for a neighbour to come, and for its next bytes
PIECE_BYTES = 1 << 20


class Link:
    """The connections of this rank; collective over `world`, an mpi4py communicator."""

    def __init__(self, world: Any) -> None:
        hosts = world.allgather(socket.gethostname())
        names = list(dict.fromkeys(hosts))
        ranks_of = [[r for r, host in enumerate(hosts) if host == name] for name in names]
        node = names.index(hosts[world.rank])
        place = ranks_of[node].index(world.rank)
        self.nodes = len(names)
        self.carriers = min(map(len, ranks_of))
        self.carries = self.nodes > 1 and place < self.carriers
        with socket.create_server(("", 0)) as listener:
            listener.settimeout(LIMIT_S)
            ports = world.allgather(listener.getsockname()[1])
            if self.carries:
                following = ranks_of[(node + 1) % self.nodes][place]
                address = (hosts[following], ports[following])
                self._to = socket.create_connection(address, LIMIT_S)
                self._from, _ = listener.accept()
                self._from.settimeout(LIMIT_S)
                self._threads = ThreadPoolExecutor(2)
            world.Barrier()

    def start(self, nbytes: int) -> list[Future[None]]:
        """Send to the next node and receive from the one before; not blocking."""
        return [
            self._threads.submit(self._send, nbytes),
            self._threads.submit(self._receive, nbytes),
        ]

    def _send(self, nbytes: int) -> None:
        piece = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
        while nbytes > 0:
            self._to.sendall(piece[:nbytes])
            nbytes -= min(nbytes, len(piece))

    def _receive(self, nbytes: int) -> None:
        piece = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
        while nbytes > 0:
            came = self._from.recv_into(piece[:nbytes])
            if came == 0:
                raise ConnectionError("the rank before this one closed its connection")
            nbytes -= came

    def close(self) -> None:
        """End the threads and the connections; local."""
        if self.carries:
            self._threads.shutdown()
            self._to.close()
            self._from.close()


class Transfer:
    """One step's bytes. nbytes: of the gradients of a rank."""

    def __init__(self, link: Link, nbytes: int) -> None:
        self._link = link
        self._nbytes = int(nbytes * 2 * (link.nodes - 1) / link.nodes / link.carriers)
        self._under_way: list[Future[None]] = []
        if link.nodes == 1:
            self._source = torch.ones(nbytes // 4)
            self._target = torch.ones(nbytes // 4)

    def begin(self) -> None:
        """At the beginning of a step; not blocking."""
        if self._link.carries:
            self._under_way = self._link.start(self._nbytes)

    def end(self) -> None:
        """When all gradients have come; blocking."""
        if self._link.nodes == 1:
            self._target.copy_(self._source)
        for one in self._under_way:
            one.result()
        self._under_way = []
