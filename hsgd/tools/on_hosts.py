"""The same command on other hosts, over ssh or srun, on all at once; it prints JSON."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hsgd.base.programs import answer_of
from hsgd.errors import HsgdError
from hsgd.jobs.launch.remote_command import shell_on

__all__ = ["ask", "host_names"]

_LIMIT_S = 60.0
_MOST_AT_ONCE = 32


def host_names(text: str) -> list[str]:
    """Return the names in node1,node2 or node1:4,node2:4; HsgdError for others; local."""
    names = [word.partition(":")[0].strip() for word in text.split(",")]
    if bad := [name for name in names if not name or name.startswith("-")]:
        raise HsgdError(f'-H {text}: "{bad[0]}" is not a host; give names with commas: node1,node2')
    return names


def ask(hosts: Sequence[str], words: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Run `hsgd WORDS` on hosts, 32 at once, up to a minute each; blocking.

    Yields for each host, in order: its name, what the command printed as JSON, and a reason if that
    is None.
    """
    if not hosts:
        return
    with ThreadPoolExecutor(min(len(hosts), _MOST_AT_ONCE)) as pool:
        answers = pool.map(lambda host: _ask_one(host, words), hosts)
        yield from ((host, *answer) for host, answer in zip(hosts, answers, strict=True))


def _ask_one(host: str, words: Sequence[str]) -> tuple[Any, str]:
    shell = shell_on(host, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    try:
        done = answer_of([*shell, shlex.join([sys.executable, "-m", "hsgd", *words])], _LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_LIMIT_S:g} s"
    except OSError as error:
        return None, f"{shell[0]} does not start: {error.strerror}"
    try:
        return json.loads(done.stdout), ""
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"{shell[0]}: exit code {done.returncode}"]
        return None, lines[-1]
