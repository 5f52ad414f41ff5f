"""Models of protocols, checked in all interleavings by spin.

Owns the calls of spin and of the C compiler. The models are in tests/models.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["verify"]

MODELS = Path(__file__).resolve().parents[1] / "models"


def verify(model: str, folder: Path, *defines: str) -> tuple[int, str]:
    """Errors that spin found in a file of tests/models, and what it said."""
    if shutil.which("spin") is None:
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail("CI must check the model: install spin")
        pytest.skip("spin is not installed (Debian, Ubuntu: apt-get install spin)")
    compiler = os.environ.get("CC") or "cc"
    for command in (
        ["spin", *(f"-D{name}" for name in defines), "-a", str(MODELS / model)],
        [*compiler.split(), "-O1", "-DSAFETY", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, timeout=60, capture_output=True)
    run = subprocess.run(
        ["./pan", "-m100000"], cwd=folder, timeout=60, capture_output=True, text=True
    )
    found = re.search(r"errors: (\d+)", run.stdout)
    assert found is not None and "max search depth too small" not in run.stdout, run.stdout
    return int(found[1]), run.stdout
