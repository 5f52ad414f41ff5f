"""Sockets, NUMA nodes and last-level caches of this node, from /sys, for reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuDomains", "find"]

Cpus = frozenset[int]
_LIST = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")


@dataclass(frozen=True)
class CpuDomains:
    """The processors of each domain; empty if /sys does not say."""

    sockets: Set[Cpus]
    nodes: Set[Cpus]
    caches: Set[Cpus]
    level: int  # of the last-level caches

    def __str__(self) -> str:
        counts = (
            (self.sockets, "socket"),
            (self.nodes, "NUMA node"),
            (self.caches, f"L{self.level} cache"),
        )
        known = [f"{len(kind)} {name}{'s' * (len(kind) > 1)}" for kind, name in counts if kind]
        return ", ".join(known) or "not known"

    def holding(self, own: Set[int]) -> str:
        """Describe the smallest domain that holds all processors of a process."""
        kinds = (
            (self.caches, f"one L{self.level} cache"),
            (self.nodes, "one NUMA node"),
            (self.sockets, "one socket"),
        )
        several = [(kind, name) for kind, name in kinds if len(kind) > 1]
        for kind, name in several:
            if any(own <= cpus for cpus in kind):
                return f"this process is bound to {name}"
        return "this process is not bound to one" if several else "nothing to bind ranks to"


def find(sys: Path = Path("/sys")) -> CpuDomains:
    """Read the domains of this node; local, fast."""
    cpus = list(sys.glob("devices/system/cpu/cpu[0-9]*"))
    level, caches = _last_level(cpus)
    topology = [cpu / "topology" for cpu in cpus]
    return CpuDomains(
        sockets=_domains(
            _list_in(folder / "package_cpus_list") or _list_in(folder / "core_siblings_list")
            for folder in topology
        ),
        nodes=_domains(map(_list_in, sys.glob("devices/system/node/node[0-9]*/cpulist"))),
        caches=caches,
        level=level,
    )


def _last_level(cpus: Iterable[Path]) -> tuple[int, Set[Cpus]]:
    levels: dict[int, set[Cpus]] = {}
    for cpu in cpus:
        for index in cpu.glob("cache/index[0-9]*"):
            level = _text_in(index / "level")
            if level.isdecimal():
                levels.setdefault(int(level), set()).add(_list_in(index / "shared_cpu_list"))
    highest = max(levels, default=0)
    return highest, _domains(levels.get(highest, ()))


def _domains(lists: Iterable[Cpus]) -> Set[Cpus]:
    """Return each domain once, without those of no processor (memory nodes, missing files)."""
    return frozenset(filter(None, lists))


def _list_in(path: Path) -> Cpus:
    """Return the numbers of a list such as 0-3,8; empty without such a file."""
    text = _text_in(path)
    if not _LIST.fullmatch(text):
        return frozenset()
    spans = [part.partition("-") for part in text.split(",")]
    return frozenset(
        cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)
    )


def _text_in(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):  # no such file; no text
        return ""
