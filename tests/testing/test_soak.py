"""Soaks in their short form, and their judge: shown programs that leak, and samples that grow."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaigns.soak.flatness import BOUNDS, growth_of, tenths
from campaigns.soak.footprint import MEASURES, footprint
from campaigns.soak.soaks import LAYOUTS, SOAKS
from tiers import short_form

__all__: list[str] = []

pytestmark = pytest.mark.long

LIMIT_S = 280.0
QUICK = ("soak", "--quick")
Campaign = Callable[..., tuple[int, dict[str, Any], str]]
LEAKS = {"leak-memory": "mapped", "leak-descriptors": "descriptors", "leak-threads": "threads"}


@pytest.mark.parametrize(
    ("layout", "names"),
    short_form(
        "chaos",
        [
            ("node-2", ["async", "communicators", "arrays", "window", "boxes"]),
            ("mpi-2", ["communicators"]),
            ("tcp-2", ["communicators", "works"]),
            ("tcp-3", ["arrays", "windows", "groups", "training"]),
            ("node-3", ["collectives", "splits", "open"]),
        ],
        keep={0, 1, 2},
    ),
)
def test_ranks_hold_no_more_in_the_end_than_after_the_warm_up(
    campaign: Campaign, layout: str, names: list[str]
) -> None:
    code, found, output = campaign(*QUICK, "--layouts", layout, "--soaks", *names, limit_s=LIMIT_S)
    assert code == 0, output
    assert [result["soak"] for result in found["results"]] == names
    for result in found["results"]:
        least = 0 if result["soak"] == "training" else SOAKS[result["soak"]].least
        assert result["operations"] >= least
        assert len(result["samples"]) == len(LAYOUTS[layout].nodes)


def test_leaks_are_found(campaign: Campaign) -> None:
    code, found, output = campaign(
        *QUICK, "--layouts", "node-2", "--soaks", *LEAKS, limit_s=LIMIT_S
    )
    assert code == 1
    for result in found["results"]:
        growing = LEAKS[result["soak"]]
        for rank in range(2):
            assert any(line.startswith(f"rank {rank}: {growing}") for line in result["problems"])
        assert result["growth"][growing]["by"] > BOUNDS[growing]
    assert "3 soaks, 3 with problems" in output


def samples(measure: str, late: int) -> list[list[int]]:
    """A hundred, of which the last ten have `late` more."""
    column = MEASURES.index(measure)
    rows = [[1000] * len(MEASURES) for _ in range(100)]
    for row in rows[90:]:
        row[column] += late
    return rows


@pytest.mark.parametrize("measure", MEASURES)
def test_the_judge_allows_the_bound_and_no_more(measure: str) -> None:
    bound = BOUNDS[measure]
    assert not any(growth.is_leak for growth in growth_of(samples(measure, bound)))
    leaks = [growth for growth in growth_of(samples(measure, bound + 1)) if growth.is_leak]
    assert [growth.measure for growth in leaks] == [measure]
    assert leaks[0].by == bound + 1


def test_the_warm_up_does_not_count() -> None:
    rows = [[10 * BOUNDS["rss"]] * len(MEASURES) for _ in range(100)]
    for row in rows[:20]:
        row[:] = [0] * len(MEASURES)
    assert not any(growth.is_leak for growth in growth_of(rows))
    assert tenths(100) == (range(20, 28), range(92, 100))
    with pytest.raises(ValueError, match="take at least 10"):
        tenths(9)


def test_a_footprint_sees_what_this_process_takes() -> None:
    before = dict(zip(MEASURES, footprint(), strict=True))
    with Path("/dev/null").open() as _:
        kept = mmap.mmap(-1, 24 << 20)  # not a part of what the allocator had
        kept.write(b"x" * len(kept))
        after = dict(zip(MEASURES, footprint(), strict=True))
    assert after["descriptors"] == before["descriptors"] + 1
    assert after["threads"] == before["threads"]
    for measure in ("rss", "pss", "mapped"):
        assert after[measure] - before[measure] >= len(kept) // 2
