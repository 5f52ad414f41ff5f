"""The version flow control of NotifiedTree, checked in all interleavings by spin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

__all__: list[str] = []

MODEL = Path(__file__).resolve().parent / "models" / "tree.pml"


def verify(folder: Path, *defines: str) -> tuple[int, str]:
    """Errors that spin found, and what it said."""
    if shutil.which("spin") is None:
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail("CI must check the model: install spin")
        pytest.skip("spin is not installed (Debian, Ubuntu: apt-get install spin)")
    compiler = os.environ.get("CC") or "cc"
    for command in (
        ["spin", *(f"-D{name}" for name in defines), "-a", str(MODEL)],
        [*compiler.split(), "-O1", "-DSAFETY", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, timeout=60, capture_output=True)
    run = subprocess.run(["./pan"], cwd=folder, timeout=60, capture_output=True, text=True)
    found = re.search(r"errors: (\d+)", run.stdout)
    assert found is not None and "max search depth too small" not in run.stdout, run.stdout
    return int(found[1]), run.stdout


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_versions_never_overtake_what_is_still_read(tmp_path: Path, steps: int) -> None:
    errors, said = verify(tmp_path, f"STEPS={steps}")
    assert errors == 0, said


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
    errors, said = verify(tmp_path, broken)
    assert errors > 0 and how in said.replace("((", "("), said
