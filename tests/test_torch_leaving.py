"""The end of a job of hsgd.torch between nodes: ranks leave when they are done, nobody hangs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from cluster import Cluster

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


@pytest.mark.parametrize(("hosts", "late"), [((1, 1), 0), ((1, 1), 1), ((2, 1), 2)], ids=str)
def test_a_rank_that_ends_later_is_not_waited_for_in_vain(
    cluster: Callable[..., Cluster], hosts: tuple[int, int], late: int
) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(late)]
    done = cluster(2).mpirun(sum(hosts), argv, hosts="node1:{},node2:{}".format(*hosts))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["left"] * sum(hosts)
