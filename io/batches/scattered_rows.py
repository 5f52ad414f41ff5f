"""ScatteredRows: fields whose rows lie apart in the file, each at a position of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..format.data_map import SlabMap
from ..format.slab_folder import FieldSpec
from ..order.epoch_order import IntArray, StreamPiece, concatenate_ranges
from ..reading.row_copies import Addresses, BatchRows, addresses_of
from .ragged_placer import PlacedRows

__all__ = ["ScatteredRows"]


class ScatteredRows:
    """The positions of rows of some fields of a dataset.

    Args:
        slabs: of the dataset.
        fields: of the batches.
        in_file: by slab and field, whether libhsgd_io reads it from the file; other fields are left
            out.
        field_offsets: by name, distance of a batch's rows from its address.
    """

    def __init__(
        self,
        slabs: Sequence[SlabMap],
        fields: Sequence[FieldSpec],
        in_file: NDArray[np.bool_],
        field_offsets: Mapping[str, int],
    ) -> None:
        self._rows: dict[int, tuple[IntArray, int, int]] = {}  # by field: positions, place, bytes
        for column, spec in enumerate(fields):
            found = [slab.extents[spec.name].positions for slab in slabs]
            if all(found) and in_file[:, column].all():
                parts = [np.frombuffer(each, np.int64) for each in found]
                positions = parts[0] if len(parts) == 1 else np.concatenate(parts)
                self._rows[column] = positions, field_offsets[spec.name], spec.row_bytes

    def one_by_one(self, piece: StreamPiece) -> StreamPiece:
        """Return a piece that reads the same rows, each as a range of its own if any lie apart."""
        if not self._rows:
            return piece
        rows = concatenate_ranges(piece.starts, piece.counts)
        return StreamPiece(rows, np.ones_like(rows), piece.places, piece.stream_rows)

    def place(
        self, piece: StreamPiece, to_rows: BatchRows, bases: Addresses
    ) -> dict[int, PlacedRows]:
        """Return by field the places of the rows of such a piece, for batches at `bases`."""
        return {
            column: PlacedRows(
                positions[piece.starts],
                addresses_of(to_rows, bases, field_offset, row_bytes),
                np.full(len(piece.starts), row_bytes),
                {},
            )
            for column, (positions, field_offset, row_bytes) in self._rows.items()
        }
