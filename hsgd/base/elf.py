"""Reader of ELF files: which libraries one needs, and where a symbol is bound in this process.

It reads 64-bit little-endian files and /proc/self/maps, and never loads a library. Source: the
System V ABI (gABI 4.1, chapter 5) and its x86-64 and AArch64 supplements.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Library", "bound_to", "first_definition", "is_mpi", "loaded_libraries", "read_library"]

_PT_LOAD, _PT_DYNAMIC = 1, 2
_NEEDED, _PLTRELSZ, _STRTAB, _SYMTAB, _RELA, _RELASZ = 1, 2, 5, 6, 7, 8
_SONAME, _RPATH, _JMPREL, _RUNPATH = 14, 15, 23, 29
_MPI = re.compile(r"libmpi(ch|_(?!cxx|usempi|mpifh|ilp64|shm)\w+)?\.so")


@dataclass(frozen=True)
class Library:
    """The dynamic section of one shared library."""

    path: str
    soname: str
    needed: tuple[str, ...]
    runpath: str

    @property
    def mpi(self) -> str | None:
        """The MPI library that it needs, or None.

        Examples: "libmpi.so.40" (Open MPI 4 and 5), "libmpi.so.12" (MPICH), "libmpi_abi.so.1" (the
        standard ABI), "libmpi_cray.so.12" (a vendor's).
        """
        return next((name for name in self.needed if is_mpi(name)), None)


@dataclass(frozen=True)
class _Mapping:
    start: int
    end: int
    offset: int
    path: str


def is_mpi(name: str) -> bool:
    """Return whether a file of that name is an MPI's library of C functions; local."""
    return _MPI.match(name) is not None


class _Image:
    """One ELF file in memory, with its dynamic tags."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        if data[:4] != b"\x7fELF" or data[4] != 2 or data[5] != 1:
            raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
        self.data = data
        headers_at, size, count = struct.unpack_from("<Q", data, 32) + struct.unpack_from(
            "<HH", data, 54
        )
        self.loads: list[tuple[int, int, int]] = []  # address, file offset, bytes
        dynamic = (0, 0)
        for i in range(count):
            kind, _, offset, address, _, file_bytes = struct.unpack_from(
                "<IIQQQQ", data, headers_at + i * size
            )
            if kind == _PT_LOAD:
                self.loads.append((address, offset, file_bytes))
            elif kind == _PT_DYNAMIC:
                dynamic = (offset, file_bytes)
        raw = data[dynamic[0] : dynamic[0] + dynamic[1] // 16 * 16]
        self.tags: list[tuple[int, int]] = list(struct.iter_unpack("<QQ", raw))

    def tag(self, wanted: int) -> int:
        return next((value for tag, value in self.tags if tag == wanted), 0)

    def offset(self, address: int) -> int:
        for start, offset, size in self.loads:
            if start <= address < start + size:
                return address - start + offset
        raise ValueError(f"address {address:#x} lies in no segment")

    def text(self, index: int) -> str:
        start = self.offset(self.tag(_STRTAB)) + index
        return self.data[start : self.data.find(b"\0", start)].decode(errors="replace")

    def slots(self, symbol: str) -> Iterator[int]:
        """Yield addresses, relative to the load address, of words with the symbol's address."""
        symbols = self.offset(self.tag(_SYMTAB))
        names: dict[int, bool] = {0: False}
        for table, size in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ)):
            if not self.tag(table):
                continue
            start = self.offset(self.tag(table))
            for address, info, _ in struct.iter_unpack(
                "<QQq", self.data[start : start + self.tag(size)]
            ):
                index = info >> 32
                if index not in names:
                    (name_at,) = struct.unpack_from("<I", self.data, symbols + index * 24)
                    names[index] = self.text(name_at) == symbol
                if names[index]:
                    yield address


def read_library(path: str | Path) -> Library:
    """Read one file; local. Raises OSError, or ValueError if it is no ELF shared library."""
    with open(path, "rb") as file, _map(file.fileno(), str(path)) as data:
        try:
            image = _Image(str(path), data)
            strings = {wanted: image.tag(wanted) for wanted in (_SONAME, _RUNPATH, _RPATH)}
            return Library(
                path=str(path),
                soname=image.text(strings[_SONAME]) if strings[_SONAME] else "",
                needed=tuple(image.text(value) for tag, value in image.tags if tag == _NEEDED),
                runpath=image.text(strings[_RUNPATH] or strings[_RPATH])
                if strings[_RUNPATH] or strings[_RPATH]
                else "",
            )
        except (struct.error, IndexError, ValueError) as error:
            raise ValueError(f"{path}: not a readable ELF shared library ({error})") from None


def _map(descriptor: int, path: str) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ValueError(f"{path}: not an ELF file, it is empty") from None


def _mappings() -> list[_Mapping]:
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                start, end = (int(part, 16) for part in fields[0].split("-"))
                found.append(_Mapping(start, end, int(fields[2], 16), fields[5]))
    return found


def loaded_libraries() -> list[str]:
    """Return the paths of the files mapped into this process, by address, each once; local."""
    return list(dict.fromkeys(mapping.path for mapping in _mappings()))


def bound_to(path: str, symbol: str) -> str | None:
    """Return the path of the library whose `symbol` the loaded library `path` calls; local.

    None if `path` does not refer to the symbol. A reference that is not resolved yet (lazy binding)
    counts as bound to the first definition that the dynamic linker would find.
    """
    mappings = _mappings()
    starts = [m.start for m in mappings if m.path == path and m.offset == 0]
    if not starts:
        raise ValueError(f"{path} is not loaded")
    with open(path, "rb") as file, _map(file.fileno(), path) as data:
        image = _Image(path, data)
        slots = list(image.slots(symbol))
        base = min(starts) - (min(address for address, _, _ in image.loads) & ~0xFFF)
    if not slots:
        return None
    for slot in slots:
        target = ctypes.c_uint64.from_address(base + slot).value
        owner = next((m.path for m in mappings if m.start <= target < m.end), None)
        if owner != path:
            return owner
    return first_definition(symbol)


def first_definition(symbol: str) -> str | None:
    """Return the path of the first library in global scope that defines `symbol`; local."""
    function = getattr(ctypes.CDLL(None), symbol, None)
    if function is None:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return next((m.path for m in _mappings() if m.start <= address < m.end), None)
