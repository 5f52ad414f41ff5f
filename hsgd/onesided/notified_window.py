"""NotifiedWindow: one-sided, notified writes between ranks, without collectives and barriers.

The vocabulary is that of GASPI as CaffeGPI uses it (arXiv:1706.00095, our reconstruction).
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
    """Memory segments and notification slots, one set per rank, that all ranks write into.

    The constructor is collective. A notification is a version number that overwrites the previous
    one: versions of a slot start at 1 and must increase. They say which data is there, not how many
    writes.

    Inside a node a write is done when put_notify returns. Over MPI (MPI-3 one-sided; one window,
    one lock_all) it progresses while threads of both ranks are in methods of the NotifiedWindow, so
    in a program with long computations a thread should wait in one. Over sockets it progresses by
    itself. Methods release the GIL and may be called by several threads (with MPI_THREAD_MULTIPLE);
    up to four may wait.

    If a peer of the node dies or closes its NotifiedWindow, a wait for a slot that `bind` assigned
    to it raises PeerLost within a second. Over sockets this also holds for a peer of another node
    that this rank has written to, or that has written here. Everything else ends at the deadline
    with CollectiveTimeout. MPI's one-sided calls do not survive a death on another node: the
    NotifiedWindow cannot be used afterwards.

    Args:
        comm: the ranks that take part. Closing it closes this.
        segment_bytes: bytes of each rank's segment, equal on all ranks; zero at the beginning.
        slots: notification slots of each rank, equal on all ranks. A slot has one writer.
        queue: most operations to other nodes in flight.
        timeout_s: deadline of a wait, and of a write that its target does not accept, which then
            breaks the NotifiedWindow; None is the deadline of `comm`.
        remote_only: write over the network inside the node too; for measurements and tests.
        network: for writes between nodes: "mpi"; "sockets", which is TCP between the nodes' IPv4
            addresses; or "auto", which is "mpi" if all nodes have an RDMA adapter
            (hsgd.onesided.networks) and else "sockets".
        forgiving: a write that its target does not accept breaks nothing. It stays in flight, its
            buffer stays in use until `done`, and it occupies its place in the queue; if its target
            dies, it is dropped and counts as done. This holds over sockets: over MPI a flush may
            wait for the target beyond the deadline.
        slice_bytes: over sockets, bytes of the slices of a write, 4096 to 64 MiB. The kernel holds
            up to four slices, at most 512 KiB, ahead of the network. Large slices cost less
            processor time: each is a kernel call on either side. With small ones urgent writes
            (`order`) wait less for others.
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
        """The network for writes between nodes."""
        return self._network

    def segment(self, rank: int | None = None) -> Any:
        """Return the bytes of a segment as a NumPy array (uint8); local.

        The rank is one of this node, by default this one; ValueError for others, whose memory
        cannot be accessed. Another rank's write is visible once its version was seen. The memory
        outlives the NotifiedWindow.
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

        Args:
            buffer: C-contiguous CPU array of any supported dtype; None only notifies. It must not
                change until `done` of the returned ticket (0 is done); it is kept alive until then.
            target: a rank.
            slot: of the target.
            version: above the slot's last one.
            offset: place in the segment, bytes.
            timeout_s: how long to wait for room in the queue, 0 not at all; None is the deadline.

        Raises:
            QueueFull: names the oldest operation.
            ValueError: the rank, slot, place or version is impossible.
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
        """Write several (buffer, offset) pairs, and then one version, as put_notify does.

        Over sockets, waiting writes to one target go by increasing `order`, also between slices of
        a running write. It must be the same in all writes to a slot.
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
        """Return whether the operation was delivered; local, not blocking."""
        return self._native.done(natural("NotifiedWindow: ticket", ticket))

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all writes of this rank were delivered; blocking. CollectiveTimeout."""
        self._native.drain(self._limit(timeout_s))

    def wait_any(
        self, slots: Sequence[int], seen: int | Sequence[int] = 0, timeout_s: float | None = None
    ) -> tuple[int, int]:
        """Wait until one of this rank's slots has a version above the one seen; blocking.

        Slots are checked in this order, against the version in `seen`, one for all or for each.
        Returns (slot, version) of the first newer one; data written before it is in the segment.
        Raises CollectiveTimeout with slots and their writers, or PeerLost; the wait may be
        repeated.
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
        """Return the version in a slot of this rank, 0 if none; local, not blocking."""
        return self._native.test(natural("NotifiedWindow: slot", slot, UINT32_MAX))

    def reset(self, slot: int) -> int:
        """Reset a slot to 0, and return its version; later versions must still increase; local."""
        return self._native.reset(natural("NotifiedWindow: slot", slot, UINT32_MAX))

    def bind(self, slot: int, source: int) -> None:
        """Declare `source` the only writer of a slot, to notice its death; local."""
        self._native.bind(
            natural("NotifiedWindow: slot", slot, UINT32_MAX),
            c_int("NotifiedWindow: source", source),
        )

    def make_tree(
        self, layers: Sequence[_native.TreeLayer], options: _native.TreeOptions
    ) -> _native.Tree:
        """Make the tree for work(); local. It keeps the memory alive."""
        return self._native.tree(list(layers), options)

    def work(self, tree: _native.Tree, update: Callable[[int, Sequence[int]], None]) -> None:
        """Sum, update and forward layers until the tree's stop slot is notified; local, blocking.

        `update` is called in this thread, with a version and layers, to make weights of their sums.
        Other threads that wait leave MPI to this one meanwhile. close() ends it. Raises PeerLost,
        CollectiveTimeout and errors of `update`.
        """
        worker = threading.current_thread()
        self._workers.append(worker)
        try:
            tree.run(update)
        finally:
            self._workers.remove(worker)
            del tree  # an error keeps this frame, and with the tree the memory

    def close(self, *, waits: bool = True) -> None:
        """Free the segments; local, but collective over MPI. A second call does nothing.

        Inside a node it waits for no rank; between nodes for puts in flight, and over MPI for all
        ranks, up to the deadline. A rank that leaves by an error passes waits=False, and waits for
        no rank over MPI either: its segment stays until the process ends, and other ranks wait here
        up to the deadline.
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
        """True after close()."""
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
