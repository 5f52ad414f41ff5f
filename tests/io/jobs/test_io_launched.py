"""Loaders that find out for themselves which rank they serve."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
from hsgd.io import PartitionedDataset, PartitionedLoader
from hsgd.io.rank_here import RankHere, rank_here

from hdf5_samples import collect, make_slabs
from hsgd import world
from toolkit.processes import launch_environ, run_marked

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
STEP = "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6"
SHELL = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_ID=0 SLURM_PTY_PORT=7"
TORCHRUN = "TORCHELASTIC_RUN_ID=x"
MVAPICH = "MV2_COMM_WORLD_RANK and MV2_COMM_WORLD_SIZE"

PROGRAM = """
import sys
from hsgd.io import PartitionedDataset, PartitionedLoader
loader = PartitionedLoader(sys.argv[1], 8, pad=False, as_numpy=True)
numbers = [n for batch in loader for n in batch["number"].tolist()]
dataset = PartitionedDataset(sys.argv[1], 8, pad=False)
assert numbers == [n for batch in dataset for n in batch["number"].tolist()]
sys.stdout.write(f"{loader!r} has {numbers}\\n")
"""

WORKERS = """
import sys
from torch.utils.data import DataLoader
from hsgd.io import PartitionedDataset, PartitionedLoader
loader = PartitionedLoader(sys.argv[1], 8, pad=False, as_numpy=True)
numbers = [n for batch in loader for n in batch["number"].tolist()]
dataset = PartitionedDataset(sys.argv[1], 8, pad=False)
batches = DataLoader(dataset, batch_size=None, num_workers=2)
assert sorted(numbers) == sorted(n for batch in batches for n in batch["number"].tolist())
sys.stdout.write(f"{loader!r}\\n")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_slabs(tmp_path_factory.mktemp("launched") / "data", 48, 3)


class Comm:
    rank, size = 2, 5


@pytest.mark.parametrize(
    ("environ", "rank", "size", "found"),
    [
        ("", 0, 1, "no launcher"),
        ("RANK=1 WORLD_SIZE=4", 1, 4, "RANK and WORLD_SIZE"),
        ("HOROVOD_RANK=3 HOROVOD_SIZE=4", 3, 4, "HOROVOD_RANK and HOROVOD_SIZE"),
        ("PMI_RANK=0 PMI_SIZE=2", 0, 2, "PMI_RANK and PMI_SIZE"),
        ("RANK=1", 0, 1, "no launcher"),
        ("RANK=x WORLD_SIZE=4 PMI_RANK=0 PMI_SIZE=1", 0, 1, "PMI_RANK and PMI_SIZE"),
        ("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2", 1, 2, MVAPICH),
        (f"{STEP} SLURM_STEP_ID=0", 5, 6, "SLURM_PROCID and SLURM_STEP_NUM_TASKS"),
        (STEP, 0, 1, "no launcher"),  # of an allocation
        (f"{SHELL} PMI_RANK=0 PMI_SIZE=6 MPI_LOCALRANKID=0", 0, 6, "PMI_RANK and PMI_SIZE"),
        (f"{SHELL} PMI_RANK=1 PMI_SIZE=2", 1, 2, "PMI_RANK and PMI_SIZE"),
        ("RANK=0 WORLD_SIZE=2 PMI_RANK=3 PMI_SIZE=8", 3, 8, "PMI_RANK and PMI_SIZE"),
        (f"{TORCHRUN} RANK=1 WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=1", 1, 2, "RANK and WORLD_SIZE"),
    ],
)
def test_the_variables_of_launchers_are_known(environ, rank, size, found):
    environ = dict(word.split("=") for word in environ.split())
    assert rank_here(None, None, None, environ) == RankHere(rank, size, found)
    assert rank_here(None, None, Comm(), environ) == RankHere(2, 5, "comm")
    assert rank_here(1, 3, Comm(), environ) == RankHere(1, 3, "the arguments")


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"world_size": 2}])
def test_one_of_both_is_refused(folder, arguments):
    with pytest.raises(ValueError, match="give both, or neither"):
        PartitionedLoader(folder, 4, **arguments)
    with pytest.raises(ValueError, match="give both, or neither"):
        PartitionedDataset(folder, 4, **arguments)


def test_torch_distributed_is_asked_before_variables(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "rank 1 of 4 (RANK and WORLD_SIZE)" in repr(PartitionedLoader(folder, 4))
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        loader = PartitionedLoader(folder, 4)
    finally:
        torch.distributed.destroy_process_group()
    assert repr(loader) == (
        f"PartitionedLoader({str(folder)!r}, 48 samples, rank 0 of 1 (torch.distributed), "
        "12 batches of 4, epoch 0)"
    )


def test_a_loader_that_was_made_before_the_ranks_were_known_is_refused(folder, monkeypatch):
    alone, told = PartitionedLoader(folder, 4), PartitionedLoader(folder, 4, 0, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(RuntimeError, match=r"each of the 3 ranks would read all samples; make it"):
        iter(alone)
    assert len(list(told)) == 12
    assert len(list(PartitionedLoader(folder, 4))) == 4


def test_hsgd_is_asked_before_variables_and_once_more_when_reading(folder, monkeypatch):
    alone = PartitionedLoader(folder, 4)
    monkeypatch.setattr(world, "_world", [Comm()])
    monkeypatch.setenv("PMIX_RANK", "0")  # MPI itself has the size
    with pytest.raises(RuntimeError, match=r"before hsgd was initialized.*each of the 5 ranks"):
        iter(alone)
    assert "rank 2 of 5 (hsgd)" in repr(PartitionedLoader(folder, 4))


def iterate_in(module, dataset):
    """Iterate as a function of that module does."""
    names = {"__name__": module}
    exec("def walk(dataset):\n    return list(dataset)", names)
    return names["walk"](dataset)


def test_a_dataset_that_accelerate_would_divide_again_is_refused(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    shared, whole = PartitionedDataset(folder, 4, 1, 2), PartitionedDataset(folder, 4, 0, 1)
    with pytest.raises(ValueError, match=r"rank 1 of 2 already, and accelerator.prepare\(\) would"):
        iterate_in("accelerate.data_loader", shared)
    assert len(iterate_in("accelerate.data_loader", whole)) == 12
    assert len(iterate_in("accelerate.accelerator", shared)) == 6


def test_ranks_of_mpirun_share_the_samples_without_a_word(folder):
    ranks = ["mpirun", "-n", "3", sys.executable, "-c", PROGRAM, str(folder)]
    done = run_marked(ranks, launch_environ(), 120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("PartitionedLoader(")]
    assert {line.partition("rank ")[2][:6] for line in lines} == {"0 of 3", "1 of 3", "2 of 3"}
    numbers = [int(n) for line in lines for n in line.partition("has [")[2][:-1].split(",")]
    assert sorted(numbers) == list(range(48))


def test_workers_of_a_data_loader_have_the_rank_of_their_process(folder):
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", WORKERS, str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 (RANK and WORLD_SIZE)" in done.stdout


def test_trainers_choose_the_epoch_by_the_sampler(folder):
    loader, other = (PartitionedLoader(folder, 48, as_numpy=True) for _ in range(2))
    loader.sampler.set_epoch(3)
    other.set_epoch(3)
    assert collect(loader)["number"].tolist() == collect(other)["number"].tolist()
    assert "epoch 3" in repr(loader)
