"""Benchmarks that are ended by Ctrl-C or SIGTERM show and write what they had measured."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

import ddp
import gossip
import lars
import node_shared
import training
from harness import stopping
from harness.worker_jobs import WorkerJobs
from studies import gossip_cost, gossip_links, large_batch

__all__: list[str] = []


@pytest.fixture(autouse=True)
def same_handler() -> Iterator[None]:
    """A benchmark keeps its own until it ends: here it does not end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("ending", "code"), [(None, 0), (KeyboardInterrupt(), 130), (SystemExit(143), 143)]
)
def test_the_exit_code_says_how_a_run_ended(ending: BaseException | None, code: int) -> None:
    with stopping.keeping() as stopped:
        if ending is not None:
            raise ending
    assert stopped.code == code


def test_errors_are_not_taken_for_an_end() -> None:
    with pytest.raises(ValueError, match="broken"), stopping.keeping():
        raise ValueError("broken")


def written(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["meta"]["interrupted"]
    return document


@pytest.mark.parametrize(
    ("program", "case"), [(training, "resnet50"), (node_shared, "resnet50+sgd")]
)
def test_steps_of_training_are_kept(
    program: Any, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_one(place: Any, ways: Any, cases: Any, turns: int, said: Any, found: Any) -> None:
        found[case, "hsgd"] = training.Samples([1e-3], [3e-3])
        found[case, "ddp"] = training.Samples([], [])  # it was made, and not measured
        sys.exit(143)

    monkeypatch.setattr(training, "measure", measure_one)
    file = tmp_path / "a.json"
    assert program.main(["--np", "2", "3", "--json", str(file)]) == 143
    (row,) = written(file)["results"]
    assert (row["candidate"], row["layout"], row["median_us"]) == ("hsgd", "np2", 3000)


def test_times_are_kept_when_memory_was_not_measured_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(place: Any, ways: Any, cases: Any, turns: int, said: Any, found: Any) -> None:
        for name, step_s in (("hsgd-node-shared", 2e-3), ("horovod", 6e-3)):
            found["bert+sgd", name] = training.Samples([1e-3], [step_s])

    def weigh(place: Any, ways: Any, cases: Any, said: Any, found: Any) -> None:
        found["bert+sgd", "hsgd-node-shared"] = [100, 110]
        sys.exit(143)

    monkeypatch.setattr(training, "measure", measure)
    monkeypatch.setattr(node_shared, "weigh", weigh)
    file = tmp_path / "a.json"
    assert node_shared.main(["--json", str(file)]) == 143
    document = written(file)
    assert document["ratios"] == {
        "vs_horovod/bert+sgd/np2": 5.0,
        "vs_peer/bert+sgd/np2": 5.0,
    }
    assert [row["job_bytes"] for row in document["results"]] == [210, None]


def test_memory_can_be_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weigh(place: Any, ways: Any, cases: Any, said: Any, found: Any) -> None:
        for name, held in (("hsgd-node-shared", 50), ("horovod", 100)):
            found["bert+sgd", name] = [held, held]

    monkeypatch.setattr(node_shared, "weigh", weigh)
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--measure", "memory", "--json", str(file), "--png", str(png)]
    assert node_shared.main(words) == 0
    document = json.loads(file.read_text())
    assert document["ratios"] == {"memory_vs_horovod/bert+sgd/np2": 2.0}
    assert png.read_bytes().startswith(b"\x89PNG")


def test_batches_with_both_optimizers_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(learn: Any, judge: Any, plan: large_batch.TrainingPlan, seed: int) -> float:
        if plan.batch == 700 and plan.optimizer == "lars":
            sys.exit(143)
        return 90.0

    monkeypatch.setattr(large_batch, "train", train)
    file = tmp_path / "a.json"
    words = ["--batches", "64", "700", "--seeds", "2", "--rates", "3", "--json", str(file)]
    assert large_batch.main(words) == 143
    found = [(row["candidate"], row["batch"]) for row in written(file)["results"]]
    assert found == [("sgd", 64), ("lars", 64)]


def test_models_that_were_done_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measure(shapes: Any, makers: Any, rounds: int, progress: Any) -> Any:
        calls.append(shapes)
        if len(calls) == 2:
            sys.exit(143)
        return {name: [1e-3] for name in makers}, []

    monkeypatch.setattr(lars, "measure", measure)
    file = tmp_path / "a.json"
    assert lars.main(["--json", str(file)]) == 143
    document = written(file)
    assert {row["model"] for row in document["results"]} == {"resnet50"}
    assert document["ratios"]["vs_limit/resnet50/1threads"] == 1.0


def test_turns_of_gossip_on_links_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trigger = {"step": 100.0, "all": 2.0}

    def measure(rate: str, *_: Any) -> Iterator[list[dict[str, Any]]]:
        report = {
            "case": f"4x1@{rate}",
            "target": 85.0,
            "reached": True,
            "steps": 9,
            "accuracy": 85,
        }
        yield [
            {**report, "candidate": name, "seconds": seconds, "mbytes": mbytes}
            for name, seconds, mbytes in (("every-step", 4.0, 8.0), ("budget-13", 2.0, 1.0))
        ]
        sys.exit(143)

    cost = [{"case": "d", "candidate": name, "median_us": us} for name, us in trigger.items()]
    monkeypatch.setattr(gossip_cost, "measure", lambda widths: iter([cost]))
    monkeypatch.setattr(gossip_links, "measure", measure)
    file = tmp_path / "a.json"
    assert gossip.main(["--no-study", "--json", str(file)]) == 143
    assert written(file)["ratios"] == {
        "vs_peer/time/budget-13/4x1@100mbit": 2.0,
        "vs_peer/traffic_to_target/budget-13/4x1@100mbit": 8.0,
        "vs_limit/trigger/all/d": 2.5,
    }


def test_what_the_ranks_of_ddp_wrote_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(jobs: WorkerJobs, layout: Any, plan: Any, environment: Any) -> Any:
        seconds = {"hsgd": [2e-3], "gloo": [5e-3], "nothing": [1e-3]}
        jobs.out.write_text(json.dumps({"seconds": {"bert": seconds}, "failures": []}))
        sys.exit(143)

    monkeypatch.setattr(WorkerJobs, "run", run)
    file = tmp_path / "a.json"
    assert ddp.main(["--models", "bert", "resnet50", "--json", str(file)]) == 143
    assert written(file)["ratios"] == {
        "vs_limit_step/bert": 0.5,
        "vs_peer/bert": 4.0,
        "vs_peer_step/bert": 2.5,
    }
