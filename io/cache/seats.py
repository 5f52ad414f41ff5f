"""The node of each rank, and the part of the stream that it reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..order.epoch_order import part_in_turn
from ..rank_group import RankGroup

__all__ = ["Seats", "seats_of"]


@dataclass(frozen=True)
class Seats:
    """The places of all ranks."""

    nodes: tuple[int, ...]  # of each rank
    numbers: tuple[int, ...]  # of each rank, counted node by node
    local_size: int  # ranks of every node; 1 if nodes have different numbers of ranks

    def part(self, rank: int, epoch: int) -> int:
        """Return the part of the stream that a rank reads if ranks take the parts in turn."""
        return part_in_turn(self.numbers[rank], epoch, len(self.numbers), self.local_size)

    def by_node(self) -> list[list[int]]:
        """Return the ranks of each node; nodes are in the order of their first ranks."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return list(found.values())


def seats_of(world_size: int, local_size: int | None, comm: RankGroup | None) -> Seats:
    """Return the seats of all ranks; collective with `comm`.

    Without `comm` each node has `local_size` consecutive ranks. Raises ValueError if that does not
    divide world_size, or comm has another number of ranks.
    """
    if comm is not None:
        if comm.size != world_size:
            raise ValueError(
                f"world_size is {world_size} and comm has {comm.size} ranks; pass the same"
            )
        nodes = np.asarray(comm.allgather(np.array([comm.cross_rank], np.int64)))
    else:
        each = 1 if local_size is None else local_size
        if each < 1 or world_size % each:
            raise ValueError(
                f"local_size={local_size} of world_size {world_size}; use a divisor of it, the "
                "number of ranks on each node"
            )
        nodes = np.arange(world_size) // each
    order = np.argsort(nodes, kind="stable")
    numbers = np.empty(world_size, np.int64)
    numbers[order] = np.arange(world_size)
    sizes = np.unique(nodes, return_counts=True)[1]
    common = int(sizes[0]) if len(set(sizes.tolist())) == 1 else 1
    return Seats(tuple(nodes.tolist()), tuple(numbers.tolist()), common)
