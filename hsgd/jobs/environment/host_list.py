"""Lists of hosts as Slurm writes them: "node[1-3,07],login"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hsgd.errors import LaunchError

__all__ = ["MOST_HOSTS", "expanded"]

MOST_HOSTS = 1 << 20
_PART = re.compile(r"\[([^][]*)\]|,|[^][,]+")


def expanded(source: str, text: str) -> Iterator[str]:
    """Yield the names of "node[1-3,07],login"; commas in brackets do not separate names; local.

    Raises LaunchError, which begins with `source`, for any other text.
    """
    parts: list[list[str]] = []
    at = 0
    for match in (*_PART.finditer(f"{text},"),):
        if match.start() != at:
            break
        at = match.end()
        if match[0] == ",":
            yield from map("".join, itertools.product(*parts))
            parts = []
        else:
            parts.append(_range(source, match[1]) if match[1] is not None else [match[0]])
    if at != len(text) + 1:
        raise LaunchError(f'{source}: "{text[at:]}" is no list of hosts; give them with -H')


def _range(source: str, text: str) -> list[str]:
    names: list[str] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()) or int(last) - int(first) >= MOST_HOSTS:
            raise LaunchError(f'{source}: "{item}" is no range of hosts; give them with -H')
        names += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return names
