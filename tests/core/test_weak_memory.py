"""The protocols of shared memory, checked by spin in all orders that ARMv8 may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from spin import verify

__all__: list[str] = []

pytestmark = pytest.mark.long

MODELS = {
    "cells.pml": ["PLAIN_NUMBER", "EARLY_PAYLOAD", "CELLS=1"],
    "rings.pml": [
        "PLAIN_STAGED",
        "PLAIN_REDUCED",
        "EARLY_REDUCED",
        "EARLY_GATHERED",
        "NO_ROOM",
        "OWN_ROOM",
    ],
    "arrivals.pml": ["PLAIN_COUNT", "EARLY_DATA"],
    "doorbell.pml": ["NO_FENCE", "OUT_OF_ORDER", "PLAIN_FLAG"],
}


@pytest.mark.parametrize("model", MODELS)
def test_what_is_read_was_written_before_it_was_told(model: str, tmp_path: Path) -> None:
    errors, output = verify(model, tmp_path)
    assert errors == 0, output


@pytest.mark.parametrize(
    ("model", "broken"), [(model, word) for model, words in MODELS.items() for word in words]
)
def test_the_model_fails_without_each_order(model: str, broken: str, tmp_path: Path) -> None:
    errors, output = verify(model, tmp_path, broken)
    assert errors > 0, output
