"""Judgement of the rows: which rank waits for which, and which ranks hold others up."""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from hsgd.tools.status.looking import Row

__all__ = ["Group", "Standing", "call_words", "groups_of"]

_TIMEOUT = -3  # HSGD_ERR_TIMEOUT of hsgd/csrc/include/hsgd_core.h
_SILENT_S = 1.0  # a waiting rank checks the others fifty times a second


class Standing(str, enum.Enum):
    """State of a rank, as others can judge."""

    STOPPED = "stopped"  # its process is: SIGSTOP, Ctrl-Z, a debugger
    ENDED = "ended"  # its process has, and its parent has not reaped it
    SET_UP = "set-up"  # waits for ranks to join, or measures
    BROKEN = "broken"  # since an error
    WAITS = "waits"  # in a call, for others
    SILENT = "silent"  # in a call, without a check of the others for long: it works, or hangs
    WORKS = "works"  # in a call
    LATE = "late"  # has not made the call in which others wait
    OUTSIDE = "outside"  # between two calls, and no rank waits for it


@dataclass
class Group:
    """The seen ranks of one communicator.

    Attributes:
        held_up_by: ranks that hold others up, the worst first.
        held_up_by_nodes: nodes that were not seen, and are waited for.
        waits_for_unseen: ranks wait, and no seen rank is the cause.
        findings: a line for each of these, and for other facts.
    """

    comm: str
    rows: list[Row]
    standings: list[Standing]
    held_up_by: list[int] = field(default_factory=list)
    held_up_by_nodes: list[int] = field(default_factory=list)
    waits_for_unseen: bool = False
    findings: list[str] = field(default_factory=list)

    @property
    def unseen(self) -> list[int]:
        """Ranks without a seen process."""
        seen = {row.rank for row in self.rows}
        return [rank for rank in range(self.rows[0].size) if rank not in seen]

    @property
    def is_held_up(self) -> bool:
        """Whether ranks wait for one that is late, silent, stopped or gone."""
        return bool(self.held_up_by) or self.waits_for_unseen


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Return a group for each communicator, those that are held up first; local."""
    by_comm: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_comm.setdefault(row.comm, {})[row.rank] = row
    groups = [_judge(comm, rows, by_rank) for comm, by_rank in by_comm.items()]
    return sorted(groups, key=lambda group: (not group.is_held_up, group.comm))


def call_words(row: Row) -> str:
    """Format a call: allreduce #12 "fc.weight"."""
    return f"{row.kind} #{row.call}" + (f' "{row.name}"' if row.name else "")


def _judge(comm: str, rows: Sequence[Row], by_rank: dict[int, Row]) -> Group:
    members = [by_rank[rank] for rank in sorted(by_rank)]
    waiting = [row for row in members if _waits(row)]
    gave_up = [row for row in members if _gave_up(row)]
    newest = max((row.call for row in (*waiting, *gave_up)), default=0)
    kept = {row.rank for row in waiting}
    group = Group(comm, members, [_standing(row, newest, kept) for row in members])
    if any(row.state == "broken" for row in members):
        _say_what_broke(group, gave_up, newest, rows)
    elif any(row.state == "set-up" for row in members):
        _say_who_does_not_meet(group)
    elif waiting:
        _say_who_is_waited_for(group, waiting, newest, rows)
    else:
        _say_who_is_stopped(group)
    return group


def _waits(row: Row) -> bool:
    """Return whether the rank waits in a call and is alive, so that its page can be trusted."""
    looks = row.last_look_s is not None and row.last_look_s < _SILENT_S
    return row.state == "open" and row.in_call and looks and not row.moves and not _is_stopped(row)


def _gave_up(row: Row) -> bool:
    """Return whether the rank waited until the deadline: its page shows for which ranks."""
    return row.state == "broken" and row.error_code == _TIMEOUT


def _is_stopped(row: Row) -> bool:
    return row.process_state in ("T", "t", "Z", "X")


def _standing(row: Row, newest: int, waiting: Container[int]) -> Standing:
    if row.process_state in ("T", "t"):
        return Standing.STOPPED
    if row.process_state in ("Z", "X"):
        return Standing.ENDED
    if row.state != "open":
        return Standing.SET_UP if row.state == "set-up" else Standing.BROKEN
    if row.rank in waiting:
        return Standing.WAITS
    if row.in_call and row.call >= newest:
        is_silent = not row.moves and _silence_s(row) >= _SILENT_S
        return Standing.SILENT if is_silent else Standing.WORKS
    if row.moves or row.call >= newest:
        return Standing.WORKS if row.in_call else Standing.OUTSIDE
    return Standing.LATE


def _silence_s(row: Row) -> float:
    return row.since_s if row.last_look_s is None else row.last_look_s


def _say_who_is_waited_for(
    group: Group, waiting: Sequence[Row], newest: int, all_rows: Sequence[Row]
) -> None:
    kept = [row for row in waiting if row.call == newest]
    longest = max(kept, key=lambda row: row.since_s)
    wait = f"{call_words(longest)}, in which 1 rank waits for {longest.since_s:.1f} s"
    if len(kept) > 1:
        wait = (
            f"{call_words(longest)}, in which {len(kept)} ranks wait, the first for "
            f"{longest.since_s:.1f} s"
        )
    _blame_all(group, newest, wait, all_rows)
    _say_who_is_unseen(group, kept, wait)


