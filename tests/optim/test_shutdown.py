"""hvd.shutdown() with an optimizer of another strategy that nobody closed: nothing stays open."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

import holdings
from hsgd import Comm, HsgdError
from hsgd.optim import Gossip
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

SIZE = 4
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gossip": ("gossip", {}),
    "gossip in groups": ("gossip", {"hierarchical": True, "group_size": 2}),
    "noloco": ("gossip", {"outer": "noloco"}),
    "easgd_async": ("easgd_async", {"update_interval": 2}),
    "easgd_hybrid": ("easgd_hybrid", {"update_interval": 2, "group_size": 2}),
}


def train(hvd: Any, name: str, steps: int) -> Any:
    strategy, options = STRATEGIES[name]
    model = nn.Linear(5, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(
        sgd, strategy=strategy, model=model, strategy_options=options
    )
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.eye(5)) - hvd.rank()).square().sum().backward()
        optimizer.step()
    return optimizer


def shut_down_twice(seat: Seat, paths: list[str], name: str) -> Any:
    """What is open after a job whose optimizer was left, and after another that closed its own."""
    with job(seat, paths[0], SIZE) as hvd:
        train(hvd, name, 3).close()
    held, threads = holdings.descriptors(), set(threading.enumerate())
    with job(seat, paths[1], SIZE) as hvd:
        left = train(hvd, name, 5)
    open_now = holdings.descriptors_since(held)
    ending = set(threading.enumerate()) - threads
    for thread in ending:  # nobody waited for them
        thread.join(10)
    more = sorted(thread.name for thread in ending if thread.is_alive())
    with pytest.raises(HsgdError, match=r"(is|was) closed"):
        left.step()
    with job(seat, paths[2], SIZE) as hvd:
        optimizer = train(hvd, name, 5)
        left.close()  # of the job before: it changes nothing here
        optimizer.step()
        optimizer.close()
    del left, optimizer
    gc.collect()
    return open_now + holdings.mappings(), more, holdings.descriptors_since(held)


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_of_it_is_open_after_shutdown_and_a_new_one_works(name: str) -> None:
    with Ranks(SIZE) as ranks:
        found = ranks.run(shut_down_twice, [meeting_point() for _ in range(3)], name)
    assert found == [([], [], [])] * SIZE


def fail() -> None:
    raise HsgdError("a rank was lost")


def test_all_that_use_a_communicator_leave_it_whatever_one_of_them_raises() -> None:
    comm, left = Comm.local(meeting_point(), 0, 1), []
    comm.before_close(lambda: left.append("first"))
    comm.before_close(fail)
    comm.before_close(lambda: left.append("last"))
    with pytest.raises(HsgdError, match="a rank was lost"):
        comm.close()
    assert left == ["first", "last"] and comm.closed


@pytest.mark.long
def test_optimizers_that_are_gone_leave_nothing_with_the_communicator() -> None:
    comm = Comm.local(meeting_point(), 0, 1)
    model = nn.Linear(2, 1)
    for closes in (True, False):
        optimizer = Gossip(torch.optim.SGD(model.parameters(), lr=0.1), model, comm)
        if closes:
            optimizer.close()
        del optimizer
        gc.collect()
        assert comm._before_close == []
    comm.close()
