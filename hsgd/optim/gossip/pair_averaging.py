"""PairAverager: averages models in pairs; both ranks apply their half, or neither does.

The protocol, which is ours::

    asker                                 asked rank, at its own step boundary
    copies its weights s into a lane  --> d = (s - w) / 2 in the lane itself, w += d
    w -= d, at its next poll()        <-- "committed", or "refused": the lane means nothing

Only the asked rank decides, in a single store. A committed half waits in the asker's segment,
however late the asker looks. The asker computes meanwhile; a peer that does not answer only
occupies a lane.

Two ranks that ask each other at once would swap their weights instead of averaging them. They
detect this by the request's stamp, the number of the peer's requests answered before it. Inside a
node the lower rank refuses such a request. Between nodes each rank has what the other sent: the
higher rank adds half of the difference of the two snapshots and answers "crossed", then the lower
one takes the same half and answers so too. Until then both snapshots stay in place.

A rank that leaves says so in its answer slot and repeats the last answer, since a version
overwrites the one before. tests/models/gossip.pml checks all interleavings, and that the protocol
fails without each of these rules.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.errors import CollectiveTimeout, PeerLost, about
from hsgd.onesided.networks import Network, choose_network
from hsgd.onesided.notified_window import NotifiedWindow
from hsgd.optim.flat_vectors import Places, square

__all__ = ["LEFT", "Averaged", "PairAverager", "Traffic"]

LEFT = "it closed its Gossip"
"""Reason why a peer that did not die is lost."""

_GONE = 1 << 62  # a rank that leaves adds it to its last answer
_REFUSED, _COMMITTED, _CROSSED = range(3)  # an answer's version is 4 * the request's number + this
_ANSWERS = 4
_LANES = 16  # the maximum; a request's version is its number, its stamp (30 bits) and its lane
_USUAL_LANES = 4
_STAMPS = 1 << 30
_DEATH_CHECK_S = 0.5  # between checks whether a peer that does not answer has died
_LOOK_S = 0.05


@dataclass(frozen=True)
class Averaged:
    """The outcome of a request with one peer."""

    peer: int
    asked: bool
    """Whether this rank was the asker; both ranks are if requests crossed between nodes."""
    committed: bool
    """False: the peer refused, left or died, and nothing changed on either side."""
    distance: float
    """|w_peer - w| if this rank was asked, else the distance of the snapshot that it sent."""


@dataclass
class Traffic:
    """What this rank wrote into others' memory; control messages have no bytes."""

    messages: int = 0
    local_bytes: int = 0
    remote_bytes: int = 0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(
            self.messages + other.messages,
            self.local_bytes + other.local_bytes,
            self.remote_bytes + other.remote_bytes,
        )


@dataclass
class _Open:
    number: int
    lane: int
    since: float
    crossed: bool = False  # this rank has applied its half, the peer has not yet


