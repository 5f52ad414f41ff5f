"""hsgd data convert | info: the reader's commands.

Owns arguments, their help, and the text of `info`. Errors are raised and become one line in
hsgd/cli.py, which calls `add_parser`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hsgd.io.convert import convert_to_slabs
from hsgd.io.datamap import DataMap, open_map
from hsgd.io.layout import SOURCE_ORDER

__all__ = ["add_parser", "describe"]

_DATA_EXAMPLES = """\
examples:
  hsgd data convert digits data/digits           scikit-learn's digits, as train and test
  hsgd data convert train.npz data/train         every array of the file becomes a field
  hsgd data convert x.npy,y.npy data/train       fields x and y
  hsgd data info data/train                      what is in there, and how it will be read

In a training script:
  from hsgd.io import PartitionedLoader
  loader = PartitionedLoader("data/train", batch_size=64, rank=rank, world_size=size)
"""

_CONVERT_EXAMPLES = """\
SRC is one of
  train.npz              a NumPy archive; every array is a field
  x.npy | x.npy,y.npy    one array (field "data"), or several (fields x and y)
  arrays/                a folder of .npy files, or a slab folder (to shuffle it anew)
  old.h5                 an HDF5 file; every dataset is a field
  digits                 scikit-learn's digits; makes DST/train and DST/test

examples:
  hsgd data convert train.npz data/train
  hsgd data convert old.h5 data/train --fields image,label --seed 7
  hsgd data convert digits data/digits --overwrite

Samples are put in a random order once, here; the loader then shuffles blocks in every epoch, which
together is as good as a full shuffle. DST appears whole or not at all.
"""


def add_parser(subparsers: Any) -> None:
    """Add `data` and its commands to the subparsers of `hsgd`."""
    data = subparsers.add_parser(
        "data",
        help="convert and inspect training data in HDF5 slabs",
        description="Training data as folders of contiguous HDF5 slabs.",
        epilog=_DATA_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_convert(commands)
    info = commands.add_parser(
        "info",
        help="show fields, slabs, sizes, and how a dataset will be read",
        description="Show what a slab folder or an HDF5 file holds and how it will be read.",
    )
    info.add_argument("path", metavar="PATH", help="slab folder or HDF5 file")
    _add_fields(info)
    info.set_defaults(command_function=_info)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="make a slab folder from NumPy or HDF5 files",
        description="Convert SRC to the slab folder DST.",
        epilog=_CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_argument("source", metavar="SRC", help="what to convert, see below")
    convert.add_argument("target", metavar="DST", help="folder to make")
    _add_fields(convert)
    convert.add_argument(
        "--slabs",
        type=int,
        metavar="N",
        help="number of slab files (default: about 128 MiB each, at least 16)",
    )
    convert.add_argument("--seed", type=int, default=0, help="of the random order (default: 0)")
    convert.add_argument(
        "--keep-order", action="store_true", help="keep the order of SRC instead of shuffling"
    )
    convert.add_argument(
        "--test-fraction",
        type=float,
        default=0.2,
        metavar="F",
        help="digits only: part of each class that goes to DST/test (default: 0.2)",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace the slabs in DST")
    convert.add_argument("--quiet", action="store_true", help="no progress bar, no table")
    convert.set_defaults(command_function=_convert)


def _add_fields(parser: Any) -> None:
    parser.add_argument(
        "--fields",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="A,B",
        help="names of the fields to use (default: all)",
    )


def _convert(options: argparse.Namespace) -> int:
    folders = convert_to_slabs(
        options.source,
        options.target,
        fields=options.fields,
        num_slabs=options.slabs,
        seed=options.seed,
        permute=not options.keep_order,
        overwrite=options.overwrite,
        test_fraction=options.test_fraction,
        progress=not options.quiet,
    )
    if not options.quiet:
        print("\n\n".join(describe(open_map(folder)) for folder in folders))
    return 0


def _info(options: argparse.Namespace) -> int:
    print(describe(open_map(options.path, options.fields)))
    return 0


def describe(data: DataMap) -> str:
    """A table of the fields, below a line on the whole."""
    size = _bytes_text(data.num_samples * data.row_bytes)
    header = data.header
    if header is None:
        kind = f"HDF5 file, {data.num_samples} samples, {size}"
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
    refusals = data.refusals()
    rows = [("field", "shape", "dtype", "size", "read by")]
    for spec in data.fields:
        refusal = refusals[spec.name]
        how = f"h5py, because: {refusal}" if refusal else "preadv, around HDF5"
        total = _bytes_text(data.num_samples * spec.row_bytes)
        rows.append((spec.name, str(spec.shape), str(spec.dtype), total, how))
    lines = [data.path, f"  {kind}", *_table(rows)]
    if header is not None:
        lines.append(f"  source sha256 {header.source_digest}, uuid {header.dataset_uuid}")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns, a rule below the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "  " + "  ".join("-" * width for width in widths), *lines[1:]]


def _bytes_text(count: int) -> str:
    """A size in the largest binary unit that leaves at least 1."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
