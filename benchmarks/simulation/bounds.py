"""What no algorithm can beat on a simulated network.

Latency, in LogP's terms (Culler et al., "LogP: Towards a Realistic Model of Parallel Computation",
PPoPP 1993): a message keeps its sender busy for o, is under way for L, and keeps its receiver busy
for o'. In time t what one node knows reaches at most n(t) nodes, where n(t) = 1 before o + L + o',
and then n(t - o) + n(t - (o + L + o')) (Karp, Sahay, Santos and Schauser, "Optimal Broadcast and
Summation in the LogP Model", SPAA 1993); read backwards, with o' for o, as many nodes can tell one
node something. Each result here depends on all nodes, or reaches all of them, so that n(t) has to
be the number of nodes. L is that of neighbours; a message to the farthest node is a bound as well.

Bandwidth: what a node at least sends or receives over its link (Chan, Heimlich, Purkayastha
and van de Geijn, "Collective communication: theory, practice, and experience", Concurrency and
Computation 19, 2007, table 1; for an allreduce Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 69, 2009), S being the whole vector and N the nodes:

    broadcast                              S
    allgather, reduce_scatter, alltoall    (N - 1) / N x S
    allreduce                              2 (N - 1) / N x S
    barrier                                0
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .platforms import Platform

__all__ = ["Bound", "bound"]


@dataclass(frozen=True)
class Bound:
    """Seconds that a collective takes at least, for either reason."""

    latency_s: float
    bandwidth_s: float

    @property
    def seconds(self) -> float:
        """Both hold, so the larger one does."""
        return max(self.latency_s, self.bandwidth_s)


def bound(platform: Platform, operation: str, nbytes: int) -> Bound:
    """The bound of one collective on a whole vector of `nbytes`."""
    return Bound(_latency_s(platform), _bandwidth_s(platform, operation, nbytes))


def _latency_s(platform: Platform) -> float:
    link = platform.link
    if platform.nodes == 1:
        return 0.0
    nearest_s, farthest_s = (
        link.send_s + hops * link.hop_s + link.receive_s for hops in platform.hops()
    )
    return max(farthest_s, _spread_s(platform.nodes, nearest_s, min(link.send_s, link.receive_s)))


def _spread_s(nodes: int, message_s: float, busy_s: float) -> float:
    """The least t with n(t) = nodes: the next message is always sent by the node that can first."""
    ready_s = [0.0]  # of the nodes that know: when each can send; a heap
    for _ in range(nodes - 1):
        start_s = heapq.heappop(ready_s)
        heapq.heappush(ready_s, start_s + busy_s)
        heapq.heappush(ready_s, start_s + message_s)
    return start_s + message_s


def _bandwidth_s(platform: Platform, operation: str, nbytes: int) -> float:
    nodes, speed = platform.nodes, platform.link.bytes_per_s
    share = (nodes - 1) / nodes
    of_node = {
        "allreduce": 2 * share,
        "allgather": share,
        "reduce_scatter": share,
        "alltoall": share,
        "broadcast": 1.0 if nodes > 1 else 0.0,
        "barrier": 0.0,
    }[operation]
    return of_node * nbytes / speed
