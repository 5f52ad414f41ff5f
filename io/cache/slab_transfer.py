"""Transfers of slabs from the memory of one node to another, by a communicator instead of files.

Slabs change places while all memory is in use. So they are sent piece by piece, the same piece of
all slots at once: a slot's bytes are sent just before others arrive there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..rank_group import RankGroup

__all__ = ["NodeSlot", "SlabTransfer", "plan_transfers", "transfer_slabs"]

_ROUND_BYTES = 32 << 20  # that a rank sends, and gets, at once
_LEAST_BYTES = 64 << 10  # of one slot
_PAGE = 4096


@dataclass(frozen=True)
class NodeSlot:
    """One slot of one node."""

    node: int
    slot: int


@dataclass(frozen=True)
class SlabTransfer:
    """A transfer of a slab from the slot `start` to the slot `to`."""

    start: NodeSlot
    to: NodeSlot


def plan_transfers(
    contents: Sequence[Sequence[int]], good: NDArray[np.uint8], coming: Sequence[dict[int, int]]
) -> list[SlabTransfer]:
    """Return the transfers for all slabs in `coming` that some node holds.

    Each slab comes from the next node that has it, so that all nodes send as much as they receive
    if slabs go round.

    Args:
        contents: slab by node and slot, -1 for an empty slot.
        good: by node and slot, 0 if the slab there is not whole.
        coming: by node, slot -> slab.
    """
    where = [
        {slab: slot for slot, slab in enumerate(held) if slab >= 0 and good[node, slot]}
        for node, held in enumerate(contents)
    ]
    found = []
    for node, slots in enumerate(coming):
        others = [(node + step) % len(contents) for step in range(1, len(contents))]
        for slot, slab in slots.items():
            holder = next((other for other in others if slab in where[other]), None)
            if holder is not None:
                found.append(
                    SlabTransfer(NodeSlot(holder, where[holder][slab]), NodeSlot(node, slot))
                )
    return found


def transfer_slabs(
    comm: RankGroup,
    memory: NDArray[np.uint8],
    transfers: Sequence[SlabTransfer],
    owner: Callable[[NodeSlot], int],
) -> int:
    """Make all transfers at once and return the bytes that this rank got; collective, blocking.

    `memory` is that of this node, (slots, bytes). `transfers` are the same on all ranks, at least
    one. `owner` returns the one rank that reads and writes a slot meanwhile.
    """
    ends = [(owner(transfer.start), owner(transfer.to)) for transfer in transfers]
    # Both lists are in the order of alltoall: by rank, and for one rank in that of the transfers.
    leaving = sorted((to, n) for n, (start, to) in enumerate(ends) if start == comm.rank)
    coming = sorted((start, n) for n, (start, to) in enumerate(ends) if to == comm.rank)
    busiest = max(np.bincount(np.array(ends)[:, column]).max() for column in range(2))
    piece = max(_LEAST_BYTES, _ROUND_BYTES // int(busiest) // _PAGE * _PAGE)
    counts = np.bincount(np.array([to for to, _ in leaving], np.int64), minlength=comm.size)
    from_slots = np.array([transfers[n].start.slot for _, n in leaving], np.int64)
    to_slots = [transfers[n].to.slot for _, n in coming]
    for low in range(0, memory.shape[1], piece):
        part = memory[:, low : low + piece]
        sent = part[from_slots].reshape(-1)  # a copy
        got, _ = comm.alltoall(sent, (counts * part.shape[1]).tolist())
        arrived = got.reshape(len(to_slots), part.shape[1])
        for slot, row in zip(to_slots, arrived, strict=True):
            part[slot] = row
    return len(to_slots) * int(memory.shape[1])
