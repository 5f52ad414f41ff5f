"""The protocol of a ParameterBox's chunks, checked in all interleavings by spin."""

from __future__ import annotations

from pathlib import Path

import pytest

from spin import verify

__all__: list[str] = []

pytestmark = pytest.mark.long


def test_chunks_stay_whole_and_no_change_is_lost_whoever_dies(tmp_path: Path) -> None:
    errors, output = verify("box.pml", tmp_path)
    assert errors == 0, output


@pytest.mark.parametrize(
    "broken", ["HOME_FIRST", "TELL_FIRST", "NO_SECOND_LOOK", "NO_JOURNAL_CHECK", "NO_SETTLING"]
)
def test_the_model_fails_without_each_of_its_rules(tmp_path: Path, broken: str) -> None:
    errors, output = verify("box.pml", tmp_path, broken)
    assert errors > 0 and "assertion violated" in output, output
