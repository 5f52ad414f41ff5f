"""Averaging in pairs while a rank of another node stands still, or dies: the program of a rank.

`python pair_fault_programs.py stalled|killed|killed-asking FOLDER`: the last rank stops, or ends,
before it has answered anybody; "killed-asking" has asked the first, which has asked it, too. The
others go on, write into the folder what they have seen, and a stopped rank is woken.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hsgd import Comm
from hsgd.config import Config
from hsgd.optim.gossip.pair_averaging import PairAverager
from pair_programs import complete, start_weights

__all__ = ["AVERAGES", "STALLED_S"]

STALLED_S = 1.0  # the deadline of the averager: the others go on for longer than that
AVERAGES = 50
WITHIN_S = 60.0
WAKE = 'for k in $(seq 1200); do [ -e "$0" ] && break; sleep 0.05; done; kill -CONT "$1"'


def go_on(comm: Comm, pairs: PairAverager, patience_s: float) -> dict[str, Any]:
    """Ask everybody, the victim first, until enough averages took place and enough time passed."""
    victim, begin, averages, turn = comm.size - 1, time.monotonic(), 0, 0
    pairs.ask(victim)
    while time.monotonic() - begin < WITHIN_S:
        turn += 1
        pairs.ask(complete(comm.size)[comm.rank][turn % (comm.size - 1)])
        done = pairs.wait(0.02)
        averages += sum(entry.committed and entry.peer != victim for entry in done)
        settled = not pairs.open if patience_s == 0 else victim in pairs.open
        known = victim in pairs.lost or patience_s > 0
        if averages >= AVERAGES and settled and known and time.monotonic() - begin > patience_s:
            break
    return {"averages": averages, "open": pairs.open, "lost": pairs.lost}


def note(folder: Path, rank: int, told: dict[str, Any]) -> None:
    (folder / f"{rank}.part").write_text(json.dumps(told))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")


def wait_for(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while len(list(folder.glob(pattern))) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def outlive_a_stalled(comm: Comm, folder: Path) -> None:
    weights = start_weights(comm.rank)
    pairs = PairAverager(comm, weights, complete(comm.size), timeout_s=STALLED_S)
    comm.barrier()
    if comm.rank == comm.size - 1:
        waker = subprocess.Popen(["sh", "-c", WAKE, str(folder / "enough"), str(os.getpid())])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
        report = {}
    else:
        report = go_on(comm, pairs, 3 * STALLED_S)
        note(folder, comm.rank, report)
        wait_for(folder, "*.json", comm.size - 1)
        (folder / "enough").touch()
    pairs.wait(WITHIN_S)
    here = comm.barrier_async()
    while not here.done():
        pairs.poll()
        time.sleep(1e-3)
    here.wait()
    pairs.close()
    sums = [comm.allreduce(mine).tolist() for mine in weights]
    if comm.rank == 0:
        print(json.dumps(sums == [wanted.tolist() for wanted in total(comm.size)]))
    comm.close()


def total(size: int) -> list[Tensor]:
    """The sum of the weights of all ranks at the beginning."""
    starts = [start_weights(rank) for rank in range(size)]
    return [torch.stack([start[k] for start in starts]).sum(0) for k in range(2)]


def outlive_a_killed(comm: Comm, folder: Path, asking: bool) -> None:
    weights = start_weights(comm.rank)
    pairs = PairAverager(comm, weights, complete(comm.size), timeout_s=WITHIN_S)
    victim = comm.size - 1
    if asking and comm.rank in (0, victim):
        assert pairs.ask(victim - comm.rank)
        pairs._window.drain(WITHIN_S)
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    report = go_on(comm, pairs, 0.0)
    (folder / f"{comm.rank}.done").touch()
    deadline = time.monotonic() + WITHIN_S
    while len(list(folder.glob("*.done"))) < comm.size - 1 and time.monotonic() < deadline:
        pairs.poll()
        time.sleep(1e-3)
    pairs.close()
    note(folder, comm.rank, {**report, "weights": [mine.tolist() for mine in weights]})
    wait_for(folder, "*.json", comm.size - 1)
    os._exit(1)  # MPI cannot be finalized without the victim; mpirun ends what is left


def main() -> None:
    torch.set_num_threads(1)
    how, folder = sys.argv[1:]
    comm = Comm(config=Config(timeout_s=WITHIN_S))
    if how == "stalled":
        outlive_a_stalled(comm, Path(folder))
    else:
        outlive_a_killed(comm, Path(folder), how == "killed-asking")


if __name__ == "__main__":
    main()
