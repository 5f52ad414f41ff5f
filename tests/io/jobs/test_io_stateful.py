"""PartitionedDataset in torchdata's StatefulDataLoader, which saves the states of its workers."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hsgd.io import PartitionedDataset
from torchdata.stateful_dataloader import StatefulDataLoader

__all__: list[str] = []

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

SAMPLES = 61
BATCH = 4


def loader_over(path, in_dataset, workers):
    """Return a loader of batches that the dataset makes, or that the DataLoader collates."""
    batch = {"batch_size": BATCH if in_dataset else None, "read_batch": 7}
    dataset = PartitionedDataset(path, rank=0, world_size=1, seed=3, pad=False, **batch)
    return StatefulDataLoader(dataset, None if in_dataset else BATCH, num_workers=workers)


def numbers(batches):
    return [number for batch in batches for number in batch["number"].tolist()]


@pytest.mark.parametrize("in_dataset", [True, False])
@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("steps", [1, 5, 15])
def test_what_is_left_comes_once_and_then_the_next_epoch(tmp_path, in_dataset, workers, steps):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["number"] = np.arange(SAMPLES)
    before = loader_over(tmp_path / "a.h5", in_dataset, workers)
    batches = iter(before)
    seen = numbers(next(batches) for _ in range(steps))
    after = loader_over(tmp_path / "a.h5", in_dataset, workers)
    state = before.state_dict()
    next(batches, None)  # which the state does not have
    after.load_state_dict(state)
    batches = None
    seen += numbers(after)
    assert sorted(seen) == list(range(SAMPLES))
    again = numbers(after)
    assert sorted(again) == list(range(SAMPLES)) and again != seen


@pytest.mark.parametrize("workers", [0, 2])
def test_another_epoch_that_is_chosen_is_whole(tmp_path, workers):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["number"] = np.arange(SAMPLES)
    before = loader_over(tmp_path / "a.h5", False, workers)
    next(iter(before))
    for ahead in (0, 1):
        after = loader_over(tmp_path / "a.h5", False, workers)
        after.load_state_dict(before.state_dict())
        after.dataset.set_epoch(ahead)
        assert len(numbers(after)) == SAMPLES - (0 if ahead else BATCH)


def test_the_state_of_another_dataset_is_refused(tmp_path):
    for name, rows in (("a.h5", SAMPLES), ("b.h5", SAMPLES + 1)):
        with h5py.File(tmp_path / name, "w") as file:
            file["number"] = np.arange(rows)
    state = loader_over(tmp_path / "a.h5", True, 0).state_dict()
    other = loader_over(tmp_path / "b.h5", True, 0)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="state"):
        list(other)
