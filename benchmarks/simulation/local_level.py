"""What the ranks of a node add to a collective between nodes, from a measurement.

Owns the two numbers and where they come from: the allreduces on one node that
`benchmarks/plan_calibration.py --constants FILE` measured. Never measures itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MEASURED", "LocalLevel", "read_local_level"]

MEASURED = Path(__file__).resolve().parents[2] / "hsgd/tools/plan/calibration.json"


@dataclass(frozen=True)
class LocalLevel:
    """Seconds of each collective, and of each byte of its vector."""

    seconds: float
    seconds_per_byte: float

    def words(self, crowding: float = 1.0) -> tuple[str, ...]:
        """Arguments of the simulator, where ranks have to share cores as many times."""
        factor = max(1.0, crowding)
        return (
            f"local_s={factor * self.seconds!r}",
            f"local_s_per_byte={factor * self.seconds_per_byte!r}",
        )


def read_local_level(path: Path = MEASURED) -> LocalLevel:
    """The level that explains the allreduces on one node in a file of constants. OSError where
    there is no such file, ValueError naming the file where it has no two of them."""
    with open(path, encoding="utf-8") as file:
        try:
            measured = json.load(file)["measured"]
            times = [(row["bytes"], row["seconds"]) for row in measured if row["nodes"] == 1]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no calibration: {error}") from None
    if len(times) < 2:
        raise ValueError(f"{path} has {len(times)} allreduces on one node; give at least 2 sizes")
    return _fitted(sorted(times))


def _fitted(times: Sequence[tuple[int, float]]) -> LocalLevel:
    """The smallest size says what a call costs, the others what a byte does: the median over sizes,
    as caches make some of them cheaper."""
    least_bytes, seconds = times[0]
    per_byte = [(time - seconds) / (size - least_bytes) for size, time in times[1:]]
    return LocalLevel(seconds, max(0.0, statistics.median(per_byte)))
