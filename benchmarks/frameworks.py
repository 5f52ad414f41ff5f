"""Run programs of others over gloo and over hsgd, in turns, and compare losses and times.

The programs lie in examples/frameworks; how they start is in programs/table.py, what becomes of
their figures in programs/figures.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.installing import PeerMissing
from harness.stopping import end_process
from hsgd.jobs.launch.horovod_wheel import cache_folder
from programs import figures
from programs.table import FOLDER, PLACE, PROGRAMS, WORKERS, Program, environment, wheel

__all__ = ["main"]

NOTES = """\
Each program is an ordinary user's: it asks torch.distributed for gloo and knows nothing of hsgd. It
gets a virtual environment of its own, once, in hsgd's cache ($HSGD_CACHE, or ~/.cache/hsgd), with
what its requirements.txt says and hsgd as it lies here. Nothing but packages is downloaded.

Candidates take turns, --rounds times each, with one thread per worker:
  gloo    two workers
  hsgd    the same command with HSGD_AS_GLOO=1, as `hsgd run --gloo -- COMMAND` sets it
  alone   two copies at once, each with one worker that does the work of one of two
A time is the median of a run's steps after the first five, and the median of these over rounds.
Exposed communication is a step less that of "alone".

Losses of all runs over gloo and over hsgd are compared; a relative difference above the program's
tolerance (1e-5) is an error, and so is a run that hsgd did not serve.

Ratios in the JSON, above 1 is ahead: vs_peer/PROGRAM is gloo's step over hsgd's;
vs_peer/PROGRAM_exposed gloo's exposed communication over hsgd's, where gloo's is more than 5 % of
a step. Less than 1 % of a step counts as 1 %.

The exit code is 1 where a program failed or its losses differ; the others are measured all the
same. Logs of all runs are kept in the cache, and a failure names its log.

examples:
  python benchmarks/frameworks.py --quick --only lightning_ddp
  python benchmarks/frameworks.py --json frameworks.json --png frameworks.png
