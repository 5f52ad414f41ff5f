"""What a call of hsgd comes to: the error that it must raise, as class and line; and a program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["outcomes_of", "told_by"]


def told_by(call: Callable[[], Any]) -> tuple[str, str]:
    """Class and line of the error that `call` must raise."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


def outcomes_of(
    program: str, *words: str, limit_s: float = 120.0
) -> list[subprocess.CompletedProcess[str]]:
    """How two ranks ended that each run `program` with a Python of its own; arguments: rank, words.

    The standard input of rank 0 ends at once, that of rank 1 when rank 0 has ended.
    """
    commands = [[sys.executable, "-c", program, str(rank), *words] for rank in range(2)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ranks = [subprocess.Popen(command, **pipes, text=True) for command in commands]
    try:
        said = [rank.communicate(timeout=limit_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        subprocess.CompletedProcess(command, rank.returncode, *texts)
        for command, rank, texts in zip(commands, ranks, said, strict=True)
    ]
