"""HSGD_AS_HOROVOD: scripts that import horovod.torch get hsgd.torch; `hsgd run --horovod`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from hsgd.errors import LaunchError
from hsgd.jobs.launch import as_horovod, horovod_options
from site_copy import installed_environ
from toolkit.processes import run_marked

__all__: list[str] = []

JOB_S = 120.0
HSGD = [sys.executable, "-m", "hsgd"]
SCRIPT = """
import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import elastic
from horovod.torch.compression import Compression
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import allreduce
import hsgd.torch

assert hvd is hsgd.torch and hvd.elastic is elastic is hsgd.torch.elastic
assert hvd.__spec__.name == "hsgd.torch" and hvd.__package__ == "hsgd.torch"
assert HorovodInternalError is hvd.HorovodInternalError and Compression is hvd.Compression
hvd.init()
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
total = allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
try:
    import horovod.tensorflow
except ImportError as error:
    missing = str(error)
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=hvd.rank() + 4)
missing += f"; {hvd.elastic.run(lambda state: state.epoch)(state)}"
try:
    horovod.run(print, np=2)
except Exception as error:
    missing += "; " + str(error)[:11] + " " + type(error).__name__
print(f"|{horovod.__version__} {hvd.rank()} {hvd.size()} {total.tolist()} {missing}|", flush=True)
"""
TOLD = (
    "No module named 'horovod.tensorflow': with HSGD_AS_HOROVOD the name horovod stands for "
    "hsgd.torch, which has no such module; 4; horovod.run LaunchError"
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.long
def test_a_script_of_horovod_runs_unedited(script: str) -> None:
    words = [*HSGD, "run", "--horovod", "-np", "2", "--cycle-time-ms", "3", "--autotune"]
    environ = installed_environ(HSGD_AS_HOROVOD="force", OMP_NUM_THREADS="1")
    done = run_marked([*words, sys.executable, script], environ, JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(re.findall(r"\|(.*?)\|", done.stdout, re.DOTALL))
    assert lines == [f"0.28.1 {rank} 2 [3.0, 3.0, 3.0] {TOLD}" for rank in range(2)]
    assert "hsgd: --cycle-time-ms, --autotune: ignored" in done.stderr


@pytest.mark.long
@pytest.mark.usefixtures("horovod")
def test_an_installed_horovod_is_passed_over_by_force_only(script: str) -> None:
    refused = "hsgd: error: HSGD_AS_HOROVOD=1 needs an environment without Horovod, and one is "
    environ = installed_environ(HSGD_AS_HOROVOD="1")
    for words in ([sys.executable, script], [*HSGD, "run", "--horovod", "-np", "2", "true"]):
        done = run_marked(words, environ, JOB_S)
        assert done.returncode == 1
        assert done.stderr.startswith(refused) and len(done.stderr.splitlines()) == 1
    look = "import horovod, sys; print('hsgd' in sys.modules, horovod.__file__ is not None)"
    done = run_marked([sys.executable, "-c", look], installed_environ(), JOB_S)
    assert done.stdout == "False True\n"


def test_every_name_stands_for_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSGD_AS_HOROVOD", "1")
    for target in as_horovod._MODULES.values():
        assert importlib.import_module(target).__name__ == target
    with pytest.raises(LaunchError, match="one is installed \\(there\\)"):
        as_horovod.find("horovod", "there")
    with pytest.raises(ModuleNotFoundError, match=r"'horovod\.run'"):
        as_horovod.find("horovod.run", None)
    monkeypatch.setenv("HSGD_AS_HOROVOD", "0")
    assert as_horovod.find("horovod.torch", None) is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1 slots=2\nnode2 slots=4\n", "node1:2,node2:4"),
        ("# two\n\nnode1:2  # first\nnode2\n", "node1:2,node2:1"),
    ],
)
def test_a_hostfile_becomes_a_host_list(tmp_path: Path, text: str, hosts: str) -> None:
    (tmp_path / "hosts").write_text(text)
    assert horovod_options.read_hostfile(str(tmp_path / "hosts")) == hosts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node1 slots=two\n", 'line 1: "node1 slots=two"; write node1 slots=2'),
        ("# none\n", "names no host"),
        (None, "No such file"),
    ],
)
def test_a_wrong_hostfile_is_refused(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    done = run_marked(
        [*HSGD, "run", "-np", "2", "--hostfile", str(path), "true"], installed_environ(), JOB_S
    )
    assert done.returncode == 1
    assert told in done.stderr and len(done.stderr.splitlines()) == 1


def test_options_of_horovodrun_reach_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ["--hostfile", str(tmp_path / "hosts"), "--timeline-filename", "t.json"]
    words += ["--network-interface", "eth7", "--launcher", "torchrun"]
    look = "import os; print(os.environ['HOROVOD_TIMELINE'], os.environ['HSGD_INTERFACES'])"
    command = [*HSGD, "run", "-np", "2", *words, sys.executable, "-c", look]
    done = run_marked(command, installed_environ(), JOB_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["t.json", "eth7"] * 2
