"""Each launcher of the table x each way into a job: a process that was started beside others never
goes on as rank 0 of 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hsgd.io.rank_here import rank_here

from hdf5_samples import make_slabs
from hsgd import LaunchError
from hsgd.jobs.environment import launchers
from hsgd.jobs.environment.launchers import LAUNCHERS, launched
from launcher_rows import ROWS, answers_of, variables
from toolkit.processes import run_marked
from torchrun_runs import JOB_S, here

__all__: list[str] = []

OTHERS = {
    "srun --mpi=pmix": (
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=1 PMIX_RANK=1 "
        "PMIX_NAMESPACE=slurm.pmix.7.0",
        (1, 3),
    ),
    "PALS whose PMI tells the size alone": ("PALS_RANKID=1 PMI_SIZE=3", (1, 3)),
    "PALS with its own size": ("PALS_RANKID=1 PALS_SIZE=3", (1, 3)),
    "an elastic worker before init": ("TORCHELASTIC_RUN_ID=hsgd-x", None),
    "PALS without a size": ("PALS_RANKID=0", None),
    "a rank that is not below the size": ("RANK=3 WORLD_SIZE=3", None),
    "two mpiruns that disagree": (
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 PMI_RANK=0 PMI_SIZE=2",
        None,
    ),
    "mpirun whose daemons PALS started": (
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 PALS_RANKID=1 PMI_RANK=1 PMI_SIZE=2",
        (1, 3),
    ),
    "mpiexec in the shell of srun --pty": (
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_PTY_PORT=7 PMI_RANK=1 "
        "PMI_SIZE=3 MPI_LOCALRANKID=1",
        (1, 3),
    ),
    "a program under srun -n1 that starts ranks": (
        "RANK=1 WORLD_SIZE=3 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0",
        (1, 3),
    ),
    "torch's variables of an image": ("PMI_RANK=1 PMI_SIZE=3 RANK=0 WORLD_SIZE=1", (1, 3)),
}
ALONE = {
    "a batch script of PBS": "PBS_NODENUM=0 PBS_TASKNUM=1 PBS_JOBID=7",
    "a batch script of LSF": "LSF_PM_TASKID=1 LSB_JOBID=7 LSB_HOSTS=a",
    "a batch script of Slurm": "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4",
    "flux run of one task": "FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1",
}


def test_each_row_of_the_table_is_tried() -> None:
    assert list(ROWS) == [row.name for row in LAUNCHERS]
    for name, (text, _) in ROWS.items():
        found = launched(variables(text))
        assert found is not None and found.launcher.name == name


@pytest.mark.parametrize("case", ROWS | OTHERS)
def test_the_reader_finds_its_rank_or_refuses(case: str) -> None:
    text, expected = (ROWS | OTHERS)[case]
    environ = variables(text)
    if expected is not None:
        here = rank_here(None, None, None, environ)
        assert (here.rank, here.world_size) == expected
        return
    with pytest.raises(LaunchError, match="each would read all samples") as raised:
        rank_here(None, None, None, environ)
    line = str(raised.value)
    assert text.split()[0] in line and "\n" not in line and "rank= and world_size=" in line


@pytest.mark.parametrize("case", ALONE)
def test_a_process_that_is_alone_reads_everything(case: str) -> None:
    assert rank_here(None, None, None, variables(ALONE[case])).world_size == 1


@pytest.mark.parametrize(
    ("terminal", "is_task", "size"),
    [(True, False, 1), (True, True, 3), (False, False, 3)],
    ids=["in the shell", "in place of the shell", "a step that was started in the shell"],
)
def test_only_what_is_typed_in_the_shell_of_srun_pty_is_alone(
    terminal: bool, is_task: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_has_terminal", lambda: terminal)
    environ = variables(
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=0 SLURM_PTY_PORT=7 PMI_RANK=0 "
        "PMI_SIZE=3"
    )
    environ["SLURM_TASK_PID"] = str(os.getpid() if is_task else 1)
    assert rank_here(None, None, None, environ).world_size == size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_slabs(tmp_path_factory.mktemp("launchers") / "data", 48, 3))


IMAGE = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1"


@pytest.fixture(scope="module")
def answers(folder: str) -> list[dict[str, str | int]]:
    """What each way into a job says, for each row, and for IMAGE."""
    texts = [*(text for text, _ in ROWS.values()), f"{IMAGE} MASTER_PORT=0"]
    return answers_of(folder, texts)


@pytest.mark.parametrize("name", ROWS)
def test_no_way_into_a_job_is_alone(answers: list[dict[str, str | int]], name: str) -> None:
    expected = ROWS[name][1]
    said = dict(answers[list(ROWS).index(name)])
    for way in ("PartitionedLoader", "PartitionedDataset"):
        batches = said.pop(way)
        assert batches == 4 if expected else str(batches).startswith("LaunchError: "), batches
    assert len(said) == 5
    for way, answer in said.items():
        assert isinstance(answer, str) and "\n" not in answer, (way, answer)
        if way in ("Comm", "hsgd.init", "hvd.init"):
            assert answer.startswith("LaunchError: "), answer
    if name not in ("torchrun", "a launcher for torch"):
        assert name in str(said["Comm"]) and "sees this one alone" in str(said["Comm"])


def test_the_backend_refuses_a_job_of_each_rank(answers: list[dict[str, str | int]]) -> None:
    answer = str(answers[-1]["backend"])
    assert answer.startswith('LaunchError: init_process_group("hsgd"): RANK=0 and WORLD_SIZE=1')
    assert "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=3" in answer and "\n" not in answer


ELASTIC = """
import sys
import hsgd.torch as hvd
from hsgd.io import PartitionedLoader

try:
    PartitionedLoader(sys.argv[1], 4)
    print("|made|", flush=True)
except RuntimeError as error:
    print(f"|{type(error).__name__} {'hvd.init()' in str(error)}|", flush=True)
hvd.init()
print(f"|{len(PartitionedLoader(sys.argv[1], 4))} of {hvd.size()}|", flush=True)
hvd.shutdown()
"""


@pytest.mark.long
def test_a_loader_before_init_of_an_elastic_job_is_refused(tmp_path: Path, folder: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    hsgd = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]
    words = ["run", "-np", "2", "--min-np", "2", sys.executable, str(script), folder]
    done: subprocess.CompletedProcess[str] = run_marked([*hsgd, *words], here(), JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    said = sorted(filter(None, (each.strip() for each in done.stdout.split("|"))))
    assert said == ["6 of 2", "6 of 2", "LaunchError True", "LaunchError True"]


def test_ranks_that_mpi_does_not_join_convert_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", number=np.arange(8))
    hsgd = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]
    words = ["data", "convert", str(tmp_path / "a.npz"), str(tmp_path / "out")]
    environ = here(OMPI_MCA_btl="self", **variables("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2"))
    done = run_marked([*hsgd, *words], environ, JOB_S)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("hsgd: error: Flux (FLUX_TASK_RANK=1, FLUX_JOB_SIZE=2) started this ")
    assert not (tmp_path / "out").exists()
