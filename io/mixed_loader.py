"""MixedLoader: the batches of several loaders, one loader at a step, drawn by seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hsgd.base.closing import Closing
from hsgd.errors import DataError

from .loader import PartitionedLoader

__all__ = ["MixedLoader"]

_FORMAT = 1  # of a state


class MixedLoader(Closing):
    """Iterable over (name, batch) of several datasets; each step takes a batch of one of them.

    Without `weights` an epoch has every batch of each loader exactly once, in an order that is
    drawn from all of them. With weights each step draws its loader with replacement, and a loader
    at its end goes on with its next epoch. All ranks take the same loader at each step, as the draw
    depends on seed, epoch and the steps of the loaders alone.

    Local, as the loaders are without comm; each loader reads ahead by itself, so the memory is that
    of all. `with` ends running iterations.

    Args:
        loaders: by name, with equal rank and world_size, and at least one step each.
        weights: by name, above 0; only their ratios count.
        steps: of an epoch; with weights, and only then.
        seed: equal on all ranks.

    Raises:
        ValueError: the arguments do not fit together.
    """

    def __init__(
        self,
        loaders: Mapping[str, PartitionedLoader],
        weights: Mapping[str, float] | None = None,
        *,
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        _check(loaders, weights, steps, seed)
        self._loaders = dict(loaders)
        self._names = list(self._loaders)
        parts = np.array([1 if weights is None else weights[name] for name in self._names], float)
        parts /= parts.max()  # so that the sum is finite
        self._weights = None if weights is None else parts / parts.sum()
        self._steps, self._seed = steps or 0, seed
        self._epoch, self._chosen = 0, True  # of the next iteration
        self._loaded = self._is_over = False  # a state is loaded, which may be that of an end
        self._forget_order()
        self._running: dict[str, Iterator[Any]] = {}
        self._turn: object = None  # of the iteration that may go on

    def _forget_order(self) -> None:
        self._key = 0  # steps of the epoch before this order was drawn
        self._counts: list[int] = []  # of the order
        self._order = np.empty(0, np.int64)
        self._done = 0  # steps of the order

    @property
    def epoch(self) -> int:
        """Epoch of the latest iteration, or the one set since."""
        return self._epoch

    def __len__(self) -> int:
        """Return the steps of a whole epoch, the same on all ranks."""
        return self._steps or sum(map(len, self._loaders.values()))

    @property
    def steps_left(self) -> int:
        """Steps of the next iteration; fewer than len() for a loaded state."""
        if self._loaded:
            return len(self._order) - self._done
        if self._weights is not None or not self._chosen:
            return len(self)
        return sum(loader.steps_left for loader in self._loaders.values())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Begin the next epoch, or go on with a loaded state."""
        if not self._loaded:
            self.set_epoch(self._epoch if self._chosen else self._epoch + 1)
            self._draw(0, [loader.steps_left for loader in self._loaders.values()])
        self._loaded = self._chosen = self._is_over = False
        turn = self._turn = object()
        while self._done < len(self._order):
            name = self._names[self._order[self._done]]
            found = self._next(name)
            self._done += 1
            yield from ((name, batch) for batch in found)
            if self._turn is None:  # close()
                return
            if self._turn is not turn:
                raise RuntimeError(
                    "another iteration, epoch or state of this MixedLoader has begun"
                )

    def _draw(self, key: int, counts: list[int]) -> None:
        self._key, self._counts, self._done = key, counts, 0
        draw = np.random.default_rng([self._seed, self._epoch, key])
        numbers = np.arange(len(self._names))
        if self._weights is None:
            self._order = draw.permutation(np.repeat(numbers, counts))
        else:
            self._order = draw.choice(numbers, self._steps, p=self._weights)

    def _next(self, name: str) -> list[Any]:
        """Return the next batch of a loader; none if it skipped some (on_error) and has ended."""
        for _ in range(3):  # what it does now, the end of a loaded state, a new epoch
            if name not in self._running:
                self._running[name] = iter(self._loaders[name])
            try:
                return [next(self._running[name])]
            except StopIteration:
                if self._weights is None:
                    return []
                del self._running[name]  # its next iteration is its next epoch
        raise DataError(f"loader {name!r} gave no batch in a whole epoch: all were skipped")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; same value on all ranks.

        A loaded state stays in force if `epoch` is the epoch in which it was saved.
        """
        self._loaded = epoch == self._epoch and (self._loaded or self._is_over)
        self._epoch, self._chosen = epoch, True
        if not self._loaded:
            self._turn = object()
            self._forget_order()
            if self._weights is None:
                self._running.clear()
                for loader in self._loaders.values():
                    loader.set_epoch(epoch)

    def close(self) -> None:
        """End running iterations; local. The loaders stay usable."""
        self._turn = None
        self._running.clear()
        for loader in self._loaders.values():
            loader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop, with the states of all loaders; local.

        Numbers, strings and lists, the same on all ranks after the same step.
        """
        return {
            "format": _FORMAT,
            **self._settings(),
            "epoch": self._epoch,
            "key": self._key,
            "counts": self._counts,
            "done": self._done,
            "loaders": {name: loader.state_dict() for name, loader in self._loaders.items()},
        }

    def _settings(self) -> dict[str, Any]:
        """Return what a state must have in common with a loader that continues from it."""
        weights = None if self._weights is None else self._weights.tolist()
        return {"seed": self._seed, "weights": weights, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where state_dict() was called; on every rank.

        With as many ranks the order goes on, except for padding and after skipped batches; on
        another number of ranks, without weights, what is left of all loaders is drawn anew, and
        comes exactly once. Raises ValueError for the state of other loaders, weights, steps or
        seed, or one that is damaged.
        """
        self._check_state(state)
        for name, loader in self._loaders.items():
            loader.load_state_dict(state["loaders"][name])
        self._running.clear()
        self._turn = object()
        self._epoch, counts, done = state["epoch"], list(state["counts"]), state["done"]
        self._chosen = not counts  # saved before the first step
        self._loaded = self._is_over = False
        if not counts:
            self._forget_order()
            return
        self._draw(state["key"], counts)
        self._done = done
        self._is_over = done == len(self._order)
        self._loaded = not self._is_over
        if self._loaded and self._weights is None:
            ahead = np.bincount(self._order[done:], minlength=len(counts)).tolist()
            left = [
                0 if not count or state["loaders"][name]["ended"] else loader.steps_left
                for (name, loader), count in zip(self._loaders.items(), ahead, strict=True)
            ]
            if left != ahead:
                self._draw(state["key"] + done, left)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise ValueError("this is no state of a MixedLoader; pass what state_dict() returned")
        for name, own in self._settings().items():
            if state.get(name) != own:
                raise ValueError(
                    f"this state was saved with {name} {state.get(name)!r}, the MixedLoader has "
                    f"{own!r}; make it as it was"
                )
        states, counts = state.get("loaders"), state.get("counts")
        if not isinstance(states, Mapping) or list(states) != self._names:
            raise ValueError(
                f"this state has the loaders {', '.join(states or ())}, the MixedLoader "
                f"{', '.join(self._names)}; make it as it was"
            )
        numbers = [state.get(name) for name in ("epoch", "key", "done")]
        is_list = isinstance(counts, list) and len(counts) in (0, len(self._names))
        numbers += counts if is_list and counts else []
        most = [loader.num_samples for loader in self._loaders.values()]
        if (
            not is_list
            or not all(type(number) is int and number >= 0 for number in numbers)
            or any(count > limit for count, limit in zip(counts or [], most, strict=False))
            or state["done"] > (self._steps or sum(counts or []))
        ):
            raise ValueError("this state of a MixedLoader is damaged; use an older one")


def _check(
    loaders: Mapping[str, PartitionedLoader],
    weights: Mapping[str, float] | None,
    steps: int | None,
    seed: int,
) -> None:
    if not isinstance(loaders, Mapping) or not isinstance(weights, Mapping | None):
        raise TypeError("give loaders, and weights, by name: {name: loader}")
    if not loaders:
        raise ValueError("no loaders; give at least one, by name")
    if len({id(loader) for loader in loaders.values()}) < len(loaders):
        raise ValueError("one loader has two names; make a loader for each")
    seats = {(loader._here.rank, loader._here.world_size) for loader in loaders.values()}
    if len(seats) > 1:
        said = ", ".join(f"rank {rank} of {size}" for rank, size in sorted(seats))
        raise ValueError(f"the loaders are of different ranks ({said}); make all for this rank")
    empty = [name for name, loader in loaders.items() if not len(loader)]
    if empty:
        raise ValueError(f"loader {empty[0]!r} has no step; leave it out, or drop_last")
    if (weights is None) != (steps is None):
        raise ValueError("weights= and steps= go together: with replacement an epoch has no end")
    for name, number in (("steps", 1 if steps is None else steps), ("seed", seed)):
        if isinstance(number, bool) or not isinstance(number, int) or number < (name == "steps"):
            raise ValueError(
                f"{name} is {number!r}; use an integer of at least {int(name == 'steps')}"
            )
    if weights is not None and set(weights) != set(loaders):
        raise ValueError(
            f"weights of {', '.join(weights)} for the loaders {', '.join(loaders)}; give each one"
        )
    for name, weight in (weights or {}).items():
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"the weight of {name!r} is {weight!r}; use a number above 0")
