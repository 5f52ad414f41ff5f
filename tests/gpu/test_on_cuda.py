"""Collectives on CUDA tensors of several ranks that share one real GPU: `make test-gpu`.

Owns which programs run with how many ranks, and what must come out. The programs are those that
run everywhere with tensors in host memory.
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
def test_every_call_dtype_and_size_is_right(cuda_ranks: Pool, size: int) -> None:
    cuda_ranks.run(core_programs.all_calls, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_come_after_their_inputs_and_before_what_reads_the_results(
    cuda_ranks: Pool, size: int
) -> None:
    cuda_ranks.run(core_programs.several_streams, size)


def test_calls_never_wait_for_the_device(cuda_ranks: Pool) -> None:
    cuda_ranks.run(core_programs.never_waits, 2)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([0, 1], "one rank per node"),
        ([0, 0, 1, 1], "share a device"),
        ([0, 0, 1], "different numbers of ranks"),
    ],
    ids=str,
)
def test_between_nodes_they_go_through_host_memory(
    cuda_ranks: Pool, tmp_path: Path, nodes: list[int], reason: str
) -> None:
    cuda_ranks.run(core_programs.between_nodes, len(nodes), str(tmp_path), nodes, reason)


def test_a_lost_rank_is_heard_of_and_the_others_end_normally(cuda_ranks: Pool) -> None:
    lose_one("cuda")


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_torch_give_what_gloo_does(
    cuda_ranks: Pool, tmp_path: Path, size: int
) -> None:
    found = cuda_ranks.run(c10d_programs.all_collectives, size, str(tmp_path))
    assert found == [sorted(COLLECTIVES)] * size


@pytest.mark.parametrize("name", ["train_with_ddp", "train_with_fsdp"])
@pytest.mark.parametrize("size", [2, 3])
def test_ddp_and_fsdp2_train_as_one_rank_on_the_cpu(
    cuda_ranks: Pool, tmp_path: Path, name: str, size: int
) -> None:
    found = cuda_ranks.run(getattr(c10d_programs, name), size, str(tmp_path))
    assert max(found) < CLOSE


def test_collectives_of_torch_never_wait_for_the_device(cuda_ranks: Pool, tmp_path: Path) -> None:
    cuda_ranks.run(c10d_programs.no_waits_of_groups, 2, str(tmp_path))


@pytest.mark.parametrize("name", ["operations", "other_order", "batch_norm"])
@pytest.mark.parametrize("size", [2, 3])
def test_operations_of_hsgd_torch_are_right(cuda_ranks: Pool, name: str, size: int) -> None:
    cuda_ranks.run(getattr(torch_programs, name), size)


def test_a_step_never_waits_for_the_device(cuda_ranks: Pool) -> None:
    cuda_ranks.run(torch_programs.no_waits_of_a_step, 2)


def test_mismatches_are_refused_on_all_ranks_and_the_job_goes_on(cuda_ranks: Pool) -> None:
    assert cuda_ranks.run(torch_programs.mismatch, 3) == [["HorovodInternalError"] * 2] * 3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", torch_programs.OPTIMIZERS)
def test_a_distributed_optimizer_trains_as_one_rank_on_the_cpu(
    cuda_ranks: Pool, optimizer: str, size: int
) -> None:
    found = cuda_ranks.run(torch_programs.train_optimizer, size, optimizer, "none")
    assert max(found) < CLOSE


def test_fp16_compression_is_off_by_its_rounding(cuda_ranks: Pool) -> None:
    found = cuda_ranks.run(torch_programs.train_optimizer, 2, "sgd", "fp16")
    assert max(found) < 1e-2


def test_overlap_is_reported(cuda_ranks: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asserted: how much hides depends on the machine."""
    for rank, found in enumerate(cuda_ranks.run(core_programs.overlap, 2)):
        figures = ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items())
        with capsys.disabled():
            print(f"\n  rank {rank}: {figures}", end="")
