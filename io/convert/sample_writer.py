"""SampleWriter: makes a slab folder of samples that a program writes one by one or in batches."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hsgd.base.closing import Closing
from hsgd.errors import DataError

from ..format.ragged import Block, Ragged, offsets_of, ragged_of
from ..format.supported_dtype import NUMBERS
from .convert_to_slabs import convert_to_slabs
from .staged_folder import check_target

__all__ = ["SampleWriter"]

_ENDING = ".samples"
_BUFFER_BYTES = 1 << 20


class _Waiting:
    """The samples of one field in a file; dtype and shape are those of the first sample."""

    def __init__(self, path: Path, name: str, values: NDArray[Any], *, ragged: bool) -> None:
        self.name, self.ragged = name, ragged
        self.dtype, self.shape = values.dtype.newbyteorder("="), values.shape[1:]
        self._path = path
        self._lengths: list[NDArray[np.int64]] = []
        self._rows = 0
        self._file: IO[bytes] = path.open("wb", buffering=_BUFFER_BYTES)

    def check(self, values: NDArray[Any]) -> None:
        """Raise ValueError or TypeError for values that do not fit the first sample."""
        if values.shape[1:] != self.shape:
            raise ValueError(
                f"field {self.name!r} has shape {values.shape[1:]}, in the first sample it had "
                f"{self.shape}; give all one shape, or name the field in ragged="
            )
        if not values.size or np.can_cast(values.dtype, self.dtype, "safe"):
            return
        kept = np.can_cast(values.dtype, self.dtype, "same_kind")
        if kept and self.dtype.kind in "biu":
            kept = bool((values.astype(self.dtype) == values).all())
        elif kept:
            with np.errstate(over="ignore"):
                kept = bool((np.isfinite(values.astype(self.dtype)) == np.isfinite(values)).all())
        if not kept:
            raise TypeError(
                f"field {self.name!r} is {values.dtype}, in the first sample it was {self.dtype}, "
                "which does not hold its values; give all one dtype"
            )

    def append(self, values: NDArray[Any], lengths: NDArray[np.int64] | None) -> None:
        self._file.write(np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data)
        self._rows += len(values)
        if lengths is not None:
            self._lengths.append(lengths)

    def block(self) -> Block:
        self._file.flush()
        shape = (self._rows, *self.shape)
        mapped = bool(np.prod(shape))
        values: NDArray[Any] = (
            np.memmap(self._path, self.dtype, "r", shape=shape)
            if mapped
            else np.empty(shape, self.dtype)
        )
        return Ragged(values, offsets_of(np.concatenate(self._lengths))) if self.ragged else values

    def close(self) -> None:
        self._file.close()


class SampleWriter(Closing):
    """Writer of samples, in any order; close(), or the end of `with`, makes a slab folder.

    Local; one process writes. Until close() the samples lie in a hidden folder beside the target,
    so the disk holds them twice. If the process is killed, the next writer of that target on the
    same host removes this folder. num_slabs, seed, permute, compress and overwrite are as for
    convert_to_slabs().

    Args:
        target: the folder; it appears complete or not at all. If an error ends the `with` block, it
            is not made.
        ragged: fields whose samples differ in length along the first axis; they also take bytes.

    Raises:
        DataError: the target exists (without overwrite), or the disk is full.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        ragged: Sequence[str] = (),
        num_slabs: int | None = None,
        seed: int = 0,
        permute: bool = True,
        compress: str | None = None,
        overwrite: bool = False,
    ) -> None:
        if isinstance(ragged, str):
            raise TypeError(f"ragged={ragged!r} is one string; use a list of names")
        self._target = Path(target).absolute()
        check_target(self._target, overwrite)
        self._ragged, self._fields = frozenset(ragged), dict[str, _Waiting]()
        self._options: dict[str, Any] = {
            "num_slabs": num_slabs,
            "seed": seed,
            "permute": permute,
            "compress": compress,
            "overwrite": overwrite,
        }
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._folder, lock = _folder_beside(self._target)
        self._remove = weakref.finalize(self, _remove, self._folder, lock, os.getpid())
        self._count = 0
        self._failed = False

    def __len__(self) -> int:
        return self._count

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write one sample: a value or an array for each field, with the same fields each time.

        Raises ValueError or TypeError if it does not fit the first sample; then nothing is written.
        """
        batch: dict[str, Any] = {}
        for name, value in sample.items():
            array = _array_of(name, value)
            if name in self._ragged and not array.ndim:
                raise ValueError(f"field {name!r} is ragged and got one value; give an array")
            batch[name] = [array] if name in self._ragged else array[None]
        self.write_batch(batch)

    def write_batch(self, batch: Mapping[str, Any]) -> None:
        """Write several samples: arrays, for ragged fields Ragged or lists of arrays."""
        if not self._remove.alive:
            raise ValueError(f"{self._target}: this writer is closed; make another")
        if self._failed:
            raise DataError(
                f"{self._target}: an earlier sample was written in part; write all samples again"
            )
        fields = {name: self._taken(name, value) for name, value in batch.items()}
        expected = list(self._fields) or [*fields, *sorted(self._ragged - set(fields))]
        if not fields or sorted(fields) != sorted(expected):
            raise ValueError(
                f"a sample has the fields {', '.join(fields) or 'none'}; expected: "
                f"{', '.join(expected) or 'one at least'}"
            )
        counts = {name: count for name, (_, _, count) in fields.items()}
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ValueError(f"numbers of samples differ: {text}; give each sample all fields")
        if not self._fields:
            self._fields = {
                name: _Waiting(
                    self._folder / str(number), name, values, ragged=name in self._ragged
                )
                for number, (name, (values, _, _)) in enumerate(fields.items())
            }
        for name, (values, _, _) in fields.items():
            self._fields[name].check(values)
        self._failed = True  # until the sample is written to all fields
        try:
            for name, (values, lengths, _) in fields.items():
                self._fields[name].append(values, lengths)
        except OSError as error:
            raise DataError(
                f"{self._folder}: writing failed: {error.strerror or error}; free some space, and "
                "write all samples again"
            ) from error
        self._failed = False
        self._count += next(iter(counts.values()))

    def close(self) -> None:
        """Make the slab folder, once; raise ValueError if no sample was written.

        After an error the samples are kept while the program runs, and close() can be called again.
        """
        if not self._remove.alive:
            return
        if self.left_by_error:
            self.discard()
            return
        if self._failed:
            self.discard()
            raise DataError(f"{self._target}: a sample was written in part, so no slabs were made")
        if not self._count:
            self.discard()
            raise ValueError(f"{self._target}: no sample was written")
        arrays = {name: field.block() for name, field in self._fields.items()}
        convert_to_slabs(arrays, self._target, **self._options)
        del arrays
        self.discard()

    def discard(self) -> None:
        """Delete the samples without making a slab folder."""
        for field in self._fields.values():
            with contextlib.suppress(OSError):  # the rest need not be written
                field.close()
        self._remove()

    def _taken(self, name: str, value: Any) -> tuple[NDArray[Any], NDArray[np.int64] | None, int]:
        """Return values, the lengths of ragged samples (or None), and the number of samples."""
        if name not in self._ragged:
            array = _array_of(name, value)
            if not array.ndim:
                raise ValueError(f"field {name!r} got one value for a batch; use write()")
            return array, None, len(array)
        if not isinstance(value, Ragged):
            parts = [_array_of(name, part) for part in value]
            if not parts:
                raise ValueError(f"field {name!r}: a batch of no samples")
            if any(not part.ndim or part.shape[1:] != parts[0].shape[1:] for part in parts):
                raise ValueError(f"field {name!r}: only the first axis of its arrays may differ")
            filled = {part.dtype for part in parts if part.size} or {parts[0].dtype}
            value = ragged_of(parts, parts[0].shape[1:], np.result_type(*filled))
        offsets = np.asarray(value.offsets, np.int64)
        values = np.asarray(value.values)[offsets[0] : offsets[-1]]
        return values, np.diff(offsets), len(offsets) - 1


def _folder_beside(target: Path) -> tuple[Path, int]:
    """Make a hidden folder; return it with the descriptor of its lock. Remove abandoned ones."""
    prefix = f".{target.name}.{platform.node()}."  # hosts may not see each other's locks
    for entry in target.parent.iterdir():
        if entry.name.startswith(prefix) and entry.name.endswith(_ENDING):
            _remove_abandoned(entry)
    while True:
        folder = Path(tempfile.mkdtemp(_ENDING, prefix, target.parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another writer removed it, see below
            continue
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)  # another writer removed it as abandoned, before it was locked


def _remove_abandoned(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # already removed, or another user's
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its writer lives, or the file system has no locks
        pass
    finally:
        os.close(descriptor)


def _remove(folder: Path, lock: int, pid: int) -> None:
    """Remove the folder, except in a forked child, whose parent goes on writing."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _array_of(name: str, value: Any) -> NDArray[Any]:
    """Return an array; of bytes, an array over them."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    array = np.asarray(value)
    if array.dtype.kind not in NUMBERS:
        raise TypeError(f"field {name!r} is {array.dtype}; only numbers, bool and bytes are taken")
    return array
