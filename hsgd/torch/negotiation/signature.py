"""Signature: what must be equal on all ranks for an operation, with Horovod's messages."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Signature"]

_SCALED = ("adasum", "allreduce", "reducescatter")
_JOINING = ("allgather", "alltoall")  # rows may differ between ranks


class Signature(NamedTuple):
    """One rank's description of an operation; cheap to pickle."""

    kind: str
    """Kind of operation, such as "allreduce", "adasum", "barrier", "join" or "process_set"."""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """One per tensor of a group."""
    op: int = -1
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors before and after a reduction."""
    root: int = -1
    """Global rank of the root of a broadcast."""
    detail: str = ""
    device: str = ""
    """For CUDA tensors "cuda", else empty."""

    def mismatch(self, other: Signature) -> str | None:
        """Return Horovod's message if another rank's signature does not match, else None."""
        if self.kind != other.kind:
            return (
                f"Mismatched operations: One rank did an {self.kind.upper()}, but another rank did "
                f"an {other.kind.upper()}."
            )
        if self.device != other.device:
            return (
                f"Mismatched {self.kind.upper()} CPU/GPU device placement: One rank specified "
                f"device {self.device or 'cpu'}, but another rank specified device "
                f"{other.device or 'cpu'}."
            )
        if self.dtypes != other.dtypes:
            return (
                f"Mismatched data types: One rank had type {_list(self.dtypes)}, but another rank "
                f"had type {_list(other.dtypes)}."
            )
        mine, theirs = self.compared_shapes(), other.compared_shapes()
        if mine != theirs:
            return (
                f"Mismatched {self.kind.upper()} tensor shapes: One rank sent a tensor of shape "
                f"{_list(self.shapes)}, but another rank sent a tensor of shape "
                f"{_list(other.shapes)}."
            )
        if self.kind in _SCALED and self.scales != other.scales:
            return (
                "Mismatched prescale and/or postscale factors: One rank sent factors "
                f"{self.scales}, but another rank sent factors {other.scales}."
            )
        if self.op != other.op:
            return (
                f"Mismatched reduction operation: One rank sent reduction op {self.op}, but "
                f"another rank sent reduction op {other.op}."
            )
        if self.root != other.root:
            return (
                f"Mismatched {self.kind.upper()} root ranks: One rank specified root rank "
                f"{self.root}, but another rank specified root rank {other.root}."
            )
        if self.detail != other.detail:
            return f"Mismatched {self.kind}: one rank gave {self.detail}, another {other.detail}."
        return None

    def refusal(self) -> str | None:
        """Return why the operation is impossible although all ranks agree, else None."""
        if self.kind in (*_JOINING, "reducescatter") and () in self.shapes:
            return f"A rank tried to {self.kind.upper()} a rank-zero tensor."
        return None

    def partners(self, most_bytes: int) -> tuple[object, ...] | None:
        """Return a key; small reductions with equal keys may be fused. None: not fusible."""
        if self.kind != "allreduce" or len(self.shapes) != 1:
            return None
        count = 1
        for extent in self.shapes[0]:
            count *= extent
        if count * 8 > most_bytes:
            return None
        return (self.dtypes, self.op, self.scales, self.device)

    def compared_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes, with -1 for extents that may differ between ranks."""
        if self.kind not in _JOINING:
            return self.shapes
        return tuple((-1, *shape[1:]) if shape else () for shape in self.shapes)


def _list(items: tuple[object, ...]) -> str:
    return str(items[0]) if len(items) == 1 else str(list(items))
