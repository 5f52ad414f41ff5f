"""Random HDF5 datasets: every type, layout and row of filters that h5py can write.

Owns types and storage of one dataset; what a file is made of is in random_files.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

__all__ = ["Draw", "Field", "add_dataset", "add_external", "create_by_type", "values_of"]

UNWRITTEN = "never written|rows was ever written"
_LATE, _EARLY, _INCREMENTAL = (
    h5py.h5d.ALLOC_TIME_LATE,
    h5py.h5d.ALLOC_TIME_EARLY,
    h5py.h5d.ALLOC_TIME_INCR,
)
_ALLOCATED = {"late": _LATE, "early": _EARLY, "incremental": _INCREMENTAL}
_FILLED = {
    "alloc": h5py.h5d.FILL_TIME_ALLOC,
    "never": h5py.h5d.FILL_TIME_NEVER,
    "ifset": h5py.h5d.FILL_TIME_IFSET,
}


class Draw(random.Random):
    """A source of random choices, with numbers of NumPy."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.numbers = np.random.default_rng(seed)

    def chance(self, part: float) -> bool:
        return self.random() < part


@dataclass
class Field:
    """A dataset that was made: what it holds, and what may truly be said against it."""

    name: str
    features: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # regular expressions
    has_gaps: bool = False  # rows that were never written, for sure
    ends_hdf5: bool = False  # HDF5 crashes, or waits for ever, when it reads this
    lies_in: str = ""  # file and name of a dataset of another file

    @property
    def text(self) -> str:
        return f"{self.name!r}: {', '.join(self.features)}"


def _low_level(base: Any, **changes: Any) -> h5py.Datatype:
    """Return a type made from `base` by calls of set_NAME(*arguments)."""
    made = base.copy()
    for name, arguments in changes.items():
        getattr(made, f"set_{name}")(*arguments)
    return h5py.Datatype(made)


def _enumeration(draw: Draw) -> Any:
    base = draw.choice(["i1", "<i2", ">u4", "<i8"])
    return h5py.enum_dtype({"red": 0, "green": 1, "blue": 7}, basetype=base)


def _wide_bool(draw: Draw) -> Any:
    made = h5py.h5t.enum_create(h5py.h5t.py_create(np.dtype("<i4")))
    made.enum_insert(b"FALSE", 0)
    made.enum_insert(b"TRUE", 1)
    return h5py.Datatype(made)


def _compound(draw: Draw) -> Any:
    parts = [("a", "<i4"), ("b", ">f8", (2,)), ("c", "S3"), ("d", [("e", "u1"), ("f", "<f2")])]
    kept = draw.sample(parts, draw.randint(1, 4))
    return np.dtype(kept, align=draw.chance(0.5))


def _array(draw: Draw) -> Any:
    return np.dtype((draw.choice(["<i4", ">f4", "u1", "S2"]), draw.choice([(3,), (2, 2), (1,)])))


def _text(draw: Draw) -> Any:
    length = draw.choice([None, None, 1, 7])
    return h5py.string_dtype(draw.choice(["ascii", "utf-8"]), length)


def _vlen(draw: Draw) -> Any:
    return h5py.vlen_dtype(np.dtype(draw.choice(["<i4", ">i2", "<f8", "u1", "bool"])))


_T = h5py.h5t
_PLAIN = [f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)]
_PLAIN += [f"{order}f{size}" for order in "<>" for size in (2, 4, 8)]
TYPES: dict[str, Callable[[Draw], Any]] = {
    "number": lambda draw: np.dtype(draw.choice(_PLAIN)),
    "bool": lambda draw: np.dtype(bool),
    "complex": lambda draw: np.dtype(draw.choice(["<c8", ">c8", "<c16", ">c16"])),
    "enum": _enumeration,
    "bool of 4 bytes": _wide_bool,
    "long double": lambda draw: np.dtype(draw.choice([np.longdouble, np.clongdouble])),
    "12 bits": lambda draw: _low_level(
        _T.STD_U16LE, precision=(12,), offset=(draw.choice([0, 4]),)
    ),
    "3 bytes": lambda draw: _low_level(draw.choice([_T.STD_I32LE, _T.STD_U32BE]), size=(3,)),
    "bfloat16": lambda draw: _low_level(
        _T.IEEE_F32LE, fields=(15, 7, 8, 0, 7), size=(2,), ebias=(127,)
    ),
    "8 bits of a float": lambda draw: _low_level(
        _T.IEEE_F16LE, fields=(7, 3, 4, 0, 3), size=(1,), ebias=(7,)
    ),
    "quadruple": lambda draw: h5py.Datatype(draw.choice([_T.IEEE_F128LE, _T.IEEE_F128BE])),
    "native complex": lambda draw: h5py.Datatype(
        draw.choice([_T.COMPLEX_IEEE_F32LE, _T.COMPLEX_IEEE_F64BE, _T.COMPLEX_IEEE_F16LE])
    ),
    "bits": lambda draw: h5py.Datatype(draw.choice([_T.STD_B8LE, _T.STD_B16BE, _T.STD_B64LE])),
    "time": lambda draw: h5py.Datatype(_T.UNIX_D32LE),
    "text": _text,
    "compound": _compound,
    "array": _array,
    "opaque": lambda draw: np.dtype("V5"),
    "date": lambda draw: h5py.opaque_dtype(np.dtype("<M8[s]")),
    "reference": lambda draw: h5py.ref_dtype,
    "region": lambda draw: h5py.regionref_dtype,
    "vlen": _vlen,
}


