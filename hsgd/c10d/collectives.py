"""Collectives of torch.distributed on CPU tensors, for all process groups of hsgd.

All methods are collective over the group, and block as torch.distributed says: by `asyncOp` of the
options. The core's queue keeps their order. Tensors on other devices go to another process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceScatterOptions,
)

from hsgd.c10d import NAME, checks, dtypes, flat, routes, torch_versions
from hsgd.c10d.backward import Backward
from hsgd.c10d.ddp_buckets import SharedBuckets
from hsgd.c10d.diagnostics import flight_recorder, tracing
from hsgd.c10d.diagnostics.flight_recorder import FlightRecorder
from hsgd.c10d.rendezvous import meet, open_board
from hsgd.c10d.root_refusal import refused_by_root, telling
from hsgd.c10d.routes import at_once, by_device
from hsgd.c10d.sparse import allreduce_sparse
from hsgd.c10d.work import HsgdWork
from hsgd.comm.communicator import Comm
from hsgd.config import Config
from hsgd.errors import HsgdError, SignatureMismatch

__all__ = ["Collectives"]


@torch_versions.keep_from_dynamo
class Collectives(dist.ProcessGroup):
    """A process group whose collectives on CPU tensors go through its own Comm.

    The shorter of `timeout` and HSGD_TIMEOUT_S holds. Raises CollectiveTimeout with late global
    ranks.
    """

    _device_type = "cpu"  # of tensors that the methods handle here
    # For profiles: the name, and whether blocking calls also run in the thread of the group.
    _traced_as, _traced_threaded = NAME, False

    def __init__(
        self, store: Any, name: str, rank: int, members: list[int], timeout: timedelta
    ) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        config = Config.from_env()
        self._limit_s = min(timeout.total_seconds(), config.timeout_s)
        self._board = open_board(store, name, rank, members, self._limit_s)
        comm = meet(self._board, dataclasses.replace(config, timeout_s=self._limit_s))
        self._comm: Any = comm
        self._queue: Comm | None = comm  # executes the works
        self._buckets: SharedBuckets | None = SharedBuckets(self._comm)
        self._backward = Backward(routes.__name__)
        self._recorder: FlightRecorder | None = None
        self._records = flight_recorder.is_wanted()
        self._may_be_at_once = torch_versions.blocking_returns_none and not self._records
        # For a group that the program did not destroy: end its thread and free its memory.
        self._end = weakref.finalize(self, _close, comm)
        self._end.atexit = False  # Comm closes itself before the interpreter ends
        forget = weakref.WeakMethod(self._forget)
        comm.before_close(lambda: (method := forget()) and method())

    @property
    def comm(self) -> Comm | None:
        """The communicator, None after the end."""
        return self._queue

    def group_for(self, device: torch.device, method: str) -> Any:
        """Return the group whose `method` handles tensors of a device other than the CPU."""
        raise NotImplementedError

    def pretend(self, what: str) -> HsgdWork:
        """Return a finished work for FakeTensors, which have no memory; local."""
        (work := HsgdWork(what, [], None, call=lambda: None)).execute()
        return work

    def _limit_now(self) -> float:
        """Return the seconds that a call may take, at most those of the communicator; local."""
        return self._limit_s

    def _is_unwatched(self) -> bool:
        """Return whether no call is counted or recorded, and the timeout is unchanged; local."""
        return self._may_be_at_once

    def shutdown(self) -> None:
        """Finish started calls and free everything; local. A second call does nothing."""
        self._end()

    def _forget(self) -> None:
        """Drop references: torch keeps a group that the program did not destroy forever."""
        self._comm = self._queue = self._buckets = None
        self._end.detach()

    def abort(self) -> None:
        """Shut down, but let running collectives fail at once."""
        if self._comm is not None and not self._comm.closed:
            self._comm.abort()
        self.shutdown()

    # Execution.

    def _submit(
        self,
        what: str,
        call: Callable[[], None],
        tensors: list[Tensor],
        opts: Any,
        given: Sequence[Tensor] | None = None,
    ) -> HsgdWork:
        """Submit a collective: `tensors` get the result; `given` is the input, if it differs."""
        recorder = self._flight_recorder()
        given = tensors if given is None else given
        recorded = recorder and functools.partial(recorder.run, what, call, given, tensors)
        run = recorded or call

        def execute() -> None:
            try:
                run()
            except SignatureMismatch as error:
                raise refused_by_root(error, what) or error from None

        work = HsgdWork(what, tensors, self._queue, execute)
        blocking = torch_versions.is_blocking(opts)
        asked_s = opts.timeout.total_seconds() if opts is not None else 0.0
        limit_s = min(self._limit_now(), asked_s if asked_s > 0 else self._limit_s)
        work.limit_s = limit_s if limit_s < self._limit_s else 0.0
        if not blocking:
            self._backward.watch(work)
        self._note(what, given)
        work.traced = tracing.begin(self._traced_as, what, given)
        threaded = work.traced is not None and self._traced_threaded
        return work.start(blocking=blocking, threaded=threaded)

    def _telling(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Report arguments that the body refuses on the root to the other ranks."""
        assert self._queue is not None
        return telling(what, self._queue)

    def _flight_recorder(self) -> FlightRecorder | None:
        """Make it at the first call: torch names a group only after it has made it."""
        if self._records and self._recorder is None:
            self._recorder = FlightRecorder(self, self._board.members, self._board.store)
        return self._recorder

    def _note(self, what: str, given: Sequence[Tensor]) -> None:
        """Record a call of this rank before it runs; local."""

    # Reductions.

    @at_once("group_allreduce", 2, "all_reduce")
    @by_device
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> HsgdWork:
        """Replace each tensor by the reduction over all ranks, in place."""
        opts = AllreduceOptions() if opts is None else opts
        op = opts.reduceOp
        for tensor in tensors:
            checks.reducible(op, tensor)
        blocking = torch_versions.is_blocking(opts)
        # As DDP calls it: its reducer in autograd's engine, but a joined rank's outside of it.
        buckets = self._buckets if not blocking and len(tensors) == 1 else None
        is_bucket = buckets is not None and self._backward.is_of_reducer()

        def call() -> None:
            for tensor in tensors:
                if buckets is not None and buckets.concerns(tensor):
                    buckets.move(tensor, is_bucket)
                if tensor.layout == torch.sparse_coo:
                    allreduce_sparse(
                        tensor, functools.partial(flat.allgather, self._comm), self.size()
                    )
                    continue
                array = dtypes.flat(tensor)
                flat.reduce(self._comm, array, op, array)
                dtypes.put_back(array, tensor)

        return self._submit("all_reduce", call, tensors, opts)

    @by_device
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> HsgdWork:
        """Reduce all tensors, joined into one per dtype, in place."""
        opts = AllreduceCoalescedOptions() if opts is None else opts
        op = opts.reduceOp
        for tensor in tensors:
            checks.reducible(op, tensor)

        def call() -> None:
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                alike = [tensor for tensor in tensors if tensor.dtype == dtype]
                joined = torch.cat([dtypes.flat(tensor) for tensor in alike])
                flat.reduce(self._comm, joined, op, joined)
                flat.split_into(joined, alike)

        return self._submit("all_reduce_coalesced", call, tensors, opts)

    @by_device
    def reduce(self, tensors: list[Tensor], opts: Any) -> HsgdWork:
        """Replace the root's tensor by the reduction over all ranks; others keep theirs."""
        (tensor,) = tensors
        op = opts.reduceOp
        checks.reducible(op, tensor)

        def call() -> None:
            array = dtypes.flat(tensor)
            if self.rank() == opts.rootRank:
                flat.reduce(self._comm, array, op, array)
                dtypes.put_back(array, tensor)
            else:
                flat.reduce(self._comm, array, op, torch.empty_like(array))

        return self._submit("reduce", call, tensors, opts)

    @by_device
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> HsgdWork:
        """Reduce the inputs at each place of the list to the rank of that place."""
        pairs = list(zip(outputs, inputs, strict=True))
        for output, parts in pairs:
            checks.alike("reduce_scatter", [output, *parts])
            checks.parts("reduce_scatter", parts, self.size(), output.numel())
        checks.apart("reduce_scatter", outputs)

        def call(op: Any) -> None:
            for output, parts in pairs:
                flat.reduce_scatter(
                    self._comm, torch.cat([dtypes.flat(part) for part in parts]), op, output
                )

        given = [part for _, parts in pairs for part in parts]
        return self._submit_reduction("reduce_scatter", call, outputs, opts, given)

    @at_once("group_reduce_scatter", 3, "reduce_scatter_tensor")
    @by_device
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> HsgdWork:
        """Reduce the inputs, and keep this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    _reduce_scatter_base = reduce_scatter_single

    @by_device
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> HsgdWork:
        pairs = list(zip(outputs, inputs, strict=True))
        for output, source in pairs:
            checks.alike("reduce_scatter_tensor", [output, source])
            checks.size("reduce_scatter_tensor", source, self.size() * output.numel())
        checks.apart("reduce_scatter_tensor", outputs)

        def call(op: Any) -> None:
            for output, source in pairs:
                flat.reduce_scatter(self._comm, dtypes.flat(source), op, output)

        return self._submit_reduction("reduce_scatter_tensor", call, outputs, opts, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _submit_reduction(
        self,
        what: str,
        call: Callable[[Any], None],
        outputs: list[Tensor],
        opts: Any,
        given: Sequence[Tensor],
    ) -> HsgdWork:
        opts = ReduceScatterOptions() if opts is None else opts
        op = opts.reduceOp
        for output in outputs:
            checks.reducible(op, output)
        return self._submit(what, lambda: call(op), outputs, opts, given)

    # Movements.

    @at_once("group_broadcast", 2, "broadcast")
    @by_device
    def broadcast(self, tensors: list[Tensor], opts: Any) -> HsgdWork:
        """Replace each tensor by the root's."""

        def call() -> None:
            for tensor in tensors:
                array = dtypes.flat(tensor)
                self._comm.broadcast(dtypes.as_bytes(array), opts.rootRank)
                dtypes.put_back(array, tensor)

        return self._submit("broadcast", call, tensors, opts)

    @by_device
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> HsgdWork:
        """Gather the tensors of all ranks on all, one list for each input."""
        opts = AllgatherOptions() if opts is None else opts
        pairs = list(zip(outputs, inputs, strict=True))
        for parts, source in pairs:
            checks.alike("all_gather", [source, *parts])
            checks.parts("all_gather", parts, self.size(), source.numel())
        checks.apart("all_gather", [part for parts in outputs for part in parts])

        def call() -> None:
            for parts, source in pairs:
                flat.split_into(flat.allgather(self._comm, dtypes.flat(source)), parts)

        places = [part for parts in outputs for part in parts]
        return self._submit("all_gather", call, places, opts, inputs)

    @by_device
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> HsgdWork:
        """Gather several tensors; `outputs` has one list for each rank."""
        if len(outputs) != self.size() or any(len(parts) != len(inputs) for parts in outputs):
            raise ValueError(
                f"all_gather_coalesced: {len(inputs)} tensors on {self.size()} ranks, output lists "
                f"of {[len(parts) for parts in outputs]}; give one list for every rank, with a "
                "place for each tensor"
            )
        return self.allgather([list(places) for places in zip(*outputs, strict=True)], inputs, opts)

    @at_once("group_allgather", 3, "all_gather_into_tensor")
    @by_device
    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> HsgdWork:
        """Gather the tensors of all ranks on all, joined in rank order."""
        return self.all_gather_single_coalesced([output], [source], opts)

    _allgather_base = all_gather_single

    @by_device
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> HsgdWork:
        opts = AllgatherOptions() if opts is None else opts
        pairs = list(zip(outputs, inputs, strict=True))
        for output, source in pairs:
            checks.alike("all_gather_into_tensor", [source, output])
            checks.size("all_gather_into_tensor", output, self.size() * source.numel())
        checks.apart("all_gather_into_tensor", outputs)

        def call() -> None:
            for output, source in pairs:
                array, place = dtypes.flat(source), dtypes.flat(output)
                self._comm.allgather(dtypes.as_bytes(array), out=dtypes.as_bytes(place))
                dtypes.put_back(place, output)

        return self._submit("all_gather_into_tensor", call, outputs, opts, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @by_device
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> HsgdWork:
        """Gather the tensors of all ranks on the root."""
        (source,) = inputs
        parts = outputs[0] if self.rank() == opts.rootRank else []
        if self.rank() == opts.rootRank:
            with self._telling("gather"):
                checks.alike("gather", [source, *parts])
                checks.parts("gather", parts, self.size(), source.numel())
                checks.apart("gather", parts)

        def call() -> None:
            flat.split_into(flat.gather(self._comm, opts.rootRank, dtypes.flat(source)), parts)

        return self._submit("gather", call, parts, opts, inputs)

    @by_device
    def gather_single(self, output: Tensor, source: Tensor, opts: Any) -> HsgdWork:
        """Gather the tensors of all ranks on the root, joined in rank order."""
        places = [output] if self.rank() == opts.rootRank else []
        for place in places:
            with self._telling("gather_single"):
                checks.alike("gather_single", [source, place])
                checks.size("gather_single", place, self.size() * source.numel())

        def call() -> None:
            flat.split_into(flat.gather(self._comm, opts.rootRank, dtypes.flat(source)), places)

        return self._submit("gather", call, places, opts, [source])

    gather_into_tensor = gather_single

    @by_device
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> HsgdWork:
        """Send each rank its tensor of the root's list."""
        (output,) = outputs
        parts = inputs[0] if self.rank() == opts.rootRank else []
        if self.rank() == opts.rootRank:
            with self._telling("scatter"):
                checks.alike("scatter", [output, *parts])
                checks.parts("scatter", parts, self.size(), output.numel())

        def call() -> None:
            sent = [part.numel() for part in parts] or [0] * self.size()
            array = (
                torch.cat([dtypes.flat(part) for part in parts]) if parts else output.new_empty(0)
            )
            out = dtypes.flat(output)
            flat.alltoall(self._comm, array, sent, out)
            dtypes.put_back(out, output)

        return self._submit("scatter", call, outputs, opts, parts)

    @by_device
    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> HsgdWork:
        """Send parts of the first dimension to all ranks; without splits equal parts."""
        opts = AllToAllOptions() if opts is None else opts
        checks.alike("all_to_all_single", [source, output])
        sent = checks.elements("input", source, input_splits, self.size())
        checks.elements("output", output, output_splits, self.size())

        def call() -> None:
            array, out = dtypes.flat(source), dtypes.flat(output)
            flat.alltoall(self._comm, array, sent, out)
            dtypes.put_back(out, output)

        return self._submit("all_to_all_single", call, [output], opts, [source])

    alltoall_base = all_to_all_single

    @by_device
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> HsgdWork:
        """Send one tensor to each rank."""
        opts = AllToAllOptions() if opts is None else opts
        if not len(outputs) == len(inputs) == self.size():
            raise ValueError(
                f"all_to_all: {len(inputs)} inputs and {len(outputs)} outputs on "
                f"{self.size()} ranks; give one of each for every rank"
            )
        checks.alike("all_to_all", [*inputs, *outputs])
        checks.apart("all_to_all", outputs)

        def call() -> None:
            array = torch.cat([dtypes.flat(source) for source in inputs])
            out = array.new_empty(sum(output.numel() for output in outputs))
            flat.alltoall(self._comm, array, [source.numel() for source in inputs], out)
            flat.split_into(out, outputs)

        return self._submit("all_to_all", call, outputs, opts, inputs)

    @by_device
    def barrier(self, opts: Any = None) -> HsgdWork:
        """Return a work that is done when all ranks have called this."""
        opts = BarrierOptions() if opts is None else opts
        device = getattr(opts, "device", None)
        if device is not None and device.type != self._device_type:
            return cast(HsgdWork, self.group_for(device, "barrier").barrier(opts))
        return self._submit("barrier", lambda: self._comm.barrier(), [], opts)


def _close(comm: Comm) -> None:
    with contextlib.suppress(HsgdError):  # closed, or in a forked child
        comm.run_function(lambda: None)  # after all works, which need what close() takes away
    comm.close()
