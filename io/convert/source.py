"""Source: the base class of all that can be converted."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hsgd.errors import DataError

from ..format.attributes import Attributes
from ..format.packing_of import Packing
from ..format.ragged import Block
from ..format.slab_folder import FieldSpec
from ..order.epoch_order import IntArray

__all__ = ["Source", "chosen", "identity_of_files", "read_file", "reading"]

_NOTHING: Mapping[str, Any] = {}
_T = TypeVar("_T")


class Source(ABC):
    """Named fields with the same number of rows, read from the first row to the last."""

    specs: tuple[FieldSpec, ...]  # with dtypes in native byte order
    num_samples: int  # rows of every field
    files: Sequence[Path]  # that are read
    text_fields: frozenset[str] = frozenset()  # fields that hold text
    notes: Sequence[str] = ()  # lines to warn with
    left_out: Mapping[str, str] = _NOTHING  # name -> why it is not a field
    left_out_are = "no fields, so"
    unwritten: Mapping[str, str] = _NOTHING  # field -> rows that were never written
    packing: Packing = _NOTHING  # of fields whose stored values stand for others

    @abstractmethod
    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        """Yield rows from `start` on in blocks of at most `rows`, each valid until the next."""

    def identity(self) -> str:
        """Return text that changes if the source does: by default a digest of its files."""
        return identity_of_files(self.files)

    def lengths(self, spec: FieldSpec) -> IntArray | None:
        """Return the elements of each sample of a ragged field; None if they must be read."""
        return None

    def attributes(self) -> Attributes:
        """Return the attributes that users gave the file and its fields."""
        return Attributes()


def chosen(
    known: Mapping[str, _T], fields: Iterable[str] | None, there: Iterable[str] | None = None
) -> dict[str, _T]:
    """Return the known fields, or those named; for others raise ValueError, which lists `there`."""
    names = list(known if fields is None else fields)
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(known if there is None else there)
        raise ValueError(f"no field {', '.join(unknown)}; there are: {listed}")
    return {name: known[name] for name in names}


def identity_of_files(paths: Iterable[Path]) -> str:
    """Return a digest of paths, sizes and modification times."""
    digest = hashlib.sha256()
    for path in paths:
        with reading(path):
            status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors of the system for a file inside the block into DataError."""
    try:
        yield
    except DataError:  # an OSError as well
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def read_file(path: Path) -> bytes:
    """Return the bytes of a file. Raises DataError."""
    with reading(path):
        return path.read_bytes()
