"""Mail between nodes for a ParameterBox: who has values of another node's box changed, and gets the
new ones back.

Owns the mailboxes in the segments of an Exchange, the thread that serves them, and the form of
letters and replies. Never decides which values belong to whom. A letter is a block of values with
what to do with them; the reply has the values of that block after it. Each worker has a few
mailboxes at each owner, so that letters and replies are under way in both directions at a time.
MPI's own accumulate is ten times slower; the owner's thread adds up instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hsgd.comm import Comm
from hsgd.errors import CollectiveTimeout, HsgdError
from hsgd.exchange import Exchange

__all__ = ["Letter", "Mail", "Reply"]

DEPTH = 4  # letters of one worker to one owner under way
_HEADER = 64  # bytes: eight whole numbers
_AREA = 96 << 20  # bytes that the mailboxes of a rank may take together
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


class Mail:
    """Mailboxes of all ranks; made collectively. `owners`: ranks that serve.

    block_bytes: most bytes of values in a letter, as float32. serve(letter, values, out) does what
    is asked, fills `out` and returns version and value; it runs in a thread of this object, on
    owners only.
    """

    def __init__(
        self, comm: Comm, owners: Sequence[int], block_bytes: int, serve: Serve, timeout_s: float
    ) -> None:
        self._comm, self._owners, self._serve, self._limit_s = comm, list(owners), serve, timeout_s
        self._stride = _HEADER + block_bytes
        boxes = DEPTH * (comm.size + len(owners))
        self._stop_slot = boxes
        self._exchange = Exchange(comm, boxes * self._stride, boxes + 1, timeout_s=timeout_s)
        self._memory: _Bytes = self._exchange.segment()
        self._sent = [0] * len(owners)  # letters ever, by owner
        self._lost: set[int] = set()  # owners that are not asked any more
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if comm.rank in self._owners:
            self._thread = threading.Thread(target=self._run, name="hsgd-mail", daemon=True)
            self._thread.start()

    @staticmethod
    def most_block_bytes(ranks: int, owners: int) -> int:
        """What a letter may have, so that the mailboxes of a rank stay of a modest size."""
        return _AREA // (DEPTH * (ranks + owners))

    # --- who asks ---

    def send(
        self,
        owner: int,
        letters: Sequence[tuple[Letter, _Bytes | None]],
        take: Callable[[Letter, Reply, Any], None],
    ) -> None:
        """Send letters with their values to the owner of this number, several at a time, and give
        each reply with its values (float32) to take(), in order; blocking.

        Raises HsgdError with what the owner says, CollectiveTimeout.
        """
        with self._lock, self._giving_up(owner):
            first, received = self._sent[owner], 0
            for sent, (letter, values) in enumerate(letters):
                while sent - received >= DEPTH:
                    self._receive(owner, first + received, letters[received][0], take)
                    received += 1
                self._post(owner, first + sent, letter, values)
            while received < len(letters):
                self._receive(owner, first + received, letters[received][0], take)
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

    def _post(self, owner: int, number: int, letter: Letter, values: _Bytes | None) -> None:
        box = self._comm.rank * DEPTH + number % DEPTH
        pieces: list[tuple[Any, int]] = [(np.array(letter, np.int64), box * self._stride)]
        if values is not None:
            pieces.append((values, box * self._stride + _HEADER))
        version = number // DEPTH + 1
        self._sent[owner] = number + 1
        self._exchange.put_list_notify(pieces, self._owners[owner], box, version)

    def _receive(
        self, owner: int, number: int, letter: Letter, take: Callable[[Letter, Reply, Any], None]
    ) -> None:
        box = DEPTH * (self._comm.size + owner) + number % DEPTH
        version = number // DEPTH
        try:
            self._exchange.wait_any([box], [version])
        except CollectiveTimeout as error:
            raise CollectiveTimeout(
                f"ParameterBox: rank {self._owners[owner]}, which owns values from place "
                f"{letter.offset}, did not answer: {error}"
            ) from None
        header, values = self._open(box)
        reply = Reply(*(int(number) for number in header[:4]))
        if reply.failed:
            words = bytes(values[: reply.failed]).decode(errors="replace")
            raise HsgdError(f"ParameterBox: rank {self._owners[owner]} says: {words}")
        take(letter, reply, values[: 4 * letter.returns].view(np.float32))

    def _open(self, box: int) -> tuple[Any, _Bytes]:
        whole = self._memory[box * self._stride : (box + 1) * self._stride]
        return whole[:_HEADER].view(np.int64), whole[_HEADER:]

    # --- who serves ---

    def _run(self) -> None:
        boxes = list(range(self._comm.size * DEPTH))
        seen = dict.fromkeys([*boxes, self._stop_slot], 0)
        stamp, replies = 0, dict[int, _Bytes]()
        order = [*boxes, self._stop_slot]
        while True:
            try:
                box, version = self._exchange.wait_any(order, [seen[n] for n in order], _LOOK_S)
            except CollectiveTimeout as error:
                if "not delivered" in str(error):
                    return  # those who wait for an answer are told by their deadlines
                continue
            except HsgdError:
                return  # closed
            if box == self._stop_slot:
                return
            seen[box] = version
            stamp += 1
            reply = replies.setdefault(box, np.empty(self._stride, np.uint8))
            try:
                self._answer(box, version, stamp, reply)
            except HsgdError:
                return
            place = order.index(box) + 1  # the others first, next time
            order = order[place:] + order[:place]

    def _answer(self, box: int, version: int, stamp: int, whole: _Bytes) -> None:
        """The memory of the reply is free: who sends again to this mailbox has got the last one."""
        header, values = self._open(box)
        letter = Letter(*(int(number) for number in header))
        out = whole[_HEADER : _HEADER + 4 * letter.returns]
        try:
            made, told = self._serve(letter, values, out)
            reply = Reply(0, stamp, made, told)
        except Exception as error:  # told to who asked
            words = f"{type(error).__name__}: {error}".encode()[: self._stride - _HEADER]
            out = whole[_HEADER : _HEADER + len(words)]
            out[:] = np.frombuffer(words, np.uint8)
            reply = Reply(len(words), stamp, 0, 0)
        whole[:_HEADER].view(np.int64)[:4] = reply
        worker = box // DEPTH
        there = DEPTH * (self._comm.size + self._owners.index(self._comm.rank)) + box % DEPTH
        pieces = [(whole[: _HEADER + len(out)], there * self._stride)]
        self._exchange.put_list_notify(pieces, worker, there, version)

    def close(self) -> None:
        """End the thread and give the segments back; collective. Nobody may ask any more."""
        if self._thread is not None:
            self._exchange.put_notify(None, self._comm.rank, self._stop_slot, 1)
            self._thread.join()
        self._exchange.close()
