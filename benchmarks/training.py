"""What communication costs a training step: plain Horovod, Horovod with the plugin hsgd-mpi,
hsgd.torch, and DistributedDataParallel over gloo, interleaved in one run.

The steps are in training_worker.py, what bytes alone cost in training_limit.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import report
from harness.candidates import Job
from harness.jobs import JobFailed, Tools, WorkerJob, environment
from harness.layouts import JobLayout, Testbed, on_one_node, open_testbed, rank_command, read_layout
from harness.steps import CASES, payload_bytes
from harness.stopping import Stopped, keeping
from hsgd.errors import LaunchError
from hsgd.jobs.launch import launch
from studies import recovery_study

__all__ = [
    "WAYS",
    "Effort",
    "Samples",
    "Way",
    "document",
    "measure",
    "noting_failures",
    "option_parser",
    "ordered",
    "ratios",
    "read_options",
    "tables",
    "visit",
    "worker_job",
]

BATCH = 5  # steps of a turn, of each kind, or fewer where steps are long
LEAST_TURNS = 3  # that steps are made fewer for
EPILOG = """\
--faults trains while ranks are killed, with options of its own (--tasks, --layouts, --minutes):
--faults --help.

A step makes gradients and waits until they are those of all ranks; that of "cnn" updates weights as
well. Its time begins with a barrier and is the largest over the ranks. Exposed communication is the
median of steps minus that of the same steps without communication, which alternate with them in the
same processes. Gradients are compared with the exact ones before anything is timed.

Horovod stands for the best of cycles of 0.1, 1 (its default) and 5 ms, and of its autotuner, which
may try settings for --tune seconds of each case before it is measured. hsgd.torch chooses in its
first steps whether gradients travel during backward or after it. Where models do not fit into
memory side by side, each is made again for its turn. The limit moves bytes and adds nothing
(training_limit.py).

Ratios, above 1 is shorter: vs_horovod/exposed/CASE/LAYOUT is the exposed time of the best plain
Horovod / that of hsgd.torch; vs_ddp and vs_plugin (hsgd-mpi, the interposer) likewise, vs_peer
is the least of Horovod and DDP, vs_limit/... the limit / hsgd.torch; .../step/... the same of whole
steps. Where a layout has one rank with T threads per node (2x1t2) and another T ranks (2x2),
processes_vs_threads/WAY/LAYOUT is the time of a step of "cnn" of one process with T threads / that
of T processes.

No turn begins after --seconds of a case; what there is goes into the files when a run is ended.

examples:
  python benchmarks/training.py --quick
  python benchmarks/training.py --nodes 2x2@1gbit 2x2@10gbit --json training.json
  python benchmarks/training.py --nodes 2x1t2@10gbit 2x2@10gbit --cases cnn   threads or processes?
