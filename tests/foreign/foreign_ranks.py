"""Starts the ranks of foreign_programs.py: processes of their own, perhaps in a sandbox.

Owns the processes until they have ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ranks import meeting_point

__all__ = ["run_ranks"]

PROGRAM = Path(__file__).with_name("foreign_programs.py")
LIMIT_S = 120.0


def run_ranks(
    *words: str, size: int = 2, prefix: Sequence[str] = (), variables: dict[str, str] | None = None
) -> list[str]:
    """What the ranks of foreign_programs.py print; each must end well."""
    path = meeting_point()
    ranks = []
    for rank in range(size):
        command = [sys.executable, str(PROGRAM), path, str(rank), str(size), *words]
        ranks.append(
            subprocess.Popen(
                [*prefix, *command],
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        output = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(output)
    return output
