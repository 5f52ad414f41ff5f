"""hsgd.torch and horovod.torch side by side: the same calls give the same, values and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

SCRIPT = Path(__file__).with_name("torch_side_by_side.py")
OWN = Path(__file__).with_name("torch_horovods_own.py")
LIMIT_S = 200.0
ENV = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_LOG_LEVEL": "fatal"}

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("horovod"),
    pytest.mark.timeout(LIMIT_S + 60),
]


@pytest.mark.parametrize("size", short_form("torch", [2, 3, 4]))
def test_every_name_gives_what_horovods_gives(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], size: int
) -> None:
    done = mpirun(size, SCRIPT, env=ENV, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compared ") == size


@pytest.mark.torch
def test_uneven_nodes_give_the_same(cluster: Callable[..., Cluster]) -> None:
    argv = [sys.executable, str(SCRIPT)]
    done = cluster(2).mpirun(3, argv, hosts="node1:2,node2:1", env=ENV, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compared ") == 3


@pytest.mark.parametrize("size", short_form("torch", [2, 4], keep=[0]))
def test_adasum_is_as_horovods_and_elastic_run_is_horovods(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], size: int
) -> None:
    done = mpirun(size, OWN, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as Horovod's") == size