"""
OFFLINE = {
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
GRACE_S = 40.0  # torchrun gives its workers 30 s to end
FOREIGN = ("HSGD_", "HOROVOD_", "PYTHON", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class Failure(RuntimeError):
    """A program does not run: one line, with the file that has the rest."""


def logs() -> Path:
    """The folder of the logs of all runs."""
    return cache_folder(None).with_name(FOLDER) / "logs"


class Runner:
    """Runs one program in its environment; `logs` gets a file for each run."""

    def __init__(self, program: Program, programs: Path, steps: int, limit_s: float) -> None:
        self.program, self.programs = program, programs
        self.steps, self.limit_s = steps, limit_s
        self.logs = logs()
        self.logs.mkdir(parents=True, exist_ok=True)

    def run(self, candidate: str) -> list[dict[str, Any]]:
        """What each copy printed. Raises Failure."""
        copies, workers = (WORKERS, 1) if candidate == "alone" else (1, WORKERS)
        command = [*self.program.words(self.programs, workers), "--steps", str(self.steps)]
        logs = [self.logs / f"{self.program.name}-{candidate}-{k}.log" for k in range(copies)]
        with tempfile.TemporaryDirectory() as folder:
            started: list[subprocess.Popen[bytes]] = []
            try:
                started += [self._start(command, candidate, log, folder) for log in logs]
                for process, log in zip(started, logs, strict=True):
                    self._wait(process, log)
            finally:
                for process in started:
                    _end(process)
        return [self._read(log, candidate) for log in logs]

    def _start(
        self, command: Sequence[str], candidate: str, log: Path, folder: str
    ) -> subprocess.Popen[bytes]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
        path = f"{self.programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        places = {"PATH": path, "PYTHONPATH": str(PLACE)}  # record.py and stdlib_text.py
        # Not shared by environments: torch would build anew for each.
        places["TORCH_EXTENSIONS_DIR"] = str(self.programs.parent / "torch_extensions")
        served = {"HSGD_AS_GLOO": "1", "HSGD_REPORT": "1"} if candidate == "hsgd" else {}
        with log.open("wb") as out:
            return subprocess.Popen(
                command,
                cwd=self.program.folder,
                env={**kept, **OFFLINE, **served, **places, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        try:
            code = process.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"took more than {self.limit_s:g} s; see {log}") from None
        if code:
            raise Failure(f"ended with {code}; see {log}")

    def _read(self, log: Path, candidate: str) -> dict[str, Any]:
        text = log.read_text(errors="replace")
        if candidate == "hsgd" and self.program.reports and "served by hsgd: a" not in text:
            raise Failure(f"no collective was served by hsgd; see {log}")
        for line in reversed(text.splitlines()):
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise Failure(f"printed no losses; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run; launchers end their workers, which lead groups of their own."""
    end_process(process, GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def measure(runner: Runner, rounds: int) -> list[dict[str, Any]]:
    """The rows of one program. Raises Failure."""
    program, losses = runner.program, []
    steps: dict[str, list[float]] = {"gloo": [], "hsgd": [], "alone": []}
    for _ in range(rounds):
        for candidate, medians in steps.items():
            found = runner.run(candidate)
            medians.append(max(figures.median_step_us(each["step_s"]) for each in found))
            if candidate != "alone":
                losses.append(found[0]["losses"])
    differ = max(figures.difference(each, losses[0]) for each in losses)
    return figures.rows_of(program.name, steps, differ)


def measure_all(
    chosen: Sequence[Program], steps: int, rounds: int, limit_s: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and failures; a program that fails does not stop the others. Raises PeerMissing where
    hsgd cannot be built.
    """
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        built = wheel(Path(folder))
        for program in chosen:
            print(f"{program.name}: {program.about}", file=sys.stderr)
            try:
                programs = environment(program.folder, built)
                found = measure(Runner(program, programs, steps, limit_s), rounds)
            except PeerMissing as missing:
                failures.append(str(missing))
                continue
            except Failure as failure:
                failures.append(f"{program.name}: {failure}")
                continue
            rows += found
            differ = max(row.get("losses_differ", 0.0) for row in found)
            if differ > program.tolerance:
                failures.append(
                    f"{program.name}: losses differ by {differ:.2g}, more than "
                    f"{program.tolerance:g}; see {logs()}"
                )
    return rows, failures


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    programs = "".join(f"  {each.name:16} {each.about}\n" for each in PROGRAMS)
    parser = report.argument_parser(
        "Run programs of others over gloo and over hsgd, and compare.",
        notes=f"programs:\n{programs}\n{NOTES}",
        quick="one round of 20 steps",
        png="plot the steps there",
    )
    add = parser.add_argument
    names = [each.name for each in PROGRAMS]
    add("--only", nargs="+", choices=names, metavar="NAME", help="these programs (default: all)")
    add("--rounds", type=int, help="runs of each candidate (default 3)")
    add("--steps", type=int, help="steps of a run (default 40)")
    add("--limit-s", type=float, default=300.0, metavar="S", help="of one run (default 300)")
    options = report.parse(parser, argv)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.steps = options.steps or (20 if options.quick else 40)
    if options.rounds < 1 or options.steps <= figures.WARM_UP or options.limit_s <= 0:
        parser.error(f"--rounds: 1 or more; --steps: above {figures.WARM_UP}; --limit-s: above 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a program failed or its losses differ."""
    options = _read(argv)
    chosen = [each for each in PROGRAMS if not options.only or each.name in options.only]
    settings = {"rounds": options.rounds, "steps": options.steps, "workers": WORKERS}
    try:
        rows, failures = measure_all(chosen, options.steps, options.rounds, options.limit_s)
    except PeerMissing as missing:
        rows, failures = [], [str(missing)]
    found = figures.ratios(rows)
    requirements = {p.name: (p.folder / "requirements.txt").read_text().split() for p in chosen}
    document = report.document(
        *("frameworks", settings, found, rows, failures),
        meta={"requirements": requirements},
    )
    text = f"one step, median milliseconds\n{figures.table(rows)}" if rows else ""
    report.publish(options, document, text, lambda doc, png: figures.plot(doc["results"], png))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
