"""What scripts do with gradients between backward() and step(), as functions of a Script.

Owns the table of them. Never compares results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

__all__ = ["IDIOMS", "WRAP_THEMSELVES", "Net", "Script", "bits_of", "largest_difference"]

STEPS, ROWS = 4, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.table = nn.Embedding(5, 16)
        self.middle = nn.Linear(16, 130)
        self.last = nn.Linear(130, 2)
        self.way = ""
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(images)).flatten(1)
        hidden = hidden + self.table((images.sum((1, 2, 3)) > 0).long())
        if self.way:
            hidden = checkpoint(self.middle, hidden, use_reentrant=self.way == "reentrant")
        else:
            hidden = self.middle(hidden)
        return self.last(torch.tanh(hidden))


@dataclass
class Script:
    """A script on one rank, or on the only one: part() is its part of a batch. wrap: makes the
    optimizer, or what is called instead of the model, that of all ranks.
    """

    model: Net
    optimizer: Any
    wrap: Callable[..., Any]
    part: Callable[[Tensor], Tensor]
    called: Callable[[Tensor], Tensor]

    def images(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(6 * ROWS, 1, 4, 4, generator=generator, dtype=torch.float64)

    def loss(self, step: int) -> Tensor:
        return self.called(self.part(self.images(step))).square().mean()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def take_part(self, rank: int, size: int) -> None:
        """Train on the rows of one rank from now on."""
        self.part = lambda rows: rows[rank * len(rows) // size : (rank + 1) * len(rows) // size]


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Between parameters of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def bits_of(model: nn.Module) -> list[bytes]:
    """Of the parameters, to compare ranks."""
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def usual(script: Script, between: Callable[[], None] = lambda: None, **zero: Any) -> None:
    for step in range(STEPS):
        script.optimizer.zero_grad(**zero)
        script.loss(step).backward()
        between()
        script.optimizer.step()


def scaled_in_place(script: Script) -> None:
    def between() -> None:
        for parameter in script.parameters():
            parameter.grad.mul_(0.5)

    usual(script, between)


def replaced(script: Script) -> None:
    def between() -> None:
        for parameter in script.parameters():
            parameter.grad = parameter.grad * 0.5

    usual(script, between, set_to_none=False)


def clipped(script: Script) -> None:
    usual(script, lambda: clip_grad_norm_(script.model.parameters(), 0.05))


def clipped_by_value(script: Script) -> None:
    usual(script, lambda: clip_grad_value_(script.model.parameters(), 0.01))


def synchronized(script: Script) -> None:
    for step in range(STEPS):
        script.optimizer.zero_grad()
        script.loss(step).backward()
        getattr(script.optimizer, "synchronize", lambda: None)()
        clip_grad_norm_(script.model.parameters(), 0.05)
        if hasattr(script.optimizer, "skip_synchronize"):
            with script.optimizer.skip_synchronize():
                script.optimizer.step()
        else:
            script.optimizer.step()


def grad_scaler(script: Script, *, unscale: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        script.model.zero_grad()
        loss = scaler.scale(script.loss(step))
        if step == 1:  # of one row of the batch, so of one rank
            rows = script.part(torch.arange(6 * ROWS))
            infinite = torch.where(rows == 0, torch.inf, 0.0).sum()
            loss = loss + infinite * script.model.last.bias.sum()
        loss.backward()
        if unscale:
            scaler.unscale_(script.optimizer)
            clip_grad_norm_(script.model.parameters(), 0.05)
        scaler.step(script.optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0


def grad_scaler_that_unscales(script: Script) -> None:
    grad_scaler(script, unscale=True)


def accumulated(script: Script) -> None:
    for step in range(STEPS):
        script.optimizer.zero_grad()
        for part in range(2):
            (script.loss(2 * step + part) / 2).backward()
        clip_grad_norm_(script.model.parameters(), 0.05)
        script.optimizer.step()


def two_passes(script: Script) -> None:
    script.wrap(backward_passes_per_step=2)
    accumulated(script)


def two_losses(script: Script) -> None:
    for step in range(STEPS):
        script.optimizer.zero_grad()
        script.model.last.weight.square().sum().backward()
        script.model.first.weight.square().sum().backward()
        script.loss(step).backward()
        clip_grad_norm_(script.model.parameters(), 0.05)
        script.optimizer.step()


def closure(script: Script) -> None:
    for step in range(STEPS):

        def evaluate(step: int = step) -> Tensor:
            script.optimizer.zero_grad()
            loss = script.loss(step)
            loss.backward()
            clip_grad_norm_(script.model.parameters(), 0.05)
            return loss

        script.optimizer.step(evaluate)


def lbfgs(script: Script) -> None:
    script.optimizer = torch.optim.LBFGS(
        script.model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    )
    script.wrap()
    closure(script)


def hooks_of_the_script(script: Script) -> None:
    for parameter in script.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(_halve)
    usual(script)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5 if parameter.dim() > 1 else parameter.grad.mul_(0.5)


def frozen_and_thawed(script: Script) -> None:
    for step in range(2 * STEPS):
        script.optimizer.zero_grad()
        script.model.middle.requires_grad_(step % 3 > 0)
        script.model.first.requires_grad_(step % 2 > 0)
        script.loss(step).backward()
        clip_grad_norm_(script.model.parameters(), 0.05)
        script.optimizer.step()


def groups_added_later(script: Script) -> None:
    last = script.model.last.requires_grad_(False)
    script.optimizer = torch.optim.SGD(
        [p for p in script.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    script.wrap(named=False)
    usual(script, lambda: clip_grad_norm_(script.model.parameters(), 0.05))
    last.requires_grad_(True)
    script.optimizer.add_param_group({"params": list(last.parameters())})
    usual(script, lambda: clip_grad_norm_(script.model.parameters(), 0.05))


def channels_last(script: Script) -> None:
    script.model.to(memory_format=torch.channels_last)
    clipped(script)


def checkpointed_reentrantly(script: Script) -> None:
    script.model.way = "reentrant"
    clipped(script)


def checkpointed(script: Script) -> None:
    script.model.way = "other"
    clipped(script)


def _fail(_: Tensor) -> None:
    raise RuntimeError("out of memory")


def a_backward_that_failed(script: Script) -> None:
    for step in range(STEPS):
        script.model.zero_grad()
        handle = script.model.last.weight.register_hook(_fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            script.model.last.weight.square().sum().backward()
        handle.remove()
        script.model.zero_grad()
        script.loss(step).backward()
        clip_grad_norm_(script.model.parameters(), 0.05)
        script.optimizer.step()


def a_checkpointed_backward_that_failed(script: Script) -> None:
    script.model.way = "reentrant"
    for step in range(STEPS):
        script.optimizer.zero_grad()
        handle = script.model.first.bias.register_hook(_fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            script.loss(step).backward()
        handle.remove()
        script.optimizer.zero_grad()
        script.loss(step).backward()
        clip_grad_norm_(script.model.parameters(), 0.05)
        script.optimizer.step()


def sparse(script: Script) -> None:
    script.model.table.sparse = True
    dense = [p for p in script.parameters() if p is not script.model.table.weight]
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    script.wrap()
    usual(script, lambda: clip_grad_norm_(dense, 0.05))


IDIOMS: tuple[Callable[[Script], None], ...] = (
    usual,
    scaled_in_place,
    replaced,
    clipped,
    clipped_by_value,
    synchronized,
    grad_scaler,
    grad_scaler_that_unscales,
    accumulated,
    two_passes,
    two_losses,
    closure,
    lbfgs,
    hooks_of_the_script,
    frozen_and_thawed,
    groups_added_later,
    channels_last,
    checkpointed_reentrantly,
    checkpointed,
    a_backward_that_failed,
    a_checkpointed_backward_that_failed,
    sparse,
)

# They call wrap() themselves.
WRAP_THEMSELVES = (two_passes, lbfgs, groups_added_later, sparse)
