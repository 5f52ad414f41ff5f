"""ReplicaGuard: finds ranks whose parameters should be equal and are not, while a job runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hsgd.comm.agree import agree, digest_of
from hsgd.comm.communicator import Comm
from hsgd.config import Config
from hsgd.errors import ReplicasDiffer, SignatureMismatch
from hsgd.optim.replicas.checksums import CHUNK_WORDS, fold, layout_sum, value_sums, word_count

__all__ = ["ReplicaGuard"]

Named = list[tuple[str, Tensor]]
_TURNS = 512  # steps in which everything is summed once
_EVERY = 8  # steps between exchanges of sums
_LEAST_WORDS = CHUNK_WORDS // 4  # of a turn
_TENSOR_WORDS = CHUNK_WORDS // 2  # fixed cost of a tensor, in words that are summed
_MODES = ("share", "0", "1")
_NAME = "replica guard"
_LEAST = -(1 << 63)


class ReplicaGuard:
    """Compares what ranks should hold equal, bit for bit; local to make.

    The first rank's HSGD_CHECK_REPLICAS counts: with "share" the first step compares everything,
    each later one a share, so that all is compared within 520 steps.

    Args:
        tensors: returns the (name, tensor) pairs; names are equal on all ranks.
        turns: steps in which everything is summed once.
        every: steps between exchanges of sums.
        terms: returns further values by name that must be equal, compared as text in each exchange.
        rank: this rank's number in errors; None: that in the communicator.
        part: index of this rank among those that see the same memory, and their number; each sums
            its own part. Equal on all nodes; a rank with a higher index sums nothing.
    """

    def __init__(
        self,
        tensors: Callable[[], Named],
        *,
        turns: int = _TURNS,
        every: int = _EVERY,
        terms: Callable[[], Mapping[str, object]] | None = None,
        rank: int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._tensors, self._terms = tensors, terms
        self._turn_count, self._every = turns, every
        self._rank, self._part = rank, part
        self._wanted: str = Config.from_env().check_replicas
        self._mode: str = self._wanted
        self._comm: Comm | None = None
        self._steps = 0
        self.restart()

    def restart(self) -> None:
        """Compare everything in the next step; local, on all ranks after the same step."""
        self._since = 0
        self._turns: list[list[tuple[str, Tensor, int, int]]] = []
        self._sums: list[int | Tensor] = []

    def check(self, comm: Comm, step: int | None = None) -> None:
        """Sum what is due in this step; collective over `comm`, blocking in one of `every` steps.

        `step` is its number in errors; None is that of the call. Raises ReplicasDiffer on all
        ranks.
        """
        if comm.size == 1:
            return
        if comm is not self._comm:
            first = np.array([_MODES.index(self._wanted), self._steps], np.int64)
            comm.broadcast(first, name=_NAME)  # a rank that joined has not counted steps
            mode, self._steps = first.tolist()
            self._comm, self._mode = comm, _MODES[mode]
            self.restart()
        if self._mode == "0":
            return
        self._steps = self._steps + 1 if step is None else step
        whole = self._mode == "1" or self._since == 0
        if whole or not self._turns:
            self._turns = self._divided()
        if whole:
            for turn in self._turns:
                self._take(turn)
        elif self._turns:
            self._take(self._turns.pop())
        self._since += 1
        if whole or self._since % self._every == 0:
            total, self._sums = fold(self._sums), []
            if not all(_equal(comm, self._compared(total))):
                self._find(comm)

    def _divided(self) -> list[list[tuple[str, Tensor, int, int]]]:
        """Return what this rank sums in each turn, the last turn first."""
        here, parts = self._part
        if here >= parts:
            return [[]] * self._turn_count
        turns = _divided(_in_order(self._tensors()), self._turn_count * parts)
        return turns[here::parts] or [[]] * self._turn_count

    def _compared(self, total: int) -> list[int | None]:
        here, parts = self._part
        own: list[int | None] = [total if part == here else None for part in range(parts)]
        return own if self._terms is None else [*own, digest_of(self._terms())]

    def _take(self, turn: Sequence[tuple[str, Tensor, int, int]]) -> None:
        for name, tensor, begin, end in turn:
            if begin == 0:
                self._sums.append(layout_sum(name, tensor))
            # Values may have changed shape or dtype since the turns were made.
            self._sums.extend(value_sums(tensor, begin, min(end, word_count(tensor))))

    def _find(self, comm: Comm) -> None:
        """Raise for the term or parameter that differs, if one still does; collective."""
        self._agree(comm)
        named = _in_order(self._tensors())
        names = [len(named), fold(layout_sum(name, torch.empty(0)) for name, _ in named)]
        if not all(_equal(comm, names)):
            what = "has other parameters, by name,"
            raise self._error(comm, None, what, names, "")
        layouts = [layout_sum(name, tensor) for name, tensor in named]
        values = [fold(value_sums(tensor, 0, word_count(tensor))) for _, tensor in named]
        same = [all(pair) for pair in zip(_equal(comm, layouts), _equal(comm, values), strict=True)]
        if all(same):
            return  # they became equal meanwhile
        first = same.index(False)
        laid_out_alike = _equal(comm, layouts[first : first + 1])[0]
        what = f"has other {'values' if laid_out_alike else 'strides, shape or dtype'} of "
        name = named[first][0]
        count = f" ({same.count(False)} of {len(same)} parameters differ)"
        own = values if laid_out_alike else layouts
        raise self._error(comm, name, what + name, own[first : first + 1], count)

    def _agree(self, comm: Comm) -> None:
        """Raise ReplicasDiffer if terms differ, since parameters then differ too; collective."""
        if self._terms is None:
            return
        try:
            agree(comm, f"replica guard, step {self._steps}", self._terms)
        except SignatureMismatch as mismatch:
            error = ReplicasDiffer(str(mismatch))
            error.rank, error.ranks = mismatch.rank, (mismatch.rank,)
            raise error from None

    def _error(
        self, comm: Comm, name: str | None, what: str, own: Sequence[int], count: str
    ) -> ReplicasDiffer:
        """Return the error about the ranks that differ from the majority; collective, blocking."""
        rank = comm.rank if self._rank is None else self._rank
        rows = sorted(map(tuple, comm.allgather(np.array([[rank, *own]], np.int64)).tolist()))
        found = Counter(row[1:] for row in rows)
        most = max(rows, key=lambda row: found[row[1:]])[1:]  # of a tie the lowest rank's
        ranks = tuple(rank for rank, *row in rows if tuple(row) != most)
        told = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
        others = [rank for rank, *row in rows if tuple(row) == most]
        against = f"rank {others[0]}" if len(others) == 1 else f"the other {len(others)} ranks"
        error = ReplicasDiffer(
            f"replica guard, step {self._steps}: rank {told} {what} than {against}{count}; usual "
            "causes: another seed, a branch that depends on data, a parameter changed on one rank "
            "or without a hook, a checkpoint loaded on one rank; broadcast the parameters before "
            "the first step, or set HSGD_CHECK_REPLICAS=0 where ranks are to differ"
        )
        error.rank, error.ranks, error.parameter = ranks[0], ranks, name
        return error


def _in_order(named: Named) -> Named:
    """Return pairs by name, numbers in it as numbers: ranks may order groups differently."""
    return sorted(named, key=lambda pair: re.sub(r"\d+", lambda m: m[0].zfill(9), pair[0]))


def _divided(named: Named, count: int) -> list[list[tuple[str, Tensor, int, int]]]:
    """Return the words of all tensors in up to `count` turns of similar cost, last one first."""
    total = sum(word_count(tensor) + _TENSOR_WORDS for _, tensor in named)
    most = max(_LEAST_WORDS, -(-total // max(count - 1, 1)))
    turns: list[list[tuple[str, Tensor, int, int]]] = [[]]
    left = most
    for name, tensor, begin, end in _pieces(named, most):
        cost = end - begin + (_TENSOR_WORDS if begin == 0 else 0)
        if left <= 0:
            turns.append([])
            left += most
        left -= cost
        turns[-1].append((name, tensor, begin, end))
    return turns[::-1]


def _pieces(named: Named, most: int) -> Iterator[tuple[str, Tensor, int, int]]:
    step = min(most, CHUNK_WORDS)
    for name, tensor in named:
        count = word_count(tensor)
        for begin in range(0, max(count, 1), step):
            yield name, tensor, begin, min(begin + step, count)


def _equal(comm: Comm, numbers: Sequence[int | None]) -> list[bool]:
    """Return which numbers are equal on all ranks that do not have None; collective, blocking."""
    count = len(numbers)
    if not count:
        return []
    pairs = [(_LEAST, _LEAST) if number is None else (number, ~number) for number in numbers]
    own = np.array(pairs, np.int64)
    comm.allreduce(own, "max", out=own, name=_NAME)
    return [bool(most == ~least or most == least == _LEAST) for most, least in own.tolist()]
