"""Damaged chunks are refused or decoded to their size: no crash, and no more memory."""

from __future__ import annotations

import pytest

from mutated_chunks import ROWS, decoded

__all__: list[str] = []


@pytest.mark.parametrize("name", ROWS)
def test_damaged_chunks_are_refused_or_decoded_to_their_size(tmp_path, name):
    assert "refused" in set(decoded(name, 400, tmp_path))
