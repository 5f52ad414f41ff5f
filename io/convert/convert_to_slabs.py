"""convert_to_slabs: makes slab folders of any source, in random order."""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hsgd.errors import DataError

from ..format.attributes import Attributes
from ..format.chunk_compression import check_compression
from ..format.fields import left_out_line
from ..format.packing_of import packing_warnings
from ..format.slab_folder import FORMAT_VERSION, INDEX_NAME, SOURCE_ORDER, FieldSpec
from ..format.stored_rows import unwritten_lines
from ..order.epoch_order import IntArray
from .array_sources import ArraySource, digits_splits
from .progress import Advance, Progress
from .shuffle_passes import BLOCK_BYTES, Order, Passes
from .slab_folder_writer import SlabFolderWriter
from .source import Source
from .sources import lengths_of, open_source
from .staged_folder import Position, Staged, staged_folder
from .text_sources import TokenizedSource, Tokenizer, load_tokenizer

__all__ = ["ConvertGroup", "convert_to_slabs"]

_SLAB_BYTES = 128 << 20  # wanted size
_MAX_SLAB_BYTES = 2 << 30  # a field of a slab is in memory while its rows are ordered
_STAYS_PACKED = (
    "these are not applied, its values stay as they are stored, and the attributes go with them"
)
_LEAST_SLABS = 16  # more slabs than ranks, also for small data


