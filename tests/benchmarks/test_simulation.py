"""The simulator of many nodes runs hsgd's own code: right values, as many messages as promised."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulation import runs
from simulation.cases import COLLECTIVES, Found, Selection, measure
from simulation.network_fit import Constants, Layout, LocalLevel
from simulation.platforms import fat_tree

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def simulator() -> None:
    """The program, built where SimGrid is installed."""
    if shutil.which("smpirun") is None:
        pytest.skip("needs SimGrid (libsimgrid-dev)")
    command = [sys.executable, "setup.py", "--quiet", "simulation"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("operation", list(runs.PEERS))
def test_values_are_right_in_the_simulator(operation: str) -> None:
    sizes = [1024, 1 << 20]
    rows = list(runs.simulate(fat_tree(16), operation, runs.hsgd_form(4), sizes))
    assert [row["bytes"] for row in rows] == sizes
    assert all(row["right"] is True for row in rows)


# docs/internals/scale.md: the sum of (size - 1) over the rounds, the same with a radix of 16 as of
# 4; a small allreduce takes m of them, a step of a large one 2 m, of which m of the first have the
# headers.
@pytest.mark.parametrize(("nodes", "radix", "messages"), [(16, 16, 6), (16, 4, 6), (64, 16, 9)])
def test_ranks_send_as_many_messages_as_the_schedule_says(
    nodes: int, radix: int, messages: int
) -> None:
    small, large = runs.simulate(fat_tree(nodes), "allreduce", runs.hsgd_form(radix), [8, 64 << 10])
    assert small["messages"] == messages
    assert large["messages"] == 2 * messages


def test_predictions_grow_with_the_size() -> None:
    sizes = [8, 4096, 64 << 10, 1 << 20]
    rows = runs.simulate(fat_tree(16), "allreduce", runs.hsgd_form(16), sizes)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_an_unknown_argument_is_refused_in_one_line() -> None:
    done = subprocess.run(
        [str(runs.PROGRAM), "none.xml", "radix"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "radix is not understood" in done.stderr


# A bound that hsgd or any algorithm of a peer beats is none.
def test_nothing_is_faster_than_its_bound() -> None:
    chosen = Selection([16], COLLECTIVES, [8, 1 << 20], 60, 280, radix=4)
    found = Found()
    for _ in measure(chosen, found, lambda line: None):
        pass
    assert not found.failures and not found.left_out
    times = {
        (row["collective"], row["bytes"], row["candidate"]): row["time_us"] for row in found.rows
    }
    assert {collective for collective, _, _ in times} == set(COLLECTIVES)
    for (collective, size, candidate), time_us in times.items():
        assert time_us >= times[collective, size, "limit"], (collective, size, candidate)


def test_a_run_that_takes_too_long_is_left_out() -> None:
    chosen = Selection([64], ["allreduce"], [1 << 20], 1e-3, 60, radix=4)
    found = Found()
    next(measure(chosen, found, lambda line: None))
    assert [row["candidate"] for row in found.rows] == ["limit"]
    assert found.left_out == [
        "allreduce on fat_tree-64, hsgd, radix 4, 1MB: the simulator ran for more than 0.001 s"
    ]


# The bucket of a virtual link makes up for pauses: two nodes that exchange 64 KB in each direction
# need the time of the link, and what their messages cost is hidden; 8 bytes need that alone.
def test_a_layout_takes_the_time_of_its_link_or_of_its_messages() -> None:
    sizes = {8: 1.0, 64 << 10: 1.0}
    layout = Layout("2x1", 2, 1, 1.0, 1.0, sizes)
    local = LocalLevel(0.0, 0.0)
    small, large = layout.simulated(Constants(1.0, 2e-6, 0.0), 16, local).values()
    assert small == pytest.approx(2 * 2e-6 + 2 * 1e-6, rel=0.5)
    assert large == pytest.approx((64 << 10) * 8e-9, rel=0.01)
    dear, _ = layout.simulated(Constants(1.0, 200e-6, 0.0), 16, local).values()
    assert dear > 50 * small
