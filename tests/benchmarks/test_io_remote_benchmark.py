"""The benchmark of URLs runs, here and behind a link, and writes what it promises."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

PROGRAM = str(Path(__file__).resolve().parents[2] / "benchmarks" / "io_throughput.py")


def run(tmp_path: Path, *words: str) -> dict[str, dict[str, float]]:
    file = tmp_path / "a.json"
    names = ["hsgd", "hsgd-order", "ranges"]
    command = [sys.executable, PROGRAM, "--remote", "--total", "8", "--rounds", "1", *words]
    done = run_marked(
        [*command, "--candidates", *names, "--json", str(file)], dict(os.environ), 200
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert [row["candidate"] for row in document["results"]] == names
    assert all(row["samples_per_s"] > 0 for row in document["results"])
    found: dict[str, dict[str, float]] = document
    return found


@pytest.mark.bench
def test_urls_are_measured_on_this_machine(tmp_path: Path) -> None:
    names = {"vs_limit/block/plain", "vs_limit/in-order/plain", "vs_one_second/plain"}
    assert run(tmp_path, "--plain")["ratios"].keys() == names


@pytest.mark.bench
def test_urls_are_measured_behind_a_link(virtual_nodes: None, tmp_path: Path) -> None:
    names = {
        f"vs_{what}/{order}/1gbit" for what in ("limit", "link") for order in ("block", "in-order")
    }
    assert run(tmp_path)["ratios"].keys() == {*names, "vs_one_second/1gbit"}
