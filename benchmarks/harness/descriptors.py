"""Descriptors of a benchmark with hundreds of ranks: the parent needs more than the usual 1024, the
ranks are to get by with what a user has.

Owns this process's soft limit and what puts a limit around a rank's command. Opens nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

__all__ = ["limited", "raise_limit"]

ENOUGH = 8192  # and no more: some launchers close all that there may be


def raise_limit() -> str:
    """Let this process and the launchers open more; the words of `ulimit` that give ranks the limit
    that was there, or "" where it stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return f"-Sn {soft}"


def limited(command: Sequence[str], ulimit: str) -> tuple[str, ...]:
    """The command with `ulimit ULIMIT` before it; as it is for ""."""
    if not ulimit:
        return tuple(command)
    return ("sh", "-c", f'ulimit {ulimit} && exec "$0" "$@"', *command)
