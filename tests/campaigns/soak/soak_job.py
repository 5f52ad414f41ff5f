"""One soak on one layout, run: ranks are started, watched, and what they report is gathered.

Owns the folder of the job and its processes. Whoever makes no progress is ended. Never judges.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.soak.soaks import LAYOUTS, Soak
from toolkit.processes import MARK, end_marked, launch_environ
from toolkit.shared_files import orphaned_files, shared_files

__all__ = ["Done", "Extent", "run_soak"]

STALLED_S = 180.0  # without a sample of any rank
_END_S = 30.0
_serial = itertools.count(1)


@dataclass(frozen=True)
class Extent:
    """How much of the long form is run. seconds: of soaks that run for a time. width: things that
    are open at once.
    """

    scale: float
    seconds: float
    width: int


@dataclass
class Done:
    """A soak that was run. samples: by rank, rows of the measures of a footprint. problems: what
    went wrong besides leaks.
    """

    operations: int = 0
    seconds: float = 0.0
    samples: list[list[list[int]]] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def run_soak(
    soak: Soak, layout: str, extent: Extent, store_port: int, say: Callable[[int, float], None]
) -> Done:
    """Run it; blocking, ends when no rank has taken a sample for STALLED_S. store_port: of a
    TCPStore. say: called now and then with the operations made and the share of all.
    """
    before = shared_files()
    with tempfile.TemporaryDirectory(prefix="hsgd-soak-") as folder:
        done = _Job(soak, layout, extent, store_port, Path(folder)).run(say)
    done.problems += [f"left /dev/shm/{name}" for name in orphaned_files(before, 2.0)]
    return done


class _Job:
    def __init__(
        self, soak: Soak, layout: str, extent: Extent, store_port: int, folder: Path
    ) -> None:
        self._folder, self._place = folder, LAYOUTS[layout]
        self._samples = soak.samples
        wanted = soak.counts[layout]
        count = max(soak.least, int(wanted * extent.scale)) if wanted else 0
        order = {
            "program": soak.program,
            "nodes": self._place.nodes,
            "by": self._place.by,
            "count": count,
            "samples": soak.samples,
            "seconds": extent.seconds,
            "width": extent.width,
            "folder": str(folder),
            "secret": secrets.token_hex(16),
            "store_port": store_port,
        }
        (folder / "order").write_text(json.dumps(order))
        self._mark = f"{os.getpid()}.soak-{next(_serial)}."
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, say: Callable[[int, float], None]) -> Done:
        done = Done()
        try:
            self._start()
            self._watch(done, say)
        finally:
            end_marked(self._mark)
            for process in self._processes:
                process.wait(_END_S)
        self._gather(done)
        return done

    def _start(self) -> None:
        ranks = range(len(self._place.nodes))
        argv = [sys.executable, "-m", "campaigns.soak.soak_rank", str(self._folder / "order")]
        environ = {
            "OPENBLAS_NUM_THREADS": "1",
            # What is mapped is what is held: no reserve of 64 MiB for each thread, no large block
            # that is kept for later.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
            "TMPDIR": str(self._folder),
            MARK: self._mark,
        }
        commands = [[*argv, str(rank)] for rank in ranks]
        if self._place.by == "mpi":
            commands = [["mpirun", "-n", str(len(ranks)), *argv]]
        for number, command in enumerate(commands):
            with (self._folder / f"output-{number}").open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=launch_environ(**environ),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def _watch(self, done: Done, say: Callable[[int, float], None]) -> None:
        """Until all have ended, one has failed, or nothing goes on."""
        last, since = 0.0, time.monotonic()
        while any(process.poll() is None for process in self._processes):
            failed = [process.poll() for process in self._processes if process.poll()]
            if failed:
                time.sleep(1.0)  # the others tell what they think of it
                return
            operations, share = self._progress()
            if share > last:
                last, since = share, time.monotonic()
            if time.monotonic() - since > STALLED_S:
                done.problems.append(f"no sample for {STALLED_S:g} s after {operations} operations")
                return
            say(operations, share)
            time.sleep(0.1)

    def _progress(self) -> tuple[int, float]:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((self._folder / "progress-0").read_text())
            return int(told["done"]), float(told["share"])
        return 0, 0.0

    def _gather(self, done: Done) -> None:
        for rank in range(len(self._place.nodes)):
            path = self._folder / f"rank-{rank}.json"
            if not path.is_file():
                done.problems.append(f"rank {rank} did not end well")
                continue
            told: dict[str, Any] = json.loads(path.read_text())
            done.samples.append(told["samples"])
            if rank == 0:
                done.operations, done.seconds = told["operations"], told["seconds"]
                done.notes = told["notes"]
        codes = [process.returncode for process in self._processes]
        if any(codes) and not done.problems:
            done.problems.append(f"exit codes {codes}")
        if done.problems:
            done.problems += self._last_words()

    def _last_words(self) -> list[str]:
        """Of the first process that said something."""
        paths = [self._folder / f"output-{number}" for number in range(len(self._processes))]
        texts = [path.read_text(errors="replace") for path in paths]
        return next(filter(None, texts), "").splitlines()[-12:]
