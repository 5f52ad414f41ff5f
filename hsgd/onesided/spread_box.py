"""SpreadBox: a ParameterBox over several nodes; each owns a part, and copies the rest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.onesided.box_mail import Letter, Mail, Reply

if TYPE_CHECKING:
    from hsgd import _native
    from hsgd.comm.communicator import Comm
    from hsgd.onesided.networks import Network

__all__ = ["SpreadBox", "chunk_bytes_over"]

_BLOCK_BYTES = 1 << 20
_ADD, _WRITE, _COUNT, _SHOW = range(4)  # Letter.what
_NARROW, _FINISHES = 1, 2  # Letter.flags


class SpreadBox:
    """The methods of a ParameterBox, on several nodes.

    Owner 0 has the counters and counts the changes: each change reaches it last, after all other
    owners. So values that an owner sends have at least the version that was known before the
    request. `_has` is that version for all values of other owners in this copy.
    """

    def __init__(
        self, comm: Comm, box: _native.Box, shards: str | None, timeout_s: float, network: Network
    ) -> None:
        """Serve the other nodes from this node's `box` of all values; collective over `comm`."""
        owners = _owners(comm, shards)
        self._comm, self._native, self._timeout_s = comm, box, timeout_s
        self._count, self._chunk = box.count(), box.chunk_count()
        self._ends = _shares(self._count, self._chunk, len(owners))
        self._own = comm.cross_rank if comm.cross_rank < len(owners) else -1
        self._complete = self._own == 0 and len(owners) == 1  # all is here, and counted here
        most = Mail.most_block_bytes(comm.size, len(owners)) // (self._chunk * 4)
        self._block = max(1, min(_BLOCK_BYTES // (self._chunk * 4), most)) * self._chunk  # values
        self._has, self._learning = 0, threading.Lock()
        self._mail = Mail(comm, owners, self._block * 4, self._serve, timeout_s, network)
        comm.barrier()

    def read(self, out: Any, offset: int) -> int:
        has = self._has  # before the values, which only get newer
        version = self._native.read(out, offset, self._timeout_s)
        return version if self._complete else has

    def write(self, values: Any, offset: int) -> int:
        self._native.check_change("write", values, offset)
        return self._change(_WRITE, _bytes_of(values), offset, 0)

    def accumulate(self, delta: Any, offset: int) -> int:
        narrow = self._native.check_change("accumulate", delta, offset)
        return self._change(_ADD, _bytes_of(delta), offset, _NARROW if narrow else 0)

    def elastic(self, weights: Sequence[Any], rate: float, delta: Any | None) -> tuple[int, float]:
        pushed = delta
        if pushed is None:
            pushed = np.empty(sum(_bytes_of(weight).size // 4 for weight in weights), np.float32)
        has = self._has  # as in read()
        version, squares = self._native.elastic(list(weights), rate, pushed, self._timeout_s)
        if delta is None:
            self.accumulate(pushed, 0)
        return version if self._complete else has, squares

    def refresh(self) -> None:
        has = self._count_now()
        for owner, (begin, end) in enumerate(self._parts(0, self._count)):
            if owner != self._own:
                letters = [(letter, None) for letter in self._cut(_SHOW, begin, end, 0)]
                self._mail.send(owner, letters, self._take)
        self._learn(has)

    def fetch_add(self, counter: int, value: int) -> int:
        if self._own == 0 or counter >= self._native.counters():
            return self._native.fetch_add(counter, value)
        self._native.version()  # raises if closed
        return self._mail.ask(0, Letter(_COUNT, counter=counter, value=value)).value

    @property
    def counts_at_once(self) -> bool:
        return self._own == 0

    def leave_comm(self) -> None:
        """Leave the communicator at the end of the program: other ranks may be in a collective."""
        self._comm.leave()

    def close(self, *, waits: bool) -> None:
        self._mail.close(waits=waits)

    # --- a change ---

    def _change(self, what: int, values: Any, offset: int, flags: int) -> int:
        """Send each owner its part; owner 0 comes last, and counts the change as a whole."""
        width = 2 if flags & _NARROW else 4
        length = values.size // width
        parts = self._parts(offset, offset + length)
        # If only owner 0 is asked, its first answer comes before all other values.
        alone = len(parts) - (self._own >= 0) == 1
        whole = (offset, length) == (0, self._count)
        has = self._count_now() if whole and (self._own == 0 or not alone) else -1
        newest = 0
        for owner in reversed(range(len(parts))):
            begin, end = parts[owner]
            part = values[(begin - offset) * width : (end - offset) * width]
            if owner == self._own:
                own = self._apply(what, flags, part, begin, finishes=owner == 0)
                newest = own if owner == 0 else newest
                continue
            cuts = self._cut(what, begin, end, flags)
            if owner == 0:
                last = cuts.pop() if cuts else Letter(what, flags=flags)
                cuts.append(last._replace(flags=last.flags | _FINISHES))
            letters = []
            for cut in cuts:
                first = (cut.at - begin) * width
                letters.append((cut, part[first : first + cut.length * width]))

            def take(letter: Letter, reply: Reply, new: Any) -> None:
                nonlocal has, newest
                self._take(letter, reply, new)
                has = reply.version if has < 0 else has
                newest = max(newest, reply.value)

            self._mail.send(owner, letters, take)
        if whole:
            self._learn(newest if newest == has + 1 else has)  # no other change came between
        return newest

    def _take(self, letter: Letter, reply: Reply, values: Any) -> None:
        count = max(reply.version, reply.value)
        self._native.take_copy(values, letter.offset, reply.stamp, count, self._timeout_s)

    def _count_now(self) -> int:
        if self._own == 0:
            return self._native.version()
        count = self._mail.ask(0, Letter(_SHOW)).version
        self._native.take_copy(np.empty(0, np.float32), 0, 0, count, self._timeout_s)
        return count

    def _learn(self, version: int) -> None:
        with self._learning:
            self._has = max(self._has, version)

    def _parts(self, begin: int, end: int) -> list[tuple[int, int]]:
        starts = [0, *self._ends[:-1]]
        return [
            (min(max(begin, first), last), max(min(end, last), min(max(begin, first), last)))
            for first, last in zip(starts, self._ends, strict=True)
        ]

    def _cut(self, what: int, begin: int, end: int, flags: int) -> list[Letter]:
        """Cut into letters of up to a block; replies have whole chunks, so each has one stamp."""
        chunk, letters = self._chunk, []
        while begin < end:
            stop = min(end, (begin // self._block + 1) * self._block)
            first = begin // chunk * chunk
            last = min(self._count, -(-stop // chunk) * chunk)
            letters.append(Letter(what, first, last - first, begin, stop - begin, flags))
            begin = stop
        return letters

    def _apply(
        self, what: int, flags: int, values: Any, at: int, *, finishes: bool, sums: Any = None
    ) -> int:
        """Apply a change to this node's values; `sums` gets the new values of an addition."""
        if what == _ADD:
            narrow = bool(flags & _NARROW)
            return self._native.accumulate_part(values, narrow, at, sums, self._timeout_s, finishes)
        return self._native.write(values.view(np.float32), at, self._timeout_s, finishes)

    # --- in the thread of an owner ---

    def _serve(self, letter: Letter, values: Any, out: Any) -> tuple[int, int]:
        """Serve a letter; return a version that the values have, and that of a whole change.

        The first is read before the values. Only owner 0 knows these numbers; others return 0.
        """
        version = self._native.version() if self._own == 0 else 0
        if letter.what == _COUNT:
            return version, self._native.fetch_add(letter.counter, letter.value)
        made_version, new = 0, out.view(np.float32)
        finishes = bool(letter.flags & _FINISHES)
        # One pass, unless the letter begins or ends within a chunk: the reply has the same values.
        at_once = letter.what == _ADD and letter.length == letter.returns
        if letter.what != _SHOW:
            width = 2 if letter.flags & _NARROW else 4
            part = values[: letter.length * width]
            made_version = self._apply(
                *(letter.what, letter.flags, part, letter.at),
                finishes=finishes,
                sums=new if at_once else None,
            )
        if not at_once:
            self._native.read(new, letter.offset, self._timeout_s)
        return version, made_version if finishes else 0


def chunk_bytes_over(comm: Comm, shards: str | None, wanted: int) -> int:
    """Return `wanted`, or the largest chunk that fits one letter, in bytes; local."""
    return min(wanted, Mail.most_block_bytes(comm.size, len(_owners(comm, shards))) // 64 * 64)


def _owners(comm: Comm, shards: str | None) -> list[int]:
    """Return the first rank of each node, by node, or that of the first node alone."""
    first: dict[int, int] = {}
    for rank, node in enumerate(comm.nodes):
        first.setdefault(node, rank)
    leaders = [first[node] for node in sorted(first)]
    return leaders if shards == "node" else leaders[:1]


def _shares(count: int, chunk: int, owners: int) -> list[int]:
    """Return where the values of each owner end: whole chunks, as even as possible."""
    chunks = -(-count // chunk)
    return [min(count, chunks * (owner + 1) // owners * chunk) for owner in range(owners)]


def _bytes_of(array: Any) -> Any:
    if hasattr(array, "detach"):
        import torch

        return array.detach().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(array).reshape(-1).view(np.uint8)
