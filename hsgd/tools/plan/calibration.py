"""Constants of the model: costs of rounds, messages and bytes, and their source."""

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

    Attributes:
        latency_us: of one round between nodes, microseconds.
        message_us: cost of a message for its sender, microseconds.
        switch_us: more cost per message for each rank per core if ranks outnumber cores.
        efficiency: share of the link's bit rate that payload gets.
        core_gb_s: bytes that a core loads and stores per second, 1e9.
        core_sends_gb_s: bytes that a core sends per second over TCP while it receives as many, 1e9.
        local_us: a small collective inside a node, with a core for each rank.
        spread_small: factor, either way, within which nine of ten measured cases lie of the
            prediction by constants that were fitted to all other layouts.
        spread_large: the same for large payloads.
        source: machine, layouts and command.
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
    """Read the "calibration" of a JSON file; local. OSError, or ValueError with its name."""
    with open(path, encoding="utf-8") as file:
        try:
            return Calibration(**json.load(file)["calibration"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a calibration: {error}") from None
