"""Which epoch an iteration has: the next one, the one that was chosen, that of a state."""

from __future__ import annotations

import pickle

import pytest
from hsgd.io import PartitionedDataset, ReadOptions
from torch.utils.data import DataLoader

from hdf5_samples import collect, make_slabs
from loaders import loader_of

TINY = {"block_bytes": 200, "window_bytes": 900}  # 4 samples in a block, 18 in a window


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """101 samples in 7 slabs."""
    return make_slabs(tmp_path_factory.mktemp("epochs") / "data", 101, 7)


@pytest.fixture(scope="module")
def orders(folder):
    """The samples of each epoch, which set_epoch() chose."""
    found = []
    for epoch in range(6):
        loader = fresh(folder)
        loader.set_epoch(epoch)
        found.append(numbers(loader))
    assert len({tuple(order) for order in found}) == 6
    return found


def fresh(folder, **options):
    return loader_of(folder, 10, 0, 1, seed=5, **TINY, **options)


def numbers(batches):
    return collect(batches)["number"].tolist()


def take(iteration, steps):
    return [number for _ in range(steps) for number in next(iteration)["number"].tolist()]


def test_each_iteration_is_the_next_epoch(folder, orders):
    loader = fresh(folder)
    assert [numbers(loader) for _ in range(4)] == orders[:4]
    assert loader.epoch == 3


def test_an_iteration_that_was_left_counts_and_one_that_gave_no_batch_does_not(folder, orders):
    loader = fresh(folder)
    iter(loader)
    assert take(iter(loader), 2) == orders[0][:20]
    iter(loader)
    iter(loader)
    assert numbers(loader) == orders[1]


def test_set_epoch_chooses_the_next_iteration_alone(folder, orders):
    loader = fresh(folder)
    for epoch in (4, 4, 0, 2):
        loader.set_epoch(epoch)
        assert numbers(loader) == orders[epoch]
    assert numbers(loader) == orders[3]


@pytest.mark.parametrize("mapped", [False, True])
def test_an_iteration_without_a_batch_begins_anew_in_the_epoch_that_is_chosen(
    folder, orders, mapped
):
    # Without a shuffle all epochs are alike: the state says which it was.
    options = {"shuffle": "none", "mapped": True} if mapped else {}
    loader = loader_of(folder, 10, 0, 1, seed=5, **options, **TINY)
    iteration = iter(loader)
    loader.set_epoch(2)
    found = numbers(iteration)
    assert sorted(found) == list(range(101)) if mapped else found == orders[2]
    assert (loader.state_dict()["epoch"], loader.state_dict()["ended"]) == (2, True)
    assert list(iteration) == []


def test_an_iteration_that_gave_a_batch_stays_in_its_epoch(folder, orders):
    loader = fresh(folder)
    iteration = iter(loader)
    first = take(iteration, 1)
    loader.set_epoch(2)
    assert first + numbers(iteration) == orders[0]
    assert numbers(loader) == orders[2]


def test_a_state_that_is_loaded_holds_for_an_iteration_without_a_batch(folder, orders):
    loader = fresh(folder)
    loader.set_epoch(3)
    begun = take(iter(loader), 4)
    state = loader.state_dict()
    other = fresh(folder)
    iteration = iter(other)
    other.load_state_dict(state)
    assert begun + numbers(iteration) == orders[3]
    assert numbers(other) == orders[4]


def test_the_state_of_a_loop_outlives_the_choice_of_its_own_epoch(folder, orders):
    loader = fresh(folder)
    iteration = iter(loader)
    begun = take(iteration, 3)
    loader.set_epoch(0)
    begun += take(iteration, 1)
    other = fresh(folder)
    other.load_state_dict(loader.state_dict())
    assert begun + numbers(other) == orders[0]
    iteration.close()
    assert numbers(loader) == orders[0]  # what was chosen


def test_close_ends_an_iteration_that_was_to_begin_anew(folder):
    loader = fresh(folder)
    iteration = iter(loader)
    loader.set_epoch(2)
    loader.close()
    iteration.close()
    assert list(iteration) == []


