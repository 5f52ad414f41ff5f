"""Elastic jobs of recovery_worker.py: what they train on, the harm that is done to their ranks, and
their notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.layouts import Testbed, rank_command
from harness.stopping import end_process

__all__ = [
    "SAMPLES",
    "Entry",
    "Fault",
    "RankNotes",
    "Training",
    "harm",
    "read_notes",
    "run_training",
    "write_samples",
]

LOOK_S, RETRY_S = 0.1, 0.5
END_S = 20.0  # for a job that is told to end
SETTLED = 5  # steps of a world before a rank of it is harmed: it has the state
KINDS = {1: ("kill", "kill", "kill", "stop"), 2: ("kill", "kill", "stop", "node")}
Arrays = Mapping[str, np.ndarray]

CONTEXT = 64  # characters of a sample
SOURCES = ("argparse", "ast", "difflib", "doctest", "inspect", "pickle", "subprocess", "tarfile")
TEST_SHARE = 0.1
SIGNALS = {"kill": "KILL", "stop": "STOP", "node": "KILL"}


@dataclass(frozen=True)
class Training:
    """A job. samples: the file of its task. fault_every_s: 0: none. timeout_s: HSGD_TIMEOUT_S."""

    task: str
    samples: Path
    seed: int
    epochs: int
    fault_every_s: float
    timeout_s: float
    limit_s: float


@dataclass(frozen=True)
class Entry:
    """A rank's entry into the training of a world. step: from which it went on."""

    world: int
    rank: int
    size: int
    step: int
    time_s: float


@dataclass
class RankNotes:
    """What a process noted: its entries, (world, step, time) of each step, and whether it came to
    the end.
    """

    host: str
    pid: int
    parent: int
    entries: list[Entry] = field(default_factory=list)
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Fault:
    """Harm that was done. pids: of ranks. world: the last that had formed."""

    kind: str
    time_s: float
    host: str
    pids: tuple[int, ...]
    world: int
    size: int


def read_notes(folder: Path) -> list[RankNotes]:
    """Of all processes so far; a line that is being written is left out; local."""
    found = []
    for path in sorted(folder.glob("*.log")):
        host, _, pid = path.stem.rpartition("-")
        lines = [line.split() for line in path.read_text().split("\n")[:-1]]
        if lines:
            notes = RankNotes(host, int(pid), int(lines[0][1]))
            for word, *numbers in lines[1:]:
                time_s = float(numbers[-1])
                if word == "enter":
                    world, rank, size, step = map(int, numbers[:4])
                    notes.entries.append(Entry(world, rank, size, step, time_s))
                elif word == "end":
                    notes.ended = True
                else:
                    notes.steps.append((notes.entries[-1].world, int(numbers[0]), time_s))
            found.append(notes)
    return found


def run_training(testbed: Testbed, training: Training) -> dict[str, Any]:
    """Run it to its end, with faults; blocking. What was noted, the faults, the score, the exit
    code and the end of what was said.
    """
    with tempfile.TemporaryDirectory(prefix="hsgd-recovery-") as name:
        folder = Path(name)
        with open(folder / "said", "w+", errors="replace") as said:
            with _job(testbed, training, folder, said) as process:
                faults = _disturb(process, testbed, training, folder)
            said.seek(0)
            tail = said.read().splitlines()[-12:]
        score = folder / "score.json"
        return {
            "notes": read_notes(folder),
            "faults": faults,
            "code": process.returncode,
            "said": tail,
            **(json.loads(score.read_text()) if score.exists() else {}),
        }


