"""ScheduledStep: the ranks that `srun`, PALS or Flux started, which may have no MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hsgd.jobs.environment.host_list import expanded
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.jobs.environment.launchers import number

__all__ = ["ScheduledStep", "pmi_variables", "scheduled_step"]

_PMI = ("PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PMIX_NAMESPACE")


@dataclass(frozen=True)
class ScheduledStep:
    """One launch of a scheduler.

    Attributes:
        name: the same for all its ranks, and for no other launch of this user; a file name.
        what: the launcher with its variables, for messages.
        hosts: of its nodes, first that of rank 0; empty if the variables do not name them.
        is_on_one_node: whether that is certain.
    """

    name: str
    what: str
    rank: int
    size: int
    hosts: tuple[str, ...]
    is_on_one_node: bool


def scheduled_step(environ: Mapping[str, str] = os.environ) -> ScheduledStep | None:
    """Return the launch with several ranks that this process belongs to, or None; local.

    Raises LaunchError as launched_once(), and for a list of hosts that cannot be read.
    """
    found = launched_once(environ)
    if found is None or found.rank is None or found.size is None or found.is_alone:
        return None
    kind = found.launcher.rank
    job = environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    if kind == "SLURM_PROCID" and job:
        names = ("SLURM_CLUSTER_NAME", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        words = ["slurm", job, *(environ.get(name, "0") for name in names)]
        nodes = environ.get("SLURM_STEP_NODELIST", "")
        hosts = tuple(expanded(f"SLURM_STEP_NODELIST={nodes}", nodes)) if nodes else ()
        is_on_one_node = number(environ, "SLURM_STEP_NUM_NODES") == 1
    elif kind == "PALS_RANKID" and environ.get("PALS_APID"):
        words = ["pals", environ["PALS_APID"]]
        hosts = _of_file(environ.get("PBS_NODEFILE", ""))
        is_on_one_node = number(environ, "PALS_LOCAL_SIZE") == found.size
    elif kind == "FLUX_TASK_RANK" and environ.get("FLUX_JOB_ID"):
        words, hosts, is_on_one_node = ["flux", environ["FLUX_JOB_ID"]], (), False
    else:
        return None
    name = re.sub(r"[^A-Za-z0-9.-]", "_", "-".join(words))
    return ScheduledStep(name, found.what, found.rank, found.size, hosts, is_on_one_node)


def pmi_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables by which a scheduler offers its ranks to an MPI; local."""
    return [name for name in _PMI if name in environ]


def _of_file(path: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text().split() if path else []
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(dict.fromkeys(lines))
