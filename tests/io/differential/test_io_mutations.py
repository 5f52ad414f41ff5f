"""Changed files of all kinds never crash, hang, or deliver wrong samples in silence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import mutation_campaign

__all__: list[str] = []


@pytest.mark.parametrize(
    ("seed", "count", "random_files"),
    [(0, 100, 2), pytest.param(1, 1400, 10, marks=pytest.mark.long)],
)
@pytest.mark.timeout(600)
def test_changed_files_are_read_right_or_refused(seed: int, count: int, random_files: int) -> None:
    words = [sys.executable, mutation_campaign.__file__, str(seed), str(count)]
    words += ["--random", str(random_files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1].partition("}")[0] + "}")
    assert sum(figures.values()) == count
    assert min(figures["delivered"], figures["refused"]) >= count // 5
