"""Paths for Comm.local at which ranks meet that have another way to tell one another."""

from __future__ import annotations

import secrets

__all__ = ["draw_meeting_path"]


def draw_meeting_path() -> str:
    """A "@NAME#SECRET" for Comm.local that nobody can guess; local."""
    return f"@hsgd-{secrets.token_hex(16)}#{secrets.token_hex(16)}"
