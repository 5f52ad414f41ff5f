"""One rank of a worker job: does what the parent orders (serving.py).

Owns the buffers, the timed loop and the check of the results on this rank. Never decides how often
or in which order anything is measured. Started by mpirun: rank.py worker SOCKET.

Orders: `setup NAME [WORD]`, `measure NAME COLLECTIVE BYTES CALLS BATCHES BUFFERS`, `release`,
`end`. Of the answers {"error": ...} says why a candidate cannot be measured, {"missing": ...} why
it cannot do this collective. Runs with NumPy and mpi4py alone: other environments have no hsgd.
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.candidates import CANDIDATES
from harness.operations import OPERATIONS, Operation
from harness.pattern import Floats, Pattern, difference, digest
from workers.bindings import BINDINGS, Binding, Call
from workers.serving import serve

__all__ = ["Bench", "main"]

_BY_NAME = {candidate.does: candidate for candidate in CANDIDATES}
_LATE_S = 2e-3  # how much later one rank comes when a barrier is checked


@dataclass
class _Buffers:
    """Pairs of arrays for one collective and size."""

    key: tuple[object, ...]
    inputs: list[Floats]
    outputs: list[Floats]


class Bench:
    """The candidates of this rank and the buffers that they share."""

    def __init__(self, folder: str) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.world = MPI.COMM_WORLD
        self.folder = folder
        self.bindings: dict[str, Binding] = {}
        self.pattern = Pattern(self.world.size)
        self.buffers: dict[str, _Buffers] = {}
        self.pauses = random.Random(1)  # the same on all ranks

    def setup(self, name: str, *_: str) -> dict[str, Any]:
        """Import and start a candidate; collective."""
        self.bindings[name] = BINDINGS[name](self.folder)
        return {}

    def measure(self, name: str, collective: str, *numbers: str) -> dict[str, Any]:
        """Seconds per call of each batch, and whether the results are right; collective.

        Buffers are used in turn. All are used once untimed and then spoilt, so what is checked
        was written by the timed calls. A batch begins when all ranks have arrived.
        """
        nbytes, calls, batches, pairs = map(int, numbers)
        operation, binding = OPERATIONS[collective], self.bindings[name]
        mine = self._allocate(operation, binding, nbytes, pairs)
        refills = _BY_NAME[name].in_place and collective == "allreduce"
        cycle_s = _BY_NAME[name].cycle_s
        try:
            bound = binding.bind(collective, mine.inputs, mine.outputs)
        except NotImplementedError as error:
            return {"missing": str(error)}
        for call in bound:
            call()
        self._spoil(operation, binding, mine)
        seconds, used = [], 0
        for _ in range(batches):
            batch = [bound[(used + i) % pairs] for i in range(calls)]
            if refills:
                self._fill_inputs(binding, mine)
            seconds.append(self._time_apart(batch, cycle_s) if cycle_s else self._time(batch))
            used += calls
        recent = {(used - 1 - i) % pairs for i in range(min(pairs, calls))}
        answer = {"seconds": seconds, **self._check(operation, binding, mine, sorted(recent))}
        if refills:
            self._fill_inputs(binding, mine)  # for who comes next
        if collective == "barrier" and "wrong" not in answer:
            return answer | self._check_barrier(bound[0])
        return answer

    def release(self) -> dict[str, Any]:
        """Give the buffers back."""
        self.buffers.clear()
        return {}

    def end(self) -> dict[str, Any]:
        """Stop the candidates; collective."""
        self.release()
        for binding in self.bindings.values():
            binding.close()
        return {}

    def _time(self, batch: list[Call]) -> float:
        self.world.Barrier()
        begin = time.perf_counter()
        for call in batch:
            call()
        return (time.perf_counter() - begin) / len(batch)

    def _time_apart(self, batch: list[Call], cycle_s: float) -> float:
        """The mean of calls that each begin at a random moment of a candidate's own cycle.

        Back to back, the next call would always begin right after a step of the cycle, and a bit of
        work more or less would count as a whole step or as nothing.
        """
        total = 0.0
        for call in batch:
            self.world.Barrier()  # before the pause: it spins, and Horovod's threads need the cores
            time.sleep(self.pauses.uniform(0, cycle_s))
            begin = time.perf_counter()
            call()
            total += time.perf_counter() - begin
        return total / len(batch)

    def _allocate(
        self, operation: Operation, binding: Binding, nbytes: int, pairs: int
    ) -> _Buffers:
        """The buffers for this case; new ones where the last of their kind were for another."""
        key = (operation.name, nbytes, pairs)
        kept = self.buffers.get(binding.buffers)
        if kept is None or kept.key != key:
            self.buffers = {k: b for k, b in self.buffers.items() if b.key == key}  # first, memory
            kept = None
            counts = operation.counts(self.world.size, nbytes)
            arrays = [[binding.empty(count) for _ in range(pairs)] for count in counts]
            kept = self.buffers[binding.buffers] = _Buffers(key, *arrays)
            self._fill_inputs(binding, kept)
            self._spoil(operation, binding, kept)
        return kept

    def _fill_inputs(self, binding: Binding, mine: _Buffers) -> None:
        for buffer, array in enumerate(mine.inputs):
            binding.fill(array, self.pattern.given(self.world.rank, buffer, array.size))

    def _spoil(self, operation: Operation, binding: Binding, mine: _Buffers) -> None:
        """Fill the outputs with what is no result; the root's, where it sends them, with data."""
        for buffer, out in enumerate(mine.outputs):
            if operation.in_place and self.world.rank == 0:
                binding.fill(out, self.pattern.given(0, buffer, out.size))
            else:
                out.fill(np.nan)

    def _check(
        self, operation: Operation, binding: Binding, mine: _Buffers, recent: list[int]
    ) -> dict[str, Any]:
        total = 0
        for buffer in recent:
            result = binding.result(buffer)
            count = mine.outputs[buffer].size
            expected = operation.expected(self.pattern, self.world.rank, buffer, count)
            wrong = difference(result, expected, binding.tolerance)
            if wrong:
                return {"wrong": f"buffer {buffer}: {wrong}"}
            total += digest(result)
        return {"digest": total}

    def _check_barrier(self, call: Call) -> dict[str, Any]:
        """The last rank comes late: nobody may leave before. One machine has one clock."""
        self.world.Barrier()
        if self.world.rank == self.world.size - 1:
            time.sleep(_LATE_S)
        came = time.monotonic()
        call()
        left = time.monotonic()
        early_s = self.world.allreduce(came, self.mpi.MAX) - left
        return {"wrong": f"left {early_s:.6f} s before the last rank came"} if early_s > 0 else {}


def main(address: str) -> None:
    """Serve the parent at `address`."""
    bench = Bench(os.path.dirname(address))
    serve(address, bench.world.rank, lambda verb, *words: getattr(bench, verb)(*words))


if __name__ == "__main__":
    main(sys.argv[1])