def random_type(draw: Draw) -> tuple[str, Any]:
    """Return a type and its name; most are plain numbers."""
    name = "number" if draw.chance(0.55) else draw.choice(list(TYPES))
    return name, TYPES[name](draw)


def values_of(
    draw: Draw, dtype: Any, shape: tuple[int, ...], file: Any = None, *, few: bool = False
) -> Any:
    """Return random values: few small ones, which compress, or any bits."""
    if dtype.subdtype is not None:
        base, inner = dtype.subdtype
        return values_of(draw, base, (*shape, *inner))
    numbers, count = draw.numbers, math.prod(shape)
    base = h5py.check_vlen_dtype(dtype)
    text = h5py.check_string_dtype(dtype)
    if text is not None and text.length is None:
        texts = ["", "a", "gr\xf6\xdfe" if text.encoding == "utf-8" else "b"]
        return np.array([draw.choice(texts) for _ in range(count)], object).reshape(shape)
    if base is not None or dtype.kind == "O":
        made = np.empty(count, object)
        for at in range(count):
            if base is not None:
                made[at] = values_of(draw, np.dtype(base), (draw.randint(0, 5),))
            else:
                region = h5py.check_ref_dtype(dtype) is h5py.RegionReference
                made[at] = file["/seen"].regionref[:1] if region else file["/seen"].ref
        return made.reshape(shape)
    if members := h5py.check_enum_dtype(dtype):
        return numbers.choice(list(members.values()), shape).astype(dtype)
    if dtype.kind == "b":
        return numbers.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iuf" and (few or draw.chance(0.6)):
        return numbers.integers(0, 5, shape).astype(dtype)
    return np.frombuffer(numbers.bytes(count * dtype.itemsize), dtype).reshape(shape)


def _plugin(options: Any) -> tuple[int, tuple[int, ...]]:
    return options.filter_id, tuple(options.filter_options)


def _plugins(draw: Draw) -> dict[str, tuple[int, tuple[int, ...]]]:
    level, shuffle = draw.choice([1, 5, 9]), draw.choice([0, 1, 2])
    blosc = hdf5plugin.Blosc(draw.choice(["lz4", "zstd", "zlib", "blosclz"]), level, shuffle)
    blosc2 = hdf5plugin.Blosc2(draw.choice(["lz4", "zstd", "blosclz"]), level, shuffle)
    return {
        "blosc": _plugin(blosc),
        "blosc2": _plugin(blosc2),
        "bitshuffle": _plugin(hdf5plugin.Bitshuffle(cname=draw.choice(["none", "lz4", "zstd"]))),
        "zstd": _plugin(hdf5plugin.Zstd(clevel=draw.choice([1, 9]))),
        "lz4": _plugin(hdf5plugin.LZ4()),
        "bzip2": _plugin(hdf5plugin.BZip2()),
    }


def _add_filters(draw: Draw, create: Any, dtype: Any) -> list[str]:
    """Add up to three filters; return their names."""
    known = ["shuffle", "gzip", "lzf", "fletcher32", "nbit", "scaleoffset", "szip"]
    plugins = _plugins(draw)
    if dtype.kind not in "iuf":
        known.remove("scaleoffset")
    if dtype.hasobject:  # others divide by zero
        known, plugins = ["shuffle", "gzip", "fletcher32"], {}
    elif draw.chance(0.03):
        known.append("gzip")  # so it may come twice
    names = draw.sample([*known, *plugins], draw.choice([0, 1, 1, 2, 2, 3]))
    if draw.chance(0.5):  # the usual order
        names.sort(key=lambda name: name != "shuffle")
    # After others these write beyond their memory.
    if "scaleoffset" in names:
        names = ["scaleoffset"]
    names.sort(key=lambda name: name not in ("nbit", "szip"))
    for name in names:
        if name == "shuffle":
            create.set_shuffle()
        elif name == "gzip":
            create.set_deflate(draw.randint(0, 9))
        elif name == "fletcher32":
            create.set_fletcher32()
        elif name == "scaleoffset":
            kind = h5py.h5z.SO_FLOAT_DSCALE if dtype.kind == "f" else h5py.h5z.SO_INT
            create.set_scaleoffset(kind, 0 if kind == h5py.h5z.SO_INT else 2)
        elif name == "szip":
            create.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 8)
        elif name in plugins:
            create.set_filter(plugins[name][0], h5py.h5z.FLAG_OPTIONAL, plugins[name][1])
        else:
            number = {"lzf": h5py.h5z.FILTER_LZF, "nbit": h5py.h5z.FILTER_NBIT}[name]
            create.set_filter(number, h5py.h5z.FLAG_OPTIONAL)
    return names


