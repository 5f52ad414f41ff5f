"""The rank of this process and the number of ranks, if the caller does not give them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsgd.errors import LaunchError
from hsgd.jobs.environment.launched_once import launched_once

__all__ = ["RankHere", "check_still_alone", "rank_here"]

_ALONE = "no launcher"


@dataclass(frozen=True)
class RankHere:
    """Rank and number of ranks; `found` names their source."""

    rank: int
    world_size: int
    found: str


def rank_here(
    rank: int | None,
    world_size: int | None,
    comm: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> RankHere:
    """Find the rank of this process and the number of ranks; local.

    Uses the first of: the arguments, `comm`, an initialized torch.distributed or hsgd, the
    variables of a launcher, one rank alone.

    Raises:
        ValueError: only one of rank and world_size is given.
        LaunchError: a launcher started several processes and gave this one no rank and size.
    """
    if rank is not None and world_size is not None:
        return RankHere(rank, world_size, "the arguments")
    if rank is not None or world_size is not None:
        raise ValueError(
            f"rank={rank}, world_size={world_size}: give both, or neither, to have them found"
        )
    if comm is not None:
        return RankHere(int(comm.rank), int(comm.size), "comm")
    here = _initialized()
    if here is not None:
        return here
    found = launched_once(environ)
    if found is None:
        return RankHere(0, 1, _ALONE)
    if found.is_alone:
        return RankHere(0, 1, found.names)
    if found.rank is None or found.size is None:
        raise LaunchError(
            f"{found.what} started this process beside others, and does not say which rank of how "
            "many it is, so each would read all samples; make the loader after hvd.init(), "
            "hsgd.init() or init_process_group(), or give comm=, or rank= and world_size= (0 and 1 "
            "for a process that is alone on purpose)"
        )
    return RankHere(found.rank, found.size, found.names)


def _initialized() -> RankHere | None:
    """Return the rank in torch.distributed or hsgd, if either is initialized in this process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return RankHere(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    world = sys.modules.get("hsgd.world")
    if world is not None and world.is_initialized():
        return RankHere(world.rank(), world.size(), "hsgd")
    return None


def check_still_alone(here: RankHere) -> None:
    """Raise RuntimeError if no rank was found before and there are several ranks now."""
    if here.found != _ALONE:
        return
    now = _initialized()
    if now is not None and now.world_size > 1:
        raise RuntimeError(
            f"this loader was made before {now.found} was initialized, and found no launcher: "
            f"each of the {now.world_size} ranks would read all samples; make it later (with "
            "Lightning in train_dataloader()), or give rank= and world_size="
        )
