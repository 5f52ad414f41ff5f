"""ElasticAveraging over several nodes: `python elastic_programs.py` under mpirun.

Checks are collective: all ranks run all of them, and rank 0 prints their names.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import nn

from hsgd import Comm
from hsgd.config import Config
from hsgd.optim import ElasticAveraging

__all__ = ["CHECKS"]

EXCHANGES = 5
TARGET = 15


def made(comm: Comm, mode: str, lr: float = 0.0, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(comm.rank)  # rank 0's weights are everybody's
    model = nn.Linear(40, 50)
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    return model, ElasticAveraging(sgd, model, comm, mode, moving_rate=0.25, **options)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()


def step(model: nn.Module, elastic: Any) -> None:
    elastic.zero_grad()
    model(torch.ones(2, 40)).square().mean().backward()
    elastic.step()


def what_the_weights_lose_the_centre_gets(comm: Comm) -> None:
    for mode, options in (
        ("async", {}),
        ("async", {"overlap": False}),
        ("async", {"compression": "bfloat16"}),
        ("hybrid", {}),
    ):
        model, elastic = made(comm, mode, **options)
        leads = not np.isnan(elastic.consensus_distance())
        start = torch.cat([part.reshape(-1) for part in elastic.centre()]) if leads else None
        node = comm.cross_rank if mode == "hybrid" else comm.rank
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.full_like(p, 4096.0 * (node + 1)))
        before = flat(model)
        comm.barrier()
        for _ in range(EXCHANGES):
            step(model, elastic)
        elastic.finish_push()
        comm.barrier()
        lost = before - flat(model) if leads else torch.zeros_like(before)
        lost = comm.allreduce(lost)
        if leads:
            assert start is not None
            centre = torch.cat([part.reshape(-1) for part in elastic.centre()])
            torch.testing.assert_close(centre.double() - start.double(), lost, rtol=1e-5, atol=1e-2)
            assert elastic.metrics().exchanges == EXCHANGES
            late = elastic.metrics().staleness
            if options.get("overlap", True):
                others = EXCHANGES * (elastic.workers - 1)
                assert sum(late.values()) == EXCHANGES and all(0 <= n <= others for n in late), late
        assert elastic.workers == (comm.cross_size if mode == "hybrid" else comm.size)
        comm.barrier()
        elastic.close()


def pushes_of_a_worker_alone_are_not_late(comm: Comm) -> None:
    model, elastic = made(comm, "async")
    for rank in range(comm.size):
        if rank == comm.rank:
            for _ in range(EXCHANGES):
                step(model, elastic)
            elastic.finish_push()
            # What others had changed before came with the answer to the first.
            late = elastic.metrics().staleness
            assert sum(late.values()) == EXCHANGES and late[0] >= EXCHANGES - 1, late
        comm.barrier()
    elastic.close()


def the_stop_rules_end_all_workers(comm: Comm) -> None:
    for mode in ("async", "hybrid"):
        for rule in ("master", "fastest", "mean"):
            model, elastic = made(comm, mode, lr=0.01, stop_rule=rule, max_steps=TARGET)
            comm.barrier()
            while not elastic.done:
                step(model, elastic)
            steps = np.array([elastic.metrics().steps], np.int64)
            elastic.close()
            everybodys = comm.allgather(steps)
            if rule == "master" and mode == "async":
                assert everybodys[0] == TARGET
            assert everybodys.max() >= TARGET
            if rule == "mean":
                assert everybodys.mean() >= TARGET


def a_state_is_loaded_everywhere(comm: Comm) -> None:
    model, elastic = made(comm, "async")
    state = elastic.state_dict()
    # The last rank's state is the newest.
    state["elastic"]["version"] = comm.rank
    state["elastic"]["centre"] = [torch.full_like(p, comm.rank) for p in model.parameters()]
    elastic.load_state_dict(state)
    assert all(bool((part == comm.size - 1).all()) for part in elastic.centre())
    comm.barrier()
    elastic.close()


CHECKS = (
    what_the_weights_lose_the_centre_gets,
    pushes_of_a_worker_alone_are_not_late,
    the_stop_rules_end_all_workers,
    a_state_is_loaded_everywhere,
)


def main() -> None:
    comm = Comm(config=Config(timeout_s=60.0, chunk_bytes=65536, oneshot_bytes=1024))
    for check in CHECKS:
        check(comm)
    if comm.rank == 0:
        print(json.dumps([check.__name__ for check in CHECKS]))
    comm.close()


if __name__ == "__main__":
    main()
