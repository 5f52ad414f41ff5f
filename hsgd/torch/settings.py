"""HorovodSettings: the HOROVOD_* variables that hsgd.torch honours, read once by init().

Names, units and defaults are Horovod 0.28.1's. Others have no meaning here: those of its cycle,
cache, fusion, autotuner and backends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["HorovodSettings", "ignored"]

_IGNORED = (
    *("ADASUM_MPI_CHUNK_SIZE", "AUTOTUNE", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES"),
    *("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "AUTOTUNE_LOG", "AUTOTUNE_STEPS_PER_SAMPLE"),
    *("AUTOTUNE_WARMUP_SAMPLES", "BATCH_D2D_MEMCOPIES", "CACHE_CAPACITY", "CYCLE_TIME"),
    *("DISABLE_GROUP_FUSION", "DISABLE_NVTX_RANGES", "ENABLE_ASYNC_COMPLETION"),
    *("FUSION_THRESHOLD", "HIERARCHICAL_ALLGATHER", "HIERARCHICAL_ALLREDUCE", "LOG_HIDE_TIME"),
    *("LOG_LEVEL", "MPI_THREADS_DISABLE", "NUM_NCCL_STREAMS", "THREAD_AFFINITY"),
    *("TIMELINE_MARK_CYCLES", "TORUS_ALLREDUCE"),
)


@dataclass(frozen=True)
class HorovodSettings:
    """Settings from the environment."""

    stall_check: bool = True
    """HOROVOD_STALL_CHECK_DISABLE: whether to report operations that some rank never submits."""
    stall_warning_s: float = 60.0
    """HOROVOD_STALL_CHECK_TIME_SECONDS: age at which such an operation is reported."""
    stall_shutdown_s: float = 0.0
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: age at which it fails on all ranks; 0 is never."""
    timeline: str | None = None
    """HOROVOD_TIMELINE: file of the timeline, or DYNAMIC to wait for start_timeline()."""
    dynamic_process_sets: bool = False
    """HOROVOD_DYNAMIC_PROCESS_SETS: whether process sets may be added and removed after init()."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> HorovodSettings:
        """Read the environment (default `os.environ`), or raise ValueError naming a variable."""
        environ = os.environ if environ is None else environ
        return cls(
            stall_check=not _flag(environ, "HOROVOD_STALL_CHECK_DISABLE"),
            stall_warning_s=_seconds(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
            stall_shutdown_s=_seconds(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
            timeline=environ.get("HOROVOD_TIMELINE") or None,
            dynamic_process_sets=_flag(environ, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        )


def ignored(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return Horovod's settings in the environment that hsgd.torch ignores, sorted; local."""
    environ = os.environ if environ is None else environ
    return tuple(name for each in _IGNORED if (name := f"HOROVOD_{each}") in environ)


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "").strip().lower() not in ("", "0", "false")


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    text = environ.get(variable, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{variable}={text}: expected seconds from 0")
    return seconds
