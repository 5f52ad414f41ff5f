"""benchmarks/elastic.py runs and counts its ratios right. No figure is judged."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import elastic
from harness.shapes import MODELS
from studies import elastic_study
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0


@pytest.mark.bench
def test_a_short_run_writes_json_and_a_plot(tmp_path: Path) -> None:
    words = ["--quick", "--parts", "box", "slow", "study", "--rounds", "1", "--mbytes", "1"]
    words += ["--steps", "3", "--workers", "2", "--seeds", "2", "--epochs", "1"]
    words += ["--lr", "0.4"]
    words += ["--json", str(tmp_path / "e.json"), "--png", str(tmp_path / "e.png")]
    program = str(ROOT / "benchmarks" / "elastic.py")
    done = run_marked([sys.executable, program, *words], dict(os.environ), LIMIT_S)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["failures"] == []
    assert {row["shards"] for row in report["results"] if row["part"] == "study"} == {
        "same distribution",
        "label skew",
    }
    assert {"box", "slow", "study"} == {row["part"] for row in report["results"]}
    keys = {"vs_limit/read/2_workers", "vs_limit/accumulate/1_workers"}
    keys |= {"vs_undisturbed/slow_async/np2", "gain/hybrid/label_skew/2_workers"}
    assert keys <= report["ratios"].keys()
    assert (tmp_path / "e.png").stat().st_size > 0


def test_ratios_compare_with_limits_peers_and_synchronous_training() -> None:
    rows = [
        {"part": "box", "layout": "np2", "workers": 2, "candidate": "read", "s": [0.2]},
        {"part": "box", "layout": "np2", "workers": 2, "candidate": "copy", "s": [0.1]},
        {"part": "push", "layout": "2x1@1gbit", "candidate": "push bf16", "bytes": 10**8}
        | {"s": [1.0]},
        {"part": "push", "layout": "2x1@1gbit", "candidate": "tcp", "bytes": 10**8} | {"s": [0.9]},
        {"part": "steps", "layout": "2x2", "candidate": "compute", "s": [1.0]},
        {"part": "steps", "layout": "2x2", "candidate": "horovod", "s": [1.6]},
        {"part": "steps", "layout": "2x2", "candidate": "two_level", "s": [1.3]},
        {"part": "steps", "layout": "2x2", "candidate": "async", "s": [1.1]},
        {"part": "models", "layout": "2x1@1gbit", "model": "vgg16", "bytes": 553}
        | {"of_an_iteration_s": dict(zip(elastic.ITERATION, (1, 2, 3, 4, 5, 28), strict=True))},
        {"part": "slow", "layout": "np2", "candidate": "async", "undisturbed": [10.0]}
        | {"disturbed": [9.0]},
    ]
    for name, right in (("sync", [97.0, 95.0]), ("none", [30.0, 40.0])):
        row = {"part": "study", "layout": "np4", "shards": "label skew", "workers": 4}
        rows.append({**row, "candidate": name, "mean_model": right, "worst_model": right})
    assert elastic.ratios(rows) == pytest.approx(
        {
            "vs_limit/read/2_workers": 0.5,
            "vs_limit/push_bf16/2x1@1gbit": 0.8,
            "vs_tcp/push_bf16/2x1@1gbit": 0.9,
            "vs_limit/tcp/2x1@1gbit": 0.8889,
            "vs_limit/t_iter/vgg16/2x1@1gbit": 0.5,
            "vs_peer/exposed_async/2x2": 6.0,
            "vs_two_level/exposed_async/2x2": 3.0,
            "vs_undisturbed/slow_async/np2": 0.9,
            "gain/none/label_skew/4_workers": -61.0,
            "error_of_gain/none/label_skew/4_workers": 76.24,
        }
    )


@pytest.mark.parametrize(
    ("optimum", "found"),
    [(0.2, 0.2), (0.4, 0.4), (1.7, 1.6), (0.02, 0.025), (1e9, 12.8), (0.0, 0.003125)],
)
def test_a_best_learning_rate_at_the_border_extends_the_grid(optimum: float, found: float) -> None:
    scores_of = lambda rates: [-abs(lr - optimum) for lr in rates]  # noqa: E731
    assert elastic_study.best_rate(scores_of) == pytest.approx(found)


def test_a_run_that_is_interrupted_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"part": "box", "workers": 1, "bytes": 1, "s": [1.0]}
    report = iter([[{**row, "candidate": "read"}, {**row, "candidate": "copy"}]])

    def run(self: Any, layout: Any, words: Any) -> Any:
        try:
            return next(report)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(elastic.WorkerJobs, "run", run)
    target = tmp_path / "e.json"
    assert elastic.main(["--parts", "box", "slow", "--json", str(target)]) == 130
    assert json.loads(target.read_text())["ratios"] == {"vs_limit/read/1_workers": 1.0}


def test_the_models_have_as_many_parameters_as_published() -> None:
    counts = {name: sum(math.prod(shape) for shape in make()) for name, make in MODELS.items()}
    assert counts == {
        "inception_v1": 6_998_552,
        "resnet50": 25_557_032,
        "inception_resnet_v2": 55_843_464,
        "vgg16": 138_357_544,
        "small": 16 * 256 * 256,
    }