def test_after_the_rest_of_an_epoch_the_next_one_is_whole(folder, orders):
    loader = fresh(folder)
    loader.set_epoch(2)
    begun = take(iter(loader), 4)
    other = fresh(folder)
    other.load_state_dict(loader.state_dict())
    assert (len(other), other.steps_left) == (11, 7)
    assert begun + numbers(other) == orders[2]
    assert (len(other), other.steps_left) == (11, 11)
    assert numbers(other) == orders[3]


def test_the_end_of_an_epoch_that_the_loop_has_not_seen_is_still_to_come(folder, orders):
    loader = fresh(folder)
    iteration = iter(loader)
    assert take(iteration, 11) == orders[0]
    other = fresh(folder)
    other.load_state_dict(loader.state_dict())
    assert (other.steps_left, list(other)) == (0, [])
    assert numbers(other) == orders[1]
    assert list(iteration) == []
    other.load_state_dict(loader.state_dict())
    assert (other.steps_left, numbers(other)) == (11, orders[1])


def test_of_an_ended_epoch_nothing_is_left_where_it_is_chosen_again(folder, orders):
    loader = fresh(folder)
    assert numbers(loader) == orders[0]
    other = fresh(folder)
    other.load_state_dict(loader.state_dict())
    assert other.state_dict() == loader.state_dict()
    other.set_epoch(0)
    assert list(other) == []
    assert numbers(other) == orders[1]


def test_closing_in_the_middle_is_no_end(folder):
    loader = fresh(folder, transform=lambda batch: batch, transform_threads=2)
    iteration = iter(loader)
    take(iteration, 3)
    loader.close()
    assert list(iteration) == []
    state = loader.state_dict()
    assert (state["ended"], state["cuts"][0]["steps"]) == (False, 3)


def test_an_epoch_that_is_chosen_again_begins_at_its_start(folder, orders):
    loader = fresh(folder)
    take(iter(loader), 3)
    loader.set_epoch(0)
    other = fresh(folder)
    other.load_state_dict(loader.state_dict())
    assert numbers(other) == numbers(loader) == orders[0]


@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True), (1, True)]
)
def test_each_iteration_of_a_dataset_is_the_next_epoch_also_in_workers(folder, workers, persistent):
    dataset = PartitionedDataset(
        folder, 10, 0, 1, seed=5, pad=False, read=ReadOptions(block_bytes=200, window_bytes=900)
    )
    batches = DataLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=persistent
    )
    found = [numbers(batches) for _ in range(2)]
    next(iter(batches))
    found.append(numbers(batches))
    dataset.set_epoch(1)
    found += [numbers(batches) for _ in range(2)]
    assert all(sorted(order) == list(range(101)) for order in found)
    assert found[1] == found[3] and found[2] != found[4]
    assert len({tuple(order) for order in found}) == 4


def test_epochs_of_a_dataset_advance_where_the_number_of_workers_changes(folder):
    dataset = PartitionedDataset(
        folder, 10, 0, 1, seed=5, pad=False, read=ReadOptions(block_bytes=200, window_bytes=900)
    )
    numbers_of_workers = [1, 2, 0, 0, 2, 1, 0]
    found = [
        numbers(DataLoader(dataset, batch_size=None, num_workers=workers))
        for workers in numbers_of_workers
    ]
    assert all(sorted(order) == list(range(101)) for order in found)
    alone = [order for order, w in zip(found, numbers_of_workers, strict=True) if w < 2]
    wanted = []
    for epoch in (0, 2, 3, 5, 6):
        dataset.set_epoch(epoch)
        wanted.append(numbers(dataset))
    assert alone == wanted


def test_a_copy_goes_on_with_the_next_epoch(folder, orders):
    loader = fresh(folder)
    assert numbers(pickle.loads(pickle.dumps(loader))) == orders[0]
    assert numbers(loader) == orders[0]
    assert numbers(pickle.loads(pickle.dumps(loader))) == orders[1]
