"""Gossip between nodes: the program of a rank, `python gossip_programs.py flat|hierarchical`.

Models start together and are pushed apart; then they average without training. Rank 0 prints how
far the mean has moved, how far models are apart before and after, and the bytes between nodes.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from torch import nn

from hsgd import Comm
from hsgd.config import Config
from hsgd.optim import FixedPeriod, Gossip

__all__: list[str] = []


def main() -> None:
    torch.set_num_threads(1)
    comm = Comm(config=Config(timeout_s=30.0))
    net = nn.Linear(300, 40)
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    gossip = Gossip(
        sgd,
        net.parameters(),
        comm,
        FixedPeriod(2),
        topology="ring",
        hierarchical=sys.argv[1] == "hierarchical",
    )
    with torch.no_grad():
        net.weight += float(comm.cross_rank)
    mean = comm.allreduce(net.weight.detach().double(), "mean")
    before = gossip.consensus_distance()
    for _ in range(40):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gossip.step()
        time.sleep(0.005)  # what a step would take
    gossip.settle()
    moved = (comm.allreduce(net.weight.detach().double(), "mean") - mean).abs().max()
    distance, metrics = gossip.consensus_distance(), gossip.metrics()
    sent = comm.allgather(np.array([metrics.remote_bytes], np.int64))
    gossip.close()
    if comm.rank == 0:
        report = {"kept": float(moved), "before": before, "distance": distance}
        print(json.dumps({**report, "remote_bytes": sent.tolist()}))
    comm.close()


if __name__ == "__main__":
    main()
