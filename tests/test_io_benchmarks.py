"""The benchmark of the reader runs, checks its arguments, and writes what it promises."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import io_throughput
import shuffle_quality
from processes import run_marked

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[1]


def test_a_small_run_writes_facts_rows_ratios_a_table_and_a_plot(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--quick", "--sizes", "3KB", "--total", "4", "--rounds", "1", "--np", "1", "2"]
    words += ["--candidates", "hsgd", "hsgd-order", "h5py-fancy", "h5py-slabs", "preadv"]
    words += ["--json", str(file), "--png", str(png), "--folder", str(tmp_path / "data")]
    program = str(ROOT / "benchmarks" / "io_throughput.py")
    done = run_marked([sys.executable, program, *words], dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    rows = {(row["candidate"], row["ranks"]): row for row in document["results"]}
    names = ("hsgd", "hsgd-order", "h5py-fancy", "h5py-slabs", "preadv")
    assert rows.keys() == {(name, ranks) for name in names for ranks in (1, 2)}
    assert all(row["samples_per_s"] > 0 and row["bytes"] == 3072 for row in rows.values())
    assert document["ratios"].keys() == {
        f"vs_{other}/warm/{order}/3KB/np{ranks}"
        for order, peer in (("block", "h5py-fancy"), ("in-order", "h5py-slabs"))
        for other in (peer, "peer", "limit")
        for ranks in (1, 2)
    }
    assert "hsgd.io in order" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--candidates", "nobody"], ["--sizes", "3 apples"]])
def test_bad_arguments_are_an_error_of_use(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        io_throughput.main(words)
    assert caught.value.code == 2
    assert "nobody" in (text := capsys.readouterr().err) or "apples" in text


def test_shuffle_quality_pairs_orders_and_reports_entropy(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    program = str(ROOT / "benchmarks" / "shuffle_quality.py")
    words = ["--seeds", "1", "--epochs", "1", "--json", str(file)]
    done = run_marked([sys.executable, program, *words], dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    ratios = json.loads(file.read_text())["ratios"]
    cases = {f"{d}/{o}" for d in ("digits", "synthetic") for o in shuffle_quality.ORDERS}
    assert ratios.keys() == {f"{what}/{case}" for what in ("accuracy", "entropy") for case in cases}
    for name in ("digits", "synthetic"):
        assert ratios[f"entropy/{name}/block"] > 0.9  # batches are as mixed as with full
        assert ratios[f"entropy/{name}/sorted"] < 0.3