def _blame_all(group: Group, newest: int, wait: str, all_rows: Sequence[Row]) -> None:
    blamed = []
    for row, standing in zip(group.rows, group.standings, strict=True):
        is_behind = row.call < newest or (row.call == newest and row.in_call)
        stopped = standing in (Standing.STOPPED, Standing.ENDED) and is_behind
        if stopped or standing in (Standing.LATE, Standing.SILENT):
            blamed.append((row.call, not stopped, row.rank, row, standing))
    for _, _, rank, row, standing in sorted(blamed, key=lambda each: each[:3]):
        group.held_up_by.append(rank)
        group.findings.append(_blame(row, standing, newest, wait) + _elsewhere(row, all_rows))


def _blame(row: Row, standing: Standing, newest: int, wait: str) -> str:
    if row.call < newest and row.in_call:
        line = f"{_person(row)} is still in {call_words(row)} and has not called {wait}"
    elif row.call < newest:
        line = f"{_person(row)} has not called {wait}"
    elif standing == Standing.SILENT:
        return (
            f"{_person(row)} is in {wait}, and has not looked at the others for "
            f"{_silence_s(row):.1f} s: it works, or hangs"
        )
    else:
        line = f"{_person(row)} makes no progress in {wait}"
    return line + _process_words(standing)


def _process_words(standing: Standing) -> str:
    if standing == Standing.STOPPED:
        return "; its process is stopped (kill -CONT continues it)"
    return "; its process has ended" if standing == Standing.ENDED else ""


def _elsewhere(row: Row, all_rows: Sequence[Row]) -> str:
    """Describe the wait of a late rank in another communicator, if it waits there."""
    for other in all_rows:
        same = other.host == row.host and other.pid == row.pid and other.comm != row.comm
        if same and _waits(other):
            whom = "" if other.waits_for is None else f" for rank {other.waits_for}"
            return f"; it waits itself{whom}, in {call_words(other)} of communicator {other.comm}"
    return ""


def _say_who_is_unseen(group: Group, waiting: Sequence[Row], wait: str) -> None:
    """Add a finding about unseen ranks; only those that a rank waits for are to blame."""
    unseen = group.unseen
    if not unseen:
        return
    awaited = sorted({row.waits_for for row in waiting if row.waits_for is not None} & {*unseen})
    where = (
        "not seen: ended, closed it, in another container, or without room on the status page"
        if group.rows[0].nodes == 1
        else "not seen, on nodes that were not asked, or did not answer (--all-nodes)"
    )
    line = f"{_ranks(unseen)} of {wait}: {where}"
    if awaited:
        line += f"; {_ranks(awaited)} is waited for"
        group.held_up_by += awaited
    seen_nodes = {row.node for row in group.rows}
    nodes = {row.waits_for_node for row in waiting if row.waits_for_node is not None}
    group.held_up_by_nodes = sorted(nodes - seen_nodes)
    if group.held_up_by_nodes:
        line += f"; {_ranks(group.held_up_by_nodes, 'node')} is waited for"
    group.waits_for_unseen = not group.held_up_by
    group.findings.append(line)


def _say_who_does_not_meet(group: Group) -> None:
    first = group.rows[0]
    here = {(row.host, row.local_rank) for row in group.rows}
    missing = [rank for rank in range(first.local_size) if (first.host, rank) not in here]
    longest = max(row.since_s for row in group.rows)
    for row, standing in zip(group.rows, group.standings, strict=True):
        if standing in (Standing.STOPPED, Standing.ENDED):
            group.held_up_by.append(row.rank)
            line = f"{_person(row)} makes no progress in the set-up of the communicator"
            group.findings.append(line + _process_words(standing))
    if missing:
        if first.nodes == 1:
            group.held_up_by += missing
        group.findings.append(
            f"{_ranks(missing, 'local rank')} of {first.local_size} on this node did not join the "
            f"set-up of the communicator, in which others wait, the first for {longest:.1f} s"
        )


def _say_what_broke(
    group: Group, gave_up: Sequence[Row], newest: int, all_rows: Sequence[Row]
) -> None:
    first = next(row for row in gave_up or group.rows if row.state == "broken")
    group.findings.append(
        f"{_person(first)}: the communicator is broken since {first.since_s:.1f} s: {first.error}"
    )
    last = [row for row in group.rows if row.call == newest and (_gave_up(row) or _waits(row))]
    if gave_up:
        ranks = "1 rank waited" if len(last) == 1 else f"{len(last)} ranks waited"
        wait = f"{call_words(last[0])}, in which {ranks} until the deadline"
        _blame_all(group, newest, wait, all_rows)


def _say_who_is_stopped(group: Group) -> None:
    for row, standing in zip(group.rows, group.standings, strict=True):
        if standing in (Standing.STOPPED, Standing.ENDED):
            group.findings.append(
                f"{_person(row)}: {_process_words(standing)[2:]}; nobody waits for it yet"
            )


def _person(row: Row) -> str:
    return f"rank {row.rank} (pid {row.pid}, {row.host})"


def _ranks(ranks: Sequence[int], word: str = "rank") -> str:
    most = 8
    if len(ranks) == 1:
        return f"{word} {ranks[0]}"
    shown = [str(rank) for rank in ranks[:most]]
    if len(ranks) > most:
        return f"{word}s {', '.join(shown)} and {len(ranks) - most} more"
    return f"{word}s {', '.join(shown[:-1])} and {shown[-1]}"
