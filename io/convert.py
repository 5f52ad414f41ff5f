"""hsgd data convert: from any source to slab folders, shuffled on the way.

Owns the global permutation in bounded memory. Pass 1 streams the source once and appends every row
to the slab where it belongs; pass 2 puts the rows of one slab at a time into their final order.
Both passes read and write in large sequential parts, and together they are exactly one random
permutation of all rows. Memory: one field of one slab, two blocks, and 16 bytes per sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from hsgd.io.layout import SOURCE_ORDER, FieldSpec, SlabFolderWriter, staged_folder
from hsgd.io.partition import IntArray, permutation
from hsgd.io.progress import Advance, Progress
from hsgd.io.sources import Source, digits_splits, open_source

from hsgd.errors import DataError

__all__ = ["ConvertGroup", "convert_to_slabs"]

_BLOCK_BYTES = 16 << 20
_SLAB_BYTES = 128 << 20  # aim
_MAX_SLAB_BYTES = 2 << 30  # one slab is held in memory while its rows are put in order
_LEAST_SLABS = 16  # more slabs than ranks, also for small data
_PERMUTE = 4  # what the random stream is for (partition.py uses 1 to 3)


def convert_to_slabs(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    num_slabs: int | None = None,
    seed: int = 0,
    permute: bool = True,
    overwrite: bool = False,
    test_fraction: float = 0.2,
    image_size: int | None = None,
    progress: bool = False,
    comm: ConvertGroup | None = None,
) -> list[Path]:
    """Convert `source` to a slab folder `target`; the folders made.

    source: .npy, .npz, HDF5, .tar (WebDataset), .csv or .parquet file, folder of .npy or .tar files
    or of class folders with images, "x.npy,y.npy", slab folder, or "digits" (scikit-learn's, makes
    target/train and target/test by test_fraction). image_size: images are scaled and cut to it.
    fields: names to take.
    num_slabs: by default about 128 MiB each, 16 at least. permute: put the samples in a random
    order that `seed` decides, which block shuffling relies on; False keeps the order of the source.
    progress: show a bar on stderr. comm: an mpi4py communicator: its ranks write slabs of their own
    (collective; the result is the same for any number of ranks, all see one path).

    The folder appears whole or not at all. Raises DataError for an unreadable source, an existing
    target (without overwrite) and a full disk, ValueError for bad arguments.
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size is {image_size}; use at least 1")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}; use 0 to 2**63 - 1")
    name = os.fspath(source)
    group = comm if comm is not None else _Alone()
    parts: dict[str, Source]
    with _shared_errors(group):
        if name == "digits" and not Path(name).exists():
            if fields is not None:
                raise ValueError(
                    "digits always have the fields image and label; leave out --fields"
                )
            parts = digits_splits(test_fraction, seed)
        else:
            parts = {"": open_source(name, fields, image_size)}
        counts = {part: _slab_count(data, num_slabs, name) for part, data in parts.items()}
    total = sum(d.num_samples * sum(s.row_bytes for s in d.specs) for d in parts.values())
    show = progress and group.rank == 0
    with (
        _staged_together(Path(target), group, overwrite=overwrite) as (staged, dataset_uuid),
        Progress(total * (2 if permute else 1), f"convert {name}", show=show) as advance,
    ):
        for part, data in parts.items():
            _convert_part(
                staged / part,
                data,
                counts[part],
                seed if permute else None,
                advance,
                group,
                f"{dataset_uuid}{part}",
            )
    return [Path(target).absolute() / part for part in parts]


class ConvertGroup(Protocol):
    """What is needed of an mpi4py communicator."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, by rank; collective."""


class _Alone:
    """The communicator of a conversion by one process."""

    rank, size = 0, 1

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj]


@contextmanager
def _staged_together(
    target: Path, group: ConvertGroup, *, overwrite: bool
) -> Iterator[tuple[Path, str]]:
    """staged_folder() of rank 0 for all ranks, and a uuid; an error of one is an error of all."""
    with _shared_errors(group), ExitStack() as stack:
        staged: Path | None = None
        with _shared_errors(group):
            if group.rank == 0:
                staged = stack.enter_context(staged_folder(target, overwrite=overwrite))
        folder, dataset_uuid = group.allgather((staged, uuid.uuid4().hex))[0]
        with _shared_errors(group):
            yield folder, dataset_uuid


@contextmanager
def _shared_errors(group: ConvertGroup) -> Iterator[None]:
    """Collective at its end: when a rank fails inside, all do, each with the first rank's text."""
    error: BaseException | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    texts = group.allgather(None if error is None else f"rank {group.rank}: {error}")
    if error is not None:
        raise error
    failed = [text for text in texts if text is not None]
    if failed:
        raise DataError(f"conversion failed on {failed[0]}")


