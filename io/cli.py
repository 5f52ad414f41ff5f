"""The commands of the reader: hsgd data convert | upload | info | verify | bench.

hsgd/tools/cli/commands.py calls `add_parser`, and prints errors that are raised as one line.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hsgd.base.bytes_text import bytes_text
from hsgd.errors import DataError, LaunchError
from hsgd.jobs.environment.launched_once import launched_once

from .convert.convert_to_slabs import convert_to_slabs
from .convert.find_damage import find_damage
from .convert.progress import Progress
from .convert.upload_slabs import check_target, upload_slabs
from .dataset_summary import describe, document, table
from .format.chunk_compression import COMPRESSIONS
from .format.index_checksum import unchecked_index
from .layouts.open_map import open_map, open_undamaged
from .loader import PartitionedLoader
from .needed_for import needed_for
from .options import ReadOptions, Shuffle
from .remote.urls import child_url, is_url

__all__ = ["add_parser"]

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
                         their names; every dataset is a field, or every group a sample
  photos/                images as photos/CLASS/x.png: fields image and label
  data.tar | shards/     samples in WebDataset's form, in one tar file or a folder of them
  t.csv | t.parquet      a table; every column of numbers (or of lists of numbers) is a field, of
                         Parquet also text that --fields names; or a folder of Parquet files
  a.txt | a.jsonl        documents: lines, or the "text" of each line of JSON; in a folder of .txt
                         files, each file is a document; field text, UTF-8
  digits                 scikit-learn's digits; makes DST/train and DST/test

examples:
  hsgd data convert train.npz data/train
  hsgd data convert old.h5 data/train --fields image,label --seed 7
  hsgd data convert digits data/digits --overwrite
  hsgd data convert photos/ data/train --encoded
  hsgd data convert shards/ data/train --fields text --tokenizer tokenizer.json
  mpirun -n 4 hsgd data convert photos/ data/train --image-size 64
  hsgd data convert train.npz data/train --to s3://bucket/train

The conversion puts samples in a random order once. The loader then shuffles blocks in every epoch;
together this is as good as a full shuffle. DST appears only when it is complete. If the command is
killed, run it again: it continues about where it stopped.
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
    add = _command(
        commands,
        "info",
        _info,
        "show fields, slabs, sizes, and how a dataset will be read",
        "Show what a slab folder or an HDF5 file holds and how it will be read.",
    )
    add("path", metavar="PATH", help="slab folder or HDF5 file")
    add("--fields", **_FIELDS)
    add = _command(
        commands,
        "verify",
        _verify,
        "check every block of a slab folder against its checksum",
        "Check every block against its checksum; exit code 1 when one is damaged.",
    )
    add("path", metavar="PATH", help="slab folder")
    add("--threads", type=int, default=4, metavar="N", help="reading threads (default: 4)")
    add("--quiet", action="store_true", help="no progress bar")
    add = _command(
        commands,
        "bench",
        _bench,
        "measure how fast this machine reads a dataset",
        "Read a dataset as a training loop would, once in each order.",
    )
    add("path", metavar="PATH", help="slab folder or HDF5 file")
    add("--batch-size", type=int, default=64, metavar="N", help="samples per batch (default: 64)")
    add("--threads", type=int, default=4, metavar="N", help="reading threads (default: 4)")
    limit = "time limit of each order (default: 10)"
    add("--seconds", type=float, default=10.0, metavar="S", help=limit)
    add("--fields", **_FIELDS)


_FIELDS: dict[str, Any] = {
    "type": lambda text: [name.strip() for name in text.split(",")],
    "metavar": "A,B",
    "help": "names of the fields to use (default: all)",
}


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    line: str,
    description: str,
    examples: str | None = None,
) -> Callable[..., Any]:
    """Add a command with the option --json; return the function that adds its other arguments."""
    parser = commands.add_parser(
        name,
        help=line,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(command_function=run)
    add: Callable[..., Any] = parser.add_argument
    return add


def _add_convert(commands: Any) -> None:
    add = _command(
        commands,
        "convert",
        _convert,
        "make a slab folder from NumPy or HDF5 files, images, tar files or tables",
        "Convert SRC to the slab folder DST.",
        _CONVERT_EXAMPLES,
    )
    add("source", metavar="SRC", help="what to convert, see below")
    add("target", metavar="DST", help="folder to make")
    add("--fields", **_FIELDS)
    slabs = "number of slab files (default: about 128 MiB each, at least 16)"
    add("--slabs", type=int, metavar="N", help=slabs)
    add("--seed", type=int, default=0, help="seed of the random order (default: 0)")
    keep = "keep the order of SRC instead of shuffling"
    add("--keep-order", action="store_true", help=keep)
    test = "digits only: part of each class that goes to DST/test (default: 0.2)"
    add("--test-fraction", type=float, default=0.2, metavar="F", help=test)
    size = "scale and cut images to N x N (default: as is)"
    add("--image-size", type=int, metavar="N", help=size)
    encoded = "keep images as the bytes of their files, of any size; the loader decodes them"
    add("--encoded", action="store_true", help=encoded)
    tokens = "a tokenizer.json: token ids (field tokens) instead of text; needs tokenizers"
    add("--tokenizer", metavar="FILE", help=tokens)
    smaller = "smaller slabs, slower to read (default: as is; lz4 and zstd need hdf5plugin)"
    add("--compress", choices=COMPRESSIONS, help=smaller)
    fill = "HDF5: take fill values for rows that nobody ever wrote (default: an error)"
    add("--fill-unwritten", action="store_true", help=fill)
    add("--overwrite", action="store_true", help="replace the slabs in DST")
    send = "then send DST to s3://BUCKET/PREFIX, as hsgd data upload does"
    add("--to", metavar="URL", help=send)
    add("--quiet", action="store_true", help="no progress bar, no table")


def _add_upload(commands: Any) -> None:
    add = _command(
        commands,
        "upload",
        _upload,
        "send a slab folder to S3",
        "Send the slab folder SRC to s3://BUCKET/PREFIX: slabs first, the index last.",
        _UPLOAD_EXAMPLES,
    )
    add("source", metavar="SRC", help="slab folder")
    add("target", metavar="URL", help="s3://BUCKET/PREFIX")
    add("--threads", type=int, default=8, metavar="N", help="files at once (default: 8)")
    retry = "how long a request that fails is sent again (default: 60)"
    add("--retry-s", type=float, default=60.0, metavar="S", help=retry)
    add("--overwrite", action="store_true", help="replace another dataset there")
    add("--quiet", action="store_true", help="no progress bar, no summary")


def _convert(options: argparse.Namespace) -> int:
    comm = _launched_together()
    if is_url(options.target):
        raise ValueError(
            f"{options.target}: DST is a folder; to send it there as well: hsgd data convert SRC "
            "DST --to URL"
        )
    if options.to is not None:
        check_target(options.to, overwrite=options.overwrite)
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
            fill_unwritten=options.fill_unwritten,
            comm=comm,
            progress=not options.quiet,
        )
    if comm is not None and comm.rank:
        return 0
    shown = options.json or not options.quiet
    made = [open_map(folder) for folder in folders if shown]
    if shown and not options.json:
        _show("\n\n".join(map(describe, made)))
    sent = []
    if options.to is not None:
        for folder in folders:
            inside = folder.relative_to(Path(options.target).absolute()).as_posix()
            url = options.to if inside == "." else child_url(options.to.rstrip("/"), inside)
            try:
                sent.append(_send(str(folder), url, options, threads=8, retry_s=60.0))
            except DataError as error:
                again = ["--overwrite"] if options.overwrite else []
                words = ["hsgd", "data", "upload", str(folder), url, *again]
                raise DataError(
                    f"{error}; {folder} is whole, go on with: {shlex.join(words)}"
                ) from None
    if options.json:
        _show(json.dumps({"datasets": [document(data) for data in made], "sent": sent}, indent=2))
    return 0


def _upload(options: argparse.Namespace) -> int:
    limits = {"threads": options.threads, "retry_s": options.retry_s}
    sent = _send(options.source, options.target, options, **limits)
    if options.json:
        _show(json.dumps(sent, indent=2))
    return 0


def _send(
    folder: str, url: str, options: argparse.Namespace, *, threads: int, retry_s: float
) -> dict[str, object]:
    """Upload a folder and return the figures for --json; without --json print them."""
    done = upload_slabs(
        folder,
        url,
        overwrite=options.overwrite,
        threads=threads,
        retry_s=retry_s,
        progress=not options.quiet,
    )
    if not (options.quiet or options.json):
        _show(
            f"{url}: {done.sent} objects sent, {bytes_text(done.sent_bytes)}; {done.kept} were "
            "there already"
        )
    return {"path": folder, "url": url, **asdict(done)}


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(
            f"hsgd: warning: {message}", file=sys.stderr
        )
        yield


def _show(text: str) -> None:
    """Print `text`, with "?" for characters that the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _launched_together() -> Any:
    """Return the communicator of all ranks under mpirun; None for a single process."""
    found = launched_once()
    if found is None or found.is_alone:
        return None
    with needed_for("converting with several ranks", "mpi4py"):
        from mpi4py import MPI
    if MPI.COMM_WORLD.size == 1:
        raise LaunchError(
            f"{found.what} started this process beside others, but mpi4py's MPI sees this one "
            "alone, so each would convert everything; start with the mpirun of that MPI, or, to "
            f"convert in one process, unset {found.names}"
        )
    return MPI.COMM_WORLD


