"""slot_layout: where the rows of several fields lie in one slot of a ring or a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..format.slab_folder import OFFSETS, FieldSpec

__all__ = ["SlotLayout", "slot_layout"]

_LINE = 64
_OFFSET_BYTES = 8  # int64


@dataclass(frozen=True)
class SlotLayout:
    """The layout of a slot; offsets of ragged fields lie before their values."""

    offsets: dict[str, int]  # of fields, and of the offsets of ragged fields (FIELD/offsets)
    nbytes: int  # of all


def slot_layout(
    specs: Sequence[FieldSpec], rows: int, elements: Mapping[str, int] | None = None
) -> SlotLayout:
    """Lay out `rows` samples; `elements` is the room for all elements of each ragged field."""
    offsets: dict[str, int] = {}
    end = 0

    def add(name: str, nbytes: int) -> None:
        nonlocal end
        offsets[name] = end
        end += -(-nbytes // _LINE) * _LINE

    for spec in specs:
        if spec.ragged:
            add(f"{spec.name}/{OFFSETS}", _OFFSET_BYTES * (rows + 1))
        add(spec.name, spec.row_bytes * ((elements or {})[spec.name] if spec.ragged else rows))
    return SlotLayout(offsets, end)
