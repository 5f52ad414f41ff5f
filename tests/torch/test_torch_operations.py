"""Operations of hsgd.torch without Horovod: what Horovod does not have, or does otherwise. What
both have is compared in test_torch_horovod.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from hsgd.optim import LARS
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 4


def on(ranks: Ranks, size: int, function: Any, *args: Any) -> list[Any]:
    return ranks.run(function, meeting_point(), size, *args, on=range(size))


# --- objects ---


def with_objects_of_different_types(seat: Seat, path: str, size: int) -> list[Any]:
    with job(seat, path, size) as hvd:
        own = "the root's" if seat.rank == 0 else None
        return [hvd.broadcast_object(own), hvd.allgather_object(own)]


def test_objects_may_have_another_type_on_each_rank(ranks: Ranks) -> None:
    wanted = ["the root's", ["the root's", None, None]]
    assert on(ranks, 3, with_objects_of_different_types) == [wanted] * 3


# --- a default device ---


def with_a_default_device(seat: Seat, path: str, size: int) -> list[Any]:
    """torch makes tensors elsewhere unless it is told where: what hsgd makes for itself must not
    be among them.
    """
    with job(seat, path, size) as hvd:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
        tensors = [torch.full((size,), float(seat.rank)) for _ in range(2)]
        sparse = torch.eye(2).to_sparse()
        torch.set_default_device("meta")
        try:
            found = [hvd.broadcast_object({"rank": seat.rank}, 1), hvd.allgather_object(seat.rank)]
            hvd.broadcast_optimizer_state(optimizer, 0)
            found.append(hvd.allreduce(tensors[0], op=hvd.Adasum).device.type)
            rows, splits = hvd.alltoall(tensors[1], [1] * size)
            found += [rows.tolist(), splits.tolist()]
            found.append(hvd.sparse_allreduce_async(sparse, "eye", hvd.Sum)().device.type)
            hvd.join()
        finally:
            torch.set_default_device("cpu")
        return found


def test_a_default_device_of_torch_changes_nothing(ranks: Ranks) -> None:
    wanted = [{"rank": 1}, [0, 1, 2], "cpu", [0.0, 1.0, 2.0], [1, 1, 1], "cpu"]
    assert on(ranks, 3, with_a_default_device) == [wanted] * 3


# --- writes in place ---


def one_row(seat: Seat, path: str, size: int) -> list[float]:
    """Rank 0 changes a row, which a sample of elements need not show, and tells the others."""
    with job(seat, path, size) as hvd:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(300, 1000))
        gradient = torch.randn(300, 1000)
        optimizer = LARS([weight], lr=0.1, momentum=0.9)
        for step in range(3):
            if step == 1:
                if seat.rank == 0:
                    with torch.no_grad():
                        weight[7] = 5.0
                before = weight._version
                hvd.broadcast_parameters({"weight": weight}, 0)
                assert weight._version > before
            weight.grad = gradient.clone()
            optimizer.step()
        before = gradient._version
        hvd.allreduce_(gradient)
        assert gradient._version > before
        return [weight.double().sum().item(), *weight[:, 0].tolist()]


def test_torch_counts_what_is_written_in_place_so_lars_stays_equal(ranks: Ranks) -> None:
    first, *others = on(ranks, 3, one_row)
    assert others == [first] * 2


# --- dtypes and compression ---


def more_dtypes(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        for dtype in (torch.bfloat16, torch.uint8, torch.int8):
            mine = torch.arange(4).to(dtype) + seat.rank
            total = hvd.allreduce(mine, op=hvd.Sum)
            assert total.dtype == dtype
            assert total.tolist() == [size * n + sum(range(size)) for n in range(4)]
        for dtype in (torch.bool, torch.complex64, torch.int16, torch.bfloat16):
            mine = torch.full((2, 3), seat.rank).to(dtype)
            rows = hvd.allgather(mine)
            assert rows.dtype == dtype and rows.shape == (2 * size, 3)
            assert torch.equal(rows[2 * seat.rank : 2 * seat.rank + 2], mine)
            assert torch.equal(
                hvd.broadcast(mine, size - 1), torch.full((2, 3), size - 1).to(dtype)
            )
            assert torch.equal(
                hvd.alltoall(torch.full((size, 2), seat.rank).to(dtype)),
                torch.arange(size).to(dtype)[:, None].expand(size, 2),
            )
            assert hvd.allgather(torch.empty(0, 3, dtype=dtype)).shape == (0, 3)
            assert hvd.allgather(torch.empty(2, 0, dtype=dtype)).shape == (2 * size, 0)
            assert torch.equal(
                hvd.broadcast(torch.tensor(seat.rank).to(dtype), 0), torch.tensor(0).to(dtype)
            )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dtypes_that_horovod_does_not_take(ranks: Ranks, size: int) -> None:
    on(ranks, size, more_dtypes)


def bf16(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        tensor = torch.tensor([1.0, 1e30, 3.0]) * (seat.rank + 1)
        total = hvd.allreduce(tensor, compression=hvd.Compression.bf16, op=hvd.Sum)
        assert total.dtype == torch.float32
        assert torch.allclose(total, torch.tensor([3.0, 3e30, 9.0]), rtol=1e-2)
        counts = hvd.allreduce(torch.tensor([257]), compression=hvd.Compression.bf16, op=hvd.Sum)
        assert counts.tolist() == [514]


def test_bf16_keeps_the_range_of_float32_and_leaves_integers(ranks: Ranks) -> None:
    on(ranks, 2, bf16)


# --- functions ---


def parameters_from_anything(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        torch.manual_seed(seat.rank)
        model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        hvd.broadcast_parameters(model.named_parameters(), 1)
        torch.manual_seed(1)
        expected = nn.Conv2d(2, 3, 2)
        assert torch.equal(model.weight, expected.weight)
        hvd.broadcast_parameters((p for p in model.parameters()), 0)
        flag = {"seen": torch.tensor(seat.rank == 0), "count": torch.tensor(seat.rank)}
        hvd.broadcast_parameters(flag, 0)
        assert bool(flag["seen"]) and int(flag["count"]) == 0
        with pytest.raises(ValueError, match="lr is float, not a tensor"):
            hvd.broadcast_parameters({"lr": 0.5}, 0)


def test_broadcast_parameters_takes_generators_gaps_and_bools(ranks: Ranks) -> None:
    on(ranks, 2, parameters_from_anything)


def fresh_optimizers(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seat.rank + 1))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        state = optimizer.state[model.weight]  # of a step on zeros
        assert float(state["step"]) == 1 and not state["exp_avg"].any()
        optimizer.state.clear()
        if seat.rank == 0:  # a resumed run: only the root has a state
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_optimizer_state(wrapped, 0)
        state = wrapped.state[model.weight]
        assert float(state["step"]) == 1
        assert state["exp_avg"].abs().sum() > 0


def test_ranks_without_a_state_get_the_roots(ranks: Ranks) -> None:
    on(ranks, 2, fresh_optimizers)


# --- process sets ---


def sets_at_init(seat: Seat, path: str, size: int) -> None:
    hvd: Any
    from hsgd.torch import ProcessSet

    even, odd = ProcessSet([0, 2]), ProcessSet([3, 1])
    with job(seat, path, size, process_sets=[even, odd]) as hvd:
        mine = odd if seat.rank % 2 else even
        assert odd.ranks == [1, 3] and mine.included() and mine.rank() == seat.rank // 2
        for n in range(20):  # sets do not wait for one another
            assert hvd.allreduce(torch.ones(1) * seat.rank, process_set=mine) == 1 + seat.rank % 2
            if n % 5 == 0:
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"all.{n}") == size
        orders = [even, hvd.global_process_set] if seat.rank else [hvd.global_process_set, even]
        handles = [
            hvd.allreduce_async(torch.ones(2), name="crossing", op=hvd.Sum, process_set=each)
            for each in orders
            if each.included()
        ]
        for handle in handles:
            assert hvd.synchronize(handle)[0] in (2, 4)
        with pytest.raises(ValueError, match="Set HOROVOD_DYNAMIC_PROCESS_SETS=1"):
            hvd.add_process_set([0, 1])


def test_process_sets_of_init_work_side_by_side(ranks: Ranks) -> None:
    on(ranks, 4, sets_at_init)


def twice_the_same_set(seat: Seat, path: str, size: int) -> None:
    from hsgd.torch import ProcessSet

    with (
        pytest.raises(ValueError, match="process_sets entry number 1 is a duplicate"),
        job(seat, path, size, process_sets=[ProcessSet([0, 1]), ProcessSet([1, 0])]),
    ):
        pass


def test_a_set_that_is_there_twice_is_refused(ranks: Ranks) -> None:
    on(ranks, 3, twice_the_same_set)


def own_sets(seat: Seat, path: str, size: int) -> tuple[int | None, list[int]]:
    from hsgd.torch.job import runtime

    with job(seat, path, size):
        job_now = runtime.current()
        return job_now.register_own([seat.rank % 2 + 2, seat.rank % 2])


def test_ranks_that_each_name_their_own_set_get_the_same_numbers(ranks: Ranks) -> None:
    assert on(ranks, 4, own_sets) == [(1, [0, 2]), (2, [1, 3])] * 2


# --- SyncBatchNorm ---


def batch_norm(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        generator = torch.Generator().manual_seed(7)
        whole = torch.randn(6, 3, 4, generator=generator, dtype=torch.float64)
        factors = torch.randn(6, 3, 4, generator=generator, dtype=torch.float64)
        cuts = [0, 1, 6] if size == 2 else [0, 1, 3, 6]
        part = slice(cuts[seat.rank], cuts[seat.rank + 1])
        ours, plain = hvd.SyncBatchNorm(3, momentum=None).double(), nn.BatchNorm1d(3, momentum=None)
        plain = plain.double()
        for step in range(2):
            mine = (whole[part] * (step + 1)).requires_grad_()
            everything = (whole * (step + 1)).requires_grad_()
            output, expected = ours(mine), plain(everything)
            assert torch.allclose(output, expected[part])
            (output * factors[part]).sum().backward()
            (expected * factors).sum().backward()
            assert mine.grad is not None and everything.grad is not None
            assert torch.allclose(mine.grad, everything.grad[part])
        assert torch.allclose(ours.running_mean, plain.running_mean)
        assert torch.allclose(ours.running_var, plain.running_var)
        assert int(ours.num_batches_tracked) == 2
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(hvd.allreduce(one.grad, op=hvd.Sum), other.grad)
        ours.eval(), plain.eval()
        assert torch.allclose(ours(whole[part]), plain(whole)[part])
        with pytest.raises(ValueError, match="at least 2D"):
            ours(torch.ones(3))


@pytest.mark.parametrize("size", [2, 3])
def test_sync_batch_norm_is_batch_norm_of_the_whole_batch(ranks: Ranks, size: int) -> None:
    on(ranks, size, batch_norm)


# --- what needs Horovod, and what is not there ---


def without_horovod(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        assert hvd.mpi_enabled() is False and hvd.gloo_enabled() is False
        with pytest.raises(ValueError, match="MPI is not enabled"):
            hvd.mpi_threads_supported()
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=hvd.rank() + 1)
        assert hvd.elastic.run(lambda state: state.epoch)(state) == 1
        with pytest.raises(ValueError, match=r"tensor is on meta; hsgd works on host memory"):
            hvd.allreduce(torch.ones(2, device="meta"))
        with pytest.raises(ValueError, match="tensor is on meta"):
            hvd.broadcast_async_(torch.ones(2, device="meta"), 0)


def test_what_is_horovods_own_says_so(ranks: Ranks) -> None:
    on(ranks, 2, without_horovod)


def again_and_again(seat: Seat, paths: list[str], size: int) -> int:
    for path in paths:
        with job(seat, path, size) as hvd:
            hvd.init()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == size
        assert not hvd.is_initialized()
        hvd.shutdown()
    return len(os.listdir("/proc/self/fd"))


def test_init_and_shutdown_leave_nothing_open(ranks: Ranks) -> None:
    def run(times: int) -> list[int]:
        paths = [meeting_point() for _ in range(times)]
        return ranks.run(again_and_again, paths, 2, on=range(2))

    first = run(1)
    assert run(4) == first