def convert_to_slabs(
    source: str | os.PathLike[str] | Mapping[str, Any],
    target: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    num_slabs: int | None = None,
    seed: int = 0,
    permute: bool = True,
    overwrite: bool = False,
    test_fraction: float = 0.2,
    image_size: int | None = None,
    encoded: bool = False,
    tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    compress: str | None = None,
    fill_unwritten: bool = False,
    progress: bool = False,
    comm: ConvertGroup | None = None,
) -> list[Path]:
    """Convert `source` to the slab folder `target`, and return the folders made; blocking.

    The folder appears complete or not at all. If a conversion is killed, the same call continues
    about where it stopped: its work is kept beside the target, as .NAME.part, for the same
    arguments, number of ranks and source files (compared by path, size and time).

    Attributes of HDF5 files, fields and groups are copied to the index. A warning names attributes
    that cannot be copied, and datasets that are not fields.

    Args:
        source: a .npy, .npz, HDF5, .tar (WebDataset), .csv, .parquet, .txt or .jsonl file; a folder
            of such files (except .npz and .csv) or of class folders with images; "x.npy,y.npy"; a
            slab folder; "digits" (scikit-learn's); or arrays in memory by field: NumPy arrays,
            Ragged, or lists of arrays of different lengths.
        target: "digits" makes target/train and target/test.
        fields: names to use.
        num_slabs: by default slabs of about 128 MiB, but at least 16.
        seed: of the random order.
        permute: put the samples into random order, on which block shuffling relies; False keeps the
            order of the source.
        overwrite: replace an existing slab folder.
        test_fraction: part of "digits" that becomes target/test.
        image_size: scale and crop images to this size.
        encoded: keep images as the bytes of their files, a ragged field for `decode=` of the
            loader.
        tokenizer: a tokenizer.json file, or a function from texts to lists of token ids, which runs
            twice. The field tokens replaces the text.
        compress: "gzip", or "lz4" or "zstd" (Blosc). Chunks hold whole samples, about 4 MiB over
            all fields; samples of ragged fields may cross chunks. During the conversion the disk
            also holds the slabs uncompressed.
        fill_unwritten: use HDF5's fill values for rows that were never written, with a warning;
            otherwise they are a DataError.
        progress: show a bar on stderr.
        comm: an mpi4py communicator; each rank writes its own slabs. Collective; all ranks
            see the same paths. The result does not depend on the number of ranks.

    Raises:
        DataError: the source cannot be read, the target exists (without overwrite), or the disk is
            full.
        ValueError: bad arguments.
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size is {image_size}; use at least 1")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}; use 0 to 2**63 - 1")
    name = "arrays" if isinstance(source, Mapping) else os.fspath(source)
    group = comm if comm is not None else _Alone()
    parts: list[_Part] = []
    with _shared_errors(group):
        if compress is not None:
            check_compression(compress)
        in_memory = isinstance(source, Mapping) or (name == "digits" and not Path(name).exists())
        if in_memory and (encoded or tokenizer is not None):
            raise ValueError(f"{name}: encoded and tokenizer are for files; leave them out")
        if isinstance(source, Mapping):
            sources: Mapping[str, Source] = {"": ArraySource(source, fields)}
        elif name == "digits" and not Path(name).exists():
            if fields is not None:
                raise ValueError(
                    "digits always have the fields image and label; leave out --fields"
                )
            sources = digits_splits(test_fraction, seed)
        else:
            sources = {"": _open(name, fields, image_size, encoded=encoded, tokenizer=tokenizer)}
        for data in sources.values():
            _check_names(data.specs, name)
            _check_written(data, fill_unwritten, warn=group.rank == 0)
        parts = [
            _Part(part, data, lengths_of(data), _attributes_of(data, name, warn=group.rank == 0))
            for part, data in sources.items()
        ]
        counts = [_slab_count(part, num_slabs, name) for part in parts]
    total = sum(part.nbytes for part in parts)
    show = progress and group.rank == 0
    settings = {
        "format": FORMAT_VERSION,
        "parts": [[*part.described(), count] for part, count in zip(parts, counts, strict=True)],
        "seed": seed if permute else None,
        "ranks": group.size,
        "compress": compress,
        "block_bytes": BLOCK_BYTES,
    }
    with (
        _staged_together(Path(target), settings, group, overwrite) as staged,
        Progress(total, f"convert {name}", show=show) as advance,
    ):
        for part, count in zip(parts, counts, strict=True):
            order_seed = seed if permute else None
            _convert_part(staged, part, count, order_seed, compress, advance, group)
    return [Path(target).absolute() / part.name for part in parts]


def _open(
    name: str,
    fields: Sequence[str] | None,
    image_size: int | None,
    *,
    encoded: bool,
    tokenizer: str | os.PathLike[str] | Tokenizer | None,
) -> Source:
    if tokenizer is None:
        return open_source(name, fields, image_size, encoded=encoded)
    encode, dtype, kind = load_tokenizer(tokenizer)
    source = open_source(name, fields, image_size, encoded=encoded, text=True)
    return TokenizedSource(source, encode, dtype, kind, name)


@dataclass(frozen=True)
class _Part:
    """The data of one slab folder; `lengths` has those of the samples of each ragged field."""

    name: str
    source: Source
    lengths: dict[str, IntArray]
    attributes: Attributes

    @property
    def nbytes(self) -> int:
        return sum(self.field_bytes(spec) for spec in self.source.specs)

    def field_bytes(self, spec: FieldSpec) -> int:
        lengths = self.lengths.get(spec.name)
        rows = self.source.num_samples if lengths is None else int(lengths.sum())
        return rows * spec.row_bytes

    def described(self) -> list[Any]:
        """Return plain values that differ if the source does."""
        specs = [[s.name, s.shape, s.dtype.str, s.ragged] for s in self.source.specs]
        lengths = hashlib.sha256(b"".join(x.tobytes() for x in self.lengths.values())).hexdigest()
        return [self.name, self.source.identity(), self.source.num_samples, specs, lengths]


def _check_written(source: Source, accepted: bool, *, warn: bool) -> None:
    lines = unwritten_lines(
        source.unwritten.values(),
        accepted=accepted,
        option="--fill-unwritten (fill_unwritten=True)",
    )
    for line in lines:
        if warn:
            warnings.warn(line, stacklevel=3)


def _attributes_of(source: Source, name: str, *, warn: bool) -> Attributes:
    """Return the attributes to copy; warn of datasets and attributes that are left out."""
    found = source.attributes()
    lines = [
        *source.notes,
        left_out_line(name, source.left_out_are, source.left_out),
        left_out_line(name, "attributes", found.left_out),
        *packing_warnings(name, source.packing, _STAYS_PACKED),
    ]
    for line in lines:
        if line and warn:
            warnings.warn(line, stacklevel=3)
    return found


class ConvertGroup(Protocol):
    """The methods of an mpi4py communicator that a conversion needs."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank; collective."""


class _Alone:
    rank, size = 0, 1

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj]


