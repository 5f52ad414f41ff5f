"""PyTorch Lightning and accelerate take a loader as it is, and go on from their checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hdf5_samples import make_slabs

__all__: list[str] = []

pytestmark = [pytest.mark.long, pytest.mark.suites]

# Without what they ask for: that would bring another torch.
PACKAGES = ("accelerate", "lightning-utilities", "pytorch-lightning", "safetensors", "torchmetrics")
NEEDS = ("fsspec", "huggingface_hub", "packaging", "psutil", "PyYAML", "tqdm")
STEPS_PER_EPOCH = 101 // (2 * 5)
FROM = (3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 2)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with both."""
    folder = str(tmp_path_factory.mktemp("trainers"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for words in (["--no-deps", *PACKAGES], NEEDS):
        subprocess.run([*pip, "--target", folder, *words], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """101 samples in 7 slabs."""
    return make_slabs(tmp_path_factory.mktemp("trained") / "data", 101, 7)


def run(what, packages, folder, place):
    """What each of two ranks found."""
    program = Path(__file__).with_name("trainer_programs.py")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environ = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, what, str(folder), str(place)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
def test_epochs_are_whole_and_a_checkpoint_leaves_exactly_the_rest(
    trainer, packages, folder, tmp_path
):
    ranks = run(trainer, packages, folder, tmp_path)
    orders = []
    for epoch in range(3):
        steps = [[n for e, n in rank["whole"] if e == epoch] for rank in ranks]
        assert [len(rank) for rank in steps] == [STEPS_PER_EPOCH] * 2
        order = [number for rank in steps for batch in rank for number in batch]
        assert len(set(order)) == len(order) == 2 * 5 * STEPS_PER_EPOCH
        orders.append(tuple(order))
    assert len(set(orders)) == 3
    for rank in ranks:
        assert {name: rank[f"from {name}"] for name in FROM} == {
            name: rank["whole"][name:] for name in FROM
        }


def test_accelerate_never_divides_a_dataset_twice(packages, folder, tmp_path):
    ranks = run("shards", packages, folder, tmp_path)
    for dispatch in ("None", "False"):
        assert all("would divide it once more" in rank[dispatch] for rank in ranks)
        shares = [{n for batch in rank[f"{dispatch} alone"] for n in batch} for rank in ranks]
        assert shares[0] | shares[1] == set(range(101))
