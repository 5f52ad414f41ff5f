"""Rows of other nodes' ranks, by `hsgd status --json` over ssh or srun, on all hosts at once."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hsgd.base.programs import answer_of
from hsgd.errors import HsgdError
from hsgd.jobs.launch.remote_command import shell_on
from hsgd.tools.status.looking import Look, Row, rows_from, shown
from hsgd.tools.status.report import FORM

__all__ = ["ask", "host_names"]

_LIMIT_S = 60.0
_MOST_AT_ONCE = 32


def host_names(text: str) -> list[str]:
    """Return the names in node1,node2 or node1:4,node2:4; HsgdError for others; local."""
    names = [word.partition(":")[0].strip() for word in text.split(",")]
    if bad := [name for name in names if not name or name.startswith("-")]:
        raise HsgdError(f'-H {text}: "{bad[0]}" is not a host; give names with commas: node1,node2')
    return names


def ask(hosts: Sequence[str], options: Sequence[str] = ()) -> Look:
    """Ask hosts, 32 at once, up to a minute each; hosts without answer are refused; blocking."""
    if not hosts:
        return Look([], [])
    with ThreadPoolExecutor(min(len(hosts), _MOST_AT_ONCE)) as pool:
        looks = list(pool.map(lambda host: _ask_one(host, options), hosts))
    rows = [row for look in looks for row in look.rows]
    return Look(rows, [line for look in looks for line in look.refused])


def _ask_one(host: str, options: Sequence[str]) -> Look:
    command = [sys.executable, "-m", "hsgd", "status", "--json", *options]
    words = shell_on(host, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    try:
        done = answer_of([*words, shlex.join(command)], _LIMIT_S)
    except subprocess.TimeoutExpired:
        return Look([], [f"{host}: no answer within {_LIMIT_S:g} s"])
    except OSError as error:
        return Look([], [f"{host}: {words[0]} does not start: {error.strerror}"])
    try:
        answer = json.loads(done.stdout)
        if answer["hsgd_status"] != FORM:
            return Look([], [f"{host}: its hsgd has another version; install the same everywhere"])
        return Look(_rows(answer), [shown(f"{host}: {line}") for line in answer["refused"]])
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or [f"{words[0]}: exit code {done.returncode}"]
        return Look([], [shown(f"{host}: {lines[-1]}")])


def _rows(answer: dict[str, Any]) -> list[Row]:
    return [row for comm in answer["communicators"] for row in rows_from(comm["ranks"])]
