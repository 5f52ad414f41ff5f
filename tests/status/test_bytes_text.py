"""Sizes in reports: the largest binary unit that leaves at least 1."""

from __future__ import annotations

import pytest

from hsgd.base.bytes_text import bytes_text

__all__: list[str] = []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (4000, "3.9 KiB"),
        (1 << 20, "1 MiB"),
        (3 << 30, "3 GiB"),
        (1 << 40, "1 TiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit(count: int, text: str) -> None:
    assert bytes_text(count) == text
