"""Sources of single records: image folders, WebDataset tar files, CSV and Parquet tables."""

from __future__ import annotations

import io as standard_io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.attributes import Attributes, class_attributes
from ..format.opening import first_line
from ..format.ragged import Block, Ragged, offsets_of, ragged_of
from ..format.slab_folder import FieldSpec
from ..needed_for import needed_for
from ..order.epoch_order import IntArray
from .class_folders import IMAGE_SUFFIXES, ClassFolders
from .source import Source, chosen, read_file, reading

__all__ = ["CsvSource", "ImageFolderSource", "ParquetSource", "TarSource"]

_KINDS = "biuf"
_TEXTS = frozenset({"string", "large_string", "string_view", "binary", "large_binary"})  # of Arrow


class ImageFolderSource(Source):
    """Images in one folder per class: fields image (uint8, height x width x 3) and label (int64).

    Labels number the folders by their sorted names, as torchvision's ImageFolder does. With
    `image_size` the shorter side is scaled to it and the central square is used; otherwise all
    images must have one size. With `encoded` the ragged field image holds the bytes of the files.
    """

    left_out_are = "files"

    def __init__(
        self,
        path: Path,
        fields: Sequence[str] | None,
        image_size: int | None,
        *,
        encoded: bool = False,
    ) -> None:
        found = ClassFolders(path)
        self._images, self._classes, self.left_out = found.images, found.names, found.left_out
        self._size = image_size
        self.files = [file for file, _ in self._images]
        self.num_samples = len(self._images)
        image = FieldSpec("image", (), np.dtype(np.uint8), ragged=True)
        if not encoded:
            first = self._images[0][0]
            shape = _decode(first.read_bytes(), image_size, str(first)).shape
            image = FieldSpec("image", shape, np.dtype(np.uint8))
        known = {"image": image, "label": FieldSpec("label", (), np.dtype(np.int64))}
        self.specs = tuple(chosen(known, fields).values())

    def attributes(self) -> Attributes:
        if all(spec.name != "label" for spec in self.specs):
            return Attributes()
        return class_attributes("label", self._classes)

    def lengths(self, spec: FieldSpec) -> IntArray:
        return np.array([_file_bytes(file) for file in self.files], np.int64)

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        for row in range(start, self.num_samples, rows):
            part = self._images[row : row + rows]
            if spec.name == "label":
                yield np.array([label for _, label in part], np.int64)
            elif spec.ragged:
                data = [np.frombuffer(read_file(file), np.uint8) for file, _ in part]
                yield ragged_of(data, (), spec.dtype)
            else:
                images = (_decode(read_file(file), self._size, str(file)) for file, _ in part)
                names = (str(file) for file, _ in part)
                yield _stacked(zip(names, images, strict=True), spec, len(part))


