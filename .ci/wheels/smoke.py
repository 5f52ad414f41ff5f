"""Tries an installed hsgd: each row of the README's table, in a few seconds each.

Use: python smoke.py first | all [--mpich FOLDER]. "first" is one allreduce of two ranks without
MPI. Uses nothing but what is installed; exits with 1 at the first row that fails.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__: list[str] = []

LIMIT_S = 120
HSGD = str(Path(sys.executable).with_name("hsgd"))
MPIRUN = str(Path(sys.executable).with_name("mpirun"))
OPERATORS = """
from hsgd.operators import kernels, schemas
schemas.define()
assert not kernels.why_in_python(), kernels.why_in_python()
"""
LOCAL = """
import os, secrets, numpy as np, hsgd
path, rank = "@hsgd-smoke-" + secrets.token_hex(16), 0
if (child := os.fork()) == 0:
    rank = 1
with hsgd.Comm.local(path, rank, 2) as comm:
    assert (comm.allreduce(np.full(1000, rank + 1.0), op="sum") == 3).all()
if rank == 0:
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0)
"""
HOROVOD = """
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(100, 100)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 100), hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
assert hvd.size() == 2
weights = hvd.allgather(model.weight.detach()[:1])
assert torch.equal(weights[0], weights[1])
"""
BACKEND = """
import os, sys, torch, torch.distributed as dist
for ours, theirs in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE")):
    os.environ.setdefault(ours, os.environ.get("OMPI_COMM_WORLD_" + theirs, ""))
dist.init_process_group(sys.argv[1])
total = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(total)
assert (total == 3).all() and dist.get_world_size() == 2
dist.destroy_process_group()
"""
COMM = """
import numpy as np, hsgd
from mpi4py import MPI
with hsgd.Comm(MPI.COMM_WORLD) as comm:
    assert comm.size == 2
    assert (comm.allreduce(np.full(3000, comm.rank + 1.0), op="sum") == 3).all()
"""
INTERPOSED = """
import numpy as np
from mpi4py import MPI
from hsgd.metrics import interposer_counters
world = MPI.COMM_WORLD
total = np.empty(3000)
world.Allreduce(np.full(3000, world.rank + 1.0), total)
assert world.size == 2 and (total == 3).all() and interposer_counters().calls == 1
"""
READER = """
import sys
from hsgd.io import PartitionedLoader
loader = PartitionedLoader(sys.argv[1], 32, 0, 2)
assert len(loader) > 10 and sum(len(next(iter(batch.values()))) for batch in loader) > 300
"""
OPTIMIZERS = """
import torch, hsgd, hsgd.torch as hvd
from hsgd.optim import LARS, Budget, Gossip
hvd.init()
model = torch.nn.Linear(50, 50)
lars = LARS(model.parameters(), lr=0.1)
model(torch.ones(2, 50)).sum().backward()
lars.step()
plain = torch.optim.SGD(model.parameters(), lr=0.1)
with hsgd.Comm() as comm:
    gossip = Gossip(plain, model.parameters(), comm, Budget(0.5, 20))
    for step in range(20):
        gossip.step()
    gossip.settle()
    gossip.close()
plain = torch.optim.SGD(torch.nn.Linear(50, 50).parameters(), lr=0.1)
hvd.DistributedOptimizer(plain, node_shared=True).step()
"""


def _check(name: str, words: list[str], *, text: str = "", **env: str) -> None:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(text)
        done = subprocess.run(
            [str(file) if word == "PROGRAM" else word for word in words],
            env={
                **os.environ,
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                **env,
            },
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    if done.returncode != 0:
        sys.exit(
            f"{name}: {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    print(f"{name:<58} ok {time.monotonic() - begin:6.1f} s", flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _all(mpich: Path | None) -> None:
    python = sys.executable
    ranks = ["run", "-np", "2"]
    mpirun = [MPIRUN, "-np", "2", "--oversubscribe", "--bind-to", "none", python, "PROGRAM"]
    _check(
        "hsgd run --horovod: a Horovod script, no Horovod",
        [HSGD, *ranks, "--horovod", python, "PROGRAM"],
        text=HOROVOD,
    )
    _check(
        'hsgd run --gloo: a program that says "gloo"',
        [HSGD, *ranks, "--gloo", python, "PROGRAM", "gloo"],
        text=BACKEND,
    )
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "PROGRAM", "hsgd"]
    _check('init_process_group("hsgd") under torchrun', torchrun, text=BACKEND)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    _check('init_process_group("hsgd") under mpirun', [*mpirun, "hsgd"], text=BACKEND, **meeting)
    _check("Comm.local without MPI", [python, "PROGRAM"], text=LOCAL)
    _check("Comm over Open MPI", mpirun, text=COMM)
    library = subprocess.run(
        [HSGD, "preload", "--abi", "openmpi"], capture_output=True, text=True, check=True
    )
    _check(
        "an MPI program of Open MPI, interposed",
        mpirun,
        text=INTERPOSED,
        LD_PRELOAD=library.stdout.strip(),
    )
    if mpich is not None:
        other = [str(mpich / "bin/mpiexec"), "-n", "2", python, "PROGRAM"]
        env = {"LD_LIBRARY_PATH": str(mpich / "lib"), "MPI4PY_MPIABI": "mpich"}
        _check("Comm over MPICH", other, text=COMM, **env)
        library = subprocess.run(
            [HSGD, "preload", "--abi", "mpich"],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=True,
        )
        _check(
            "an MPI program of MPICH, interposed",
            other,
            text=INTERPOSED,
            **env,
            LD_PRELOAD=library.stdout.strip(),
        )
    with tempfile.TemporaryDirectory() as folder:
        _check("hsgd data convert", [HSGD, "data", "convert", "digits", f"{folder}/digits"])
        _check("PartitionedLoader", [python, "PROGRAM", f"{folder}/digits/train"], text=READER)
    _check("LARS, Gossip, node_shared", [HSGD, *ranks, python, "PROGRAM"], text=OPTIMIZERS)
    _check("hsgd info: nothing stops use", [HSGD, "info"])
    _check("hsgd.operators without Python", [python, "PROGRAM"], text=OPERATORS)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("first", "all"))
    parser.add_argument("--mpich", type=Path, help="an installation of MPICH to try as well")
    arguments = parser.parse_args()
    if arguments.what == "first":
        _check("the first allreduce", [sys.executable, "PROGRAM"], text=LOCAL)
    else:
        _all(arguments.mpich)


if __name__ == "__main__":
    _main()
