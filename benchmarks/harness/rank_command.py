"""How a rank of a benchmark is started: one way for all of them.

Owns the words of the command, and where the benchmarks are. Starts nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["BENCHMARKS", "rank_command"]

BENCHMARKS = Path(__file__).resolve().parents[1]


def rank_command(name: str, *words: str, python: str = sys.executable) -> list[str]:
    """The command of a rank that runs workers.NAME with these words."""
    return [python, str(BENCHMARKS / "rank.py"), name, *words]
