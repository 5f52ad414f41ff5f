"""The look at the node's ranks that the first error of a process leaves behind: who takes it, what
it names, that it changes nothing, and that torch's reader takes its files.

Run under mpirun, this file is the program of the ranks of virtual nodes.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd import Comm
from hsgd.config import Config
from hsgd.errors import HsgdError
from hsgd.tools.status import dump, looking
from hsgd.tools.status.flight_files import flight_files
from hsgd.tools.status.looking import Row
from hsgd.tools.status.page import KINDS
from hsgd.tools.status.report import brief
from hsgd.tools.status.waits import groups_of
from ranks import LIMIT_S, Ranks, Seat, meeting_point
from toolkit.cluster import Cluster

__all__: list[str] = []

SIZE = 4
LATE = 2
HASTY = Config(timeout_s=1.0)
JOB_S = 120.0


def errors_of(call: Callable[[], object]) -> tuple[str, str]:
    """The error that a call ends with, and what came to stderr meanwhile."""
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        call()
    except HsgdError as error:
        return f"{type(error).__name__}: {error}", sys.stderr.getvalue()
    finally:
        sys.stderr = stderr
    raise AssertionError("it did not fail")


def do_be_late(
    seat: Seat, path: str, environment: dict[str, str], breaks: str = ""
) -> list[tuple[str, str]]:
    """One allreduce together, then one to which rank LATE does not come; then in another
    communicator the same. breaks: what is wrong with looking.
    """
    os.environ.update(environment)
    if breaks:
        dump._LIMIT_S = 0.2
        looking.look = wait_for_ever if breaks == "hangs" else raise_an_error
    found, weights = [], np.ones(1000, np.float32)
    for turn in range(2):
        comm = seat.comm(f"{path}-{turn}", SIZE, HASTY)
        comm.allreduce(np.ones(3), name="first")
        if seat.rank != LATE:
            found.append(errors_of(partial(comm.allreduce, weights, name="fc.weight")))
            seat.tell("failed")
        seat.pipe.recv()
    return found


def wait_for_ever(*_: object) -> None:
    threading.Event().wait()


def raise_an_error(*_: object) -> None:
    raise KeyError("looking")


def run_late(ranks: Ranks, path: str, *arguments: object) -> list[list[tuple[str, str]]]:
    """What each rank but the late one got, in both communicators."""
    ranks.start(do_be_late, path, *arguments)
    for _ in range(2):
        for rank in range(SIZE):
            assert rank == LATE or ranks.hear(rank) == "failed"
        for rank in range(SIZE):
            ranks.send(rank, "go")
    found = [outcome.value for rank, outcome in enumerate(ranks.finish()) if rank != LATE]
    for failures in found:
        for error, _ in failures:
            assert error.startswith('CollectiveTimeout: allreduce #2 "fc.weight": ')
            assert f"rank {LATE} (pid {ranks.pid(LATE)}" in error
    return found


def test_one_rank_shows_once_who_is_late(ranks: Ranks) -> None:
    found = run_late(ranks, meeting_point(), {})
    (text,) = [shown for failures in found for _, shown in failures if shown]
    assert text in [failures[0][1] for failures in found]
    assert "got CollectiveTimeout; what the ranks of this node do" in text
    lines = text.splitlines()
    assert lines[3].split()[:3] == [str(LATE), str(ranks.pid(LATE)), "LATE"]
    # None has gone meanwhile.
    assert [line.split()[2] in ("broken", "waits") for line in lines[4:7]] == [True] * 3
    blamed = f"-> rank {LATE} (pid {ranks.pid(LATE)}, {os.uname().nodename}) has not called "
    assert f'{blamed}allreduce #2 "fc.weight", in which 3 ranks waited until the deadline' in text


def test_nothing_is_shown_where_it_is_not_wanted(ranks: Ranks, tmp_path: Path) -> None:
    environment = {"HSGD_DUMP": "0", "HSGD_DUMP_DIR": str(tmp_path)}
    found = run_late(ranks, meeting_point(), environment)
    assert [shown for failures in found for _, shown in failures] == [""] * 6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("breaks", ["hangs", "raises"])
def test_a_look_that_fails_changes_no_error(ranks: Ranks, breaks: str) -> None:
    found = run_late(ranks, meeting_point(), {}, breaks)
    assert [shown for failures in found for _, shown in failures] == [""] * 6


def missing_ranks(folder: Path) -> list[set[int] | None]:
    """What torchfrtrace says of each collective in its files: ranks that did not come to it."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    arguments = JobConfig().parse_args([str(folder)])
    try:
        database = build_db(*read_dir(arguments)[:1], arguments, "2.10")
    finally:
        gc.enable()
    assert all(each.pass_check for each in database.collectives)
    return [each.missing_ranks for each in database.collectives]


