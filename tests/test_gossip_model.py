"""The protocol of hsgd.optim.pairs, checked in all interleavings by spin."""

from __future__ import annotations

from pathlib import Path

import pytest

from spin import verify

__all__: list[str] = []


@pytest.mark.parametrize("asks", [1, 2, 3])
def test_both_sides_apply_their_half_or_neither_does(tmp_path: Path, asks: int) -> None:
    errors, said = verify("gossip.pml", tmp_path, f"ASKS={asks}")
    assert errors == 0, said


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        ("NO_TIE", "assertion violated !(crossed"),
        ("NO_STAMP", "assertion violated !(crossed"),
        ("NOTIFY_FIRST", "assertion violated (sum==0)"),
        ("FORGETFUL_GONE", "assertion violated (sum==0)"),
        ("GIVE_UP", "assertion violated (sum==0)"),
    ],
)
def test_the_model_fails_without_each_of_its_rules(tmp_path: Path, broken: str, how: str) -> None:
    errors, said = verify("gossip.pml", tmp_path, broken)
    assert errors > 0 and how in " ".join(said.split()), said
