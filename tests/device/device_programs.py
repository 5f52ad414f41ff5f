"""What ranks do with arrays of a simulated device; run by the tests of this folder.

Owns random collectives whose inputs are made by kernels of the device just before, and overwritten
by kernels just after, so that whatever does not wait for the other is seen in the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsgd import Comm
from simcuda_build import build
from simulated import DeviceArray, Simulator

__all__ = ["Steps", "simulator", "value"]

Array = npt.NDArray[Any]
KINDS = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall")
KERNEL_DTYPES = ("float32", "float64", "int32", "int64")
LIBRARIES = Path(__file__).resolve().parents[2] / "build" / "simcuda"


def simulator(seed: int, most_us: int) -> Simulator:
    """The simulated device of this process, with random delays."""
    made = Simulator(build(LIBRARIES))
    made.set_delays(seed, most_us)
    return made


def value(rank: int, step: int, count: int) -> Array:
    """What a rank puts in: whole numbers, whose sums are exact in every dtype."""
    return (np.arange(count) % 7 + rank + step % 5).astype(np.int64)


@dataclass
class Case:
    """One collective, the same on all ranks."""

    step: int
    kind: str
    dtype: str
    rows: int
    stream: int  # number
    in_place: bool
    waits_late: bool
    root: int
    op: str


class Steps:
    """Random collectives of one rank; `check` compares all that came out with NumPy.

    seed: of the cases, the same on all ranks.
    """

    def __init__(self, comm: Comm, device: Simulator, seed: int, most_rows: int) -> None:
        self.comm, self.device = comm, device
        self.draw = np.random.default_rng(seed)
        self.most_rows = most_rows
        self.streams = [0, device.stream(), device.stream()]
        self.outcomes: list[tuple[Case, DeviceArray, Array]] = []
        self.late: list[tuple[Any, Case, DeviceArray, Array]] = []

    def case(self, step: int) -> Case:
        draw = self.draw
        size = self.comm.size
        kind = str(draw.choice(KINDS))
        rows = (
            int(draw.integers(0, 3))
            if draw.random() < 0.1
            else int(np.exp(draw.uniform(0, np.log(self.most_rows))))
        )
        if kind == "alltoall":
            rows = (rows // size + 1) * size
        return Case(
            step,
            kind,
            str(draw.choice(KERNEL_DTYPES)),
            rows,
            int(draw.integers(len(self.streams))),
            bool(draw.random() < 0.5),
            bool(draw.random() < 0.3),
            int(draw.integers(size)),
            str(draw.choice(["sum", "max", "min"])),
        )

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.one(self.case(step))
            if len(self.outcomes) >= 25:
                self.check()
        self.check()

    def one(self, case: Case) -> None:
        device, comm = self.device, self.comm
        stream = self.streams[case.stream]
        mine = value(comm.rank, case.step, case.rows)
        base = device.array(mine.astype(case.dtype))
        source = DeviceArray.from_numpy(device, np.zeros(case.rows, case.dtype), stream)
        want = self.expected(case)
        in_place = case.kind == "broadcast" or (case.in_place and case.kind == "allreduce")
        out = (
            source
            if in_place
            else DeviceArray.from_numpy(device, np.full(want.shape, 99, case.dtype), stream)
        )
        if case.rows:
            device.scale_add(stream, source.pointer, base.pointer, case.rows, case.dtype, 1, 0)
        handle = self.start(case, source, out)
        if case.waits_late:
            self.late.append((handle, case, out, want))
        else:
            handle.wait()
            self.finish(case, out, want)
            if case.rows:  # the input, once the collective is over
                device.scale_add(stream, source.pointer, base.pointer, case.rows, case.dtype, 0, -1)
        if len(self.late) > 3:
            self.settle()

    def settle(self) -> None:
        for handle, case, out, want in self.late:
            handle.wait()
            self.finish(case, out, want)
        self.late.clear()

    def finish(self, case: Case, out: DeviceArray, want: Array) -> None:
        """Copies the result on its stream, as a program uses it, and overwrites it."""
        device, stream = self.device, self.streams[case.stream]
        kept = DeviceArray.from_numpy(device, np.zeros(want.shape, case.dtype), stream)
        if want.size:
            device.copy_async(kept.pointer, out.pointer, want.nbytes, stream)
            device.scale_add(stream, out.pointer, out.pointer, want.size, case.dtype, 0, -7)
        self.outcomes.append((case, kept, want))

    def start(self, case: Case, source: DeviceArray, out: DeviceArray) -> Any:
        comm = self.comm
        if case.kind == "allreduce":
            return comm.allreduce_async(source, case.op, out=out)
        if case.kind == "broadcast":
            return comm.broadcast_async(source, case.root)
        if case.kind == "allgather":
            return comm.allgather_async(source, out=out)
        if case.kind == "reduce_scatter":
            return comm.reduce_scatter_async(source, case.op, out=out)
        return comm.alltoall_async(source, out=out)

    def expected(self, case: Case) -> Array:
        size, rank = self.comm.size, self.comm.rank
        inputs = [value(each, case.step, case.rows) for each in range(size)]
        combine = {"sum": np.sum, "max": np.max, "min": np.min}[case.op]
        if case.kind == "broadcast":
            result = inputs[case.root]
        elif case.kind == "allgather":
            result = np.concatenate(inputs)
        elif case.kind == "alltoall":
            result = np.concatenate([np.split(each, size)[rank] for each in inputs])
        else:
            result = combine(inputs, axis=0)
        if case.kind == "reduce_scatter":
            result = np.array_split(result, size)[rank]
        return result.astype(case.dtype)

    def check(self) -> None:
        """Raises AssertionError for the first result that differs."""
        self.settle()
        for case, kept, want in self.outcomes:
            got = kept.numpy()
            assert np.array_equal(got, want), f"{case}: {got[:8]} instead of {want[:8]}"
            kept.free()
        self.outcomes.clear()
