"""Strategies for data-parallel training, and the cost of each per step on a cluster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hsgd.config import Config
from hsgd.tools.plan.calibration import Calibration
from hsgd.tools.plan.model import Cluster, Prediction, predict_allreduce, seconds_per_byte

__all__ = ["BUCKET_BYTES", "Forecast", "Outlook", "Workload", "forecast"]

BUCKET_BYTES = 25 << 20  # hsgd.torch's bucket_cap_mb
# Backward takes about two thirds of the computation of a step: two matrix products per layer, while
# forward takes one (Kaplan et al., arXiv:2001.08361, section 2.1).
_BACKWARD = 2 / 3
_GOSSIP_RATE = 1 / 13  # docs/gossip.md: accuracy at this rate
_ALIKE = 1.03  # steps that differ by less count as equal
_BEARABLE = 0.1  # exposed communication, as a share of the step


@dataclass(frozen=True)
class Workload:
    """The training.

    Attributes:
        model_bytes: of all gradients, float32.
        compute_s: forward and backward of one step on one rank, seconds; None if unknown.
    """

    model_bytes: int
    compute_s: float | None = None

    def __post_init__(self) -> None:
        if self.model_bytes < 1:
            raise ValueError(f"a model of {self.model_bytes} bytes; give at least 1")
        if self.compute_s is not None and not 0 <= self.compute_s < float("inf"):
            raise ValueError(f"compute takes {self.compute_s} s; give 0 or more")


@dataclass(frozen=True)
class Outlook:
    """A strategy on a cluster. Times in seconds, with bounds; per step, on average."""

    name: str
    how: str
    exact: bool  # trains as one process with the whole batch would
    communication: tuple[float, float, float]  # predicted, low, high
    exposed: tuple[float, float, float]  # not hidden by computation
    sent_bytes: int  # by each node
    memory_bytes: int  # of one node
    # Time of forward and backward from which at most a tenth of the step is exposed.
    suits_from_s: float

    def step(self, compute_s: float) -> tuple[float, float, float]:
        """Return the seconds of a step: predicted, low, high."""
        best, low, high = (compute_s + value for value in self.exposed)
        return best, low, high


@dataclass(frozen=True)
class Forecast:
    """All strategies, and the recommended one; None if the computation is unknown."""

    allreduce: Prediction
    outlooks: list[Outlook]
    choice: Outlook | None


def forecast(cluster: Cluster, workload: Workload, calibration: Calibration) -> Forecast:
    """Predict a step with each strategy; local. Raises ValueError."""
    config = Config.from_env()
    outlooks = [_synchronous(cluster, workload, calibration, config)]
    if cluster.nodes > 1:
        halved = dataclasses.replace(config, wire_dtype="bfloat16")
        if config.wire_dtype == "none":
            outlooks.append(_synchronous(cluster, workload, calibration, halved))
        outlooks.append(_gossip(cluster, workload, calibration, config))
    return Forecast(
        allreduce=_of_gradients(cluster, workload.model_bytes, calibration, config),
        outlooks=outlooks,
        choice=_choose(outlooks, workload),
    )


def _synchronous(
    cluster: Cluster, workload: Workload, calibration: Calibration, config: Config
) -> Outlook:
    """Predict a step that sends buckets during backward, and the last one after it."""
    whole = _of_gradients(cluster, workload.model_bytes, calibration, config)
    last_bytes = min(workload.model_bytes, BUCKET_BYTES)
    last = _of_gradients(cluster, last_bytes, calibration, config)
    hidden_s = _BACKWARD * (workload.compute_s or 0.0)

    def exposed(all_s: float, last_s: float) -> float:
        return max(all_s - hidden_s, last_s)

    narrow = config.wire_dtype != "none"
    return Outlook(
        name=f"allreduce, {config.wire_dtype}" if narrow else "allreduce",
        how=f"HSGD_WIRE_DTYPE={config.wire_dtype}" if narrow else "DistributedOptimizer",
        exact=not narrow,
        communication=(whole.seconds, whole.low, whole.high),
        exposed=(
            exposed(whole.seconds, last.seconds),
            exposed(whole.low, last.low),
            exposed(whole.high, last.high),
        ),
        sent_bytes=whole.sent_bytes,
        memory_bytes=whole.memory_bytes + cluster.ranks_per_node * workload.model_bytes,
        suits_from_s=_suits_from(whole.seconds, last.seconds),
    )


def _of_gradients(
    cluster: Cluster, nbytes: int, calibration: Calibration, config: Config
) -> Prediction:
    return predict_allreduce(cluster, nbytes, calibration, config, in_shared_memory=True)


def _suits_from(all_s: float, last_s: float) -> float:
    """Return the compute time at which exposed = _BEARABLE x (compute + exposed)."""
    odds = (1 - _BEARABLE) / _BEARABLE  # of computation to exposed time
    return max(last_s * odds, all_s / (_BACKWARD + 1 / odds))


def _gossip(
    cluster: Cluster, workload: Workload, calibration: Calibration, config: Config
) -> Outlook:
    """Predict a step of gossip.

    Gradients are averaged inside the node in every step. From time to time the first ranks of two
    nodes average their models, and the other ranks of these nodes wait.
    """
    inside = _synchronous(dataclasses.replace(cluster, nodes=1), workload, calibration, config)
    wire_s = workload.model_bytes * seconds_per_byte(cluster, calibration, senders=1)
    pair_s = _GOSSIP_RATE * (wire_s + calibration.latency_us * 1e-6)
    spread = calibration.spread_large
    pair = (pair_s, pair_s / spread, pair_s * spread)
    return Outlook(
        name="gossip",
        how="Gossip(..., Budget(1/13, steps), hierarchical=True)",
        exact=False,
        communication=_added(inside.communication, pair),
        exposed=_added(inside.exposed, pair),
        sent_bytes=round(_GOSSIP_RATE * workload.model_bytes),
        memory_bytes=inside.memory_bytes,
        suits_from_s=inside.suits_from_s + pair_s * (1 - _BEARABLE) / _BEARABLE,
    )


def _added(
    one: tuple[float, float, float], other: tuple[float, float, float]
) -> tuple[float, float, float]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _choose(outlooks: list[Outlook], workload: Workload) -> Outlook | None:
    """Return the first, most exact outlook with little exposed; else the first of the shortest."""
    compute_s = workload.compute_s
    if compute_s is None:
        return None
    steps = [outlook.step(compute_s)[0] for outlook in outlooks]
    little = [
        outlook.exposed[0] <= _BEARABLE * step
        for outlook, step in zip(outlooks, steps, strict=True)
    ]
    short = [step <= _ALIKE * min(steps) for step in steps]
    return outlooks[(little if any(little) else short).index(True)]
