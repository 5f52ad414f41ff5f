"""RoundPlan: what all ranks do in one round of negotiation.

It depends on the tables only, so each rank derives the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hsgd.torch.negotiation.signature import Signature

__all__ = ["JOIN", "RoundPlan", "Table"]

Table = Sequence[tuple[str, Signature]]
"""Operations that one rank has submitted, oldest first."""

JOIN = "join"
_FUSED_BYTES = 1 << 16  # maximum of one operation; larger ones gain nothing


class RoundPlan:
    """The plan for tables in rank order; a rank whose table has JOIN takes part with zeros."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = [dict(table) for table in tables]
        self.joined = [JOIN in table for table in self._tables]
        working = [t for t, joined in zip(self._tables, self.joined, strict=True) if not joined]
        everybody = working or self._tables
        self.ready = [name for name in everybody[0] if all(name in table for table in everybody)]
        """Names that all ranks have submitted, in the order of the first working rank."""
        known = {name for table in self._tables for name in table}
        self.leftover = bool(known - set(self.ready))
        """Whether operations still wait for some rank after this round."""

    def signature(self, name: str) -> Signature:
        """Return the signature of the first rank that submitted the operation."""
        return next(table[name] for table in self._tables if name in table)

    def error(self, name: str) -> str | None:
        """Return why a ready operation fails on all ranks; None if it does not."""
        first = self.signature(name)
        for table in self._tables:
            if name in table and (words := first.mismatch(table[name])) is not None:
                return f"{words} ({name})"
        if (words := first.refusal()) is not None:
            return f"{words} ({name})"
        if any(self.joined) and first.device:
            return f"{first.kind.capitalize()} of CUDA tensors is not supported with Join. ({name})"
        if any(self.joined) and first.kind not in ("allreduce", "barrier", "join"):
            words = f"{first.kind.capitalize()} is not supported with Join at this time. ({name})"
            if first.kind == "allgather":
                words += " Specify sparse_as_dense=True if using DistributedOptimizer"
            return words
        return None

    def batches(self) -> Iterator[list[str]]:
        """Yield ready names in order; neighbours that may be fused are in one list."""
        batch: list[str] = []
        shared: tuple[object, ...] | None = None
        for name in self.ready:
            partners = None
            if self.error(name) is None:
                partners = self.signature(name).partners(_FUSED_BYTES)
            if batch and (partners is None or partners != shared):
                yield batch
                batch = []
            batch.append(name)
            shared = partners
        if batch:
            yield batch
