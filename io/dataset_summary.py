"""The summary of a dataset, as text for people and as a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hsgd.base.bytes_text import bytes_text
from hsgd.errors import one_line

from .class_counts import ClassCounts, class_counts
from .format.data_map import DataMap
from .format.packing_of import packing_text
from .format.slab_folder import SOURCE_ORDER
from .layouts.sample_groups import LEAST_GROUPS

__all__ = ["describe", "document", "table"]

_BARS = " ▁▂▃▄▅▆▇█"
_PICTURE_CELLS = 64
_MOST_CLASSES = 20  # in a table


def describe(data: DataMap) -> str:
    """Return a table of the fields, after a line about the whole dataset."""
    size = bytes_text(data.nbytes)
    header = data.header
    if header is None:
        files = len({slab.path for slab in data.slabs})
        kind = "HDF5 file" if files == 1 else f"{files} HDF5 files"
        kind += f", {data.num_samples} samples, {size}"
    else:
        order = (
            "in the order of the source"
            if header.permutation_seed == SOURCE_ORDER
            else f"shuffled with seed {header.permutation_seed}"
        )
        kind = (
            f"{data.num_samples} samples in {len(data.slabs)} sealed slabs of "
            f"{min(data.slab_counts)} to {max(data.slab_counts)}, {size}, {order}"
        )
    read_by = data.read_by()
    rows = [("field", "shape", "dtype", "size", "read by")]
    for spec in data.fields:
        how = read_by[spec.name].replace("h5py:", "h5py, because:")
        how += ", around HDF5" if how.startswith("preadv") else ""
        total = bytes_text(data.field_bytes(spec))
        shape = f"({', '.join(['any', *map(str, spec.shape)])})" if spec.ragged else str(spec.shape)
        rows.append((spec.name, shape, str(spec.dtype), total, how))
    lines = [data.path, f"  {kind}", *table(rows)]
    for name, classes in class_counts(data).items():
        lines += _class_table(name, classes)
    lines += [f"  layout: {data.note}"] if data.note else []
    lines += [f"  no field: {name} ({why})" for name, why in data.left_out.items()]
    lines += [
        f"  packed: {name} ({packing_text(values)}), read as stored"
        for name, values in data.packing.items()
    ]
    lines += [f"  never written: {line}" for line in data.unwritten().values()]
    if header is None:
        lines += _groups_alike([spec.name for spec in data.fields])
    else:
        lines.append(f"  source sha256 {header.source_digest}, uuid {header.dataset_uuid}")
        lines += _slab_picture(data)
    return "\n".join(map(one_line, lines))


def document(data: DataMap) -> dict[str, object]:
    """Return the facts of describe() for programs; local, blocks while labels are counted.

    Sizes are in bytes; shapes are those of one sample, with None for any number of elements.
    """
    read_by = data.read_by()
    fields = [
        {
            "name": spec.name,
            "shape": [None, *spec.shape] if spec.ragged else list(spec.shape),
            "dtype": str(spec.dtype),
            "bytes": data.field_bytes(spec),
            "read_by": read_by[spec.name],
        }
        for spec in data.fields
    ]
    found: dict[str, object] = {
        "path": data.path,
        "samples": data.num_samples,
        "bytes": data.nbytes,
        "samples_of_files": data.slab_counts,
        "fields": fields,
        "layout": data.note,
        "left_out": dict(data.left_out),
        "unwritten": data.unwritten(),
        "packing": {name: dict(values) for name, values in data.packing.items()},
        "classes": {name: asdict(classes) for name, classes in class_counts(data).items()},
    }
    if (header := data.header) is not None:
        seed = header.permutation_seed
        found |= {
            "seed": None if seed == SOURCE_ORDER else seed,
            "source_sha256": header.source_digest,
            "uuid": header.dataset_uuid,
        }
    return found


def _groups_alike(fields: Sequence[str]) -> list[str]:
    """Return a line if sibling groups, samples or parts of a table, have equal fields."""
    names = [tuple(name.split("/")) for name in fields]
    for depth in range(1, max(map(len, names), default=0)):
        homes: dict[tuple[str, ...], dict[str, set[str]]] = {}
        for name in names:
            if len(name) > depth:
                groups = homes.setdefault(name[: depth - 1], {})
                groups.setdefault(name[depth - 1], set()).add("/".join(name[depth:]))
        for home, groups in homes.items():
            held, *others = groups.values()
            if others and all(other == held for other in others):
                first = "/".join((*home, min(groups)))
                return [
                    f"  alike: {len(groups)} groups have {', '.join(sorted(held))}, read as fields "
                    f'whose rows are samples; group="{first}" reads one group alone; only '
                    f"{LEAST_GROUPS} groups or more are taken for one sample each"
                ]
    return []


def _class_table(field: str, classes: ClassCounts) -> list[str]:
    """Return lines with the classes of a field; only the first ones if there are many."""
    names, samples = classes.names, classes.samples
    shown = len(names) if len(names) <= _MOST_CLASSES else _MOST_CLASSES - 1
    rows = [(field, "class", "samples")]
    for label, name in enumerate(names[:shown]):
        rows.append((str(label), name, "not counted" if samples is None else f"{samples[label]:,}"))
    if shown < len(names):
        rest = "not counted" if samples is None else f"{sum(samples[shown:]):,}"
        rows.append((f"... {len(names) - 1}", f"{len(names) - shown} more, see --json", rest))
    if classes.nameless:
        rows.append(("others", "without a name", f"{classes.nameless:,}"))
    return ["", *table(rows)]


def _slab_picture(data: DataMap) -> list[str]:
    """Return all slabs as bars as high as their samples; a dot if HDF5 must read a slab."""
    counts = data.slab_counts
    largest = max(counts)
    cells = [
        "·"
        if any(extent.refusal for extent in slab.extents.values())
        else _BARS[-(-(len(_BARS) - 1) * slab.count // largest)]
        for slab in data.slabs
    ]
    lines = ["", f"  slabs 0 to {len(cells) - 1}, each as high as its samples"]
    for start in range(0, len(cells), _PICTURE_CELLS):
        part = "".join(cells[start : start + _PICTURE_CELLS])
        lines.append(f"  {start:>5} {part}")
    return lines


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns, and a rule below the first."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "  " + "  ".join("-" * width for width in widths), *lines[1:]]
