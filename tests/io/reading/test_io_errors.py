"""Policies for what cannot be read: all ranks raise, skip or go on together."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hsgd.io import open_map
from hsgd.io.convert import slab_folder_writer as writing

from hdf5_samples import arrays_of, collect, make_slabs
from hsgd.errors import DataError
from loaders import loader_of
from outcomes import told_by
from ranks import Ranks, meeting_point

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 200, "window_bytes": 900}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """100 samples in 5 slabs, with a checksum for each 4 samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "CHECKSUM_BYTES", 4 * (8 + 24 + 5 + 1))
        folder = tmp_path_factory.mktemp("errors") / "data"
        return make_slabs(folder, 100, 5, permute=False)


@pytest.fixture
def folder(original, tmp_path):
    """A copy in which samples 24 to 27 are damaged."""
    folder = shutil.copytree(original, tmp_path / "data")
    slab = open_map(folder).slabs[1]
    with open(slab.path, "r+b") as file:
        file.seek(slab.extents["number"].offset + 5 * 8)
        file.write(b"\xff")
    return folder


def make(folder, rank=0, world_size=1, **options):
    settings = {"shuffle": "none", "verify": True, **TINY, **options}
    return loader_of(folder, 10, rank, world_size, **settings)


@pytest.fixture(scope="module")
def pool():
    with Ranks(3) as ranks:
        yield ranks


def test_skip_leaves_out_the_batch_and_counts_it(folder):
    loader = make(folder, on_error="skip")
    with pytest.warns(UserWarning, match=r"1 of 10 batches.*slab-00001\.h5.*\(batch 2 of rank 0\)"):
        found = collect(loader)["number"].tolist()
    assert found == [n for n in range(100) if not 20 <= n < 30]
    assert (loader.metrics()["skipped"], loader.metrics()["batches"]) == (1, 9)
    assert loader.state_dict()["cuts"][0]["steps"] == 10


@pytest.mark.parametrize("transform_threads", [0, 2])
def test_an_epoch_without_a_readable_batch_says_so_and_counts_all(folder, transform_threads):
    loader = make(
        folder, on_error="skip", transform=lambda batch: batch, transform_threads=transform_threads
    )
    for slab in range(5):
        (folder / f"slab-{slab:05d}.h5").touch()
    with pytest.warns(UserWarning, match=r"10 of 10 batches .* left out .*slab-00000\.h5: changed"):
        assert list(loader) == []
    assert (loader.metrics()["skipped"], loader.metrics()["batches"]) == (10, 0)


def test_what_was_skipped_at_the_end_counts_after_the_batches_before_it(folder):
    loader = make(folder, on_error="skip", transform=lambda batch: batch, transform_threads=4)
    (folder / "slab-00004.h5").touch()
    iteration = iter(loader)
    for _ in range(6):
        next(iteration)
    assert loader.state_dict()["cuts"][0]["steps"] == 7
    with pytest.warns(UserWarning, match="3 of 10 batches"):
        list(iteration)
    assert loader.state_dict()["cuts"][0]["steps"] == 10


def test_substitute_puts_good_samples_of_the_batch_in_their_place(folder):
    loader = make(folder, on_error="substitute")
    found = collect(loader)
    numbers = found["number"].tolist()
    assert len(numbers) == 100
    assert numbers[20:24] + numbers[28:30] == [20, 21, 22, 23, 28, 29]
    assert set(numbers[24:28]) <= {20, 21, 22, 23, 28, 29}
    for name, values in found.items():
        np.testing.assert_array_equal(values, arrays_of(100)[name][found["number"]])
    assert loader.metrics()["substituted"] == 4


def test_substitute_for_a_whole_batch_takes_an_earlier_sample_and_raises_without_one(folder):
    settings = {"shuffle": "none", "verify": True, "on_error": "substitute", **TINY}
    loader = loader_of(folder, 4, **settings)
    assert collect(loader)["number"].tolist()[24:28] == [0] * 4
    (folder / "slab-00000.h5").touch()
    with pytest.raises(DataError, match=r"slab-00000\.h5: changed"):
        list(loader)


def test_a_slab_that_changes_while_it_is_read_falls_under_the_policy_too(folder):
    loader = make(folder, on_error="skip")
    (folder / "slab-00004.h5").touch()
    with pytest.warns(UserWarning, match="3 of 10 batches of this epoch were left out"):
        found = collect(loader)["number"].tolist()
    assert loader.metrics()["skipped"] == 3
    assert found == [n for n in range(80) if not 20 <= n < 30]


