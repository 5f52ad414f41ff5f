"""`srun python train.py` on a real Slurm, without MPI and without flags."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import pytest

from toolkit.front_ends import FRONT_ENDS, check_answers, write_program
from toolkit.slurm import Slurm

__all__: list[str] = []

pytestmark = pytest.mark.long
PYTHON = sys.executable

COMM = """
import numpy as np, hsgd
from hsgd.world import comm
hsgd.init()
for one in (comm(), hsgd.Comm()):
    total = one.allreduce(np.full(5, one.rank + 1.0, np.float32))
    print(one.rank, one.size, one.local_rank, one.cross_size, total[0], flush=True)
hsgd.shutdown()
"""
BACKEND = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
part = dist.new_group([0, dist.get_world_size() - 1])
tensor = torch.ones(4)
dist.all_reduce(tensor)
kind = type(dist.group.WORLD).__name__
print(dist.get_rank(), dist.get_world_size(), tensor[0].item(), kind, flush=True)
dist.destroy_process_group()
"""
DROP_IN = """
import torch, hsgd.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
print(hvd.size(), [round(each.sum().item(), 6) for each in model.parameters()], flush=True)
hvd.shutdown()
"""
LOADER = """
import sys, numpy as np, hsgd, hsgd.io
from hsgd.world import comm
loader = hsgd.io.PartitionedLoader(sys.argv[1], batch_size=2)
rows = [int(row) for batch in loader for row in np.asarray(batch["x"]).ravel()]
hsgd.init()
every = comm().allgather_object(rows)
if comm().rank == 0:
    print(sorted(row for each in every for row in each), [len(each) for each in every])
"""


def srun(slurm: Slurm, options: str, program: str, *words: str, **env: str) -> list[str]:
    """Return the lines of all ranks, sorted; the job ends well and is quiet."""
    argv = ["srun", *options.split(), PYTHON, "-c", program, *words]
    done = slurm.run(argv, env=env)
    assert done.returncode == 0, done.stderr[-3000:] + slurm.logs()
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("options", ["-N2 -n4", "-N1 -n2", "-N2 --ntasks-per-node=1", "-n3 -c2"])
def test_ranks_of_a_step_meet(slurm: Slurm, options: str) -> None:
    lines = srun(slurm, options, COMM)
    size = int(lines[0].split()[1])
    nodes = 2 if options != "-N1 -n2" else 1
    expected = [
        f"{rank} {size} {nodes} {size * (size + 1) / 2}" for rank in range(size) for _ in range(2)
    ]
    without_local = [" ".join([*line.split()[:2], *line.split()[3:]]) for line in lines]
    assert without_local == expected


@pytest.mark.parametrize("home", ["shared", "own", "none"])
def test_nodes_need_a_shared_folder_or_munge(slurm: Slurm, tmp_path: Path, home: str) -> None:
    """Of each node's own, or a home that nobody can write: Munge leads to rank 0."""
    places = {"shared": str(tmp_path), "own": "/dev/shm/cache", "none": "/proc/nothing"}
    lines = srun(slurm, "-N2 -n2", COMM, XDG_CACHE_HOME=places[home])
    assert [line.split()[4] for line in lines] == ["3.0"] * 4
    assert not list(tmp_path.rglob("slurm-*"))  # the file went when all ranks had come


def test_without_either_one_line_says_where_a_rank_looked(slurm: Slurm) -> None:
    program = "import hsgd, hsgd.jobs.stores.munge as m\nm._LIBRARY = 'libnone.so'\nhsgd.Comm()"
    done = slurm.run(
        ["srun", "-N2", "-n2", PYTHON, "-c", program],
        env={"XDG_CACHE_HOME": "/dev/shm/cache", "HSGD_TIMEOUT_S": "5"},
    )
    assert done.returncode != 0
    assert "rank 0 of srun (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2) was not found" in done.stderr
    assert "/dev/shm/cache/hsgd/steps/slurm-" in done.stderr and "HSGD_STEP_DIR" in done.stderr


