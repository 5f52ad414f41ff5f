"""Other programs that are asked for an answer: started with nothing to read, and with a limit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

__all__ = ["answer_of"]


def answer_of(words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """What a program printed, and its exit code; blocking. Bytes that are no text are replaced.

    Raises OSError where it does not start, subprocess.TimeoutExpired where it takes longer.
    """
    return subprocess.run(
        list(words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )
