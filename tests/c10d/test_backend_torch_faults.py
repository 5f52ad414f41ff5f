"""Faults of a rank while torch's own code uses backend "hsgd": the others get hsgd's exceptions,
whatever C++ lies between, and go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backend_programs import group
from ranks import Ranks, Seat
from torch_faults import DEVIATIONS, FAMILIES, LOSSES, SINGLE

__all__: list[str] = []

GOOD_STEPS = 3  # buckets of DDP are made anew, and PowerSGD begins
# The reducer whose hook failed is not ready for another forward pass, and says so itself.
AGAIN = {name: ("RuntimeError",) for name in FAMILIES if name.startswith("hook")}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(1 + len(LOSSES)) as pool:
        yield pool
        assert pool.end(0) == 0


def raised(step: object) -> str:
    try:
        step()  # type: ignore[operator]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def do_deviate(seat: Seat, path: str, family: str) -> list[list[str]]:
    """What each rank met where rank 1 called something else, and in another step of all."""
    found = []
    for number, deviate in enumerate(DEVIATIONS.values()):
        with group(seat.rank, 2, f"{path}{number}"):
            step = FAMILIES[family]()
            for _ in range(GOOD_STEPS):
                step()
            texts = [raised(step if seat.rank == 0 else deviate)]
            if family in SINGLE:
                texts.append(raised(step))
            found.append(texts)
    return found


def do_lose(seat: Seat, path: str, family: str, loss: str, survivor: bool) -> tuple[str, str]:
    """What the survivor met, in that step and in another."""
    with group(0 if survivor else 1, 2, path):
        step = FAMILIES[family]()
        for _ in range(GOOD_STEPS):
            step()
        if not survivor:
            LOSSES[loss]()
        return raised(step), raised(step)


def test_others_get_the_documented_error_and_go_on(
    ranks: Ranks, family: str, tmp_path: Path
) -> None:
    for rank, cases in enumerate(ranks.run(do_deviate, str(tmp_path / "s"), family, on=(0, 1))):
        for texts in cases:
            assert texts[0].startswith("SignatureMismatch: "), (rank, texts)
            assert texts[1:] in ([], ["nothing"]), (rank, texts)
    for victim, loss in enumerate(LOSSES, 1):
        path = str(tmp_path / str(victim))
        ranks.start(do_lose, path, family, loss, True, on=[0])
        ranks.start(do_lose, path, family, loss, False, on=[victim])
        (outcome,) = ranks.finish(on=[0])
        assert outcome.error is None, outcome.trace
        first, second = outcome.value
        assert first.startswith("PeerLost: ") and "rank 1 " in first, (loss, first)
        assert second.split(":")[0] in ("PeerLost", "HsgdError", *AGAIN.get(family, ())), second


def do_catch(seat: Seat, path: str, survivor: bool, threaded: bool) -> tuple[list[str], list[str]]:
    """Return the errors of backward, and those that the hook caught, without the other rank."""
    caught = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, no text
        work = dist.all_reduce(bucket.buffer(), async_op=True)

        def wait() -> None:
            try:
                work.wait()
            except Exception as error:
                caught.append(type(error).__name__)

        if threaded:
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        else:
            wait()
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with group(0 if survivor else 1, 2, path):
        model = DistributedDataParallel(nn.Linear(64, 3))
        model.register_comm_hook(None, hook)

        def step() -> None:
            model(torch.ones(4, 64)).sum().backward()

        for _ in range(GOOD_STEPS):
            step()
        if not survivor:
            os.kill(os.getpid(), signal.SIGKILL)
        return [raised(step), "" if threaded else raised(step)], caught


@pytest.mark.parametrize("threaded", [False, True])
def test_a_hook_that_catches_the_error_itself_goes_on(
    ranks: Ranks, tmp_path: Path, threaded: bool
) -> None:
    ranks.start(do_catch, str(tmp_path / "s"), True, threaded, on=[0])
    ranks.start(do_catch, str(tmp_path / "s"), False, threaded, on=[1])
    (outcome,) = ranks.finish(on=[0])
    assert outcome.error is None, outcome.trace
    texts, caught = outcome.value
    assert caught[0] == "PeerLost"
    if threaded:  # the hook may know nothing of it
        assert texts[0].startswith("PeerLost: ")
    else:
        assert texts == ["nothing", "nothing"] and len(caught) == 2