def test_steps_of_one_allocation_keep_apart(slurm: Slurm) -> None:
    script = f"""
for size in 2 3; do srun -n$size --overlap {PYTHON} -c '{COMM}' & done
wait"""
    done = slurm.run(["salloc", "-N2", "-n4", "sh", "-c", script])
    assert done.returncode == 0, done.stderr
    sizes = [line.split()[1] for line in done.stdout.splitlines()]
    assert sizes.count("2") == 4 and sizes.count("3") == 6


def test_tasks_of_an_array_and_parts_of_a_step_with_several_programs(
    slurm: Slurm, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nsrun {PYTHON} -c '{COMM}'\n")
    out = str(tmp_path / "out-%a")
    done = slurm.batch(["-a", "1-2", "-n2", "-o", out, str(script)])
    assert done.returncode == 0, done.stderr
    for task in (1, 2):
        lines = sorted((tmp_path / f"out-{task}").read_text().splitlines())
        assert [line.split()[1] for line in lines] == ["2"] * 4
    programs = tmp_path / "programs"
    programs.write_text(f"0 {PYTHON} {tmp_path}/first.py\n1-2 {PYTHON} {tmp_path}/second.py\n")
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(COMM)
    done = slurm.run(["srun", "-N2", "-n3", "--multi-prog", str(programs)])
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 6, done.stderr


def test_parts_of_different_size_form_one_job(slurm: Slurm) -> None:
    step = f"srun --het-group=0,1 {PYTHON} -c '{COMM}'"
    done = slurm.run(["salloc", "-N1", "-n1", ":", "-N1", "-n2", "sh", "-c", step])
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in sorted(done.stdout.splitlines())] == ["3"] * 6


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
@pytest.mark.parametrize("backend", ["hsgd", "gloo"])
def test_a_process_group_needs_no_variables(slurm: Slurm, backend: str, mpi: str) -> None:
    lines = srun(slurm, f"--mpi={mpi} -N2 -n3", BACKEND, backend, HSGD_AS_GLOO="1")
    kind = "HsgdProcessGroup" if backend == "hsgd" else "GlooGroup"
    assert lines == [f"{rank} 3 3.0 {kind}" for rank in range(3)]


def test_every_front_end_joins_all_ranks(slurm: Slurm, tmp_path: Path) -> None:
    words = ["srun", "-N2", "-n4", PYTHON, *write_program(tmp_path)]
    done = slurm.run(words, env={"HSGD_AS_GLOO": "1"})
    assert done.returncode == 0, done.stderr[-3000:] + slurm.logs()
    check_answers(done.stdout, FRONT_ENDS, 4)


def test_the_drop_in_trains_one_model(slurm: Slurm) -> None:
    lines = srun(slurm, "-N2 -n4", DROP_IN)
    assert len(set(lines)) == 1 and len(lines) == 4 and lines[0].startswith("4 ")


def test_a_rank_that_dies_is_named(slurm: Slurm) -> None:
    program = """
import os, signal, numpy as np, hsgd
one = hsgd.Comm()
one.allreduce(np.ones(3))
if one.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
one.allreduce(np.ones(3))
"""
    done = slurm.run(["srun", "-K0", "-N2", "-n3", PYTHON, "-c", program])
    assert done.returncode != 0 and "PeerLost" in done.stderr and "rank 2" in done.stderr


def test_a_loader_reads_each_row_once(slurm: Slurm, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = list(range(12))
    (line,) = srun(slurm, "-N2 -n3", LOADER, str(tmp_path / "data.h5"))
    assert line == f"{[*range(12)]} [4, 4, 4]"


def test_the_file_of_rank_0_is_its_users_only(slurm: Slurm, tmp_path: Path) -> None:
    program = """
import os, pathlib, time, hsgd
folder = pathlib.Path(os.environ["HSGD_STEP_DIR"])
while os.environ["SLURM_PROCID"] == "1" and not [*folder.glob("slurm-*")]:
    time.sleep(0.01)
modes = [oct(each.stat().st_mode & 0o777) for each in (folder, *folder.iterdir())]
hsgd.Comm()
if os.environ["SLURM_PROCID"] == "1":
    print(modes, len([*folder.iterdir()]))
"""
    folder = tmp_path / "steps"
    folder.mkdir(mode=0o700)
    (line,) = srun(slurm, "-N2 -n2", program, HSGD_STEP_DIR=str(folder))
    assert line == "['0o700', '0o600'] 0"
