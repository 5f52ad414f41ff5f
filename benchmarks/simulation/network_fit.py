"""The constants of virtual nodes' network, fitted to measured allreduces by simulating them.

Three constants: the share of the link's rate that payload gets, what an end of a message costs, and
what it costs more for each rank per core where ranks outnumber cores and wait for one another.
Simulated times of a few values of these are interpolated, as a run takes about a second; what is
checked is simulated. What the ranks of a node add is taken from the allreduces on one node.

Virtual links are limited by a token bucket (tc-tbf(8); tests/toolkit/virtual_nodes.py), which the
simulator has not: what a link did not carry in a pause passes later at once, up to the bucket. In
calls one after the other a link is busy at least for what it carries, and a pause costs only what
the bucket does not make up for.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.plan_fit import descend

from . import runs
from .platforms import Link, Platform

__all__ = [
    "MEASURED",
    "Constants",
    "Layout",
    "LocalLevel",
    "Surface",
    "fit",
    "read_local_level",
    "surfaces",
]

MEASURED = Path(__file__).resolve().parents[2] / "hsgd/tools/plan/calibration.json"
_HOP_S = 1e-6  # of a virtual link; a few nodes cannot tell it from the cost of a message
_BUCKET_BYTES = 256 << 10
_UNLIMITED = 100.0  # times the rate: what passes while the bucket has tokens
_EFFICIENCIES = (0.9, 1.0)
_MESSAGES_S = tuple(1e-6 * 4**power for power in range(4))  # 1 us to 64 us
_FITTED_BYTES = 1 << 20  # larger ones say no more about the constants, and take longest


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


@dataclass(frozen=True)
class Constants:
    """Efficiency: of the link. message_s: of either end. switch_s: for each rank per core."""

    efficiency: float = 0.95
    message_s: float = 4e-6
    switch_s: float = 4e-6


@dataclass(frozen=True)
class Layout:
    """Virtual nodes that share the cores of one machine, and what was measured on them.

    crowding: ranks per core. seconds: of an allreduce, by bytes.
    """

    name: str
    nodes: int
    ranks_per_node: int
    link_gbit: float
    crowding: float
    seconds: Mapping[int, float]

    def link(self, constants: Constants) -> Link:
        """What messages cost there."""
        message_s = self.message_s(constants)
        speed = constants.efficiency * self.link_gbit * 1e9 / 8
        return Link(bytes_per_s=speed, hop_s=_HOP_S, send_s=message_s, receive_s=message_s)

    def message_s(self, constants: Constants) -> float:
        """What either end of a message costs."""
        waits_s = constants.switch_s * self.crowding if self.crowding > 1 else 0.0
        return constants.message_s + waits_s

    def simulated(
        self, constants: Constants, radix: int, local: LocalLevel, most_bytes: int | None = None
    ) -> Mapping[int, float]:
        """Seconds by bytes, one call after the other."""
        link = self.link(constants)
        words = local.words(self.crowding) if self.ranks_per_node > 1 else ()
        sizes = sorted(n for n in self.seconds if most_bytes is None or n <= most_bytes)

        def rows(bytes_per_s: float) -> list[dict[str, Any]]:
            at = dataclasses.replace(link, bytes_per_s=bytes_per_s)
            network = Platform("crossbar", self.nodes, "", at)
            form = runs.hsgd_form(radix)
            return list(runs.simulate(network, "allreduce", form, sizes, *words, limit_s=120))

        found = {}
        full = rows(link.bytes_per_s)
        for slow, fast in zip(full, rows(_UNLIMITED * link.bytes_per_s), strict=True):
            made_up_s = slow["seconds"] - _BUCKET_BYTES / link.bytes_per_s
            busy_s = slow["sent"] / link.bytes_per_s
            found[slow["bytes"]] = max(made_up_s, busy_s, fast["seconds"])
        return found


@dataclass(frozen=True)
class Surface:
    """Simulated times of one layout over efficiency and cost of a message."""

    layout: Layout
    times: Mapping[tuple[float, float], Mapping[int, float]]

    def seconds(self, constants: Constants, nbytes: int) -> float:
        """Interpolated between the four nearest points, linear in both costs."""
        message_s = min(max(self.layout.message_s(constants), _MESSAGES_S[0]), _MESSAGES_S[-1])
        place = max(1, min(bisect.bisect(_MESSAGES_S, message_s), len(_MESSAGES_S) - 1))
        low_s, high_s = _MESSAGES_S[place - 1 : place + 1]
        up = (message_s - low_s) / (high_s - low_s)
        low, high = _EFFICIENCIES
        across = (1 / constants.efficiency - 1 / low) / (1 / high - 1 / low)
        parts = [
            (1 - across, low, 1 - up, low_s),
            (1 - across, low, up, high_s),
            (across, high, 1 - up, low_s),
            (across, high, up, high_s),
        ]
        return sum(a * b * self.times[point, cost][nbytes] for a, point, b, cost in parts)

    def error(self, constants: Constants) -> float:
        """Sum of the logarithms of factors: a single size that is far off moves little."""
        return sum(
            abs(math.log(self.seconds(constants, size) / seconds))
            for size, seconds in self.layout.seconds.items()
            if size <= _FITTED_BYTES
        )


def surfaces(
    layouts: Sequence[Layout], radix: int, local: LocalLevel, say: Callable[[str], None]
) -> Iterator[Surface]:
    """Simulate what the fit interpolates; half a minute a layout."""
    for layout in layouts:
        say(f"{layout.name}: {len(_EFFICIENCIES) * len(_MESSAGES_S)} simulations")
        times = {
            (efficiency, message_s): layout.simulated(
                Constants(efficiency, message_s, switch_s=0.0), radix, local, _FITTED_BYTES
            )
            for efficiency in _EFFICIENCIES
            for message_s in _MESSAGES_S
        }
        yield Surface(layout, times)


def fit(known: Sequence[Surface]) -> Constants:
    """The constants that explain the layouts."""
    return descend(
        Constants(),
        [field.name for field in dataclasses.fields(Constants)],
        lambda tried: sum(surface.error(tried) for surface in known),
        lambda tried: _EFFICIENCIES[0] <= tried.efficiency <= _EFFICIENCIES[-1],
    )