def create_by_type(file: Any, name: str, kind: Any, space: Any, create: Any = None) -> None:
    """Make a dataset without NumPy's types."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(1)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    h5py.h5d.create(file.id, name.encode(), kind, space, create, links)


def _leave_edges(create: Any) -> None:
    """Set H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS, which h5py has no name for."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in maps if re.search(r"/libhdf5[-.][^_]*$", line)}
    library = ctypes.CDLL(loaded.pop())
    assert library.H5Pset_chunk_opts(ctypes.c_int64(create.id), 2) >= 0


def _shape(draw: Draw, rows: int) -> tuple[int, ...]:
    inner = draw.choice([(), (), (3,), (7,), (2, 3), (5, 1, 2), (17,), (0,), (64,)])
    return (rows, *inner)


def add_dataset(draw: Draw, file: Any, name: str, rows: int) -> Field:
    """Write a dataset of `rows` rows; one that HDF5 refuses to write becomes a plain one."""
    made = Field(name)
    label, kind = random_type(draw)
    shape = _shape(draw, rows)
    dtype = kind
    if isinstance(kind, h5py.Datatype):
        try:
            dtype = kind.dtype
        except (TypeError, ValueError):  # h5py has none
            with contextlib.suppress(ValueError):  # too new for this file
                create_by_type(file, name, kind.id, h5py.h5s.create_simple(shape))
                made.features += [label, f"{shape}"]
                made.reasons.append("NumPy|not understood|Insufficient precision")
                return made
            kind = dtype = np.dtype("<i4")
    layout = draw.choice(["contiguous", "contiguous", "compact", "chunked", "chunked", "chunked"])
    try:
        _write(draw, file, made, label, kind, dtype, shape, layout)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        if name in file:
            del file[name]
        made.has_gaps = False
        first = (str(error).splitlines() or [type(error).__name__])[0]
        made.features[:] = ["<i4", f"{(rows, 2)}", f"contiguous ({label} failed: {first})"]
        made.reasons.clear()
        file.create_dataset(name, data=values_of(draw, np.dtype("<i4"), (rows, 2)))
    return made


def _write(
    draw: Draw, file: Any, made: Field, label: str, kind: Any, dtype: Any, shape: Any, layout: str
) -> None:
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.features += [label, str(dtype), f"{shape}", layout]
    options: dict[str, Any] = {}
    if layout == "chunked":
        chunks = tuple(draw.randint(1, max(1, n)) for n in shape)
        if draw.chance(0.6):
            chunks = (chunks[0], *(max(1, n) for n in shape[1:]))
        options["chunks"] = chunks
        ways = [None, (None, *shape[1:]), (None,) * len(shape), tuple(n + 9 for n in shape)]
        options["maxshape"] = draw.choice(ways) if all(shape) else (None,) * len(shape)
        names = _add_filters(draw, create, dtype)
        if len({*names}) < len(names):
            made.reasons.append("applies a filter twice")
        made.features += [f"{chunks}", f"up to {options['maxshape']}", "+".join(names)]
    elif layout == "compact":
        create.set_layout(h5py.h5d.COMPACT)
    if layout != "compact":
        allocated, filled = draw.choice(list(_ALLOCATED)), draw.choice(list(_FILLED))
        filled = "alloc" if "scaleoffset" in made.features[-1] else filled
        create.set_alloc_time(_ALLOCATED[allocated])
        create.set_fill_time(_FILLED[filled])
        made.features += [f"allocated {allocated}", f"filled {filled}"]
        if filled != "never" and dtype.kind in "iufb" and draw.chance(0.3):
            options["fillvalue"] = 1
    resized = shape
    if options.get("maxshape") and draw.chance(0.4):
        most = options["maxshape"]
        resized = tuple(
            n if limit == n else min(limit or 99, draw.randint(0, n + 8))
            for n, limit in zip(shape, most, strict=True)
        )
        made.features.append(f"first {resized}")
    if layout == "chunked" and draw.chance(0.1):
        made.features.append("no filters at edges")
        limits = [h5py.h5s.UNLIMITED if n is None else n for n in options["maxshape"] or resized]
        create.set_chunk(chunks)
        _leave_edges(create)
        stored = kind.id if isinstance(kind, h5py.Datatype) else h5py.h5t.py_create(kind, logical=1)
        space = h5py.h5s.create_simple(resized, tuple(limits))
        create_by_type(file, made.name, stored, space, create)
        dataset = file[made.name]
    else:
        dataset = file.create_dataset(made.name, resized, kind, dcpl=create, **options)
    _fill(draw, dataset, made, dtype, resized, shape)


