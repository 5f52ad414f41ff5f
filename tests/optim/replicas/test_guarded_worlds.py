"""In a new elastic world everything is compared at once, whoever its ranks are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_jobs import HSGD, JOB_S
from hsgd import Comm, ReplicasDiffer
from ranks import PATIENT, Ranks, Seat, meeting_point
from toolkit.processes import launch_environ, run_marked
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 3
WORLDS = {"fewer": (3, 2), "more": (2, 3), "from one": (1, 3), "as many": (2, 2)}
STEPS = 12  # in the first world: turns and sums are under way


def made(hvd: Any, seat: Seat, kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(seat.rank)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = {"strategy_options": {"sync_every": 2, "group": None}} if kind == "diloco" else {}
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), strategy=kind, model=model, **strategy
    )
    return model, optimizer


def steps(model: nn.Module, optimizer: Any, count: int) -> tuple[int, tuple[int, ...], str]:
    """How many were made, the ranks that differ, and what was said."""
    for step in range(count):
        try:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        except ReplicasDiffer as error:
            return step, error.ranks, str(error)
    return count, (), ""


def in_two_worlds(
    seat: Seat, paths: list[str], world: str, kind: str, fault: bool
) -> tuple[int, tuple[int, ...], str]:
    first, second = WORLDS[world]
    was_there = seat.rank < first
    with job(seat, paths[0 if was_there else 1], first if was_there else second) as hvd:
        model, optimizer = made(hvd, seat, kind)
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        if was_there:
            state.sync()
            assert steps(model, optimizer, STEPS) == (STEPS, (), "")
            hvd.shutdown()
            if seat.rank >= second:
                return STEPS, (), ""
            hvd.init(Comm.local(paths[1], seat.rank, second, PATIENT))
            state.on_reset()
        state.sync()
        if fault and seat.rank == second - 1:
            if kind == "diloco":
                optimizer._fragments[-1].velocity[-1] += 1
            else:
                model[-1].bias.detach()[-1] += 1
        return steps(model, optimizer, STEPS)


# Ranks make DiLoCo together where no agent says that the others train already.
@pytest.mark.parametrize(
    ("world", "kind"), [*((world, "auto") for world in WORLDS), ("fewer", "diloco")]
)
def test_a_new_world_is_compared_in_its_first_step(ranks: Ranks, world: str, kind: str) -> None:
    first, second = WORLDS[world]
    for fault in (False, True):
        paths = [meeting_point(), meeting_point()]
        answers = ranks.run(in_two_worlds, paths, world, kind, fault, on=range(max(first, second)))
        step, differ, line = answers[0]
        assert answers[:second] == [answers[0]] * second
        assert (step, differ) == ((kind == "diloco", (second - 1,)) if fault else (STEPS, ()))
        assert not fault or f"rank {second - 1} has other values of" in line


DIFFERS = """
import torch
import hsgd.torch as hvd

hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    print("|enter|", flush=True)
    while state.step < 300:
        if state.step == 5 and hvd.rank() == 1:
            model.weight.data[0, 1] += 1
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state.step += 1

train(state)
"""


@pytest.mark.long
def test_an_elastic_job_ends_where_ranks_differ(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIFFERS)
    words = [*HSGD, "run", "-np", "2", "--min-np", "1", sys.executable, str(script)]
    done = run_marked(words, launch_environ(OMP_NUM_THREADS="1"), JOB_S)
    assert done.returncode != 0 and done.stdout.count("|enter|") == 2, done.stderr[-3000:]
    assert "rank 1 has other values of" in done.stderr
