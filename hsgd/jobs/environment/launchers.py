"""The table of launchers: the variables with a process's rank and the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FOR_TORCH", "LAUNCHERS", "Launched", "Launcher", "launched", "launched_in", "number"]

_START = "start with `hsgd run -np {}`, or the mpirun of that MPI"


@dataclass(frozen=True)
class Launcher:
    """A row of the table.

    Attributes:
        sizes: variables with the number of ranks, of which the first that is set counts; empty if
            the launcher sets none.
        local_rank: variable with the rank among those of this node.
        local_size: variable with the number of ranks of this node.
        needs: variables without which the others have no meaning.
        least: the first rank of a process that is certainly one of several.
        counts_for_mpi: whether the rank is that of MPI.
        remedy: what to do if MPI sees one rank alone; {} is the number of ranks.
    """

    name: str
    rank: str
    sizes: tuple[str, ...] = ()
    local_rank: str = ""
    local_size: str = ""
    needs: tuple[str, ...] = ()
    least: int = 0
    counts_for_mpi: bool = False
    remedy: str = _START


_TORCHRUN = Launcher(
    "torchrun",
    *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    needs=("TORCHELASTIC_RUN_ID",),
    remedy="leave the communicator out: hsgd.Comm(), hsgd.init()",
)
_HYDRA = Launcher(
    "an mpiexec of MPICH or Intel MPI",
    *("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    counts_for_mpi=True,
)
# One of these may have started another; each starts all ranks of an MPI job itself.
_OF_MPI = (
    Launcher(
        "Open MPI's mpirun",
        *("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        counts_for_mpi=True,
    ),
    Launcher(
        "MVAPICH's launcher",
        *("MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        counts_for_mpi=True,
    ),
    Launcher(
        "jsrun",
        *("JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",)),
        *("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        counts_for_mpi=True,
    ),
    _HYDRA,
)
_HOROVODRUN = Launcher(
    "horovodrun without MPI",
    *("HOROVOD_RANK", ("HOROVOD_SIZE",), "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    remedy="use `horovodrun --mpi`, or `hsgd run -np {}`",
)
_SLURM = Launcher(
    "srun",
    *("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), "SLURM_LOCALID"),
    # An allocation is no launch: a batch script and the shell of salloc are one process each, for
    # any SLURM_NTASKS.
    needs=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    remedy=f"name this MPI's interface (`srun --mpi=list`), or {_START}",
)
# A container or a wrapper may hide the variables of the step; a batch script is task 0.
_SLURM_TASK = Launcher(
    "Slurm",
    *("SLURM_PROCID", (), "SLURM_LOCALID"),  # no size: task 0 would not know that it has one
    needs=("SLURM_NTASKS",),
    least=1,
    remedy=_SLURM.remedy,
)
# They may start the daemons of an mpirun, whose ranks inherit their variables: so they come last.
_OF_CLUSTERS = (
    Launcher(
        "PALS", *("PALS_RANKID", ("PALS_SIZE", "PMI_SIZE"), "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
    ),
    # Flux takes its variables from the script of `flux batch`.
    Launcher("Flux", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID"),
    _SLURM,
    _SLURM_TASK,
)
# Ray Train, SageMaker, Kubeflow. Last: images set them for a node in which mpirun starts ranks.
FOR_TORCH = Launcher(
    "a launcher for torch",
    *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    needs=("WORLD_SIZE",),
    remedy="start with torchrun, mpirun or `hsgd run -np {}`",
)
LAUNCHERS = (
    _TORCHRUN,
    *_OF_MPI,
    _HOROVODRUN,
    *_OF_CLUSTERS,
    Launcher("PMIx", "PMIX_RANK", counts_for_mpi=True),
    # Tasks of blaunch count from 1; a batch script may be the first.
    Launcher("blaunch of LSF", "LSF_PM_TASKID", least=2),
    # Of pbsdsh, and others that ask PBS to start tasks: a batch script runs on node 0.
    Launcher("PBS", "PBS_NODENUM", least=1),
    FOR_TORCH,
)


@dataclass(frozen=True)
class Launched:
    """A launcher's variables for this process; rank and size are None if unset."""

    launcher: Launcher
    rank: int | None
    size: int | None
    told: tuple[str, ...]  # variables and their values

    @property
    def what(self) -> str:
        """The name of the launcher, with its variables."""
        return f"{self.launcher.name} ({', '.join(self.told)})"

    @property
    def names(self) -> str:
        """The names of the variables."""
        return " and ".join(each.partition("=")[0] for each in self.told)

    @property
    def is_alone(self) -> bool:
        """Whether it is the only rank."""
        return self.size == 1


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the innermost launcher that started this process as a rank, or None; local."""
    return next(iter(launched_in(environ)), None)


def launched_in(environ: Mapping[str, str]) -> list[Launched]:
    """Return the launchers that started one another and this process, innermost first; local."""
    found = (
        *(_told(_TORCHRUN, environ), _of_mpi(environ)),
        *(_told(_HOROVODRUN, environ), _of_others(environ)),
    )
    return [each for each in found if each is not None]


def _of_mpi(environ: Mapping[str, str]) -> Launched | None:
    """Return the launcher of an MPI; one that started several ranks, if there is one."""
    found = [each for row in _OF_MPI if (each := _told(row, environ))]
    several = [each for each in found if not each.is_alone]
    if several and any(_disagree(several[0], other) for other in several):
        told = tuple(word for each in several for word in each.told)
        return Launched(several[0].launcher, None, None, told)
    return next(iter(several or found), None)


def _of_others(environ: Mapping[str, str]) -> Launched | None:
    found = [
        each
        for row in LAUNCHERS[LAUNCHERS.index(_HOROVODRUN) + 1 :]
        if (each := _told(row, environ))
    ]
    # `srun -n1` may start a program that starts several ranks for torch.
    if found and found[0].is_alone and found[-1].launcher is FOR_TORCH:
        return found[-1]
    return next(iter(found), None)


def _told(row: Launcher, environ: Mapping[str, str]) -> Launched | None:
    """Return the launch by the variables of one row; None if they are not this process's."""
    rank = number(environ, row.rank)
    size_name = next((name for name in row.sizes if environ.get(name)), "")
    size = number(environ, size_name)
    if any(not environ.get(name) for name in row.needs) or _is_of_another(row, environ):
        return None
    said = rank is not None or row is _TORCHRUN or (row.counts_for_mpi and size is not None)
    if not said or (rank is not None and rank < row.least):
        return None
    names = [*row.needs[:1], row.rank] if row is _TORCHRUN and rank is None else [row.rank]
    told = tuple(f"{name}={environ[name]}" for name in [*names, size_name] if name in environ)
    if rank is not None and size is not None and rank >= size:
        rank = size = None
    return Launched(row, rank, size, told)


