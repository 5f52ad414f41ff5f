"""Numbers and sizes of dtypes, and numbers of operations, as in csrc/include/hsgd_core.h."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["DTYPES", "DTYPE_CODES", "ITEM_BYTES", "OPS", "OP_CODES", "Op"]

Op = Literal["sum", "mean", "min", "max", "prod"]
OPS: tuple[Op, ...] = get_args(Op)
OP_CODES: dict[str, int] = {op: code for code, op in enumerate(OPS)}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8")
DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
ITEM_BYTES = dict(zip(DTYPES, (4, 8, 2, 2, 1, 4, 8, 1), strict=True))
