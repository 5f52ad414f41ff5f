"""Calls of other programs for their output: with no input, and with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["answer_of"]


def answer_of(
    words: Sequence[str],
    limit_s: float,
    *,
    folder: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program for its output and exit code; OSError, subprocess.TimeoutExpired; blocking."""
    return subprocess.run(
        list(words),
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )
