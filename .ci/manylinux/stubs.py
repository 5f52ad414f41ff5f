"""Stubs of the system's libraries: the names and versions that manylinux_2_28 has, and no code.

Owns the choice of versions: of each symbol the newest one that is not newer than the limits below
(PEP 600; auditwheel's policy has the same, and checks the wheel). Read from this system's libraries
with readelf; glibc keeps old versions of a symbol beside new ones.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["make", "sources"]

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# Libraries to read, and where a symbol of glibc lay in 2.28, before all came into libc.so.6 (2.34).
SOURCES = ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6")
PLACES = (
    ("libdl.so.2", re.compile(r"dl(open|sym|vsym|close|error|addr1?|info|mopen)$")),
    ("libpthread.so.0", re.compile(r"_*(pthread|sem)_")),
    ("librt.so.1", re.compile(r"(shm_|mq_|timer_|aio_|lio_)")),
)
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
Symbols = dict[str, tuple[str, str]]  # version and type by name


def _number(version: str) -> tuple[str, tuple[int, ...]]:
    family, _, digits = version.rpartition("_")
    parts = digits.split(".")
    return family, tuple(map(int, parts)) if all(part.isdigit() for part in parts) else (10**6,)


def _defined(library: Path) -> Iterator[tuple[str, str, str]]:
    """Name, version and type of what the library has for others."""
    shown = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", str(library)],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in shown.stdout.splitlines():
        words = line.split()
        if len(words) >= 8 and words[4] in ("GLOBAL", "WEAK", "UNIQUE") and words[6] != "UND":
            name, _, version = words[7].partition("@")
            if version:
                yield name, version.lstrip("@"), words[3]


def _chosen(library: Path) -> Symbols:
    found: Symbols = {}
    for name, version, kind in _defined(library):
        family, number = _number(version)
        if number > NEWEST.get(family, (-1,)):
            continue
        if name not in found or _number(found[name][0])[1] < number:
            found[name] = version, kind
    return found


def _by_soname(found: Mapping[str, Path]) -> dict[str, Symbols]:
    libraries = {soname: _chosen(path.resolve()) for soname, path in found.items()}
    of_libc = libraries["libc.so.6"]
    for soname, pattern in PLACES:
        moved = {name for name in of_libc if pattern.match(name)}
        libraries[soname] = {name: of_libc.pop(name) for name in moved}
    return libraries


def _assembly(symbols: Symbols) -> str:
    """One byte for all of a kind."""
    lines = [".data", "data: .byte 0"]
    lines += ['.section .tbss,"awT",%nobits', "thread: .zero 1"]
    for index, (name, (version, kind)) in enumerate(sorted(symbols.items())):
        word = {"FUNC": "function", "IFUNC": "function", "TLS": "tls_object"}.get(kind, "object")
        place = "thread" if kind == "TLS" else "data"
        lines += [f".globl s{index}", f".type s{index}, %{word}", f".set s{index}, {place}"]
        lines.append(f".symver s{index}, {name}@@{version}")
    return "\n".join(lines) + "\n"


def _versions(symbols: Symbols) -> str:
    nodes = dict.fromkeys(version for version, _ in symbols.values())
    first = 'local: "s[0-9]*";'
    return "".join(f"{node} {{ {first if i == 0 else ''} }};\n" for i, node in enumerate(nodes))


def sources(machine: str) -> tuple[str, ...]:
    """Names of the libraries to read, for "x86_64" or "aarch64"."""
    return (*SOURCES, LOADERS[machine])


def make(compiler: list[str], found: Mapping[str, Path], folder: Path) -> None:
    """Write the stubs into the folder."""
    for soname, symbols in _by_soname(found).items():
        assembly, script = folder / f"{soname}.s", folder / f"{soname}.map"
        assembly.write_text(_assembly(symbols))
        script.write_text(_versions(symbols))
        words = ["-shared", "-nostdlib", "-nostartfiles", str(assembly), f"-Wl,-soname,{soname}"]
        words += [f"-Wl,--version-script,{script}", "-o", str(folder / soname)]
        subprocess.run([*compiler, *words], check=True)
