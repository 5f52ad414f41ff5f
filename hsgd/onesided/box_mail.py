"""Mail between nodes for a ParameterBox: letters with changes, and replies with new values.

A letter is a block of values and what to do with them; the reply has the new values of that block.
Mailboxes lie in the segments of a NotifiedWindow; a thread of each owner serves them. Each worker
has a few mailboxes at each owner, so that letters and replies travel in both directions at a time,
and one for letters without values, which need not wait for the others. MPI's own accumulate is ten
times slower than the sum in the owner's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hsgd.comm.communicator import Comm
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost, QueueFull, about
from hsgd.onesided.networks import Network, choose_network
from hsgd.onesided.notified_window import NotifiedWindow

__all__ = ["Letter", "Mail", "Reply"]

DEPTH = 4  # letters in flight from one worker to one owner
_HEADER = 64  # bytes: eight 64-bit integers
_WORDS = 960  # bytes of the largest reply without values
_AREA = 96 << 20  # most bytes of all mailboxes of a rank
_SLICE_BYTES = 1 << 20  # a whole block: no letter is so urgent that smaller slices pay off
_LOOK_S = 1.0
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Letter(NamedTuple):
    """Request to an owner: `what` to do with `length` values from `at`, and values to return."""

    what: int
    offset: int = 0
    returns: int = 0
    at: int = 0
    length: int = 0
    flags: int = 0
    counter: int = 0
    value: int = 0


class Reply(NamedTuple):
    """Result of a letter; `stamp` grows with each reply of an owner."""

    failed: int
    stamp: int
    version: int
    value: int


Serve = Callable[[Letter, _Bytes, _Bytes], tuple[int, int]]
Take = Callable[[Letter, Reply, Any], None]


class _Lane:
    """Mailboxes of one size: their place in every segment, and the letters sent to each owner.

    Each rank has `depth` mailboxes for letters of each rank, and as many for replies of each owner.
    Of waiting writes to a rank, those with the lowest `order` go first.
    """

    def __init__(
        self,
        comm: Comm,
        owners: int,
        depth: int,
        stride: int,
        first_slot: int,
        start: int,
        order: int,
    ) -> None:
        self.depth, self.stride, self.start, self.order = depth, stride, start, order
        self._ranks, self._first_slot = comm.size, first_slot
        self.count = depth * (comm.size + owners)
        self.sent = [0] * owners  # letters sent so far, by owner
        self.lock = threading.Lock()

    def letter_slot(self, rank: int, number: int) -> int:
        """Return the owner's slot of a letter from `rank`."""
        return self._first_slot + rank * self.depth + number % self.depth

    def reply_slot(self, owner: int, number: int) -> int:
        """Return the slot of the reply to a letter."""
        return self._first_slot + self.depth * (self._ranks + owner) + number % self.depth

    def place(self, slot: int) -> int:
        """Return where the mailbox of a slot begins in a segment, bytes."""
        return self.start + (slot - self._first_slot) * self.stride

    def sender_of(self, slot: int) -> tuple[int, int]:
        """Return the sender of letters to a slot, and which of its `depth` letters it holds."""
        return divmod(slot - self._first_slot, self.depth)