class TarSource(Source):
    """Tar files in WebDataset's form: members of one sample share the name before the first dot.

    The rest of the name is the field: npy (an array), cls (a number as text), jpg, png and the like
    (an image, uint8), anything else (bytes). All samples have the same fields. Arrays and bytes of
    different lengths make a ragged field. With `encoded` images stay bytes.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        fields: Sequence[str] | None,
        image_size: int | None,
        *,
        encoded: bool = False,
    ) -> None:
        self.files, self._size, self._encoded = list(paths), image_size, encoded
        # Field -> each sample's member: number of the tar file, offset, length, name.
        self._members: dict[str, list[tuple[int, int, int, str]]] = {}
        samples = 0
        for number, path in enumerate(self.files):
            samples = self._scan(number, path, samples)
        self.num_samples = samples
        for name, members in self._members.items():
            if len(members) != samples:
                raise DataError(
                    f"{self.files[0]}: {len(members)} of {samples} samples have .{name}; "
                    "choose other fields with --fields"
                )
        known = {}
        for name in self._members if fields is None else fields:
            if name in self._members:
                known[name] = self._spec(name)
        self.specs = tuple(chosen(known, fields, self._members).values())

    def _spec(self, name: str) -> FieldSpec:
        """Return the field; ragged for arrays and bytes of different sizes, and encoded images."""
        first = self._load(name, 0)
        suffix = f".{name.rpartition('.')[2]}"
        if self._encoded and suffix in IMAGE_SUFFIXES:
            return FieldSpec(name, (), first.dtype, ragged=True)
        sizes = {length for _, _, length, _ in self._members[name]}
        if len(sizes) > 1 and first.ndim and suffix not in IMAGE_SUFFIXES:
            return FieldSpec(name, first.shape[1:], first.dtype, ragged=True)
        return FieldSpec(name, first.shape, first.dtype)

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        members = self._members[spec.name]
        for row in range(start, self.num_samples, rows):
            part = range(row, min(row + rows, self.num_samples))
            values = ((members[row][3], self._load(spec.name, row)) for row in part)
            yield _in_a_row(values, spec) if spec.ragged else _stacked(values, spec, len(part))

    def _scan(self, number: int, path: Path, samples: int) -> int:
        last = None
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    if not member.isfile():
                        continue
                    folder, _, base = member.name.rpartition("/")
                    key, _, name = base.partition(".")
                    if (folder, key) != last:
                        last, samples = (folder, key), samples + 1
                    place = (number, member.offset_data, member.size, f"{path}: {member.name}")
                    self._members.setdefault(name.lower(), []).append(place)
        except (OSError, tarfile.TarError) as error:
            raise DataError(f"{path}: not a readable tar file: {first_line(error)}") from None
        return samples

    def _load(self, name: str, row: int) -> NDArray[Any]:
        number, offset, length, where = self._members[name][row]
        with reading(where), open(self.files[number], "rb") as file:
            file.seek(offset)
            data = file.read(length)
        if len(data) < length:
            raise DataError(f"{where} is truncated; copy the file again")
        suffix = name.rpartition(".")[2]
        try:
            if suffix == "npy":
                array: NDArray[Any] = np.load(standard_io.BytesIO(data), allow_pickle=False)
                return array.astype(array.dtype.newbyteorder("="), copy=False)
            if suffix in ("cls", "index"):
                return np.array(int(data), np.int64)
        except (ValueError, TypeError, EOFError, MemoryError) as error:  # of damaged headers
            raise DataError(f"{where}: {first_line(error)}") from None
        if f".{suffix}" in IMAGE_SUFFIXES and not self._encoded:
            return _decode(data, self._size, where)
        return np.frombuffer(data, np.uint8)


class CsvSource(Source):
    """A CSV table with a header line; every column of numbers is a field; needs pandas."""

    _CHUNK = 100_000

    def __init__(self, path: Path, fields: Sequence[str] | None) -> None:
        self._path, self.files = path, [path]
        self.num_samples = 0
        # The types of all parts count: a column may begin with integers and go on with floats.
        types: dict[str, np.dtype[Any]] = {}
        for chunk in self._chunks(fields):
            self.num_samples += len(chunk)
            for name in chunk.columns:
                dtype = np.dtype(chunk[name].dtype) if _is_plain(chunk[name].dtype) else _OBJECT
                if name not in types:
                    types[str(name)] = dtype
                elif types[name] != dtype:
                    types[name] = np.promote_types(types[name], dtype)
        self.specs = _columns(path, types, fields)

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[NDArray[Any]]:
        """Yield one column in parts; lines before `start` are read again."""
        before = start
        for chunk in self._chunks([spec.name]):
            values = chunk[spec.name].to_numpy(spec.dtype)[before:]
            before = max(0, before - len(chunk))
            for row in range(0, len(values), rows):
                yield values[row : row + rows]

    def _chunks(self, columns: Sequence[str] | None) -> Iterator[Any]:
        with needed_for("CSV", "pandas"):
            import pandas
        try:
            yield from pandas.read_csv(self._path, usecols=columns, chunksize=self._CHUNK)
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path}: not readable as CSV: {first_line(error)}") from None


class ParquetSource(Source):
    """A Parquet table; every column of numbers, or of lists of numbers, is a field; needs pyarrow.

    Lists whose type fixes their length get it as a shape; other lists are ragged. Columns of text
    or bytes become ragged fields of bytes if `fields` names them, or all of them with `text`.
    Dictionary-encoded columns are read as their values.
    """

    def __init__(self, path: Path, fields: Sequence[str] | None, *, text: bool = False) -> None:
        self._path, self.files = path, [path]
        table = self._open()
        self.num_samples = int(table.metadata.num_rows)
        types, shapes, lists, texts = {}, {}, set(), set()
        for entry in table.schema_arrow:
            stored = entry.type
            kind = _values_of(stored)
            documents = text and kind is stored  # a dictionary holds categories, not documents
            if str(kind) in _TEXTS and (documents if fields is None else entry.name in fields):
                texts.add(entry.name)
                types[entry.name] = np.dtype(np.uint8)
                continue
            if str(kind).startswith(("list<", "large_list<")):
                lists.add(entry.name)
                kind = kind.value_type
            shapes[entry.name], kind = _fixed_shape(kind)
            try:
                types[entry.name] = np.dtype(kind.to_pandas_dtype())
            except NotImplementedError:
                types[entry.name] = _OBJECT
        self.text_fields = frozenset(texts)
        self.specs = tuple(
            replace(spec, ragged=spec.name in lists | texts, shape=shapes.get(spec.name, ()))
            for spec in _columns(path, types, fields)
        )

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        """Yield one column in parts; rows before `start` are read again."""
        before = start
        for batch in self._batches(spec.name, rows):
            column = batch.column(0)[before:]
            before = max(0, before - len(batch))
            if hasattr(column, "dictionary_decode"):
                column = column.dictionary_decode()
            if spec.name in self.text_fields and not column.null_count:
                yield _bytes_of(column)
                continue
            lengths = None
            if spec.ragged and not column.null_count:
                lengths = column.value_lengths().to_numpy().astype(np.int64)
                column = column.flatten()
            for _ in spec.shape:
                if not column.null_count:
                    column = column.flatten()
            if column.null_count:
                raise DataError(
                    f"{self._path}: column {spec.name!r} has missing values; fill them, or name "
                    "other columns with --fields"
                )
            values = column.to_numpy(zero_copy_only=False).astype(spec.dtype, copy=False)
            values = values.reshape(-1, *spec.shape)
            yield values if lengths is None else Ragged(values, offsets_of(lengths))

    def _batches(self, name: str, rows: int) -> Iterator[Any]:
        table = self._open()
        try:
            yield from table.iter_batches(batch_size=rows, columns=[name])
        except (OSError, ValueError) as error:  # pyarrow's errors are among these
            raise DataError(f"{self._path}: not readable as Parquet: {first_line(error)}") from None

    def _open(self) -> Any:
        with needed_for("Parquet", "pyarrow"):
            import pyarrow
            from pyarrow import parquet
        try:
            return parquet.ParquetFile(self._path)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{self._path}: not readable as Parquet: {first_line(error)}") from None


def _values_of(kind: Any) -> Any:
    """Return Arrow's type of a column's values, also of a dictionary-encoded column."""
    return kind.value_type if str(kind).startswith("dictionary<") else kind


def _fixed_shape(kind: Any) -> tuple[tuple[int, ...], Any]:
    """Return the lengths of (nested) lists of fixed length, and the type of their items."""
    shape: tuple[int, ...] = ()
    while str(kind).startswith("fixed_size_list<"):
        shape, kind = (*shape, kind.list_size), kind.value_type
    return shape, kind


def _bytes_of(column: Any) -> Ragged:
    flat = column.cast("large_binary")
    _, offsets, data = flat.buffers()
    ends = np.frombuffer(offsets, np.int64)[flat.offset : flat.offset + len(flat) + 1]
    values = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    return Ragged(values, ends - ends[0])


_OBJECT: np.dtype[Any] = np.dtype(object)


def _is_plain(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in _KINDS


def _columns(
    path: Path, types: dict[str, np.dtype[Any]], fields: Sequence[str] | None
) -> tuple[FieldSpec, ...]:
    """Return the columns of numbers, or the chosen ones, which must be numbers."""
    wanted = [name for name in types if _is_plain(types[name])] if fields is None else fields
    odd = [name for name in wanted if name in types and not _is_plain(types[name])]
    if odd:
        raise DataError(f"{path}: column {odd[0]!r} holds no numbers; choose others with --fields")
    known = {name: FieldSpec(name, (), types[name]) for name in wanted if name in types}
    if not wanted:
        raise DataError(f"{path}: no column of numbers; there are: {', '.join(types)}")
    return tuple(chosen(known, wanted, types).values())


def _stacked(values: Any, spec: FieldSpec, count: int) -> NDArray[Any]:
    """Return rows as one array; raise DataError naming one of another shape or dtype."""
    out = np.empty((count, *spec.shape), spec.dtype)
    for row, (where, value) in enumerate(values):
        if value.shape != spec.shape or value.dtype != spec.dtype:
            raise DataError(
                f"{where} is {value.shape} {value.dtype}, the first one {spec.shape} {spec.dtype}; "
                "all samples need one form (images: --image-size)"
            )
        out[row] = value
    return out


def _in_a_row(values: Any, spec: FieldSpec) -> Ragged:
    """Join arrays of different lengths; raise DataError naming one of another shape or dtype."""
    found = []
    for where, value in values:
        if value.shape[1:] != spec.shape or value.ndim == 0 or value.dtype != spec.dtype:
            raise DataError(
                f"{where} is {value.shape} {value.dtype}, the first one (any, "
                f"{', '.join(map(str, spec.shape))}) {spec.dtype}; only the first axis may differ"
            )
        found.append(value)
    return ragged_of(found, spec.shape, spec.dtype)


def _file_bytes(path: Path) -> int:
    with reading(path):
        return path.stat().st_size


def _decode(data: bytes, size: int | None, where: str) -> NDArray[np.uint8]:
    """Return an image as RGB, height x width x 3; with `size` scaled and cropped to size x size."""
    with needed_for("an image", "pillow"):
        from PIL import Image, ImageOps
    try:
        with Image.open(standard_io.BytesIO(data)) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: not a readable image: {first_line(error)}") from None
    if size is not None:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, np.uint8)
