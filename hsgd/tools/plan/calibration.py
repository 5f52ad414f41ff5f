"""What rounds, messages and bytes cost: the constants of the model, with what they were fitted to.

Owns the file of constants and its checks. Never measures: benchmarks/plan_calibration.py does.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DEFAULT", "Calibration", "read_calibration"]

DEFAULT = Path(__file__).with_name("calibration.json")


@dataclass(frozen=True)
class Calibration:
    """Constants of model.py.

    latency_us: of one round between nodes, microseconds. message_us: what a message costs its
    sender; switch_us: and more for each rank per core where ranks outnumber cores. efficiency: the
    share of the link's bit rate that payload gets. core_gb_s: bytes that a core loads and stores
    per second, 1e9. core_sends_gb_s: bytes that a core sends per second over TCP while as many come
    in, 1e9. local_us: a small collective inside a node, each rank on a core of its own.
    spread_small, spread_large: nine of ten measured cases lie within this factor, either way, of
    what constants fitted to all other layouts predict. source: machine, layouts and command.
    """

    latency_us: float
    message_us: float
    switch_us: float
    efficiency: float
    core_gb_s: float
    core_sends_gb_s: float
    local_us: float
    spread_small: float
    spread_large: float
    source: str

    def __post_init__(self) -> None:
        """Refuse what is no constant of the model: ValueError."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "source":
                continue
            least = 1.0 if field.name.startswith("spread") else 0.0
            if not isinstance(value, int | float) or not least <= value < float("inf"):
                raise ValueError(f"{field.name} is {value!r}; give a number of at least {least:g}")
        for name in ("efficiency", "core_gb_s", "core_sends_gb_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is 0; give a number above 0")


def read_calibration(path: Path = DEFAULT) -> Calibration:
    """Read constants from a JSON file whose "calibration" has them; local.

    Raises OSError where there is no such file, ValueError naming the file where it is none of this
    kind.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return Calibration(**json.load(file)["calibration"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a calibration: {error}") from None
