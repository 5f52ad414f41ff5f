"""A rank in a container: what users do with hsgd, over the variables of torch's launchers."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import hsgd
from hsgd.errors import PeerLost

__all__: list[str] = []


def main(*words: str) -> None:
    torch.manual_seed(1)
    dist.init_process_group("hsgd")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 8), rank + step + 1.0)).sum().backward()
        optimizer.step()
    large = torch.ones(24 << 20)  # more than a /dev/shm of 64 MB
    dist.all_reduce(large)
    assert large[-1].item() == size
    store = dist.distributed_c10d._get_default_store()
    comm = hsgd.Comm.over_store(store, rank, size, prefix="own")
    assert comm.allreduce(np.ones(3))[0] == size
    hsgd.NotifiedWindow(comm, 1 << 20, 2).close()
    box = hsgd.ParameterBox.over(comm, np.zeros(1000, np.float32))
    box.close()
    dist.barrier()
    if "dies" in words:
        if rank == 1:
            os._exit(7)  # the first process of its container cannot kill itself
        try:
            comm.barrier()
        except PeerLost as error:
            print(f"PeerLost: {error}", flush=True)
            os._exit(0)
    print(f"rank {rank} of {size}, local {comm.local_size}: all is well", flush=True)
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
