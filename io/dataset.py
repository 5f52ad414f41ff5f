"""PartitionedDataset: the samples of PartitionedLoader for torch's own DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .loader import PartitionedLoader
from .rank_here import rank_here

if TYPE_CHECKING:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
else:
    # hsgd.io imports this module, and with it torch, only for PartitionedDataset.
    torch, torch_data = import_module("torch"), import_module("torch.utils.data")
    IterableDataset, get_worker_info = torch_data.IterableDataset, torch_data.get_worker_info

__all__ = ["PartitionedDataset"]

_MOST_WORKERS = 256


class PartitionedDataset(IterableDataset[Any]):
    """torch IterableDataset of a rank's samples, or of its batches if batch_size is given.

    Arguments, order and errors are those of PartitionedLoader. With batch_size=None it yields
    samples: dicts of tensors, which the DataLoader collates; their memory is reused after the last
    reference is gone. With num_workers > 0 the workers of all ranks divide the stream as ranks do;
    their parts differ by at most one sample. For equal steps on all ranks pass batch_size here and
    batch_size=None to the DataLoader. Each iteration is the next epoch, unless set_epoch() was
    called; this also holds for iterations in workers.

    accelerator.prepare() of a DataLoader over this dataset would divide it a second time; the loop
    then raises ValueError at its start. Leave that DataLoader out of prepare(), or prepare a
    PartitionedLoader, which accelerate does not change, or let accelerate divide it: rank=0,
    world_size=1.

    torchdata's StatefulDataLoader saves and resumes it, with as many ranks and workers as before.
    Transforms that need processes go through the DataLoader; others are faster in the threads of
    PartitionedLoader.
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
        self._rank, self._world_size = rank, world_size
        self._loader = PartitionedLoader(rank=rank, world_size=world_size, **self._arguments)
        self._position: dict[str, Any] | None = None  # of the latest iteration in this process
        self._loaded: dict[str, Any] | None = None  # of load_state_dict(), for the next iteration
        # The epoch of set_epoch(), and the number of iterations since then: by number of workers (0
        # is the program) and worker. Each element has one writer; the program writes while no
        # worker iterates.
        self._epoch = torch.zeros(2, dtype=torch.int64)  # and 1 if set_epoch() chose it
        self._counts = torch.zeros((_MOST_WORKERS + 1, _MOST_WORKERS), dtype=torch.int64)
        for shared in (self._epoch, self._counts):
            shared.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Return samples, or batches, per epoch without workers."""
        return self._loader.samples_per_epoch if self._samples else len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of iterations that start from now on; same value on all ranks.

        A loaded state stays in force if `epoch` is the epoch in which it was saved.
        """
        self._loader.set_epoch(epoch)
        self._counts.zero_()
        self._epoch[:] = torch.tensor([epoch, 1])

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration in this process, a worker or the program."""
        return dict(self._position or {"loader": self._loader.state_dict(), "samples": 0})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration in this process, a worker or the program, continue there.

        Raises ValueError, then, for the state of another dataset or order.
        """
        self._loaded = state

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if self._world_size > 1:
            self._check_nobody_divides_it()
        own = (0, 0) if worker is None else (worker.num_workers, worker.id)
        if self._loaded is not None and (resumed := self._resumed(*own)) is not None:
            return resumed
        if worker is None:
            before = self._iterated_by_others(0)
            self._counts[0, 0] += 1
            if before == 0:
                return self._items(self._loader)
            epoch = int(self._epoch[0] + self._counts[0, 0]) + before - 1
            return self._items(self._loader, epoch)
        # Counted now, not with the first batch: all workers must agree, and a loop that ends early
        # may not ask every worker for a batch.
        if worker.num_workers > _MOST_WORKERS:
            raise ValueError(f"num_workers={worker.num_workers}; use at most {_MOST_WORKERS}")
        epoch = int(self._epoch[0] + self._counts[own]) + self._iterated_by_others(
            worker.num_workers
        )
        self._counts[own] += 1
        return self._items(self._loader_of(worker.id, worker.num_workers), epoch)

    def _iterated_by_others(self, workers: int) -> int:
        """Return the iterations since set_epoch() with another number of workers."""
        most = self._counts.numpy().max(axis=1)
        return int(most.sum() - most[workers])

    def _check_nobody_divides_it(self) -> None:
        """Raise ValueError if accelerate iterates the dataset and would divide it again.

        Finds a stack frame of accelerate. In workers there is none, so nothing is detected there;
        accelerate then only takes each batch from rank 0.
        """
        frame = sys._getframe(1) if "accelerate" in sys.modules else None
        while frame is not None:
            if frame.f_globals.get("__name__") == "accelerate.data_loader":
                raise ValueError(
                    f"PartitionedDataset is rank {self._rank} of {self._world_size} already, and "
                    "accelerator.prepare() would divide it once more: leave its DataLoader out of "
                    "prepare(), or prepare a PartitionedLoader"
                )
            frame = frame.f_back

    def _loader_of(self, worker: int, workers: int) -> PartitionedLoader:
        if workers == 1:
            return self._loader
        options = dict(self._arguments)
        if options.get("local_size") is not None:
            options["local_size"] *= workers
        return PartitionedLoader(
            rank=self._rank * workers + worker, world_size=self._world_size * workers, **options
        )

    def _resumed(self, workers: int, worker: int) -> Iterator[Any] | None:
        """Continue from the loaded state; iterations after this one count on from its epoch.

        Returns None if set_epoch() has chosen another epoch since the last iteration.
        """
        state, self._loaded = self._loaded, None
        assert state is not None
        is_chosen = bool(self._epoch[1]) and not self._counts[workers, worker]
        if is_chosen and self._epoch[0] != state["loader"]["epoch"]:
            return None
        loader = self._loader_of(worker, workers) if workers else self._loader
        loader.load_state_dict(state["loader"])
        others = self._iterated_by_others(workers)
        self._counts[workers, worker] = state["loader"]["epoch"] + 1 - int(self._epoch[0]) - others
        if workers and state["loader"]["ended"]:
            return iter(())  # the other workers have not ended, or StatefulDataLoader asks again
        return self._items(loader, skipped=state["samples"])

    def _items(
        self, loader: PartitionedLoader, epoch: int | None = None, skipped: int = 0
    ) -> Iterator[Any]:
        """Yield batches or samples; without the first `skipped` samples of the first batch."""
        if epoch is not None:
            loader.set_epoch(epoch)
        batches = iter(loader)
        self._position = {"loader": loader.state_dict(), "samples": skipped}
        for batch in batches:
            if not self._samples:
                self._position = {"loader": loader.state_dict(), "samples": 0}
                yield batch
                continue
            names = list(batch)
            for number, values in enumerate(zip(*batch.values(), strict=True)):
                if number >= skipped:
                    self._position["samples"] = number + 1
                    yield dict(zip(names, values, strict=True))
            skipped = 0
            self._position = {"loader": loader.state_dict(), "samples": 0}
        self._position = {"loader": loader.state_dict(), "samples": 0}
