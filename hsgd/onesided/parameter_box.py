"""ParameterBox: float32 values in shared memory that any process may read and add to at any time.

Source: the Soft Memory Box of ShmCaffe (Ahn et al., ICDCS 2018), known to us from its abstract and
its users; versions and locks are ours.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import secrets
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.base.checked import UINT32_MAX, natural, whole
from hsgd.base.closing import Closing
from hsgd.comm.communicator import (
    Comm,  # first: at the end of the program boxes close before it
)
from hsgd.errors import HsgdError
from hsgd.onesided.networks import Network, check_network

if TYPE_CHECKING:
    from types import TracebackType

    from hsgd import _native
    from hsgd.onesided.spread_box import SpreadBox

__all__ = ["CHUNK_BYTES", "ParameterBox"]

CHUNK_BYTES = 4 << 10  # a chunk, its draft and a delta fit into a first-level cache
_ITEM_BYTES = 4
_MOST_S = 1e9

# Closed before the interpreter ends: each has a thread that serves attaching processes.
_open: weakref.WeakSet[ParameterBox] = weakref.WeakSet()
_spread: set[ParameterBox] = set()  # other nodes use these, so they live until they are closed
_serials = itertools.count()


@atexit.register
def _close_all() -> None:
    # In the same order on all ranks, as closing is collective between nodes. Without waiting if an
    # exception ends the program: the other ranks should learn of it at once.
    waits = getattr(sys, "last_value", None) is None
    boxes = sorted(_open, key=lambda box: box._serial)
    for box in boxes:
        if box._spread is not None:
            box._spread.leave_comm()
    for box in boxes:
        with contextlib.suppress(HsgdError):  # its ranks may be gone; the next box has others
            box._leave(waits=waits)


class ParameterBox(Closing):
    """Values of a node, found by a key; made by `create`, `attach` or `over`.

    Processes of the same user in the same network namespace see one box under a key. It lives in
    memory without a file as long as any process has it open; a process that attaches later gets it
    from any of them, and nothing is left when the last one ends, however it ends.

    The values are one row of float32, in chunks. A read takes no lock, and sees each chunk after
    whole changes, never half of one. A change (write, accumulate, elastic) is exclusive and atomic
    per chunk: if a process dies during one, the chunks it finished are changed, the others are not,
    and its lock passes on. Different chunks of one read may have seen different changes.

    Methods of a box of one node are local. All release the GIL and may be called by several
    threads. They wait only for the lock of a chunk, and between nodes for the owner of values. The
    lock takes microseconds unless its holder is stopped: then they raise
    CollectiveTimeout, after `timeout_s`, with the name of that process. After close() they raise
    HsgdError.

    On several nodes (`over`) each has a copy of the values for reads; a change goes to the nodes
    that own the values, and the new values come back with the reply. So a rank reads its own
    changes, and those of other nodes up to its node's last change or refresh(). A read returns the
    version at this rank's last change or refresh of all values; `version` is the last count that
    this node received. close() is then collective and comes before that of the Comm: ranks that own
    values serve the others until these have closed the box too, or are gone. A rank does not wait
    if an exception ends its `with` block or its program; ranks that use its values get PeerLost.
    """

    _spread: SpreadBox | None = None  # on several nodes

    def __init__(self) -> None:
        raise TypeError(
            "ParameterBox: use ParameterBox.create, ParameterBox.attach or ParameterBox.over"
        )

    @classmethod
    def create(
        cls,
        key: str,
        initial: Any | None = None,
        *,
        count: int | None = None,
        counters: int = 64,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 60.0,
    ) -> ParameterBox:
        """Make the box of a key; local. It takes the bytes of its values and of up to 64 chunks.

        Args:
            key: 1 to 64 characters of UTF-8, not in use on this node.
            initial: the values, a C-contiguous CPU array of float32 of any shape; None is `count`
                zeros.
            count: number of values, without `initial`.
            counters: number of counters.
            chunk_bytes: a multiple of 64.
            timeout_s: deadline of waits.

        Raises:
            ValueError: the key is taken.
            SharedMemoryError: shared memory is missing.
        """
        from hsgd import _native

        if (initial is None) == (count is None):
            raise ValueError("ParameterBox: give either initial values or a count")
        _check_numbers(counters, chunk_bytes, timeout_s)
        values = _size_of(initial) if count is None else natural("ParameterBox: count", count)
        chunk_count = chunk_bytes // _ITEM_BYTES
        native = _native.Box.create(
            str(key),
            values,
            initial,
            chunk_count,
            natural("ParameterBox: counters", counters, UINT32_MAX),
        )
        return cls._made(native, str(key), timeout_s)

    @classmethod
    def attach(cls, key: str, *, timeout_s: float = 60.0) -> ParameterBox:
        """Open the box of a key, after waiting until a process has made it; blocking.

        Raises CollectiveTimeout if there is none after `timeout_s`, which also limits later waits.
        """
        from hsgd import _native

        _check_seconds(timeout_s)
        return cls._made(_native.Box.attach(str(key), timeout_s), str(key), timeout_s)

    @classmethod
    def over(
        cls,
        comm: Comm,
        initial: Any,
        *,
        shards: str | None = "node",
        counters: int = 64,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float | None = None,
        network: Network = "sockets",
    ) -> ParameterBox:
        """Make one box for the ranks of a communicator, under a random key; collective.

        On one node nothing of `comm` is used afterwards; for several nodes see ParameterBox.

        Args:
            comm: the ranks.
            initial: as in create, of the same size on all ranks; rank 0's values count.
            shards: which nodes own the values: "node" gives each an even share, None all to the
                first.
            counters: as in create.
            chunk_bytes: as in create.
            timeout_s: None is the deadline of `comm`.
            network: for changes between nodes, as in hsgd.NotifiedWindow: "sockets", which needs
                IPv4; "mpi", which needs MPI_THREAD_MULTIPLE, and stops while a rank is in a
                blocking call of MPI; or "auto".

        Raises:
            SignatureMismatch: arguments differ.
            Exception: errors of create, on all ranks.
        """
        from hsgd.comm.agree import agree

        limit_s = comm.timeout_s if timeout_s is None else float(timeout_s)

        def terms() -> dict[str, object]:
            check_network("ParameterBox", network)
            if shards not in ("node", None):
                raise ValueError(f'ParameterBox.over: shards is {shards!r}; use "node" or None')
            _check_numbers(counters, chunk_bytes, limit_s)
            if limit_s == 0:
                raise ValueError("ParameterBox.over: timeout_s is 0; give seconds above 0")
            dtype, count = _form_of(initial)
            own = {"initial": f"{count} {dtype}", "shards": shards, "counters": counters}
            return {**own, "chunk_bytes": chunk_bytes, "network": network}

        agree(comm, "ParameterBox.over", terms)
        if (dtype := _form_of(initial)[0]) != "float32":
            raise TypeError(f"ParameterBox.over: the initial values are {dtype}; give float32")
        if comm.cross_size > 1:
            from hsgd.onesided.spread_box import SpreadBox, chunk_bytes_over

            initial = np.array(initial, np.float32, copy=True).reshape(-1)
            comm.broadcast(initial, name="initial values of the box")
            chunk_bytes = chunk_bytes_over(comm, shards, chunk_bytes)
            box = cls._together(comm, initial, counters, chunk_bytes, limit_s)
            box._spread = SpreadBox(comm, box._native, shards, limit_s, network)
            _spread.add(box)
            return box
        return cls._together(comm, initial, counters, chunk_bytes, limit_s)

    @classmethod
    def _together(
        cls, comm: Comm, initial: Any, counters: int, chunk_bytes: int, timeout_s: float
    ) -> ParameterBox:
        """Make a box on each node: its first rank creates, the others attach; collective."""
        token = np.frombuffer(secrets.token_hex(16).encode(), np.uint8).copy()
        key = f"{comm.broadcast(token, name='ParameterBox').tobytes().decode()}-{comm.cross_rank}"
        box: ParameterBox | None = None
        failure: Exception | None = None
        if comm.local_rank == 0:
            try:
                box = ParameterBox.create(
                    key, initial, counters=counters, chunk_bytes=chunk_bytes, timeout_s=timeout_s
                )
            except Exception as error:  # of any kind: the others wait for the outcome
                failure = error
        all_made = comm.allreduce(np.array([failure is None], np.int64), "min", name="ParameterBox")
        if failure is not None:
            raise failure
        if not all_made[0]:
            if box is not None:
                box.close()
            raise HsgdError("ParameterBox.over: a rank could not make the box; see what it says")
        if box is None:
            box = ParameterBox.attach(key, timeout_s=timeout_s)
        comm.barrier()  # the first rank may close it right away
        return box

    @classmethod
    def _made(cls, native: _native.Box, key: str, timeout_s: float) -> ParameterBox:
        self = cls.__new__(cls)
        self._keep(native, key, timeout_s)
        return self

    def _keep(self, native: _native.Box, key: str, timeout_s: float) -> None:
        self._native, self._key, self._timeout_s = native, key, float(timeout_s)
        self._serial = next(_serials)
        self._count, self._counters = native.count(), native.counters()
        self._chunk_bytes = native.chunk_count() * _ITEM_BYTES
        _open.add(self)

    def read(self, out: Any, offset: int = 0) -> int:
        """Copy values from `offset` on into `out`; return the version that they have at least.

        `out` is a C-contiguous, writable CPU array of float32; ValueError if the box is too short.
        """
        at = natural("ParameterBox: offset", offset)
        if self._spread is not None:
            return self._spread.read(out, at)
        return self._native.read(out, at, self._timeout_s)

    def write(self, values: Any, offset: int = 0) -> int:
        """Overwrite values by `values` (an array as in read); return the version of this change."""
        at = natural("ParameterBox: offset", offset)
        if self._spread is not None:
            return self._spread.write(values, at)
        return self._native.write(values, at, self._timeout_s, True)

    def accumulate(self, delta: Any, offset: int = 0) -> int:
        """Add `delta`; return the version of this change, which every later read sees.

        `delta` is a C-contiguous CPU array of float32, or of bfloat16 (torch), added in float32.
        """
        at = natural("ParameterBox: offset", offset)
        if self._spread is not None:
            return self._spread.accumulate(delta, at)
        return self._native.accumulate(delta, at, self._timeout_s)

    def elastic(
        self, weights: Sequence[Any], rate: float, delta: Any | None = None
    ) -> tuple[int, float]:
        """Move weights and values towards each other, in one pass over memory.

        d = rate * (weights - values), weights -= d, and d goes into `delta`, for accumulate();
        without `delta` it is added to the values, on one node in the same pass. EASGD,
        arXiv:1412.6651, equations 5 and 6. Returns a version that the values had at least, and
        |weights - values|^2 from before.

        Args:
            weights: C-contiguous, writable CPU arrays of float32, which correspond to the values of
                the box in order, from the first one on.
            rate: see above.
            delta: as many values, float32 or bfloat16 (torch): d is rounded to its dtype before it
                is used, so that the weights lose exactly what is pushed.
        """
        if self._spread is not None:
            return self._spread.elastic(weights, rate, delta)
        return self._native.elastic(list(weights), rate, delta, self._timeout_s)

    def refresh(self) -> None:
        """Make the next read see all earlier changes; blocking. In a node every read does."""
        self._native.version()  # raises if closed
        if self._spread is not None:
            self._spread.refresh()

    @property
    def version(self) -> int:
        """Number of finished changes, over all processes, as far as this node knows."""
        return self._native.version()

    @property
    def recoveries(self) -> int:
        """How often a lock was taken from a process that died while it held it."""
        return self._native.recoveries()

    def fetch_add(self, counter: int, value: int = 1) -> int:
        """Add to a counter, a signed 64-bit number, and return its previous value; atomic."""
        number = natural("ParameterBox: counter", counter, UINT32_MAX)
        if self._spread is not None:
            return self._spread.fetch_add(number, value)
        return self._native.fetch_add(number, value)

    @property
    def counts_at_once(self) -> bool:
        """Whether fetch_add() works in this node's memory, without a message to another node."""
        return self._spread is None or self._spread.counts_at_once

    def counter(self, counter: int) -> int:
        """Return the number in a counter; 0 at the beginning."""
        return self.fetch_add(counter, 0)

    @property
    def key(self) -> str:
        """The key of the box."""
        return self._key

    @property
    def count(self) -> int:
        """Values in the box."""
        return self._count

    @property
    def counters(self) -> int:
        """Counters of the box."""
        return self._counters

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, which changes as a whole."""
        return self._chunk_bytes

    @property
    def timeout_s(self) -> float:
        """Deadline of a wait for the lock of a chunk, seconds."""
        return self._timeout_s

    def close(self, *, waits: bool = True) -> None:
        """Close the box; local, but collective between nodes. A second call does nothing.

        A rank that leaves by an error passes waits=False, and waits for no other node.
        """
        self._leave(waits=waits)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(waits=kind is None)

    def _leave(self, *, waits: bool) -> None:
        try:
            if self._spread is not None and not self.closed:
                self._spread.close(waits=waits)
        finally:
            self._native.close()
            _open.discard(self)
            _spread.discard(self)

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._native.closed()

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._count} values"
        return f"<hsgd.ParameterBox {self._key!r}, {state}>"


def _size_of(array: Any) -> int:
    size = array.numel() if hasattr(array, "numel") else array.size
    return int(size)


def _form_of(array: Any) -> tuple[str, int]:
    if hasattr(array, "numel"):
        return str(array.dtype).removeprefix("torch."), int(array.numel())
    taken = np.asarray(array)
    return str(taken.dtype), int(taken.size)


def _check_numbers(counters: int, chunk_bytes: int, timeout_s: float) -> None:
    natural("ParameterBox: counters", counters, UINT32_MAX)
    if whole("ParameterBox: chunk_bytes", chunk_bytes) < 64 or chunk_bytes % 64:
        raise ValueError(f"ParameterBox: chunk_bytes is {chunk_bytes}; give a multiple of 64")
    _check_seconds(timeout_s)


def _check_seconds(timeout_s: float) -> None:
    if not 0 <= timeout_s <= _MOST_S:
        raise ValueError(f"ParameterBox: timeout_s is {timeout_s:g}; give 0 to {_MOST_S:g} seconds")
