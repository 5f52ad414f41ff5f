"""Reads damaged files, again and again: a program of its own, so that a crash or hang is seen.

    mutated_files.py slabs|foreign FOLDER COUNT SEED

Each turn changes one file of FOLDER, reads, asks `hsgd data info` and `verify`, and restores it,
all in little more memory than there is at the start. Slabs are read with their checksums:
what comes must be what was there before, or an error of one line. Files of others have none: what
comes must be what was there before, what stock h5py reads from the same damaged file, or an error.
Prints how many turns were refused, and how many not.
"""

from __future__ import annotations

import contextlib
import io
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401, so that stock h5py reads what was compressed
import numpy as np
from hsgd.io import Ragged

from hsgd.errors import DataError
from hsgd.tools import cli
from loaders import loader_of

__all__: list[str] = []

LIMIT_BYTES = 256 << 20  # a damaged file may claim rows of any size
BATCHES = 40  # and any number of them
SPARE_BYTES = 2 << 30  # of addresses, beyond those at the start
NUMBERS = (1 << 31, 1 << 40, 1 << 50, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)  # a file may claim


def batches(path: Path, **options: Any) -> Iterator[dict[str, Any]]:
    """The first batches in order, with few threads and little memory."""
    loader = loader_of(
        path, 8, as_numpy=True, threads=2, timeout_s=30, memory_limit=LIMIT_BYTES, **options
    )
    iteration = iter(loader)
    try:
        for batch, _ in zip(iteration, range(BATCHES), strict=False):
            yield batch
    finally:
        iteration.close()


def as_bytes(value: Any) -> tuple[bytes, ...]:
    if isinstance(value, Ragged):
        return value.values.tobytes(), value.offsets.tobytes()
    return (value.tobytes(),)


def read_slabs(folder: Path) -> list[dict[str, tuple[bytes, ...]]]:
    """All batches with verify=True."""
    found = batches(folder, verify=True, window_bytes=900, block_bytes=200)
    return [{name: as_bytes(value) for name, value in batch.items()} for batch in found]


def read_foreign(path: Path) -> dict[str, np.ndarray]:
    """The first rows of all fields, in order."""
    found: dict[str, list[np.ndarray]] = {}
    for batch in batches(path, shuffle="none"):
        for name, values in batch.items():
            found.setdefault(name, []).append(values.copy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def is_right(path: Path, found: dict[str, np.ndarray], good: dict[str, np.ndarray]) -> bool:
    """Whether each field is what was written, or what h5py reads: its search in a damaged index may
    miss a chunk that the list of all chunks has.
    """
    for name, values in found.items():
        if name in good and good[name].tobytes() == values.tobytes():
            continue
        with h5py.File(path, "r") as file:
            stored = file[name][: len(values)]
        if stored.astype(stored.dtype.newbyteorder("=")).tobytes() != values.tobytes():
            return False
    return True


def damage(data: bytes, draw: random.Random) -> bytes:
    """Some other content of a file."""
    changed = bytearray(data)
    place = draw.randrange(len(data))
    kind = draw.choice(("bit", "bit", "truncate", "zeros", "bytes", "number"))
    if kind == "bit":
        changed[place] ^= 1 << draw.randrange(8)
    elif kind == "truncate":
        del changed[place:]
    elif kind == "number":
        place -= place % 8
        changed[place : place + 8] = draw.choice(NUMBERS).to_bytes(8, "little")
    elif kind == "zeros":
        changed[place : place + 512] = bytes(len(changed[place : place + 512]))
    else:
        changed[place : place + 64] = draw.randbytes(len(changed[place : place + 64]))
    return bytes(changed)


def is_refused(kind: str, folder: Path, file: Path, good: Any) -> bool:
    """Reads a damaged file; False when what came was right, AssertionError when it was not."""
    try:
        found: Any = read_slabs(folder) if kind == "slabs" else read_foreign(file)
    except DataError as error:
        lines = str(error).splitlines()
    except ValueError as error:  # the limit that batches() gives
        lines = str(error).splitlines()
        assert lines[0].startswith("memory_limit="), lines
    else:
        assert found == good if kind == "slabs" else is_right(file, found, good[file])
        return False
    assert len(lines) == 1, lines
    return True


def check_commands(path: Path) -> None:
    """Both commands end by themselves, with one line for what is wrong."""
    for words in (["info", str(path)], ["verify", str(path), "--quiet"]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["data", *words])
        lines = [line for line in err.getvalue().splitlines() if "Warning" not in line]
        assert code in (0, 1) and len(lines) <= 1, (code, lines)
        assert code == 0 or lines or out.getvalue()


def main(kind: str, name: str, count: str, seed: str) -> None:
    folder, draw = Path(name), random.Random(int(seed))
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    good: Any = read_slabs(folder) if kind == "slabs" else {p: read_foreign(p) for p in files}
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    refused = 0
    for turn in range(int(count)):
        path = draw.choice(list(files))
        path.write_bytes(damage(files[path], draw))
        try:
            refused += is_refused(kind, folder, path, good)
            check_commands(folder if kind == "slabs" else path)
        except BaseException:
            print(f"turn {turn}, {path.name}", file=sys.stderr)
            raise
        path.write_bytes(files[path])
    print(refused, int(count) - refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
