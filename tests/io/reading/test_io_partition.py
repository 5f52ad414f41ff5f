"""The arithmetic of the reader: who reads what, in which order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hsgd.io.order.epoch_order import EpochOrder, part_in_turn, permutation, share_of
from hypothesis import given, settings
from hypothesis import strategies as st

worlds = st.integers(1, 5)
counts = st.integers(1, 211)
batches = st.integers(1, 17)
shuffles = st.sampled_from(["block", "slabs", "none", "full"])


def positions(share, num_samples):
    return [(share.start + i) % num_samples for i in range(share.count)]


@given(num_samples=counts, batch_size=batches, world_size=worlds)
def test_padding_gives_every_rank_equal_batches_and_every_position_once_besides_it(
    num_samples, batch_size, world_size
):
    if num_samples < world_size:
        return
    shares = [share_of(num_samples, batch_size, r, world_size) for r in range(world_size)]
    assert len({(s.steps, s.count) for s in shares}) == 1
    own = [p for s in shares for p in positions(s, num_samples)[: s.count - s.padding]]
    assert sorted(own) == list(range(num_samples))
    assert all(s.padding in (0, 1) for s in shares)
    assert all(s.batch_count(step) > 0 for s in shares for step in range(s.steps))


@given(num_samples=counts, batch_size=batches, world_size=worlds)
def test_without_padding_every_position_appears_exactly_once(num_samples, batch_size, world_size):
    if num_samples < world_size:
        return
    shares = [
        share_of(num_samples, batch_size, r, world_size, pad=False) for r in range(world_size)
    ]
    assert len({s.steps for s in shares}) == 1
    assert sorted(p for s in shares for p in positions(s, num_samples)) == list(range(num_samples))
    for share in shares:
        assert sum(share.batch_count(step) for step in range(share.steps)) == share.count
        assert share.batch_count(share.steps) == 0


@given(num_samples=counts, batch_size=batches, world_size=worlds)
def test_drop_last_gives_full_batches_only_and_no_position_twice(
    num_samples, batch_size, world_size
):
    if num_samples < world_size:
        return
    if num_samples < world_size * batch_size:
        with pytest.raises(ValueError, match="drop_last=True leaves no batch"):
            share_of(num_samples, batch_size, 0, world_size, drop_last=True)
        return
    shares = [
        share_of(num_samples, batch_size, r, world_size, drop_last=True) for r in range(world_size)
    ]
    assert len({s.steps for s in shares}) == 1
    assert all(s.batch_count(step) == batch_size for s in shares for step in range(s.steps))
    seen = [p for s in shares for p in positions(s, num_samples)]
    assert len(seen) == len(set(seen)) > num_samples - world_size * batch_size


@settings(max_examples=200)
@given(
    slabs=st.lists(st.integers(0, 23), min_size=1, max_size=9),
    shuffle=shuffles,
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    block_samples=st.integers(1, 12),
    window_samples=st.integers(1, 60),
    parts=worlds,
)
def test_any_order_is_a_permutation_however_it_is_cut(
    slabs, shuffle, seed, epoch, block_samples, window_samples, parts
):
    total = sum(slabs)
    if total == 0:
        return
    order = EpochOrder(
        slabs,
        shuffle=shuffle,
        seed=seed,
        epoch=epoch,
        block_samples=block_samples,
        window_samples=window_samples,
    )
    whole = order.indices(0, total)
    assert sorted(whole) == list(range(total))
    cuts = [total * part // parts for part in range(parts + 1)]
    pieces = [order.indices(low, high - low) for low, high in itertools.pairwise(cuts)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    around = order.indices(total - 1, total)
    assert around.tolist() == np.roll(whole, 1).tolist()


@pytest.mark.parametrize("shuffle", ["block", "slabs", "full"])
def test_the_order_is_a_function_of_seed_and_epoch(shuffle):
    def order(seed, epoch):
        created = EpochOrder(
            [50, 50], shuffle=shuffle, seed=seed, epoch=epoch, block_samples=5, window_samples=20
        )
        return created.indices(0, 100).tolist()

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_no_shuffle_is_the_order_of_the_files_in_one_read():
    order = EpochOrder([4, 3], shuffle="none", seed=5, epoch=6)
    (piece,) = order.pieces(2, 4)
    assert (piece.starts.tolist(), piece.counts.tolist()) == ([2, 4], [2, 2])
    assert piece.places.tolist() == [0, 1, 2, 3]


def test_whole_windows_of_a_block_shuffle_are_read_block_by_block():
    order = EpochOrder([64], shuffle="block", seed=3, block_samples=8, window_samples=16)
    pieces = list(order.pieces(0, 64))
    assert len(pieces) == 4
    for piece in pieces:
        assert piece.buffer_rows == piece.stream_rows == 16
        assert all(start % 8 == 0 for start in piece.starts)


def test_a_sparse_piece_reads_at_most_four_times_its_rows():
    order = EpochOrder([100_000], shuffle="full", seed=3, window_samples=50)
    for piece in order.pieces(0, 1000):
        assert piece.buffer_rows <= 4 * piece.stream_rows


def test_positions_in_an_epoch_are_uniform():
    hits = np.zeros((40, 40), int)
    for epoch in range(2000):
        order = EpochOrder([20, 20], seed=1, epoch=epoch, block_samples=4, window_samples=12)
        hits[np.arange(40), order.indices(0, 40)] += 1
    expected = 2000 / 40
    chi_square = ((hits - expected) ** 2 / expected).sum()
    degrees = 39 * 39
    assert abs(chi_square - degrees) < 6 * np.sqrt(2 * degrees)


def test_permutation_values_are_fixed_for_ever():
    assert permutation(10, 1, 2, 3).tolist() == [8, 1, 9, 3, 7, 5, 2, 0, 4, 6]
    assert permutation(0, 1).tolist() == []
    assert permutation(1, 1).tolist() == [0]


def test_more_ranks_than_samples_names_both_and_the_remedy():
    with pytest.raises(ValueError, match=r"3 samples for 4 ranks.*start at most 3 ranks"):
        share_of(3, 1, 0, 4)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="the dataset is empty"):
        share_of(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((10, 0, 0, 1), ValueError),
        ((10, 1, 2, 2), ValueError),
        ((10, 1, -1, 2), ValueError),
        ((10, 1, 0, 0), ValueError),
        ((10, 2.5, 0, 1), TypeError),
        ((10, 1, True, 2), TypeError),
    ],
)
def test_impossible_arguments_are_refused(arguments, error):
    with pytest.raises(error, match=r"is|of"):
        share_of(*arguments)


@pytest.mark.parametrize(
    "options", [{"shuffle": "blocks"}, {"seed": -1}, {"epoch": -1}, {"block_samples": 0}]
)
def test_impossible_orders_are_refused(options):
    with pytest.raises(ValueError, match="use"):
        EpochOrder([10], **options)


def test_with_slabs_a_part_of_the_stream_holds_the_same_slabs_in_every_epoch():
    def slabs_and_order(epoch):
        order = EpochOrder(
            [40] * 16, shuffle="slabs", seed=3, epoch=epoch, block_samples=5, window_samples=20
        )
        halves = order.indices(0, 320), order.indices(320, 320)
        for half, start in zip(halves, (0, 320), strict=True):
            assert set((half // 40).tolist()) == set(order.slabs(start, 320).tolist())
        return [set((half // 40).tolist()) for half in halves], halves[0].tolist()

    first, second = slabs_and_order(0), slabs_and_order(1)
    assert first[0] == second[0]
    assert [len(slabs) for slabs in first[0]] == [8, 8]
    assert first[1] != second[1]


@given(
    slabs=st.lists(st.integers(0, 23), min_size=1, max_size=9),
    shuffle=shuffles,
    start=st.integers(0, 200),
    count=st.integers(0, 200),
    block_samples=st.integers(1, 12),
    window_samples=st.integers(1, 60),
)
def test_the_slabs_of_a_range_are_all_that_its_samples_come_from(
    slabs, shuffle, start, count, block_samples, window_samples
):
    total = sum(slabs)
    if total == 0:
        return
    start, count = start % total, min(count, total)
    order = EpochOrder(
        slabs, shuffle=shuffle, block_samples=block_samples, window_samples=window_samples
    )
    rows = order.indices(start, count)
    needed = np.searchsorted(np.cumsum(slabs), rows, side="right")
    assert set(needed.tolist()) <= set(order.slabs(start, count).tolist())


@given(nodes=st.integers(1, 4), local_size=st.integers(1, 4))
def test_parts_go_round_inside_the_node_first_and_come_to_every_rank(nodes, local_size):
    size = nodes * local_size
    turns = [
        [part_in_turn(r, epoch, size, local_size) for r in range(size)] for epoch in range(size)
    ]
    assert all(sorted(turn) == list(range(size)) for turn in turns)
    assert all(sorted(of_rank) == list(range(size)) for of_rank in zip(*turns, strict=True))
    for turn in turns[:local_size]:
        assert [part // local_size for part in turn] == [r // local_size for r in range(size)]
    assert sorted(part_in_turn(r, 7, 5, 2) for r in range(5)) == list(range(5))
