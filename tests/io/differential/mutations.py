"""Changes of the bytes of HDF5 files, most of them in metadata: `mutate(content, layout, draw)`.

Metadata in HDF5's newer format ends with checksums, so that a changed byte alone gets no further
than these; as a hostile author would, most changes make them right again.
"""

from __future__ import annotations

import random
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hsgd.io.format.index_checksum import MAGIC
from numpy.typing import NDArray

__all__ = ["Layout", "layout_of", "mutate"]

_SIGNATURES = rb"\x89HDF|OHDR|OCHK|BTHD|BTLF|BTIN|FRHP|FHDB|FHIB|FSHD|FSSE|SMTB|SMLI"
_SIGNATURES += rb"|EAHD|EAIB|EASB|EADB|FAHD|FADB|TREE|SNOD|HEAP|GCOL"
_UNSEALED = (b"TREE", b"SNOD", b"HEAP", b"GCOL")  # of the older format
_LONGEST = 520  # of pieces whose checksum is looked for
_NUMBERS = [0, 1, 2, 3, 4, 7, 8, 16, 24, 32, 64, 127, 128, 255, 256, 512, 1000, 4096, 65535, 65536]
_NUMBERS += [
    (1 << power) - less for power in (16, 24, 31, 32, 40, 50, 62, 63, 64) for less in (1, 2)
]
_NUMBERS += [1 << power for power in (20, 24, 31, 32, 40, 48, 50, 61, 62, 63)]
_NAMES = [
    b"/dev/zero",
    b"/proc/self/mem",
    b"../x.h5",
    b"/",
    b".",
    b"..",
    b"\n\x1b[2J",
    b"\xff\xfe",
    b"%b",
]


@dataclass(frozen=True)
class Layout:
    """What lies where in a file."""

    metadata: Sequence[tuple[int, int]]  # start and stop
    sealed: Sequence[tuple[int, int]]  # start and stop of what a checksum of 4 bytes follows
    addresses: Sequence[int]  # of pieces with a signature


def layout_of(content: bytes, values: Sequence[tuple[int, int]]) -> Layout:
    """Return the layout of a file; `values` are start and stop of what is no metadata."""
    metadata, reached = [], 0
    for start, stop in sorted(values):
        if start > reached:
            metadata.append((reached, start))
        reached = max(reached, stop)
    if reached < len(content):
        metadata.append((reached, len(content)))
    found = [at.start() for at in re.finditer(_SIGNATURES, content)]
    sealed = [
        part
        for start in found
        if content[start : start + 4] not in _UNSEALED and (part := _sealed_from(content, start))
    ]
    return Layout(metadata, sealed, found)


def mutate(content: bytes, layout: Layout, draw: random.Random) -> bytes:
    """Return another content of a file."""
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if len(changed) > 16:
            _change(changed, layout, draw)
    if draw.random() < 0.8:
        _seal(content, changed, layout)
    return bytes(changed)


def _change(changed: bytearray, layout: Layout, draw: random.Random) -> None:
    place = min(_place(layout, len(changed), draw), len(changed) - 1)
    length = draw.choice([1, 2, 4, 8, 8, 16, 64])
    word = place - place % 8
    kind = draw.choice(["bit"] * 4 + ["number"] * 6 + ["run", "run", "swap", "copy", "name", "end"])
    if kind == "bit":
        for _ in range(draw.choice([1, 1, 2, 4])):
            changed[min(place + draw.randrange(8), len(changed) - 1)] ^= 1 << draw.randrange(8)
    elif kind == "number":
        _write(changed, draw.choice([place, place, word]), _number(changed, place, layout, draw))
    elif kind == "run":
        run = draw.choice([bytes(length), b"\xff" * length, draw.randbytes(length)])
        _write(changed, place, run)
    elif kind == "swap":
        other = min(_place(layout, len(changed), draw), len(changed) - 8) & ~7
        one, two = changed[word : word + 8], changed[other : other + 8]
        _write(changed, word, two)
        _write(changed, other, one)
    elif kind == "copy":
        other = _place(layout, len(changed), draw)
        _write(changed, place, changed[other : other + length])
    elif kind == "name":
        _write(changed, place, draw.choice(_NAMES) + b"\0")
    elif draw.random() < 0.5:
        del changed[place:]
    else:
        changed += draw.choice([bytes(length), draw.randbytes(length), changed[-length:]])


