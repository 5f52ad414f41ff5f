"""Options: how gradients travel, as DistributedOptimizer was told; equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hsgd.torch.compression import Compressor
from hsgd.torch.job.process_sets import ProcessSet
from torch import Tensor

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """overlap: as for Overlap."""

    compression: type[Compressor]
    op: int
    predivide: float
    groups: int | list[list[Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    bucket_cap_mb: float
    overlap: str

    def terms(self, passes: int) -> dict[str, object]:
        """What all ranks must have alike, as texts can tell it; passes: per step."""
        return {
            "backward_passes_per_step": passes,
            "op": self.op,
            "gradient_predivide_factor": self.predivide,
            "compression": self.compression.__qualname__,
            "sparse_as_dense": self.sparse_as_dense,
        }
