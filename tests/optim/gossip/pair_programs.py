"""What averaging in pairs promises, for ranks in shared memory and over MPI alike.

Run under mpirun, this file is the program of the ranks: `python pair_programs.py COUNT` averages at
random over MPI's one-sided calls, inside the node too, and rank 0 prints what it found.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsgd import Comm
from hsgd.config import Config
from hsgd.optim.gossip.pair_averaging import PairAverager

__all__ = ["average_at_random", "complete", "start_weights"]

ELEMENTS = 13


def complete(size: int) -> list[list[int]]:
    """Everybody with everybody."""
    return [[peer for peer in range(size) if peer != rank] for rank in range(size)]


def start_weights(rank: int) -> list[Tensor]:
    """Integers, of which the sum of all ranks must not change."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(-(10**12), 10**12, (n,), generator=draw) for n in (ELEMENTS, 1)]


def delay_messages(pairs: PairAverager, draw: random.Random) -> list[int]:
    """Let time pass before and after some messages. What is returned grows with each answer to a
    request that has crossed one of this rank.
    """
    send, close_crossed = pairs._send, pairs._close_crossed
    crossed: list[int] = []

    def late(*args: Any) -> int:
        time.sleep(draw.choice((0.0, 0.0, 0.0, 1e-3)))
        ticket = send(*args)
        time.sleep(draw.choice((0.0, 0.0, 0.0, 1e-3)))
        return ticket

    def counted(peer: int, version: int) -> None:
        crossed.append(peer)
        close_crossed(peer, version)

    pairs._send, pairs._close_crossed = late, counted  # type: ignore[method-assign]
    return crossed


def average_at_random(
    comm: Comm, asks: int, *, stay: bool = True, dawdle: bool = False, **options: Any
) -> dict[str, Any]:
    """Ask at random, with random delays, while the own weights move; then leave: all together, or
    each when it is done, or has nobody left to ask. dawdle: delays at every message, too.
    """
    draw = random.Random(comm.rank)
    weights = start_weights(comm.rank)
    pairs = PairAverager(comm, weights, complete(comm.size), **options)
    crossed = delay_messages(pairs, draw) if dawdle else []
    moved, committed, refused, asks_made = 0, 0, 0, 0
    done = []
    while asks_made < asks and len(pairs.lost) < comm.size - 1:
        step = draw.randint(-1000, 1000)
        weights[0] += step
        moved += step
        done += pairs.poll()
        if draw.random() < 0.002:
            time.sleep(draw.random() * 1e-3)
        peer = draw.choice(complete(comm.size)[comm.rank])
        if pairs.ask(peer):
            asks_made += 1
        else:
            done += pairs.wait(draw.random() * 5e-3)
    if stay:
        here = comm.barrier_async()
        while not here.done():
            done += pairs.poll()
            time.sleep(1e-4)
        here.wait()
    done += pairs.close()
    for entry in done:
        committed += entry.committed and entry.asked
        refused += entry.asked and not entry.committed
    return {
        "weights": [w.tolist() for w in weights],
        "moved": moved,
        "asked": asks_made,
        "committed": committed,
        "refused": refused,
        "crossed": len(crossed),
        "lost": sorted(pairs.lost),
    }


def conserved(outcomes: list[dict[str, Any]]) -> bool:
    """Whether the sum over all ranks is what the ranks themselves made of it."""
    starts = [start_weights(rank) for rank in range(len(outcomes))]
    moved = sum(outcome["moved"] for outcome in outcomes)
    wanted = [
        (sum(start[0] for start in starts) + moved).tolist(),
        sum(start[1] for start in starts).tolist(),  # type: ignore[union-attr]
    ]
    found = [
        np.sum([np.array(outcome["weights"][k]) for outcome in outcomes], axis=0).tolist()
        for k in range(2)
    ]
    return found == wanted


def main() -> None:
    torch.set_num_threads(1)
    with Comm(config=Config(timeout_s=30.0)) as comm:
        options = {"remote_only": True, "network": "mpi"}
        mine = average_at_random(comm, int(sys.argv[1]), **options)
        from mpi4py import MPI

        every = MPI.COMM_WORLD.gather(mine)
        if every is not None:
            totals = {k: sum(one[k] for one in every) for k in ("asked", "committed", "refused")}
            print(json.dumps({"conserved": conserved(every), **totals}))


if __name__ == "__main__":
    main()