def _fill(draw: Draw, dataset: Any, made: Field, dtype: Any, first: Any, last: Any) -> None:
    """Write all of a dataset, some or none; resize it; write chunks around the filters."""
    # HDF5's scale-offset filter writes beyond its memory for numbers that need all bits.
    few = any("scaleoffset" in each for each in made.features)
    plain = "filled never" not in made.features  # else what is not written is any memory
    way = draw.choice(["all"] * 6 + ["rows", "nothing"]) if plain else "all"
    if way == "all" and math.prod(first):
        dataset[...] = values_of(draw, dtype, first, dataset.file, few=few)
    elif way == "rows" and first[0]:
        start = draw.randrange(first[0])
        part = (draw.randint(1, first[0] - start), *first[1:])
        dataset[start : start + part[0]] = values_of(draw, dtype, part, dataset.file, few=few)
    made.features.append(f"written {way}")
    late = "allocated late" in made.features and bool(math.prod(last))
    made.has_gaps = late and first == last and way == "nothing"
    if first != last:
        dataset.resize(last)
        if not plain or draw.chance(0.6):
            dataset[...] = values_of(draw, dtype, last, dataset.file, few=few)
            made.features.append("written again")
    if "allocated early" not in made.features or made.features[3] == "chunked":
        made.reasons.append(UNWRITTEN)
    if dataset.chunks and not few and draw.chance(0.3):
        _write_chunks(draw, dataset, made, dtype)


def _write_chunks(draw: Draw, dataset: Any, made: Field, dtype: Any) -> None:
    """Write some chunks as bytes, with some of the filters left out by their masks."""
    create = dataset.id.get_create_plist()
    filters = [create.get_filter(at)[0] for at in range(create.get_nfilters())]
    if dtype.hasobject or dtype.kind == "b" or h5py.check_enum_dtype(dtype):
        return
    dataset.file.flush()
    for _ in range(2):
        if not math.prod(dataset.shape):
            return
        at = tuple(
            draw.randrange(-(-n // step)) * step
            for n, step in zip(dataset.shape, dataset.chunks, strict=True)
        )
        size = dataset.id.get_type().get_size()
        data = draw.numbers.bytes(math.prod(dataset.chunks) * size)
        mask = (1 << len(filters)) - 1
        for bit, number in enumerate(filters):
            if number == h5py.h5z.FILTER_DEFLATE and draw.chance(0.7):
                mask &= ~(1 << bit)
                data = zlib.compress(data)
            elif number == h5py.h5z.FILTER_SHUFFLE and not bit and draw.chance(0.5):
                mask &= ~1
                data = np.frombuffer(data, "u1").reshape(-1, size).T.tobytes()
        dataset.id.write_direct_chunk(at, data, filter_mask=mask)
        made.has_gaps = False
        made.features.append(f"chunk {at} by mask {mask:b}")


def add_external(draw: Draw, file: Any, name: str, rows: int) -> Field:
    """Write a dataset whose rows lie in files of their own."""
    dtype, shape = np.dtype(draw.choice(_PLAIN)), (rows, draw.randint(1, 4))
    left, parts = math.prod(shape) * dtype.itemsize, []
    made = Field(name, [f"{dtype}", f"{shape}"])
    for number in range(draw.randint(1, 3)):
        home = Path(file.filename)
        place = home.parent / f"{home.stem}-{len(name)}-{name.encode().hex()[:40]}-{number}.raw"
        nbytes = draw.randint(0, left) if number < 2 else left
        parts.append((str(place), draw.choice([0, 16]), nbytes or 1))
        left -= min(left, nbytes or 1)
    path, offset, _ = parts[-1]
    parts[-1] = (path, offset, h5py.h5f.UNLIMITED if draw.chance(0.3) else left + parts[-1][2])
    dataset = file.create_dataset(name, shape, dtype, external=parts)
    way = draw.choice(["all", "all", "all", "some", "nothing"])
    if way == "all" and rows:
        dataset[...] = values_of(draw, dtype, shape)
    elif way == "some" and rows:
        dataset[: rows // 2] = values_of(draw, dtype, (rows // 2, *shape[1:]))
    made.features.append(f"external storage in {len(parts)} files, written {way}")
    made.reasons.append("has its rows in .*(missing|ends at)")
    return made
