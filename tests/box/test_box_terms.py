"""Ranks that make a ParameterBox together: all of them do, or all of them are told why not.

Run under mpirun, this file is the program of the ranks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hsgd import Comm, ParameterBox
from outcomes import told_by
from ranks import Ranks, Seat, meeting_point
from toolkit.cluster import Cluster

__all__: list[str] = []

SIX = np.zeros(6, np.float32)
# What every rank gives, and the line that each of them gets.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"timeout_s": -1.0}, "timeout_s is -1; give 0 to 1e+09 seconds"),
    ({"timeout_s": 0.0}, "timeout_s is 0; give seconds above 0"),
    ({"timeout_s": math.nan}, "timeout_s is nan; give"),
    ({"chunk_bytes": 100}, "chunk_bytes is 100; give a multiple of 64"),
    ({"counters": -1}, "counters is -1; give 0 or more"),
    ({"shards": "rank"}, "shards is 'rank'; use"),
    ({"network": "pigeons"}, "network is 'pigeons'; give"),
]
# What the last rank gives where the others give six float32, and what both are called.
DIFFERENT: list[tuple[dict[str, Any], str, str]] = [
    ({"initial": np.zeros(5, np.float32)}, "6 float32", "5 float32"),
    ({"initial": np.zeros(6, np.float64)}, "6 float32", "6 float64"),
    ({"counters": 3}, "64", "3"),
    ({"chunk_bytes": 64}, "4096", "64"),
    ({"shards": None}, "node", "None"),
    ({"network": "auto"}, "sockets", "auto"),
]


def over(comm: Comm, **options: Any) -> tuple[str, str]:
    return told_by(lambda: ParameterBox.over(comm, **{"initial": SIX, **options}))


def tell_all(comm: Comm) -> list[list[tuple[str, str]]]:
    """What this rank is told of each; and that the ranks can make a box afterwards."""
    last = comm.rank == comm.size - 1
    bad = [over(comm, **options) for options, _ in BAD]
    alone = [over(comm, timeout_s=-1.0) if last else over(comm)]
    different = [over(comm, **(options if last else {})) for options, *_ in DIFFERENT]
    wrong = [over(comm, initial=np.zeros(6, np.float64))]
    with ParameterBox.over(comm, SIX) as box:
        assert box.count == 6
        comm.barrier()
    return [bad, alone, different, wrong]


def check_told(everybodys: list[Any]) -> None:
    last = len(everybodys) - 1
    for rank, (bad, alone, different, wrong) in enumerate(everybodys):
        for (kind, line), (_, words) in zip(bad, BAD, strict=True):
            assert kind == "ValueError" and words in line
        ((kind, line),) = alone
        if rank == last:
            assert kind == "ValueError" and "timeout_s is -1" in line
        else:
            assert kind == "HsgdError"
            assert f"rank {last} refused its arguments: " in line
            assert line.endswith("timeout_s is -1; give 0 to 1e+09 seconds")
        for (kind, line), (options, first, other) in zip(different, DIFFERENT, strict=True):
            (name,) = options
            assert kind == "SignatureMismatch"
            assert f": {name} is {other} on rank {last}, {first} on rank 0; give the same" in line
        assert wrong == [
            ["TypeError", "ParameterBox.over: the initial values are float64; give float32"]
        ]


def tell_here(seat: Seat, path: str, size: int) -> Any:
    return json.loads(json.dumps(tell_all(seat.comm(path, size))))


@pytest.mark.parametrize("size", [2, 3])
def test_arguments_that_cannot_work_or_differ_are_refused_by_all_ranks(size: int) -> None:
    with Ranks(size) as pool:
        check_told(pool.run(tell_here, meeting_point(), size))


def test_so_they_are_between_nodes(cluster: Callable[..., Cluster]) -> None:
    argv = [sys.executable, __file__]
    done = cluster(2).mpirun(3, argv, hosts="node1:2,node2:1", timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    check_told([line["told"] for line in sorted(lines, key=lambda line: line["rank"])])


def main() -> None:
    comm = Comm()
    print(json.dumps({"rank": comm.rank, "told": tell_all(comm)}), flush=True)


if __name__ == "__main__":
    main()
