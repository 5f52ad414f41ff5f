"""torch.ops.hsgd: the bits of Comm, eager and compiled, whoever implements the operators."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hsgd import Comm, HsgdError, operators
from hsgd.operators import Group, kernels
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

SIZES = (1, 2, 3)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES += (torch.int8, torch.int32, torch.int64, torch.uint8)
BROKEN_S = 10.0


@pytest.fixture(scope="module", params=["native", "python"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(max(SIZES)) as pool:
        pool.run(choose, request.param == "native")
        yield pool


def choose(seat: Seat, native: bool) -> None:
    if not native:
        kernels.LIBRARY = Path("/nonexistent")
    assert kernels.are_native() is native


def communicator(seat: Seat, path: str, size: int) -> Comm:
    return Comm.local(path, seat.rank, size, PATIENT)


@pytest.mark.parametrize("size", SIZES)
def test_operators_give_the_bits_of_comm(ranks: Ranks, size: int) -> None:
    ranks.run(compare, meeting_point(), size, on=range(size))


def compare(seat: Seat, path: str, size: int) -> None:
    with communicator(seat, path, size) as comm:
        group = operators.group(comm)
        assert operators.group(comm) is group
        for dtype in DTYPES:
            for shape in ((size * 2, 3), (size,), (size * 500, 7)):
                mine = torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 + seat.rank
                compare_one(comm, group, mine.to(dtype))


def compare_one(comm: Comm, group: Group, mine: Tensor) -> None:
    for op in ("sum", "min", "max", "prod", *(["mean"] if mine.is_floating_point() else [])):
        wanted = comm.allreduce(mine, op)
        check_same(operators.allreduce(mine, group, op), wanted)
        in_place = mine.clone()
        assert operators.allreduce_(in_place, group, op) is in_place
        check_same(in_place, wanted)
        check_same(operators.reduce_scatter(mine, group, op), comm.reduce_scatter(mine, op))
    check_same(operators.allgather(mine, group), comm.allgather(mine))
    root = comm.size - 1
    check_same(operators.broadcast_(mine.clone(), group, root), comm.broadcast(mine.clone(), root))


def check_same(given: Tensor, wanted: Tensor) -> None:
    assert given.dtype == wanted.dtype and given.shape == wanted.shape, (given, wanted)
    assert torch.equal(given, wanted), (given, wanted)


@pytest.mark.parametrize("size", [1, 3])
def test_tensors_have_any_layout_and_shape(ranks: Ranks, size: int) -> None:
    ranks.run(try_shapes, meeting_point(), size, on=range(size))


def try_shapes(seat: Seat, path: str, size: int) -> None:
    with communicator(seat, path, size) as comm:
        group = operators.group(comm)
        across = torch.arange(12.0).reshape(4, 3).t()
        check_same(operators.allreduce(across, group), across * size)
        in_place = torch.empty(4, 3).t().copy_(across)
        assert not in_place.is_contiguous()
        operators.allreduce_(in_place, group)
        check_same(in_place, across * size)
        operators.broadcast_(in_place.mul_(seat.rank + 1), group)
        check_same(in_place, across * size)
        check_same(operators.allgather(across, group), torch.cat([across] * size))
        none = torch.empty(0, 3)
        for given in (operators.allreduce(none, group), operators.allgather(none, group)):
            assert given.shape == (0, 3)
        assert operators.reduce_scatter(none, group).shape == (0, 3)
        check_same(operators.allreduce(torch.tensor(2.0), group), torch.tensor(2.0 * size))
        every = operators.allgather(torch.tensor(float(seat.rank)), group)
        check_same(every, torch.arange(float(size)))


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_gradients_are_those_of_all_losses(ranks: Ranks, backend: str | None) -> None:
    ranks.run(differentiate, meeting_point(), backend, on=range(2))


def differentiate(seat: Seat, path: str, backend: str | None) -> None:
    with communicator(seat, path, 2) as comm:
        group = operators.group(comm)

        def loss(x: Tensor) -> Tensor:
            y = operators.allreduce(x * x, group) * operators.allreduce(x, group, "mean")
            y = y + operators.reduce_scatter(operators.allgather(x * x, group), group)
            y = y + operators.allgather(operators.reduce_scatter(x * x, group, "mean"), group)
            return (y * (seat.rank + 1)).sum()

        run = loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True)
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64) + seat.rank
        x.requires_grad_()
        run(x).backward()
        torch.testing.assert_close(x.grad, numeric_gradient(comm, loss, x.detach()))
        with pytest.raises(ValueError, match="'max' has no gradient"):
            operators.allreduce(x, group, "max").sum().backward()


def numeric_gradient(comm: Comm, loss: object, x: Tensor) -> Tensor:
    """Of the sum of all ranks' losses: each element of each rank is moved in turn."""
    assert callable(loss)
    step, found = 1e-4, torch.zeros_like(x)
    for rank in range(comm.size):
        for place in range(x.numel()):
            sides = []
            for sign in (1, -1):
                moved = x.clone()
                moved.view(-1)[place] += sign * step * (rank == comm.rank)
                sides.append(comm.allreduce(loss(moved).reshape(1)).item())
            if rank == comm.rank:
                found.view(-1)[place] = (sides[0] - sides[1]) / (2 * step)
    return found


