"""NotifiedWindow: one-sided, notified writes between ranks, without collectives and barriers.

Owns the Python face of segments and slots, with the vocabulary of GASPI as CaffeGPI uses it
(arXiv:1706.00095, our reconstruction). Never decides what is sent to whom: hsgd.optim.NotifiedTree
does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hsgd.base import forked
from hsgd.base.checked import UINT32_MAX, c_int, natural, seconds
from hsgd.base.closing import Closing
from hsgd.comm.communicator import Comm
from hsgd.onesided.networks import ChosenNetwork, Network, choose_network

if TYPE_CHECKING:
    from hsgd import _native

__all__ = ["NotifiedWindow"]


class NotifiedWindow(Closing):
    """A segment of memory and a row of slots on every rank, that all ranks write into; collective.

    comm: the ranks that take part. Closing it closes this.
    segment_bytes: bytes of each rank's segment, equal on all ranks; zero at the beginning.
    slots: notification slots of each rank, equal on all ranks. A slot has one writer.
    queue: operations to other nodes that may be under way.
    timeout_s: until a wait gives up, and until a write that its target does not take breaks the
        NotifiedWindow; None is the deadline of `comm`.
    remote_only: write over the network inside the node too; for measurements and tests.
    network: what carries writes between nodes: "mpi"; "sockets", which is TCP between the nodes'
        IPv4 addresses; or "auto", which is "mpi" where all nodes have an adapter for RDMA
        (hsgd.onesided.networks) and else "sockets". `network` says what was chosen.
    forgiving: a target that does not take a write breaks nothing. The write stays under way, its
        buffer is in use until `done` says otherwise, and it needs its place in the queue; it is
        dropped, and counts as done, when its target dies. That is over sockets: over MPI a flush
        may wait for the target, whatever the deadline.
    slice_bytes: over sockets a write goes in slices of so many bytes, 4096 to 64 MiB, of which the
        kernel has up to four ahead of the network, but no more than 512 KiB. Large ones take less
        of the processors' time: each is a call into the kernel on either side. In small ones what
        is needed first (`order`) waits less for the rest.

    A notification is a version number that overwrites the one before: versions of a slot start at
    1 and must increase, and say what is there, not how often it was put.

    Inside a node a write is done when put_notify returns. Over MPI (MPI-3 one-sided; one window,
    one lock_all) it goes on while threads of both ranks are in methods of the NotifiedWindow, so a
    program that computes for long lets a thread wait in one. Over sockets it goes on by itself.
    Methods release the GIL and may be called by several threads (with MPI_THREAD_MULTIPLE); up to
    four may wait.

    A peer of the node that died or closed its NotifiedWindow is PeerLost within a second, if the
    slot that is waited for was given to it with `bind`; over sockets so is a peer of another node
    that this rank has written to, or that has written here. Everything else ends at the deadline
    with CollectiveTimeout. MPI's one-sided calls do not survive a death on another node: the
    NotifiedWindow is of no use then.
    """

    def __init__(
        self,
        comm: Comm,
        segment_bytes: int,
        slots: int,
        *,
        queue: int = 64,
        timeout_s: float | None = None,
        remote_only: bool = False,
        network: Network = "auto",
        forgiving: bool = False,
        slice_bytes: int = 64 << 10,
    ) -> None:
        from hsgd import _native

        self._network = choose_network(comm, network, "NotifiedWindow")
        self._timeout_s = comm.timeout_s if timeout_s is None else float(timeout_s)
        self._segment_bytes = natural("NotifiedWindow: segment_bytes", segment_bytes)
        options = _native.WindowOptions(
            segment_bytes=self._segment_bytes,
            slots=natural("NotifiedWindow: slots", slots, UINT32_MAX),
            queue=natural("NotifiedWindow: queue", queue, UINT32_MAX),
            timeout_s=self._timeout_s,
            remote_only=remote_only,
            sockets=self._network == "sockets",
            forgiving=forgiving,
            slice_bytes=natural("NotifiedWindow: slice_bytes", slice_bytes),
            interfaces=comm.interfaces,
        )
        self._native: _native.NotifiedWindow = comm.make_window(self, options)
        self._rank, self._slots = comm.rank, slots
        self._workers: list[threading.Thread] = []
        forked.watch(self, self._native)

    @property
    def network(self) -> ChosenNetwork:
        """What carries writes between nodes."""
        return self._network

    def segment(self, rank: int | None = None) -> Any:
        """The bytes of a segment as a NumPy array (uint8); local.

        rank: a rank of this node; None is this one. What another rank wrote is there once the
        version that tells of it was seen. The memory outlives the NotifiedWindow.
        Raises ValueError for ranks of other nodes, whose memory cannot be reached.
        """
        which = self._rank if rank is None else c_int("NotifiedWindow: rank", rank)
        memory = self._native.segment(which, self._segment_bytes)
        if memory is None:
            raise ValueError(
                f"segment: rank {which} is not a rank of this node; give one of this node, and use "
                "put_notify for others"
            )
        return memory

    def put_notify(
        self,
        buffer: Any,
        target: int,
        slot: int,
        version: int,
        offset: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Write `buffer` into the segment of `target`, and then `version` into its slot; local.

        buffer: C-contiguous CPU array of any supported dtype; None only notifies. It must not
        change until `done` says so of the ticket that is returned (0 is done); it is kept alive
        until then.
        offset: where in the segment, bytes.
        timeout_s: how long to wait for room in the queue, 0 not at all; None is the deadline.
        Raises QueueFull, naming the oldest operation; ValueError for a rank, a slot, a place or a
        version that cannot be.
        """
        pieces = [] if buffer is None else [(buffer, offset)]
        return self.put_list_notify(pieces, target, slot, version, timeout_s)

    def put_list_notify(
        self,
        pieces: Iterable[tuple[Any, int]],
        target: int,
        slot: int,
        version: int,
        timeout_s: float | None = None,
        order: int = 0,
    ) -> int:
        """Write several (buffer, offset), and then one version; as put_notify.

        order: over sockets, of what waits for one target the least goes first, between slices of
        what is on its way; the same in all writes for a slot.
        """
        placed = [(buffer, natural("NotifiedWindow: offset", offset)) for buffer, offset in pieces]
        limit_s = self._limit(timeout_s)
        return self._native.put_notify(
            placed,
            c_int("NotifiedWindow: target", target),
            natural("NotifiedWindow: slot", slot, UINT32_MAX),
            natural("NotifiedWindow: version", version),
            limit_s,
            natural("NotifiedWindow: order", order, UINT32_MAX),
        )

    def done(self, ticket: int) -> bool:
        """Whether the operation was delivered; local, not blocking."""
        return self._native.done(natural("NotifiedWindow: ticket", ticket))

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when all that this rank has put was delivered; local, blocking.

        Raises CollectiveTimeout naming the oldest operation that was not.
        """
        self._native.drain(self._limit(timeout_s))

    def wait_any(
        self,
        slots: Sequence[int],
        seen: int | Sequence[int] = 0,
        timeout_s: float | None = None,
    ) -> tuple[int, int]:
        """Wait until one of this rank's slots has a version above the one seen; blocking.

        slots: looked at in this order. seen: the version that is known already, of all slots or of
        each. Returns (slot, version) of the first that is later; what was written before it is in
        the segment.
        Raises CollectiveTimeout naming slots and their writers, and PeerLost. Nothing is broken
        then, and the wait may be repeated.
        """
        known = [seen] * len(slots) if isinstance(seen, int) else list(seen)
        if len(known) != len(slots):
            raise ValueError(
                f"wait_any: {len(slots)} slots but {len(known)} versions seen; give one for each"
            )
        return self._native.wait_any(
            [natural("NotifiedWindow: slot", slot, UINT32_MAX) for slot in slots],
            [natural("NotifiedWindow: seen", version) for version in known],
            self._limit(timeout_s),
        )

    def test(self, slot: int) -> int:
        """The version in a slot of this rank, 0 if none; local, not blocking."""
        return self._native.test(natural("NotifiedWindow: slot", slot, UINT32_MAX))

    def reset(self, slot: int) -> int:
        """Make a slot of this rank 0, and return the version it had; local, not blocking.

        The writer's next version still has to be above its last.
        """
        return self._native.reset(natural("NotifiedWindow: slot", slot, UINT32_MAX))

    def bind(self, slot: int, source: int) -> None:
        """Say that only `source` notifies this slot, for errors and the death watch; local."""
        self._native.bind(
            natural("NotifiedWindow: slot", slot, UINT32_MAX),
            c_int("NotifiedWindow: source", source),
        )

    def make_tree(
        self, layers: Sequence[_native.TreeLayer], options: _native.TreeOptions
    ) -> _native.Tree:
        """What work() needs; local. The memory stays as long as it does."""
        return self._native.tree(list(layers), options)

    def work(self, tree: _native.Tree, update: Callable[[int, Sequence[int]], None]) -> None:
        """Sum, update and forward layers until the tree's stop slot is notified; local, blocking.

        update: called here, with a version and layers, to make weights of their sums.
        Meanwhile other threads that wait leave MPI to this one. close() ends it.
        Raises PeerLost, CollectiveTimeout, and what `update` raises.
        """
        worker = threading.current_thread()
        self._workers.append(worker)
        try:
            tree.run(update)
        finally:
            self._workers.remove(worker)
            del tree  # an error keeps this frame, and the tree would keep the memory

    def close(self, *, waits: bool = True) -> None:
        """Give the segments back; local, but collective over MPI. A second call does nothing.

        Waits for nobody inside a node; between nodes for puts under way, and over MPI for all
        ranks, up to the deadline.
        waits: False for a rank that leaves by an error, which waits for nobody over MPI either:
            its segment stays until the process ends, and other ranks wait here up to the deadline.
        """
        self._native.end_work()
        if not waits:
            self._native.abandon()
        for worker in list(self._workers):
            if worker is not threading.current_thread():
                worker.join(self._timeout_s)
        self._native.close()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._native.closed()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._segment_bytes} bytes, {self._slots} slots"
        return f"<hsgd.NotifiedWindow rank {self._rank}, {state}>"

    def _limit(self, timeout_s: float | None) -> float:
        return (
            self._timeout_s
            if timeout_s is None
            else seconds("NotifiedWindow: timeout_s", timeout_s)
        )
