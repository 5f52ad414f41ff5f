"""A run that is ended early, by Ctrl-C or SIGTERM (`timeout`), keeps what had been measured."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Stopped", "end_process", "keeping"]


@dataclass
class Stopped:
    """Why a run ended."""

    code: int = 0
    """130 after Ctrl-C, 143 after SIGTERM, 0 when it came to its end."""


@contextlib.contextmanager
def keeping() -> Iterator[Stopped]:
    """A context in which a benchmark measures: it leaves early, through all its `finally`, instead
    of ending the program. SIGTERM is handled so from then on. What had been measured is to be shown
    and written, and the exit code to be that of `Stopped`.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stopped = Stopped()
    try:
        yield stopped
    except KeyboardInterrupt:
        stopped.code = 130
    except SystemExit as request:
        stopped.code = int(request.code or 1)
    if stopped.code:
        print("interrupted; this is what had been measured", file=sys.stderr)


def end_process(process: subprocess.Popen[Any], grace_s: float) -> None:
    """Ask a process to end, and kill it where it has not after so long; blocking."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
