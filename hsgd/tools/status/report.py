"""Output of `hsgd status`: a table for people, a document for programs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hsgd.base.bytes_text import bytes_text
from hsgd.tools.status.looking import Row
from hsgd.tools.status.waits import Group, Standing, call_words

__all__ = ["FORM", "brief", "document", "table"]

FORM = 1  # of the document
_LOUD = {Standing.LATE, Standing.SILENT, Standing.STOPPED, Standing.ENDED}
_COMMAND_LETTERS = 60
_BRIEF_RANKS = 8
_BRIEF_FINDINGS = 4


def document(groups: Sequence[Group], host: str, refused: Sequence[str]) -> dict[str, Any]:
    """Return the document for JSON. Ages are in seconds."""
    return {
        "hsgd_status": FORM,
        "host": host,
        "communicators": [
            {
                "comm": group.comm,
                "size": group.rows[0].size,
                "nodes": group.rows[0].nodes,
                "held_up": group.is_held_up,
                "held_up_by": group.held_up_by,
                "held_up_by_nodes": group.held_up_by_nodes,
                "unseen": group.unseen,
                "findings": group.findings,
                "ranks": [
                    {**dataclasses.asdict(row), "standing": standing.value}
                    for row, standing in zip(group.rows, group.standings, strict=True)
                ],
            }
            for group in groups
        ],
        "refused": list(refused),
    }


def table(groups: Sequence[Group]) -> str:
    """Return several lines for each communicator: its name, its ranks, findings, stacks."""
    parts = []
    for group in groups:
        pairs = list(zip(group.rows, group.standings, strict=True))
        lines = [_title(group), *_columns(_cells(group, pairs))]
        lines += [f"  -> {finding}" for finding in group.findings]
        if not group.findings:
            lines.append(f"  -> {_calm(group)}")
        for row in group.rows:
            if row.stack is not None:
                lines += [f"  stacks of rank {row.rank} (pid {row.pid}):"]
                lines += [f"    {line}" for line in row.stack.splitlines()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def brief(group: Group) -> str:
    """Return at most 15 lines; the worst ranks first, none if only another node is awaited."""
    pairs = list(zip(group.rows, group.standings, strict=True))
    pairs.sort(key=lambda pair: pair[1] not in _LOUD)
    is_elsewhere = group.rows[0].nodes > 1 and not group.held_up_by
    shown = [] if is_elsewhere else pairs[:_BRIEF_RANKS]
    lines = [_title(group), *(_columns(_cells(group, shown)) if shown else [])]
    if left := Counter(standing.value for _, standing in pairs[len(shown) :]):
        words = ", ".join(f"{count} {standing}" for standing, count in left.items())
        lines.append(f"  {'and ' if shown else ''}{left.total()} on this node: {words}")
    lines += [f"  -> {finding}" for finding in group.findings[:_BRIEF_FINDINGS]]
    if (more := len(group.findings) - _BRIEF_FINDINGS) > 0:
        lines.append(f"  -> and {more} more")
    return "\n".join(lines)


def _title(group: Group) -> str:
    first = group.rows[0]
    command = first.command
    if len(command) > _COMMAND_LETTERS:
        command = "..." + command[3 - _COMMAND_LETTERS :]
    ranks = f"{first.size} rank{'s' if first.size > 1 else ''}"
    nodes = f"{first.nodes} node{'s' if first.nodes > 1 else ''}"
    return f"communicator {group.comm}: {ranks} on {nodes}: {command}"


def _calm(group: Group) -> str:
    if Standing.WAITS in group.standings:
        return "ranks wait for one another, and none stands out: ask again"
    if any(row.moves for row in group.rows):
        return "it runs"
    return "no rank waits for another"


def _cells(group: Group, shown: Sequence[tuple[Row, Standing]]) -> list[list[str]]:
    first = group.rows[0]
    with_hosts = len({row.host for row in group.rows}) > 1
    with_nodes = first.nodes > 1
    with_world = any(row.world_rank not in (None, row.rank) for row in group.rows)
    head = ["rank", "pid", "state", "since", "call", "waits for"]
    cells = [[*head, *(["world rank"] if with_world else []), *(["node"] if with_nodes else [])]]
    cells[0] += ["host"] if with_hosts else []
    for row, standing in shown:
        state = standing.value.upper() if standing in _LOUD else standing.value
        line = [str(row.rank), str(row.pid), state, f"{row.since_s:.1f} s"]
        line += [_call(row), _waited_for(row, standing)]
        line += ["" if row.world_rank is None else str(row.world_rank)] if with_world else []
        line += [str(row.node)] if with_nodes else []
        cells.append(line + ([row.host] if with_hosts else []))
    return cells


def _call(row: Row) -> str:
    if row.state == "set-up":
        return "its set-up"
    if row.in_call or (row.state == "broken" and row.call):
        return f"{call_words(row)}, {bytes_text(row.bytes)}" if row.bytes else call_words(row)
    return f"none, after {call_words(row)}" if row.call else "none yet"


def _waited_for(row: Row, standing: Standing) -> str:
    if standing not in (Standing.WAITS, Standing.SET_UP):
        return ""
    since = "" if row.waits_since_s is None else f", {row.waits_since_s:.1f} s"
    if row.waits_for is not None:
        return f"rank {row.waits_for}{since}"
    return f"node {row.waits_for_node}{since}" if row.waits_for_node is not None else ""


def _columns(cells: list[list[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    numbers = {0, 1, 3}  # right-aligned
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
