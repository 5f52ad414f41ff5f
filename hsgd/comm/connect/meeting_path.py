"""Random paths for Comm.local, for ranks that have another way to send one another the path."""

from __future__ import annotations

import secrets

__all__ = ["draw_meeting_path"]


def draw_meeting_path() -> str:
    """Return a "@NAME#SECRET" for Comm.local that nobody can guess; local."""
    return f"@hsgd-{secrets.token_hex(16)}#{secrets.token_hex(16)}"
