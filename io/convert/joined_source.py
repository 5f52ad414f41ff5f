"""JoinedSource: the files of a folder, one after the other, as one source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..format.attributes import Attributes, common_attributes
from ..format.ragged import Block
from ..format.slab_folder import FieldSpec
from ..layouts.joined_map import check_alike
from .source import Source

__all__ = ["JoinedSource"]


class JoinedSource(Source):
    """The samples of all `parts` (path, source), in their order; all have equal fields."""

    def __init__(self, parts: Sequence[tuple[Path, Source]]) -> None:
        first_path, first = parts[0]
        self._parts, self._folder = [source for _, source in parts], first_path.parent
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
            check_alike(
                (first_path, self.specs, self.packing), (path, source.specs, source.packing)
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
        return common_attributes([source.attributes() for source in self._parts], self._folder)
