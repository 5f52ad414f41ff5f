"""Ranks of cases that mpirun starts on virtual nodes.

Owns each case's mpirun. A rank is two processes: a keeper, which mpirun started and which says how
the rank ended, and the rank. Both connect here, so their pids are known as this process sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.chaos.starter import StarterError
from toolkit.cluster import Cluster, ClusterError

__all__ = ["MpiLaunch"]

_START_S = 60.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_OPEN_MPIS = ("sm_segment", "vader_segment", "ompi.", "pmix")  # files that it may leave
_KEEPER = Path(__file__).with_name("mpi_keeper.py")


class MpiLaunch:
    """A Starter, and a context manager. Raises StarterError where there can be no virtual nodes."""

    leaving_s = 15.0  # of mpirun
    store = ("", 0)

    def __init__(self, nodes: int = 3) -> None:
        self._events = selectors.DefaultSelector()
        try:
            self._cluster = Cluster(nodes, management=True)  # of mpirun's daemons
        except ClusterError as error:
            raise StarterError(str(error)) from error
        self._clear()

    def _clear(self) -> None:
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None
        self._pids: dict[int, int] = {}  # of ranks
        self._lines: dict[socket.socket, tuple[int, bool]] = {}  # rank, and whether its keeper's
        self._ended: list[tuple[int, int]] = []
        self._reported: set[int] = set()

    def __enter__(self) -> MpiLaunch:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_case()
        self._events.close()
        self._cluster.close()

    def fileno(self) -> int:
        """To poll."""
        return self._events.fileno()

    def start(self, orders: Sequence[dict[str, Any]]) -> list[int]:
        """All ranks by one mpirun; returns when MPI is initialized on all."""
        folder, nodes = Path(orders[0]["folder"]), orders[0]["nodes"]
        (folder / "orders").write_text(json.dumps(list(orders)))
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(str(folder / "launch"))
        self._door.listen(2 * len(orders))
        self._events.register(self._door, selectors.EVENT_READ)
        hosts = ",".join(f"node{node + 1}:{nodes.count(node)}" for node in sorted(set(nodes)))
        command = self._cluster.mpirun_command(
            len(nodes),
            [sys.executable, "-SE", str(_KEEPER), str(folder)],
            hosts=hosts,
            options=("--with-ft", "ulfm") if orders[0]["launch"]["lives_on"] else (),
        )
        with (folder / "mpirun").open("wb") as output:
            self._mpirun = subprocess.Popen(
                self._cluster.command(command),
                env=self._cluster.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        limit = time.monotonic() + _START_S
        while len(self._pids) < len(orders):
            if time.monotonic() > limit or self._mpirun.poll() is not None:
                raise StarterError(f"chaos: mpirun: {(folder / 'mpirun').read_text()[-2000:]}")
            self._look(0.1)
        return [self._pids[rank] for rank in range(len(orders))]

    def _look(self, wait_s: float) -> None:
        for key, _ in self._events.select(wait_s):
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if line is self._door:
                self._welcome(self._door)
            else:
                self._hear(line)

    def _welcome(self, door: socket.socket) -> None:
        line, _ = door.accept()
        line.settimeout(_START_S)
        data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        text = b""
        while b"\n" not in text:
            text += line.recv(1 << 10)
        first, _, status = text.partition(b"\n")
        words = json.loads(first)
        if not words["is_keeper"]:
            self._pids[words["rank"]] = _CREDENTIALS.unpack(data)[0]
        self._lines[line] = words["rank"], words["is_keeper"]
        self._events.register(line, selectors.EVENT_READ)
        if status:
            self._report(words["rank"], int(status))

    def _hear(self, line: socket.socket) -> None:
        rank, is_keeper = self._lines[line]
        text = b""
        with contextlib.suppress(ConnectionError):
            text = line.recv(1 << 10)
        if is_keeper and text:
            self._report(rank, int(text))
        if text:
            return
        self._events.unregister(line)
        line.close()
        del self._lines[line]
        if is_keeper:  # ended by mpirun, with its rank
            self._report(rank, int(signal.SIGKILL))

    def _report(self, rank: int, status: int) -> None:
        if rank not in self._reported and rank in self._pids:
            self._reported.add(rank)
            self._ended.append((self._pids[rank], status))

    def send(self, rank: int, number: signal.Signals) -> bool:
        """A signal to a rank; False where it has ended."""
        try:
            os.kill(rank, number)
        except ProcessLookupError:
            return False
        return True

    def ended(self) -> tuple[int, int] | None:
        """Pid and wait status; SIGKILL of ranks that mpirun ended."""
        self._look(0)
        return self._ended.pop(0) if self._ended else None

    def left(self) -> list[str]:
        """mpirun, ranks, and files in the nodes' /dev/shm that are not Open MPI's own."""
        left = [f"rank {rank} (process {pid})" for rank, pid in self._living()]
        if self._mpirun is not None and self._mpirun.poll() is None:
            left.append(f"mpirun (process {self._mpirun.pid})")
        return left + [
            f"{node}:/dev/shm/{path.name}"
            for node, path in self._cluster.shared_files()
            if not path.name.startswith(_OPEN_MPIS)
        ]

    def _living(self) -> list[tuple[int, int]]:
        return [(rank, pid) for rank, pid in self._pids.items() if Path(f"/proc/{pid}").exists()]

    def end_case(self) -> None:
        """End mpirun, and with it all that it started."""
        if self._mpirun is not None and self._mpirun.poll() is None:
            os.killpg(self._mpirun.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._mpirun.wait(10)
            if self._mpirun.poll() is None:
                os.killpg(self._mpirun.pid, signal.SIGKILL)
                self._mpirun.wait(10)
        for _, pid in self._living():
            self.send(pid, signal.SIGKILL)
        self._cluster.remove_shared_files()
        for line in self._lines:
            self._events.unregister(line)
            line.close()
        if self._door is not None:
            self._events.unregister(self._door)
            self._door.close()
        self._clear()

    def set_link(self, node: int, state: str) -> None:
        """Of the node with this index: MPI's link, not that of mpirun's daemons."""
        self._cluster.set_link(node + 1, state)
