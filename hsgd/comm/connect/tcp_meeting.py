"""Communicators over several nodes without MPI: shared memory inside a node, TCP between nodes.

Ranks find their nodes, leaders open sockets and publish the addresses, all leaders connect, and
then the ranks of each node connect. A rank that fails says so in the step that all take together,
so that no rank waits for it.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hsgd import errors
from hsgd.comm.connect.meeting_path import draw_meeting_path
from hsgd.comm.connect.own_node import Circle, find_nodes, number_nodes
from hsgd.errors import HsgdError
from hsgd.jobs.stores.board import Board

if TYPE_CHECKING:
    from hsgd import _native

__all__ = ["meet_over_store", "meet_within"]

_STEPS = ("addresses", "connections")  # exchanges of _meet_on_nodes()


def meet_over_store(
    board: Board, options: _native.Options, settings: dict[str, Any], interfaces: str
) -> _native.Comm:
    """Make a communicator of the ranks of a board; collective, blocking.

    Raises errors of the board, ValueError if `settings` differ between ranks or an interface cannot
    be used, PeerLost and CollectiveTimeout with leaders that cannot be reached, SharedMemoryError.
    """
    from hsgd import _native

    rows = board.exchange("settings", [settings, _native.near_nic(options)])
    for rank, (other, _) in enumerate(rows):
        differ = [name for name in settings if other.get(name) != settings[name]]
        if differ:
            raise ValueError(
                f"ranks {board.members[board.rank]} and {board.members[rank]} have different "
                f"settings ({', '.join(differ)}); give all ranks the same"
            )
    node_of_rank = find_nodes(board, len(board.members))
    return _meet_on_nodes(board, node_of_rank, [nic for _, nic in rows], options, interfaces)


def meet_within(
    tell_all: Callable[[Any], list[Any]],
    members: list[int],
    own: tuple[int, list[int]],
    options: _native.Options,
    interfaces: str,
) -> _native.Comm | None:
    """Make a communicator of some ranks of a parent; collective over the parent, blocking.

    `tell_all` is an allgather over the parent. `members` are the parent's ranks in the new
    communicator, in its order; if empty, this rank only takes part in the allgathers, and gets
    None. `own` is (this rank, node of each rank) in the parent. Raises as meet_over_store(), on all
    members.
    """
    from hsgd import _native

    if not members:
        for _ in ("adapters", *_STEPS):
            tell_all(None)
        return None
    rank, nodes = own
    part = _Part(tell_all, members, members.index(rank))
    node_of_rank = number_nodes([nodes[member] for member in members])
    nics = part.exchange("adapters", _native.near_nic(options))
    return _meet_on_nodes(part, node_of_rank, nics, options, interfaces)


class _Part:
    """Some ranks of a communicator, whose other ranks take part in the exchanges."""

    def __init__(self, tell_all: Callable[[Any], list[Any]], members: list[int], rank: int) -> None:
        self._tell_all, self._members, self.rank = tell_all, members, rank

    def exchange(self, what: str, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return every member's value, by rank; the deadline is that of the communicator."""
        rows = self._tell_all(value)
        return [rows[member] for member in self._members]


def _meet_on_nodes(
    circle: Circle,
    node_of_rank: list[int],
    nics: list[int],
    options: _native.Options,
    interfaces: str,
) -> _native.Comm:
    from hsgd import _native

    node = node_of_rank[circle.rank]
    nodes = max(node_of_rank) + 1
    first = node_of_rank.index(node)
    lanes = _native.leaders(node_of_rank, nics) if nodes > 1 else []
    lane = next((ranks for ranks in lanes if circle.rank in ranks), [])
    leader: list[_native.Leader] = []

    def open_up() -> list[str]:
        if lane:
            leader.append(_native.Leader(interfaces, nodes))
        # Most of it is zero: a place for each address that a host may have.
        address = base64.b64encode(zlib.compress(leader[0].address())).decode() if lane else ""
        is_first = circle.rank == first
        host = socket.gethostname() if is_first and nodes > 1 else ""
        return [draw_meeting_path() if is_first else "", address, host]

    rows = _together(circle, _STEPS[0], open_up, options.timeout_s)

    def connect() -> None:
        if lane:
            told = (base64.b64decode(rows[rank][1]) for rank in lane)
            addresses = b"".join(map(zlib.decompress, told))
            leader[0].connect(addresses, lane, node, options)

    # All ranks know the path of the first node: `hsgd status` names the communicator by it.
    path = str(rows[0][0]).encode()
    options.comm_id = int.from_bytes(hashlib.blake2b(path, digest_size=8).digest(), "big")
    # Leaders wait for one another that long; ranks that wait for leaders must learn why they gave
    # up.
    _together(circle, _STEPS[1], connect, 2 * options.timeout_s)
    comm = _native.Comm.over_tcp(
        rows[first][0], node_of_rank, nics, circle.rank, leader[0] if lane else None, options
    )
    if circle.rank == first and nodes > 1:
        comm.tell_hosts(",".join(row[2] for row in rows if row[2]))
    return comm


def _together(circle: Circle, what: str, make: Callable[[], Any], limit_s: float) -> list[Any]:
    """Return make()'s result of each rank, within `limit_s`; if it fails on one, all raise."""
    failure: Exception | None = None
    row: list[Any] = ["", None, -1]
    end = time.monotonic() + limit_s
    try:
        row[1] = make()
    except (HsgdError, ValueError, OSError) as error:
        failure, row = error, [type(error).__name__, str(error), getattr(error, "rank", -1)]
    try:
        rows: list[Any] = circle.exchange(what, row, end - time.monotonic())
    except HsgdError:  # the same rank is missing here
        if failure is None:
            raise
    if failure is not None:
        raise failure
    for kind, text, rank in rows:
        if kind:
            raise _error(kind, text, rank)
    return [value for _, value, _ in rows]


def _error(kind: str, text: str, rank: int) -> Exception:
    if kind == "ValueError":
        return ValueError(text)
    return errors.about(rank, getattr(errors, kind, HsgdError)(text))
