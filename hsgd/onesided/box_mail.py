"""Mail between nodes for a ParameterBox: who has values of another node's box changed, and gets the
new ones back.

Owns the mailboxes in the segments of a NotifiedWindow, the thread that serves them, and the form of
letters and replies. Never decides which values belong to whom. A letter is a block of values with
what to do with them; the reply has the values of that block after it. Each worker has a few
mailboxes at each owner, so that letters and replies are under way in both directions at a time, and
one for letters without values, which so wait for no others. MPI's own accumulate is ten times
slower; the owner's thread adds up instead.
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

DEPTH = 4  # letters of one worker to one owner under way
_HEADER = 64  # bytes: eight whole numbers
_WORDS = 960  # bytes: what an owner may say in a reply without values
_AREA = 96 << 20  # bytes that the mailboxes of a rank may take together
_SLICE_BYTES = 1 << 20  # a whole block: nothing here is needed so soon that small ones pay off
_LOOK_S = 1.0
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Letter(NamedTuple):
    """What an owner is asked to do with `length` values from place `at` on; it sends `returns`
    values from `offset` on back.
    """

    what: int
    offset: int = 0
    returns: int = 0
    at: int = 0
    length: int = 0
    flags: int = 0
    counter: int = 0
    value: int = 0


class Reply(NamedTuple):
    """What came of it; `stamp` grows with each reply of an owner."""

    failed: int
    stamp: int
    version: int
    value: int


Serve = Callable[[Letter, _Bytes, _Bytes], tuple[int, int]]
Take = Callable[[Letter, Reply, Any], None]


class _Lane:
    """Mailboxes of one size: where they lie in every segment, and how many letters went each way.

    Each rank has `depth` for the letters of each rank, and as many for the replies of each owner.
    order: of what waits for a rank the least goes first.
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
        self.sent = [0] * owners  # letters ever, by owner
        self.lock = threading.Lock()

    def letter_slot(self, rank: int, number: int) -> int:
        """Where an owner finds a letter."""
        return self._first_slot + rank * self.depth + number % self.depth

    def reply_slot(self, owner: int, number: int) -> int:
        """Where the reply to a letter comes."""
        return self._first_slot + self.depth * (self._ranks + owner) + number % self.depth

    def place(self, slot: int) -> int:
        """Where the mailbox of a slot begins in a segment, bytes."""
        return self.start + (slot - self._first_slot) * self.stride

    def sender_of(self, slot: int) -> tuple[int, int]:
        """Who sends letters to it, and which of his letters in a round of `depth`."""
        return divmod(slot - self._first_slot, self.depth)


class Mail:
    """Mailboxes of all ranks; made collectively. `owners`: ranks that serve.

    block_bytes: most bytes of values in a letter, as float32. serve(letter, values, out) does what
    is asked, fills `out` and returns version and value; it runs in a thread of this object, on
    owners only. network: of the NotifiedWindow.
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
        self._lost: set[int] = set()  # owners that are not asked any more
        for owner, rank in enumerate(self._owners):
            for lane in (self._notes, self._values):
                for number in range(lane.depth):  # their death ends a wait
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
        """What a letter may have, so that the mailboxes of a rank stay of a modest size."""
        return _AREA // (DEPTH * (ranks + owners))

    # --- who asks ---

    def send(self, owner: int, letters: Sequence[tuple[Letter, _Bytes | None]], take: Take) -> None:
        """Send letters with their values to the owner of this number, several at a time, and give
        each reply with its values (float32) to take(), in order; blocking.

        Raises HsgdError with what the owner says, CollectiveTimeout, PeerLost.
        """
        self._converse(self._values, owner, letters, take)

    def ask(self, owner: int, letter: Letter) -> Reply:
        """Send a letter without values, for none; blocking, but not behind send(). Raises as it."""
        replies: list[Reply] = []
        self._converse(
            self._notes, owner, [(letter, None)], lambda _, reply, __: replies.append(reply)
        )
        return replies[0]

    def _converse(
        self,
        lane: _Lane,
        owner: int,
        letters: Sequence[tuple[Letter, _Bytes | None]],
        take: Take,
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
        """After a letter that was not answered its mailbox may not be used again."""
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

    # --- who serves ---

    def _run(self) -> None:
        """Letters of a worker in the order in which they were sent: the last of a change counts it.
        Workers take turns, but what has no values goes before what has.
        """
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
                if "not delivered" in str(error):
                    return  # those who wait for an answer are told by their deadlines
                continue
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
                continue  # a worker that is gone or stands still: the others are served
            turns.remove(worker)  # the others first, next time
            turns.append(worker)

    def _answer(self, lane: _Lane, slot: int, version: int, stamp: int, whole: _Bytes) -> None:
        """The memory of the reply is free: who sends again to this mailbox has got the last one."""
        header, values = self._open(lane, slot)
        letter = Letter(*(int(number) for number in header))
        out = whole[_HEADER : _HEADER + 4 * letter.returns]
        try:
            value, squares = self._serve(letter, values, out)
            reply = Reply(0, stamp, value, squares)
        except Exception as error:  # told to who asked
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
        """Where a rank says that it will ask no more."""
        return self._stop_slot + 1 + rank

    def close(self, *, waits: bool) -> None:
        """End the thread and give the segments back; over MPI collective.

        waits: say goodbye to the owners, which wait for that of all ranks, and serve them until
            then; who is lost has no more to ask. Else nobody waits for anybody, and whoever still
            asks this rank gets PeerLost.
        Raises CollectiveTimeout naming ranks that did not say goodbye; all is closed even so.
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
                with contextlib.suppress(HsgdError):  # who takes nothing waits for nothing
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
        """Write to a rank, so that its end is noticed; True when there was no room for it."""
        if self._window.network == "mpi" or rank in self._owners:
            return False
        try:
            self._window.put_notify(None, rank, self._bye_slot(self._comm.rank), 1, timeout_s=0)
        except QueueFull:
            return True
        except HsgdError:
            pass  # its end is noticed by the wait
        return False


def _aligned(nbytes: int) -> _Bytes:
    """Memory that begins with a cache line: values are written in whole ones."""
    room = np.empty(nbytes + _HEADER, np.uint8)
    begin = -room.ctypes.data % _HEADER
    return room[begin : begin + nbytes]
