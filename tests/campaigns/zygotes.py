"""Zygotes: what starts ranks, by a zygote on this machine or by one on each of some virtual nodes.

Owns the zygotes, the virtual nodes, and the store at which ranks meet as they do at torchrun's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.cluster import Cluster, ClusterError

__all__ = ["StarterError", "Zygotes"]

_START_S = 60.0
_STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class StarterError(RuntimeError):
    """The ranks of a job could not be started."""


class Zygotes:
    """Starts the ranks of one job after another; a context manager.

    A rank has a number: its pid, perhaps in another PID namespace. leaving_s: how long what is
    started may outlive the ranks. inits_mpi: ranks call MPI_Init before their programs.

    modules: loaded in the zygotes. nodes: virtual ones; 0: ranks run on this machine. environment:
    of ranks, on top of that of this process. Raises StarterError if there can be no virtual nodes.
    """

    leaving_s = 1.0
    inits_mpi = False

    def __init__(self, modules: Sequence[str] = (), nodes: int = 0, **environment: str) -> None:
        self._environment = {"OPENBLAS_NUM_THREADS": "1", **environment}
        self._ended: list[tuple[int, int]] = []
        self._line_of: dict[int, socket.socket] = {}  # by the number of a rank that has not ended
        with contextlib.ExitStack() as stack:
            self._events = stack.enter_context(selectors.DefaultSelector())
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hsgd-")))
            self._door = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._door.bind(str(self._folder / "door"))
            self._door.listen(16)
            try:
                self._cluster = self._made_cluster(nodes)
            except ClusterError as error:
                raise StarterError(str(error)) from error
            if self._cluster is not None:
                stack.enter_context(self._cluster)
            self._zygotes: list[socket.socket] = []  # by node
            self._start_zygotes(stack, modules)
            self._stack = stack.pop_all()

    def _made_cluster(self, nodes: int) -> Cluster | None:
        return Cluster(nodes) if nodes else None

    def _start_zygotes(self, stack: contextlib.ExitStack, modules: Sequence[str]) -> None:
        argv = [sys.executable, "-m", "campaigns.zygote", str(self._folder / "door")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self._environment}
        processes = []
        for number in range(len(self._cluster.nodes) if self._cluster else 1):
            words = [*argv, str(number), *modules]
            command = self._cluster.command(words, node=number + 1) if self._cluster else words
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            )
            stack.callback(processes[-1].wait, 30)
        self._zygotes = self._accepted(processes, len(processes))
        for line in self._zygotes:
            stack.callback(line.close)  # ends the zygote

    def _accepted(
        self, processes: Sequence[subprocess.Popen[bytes]], count: int
    ) -> list[socket.socket]:
        """Accept the connections of `count` zygotes, in the order of their own numbers."""
        lines: dict[int, socket.socket] = {}
        limit = time.monotonic() + _START_S
        self._door.settimeout(0.1)
        while len(lines) < count:
            if time.monotonic() > limit or any(each.poll() is not None for each in processes):
                raise StarterError(f"ranks were not started: {self.last_words()}")
            with contextlib.suppress(TimeoutError):
                line, _ = self._door.accept()
                line.settimeout(_START_S)
                lines[json.loads(line.recv(1 << 10))["number"]] = line
                self._events.register(line, selectors.EVENT_READ)
        return [lines[number] for number in sorted(lines)]

    def __enter__(self) -> Zygotes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_job()
        self._stack.close()

    @functools.cached_property
    def store(self) -> tuple[str, int]:
        """Host and port of a TCPStore that all ranks reach; served from the first use."""
        host = "127.0.0.1" if self._cluster is None else "login"
        argv = [sys.executable, "-c", _STORE, host]
        environment = self._cluster.environment() if self._cluster else None
        command = self._cluster.command(argv) if self._cluster else argv
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self._stack.callback(process.wait, 30)
        assert process.stdin is not None and process.stdout is not None
        self._stack.callback(process.stdin.close)
        return host, int(process.stdout.readline())

    def fileno(self) -> int:
        """Return a descriptor that is readable when a rank has ended."""
        return self._events.fileno()

    def start(self, orders: Sequence[dict[str, Any]]) -> list[int]:
        """Start a rank for each order; return their numbers. Raises StarterError."""
        nodes = orders[0]["nodes"] if self._cluster else [0] * len(orders)
        return self._forked([self._zygotes[node] for node in nodes], orders)

    def _forked(self, zygotes: list[socket.socket], orders: Sequence[dict[str, Any]]) -> list[int]:
        numbers = []
        for line, order in zip(zygotes, orders, strict=True):
            told = self._ask(line, "pid", do="fork", order=order)
            if told["what"] == "lost":
                raise StarterError(f"a rank was not started: {self.last_words()}")
            numbers.append(told["pid"])
            self._line_of[told["pid"]] = line
        return numbers

    def send(self, rank: int, number: signal.Signals) -> bool:
        """Send a signal to the rank of this number; False if it has ended."""
        line = self._line_of.get(rank)
        if line is None:
            return False
        return bool(self._ask(line, "sent", do="signal", pid=rank, number=int(number))["was_there"])

    def ended(self) -> tuple[int, int] | None:
        """Return number and wait status of a rank that has ended; None if no other has."""
        for key, _ in self._events.select(0):
            assert isinstance(key.fileobj, socket.socket)
            self._receive(key.fileobj, "ended")
        return self._ended.pop(0) if self._ended else None

    def left(self) -> list[str]:
        """Name processes that are left of the job, those of ranks too, and files."""
        files = self._cluster.shared_files() if self._cluster else []
        counts = [self._ask(line, "children", do="count") for line in list(self._zygotes)]
        return [
            *(f"{node}:/dev/shm/{path.name}" for node, path in files if not self._may_stay(path)),
            *(f"process {pid}" for count in counts for pid in count["pids"]),
        ]

    def _may_stay(self, path: Path) -> bool:
        return False

    def end_job(self) -> None:
        """End what is left of the job."""
        self._line_of.clear()
        self._ended.clear()
        if self._cluster is not None:
            self._cluster.remove_shared_files()

    def last_words(self) -> str:
        """Return what those that start ranks have printed."""
        return "see above"

    def set_link(self, node: int, state: str) -> None:
        """Set the link of a virtual node to "up", "down", or "slow". Raises StarterError."""
        if self._cluster is None:
            raise StarterError(f"node {node} is pretended and has no link to set {state}")
        try:
            self._cluster.set_link(node + 1, state)
        except ClusterError as error:
            raise StarterError(str(error)) from error

    def _ask(self, line: socket.socket, answer: str, **request: Any) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            line.send(json.dumps(request).encode())
        return self._receive(line, answer)

    def _receive(self, line: socket.socket, wanted: str) -> dict[str, Any]:
        while True:
            try:
                text = line.recv(1 << 12)
            except ConnectionError:
                text = b""
            told: dict[str, Any] = json.loads(text) if text else self._lost(line)
            if told["what"] == "ended" and self._line_of.pop(told["pid"], None) is not None:
                self._ended.append((told["pid"], told["status"]))
            if told["what"] in (wanted, "lost"):
                return told

    def _lost(self, line: socket.socket) -> dict[str, Any]:
        """Make an answer of the end of a zygote."""
        raise StarterError("the process that starts ranks has ended")
