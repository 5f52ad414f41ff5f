"""What a process makes of the variables of launchers: torchrun's workers meet, ranks that another
launcher started and MPI does not see are refused, and a process that is alone on purpose is not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hsgd import LaunchError
from hsgd.jobs.environment import launcher_variables
from toolkit.processes import run_marked
from torchrun_runs import JOB_S, free_port, here, said, torchrun

__all__: list[str] = []

OPEN_MPI = "Open MPI v5.0.11"


TRAINING = """
import sys, torch
import hsgd.torch as hvd

hvd.init()
net = torch.nn.Linear(3, 2)
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
net(torch.full((2, 3), float(hvd.rank()))).sum().backward()
optimizer.step()
total = hvd.allreduce(net.bias.detach(), op=hvd.Max) - net.bias
over_mpi = "mpi4py.MPI" in sys.modules
print(f"|{hvd.rank()} of {hvd.size()}, {total.tolist()}, {over_mpi}|", flush=True)
"""


@pytest.mark.long
def test_workers_of_torchrun_train_one_model_together_without_mpi(tmp_path: Path) -> None:
    done = torchrun(tmp_path, TRAINING, "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert said(done) == [f"{rank} of 2, [0.0, 0.0], False" for rank in range(2)]


COMMUNICATORS = """
import numpy as np, torch.distributed as dist
import hsgd

hsgd.init()
comm = hsgd.Comm()
dist.init_process_group("hsgd")
sums = [int(each.allreduce(np.ones(1))[0]) for each in (hsgd.world.comm(), comm)]
print(f"|{hsgd.rank()} of {hsgd.size()}, {sums}, {dist.get_rank()}, {comm.mpi}|", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("standalone", [True, False], ids=["standalone", "static port"])
def test_each_communicator_of_torchruns_workers_is_one_of_all(
    tmp_path: Path, standalone: bool
) -> None:
    option = "--standalone" if standalone else f"--master-port={free_port()}"
    done = torchrun(tmp_path, COMMUNICATORS, option, "--nproc-per-node=3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert said(done) == [f"{rank} of 3, [3, 3], {rank}, None" for rank in range(3)]


def start(environ: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
    """A single process that a launcher with these variables seems to have started.

    Open MPI's shared memory is off: a process without its mpirun leaves a file in /dev/shm.
    """
    alone = {"OMPI_MCA_btl": "self", **environ}
    return run_marked([sys.executable, "-c", program], here(**alone), JOB_S)


WORKER = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import hsgd; hsgd.Comm()", "Comm: torchrun's store cannot be reached: "),
        (
            "from mpi4py import MPI; import hsgd; hsgd.Comm(MPI.COMM_WORLD)",
            "torchrun (RANK=0, WORLD_SIZE=4) started 4 ranks, but Open MPI v5.0.11 sees this one "
            "alone, so each would train by itself; leave the communicator out: ",
        ),
    ],
    ids=["several nodes", "COMM_WORLD"],
)
def test_what_torchrun_cannot_do_is_refused_in_one_line(program: str, expected: str) -> None:
    done = start(WORKER, program)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    if "Open MPI" not in last:
        expected = expected.replace(OPEN_MPI, "MPICH Version:")
    assert last.startswith(f"hsgd.errors.LaunchError: {expected}")


BOTH = """
import hsgd, hsgd.torch as hvd
from mpi4py import MPI

for make in (hsgd.Comm, hvd.init, lambda: hvd.init([0]), lambda: hsgd.Comm(MPI.COMM_WORLD.Dup())):
    try:
        make()
    except hsgd.LaunchError as error:
        print(error)
print(hsgd.Comm(MPI.COMM_SELF).size)
"""


def test_a_rank_of_another_mpis_launcher_does_not_train_by_itself() -> None:
    done = start({"PMI_SIZE": "2", "PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, BOTH)
    assert done.returncode == 0, done.stderr
    *refusals, alone = done.stdout.splitlines()
    assert alone == "1"
    assert len(refusals) == 4, done.stdout
    for line in refusals:
        assert "(OMPI_COMM_WORLD_SIZE=2) started 2 ranks, but " in line
        assert "sees this one alone" in line and "`hsgd run -np 2`" in line


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
REFUSED = {
    "mpirun of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "3"}, "Open MPI's mpirun"),
    "mpiexec of MPICH": ({"PMI_SIZE": "3"}, "PMI_SIZE=3"),
    "mpiexec of MPICH within a rank of another": (
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "3"},
        "PMI_SIZE=3",
    ),
    "srun without MPI's interface": ({**STEP, "SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=list"),
    "horovodrun --gloo": ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "horovodrun --mpi"),
    "a launcher for torch": ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0, WORLD_SIZE=2"),
    "torchrun": ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, "torchrun"),
}


@pytest.mark.parametrize("launcher", REFUSED)
def test_a_launcher_that_started_more_ranks_than_mpi_sees_is_named(launcher: str) -> None:
    environ, text = REFUSED[launcher]
    with pytest.raises(LaunchError, match=OPEN_MPI) as raised:
        launcher_variables.refuse_alone(1, OPEN_MPI, environ)
    assert text in str(raised.value) and "\n" not in str(raised.value)


ALONE = {
    "no launcher": {},
    "the shell of salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
    "the script of sbatch": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "srun -n1 in a larger allocation": {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun -n 1 whose daemons are a step of their own": {
        **STEP,
        "SLURM_STEP_NUM_TASKS": "2",
        "OMPI_COMM_WORLD_SIZE": "1",
    },
    "mpiexec -n 1": {"PMI_SIZE": "1", "PMI_RANK": "0"},
    "torchrun with one worker": {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"},
    "a script that sets what gloo needs": {"RANK": "0", "WORLD_SIZE": "1"},
    "a size without a rank, as containers set it": {"WORLD_SIZE": "4"},
    "a variable that is no number": {"PMI_SIZE": "many"},
}


@pytest.mark.parametrize("start", ALONE)
def test_a_process_that_is_alone_on_purpose_is_left_alone(start: str) -> None:
    launcher_variables.refuse_alone(1, OPEN_MPI, ALONE[start])


def test_a_rank_whose_mpi_sees_the_others_is_left_alone() -> None:
    launcher_variables.refuse_alone(
        2, OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "4", "RANK": "0"}
    )


def test_restarts_count_where_one_agent_starts_all_workers() -> None:
    worker = {**WORKER, "TORCHELASTIC_RESTART_COUNT": "3"}
    assert launcher_variables.restarts({**worker, "LOCAL_WORLD_SIZE": "4"}) == 3
    assert (
        launcher_variables.restarts(worker) == 0
    )  # the agents of several nodes may have counted differently
    assert launcher_variables.restarts({"TORCHELASTIC_RESTART_COUNT": "3"}) == 0
