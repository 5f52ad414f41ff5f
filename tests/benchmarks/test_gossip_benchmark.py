"""The benchmark of gossip runs and writes what it promises; its ranks are simulated faithfully."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from hsgd.optim import FixedPeriod, RelativeChange
from studies import gossip_links, gossip_simulation, gossip_study
from studies.gossip_simulation import SHARDS, Case, Way, digits, shards, simulate
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SMALL = Case("two-classes", 4, (0, 1), 30)


def test_a_quick_run_writes_rows_ratios_a_table_and_a_plot(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--quick", "--steps", "40", "--json", str(file), "--png", str(png)]
    program = str(ROOT / "benchmarks" / "gossip.py")
    done = run_marked([sys.executable, program, *words], dict(os.environ), 120)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    names = {row["candidate"] for row in document["results"]}
    assert {"none", "synchronous", "every-step", "fixed-13", "budget-13"} <= names
    assert document["ratios"]["vs_peer/traffic/fixed-13/two-classes/p4"] > 10
    assert any(key.startswith("vs_limit/trigger/") for key in document["ratios"])
    assert "two-classes/p4" in done.stdout and png.stat().st_size > 1000


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("ranks", [4, 8])
def test_shards_divide_the_images(kind: str, ranks: int) -> None:
    labels = digits()[1].numpy()
    parts = shards(kind, ranks, np.random.default_rng(3), labels)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    classes = [len(set(labels[part])) for part in parts]
    assert min(len(part) for part in parts) >= 16
    assert min(classes) == 10 if kind == "same" else np.mean(classes) < 7


def test_a_simulated_step_is_that_of_torch() -> None:
    crowd = gossip_simulation._Crowd(SMALL)
    weights = crowd.weights_of(1)[2].clone().requires_grad_()
    w1, b1, w2, b2 = weights.split(gossip_simulation.SIZES)
    chosen = crowd._order[4, 6]  # step 5 of the second seed's third rank
    hidden = (crowd._images[chosen] @ w1.view(64, 64) + b1).relu()
    functional.cross_entropy(hidden @ w2.view(64, 10) + b2, crowd._labels[chosen]).backward()
    assert weights.grad is not None
    crowd.step(5, 0.3, 1)
    wanted = weights.detach() - 0.3 * weights.grad
    torch.testing.assert_close(crowd.weights_of(1)[2], wanted)


def test_no_communication_and_all_of_it() -> None:
    found = simulate(SMALL, Way("none"), 0.1)
    again = simulate(SMALL, Way("never", lambda _: RelativeChange(float("inf"))), 0.1)
    assert found.single == again.single and again.bytes == [0.0, 0.0]
    together = simulate(SMALL, Way("synchronous", synchronous=True), 0.1)
    assert max(together.distance) < 1e-5 < min(found.distance)


def test_rates_are_chosen_without_the_test_images() -> None:
    images, labels, tests, answers = digits(tuning=True)
    training, its_labels, *_ = digits()
    assert torch.equal(torch.cat([images, tests]), training)
    assert torch.equal(torch.cat([labels, answers]), its_labels)


def test_a_final_average_is_the_mean_model_and_its_bytes() -> None:
    way = Way("fixed", lambda _: FixedPeriod(5), "exponential2")
    before, after = (simulate(SMALL, replace(way, final_average=f), 0.1) for f in (False, True))
    assert after.single == after.worst == before.mean_model != before.single
    assert [b - a for a, b in zip(before.bytes, after.bytes, strict=True)] == [6 * 4 * 4810] * 2


def test_averages_of_all_make_models_one() -> None:
    found = simulate(SMALL, Way("average", average_every=10), 0.1)
    assert max(found.distance) < 1e-6 and found.bytes == [3 * 6 * 4 * 4810] * 2


def test_16_bits_on_the_wire_are_half_of_the_bytes_and_keep_the_mean() -> None:
    way = Way("every", lambda _: FixedPeriod(1), "exponential2")
    whole, half = (
        simulate(SMALL, replace(way, wire=dtype), 0.1) for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.bytes == [sent / 2 for sent in whole.bytes]
    assert max(half.distance) < 0.01 and half.distance != whole.distance


@pytest.mark.bench
def test_what_was_measured_is_on_disk_when_time_is_up(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = ["--quick", "--steps", "30", "--limit-s", "0", "--json", str(file)]
    program = [sys.executable, str(ROOT / "benchmarks" / "gossip.py")]
    assert run_marked([*program, *words], dict(os.environ), 120).returncode == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["candidate"] for row in rows if row["case"] == "two-classes/p4"] == ["none"]


def test_every_exchange_is_counted_once() -> None:
    every = simulate(SMALL, Way("every", lambda _: FixedPeriod(1), "exponential2"), 0.1)
    assert every.messages == [60.0, 60.0]  # two pairs in each of 30 steps
    change = simulate(SMALL, Way("change", lambda _: RelativeChange(0.0), "exponential2"), 0.1)
    assert change.messages == every.messages and change.single == every.single
    assert every.bytes == [60 * 2 * 4 * 4810] * 2


def test_points_are_paired_over_seeds_with_their_interval() -> None:
    def row(name: str, mbytes: float, single: list[float]) -> dict[str, object]:
        mean = sum(single) / len(single)
        seeds = {"single": single, "worst": single}
        return {"case": "c", "candidate": name, "mbytes": mbytes, "single": mean, "seeds": seeds}

    rows = [
        row("every-step", 100, [98, 99, 97]),
        row("fixed-13", 8, [94, 95, 93]),
        row("fixed-26", 4, [90, 91, 89]),
        row("budget-13", 7.9, [96, 98, 94]),
    ]
    ahead, error = gossip_study.compare(rows, "budget-13", "fixed-13")
    assert ahead == 2 and error == pytest.approx(4.303 / 3**0.5, rel=0.15)
    assert gossip_study.best_alike(rows, rows[3], "fixed") == "fixed-13"
    assert gossip_study.best_alike(rows, rows[3], "fixed_final") is None
    found = gossip_study.ratios(rows)
    assert found["points_vs_fixed/budget-13/c"] == 2 and found["error_vs_fixed/budget-13/c"] > 2
    assert found["vs_peer/traffic/fixed-26/c"] == 25
    rows += [row("fixed-6-bf16", 8.3, [95, 96, 94]), row("budget-6.5-bf16", 8, [97, 99, 95])]
    assert gossip_study.best_alike(rows, rows[3], "fixed") == "fixed-13"
    found = gossip_study.ratios(rows)
    assert found["points_vs_fixed/budget-6.5-bf16/c"] == 3
    assert found["points_vs_fixed_bf16/budget-6.5-bf16/c"] == 2
    assert not any("traffic_bf16" in key for key in found)  # nobody sends 16 bits in every step
    rows += [row("every-step-bf16", 50, [98, 99, 97])]
    found = gossip_study.ratios(rows)
    assert found["vs_peer/traffic_bf16/budget-6.5-bf16/c"] == 6.25
    assert found["points_vs_every_step_bf16/budget-6.5-bf16/c"] == -1
    assert "vs_peer/traffic_bf16/budget-13/c" not in found
    rows += [row("change-0.2", 4, [93, 94, 92]), row("change-0.1", 15.6025, [95, 97, 93])]
    # half-way on the scale of bytes: 94, 95.5 and 92.5
    assert gossip_study.compare_with_curve(rows, "budget-13", "change")[0] == pytest.approx(2)
    assert gossip_study.compare_with_curve(rows, "every-step", "change") is None


def test_seconds_are_compared_where_the_target_was_reached() -> None:
    def row(name: str, seconds: float, reached: bool = True) -> dict[str, object]:
        report = {"case": "c", "candidate": name, "seconds": seconds}
        return {**report, "mbytes": 10.0, "reached": reached}

    found = gossip_links.ratios([row("every-step", 4), row("a", 2), row("b", 1, False)])
    assert found["vs_peer/time/a/c"] == 2 and not any("/b/" in key for key in found)
    narrow = [row("every-step-bf16", 3), row("a-bf16", 1)]
    found = gossip_links.ratios([row("every-step", 4), row("a", 2), *narrow])
    assert found["vs_peer/time/a-bf16/c"] == 4 and found["vs_peer/time_bf16/a-bf16/c"] == 3
    assert "vs_peer/time_bf16/a/c" not in found
