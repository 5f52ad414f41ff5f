"""MpiLaunch: ranks that mpirun starts, on virtual nodes or on this machine.

Owns each job's mpirun. It starts a zygote for each rank, which says how the rank ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.zygotes import Zygotes
from toolkit.cluster import Cluster
from toolkit.processes import launch_environ

__all__ = ["MpiLaunch"]

_ZYGOTE = Path(__file__).with_name("zygote.py")
_OPEN_MPIS = ("sm_segment", "vader_segment", "ompi.", "pmix")  # files that it may leave


class MpiLaunch(Zygotes):
    """Starts the ranks of one job after another; see Zygotes."""

    leaving_s = 15.0  # of mpirun
    inits_mpi = True
    _mpirun: subprocess.Popen[bytes] | None = None

    def _made_cluster(self, nodes: int) -> Cluster | None:
        return Cluster(nodes, management=True) if nodes else None  # of mpirun's daemons

    def _start_zygotes(self, stack: contextlib.ExitStack, modules: Sequence[str]) -> None:
        """Nothing yet: each job has its own."""

    def start(self, orders: Sequence[dict[str, Any]]) -> list[int]:
        """Start all ranks by one mpirun; their numbers. Raises StarterError."""
        nodes = orders[0]["nodes"]
        words = [sys.executable, "-SI", str(_ZYGOTE), str(self._folder / "door"), "keeper"]
        if self._cluster is None:
            command = ["mpirun", "-n", str(len(nodes)), *words]
            environment = launch_environ(TMPDIR=str(self._folder), **self._environment)
        else:
            hosts = ",".join(f"node{node + 1}:{nodes.count(node)}" for node in sorted(set(nodes)))
            options = ("--with-ft", "ulfm") if orders[0]["outlives"] else ()
            command = self._cluster.command(
                self._cluster.mpirun_command(len(nodes), words, hosts=hosts, options=options)
            )
            environment = self._cluster.environment()
        with (self._folder / "mpirun").open("wb") as output:
            files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._mpirun = subprocess.Popen(
                command, env=environment, start_new_session=True, **files
            )
        self._zygotes = self._accepted([self._mpirun], len(orders))
        return self._forked(self._zygotes, orders)

    def last_words(self) -> str:
        """Return what mpirun, and ranks that had not begun, have printed."""
        return f"mpirun: {(self._folder / 'mpirun').read_text(errors='replace')[-2000:]}"

    def left(self) -> list[str]:
        """Name mpirun, processes that are left, and files that are not Open MPI's own."""
        left = super().left()
        if self._mpirun is not None and self._mpirun.poll() is None:
            left.append(f"mpirun (process {self._mpirun.pid})")
        return left

    def _may_stay(self, path: Path) -> bool:
        return path.name.startswith(_OPEN_MPIS)

    def end_job(self) -> None:
        """End mpirun, and with it all that it started."""
        if self._mpirun is not None and self._mpirun.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                os.killpg(self._mpirun.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._mpirun.wait(10)
                    break
        for line in list(self._zygotes):
            self._drop(line)
        super().end_job()

    def _drop(self, line: socket.socket) -> None:
        self._zygotes.remove(line)
        self._events.unregister(line)
        line.close()

    def _lost(self, line: socket.socket) -> dict[str, Any]:
        """A zygote that said nothing was ended by mpirun, with its rank."""
        self._drop(line)
        for number in [number for number, of in self._line_of.items() if of is line]:
            del self._line_of[number]
            self._ended.append((number, int(signal.SIGKILL)))
        return {"what": "lost", "was_there": False, "pids": []}
