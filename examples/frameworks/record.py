"""What the programs tell of their steps: losses, times, and a trace of torch.profiler."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import TextIO

import torch

WARM_UP = 5


class Record:
    """Losses and times of the steps of this rank, and a trace of all but the first ones."""

    def __init__(self, trace: str | None) -> None:
        self.losses: list[float] = []
        self.ends = [time.perf_counter()]
        self.trace = trace
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def step(self, loss: float) -> None:
        self.losses.append(loss)
        self.ends.append(time.perf_counter())
        if self.trace and len(self.losses) == WARM_UP:
            self.profiler.start()

    def end(self, shown: bool, out: TextIO | None = None) -> None:
        """Print all as a line of JSON, to `out` or the terminal, where this rank's is the one that
        is shown. Called on every rank, or torch's profiler crashes at the end.
        """
        found = {"losses": self.losses, "step_s": [b - a for a, b in pairwise(self.ends)]}
        if self.trace:
            self.profiler.stop()
            if shown:
                self.profiler.export_chrome_trace(self.trace)
            found["traced_steps"] = len(self.losses) - WARM_UP
        if shown:
            print(json.dumps(found), file=out, flush=True)