@contextmanager
def _staged_together(
    target: Path, settings: dict[str, Any], group: ConvertGroup, overwrite: bool
) -> Iterator[Staged]:
    """Call staged_folder() on rank 0 for all ranks; an error of one rank is raised on all."""
    with _shared_errors(group), ExitStack() as stack:
        staged: Staged | None = None
        with _shared_errors(group):
            if group.rank == 0:
                staged = stack.enter_context(staged_folder(target, settings, overwrite=overwrite))
        shared = group.allgather(staged)[0]
        with _shared_errors(group):
            yield shared


@contextmanager
def _shared_errors(group: ConvertGroup) -> Iterator[None]:
    """Raise an error on all ranks if the block fails on one; collective at the end of the block."""
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
    staged: Staged,
    part: _Part,
    num_slabs: int,
    seed: int | None,
    compress: str | None,
    advance: Advance,
    group: ConvertGroup,
) -> None:
    """Write one slab folder: each rank its slabs, rank 0 the index when all are complete."""
    folder = staged.folder / part.name
    folder.mkdir(exist_ok=True)
    if group.allgather((folder / INDEX_NAME).exists())[0]:
        return  # made before the conversion was killed
    with _shared_errors(group):
        journal = staged.journal(part.name, group.rank)
        position = journal.load()
        order = Order(part.source.num_samples, seed)
        writer = SlabFolderWriter(
            folder,
            part.source.specs,
            part.source.num_samples,
            num_slabs,
            SOURCE_ORDER if seed is None else seed,
            dataset_uuid=_uuid_of(staged.dataset_uuid, part.name),
            owned=range(group.rank, num_slabs, group.size),
            ends={name: order.ends(lengths) for name, lengths in part.lengths.items()},
            compress=compress,
            resumed=position is not None,
        )
        passes = Passes(
            writer,
            part.source,
            order,
            part.lengths,
            journal,
            position or Position(),
            _evenly(advance, part.nbytes, 1 if seed is None else 2, group.size),
        )
        digest = passes.run()
        writer.seal(digest)
    if group.rank == 0:
        writer.write_index(digest, part.attributes)


def _evenly(advance: Advance, total: int, passes: int, ranks: int) -> Advance:
    """Return a function that converts bytes moved in all passes of a rank to bytes of the data."""
    moved = total + (total // ranks if passes > 1 else 0)
    done = shown = 0

    def tell(count: int) -> None:
        nonlocal done, shown
        done += count
        now = min(total, done * total // max(1, moved))
        advance(now - shown)
        shown = now

    return tell


def _check_names(specs: Sequence[FieldSpec], source: str) -> None:
    """Raise DataError for names that cannot be names of datasets in one HDF5 file."""
    names = [spec.name for spec in specs]
    for name in names:
        steps = name.split("/")
        if "" in steps or "." in steps or "\0" in name:
            raise DataError(
                f"{source}: HDF5 has no dataset of the name {name!r}; rename the field, or choose "
                "others with --fields"
            )
        inside = [other for other in names if other.startswith(f"{name}/")]
        if inside:
            raise DataError(
                f"{source}: field {name!r} cannot hold field {inside[0]!r}; rename one, or choose "
                "others with --fields"
            )


def _slab_count(part: _Part, asked: int | None, name: str) -> int:
    """Return the number of slabs; raise an error if `asked` is impossible for these samples."""
    samples = part.source.num_samples
    if samples == 0:
        raise DataError(f"{name}: the first dimension is 0, there are no samples to convert")
    if not part.nbytes and not any(spec.ragged for spec in part.source.specs):
        raise DataError(f"{name}: every field has an axis of length 0, there is nothing to convert")
    largest_field = max(part.field_bytes(spec) for spec in part.source.specs)
    all_fields = part.nbytes
    if asked is None:
        return min(samples, max(_LEAST_SLABS, -(-all_fields // _SLAB_BYTES)))
    if not 1 <= asked <= samples:
        raise ValueError(f"{asked} slabs for {samples} samples; use 1 to {samples}")
    if largest_field // asked > _MAX_SLAB_BYTES:
        least = -(-largest_field // _MAX_SLAB_BYTES)
        raise ValueError(f"{asked} slabs would be too large to shuffle; use {least} at least")
    return asked


def _uuid_of(dataset_uuid: str, part: str) -> str:
    """Return the uuid of one part (train, test), the same on all ranks and after a restart."""
    return uuid.uuid5(uuid.UUID(dataset_uuid), part).hex if part else dataset_uuid
