"""The fit of the constants of `hsgd plan`. Its measuring is that of the other benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from hsgd.config import Config
from hsgd.tools.plan.calibration import Calibration
from hsgd.tools.plan.model import Cluster, predict_allreduce
from studies.plan_fit import Measured, fit, residuals

__all__: list[str] = []

TRUTH = Calibration(12.0, 1.5, 20.0, 0.9, 6.0, 0.5, 0.8, 1.0, 1.0, "")
CLUSTERS = {
    "np2": Cluster(1, 2, 1.0, 2),
    "2x1": Cluster(2, 1, 1.0, 1),
    "2x2": Cluster(2, 2, 1.0, 1),
    "3x1": Cluster(3, 1, 10.0, 2 / 3),
    "4x1": Cluster(4, 1, 10.0, 0.5),
}
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)


def measured(constants: Calibration) -> Iterator[Measured]:
    for name, cluster in CLUSTERS.items():
        for nbytes in SIZES:
            found = predict_allreduce(cluster, nbytes, constants, Config())
            yield Measured(name, cluster, nbytes, found.seconds)


def test_constants_are_found_again() -> None:
    cases = list(measured(TRUTH))
    found = fit(cases, residuals(cases), "a test")
    assert found.efficiency == pytest.approx(TRUTH.efficiency, rel=0.02)
    assert found.core_gb_s == pytest.approx(TRUTH.core_gb_s, rel=0.1)
    assert found.core_sends_gb_s == pytest.approx(TRUTH.core_sends_gb_s, rel=0.05)
    # On few layouts one may stand for a part of the other.
    assert found.latency_us + found.message_us == pytest.approx(13.5, rel=0.15)
    assert found.spread_large < 1.1
    assert found.source == "a test"


@pytest.mark.long
def test_a_layout_that_the_model_does_not_explain_widens_the_bounds() -> None:
    cases = [
        dataclasses.replace(case, seconds=case.seconds * (3 if case.layout == "4x1" else 1))
        for case in measured(TRUTH)
    ]
    assert fit(cases, residuals(cases), "a test").spread_large > 1.5
