"""Predicted times beside measured ones, by layout and size: ratios, a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report

__all__ = ["plot_predictions", "prediction_ratios", "predictions_table"]

Rows = Sequence[Mapping[str, Any]]


def _share(row: Mapping[str, Any], how: str) -> float:
    return float(row[f"{how}_us"] / row["measured_us"])


def prediction_ratios(rows: Rows, how: str) -> dict[str, float]:
    """vs_limit/allreduce/LAYOUT/SIZE: predicted over measured. how: "predicted" or "simulated"."""
    return {
        f"vs_limit/allreduce/{row['layout']}/{report.size_label(row['bytes'])}": float(
            f"{_share(row, how):.4g}"
        )
        for row in rows
    }


def predictions_table(rows: Rows, how: str) -> str:
    """A line for each size, a column for each layout."""
    in_order = sorted(rows, key=lambda row: row["bytes"])
    size: dict[str, Any] = {"bytes": lambda row: report.size_label(row["bytes"])}
    return report.pivot(in_order, size, "layout", lambda row: f"{_share(row, how):.2f}")


def plot_predictions(rows: Rows, how: str, target: Path) -> None:
    """Draw a line for each layout; what is within 15 % is grey."""
    with report.figure(target, size=(8, 4.5)) as ((axes,),):
        for (layout,), here in report.grouped(rows, "layout").items():
            points = sorted((row["bytes"], _share(row, how)) for row in here)
            axes.plot(*zip(*points, strict=True), marker="o", label=layout)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.axhspan(1 / 1.15, 1.15, color="#eeeeee")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("bytes per rank")
        axes.set_ylabel(f"{how} / measured")
        axes.legend()