class Mail:
    """Mailboxes of all ranks; the constructor is collective.

    Args:
        owners: ranks that serve.
        block_bytes: most bytes of values in a letter, as float32.
        serve: serve(letter, values, out) applies a letter, fills `out` and returns version and
            value. It runs in a thread of this object, on owners only.
        network: as for NotifiedWindow.
    """

    def __init__(
        self,
        comm: Comm,
        owners: Sequence[int],
        block_bytes: int,
        serve: Serve,
        timeout_s: float,
        network: Network,
    ) -> None:
        self._comm, self._owners, self._serve = comm, list(owners), serve
        self._notes = _Lane(comm, len(owners), 1, _HEADER + _WORDS, 0, 0, order=0)
        behind = self._notes.count * self._notes.stride
        stride = _HEADER + block_bytes
        self._values = _Lane(comm, len(owners), DEPTH, stride, self._notes.count, behind, order=1)
        self._stop_slot = self._notes.count + self._values.count
        nbytes = behind + self._values.count * stride
        self._timeout_s = timeout_s
        self._window = NotifiedWindow(
            comm,
            nbytes,
            self._bye_slot(comm.size),
            timeout_s=timeout_s,
            network=choose_network(comm, network, "ParameterBox", any_thread=True),
            slice_bytes=_SLICE_BYTES,
        )
        self._memory: _Bytes = self._window.segment()
        self._lost: set[int] = set()  # owners that did not answer, and get no more letters
        for owner, rank in enumerate(self._owners):
            for lane in (self._notes, self._values):
                for number in range(lane.depth):  # the death of the owner ends a wait
                    self._window.bind(lane.reply_slot(owner, number), rank)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        for rank in self._others:
            self._window.bind(self._bye_slot(rank), rank)
        self._thread: threading.Thread | None = None
        if comm.rank in self._owners:
            self._thread = threading.Thread(target=self._run, name="hsgd-mail", daemon=True)
            self._thread.start()

    @staticmethod
    def most_block_bytes(ranks: int, owners: int) -> int:
        """Return the most bytes of a letter's values that keep a rank's mailboxes small enough."""
        return _AREA // (DEPTH * (ranks + owners))

    # --- the sender ---

    def send(self, owner: int, letters: Sequence[tuple[Letter, _Bytes | None]], take: Take) -> None:
        """Send letters with their values to an owner, several at a time; blocking.

        Each reply and its values (float32) go to take(), in order. `owner` is an index of `owners`.
        Raises HsgdError with the owner's error, CollectiveTimeout or PeerLost.
        """
        self._converse(self._values, owner, letters, take)

    def ask(self, owner: int, letter: Letter) -> Reply:
        """Send a letter without values and return its reply; blocking, but not behind send()."""
        replies: list[Reply] = []
        self._converse(
            self._notes, owner, [(letter, None)], lambda _, reply, __: replies.append(reply)
        )
        return replies[0]

    def _converse(
        self, lane: _Lane, owner: int, letters: Sequence[tuple[Letter, _Bytes | None]], take: Take
    ) -> None:
        with lane.lock, self._giving_up(owner):
            first, received = lane.sent[owner], 0
            for sent, (letter, values) in enumerate(letters):
                while sent - received >= lane.depth:
                    self._receive(lane, owner, first + received, letters[received][0], take)
                    received += 1
                self._post(lane, owner, first + sent, letter, values)
            while received < len(letters):
                self._receive(lane, owner, first + received, letters[received][0], take)
                received += 1

    @contextlib.contextmanager
    def _giving_up(self, owner: int) -> Iterator[None]:
        """Refuse later letters to an owner that did not answer: its mailbox may still be in use."""
        if owner in self._lost:
            raise HsgdError(
                f"ParameterBox: rank {self._owners[owner]} did not answer before; make a new box"
            )
        try:
            yield
        except BaseException:
            self._lost.add(owner)
            raise

    def _post(
        self, lane: _Lane, owner: int, number: int, letter: Letter, values: _Bytes | None
    ) -> None:
        slot = lane.letter_slot(self._comm.rank, number)
        there = lane.place(slot)
        pieces: list[tuple[Any, int]] = [(np.array(letter, np.int64), there)]
        if values is not None:
            pieces.append((values, there + _HEADER))
        version = number // lane.depth + 1
        lane.sent[owner] = number + 1
        self._window.put_list_notify(pieces, self._owners[owner], slot, version, order=lane.order)

    def _receive(self, lane: _Lane, owner: int, number: int, letter: Letter, take: Take) -> None:
        slot = lane.reply_slot(owner, number)
        version = number // lane.depth
        try:
            self._window.wait_any([slot], [version])
        except CollectiveTimeout as error:
            raise about(
                self._owners[owner],
                CollectiveTimeout(
                    f"ParameterBox: rank {self._owners[owner]}, which owns values from place "
                    f"{letter.offset}, did not answer: {error}"
                ),
            ) from None
        header, values = self._open(lane, slot)
        reply = Reply(*(int(number) for number in header[:4]))
        if reply.failed:
            words = bytes(values[: reply.failed]).decode(errors="replace")
            raise HsgdError(f"ParameterBox: rank {self._owners[owner]} says: {words}")
        take(letter, reply, values[: 4 * letter.returns].view(np.float32))

    def _open(self, lane: _Lane, slot: int) -> tuple[Any, _Bytes]:
        begin = lane.place(slot)
        whole = self._memory[begin : begin + lane.stride]
        return whole[:_HEADER].view(np.int64), whole[_HEADER:]

    # --- the owner ---

    def _run(self) -> None:
        """Serve letters: each worker's in order, workers in turn, letters without values first."""
        turns = list(range(self._comm.size))
        taken = {lane: [0] * len(turns) for lane in (self._notes, self._values)}
        stamp, replies = 0, dict[int, _Bytes]()
        while True:
            next_ones = [(lane, worker) for lane in taken for worker in turns]
            slots = [lane.letter_slot(who, taken[lane][who]) for lane, who in next_ones]
            seen = [taken[lane][who] // lane.depth for lane, who in next_ones]
            try:
                slot, version = self._window.wait_any(
                    [*slots, self._stop_slot], [*seen, 0], _LOOK_S
                )
            except CollectiveTimeout as error:
                if error.rank < 0:  # no letter came
                    continue
                return  # a reply was not delivered: who waits for one fails by its deadline
            except HsgdError:
                return  # closed
            if slot == self._stop_slot:
                return
            lane, worker = next_ones[slots.index(slot)]
            taken[lane][worker] += 1
            stamp += 1
            if slot not in replies:
                replies[slot] = _aligned(lane.stride)
            try:
                self._answer(lane, slot, version, stamp, replies[slot])
            except HsgdError:
                if self._window.closed:
                    return
                continue  # that worker is gone or stopped: serve the others
            turns.remove(worker)  # last in the next round
            turns.append(worker)

    def _answer(self, lane: _Lane, slot: int, version: int, stamp: int, whole: _Bytes) -> None:
        """Serve a letter; reply in `whole`, which is free: its sender has the previous reply."""
        header, values = self._open(lane, slot)
        letter = Letter(*(int(number) for number in header))
        out = whole[_HEADER : _HEADER + 4 * letter.returns]
        try:
            value, squares = self._serve(letter, values, out)
            reply = Reply(0, stamp, value, squares)
        except Exception as error:  # sent to the sender
            words = f"{type(error).__name__}: {error}".encode()[: lane.stride - _HEADER]
            out = whole[_HEADER : _HEADER + len(words)]
            out[:] = np.frombuffer(words, np.uint8)
            reply = Reply(len(words), stamp, 0, 0)
        whole[:_HEADER].view(np.int64)[:4] = reply
        worker, number = lane.sender_of(slot)
        there = lane.reply_slot(self._owners.index(self._comm.rank), number)
        pieces = [(whole[: _HEADER + len(out)], lane.place(there))]
        self._window.put_list_notify(pieces, worker, there, version, order=lane.order)

    # --- the end ---

    def _bye_slot(self, rank: int) -> int:
        return self._stop_slot + 1 + rank

    def close(self, *, waits: bool) -> None:
        """End the thread and free the segments; over MPI collective.

        Args:
            waits: send a goodbye to the owners, which serve until they have those of all living
                ranks. Otherwise no rank waits, and ranks that still send letters to this one get
                PeerLost.

        Raises:
            CollectiveTimeout: names ranks that sent no goodbye; all is closed even so.
        """
        try:
            if waits:
                self._say_goodbye(self._owners)
                if self._comm.rank in self._owners:
                    self._await_goodbyes()
        finally:
            if self._thread is not None:
                self._window.put_notify(None, self._comm.rank, self._stop_slot, 1)
                self._thread.join()
            self._window.close(waits=waits)

    def _say_goodbye(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank != self._comm.rank:
                with contextlib.suppress(HsgdError):  # a rank that takes no writes does not wait
                    self._window.put_notify(None, rank, self._bye_slot(self._comm.rank), 1)
        with contextlib.suppress(HsgdError):
            self._window.drain()

    def _await_goodbyes(self) -> None:
        end = time.monotonic() + self._timeout_s
        waiting, quiet = list(self._others), list(self._others)
        while waiting:
            slots = [self._bye_slot(rank) for rank in waiting]
            try:
                slot, _ = self._window.wait_any(slots, 0, _LOOK_S)
                waiting.remove(waiting[slots.index(slot)])
            except PeerLost as error:
                waiting.remove(error.rank)
            except CollectiveTimeout:
                if time.monotonic() > end:
                    ranks = ", ".join(map(str, waiting))
                    raise about(
                        waiting[0],
                        CollectiveTimeout(
                            f"ParameterBox.close: after {self._timeout_s:g} s rank {ranks} had not "
                            "closed it; close it on every rank"
                        ),
                    ) from None
                # A rank that never wrote here has no connection that would end with it.
                quiet = [rank for rank in quiet if rank in waiting and self._knock(rank)]

    def _knock(self, rank: int) -> bool:
        """Write to a rank, so that its end is noticed; return True if there was no room."""
        if self._window.network == "mpi" or rank in self._owners:
            return False
        try:
            self._window.put_notify(None, rank, self._bye_slot(self._comm.rank), 1, timeout_s=0)
        except QueueFull:
            return True
        except HsgdError:
            pass  # the wait notices its end
        return False


def _aligned(nbytes: int) -> _Bytes:
    """Make an array that begins at a cache line: values are written in whole lines."""
    room = np.empty(nbytes + _HEADER, np.uint8)
    begin = -room.ctypes.data % _HEADER
    return room[begin : begin + nbytes]
