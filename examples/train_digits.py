"""Train a small network on 8x8 images of handwritten digits: an ordinary Horovod script.

The same file runs on plain Horovod, with the plugins of hsgd, and on hsgd's own front door:

    hsgd data convert digits demo/digits                 # first: the images, from scikit-learn
    mpirun -n 2 python examples/train_digits.py          # plain Horovod, as with horovodrun
    horovodrun --plugin hsgd -np 2 python examples/train_digits.py       # as hsgd.torch
    horovodrun --plugin hsgd-mpi -np 2 python examples/train_digits.py   # MPI calls through hsgd
    mpirun -n 2 python examples/train_digits.py --api hsgd
    python examples/train_digits.py                      # one rank, no launcher

(Horovod 0.28.1's own horovodrun cannot start Open MPI 5; with --plugin it can.)

The global batch is fixed and split over the ranks, so the learning rate does not depend on their
number. With the default batch of 96 it is 1.0; for another batch scale it in proportion. The same
seed and number of ranks give the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hsgd.io import PartitionedLoader
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from hsgd.errors import DataError
from hsgd.metrics import Counters, interposer_counters
from hsgd.optim import LARS

# Your own script has one line here: `import horovod.torch as hvd`, or `import hsgd.torch as hvd`.
api = argparse.ArgumentParser(add_help=False)
api.add_argument("--api", choices=("horovod", "hsgd"), default="horovod", help="whose hvd it is")
if api.parse_known_args()[0].api == "hsgd":
    import hsgd.torch as hvd
else:
    import horovod.torch as hvd

# hsgd.torch has counters; Horovod communicates through the interposer if that is there.
read_counters = getattr(hvd, "metrics", interposer_counters)
COLUMNS = (  # title, key in the JSON, factor, format
    ("epoch", "epoch", 1, "d"),
    ("loss", "loss", 1, ".4f"),
    ("train %", "train_accuracy", 100, ".2f"),
    ("test %", "test_accuracy", 100, ".2f"),
    ("images/s", "images_per_s", 1, ".0f"),
    ("MB in nodes", "intra_bytes", 1e-6, ".2f"),
    ("MB between", "inter_bytes", 1e-6, ".2f"),
    ("comm. %", "communication_share", 100, ".1f"),
)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        parents=[api],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("demo/digits"), help="folder with train and test in it")
    add("--epochs", type=int, default=20, help="passes over the training images")
    add("--global-batch", type=int, default=96, help="images per step, all ranks together")
    add("--lr", type=float, default=1.0, help="peak learning rate, for the global batch")
    add("--seed", type=int, default=0, help="of the weights and of the order of the images")
    add("--threads", type=int, default=1, help="torch threads per rank")
    add("--output", type=Path, default=Path("demo"), help="folder for training.json and .png")
    add("--target-accuracy", type=float, metavar="PERCENT", help="exit code 1 below it")
    add("--dump-weights", metavar="FILE", help="each rank saves its weights as FILE.RANK")
    return parser.parse_args()


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def build_optimizer(model: nn.Module, lr: float) -> LARS:
    return LARS(model.parameters(), lr, weight_decay=1e-4, trust_coefficient=0.02)


def rate_factor(step: int, steps: int) -> float:
    """Learning rate over its peak: linear warm-up for a tenth of the steps, then half a cosine."""
    return min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train_epoch(
    model: nn.Module, loader: PartitionedLoader, optimizer: Any, scheduler: Any, bar: Any
) -> tuple[float, int, int]:
    """One pass over this rank's part: sum of losses, correct images, images."""
    model.train()
    loss_sum, correct, images = 0.0, 0, 0
    for batch in loader:
        output = model(batch["image"])
        loss = functional.cross_entropy(output, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss_sum += loss.item() * len(output)
        correct += int((output.argmax(1) == batch["label"]).sum())
        images += len(output)
        bar.update()
    return loss_sum, correct, images


@torch.no_grad()
def evaluate(model: nn.Module, loader: PartitionedLoader) -> tuple[int, int]:
    """One pass over this rank's part of the test images: correct images, images."""
    model.eval()
    correct, images = 0, 0
    for batch in loader:
        correct += int((model(batch["image"]).argmax(1) == batch["label"]).sum())
        images += len(batch["label"])
    return correct, images


def summarize(
    epoch: int,
    train: tuple[float, int, int],
    test: tuple[int, int],
    seconds: float,
    moved: Counters | None,
) -> dict[str, float | None]:
    """The numbers of all ranks for one epoch. Collective.

    communication_share: seconds that the thread which communicates (Horovod's, or hsgd's, in the
    background) spent inside two-level collectives, waiting for slower ranks included, over the wall
    time of the training loop; mean over ranks. It overlaps with the computation of the main thread,
    so it is not time lost; Horovod's own negotiation and copies are not in it.
    """
    own = moved or Counters.none()
    values = [*train, *test, seconds, moved is not None]
    values += [own.calls, own.intra_bytes, own.inter_bytes_sent, own.total_s]
    total = hvd.allreduce(torch.tensor(values, dtype=torch.float64), name="epoch", op=hvd.Sum)
    loss, right, images, test_right, test_images, wall_s, counted, *counts = total.tolist()
    calls, intra_bytes, inter_bytes, inside_s = counts if counted else [None] * 4
    return {
        "epoch": epoch,
        "loss": loss / images,
        "train_accuracy": right / images,
        "test_accuracy": test_right / test_images,
        "images_per_s": images / (wall_s / hvd.size()),
        "two_level_calls": calls,
        "intra_bytes": intra_bytes,
        "inter_bytes": inter_bytes,
        "communication_share": inside_s / wall_s if counted else None,
    }


def open_data(options: argparse.Namespace) -> tuple[PartitionedLoader, PartitionedLoader]:
    """This rank's part of the training and the test images."""
    if importlib.util.find_spec("matplotlib") is None:  # found out now, not after training
        raise ValueError("the plot needs matplotlib; pip install matplotlib")
    if options.epochs < 1:
        raise ValueError(f"--epochs is {options.epochs}; use at least 1")
    if options.global_batch % hvd.size():
        raise ValueError(
            f"--global-batch {options.global_batch} does not split over {hvd.size()} ranks; "
            f"use a multiple of {hvd.size()}"
        )
    part: dict[str, int] = {"rank": hvd.rank(), "world_size": hvd.size(), "seed": options.seed}
    batch = options.global_batch // hvd.size()
    return (
        PartitionedLoader(options.data / "train", batch, shuffle="block", drop_last=True, **part),
        PartitionedLoader(options.data / "test", 256, shuffle="none", pad=False, **part),
    )


def train(
    options: argparse.Namespace, loader: PartitionedLoader, tests: PartitionedLoader
) -> list[dict[str, float | None]]:
    """Train and test for all epochs. Collective; one summary per epoch, equal on all ranks."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    steps = options.epochs * len(loader)

    model = build_model()
    optimizer = build_optimizer(model, options.lr)
    # One group: gradients always travel together, so that MPI adds them in the same order each run.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), groups=1
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))

    epochs = []
    # A bar on a terminal; under a launcher, whose log would keep every state of it, one line.
    with tqdm(total=steps, unit="step", disable=None if hvd.rank() == 0 else True) as bar:
        if bar.disable and hvd.rank() == 0:
            what = f"training: {options.epochs} epochs, {steps} steps, {hvd.size()} rank(s)"
            print(what, file=sys.stderr)
        for epoch in range(1, options.epochs + 1):
            loader.set_epoch(epoch)
            before, start = read_counters(), time.perf_counter()
            trained = train_epoch(model, loader, optimizer, scheduler, bar)
            seconds, after = time.perf_counter() - start, read_counters()
            moved = after - before if before and after else None
            epochs.append(summarize(epoch, trained, evaluate(model, tests), seconds, moved))
            text = "loss {loss:.4f}, test accuracy {test_accuracy:.4f}".format(**epochs[-1])
            bar.set_postfix_str(text, refresh=False)
    if options.dump_weights:
        torch.save(model.state_dict(), f"{options.dump_weights}.{hvd.rank()}")
    return epochs


def format_table(epochs: list[dict[str, Any]]) -> str:
    rows = [[title for title, _, _, _ in COLUMNS]]
    for epoch in epochs:
        values = [(epoch[key], factor, form) for _, key, factor, form in COLUMNS]
        rows.append(
            [
                "-" if value is None else format(value * factor, form)
                for value, factor, form in values
            ]
        )
    return "\n".join("".join(f"{cell:>13}" for cell in row) for row in rows)


def plot(source: Path, target: Path) -> None:
    """Draw the run that is in the JSON file `source`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    run = json.loads(source.read_text())
    column = {key: [epoch[key] for epoch in run["epochs"]] for key in run["epochs"][0]}
    counted = None not in column["intra_bytes"]
    figure, axes = pyplot.subplots(1, 4 if counted else 2, figsize=(14, 3.6), layout="constrained")
    axes[0].plot(column["epoch"], column["loss"])
    axes[0].set(title="training loss", yscale="log")
    for key in ("train_accuracy", "test_accuracy"):
        percent = [100 * value for value in column[key]]
        axes[1].plot(column["epoch"], percent, label=key.replace("_", " "))
    axes[1].set(title="accuracy (%)")
    axes[1].legend()
    if counted:
        for key, label in (("intra_bytes", "inside nodes"), ("inter_bytes", "between nodes")):
            axes[2].plot(column["epoch"], [value / 1e6 for value in column[key]], label=label)
        axes[2].set(title="MB moved per epoch")
        axes[2].legend()
        share = [100 * value for value in column["communication_share"]]
        axes[3].plot(column["epoch"], share)
        axes[3].set(title="time in communication (%)", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"digits, {run['ranks']} rank(s) on {run['nodes']} node(s), {run['api']}")
    figure.savefig(target, dpi=120)


def report(options: argparse.Namespace, epochs: list[dict[str, float | None]]) -> None:
    """Print the table; write training.json and, from it, training.png."""
    print(format_table(epochs))
    run = {
        "api": options.api,
        "ranks": hvd.size(),
        "nodes": hvd.cross_size(),
        "global_batch": options.global_batch,
        "lr": options.lr,
        "seed": options.seed,
        "epochs": epochs,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "training.json"
    results.write_text(json.dumps(run, indent=1) + "\n")
    plot(results, results.with_suffix(".png"))
    print(f"wrote {results} and {results.with_suffix('.png')}")


def main() -> int:
    options = parse_options()
    hvd.init()
    leader = hvd.rank() == 0
    loaders, mistake = None, None
    try:
        loaders = open_data(options)
    except (DataError, ValueError) as error:
        mistake = str(error)
    mistakes = [text for text in hvd.allgather_object(mistake) if text]
    if loaders is None or mistakes:
        return fail(mistakes[0]) if leader else 0
    epochs = train(options, *loaders)
    if not leader:
        return 0
    report(options, epochs)
    reached = 100 * (epochs[-1]["test_accuracy"] or 0.0)
    if options.target_accuracy is not None and reached < options.target_accuracy:
        return fail(
            f"test accuracy {reached:.2f} % is below the target of {options.target_accuracy:g} %; "
            "train longer, or look at the curves"
        )
    return 0


def fail(reason: str) -> int:
    """One line from one rank: the others end with 0, lest the launcher kill this one too early."""
    print(f"train_digits: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
