"""Training with a NotifiedTree over MPI: the program of a rank.

`python tree_programs.py count NETWORK ROOTS PART_BYTES LIBRARY`: the library is preloaded. Training
is ended and taken up again twice, from rank 0's optimizer state. Rank 0 prints its weights, whether
all ranks have the same, how many parameters have momentum, and the collectives of all ranks during
steps, MPI's and hsgd's own.
`python tree_programs.py stalled|killed NETWORK FOLDER`: the last rank stops itself, or ends and
leaves a child of fork behind. The others write into the folder what they are told.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from hsgd import Comm, HsgdError
from hsgd.config import Config
from hsgd.optim import NotifiedTree
from test_tree import MODELS, OPTIMIZERS, STEPS, batch, take_steps

__all__ = ["WITHIN_S"]

STALLED_S = 1.0  # the deadline of waits for a rank that stopped
WITHIN_S = 30.0  # until all have told, on a busy machine


def digest(model: torch.nn.Module) -> int:
    """A number that tells different weights apart."""
    whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return int.from_bytes(hashlib.sha256(whole).digest()[:7], "little")


def count(network: str, roots: str, part_bytes: str, library: str) -> None:
    comm = Comm(config=Config(timeout_s=30.0))
    torch.manual_seed(comm.rank)
    net = MODELS["odd"]()
    collectives = ctypes.CDLL(library).collectives_counted
    assert collectives() > 0, "the counter counts nothing"
    counted, saved = np.zeros(2, np.int64), None
    for part in (range(3), range(3, 5), range(5, STEPS)):
        optimizer = OPTIMIZERS["sgd"](net.parameters())
        if part.start == 3:  # taken up from what the wrapped optimizer of rank 0 has
            optimizer.load_state_dict(saved if comm.rank == 0 else {**saved, "state": {}})
        options = {"network": network, "roots": roots, "part_bytes": int(part_bytes)}
        tree = NotifiedTree(optimizer, net, comm, **options)  # type: ignore[arg-type]
        if part.start == 5:
            tree.load_state_dict(saved)
        scheduler = torch.optim.lr_scheduler.StepLR(tree, 2, 0.5, last_epoch=part.start - 1)
        before = (collectives(), comm.metrics().calls)
        take_steps(tree, scheduler, net, part, comm.rank)
        tree.wait()
        counted += [collectives() - before[0], comm.metrics().calls - before[1]]
        saved = copy.deepcopy(tree.state_dict())
        tree.close()
    digests = comm.allgather(np.array([digest(net)], np.int64))
    counted = comm.allreduce(counted)
    if comm.rank == 0:
        weights = [p.detach().tolist() for p in net.parameters()]
        equal = bool((digests == digests[0]).all())
        momenta = sum("momentum_buffer" in team_of for team_of in saved["state"].values())
        report = {"equal": equal, "counted": counted.tolist(), "momenta": momenta}
        print(json.dumps({"weights": weights, **report}))
    comm.close()


def fall(how: str, network: str, folder: Path) -> None:
    number = signal.SIGSTOP if how == "stalled" else signal.SIGKILL
    comm = Comm(config=Config(timeout_s=20.0))
    net = MODELS["mlp"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    limit_s = STALLED_S if number == signal.SIGSTOP else WITHIN_S
    tree = NotifiedTree(optimizer, net, comm, timeout_s=limit_s, network=network)
    report = {}
    for step in range(1_000_000):
        if step == 5:
            comm.barrier()
            if comm.rank == comm.size - 1:
                if how == "killed" and os.fork() == 0:  # as the worker of a DataLoader
                    wait_for_files(folder, comm.size - 1)
                    os._exit(0)
                os.kill(os.getpid(), number)
                os._exit(1)  # where the launcher wakes it to end it
        begin = time.monotonic()
        x, y = batch(step, comm.rank)
        tree.zero_grad()
        try:
            functional.mse_loss(net(x), y).backward()
            tree.step()
        except HsgdError as error:
            report = {"kind": type(error).__name__, "line": str(error)}
            report["after_s"] = time.monotonic() - begin
            break
    (folder / f"{comm.rank}.part").write_text(json.dumps(report))
    (folder / f"{comm.rank}.part").rename(folder / f"{comm.rank}.json")
    wait_for_files(folder, comm.size - 1)
    os._exit(1)  # MPI cannot be finalized without the victim; mpirun ends what is left


def wait_for_files(folder: Path, count: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while len(list(folder.glob("*.json"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def main() -> None:
    torch.set_num_threads(1)
    how, network, *roots, where = sys.argv[1:]
    if how == "count":
        return count(network, *roots, where)
    fall(how, network, Path(where))


if __name__ == "__main__":
    main()
