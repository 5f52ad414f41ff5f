"""hsgd data convert | upload | info | verify | bench: the reader's commands.

Owns arguments, their help, and the text of `info`. Errors are raised and become one line in
hsgd/cli.py, which calls `add_parser`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsgd.errors import DataError, MissingExtra

from .convert.conversion import convert_to_slabs
from .convert.progress import Progress, bytes_text
from .convert.upload import check_target, upload_slabs
from .convert.verify import find_damage
from .format.chunks import COMPRESSIONS
from .format.dataset_index import DataMap, open_map
from .format.slab_folder import SOURCE_ORDER
from .loader import PartitionedLoader
from .options import ReadOptions, Shuffle
from .remote.urls import child_url, is_url

__all__ = ["add_parser", "describe"]

_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_BARS = " ▁▂▃▄▅▆▇█"
_PICTURE_CELLS = 64

_DATA_EXAMPLES = """\
examples:
  hsgd data convert digits data/digits           scikit-learn's digits, as train and test
  hsgd data convert train.npz data/train         every array of the file becomes a field
  hsgd data convert x.npy,y.npy data/train       fields x and y
  hsgd data info data/train                      what is in there, and how it will be read
  hsgd data verify data/train                    every block against its checksum
  hsgd data bench data/train                     how fast this machine reads it
  hsgd data upload data/train s3://bucket/train  for jobs that read it from there

In a training script:
  from hsgd.io import PartitionedLoader
  loader = PartitionedLoader("data/train", batch_size=64, rank=rank, world_size=size)
"""

_CONVERT_EXAMPLES = """\
SRC is one of
  train.npz              a NumPy archive; every array is a field
  x.npy | x.npy,y.npy    one array (field "data"), or several (fields x and y)
  arrays/                a folder of .npy files, or a slab folder (to shuffle it anew)
  old.h5 | parts/        an HDF5 file, or a folder of such files with equal fields, in the order of
                         their names; every dataset is a field
  photos/                images as photos/CLASS/x.png: fields image and label
  data.tar | shards/     samples in WebDataset's form, in one tar file or a folder of them
  t.csv | t.parquet      a table; every column of numbers (or of lists of numbers) is a field, of
                         Parquet also text that --fields names; a folder of Parquet files, too
  a.txt | a.jsonl        documents: lines, or the "text" of each line of JSON; of a folder of .txt
                         files each is one; field text, UTF-8
  digits                 scikit-learn's digits; makes DST/train and DST/test

examples:
  hsgd data convert train.npz data/train
  hsgd data convert old.h5 data/train --fields image,label --seed 7
  hsgd data convert digits data/digits --overwrite
  hsgd data convert photos/ data/train --encoded
  hsgd data convert shards/ data/train --fields text --tokenizer tokenizer.json
  mpirun -n 4 hsgd data convert photos/ data/train --image-size 64
  hsgd data convert train.npz data/train --to s3://bucket/train

Samples are put in a random order once, here; the loader then shuffles blocks in every epoch, which
together is as good as a full shuffle. DST appears whole or not at all; if the command is killed,
give it again, and it goes on about where it was.
"""


_UPLOAD_EXAMPLES = """\
examples:
  hsgd data upload data/train s3://bucket/train
  AWS_ENDPOINT_URL=https://minio.example.org hsgd data upload data/train s3://bucket/train

