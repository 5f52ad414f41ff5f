"""What communication costs a training step: plain Horovod, Horovod with the plugin, hsgd.torch, and
DistributedDataParallel over gloo, interleaved in one run.

Owns the candidates, the arithmetic and the files. The steps are in training_worker.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from candidates import Job
from hsgd import launch
from hsgd.errors import LaunchError
from jobs import HERE, JobFailed, Tools, WorkerJob, environment
from layouts import Layout, Place, on_one_node, open_place, read_layout
from steps import CASES, payload_bytes
from stopping import Stopped, keeping

__all__ = [
    "WAYS",
    "Samples",
    "Way",
    "document",
    "measure",
    "ordered",
    "ratios",
    "tables",
    "told",
    "visit",
    "worker_job",
]

BATCH = 5  # steps of a turn, of each kind
EPILOG = """\
A step makes gradients and waits until they are those of all ranks; that of "cnn" updates weights as
well. Its time begins with a barrier and is the largest over the ranks. Exposed communication is the
median of steps minus that of the same steps without communication, which alternate with them in the
same processes. Gradients are compared with the exact ones before anything is timed. Work is the
processor time that communication adds, over all ranks, from the least of both kinds of steps: it
says something on machines that others use as well.

Horovod stands for the best of its default cycle, of a cycle of 0.1 ms, and of its autotuner.

Ratios, above 1 is shorter: vs_horovod/exposed/CASE/LAYOUT is the exposed time of the best plain
Horovod / that of hsgd.torch; vs_ddp and vs_plugin likewise, vs_peer is the least of Horovod and
DDP; .../step/... the same of whole steps. Where a layout has one rank per node and another as many
threads as ranks, processes_vs_threads/WAY/LAYOUT is the time of one process with T threads / that
of T processes.

examples:
  python benchmarks/training.py --quick
  python benchmarks/training.py --nodes 2x2@1gbit 2x2@10gbit --json training.json
  python benchmarks/training.py --nodes 2x1@10gbit 2x2@10gbit --cases cnn   one process per node?
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

    def job(self) -> Job:
        crowded = {"OMPI_MCA_mpi_yield_when_idle": "1"}
        interface = "GLOO_SOCKET_IFNAME" if self.worker == "ddp" else None
        return Job(
            self.name,
            pauses=True,
            environment=self.environment,
            crowded=crowded,
            interface_variable=interface,
        )


WAYS = (
    Way("hsgd", "hsgd.torch", "hsgd", "hsgd", {}),
    Way("hsgd-late", "hsgd.torch, after backward", "hsgd", "hsgd-late", {}, False),
    Way("plugin", "Horovod + plugin", "hsgd", "horovod", {"HOROVOD_PLUGIN": "hsgd"}),
    Way("horovod", "Horovod", "peer", "horovod", {}),
    Way("horovod-fast", "Horovod, cycle 0.1 ms", "peer", "horovod", {"HOROVOD_CYCLE_TIME": "0.1"}),
    Way("horovod-tuned", "Horovod, autotuner", "peer", "horovod", {"HOROVOD_AUTOTUNE": "1"}, False),
    Way("ddp", "DDP over gloo", "peer", "ddp", {}),
)
HOROVODS = ("horovod", "horovod-fast", "horovod-tuned")
RIVALS = {
    "peer": (*HOROVODS, "ddp"),
    "horovod": HOROVODS,
    "ddp": ("ddp",),
    "plugin": ("plugin",),
}


@dataclass
class Samples:
    """Seconds of one way in one case, the largest over the ranks, and processor time of all."""

    plain: list[float]
    step: list[float]
    plain_work: list[float] = field(default_factory=list)
    step_work: list[float] = field(default_factory=list)


