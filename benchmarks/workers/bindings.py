"""The Python side of the candidates: how one call of each collective is made.

Owns the set-up and the calls. Never measures: worker.py does, with the calls bound here. A binding
has a method per collective that it can do, named like it; what a library cannot do, the binding
must not have. Heavy packages are imported by the class that needs them.
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

    def __init__(self, folder: str) -> None:
        pass

    def empty(self, count: int) -> Floats:
        """A new buffer of `count` float32."""
        return aligned(count)

    def fill(self, array: Floats, values: Floats) -> None:
        """Put values into a buffer of as many float32."""
        array[:] = values

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        """One call per pair of buffers. Raises NotImplementedError for what it cannot do."""
        method = getattr(self, collective, None)
        if method is None:
            raise NotImplementedError(f"there is no {collective} here")
        self._results = outputs
        return [method(given, taken) for given, taken in zip(inputs, outputs, strict=True)]

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

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        if not hasattr(self.comm, collective):
            raise NotImplementedError(f"hsgd.Comm has no {collective}")
        return super().bind(collective, inputs, outputs)

    def allreduce(self, given: Floats, taken: Floats) -> Call:
        return partial(self.comm.allreduce, given, "sum", taken)

    def broadcast(self, given: Floats, taken: Floats) -> Call:
        return partial(self.comm.broadcast, taken, 0)

    def allgather(self, given: Floats, taken: Floats) -> Call:
        return partial(self.comm.allgather, given, taken)

    def reduce_scatter(self, given: Floats, taken: Floats) -> Call:
        return partial(self.comm.reduce_scatter, given, "sum", taken)

    def alltoall(self, given: Floats, taken: Floats) -> Call:
        return partial(self.comm.alltoall, given, out=taken)

    def barrier(self, given: Floats, taken: Floats) -> Call:
        return partial(self.comm.barrier)

    def close(self) -> None:
        self.comm.close()


class _HsgdArena(_Hsgd):
    buffers = "arena"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        if not hasattr(self.comm, "empty"):
            raise NotImplementedError("hsgd.Comm has no empty")

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

    def allreduce(self, given: Floats, taken: Floats) -> Call:
        return partial(self.world.Allreduce, given, taken)

    def broadcast(self, given: Floats, taken: Floats) -> Call:
        return partial(self.world.Bcast, taken, 0)

    def allgather(self, given: Floats, taken: Floats) -> Call:
        return partial(self.world.Allgather, given, taken)

    def reduce_scatter(self, given: Floats, taken: Floats) -> Call:
        return partial(self.world.Reduce_scatter_block, given, taken)

    def alltoall(self, given: Floats, taken: Floats) -> Call:
        return partial(self.world.Alltoall, given, taken)

    def barrier(self, given: Floats, taken: Floats) -> Call:
        return partial(self.world.Barrier)


class _Gloo(Binding):
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

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        calls = super().bind(collective, inputs, outputs)
        if collective == "allreduce":
            self._results = inputs  # gloo works in place
        return calls

    def allreduce(self, given: Floats, taken: Floats) -> Call:
        return partial(self.dist.all_reduce, self.tensor(given), group=self.group)

    def broadcast(self, given: Floats, taken: Floats) -> Call:
        return partial(self.dist.broadcast, self.tensor(taken), 0, group=self.group)

    def allgather(self, given: Floats, taken: Floats) -> Call:
        gather = self.dist.all_gather_into_tensor
        return partial(gather, self.tensor(taken), self.tensor(given), group=self.group)

    def reduce_scatter(self, given: Floats, taken: Floats) -> Call:
        scatter = self.dist.reduce_scatter_tensor
        return partial(scatter, self.tensor(taken), self.tensor(given), group=self.group)

    def alltoall(self, given: Floats, taken: Floats) -> Call:
        exchange = self.dist.all_to_all_single
        return partial(exchange, self.tensor(taken), self.tensor(given), group=self.group)

    def barrier(self, given: Floats, taken: Floats) -> Call:
        return partial(self.dist.barrier, self.group)

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

    def allreduce(self, given: Floats, taken: Floats) -> Call:
        return partial(self.ops.shm_allreduce, self.handle, self.tensor(given))

    def allgather(self, given: Floats, taken: Floats) -> Call:
        return partial(self.ops.shm_all_gather, self.handle, self.tensor(given), self.tensor(taken))

    def close(self) -> None:
        pass


class _VllmBf16(_Bf16, _Vllm):
    pass


class _HsgdOperator(Binding):
    """Without the wrappers: what a compiled program calls."""

    def __init__(self, folder: str) -> None:
        import torch

        import hsgd
        from hsgd import operators

        self.comm, self.tensor = hsgd.Comm(), torch.from_numpy
        self.number = operators.group(self.comm).number
        self.tolerance = _rounding()

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        calls = super().bind(collective, inputs, outputs)
        if collective == "allreduce":
            self._results = inputs  # in place
        return calls

    def allreduce(self, given: Floats, taken: Floats) -> Call:
        import torch

        return partial(torch.ops.hsgd.allreduce_, self.tensor(given), self.number, "sum")

    def allgather(self, given: Floats, taken: Floats) -> Call:
        import torch

        gather = torch.ops.hsgd.allgather_into
        return partial(gather, self.tensor(taken), self.tensor(given), self.number)

    def close(self) -> None:
        self.comm.close()


class _Horovod(Binding):
    def __init__(self, folder: str) -> None:
        import horovod.torch as hvd

        self._start(hvd)

    def _start(self, hvd: Any) -> None:
        self.hvd = hvd
        hvd.init()

    def bind(self, collective: str, inputs: list[Floats], outputs: list[Floats]) -> list[Call]:
        import torch

        if collective != "allreduce":
            raise NotImplementedError(f"{collective} over Horovod is not measured")
        self._results = inputs  # in place, as Horovod's DistributedOptimizer does
        tensors = [torch.from_numpy(array) for array in inputs]
        return [partial(self._call, buffer, tensor) for buffer, tensor in enumerate(tensors)]

    def _call(self, buffer: int, tensor: Any) -> None:
        # names that come again, as in training: Horovod negotiates them from its cache
        self.hvd.allreduce_(tensor, name=f"{tensor.numel()}.{buffer}", op=self.hvd.Sum)

    def close(self) -> None:
        self.hvd.shutdown()


class _HorovodPlugin(_Horovod):
    def __init__(self, folder: str) -> None:
        import horovod.torch as hvd  # HOROVOD_PLUGIN=hsgd-mpi binds its calls to the interposer

        self._start(hvd)
        self.tolerance = _rounding()
        self._prove()

    def _prove(self) -> None:
        """Never measure plain Horovod under this name; collective."""
        import torch

        from hsgd.config import Config
        from hsgd.metrics import interposer_collectives

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
