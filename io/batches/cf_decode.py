"""CfDecode: turns packed values into those that they stand for, by the conventions of netCDF.

Source: CF conventions 1.11, sections 2.5.1 (missing data) and 8.1 (packed data); NUG, Appendix A
(_Unsigned). Results are float32 for stored integers of up to two bytes without an offset and for
floats of up to four, otherwise float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..format.data_map import DataMap
from ..format.packing_of import FILLS, packing_text
from ..format.ragged import Ragged
from ..format.slab_folder import FieldSpec

__all__ = ["CfDecode"]

_KNOWN = {"scale_factor", "add_offset", "_Unsigned", *FILLS}


@dataclass(frozen=True)
class _Form:
    """How the values of one field are decoded."""

    stored: np.dtype[Any]  # without a sign if it is _Unsigned
    result: np.dtype[Any]
    scale: float
    offset: float
    fills: NDArray[Any]


class CfDecode:
    """The transform of a loader with decode="cf"; `transform` comes after it.

    Missing values become NaN. Raises ValueError for attributes that CF does not define, or that are
    no numbers of the field's type.
    """

    def __init__(self, data: DataMap, transform: Callable[[Any], Any] | None) -> None:
        self._transform = transform
        specs = {spec.name: spec for spec in data.fields}
        self._forms = {
            name: _form(specs[name], values)
            for name, values in data.packing.items()
            if name in specs
        }

    def fields(self, specs: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
        """Return fields as they are delivered."""
        forms = self._forms
        return tuple(
            replace(spec, dtype=forms[spec.name].result) if spec.name in forms else spec
            for spec in specs
        )

    def __call__(self, batch: dict[str, Any]) -> Any:
        for name, form in self._forms.items():
            values = batch[name]
            if isinstance(values, Ragged):
                batch[name] = Ragged(_decoded(values.values, form), values.offsets)
            else:
                batch[name] = _decoded(values, form)
        return batch if self._transform is None else self._transform(batch)


def _form(spec: FieldSpec, values: Mapping[str, Any]) -> _Form:
    wrong = [name for name in values if name not in _KNOWN]
    scale, offset = values.get("scale_factor", 1.0), values.get("add_offset", 0.0)
    fills = [each for name in FILLS for each in _listed(values.get(name, []))]
    are_numbers = not any(isinstance(each, str | list) for each in [scale, offset, *fills])
    if wrong or spec.dtype.kind not in "iuf" or not are_numbers:
        raise ValueError(
            f'decode="cf": field {spec.name!r} ({spec.dtype}) has {packing_text(values)}; only '
            f"numbers in {', '.join(sorted(_KNOWN))} are decoded: leave out decode=, or the field"
        )
    stored = spec.dtype
    if str(values.get("_Unsigned", "false")).lower() == "true" and stored.kind == "i":
        stored = np.dtype(f"u{stored.itemsize}")
    is_small = stored.itemsize <= 2 and offset == 0 if stored.kind != "f" else stored.itemsize <= 4
    result = np.dtype(np.float32 if is_small else np.float64)
    return _Form(stored, result, float(scale), float(offset), _as_stored(fills, spec.dtype, stored))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _as_stored(fills: Sequence[Any], dtype: np.dtype[Any], stored: np.dtype[Any]) -> NDArray[Any]:
    """Return fill values as the field's type; those that it cannot have are no value of it."""
    if stored.kind == "f":
        with np.errstate(over="ignore"):
            cast: NDArray[Any] = np.array(fills, stored)
        kept: NDArray[Any] = cast[np.isfinite(cast) == np.isfinite(np.array(fills, np.float64))]
        return kept
    limits = [np.iinfo(dtype), np.iinfo(stored)]
    whole = [int(fill) for fill in fills if math.isfinite(fill) and fill == int(fill)]
    held = [n for n in whole if any(limit.min <= n <= limit.max for limit in limits)]
    return np.array([n % (1 << 8 * stored.itemsize) for n in held], f"u{stored.itemsize}").view(
        stored
    )


def _decoded(values: Any, form: _Form) -> Any:
    """Return a new array, or tensor if `values` is one."""
    is_array = isinstance(values, np.ndarray)
    rows = (values if is_array else values.numpy()).view(form.stored)
    missing = np.isin(rows, form.fills) if len(form.fills) else None
    found = rows.astype(form.result)
    if form.scale != 1:
        found *= form.scale
    if form.offset:
        found += form.offset
    if missing is not None:
        found[missing] = np.nan
    if is_array:
        return found
    import torch

    return torch.from_numpy(found)
