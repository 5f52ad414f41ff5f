"""Which rank this process is, and of how many, when the caller does not say.

Owns where that is looked up. Never starts anything and never talks to another rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RankHere", "check_still_alone", "rank_here"]

# The innermost launcher first, as hsgd.job.launcher_variables has them. RANK and WORLD_SIZE without
# torchrun come last: images and schedulers set them for a node, in which an mpirun starts ranks.
_TORCHRUN = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("PMI_RANK", "PMI_SIZE", ""),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ""),
    ("HOROVOD_RANK", "HOROVOD_SIZE", ""),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ("RANK", "WORLD_SIZE", ""),
)
# A shell of `srun --pty` is one process, whatever its step says.
_OF_A_STEP = ("PMI_RANK", "SLURM_PROCID")

_ALONE = "no launcher"


@dataclass(frozen=True)
class RankHere:
    """found: where from."""

    rank: int
    world_size: int
    found: str


def rank_here(
    rank: int | None,
    world_size: int | None,
    comm: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> RankHere:
    """What the caller says, else `comm`, else torch.distributed where it is initialized, else the
    variables of a launcher, else one rank alone. Raises ValueError for one of both.
    """
    if rank is not None and world_size is not None:
        return RankHere(rank, world_size, "the arguments")
    if rank is not None or world_size is not None:
        raise ValueError(
            f"rank={rank}, world_size={world_size}: give both, or neither, to have them found"
        )
    if comm is not None:
        return RankHere(int(comm.rank), int(comm.size), "comm")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return RankHere(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    for rank_name, size_name, needed in (_TORCHRUN, *_VARIABLES):
        if needed and needed not in environ:
            continue
        if rank_name in _OF_A_STEP and "SLURM_PTY_PORT" in environ:
            continue
        texts = environ.get(rank_name, ""), environ.get(size_name, "")
        if all(text.isdecimal() for text in texts) and int(texts[0]) < int(texts[1]):
            return RankHere(int(texts[0]), int(texts[1]), f"{rank_name} and {size_name}")
    return RankHere(0, 1, _ALONE)


def check_still_alone(here: RankHere) -> None:
    """Raise RuntimeError where no rank was found, and torch.distributed has several by now."""
    if here.found != _ALONE:
        return
    now = rank_here(None, None, None, {})
    if now.world_size > 1:
        raise RuntimeError(
            "this loader was made before torch.distributed was initialized, and found no launcher: "
            f"each of the {now.world_size} ranks would read all samples; make it later (with "
            "Lightning in train_dataloader()), or give rank= and world_size="
        )
