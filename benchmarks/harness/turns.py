"""Turns: which candidate is measured when and how often, in worker jobs that live side by side.

Owns the order of measuring and what happens to candidates that fail. Candidates take turns, round
after round, so that a change of the machine meets all alike; a job that has no order sleeps in a
read, and one whose own threads would wake up (Horovod) is stopped meanwhile. worker.py and
native/worker.c touch the data.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from harness import report
from harness.candidates import JOBS, Candidate
from harness.jobs import JobFailed, WorkerJob, prepare
from harness.layouts import JobLayout, Testbed, open_testbed
from harness.operations import OPERATIONS
from harness.peers import PeerMissing
from harness.setup_cost import setup_rows
from hsgd.errors import LaunchError

__all__ = [
    "BATCH_S",
    "BUFFERS",
    "CYCLE_CALLS",
    "LEAST_BATCHES",
    "LEAST_CALLS",
    "LIMIT_S",
    "MOST_CALLS",
    "SPAN_CALLS",
    "Jobs",
    "MeasurementPlan",
    "Run",
    "batches",
    "buffer_count",
    "measure",
]

Case = tuple[str, str, int]  # layout, collective, bytes

BUFFERS = 4  # pairs of buffers used in turn; more of the smallest, fewer where they would hold
BUFFER_BYTES = 64 << 20  # more than this
JOB_BYTES = 1 << 30  # or all ranks of a job more than this
SMALL_BUFFERS, SMALL_BYTES = 16, 4 << 10
KEPT_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3  # by all, between turns
BATCH_S = 1e-3  # calls between two looks at the clock take about this long
TRIALS = 3  # batches that find out how many calls that is, of tiny payloads up to:
TINY_BYTES = 256 << 10
MOST_CALLS = 1000
LEAST_BATCHES, MOST_BATCHES = 2, 400
CYCLE_CALLS = 16  # calls per batch of a candidate that answers in steps, while they are short
SPAN_CALLS = 20  # in a batch that is timed from its first rank's begin to its last one's end
LEAST_CALLS = 5
LIMIT_S = 25.0  # who takes longer for so many calls is not asked for larger sizes


@dataclass(frozen=True)
class MeasurementPlan:
    """What is measured, and how long."""

    sizes: tuple[int, ...]
    layouts: tuple[JobLayout, ...]
    candidates: tuple[Candidate, ...]
    rounds: int
    budget_s: float  # of timed calls, for each candidate and case
    collectives: tuple[str, ...] = ("allreduce",)
    install: bool = True  # peers that are missing
    limit_s: float = LIMIT_S  # of LEAST_CALLS calls of a case
    ulimit: str = ""  # of each rank, in the words of the shell
    span: bool = False  # time batches from the first begin to the last end: one node, C programs

    def cases(self, layout: JobLayout) -> list[Case]:
        """What is measured on a layout, in order; a barrier has no size."""
        return [
            (layout.name, collective, nbytes)
            for collective in self.collectives
            for nbytes in ((0,) if collective == "barrier" else self.sizes)
        ]

    def contenders(self, layout: JobLayout, case: Case) -> list[Candidate]:
        """Who is measured in a case, if nobody fails."""
        return [c for c in self.candidates if c.fits(layout, *case[1:])]


@dataclass
class Run:
    """What was found: samples by case and candidate, and who dropped out why."""

    samples: dict[tuple[Case, str], list[float]] = field(default_factory=dict)
    machine: dict[str, dict[str, Any]] = field(default_factory=dict)  # by layout
    setups: list[dict[str, Any]] = field(default_factory=list)  # see setup_cost.py
    launches: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by layout and job
    failures: list[dict[str, Any]] = field(default_factory=list)
    ended: set[tuple[str, str, str]] = field(default_factory=set)  # layout, candidate, collective

    def fail(
        self, layout: str, name: str, reason: str, *, wrong: bool = False, only: str = ""
    ) -> None:
        """Note, and tell at once, that a candidate drops out; `only`: of one collective."""
        row = {"candidate": name, "layout": layout, "reason": reason, "wrong": wrong}
        self.failures.append(row)
        self.ended.add((layout, name, only))
        tqdm.write(f"{'error' if wrong else 'left out'}: {name}: {reason}", file=sys.stderr)

    def has_ended(self, layout: str, name: str, collective: str = "") -> bool:
        return bool({(layout, name, ""), (layout, name, collective)} & self.ended)

    @property
    def any_wrong(self) -> bool:
        return any(failure["wrong"] for failure in self.failures)

    def rows(self, plan: MeasurementPlan) -> list[dict[str, Any]]:
        """The results, as they go into the JSON; of candidates with a wrong result none."""
        known = {candidate.name: candidate for candidate in plan.candidates}
        layouts = {layout.name: layout for layout in plan.layouts}
        wrong = {(f["layout"], f["candidate"]) for f in self.failures if f["wrong"]}
        return [
            {
                "candidate": name,
                "label": known[name].label,
                "kind": known[name].kind,
                "collective": collective,
                "layout": layout,
                "ranks": layouts[layout].ranks,
                "bytes": nbytes,
                **report.statistics(seconds),
                "samples": len(seconds),
            }
            for ((layout, collective, nbytes), name), seconds in self.samples.items()
            if seconds and (layout, name) not in wrong
        ]


class Jobs:
    """The worker jobs of one layout, and the candidates that can be measured in them."""

    def __init__(self, plan: MeasurementPlan, layout: JobLayout, run: Run) -> None:
        self.plan, self.layout, self.run = plan, layout, run
        self.by_name: dict[str, WorkerJob] = {}

    def start(self, testbed: Testbed, folder: Path, stack: contextlib.ExitStack) -> None:
        """Start all jobs side by side, then each candidate; those that fail drop out."""
        wanted = [c for c in self.plan.candidates if c.fits_layout(self.layout)]
        for job in (job for job in JOBS if job.name in {c.job for c in wanted}):
            try:
                tools = prepare(job, folder, self.plan.install)
                started = stack.enter_context(
                    WorkerJob(job, testbed, folder, tools, self.plan.ulimit)
                )
            except (JobFailed, LaunchError, PeerMissing, OSError) as error:
                self._end(job.name, str(error))
                continue
            self.by_name[job.name] = started
            words = [Path(word).name if "/" in word else word for word in started.words]
            self.run.launches.setdefault(self.layout.name, {})[job.name] = words
        for name in list(self.by_name):
            with self._failing(name):
                self.by_name[name].connect()
        for candidate in wanted:
            if candidate.job in self.by_name:
                word = self.by_name[candidate.job].word
                answers = self.order(candidate, f"setup {candidate.does} {word}".strip())
                self._note(answers)
                self.run.setups += setup_rows(candidate, self.layout, answers)
        self.probe()

    def probe(self) -> None:
        """Look at the state of the machine, again when a layout is finished."""
        if "native" not in self.by_name:
            return
        facts: dict[str, Any] = {}
        with self._failing("native"):
            facts = self.by_name["native"].order("probe")[0].get("facts", {})
        known = self.run.machine.setdefault(self.layout.name, {})
        now, before = (d.get("shared_last_level_cache") for d in (facts, known))
        if None not in (now, before) and now != before:
            facts = {"state_changed": True}
            tqdm.write("note: the machine changed its state during this run", sys.stderr)
        known.update(facts)

    def alive(self, case: Case) -> list[Candidate]:
        """Candidates for this case that have not dropped out."""
        fitting = self.plan.contenders(self.layout, case)
        ended = {c.name for c in fitting if self.run.has_ended(self.layout.name, c.name, case[1])}
        return [c for c in fitting if c.name not in ended and c.job in self.by_name]

    def order(self, candidate: Candidate, text: str, collective: str = "") -> list[dict[str, Any]]:
        """The answers of all ranks; none when the candidate has dropped out, now or before."""
        answers: list[dict[str, Any]] = []
        if candidate.job not in self.by_name:
            return answers
        with self._failing(candidate.job):
            answers = self.by_name[candidate.job].order(text)
        for kind in ("wrong", "error", "missing"):
            for rank, answer in enumerate(answers):
                if kind in answer:
                    missing = kind == "missing"
                    reason = f"{text}: rank {rank}: {answer[kind]}"
                    self.run.fail(
                        self.layout.name,
                        candidate.name,
                        answer[kind] if missing else reason,
                        wrong=kind == "wrong",
                        only=collective if missing else "",
                    )
                    return []
        return answers

    def sample(
        self, candidate: Candidate, case: Case, calls: int, count: int, buffers: int
    ) -> list[float]:
        """Seconds per call of `count` batches, those of the slowest rank; none when it failed."""
        _, collective, nbytes = case
        text = f"measure {candidate.does} {collective} {nbytes} {calls} {count} {buffers}"
        answers = self.order(candidate, text, collective)
        digests = [answer["digest"] for answer in answers]
        alike = OPERATIONS[collective].alike and candidate.kind != "limit"
        if alike and len(set(digests)) > 1:
            reason = f"{text}: ranks hold different results, digests {digests}"
            self.run.fail(self.layout.name, candidate.name, reason, wrong=True)
            return []
        if self.layout.ranks * len(self.by_name) * 2 * buffers * nbytes > KEPT_BYTES:
            self.order(candidate, "release")
        if answers and self.plan.span:
            return spans(answers, calls)
        return [max(batch) for batch in zip(*(a["seconds"] for a in answers), strict=True)]

    def finish(self) -> None:
        """Have the candidates give everything back."""
        self.probe()
        for name in list(self.by_name):
            with self._failing(name):
                self.by_name[name].order("end")

    def _note(self, answers: Sequence[dict[str, Any]]) -> None:
        known = self.run.machine.setdefault(self.layout.name, {})
        for key, value in (answers[0].get("facts", {}) if answers else {}).items():
            if known.setdefault(key, value) != value:  # another MPI
                known[key] = f"{known[key]}; {value}"

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except JobFailed as error:
            self._end(name, str(error))

    def _end(self, name: str, reason: str) -> None:
        self.by_name.pop(name, None)
        for candidate in self.plan.candidates:
            of_job = candidate.job == name and candidate.fits_layout(self.layout)
            if of_job and not self.run.has_ended(self.layout.name, candidate.name):
                self.run.fail(self.layout.name, candidate.name, reason)


class _Progress:
    """A bar on a terminal; elsewhere a line for each step."""

    def __init__(self, total: int) -> None:
        self.bar = tqdm(total=total, unit="turn", file=sys.stderr, leave=False, disable=None)

    def step(self, text: str) -> None:
        self.bar.set_description(text)
        if self.bar.disable:
            print(text, file=sys.stderr, flush=True)

    def update(self) -> None:
        self.bar.update()


def measure(plan: MeasurementPlan, run: Run) -> None:
    """Everything that is planned, into `run`; blocking."""
    cases = [(layout, case) for layout in plan.layouts for case in plan.cases(layout)]
    turns = sum(len(plan.contenders(layout, case)) for layout, case in cases) * plan.rounds
    progress = _Progress(turns)
    for layout in plan.layouts:
        progress.step(f"{layout}: starting jobs")
        try:
            with contextlib.ExitStack() as stack:
                testbed = stack.enter_context(open_testbed(layout))
                _measure_layout(plan, testbed, run, progress, stack)
        except LaunchError as error:
            run.fail(layout.name, layout.name, str(error))
    progress.bar.close()


def _measure_layout(
    plan: MeasurementPlan,
    testbed: Testbed,
    run: Run,
    progress: _Progress,
    stack: contextlib.ExitStack,
) -> None:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hsgd-bench-"))
    jobs = Jobs(plan, testbed.layout, run)
    jobs.start(testbed, Path(folder), stack)
    for case in plan.cases(testbed.layout):
        _measure_case(plan, jobs, case, progress)
    jobs.finish()


def _measure_case(plan: MeasurementPlan, jobs: Jobs, case: Case, progress: _Progress) -> None:
    _, collective, nbytes = case
    buffers = buffer_count(nbytes, jobs.layout.ranks)
    shape: dict[str, tuple[int, int, int]] = {}
    progress.step(f"{jobs.layout}: {collective} {report.size_label(nbytes)}")
    for turn in range(plan.rounds):
        alive = jobs.alive(case)
        for position in range(len(alive)):
            candidate = alive[(position + turn) % len(alive)]  # nobody is always the first
            key = (case, candidate.name)
            if candidate.name not in shape:
                times = _try_out(plan, jobs, case, candidate, buffers)
                if not times:
                    continue
                if LEAST_CALLS * min(times) > plan.limit_s:
                    jobs.run.samples[key] = times
                    took = f"a call of {report.size_label(nbytes)} took {min(times):.1f} s"
                    reason = f"{took}: measured once, no larger sizes"
                    jobs.run.fail(jobs.layout.name, candidate.name, reason, only=collective)
                    continue
                shape[candidate.name] = batches(median(times), plan, buffers, candidate)
            times = jobs.sample(candidate, case, *shape[candidate.name])
            jobs.run.samples.setdefault(key, []).extend(times)
            progress.update()


def spans(answers: Sequence[dict[str, Any]], calls: int) -> list[float]:
    """Seconds per call of each batch, from its first rank's begin to its last one's end. Where
    ranks outnumber cores, one that begins late finds all done, and its own time says nothing.
    """
    begins = list(zip(*(answer["begins"] for answer in answers), strict=True))
    lasted = list(zip(*(answer["seconds"] for answer in answers), strict=True))
    return [
        max(begin + calls * each for begin, each in zip(began, took, strict=True)) / calls
        - min(began) / calls
        for began, took in zip(begins, lasted, strict=True)
    ]


def _try_out(
    plan: MeasurementPlan, jobs: Jobs, case: Case, candidate: Candidate, buffers: int
) -> list[float]:
    """Seconds per call of a few batches, which tell how long others may be. Where ranks outnumber
    cores a call may take a second: one is tried first.
    """
    if jobs.layout.crowded:
        times = jobs.sample(candidate, case, 1, 1, 1)
        if not times or (TRIALS + 1) * buffers * min(times) > plan.budget_s:
            return times
    trial = (buffers, TRIALS) if case[2] <= TINY_BYTES else (1, 1)
    return jobs.sample(candidate, case, *trial, buffers)


def buffer_count(nbytes: int, ranks: int = 2) -> int:
    """Pairs of buffers that are used in turn; one where it is larger than caches anyway."""
    wanted = SMALL_BUFFERS if nbytes <= SMALL_BYTES else BUFFERS
    held = max(1, nbytes)
    return max(1, min(wanted, BUFFER_BYTES // held, JOB_BYTES // (2 * ranks * held)))


def batches(
    call_s: float, plan: MeasurementPlan, buffers: int, candidate: Candidate
) -> tuple[int, int, int]:
    """Calls per batch, batches per round and pairs of buffers, for calls that take `call_s`."""
    call_s = max(call_s, 1e-9)
    if candidate.cycle_s:  # a mean over its steps; where a call takes many of them, one will do
        calls = min(CYCLE_CALLS, math.ceil(2 * CYCLE_CALLS * candidate.cycle_s / call_s))
    else:
        calls = min(math.ceil(BATCH_S / call_s), MOST_CALLS)
    if plan.span:  # ranks leave the barrier one after the other: let that be a small part
        most = int(plan.budget_s / plan.rounds / LEAST_BATCHES / call_s)
        calls = max(calls, min(SPAN_CALLS, most))
    if candidate.in_place:  # filled again between batches
        calls = min(calls, buffers)
    turn_s = plan.budget_s / plan.rounds
    count = int(turn_s / (calls * call_s))
    # Each buffer is used once before the clock starts.
    used = max(1, min(buffers, int(turn_s / call_s))) if calls == 1 else buffers
    return calls, max(LEAST_BATCHES, min(MOST_BATCHES, count)), used