def measure(
    place: Place,
    ways: Sequence[Way],
    cases: Sequence[str],
    turns: int,
    failures: list[str],
    found: dict[tuple[str, str], Samples],
) -> None:
    """All cases of a layout, by case and way, into `found` as they come. Ways that fail are left
    out, and named in `failures`.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        alive: dict[str, WorkerJob] = {}
        for way in ways:  # one after the other: their ranks share the cores
            job = worker_job(way, place, Path(folder), stack)
            with told(way, failures):
                job.connect()
                alive[way.name] = job
        for case in cases:
            together = _fit(case, len(alive) * place.layout.ranks)
            ready = dict(alive)
            for turn in range(turns):
                for name, job in list(ready.items()):
                    new = turn == 0 or not together
                    if new and ordered(job, name, f"setup {case}", failures) is None:
                        del ready[name]
                        continue
                    answers = ordered(job, name, f"measure {BATCH}", failures)
                    if answers:
                        _add(found.setdefault((case, name), Samples([], [])), answers)
                    if not together:
                        ordered(job, name, "release", failures)
            for name, job in ready.items() if together else ():
                ordered(job, name, "release", failures)
        for name, job in alive.items():
            ordered(job, name, "end", failures)


def _fit(case: str, ranks: int) -> bool:
    """Whether the models of all ranks may wait for their turns: weights, gradients and momentum
    of each, and what it communicates with, in half of the memory.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * payload_bytes(case) * ranks <= memory // 2


def worker_job(way: Way, place: Place, folder: Path, stack: contextlib.ExitStack) -> WorkerJob:
    """The ranks of one way, started in a folder of their own; ended with the stack."""
    launcher = launch.find_launcher(_environ(place))
    words = (sys.executable, str(HERE / "training_worker.py"), way.worker)
    own = folder / way.name
    own.mkdir()
    tools = Tools(launcher, words, Path(sys.executable).parent)
    return stack.enter_context(WorkerJob(way.job(), place, own, tools))


def _environ(place: Place) -> dict[str, str]:
    environ = environment(place.layout)
    return {**environ, "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}


def visit(layouts: Sequence[Layout], failures: list[str], work: Callable[[Place], None]) -> Stopped:
    """Do `work` on each layout. One that cannot be made becomes a line of `failures`; what had been
    found when somebody ends the run is kept.
    """
    with keeping() as stopped:
        for layout in layouts:
            try:
                with open_place(layout) as place:
                    work(place)
            except LaunchError as error:
                failures.append(f"{layout.name}: {error}")
                print(f"left out: {failures[-1]}", file=sys.stderr)
    return stopped


@contextlib.contextmanager
def told(way: Way, failures: list[str]) -> Any:
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
    for kind, kept in enumerate((samples.plain_work, samples.step_work)):
        kept += [sum(values) for values in zip(*(a["worked"][kind] for a in answers), strict=True)]


def rows(layout: Layout, found: Mapping[tuple[str, str], Samples]) -> list[dict[str, Any]]:
    """Rows of results: times of steps, and what communication adds to them, in microseconds."""
    by_name = {way.name: way for way in WAYS}
    made = []
    for (case, name), samples in found.items():
        plain = statistics.median(samples.plain) * 1e6
        step = statistics.median(samples.step) * 1e6
        work = min(samples.step_work) - min(samples.plain_work)
        made.append(
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
                "work_us": float(f"{work * 1e6:.6g}"),
            }
        )
    return made


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: a rival's time over that of hsgd.torch."""
    found: dict[str, float] = {}
    cases = dict.fromkeys((row["case"], row["layout"]) for row in results)
    for case, layout in cases:
        here = {r["candidate"]: r for r in results if (r["case"], r["layout"]) == (case, layout)}
        if "hsgd" not in here:
            continue
        for rival, names in RIVALS.items():
            for what, key in (("exposed", "exposed_us"), ("step", "median_us")):
                times = [here[name][key] for name in names if name in here]
                ours = here["hsgd"][key]
                # Below a hundredth of the step, exposed time is noise.
                floor = here["hsgd"]["median_us"] / 100 if what == "exposed" else 0.0
                if times:
                    found[f"vs_{rival}/{what}/{case}/{layout}"] = float(
                        f"{max(min(times), floor) / max(ours, floor):.4g}"
                    )
    return found | _processes_and_threads(results)


