"""EpochState: a loader's epoch, how it was left before, and what the loop has consumed of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hsgd.errors import DataError

from .batches.iteration import Progress
from .cache.seats import Seats
from .format.data_map import DataMap
from .order.epoch_order import Cut, EpochOrder, Range, Share, part_of, remaining, share_of, with_cut

__all__ = ["EpochState", "OrderSettings"]

_FORMAT = 2  # of a state
_DAMAGED = "this state of a PartitionedLoader is damaged: {}; use an older one"


@dataclass(frozen=True)
class OrderSettings:
    """All that determines the order of a dataset besides the epoch; equal on all ranks."""

    shuffle: str
    seed: int
    block_samples: int
    window_samples: int


class EpochState:
    """The epoch of the next iteration, and the progress of the last one; picklable.

    `cut` says how each rank takes its batches; `seats` are those of all ranks, once known. Raises
    ValueError or TypeError for arguments that leave a rank without samples, or define no order.
    """

    def __init__(self, data: DataMap, settings: OrderSettings, cut: Cut, rank: int) -> None:
        self._data, self._settings, self.cut = data, settings, cut
        self.seats: Seats | None = None
        self.epoch, self._cuts, self._chosen = 0, (), True  # the next iteration is epoch 0
        self._made: tuple[tuple[type, int], EpochOrder] | None = None
        self._last = (0, self._cuts, Progress())
        self.share(rank)
        self.order()

    _cuts: tuple[Cut, ...]  # how the epoch was left before
    _last: tuple[int, tuple[Cut, ...], Progress]  # of the last iteration: epoch, cuts, progress

    def __getstate__(self) -> dict[str, Any]:
        epoch, cuts, progress = self._last
        return {**vars(self), "_made": None, "_last": (epoch, cuts, replace(progress))}

    @property
    def is_over(self) -> bool:
        """True if the next iteration is the next epoch."""
        return not self._chosen and self._last[2].has_begun

    def order(self) -> EpochOrder:
        """Return the order of the epoch; it is kept, as making it takes time for many samples."""
        key = (type(self.epoch), self.epoch)
        if self._made is None or self._made[0] != key:
            self._made = (key, self._order_of(self.epoch))
        return self._made[1]

    def _order_of(self, epoch: int) -> EpochOrder:
        try:
            return EpochOrder(self._data.slab_counts, epoch=epoch, **asdict(self._settings))
        except MemoryError:
            raise DataError(
                f"{self._data.path}: the order of {self._data.num_samples} samples needs more "
                "memory than is there; restore the file if it has not as many, or use a larger "
                "block_bytes"
            ) from None

    def share(self, rank: int) -> Share:
        """Return the share of a rank in the whole epoch."""
        return self._share_in(rank, self._data.num_samples, resumed=False)

    def left(self, rank: int) -> tuple[Share, tuple[Range, ...]]:
        """Return the share of a rank in the rest of the epoch, and its part of the stream."""
        samples = [(0, self._data.num_samples)]
        share = self.share(rank)
        if self._cuts:
            samples = remaining(self._data.num_samples, self._cuts)
            share = self._share_in(rank, sum(count for _, count in samples), resumed=True)
        return share, tuple(part_of(samples, share.start, share.count))

    def wanted_slabs(self, nodes: list[list[int]]) -> list[list[int]]:
        """Return by node the slabs that its ranks read next, those of the first rank first."""
        windows = self._data.windows
        crossing = frozenset() if windows is None else windows.crossing  # one sample, not a file
        wanted = []
        for ranks in nodes:
            found: dict[int, None] = {}
            for rank in ranks:
                for start, count in self.left(rank)[1]:
                    found.update(dict.fromkeys(self.order().slabs(start, count).tolist()))
            wanted.append([slab for slab in found if slab not in crossing])
        return wanted

    def begin_iteration(self) -> None:
        """Go to the next epoch if the last iteration gave something of this one."""
        if self.is_over:
            self._begin(self.epoch + 1)
        self._chosen = False

    def follow(self, progress: Progress) -> None:
        """Count what this iteration delivers as consumed."""
        self._last = (self.epoch, self._cuts, progress)

    def set_epoch(self, epoch: int, runs: Callable[[Progress], bool]) -> bool:
        """Choose the epoch of the next iteration; return whether it is another one.

        `runs` says whether a loop still takes batches; its state counts until it ends.
        """
        differs = epoch != self.epoch
        if differs:
            self._begin(epoch)
        else:
            self._take_epoch(epoch)
            if self._last[2].has_begun and not runs(self._last[2]):
                self.follow(Progress())
        self._chosen = True
        return differs

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, strings and lists, for JSON and torch.save."""
        epoch, cuts, progress = self._last
        if steps := progress.batches + progress.skipped:
            cuts = with_cut(cuts, replace(self.cut, steps=steps))
        left = {"epoch": epoch, "cuts": [asdict(cut) for cut in cuts], "ended": progress.ended}
        return {"format": _FORMAT, **self._identity(), **left}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where as_dict() was called. Raises ValueError for a state that does not fit."""
        _check_format(state)
        try:
            saved = {name: state[name] for name in self._identity()}
            epoch, ended = state["epoch"], state["ended"]
            cuts = tuple(Cut(**cut) for cut in state["cuts"])
        except (KeyError, TypeError) as error:
            raise ValueError(_DAMAGED.format(error)) from None
        self._check_identity(saved)
        self._begin(epoch)
        self._cuts, self._chosen = cuts, not ended
        self.follow(Progress(ended=ended))

    def _identity(self) -> dict[str, Any]:
        """Return what a state must have in common with a loader that continues from it."""
        data = self._data
        named = {"dataset": data.fingerprint(), "num_samples": data.num_samples}
        return {**named, **asdict(self._settings)}

    def _check_identity(self, saved: Mapping[str, Any]) -> None:
        here = self._identity()
        dataset, samples = saved["dataset"], saved["num_samples"]
        if (dataset, samples) != (here["dataset"], here["num_samples"]):
            raise ValueError(
                f"this state is of another dataset: {dataset} with {samples} samples, here "
                f"{here['dataset']} with {here['num_samples']}; load the state that was saved "
                "with this dataset"
            )
        for name, now in here.items():
            if saved[name] != now:
                raise ValueError(
                    f"this state was saved with {name} {saved[name]!r}, the loader has {now!r}, so "
                    "the order of samples differs; make the loader as it was"
                )

    def _share_in(self, rank: int, samples: int, *, resumed: bool) -> Share:
        goes_round = self._settings.shuffle == "slabs" and self.seats is not None
        part = self.seats.part(rank, self.epoch) if self.seats and goes_round else rank
        cut = self.cut
        return share_of(
            samples,
            cut.batch_size,
            part,
            cut.world_size,
            drop_last=cut.drop_last,
            pad=cut.pad,
            resumed=resumed,
        )

    def _take_epoch(self, epoch: int) -> None:
        """Set the epoch; raise TypeError or ValueError, without a change, if it is invalid."""
        before, self.epoch = self.epoch, epoch
        try:
            self.order()
        except (TypeError, ValueError):
            self.epoch = before
            raise

    def _begin(self, epoch: int) -> None:
        self._take_epoch(epoch)
        self._cuts = ()
        self.follow(Progress())


def _check_format(state: Mapping[str, Any]) -> None:
    if isinstance(state, Mapping) and state.get("format") == 1:
        raise ValueError(
            f"this state was saved by an older hsgd (format 1, now {_FORMAT}); begin the epoch: "
            "set_epoch(...)"
        )
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise ValueError("this is no state of a PartitionedLoader; pass what state_dict() returned")
