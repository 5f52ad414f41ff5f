"""Post: what the program of a rank sees of its soak, and the process that runs it.

Owns the samples of what this rank holds. Never judges.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.soak.footprint import MEASURES, footprint
from hsgd import Comm
from hsgd.config import Config
from hsgd.onesided.networks import Network

__all__ = ["Post"]

_PR_SET_PDEATHSIG = 1
_KEEP, _SAMPLE, _END = range(3)
_CONFIG = Config(timeout_s=120.0)


class Post:
    """A rank of a soak.

    nodes: the node of each rank. count: operations to make; 0: `seconds` are to pass. folder: one
    that all ranks see. width: things to have open at once. notes: figures for the report.
    """

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self.rank = rank
        self.nodes: list[int] = order["nodes"]
        self.size = len(self.nodes)
        self.count: int = order["count"]
        self.seconds: float = order["seconds"]
        self.width: int = order["width"]
        self.folder = Path(order["folder"])
        self.notes: dict[str, float] = {}
        self._meetings = itertools.count()
        self._by: str = order["by"]
        self._secret: str = order["secret"]
        self._store_port: int = order["store_port"]
        self._store: Any = None
        self._rows = np.zeros((order["samples"], len(MEASURES)), np.int64)
        self._taken = 0
        self._done = 0
        self._begin = time.monotonic()

    @property
    def network(self) -> Network:
        """Of one-sided writes."""
        return "sockets" if len(set(self.nodes)) > 1 else "auto"

    def communicator(self, config: Config = _CONFIG) -> Comm:
        """Of all ranks, in the way of the layout; collective, blocking."""
        if self._by == "mpi":
            return Comm(config=config)
        if self._by == "path":
            # A name for each: a rank may be at the next meeting while rank 0 still ends the last.
            path = f"@hsgd-soak-{self._secret[:8]}-{next(self._meetings)}#{self._secret}"
            return Comm.local(path, self.rank, self.size, config)
        self.pretend_nodes()
        return Comm.over_store(self.store(), self.rank, self.size, config=config)

    def store(self) -> Any:
        """Of this job alone; the controller serves it, as torchrun's agent does."""
        import torch.distributed

        if self._store is None:
            port, limit = self._store_port, timedelta(seconds=_CONFIG.timeout_s)
            dist: Any = torch.distributed
            served = dist.TCPStore("127.0.0.1", port, timeout=limit)
            self._store = dist.PrefixStore(self._secret, served)
        return self._store

    def pretend_nodes(self) -> None:
        """Ranks believe that they are on the nodes of the layout, and speak TCP between them."""
        from hsgd.comm.connect import tcp_meeting

        nodes = list(self.nodes)
        vars(tcp_meeting)["find_nodes"] = lambda *_: nodes

    # --- the work, and what is held meanwhile ---

    def blocks(self) -> Iterator[int]:
        """How many operations to make next; after each such block a sample is taken."""
        samples = len(self._rows)
        for number in range(samples):
            todo = (number + 1) * self.count // samples - number * self.count // samples
            yield todo
            self._done += todo
            self._sample()

    def steps_in_time(self, comm: Comm) -> Iterator[int]:
        """The numbers of steps until the time is up; collective: one small broadcast each."""
        samples = len(self._rows)
        step = 0
        while True:
            yield step
            step += 1
            passed = (time.monotonic() - self._begin) / self.seconds
            word = np.array([_SAMPLE if passed * samples > self._taken + 1 else _KEEP], np.int32)
            if self._taken + 1 == samples and word[0] == _SAMPLE:
                word[0] = _END
            word = comm.broadcast(word)
            if word[0] == _KEEP:
                continue
            self._done = step
            self._sample()
            if word[0] == _END:
                return

    def _sample(self) -> None:
        gc.collect()  # cycles are the interpreter's business
        if self._taken == 0:
            gc.freeze()  # what is loaded by now stays: no look at it takes time again
            _settle_names()
        self._rows[self._taken] = footprint()
        self._taken += 1
        share = self._taken / len(self._rows)
        text = json.dumps({"done": self._done, "share": share})
        part = self.folder / f"progress-{self.rank}.part"
        part.write_text(text)
        part.rename(self.folder / f"progress-{self.rank}")

    def report(self) -> dict[str, Any]:
        """What the controller judges."""
        return {
            "samples": self._rows[: self._taken].tolist(),
            "operations": self._done,
            "seconds": time.monotonic() - self._begin,
            "notes": self.notes,
        }


def _settle_names() -> None:
    """The interpreter's table of names is made anew, and larger, when many have come and gone, as
    parts of paths do: here, and not in the middle of the samples.
    """
    for number in range(200_000):
        sys.intern(f"soak {number}")


def _own_rank(order: dict[str, Any]) -> int:
    if order["by"] != "mpi":
        return int(sys.argv[2])
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank)


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody outlives the controller
    order = json.loads(Path(sys.argv[1]).read_text())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    post = Post(order, _own_rank(order))
    module, _, name = order["program"].partition(":")
    program = getattr(importlib.import_module(f"campaigns.soak.{module}"), name)
    program(post)
    part = post.folder / f"rank-{post.rank}.part"
    part.write_text(json.dumps(post.report()))
    os.replace(part, post.folder / f"rank-{post.rank}.json")


if __name__ == "__main__":
    _main()
