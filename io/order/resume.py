"""The state of a loader in the middle of an epoch: a few numbers that every rank has.

Owns the form of the state, its checks, and their messages. Never counts anything (loader.py), and
knows no rank: the samples that are left follow from the cuts (partition.remaining).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .epoch_order import Cut

__all__ = ["EpochState", "state_from"]

_FORMAT = 2


@dataclass(frozen=True)
class EpochState:
    """Where an epoch stands. dataset: DataMap.fingerprint(); cuts: how it was left, in order;
    ended: the loop has seen its end.
    """

    dataset: str
    num_samples: int
    shuffle: str
    seed: int
    block_samples: int
    window_samples: int
    epoch: int
    cuts: tuple[Cut, ...]
    ended: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, as JSON and torch.save take them."""
        cuts = [asdict(cut) for cut in self.cuts]
        return {"format": _FORMAT, **asdict(self), "cuts": cuts}

    def check_fits(self, here: EpochState) -> None:
        """Raise ValueError when `here`, the state of a loader, is of another dataset or order."""
        if (self.dataset, self.num_samples) != (here.dataset, here.num_samples):
            raise ValueError(
                f"this state is of another dataset: {self.dataset} with {self.num_samples} "
                f"samples, here {here.dataset} with {here.num_samples}; load the state that was "
                "saved with this dataset"
            )
        for name in ("shuffle", "seed", "block_samples", "window_samples"):
            saved, now = getattr(self, name), getattr(here, name)
            if saved != now:
                raise ValueError(
                    f"this state was saved with {name} {saved!r}, the loader has {now!r}, so the "
                    "order of samples differs; make the loader as it was"
                )


def state_from(state: Mapping[str, Any]) -> EpochState:
    """The state that as_dict() wrote. Raises ValueError for anything else."""
    if isinstance(state, Mapping) and state.get("format") == 1:
        raise ValueError(
            f"this state was saved by an older hsgd (format 1, now {_FORMAT}); begin the epoch: "
            "set_epoch(...)"
        )
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise ValueError("this is no state of a PartitionedLoader; pass what state_dict() returned")
    try:
        values = {field.name: state[field.name] for field in fields(EpochState)}
        values["cuts"] = tuple(Cut(**cut) for cut in state["cuts"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"this state of a PartitionedLoader is damaged: {error}; use an older one"
        ) from None
    return EpochState(**values)
