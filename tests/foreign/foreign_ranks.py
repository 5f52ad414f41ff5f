"""Starts the ranks of foreign_programs.py: processes of their own, perhaps in a sandbox."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ranks import meeting_point
from toolkit.processes import run_together

__all__ = ["run_ranks"]

PROGRAM = Path(__file__).with_name("foreign_programs.py")
LIMIT_S = 120.0


def run_ranks(
    *words: str, size: int = 2, prefix: Sequence[str] = (), variables: dict[str, str] | None = None
) -> list[str]:
    """What the ranks of foreign_programs.py print; each must end well."""
    start = [*prefix, sys.executable, str(PROGRAM), meeting_point()]
    commands = [[*start, str(rank), str(size), *words] for rank in range(size)]
    ranks = run_together(commands, {**os.environ, **(variables or {})}, LIMIT_S)
    output = [rank.stdout + rank.stderr for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(output)
    return output
