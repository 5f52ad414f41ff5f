"""When the scheduler ends this job: Slurm, PBS and Flux are asked by their own commands."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hsgd.base.programs import answer_of
from hsgd.errors import LaunchError

__all__ = ["left_s", "scheduler_says", "slurm_job"]

_ASK_S = 20.0  # a busy controller of Slurm may take long


def slurm_job(environ: Mapping[str, str]) -> str:
    """Return the name of this job, or task of an array, for Slurm's commands; "" without; local."""
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID", "")


def _of_slurm(text: str) -> float | None:
    """Read squeue's %L: "1-02:03:04", "02:03:04", "3:04", UNLIMITED or NOT_SET."""
    if text.strip() in ("UNLIMITED", "NOT_SET", "INVALID", "N/A"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?((?:\d+:){0,2}\d+)", text.strip())
    if found is None:
        raise ValueError(text)
    seconds = 0
    for part in found[2].split(":"):
        seconds = 60 * seconds + int(part)
    if found[1] and found[2].count(":") < 2:  # "1-02" are hours, "1-02:03" hours and minutes
        seconds *= 60 ** (2 - found[2].count(":"))
    return 86400.0 * int(found[1] or 0) + seconds


def _of_pbs(text: str) -> float | None:
    """Read `qstat -f`: the limit and what is used of it."""
    limit = re.search(r"Resource_List\.walltime = ([\d:]+)", text)
    used = re.search(r"resources_used\.walltime = ([\d:]+)", text)
    if limit is None:
        return None
    spent = _of_slurm(used[1]) if used else 0.0
    return (_of_slurm(limit[1]) or 0.0) - (spent or 0.0)


def _of_flux(text: str) -> float | None:
    """Read `flux job timeleft`: seconds, or "infinity"."""
    seconds = float(text)
    return None if math.isinf(seconds) else seconds


@dataclass(frozen=True)
class _Scheduler:
    """A row of the table.

    Attributes:
        job: returns the job's name from the variables, "" without.
        command: gets that name.
        read: returns seconds from the answer, None: no limit; ValueError.
    """

    job: Callable[[Mapping[str, str]], str]
    command: str
    read: Callable[[str], float | None]


_SCHEDULERS = (
    _Scheduler(slurm_job, "squeue --noheader --format=%L --jobs={}", _of_slurm),
    _Scheduler(lambda environ: environ.get("PBS_JOBID", ""), "qstat -f {}", _of_pbs),
    _Scheduler(lambda environ: environ.get("FLUX_JOB_ID", ""), "flux job timeleft {}", _of_flux),
)


def left_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds until the scheduler ends this job; None: there is no limit or scheduler.

    Local, blocks for up to 20 s. Raises LaunchError if the scheduler does not answer.
    """
    for scheduler in _SCHEDULERS:
        job = scheduler.job(environ)
        if not job:
            continue
        words = [word.format(job) for word in scheduler.command.split()]
        answer = scheduler_says(*words)
        try:
            return scheduler.read(answer)
        except ValueError:
            text = answer.strip()[:80]
            raise LaunchError(f"{' '.join(words)} says {text!r}, no time that is left") from None
    return None


def scheduler_says(*words: str) -> str:
    """Return what a scheduler's command prints; local, blocks for up to 20 s.

    Raises LaunchError if it fails or does not answer.
    """
    try:
        done = answer_of(words, _ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(words)}: {error}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise LaunchError(f"{' '.join(words)}: {said[0]}")
    return done.stdout