def read_part(seat, folder, path, on_error):
    """Numbers that a rank got, or the text of its error; then a collective, to see who is there."""
    comm = seat.comm(path, 3)
    settings = {"shuffle": "none", "verify": True, "as_numpy": True, **TINY}
    loader = loader_of(folder, 6, seat.rank, 3, on_error=on_error, comm=comm, **settings)
    got = []
    try:
        for batch in loader:
            got += batch["number"].tolist()
    except DataError as error:
        got = str(error)
    together = int(comm.allreduce(np.ones(1, np.int32))[0])
    return got, together, loader.metrics()["skipped"]


DIFFERENT = [
    ("seed", 3, 4),
    ("shuffle", "none", "block"),
    ("shuffle", "slabs", "block"),
    ("drop_last", True, False),
]


def make_differently(seat, folder, path):
    """What a rank is told of each; then ranks make a loader that agrees."""
    comm, told = seat.comm(path, 3), []
    for name, odd, usual in DIFFERENT:
        own = {name: odd if seat.rank == 2 else usual}
        told.append(told_by(lambda own=own: loader_of(folder, 6, comm=comm, **own, **TINY)))
    size = 6 + (seat.rank == 1)
    told.append(told_by(lambda: loader_of(folder, size, comm=comm, **TINY)))
    seats = {"rank": seat.rank, "world_size": 3 + (seat.rank == 0)}
    told.append(told_by(lambda: loader_of(folder, 6, comm=comm, **seats, **TINY)))
    return told, len(loader_of(folder, 6, comm=comm, **TINY))


def test_ranks_that_would_read_in_different_orders_are_told(pool, folder):
    for told, steps in pool.run(make_differently, folder, meeting_point()):
        assert {kind for kind, _ in told} == {"SignatureMismatch"} and steps > 0
        for (_, line), (name, odd, usual) in zip(told, DIFFERENT, strict=False):
            assert f"PartitionedLoader: {name} is {odd} on rank 2, {usual} on rank 0" in line
        assert "batch_size is 7 on rank 1, 6 on rank 0" in told[-2][1]
        assert "world_size is 3 on rank 1, 4 on rank 0" in told[-1][1]


def test_all_ranks_raise_in_the_same_step_and_those_without_error_name_the_rank(pool, folder):
    found = pool.run(read_part, folder, meeting_point(), "raise")
    assert [together for _, together, _ in found] == [3, 3, 3]
    assert "slab-00001.h5: the checksum of the block" in found[0][0]
    for rank in (1, 2):
        assert found[rank][0].startswith("batch 4 of rank 0 could not be read, so no rank has it")


def test_all_ranks_skip_the_same_step(pool, folder):
    found = pool.run(read_part, folder, meeting_point(), "skip")
    assert [(together, skipped) for _, together, skipped in found] == [(3, 1)] * 3
    for rank, start in enumerate((0, 34, 67)):
        expected = [n for n in range(start, start + 34) if not 24 <= n - start < 30]
        assert [n % 100 for n in found[rank][0]] == [n % 100 for n in expected]


def test_substitution_stays_with_the_rank_and_nobody_waits(pool, folder):
    found = pool.run(read_part, folder, meeting_point(), "substitute")
    assert [(len(got), together) for got, together, _ in found] == [(34, 3)] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error='ignore'; use one of 'raise'"),
        ({"on_error": "skip", "world_size": 2}, "needs comm=, a hsgd.Comm of these ranks"),
    ],
)
def test_policies_that_cannot_hold_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        make(folder, **options)


def count_examinations(seat, folder, path):
    """How many files this rank opened with HDF5, and its numbers; or the text of its error."""
    from hsgd.io.format import opening

    opened = []
    examine, opening.open_hdf5 = (
        opening.open_hdf5,
        lambda *a: (opened.append(a), examine(*a))[1],
    )
    try:
        loader = loader_of(folder, 6, seat.rank, 3, as_numpy=True, comm=seat.comm(path, 3), **TINY)
        return len(opened), collect(loader)["number"].tolist()
    except DataError as error:
        return len(opened), str(error)
    finally:
        opening.open_hdf5 = examine


def test_only_rank_0_parses_the_metadata_and_its_errors_reach_all(pool, original, tmp_path):
    path = meeting_point()
    found = pool.run(count_examinations, original, path)
    assert [opened for opened, _ in found] == [6, 0, 0]
    assert {number for _, numbers in found for number in numbers} == set(range(100))
    found = pool.run(count_examinations, tmp_path / "nothing", path)
    assert [opened for opened, _ in found] == [1, 0, 0]
    assert len({text for _, text in found}) == 1 and "nothing: no such file" in found[0][1]