class PairAverager:
    """Averages pairs of models; made collectively, blocking. poll(), ask() and wait() are local.

    Args:
        weights: contiguous 1-d CPU tensors, which poll() changes in place; shapes and dtypes equal
            on all ranks. Integers are halved downwards, so that sums are exact.
        neighbours: of each rank; symmetric.
        wire_dtype: dtype of floating weights on the way; None is their own. Both sides apply the
            same rounded difference.
        lanes: number of requests that may be open, 1 to 16, equal on all ranks; None is one per
            neighbour, up to 4. Each costs a copy of the weights; so does each neighbour on another
            node.
        network: between nodes: "sockets" or "mpi"; see hsgd.NotifiedWindow. Over MPI a peer on
            another node that dies ends the job, and a stopped one may delay its neighbours.
        timeout_s: limit of close() for open requests; None is the deadline of `comm`.
        remote_only: use the network inside the node too, for tests.

    Raises:
        ValueError: the weights or lanes are invalid.
    """

    def __init__(
        self,
        comm: Comm,
        weights: Sequence[Tensor],
        neighbours: Sequence[Sequence[int]],
        *,
        wire_dtype: torch.dtype | None = None,
        lanes: int | None = None,
        network: Network = "sockets",
        timeout_s: float | None = None,
        remote_only: bool = False,
    ) -> None:
        if lanes is None:
            lanes = max(1, min(_USUAL_LANES, max(map(len, neighbours))))
        if not 1 <= lanes <= _LANES:
            raise ValueError(f"PairAverager: lanes is {lanes}; give 1 to {_LANES}")
        self._rank, self._size = comm.rank, comm.size
        self._weights = [_flat(tensor) for tensor in weights]
        self._peers = list(neighbours[comm.rank])
        self._timeout_s = comm.timeout_s if timeout_s is None else timeout_s
        nodes = list(range(comm.size)) if remote_only else comm.nodes
        self._remote = _on_other_nodes(neighbours, nodes)
        self._places = Places(self._weights, wire_dtype)
        places = lanes + max(map(len, self._remote))
        self._lanes = lanes
        self._window = NotifiedWindow(
            comm,
            places * self._places.nbytes,
            2 * comm.size + 1,
            queue=8 * comm.size + 8,
            timeout_s=timeout_s,
            remote_only=remote_only,
            network=choose_network(comm, network, "Gossip", any_thread=True),
            forgiving=True,  # a stopped peer does not delay others
        )
        self._own = torch.from_numpy(self._window.segment())
        self._segments = {
            peer: torch.from_numpy(self._window.segment(peer))
            for peer in self._peers
            if peer not in self._remote[self._rank]
        }
        for peer in self._peers:
            self._window.bind(self._request_slot(peer), peer)
            self._window.bind(self._answer_slot(peer), peer)
        self._free = list(range(lanes))
        self._open: dict[int, _Open] = {}
        self._asked = dict.fromkeys(self._peers, 0)  # requests made, by peer
        self._seen = dict.fromkeys(self._peers, 0)  # the last request of each
        self._answers = dict.fromkeys(self._peers, 0)  # the last answer to each
        self._mixed = dict.fromkeys(self._peers, 0)  # the last request that was not refused
        self._put_off = dict.fromkeys(self._peers, 0)  # a request that crossed an open one
        self._halves: dict[int, int] = {}  # tickets of the last half sent to each
        self._checked = 0.0
        self.lost: dict[int, str] = {}
        """Peers that died or left, and why; they are not asked again."""
        self.traffic = Traffic()
        self._closed = False
        self._waits = True
        driven = self._remote[self._rank] and self._window.network == "mpi"
        self._driver = _Driver(self._window, comm) if driven else None

    @property
    def open(self) -> list[int]:
        """Peers that have not answered yet."""
        return list(self._open)

    @property
    def remote(self) -> frozenset[int]:
        """Neighbours on other nodes, with whom crossing requests make one average."""
        return frozenset(self._remote[self._rank])

    @property
    def model_bytes(self) -> int:
        """Bytes of one copy of the weights on the way."""
        return sum(view.numel() * view.element_size() for view in self._places.views(self._own, 0))

    def ask(self, peer: int) -> bool:
        """Offer the current weights to `peer`; local, not blocking.

        Returns False, without effect, if the peer has an open request or is lost, or all lanes are
        used.
        """
        if peer in self._open or peer in self.lost or not self._free:
            return False
        if self._left(peer):
            self.lost[peer] = LEFT
            return False
        lane = self._free.pop()
        offset = lane * self._places.nbytes
        for view, weight in zip(self._places.views(self._own, offset), self._weights, strict=True):
            view.copy_(weight)
        self._asked[peer] += 1
        self._open[peer] = _Open(self._asked[peer], lane, time.monotonic())
        self._mixed[peer] = self._asked[peer]
        stamp = self._answers[peer] // _ANSWERS
        version = (self._asked[peer] * _STAMPS + stamp) * _LANES + lane
        self._send(peer, self._request_slot(self._rank), version, offset, self._inbox(peer))
        return True

    def poll(self) -> list[Averaged]:
        """Apply the peers' answers, and answer their requests; local, not blocking.

        Call it when the weights may change: between optimizer.step() and the next forward pass.
        """
        done = [entry for peer in list(self._open) for entry in self._collect(peer)]
        for peer in self._peers:
            version = self._window.test(self._request_slot(peer))
            if version <= self._seen[peer]:
                continue
            done += self._collect(peer)  # the peer's answer, if it came before its request
            if version <= self._seen[peer] or self._puts_off(peer, version):
                continue
            self._seen[peer] = version
            if not self._left(peer):  # a peer that left would never apply its half
                done.append(self._answer(peer, version))
        return done + self._look_after()

    def wait(self, limit_s: float) -> list[Averaged]:
        """Poll until no request of this rank is open; local, blocks at most `limit_s`.

        Other ranks' requests are answered meanwhile, so ranks that wait for each other do not
        deadlock.
        """
        deadline = time.monotonic() + limit_s
        done = self.poll()
        while self._open and self._waits and (left := deadline - time.monotonic()) > 0:
            live = [peer for peer in self._peers if peer not in self.lost]
            slots = [self._request_slot(peer) for peer in live]
            seen = [max(self._seen[peer], self._put_off[peer]) for peer in live]
            for peer in self._open:
                slots.append(self._answer_slot(peer))
                seen.append(_ANSWERS * self._open[peer].number - 1)
            try:
                self._window.wait_any(slots, seen, min(left, _LOOK_S))
            except PeerLost as error:
                done += self._lose(error.rank, str(error))
            except CollectiveTimeout:
                pass
            done += self.poll()
        return done

    def stop_waiting(self) -> None:
        """Make wait() return, now and in future; local, never blocks, from any thread."""
        self._waits = False

    def abandon(self) -> None:
        """Close the window without waiting for vectors under way, which may be lost; local."""
        self._closed = True
        if not self._window.closed:
            if self._driver is not None:
                self._driver.stop()
            self._window.close(waits=False)

    def close(self) -> list[Averaged]:
        """Wait for open requests, answer those that have come, and leave.

        Local, but collective over MPI; blocks up to the deadline for answers, and again for what
        was sent. A second call does nothing.

        Raises:
            CollectiveTimeout: names peers that did not answer, and may have committed, and peers
                that did not take a half which this rank committed.
        """
        if self._closed:
            return []
        self._closed = True
        if self._window.closed:  # it closes with its communicator
            return []
        try:
            done = self.wait(self._timeout_s)
            untaken = self._leave()
        finally:
            if self._driver is not None and not self._window.closed:
                self._driver.stop()
            self._window.close()
        late = [
            f"rank {', '.join(map(str, peers))} has not {what} rank {self._rank}"
            for peers, what in (
                (self._open, "answered"),
                (untaken, "applied its half of an average with"),
            )
            if peers
        ]
        if late:
            raise about(
                next(iter([*self._open, *untaken])),
                CollectiveTimeout(
                    f"PairAverager: {', '.join(late)} within {self._timeout_s:g} s, so the sum of "
                    "the weights may have changed by one half of an average; give a longer "
                    "timeout_s or end that rank"
                ),
            )
        return done

    # --- places ---

    def _inbox(self, peer: int) -> int:
        """Return the place of this rank's weights in the segment of a peer on another node."""
        asks = self._remote[peer]
        return (
            (self._lanes + asks.index(self._rank)) * self._places.nbytes
            if self._rank in asks
            else 0
        )

    def _request_slot(self, asker: int) -> int:
        return asker

    def _answer_slot(self, asked: int) -> int:
        return self._size + asked

    # --- the protocol ---

    def _left(self, peer: int) -> bool:
        return peer in self.lost or self._window.test(self._answer_slot(peer)) >= _GONE

    def _send(self, peer: int, slot: int, version: int, here: int | None, there: int) -> int:
        """Send `version` to a peer's `slot`; return the ticket of the write.

        To another node the model at `here`, if any, is written to `there` in its segment before.
        """
        pieces: list[tuple[Any, int]] = []
        self.traffic.messages += 1
        if peer in self._segments:
            self.traffic.local_bytes += 0 if here is None else self.model_bytes
        elif here is not None:
            pieces = [(self._own[here : here + self._places.nbytes], there)]
            self.traffic.remote_bytes += self._places.nbytes
        return self._window.put_list_notify(pieces, peer, slot, version)

    def _answer(self, peer: int, version: int) -> Averaged:
        number, stamp, lane = _parts_of(version)
        place = lane * self._places.nbytes
        if peer in self._segments:
            here, memory = place, self._segments[peer]
        else:
            here, memory = self._inbox_of(peer), self._own
        blocks, mine = self._places.views(memory, here), self._weights
        own = self._open.get(peer)
        crossed = own is not None and stamp < own.number and peer not in self._segments
        if own is not None and crossed:  # on the higher rank: the lower one postpones it
            mine = self._places.views(self._own, own.lane * self._places.nbytes)
        refused = self._rank < peer and stamp < self._mixed[peer]
        distance = math.nan if refused else self._halve(blocks, mine)
        committed = math.isfinite(distance)
        if committed:
            for weight, block in zip(self._weights, blocks, strict=True):
                weight.add_(block)
        crossed = crossed and committed
        if own is not None and crossed:
            own.crossed = True
        answer = _CROSSED if crossed else _COMMITTED if committed else _REFUSED
        self._answers[peer] = _ANSWERS * number + answer
        # Apply this half first: an asker that sees the version may ask again at once.
        sent = here if answer == _COMMITTED else None
        slot = self._answer_slot(self._rank)
        ticket = self._send(peer, slot, self._answers[peer], sent, place)
        if committed:
            self._halves[peer] = ticket
        return Averaged(peer, crossed, committed, distance)

    def _puts_off(self, peer: int, version: int) -> bool:
        """Return whether a request crossed an open one of this rank, the lower one, between nodes.

        The peer's answer to the open request then counts for both.
        """
        stamp = _parts_of(version)[1]
        if peer in self._segments or peer not in self._open:
            return False
        if self._rank > peer or stamp >= self._mixed[peer]:
            return False
        self._put_off[peer] = version
        return True

    def _inbox_of(self, peer: int) -> int:
        return (self._lanes + self._remote[self._rank].index(peer)) * self._places.nbytes

    def _halve(self, blocks: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        """Replace a peer's weights by half of the difference; return the norm of the difference.

        Weights that are not finite give a norm that is not finite, and are refused.
        """
        squares = 0.0
        for block, weight in zip(blocks, others, strict=True):
            if not block.is_floating_point():
                torch.sub(block, weight, out=block)
                half = torch.div(block, 2, rounding_mode="floor", out=block)
            elif block.dtype == weight.dtype:
                half = torch.sub(block, weight, out=block).mul_(0.5)
            else:
                half = block.copy_((block.to(weight.dtype) - weight).mul_(0.5))
            squares += 4 * square(half)
        return math.sqrt(squares) if squares >= 0 else math.nan

    def _collect(self, peer: int) -> list[Averaged]:
        request = self._open.get(peer)
        if request is None:
            return []
        version = self._window.test(self._answer_slot(peer))
        gone, answer = version >= _GONE, version % _GONE
        answered = answer // _ANSWERS == request.number
        if not answered and not gone:
            return []
        kind, distance = answer % _ANSWERS if answered else _REFUSED, math.nan
        blocks = self._places.views(self._own, request.lane * self._places.nbytes)
        if kind == _CROSSED and not request.crossed:
            theirs = self._window.test(self._request_slot(peer))
            if theirs <= self._seen[peer]:
                return []  # the peer's weights have not arrived yet
            self._halve(blocks, self._places.views(self._own, self._inbox_of(peer)))
        if kind != _REFUSED and not request.crossed:
            squares = 0.0
            for weight, block in zip(self._weights, blocks, strict=True):
                weight.sub_(block)
                squares += 4 * square(block)
            distance = math.sqrt(squares)
        elif kind == _REFUSED:
            self._mixed[peer] = 0
        if gone:
            self.lost.setdefault(peer, LEFT)
        del self._open[peer]
        self._free.append(request.lane)
        if request.crossed:
            return []  # reported when this rank applied its half
        if kind == _CROSSED:
            self._close_crossed(peer, theirs)
        return [Averaged(peer, True, kind != _REFUSED, distance)]

    def _close_crossed(self, peer: int, version: int) -> None:
        """Tell the peer that its crossing request has had its average."""
        self._seen[peer] = version
        self._answers[peer] = _ANSWERS * _parts_of(version)[0] + _CROSSED
        if not self._left(peer):
            slot = self._answer_slot(self._rank)
            self._send(peer, slot, self._answers[peer], None, 0)

    def _look_after(self) -> list[Averaged]:
        """Check whether peers that do not answer are alive."""
        now, done = time.monotonic(), []
        if now - self._checked < _DEATH_CHECK_S:
            return []
        self._checked = now
        for peer, request in list(self._open.items()):
            if now - request.since < _DEATH_CHECK_S:
                continue
            try:
                seen = _ANSWERS * request.number - 1
                self._window.wait_any([self._answer_slot(peer)], seen, 0.0)
            except PeerLost as error:
                done += self._lose(peer, str(error))
            except CollectiveTimeout:
                continue
        return done

    def _lose(self, peer: int, why: str) -> list[Averaged]:
        """Mark a peer as lost; what it committed before counts."""
        self.lost.setdefault(peer, LEFT if self._left(peer) else why)
        done = self._collect(peer)
        request = self._open.pop(peer, None)
        if request is None:
            return done
        self._free.append(request.lane)
        return done if request.crossed else [*done, Averaged(peer, True, False, math.nan)]

    def _leave(self) -> list[int]:
        """Tell the peers that this rank leaves; return peers that have not taken their halves."""
        for peer in self._peers:
            if peer not in self.lost:
                slot = self._answer_slot(self._rank)
                self._send(peer, slot, _GONE + self._answers[peer], None, 0)
        with contextlib.suppress(CollectiveTimeout):
            self._window.drain(self._timeout_s)
        return [peer for peer, half in self._halves.items() if not self._window.done(half)]


class _Driver:
    """A thread that keeps writes between nodes progressing while the program computes."""

    def __init__(self, window: NotifiedWindow, comm: Comm) -> None:
        self._window, self._rank, self._slot = window, comm.rank, 2 * comm.size
        self._thread = threading.Thread(target=self._run, name="hsgd-gossip", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._window.wait_any([self._slot], 0, 1.0)
                return
            except CollectiveTimeout:
                continue
            except Exception:
                return  # closed or broken: the next poll() raises too

    def stop(self) -> None:
        self._window.put_notify(None, self._rank, self._slot, 1)
        self._thread.join()


def _on_other_nodes(neighbours: Sequence[Sequence[int]], nodes: Sequence[int]) -> list[list[int]]:
    return [
        [peer for peer in of_rank if nodes[peer] != nodes[rank]]
        for rank, of_rank in enumerate(neighbours)
    ]


def _parts_of(version: int) -> tuple[int, int, int]:
    stamped, lane = divmod(version, _LANES)
    return (*divmod(stamped, _STAMPS), lane)


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"PairAverager: expected a contiguous 1-d CPU tensor, got shape {tuple(tensor.shape)} "
            f"on {tensor.device}; flatten it"
        )
    return tensor.detach()
