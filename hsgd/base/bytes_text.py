"""bytes_text(): a size for people."""

from __future__ import annotations

__all__ = ["bytes_text"]


def bytes_text(count: int) -> str:
    """Return a size in the largest binary unit with a value of at least 1, as "1.5 KiB"; local."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{f'{value:.1f}'.removesuffix('.0')} {unit}"
