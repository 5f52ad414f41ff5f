"""Rows of this user's ranks, read twice, a moment apart, to see which ranks move."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsgd.errors import HsgdError
from hsgd.jobs.environment.launcher_variables import world_rank
from hsgd.tools.status.page import KINDS, Note, NoteState, PageRefused, hosts_of, notes_of

__all__ = ["Look", "Row", "look", "named_hosts", "rows_from", "shown", "with_stack"]

_PAUSE_S = 0.1  # between the two readings
_STATES = {NoteState.MEETING: "set-up", NoteState.OPEN: "open", NoteState.BROKEN: "broken"}


@dataclass(frozen=True)
class Row:
    """One rank of one communicator. Ages are in seconds; None: never, or unknown."""

    comm: str  # equal on all its ranks
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    host: str
    pid: int
    world_rank: int | None  # by the launcher's variables
    command: str
    process_state: str  # the letter in /proc/PID/stat
    state: str  # set-up, open, broken
    moves: bool  # it did something between the two readings
    in_call: bool
    call: int  # the number of the last call that it began; 0: none
    kind: str
    name: str
    bytes: int
    finished_calls: int
    since_s: float  # of the call, or since it ended
    last_look_s: float | None  # since it checked the other ranks, waiting in this call
    waits_for: int | None  # a rank
    waits_for_node: int | None
    waits_since_s: float | None
    error_code: int
    error_rank: int | None
    error: str
    stack: str | None = None


@dataclass(frozen=True)
class Look:
    """The rows, and a line for each process whose page could not be read."""

    rows: list[Row]
    refused: list[str]


def look(pids: Sequence[int] = (), *, twice: bool = True) -> Look:
    """Read all ranks of this user on this node, or those of some jobs; local.

    Raises HsgdError if one of the processes has no ranks.

    Args:
        pids: ranks, or processes that started them.
        twice: read twice, 0.1 s apart, to see which ranks move; else none does.
    """
    chosen = _with_descendants(pids, _children()) if pids else set()
    processes = _own_processes()
    for pid in pids:
        _check_process(pid)
    notes_by_pid, refused = _read_all(processes)
    before = {pid: _progress(notes) for pid, notes in notes_by_pid.items()}
    if before and twice:
        time.sleep(_PAUSE_S)
        notes_by_pid, refused = _read_all(processes)
    rows, host = [], socket.gethostname()
    for pid, notes in notes_by_pid.items():
        process = _Process.read(pid)
        rows += [_row(process, note, before.get(pid, {}), host) for note in notes]
    if pids:
        rows = _of_the_same_jobs(rows, chosen)
        refused = {pid: line for pid, line in refused.items() if pid in chosen}
        _check_found(pids, rows, refused)
    return Look(sorted(rows, key=lambda row: (row.comm, row.rank)), list(refused.values()))


def named_hosts(rows: Sequence[Row]) -> list[str]:
    """Return the hosts of all nodes of these communicators, if a rank here knows; local."""
    names: dict[str, None] = {}
    for pid in sorted({row.pid for row in rows if row.nodes > 1}):
        with contextlib.suppress(OSError, PageRefused):  # it ended meanwhile
            names.update(dict.fromkeys(hosts_of(pid)))
    return list(names)


def rows_from(dictionaries: Iterable[dict[str, Any]]) -> list[Row]:
    """Rebuild rows from another `hsgd status --json`; KeyError if one lacks a field."""
    names = [field.name for field in dataclasses.fields(Row)]
    return [Row(**{name: shown(each[name]) for name in names}) for each in dictionaries]


def shown(value: Any) -> Any:
    """Return text of another node without control characters for a terminal."""
    if not isinstance(value, str):
        return value
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in value)


def with_stack(row: Row, stack: str | None) -> Row:
    """Return the same row with the stacks of its process; None: without."""
    return dataclasses.replace(row, stack=stack)


def _own_processes() -> list[int]:
    own, found = os.geteuid(), []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if own == 0 or os.stat(f"/proc/{entry}").st_uid == own:
                    found.append(int(entry))
            except OSError:
                continue  # it ended meanwhile
    return sorted(found)


def _check_process(pid: int) -> None:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise HsgdError(f"process {pid} has ended, or never was") from None
    if os.geteuid() not in (0, uid):
        raise HsgdError(
            f"process {pid} belongs to another user (uid {uid}); hsgd status reads your own only"
        )


def _check_found(pids: Sequence[int], rows: list[Row], refused: dict[int, str]) -> None:
    seen, children = {row.pid for row in rows} | refused.keys(), _children()
    for pid in pids:
        if not seen & _with_descendants([pid], children):
            raise HsgdError(
                f"process {pid} has no open communicator of hsgd: it has made none yet, or has "
                "finished and closed them"
            )


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (words := _stat_words(int(entry))):
            children.setdefault(int(words[1]), []).append(int(entry))
    return children


def _with_descendants(pids: Sequence[int], children: dict[int, list[int]]) -> set[int]:
    found: set[int] = set()
    left = list(pids)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children.get(pid, [])
    return found


def _of_the_same_jobs(rows: list[Row], chosen: set[int]) -> list[Row]:
    """Return rows of the chosen processes, and of all that share a communicator with them."""
    comms = {row.comm for row in rows if row.pid in chosen}
    pids = {row.pid for row in rows if row.comm in comms}
    comms |= {row.comm for row in rows if row.pid in pids}
    return [row for row in rows if row.comm in comms]


def _read_all(processes: Sequence[int]) -> tuple[dict[int, list[Note]], dict[int, str]]:
    found: dict[int, list[Note]] = {}
    refused: dict[int, str] = {}
    for pid in processes:
        try:
            if notes := notes_of(pid):
                found[pid] = notes
        except PageRefused as error:
            refused[pid] = str(error)
        except OSError:
            continue  # it ended meanwhile, or has special rights
    return found, refused


_Progress = dict[tuple[int, int, int], tuple[int, int, bool, int]]


def _progress(notes: Sequence[Note]) -> _Progress:
    return {
        (note.id, note.meeting, note.rank): (note.sequence, note.finished, note.in_call, note.state)
        for note in notes
    }


@dataclass(frozen=True)
class _Process:
    pid: int
    state: str
    command: str
    world_rank: int | None

    @staticmethod
    def read(pid: int) -> _Process:
        words = _stat_words(pid)
        command = _read_quietly(pid, "cmdline").replace("\0", " ").strip()
        variables = (word.partition("=") for word in _read_quietly(pid, "environ").split("\0"))
        return _Process(
            pid,
            words[0] if words else "Z",
            "".join(letter if letter.isprintable() else " " for letter in command),
            world_rank({name: value for name, _, value in variables}),
        )


def _stat_words(pid: int) -> list[str]:
    """Return the words of /proc/PID/stat after the name, which may have blanks; [] if it ended."""
    return _read_quietly(pid, "stat").rpartition(")")[2].split()


def _read_quietly(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _row(process: _Process, note: Note, before: _Progress, host: str) -> Row:
    def age(then_ns: int) -> float | None:  # when the note was read: others were read meanwhile
        return round(max(0, note.read_ns - then_ns) * 1e-9, 3) if then_ns else None

    waiting = note.in_call or note.state == NoteState.MEETING
    return Row(
        comm=f"{note.id:016x}" if note.id else f"set-up-{note.meeting:016x}",
        rank=note.rank,
        size=note.size,
        local_rank=note.local_rank,
        local_size=note.local_size,
        node=note.node,
        nodes=note.nodes,
        host=host,
        pid=process.pid,
        world_rank=process.world_rank,
        command=process.command,
        process_state=process.state,
        state=_STATES.get(note.state, "open"),
        moves=note.is_torn
        or any(before.get(key) != value for key, value in _progress([note]).items()),
        in_call=note.in_call,
        call=note.sequence,
        kind=KINDS[note.kind] if note.kind < len(KINDS) else "collective",
        name=note.name,
        bytes=note.bytes,
        finished_calls=note.finished,
        since_s=age(note.since_ns) or 0.0,
        last_look_s=age(note.looked_ns) if waiting else None,
        waits_for=note.awaited if waiting and note.awaited >= 0 else None,
        waits_for_node=note.awaited_node if waiting and note.awaited_node >= 0 else None,
        waits_since_s=age(note.waits_since_ns) if waiting else None,
        error_code=note.error,
        error_rank=note.error_rank if note.error_rank >= 0 else None,
        error=note.message,
    )
