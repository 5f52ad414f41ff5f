"""What is asked of a changed file, in a process that it may end: by hsgd, and by h5py alone."""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hsgd.io.format.opening import UnknownFields
from hsgd.io.format.slab_folder import CHECKSUMS, LARGEST_BLOCK, LONGEST, SlabHeader

from h5py_oracle import rows_of
from hsgd.errors import DataError
from hsgd.tools import cli
from hsgd.tools.cli import commands
from loaders import loader_of
from mutation_corpus import Subject

__all__ = ["check", "fill_new_memory", "good_samples", "read_plainly"]

_BATCH, _BATCHES = 8, 40  # a changed file may claim any number of rows
_MEMORY_BYTES = 256 << 20
_ATTRIBUTES = [each.name for each in fields(SlabHeader)] + [LONGEST, LARGEST_BLOCK, CHECKSUMS]
_Samples = dict[str, list[bytes]]

_PARSER = commands.make_parser(["data"])
commands.make_parser = lambda words: _PARSER  # made once for all children


def fill_new_memory(byte: int) -> None:
    """Have malloc() fill what it gives with other bytes; 0 for as it was."""
    ctypes.CDLL(None).mallopt(-6, byte)  # M_PERTURB


def good_samples(subject: Subject) -> _Samples:
    """Return all samples before any change, each field alone if they do not go together."""
    if subject.is_slabs:
        return _samples(subject.path, verify=True)
    with contextlib.suppress(DataError, ValueError):
        return _samples(subject.path)
    found: _Samples = {}
    names: list[str] = []
    with h5py.File(subject.path, "r") as file:
        file.visititems(
            lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
        )
    for name in names:
        with contextlib.suppress(DataError, ValueError):
            found |= _samples(subject.path, fields=[name])
    return found


def check(subject: Subject, changed: Path, draw: random.Random) -> str:
    """Read, and sometimes describe, verify or convert; return what became of it.

    Raises AssertionError for samples that are wrong, and what hsgd should not raise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _tried(subject.path, verify=subject.is_slabs)
        if found is None and not subject.is_slabs and subject.good:
            name = draw.choice([*subject.good])
            found = _tried(subject.path, fields=[name])
        if found is not None:
            _check_samples(subject, found)
        kind = draw.random()
        if kind < 0.3:
            _command("info", str(subject.path))
        if kind < (0.6 if subject.is_slabs else 0.05):  # files of others have no checksums
            _command("verify", str(subject.path), "--quiet", "--threads", "1")
        if kind > 0.9:
            _convert(subject)
    return "delivered" if found is not None else "refused"


def _tried(path: Path, **options: Any) -> _Samples | None:
    """Return the samples, or None if they are refused by one line."""
    told = ""
    try:
        return _samples(path, **options)
    except DataError as error:
        told = str(error)
    except ValueError as error:
        if type(error) not in (ValueError, UnknownFields):
            raise
        told = str(error)
    assert len(told.splitlines()) == 1, f"not one line: {told!r}"
    return None


def _samples(path: Path, **options: Any) -> _Samples:
    """Return the first samples in order, by the names of fields."""
    loader = loader_of(
        path,
        _BATCH,
        0,
        1,
        shuffle="none",
        pad=False,
        as_numpy=True,
        threads=2,
        timeout_s=15,
        memory_limit=_MEMORY_BYTES,
        window_bytes=900,
        block_bytes=200,
        **options,
    )
    found: _Samples = {spec.name: [] for spec in loader.fields}
    with loader:
        for batch, _ in zip(loader, range(_BATCHES), strict=False):
            for name, values in batch.items():
                found[name] += [row for (row,) in rows_of({name: values})]
    return found


def _check_samples(subject: Subject, found: _Samples) -> None:
    """Raise AssertionError unless samples are what was there before, or what h5py reads."""
    for name, rows in found.items():
        if rows == subject.good.get(name):
            continue
        assert not subject.is_slabs, f"{name!r} passed its checksums and is not what was written"
        wanted, anywhere = _by_h5py(subject.path, name, len(rows))
        fill_new_memory(0xAA)  # HDF5 gives some of it for chunks that inflate to less than they are
        again, anywhere_again = _by_h5py(subject.path, name, len(rows))
        fill_new_memory(0)
        good = subject.good.get(name, [])
        for at, row in enumerate(rows):
            same = row in (b"", *wanted[at : at + 1], *good[at : at + 1]) or row in anywhere
            same = same or wanted[at : at + 1] != again[at : at + 1] or anywhere != anywhere_again
            same = same or _is_lost(subject.path, name, at)
            there = wanted[at : at + 1] or [*anywhere][:3]
            assert same, f"sample {at} of {name!r}: {row[:80]!r}, h5py has {there!r:.300}"


def _is_lost(path: Path, name: str, row: int) -> bool:
    """Return whether HDF5 does not find the chunk of a row that its list of all chunks has."""
    with contextlib.suppress(KeyError), h5py.File(path, "r") as file:
        item = file[name]
        if isinstance(item, h5py.Dataset) and item.chunks:
            place = row - row % item.chunks[0], *(0 for _ in item.shape[1:])
            try:
                item.id.read_direct_chunk(place)
            except (MemoryError, OSError, RuntimeError):
                return True
    return False


def _by_h5py(path: Path, name: str, count: int) -> tuple[list[bytes], set[bytes]]:
    """Return the first samples of a field, or all samples if groups hold them, in any order."""
    with contextlib.suppress(Exception), h5py.File(path, "r") as file:
        with contextlib.suppress(Exception):
            return _rows(file[name][:count]), set()
        with contextlib.suppress(Exception):
            table, _, column = name.rpartition("/")
            return _rows(file[table][:count][column]), set()
        found: set[bytes] = set()
        _gather(file["/"], name, found, 0)
        return [], found
    return [], set()


def _gather(group: h5py.Group, name: str, found: set[bytes], depth: int) -> None:
    """Find the samples that groups have under a name, at any depth."""
    for each in group:
        with contextlib.suppress(Exception):
            inner = group[each]
            if depth < 3 and isinstance(inner, h5py.Group):
                _gather(inner, name, found, depth + 1)
            found.update(_rows(inner[name][()][None]))


def _rows(read: Any) -> list[bytes]:
    native = np.ascontiguousarray(read).astype(read.dtype.newbyteorder("="))
    return [row for (row,) in rows_of({"": native})]


def _convert(subject: Subject) -> None:
    target = subject.path.parent / "converted"
    try:
        code = _command(
            "convert", str(subject.path), str(target), "--slabs", "2", "--keep-order", "--quiet"
        )
        if code == 0 and not subject.is_slabs:
            _check_samples(subject, _samples(target, verify=True))
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _command(*words: str) -> int:
    """Run `hsgd data`; what is wrong is one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["data", *words])
    lines = [line for line in err.getvalue().splitlines() if "arning" not in line]
    assert code in (0, 1) and len(lines) <= 1, (words, code, lines)
    assert code == 0 or lines or out.getvalue(), words
    return code


