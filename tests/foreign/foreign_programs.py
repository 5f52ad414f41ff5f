"""What every environment must be able to do: `foreign_programs.py PATH RANK SIZE [WORD...]`.

One rank of a node, without MPI. Each use of shared memory once, small and large, against what it
must give. Prints one line at the end.

Words: `torch` adds parameters that a node shares. `dies`: instead, rank 1 ends without closing, and
the others say what they were told. `asks`: instead, the ranks ask for more memory than they may
have, say what they were told, and go on. Settings of the sandbox (foreign/sandbox.py) are words,
too, and come into force when all modules are loaded.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

import numpy as np

import sandbox
from hsgd import Comm, NotifiedWindow, ParameterBox
from hsgd.config import Config
from hsgd.errors import HsgdError

__all__: list[str] = []

CONFIG = Config(timeout_s=60.0)
LARGE = 300_007  # elements: several steps of a pipeline
HUGE = 17 << 20  # bytes: an array of the node in parts that huge pages fit


def collectives(comm: Comm) -> None:
    total = comm.size * (comm.size + 1) // 2
    for count in (1, 5000, LARGE):
        assert (comm.allreduce(np.full(count, comm.rank + 1.0)) == total).all()
    in_reach = comm.empty(LARGE)
    in_reach[:] = comm.rank + 1
    assert (comm.allreduce(in_reach, out=in_reach) == total).all()
    assert (comm.allgather(in_reach)[:: LARGE - 1] == total).all()


def arrays_of_the_node(comm: Comm) -> None:
    for nbytes in (1, 5000, HUGE):
        shared = comm.shared(nbytes, "uint8")
        shared[comm.rank :: comm.size] = comm.rank + 1
        comm.barrier()
        for rank in range(comm.size):
            assert (shared[rank :: comm.size] == rank + 1).all()
        comm.barrier()


def one_sided(comm: Comm) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with NotifiedWindow(comm, 10_000, 1) as exchange:
        exchange.bind(0, before)
        exchange.put_notify(np.full(10_000, comm.rank, np.uint8), after, 0, 1)
        exchange.wait_any([0], 0)
        assert (exchange.segment() == before).all()
        comm.barrier()


def boxes(comm: Comm) -> None:
    with ParameterBox.over(comm, np.zeros(LARGE, np.float32)) as box:
        box.accumulate(np.ones(LARGE, np.float32))
        comm.barrier()
        found = np.empty(LARGE, np.float32)
        box.read(found)
        assert (found == comm.size).all()
        comm.barrier()


def parameters(comm: Comm) -> None:
    import torch

    from hsgd.optim import NodeSharedOptimizer, share_parameters

    torch.manual_seed(0)
    model = torch.nn.Linear(4000, 10)
    shared = share_parameters(model, comm)
    optimizer = NodeSharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shared)
    model(torch.full((1, 4000), float(comm.rank))).sum().backward()
    optimizer.step()
    first = model.bias.detach().clone()
    assert torch.equal(torch.from_numpy(comm.broadcast(first.numpy())), model.bias.detach())


def deaths(comm: Comm) -> None:
    """Rank 1 ends while the others have waited for it; they say what they were told."""
    time.sleep(0.3 if comm.rank == 1 else 0)  # a death that is seen at once would be a wrong one
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)
    try:
        comm.barrier()
    except HsgdError as error:
        print(f"{type(error).__name__}: {error}")


def greed(comm: Comm) -> None:
    for ask in (comm.empty, comm.shared):
        try:
            ask(1 << 30, "uint8")
        except HsgdError as error:
            print(f"{type(error).__name__}: {error}")
    assert comm.allreduce(np.ones(3))[0] == comm.size


def main(path: str, rank: str, size: str, *words: str) -> None:
    from hsgd import _native  # noqa: F401  # all that is loaded later

    if "torch" in words:
        import torch  # noqa: F401
    sandbox.enter([word for word in words if "=" in word])
    with Comm.local(path, int(rank), int(size), CONFIG) as comm:
        if "dies" in words:
            return deaths(comm)
        if "asks" in words:
            return greed(comm)
        for part in (collectives, arrays_of_the_node, one_sided, boxes):
            part(comm)
        if "torch" in words:
            parameters(comm)
    print(f"all is well with pages of {mmap.PAGESIZE} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
