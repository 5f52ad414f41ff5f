"""DistributedOptimizer after a HorovodInternalError that a script caught: nothing of the round that
failed is left, and training goes on in a new job, or in the same one."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hsgd import Comm, PeerLost
from ranks import PATIENT, Ranks, Seat, meeting_point
from test_torch_join import LR, loss_of, made, net, weights
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 2
pytestmark = pytest.mark.long

STEPS, FAILS_AT = 6, 3
TRIAL = 20  # steps, more than those in which an optimizer tries when buckets travel


def assert_trained(
    found: list[list[float]], model: nn.Module, plan: list[tuple[int, int]], momentum: float = 0.0
) -> None:
    """As one process trains that has the batches of as many ranks in each (step, ranks)."""
    plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for step, size in plan:
        plain.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank) / size).backward()
        plain.step()
    for ours, theirs in zip(found, weights(model), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def take_step(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


# --- a rank is lost, and the others go on without it ---

PLAN = [(step, 3 if step < FAILS_AT else 2) for step in range(STEPS)]


def weights_without_rank_2(function: Any, *args: Any) -> list[list[float]]:
    """Of ranks 0 and 1, which have the same bits, when rank 2 has died on the way."""
    with Ranks(3) as pool:
        pool.start(function, [meeting_point(), meeting_point()], *args)
        outcomes = pool.finish(on=[0, 1])
    assert [outcome.error for outcome in outcomes] == [None] * 2, outcomes[0].trace
    first, second = (outcome.value for outcome in outcomes)
    assert first == second
    return first  # type: ignore[no-any-return]


def restored(seat: Seat, paths: list[str], where: str) -> list[list[float]]:
    """What elastic.run does on the ranks that are left: restore, a new job, on_reset, sync."""
    with job(seat, paths[0], 3) as hvd:
        model = net()
        optimizer = made(hvd, model, strategy="overlap")
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        while state.step < STEPS:
            try:
                optimizer.zero_grad()
                if (seat.rank, state.step, where) == (2, FAILS_AT, "bucket"):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = loss_of(model, state.step, seat.rank)
                loss.backward()
                if (seat.rank, state.step, where) == (2, FAILS_AT, "named operation"):
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.allreduce(loss.detach(), name="loss")
                optimizer.step()
            except hvd.HorovodInternalError:
                assert state.step == FAILS_AT and hvd.size() == 3
                state.restore()
                hvd.shutdown()
                hvd.init(Comm.local(paths[1], seat.rank, 2, PATIENT))
                state.on_reset()
                state.sync()
                continue
            state.step += 1
            state.save()
        assert hvd.size() == 2
        return weights(model)


@pytest.mark.parametrize("where", ["bucket", "named operation"])
def test_an_elastic_state_is_restored_and_the_others_train_on(where: str) -> None:
    assert_trained(weights_without_rank_2(restored, where), net(), PLAN)


def alone_in_the_end(seat: Seat, paths: list[str]) -> list[list[float]]:
    """Rank 1 leaves; rank 0 drops that step, goes on in a job of its own, and then in none."""
    with job(seat, paths[0], 2) as hvd:
        model = net()
        optimizer = made(hvd, model)
        for step in range(FAILS_AT):
            take_step(model, optimizer, step, seat.rank)
        if seat.rank == 1:
            return []
        with pytest.raises(hvd.HorovodInternalError):
            take_step(model, optimizer, FAILS_AT, 0)
        hvd.shutdown()
        hvd.init(Comm.local(paths[1], 0, 1, PATIENT))
        for step in range(FAILS_AT, STEPS):
            take_step(model, optimizer, step, 0)
        hvd.shutdown()
        for step in range(STEPS, STEPS + 2):
            take_step(model, optimizer, step, 0)
        return weights(model)


def test_a_rank_that_is_left_alone_trains_on(ranks: Ranks) -> None:
    found = ranks.run(alone_in_the_end, [meeting_point(), meeting_point()], on=range(2))[0]
    plan = [(step, 2 if step < FAILS_AT else 1) for step in range(STEPS + 2)]
    assert_trained(found, net(), plan)


def shared_again(seat: Seat, paths: list[str]) -> list[list[float]]:
    """The parameters lie in memory that the lost rank may have left half updated."""
    with job(seat, paths[0], 3) as hvd:
        model = net()

        def share() -> Any:
            sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
            return hvd.DistributedOptimizer(sgd, model.named_parameters(), node_shared=True)

        optimizer = share()
        step, causes = 0, []
        while step < STEPS:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if (seat.rank, step) == (2, FAILS_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                take_step(model, optimizer, step, seat.rank)
            except hvd.HorovodInternalError as error:
                causes.append(type(error.__cause__))
                hvd.shutdown()
                hvd.init(Comm.local(paths[1], seat.rank, 2, PATIENT))
                optimizer = share()
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            else:
                step += 1
        assert causes == [PeerLost]
        hvd.barrier()
        return weights(model)


def test_node_shared_parameters_are_shared_again_without_a_lost_rank() -> None:
    assert_trained(weights_without_rank_2(shared_again), net(), PLAN, momentum=0.5)


# --- an error that all ranks catch, in the same job ---


def with_a_layer_more(seat: Seat, path: str) -> list[list[float]]:
    """Rank 1 adds a layer one step too early; afterwards all begin again from the same weights."""
    with job(seat, path, 2) as hvd:
        model, more = net(), nn.Linear(2, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HSGD_CHECK_REPLICAS", "0")  # or rank 1 meets the comparison of step 1
            optimizer = made(hvd, model)
        take_step(model, optimizer, 0, seat.rank)
        if seat.rank == 0:  # ends this step, and meets what rank 1 asks for with the next one
            take_step(model, optimizer, 1, 0)
        else:
            optimizer.add_param_group({"params": list(more.parameters())})
            model.append(more)
        with pytest.raises(hvd.HorovodInternalError, match="terms of DistributedOptimizer"):
            take_step(model, optimizer, 1, seat.rank)
        if seat.rank == 0:
            optimizer.add_param_group({"params": list(more.parameters())})
            model.append(more)
        model.load_state_dict(with_more().state_dict())
        for step in range(STEPS):
            take_step(model, optimizer, step, seat.rank)
        return weights(model)


def with_more() -> nn.Module:
    return net().append(nn.Linear(2, 2))


def test_ranks_that_disagreed_about_the_model_go_on_when_they_agree(ranks: Ranks) -> None:
    found = ranks.run(with_a_layer_more, meeting_point(), on=range(2))
    assert found[0] == found[1]
    assert_trained(found[0], with_more(), [(step, 2) for step in range(STEPS)])


def with_a_bad_compression(seat: Seat, path: str) -> list[list[float]]:
    """Code of the user fails on rank 0 alone, once; that rank skips the step."""
    with job(seat, path, 2) as hvd:
        armed: list[bool] = []

        class Fragile(hvd.Compression.none):  # type: ignore[misc,name-defined]
            @staticmethod
            def decompress(tensor: Tensor, ctx: Any) -> Tensor:
                if armed:
                    raise RuntimeError("out of order")
                return tensor

        model = net()
        optimizer = made(hvd, model, compression=Fragile)
        for step in range(TRIAL):
            saved = [parameter.detach().clone() for parameter in model.parameters()]
            if seat.rank == 0 and step == FAILS_AT:
                armed.append(True)
                with pytest.raises(RuntimeError, match="out of order"):
                    take_step(model, optimizer, step, seat.rank)
                armed.clear()
            else:
                take_step(model, optimizer, step, seat.rank)
            if step == FAILS_AT:  # all forget it
                for parameter, value in zip(model.parameters(), saved, strict=True):
                    parameter.data.copy_(value)
        assert optimizer.overlap_choice.during_s is not None  # the ranks end its trial together
        return weights(model)


def test_an_error_of_a_compression_leaves_no_trace_in_the_next_step(ranks: Ranks) -> None:
    found = ranks.run(with_a_bad_compression, meeting_point(), on=range(2))
    assert found[0] == found[1]
    assert_trained(found[0], net(), [(step, 2) for step in range(TRIAL) if step != FAILS_AT])


def with_a_compression_that_stops(
    seat: Seat,
    path: str,
    fails_at: int,
    error: type[BaseException],
    fails: dict[int, int],
    told: list[int],
) -> list[list[float]]:
    """Code of the user fails before a bucket is sent, once. fails: bucket by rank. told: ranks that
    learn that the others have left their step.
    """
    with job(seat, path, 2) as hvd:
        model = net()
        calls, last = 0, fails_at * len(weights(model)) + fails.get(seat.rank, 0)

        class Fragile(hvd.Compression.none):  # type: ignore[misc,name-defined]
            @staticmethod
            def compress(tensor: Tensor) -> tuple[Tensor, Any]:
                nonlocal calls
                calls += 1
                if seat.rank in fails and calls == last + 1:
                    raise error("out of order")
                return tensor, None

        optimizer = made(hvd, model, compression=Fragile)
        for step in range(fails_at):
            take_step(model, optimizer, step, seat.rank)
        if seat.rank in fails:
            with pytest.raises(error, match="out of order"):
                take_step(model, optimizer, fails_at, seat.rank)
        if seat.rank in told:  # a rank that failed is one step ahead
            with pytest.raises(hvd.HorovodInternalError, match="after 1 failed steps"):
                take_step(model, optimizer, fails_at + (seat.rank in fails), seat.rank)
            assert [p.grad for p in model.parameters()] == [None] * len(weights(model))
        for step in range(fails_at, STEPS):
            take_step(model, optimizer, step, seat.rank)
        return weights(model)


FAILURES: dict[str, tuple[type[BaseException], dict[int, int], list[int]]] = {
    "of one rank": (RuntimeError, {0: 0}, [0, 1]),
    "of one rank, later": (RuntimeError, {0: 2}, [0, 1]),
    "of all": (RuntimeError, {0: 1, 1: 1}, []),
    "of one rank after the other": (RuntimeError, {0: 2, 1: 0}, [1]),
    "interrupted": (KeyboardInterrupt, {0: 1, 1: 1}, []),
}


@pytest.mark.parametrize("fails_at", [0, FAILS_AT])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=list(FAILURES))
def test_gradients_of_different_steps_are_not_added_up(
    ranks: Ranks, fails_at: int, failure: tuple[type[BaseException], dict[int, int], list[int]]
) -> None:
    args = (meeting_point(), fails_at, *failure)
    found = ranks.run(with_a_compression_that_stops, *args, on=range(2))
    assert found[0] == found[1]
    assert_trained(found[0], net(), [(step, 2) for step in range(STEPS)])
