"""benchmarks/simulation/cache_lines.py: what it counts, and how near it is to measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulation.cache_lines import FORMS, Node, break_even_bytes, main

__all__: list[str] = []


def test_lines_of_each_form_by_hand() -> None:
    node = Node(4)  # arrivals cost nothing
    lines = {
        kind: {form: of(node, 8) for form, of in forms.items()} for kind, forms in FORMS.items()
    }
    assert lines == {
        "allreduce": {"one step": 24, "two steps": 8 + 6 + 8, "Comm.empty": 6 + 6},
        "reduce_scatter": {"one rank sums": 24, "each its slice": 6},
        "broadcast": {"all read": 8, "Comm.empty": 2 + 6},
        "allgather": {"one rank joins": 16, "all read": 8},
    }
    assert FORMS["allreduce"]["one step"](Node(32), 8) == 31 * 8 + 8  # one rank sums for all
    assert FORMS["reduce_scatter"]["each its slice"](Node(32), 8) == 31  # a line of each


def test_meetings_grow_with_ranks_and_less_so_in_groups() -> None:
    assert [Node(ranks, 2.0).meeting() for ranks in (2, 16, 32, 64, 128)] == [2, 30, 32, 48, 64]


def test_it_is_near_what_was_measured(tmp_path: Path) -> None:
    assert main(["--json", str(tmp_path / "lines.json")]) == 0
    written = json.loads((tmp_path / "lines.json").read_text())
    assert len(written["ratios"]) == 3
    assert all(0.8 < ratio < 1.25 for ratio in written["ratios"].values())
    assert written["meta"]["break_even_bytes"] == {"16": 1152, "64": 384, "128": 320}
    assert break_even_bytes(Node(16, written["meta"]["arrival_lines"])) == 1152


@pytest.mark.parametrize("words", [["--np", "x"], ["--json"]])
def test_a_wrong_option_ends_it(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
