"""Diagnostics of a process group: profiles, counts of calls, torch's Flight Recorder."""

from __future__ import annotations

__all__: list[str] = []
