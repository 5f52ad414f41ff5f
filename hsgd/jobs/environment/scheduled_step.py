"""ScheduledStep: the ranks that `srun`, PALS or Flux started, which may have no MPI."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hsgd.errors import LaunchError
from hsgd.jobs.environment.host_list import expanded
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.jobs.environment.launchers import number

__all__ = ["ScheduledStep", "claim_rank", "pmi_variables", "scheduled_step"]

_claims: dict[tuple[str, int, int], int] = {}  # descriptors by step, rank and process
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

    Raises LaunchError as launched_once().
    """
    found = launched_once(environ)
    if found is None or found.rank is None or found.size is None or found.is_alone:
        return None
    kind = found.launcher.rank
    job = environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    if kind == "SLURM_PROCID" and job:
        names = ("SLURM_CLUSTER_NAME", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        words = ["slurm", job, *(environ.get(name, "0") for name in names)]
        hosts = _of_list(environ.get("SLURM_STEP_NODELIST", ""))
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


def claim_rank(step: ScheduledStep) -> None:
    """Keep other processes of this node from being the same rank; local.

    Children of a rank inherit its variables. Without this they would find one another and train
    by themselves. Raises LaunchError if another process has this rank.
    """
    key = step.name, step.rank, os.getpid()
    if key in _claims:
        return
    name = hashlib.blake2b(f"{step.name} {step.rank}".encode(), digest_size=16).hexdigest()
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0hsgd-{os.geteuid()}-{name}")  # until this process ends
    except OSError:
        claim.close()
        raise LaunchError(
            f"another process of this node is rank {step.rank} of {step.what}, such as the parent "
            "of this one; a process that a rank starts is no rank of the job: unset the "
            "scheduler's variables for it"
        ) from None
    _claims[key] = claim.detach()


def pmi_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables by which a scheduler offers its ranks to an MPI; local."""
    return [name for name in _PMI if name in environ]


def _of_list(text: str) -> tuple[str, ...]:
    try:
        return tuple(expanded("SLURM_STEP_NODELIST", text)) if text else ()
    except LaunchError:  # they are only one of the ways to rank 0
        return ()


def _of_file(path: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text().split() if path else []
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(dict.fromkeys(lines))
