"""Rows of other nodes' ranks, by `hsgd status --json` on them."""

from __future__ import annotations

from collections.abc import Sequence

from hsgd.tools import on_hosts
from hsgd.tools.status.looking import Look, Row, rows_from, shown
from hsgd.tools.status.report import FORM

__all__ = ["ask"]


def ask(hosts: Sequence[str], options: Sequence[str] = ()) -> Look:
    """Ask hosts; those without answer are refused. Blocking, see on_hosts.ask()."""
    rows: list[Row] = []
    refused: list[str] = []
    for host, answer, reason in on_hosts.ask(hosts, ["status", "--json", *options]):
        try:
            if answer is not None and answer["hsgd_status"] != FORM:
                reason = "its hsgd has another version; install the same everywhere"
            elif answer is not None:
                rows += [
                    row for comm in answer["communicators"] for row in rows_from(comm["ranks"])
                ]
                refused += [shown(f"{host}: {line}") for line in answer["refused"]]
        except (KeyError, TypeError):
            reason = "its answer is not that of hsgd status"
        if reason:
            refused.append(shown(f"{host}: {reason}"))
    return Look(rows, refused)