def _convert_part(
    folder: Path,
    data: Source,
    num_slabs: int,
    seed: int | None,
    advance: Advance,
    group: ConvertGroup,
    dataset_uuid: str,
) -> None:
    """Write one slab folder; every rank its slabs, rank 0 the index when all are there."""
    folder.mkdir(exist_ok=True)
    stored_seed = SOURCE_ORDER if seed is None else seed
    with _shared_errors(group):
        writer = SlabFolderWriter(
            folder,
            data.specs,
            data.num_samples,
            num_slabs,
            stored_seed,
            dataset_uuid=dataset_uuid,
            owned=range(group.rank, num_slabs, group.size),
        )
        digest = _write_rows(writer, data, seed, advance)
        writer.seal(digest)
    if group.rank == 0:
        writer.write_index(digest)


def _slab_count(source: Source, asked: int | None, name: str) -> int:
    """How many slabs to make; refuses what cannot be split or would not fit in memory."""
    samples = source.num_samples
    if samples == 0:
        raise DataError(f"{name}: the first dimension is 0, there are no samples to convert")
    if any(spec.row_bytes == 0 for spec in source.specs):
        raise DataError(f"{name}: a field has an axis of length 0; choose the fields with --fields")
    largest_field = max(spec.row_bytes for spec in source.specs) * samples
    all_fields = sum(spec.row_bytes for spec in source.specs) * samples
    if asked is None:
        return min(samples, max(_LEAST_SLABS, -(-all_fields // _SLAB_BYTES)))
    if not 1 <= asked <= samples:
        raise ValueError(f"{asked} slabs for {samples} samples; use 1 to {samples}")
    if largest_field // asked > _MAX_SLAB_BYTES:
        least = -(-largest_field // _MAX_SLAB_BYTES)
        raise ValueError(f"{asked} slabs would be too large to shuffle; use {least} at least")
    return asked


def _write_rows(
    writer: SlabFolderWriter, source: Source, seed: int | None, advance: Advance
) -> str:
    """Write all rows of all fields; the digest of the source."""
    bounds = np.asarray(writer.bounds)
    place_of = source_at = None
    if seed is not None:
        source_at = permutation(source.num_samples, seed, _PERMUTE)
        place_of = np.empty_like(source_at)
        place_of[source_at] = np.arange(len(source_at))
    digest = hashlib.sha256()
    for spec in source.specs:
        digest.update(json.dumps([spec.name, spec.shape, spec.dtype.str]).encode())
        digest.update(_append_rows(writer, source, spec, bounds, place_of, advance))
        if place_of is not None and source_at is not None:
            for slab in writer.owned:
                _order_slab(writer, spec, slab, place_of, source_at, advance)
    return digest.hexdigest()


def _append_rows(
    writer: SlabFolderWriter,
    source: Source,
    spec: FieldSpec,
    bounds: IntArray,
    place_of: IntArray | None,
    advance: Advance,
) -> bytes:
    """Pass 1: every row to the next free place of its slab. The digest of the rows as they came."""
    digest = hashlib.sha256()
    filled = np.zeros(len(bounds) - 1, np.int64)
    owned = frozenset(writer.owned)
    row = 0
    for block in source.stream(spec, max(1, _BLOCK_BYTES // spec.row_bytes)):
        values = np.ascontiguousarray(block)
        digest.update(values.reshape(-1).view(np.uint8).data)
        places = np.arange(row, row + len(values))
        if place_of is not None:
            places = place_of[places]
        slab_of = np.searchsorted(bounds, places, side="right") - 1
        by_slab = np.argsort(slab_of, kind="stable")
        slabs, firsts = np.unique(slab_of[by_slab], return_index=True)
        for slab, rows in zip(slabs.tolist(), np.split(by_slab, firsts[1:]), strict=True):
            if slab in owned:
                writer.write(slab, spec, int(filled[slab]), values[rows])
            filled[slab] += len(rows)
        row += len(values)
        advance(values.nbytes)
    if row != source.num_samples:
        raise DataError(
            f"field {spec.name!r}: {row} rows came, {source.num_samples} were announced"
        )
    return digest.digest()


def _order_slab(
    writer: SlabFolderWriter,
    spec: FieldSpec,
    slab: int,
    place_of: IntArray,
    source_at: IntArray,
    advance: Advance,
) -> None:
    """Pass 2: the rows of a slab arrived in the order of the source; put them in their places."""
    start, stop = writer.bounds[slab], writer.bounds[slab + 1]
    arrived = np.sort(source_at[start:stop])
    arrival_at = np.empty_like(arrived)
    arrival_at[place_of[arrived] - start] = np.arange(len(arrived))
    values = writer.read_back(slab, spec)
    rows = max(1, _BLOCK_BYTES // spec.row_bytes)
    for first in range(0, len(values), rows):
        block = values[arrival_at[first : first + rows]]
        writer.write(slab, spec, first, block)
        advance(block.nbytes)