def read_plainly(subject: Subject) -> None:
    """Do by h5py alone what hsgd does by it; only whether HDF5 survives this counts."""
    paths = sorted(subject.path.iterdir()) if subject.is_slabs else [subject.path]
    for path in paths:
        with contextlib.suppress(Exception), h5py.File(path, "r") as file:
            _plainly(file["/"], 0)


def _plainly(item: Any, depth: int) -> None:
    """Look at all that an item has."""
    calls: Sequence[Callable[[], Any]] = [
        lambda: dict(item.attrs),
        lambda: [name in item.attrs for name in _ATTRIBUTES],
        lambda: h5py.h5o.get_info(item.id),
    ]
    if isinstance(item, h5py.Group):
        names: list[Any] = []
        with contextlib.suppress(Exception):
            names = list(item)
        for name in names if depth < 20 else ():
            with contextlib.suppress(Exception):
                item.get(name, getlink=True)
            with contextlib.suppress(Exception):
                _plainly(item[name], depth + 1)
    elif isinstance(item, h5py.Dataset):
        create = item.id.get_create_plist()
        calls = [
            *calls,
            lambda: (item.dtype, item.id.get_type().get_size()),
            lambda: h5py.h5ds.is_scale(item.id),
            lambda: [create.get_filter(n) for n in range(create.get_nfilters())],
            lambda: [create.get_external(n) for n in range(create.get_external_count())],
            lambda: [create.get_virtual_filename(n) for n in range(create.get_virtual_count())],
            lambda: (item.id.get_offset(), item.id.get_storage_size(), item.id.get_space_status()),
            lambda: item.id.chunk_iter(lambda at: None),
            lambda: item.id.get_num_chunks(),
            lambda: [item.id.get_chunk_info(n) for n in range(min(1000, item.id.get_num_chunks()))],
            lambda: item[...] if math.prod(item.shape) * item.dtype.itemsize < 64 << 20 else None,
            lambda: [item[n : n + 8] for n in range(0, min(400, len(item)), 8)],
        ]
    for call in calls:
        with contextlib.suppress(Exception):
            call()
