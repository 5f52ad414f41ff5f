"""What tests of the campaigns share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.processes import run_marked

__all__: list[str] = []


@pytest.fixture
def campaign(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """campaign(*words, limit_s=1500): run one; its exit code, its JSON file, and its output."""

    def run(*words: str, limit_s: float = 1500.0) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "found.json"
        command = [sys.executable, "-m", "campaigns", *words, "--json", str(path)]
        done = run_marked(command, os.environ, limit_s)
        output = done.stdout + done.stderr
        assert path.is_file(), output
        return done.returncode, json.loads(path.read_text()), output

    return run
