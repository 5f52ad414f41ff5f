"""hvd.shutdown() with an optimizer of strategy="diloco" that nobody closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import holdings
import hsgd
from hsgd import HsgdError
from hsgd.torch.job import runtime
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

OPTIONS: list[dict[str, Any]] = [
    {"group": None},
    {"group": None, "fragments": 2, "delay": 1},
    {"group": 2},
]


def train(hvd: Any, options: dict[str, Any], steps: int) -> tuple[Any, nn.Module]:
    model = nn.Linear(5, 3)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    diloco = hvd.DistributedOptimizer(
        adam, strategy="diloco", model=model, strategy_options={"sync_every": 4, **options}
    )
    for _ in range(steps):
        diloco.zero_grad()
        (model(torch.eye(5)) - hvd.rank()).square().sum().backward()
        diloco.step()
    return diloco, model


def shut_down_twice(seat: Seat, paths: list[str], size: int, options: dict[str, Any]) -> Any:
    with job(seat, paths[0], size):
        pass  # what a first job leaves is not the optimizer's
    held, threads = holdings.descriptors(), set(threading.enumerate())
    with job(seat, paths[1], size) as hvd:
        left, _ = train(hvd, options, 7)  # with a delay an exchange is under way now
    open_now = holdings.descriptors_since(held)
    more = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    with pytest.raises(HsgdError, match=r"^DiLoCo: .*hvd\.init\(\)"):
        left.step()
    saved = left.state_dict()["diloco"]
    assert saved["steps"] == 7 and ("fragments" in saved) == ("worker" in saved)
    with job(seat, paths[2], size) as hvd:
        diloco, model = train(hvd, options, 8)
        diloco.synchronize_weights()
        left.close()  # of the job before: it changes nothing here
        diloco.step()
        weights = model.weight.flatten().tolist()
        diloco.close()
    return open_now + holdings.mappings(), more, holdings.descriptors_since(held), weights


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_of_it_is_open_after_shutdown_and_a_new_one_works(options: dict[str, Any]) -> None:
    size = 4 if options["group"] == 2 else 2
    paths = [meeting_point() for _ in range(3)]
    with Ranks(size) as ranks:
        found = ranks.run(shut_down_twice, paths, size, options)
    for left, threads, at_end, weights in found:
        assert (left, threads, at_end) == ([], [], [])
        assert torch.tensor(weights).isfinite().all()


def fail() -> None:
    raise HsgdError("a rank was lost")


def shut_down_in_vain(seat: Seat, paths: list[str]) -> Any:
    with job(seat, paths[0], 2):
        pass
    held = holdings.descriptors()
    with job(seat, paths[1], 2) as hvd:
        train(hvd, {"group": None}, 3)
        runtime.current().private_comm(0, "failing").before_close(fail)
        with pytest.raises(HsgdError, match="a rank was lost"):
            hvd.shutdown()
    return holdings.descriptors_since(held)


def test_what_fails_to_leave_keeps_nothing_else_open() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(shut_down_in_vain, [meeting_point(), meeting_point()]) == [[], []]


def go_on(seat: Seat, paths: list[str], size: int) -> Any:
    with job(seat, paths[2], size):
        pass
    held = holdings.descriptors()
    with job(seat, paths[0], size) as hvd:
        diloco, model = train(hvd, {"group": None}, 6)
    outer = diloco.state_dict()["diloco"]["fragments"][0]["outer_weights"]
    with job(seat, paths[1], size):
        diloco.restart(hsgd.world.comm())
        same = torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), outer)
        steps = diloco.metrics().steps
    with pytest.raises(HsgdError, match="its communicator was closed"):
        diloco.step()
    return same, steps, holdings.descriptors_since(held)


def test_a_job_after_it_goes_on_from_its_outer_weights() -> None:
    paths = [meeting_point() for _ in range(3)]
    with Ranks(2) as ranks:
        assert ranks.run(go_on, paths, 2) == [(True, 6, [])] * 2
