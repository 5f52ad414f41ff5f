"""PartitionedDataset: the same stream as PartitionedLoader, for torch's own DataLoader.

Owns the split of a rank's share over the worker processes of a DataLoader. Reading is the loader's:
each worker has a PartitionedLoader of its own, as if it were a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .launched import rank_here
from .loader import PartitionedLoader

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset
else:
    # torch is imported when this module is, which hsgd.io does only for this name.
    from importlib import import_module

    IterableDataset = import_module("torch.utils.data").IterableDataset

__all__ = ["PartitionedDataset"]


class PartitionedDataset(IterableDataset[Any]):
    """torch IterableDataset of a rank's samples, or of its batches when batch_size is given.

    Arguments are those of PartitionedLoader, and so are order and errors. batch_size=None: samples,
    dicts of tensors (one sample each, the memory of which is used again after the last reference
    died), which the DataLoader puts together. With num_workers > 0 the workers of all ranks divide
    the stream as ranks do, in parts that differ by one sample at most; pass batch_size here and
    batch_size=None to the DataLoader to have equal steps on all ranks.

    Transforms that need processes go through the DataLoader; those that do not are faster in the
    threads of PartitionedLoader.
    """

    def __init__(
        self,
        path: Any,
        batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        read_batch: int = 64,
        **options: Any,
    ) -> None:
        if batch_size is None and options.get("pack") is not None:
            raise ValueError(
                "pack= gives batches; pass batch_size here, and batch_size=None to the DataLoader"
            )
        self._samples = batch_size is None
        self._arguments = {"path": path, "batch_size": batch_size or read_batch, **options}
        here = rank_here(rank, world_size, options.get("comm"))
        rank, world_size = here.rank, here.world_size
        self._rank, self._world_size, self._epoch = rank, world_size, 0
        self._loader = PartitionedLoader(rank=rank, world_size=world_size, **self._arguments)

    def __len__(self) -> int:
        """Samples, or batches, per epoch without workers."""
        return self._loader.samples_per_epoch if self._samples else len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the iterations that start from now on; same value on all ranks."""
        self._loader.set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        worker, loader = get_worker_info(), self._loader
        if worker is not None and worker.num_workers > 1:
            options = dict(self._arguments)
            if options.get("local_size") is not None:
                options["local_size"] *= worker.num_workers
            loader = PartitionedLoader(
                rank=self._rank * worker.num_workers + worker.id,
                world_size=self._world_size * worker.num_workers,
                **options,
            )
            loader.set_epoch(self._epoch)
        if not self._samples:
            yield from loader
            return
        for batch in loader:
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))
