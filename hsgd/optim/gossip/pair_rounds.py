"""PairRounds: rounds in which ranks meet in pairs and swap vectors.

All ranks derive a round's pairs from its number. Each partner writes its vectors into the other's
segment with the round as version, and writes no new ones before it learns that they were taken.
Vectors that arrive after their round are dropped.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.errors import CollectiveTimeout, PeerLost
from hsgd.onesided.notified_window import NotifiedWindow
from hsgd.optim.flat_vectors import Places
from hsgd.optim.gossip.pair_averaging import LEFT, Traffic

__all__ = ["PairRounds", "partner_of"]

_LOOK_S = 0.05  # between checks whether a wait was stopped
_GONE = 1 << 62  # a rank that leaves adds it to its last round


def partner_of(rank: int, size: int, number: int, seed: int) -> int | None:
    """Return a rank's partner in a round; None for the odd rank out; local."""
    order = list(range(size))
    random.Random(f"{seed} round {number}").shuffle(order)
    place = order.index(rank) ^ 1
    return order[place] if place < size else None


class PairRounds:
    """Swaps vectors in pairs; made collectively, blocking. swap() waits for the partner only.

    Args:
        like: 1-d CPU tensors with the sizes and dtypes of what is swapped, equal on all ranks. Each
            rank holds a place for each other rank.
        timeout_s: limit of close() for undelivered data.
        remote_only: use sockets inside the node too, for tests.
    """

    def __init__(
        self, comm: Comm, like: Sequence[Tensor], timeout_s: float, *, remote_only: bool = False
    ) -> None:
        self._rank, self._size, self._timeout_s = comm.rank, comm.size, timeout_s
        self._nodes = list(range(comm.size)) if remote_only else comm.nodes
        self._places = Places(like)
        self._window = NotifiedWindow(
            comm,
            comm.size * self._places.nbytes,
            2 * comm.size,
            queue=8 * comm.size + 8,
            timeout_s=timeout_s,
            remote_only=remote_only,
            network="sockets",
            forgiving=True,  # a stopped partner breaks nothing
        )
        self._memory = torch.from_numpy(self._window.segment())
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        for rank in others:
            self._window.bind(self._sent_slot(rank), rank)
            self._window.bind(self._taken_slot(rank), rank)
        self._sent = dict.fromkeys(others, 0)  # the last round sent to each
        self._taken = dict.fromkeys(others, 0)  # the last round of each that was read or dropped
        self.lost: dict[int, str] = {}
        """Partners that died or left, and why; their rounds have no partner."""
        self.traffic = Traffic()
        self._closed = False
        self._waits = True

    def swap(
        self, number: int, partner: int, vectors: Sequence[Tensor], patience_s: float
    ) -> list[Tensor] | None:
        """Swap vectors with the partner of round `number`; blocks at most `patience_s`.

        Returns new tensors, or None if the partner is late, lost or some rounds ahead. `number`
        starts at 1 and rises.
        """
        deadline = time.monotonic() + patience_s
        slots = [self._sent_slot(partner), self._taken_slot(partner)]
        while partner not in self.lost:
            sent, taken = map(self._window.test, slots)
            gone, come = divmod(sent, _GONE)
            if gone and not come == number == self._sent[partner]:
                self.lost[partner] = LEFT
                return None
            if self._taken[partner] < come < number:
                self._take(partner, come)  # drop it: this rank made that round alone
            if self._sent[partner] < number and taken >= self._sent[partner]:
                self._send(partner, number, vectors)
            if come > number:
                return None  # the partner made this round alone
            if come == number and self._sent[partner] == number:
                found = [
                    view.clone()
                    for view in self._places.views(self._memory, partner * self._places.nbytes)
                ]
                self._take(partner, number)
                return found
            left = deadline - time.monotonic()
            if left <= 0 or not self._waits:
                return None
            try:
                self._window.wait_any(slots, [sent, taken], min(left, _LOOK_S))
            except CollectiveTimeout:
                continue
            except PeerLost as error:
                if self._window.test(slots[0]) == sent:  # it left without sending
                    self.lost[partner] = str(error)
        return None

    def close(self) -> None:
        """Deliver what was sent, and leave; local, blocks up to the deadline. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._window.closed:  # it closes with its communicator
            for rank, number in self._sent.items():
                if rank not in self.lost:
                    slot = self._sent_slot(self._rank)
                    self._window.put_notify(None, rank, slot, _GONE + number)
            with contextlib.suppress(CollectiveTimeout):
                self._window.drain(self._timeout_s)
            self._window.close()

    def stop_waiting(self) -> None:
        """Make swap() return, now and in future; local, never blocks, from any thread."""
        self._waits = False

    def abandon(self) -> None:
        """Close the window without waiting for vectors under way, which may be lost; local."""
        self._closed = True
        if not self._window.closed:
            self._window.close(waits=False)

    def _send(self, partner: int, number: int, vectors: Sequence[Tensor]) -> None:
        start = self._rank * self._places.nbytes
        pieces = [
            (vector.clone().numpy(), start + offset)  # a slow partner may read it late
            for vector, offset in zip(vectors, self._places.offsets, strict=True)
            if vector.numel()
        ]
        self._window.put_list_notify(pieces, partner, self._sent_slot(self._rank), number)
        self._sent[partner] = number
        self.traffic.messages += 1
        nbytes = sum(vector.numel() * vector.element_size() for vector in vectors)
        if self._nodes[partner] == self._nodes[self._rank]:
            self.traffic.local_bytes += nbytes
        else:
            self.traffic.remote_bytes += nbytes

    def _take(self, partner: int, number: int) -> None:
        self._taken[partner] = number
        if self._window.test(self._sent_slot(partner)) < _GONE:
            self._window.put_notify(None, partner, self._taken_slot(self._rank), number)
            self.traffic.messages += 1

    def _sent_slot(self, sender: int) -> int:
        return sender

    def _taken_slot(self, reader: int) -> int:
        return self._size + reader
