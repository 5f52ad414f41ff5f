"""packed_map: windows of fixed length over the elements of ragged fields, as language models need.

Window n has the elements [n * length, (n + 1) * length) of all samples, in the order of the slabs.
A window is a sample like any other, so order, ranks and resume do not change.
"""

from __future__ import annotations

from dataclasses import replace

from ..format.data_map import DataMap, Extent, SlabMap, Windows
from ..format.slab_folder import FieldSpec

__all__ = ["packed_map"]


def packed_map(data: DataMap, length: int, *, chosen: bool) -> DataMap:
    """Make a dataset whose samples are windows of `length` elements of the ragged fields of `data`.

    `chosen` is true if the caller named the fields; otherwise fields that are not ragged are left
    out. Raises TypeError or ValueError for a length, or fields, that cannot be packed.
    """
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"pack={length!r}; use the number of elements of a window, as pack=1024")
    if length < 1:
        raise ValueError(f"pack={length}; use at least 1")
    specs = _packable(data, chosen=chosen)
    source = replace(data, fields=specs)
    slabs, crossing, elements = _window_slabs(source, length)
    if not slabs:
        raise ValueError(
            f"pack={length}: {data.path} has {elements} elements of {specs[0].name!r}, less than "
            f"a window; use at most {elements}"
            if elements
            else f"pack={length}: {specs[0].name!r} of {data.path} has no elements"
        )
    packed = tuple(replace(s, shape=(length, *s.shape), ragged=False) for s in specs)
    windows = Windows(source, length, crossing, elements % length)
    return replace(
        data,
        fields=packed,
        slabs=slabs,
        num_samples=elements // length,
        header=None,
        windows=windows,
    )


def _packable(data: DataMap, *, chosen: bool) -> tuple[FieldSpec, ...]:
    """Return the ragged fields; raise ValueError unless their samples have equal lengths."""
    specs = tuple(spec for spec in data.fields if spec.ragged)
    plain = [spec.name for spec in data.fields if not spec.ragged]
    if not specs or (plain and chosen):
        raise ValueError(
            f"pack= takes fields of samples of different lengths; in {data.path} "
            f"{', '.join(plain)} {'is none' if len(plain) == 1 else 'are none'}; name others with "
            "fields="
        )
    for slab in data.slabs:
        found = [slab.extents[spec.name].offsets for spec in specs]
        for spec, offsets in zip(specs, found, strict=True):
            first = found[0]
            assert offsets is not None and first is not None
            same = (offsets.first, offsets.elements) == (first.first, first.elements)
            same = same and offsets.held == first.held
            if not same or offsets.checksums != first.checksums:
                raise ValueError(
                    f"pack= packs fields together whose samples have equal lengths; those of "
                    f"{specs[0].name!r} and {spec.name!r} differ in {slab.path}; name one with "
                    "fields="
                )
    return specs


def _window_slabs(source: DataMap, length: int) -> tuple[tuple[SlabMap, ...], frozenset[int], int]:
    """Return windows as slabs, the numbers of the crossing ones, and the elements of all files.

    Each file has a slab of the windows inside it. A crossing window, which begins in one file and
    ends in another, is a slab of its own.
    """
    found: list[SlabMap] = []
    crossing = set()
    before = windows = 0
    for slab in source.slabs:
        offsets = slab.extents[source.fields[0].name].offsets
        assert offsets is not None
        stop = before + offsets.elements
        if windows * length < before and (windows + 1) * length <= stop:
            crossing.add(len(found))
            found.append(_slab_of(source, slab, windows, 1, length, None))
            windows += 1
        count = (stop - windows * length) // length if windows * length >= before else 0
        if count:
            skip = windows * length - before
            found.append(_slab_of(source, slab, windows, count, length, skip))
            windows += count
        before = stop
    return tuple(found), frozenset(crossing), before


def _slab_of(
    source: DataMap, slab: SlabMap, start: int, count: int, length: int, skip: int | None
) -> SlabMap:
    """Return windows as rows of a file from its element `skip` on, or across files if None."""
    extents = {}
    for spec in source.fields:
        extent = slab.extents[spec.name]
        is_plain = not extent.refusal and extent.chunks is None and extent.stored_dtype.isnative
        gathered = skip is None or not is_plain
        offset = -1 if skip is None or gathered else extent.offset + skip * spec.row_bytes
        row_bytes = length * spec.row_bytes
        extents[spec.name] = Extent(offset, spec.dtype, 1, row_bytes, "", gathered=gathered)
    return SlabMap(slab.path, start, count, slab.identity, extents)
