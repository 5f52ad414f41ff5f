"""What every environment must be able to do: `foreign_programs.py PATH RANK SIZE [torch]`.

One rank of a node, without MPI. Each use of shared memory once, small and large, against what it
must give; "torch" adds parameters that a node shares. Prints one line at the end.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np

from hsgd import Comm, Exchange, ParameterBox
from hsgd.config import Config

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
    with Exchange(comm, 10_000, 1) as exchange:
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


def main(path: str, rank: str, size: str, *more: str) -> None:
    with Comm.local(path, int(rank), int(size), CONFIG) as comm:
        for part in (collectives, arrays_of_the_node, one_sided, boxes):
            part(comm)
        if "torch" in more:
            parameters(comm)
    print(f"all is well with pages of {mmap.PAGESIZE} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