def _is_of_another(row: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether another launcher set these variables, or this one for the parent process."""
    if row is _SLURM:
        return _is_in_shell_of_srun(environ)
    if row.rank == "PMIX_RANK":  # `srun --mpi=pmix`
        return environ.get("PMIX_NAMESPACE", "").startswith("slurm.") and (
            "SLURM_STEP_NUM_TASKS" in environ
        )
    if row is not _HYDRA or environ.get("MPI_LOCALRANKID"):  # Hydra's own variable
        return False
    rank, size = environ.get("PMI_RANK"), environ.get("PMI_SIZE")
    return any(
        each.rank in environ
        and rank in (None, environ[each.rank])
        and size in map(environ.get, each.sizes)
        for each in _OF_CLUSTERS
    )


def _is_in_shell_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in the shell of `srun --pty`.

    That step's other tasks have no terminal, and neither have tasks of steps that were started
    there, which inherit the variable.
    """
    if "SLURM_PTY_PORT" not in environ or environ.get("SLURM_PROCID") != "0":
        return False
    return environ.get("SLURM_TASK_PID") != str(os.getpid()) and _has_terminal()


def _has_terminal() -> bool:
    try:
        with open("/proc/self/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2].split()[4] != b"0"
    except OSError:
        return False


def _disagree(one: Launched, other: Launched) -> bool:
    ranks = one.rank != other.rank and None not in (one.rank, other.rank)
    return ranks or (one.size != other.size and None not in (one.size, other.size))


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable that is a whole number; None if it is not, or not set; local."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
