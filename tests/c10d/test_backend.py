"""torch.distributed.init_process_group("hsgd"): every collective does what gloo's does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GatherOptions

from backend_programs import (
    COLLECTIVES,
    group,
    made,
    not_in_torch_2_7,
    register_standin,
    run_collectives,
    run_what_gloo_has,
)
from gloo_reference import over_gloo
from hsgd.c10d import register
from ranks import Ranks, Seat

__all__: list[str] = []

MOST_RANKS = 3


def do_collectives(seat: Seat, path: str, size: int) -> dict[str, list[Any]]:
    with group(seat.rank, size, path):
        return run_collectives(seat.rank, size)


@pytest.fixture(scope="module")
def results(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], list[dict[str, list[Any]]]]:
    """What each rank got, by the number of ranks and the backend."""
    found = {}
    for size in (1, 2, 3):
        path = str(tmp_path_factory.mktemp("store") / "file")
        found[size, "hsgd"] = ranks.run(do_collectives, path, size, on=range(size))
        found[size, "gloo"] = over_gloo(size, path, run_what_gloo_has)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_what_gloo_gives(
    results: dict[tuple[int, str], list[dict[str, list[Any]]]], name: str, size: int
) -> None:
    if name not in results[size, "gloo"][0]:
        pytest.skip("gloo of this torch has no such collective")
    for rank in range(size):
        assert results[size, "hsgd"][rank][name] == results[size, "gloo"][rank][name], rank


def do_gather_single(seat: Seat, path: str) -> list[Any]:
    with group(seat.rank, 3, path):
        place = torch.zeros(3, 2, 2)
        if hasattr(dist, "gather_single"):
            dist.gather_single(made(seat.rank, 4), place if seat.rank == 1 else None, dst=1)
        else:  # torch 2.14 brought the function, which calls the method like this
            options = GatherOptions()
            options.rootRank = 1
            whole: Any = dist.group.WORLD
            whole.gather_single(place, made(seat.rank, 4), options).wait()
        assert torch.equal(place[0], made(0, 4).view(2, 2)) == (seat.rank == 1)
        if seat.rank != 1:
            return place.tolist()
        return (place - torch.stack([made(rank, 4).view(2, 2) for rank in range(3)])).tolist()


def test_gather_single_joins_the_tensors_of_all_at_the_root(ranks: Ranks, path: str) -> None:
    nothing = torch.zeros(3, 2, 2).tolist()
    assert ranks.run(do_gather_single, path) == [nothing] * 3


OPS = dist.ReduceOp
PLAIN = {
    OPS.SUM: torch.add,
    OPS.PRODUCT: torch.mul,
    OPS.MIN: torch.minimum,
    OPS.MAX: torch.maximum,
}
BITS = {OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
UNSIGNED = {torch.uint16: 2**16 - 3, torch.uint32: 2**32 - 3, torch.uint64: 2**63 + 7}


def combined(op: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    if op == OPS.AVG:
        return torch.stack(parts).sum(0) / len(parts)
    total = parts[0]
    for part in parts[1:]:
        total = {**PLAIN, **BITS}[op](total, part).to(part.dtype)
    return total


def do_reduce(seat: Seat, path: str, size: int) -> list[str]:
    wrong = []
    cases = [(op, dtype) for op in (*PLAIN, OPS.AVG) for dtype in FLOATS]
    cases += [(op, dtype) for op in PLAIN for dtype in INTEGERS]
    cases += [(op, dtype) for op in BITS for dtype in (*INTEGERS, torch.bool)]
    cases += [(op, dtype) for op in (OPS.SUM, OPS.AVG) for dtype in (torch.complex64,)]
    with group(seat.rank, size, path):
        for op, dtype in cases:
            parts = [made(rank, 4 * size, dtype) for rank in range(size)]
            expected = combined(op, parts)
            tensor = parts[seat.rank].clone()
            dist.all_reduce(tensor, op)
            kept = torch.empty(4, dtype=dtype)
            dist.reduce_scatter_tensor(kept, parts[seat.rank], op)
            own = expected[4 * seat.rank :][:4]
            close = torch.allclose(tensor, expected) and torch.allclose(kept, own)
            if not close or not torch.equal(parts[seat.rank], made(seat.rank, 4 * size, dtype)):
                wrong.append(f"{op} {dtype}: {tensor} {kept}, not {expected}")
    return wrong


@pytest.mark.parametrize("size", [1, 3])
def test_reductions_are_exact_for_every_op_and_dtype(ranks: Ranks, path: str, size: int) -> None:
    assert ranks.run(do_reduce, path, size, on=range(size)) == [[]] * size


def do_reduce_unsigned(seat: Seat, path: str) -> list[str]:
    """torch itself does not compute with these: Python does."""
    wrong = []
    with group(seat.rank, 2, path):
        for dtype, large in UNSIGNED.items():
            modulus = 2 ** torch.iinfo(dtype).bits
            numbers = [[large, 2, 0], [large - 1, 3, large]]
            for op, function in {
                OPS.SUM: lambda a, b: a + b,
                OPS.PRODUCT: lambda a, b: a * b,
                OPS.MIN: min,
                OPS.MAX: max,
            }.items():
                expected = [function(a, b) % modulus for a, b in zip(*numbers, strict=True)]
                tensor = torch.tensor(numbers[seat.rank], dtype=dtype)
                dist.all_reduce(tensor, op)
                if tensor.tolist() != expected:
                    wrong.append(f"{op} {dtype}: {tensor.tolist()}, not {expected}")
    return wrong


def test_unsigned_integers_are_reduced_exactly(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_reduce_unsigned, path, on=range(2)) == [[]] * 2


def do_reduce_bool(seat: Seat, path: str) -> list[list[bool]]:
    found = []
    with group(seat.rank, 2, path):
        for op in PLAIN:
            tensor = torch.tensor(
                [[False, False, True, True], [False, True, False, True]][seat.rank]
            )
            dist.all_reduce(tensor, op)
            found.append(tensor.tolist())
    return found


def test_sum_and_product_of_bool_are_or_and_and(ranks: Ranks, path: str) -> None:
    either, both = [False, True, True, True], [False, False, False, True]
    assert ranks.run(do_reduce_bool, path, on=range(2)) == [[either, both, both, either]] * 2


ALL_DTYPES = (*FLOATS, *INTEGERS, *UNSIGNED, torch.bool, torch.complex64, torch.float8_e5m2)


def do_move(seat: Seat, path: str, size: int) -> list[str]:
    """What gloo does not move: other dtypes, lists of unequal tensors, tensors with gaps."""
    rank, wrong = seat.rank, []
    with group(rank, size, path):
        gaps = torch.arange(9.0)
        dist.all_reduce(gaps[::2])
        assert gaps.tolist() == [(1 if k % 2 else size) * k for k in range(9)]
        for dtype in ALL_DTYPES:
            report = made(rank, 5, dtype)
            dist.broadcast(report, size - 1)
            joined = torch.empty(5 * size, dtype=dtype)
            dist.all_gather_into_tensor(joined, made(rank, 5, dtype))
            places = [torch.empty(1 + rank + source).to(dtype) for source in range(size)]
            dist.all_to_all(places, [made(rank, 1 + rank + to, dtype, to) for to in range(size)])
            expected = [made(source, 1 + source + rank, dtype, rank) for source in range(size)]
            pairs = [(report, made(size - 1, 5, dtype))]
            pairs += [(joined, torch.cat([made(k, 5, dtype) for k in range(size)]))]
            pairs += zip(places, expected, strict=True)
            if any(a.tolist() != b.tolist() for a, b in pairs):
                wrong.append(str(dtype))
    return wrong


def test_every_dtype_is_moved(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_move, path, 3) == [[]] * 3


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "average of integers": (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), OPS.AVG),
        TypeError,
        "AVG of torch.int32 would round; use SUM and divide",
    ),
    "product of complex": (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64), OPS.PRODUCT),
        (TypeError, ValueError),
        "complex",
    ),
    "bits of floats": (
        lambda: dist.all_reduce(torch.ones(3), OPS.BXOR),
        TypeError,
        "BXOR of torch.float32 has no meaning",
    ),
    "small list": (
        lambda: dist.group.WORLD.allgather([[torch.ones(3)]], [torch.ones(3)]),
        ValueError,
        "all_gather: the list has tensors of [3] elements on 2 ranks",
    ),
    "output of another size": (
        lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(7)),
        ValueError,
        "reduce_scatter_tensor: the joined tensor has 7 elements, the parts of all ranks 6",
    ),
    "uneven split": (
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
        ValueError,
        "3 rows on 2 ranks; give split sizes",
    ),
    "wrong splits": (
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [2, 1]),
        ValueError,
        "output split sizes are [1, 1], rows 3",
    ),
    "sparse broadcast": (
        lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        TypeError,
        "only all_reduce with SUM takes sparse_coo",
    ),
    "other device": (
        lambda: dist.all_reduce(torch.ones(3, device="meta")),
        ValueError,
        "the process group has no backend for meta tensors",
    ),
    "new timeout": (
        lambda: dist.group.WORLD.set_timeout(dist.default_pg_timeout * 2),
        ValueError,
        "the group was made with 30 s, which cannot change",
    ),
}


def do_wrong(seat: Seat, path: str) -> dict[str, tuple[str, str]]:
    """Both ranks are wrong in the same way; afterwards the group works as before."""
    found = {}
    with group(seat.rank, 2, path):
        for name, (call, _, _) in WRONG.items():
            try:
                call()
            except Exception as error:
                found[name] = (type(error).__name__, str(error))
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 3
    return found


def test_what_cannot_be_done_is_refused_in_one_line(ranks: Ranks, path: str) -> None:
    found = ranks.run(do_wrong, path, on=range(2))[0]
    for name, (_, kinds, text) in WRONG.items():
        names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        kind, message = found[name]
        assert kind in names and text in message and "\n" not in message, (name, kind, message)


def do_async(seat: Seat, path: str, size: int) -> None:
    with group(seat.rank, size, path) as whole:
        tensors = [made(seat.rank, 1 + k * 1000) for k in range(40)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        joined = [torch.zeros(size * 3) for _ in range(4)]
        works += [
            dist.all_gather_into_tensor(place, made(seat.rank, 3), async_op=True)
            for place in joined
        ]
        late = made(seat.rank, 5)
        dist.all_reduce(late)  # blocking: after all that were called before
        assert all(work.is_completed() and work.is_success() for work in works)
        for work in reversed(works):
            assert work.wait()
            assert work.exception() is None
        for k, tensor in enumerate(tensors):
            parts = [made(rank, 1 + k * 1000) for rank in range(size)]
            assert torch.equal(tensor, combined(OPS.SUM, parts))
        early = whole.allreduce([tensor := made(seat.rank, 9)])
        chained = early.get_future().then(lambda future: future.value()[0] * 2)
        assert torch.equal(chained.wait(), 2 * tensor)
        assert early.get_future() is early.get_future()
        assert early.result()[0] is tensor
        other = torch.cuda.is_available()  # a future after the end is done at once
        assert early.get_future().done() or other


def test_asynchronous_calls_run_in_order_and_have_futures(ranks: Ranks, path: str) -> None:
    ranks.run(do_async, path, 3)


def do_mismatch(seat: Seat, path: str) -> tuple[str, str, str]:
    with group(seat.rank, 2, path):
        messages = []
        try:
            dist.all_reduce(torch.ones(3 + seat.rank))
        except ValueError as error:
            messages += [type(error).__name__, str(error)]
        work = dist.all_reduce(torch.ones(5 + seat.rank), async_op=True)
        try:
            work.get_future().wait()
        except Exception as error:
            messages.append(str(error))
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]
    return tuple(messages)  # type: ignore[return-value]


def test_different_shapes_are_an_error_on_all_ranks_and_the_group_goes_on(
    ranks: Ranks, path: str
) -> None:
    for kind, message, later in ranks.run(do_mismatch, path, on=range(2)):
        assert kind == "SignatureMismatch"
        assert "rank 0" in message and "rank 1" in message and "4" in message
        assert "rank 0" in later and "6" in later


def do_mixed(seat: Seat, path: str) -> list[str]:
    register_standin()
    seen = []
    for backend in ("cpu:hsgd,meta:standin", "meta:standin,cpu:hsgd"):
        with group(seat.rank, 2, path, backend) as whole:
            tensor = made(seat.rank, 4)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, made(0, 4) + made(1, 4))
            ghost = torch.ones(4, device="meta")
            dist.all_reduce(ghost)
            dist.broadcast(ghost, 0)
            dist.all_gather_into_tensor(torch.ones(8, device="meta"), ghost)
            dist.barrier()
            part = dist.new_group([0, 1])
            dist.all_reduce(ghost, group=part)
            dist.all_reduce(tensor, group=part)
            seen.append(str(whole._get_backend(torch.device("meta")).name()))
            seen += [device.type for device in whole._device_types]
    return seen


@not_in_torch_2_7
def test_other_devices_go_to_the_backend_that_was_configured_for_them(
    ranks: Ranks, path: str
) -> None:
    for seen in ranks.run(do_mixed, path, on=range(2)):
        assert seen == ["fake", "cpu", "meta"] * 2


def do_without_nccl(seat: Seat, path: str) -> str:
    with group(seat.rank, 1, path, "cpu:hsgd,meta:nccl"):
        try:
            dist.all_reduce(torch.ones(1, device="meta"))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_without_cuda_is_refused_in_one_line(ranks: Ranks, path: str) -> None:
    (text,) = ranks.run(do_without_nccl, path, on=range(1))
    assert text == "meta:nccl: this build of torch has no NCCL"


def do_bind_a_device(seat: Seat, path: str) -> list[str]:
    """torch lets device_id through where the machine has such a device."""
    register_standin()
    register()
    device, found = torch.device("meta", 0), []
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=device),
        mock.patch.object(torch.accelerator, "device_count", return_value=1),
    ):
        for backend in ("hsgd", "cpu:hsgd,meta:standin"):
            store = dist.FileStore(f"{path}-{len(found)}", 1)
            try:
                dist.init_process_group(
                    backend, store=store, rank=0, world_size=1, device_id=device
                )
            except ValueError as error:
                found.append(str(error))
            assert not dist.is_initialized()
    with group(seat.rank, 1, f"{path}-good"):  # torch counts groups anew when one was destroyed
        dist.barrier()
    return found


def test_a_bound_device_is_refused_in_one_line(ranks: Ranks, path: str) -> None:
    found = ranks.run(do_bind_a_device, path, on=range(1))[0]
    assert len(found) == 2
    for text in found:
        assert "without device_id" in text
        assert "\n" not in text


def do_profile(seat: Seat, path: str) -> set[str]:
    with group(seat.rank, 2, path), torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3))
        work = dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3), async_op=True)
        work.wait()
    return {event.key for event in profile.key_averages() if event.key.startswith("hsgd:")}


def test_a_profile_shows_the_collectives_that_a_rank_calls(ranks: Ranks, path: str) -> None:
    for names in ranks.run(do_profile, path, on=range(2)):
        assert {"hsgd:all_reduce", "hsgd:all_gather"} <= names
