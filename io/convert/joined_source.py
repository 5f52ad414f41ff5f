"""JoinedSource: the files of a folder, one after the other, as one source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hsgd.errors import DataError

from ..format.attributes import Attributes, common_attributes
from ..format.packing_of import Packing, packing_text
from ..format.ragged import Block
from ..format.slab_folder import FieldSpec
from .source import Source

__all__ = ["HDF5_SUFFIXES", "JoinedSource"]

HDF5_SUFFIXES = frozenset({".h5", ".hdf5", ".hdf", ".he5"})


class JoinedSource(Source):
    """The samples of all `parts` (path, source), in their order; all have equal fields."""

    def __init__(self, parts: Sequence[tuple[Path, Source]]) -> None:
        first_path, first = parts[0]
        self._parts = [source for _, source in parts]
        self.specs, self.text_fields = first.specs, first.text_fields
        self.num_samples = sum(source.num_samples for source in self._parts)
        self.left_out: dict[str, str] = {}
        self.unwritten: dict[str, str] = {}
        self.packing = first.packing
        self.notes = [note for source in self._parts for note in source.notes]
        for path, source in parts:
            self.left_out |= {f"{path.name}:{name}": why for name, why in source.left_out.items()}
            of_part = source.unwritten.items()
            self.unwritten |= {f"{path.name}:{name}": what for name, what in of_part}
            _check_packing((first_path, self.packing), (path, source.packing))
            if source.specs != self.specs:
                raise DataError(
                    f"{path}: its fields are {_described(source.specs)}, those of "
                    f"{first_path.name} {_described(self.specs)}; convert them apart, or choose "
                    "equal ones with --fields"
                )

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        for source in self._parts:
            if start < source.num_samples:
                yield from source.stream(spec, rows, start)
            start = max(0, start - source.num_samples)

    def identity(self) -> str:
        digest = hashlib.sha256()
        for source in self._parts:
            digest.update(source.identity().encode())
        return digest.hexdigest()

    def attributes(self) -> Attributes:
        return common_attributes([source.attributes() for source in self._parts])


def _check_packing(first: tuple[Path, Packing], other: tuple[Path, Packing]) -> None:
    """Raise DataError if equal stored values mean different values in the two files."""
    for name in sorted({*first[1], *other[1]}):
        found = [packing.get(name, {}) for _, packing in (first, other)]
        if found[0] != found[1]:
            texts = [packing_text(values) or "nothing" for values in found]
            raise DataError(
                f"{other[0]}: field {name!r} is packed with {texts[1]}, that of {first[0].name} "
                f"with {texts[0]}, so that equal values stand for different ones; unpack both, or "
                "convert them apart"
            )


def _described(specs: Sequence[FieldSpec]) -> str:
    return ", ".join(
        f"{spec.name} {spec.dtype} {'of any length' if spec.ragged else spec.shape}"
        for spec in specs
    )
