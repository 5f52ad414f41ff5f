"""ReplicaGuard: finds ranks whose parameters should be equal and are not, while a job runs.

Owns what is compared when, and what is said of a difference. Never changes a value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hsgd.comm import Comm
from hsgd.config import Config
from hsgd.errors import ReplicasDiffer
from hsgd.optim.replicas.checksums import CHUNK_WORDS, fold, layout_sum, value_sums, word_count

__all__ = ["ReplicaGuard"]

Named = list[tuple[str, Tensor]]
_TURNS = 256  # steps in which all is looked at
_EVERY = 8  # steps from one exchange to the next
_LEAST_WORDS = CHUNK_WORDS // 4  # of a turn
_TENSOR_WORDS = CHUNK_WORDS // 2  # what the beginning of a tensor costs, in words that are summed
_MODES = ("share", "0", "1")
_NAME = "replica guard"


class ReplicaGuard:
    """Compares what ranks should hold alike, bit for bit; local to make.

    tensors: gives them with their names, which are equal on all ranks. The first rank's
    HSGD_CHECK_REPLICAS holds for all: with "share" everything in the first step, then a share in
    each, so that all is compared within 264 steps.
    """

    def __init__(self, tensors: Callable[[], Named]) -> None:
        self._tensors = tensors
        self._wanted: str = Config.from_env().check_replicas
        self._mode: str = self._wanted
        self._comm: Comm | None = None
        self._steps = 0
        self.restart()

    def restart(self) -> None:
        """Compare everything in the next step; local, by all ranks after the same step."""
        self._since = 0
        self._turns: list[list[tuple[str, Tensor, int, int]]] = []
        self._sums: list[int | Tensor] = []

    def check(self, comm: Comm) -> None:
        """Look at what is due in this step; collective over `comm`, blocking in one of 8 steps.
        Raises ReplicasDiffer on all ranks.
        """
        if comm.size == 1:
            return
        if comm is not self._comm:
            mode = np.array([_MODES.index(self._wanted)], np.int64)
            comm.broadcast(mode, name=_NAME)
            self._comm, self._mode = comm, _MODES[int(mode[0])]
            self.restart()
        if self._mode == "0":
            return
        self._steps += 1
        whole = self._mode == "1" or self._since == 0
        if whole or not self._turns:
            self._turns = _divided(_in_order(self._tensors()))
        if whole:
            for turn in self._turns:
                self._take(turn)
        elif self._turns:
            self._take(self._turns.pop())
        self._since += 1
        if whole or self._since % _EVERY == 0:
            total, self._sums = fold(self._sums), []
            if not _equal(comm, [total])[0]:
                self._find(comm)

    def _take(self, turn: Sequence[tuple[str, Tensor, int, int]]) -> None:
        for name, tensor, begin, end in turn:
            if begin == 0:
                self._sums.append(layout_sum(name, tensor))
            # Values may have changed shape or dtype since the turns were made.
            for one in value_sums(tensor, begin, min(end, word_count(tensor))):
                self._sums.append(int(one) if one.device.type == "cpu" else one)

    def _find(self, comm: Comm) -> None:
        """Say which parameter differs, if one still does; collective."""
        named = _in_order(self._tensors())
        names = [len(named), fold(layout_sum(name, torch.empty(0)) for name, _ in named)]
        if not all(_equal(comm, names)):
            what = "has other parameters, by name,"
            raise self._error(comm, None, what, comm.allgather(np.array([names])), "")
        layouts = [layout_sum(name, tensor) for name, tensor in named]
        values = [fold(value_sums(tensor, 0, word_count(tensor))) for _, tensor in named]
        same = [all(pair) for pair in zip(_equal(comm, layouts), _equal(comm, values), strict=True)]
        if all(same):
            return  # made equal meanwhile
        first = same.index(False)
        table = comm.allgather(np.array([[layouts[first], values[first]]], np.int64))
        laid_out_alike = len(set(table[:, 0].tolist())) == 1
        what = f"has other {'values' if laid_out_alike else 'strides, shape or dtype'} of "
        name = named[first][0]
        count = f" ({same.count(False)} of {len(same)} parameters differ)"
        raise self._error(comm, name, what + name, table if laid_out_alike else table[:, :1], count)

    def _error(
        self, comm: Comm, name: str | None, what: str, table: np.ndarray, count: str
    ) -> ReplicasDiffer:
        rows = [tuple(row) for row in table.tolist()]
        found = Counter(rows)
        most = max(rows, key=lambda row: found[row])  # of equally many that of the lowest rank
        ranks = tuple(rank for rank, row in enumerate(rows) if row != most)
        told = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
        others = [rank for rank, row in enumerate(rows) if row == most]
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
    """By name, numbers in it as numbers: groups may be in another order on another rank."""
    return sorted(named, key=lambda pair: re.sub(r"\d+", lambda m: m[0].zfill(9), pair[0]))


def _divided(named: Named) -> list[list[tuple[str, Tensor, int, int]]]:
    """The words of all tensors in turns of about equal cost, the last one first."""
    total = sum(word_count(tensor) + _TENSOR_WORDS for _, tensor in named)
    most = max(_LEAST_WORDS, -(-total // (_TURNS - 1)))
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


def _equal(comm: Comm, numbers: Sequence[int]) -> list[bool]:
    """Which of them all ranks have alike; collective, blocking."""
    own = np.array([*numbers, *(~number for number in numbers)], np.int64)
    comm.allreduce(own, "max", out=own, name=_NAME)
    count = len(numbers)
    return [bool(each) for each in own[:count] == ~own[count:]]
