"""FaultSeat: a rank to which faults happen, some of which it does to itself."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaigns.seat import Seat

__all__ = ["FaultSeat"]

_COUNT = struct.Struct("q")


class FaultSeat(Seat):
    """The seat of a rank of a case.

    luck: the same draws on all ranks. own_luck: of this rank alone.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        if order["cores"]:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["cores"]])
        self.steps: int = order["steps"]
        self.luck = random.Random(order["number"])
        self.own_luck = random.Random(f"{order['number']} {order['rank']}")
        self._fails = False
        with Path(f"{order['folder']}/steps-{order['rank']}").open("w+b") as file:
            file.truncate(_COUNT.size)
            self._count = mmap.mmap(file.fileno(), _COUNT.size)  # read when this process is dead
        super().__init__(order)
        if order["victim"] == self.rank:
            threading.Thread(target=self._listen, daemon=True).start()

    def loop(self) -> Iterator[int]:
        """Yield the steps of a program, 0, 1, ..., with pauses of different length."""
        self.say("ready")
        for step in range(self.steps):
            if self.own_luck.random() < 0.5:
                time.sleep(self.own_luck.random() * 2e-3)
            if self._fails:
                raise RuntimeError("chaos: this rank fails")
            yield step
            _COUNT.pack_into(self._count, 0, step + 1)
        self.say("ending")

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