def _place(layout: Layout, size: int, draw: random.Random) -> int:
    if layout.metadata and draw.random() < 0.9:
        start, stop = draw.choice(layout.metadata)
        near = [at for at in layout.addresses if start <= at < stop]
        if near and draw.random() < 0.6:  # where the numbers are
            return draw.choice(near) + int(draw.random() ** 2 * 120)
        return draw.randrange(start, stop)
    return draw.randrange(size)


def _number(changed: bytearray, place: int, layout: Layout, draw: random.Random) -> bytes:
    """Return a number that could stand at a place, in 1 to 8 bytes."""
    width = draw.choice([1, 2, 4, 8, 8])
    there = int.from_bytes(changed[place : place + width], "little")
    near = [there + 1, there - 1, there * 2, there // 2, there ^ (1 << draw.randrange(8 * width))]
    known = [*layout.addresses, len(changed)] if draw.random() < 0.4 else _NUMBERS
    number = draw.choice(near if draw.random() < 0.4 else known)
    return (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _write(changed: bytearray, place: int, new: bytes) -> None:
    """Write over what is there, up to the end."""
    room = max(0, len(changed) - place)
    changed[place : place + len(new)] = new[:room]


def _seal(content: bytes, changed: bytearray, layout: Layout) -> None:
    """Make the checksums right of what has changed."""
    for start, stop in layout.sealed:
        if changed[start:stop] != content[start:stop] and len(changed) >= stop + 4:
            struct.pack_into(
                "<I", changed, stop, int(_lookup3(changed[start:stop], [stop - start])[0])
            )
    end = len(content) - len(MAGIC) - 4
    if content[end : end + len(MAGIC)] == MAGIC and len(changed) == len(content):
        struct.pack_into("<I", changed, len(content) - 4, zlib.crc32(changed[:end]))


def _sealed_from(content: bytes, start: int) -> tuple[int, int] | None:
    """Return start and stop of a piece whose checksum follows it; None without one."""
    lengths = np.arange(8, min(_LONGEST, len(content) - start - 4))
    if not len(lengths):
        return None
    found = _lookup3(content[start : start + _LONGEST], lengths)
    stored = np.array(
        [int.from_bytes(content[start + n : start + n + 4], "little") for n in lengths]
    )
    right = np.flatnonzero(found == stored)
    return (start, start + int(lengths[right[0]])) if len(right) else None


def _lookup3(content: bytes, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return HDF5's checksum of the first bytes of `content`, for each of some lengths > 0.

    Source: Bob Jenkins's lookup3, hashlittle() with an initial value of 0.
    """
    sizes = np.asarray(lengths)
    state = np.repeat(np.uint32(0xDEADBEEF) + sizes.astype(np.uint32), 3).reshape(-1, 3).T.copy()
    found = np.zeros(len(sizes), np.uint32)
    for begin in range(0, int(sizes.max()), 12):
        block = np.frombuffer(content[begin : begin + 12].ljust(12, b"\0"), np.uint8)
        last = (sizes > begin) & (sizes <= begin + 12)
        if last.any():
            kept = np.where(np.arange(12) < (sizes[last] - begin)[:, None], block, 0).astype(
                np.uint8
            )
            found[last] = _final(state[:, last] + kept.view("<u4").T)
        state += block.view("<u4")[:, None]
        _mix(state)
    return found


def _turned(word: NDArray[np.uint32], by: int) -> NDArray[np.uint32]:
    return (word << np.uint32(by)) | (word >> np.uint32(32 - by))


def _mix(state: NDArray[np.uint32]) -> None:
    a, b, c = state
    for one, two, three, by in (
        (a, c, b, 4),
        (b, a, c, 6),
        (c, b, a, 8),
        (a, c, b, 16),
        (b, a, c, 19),
        (c, b, a, 4),
    ):
        one -= two
        one ^= _turned(two, by)
        two += three


def _final(state: NDArray[np.uint32]) -> NDArray[np.uint32]:
    a, b, c = state
    for one, two, by in (
        (c, b, 14),
        (a, c, 11),
        (b, a, 25),
        (c, b, 16),
        (a, c, 4),
        (b, a, 14),
        (c, b, 24),
    ):
        one ^= two
        one -= _turned(two, by)
    return c