"""


@dataclass(frozen=True)
class Way:
    """One way to communicate: a job of its own."""

    name: str
    label: str
    kind: str
    worker: str  # of training_worker.WAYS
    environment: dict[str, str]
    quick: bool = True
    tunes: bool = False  # it tunes itself while it trains: a new job for each case, and time to

    def job(self) -> Job:
        return Job(
            self.name,
            pauses=True,
            environment=self.environment,
            crowded={"OMPI_MCA_mpi_yield_when_idle": "1"},
            interface_variable="GLOO_SOCKET_IFNAME" if self.worker == "ddp" else None,
        )


SLOW = {"HOROVOD_CYCLE_TIME": "5"}  # more tensors travel together
TUNER = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "10",
}
WAYS = (
    Way("hsgd", "hsgd.torch", "hsgd", "hsgd", {}),
    Way("hsgd-early", "hsgd.torch, during backward", "hsgd", "hsgd-early", {}, False),
    Way("hsgd-late", "hsgd.torch, after backward", "hsgd", "hsgd-late", {}, False),
    Way("plugin", "Horovod + hsgd-mpi", "hsgd", "horovod", {"HOROVOD_PLUGIN": "hsgd-mpi"}),
    Way("horovod", "Horovod", "peer", "horovod", {}),
    Way("horovod-fast", "Horovod, cycle 0.1 ms", "peer", "horovod", {"HOROVOD_CYCLE_TIME": "0.1"}),
    Way("horovod-slow", "Horovod, cycle 5 ms", "peer", "horovod", SLOW, False),
    Way("horovod-tuned", "Horovod, autotuner", "peer", "horovod", TUNER, False, True),
    Way("ddp", "DDP over gloo", "peer", "ddp", {}),
    Way("limit", "bytes alone", "limit", "limit", {}),
)
HOROVODS = ("horovod", "horovod-fast", "horovod-slow", "horovod-tuned")
RIVALS = {
    "peer": (*HOROVODS, "ddp"),
    "horovod": HOROVODS,
    "ddp": ("ddp",),
    "plugin": ("plugin",),
    "limit": ("limit",),
}


@dataclass(frozen=True)
class Effort:
    """How long one case is measured on one layout, set-up aside."""

    turns: int  # at most
    seconds: float = 1e9  # no further turn begins after that
    tune_s: float = 20.0  # for a way that tunes itself, at most


@dataclass
class Samples:
    """Seconds of one way in one case, the largest over the ranks."""

    plain: list[float]
    step: list[float]
    tuning: dict[str, int] = field(default_factory=dict)  # steps, and settings that were tried


def measure(
    testbed: Testbed,
    ways: Sequence[Way],
    cases: Sequence[str],
    effort: Effort,
    failures: list[str],
    found: dict[tuple[str, str], Samples],
) -> None:
    """All cases of a layout, by case and way, into `found` as they come. Ways that fail are left
    out, and named in `failures`.
    """
    tuned = [way for way in ways if way.tunes]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        usual = [way for way in ways if not way.tunes]
        alive = _started(usual, testbed, Path(folder), stack, failures)
        for case in cases:
            with contextlib.ExitStack() as own:
                new = _started(tuned, testbed, Path(folder) / case, own, failures)
                _take_turns(testbed, alive | new, new, case, effort, failures, found)
                for name, job in new.items():
                    ordered(job, name, "end", failures)
        for name, job in alive.items():
            ordered(job, name, "end", failures)


def _started(
    ways: Sequence[Way],
    testbed: Testbed,
    folder: Path,
    stack: contextlib.ExitStack,
    failures: list[str],
) -> dict[str, WorkerJob]:
    """The jobs by name, one after the other: their ranks share the cores."""
    alive = {}
    for way in ways:
        job = worker_job(way, testbed, folder, stack)
        with noting_failures(way, failures):
            job.connect()
            alive[way.name] = job
    return alive


def _take_turns(
    testbed: Testbed,
    jobs: Mapping[str, WorkerJob],
    tuned: Container[str],
    case: str,
    effort: Effort,
    failures: list[str],
    found: dict[tuple[str, str], Samples],
) -> None:
    """One case; those of `tuned` may tune themselves before their first turn."""
    together = _fit(case, len(jobs) * testbed.layout.ranks)
    counts: dict[str, int] = {}
    ready = dict(jobs)
    spent_s = 0.0
    for turn in range(effort.turns):
        for name, job in list(ready.items()):
            if turn == 0 or not together:
                answers = ordered(job, name, f"setup {case}", failures)
                tuning = {}
                if answers and turn == 0 and name in tuned:
                    told_of = ordered(job, name, f"tune {effort.tune_s}", failures)
                    answers, tuning = (answers, told_of[0]) if told_of else (None, {})
                if answers is None:
                    del ready[name]
                    continue
                if turn == 0:
                    found[case, name] = Samples([], [], tuning=tuning)
                    both_s = max(answer["both_s"] for answer in answers)
                    fitting = effort.seconds / LEAST_TURNS / len(jobs) / max(both_s, 1e-9)
                    counts[name] = max(1, min(BATCH, int(fitting)))
            begin_s = time.monotonic()
            answers = ordered(job, name, f"measure {counts[name]}", failures)
            spent_s += time.monotonic() - begin_s
            if answers:
                _add(found[case, name], answers)
            if not together:
                ordered(job, name, "release", failures)
        if spent_s >= effort.seconds:
            break
    for name, job in ready.items() if together else ():
        ordered(job, name, "release", failures)


def _fit(case: str, ranks: int) -> bool:
    """Whether the models of all ranks may wait for their turns: weights, gradients and momentum
    of each, and what it communicates with, in half of the memory.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * payload_bytes(case) * ranks <= memory // 2


