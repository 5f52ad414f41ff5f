"""The version flow control of NotifiedTree, checked in all interleavings by spin."""

from __future__ import annotations

from pathlib import Path

import pytest

from spin import verify

__all__: list[str] = []

pytestmark = pytest.mark.long


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_versions_never_overtake_what_is_still_read(tmp_path: Path, steps: int) -> None:
    errors, output = verify("tree.pml", tmp_path, f"STEPS={steps}")
    assert errors == 0, output


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        ("EAGER_GRADIENT", "assertion violated (inbox_"),
        ("EAGER_WEIGHTS", "assertion violated (weights_"),
        ("OLD_NOTIFICATION", "assertion violated (inbox_"),
        ("COUNTS", "invalid end state"),
    ],
)
def test_the_model_fails_without_each_of_its_rules(tmp_path: Path, broken: str, how: str) -> None:
    errors, output = verify("tree.pml", tmp_path, broken)
    assert errors > 0 and how in output.replace("((", "("), output
