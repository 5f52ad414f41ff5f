"""Node-shared parameters on several nodes: each node has one copy, and all have the same bits.

Run under mpirun, this file is the program of the ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

pytestmark = pytest.mark.long

JOB_S = 120.0
LAYOUTS = {"2+2": (2, 2), "2+1": (2, 1)}


@pytest.mark.parametrize("layout", short_form("torch", LAYOUTS, keep=[1]))
def test_nodes_train_as_the_same_optimizer_after_an_allreduce(
    layout: str, cluster: Callable[[int], Cluster]
) -> None:
    ranks = LAYOUTS[layout]
    hosts = ",".join(f"node{k + 1}:{count}" for k, count in enumerate(ranks))
    done = cluster(len(ranks)).mpirun(
        sum(ranks), [sys.executable, __file__], hosts=hosts, timeout_s=JOB_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == [{"sgd": True, "lars": True, "clipped": True}] * sum(ranks)


def main() -> None:
    import torch
    from mpi4py import MPI

    from hsgd import Comm
    from hsgd.optim.node_shared.node_shared_optimizer import (
        NodeSharedOptimizer,
        share_parameters,
    )
    from test_node_shared import (
        MAKERS,
        groups_of,
        loss_of,
        make_model,
        take_reference_step,
        take_step,
        weights,
    )

    torch.set_num_threads(1)
    comm = Comm(MPI.COMM_WORLD)
    same: dict[str, Any] = {}
    for kind, name in (("momentum", "sgd"), ("lars", "lars")):
        model, reference = make_model(comm.rank), make_model(0)
        shared = share_parameters(model, comm)
        optimizer = NodeSharedOptimizer(MAKERS[kind](groups_of(model)), shared)
        other = MAKERS[kind](groups_of(reference))
        for step in range(4):
            take_step(model, optimizer, comm, step)
            take_reference_step(reference, other, comm, step)
        same[name] = weights(model) == weights(reference)
    loss_of(model, comm.rank, 9).backward()
    norm = optimizer.clip_grad_norm_(1e-3)
    gradients = [norm] * comm.size
    same["clipped"] = comm.allgather(norm.view(1)).tolist() == [float(g) for g in gradients]
    found = MPI.COMM_WORLD.gather(same)
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
