"""MixedLoader: batches of several datasets, exactly once or by weight, on all ranks alike."""

from __future__ import annotations

import json
import shutil

import pytest
from hsgd.io import MixedLoader

from hdf5_samples import make_slabs
from hsgd.errors import DataError
from loaders import loader_of

__all__: list[str] = []

COUNTS = {"a": 40, "b": 23, "c": 7}
TINY = {"block_bytes": 200, "window_bytes": 900, "as_numpy": True, "pad": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("mixed")
    return {name: make_slabs(home / name, count, 3) for name, count in COUNTS.items()}


def mixed(folders, rank=0, size=1, batch_size=3, **options):
    loaders = {
        name: loader_of(folder, batch_size, rank, size, seed=5, **TINY)
        for name, folder in folders.items()
    }
    return MixedLoader(loaders, **options)


def steps_of(loader, most=10**9):
    """The names and the sample numbers of the next steps; the iteration is left there."""
    found = []
    for name, batch in loader:
        found.append((name, batch["number"].tolist()))
        if len(found) == most:
            break
    return found


def samples(*parts):
    found = {name: [] for name in COUNTS}
    for name, numbers in (step for part in parts for step in part):
        found[name] += numbers
    return {name: sorted(numbers) for name, numbers in found.items()}


EVERY = {name: list(range(count)) for name, count in COUNTS.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_every_batch_comes_once_and_ranks_take_the_same_loader(folders, size):
    loaders = [mixed(folders, rank, size) for rank in range(size)]
    epochs = []
    for _ in range(2):
        found = [steps_of(loader) for loader in loaders]
        assert samples(*found) == EVERY
        names = [[name for name, _ in part] for part in found]
        assert all(other == names[0] for other in names)
        assert [len(part) for part in found] == [len(loaders[0])] * size
        epochs.append(names[0])
    assert epochs[0] != epochs[1] and loaders[0].epoch == 1
    assert epochs[0][:8] != sorted(epochs[0])[:8]  # mixed, not one after the other
    again = mixed(folders, 0, size)
    assert [name for name, _ in steps_of(again)] == epochs[0]
    for _ in range(2):
        loaders[0].set_epoch(0)
        assert steps_of(loaders[0]) == steps_of(mixed(folders, 0, size))
    steps_of(loaders[0], 2)  # a loop that breaks leaves the rest of its epoch
    assert len(steps_of(loaders[0])) == len(loaders[0]) and loaders[0].epoch == 2


def test_weights_are_ratios_and_loaders_go_round(folders):
    loader = mixed(folders, weights={"a": 1, "b": 2, "c": 5}, steps=400)
    found = [name for name, _ in steps_of(loader)]
    assert len(found) == len(loader) == 400
    assert [round(8 * found.count(name) / 400) for name in COUNTS] == [1, 2, 5]
    assert found != [name for name, _ in steps_of(loader)]
    # Epochs of a loader follow one another without a gap, also where the mix begins a new epoch.
    loader = mixed(folders, weights={"a": 1, "b": 1, "c": 1}, steps=10)
    numbers = [n for _ in range(3) for name, part in steps_of(loader) if name == "c" for n in part]
    for start in range(0, len(numbers) - 7, 7):
        assert sorted(numbers[start : start + 7]) == list(range(7))


@pytest.mark.parametrize("done", [0, 1, 9, 23, 24])
@pytest.mark.parametrize(("size", "then"), [(1, 1), (3, 3), (1, 3), (3, 2)])
def test_what_is_left_comes_once_on_any_number_of_ranks(folders, size, then, done):
    begun, states = [], []
    steps = min(done, len(mixed(folders, 0, size)))
    for rank in range(size):
        loader = mixed(folders, rank, size)
        begun.append(steps_of(loader, steps) if steps else [])
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(other == states[0] for other in states)
    rest = []
    for rank in range(then):
        loader = mixed(folders, rank, then)
        loader.load_state_dict(states[0])
        loader.set_epoch(0)  # as trainers do
        left = loader.steps_left
        rest.append(steps_of(loader))
        assert len(rest[-1]) == left
    names = [[name for name, _ in part] for part in rest]
    assert all(other == names[0] for other in names)
    assert samples(*begun, *rest) == EVERY
    if size == then:
        assert begun[0] + rest[0] == steps_of(mixed(folders, 0, size))
    assert samples(steps_of(loader)) if then == 1 else loader.epoch == 0
    loader = mixed(folders)
    loader.load_state_dict(states[0])
    if steps == len(mixed(folders, 0, size)):
        assert samples(steps_of(loader)) == EVERY and loader.epoch == 1


@pytest.mark.parametrize("done", [0, 1, 7, 20])
def test_a_draw_by_weight_goes_on(folders, done):
    options = {"weights": {"a": 1, "b": 1, "c": 9}, "steps": 20}
    loader = mixed(folders, **options)
    begun = steps_of(loader, done) if done else []
    again = mixed(folders, **options)
    again.load_state_dict(loader.state_dict())
    whole = mixed(folders, **options)
    expected = steps_of(whole) + steps_of(whole)
    assert (begun + steps_of(again) + steps_of(again))[:40] == expected[:40]


def test_an_epoch_that_was_chosen_is_in_the_state(folders):
    loader = mixed(folders)
    steps_of(loader, 3)
    loader.set_epoch(1)
    again = mixed(folders)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(1)
    expected = mixed(folders)
    expected.set_epoch(1)
    assert again.steps_left == len(again)
    assert steps_of(again) == steps_of(expected) and again.epoch == 1


def test_a_resumed_epoch_can_be_asked_for_again(folders):
    loader = mixed(folders)
    steps_of(loader, 3)
    again = mixed(folders)
    again.load_state_dict(loader.state_dict())
    rest = steps_of(again)
    again.set_epoch(0)
    assert again.steps_left == len(rest)
    assert samples(steps_of(again)) == samples(rest)


def test_close_ends_the_iteration(folders):
    loader = mixed(folders)
    steps = iter(loader)
    next(steps)
    loader.close()
    assert list(steps) == []
    assert samples(steps_of(loader)) == EVERY


def skipping(folders, tmp_path, **options):
    """Loaders of which one skips some batches: a slab is cut off after it was opened."""
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(folders["a"], broken)
    loaders = {
        "a": loader_of(broken, 4, 0, 1, shuffle="none", on_error="skip", **TINY),
        "c": loader_of(folders["c"], 4, 0, 1, **TINY),
    }
    for slab in sorted(broken.glob("slab-*"))[options.pop("first", 1) :]:
        with slab.open("r+b") as file:
            file.truncate(9000)
    return MixedLoader(loaders, **options)


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_a_loader_that_skips_all_batches_ends_a_draw_by_weight(folders, tmp_path):
    loader = skipping(folders, tmp_path, first=0, weights={"a": 1, "c": 1}, steps=50)
    with pytest.raises(DataError, match="loader 'a' gave no batch in a whole epoch"):
        steps_of(loader)


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_batches_that_are_skipped_never_come_twice(folders, tmp_path):
    every = steps_of(skipping(folders, tmp_path))
    loader = skipping(folders, tmp_path)
    assert 0 < len(every) < len(loader)
    for done in range(1, len(every) + 1):
        loader = skipping(folders, tmp_path)
        begun = steps_of(loader, done)
        again = skipping(folders, tmp_path)
        again.load_state_dict(loader.state_dict())
        again.set_epoch(0)
        assert samples(begun, steps_of(again)) == samples(every)


def test_an_iteration_that_another_one_replaces_ends_by_an_error(folders):
    loader = mixed(folders)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="another iteration"):
        next(first)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "weights= and steps= go together"),
        ({"steps": 3}, "weights= and steps= go together"),
        ({"weights": {"a": 1}, "steps": 3}, "weights of a for the loaders a, b, c"),
        ({"weights": {"a": 1, "b": 0, "c": 1}, "steps": 3}, "the weight of 'b' is 0"),
        ({"weights": {"a": 1, "b": float("nan"), "c": 1}, "steps": 3}, "the weight of 'b' is nan"),
        ({"weights": {"a": 1, "b": 1, "c": 1}, "steps": 0}, "steps is 0"),
        ({"weights": {"a": 1, "b": 1, "c": 1}, "steps": 2.5}, "steps is 2.5"),
        ({"weights": {"a": "x", "b": 1, "c": 1}, "steps": 2}, "the weight of 'a' is 'x'"),
        ({"seed": -1}, "seed is -1; use an integer of at least 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(folders, options, text):
    with pytest.raises(ValueError, match=text):
        mixed(folders, **options)


def test_wrong_loaders_and_states_are_refused(folders):
    loader = mixed(folders)
    with pytest.raises(ValueError, match="no loaders"):
        MixedLoader({})
    with pytest.raises(TypeError, match="by name"):
        MixedLoader([loader])
    with pytest.raises(ValueError, match=r"of different ranks \(rank 0 of 1, rank 0 of 2\)"):
        MixedLoader({"a": loader_of(folders["a"], 3, 0, 1), "b": loader_of(folders["b"], 3, 0, 2)})
    (one,) = [loader_of(folders["a"], 3, 0, 1)]
    with pytest.raises(ValueError, match="one loader has two names"):
        MixedLoader({"a": one, "b": one})
    state = loader.state_dict()
    for changed, text in (
        ({"seed": 7}, "seed 7, the MixedLoader has 0"),
        ({"format": 9}, "no state of a MixedLoader"),
        ({"epoch": None}, "damaged"),
        ({"done": 99}, "damaged"),
        ({"counts": [1]}, "damaged"),
        ({"counts": [10**12, 1, 1]}, "damaged"),
        ({"loaders": {"a": {}}}, "has the loaders a, the MixedLoader a, b, c"),
    ):
        with pytest.raises(ValueError, match=text):
            loader.load_state_dict({**state, **changed})
