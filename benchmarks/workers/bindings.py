"""The Python side of the candidates: how one call of each collective is made.

worker.py measures the calls that are bound here. Heavy packages are imported by the class that
needs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from harness.pattern import Floats, aligned

__all__ = ["BINDINGS", "Binding", "Call"]

Call = Callable[[], object]


class Binding:
    """A candidate in a worker. The constructor is collective and does the set-up; `folder` is
    one that all ranks see.
    """

    buffers = "private"  # bindings with the same kind of buffers use the same ones
    tolerance = 0.0  # largest relative error of its sums
    in_place: tuple[str, ...] = ()  # collectives whose result is their input

    def __init__(self, folder: str) -> None:
        pass

    def empty(self, count: int) -> Floats:
        """A new buffer of `count` float32."""
        return aligned(count)

    def fill(self, array: Floats, values: Floats) -> None:
        """Put values into a buffer of as many float32."""
        array[:] = values

    def calls(self, given: Floats, taken: Floats) -> dict[str, Call]:
        """Those that it can do on this pair of buffers, by collective; here none."""
        return {}

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        """One call per pair of buffers. Raises NotImplementedError for what it cannot do."""
        self._results = inputs if collective in self.in_place else outputs
        bound = [self.calls(*pair).get(collective) for pair in zip(inputs, outputs, strict=True)]
        if None in bound:
            raise NotImplementedError(f"there is no {collective} here")
        return bound  # type: ignore[return-value]

    def result(self, buffer: int) -> Floats:
        """What the last call on this pair gave."""
        return self._results[buffer]

    def close(self) -> None:
        """Give everything back; collective."""


def _rounding() -> float:
    """Of hsgd, which may send 16-bit floats between nodes: partial sums and result are rounded."""
    from hsgd.config import Config

    return 0.0 if Config.from_env().wire_dtype == "none" else 2 / 256


class _Hsgd(Binding):
    def __init__(self, folder: str) -> None:
        import hsgd

        self.comm: Any = hsgd.Comm()
        self.tolerance = _rounding()

    def calls(self, given: Floats, taken: Floats) -> dict[str, Call]:
        comm = self.comm
        return {
            "allreduce": partial(comm.allreduce, given, "sum", taken),
            "broadcast": partial(comm.broadcast, taken, 0),
            "allgather": partial(comm.allgather, given, taken),
            "reduce_scatter": partial(comm.reduce_scatter, given, "sum", taken),
            "alltoall": partial(comm.alltoall, given, out=taken),
            "barrier": partial(comm.barrier),
        }

    def close(self) -> None:
        self.comm.close()


class _HsgdArena(_Hsgd):
    buffers = "arena"

    def empty(self, count: int) -> Floats:
        return self.comm.empty((count,), np.float32)  # type: ignore[no-any-return]


class _HsgdTcp(_Hsgd):
    def __init__(self, folder: str) -> None:
        from mpi4py import MPI
        from torch.distributed import FileStore

        import hsgd

        world = MPI.COMM_WORLD
        store = FileStore(os.path.join(folder, "hsgd-tcp"), world.size)
        self.comm = hsgd.Comm.over_store(store, world.rank, world.size)
        self.tolerance = _rounding()


class _Mpi4py(Binding):
    def __init__(self, folder: str) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD

    def calls(self, given: Floats, taken: Floats) -> dict[str, Call]:
        world = self.world
        return {
            "allreduce": partial(world.Allreduce, given, taken),
            "broadcast": partial(world.Bcast, taken, 0),
            "allgather": partial(world.Allgather, given, taken),
            "reduce_scatter": partial(world.Reduce_scatter_block, given, taken),
            "alltoall": partial(world.Alltoall, given, taken),
            "barrier": partial(world.Barrier),
        }


class _Gloo(Binding):
    in_place = ("allreduce",)

    def __init__(self, folder: str) -> None:
        import torch
        import torch.distributed as dist
        from mpi4py import MPI

        self.dist, self.tensor = dist, torch.from_numpy
        if not dist.is_initialized():
            world = MPI.COMM_WORLD
            meeting_point = "file://" + os.path.join(folder, "gloo")
            dist.init_process_group("gloo", meeting_point, rank=world.rank, world_size=world.size)
        self.group: Any = dist.group.WORLD

    def calls(self, given: Floats, taken: Floats) -> dict[str, Call]:
        dist, group, source, target = self.dist, self.group, self.tensor(given), self.tensor(taken)
        return {
            "allreduce": partial(dist.all_reduce, source, group=group),
            "broadcast": partial(dist.broadcast, target, 0, group=group),
            "allgather": partial(dist.all_gather_into_tensor, target, source, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, target, source, group=group),
            "alltoall": partial(dist.all_to_all_single, target, source, group=group),
            "barrier": partial(dist.barrier, group),
        }

    def close(self) -> None:
        if self.dist.is_initialized():
            self.dist.destroy_process_group()


class _HsgdC10d(_Gloo):
    def __init__(self, folder: str) -> None:
        from hsgd.c10d import register

        super().__init__(folder)
        register()
        self.group = self.dist.new_group(backend="hsgd")


def _as_bfloat16(array: Floats) -> Any:
    import torch

    return torch.from_numpy(array).view(torch.bfloat16)


class _Bf16(_Gloo):
    """bfloat16 in the memory of as many bytes of float32: all values twice. Before a class whose
    calls take `self.tensor(array)`.
    """

    buffers, tolerance = "bfloat16", 4 / 256  # what is sent is rounded, and each sum

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.tensor: Any = _as_bfloat16

    def fill(self, array: Floats, values: Floats) -> None:
        import torch

        _as_bfloat16(array).view(2, -1)[:] = torch.tensor(values)

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        self._shares = outputs[0].size // inputs[0].size  # one for each rank, or one
        return super().bind(collective, inputs, outputs)

    def result(self, buffer: int) -> Floats:
        first = _as_bfloat16(super().result(buffer)).view(self._shares, 2, -1)[:, 0]
        return first.float().numpy().reshape(-1)  # type: ignore[no-any-return]


class _HsgdC10dBf16(_Bf16, _HsgdC10d):
    pass


class _Vllm(_Gloo):
    """What vLLM's communicator for CPUs calls where all ranks share a node."""

    def __init__(self, folder: str) -> None:
        import torch
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        torch.ops.load_library(os.environ["VLLM_LIBRARY"])
        self.ops: Any = torch.ops._C
        self.tensor = torch.from_numpy
        name = world.bcast(f"hsgd-benchmark-{os.getpid()}-{type(self).__name__}")
        self.handle = self.ops.init_shm_manager(name, world.size, world.rank, 1)
        world.Barrier()
        self.ops.join_shm_manager(self.handle, name)
        world.Barrier()

    def calls(self, given: Floats, taken: Floats) -> dict[str, Call]:
        ops, handle, source, target = self.ops, self.handle, self.tensor(given), self.tensor(taken)
        return {
            "allreduce": partial(ops.shm_allreduce, handle, source),
            "allgather": partial(ops.shm_all_gather, handle, source, target),
        }

    def close(self) -> None:
        pass


