"""benchmarks/simulate.py: its bounds, its ratios and what it says, without the simulator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import simulate
from simulation import runs
from simulation.bounds import bound
from simulation.cases import COLLECTIVES, Selection
from simulation.figures import draw, ratios, tables
from simulation.network_fit import (
    Constants,
    Layout,
    LocalLevel,
    Surface,
    fit,
    read_local_level,
)
from simulation.platforms import Link, Platform, fat_tree

__all__: list[str] = []

pytestmark = pytest.mark.long

# One crossbar: two links between any two nodes, so that a message takes 2 + 2 x 3 + 2.
LINK = Link(bytes_per_s=1000, hop_s=3, send_s=2, receive_s=2)


def row(kind: str, candidate: str, time_us: float) -> dict[str, Any]:
    case = {"network": "fat_tree", "nodes": 16, "collective": "allreduce", "bytes": 64 << 10}
    return case | {"kind": kind, "candidate": candidate, "label": candidate, "time_us": time_us}


# The first node tells one more every 2, and a message takes 10: the second node knows at 10, and
# the one that it tells at 20, as the sixth one that the first node tells.
@pytest.mark.parametrize(
    ("nodes", "seconds"), [(1, 0), (2, 10), (3, 12), (6, 18), (7, 20), (8, 20)]
)
def test_the_bound_of_latency_is_that_of_the_optimal_tree(nodes: int, seconds: float) -> None:
    assert bound(Platform("crossbar", nodes, "", LINK), "barrier", 0).seconds == seconds


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [("broadcast", 64), ("allgather", 48), ("alltoall", 48), ("allreduce", 96), ("barrier", 0)],
)
def test_the_bound_of_bandwidth_is_what_a_node_has_to_pass(operation: str, seconds: float) -> None:
    found = bound(Platform("crossbar", 4, "", LINK), operation, 64_000)
    assert found.bandwidth_s == pytest.approx(seconds)


def test_a_ratio_compares_with_the_best_peer_and_the_bound() -> None:
    rows = [row("limit", "limit", 2), row("hsgd", "hsgd-16", 4)]
    rows += [row("peer", "rdb", 6), row("peer", "rab", 5)]
    assert ratios(rows) == {
        "vs_peer/allreduce/fat_tree-16/64KB": 1.25,
        "vs_limit/allreduce/fat_tree-16/64KB": 0.5,
    }


def test_no_block_is_smaller_than_eight_bytes() -> None:
    chosen = Selection((64,), COLLECTIVES, (8, 256, 4096), 1, 1)
    assert chosen.sizes_of("alltoall", 64) == [512, 4096]
    assert chosen.sizes_of("allreduce", 64) == [8, 256, 4096]
    assert chosen.sizes_of("barrier", 64) == [0]


def test_tables_and_the_plot_need_the_document_alone(tmp_path: Path) -> None:
    rows = [row("limit", "limit", 2), row("hsgd", "hsgd-16", 4), row("peer", "rdb", 6)]
    document = {
        "meta": {"date": "2026-11-24T00:00:00"},
        "ratios": ratios(rows),
        "left_out": ["allreduce on fat_tree-1024: 1 s were over"],
        "results": rows,
    }
    draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    shown = tables(document)
    assert "64KB      2        4    6   1.50      0.50" in shown
    assert "left out: allreduce on fat_tree-1024" in shown


def test_a_missing_simulator_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "PROGRAM", tmp_path / "build" / "simulation" / "simulate")
    assert simulate.main(["--quick"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "no build/simulation/simulate; install SimGrid" in told


def test_the_farthest_node_is_farther_than_the_nearest() -> None:
    nearest, farthest = fat_tree(64).hops()
    assert 1 <= nearest < farthest


def test_a_small_message_takes_as_long_as_was_published() -> None:
    link = Link()
    assert 1e6 * (link.send_s + 2 * link.hop_s + link.receive_s) == pytest.approx(0.9)


def constants_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "constants.json"
    path.write_text(json.dumps({"measured": rows}))
    return path


def test_what_the_ranks_of_a_node_cost_comes_from_one_node(tmp_path: Path) -> None:
    rows = [{"nodes": 1, "bytes": n, "seconds": 1e-6 + 2e-10 * n} for n in (0, 1000, 10**6)]
    rows.append({"nodes": 2, "bytes": 0, "seconds": 1.0})
    level = read_local_level(constants_file(tmp_path, rows))
    assert level.seconds == pytest.approx(1e-6)
    assert level.seconds_per_byte == pytest.approx(2e-10)
    assert LocalLevel(1e-6, 2e-10).words(crowding=2) == ("local_s=2e-06", "local_s_per_byte=4e-10")


def test_a_file_without_one_node_is_refused_by_name(tmp_path: Path) -> None:
    path = constants_file(tmp_path, [{"nodes": 2, "bytes": 0, "seconds": 1.0}])
    with pytest.raises(ValueError, match=r"constants\.json has 0 allreduces on one node"):
        read_local_level(path)


# Times as a simulator would give them that is linear in both costs.
def surface(name: str, crowding: float, truth: Constants) -> Surface:
    layout = Layout(name, 2, 1, 1.0, crowding, {})

    def seconds(efficiency: float, message_s: float) -> dict[int, float]:
        return {n: 10 * message_s + 8e-9 * n / efficiency for n in (8, 1 << 10, 1 << 20)}

    message_s = layout.message_s(truth)
    layout = dataclasses.replace(layout, seconds=seconds(truth.efficiency, message_s))
    points = [(share, 1e-6 * 4**power) for share in (0.9, 1.0) for power in range(4)]
    return Surface(layout, {point: seconds(*point) for point in points})


def test_constants_of_the_network_are_found_again() -> None:
    truth = Constants(0.93, 3e-6, 7e-6)
    found = fit([surface("2x1", 1.0, truth), surface("4x1", 2.0, truth)])
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(truth), rel=0.02)
