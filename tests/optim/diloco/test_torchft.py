"""The same training with torchft's DiLoCo, of its wheel: workers are threads of one process."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hsgd.optim import DiLoCo
from ranks import Ranks, Seat, meeting_point

__all__: list[str] = []

pytestmark = pytest.mark.long

PACKAGES = ("torchft-nightly",)
ITS_NEEDS = ("opentelemetry-exporter-otlp-proto-http>=1.39", "opentelemetry-sdk>=1.39")
WIDTHS = (6, 8, 4)
RATE = 0.05


@pytest.fixture(scope="module")
def torchft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with torchft, without another torch."""
    folder = str(tmp_path_factory.mktemp("torchft"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for words in (["--no-deps", *PACKAGES], ITS_NEEDS):
        subprocess.run([*pip, "--target", folder, *words], check=True, timeout=300)
    return folder


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]


def backward(parts: list[nn.Linear], worker: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(5, WIDTHS[0], generator=generator)
    y = torch.randn(5, WIDTHS[-1], generator=generator)
    (parts[1](torch.tanh(parts[0](x))) - y).square().mean().backward()


def flat(parts: list[nn.Linear]) -> np.ndarray:
    tensors = [p.detach().reshape(-1) for part in parts for p in part.parameters()]
    return torch.cat(tensors).numpy()


class Threads:
    """Averages over threads, each of which comes with the tensors in the same order."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: dict[int, torch.Tensor] = {}

    def average(self, worker: int, tensor: torch.Tensor) -> None:
        self.given[worker] = tensor
        self.barrier.wait()
        mean = torch.stack([self.given[w] for w in sorted(self.given)]).mean(0)
        self.barrier.wait()
        tensor.copy_(mean)
        self.barrier.wait()


class Manager:
    """What DiLoCo asks of torchft's manager, without a network."""

    _use_async_quorum = False

    def __init__(self, threads: Threads, worker: int) -> None:
        self.threads, self.worker, self.step = threads, worker, 0

    def current_step(self) -> int:
        return self.step

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def allreduce(self, tensor: torch.Tensor, **_: Any) -> Any:
        self.threads.average(self.worker, tensor)

        class Done:
            def wait(self) -> bool:
                return True

        return Done()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # quorums, and who may read the state


def with_torchft(
    seat: Seat, folder: str, size: int, steps: int, options: dict[str, Any]
) -> list[np.ndarray]:
    sys.path.insert(0, folder)
    from torchft.local_sgd import DiLoCo as Theirs

    threads, found = Threads(size), {}

    def train(worker: int, parts: list[nn.Linear]) -> None:
        parameters = [p for part in parts for p in part.parameters()]
        inner = torch.optim.SGD(parameters, lr=RATE)
        groups = parts if options["fragments"] == 2 else [nn.ModuleList(parts)]
        outers = [
            torch.optim.SGD(group.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            for group in groups
        ]
        with Theirs(
            Manager(threads, worker),
            groups,
            inner,
            outers,
            sync_every=options["sync_every"],
            pin_memory=False,
            fragment_sync_delay=options["delay"],
            fragment_update_alpha=options["alpha"],
        ):
            for step in range(steps):
                inner.zero_grad()
                backward(parts, worker, step)
                inner.step()
        found[worker] = flat(parts)

    every = [layers() for _ in range(size)]
    running = [
        threading.Thread(target=train, args=(worker, parts)) for worker, parts in enumerate(every)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return [found[worker] for worker in range(size)]


def with_hsgd(seat: Seat, path: str, size: int, steps: int, options: dict[str, Any]) -> np.ndarray:
    parts = layers()
    parameters = [p for part in parts for p in part.parameters()]
    sgd = torch.optim.SGD(parameters, lr=RATE)
    given = {**options, "fragments": parts if options["fragments"] == 2 else 1}
    with DiLoCo(sgd, parameters, seat.comm(path, size), group=None, **given) as diloco:
        for step in range(steps):
            diloco.zero_grad()
            backward(parts, seat.rank, step)
            diloco.step()
    return flat(parts)


@pytest.mark.suites
@pytest.mark.parametrize(
    ("fragments", "delay", "alpha"), [(1, 0, 0.0), (1, 3, 0.25), (2, 0, 0.5), (2, 2, 0.5)]
)
def test_it_trains_as_torchft_does(torchft: str, fragments: int, delay: int, alpha: float) -> None:
    options = {"sync_every": 6, "fragments": fragments, "delay": delay, "alpha": alpha}
    steps = 6 * 50
    with Ranks(2) as ranks:
        (theirs,) = ranks.run(with_torchft, torchft, 2, steps, options, on=[0])
        ours = ranks.run(with_hsgd, meeting_point(), 2, steps, options)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert np.abs(mine - wanted).max() <= 1e-6 * max(1.0, float(np.abs(wanted).max()))
    assert np.abs(theirs[0] - flat(layers())).max() > 0.01
