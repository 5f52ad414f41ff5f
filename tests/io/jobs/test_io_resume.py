"""Resume in the middle of an epoch: what is left comes once, in order, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from hsgd.io.order.epoch_order import Cut, part_of, remaining, share_of, with_cut
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hdf5_samples import collect, make_slabs
from loaders import loader_of

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 200, "window_bytes": 900}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """101 samples in 7 slabs."""
    return make_slabs(tmp_path_factory.mktemp("resume") / "data", 101, 7)


def loaders(folder, world_size, batch_size, state=None, **options):
    created = [
        loader_of(folder, batch_size, rank, world_size, seed=5, **TINY, **options)
        for rank in range(world_size)
    ]
    for loader in created:
        if state is not None:
            loader.load_state_dict(state)
    return created


def numbers(batches):
    return collect(batches)["number"].tolist() if batches else []


def consume(loader, steps):
    """The numbers of the first batches; the iteration is left open behind them."""
    iteration = iter(loader)
    batches = [next(iteration) for _ in range(min(steps, loader.steps_left))]
    return iteration, numbers(batches)


@pytest.mark.long
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([1, 3, 8]), st.integers(0, 9)),
        min_size=1,
        max_size=3,
    ),
    pad=st.booleans(),
)
def test_every_sample_comes_once_over_jobs_of_any_number_of_ranks(folder, jobs, pad):
    seen, state = [], None
    for world_size, batch_size, steps in [*jobs, (2, 4, 10**6)]:
        states = []
        for loader in loaders(folder, world_size, batch_size, state, pad=pad):
            assert loader.steps_left <= 101
            iteration, part = consume(loader, steps)
            share, _ = loader._state.left(loader._here.rank)
            seen += part[: share.count - share.padding]
            states.append(loader.state_dict())
            iteration.close()
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
    assert sorted(seen) == list(range(101))


def test_on_as_many_ranks_the_remaining_order_is_that_of_the_job_that_ended(folder):
    for whole, left in zip(
        loaders(folder, 3, 4, pad=False), loaders(folder, 3, 4, pad=False), strict=True
    ):
        expected = numbers(list(whole))
        iteration, begun = consume(left, 3)
        state = left.state_dict()
        iteration.close()
        again = loaders(folder, 3, 4, state, pad=False)[left._here.rank]
        assert (len(again), again.steps_left) == (len(whole), len(whole) - 3)
        assert begun + numbers(list(again)) == expected


def test_with_the_same_global_batch_drop_last_leaves_the_same_number_of_steps(folder):
    (first, *_) = loaders(folder, 4, 2, drop_last=True)
    iteration, _ = consume(first, 5)
    state = first.state_dict()
    iteration.close()
    for world_size, batch_size in ((1, 8), (2, 4), (8, 1)):
        resumed = loaders(folder, world_size, batch_size, state, drop_last=True)
        assert {loader.steps_left for loader in resumed} == {101 // 8 - 5}
        found = [number for loader in resumed for number in numbers(list(loader))]
        assert len(found) == len(set(found)) == 8 * (101 // 8 - 5)


@settings(max_examples=60)
@given(
    samples=st.integers(1, 1100),
    jobs=st.lists(
        st.tuples(st.integers(1, 7), st.integers(1, 16), st.integers(0, 20)), min_size=1, max_size=4
    ),
)
@example(samples=1003, jobs=[(3, 8, 10), (5, 8, 7), (4, 4, 99)])
def test_drop_last_leaves_out_less_than_one_global_batch_however_often_it_is_resumed(samples, jobs):
    cuts = ()
    seen = []
    for world_size, batch_size, steps in [*jobs[:-1], (*jobs[-1][:2], samples)]:
        left = remaining(samples, cuts)
        total = sum(count for _, count in left)
        shares = [
            share_of(total, batch_size, rank, world_size, drop_last=True, resumed=True)
            for rank in range(world_size)
        ]
        taken = min(steps, shares[0].steps)
        for share in shares:
            for first, count in part_of(left, share.start, taken * batch_size):
                seen += range(first, first + count)
        cuts = with_cut(cuts, Cut(world_size, batch_size, True, True, taken))
    assert len(set(seen)) == len(seen)
    world_size, batch_size, _ = jobs[-1]
    assert samples - len(seen) < world_size * batch_size
    assert sum(count for _, count in remaining(samples, cuts)) == samples - len(seen)


def test_batches_that_were_only_read_ahead_are_not_consumed(folder):
    (loader,) = loaders(folder, 1, 1, read_ahead=50)
    iteration, _ = consume(loader, 1)
    assert loader.state_dict()["cuts"] == [
        {"world_size": 1, "batch_size": 1, "drop_last": False, "pad": True, "steps": 1}
    ]
    iteration.close()


def test_the_state_stays_small(folder):
    (loader,) = loaders(folder, 1, 1)
    sizes = set()
    iteration = iter(loader)
    for _ in range(99):
        next(iteration)
        sizes.add(len(json.dumps(loader.state_dict())) // 10)
    assert len(sizes) <= 2
    iteration.close()


def test_after_the_resumed_epoch_the_next_one_is_whole(folder):
    (first,) = loaders(folder, 1, 10)
    first.set_epoch(3)
    iteration, begun = consume(first, 4)
    state = first.state_dict()
    iteration.close()
    (second,) = loaders(folder, 1, 10, state)
    second.set_epoch(3)  # a training loop starts with the epoch of the state
    assert sorted(begun + numbers(list(second))) == list(range(101))
    second.set_epoch(4)
    assert (len(second), sorted(numbers(list(second)))) == (11, list(range(101)))


def test_a_state_of_a_finished_epoch_leaves_nothing(folder):
    (loader,) = loaders(folder, 1, 10)
    list(loader)
    (again,) = loaders(folder, 1, 10, loader.state_dict())
    again.set_epoch(0)
    assert (again.steps_left, list(again)) == (0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "other"}, "state is of another dataset: other"),
        ({"num_samples": 7}, "state is of another dataset"),
        ({"seed": 6}, "saved with seed 6, the loader has 5"),
        ({"shuffle": "full"}, "saved with shuffle 'full', the loader has 'block'"),
        ({"window_samples": 1}, "saved with window_samples 1"),
        ({"format": 1}, "saved by an older hsgd"),
        ({"format": 9}, "this is no state of a PartitionedLoader"),
        ({"cuts": [{}]}, "is damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(folder, change, message):
    (loader,) = loaders(folder, 1, 10)
    expected = numbers(list(loader))
    loader.set_epoch(0)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert numbers(list(loader)) == expected


def test_positions_that_are_left_follow_from_the_cuts_alone():
    first = Cut(2, 3, False, True, 1)
    assert remaining(11, []) == [(0, 11)]
    assert remaining(11, [first]) == [(3, 3), (9, 2)]
    assert remaining(11, [first, Cut(1, 2, False, True, 1)]) == [(5, 1), (9, 2)]
    assert part_of([(3, 3), (9, 2)], 4, 3) == [(10, 1), (3, 2)]


TRAIN = """\
import json, os, sys
from loaders import loader_of
folder, state_file = sys.argv[1:]
loader = loader_of(folder, 3, seed=5, as_numpy=True, block_bytes=200, window_bytes=900)
if os.path.exists(state_file):
    loader.load_state_dict(json.load(open(state_file)))
for batch in loader:
    print(*batch["number"].tolist(), flush=True)
    with open(state_file + ".new", "w") as file:
        json.dump(loader.state_dict(), file)
    os.replace(state_file + ".new", state_file)
    print("saved", flush=True)
"""


def test_a_job_that_was_killed_goes_on_with_the_same_samples_in_the_same_order(folder, tmp_path):
    command = [sys.executable, "-c", TRAIN, str(folder), str(tmp_path / "state")]
    expected = numbers(list(loaders(folder, 1, 3)[0]))
    found = []  # the numbers of each batch
    for lives in (7, 2, 11, 10**6):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        delivered = []
        for line in process.stdout:
            if line != "saved\n":
                delivered.append([int(word) for word in line.split()])
            elif len(delivered) == lives:
                os.kill(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait(60)
        (cut,) = json.loads((tmp_path / "state").read_text())["cuts"]
        # A batch after the last state comes again; one between state and print may be unseen here.
        found += delivered[: cut["steps"] - len(found)]
    assert [number for batch in found for number in batch] == expected
