"""Random programs of reduce_scatter, allgather and alltoall, checked against NumPy on each rank.

Owns what is drawn and what must come out. Run by ranks of any kind: forked ones and those of
mpirun. Never starts ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reference import allreduced, as_torch, digest, made, zeros

__all__ = ["KINDS", "wrong_results"]

# The name of a method, its arguments, and the judgement of its result.
Prepared = tuple[str, dict[str, Any], Callable[[Any], bool]]
KINDS = ("reduce_scatter", "allgather", "alltoall")


def wrong_results(
    comm: Any,
    nodes: list[list[int]],
    seed: int,
    calls: int,
    dtypes: Sequence[str],
    most_rows: int = 3000,
    tensors: bool = True,
    asynchronous: bool = False,
    shared: Sequence[np.ndarray] = (),
) -> list[str]:
    """Run a program, the same on all ranks; a line for each result that differs from NumPy's.

    nodes: the ranks of each node, in local order. tensors: some of the arrays are torch's.
    asynchronous: most calls are, and each rank waits for them in an order of its own.
    shared: two arrays of bytes of Comm.empty, in which arguments lie then; blocking calls only.
    """
    program, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
    wrong = []
    open_calls: list[tuple[str, Any, Callable[[Any], bool]]] = []

    def judge(line: str, right: bool) -> None:
        if not right:
            wrong.append(line)

    def wait_for_one() -> None:
        line, handle, is_right = open_calls.pop(own.randrange(len(open_calls)))
        result = handle.wait(own.choice([None, 60]))
        judge(line, handle.done() and is_right(result) and handle.wait() is result)

    for call in range(calls):
        case = Case(program, comm.size, dtypes, seed * 1000 + call, most_rows, tensors)
        case.share(program, comm, shared)
        line = f"call {call} of seed {seed} on rank {comm.rank}: {case}"
        name, arguments, is_right = case.prepared(comm, nodes)
        if asynchronous and program.random() < 0.8:
            handle = getattr(comm, f"{name}_async")(**arguments)
            open_calls.append((line, handle, is_right))
        else:
            judge(line, is_right(getattr(comm, name)(**arguments)))
            judge(f"overtaken: {line}", all(handle.done() for _, handle, _ in open_calls))
        while open_calls and (own.random() < 0.3 or len(open_calls) > 8):
            wait_for_one()
    while open_calls:
        wait_for_one()
    return wrong


class Case:
    """One call: the same on all ranks."""

    def __init__(
        self,
        program: random.Random,
        size: int,
        dtypes: Sequence[str],
        seed: int,
        most_rows: int,
        tensors: bool,
    ) -> None:
        self.kind = program.choice(KINDS)
        self.dtype = program.choice(list(dtypes))
        self.seed = seed
        means = ["mean"] if "float" in self.dtype else []
        self.op = program.choice(["sum", "min", "max", "prod", *means])
        self.width = program.choice([None, 1, 3])  # None: 1-d arrays
        self.even = program.random() < 0.3
        self.in_place = program.random() < 0.4
        tensor = program.random() < 0.5 and tensors
        self.tensor = tensor or self.dtype == "bfloat16"
        most = int(most_rows ** program.uniform(0, 1))
        blocks = size * size if self.kind == "alltoall" else size
        same = program.randrange(most + 1)
        self.rows = [
            same if self.even else program.choice([0, program.randrange(most + 1)])
            for _ in range(blocks)
        ]

    def share(self, program: random.Random, comm: Any, shared: Sequence[np.ndarray]) -> None:
        """Put arguments into shared memory: those of all ranks, inputs alone, or not the last's."""
        style = program.choice(["both", "inputs", "all but one"]) if shared else "none"
        start = 64 * program.randrange(4) * (comm.rank % 3)  # ranks need not use the same place
        private = style == "none" or (style == "all but one" and comm.rank == comm.size - 1)
        self.shared = [] if private else [array[start:] for array in shared]
        self.shares_out = bool(self.shared) and style != "inputs"

    def _placed(self, stored: np.ndarray) -> np.ndarray:
        """An input."""
        return self._in_shared(0, stored) if self.shared else stored

    def _target(self, rows: int) -> Any:
        """An output, where it is shared."""
        if not self.shares_out:
            return None
        return self._array(self._in_shared(1, zeros(rows * (self.width or 1), self.dtype)))

    def _in_shared(self, which: int, stored: np.ndarray) -> np.ndarray:
        place = self.shared[which][: stored.nbytes].view(stored.dtype)
        place[:] = stored
        return place

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.dtype} {self.op} of {self.rows} rows of {self.width}, "
            f"even {self.even}, in place {self.in_place}, tensor {self.tensor}, "
            f"shared {bool(self.shared)}, {self.shares_out}"
        )

    def prepared(self, comm: Any, nodes: list[list[int]]) -> Prepared:
        """What to call with which arguments, and whether what comes of it is right on this rank,
        and the input what it was.
        """
        if self.kind == "reduce_scatter":
            return self._reduce_scatter(comm, nodes)
        return self._allgather(comm) if self.kind == "allgather" else self._alltoall(comm)

    def _made(self, key: int, rows: int) -> np.ndarray:
        return made(self.seed, key, rows * (self.width or 1), self.dtype, special=True)

    def _array(self, stored: np.ndarray) -> Any:
        shape = (-1,) if self.width is None else (-1, self.width)
        array = as_torch(stored, self.dtype) if self.tensor else stored
        return array.reshape(shape)

    def _stored(self, array: Any) -> np.ndarray:
        if self.dtype == "bfloat16":
            array = array.view(dtype=_int16())
        return np.asarray(array).reshape(-1).view(zeros(0, self.dtype).dtype)

    def _is(self, array: Any, rows: int, stored: np.ndarray) -> bool:
        shape = (rows,) if self.width is None else (rows, self.width)
        return tuple(array.shape) == shape and digest(self._stored(array)) == digest(stored)

    def _reduce_scatter(self, comm: Any, nodes: list[list[int]]) -> Prepared:
        total = sum(self.rows)
        inputs = [self._made(rank, total) for rank in range(comm.size)]
        stored = self._placed(inputs[comm.rank].copy())
        begin = sum(self.rows[: comm.rank])
        end = begin + self.rows[comm.rank]
        array = self._array(stored)
        out = array[begin:end] if self.in_place else self._target(end - begin)
        counts = None if self.even else self.rows
        ordered = [[inputs[rank] for rank in ranks] for ranks in nodes]
        width = self.width or 1
        whole = allreduced(ordered, self.dtype, self.op)[begin * width : end * width]

        def is_right(result: Any) -> bool:
            kept = self.in_place or digest(stored) == digest(inputs[comm.rank])
            return kept and self._is(result, end - begin, whole)

        return self.kind, {"array": array, "op": self.op, "out": out, "counts": counts}, is_right

    def _allgather(self, comm: Any) -> Prepared:
        blocks = [self._made(rank, rows) for rank, rows in enumerate(self.rows)]
        whole = np.concatenate(blocks)
        rows = sum(self.rows)
        array, out = self._array(self._placed(blocks[comm.rank].copy())), self._target(rows)
        if self.in_place:
            out = self._array(self._placed(zeros(len(whole), self.dtype)))
            begin = sum(self.rows[: comm.rank])
            own = out[begin : begin + self.rows[comm.rank]]
            own[:] = self._array(blocks[comm.rank])
            array = own

        def is_right(result: Any) -> bool:
            return (out is None or result is out) and self._is(result, rows, whole)

        return self.kind, {"array": array, "out": out, "name": "gather"}, is_right

    def _alltoall(self, comm: Any) -> Prepared:
        size, rank = comm.size, comm.rank
        sent = self.rows[rank * size : (rank + 1) * size]
        received = self.rows[rank::size]
        blocks = [self._made(rank * size + to, rows) for to, rows in enumerate(sent)]
        wanted = [self._made(sender * size + rank, rows) for sender, rows in enumerate(received)]
        stored = self._placed(np.concatenate(blocks))
        before = stored.copy()

        def is_right(result: Any) -> bool:
            array, report = (result, received) if self.even else result
            kept = report == received and digest(stored) == digest(before)
            return kept and self._is(array, sum(received), np.concatenate(wanted))

        out = self._target(sum(received))
        arguments = {"array": self._array(stored), "out": out, "name": "all"}
        return self.kind, arguments if self.even else {**arguments, "send_counts": sent}, is_right


def _int16() -> Any:
    import torch

    return torch.int16