class _VllmBf16(_Bf16, _Vllm):
    pass


class _HsgdOperator(Binding):
    """Without the wrappers: what a compiled program calls."""

    in_place = ("allreduce",)

    def __init__(self, folder: str) -> None:
        import torch

        import hsgd
        from hsgd import operators

        self.comm, self.tensor, self.ops = hsgd.Comm(), torch.from_numpy, torch.ops.hsgd
        self.number = operators.group(self.comm).number
        self.tolerance = _rounding()

    def calls(self, given: Floats, taken: Floats) -> dict[str, Call]:
        ops, source, target = self.ops, self.tensor(given), self.tensor(taken)
        return {
            "allreduce": partial(ops.allreduce_, source, self.number, "sum"),
            "allgather": partial(ops.allgather_into, target, source, self.number),
        }

    def close(self) -> None:
        self.comm.close()


class _Horovod(Binding):
    in_place = ("allreduce",)  # as Horovod's DistributedOptimizer does

    def __init__(self, folder: str) -> None:
        import horovod.torch as hvd  # HOROVOD_PLUGIN=hsgd-mpi binds its calls to the interposer

        self.hvd: Any = hvd
        hvd.init()

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        import torch

        if collective != "allreduce":
            raise NotImplementedError(f"{collective} over Horovod is not measured")
        self._results = inputs
        tensors = [torch.from_numpy(array) for array in inputs]
        return [partial(self._call, buffer, tensor) for buffer, tensor in enumerate(tensors)]

    def _call(self, buffer: int, tensor: Any) -> None:
        # names that come again, as in training: Horovod negotiates them from its cache
        self.hvd.allreduce_(tensor, name=f"{tensor.numel()}.{buffer}", op=self.hvd.Sum)

    def close(self) -> None:
        self.hvd.shutdown()


class _HorovodPlugin(_Horovod):
    def __init__(self, folder: str) -> None:
        import torch

        from hsgd.config import Config
        from hsgd.metrics import interposer_collectives

        super().__init__(folder)
        self.tolerance = _rounding()
        # Never measure plain Horovod under this name.
        count = max(1 << 14, Config.from_env().min_bytes)
        self.hvd.allreduce(torch.ones(count), name="proof", op=self.hvd.Sum)
        counters = interposer_collectives()
        if counters is None or counters["MPI_Allreduce"].taken_calls == 0:
            raise RuntimeError("an allreduce did not take the two-level path; see hsgd info")


BINDINGS: dict[str, type[Binding]] = {
    "hsgd": _Hsgd,
    "hsgd-arena": _HsgdArena,
    "hsgd-tcp": _HsgdTcp,
    "mpi4py": _Mpi4py,
    "gloo": _Gloo,
    "hsgd-c10d": _HsgdC10d,
    "gloo-bf16": _Bf16,
    "hsgd-c10d-bf16": _HsgdC10dBf16,
    "vllm": _Vllm,
    "vllm-bf16": _VllmBf16,
    "hsgd-operator": _HsgdOperator,
    "horovod": _Horovod,
    "horovod-plugin": _HorovodPlugin,
}
