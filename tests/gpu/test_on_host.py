"""The programs of this folder with tensors in host memory, so that they are right when a GPU is
there. What they find out about collectives in host memory, the tests of other folders do as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import array_programs
import c10d_programs
import core_programs
import torch_programs
from backend_programs import COLLECTIVES
from device_ranks import Pool, lose_one

__all__: list[str] = []

SIZE = 2


@pytest.mark.parametrize("name", ["all_calls", "several_streams", "never_waits"])
def test_calls_of_the_core(host_ranks: Pool, name: str) -> None:
    host_ranks.run(getattr(core_programs, name), SIZE)


def test_pretended_nodes(host_ranks: Pool, tmp_path: Path) -> None:
    host_ranks.run(core_programs.between_nodes, SIZE, str(tmp_path), [0, 1], "")


def test_overlap_is_timed(host_ranks: Pool) -> None:
    for found in host_ranks.run(core_programs.overlap, SIZE, 64):
        assert found.keys() == {"compute", "allreduce", "both"}


def test_batches_of_the_loader(host_ranks: Pool, tmp_path: Path) -> None:
    host_ranks.run(array_programs.moved_batches, 1, str(tmp_path))


def test_a_lost_rank() -> None:
    lose_one("cpu")


def test_groups_of_torch(host_ranks: Pool, tmp_path: Path) -> None:
    found = host_ranks.run(c10d_programs.all_collectives, SIZE, str(tmp_path))
    assert found == [sorted(COLLECTIVES)] * SIZE


@pytest.mark.parametrize("name", ["train_with_ddp", "train_with_fsdp"])
def test_training_of_torch(host_ranks: Pool, tmp_path: Path, name: str) -> None:
    program = getattr(c10d_programs, name)
    assert max(host_ranks.run(program, SIZE, str(tmp_path))) < 1e-4


def test_a_group_that_is_not_waited_for(host_ranks: Pool, tmp_path: Path) -> None:
    host_ranks.run(c10d_programs.no_waits_of_groups, SIZE, str(tmp_path))


@pytest.mark.parametrize("name", ["operations", "other_order", "batch_norm", "no_waits_of_a_step"])
def test_operations(host_ranks: Pool, name: str) -> None:
    host_ranks.run(getattr(torch_programs, name), SIZE)


def test_mismatches(host_ranks: Pool) -> None:
    assert host_ranks.run(torch_programs.mismatch, SIZE) == [["HorovodInternalError"] * 2] * SIZE


@pytest.mark.parametrize("optimizer", torch_programs.OPTIMIZERS)
def test_optimizers(host_ranks: Pool, optimizer: str) -> None:
    assert max(host_ranks.run(torch_programs.train_optimizer, SIZE, optimizer, "none")) < 1e-4


def test_compression(host_ranks: Pool) -> None:
    assert max(host_ranks.run(torch_programs.train_optimizer, SIZE, "sgd", "fp16")) < 1e-2
