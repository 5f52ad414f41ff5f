"""benchmarks/training.py runs, checks its results, and writes what it promises. No figure is judged
here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import training
from harness import candidates, jobs, layouts, steps
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "training.py"
LIMIT_S = 400  # three jobs that load torch; a crowded machine needs it


def row(candidate: str, exposed_us: float, median_us: float = 1e4, **more: Any) -> dict[str, Any]:
    fixed = {"candidate": candidate, "exposed_us": exposed_us, "median_us": median_us}
    return {"case": "resnet50", "layout": "np2", **fixed, **more}


@pytest.mark.bench
def test_a_short_run_writes_rows_ratios_a_table_and_a_plot(tmp_path: Path) -> None:
    names = ["hsgd", "ddp", "limit"]
    words = [
        "--cases",
        "small1000",
        "cnn",
        "--candidates",
        *names,
        "--turns",
        "1",
        "--seconds",
        "900",
    ]
    files = ["--json", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]
    environ = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = run_marked([sys.executable, str(PROGRAM), *words, *files], environ, LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["failures"] == []
    places = {(r["case"], r["candidate"]) for r in found["results"]}
    assert places == {(case, name) for case in ("small1000", "cnn") for name in names}
    for result in found["results"]:
        assert result["samples"] == training.BATCH
        assert result["median_us"] > 0 and result["plain_us"] > 0
        assert result["exposed_us"] == pytest.approx(  # all three are rounded to six digits
            result["median_us"] - result["plain_us"], abs=2e-5 * result["median_us"]
        )
    assert {"vs_ddp/exposed/small1000/np2", "vs_limit/step/cnn/np2"} <= found["ratios"].keys()
    assert found["meta"]["interrupted"] is False
    assert found["meta"]["settings"]["layouts"] == {"np2": "2 ranks"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "vs_ddp/exposed/small1000/np2" in done.stdout


def test_horovod_is_the_best_of_its_settings() -> None:
    rows = [
        row("hsgd", 100.0),
        row("horovod", 900.0),
        row("horovod-fast", 500.0),
        row("ddp", 300.0),
    ]
    found = training.ratios(rows)
    assert found["vs_horovod/exposed/resnet50/np2"] == 5.0
    assert found["vs_ddp/exposed/resnet50/np2"] == 3.0
    assert found["vs_ddp/step/resnet50/np2"] == 1.0


def test_exposed_time_in_the_noise_counts_as_a_hundredth_of_the_step() -> None:
    found = training.ratios([row("hsgd", -50.0), row("ddp", 300.0)])
    assert found["vs_ddp/exposed/resnet50/np2"] == 3.0


def test_the_limit_is_compared_but_is_no_peer() -> None:
    found = training.ratios([row("hsgd", 200.0), row("ddp", 300.0), row("limit", 50.0)])
    assert found["vs_limit/exposed/resnet50/np2"] == 0.5  # a hundredth of the step
    assert found["vs_peer/exposed/resnet50/np2"] == 1.5


class Told:
    """In place of a job: notes its orders, and what tuning and steps would answer."""

    def __init__(self, both_s: float) -> None:
        self.orders: list[str] = []
        self._both_s = both_s

    def order(self, text: str) -> list[dict[str, Any]]:
        self.orders.append(text)
        verb, _, word = text.partition(" ")
        times = [1e-3] * int(word) if verb == "measure" else []
        return [
            {
                "setup": {"both_s": self._both_s},
                "tune": {"steps": 10, "tried": 3},
                "measure": {"plain": times, "step": times},
            }.get(verb, {})
        ]


@pytest.mark.parametrize("together", [True, False])
def test_a_way_that_tunes_itself_does_so_once_and_long_steps_are_few(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_fit", lambda case, ranks: together)
    jobs_of = {"hsgd": Told(0.01), "horovod-tuned": Told(10.0)}
    found: dict[tuple[str, str], training.Samples] = {}
    effort = training.Effort(turns=2, seconds=6.0, tune_s=4.0)
    testbed = layouts.Testbed(layouts.on_one_node(2))
    training._take_turns(testbed, jobs_of, {"horovod-tuned"}, "cnn", effort, [], found)  # type: ignore[arg-type]
    usual = ["setup cnn", "measure 5", "release", "setup cnn", "measure 5", "release"]
    tuned = ["setup cnn", "tune 4.0", "measure 1", "release", "setup cnn", "measure 1", "release"]
    if together:
        usual[2:4] = []
        tuned[3:5] = []
    assert jobs_of["hsgd"].orders == usual
    assert jobs_of["horovod-tuned"].orders == tuned
    assert found["cnn", "horovod-tuned"].tuning == {"steps": 10, "tried": 3}
    assert len(found["cnn", "hsgd"].step) == 10


def test_threads_are_compared_with_processes_on_links_of_one_rate() -> None:
    rows = [
        row("hsgd", 0, 600.0, case="cnn", layout="2x1t2@10gbit"),
        row("hsgd", 0, 300.0, case="cnn", layout="2x1@10gbit"),
        row("hsgd", 0, 400.0, case="cnn", layout="2x2@10gbit"),
        row("hsgd", 0, 500.0, case="cnn", layout="2x2@1gbit"),
    ]
    found = {k: v for k, v in training.ratios(rows).items() if k.startswith("processes")}
    assert found == {"processes_vs_threads/hsgd/2x2@10gbit": 1.5}


def test_shapes_are_those_of_the_models() -> None:
    shapes = steps.resnet50()
    assert len(shapes) == 161
    assert steps.payload_bytes("resnet50") == 4 * 25_557_032
    assert len(steps.bert()) == 199
    assert steps.payload_bytes("bert") == 4 * 109_482_240
    assert steps.payload_bytes("small1000") == 4 * 256_000


def test_every_way_is_a_job_that_the_helpers_know() -> None:
    for way in training.WAYS:
        assert isinstance(way.job(), candidates.Job)
    assert layouts.read_layout("2x2@10gbit").ranks == 4


def test_a_layout_may_give_each_rank_threads() -> None:
    threaded = layouts.read_layout("2x1t2@10gbit")
    assert (threaded.ranks_of_nodes, threaded.threads, threaded.rate) == ((1, 1), 2, "10gbit")
    assert str(threaded) == "1 + 1 ranks with 2 threads each on 2 nodes at 10gbit/s"
    assert jobs.environment(threaded)["OMP_NUM_THREADS"] == "2"
    for text in ("2x1t", "2x1t0", "t2"):
        with pytest.raises(ValueError, match="is no layout"):
            layouts.read_layout(text)