def test_files_hold_the_table_and_what_torchfrtrace_reads(ranks: Ranks, tmp_path: Path) -> None:
    found = run_late(ranks, meeting_point(), {"HSGD_DUMP_DIR": str(tmp_path / "new")})
    (folder,) = (tmp_path / "new").iterdir()
    (text,) = [shown for failures in found for _, shown in failures if shown]
    assert text.endswith(f"hsgd: written to {folder}\n")
    host = os.uname().nodename
    assert {path.name for path in folder.iterdir()} == {
        *(f"status-{host}.txt", f"status-{host}.json"),
        *(f"trace_rank_{rank}" for rank in range(SIZE)),
    }
    table = (folder / f"status-{host}.txt").read_text()
    assert "LATE" in table and folder.name == f"hsgd-{table.split()[1][:-1]}"
    (comm,) = json.loads((folder / f"status-{host}.json").read_text())["communicators"]
    assert (comm["held_up_by"], len(comm["ranks"])) == ([LATE], SIZE)
    assert missing_ranks(folder) == [{LATE}]


def test_a_folder_that_cannot_be_written_is_said(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = run_late(ranks, meeting_point(), {"HSGD_DUMP_DIR": str(tmp_path / "file")})
    (text,) = [shown for failures in found for _, shown in failures if shown]
    assert text.endswith(f"hsgd: HSGD_DUMP_DIR={tmp_path / 'file'}: Not a directory\n")


def do_lose_one(seat: Seat, path: str, environment: dict[str, str]) -> tuple[str, str]:
    os.environ.update(environment)
    comm = seat.comm(path, SIZE)
    seat.tell("ready")

    def call_on() -> None:
        while True:
            comm.allreduce(np.ones(10))

    return errors_of(call_on)


def run_lost(ranks: Ranks, environment: dict[str, str]) -> list[tuple[str, str]]:
    """What the ranks got that are left."""
    ranks.start(do_lose_one, meeting_point(), environment)
    for rank in range(SIZE):
        ranks.hear(rank)
    ranks.signal(SIZE - 1, signal.SIGKILL)
    found = [outcome.value for outcome in ranks.finish(on=range(SIZE - 1))]
    assert all(error.startswith("PeerLost: ") for error, _ in found)
    return found


def test_a_rank_that_is_lost_is_told_at_once(ranks: Ranks) -> None:
    assert [shown for _, shown in run_lost(ranks, {})] == [""] * 3


def test_a_rank_that_is_lost_is_in_no_call_of_the_files(ranks: Ranks, tmp_path: Path) -> None:
    found = run_lost(ranks, {"HSGD_DUMP_DIR": str(tmp_path)})
    (text,) = [shown for _, shown in found if shown]
    assert "got PeerLost" in text and "LATE" not in text
    (folder,) = tmp_path.iterdir()
    missing = missing_ranks(folder)
    assert missing and all(each is not None and SIZE - 1 in each for each in missing)


def do_fail_without_a_communicator(seat: Seat, path: str) -> tuple[str, str]:
    return errors_of(lambda: Comm.local(path, seat.rank, SIZE, HASTY))


def test_a_set_up_that_fails_is_no_broken_communicator(ranks: Ranks) -> None:
    path = meeting_point()
    for error, shown in ranks.run(do_fail_without_a_communicator, path, on=range(2)):
        assert error.startswith("CollectiveTimeout: ") and shown == ""


def do_wait_in_torch(seat: Seat, path: str) -> tuple[str, str]:
    """In a process group, whose works are run by a thread of hsgd's."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    store = dist.FileStore(path, 2)
    dist.init_process_group(
        "hsgd", store=store, rank=seat.rank, world_size=2, timeout=timedelta(seconds=1)
    )
    if seat.rank == 1:
        seat.pipe.recv()
        return "", ""
    work = dist.all_reduce(torch.ones(5), async_op=True)
    found = errors_of(work.wait)
    seat.tell("failed")
    return found


def test_an_error_of_a_process_group_is_shown_as_well(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(do_wait_in_torch, str(tmp_path / "store"), on=(0, 1))
    assert ranks.hear(0) == "failed"
    ranks.send(1, "end")
    error, shown = ranks.finish(on=(0, 1))[0].value
    assert error.startswith("CollectiveTimeout: ")
    assert f"-> rank 1 (pid {ranks.pid(1)}, " in shown


# --- several nodes ---


@pytest.mark.long
def test_each_node_writes_its_part_of_one_folder(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    nodes = cluster(2)
    environment = {"HSGD_DUMP_DIR": str(tmp_path), "HSGD_TIMEOUT_S": "2"}
    command = [sys.executable, __file__, str(tmp_path)]
    done = nodes.mpirun(4, command, env=environment, timeout_s=JOB_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"hsgd: rank \d got CollectiveTimeout; ", done.stderr)) == 2
    (folder,) = tmp_path.iterdir()
    assert {*WRITTEN, *(f"trace_rank_{rank}" for rank in range(4))} <= {
        path.name for path in folder.iterdir()
    }
    assert missing_ranks(folder) == [{3}]


WRITTEN = {f"status-node{node}.{form}" for node in (1, 2) for form in ("txt", "json")}


def run_rank(folder: Path) -> None:
    """The last rank, of the second node, comes when both nodes have written what they saw."""
    with Comm() as comm:
        end = time.monotonic() + LIMIT_S
        while comm.rank == 3 and WRITTEN - {path.name for path in folder.glob("*/*")}:
            assert time.monotonic() < end
        try:
            comm.barrier()
        except HsgdError as error:
            print(error)
        else:
            raise AssertionError("the last rank was not late")


# --- forms, of rows that no job wrote ---


def row(rank: int, size: int, **fields: Any) -> Row:
    """Of a rank that waited until the deadline in call 5."""
    known: dict[str, Any] = {
        **{field.name: None for field in dataclasses.fields(Row)},
        "comm": "7",
        "rank": rank,
        "size": size,
        "local_size": size,
        "node": 0,
        "nodes": 1,
        "host": "node1",
        "pid": 1000 + rank,
        "command": "train",
        "process_state": "S",
        "state": "broken",
        "moves": False,
        "in_call": False,
        "call": 5,
        "kind": "allreduce",
        "name": "",
        "bytes": 64,
        "since_s": 0.1,
        "error_code": -3,
        "error": "x" * 191,
    }
    return Row(**{**known, **fields})


def late(rank: int, size: int, **fields: Any) -> Row:
    return row(rank, size, state="open", call=4, since_s=9.0, error_code=0, error="", **fields)


@pytest.mark.parametrize("count_late", [1, 100])
def test_a_large_node_is_shown_in_twenty_lines(count_late: int) -> None:
    size = 256
    rows = [row(rank, size) for rank in range(size - count_late)]
    rows += [late(rank, size) for rank in range(size - count_late, size)]
    (group,) = groups_of(rows)
    lines = brief(group).splitlines()
    assert len(lines) <= 18  # one before, one behind
    assert lines[2].split()[:3] == [str(size - count_late), f"{1256 - count_late}", "LATE"]
    assert lines[10].startswith("  and 248 on this node: ")


def test_a_node_that_waits_for_another_one_shows_no_ranks() -> None:
    (group,) = groups_of([row(rank, 16, nodes=2, local_size=8) for rank in range(8)])
    lines = brief(group).splitlines()
    assert [line[:3] for line in lines] == ["com", "  8", "  -"]
    assert lines[1] == "  8 on this node: 8 broken"


@pytest.mark.parametrize("kind", sorted({*KINDS}))
def test_torchfrtrace_takes_every_kind_of_call(tmp_path: Path, kind: str) -> None:
    for come in (3, 4):
        rows = [row(rank, 4, kind=kind, bytes=90) for rank in range(come)]
        rows += [late(rank, 4, kind=kind) for rank in range(come, 4)]
        (group,) = groups_of(rows)
        for name, data in flight_files(group).items():
            (tmp_path / name).write_bytes(data)
        assert missing_ranks(tmp_path) == [{3} if come == 3 else None]


def test_who_lost_a_rank_blames_nobody_for_being_behind() -> None:
    rows = [row(0, 3, error_code=-2), late(1, 3)]
    (group,) = groups_of(rows)
    assert group.held_up_by == [] and len(group.findings) == 1


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
