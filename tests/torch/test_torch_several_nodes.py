"""hsgd.torch on several virtual nodes without MPI, each with a torchrun of its own."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.cluster import Cluster
from torchrun_runs import JOB_S

__all__: list[str] = []

pytestmark = pytest.mark.long

PROGRAM = """
import json, sys
import torch
import hsgd
import hsgd.torch as hvd

hvd.init()
place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(300, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
torch.manual_seed(100 + hvd.rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
total = hvd.allreduce(torch.full((5,), float(hvd.rank())), op=hvd.Sum)
weights = hvd.allgather(model.weight.detach().double().sum().reshape(1))
names = hvd.allgather_object(hvd.rank())
with hsgd.Comm() as comm:
    again = comm.allreduce(torch.ones(3)).tolist()
    nodes = comm.nodes
print(json.dumps([place, total.tolist(), weights.tolist(), names, again, nodes]) + "|", flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize("counts", [[2, 2], [2, 1, 1]], ids=str)
def test_a_model_is_trained_over_several_nodes_without_mpi(
    tmp_path: Path, cluster: Callable[..., Cluster], counts: list[int]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    nodes, found = cluster(len(counts)), [None] * len(counts)
    env = {"HSGD_INTERFACES": "eth0", "OMP_NUM_THREADS": "1", "HSGD_TIMEOUT_S": "60"}

    def run(node: int) -> None:
        words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(counts)}"]
        words += [f"--node-rank={node}", f"--nproc-per-node={counts[node]}"]
        words += ["--master-addr=10.99.0.1", "--master-port=29521", str(script)]
        found[node] = nodes.run(words, node=node + 1, env=env, timeout_s=JOB_S)

    threads = [threading.Thread(target=run, args=(node,)) for node in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports: list[Any] = []
    for done in found:
        assert done is not None and done.returncode == 0, done and done.stderr[-3000:]
        reports += [json.loads(line) for line in done.stdout.replace("\n", "").split("|") if line]
    size = sum(counts)
    nodes_of = [node for node, count in enumerate(counts) for _ in range(count)]
    assert len(reports) == size
    for place, total, weights, names, again, nodes_told in sorted(reports):
        rank, local = place[0], nodes_of[: place[0]].count(nodes_of[place[0]])
        assert place == [rank, size, local, counts[nodes_of[rank]]]
        assert total == [sum(range(size))] * 5 and again == [size] * 3
        assert len(set(weights)) == 1 and len(weights) == size
        assert names == list(range(size)) and nodes_told == nodes_of
