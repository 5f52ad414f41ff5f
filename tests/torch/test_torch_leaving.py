"""The end of a job of hsgd.torch: ranks leave when they are done, or fail, and nobody
hangs. Nothing here asserts on time: collectives have half an hour, and jobs are ended long before.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

PROGRAM = """
import sys, time, torch
import hsgd.torch as hvd

hvd.init()
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
if hvd.rank() == int(sys.argv[1]):
    time.sleep(1)  # as who writes the checkpoint; longer than inspectors of stalls wait to meet
hvd.shutdown()
print("left")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "late"),
    short_form("torch", [((1, 1), 0), ((1, 1), 1), ((2, 1), 2)], keep=[2]),
    ids=str,
)
def test_a_rank_that_ends_later_is_not_waited_for_in_vain(
    cluster: Callable[..., Cluster], hosts: tuple[int, int], late: int
) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(late)]
    done = cluster(2).mpirun(sum(hosts), argv, hosts="node1:{},node2:{}".format(*hosts))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["left"] * sum(hosts)


FAILING = """
import sys, torch
import hsgd.torch as hvd

hvd.init()
torch.manual_seed(1)
net = torch.nn.Linear(40, 30)
plain = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
try:
    for step in range(100_000):
        optimizer.zero_grad()
        net(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()
        hvd.allreduce(torch.ones(3), name="loss")
        if step == 3 and hvd.rank() == int(sys.argv[1]):
            raise RuntimeError("this rank fails")
except hvd.HorovodInternalError as error:
    print("told", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "failing"), short_form("torch", [((1, 1), 1), ((2, 1), 1)], keep=[1]), ids=str
)
def test_a_rank_that_fails_between_nodes_ends_the_training_of_all(
    cluster: Callable[..., Cluster], hosts: tuple[int, int], failing: int
) -> None:
    argv = [sys.executable, "-c", FAILING, str(failing)]
    done = cluster(2).mpirun(sum(hosts), argv, hosts="node1:{},node2:{}".format(*hosts))
    assert done.returncode != 0
    assert "RuntimeError: this rank fails" in done.stderr
    assert done.stdout.split() == ["told"] * (sum(hosts) - 1), done.stderr[-3000:]


STRATEGY = """
import sys, torch
import hsgd.torch as hvd
from hsgd.optim.notified_tree import notified_tree_optimizer

notified_tree_optimizer._LEAVE_S = 1000.0  # how long a rank that is done waits for others
hvd.init()
torch.manual_seed(1)
net = torch.nn.Linear(40, 30)
plain = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(plain, strategy="notified_tree", model=net)
try:
    for step in range(100_000):
        optimizer.zero_grad()
        net(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()
        if step == 3 and hvd.rank() == 0:
            raise RuntimeError("this rank fails")
except (hvd.HorovodInternalError, ConnectionError) as error:
    print("told", flush=True)
"""


@pytest.mark.long
def test_a_rank_that_fails_with_a_tree_waits_for_nobody(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Nor does anybody wait for it: the weights of its last step never come."""
    program = tmp_path / "program.py"
    program.write_text(STRATEGY)
    done = mpirun(2, program, timeout_s=60)
    assert done.returncode != 0
    assert "RuntimeError: this rank fails" in done.stderr
    assert done.stdout.split() == ["told"], done.stderr[-3000:]
