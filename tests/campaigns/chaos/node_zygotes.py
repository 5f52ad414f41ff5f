"""Ranks of cases on virtual nodes, each node with a zygote of its own.

Owns the virtual nodes, their zygotes, and the store on their login, at which ranks meet as they do
at torchrun's.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from campaigns.chaos.starter import StarterError
from campaigns.chaos.zygote import Zygote
from toolkit.cluster import Cluster, ClusterError

__all__ = ["NodeZygotes"]

_LOGIN = "login"
_STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class NodeZygotes:
    """A Starter, and a context manager. Raises StarterError where there can be no virtual nodes."""

    leaving_s = 1.0

    def __init__(self, nodes: int = 3) -> None:
        self._events = selectors.DefaultSelector()
        self._of: dict[int, Zygote] = {}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            try:
                self._cluster = stack.enter_context(Cluster(nodes))
            except ClusterError as error:
                raise StarterError(str(error)) from error
            self.store = (_LOGIN, self._serve_store(stack))
            self._zygotes = [
                stack.enter_context(Zygote(partial(self._cluster.command, node=node)))
                for node in range(1, nodes + 1)
            ]
            for zygote in self._zygotes:
                self._events.register(zygote, selectors.EVENT_READ)
            self._stack = stack.pop_all()

    def _serve_store(self, stack: contextlib.ExitStack) -> int:
        process = subprocess.Popen(
            self._cluster.command([sys.executable, "-c", _STORE, _LOGIN]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._cluster.environment(),
        )
        stack.callback(process.wait, 30)
        assert process.stdin is not None and process.stdout is not None
        stack.callback(process.stdin.close)
        return int(process.stdout.readline())

    def __enter__(self) -> NodeZygotes:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
        self._stack.close()

    def fileno(self) -> int:
        """To poll."""
        return self._events.fileno()

    def start(self, orders: Sequence[dict[str, Any]]) -> list[int]:
        """Each rank on its node; pids of the cluster's namespace."""
        numbers = []
        for order in orders:
            zygote = self._zygotes[order["nodes"][order["rank"]]]
            numbers += zygote.start([order])
            self._of[numbers[-1]] = zygote
        return numbers

    def send(self, rank: int, number: signal.Signals) -> bool:
        """A signal to a rank; False where it has ended."""
        return self._of[rank].send(rank, number)

    def ended(self) -> tuple[int, int] | None:
        """Number and wait status of a rank that has ended."""
        found = (zygote.ended() for zygote in self._zygotes)
        return next((each for each in found if each is not None), None)

    def left(self) -> list[str]:
        """Processes, and files in the nodes' own /dev/shm."""
        files = [f"{node}:/dev/shm/{path.name}" for node, path in self._cluster.shared_files()]
        return [*files, *(what for zygote in self._zygotes for what in zygote.left())]

    def end_case(self) -> None:
        """Nothing but ranks is started."""
        self._of.clear()
        self._cluster.remove_shared_files()

    def set_link(self, node: int, state: str) -> None:
        """Of the node with this index."""
        self._cluster.set_link(node + 1, state)
