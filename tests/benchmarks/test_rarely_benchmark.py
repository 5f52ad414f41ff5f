"""rarely.py: what its ratios mean, and its tasks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rarely
from tasks.skewed_digits import SkewedDigits
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240


def row(way: str, *curve: list[float], seed: int = 0) -> dict[str, Any]:
    step, loss, seconds, sent = curve[-1]
    return {
        "layout": "4x1",
        "candidate": way,
        "seed": seed,
        "steps": step,
        "loss": loss,
        "accuracy": 90.0 + seed,
        "seconds": seconds,
        "sent_bytes": sent,
        "wait_s": None,
        "curve": list(curve),
    }


BASE = row("synchronous", [10, 3.0, 40.0, 500.0], [20, 2.0, 80.0, 1000.0])


def test_a_way_that_takes_more_steps_is_compared_by_step_and_by_when_it_reaches_the_loss() -> None:
    longer = row("a", [10, 3.0, 5.0, 10.0], [20, 2.5, 10.0, 20.0], [30, 1.5, 15.0, 30.0])
    found = rarely.ratios([BASE, longer])
    assert found["vs_peer/seconds/a/4x1"] == 8.0  # 4 seconds in a step, and 0.5
    assert found["vs_peer/bytes/a/4x1"] == 50.0
    assert found["vs_peer/time_to_loss/a/4x1"] == 6.4  # 80 s and 12.5 s
    assert found["vs_peer/bytes_to_loss/a/4x1"] == 40.0


def test_a_way_that_misses_the_loss_of_one_seed_has_no_time_to_it() -> None:
    there = row("a", [10, 2.0, 5.0, 10.0])
    missed = row("a", [10, 2.1, 5.0, 10.0], seed=1)
    found = rarely.ratios([BASE, {**BASE, "seed": 1}, there, missed])
    assert not [name for name in found if "to_loss" in name]
    assert "vs_peer/loss/a/4x1" in found


def test_points_of_accuracy_are_paired_by_seed() -> None:
    rows = [BASE, {**BASE, "seed": 1}, row("a", [20, 2.0, 5.0, 10.0], seed=1)]
    rows.append({**rows[-1], "seed": 0, "accuracy": 88.0})
    found = rarely.ratios(rows)
    assert found["points/accuracy/a/4x1"] == -0.5  # 1 and -2


def test_a_single_seed_has_no_interval() -> None:
    there = row("a", [20, 2.2, 5.0, 10.0])
    one = rarely.ratios([BASE, there])
    assert not [name for name in one if name.startswith("error/")]
    assert rarely._percent(one, "a/4x1") == "+10.00 %"
    two = rarely.ratios([BASE, {**BASE, "seed": 1}, there, {**there, "seed": 1, "loss": 2.0}])
    assert rarely._percent(two, "a/4x1").startswith("+4.77 +- ")


def test_each_rank_has_few_classes_of_the_digits_and_all_score_the_same_images() -> None:
    task = SkewedDigits()
    draws = [torch.Generator().manual_seed(rank) for rank in range(4)]
    labels = [task.batch(3, rank, 4, 400, draws[rank])[1] for rank in range(4)]
    assert all(len(part.unique()) <= 5 for part in labels)
    assert len(torch.cat(labels).unique()) == 10
    parts = task.held_out(4)
    assert len(parts) % 4 == 0 and {len(answers) for _, answers in parts} == {15}
    with pytest.raises(ValueError, match=r"^5 ranks: "):
        task.held_out(5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--task", "vision", "--pretrain", "5"], "--pretrain: for --task text"),
        (["--longer", "0.5"], "--longer: 1 or more"),
        (["--longer", "2", "--ways", "diloco-30"], "above 1 with synchronous among --ways"),
    ],
)
def test_options_that_cannot_be_are_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        rarely.main(words)
    assert reason in capsys.readouterr().err


@pytest.mark.bench
def test_digits_are_learned_until_the_loss_of_synchronous_training(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = ["--quick", "--task", "vision", "--steps", "20", "--longer", "3", "--json"]
    program = [sys.executable, str(ROOT / "benchmarks" / "rarely.py")]
    done = run_marked([*program, *words, str(file)], {**os.environ}, LIMIT_S)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    rows = {one["candidate"]: one for one in document["results"]}
    base = rows.pop("synchronous")
    assert base["steps"] == 20 and base["parameters"] == 120010 and list(rows)
    for one in rows.values():
        last = one["curve"][-1]
        assert last[0] == one["steps"] <= 60
        assert one["steps"] == 60 or last[1] <= base["loss"]
        assert all(point[1] > base["loss"] for point in one["curve"][:-1])
