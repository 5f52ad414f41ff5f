"""Jobs of `hsgd run --min-np`, and what their ranks wrote.

Owns the command and the reading of output while the job runs. A rank's line is "|KIND WORDS|".
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.processes import launch_environ, run_marked

__all__ = ["HSGD", "JOB_S", "TRAIN", "lines", "local_training", "watched"]

JOB_S = 120.0
HSGD = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]

# It holds in the middle, with commits, until there is a file; a fault may come at any step of it.
# Sums that any number of ranks, in any worlds, must get right: a gradient that is the same on all.
TRAIN = """
import os, sys, time
import torch
import hsgd.torch as hvd

steps, go, most = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])  # most: ranks that commit in it

def say(*words):
    print("|" + " ".join(map(str, words)) + "|", flush=True)

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
if hvd.rank() == 0:
    [each.data.fill_(1.0) for each in model.parameters()]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5))
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    say("enter", hvd.rank(), hvd.size(), os.getpid(), state.step)
    while state.step < steps:
        while state.step == steps // 2 and not hvd.broadcast_object(os.path.exists(go)):
            time.sleep(0.02)
            if hvd.size() <= most:
                state.commit()
        optimizer.zero_grad()
        model(torch.full((2, 3), state.step / steps)).sum().backward()
        optimizer.step()
        state.step += 1
        if state.step % 2 == 0:
            state.commit()
    return [round(each.item(), 6) for each in model.weight.detach().flatten()]

weights = train(state)
say("done", hvd.rank(), hvd.size(), *weights)
"""


# Three ranks train apart; the last is killed at step 18, and another takes its place.
LOCAL_TRAINING = """
import json, os, signal, sys, time
import torch
import hsgd.torch as hvd

def say(*words):
    print("|" + " ".join(map(str, words)) + "|", flush=True)

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
adam = torch.optim.Adam(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(
    adam, strategy=sys.argv[1], model=model, strategy_options=json.loads(sys.argv[2])
)
state = hvd.elastic.TorchState(model, optimizer, step=0)
taken = 0

@hvd.elastic.run
def train(state):
    global taken
    say("enter", hvd.size(), state.step, optimizer.metrics().steps)
    first = sys.argv[3]  # a file that tells that rank 2 was killed
    while state.step < 40:
        if state.step == 18 and hvd.rank() == 2 and not os.path.exists(first):
            open(first, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        while state.step == 25 and not (hvd.size() == 3 and os.path.exists(first)):
            time.sleep(0.05)
            state.commit()
        optimizer.zero_grad()
        (model(torch.eye(3)) - hvd.rank() - 1).square().sum().backward()
        optimizer.step()
        state.step += 1
        taken += 1
        if state.step % 5 == 0:
            state.commit()

train(state)
optimizer.synchronize_weights() if sys.argv[1] == "diloco" else optimizer.global_average()
say("done", hvd.size(), taken, optimizer.metrics().steps, *model.weight.detach().flatten().tolist())
optimizer.close()
"""


def lines(text: str, kind: str) -> list[list[str]]:
    """The words of the ranks' lines of one kind, in order."""
    found = [line.split() for line in re.findall(r"\|([^|\n]*)\|", text)]
    return [words[1:] for words in found if words[:1] == [kind]]


class Watched:
    """A job that runs. text: what it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.text = ""
        self._ended = False
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, condition: Callable[[str], object]) -> None:
        """Until its output fulfils a condition; fails with the output after JOB_S."""
        with self._grown:
            self._grown.wait_for(lambda: self._ended or condition(self.text), JOB_S)
            if not condition(self.text):
                raise AssertionError(f"it did not come:\n{self.text[-3000:]}")

    def end(self) -> int:
        """Its exit code, when all is read."""
        code = self.process.wait(JOB_S)
        self._reader.join(JOB_S)
        return code

    def close(self) -> None:
        """End it where it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(JOB_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.text += line
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()


def local_training(folder: Path, strategy: str, options: dict[str, Any]) -> str:
    """What the ranks wrote of an elastic job that loses a rank and gets another."""
    script = folder / "train.py"
    script.write_text(LOCAL_TRAINING)
    words = [strategy, json.dumps(options), str(folder / "first")]
    command = [*HSGD, "run", "-np", "3", "--min-np", "2", sys.executable, str(script), *words]
    done = run_marked(command, launch_environ(), JOB_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@contextlib.contextmanager
def watched(words: list[str], env: Mapping[str, str]) -> Iterator[Watched]:
    """A job, which is ended when the block is left early."""
    process = subprocess.Popen(
        words, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    job = Watched(process)
    try:
        yield job
    finally:
        job.close()