def _info(options: argparse.Namespace) -> int:
    data = open_map(options.path, options.fields)
    _show(json.dumps(document(data), indent=2) if options.json else describe(data))
    return 0


def _verify(options: argparse.Namespace) -> int:
    if options.threads < 1:
        raise ValueError(f"--threads {options.threads}; use at least 1")
    data, refused = open_undamaged(options.path)
    total, slabs = data.nbytes, len(data.slabs) + len(refused)
    damaged = list(refused)
    if not options.json:
        for line in refused:
            _show(line)
    with Progress(total, f"verify {options.path}", show=not options.quiet) as advance:
        for line in find_damage(data, threads=options.threads, advance=advance):
            damaged.append(line)
            if not options.json:
                _show(line)
    unchecked = [] if is_url(data.path) else unchecked_index(data.path)
    if options.json:
        found = {"path": data.path, "bytes": total, "slabs": slabs, "damaged": damaged}
        found["unchecked"] = unchecked
        _show(json.dumps(found, indent=2))
    elif damaged:
        counts = {"slabs": len(refused), "blocks": len(damaged) - len(refused)}
        kinds = " and ".join(
            f"{count} damaged {what if count > 1 else what[:-1]}"
            for what, count in counts.items()
            if count
        )
        print(f"{kinds}; restore these files, or convert the data again")
    else:
        _show(f"{data.path}: {bytes_text(total)} in {slabs} slabs, all checksums right")
    for line in unchecked if not options.json else ():
        _show(line)
    return 1 if damaged else 0


def _bench(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
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
        found.append(
            {
                "order": title,
                "samples_per_s": samples / seconds,
                "bytes_per_s": loader.metrics()["bytes_read"] / seconds,
                "first_batch_s": first_s,
            }
        )
    if options.json:
        _show(json.dumps({"path": str(options.path), "orders": found}, indent=2))
        return 0
    rows = [("order", "samples/s", "GB/s", "first batch")]
    for row in found:
        rate, first_ms = row["bytes_per_s"] / 1e9, row["first_batch_s"] * 1e3
        speed = f"{row['samples_per_s']:,.0f}"
        rows.append((row["order"], speed, f"{rate:.2f}", f"{first_ms:.0f} ms"))
    _show("\n".join([str(options.path), *table(rows)]))
    return 0
