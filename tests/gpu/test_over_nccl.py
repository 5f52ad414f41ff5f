"""Collectives on CUDA tensors over the real NCCL: `make test-gpu`.

Ranks have a GPU each where the machine has enough. Otherwise they share what there is, which NCCL
allows from 2.30 on. Owns which programs run with how many ranks, and what must come out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import c10d_programs
import core_programs
import torch_programs
from backend_programs import COLLECTIVES
from device_ranks import Pool, lose_one

__all__: list[str] = []

pytestmark = pytest.mark.gpu
CLOSE = 1e-4  # to the CPU's parameters, which are summed in another order


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["all_calls", "several_streams"])
def test_calls_of_the_core_are_right(nccl_ranks: Pool, name: str, size: int) -> None:
    nccl_ranks.run(getattr(core_programs, name), size)


def test_calls_never_wait_for_the_device(nccl_ranks: Pool) -> None:
    nccl_ranks.run(core_programs.never_waits, 2)


def test_nccl_in_the_nodes_and_host_memory_between_them(nccl_ranks: Pool, tmp_path: Path) -> None:
    nccl_ranks.run(core_programs.between_nodes, 4, str(tmp_path), [0, 0, 1, 1], "")


def test_a_lost_rank_is_heard_of_and_the_others_end_normally(nccl_ranks: Pool) -> None:
    lose_one("nccl")


def test_collectives_of_torch_give_what_gloo_does(nccl_ranks: Pool, tmp_path: Path) -> None:
    found = nccl_ranks.run(c10d_programs.all_collectives, 3, str(tmp_path))
    assert found == [sorted(COLLECTIVES)] * 3


@pytest.mark.parametrize("name", ["train_with_ddp", "train_with_fsdp"])
def test_ddp_and_fsdp2_train_as_one_rank_on_the_cpu(
    nccl_ranks: Pool, tmp_path: Path, name: str
) -> None:
    found = nccl_ranks.run(getattr(c10d_programs, name), 2, str(tmp_path))
    assert max(found) < CLOSE


@pytest.mark.parametrize("name", ["operations", "other_order"])
def test_operations_of_hsgd_torch_are_right(nccl_ranks: Pool, name: str) -> None:
    nccl_ranks.run(getattr(torch_programs, name), 3)


def test_a_step_never_waits_for_the_device(nccl_ranks: Pool) -> None:
    nccl_ranks.run(torch_programs.no_waits_of_a_step, 2)


def test_a_distributed_optimizer_trains_as_one_rank_on_the_cpu(nccl_ranks: Pool) -> None:
    found = nccl_ranks.run(torch_programs.train_optimizer, 4, "lars", "none")
    assert max(found) < CLOSE