@contextlib.contextmanager
def _job(
    testbed: Testbed, training: Training, folder: Path, said: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The job as a process; it is told to end when the context does."""
    words = [sys.executable, "-m", "hsgd", "run", "-np", str(testbed.layout.ranks)]
    words += ["--min-np", "1", *(["-H", testbed.hosts] if testbed.layout.nodes > 1 else [])]
    numbers = (str(training.seed), str(training.epochs))
    rank = rank_command("recovery_worker", training.task, str(training.samples), str(folder))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    environment["HSGD_TIMEOUT_S"] = f"{training.timeout_s:g}"
    process = subprocess.Popen(
        testbed.command([*words, *rank, *numbers]),
        env=testbed.environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
    )
    try:
        yield process
    finally:
        end_process(process, END_S)


def _disturb(
    process: subprocess.Popen[bytes], testbed: Testbed, training: Training, folder: Path
) -> list[Fault]:
    """Harm a rank now and then until the job ends, or its time is over."""
    draw = random.Random(f"{training.task} {training.seed} {testbed.layout.name}")
    faults: list[Fault] = []
    end = time.monotonic() + training.limit_s
    next_s = _first_step(process, folder, end) + training.fault_every_s
    while process.poll() is None and time.monotonic() < end:
        time.sleep(LOOK_S)
        if not training.fault_every_s or time.monotonic() < next_s:
            continue
        fault = harm(draw, testbed, folder, faults)
        if fault is None:
            next_s = time.monotonic() + RETRY_S
        else:
            faults.append(fault)
            next_s = fault.time_s + training.fault_every_s
    return faults


def _first_step(process: subprocess.Popen[bytes], folder: Path, end: float) -> float:
    """When the job has begun."""
    while process.poll() is None and time.monotonic() < end:
        if any(notes.steps for notes in read_notes(folder)):
            break
        time.sleep(LOOK_S)
    return time.monotonic()


def harm(
    draw: random.Random, testbed: Testbed, folder: Path, faults: Sequence[Fault]
) -> Fault | None:
    """Of the ranks in `folder` one, or those of a node; local. None where those of the last world
    have hardly begun, only one is there, the fault before has not been overcome yet, or the
    training is over.
    """
    gone = {(fault.host, pid) for fault in faults for pid in fault.pids}
    alive = [note for note in read_notes(folder) if (note.host, note.pid) not in gone]
    world = max((entry.world for note in alive for entry in note.entries), default=0)
    ranks = [note for note in alive if sum(1 for step in note.steps if step[0] == world) >= SETTLED]
    over = any(note.ended for note in alive)
    if over or len(ranks) < 2 or (faults and world <= faults[-1].world):
        return None
    kind = draw.choice(KINDS[min(testbed.layout.nodes, 2)])
    victim = draw.choice(ranks)
    pids = [victim.pid]
    if kind == "node" and all(note.host == victim.host for note in ranks):
        kind = "kill"  # it would be the end of the state
    if kind == "node":
        pids = [note.pid for note in alive if note.host == victim.host]
    agents = [victim.parent] if kind == "node" else []
    now = time.monotonic()
    words = ["kill", f"-{SIGNALS[kind]}", *map(str, [*agents, *pids])]
    done = subprocess.run(
        testbed.command(words),
        env=testbed.environment({"PATH": os.environ.get("PATH", os.defpath)}),
        capture_output=True,
    )
    if done.returncode != 0 and kind != "node":  # its process has just ended
        return None
    return Fault(kind, now, victim.host, tuple(pids), world, len(ranks))


def digits() -> Arrays:
    """Images of 64 numbers in 0..1; a fifth for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    image = (found.data[order] / 16).astype(np.float32)
    label = found.target[order].astype(np.int64)
    held = len(label) // 5
    return _parted(image, label, slice(held, None), slice(held))


def characters() -> Arrays:
    """Windows of modules of the standard library, and the same one character on."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES)
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    count = (len(codes) - 1) // CONTEXT
    inputs = codes[: count * CONTEXT].reshape(count, CONTEXT)
    targets = codes[1 : count * CONTEXT + 1].reshape(count, CONTEXT)
    held = int(count * TEST_SHARE)
    order = np.random.default_rng(0).permutation(count)
    return _parted(inputs, targets, order[held:], order[:held])


def _parted(inputs: np.ndarray, targets: np.ndarray, learn: Any, test: Any) -> Arrays:
    found = {"input": inputs[learn], "target": targets[learn]}
    return {**found, "test_input": inputs[test], "test_target": targets[test]}


SAMPLES: Mapping[str, Callable[[], Arrays]] = {"digits": digits, "gpt": characters}


def write_samples(task: str, folder: Path) -> Path:
    """The file of a task's samples, which is made where it is not there yet; local."""
    path = folder / f"{task}.npz"
    if not path.exists():
        np.savez(path, **SAMPLES[task]())
    return path