Credentials, region and endpoint are those that AWS's own tools use. The dataset is there when its
index is, which comes last. If the command is killed, give it again: what is there stays.
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
    _add_upload(commands)
    info = commands.add_parser(
        "info",
        help="show fields, slabs, sizes, and how a dataset will be read",
        description="Show what a slab folder or an HDF5 file holds and how it will be read.",
    )
    info.add_argument("path", metavar="PATH", help="slab folder or HDF5 file")
    _add_fields(info)
    info.set_defaults(command_function=_info)
    verify = commands.add_parser(
        "verify",
        help="check every block of a slab folder against its checksum",
        description="Check every block against its checksum; exit code 1 when one is damaged.",
    )
    verify.add_argument("path", metavar="PATH", help="slab folder")
    verify.add_argument("--threads", type=int, default=4, metavar="N", help="default: 4")
    verify.add_argument("--quiet", action="store_true", help="no progress bar")
    verify.set_defaults(command_function=_verify)
    bench = commands.add_parser(
        "bench",
        help="measure how fast this machine reads a dataset",
        description="Read a dataset as a training loop would, once in each order.",
    )
    bench.add_argument("path", metavar="PATH", help="slab folder or HDF5 file")
    bench.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: 64")
    bench.add_argument("--threads", type=int, default=4, metavar="N", help="default: 4")
    bench.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="at most for each order"
    )
    _add_fields(bench)
    bench.set_defaults(command_function=_bench)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="make a slab folder from NumPy or HDF5 files, images, tar files or tables",
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
    convert.add_argument(
        "--image-size", type=int, metavar="N", help="scale and cut images to N x N (default: as is)"
    )
    convert.add_argument(
        "--encoded",
        action="store_true",
        help="keep images as the bytes of their files, of any size; the loader decodes them",
    )
    convert.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json: token ids (field tokens) instead of text; needs tokenizers",
    )
    convert.add_argument(
        "--compress",
        choices=COMPRESSIONS,
        help="smaller slabs, slower to read (default: as is; lz4 and zstd need hdf5plugin and "
        "numcodecs)",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace the slabs in DST")
    convert.add_argument(
        "--to",
        metavar="URL",
        help="then send DST to s3://BUCKET/PREFIX, as hsgd data upload does",
    )
    convert.add_argument("--quiet", action="store_true", help="no progress bar, no table")
    convert.set_defaults(command_function=_convert)


def _add_upload(commands: Any) -> None:
    upload = commands.add_parser(
        "upload",
        help="send a slab folder to S3",
        description="Send the slab folder SRC to s3://BUCKET/PREFIX: slabs first, the index last.",
        epilog=_UPLOAD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    upload.add_argument("source", metavar="SRC", help="slab folder")
    upload.add_argument("target", metavar="URL", help="s3://BUCKET/PREFIX")
    upload.add_argument(
        "--threads", type=int, default=8, metavar="N", help="files at once (default: 8)"
    )
    upload.add_argument(
        "--retry-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long a request that fails is sent again (default: 60)",
    )
    upload.add_argument("--overwrite", action="store_true", help="replace another dataset there")
    upload.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    upload.set_defaults(command_function=_upload)


def _add_fields(parser: Any) -> None:
    parser.add_argument(
        "--fields",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="A,B",
        help="names of the fields to use (default: all)",
    )


def _convert(options: argparse.Namespace) -> int:
    comm = _launched_together()
    if is_url(options.target):
        raise ValueError(
            f"{options.target}: DST is a folder; to send it there as well: hsgd data convert SRC "
            "DST --to URL"
        )
    if options.to is not None:
        check_target(options.to)
    with _warnings_as_lines():
        folders = convert_to_slabs(
            options.source,
            options.target,
            fields=options.fields,
            num_slabs=options.slabs,
            seed=options.seed,
            permute=not options.keep_order,
            overwrite=options.overwrite,
            test_fraction=options.test_fraction,
            image_size=options.image_size,
            encoded=options.encoded,
            tokenizer=options.tokenizer,
            compress=options.compress,
            comm=comm,
            progress=not options.quiet,
        )
    if comm is not None and comm.rank:
        return 0
    if not options.quiet:
        _show("\n\n".join(describe(open_map(folder)) for folder in folders))
    if options.to is not None:
        for folder in folders:
            inside = folder.relative_to(Path(options.target).absolute()).as_posix()
            url = options.to if inside == "." else child_url(options.to.rstrip("/"), inside)
            try:
                _send(str(folder), url, options, threads=8, retry_s=60.0)
            except DataError as error:
                raise DataError(
                    f"{error}; {folder} is whole, go on with: hsgd data upload {folder} {url}"
                ) from None
    return 0


def _upload(options: argparse.Namespace) -> int:
    _send(options.source, options.target, options, threads=options.threads, retry_s=options.retry_s)
    return 0


def _send(
    folder: str, url: str, options: argparse.Namespace, *, threads: int, retry_s: float
) -> None:
    done = upload_slabs(
        folder,
        url,
        overwrite=options.overwrite,
        threads=threads,
        retry_s=retry_s,
        progress=not options.quiet,
    )
    if not options.quiet:
        _show(
            f"{url}: {done.sent} objects sent, {bytes_text(done.sent_bytes)}; {done.kept} were "
            "there already"
        )


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Warnings of the block as one line each on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(
            f"hsgd: warning: {message}", file=sys.stderr
        )
        yield


def _show(text: str) -> None:
    """Print, with "?" for what the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _launched_together() -> Any:
    """The communicator of all ranks under mpirun; None for a single process."""
    if not any(int(os.environ.get(name, "1")) > 1 for name in _WORLD_SIZES):
        return None
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtra(
            f"converting with several ranks needs mpi4py ({error}); pip install mpi4py"
        ) from None
    return MPI.COMM_WORLD


def _info(options: argparse.Namespace) -> int:
    _show(describe(open_map(options.path, options.fields)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    if options.threads < 1:
        raise ValueError(f"--threads {options.threads}; use at least 1")
    data = open_map(options.path)
    total = data.nbytes
    damaged = 0
    with Progress(total, f"verify {options.path}", show=not options.quiet) as advance:
        for line in find_damage(data, threads=options.threads, advance=advance):
            _show(line)
            damaged += 1
    if damaged:
        print(f"{damaged} damaged blocks; restore these files, or convert the data again")
        return 1
    _show(f"{data.path}: {bytes_text(total)} in {len(data.slabs)} slabs, all checksums right")
    return 0


def _bench(options: argparse.Namespace) -> int:
    rows = [("order", "samples/s", "GB/s", "first batch")]
    fields = options.fields
    if fields is None:  # info says what is left out
        fields = [spec.name for spec in open_map(options.path).fields]
    orders: tuple[tuple[Shuffle, str], ...] = (("none", "in order"), ("block", "shuffled"))
    for shuffle, title in orders:
        loader = PartitionedLoader(
            options.path,
            options.batch_size,
            rank=0,
            world_size=1,
            shuffle=shuffle,
            fields=fields,
            as_numpy=True,  # reads types that torch does not have
            read=ReadOptions(threads=options.threads),
        )
        began = time.perf_counter()
        first_s, samples = 0.0, 0
        for batch in loader:
            first_s = first_s or time.perf_counter() - began
            samples += len(next(iter(batch.values())))
            if time.perf_counter() - began > options.seconds:
                break
        seconds = time.perf_counter() - began
        rate = loader.metrics()["bytes_read"] / seconds / 1e9
        rows.append((title, f"{samples / seconds:,.0f}", f"{rate:.2f}", f"{first_s * 1e3:.0f} ms"))
    _show("\n".join([str(options.path), *_table(rows)]))
    return 0


def describe(data: DataMap) -> str:
    """A table of the fields, below a line on the whole."""
    size = bytes_text(data.nbytes)
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
    read_by = data.read_by()
    rows = [("field", "shape", "dtype", "size", "read by")]
    for spec in data.fields:
        how = read_by[spec.name].replace("h5py:", "h5py, because:")
        how += ", around HDF5" if how.startswith("preadv") else ""
        total = bytes_text(data.field_bytes(spec))
        shape = f"({', '.join(['any', *map(str, spec.shape)])})" if spec.ragged else str(spec.shape)
        rows.append((spec.name, shape, str(spec.dtype), total, how))
    lines = [data.path, f"  {kind}", *_table(rows)]
    lines += [f"  no field: {name} ({why})" for name, why in data.left_out.items()]
    if header is not None:
        lines.append(f"  source sha256 {header.source_digest}, uuid {header.dataset_uuid}")
        lines += _slab_picture(data)
    return "\n".join(lines)


def _slab_picture(data: DataMap) -> list[str]:
    """All slabs as one line of bars: as high as their samples, a dot where HDF5 has to read."""
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


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns, a rule below the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "  " + "  ".join("-" * width for width in widths), *lines[1:]]