def worker_job(way: Way, testbed: Testbed, folder: Path, stack: contextlib.ExitStack) -> WorkerJob:
    """The ranks of one way, started in a folder of their own; ended with the stack."""
    launcher = launch.find_launcher(_environ(testbed))
    words = tuple(rank_command("training_worker", way.worker))
    own = folder / way.name
    own.mkdir(parents=True)
    tools = Tools(launcher, words, Path(sys.executable).parent)
    return stack.enter_context(WorkerJob(way.job(), testbed, own, tools))


def _environ(testbed: Testbed) -> dict[str, str]:
    environ = environment(testbed.layout)
    return {**environ, "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}


def visit(
    layouts: Sequence[JobLayout], failures: list[str], work: Callable[[Testbed], None]
) -> Stopped:
    """Do `work` on each layout. One that cannot be made becomes a line of `failures`; what had been
    found when somebody ends the run is kept.
    """
    with keeping() as stopped:
        for layout in layouts:
            try:
                with open_testbed(layout) as testbed:
                    work(testbed)
            except LaunchError as error:
                failures.append(f"{layout.name}: {error}")
                print(f"left out: {failures[-1]}", file=sys.stderr)
    return stopped


@contextlib.contextmanager
def noting_failures(way: Way, failures: list[str]) -> Any:
    """A context whose JobFailed becomes a line of `failures`."""
    try:
        yield
    except JobFailed as error:
        failures.append(f"{way.name}: {error}")
        print(f"left out: {failures[-1]}", file=sys.stderr)


def ordered(
    job: WorkerJob, way: str, order: str, failures: list[str]
) -> list[dict[str, Any]] | None:
    """The answers of all ranks; None, and a line of `failures`, where one had an error."""
    try:
        answers = job.order(order)
        wrong = next((answer["error"] for answer in answers if "error" in answer), None)
    except JobFailed as error:
        answers, wrong = [], str(error)
    if wrong is None:
        return answers
    failures.append(f"{way}, {order}: {wrong}")
    print(f"left out: {failures[-1]}", file=sys.stderr)
    return None


def _add(samples: Samples, answers: Sequence[Mapping[str, Any]]) -> None:
    samples.plain += [max(values) for values in zip(*(a["plain"] for a in answers), strict=True)]
    samples.step += [max(values) for values in zip(*(a["step"] for a in answers), strict=True)]


def rows(layout: JobLayout, found: Mapping[tuple[str, str], Samples]) -> list[dict[str, Any]]:
    """Rows of results: times of steps, and what communication adds to them, in microseconds."""
    by_name = {way.name: way for way in WAYS}
    rows = []
    for (case, name), samples in found.items():
        if not samples.step:
            continue
        plain = statistics.median(samples.plain) * 1e6
        step = statistics.median(samples.step) * 1e6
        rows.append(
            {
                "layout": layout.name,
                "case": case,
                "candidate": name,
                "label": by_name[name].label,
                "kind": by_name[name].kind,
                "ranks": layout.ranks,
                "bytes": payload_bytes(case),
                "samples": len(samples.step),
                **report.statistics(samples.step),
                "plain_us": float(f"{plain:.6g}"),
                "exposed_us": float(f"{step - plain:.6g}"),
                **({"tuning": samples.tuning} if samples.tuning else {}),
            }
        )
    return rows


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: a rival's time over that of hsgd.torch."""
    found: dict[str, float] = {}
    for (case, layout), rows in report.grouped(results, "case", "layout").items():
        here = {row["candidate"]: row for row in rows}
        if "hsgd" not in here:
            continue
        for rival, names in RIVALS.items():
            for what, key in (("exposed", "exposed_us"), ("step", "median_us")):
                times = [here[name][key] for name in names if name in here]
                ours = here["hsgd"][key]
                # Below a hundredth of the step, exposed time is noise.
                floor = here["hsgd"]["median_us"] / 100 if what == "exposed" else 0.0
                if times:
                    share = max(min(times), floor) / max(ours, floor)
                    found[f"vs_{rival}/{what}/{case}/{layout}"] = float(f"{share:.4g}")
    return found | _processes_and_threads(results)


def _processes_and_threads(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Layouts of one rank with T threads per node against those of T ranks."""
    times = {(r["layout"], r["candidate"]): r["median_us"] for r in results if r["case"] == "cnn"}
    found = {}
    for (layout, way), single in times.items():
        shape, at, rate = layout.partition("@")
        nodes, one, threads = shape.partition("x1t")
        other = f"{nodes}x{threads}{at}{rate}"
        if one and (other, way) in times:
            share = float(f"{single / times[other, way]:.4g}")
            found[f"processes_vs_threads/{way}/{other}"] = share
    return found


def document(
    results: list[dict[str, Any]],
    layouts: Sequence[JobLayout],
    effort: Effort,
    failures: list[str],
    stopped: int,
) -> dict[str, Any]:
    """Everything that is known after a run, as it goes into the JSON."""
    settings = {
        "layouts": {layout.name: str(layout) for layout in layouts},
        "cases": CASES,
        "candidates": {way.name: {"label": way.label, **way.environment} for way in WAYS},
        "turns": effort.turns,
        "seconds": effort.seconds,
        "steps_of_a_turn": BATCH,
        "omp_num_threads": {n.name: environment(n)["OMP_NUM_THREADS"] for n in layouts},
    }
    return report.document("training", settings, ratios(results), results, failures, stopped)


def tables(doc: Mapping[str, Any]) -> str:
    """The document as text for a terminal."""
    return report.case_tables(
        doc,
        doc["meta"]["settings"]["cases"],
        {
            "step ms": lambda row: f"{row['median_us'] / 1e3:.2f}",
            "p99": lambda row: f"{row['p99_us'] / 1e3:.2f}",
            "alone": lambda row: f"{row['plain_us'] / 1e3:.2f}",
            "exposed": lambda row: f"{row['exposed_us'] / 1e3:.2f}",
        },
    )


def plot(doc: Mapping[str, Any], target: Path) -> None:
    """Bars of exposed time, a panel for each case and layout."""
    heights = {"exposed communication, ms per step": lambda row: row["exposed_us"] / 1e3}
    report.plot_bars(doc["results"], target, heights)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured, or something wrong."""
    options, layouts = read_options(_parser(), argv)
    cases = options.cases or (["resnet50", "small1000"] if options.quick else list(CASES))
    wanted = options.candidates or [way.name for way in WAYS if way.quick or not options.quick]
    ways = [way for way in WAYS if way.name in wanted]
    turns, seconds = (3, 5.0) if options.quick else (20, 20.0)
    effort = Effort(options.turns or turns, options.seconds or seconds, options.tune)
    found: dict[str, dict[tuple[str, str], Samples]] = {layout.name: {} for layout in layouts}
    failures: list[str] = []

    def work(testbed: Testbed) -> None:
        measure(testbed, ways, cases, effort, failures, found[testbed.layout.name])

    stopped = visit(layouts, failures, work)
    results = [row for layout in layouts for row in rows(layout, found[layout.name])]
    doc = document(results, layouts, effort, failures, stopped.code)
    report.publish(options, doc, tables(doc), plot)
    wrong = any("wrong result" in failure for failure in failures)
    return stopped.code or int(wrong or not results)


def option_parser(about: str, notes: str, *, quick: str, png: str) -> argparse.ArgumentParser:
    """A command line with the layouts and the effort of trainings."""
    parser = report.argument_parser(about, notes, quick, png)
    add = parser.add_argument
    add("--np", nargs="+", type=int, metavar="N", help="ranks on one node (default 2)")
    add("--nodes", nargs="+", metavar="LAYOUT", help="virtual nodes, like 2x2@10gbit")
    add("--turns", type=int, metavar="N", help=f"at most, of {BATCH} steps each (default 20)")
    add("--seconds", type=float, metavar="S", help="of turns for each case (default 20)")
    return parser


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[JobLayout]]:
    """The options, and the layouts that they name."""
    options = report.parse(parser, argv, np=on_one_node, nodes=read_layout)
    return options, options.np + options.nodes or [on_one_node(2)]


def _parser() -> argparse.ArgumentParser:
    parser = option_parser(
        *(__doc__.splitlines()[0], EPILOG),
        quick="two cases and few steps: under a minute",
        png="plot exposed communication there",
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=list(CASES), help="these alone")
    add("--candidates", nargs="+", choices=[way.name for way in WAYS], help="these alone")
    add("--tune", type=float, default=20.0, metavar="S", help="for the autotuner (default 20)")
    return parser


if __name__ == "__main__":
    sys.exit(recovery_study.main() if "--faults" in sys.argv else main())
