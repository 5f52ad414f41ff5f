"""Status pages of this user's processes, in the layout of csrc/core/status/status_record.hpp."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hsgd.errors import HsgdError

__all__ = ["KINDS", "Note", "NoteState", "PageRefused", "hosts_of", "notes_of"]

VERSION = 1
MAGIC = b"hsgdstat"
_LINK = "/memfd:status-of-hsgd"
_HEADER = struct.Struct("=8sIIIIIIII")
_RECORD = struct.Struct("=QQQQqqqBBB5xiiIiQQiiiiiiii64s192s")
_VERSION = struct.Struct("=Q")
_MOST_RECORDS = 4096
_HOST_BYTES = 64
_MOST_HOSTS = 4096
_TRIES = 50  # a change takes nanoseconds, unless its writer was stopped within
# hsgd_kind of hsgd/csrc/include/hsgd_core.h, then calls of Comm.empty and Comm.shared.
KINDS = (
    *("allreduce", "broadcast", "barrier", "reduce_scatter", "allgather", "alltoall"),
    *("allgather", "alltoall", "empty or shared"),
)


class NoteState:
    """The states of a communicator in its record."""

    FREE, MEETING, OPEN, BROKEN = range(4)


class PageRefused(HsgdError):
    """A status page that this hsgd cannot read."""


@dataclass(frozen=True)
class Note:
    """One record: a communicator of a process. Times are of CLOCK_MONOTONIC, in ns; 0: never."""

    sequence: int
    finished: int
    bytes: int
    since_ns: int
    looked_ns: int
    waits_since_ns: int
    kind: int
    in_call: bool
    awaited: int
    awaited_node: int
    state: int
    error: int
    id: int
    meeting: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    error_rank: int
    name: str
    message: str
    read_ns: int  # time of this reading
    is_first: bool = False  # first of its node whose collective failed
    is_torn: bool = False  # its writer changed it during all tries


def notes_of(pid: int) -> list[Note]:
    """Return the notes of a process's open communicators; local.

    Raises OSError, and PageRefused for pages of another version.
    """
    return [note for page in _pages(pid) for note in _read(page, pid)]


def hosts_of(pid: int) -> list[str]:
    """Return the hosts of its communicators, if it is the process that knows; as notes_of()."""
    found: dict[str, None] = {}
    for page in _pages(pid):
        if (header := _header(page, pid)) is not None:
            data = os.pread(page, _HOST_BYTES * min(header.hosts, _MOST_HOSTS), header.hosts_begin)
            names = (data[at : at + _HOST_BYTES] for at in range(0, len(data), _HOST_BYTES))
            found.update(dict.fromkeys(map(_text, names)))
    return [name for name in found if name and not name.startswith("-")]


def _pages(pid: int) -> Iterator[int]:
    for path in _paths(pid):
        try:
            # The number may belong to another file by now, which must not block.
            page = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            continue  # closed meanwhile
        try:
            yield page
        finally:
            os.close(page)


def _paths(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        path = f"{folder}/{entry}"
        try:
            link = os.readlink(path)
        except FileNotFoundError:
            continue
        if link.startswith(_LINK):
            yield path


@dataclass(frozen=True)
class _Header:
    used: int
    without: int
    hosts_begin: int
    hosts: int


def _read(page: int, pid: int) -> list[Note]:
    header = _header(page, pid)
    if header is None:
        return []
    notes = (_read_record(page, index + 1, pid) for index in range(header.used))
    found = [note for note in notes if note.state != NoteState.FREE]
    if header.without and not found:
        raise PageRefused(f"process {pid}: its status page has no room for its communicators")
    return found


def _header(page: int, pid: int) -> _Header | None:
    """Return the header; None if the process has no page of its own, or not yet."""
    head = os.pread(page, _HEADER.size, 0)
    if not head.strip(b"\0"):
        return None  # it is being made
    if len(head) < _HEADER.size:
        raise PageRefused(f"process {pid}: its status page is cut off after {len(head)} bytes")
    magic, version, record_bytes, writer, _, used, *rest = _HEADER.unpack(head)
    if magic == b"\0" * len(MAGIC):
        return None  # the same: the magic is written last
    if magic != MAGIC:
        raise PageRefused(f"process {pid}: its status page is not one of hsgd's")
    if version != VERSION:
        raise PageRefused(
            f"process {pid}: its status page has version {version}, and this hsgd reads {VERSION}; "
            "call the hsgd that the job was started with"
        )
    if record_bytes != _RECORD.size or used > _MOST_RECORDS:
        raise PageRefused(
            f"process {pid}: its status page has {used} records of {record_bytes} bytes, where "
            f"{_RECORD.size} bytes were expected; call the hsgd that the job was started with"
        )
    if writer != _own_number(pid):
        return None  # a forked child has its parent's page, and is no rank
    return _Header(used, *rest)


def _own_number(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def _read_record(page: int, index: int, pid: int) -> Note:
    """Read a record, from 1; it is torn if its writer was stopped within a change."""
    offset = index * _RECORD.size
    for _ in range(_TRIES):
        record = os.pread(page, _RECORD.size, offset)  # begins with its version
        after = os.pread(page, _VERSION.size, offset)
        if len(record) < _RECORD.size:
            raise PageRefused(f"process {pid}: its status page is cut off")
        read_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        is_torn = record[: _VERSION.size] != after or _VERSION.unpack(after)[0] % 2 != 0
        if not is_torn:
            break
    fields = _RECORD.unpack(record)
    (sequence, finished, size_bytes, since, looked, waits_since) = fields[1:7]
    (kind, in_call, named) = fields[7:10]
    is_waiting = waits_since != 0
    (awaited, awaited_node) = fields[10:12] if is_waiting else (-1, -1)
    (state, error, comm_id, meeting) = fields[12:16]
    (rank, size, local_rank, local_size, node, nodes, error_rank, is_first) = fields[16:24]
    return Note(
        *(sequence, finished, size_bytes, since, looked, waits_since, kind, bool(in_call)),
        *(awaited, awaited_node, state, error, comm_id, meeting),
        *(rank, size, local_rank, local_size, node, nodes, error_rank),
        name=_text(fields[24]) if named else "",
        message=_text(fields[25]),
        is_first=is_first != 0,
        read_ns=read_ns,
        is_torn=is_torn,
    )


def _text(data: bytes) -> str:
    text = data.partition(b"\0")[0].decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in text)
