"""ElasticSampler: every rank gets as many indices as it says, whatever is left of the epoch."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from hsgd.torch.elastic.sampler import ElasticSampler

__all__: list[str] = []


def samplers(count: int, size: int, processed: int, shuffle: bool) -> list[ElasticSampler]:
    made = []
    for rank in range(size):
        job = SimpleNamespace(comm=SimpleNamespace(size=size, rank=rank))
        with mock.patch("hsgd.torch.elastic.sampler.runtime.current", lambda job=job: job):
            sampler = ElasticSampler(range(count), shuffle=shuffle)
            sampler.load_state_dict({"epoch": 0, "processed_num": processed})
        made.append(sampler)
    return made


@given(st.integers(0, 40), st.integers(1, 17), st.integers(0, 50), st.booleans())
def test_all_ranks_get_as_many_indices_and_all_that_is_left_together(
    count: int, size: int, processed: int, shuffle: bool
) -> None:
    every = samplers(count, size, processed, shuffle)
    given_out = [list(sampler) for sampler in every]
    left = every[0].remaining_indices
    assert len(left) == max(0, count - processed)
    assert {len(indices) for indices in given_out} == {len(every[0])} == {-(-len(left) // size)}
    assert {index for indices in given_out for index in indices} == set(left)


def test_one_index_for_four_ranks() -> None:
    for count, processed in ((9, 8), (1, 0)):
        every = samplers(count, 4, processed, shuffle=False)
        assert [list(sampler) for sampler in every] == [[count - 1]] * 4
