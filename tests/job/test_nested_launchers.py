"""Launchers in one another: if each of several tasks starts a job of its own, every way into a job
refuses; what makes one job of them works.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from hdf5_samples import make_slabs
from hsgd import LaunchError
from hsgd.jobs.environment.launched_once import launched_once
from launcher_rows import ROWS, answers_of, variables
from toolkit.processes import run_marked
from torchrun_runs import JOB_S, here

__all__: list[str] = []

TORCHRUN = "TORCHELASTIC_RUN_ID=x RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={size}"
INNER = {
    "a torchrun of one rank": TORCHRUN.format(rank=0, size=1) + " LOCAL_WORLD_SIZE=1",
    "a torchrun of one agent": TORCHRUN.format(rank=2, size=4) + " LOCAL_WORLD_SIZE=4",
    "horovodrun of one rank": "HOROVOD_RANK=0 HOROVOD_SIZE=1",
    "mpirun of one rank": "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
    "mpiexec of one rank": "PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0",
}
OUTER = [name for name in ROWS if name not in ("torchrun", "a launcher for torch")]
OF_MPI = ("Open MPI's mpirun", "MVAPICH's launcher", "jsrun", "an mpiexec of MPICH or Intel MPI")
PAIRS = [
    (inner, outer)
    for inner in INNER
    for outer in OUTER
    if inner.startswith("a torchrun")
    or (
        outer not in (*OF_MPI, "horovodrun without MPI", "PMIx")
        and (inner, outer) != ("mpiexec of one rank", "PALS")  # whose PMI_SIZE is hidden
    )
]


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_a_job_of_one_task_in_several_is_refused(
    inner: str, outer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsgd.jobs.environment.launched_once._has_mpirun_above", lambda: True)
    own, outside = variables(INNER[inner]), variables(ROWS[outer][0])
    with pytest.raises(LaunchError) as raised:
        launched_once({**outside, **own})
    line = str(raised.value)
    assert "\n" not in line and f"tasks of {outer} (" in line
    told = line.partition(" unset ")[2].split(", ")
    assert told and not {*told} & {*own}
    launched_once({name: value for name, value in {**outside, **own}.items() if name not in told})


SRUN = "SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS={size}"
ONE_JOB = {
    "srun -n1 torchrun --nproc-per-node=4": f"{INNER['a torchrun of one agent']} "
    + SRUN.format(rank=0, size=1),
    "srun -n2 torchrun --nnodes=2 --nproc-per-node=4": TORCHRUN.format(rank=5, size=8)
    + " LOCAL_WORLD_SIZE=4 "
    + SRUN.format(rank=1, size=2),
    "srun -n2 torchrun --nnodes=2 --nproc-per-node=1": TORCHRUN.format(rank=1, size=2)
    + " LOCAL_WORLD_SIZE=1 "
    + SRUN.format(rank=1, size=2),
    "mpirun -np 1 torchrun --nproc-per-node=4": f"{INNER['a torchrun of one agent']} "
    + "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
    "torchrun in an allocation": f"{INNER['a torchrun of one rank']} SLURM_JOB_ID=7 SLURM_PROCID=0 "
    + "SLURM_NTASKS=4",
    "torchrun in an mpirun of one rank whose daemon srun started": (
        f"{INNER['a torchrun of one rank']} {INNER['mpirun of one rank']} "
        + SRUN.format(rank=2, size=4)
    ),
    "PALS that tells no size": f"{INNER['a torchrun of one rank']} PALS_RANKID=0",
    "an elastic worker before init": "TORCHELASTIC_RUN_ID=hsgd-x SLURM_PROCID=1 SLURM_NTASKS=2",
    "flux start under srun": f"FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1 {SRUN.format(rank=1, size=2)}",
}


@pytest.mark.parametrize("case", ONE_JOB)
def test_what_makes_one_job_is_left_alone(case: str) -> None:
    launched_once(variables(ONE_JOB[case]))


CHECK = """
import os
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.errors import LaunchError
try:
    launched_once()
    print("one job")
except LaunchError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["mpirun", "orted"])
def test_the_mpirun_of_each_task_is_told_from_a_daemon_of_one_outside(
    tmp_path: Path, name: str
) -> None:
    """Only the mpirun itself is a parent on this host if each task started one."""
    shutil.copy(shutil.which("sh") or "/bin/sh", tmp_path / name)
    text = f"{INNER['mpirun of one rank']} {SRUN.format(rank=1, size=2)}"
    words = [str(tmp_path / name), "-c", '"$0" -c "$1"; true', sys.executable, CHECK]
    done = run_marked(words, here(**variables(text)), JOB_S)
    expected = "one of 2 tasks of srun (SLURM_PROCID=1" if name == "mpirun" else "one job"
    assert expected in done.stdout, done.stderr


def test_no_way_into_a_job_goes_on_in_a_nested_one(tmp_path: Path) -> None:
    folder = str(make_slabs(tmp_path / "data", 48, 3))
    address = "MASTER_ADDR=127.0.0.1 MASTER_PORT=0"
    texts = [f"{INNER['a torchrun of one rank']} {ROWS['srun'][0]} {address}"]
    (said,) = answers_of(folder, texts)
    assert len(said) == 7
    assert str(said.pop("strategy")).startswith("ValueError: ")  # before hvd.init()
    for way, answer in said.items():
        assert str(answer).startswith("LaunchError: torchrun (RANK=0, WORLD_SIZE=1) "), (
            way,
            answer,
        )
        assert "srun (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=3)" in str(answer), (way, answer)


@pytest.mark.long
@pytest.mark.parametrize("call", ['dist.init_process_group("hsgd")', "hsgd.Comm()"])
@pytest.mark.parametrize(("tasks", "ranks"), [(2, 1), (2, 2), (1, 2)])
def test_workers_of_a_torchrun_in_each_task(
    tmp_path: Path, call: str, tasks: int, ranks: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import hsgd\nimport torch.distributed as dist\n{call}\nprint('joined')")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    words.insert(-1, f"--nproc-per-node={ranks}")
    environ = here(**variables(SRUN.format(rank=tasks - 1, size=tasks)))
    done = run_marked(words, environ, JOB_S)
    if tasks == 1:
        assert done.returncode == 0 and done.stdout.count("joined") == ranks, done.stderr
    else:
        assert done.returncode == 1 and "joined" not in done.stdout
        assert "in one of 2 tasks of srun (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2)" in done.stderr


@pytest.mark.parametrize("words", [["run", "-np", "2", "true"], ["data", "convert", "a", "b"]])
def test_commands_that_start_or_share_work_are_refused(words: list[str]) -> None:
    hsgd = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]
    text = f"{INNER['a torchrun of one rank']} {SRUN.format(rank=1, size=2)}"
    done = run_marked([*hsgd, *words], here(**variables(text)), JOB_S)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("hsgd: error: torchrun (RANK=0, WORLD_SIZE=1) started 1 rank of this ")
