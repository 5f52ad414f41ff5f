"""Predicted time of an allreduce on a cluster.

The core says how a payload is cut and how many rounds it takes (hsgd_plan_allreduce),
calibration.py the costs of rounds, messages and bytes.

The model is that of Hockney ("The communication challenge for MPP", Parallel Computing 20, 1994),
latency + bytes / bandwidth, with a cost per message as in LogP (Culler et al., PPoPP 1993):

    small    rounds x latency + messages x (message + bytes / bandwidth) + local
    large    max(inside, between) + min(inside, between) / steps + 2 x rounds x latency
    inside   ranks x traffic x bytes / (cores x memory bandwidth of a core)
    between  max(sent / bandwidth, sent / sending rate, steps x 2 x messages x message)
    sent     2 (nodes - 1) / nodes x bytes

Over TCP cores send, at the combined rate of the leaders' cores; with RDMA adapters do. The pipeline
hides the shorter of the two levels except for one step. If ranks outnumber cores, a message waits
until its receiver gets a core: `message` grows by `switch` x ranks / cores. Traffic is the bytes
that a rank loads and stores for each byte (docs/performance.md): 5 - 2 / ranks with ordinary
buffers, 2 with buffers in shared memory, or 3 + 1 / ranks with those on several nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsgd.comm.native_options import native_options
from hsgd.config import Config
from hsgd.tools.plan.calibration import Calibration

__all__ = ["Cluster", "Prediction", "predict_allreduce", "seconds_per_byte"]


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike.

    Attributes:
        link_gbit: of a node's network, each way, Gbit/s.
        cores: of a node that its ranks may use.
        rdma: adapters move data between nodes, instead of cores.
    """

    nodes: int
    ranks_per_node: int
    link_gbit: float
    cores: float
    rdma: bool = False

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("ranks per node", self.ranks_per_node)):
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if not self.link_gbit > 0 or not self.cores > 0:
            raise ValueError(
                f"a link of {self.link_gbit:g} Gbit/s and {self.cores:g} cores; give more than 0"
            )


@dataclass(frozen=True)
class Prediction:
    """One allreduce; times in seconds, with bounds that held in the calibration."""

    seconds: float
    low: float
    high: float
    inside_s: float  # of work inside the node
    between_s: float  # of the link
    sent_bytes: int  # by each node
    memory_bytes: int  # of the communicator on one node
    rounds: int
    messages: int
    leaders: int
    steps: int


def predict_allreduce(
    cluster: Cluster,
    nbytes: int,
    calibration: Calibration,
    config: Config | None = None,
    *,
    in_shared_memory: bool = False,
) -> Prediction:
    """Predict a float32 sum of `nbytes` bytes on each rank; local.

    `in_shared_memory`: buffers of Comm.empty, as hsgd.torch's gradients. `config` is by default
    that of the environment. Raises ValueError for numbers that no communicator can have.
    """
    from hsgd import _native

    config = Config.from_env() if config is None else config
    nodes, ranks = cluster.nodes, cluster.ranks_per_node
    plan = _native.plan_allreduce(native_options(config), nodes, ranks, nbytes)
    is_small = plan.steps == 0
    sent_share = 1.0 if config.wire_dtype == "none" or is_small else 0.5
    per_byte_s = seconds_per_byte(cluster, calibration, max(1, plan.leaders))
    crowding = ranks / cluster.cores
    message_s = calibration.message_us * 1e-6
    if crowding > 1:
        message_s += calibration.switch_us * 1e-6 * crowding
    latency_s = plan.rounds * calibration.latency_us * 1e-6
    inside_s = 0.0
    if ranks > 1:
        traffic = 5 - 2 / ranks
        if in_shared_memory and not is_small:
            traffic = 2 if nodes == 1 else 3 + 1 / ranks
        cores = min(ranks, cluster.cores)
        inside_s = ranks * traffic * nbytes / (cores * calibration.core_gb_s * 1e9)
        inside_s += calibration.local_us * 1e-6 * max(1.0, crowding)
    if is_small or nodes == 1:
        sent = float(plan.messages * nbytes)
        between_s = latency_s + plan.messages * message_s + sent * per_byte_s
        seconds = inside_s + between_s
    else:
        sent = 2 * (nodes - 1) / nodes * nbytes * sent_share
        between_s = max(sent * per_byte_s, plan.steps * 2 * plan.messages * message_s)
        hidden_s = min(inside_s, between_s)
        seconds = max(inside_s, between_s) + hidden_s / plan.steps + 2 * latency_s
    spread = calibration.spread_small if is_small else calibration.spread_large
    return Prediction(
        seconds=seconds,
        low=seconds / spread,
        high=seconds * spread,
        inside_s=inside_s,
        between_s=between_s,
        sent_bytes=round(sent),
        memory_bytes=plan.memory_bytes,
        rounds=plan.rounds,
        messages=plan.messages,
        leaders=plan.leaders,
        steps=plan.steps,
    )


def seconds_per_byte(cluster: Cluster, calibration: Calibration, senders: int) -> float:
    """Return the time per byte if `senders` ranks of a node send and receive as many; local."""
    link_s = 8 / (cluster.link_gbit * 1e9 * calibration.efficiency)
    if cluster.rdma:
        return link_s
    return max(link_s, 1 / (min(senders, cluster.cores) * calibration.core_sends_gb_s * 1e9))
