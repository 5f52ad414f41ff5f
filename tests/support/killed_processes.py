"""Processes that are killed in the midst of their work."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Sequence

__all__ = ["kill_soon"]


def kill_soon(
    commands: Sequence[Sequence[str]], first: str, luck: random.Random, most_s: float
) -> list[str]:
    """Start all, and when each has printed the line `first`, kill one after another, each within
    `most_s`; what they printed meanwhile. One may have ended well before.
    """
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == f"{first}\n"
    printed = []
    for process in processes:
        try:  # a moment for what it does until it is killed
            process.wait(luck.uniform(0, most_s))
        except subprocess.TimeoutExpired:
            process.kill()
        printed.append(process.communicate()[0])
        assert process.returncode in (0, -signal.SIGKILL)
    return printed
