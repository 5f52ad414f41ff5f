"""torch.ops.hsgd: the bits of Comm, eager and compiled, whoever implements the operators."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from hsgd import Comm, HsgdError, operators
from hsgd.operators import Group, kernels
from outcomes import told_by
from ranks import PATIENT, Ranks, Seat, meeting_point
from toolkit.forked_child import in_forked_child

__all__: list[str] = []

SIZES = (1, 2, 3)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES += (torch.int8, torch.int32, torch.int64, torch.uint8)
BROKEN_S = 10.0
COMPILED_S = 200.0  # torch.compile starts compilers


# Torch older than 2.10 has none but those in Python.
KINDS = ["python"] if "older" in kernels.why_in_python() else ["native", "python"]


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(max(SIZES)) as pool:
        pool.run(choose, request.param)
        yield pool


def choose(seat: Seat, kind: str) -> None:
    if kind == "python":
        kernels.LIBRARY = Path("/nonexistent")
    assert (not kernels.why_in_python()) is (kind == "native")


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


@pytest.mark.long
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_gradients_are_those_of_all_losses(ranks: Ranks, backend: str | None) -> None:
    ranks.run(differentiate, meeting_point(), backend, on=range(2), limit_s=COMPILED_S)


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


@pytest.mark.long
def test_compiled_programs_have_the_operators_in_their_graph(ranks: Ranks) -> None:
    ranks.run(compile_all, meeting_point(), on=range(2), limit_s=COMPILED_S)


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
        assert "hsgd.allreduce_" in seen and "hsgd.broadcast_" in seen
        functions = {"hsgd.allreduce_into", "hsgd.allgather_into", "hsgd.reduce_scatter_into"}
        assert functions <= set(inner_targets(program, x))


def inner_targets(program: Callable[[Tensor], object], x: Tensor) -> list[str]:
    """What the graphs call that a backend gets when torch has traced all functions."""
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        for node in graph.graph.nodes:
            seen.extend(str(word).removesuffix(".default") for word in (node.target, *node.args))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(program, backend=aot_autograd(fw_compiler=look), fullgraph=True)(x)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_nobody_reads_is_sent_all_the_same(ranks: Ranks, backend: str) -> None:
    assert ranks.run(leave_unread, meeting_point(), backend, on=range(2), limit_s=COMPILED_S) == [
        [35.0],
        [30.0],
    ]


def leave_unread(seat: Seat, path: str, backend: str) -> list[float]:
    """Rank 0 reads results that rank 1 leaves: a call less on one rank would shift all others."""
    with communicator(seat, path, 2) as comm:
        group = operators.group(comm)

        def program(x: Tensor) -> Tensor:
            first = operators.allreduce(x, group)
            second = operators.allreduce(x * 10, group)
            scratch = x * 100
            operators.broadcast_(scratch, group)
            operators.allreduce_(x * 1000, group)
            last = operators.allreduce(x * 5, group)
            return second + last + first * (1 if seat.rank == 0 else 0)

        def program_of_other(x: Tensor) -> Tensor:
            operators.allreduce(x, group)
            second = operators.allreduce(x * 10, group)
            operators.broadcast_(x * 100, group)
            operators.allreduce_(x * 1000, group)
            return second + operators.allreduce(x * 5, group)

        mine = program if seat.rank == 0 else program_of_other
        found: Tensor = torch.compile(mine, backend=backend, fullgraph=True)(torch.ones(1))
        return (found + (3 if seat.rank == 0 else 0)).tolist()  # type: ignore[no-any-return]


def test_operators_in_place_are_no_part_of_a_backward_pass(ranks: Ranks) -> None:
    ranks.run(record, meeting_point(), on=range(1))


def record(seat: Seat, path: str) -> None:
    with communicator(seat, path, 1) as comm:
        group = operators.group(comm)
        x = torch.ones(3, requires_grad=True)
        for call in (operators.allreduce_, operators.broadcast_):
            y = x.exp()
            with pytest.raises(ValueError, match=r"requires grad.*torch\.no_grad\(\)"):
                call(y, group)
            with torch.no_grad():
                call(y, group)  # which exp() has kept
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_torch_finds_schemas_shapes_and_gradients_consistent(ranks: Ranks) -> None:
    ranks.run(check_with_torch, meeting_point(), on=range(1))


def check_with_torch(seat: Seat, path: str) -> None:
    with communicator(seat, path, 1) as comm:
        group, ops = operators.group(comm), torch.ops.hsgd
        x = torch.ones(4, 2, requires_grad=True)
        plain, out = x.detach().clone(), torch.empty(4, 2)
        torch.library.opcheck(ops.allreduce_into.default, (out, plain, group.number, "sum"))
        torch.library.opcheck(ops.allgather_into.default, (out, plain, group.number))
        torch.library.opcheck(ops.reduce_scatter_into.default, (out, plain, group.number, "mean"))
        for function in (
            lambda y: operators.allreduce(y, group, "mean"),
            lambda y: operators.allgather(y, group),
            lambda y: operators.reduce_scatter(y, group),
        ):
            assert torch.autograd.gradcheck(function, x.detach().double().requires_grad_())
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
    with pytest.raises(errors, match=r"dtype.*[Cc]omplex|complex"):
        operators.allreduce(x.to(torch.complex64), group)
    with pytest.raises(errors, match="mean"):
        operators.allreduce(x.long(), group, "mean")
    with pytest.raises(errors, match="cannot be split evenly over 2 ranks"):
        operators.reduce_scatter(torch.ones(3), group)
    with pytest.raises(errors, match="root"):
        operators.broadcast_(x, group, 2)
    with pytest.raises(errors, match=r"allgather.*(shape|rows)"):
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


@pytest.mark.long
def test_a_communicator_that_nobody_refers_to_goes(ranks: Ranks) -> None:
    ranks.run(drop, on=range(1))


def drop(seat: Seat) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd")) + len(list(open("/proc/self/maps")))

    counts = []
    for _ in range(20):
        group = operators.group(Comm.local(meeting_point(), 0, 1, PATIENT))
        gc.collect()
        counts.append(descriptors())
        with pytest.raises(RuntimeError, match="no open communicator has the number"):
            operators.allreduce(torch.ones(2), group)
    assert max(counts[5:]) - min(counts[5:]) < 5, counts


@pytest.mark.long
def test_open_calls_keep_their_arrays(ranks: Ranks) -> None:
    ranks.run(drop_with_open_calls, meeting_point(), on=range(2))


def drop_with_open_calls(seat: Seat, path: str) -> None:
    """A communicator is closed, or dropped, while calls are open and an operator has a share."""
    for close in (True, False):
        comm = communicator(seat, f"{path}-{close}", 2)
        operators.group(comm)
        if seat.rank == 1:
            time.sleep(0.2)
        found = torch.ones(300_000)
        for _ in range(4):
            comm.allreduce_async(found, out=found)
        if close:
            comm.close()
        del comm
        gc.collect()
        assert bool((found == 16).all())


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


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_ends_the_wait(kind: str) -> None:
    with Ranks(2) as pool:
        pool.run(choose, kind)
        pool.start(wait_alone, meeting_point())
        assert [pool.hear(rank) for rank in range(2)] == ["ready"] * 2
        time.sleep(1)  # rank 0 is in its call: nothing else tells
        pool.signal(0, signal.SIGINT)
        (outcome,) = pool.finish(on=[0])
        pool.send(1, "go")
        pool.finish(on=[1])
    assert outcome.error is None, outcome.trace
    name, line = outcome.value
    assert name == ("RuntimeError" if kind == "native" else "KeyboardInterrupt")
    assert kind == "python" or "interrupted" in line


def wait_alone(seat: Seat, path: str) -> tuple[str, str]:
    comm = communicator(seat, path, 2)
    group = operators.group(comm)
    operators.allreduce(torch.ones(4), group)
    seat.tell("ready")
    if seat.rank == 1:
        seat.pipe.recv()
        return "", ""
    begin = time.monotonic()
    try:
        operators.allreduce(torch.ones(4), group)
    except (KeyboardInterrupt, RuntimeError) as error:
        assert time.monotonic() - begin < BROKEN_S
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_forked_child_is_refused(ranks: Ranks) -> None:
    ranks.run(fork, meeting_point(), on=range(1))


def fork(seat: Seat, path: str) -> None:
    with communicator(seat, path, 1) as comm:
        group = operators.group(comm)
        operators.allreduce(torch.ones(4), group)
        in_forked_child(lambda: told_by(lambda: operators.allreduce(torch.ones(4), group)))
        operators.allreduce(torch.ones(4), group)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_rank_ends_the_wait(kind: str) -> None:
    with Ranks(2) as pool:
        pool.run(choose, kind)
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
