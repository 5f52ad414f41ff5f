"""Variables of launchers, and what each way into a job says when it finds them.

Owns one row for each of the table in hsgd.jobs.environment.launchers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from toolkit.processes import run_marked
from torchrun_runs import JOB_S, here

__all__ = ["ROWS", "answers_of", "variables"]

# Rank 1 of 3: variables, and what the loader finds; None where no variable has the size.
ROWS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "torchrun": ("TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=3", (1, 3)),
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 PMIX_RANK=1", (1, 3)),
    "MVAPICH's launcher": ("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=3", (1, 3)),
    "jsrun": ("JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=3 PMIX_RANK=1", (1, 3)),
    "an mpiexec of MPICH or Intel MPI": ("PMI_RANK=1 PMI_SIZE=3 MPI_LOCALRANKID=1", (1, 3)),
    "horovodrun without MPI": ("HOROVOD_RANK=1 HOROVOD_SIZE=3", (1, 3)),
    "PALS": ("PALS_RANKID=1 PMI_SIZE=3 PMI_RANK=1", (1, 3)),
    "Flux": ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=3", (1, 3)),
    "srun": ("SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=1", (1, 3)),
    "Slurm": ("SLURM_PROCID=1 SLURM_NTASKS=3", None),
    "PMIx": ("PMIX_RANK=1", None),
    "blaunch of LSF": ("LSF_PM_TASKID=2", None),
    "PBS": ("PBS_NODENUM=1 PBS_TASKNUM=1", None),
    "a launcher for torch": ("RANK=1 WORLD_SIZE=3", (1, 3)),
}


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
from mpi4py import MPI
import hsgd, hsgd.torch as hvd
from hsgd.io import PartitionedDataset, PartitionedLoader

ways = {
    "Comm": lambda: hsgd.Comm().size,
    "hsgd.init": lambda: (hsgd.init(), hsgd.size())[1],
    "hvd.init": lambda: (hvd.init(), hvd.size())[1],
    "backend": lambda: (dist.init_process_group("hsgd"), dist.get_world_size())[1],
    "strategy": lambda: hvd.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), strategy="gossip"
    ),
    "PartitionedLoader": lambda: len(PartitionedLoader(sys.argv[1], 4, pad=False)),
    "PartitionedDataset": lambda: len(PartitionedDataset(sys.argv[1], 4, pad=False)),
}
def try_all():
    said = {}
    for name, way in ways.items():
        try:
            said[name] = way()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said

for environ in json.loads(sys.argv[2]):  # no way in is taken: nothing is left of the one before
    os.environ.update(environ)
    print(json.dumps(try_all()), flush=True)
    for name in environ:
        del os.environ[name]
"""


def answers_of(folder: str, texts: Sequence[str]) -> list[dict[str, str | int]]:
    """What each way into a job says, for each text of variables. folder: of slabs, 48 samples."""
    given = json.dumps(list(map(variables, texts)))
    done = run_marked(
        [sys.executable, "-c", PROGRAM, folder, given], here(OMPI_MCA_btl="self"), JOB_S
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(texts), done.stderr
    return list(map(json.loads, lines))
