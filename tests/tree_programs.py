"""Training with a NotifiedTree over MPI: the program of a rank, `python tree_programs.py COUNTER`.

The library COUNTER is preloaded. Rank 0 prints its weights, whether all ranks have the same, and
the collectives of all ranks between the first step and the last, MPI's and hsgd's own.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys

import numpy as np
import torch
from torch.nn import functional

from hsgd import Comm
from hsgd.config import Config
from hsgd.optim import NotifiedTree
from test_tree import MODELS, OPTIMIZERS, STEPS, batch

__all__: list[str] = []


def digest(model: torch.nn.Module) -> int:
    """A number that tells different weights apart."""
    whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return int.from_bytes(hashlib.sha256(whole).digest()[:7], "little")


def main() -> None:
    torch.set_num_threads(1)
    comm = Comm(config=Config(timeout_s=30.0))
    torch.manual_seed(comm.rank)
    net = MODELS["odd"]()
    tree = NotifiedTree(OPTIMIZERS["sgd"](net.parameters()), net, comm)
    scheduler = torch.optim.lr_scheduler.StepLR(tree, 2, 0.5)
    counter = ctypes.CDLL(sys.argv[1]).collectives_counted
    before = (counter(), comm.counters().calls)
    assert before[0] > 0, "the counter counts nothing"
    for step in range(STEPS):
        net.step = step  # type: ignore[assignment]
        x, y = batch(step, comm.rank)
        tree.zero_grad()
        functional.mse_loss(net(x), y).backward()
        tree.step()
        scheduler.step()
    tree.wait()
    counted = np.array([counter() - before[0], comm.counters().calls - before[1]], np.int64)
    tree.close()
    digests = comm.allgather(np.array([digest(net)], np.int64))
    counted = comm.allreduce(counted)
    if comm.rank == 0:
        weights = [p.detach().tolist() for p in net.parameters()]
        equal = bool((digests == digests[0]).all())
        print(json.dumps({"weights": weights, "equal": equal, "counted": counted.tolist()}))
    comm.close()


if __name__ == "__main__":
    main()
