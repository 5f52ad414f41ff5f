"""Timelines: what hsgd.torch writes, and what `hsgd trace summary` reads."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hsgd.comm.timeline import ROWS, Timeline, summarize
from hsgd.errors import DataError
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 2


def traced(seat: Seat, path: str, size: int, file: str) -> None:
    with job(seat, path, size) as hvd:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.start_timeline(file)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.allreduce(torch.ones(1000), name="named")
        handles = [hvd.allreduce_async(torch.ones(10), name=f"burst.{n}") for n in range(5)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="unseen")


def test_each_rank_writes_a_trace_of_its_operations_and_buckets(
    ranks: Ranks, tmp_path: Path
) -> None:
    file = tmp_path / "timeline.json"
    ranks.run(traced, meeting_point(), 2, str(file))
    for rank, path in enumerate((file, tmp_path / "timeline.json.1")):
        events = json.loads(path.read_text())["traceEvents"]
        timed = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {rank}
        rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert rows == set(ROWS)
        names = {(event["cat"], event["name"]) for event in timed}
        assert {("queue", "allreduce.named"), ("collective", "allreduce.named")} <= names
        assert ("collective", "optimizer bucket 0 (bias)") in names
        assert ("pack", "optimizer bucket 0 (bias)") in names
        for name in ("allreduce.named", "optimizer bucket 0 (bias)", "allreduce.burst.3"):
            assert ("intra reduce", name) in names
        assert ("queue", "allreduce.burst.3") in names
        burst = [
            e for e in timed if (e["cat"], e["name"][:15]) == ("collective", "allreduce.burst")
        ]
        burst.sort(key=lambda event: event["ts"])
        assert [event["name"] for event in burst] == [f"allreduce.burst.{n}" for n in range(5)]
        for earlier, later in itertools.pairwise(burst):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 0.01
        assert not [name for _, name in names if "unseen" in name]
        (named,) = [e for e in timed if (e["cat"], e["name"]) == ("collective", "allreduce.named")]
        assert named["args"] == {"bytes": 4000} and named["dur"] > 0
    text = summarize([file, tmp_path / "timeline.json.1"])
    assert [line.split()[:2] for line in text.splitlines()[1:3]] == [["0", "queue"], ["0", "pack"]]
    reduced = next(line.split() for line in text.splitlines() if "intra reduce" in line)
    assert float(reduced[-1]) <= float(reduced[4])  # busy is a part of the total
    assert "allreduce.named" in text


def test_shutdown_ends_a_timeline_that_was_started_by_the_environment(tmp_path: Path) -> None:
    code = (
        "import torch, hsgd.torch as hvd\n"
        "from hsgd import Comm\n"
        f"hvd.init(Comm.local({meeting_point()!r}, 0, 1))\n"
        "hvd.allreduce(torch.ones(1), name='one')\n"
    )
    words = [sys.executable, "-c", code]
    file = tmp_path / "timeline.json"
    environ: dict[str, Any] = {"HOROVOD_TIMELINE": str(file)}
    import os

    done = subprocess.run(words, env={**os.environ, **environ}, timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "allreduce.one" in summarize([file])


def test_the_command_prints_the_summary(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    timeline = Timeline(file, 3)
    timeline.add("collective", "x", 1.0, 1.002)
    timeline.add("collective", "x", 2.0, 2.004)
    timeline.close()
    words = [sys.executable, "-m", "hsgd", "trace", "summary", str(file)]
    done = subprocess.run(words, timeout=60, capture_output=True, text=True)
    assert done.stdout.splitlines()[1].split() == [
        "3",
        "collective",
        "2",
        "6.000",
        "3000.0",
        "4000.0",
    ]


def test_the_summary_as_json_has_the_figures_as_numbers(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    timeline = Timeline(file, 3)
    timeline.add("collective", "x", 1.0, 1.002)
    timeline.close()
    words = [sys.executable, "-m", "hsgd", "trace", "summary", "--json", str(file)]
    done = subprocess.run(words, timeout=60, capture_output=True, text=True)
    figures = {"events": 1, "total_ms": 2.0, "mean_us": 2000.0, "longest_us": 2000.0}
    assert json.loads(done.stdout) == {
        "rows": [{"rank": 3, "row": "collective", **figures, "busy_ms": None}],
        "collectives": [{"collective": "x", **figures}],
    }


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1}', '{"traceEvents": [{"ph": "X"}]}'])
def test_other_files_are_refused_with_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(DataError, match="not a timeline"):
        summarize([file])
    with pytest.raises(DataError, match="No such file"):
        summarize([tmp_path / "missing"])


def test_a_path_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Timeline(tmp_path / "nowhere" / "t.json", 0)
