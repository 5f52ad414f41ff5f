"""Workers that torchrun starts again meet one another, and nothing that the dead ones left.

torchrun's agent keeps its store over restarts, with all keys of the workers before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrun_runs import said, torchrun

__all__: list[str] = []

# Of the second attempt rank 0 comes when rank 1 has looked for a path already.
LATE_FIRST = """
import os, pathlib, sys, time
import numpy as np
from torch.distributed import TCPStore
import hsgd

again, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", os.environ["RANK"]
looked = pathlib.Path(__file__).with_name("looked")
wait = TCPStore.wait

def look_first(store, keys, *limit):
    if store.check(keys):
        sys.exit("rank 1 found what the dead rank 0 left")
    looked.touch()
    wait(store, keys, *limit)

if again and rank == "1":
    TCPStore.wait = look_first
while again and rank == "0" and not looked.exists():
    time.sleep(0.01)
comm = hsgd.Comm()
print(f"|{comm.rank}, {again}, {comm.allreduce(np.ones(1))[0]}|", flush=True)
if not again:
    os._exit(3)
"""


@pytest.mark.long
def test_a_restarted_worker_waits_for_the_new_rank_0_not_for_the_dead_one(tmp_path: Path) -> None:
    done = torchrun(tmp_path, LATE_FIRST, "--standalone", "--max-restarts=1", "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in said(done) if "True" in line] == ["0, True, 2.0", "1, True, 2.0"]


# Of the first attempt only rank 0 arrives at the group's meeting.
HALF_ARRIVED = """
import datetime, os, signal
import torch, torch.distributed as dist
from hsgd.jobs.stores.board import Board

again, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", int(os.environ["RANK"])
if not again and rank == 1:
    signal.pause()
if not again:
    Board.exchange = lambda *_: os._exit(3)
dist.init_process_group("hsgd", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
print(f"|{rank}, {total.item()}|", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_group_meets_though_only_some_ranks_of_the_last_attempt_had_come(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path, HALF_ARRIVED, "--standalone", "--max-restarts=1", "--nproc-per-node=2"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert said(done) == ["0, 2.0", "1, 2.0"]
