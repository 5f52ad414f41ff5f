"""A ParameterBox over several nodes: each owns a part of the values, and has a copy of the others.

Owns who owns what, and how a change is cut into letters. Never waits for a thread of the owner's
program: the mail of the library serves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hsgd.box.local import ParameterBox, _open
from hsgd.box.rpc import Letter, Mail, Reply
from hsgd.checked import natural
from hsgd.comm import Comm
from hsgd.networks import Network

__all__ = ["SpreadBox"]

_BLOCK_BYTES = 1 << 20
_ADD, _WRITE, _COUNT, _SHOW = range(4)  # Letter.what
_NARROW, _FINISHES = 1, 2  # Letter.flags


class SpreadBox(ParameterBox):
    """What ParameterBox.over() makes on several nodes; its methods are those of ParameterBox.

    Owner 0 has the counters, and counts the changes: each of them ends there. A count that was
    known before an owner was asked for values is a version that these have: whoever is counted has
    been at all owners. `_has` is that of all values here that other nodes own.
    """

    def __init__(
        self,
        comm: Comm,
        initial: Any,
        shards: str | None,
        counters: int,
        chunk_bytes: int,
        timeout_s: float,
        network: Network,
    ) -> None:
        start = np.array(initial, np.float32, copy=True).reshape(-1)
        comm.broadcast(start, name="initial values of the box")
        leaders = _leaders(comm)
        owners = leaders if shards == "node" else leaders[:1]
        most = Mail.most_block_bytes(comm.size, len(owners)) // 64 * 64
        chunk_bytes = min(chunk_bytes, most)
        here = ParameterBox._together(comm, start, counters, chunk_bytes, timeout_s)
        _open.discard(here)
        self._keep(here._native, here.key, timeout_s)
        self._comm = comm
        self._ends = _shares(start.size, chunk_bytes // 4, len(owners))
        self._own = comm.cross_rank if comm.cross_rank < len(owners) else -1
        self._complete = self._own == 0 and len(owners) == 1  # all is here, and counted here
        block = max(1, min(_BLOCK_BYTES, most) // chunk_bytes) * chunk_bytes
        self._block = block // 4  # values
        self._has, self._learning = 0, threading.Lock()
        self._mail = Mail(comm, owners, block, self._serve, timeout_s, network)
        comm.barrier()

    # --- what differs from a box of one node ---

    def read(self, out: Any, offset: int = 0) -> int:
        has = self._has  # before the values, which only grow newer
        version = super().read(out, offset)
        return version if self._complete else has

    def write(self, values: Any, offset: int = 0) -> int:
        self._native.check_change("write", values, natural("ParameterBox: offset", offset))
        return self._change(_WRITE, _bytes_of(values), offset, 0)

    def accumulate(self, delta: Any, offset: int = 0) -> int:
        narrow = self._native.check_change(
            "accumulate", delta, natural("ParameterBox: offset", offset)
        )
        return self._change(_ADD, _bytes_of(delta), offset, _NARROW if narrow else 0)

    def elastic(
        self, weights: Sequence[Any], rate: float, delta: Any | None = None
    ) -> tuple[int, float]:
        pushed = delta
        if pushed is None:
            pushed = np.empty(sum(_bytes_of(weight).size // 4 for weight in weights), np.float32)
        has = self._has  # as in read()
        version, squares = super().elastic(weights, rate, pushed)
        if delta is None:
            self.accumulate(pushed)
        return version if self._complete else has, squares

    def refresh(self) -> None:
        super().refresh()
        has = self._count_now()
        for owner, (begin, end) in enumerate(self._parts(0, self.count)):
            if owner != self._own:
                letters = [(letter, None) for letter in self._cut(_SHOW, begin, end, 0)]
                self._mail.send(owner, letters, self._take)
        self._learn(has)

    def fetch_add(self, counter: int, value: int = 1) -> int:
        if self._own == 0 or not 0 <= counter < self.counters:
            return super().fetch_add(counter, value)
        super().refresh()  # refuses when closed
        return self._mail.ask(0, Letter(_COUNT, counter=counter, value=value)).value

    @property
    def counts_at_once(self) -> bool:
        return self._own == 0

    def _end_of_program(self) -> None:
        self._comm.leave()  # others may stand in a collective, as after sys.exit() here

    def _leave(self, *, waits: bool) -> None:
        if self.closed:
            return
        try:
            self._mail.close(waits=waits)
        finally:
            super()._leave(waits=waits)

    # --- a change ---

    def _change(self, what: int, values: Any, offset: int, flags: int) -> int:
        """Each owner's part to it; owner 0 comes last, and counts the change as a whole."""
        width = 2 if flags & _NARROW else 4
        length = values.size // width
        parts = self._parts(offset, offset + length)
        # Where nobody else is asked, the first answer of owner 0 comes before all other values.
        alone = len(parts) - (self._own >= 0) == 1
        whole = (offset, length) == (0, self.count)
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
            self._learn(newest if newest == has + 1 else has)  # nobody else's came between
        return newest

    def _take(self, letter: Letter, reply: Reply, values: Any) -> None:
        count = max(reply.version, reply.value)
        self._native.take_copy(values, letter.offset, reply.stamp, count, self._timeout_s)

    def _count_now(self) -> int:
        """How many changes owner 0 has counted."""
        if self._own == 0:
            return self._native.version()
        count = self._mail.ask(0, Letter(_SHOW)).version
        self._native.take_copy(np.empty(0, np.float32), 0, 0, count, self._timeout_s)
        return count

    def _learn(self, version: int) -> None:
        with self._learning:
            self._has = max(self._has, version)

    def _parts(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What of a range each owner has."""
        starts = [0, *self._ends[:-1]]
        return [
            (min(max(begin, first), last), max(min(end, last), min(max(begin, first), last)))
            for first, last in zip(starts, self._ends, strict=True)
        ]

    def _cut(self, what: int, begin: int, end: int, flags: int) -> list[Letter]:
        """Letters of up to a block; whole chunks come back, so that each has one stamp."""
        chunk, letters = self.chunk_bytes // 4, []
        while begin < end:
            stop = min(end, (begin // self._block + 1) * self._block)
            first = begin // chunk * chunk
            last = min(self.count, -(-stop // chunk) * chunk)
            letters.append(Letter(what, first, last - first, begin, stop - begin, flags))
            begin = stop
        return letters

    def _apply(
        self, what: int, flags: int, values: Any, at: int, *, finishes: bool, sums: Any = None
    ) -> int:
        """`sums`: of what is added, where the new values go."""
        if what == _ADD:
            narrow = bool(flags & _NARROW)
            return self._native.accumulate_part(values, narrow, at, sums, self._timeout_s, finishes)
        return self._native.write(values.view(np.float32), at, self._timeout_s, finishes)

    # --- in the thread of an owner ---

    def _serve(self, letter: Letter, values: Any, out: Any) -> tuple[int, int]:
        """Tells a version that the values have, so it is looked up before them, and the number that
        a whole change has got; owner 0 alone knows them.
        """
        version = self._native.version() if self._own == 0 else 0
        if letter.what == _COUNT:
            return version, self._native.fetch_add(letter.counter, letter.value)
        made_version, new = 0, out.view(np.float32)
        finishes = bool(letter.flags & _FINISHES)
        # The same values are asked for, unless the letter begins or ends within a chunk: one pass.
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


def _leaders(comm: Comm) -> list[int]:
    """The first rank of each node, by node."""
    first: dict[int, int] = {}
    for rank, node in enumerate(comm.nodes):
        first.setdefault(node, rank)
    return [first[node] for node in sorted(first)]


def _shares(count: int, chunk: int, owners: int) -> list[int]:
    """Where the values of each owner end: whole chunks, as even as can be."""
    chunks = -(-count // chunk)
    return [min(count, chunks * (owner + 1) // owners * chunk) for owner in range(owners)]


def _bytes_of(array: Any) -> Any:
    """The bytes of a NumPy array or a torch tensor, which are checked already."""
    if hasattr(array, "detach"):
        import torch

        return array.detach().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(array).reshape(-1).view(np.uint8)
