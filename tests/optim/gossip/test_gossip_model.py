"""The protocol of hsgd.optim.gossip.pair_averaging, checked in all interleavings by spin."""

from __future__ import annotations

from pathlib import Path

import pytest

from spin import verify

__all__: list[str] = []

pytestmark = pytest.mark.long


@pytest.mark.parametrize("asks", [1, 2, 3])
@pytest.mark.parametrize("where", ["INSIDE", "NETWORK"])
def test_both_sides_apply_their_half_or_neither_does(tmp_path: Path, where: str, asks: int) -> None:
    errors, output = verify("gossip.pml", tmp_path, where, f"ASKS={asks}")
    assert errors == 0, output


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        ("INSIDE NO_TIE", "assertion violated !(crossed"),
        ("INSIDE NO_STAMP", "assertion violated !(crossed"),
        ("INSIDE NOTIFY_FIRST", "assertion violated (sum==0)"),
        ("INSIDE FORGETFUL_GONE", "assertion violated (sum==0)"),
        ("INSIDE GIVE_UP", "assertion violated (sum==0)"),
        ("NETWORK ANSWER_BOTH", "assertion violated"),
        ("NETWORK CLOSE_EARLY", "assertion violated"),
        ("NETWORK TELL_FIRST", "assertion violated (sum==0)"),
        ("NETWORK GIVE_UP", "assertion violated (sum==0)"),
    ],
)
def test_the_model_fails_without_each_of_its_rules(tmp_path: Path, broken: str, how: str) -> None:
    errors, output = verify("gossip.pml", tmp_path, *broken.split())
    assert errors > 0 and how in " ".join(output.split()), output
