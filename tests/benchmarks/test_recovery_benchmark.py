"""training.py --faults counts right what faults cost, and runs. No figure is judged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import layouts
from studies import recovery_figures as figures
from studies import recovery_jobs
from studies.recovery_jobs import Entry, Fault, RankNotes
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280.0
LOGS = {
    "a-1": "begin 9 0.0\nenter 1 0 2 0 1.0\n"
    "step 1 2.0\nstep 2 3.0\nstep 3 4.0\n"
    "enter 2 0 1 1 6.5\nstep 2 7.0\nstep 3 8.0\nstep 4 9.0\n"
    "enter 3 0 2 4 9.5\nstep 5 11.0\nst",
    "a-2": "begin 9 0.0\nenter 1 1 2 0 1.0\nstep 1 2.0\nstep 2 3.0\n",
    "a-3": "begin 9 5.0\nenter 3 1 2 4 9.6\nstep 5 11.5\n",
}
KILLED = Fault("kill", 4.5, "a", (2,), 1, 2)


@pytest.fixture
def notes(tmp_path: Path) -> list[RankNotes]:
    for name, text in LOGS.items():
        (tmp_path / f"{name}.log").write_text(text)
    return recovery_jobs.read_notes(tmp_path)


def test_notes_are_read_without_a_line_that_is_being_written(notes: list[RankNotes]) -> None:
    assert [(note.host, note.pid, note.parent) for note in notes] == [
        ("a", 1, 9),
        ("a", 2, 9),
        ("a", 3, 9),
    ]
    assert notes[0].entries[1] == Entry(2, 0, 1, 1, 6.5)
    assert notes[0].steps[-2:] == [(2, 4, 9.0), (3, 5, 11.0)]


def test_a_fault_costs_the_time_to_the_next_step_and_the_steps_since_the_commit(
    notes: list[RankNotes],
) -> None:
    assert figures.costs_of_faults(notes, [KILLED]) == [
        {
            "kind": "kill",
            "entered_s": 2.0,
            "recovered_s": 2.5,
            "steps_again": 2,  # the third was reached, the first committed
            "size_before": 2,
            "size_after": 1,
        }
    ]
    assert figures.pace(notes) == (10.5, 1.0)


def test_a_fault_that_no_step_followed_was_not_overcome(notes: list[RankNotes]) -> None:
    later = Fault("kill", 11.6, "a", (3,), 3, 2)
    assert len(figures.costs_of_faults(notes, [KILLED, later])) == 1
    of_all = Fault("node", 4.5, "a", (1, 2, 3), 1, 2)
    assert figures.costs_of_faults(notes, [of_all]) == []


def test_joins_are_gaps_between_worlds_without_a_fault(notes: list[RankNotes]) -> None:
    assert figures.costs_of_joins(notes, [KILLED]) == [2.0]
    assert figures.costs_of_joins(notes, []) == [3.0, 2.0]


def test_ratios_compare_trainings_of_one_seed() -> None:
    def row(candidate: str, seed: int, score: float, seconds: float, *costs: float) -> object:
        overcome = [{"kind": "kill", "recovered_s": s, "steps_again": 2} for s in costs]
        return {
            "candidate": candidate,
            "task": "digits",
            "layout": "np4",
            "seed": seed,
            "score": score,
            "seconds": seconds,
            "step_s": 0.5,
            "faults": len(costs),
            "overcome": overcome,
            "joins_s": [1.5],
        }

    rows = [
        *(row("undisturbed", 0, 98.0, 10.0), row("disturbed", 0, 97.0, 15.0, 1.0, 3.0)),
        *(row("undisturbed", 1, 96.0, 10.0), row("disturbed", 1, 98.0, 25.0)),
        row("disturbed", 2, 0.0, 7.0),  # without an undisturbed one yet
    ]
    found = figures.ratios(rows)  # type: ignore[arg-type]
    assert found.pop("half_width/digits/np4") > 0
    assert found == {
        "difference/digits/np4": 0.5,
        "vs_undisturbed/time/digits/np4": 0.5,
        "overcome/digits/np4": 1.0,
        "lost_s_p50/digits/np4": 3.0,
        "lost_s_p99/digits/np4": 3.98,
    }
    text = figures.tables(rows)  # type: ignore[arg-type]
    assert "a rank is killed" in text and "ranks join" in text and "+0.500" in text


@pytest.mark.parametrize("kind", ["nobody", "one left", "not settled", "not overcome", "over"])
def test_nobody_is_harmed_where_the_state_would_be_lost(tmp_path: Path, kind: str) -> None:
    steps = "".join(f"step {k} 2.0\n" for k in range(recovery_jobs.SETTLED))
    texts = {"nobody": {}, "one left": {"1": steps}, "not settled": {"1": "step 1 2.0\n", "2": ""}}
    texts["over"] = {"1": steps, "2": f"{steps}end 9.0\n"}
    for pid, text in texts.get(kind, {"1": steps, "2": steps}).items():
        (tmp_path / f"a-{pid}.log").write_text(f"begin 9 0.0\nenter 1 0 2 0 1.0\n{text}")
    before = [Fault("kill", 1.0, "a", (3,), 1, 3)] if kind == "not overcome" else []
    place = layouts.Testbed(layouts.on_one_node(2))
    assert recovery_jobs.harm(random.Random(0), place, tmp_path, before) is None


def test_a_rank_that_has_the_state_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_jobs, "KINDS", {1: ("kill",)})
    steps = "".join(f"step {k} 2.0\n" for k in range(recovery_jobs.SETTLED))
    ranks = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    try:
        for rank in ranks:
            text = f"begin 9 0.0\nenter 1 0 2 0 1.0\n{steps}"
            (tmp_path / f"a-{rank.pid}.log").write_text(text)
        place = layouts.Testbed(layouts.on_one_node(2))
        fault = recovery_jobs.harm(random.Random(0), place, tmp_path, [])
        assert fault is not None and (fault.kind, fault.world, fault.size) == ("kill", 1, 2)
        (hit,) = (rank for rank in ranks if rank.pid in fault.pids)
        assert hit.wait(10) == -signal.SIGKILL
        assert [rank.poll() for rank in ranks if rank is not hit] == [None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("task", recovery_jobs.SAMPLES)
def test_samples_are_those_of_a_task(task: str, tmp_path: Path) -> None:
    arrays = recovery_jobs.SAMPLES[task]()
    assert len(arrays["input"]) == len(arrays["target"]) > 1000
    assert len(arrays["test_input"]) == len(arrays["test_target"]) > 300
    if task == "gpt":
        assert (arrays["input"][:, 1:] == arrays["target"][:, :-1]).all()
        assert arrays["input"].max() < 128
    path = recovery_jobs.write_samples(task, tmp_path)
    assert recovery_jobs.write_samples(task, tmp_path) == path


@pytest.mark.bench
def test_a_short_run_writes_json_and_a_plot(tmp_path: Path) -> None:
    file, png = tmp_path / "f.json", tmp_path / "f.png"
    program = str(ROOT / "benchmarks" / "training.py")
    words = ["--faults", "--quick", "--json", str(file), "--png", str(png)]
    done = run_marked([sys.executable, program, *words], dict(os.environ), LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert [row["candidate"] for row in document["results"]] == ["undisturbed", "disturbed"]
    plain, disturbed = document["results"]
    assert disturbed["faults"] > 0 and disturbed["overcome"]
    assert disturbed["steps"] >= plain["steps"] > 0
    assert {"difference/digits/np4", "lost_s_p99/digits/np4"} <= document["ratios"].keys()
    assert png.stat().st_size > 0