def _processes_and_threads(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    times = {(r["layout"], r["candidate"]): r["median_us"] for r in results if r["case"] == "cnn"}
    found = {}
    for (layout, way), single in times.items():
        nodes, _, rest = layout.partition("x1")
        if not rest.startswith("@") and layout != f"{nodes}x1":
            continue
        for (other, same), several in times.items():
            shape, _, rate = other.partition("@")
            alike = shape.startswith(f"{nodes}x") and rate == rest.removeprefix("@")
            if alike and same == way and other != layout:
                found[f"processes_vs_threads/{way}/{other}"] = float(f"{single / several:.4g}")
    return found


def document(
    results: list[dict[str, Any]], layouts: Sequence[Layout], turns: int, failures: list[str]
) -> dict[str, Any]:
    """Everything that is known after a run, as it goes into the JSON."""
    settings = {
        "layouts": {layout.name: str(layout) for layout in layouts},
        "cases": CASES,
        "candidates": {way.name: {"label": way.label, **way.environment} for way in WAYS},
        "turns": turns,
        "steps_of_a_turn": BATCH,
        "omp_num_threads": {n.name: environment(n)["OMP_NUM_THREADS"] for n in layouts},
    }
    meta = {**report.facts("training"), "settings": settings}
    return {"meta": meta, "ratios": ratios(results), "failures": failures, "results": results}


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
            "work": lambda row: f"{row['work_us'] / 1e3:.2f}",
        },
    )


def plot(doc: Mapping[str, Any], target: Path) -> None:
    """Bars of exposed time, a panel for each case and layout."""
    heights = {"exposed communication, ms per step": lambda row: row["exposed_us"] / 1e3}
    report.plot_bars(doc["results"], target, heights)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured, or something wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        layouts = [*map(on_one_node, options.np or ()), *map(read_layout, options.nodes or ())]
    except ValueError as error:
        parser.error(str(error))
    report.check_targets(parser, options.json, options.png)
    layouts = layouts or [on_one_node(2)]
    cases = options.cases or (["resnet50", "small1000"] if options.quick else list(CASES))
    wanted = options.candidates or [way.name for way in WAYS if way.quick or not options.quick]
    ways = [way for way in WAYS if way.name in wanted]
    turns = options.turns or (3 if options.quick else 10)
    found: dict[str, dict[tuple[str, str], Samples]] = {layout.name: {} for layout in layouts}
    failures: list[str] = []

    def work(place: Place) -> None:
        measure(place, ways, cases, turns, failures, found[place.layout.name])

    stopped = visit(layouts, failures, work)
    results = [row for layout in layouts for row in rows(layout, found[layout.name])]
    doc = json.loads(json.dumps(document(results, layouts, turns, failures)))
    doc["meta"]["interrupted"] = bool(stopped.code)
    print(tables(doc))
    if options.json:
        report.write_json(options.json, doc)
    if options.png and results:
        plot(doc, options.png)
    wrong = any("wrong result" in failure for failure in failures)
    return stopped.code or int(wrong or not results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two cases and few steps: under a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--png", type=Path, metavar="FILE", help="plot exposed communication there")
    add("--np", nargs="+", type=int, metavar="N", help="ranks on one node (default 2)")
    add("--nodes", nargs="+", metavar="LAYOUT", help="virtual nodes, like 2x2@1gbit")
    add("--cases", nargs="+", choices=list(CASES), help="these alone")
    add("--candidates", nargs="+", choices=[way.name for way in WAYS], help="these alone")
    add("--turns", type=int, metavar="N", help=f"of {BATCH} steps each, for each candidate")
    return parser


if __name__ == "__main__":
    sys.exit(main())