def test_compiled_programs_have_the_operators_in_their_graph(ranks: Ranks) -> None:
    ranks.run(compile_all, meeting_point(), on=range(2))


def compile_all(seat: Seat, path: str) -> None:
    with communicator(seat, path, 2) as comm:
        group = operators.group(comm)

        def program(x: Tensor) -> tuple[Tensor, ...]:
            y = operators.allreduce(x + 1, group)
            z = y * 2
            operators.allreduce_(z, group, "max")
            operators.broadcast_(z, group, 1)
            return operators.allgather(z, group), operators.reduce_scatter(y, group, "mean")

        x = torch.arange(8.0).reshape(4, 2) * (seat.rank + 1)
        wanted = program(x)
        seen: list[str] = []

        def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        for backend in (look, "aot_eager", "inductor"):
            torch._dynamo.reset()
            for given, want in zip(
                torch.compile(program, backend=backend, fullgraph=True)(x), wanted, strict=True
            ):
                check_same(given, want)
        names = ("allreduce", "allreduce_", "broadcast_", "allgather", "reduce_scatter")
        assert {f"hsgd.{name}" for name in names} <= set(seen)


def test_torch_finds_schemas_shapes_and_gradients_consistent(ranks: Ranks) -> None:
    ranks.run(check_with_torch, meeting_point(), on=range(1))


def check_with_torch(seat: Seat, path: str) -> None:
    with communicator(seat, path, 1) as comm:
        group, ops = operators.group(comm), torch.ops.hsgd
        x = torch.ones(4, 2, requires_grad=True)
        torch.library.opcheck(ops.allreduce.default, (x, group.number, "sum"))
        torch.library.opcheck(ops.allgather.default, (x, 1, group.number))
        torch.library.opcheck(ops.reduce_scatter.default, (x, 1, group.number, "mean"))
        plain = x.detach().clone()
        torch.library.opcheck(ops.allreduce_.default, (plain, group.number, "sum"))
        torch.library.opcheck(ops.broadcast_.default, (plain, 0, group.number))


def test_what_cannot_work_is_one_line(ranks: Ranks) -> None:
    ranks.run(refuse, meeting_point(), on=range(2))


def refuse(seat: Seat, path: str) -> None:
    comm = communicator(seat, path, 2)
    group, x = operators.group(comm), torch.ones(2, 3)
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match="op"):
        operators.allreduce(x, group, "median")  # type: ignore[arg-type]
    with pytest.raises(errors, match=r"dtype|complex"):
        operators.allreduce(x.to(torch.complex64), group)
    with pytest.raises(errors, match="mean"):
        operators.allreduce(x.long(), group, "mean")
    with pytest.raises(errors, match="cannot be split evenly over 2 ranks"):
        operators.reduce_scatter(torch.ones(3), group)
    with pytest.raises(errors, match="root"):
        operators.broadcast_(x, group, 2)
    with pytest.raises(errors, match="size is 3, the communicator has 2 ranks"):
        operators.allgather(x, Group(group.number, 3))
    with pytest.raises(errors, match=r"no open communicator has the number 77"):
        operators.allreduce(x, Group(77, 2))
    with pytest.raises(errors, match=r"has \d rows.* from each|rows"):
        operators.allgather(torch.ones(seat.rank + 1, 2), group)
    with pytest.raises(errors, match=r"rank 0.*rank 1"):  # told on both, and it goes on
        operators.allreduce(torch.ones(3 + seat.rank), group)
    check_same(operators.allreduce(x, group), 2 * x)
    comm.close()
    with pytest.raises(errors, match=f"no open communicator has the number {group.number}"):
        operators.allreduce(x, group)
    with pytest.raises(HsgdError, match="closed"):
        operators.group(comm)


def test_other_threads_run_while_one_waits(ranks: Ranks) -> None:
    ranks.run(wait_with_a_thread, meeting_point(), on=range(2))


def wait_with_a_thread(seat: Seat, path: str) -> None:
    with communicator(seat, path, 2) as comm:
        group, counted, stop = operators.group(comm), 0, threading.Event()

        def count() -> None:
            nonlocal counted
            while not stop.wait(0.01):
                counted += 1

        thread = threading.Thread(target=count)
        thread.start()
        if seat.rank == 1:
            time.sleep(0.5)
        operators.allreduce(torch.ones(4), group)
        stop.set()
        thread.join()
        assert counted > 10


@pytest.mark.parametrize("native", [True, False])
def test_a_lost_rank_ends_the_wait(native: bool) -> None:
    with Ranks(2) as pool:
        pool.run(choose, native)
        pool.start(lose, meeting_point())
        (outcome,) = pool.finish(on=[0])
    assert outcome.error is None, outcome.trace
    assert re.search(r"rank 1 ", outcome.value), outcome.value


def lose(seat: Seat, path: str) -> str:
    comm = communicator(seat, path, 2)
    group = operators.group(comm)
    operators.allreduce(torch.ones(4), group)
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as told:
        operators.allreduce(torch.ones(4), group)
    assert time.monotonic() - begin < BROKEN_S
    return str(told.value)
