"""What `make demo` does, in its shortest form: turns, equal accuracy, a table and a plot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.processes import launch_environ, run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

COMPARE = Path(__file__).resolve().parents[2] / "examples" / "gain" / "compare.py"
JOB_S = 800.0
WAYS = ["Horovod", "--plugin hsgd-mpi", "--plugin hsgd", "DDP, gloo", "DDP, hsgd"]


def compare(*options: str) -> subprocess.CompletedProcess[str]:
    return run_marked([sys.executable, str(COMPARE), *options], launch_environ(), JOB_S)


@pytest.mark.timeout(JOB_S + 20)
def test_the_ways_train_alike_and_end_in_a_table_and_a_plot(tmp_path: Path) -> None:
    short = ["--rounds", "1", "--epochs", "1", "--images", "240", "--blocks", "1", "--np", "2"]
    done = compare(*short, "--output", str(tmp_path / "new"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stdout and done.stdout.endswith("\n")
    lines = done.stdout.splitlines()
    steps = [re.match(r"round 1 of 1, 2 ranks, (.*?): step", line) for line in lines[:5]]
    assert [step[1] for step in steps] == WAYS
    rows = lines[-6:-1]
    assert [row[:18].strip() for row in rows] == WAYS
    found = json.loads((tmp_path / "new" / "gain.json").read_text())["2"]
    ends = [found[way][0]["curve"][-1]["accuracy"] for way in WAYS]
    assert [row.split()[-1] for row in rows] == [f"{end:.2f}" for end in ends]
    losses = [found[way][0]["curve"][-1]["loss"] for way in WAYS]
    assert losses == pytest.approx([losses[0]] * len(WAYS), rel=1e-4)
    assert (tmp_path / "new" / "gain.png").read_bytes().startswith(b"\x89PNG")


def test_the_help_defines_what_is_measured_and_bad_options_end_in_one_line() -> None:
    help_text = compare("--help").stdout
    assert "Step: " in help_text and "Exposed: " in help_text
    done = compare("--rounds", "0")
    assert (done.returncode, done.stderr) == (1, "compare: --rounds is 0; use at least 1\n")
