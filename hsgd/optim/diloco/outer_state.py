"""The outer state of all fragments on one rank: saving, loading and averaging it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.optim.diloco.eager_gradient import EagerGradient
from hsgd.optim.diloco.fragments import Fragment, check_saved
from hsgd.optim.diloco.outer_optimizer import Nesterov
from hsgd.optim.diloco.pseudo_gradient_exchange import Compression, Exchange, exchange_of
from hsgd.optim.diloco.worker_comms import WorkerComms
from hsgd.optim.flat_vectors import views_of
from hsgd.optim.replicas.replica_guard import ReplicaGuard

__all__ = [
    "Exchanged",
    "average_outer",
    "exchanged_here",
    "go_on_from",
    "guards_of",
    "kept_outer",
    "load_fragments",
    "mean_outer",
    "saved_alike",
    "saved_fragments",
    "take_outer",
]

_NAME = "outer weights of DiLoCo"


class Exchanged(NamedTuple):
    """A fragment on a rank that exchanges it with other workers."""

    fragment: Fragment
    exchange: Exchange
    eager: EagerGradient


def exchanged_here(
    fragments: Sequence[Fragment], compression: Compression, workers: Comm | None, count: int
) -> list[Exchanged]:
    """Return this rank's fragments with their exchanges; none if `workers` is None; local."""
    if workers is None:
        return []
    exchanges = (
        exchange_of(compression, workers, one.count, f"pseudo-gradient {number}")
        for number, one in enumerate(fragments)
    )
    return [
        Exchanged(fragment, exchange, EagerGradient(count))
        for fragment, exchange in zip(fragments, exchanges, strict=True)
    ]


def guards_of(
    fragments: Sequence[Fragment], named: Sequence[tuple[str, Tensor]], rank: int, eager: bool
) -> list[ReplicaGuard | None]:
    """Return, for each fragment, what checks that workers have equal outer weights and momentum.

    Local. With eager updates workers differ by design, so there is None for each. Tensors that do
    not train are not compared, since a worker may have its own. `rank`: this rank's number in
    errors.
    """
    if eager:
        return [None] * len(fragments)
    names = {tensor: name for name, tensor in named}

    def alike(fragment: Fragment) -> list[tuple[str, Tensor]]:
        outer = (fragment.outer_weights, fragment.velocity)
        views = (views_of(each, fragment.parameters) for each in outer)
        found = []
        for parameter, weights, momentum in zip(fragment.parameters, *views, strict=True):
            found.append((f"the outer model's {names[parameter]}", weights))
            found.append((f"the outer momentum of {names[parameter]}", momentum))
        return found

    return [
        ReplicaGuard(functools.partial(alike, fragment), turns=1, every=1, rank=rank)
        for fragment in fragments
    ]


def saved_alike(own: Mapping[str, Any], ranks: WorkerComms, steps: int, eager: int) -> bool:
    """Return whether the saved exchanges of all ranks fit together; collective, blocking.

    All ranks must have saved at step `steps`, with the current number of workers and the same
    pending exchanges. `eager` is the period of eager updates, or 0; it must be the saved one, and
    with eager updates each worker must load what it saved itself.
    """
    workers, under_way = ranks.between, own["under_way"]
    complete = workers is None or None not in [means for *_, means in under_way]
    here = complete and own["workers"] == ranks.count and own["steps"] == steps
    here &= own.get("eager", 0) == eager
    if eager and workers is not None:
        here &= own.get("worker") == workers.rank
    same = bool(ranks.combine(int(here), "min"))
    count = len(under_way)
    return ranks.combine(count, "min") == ranks.combine(count, "max") and same


def saved_fragments(here: Sequence[Exchanged]) -> list[dict[str, Any]]:
    """Return the state that load_fragments() loads; local."""
    return [
        {
            "outer_weights": fragment.outer_weights.clone(),
            "velocity": fragment.velocity.clone(),
            "left_out": exchange.state_dict(),
            "eager": eager.state_dict(),
        }
        for fragment, exchange, eager in here
    ]


def load_fragments(
    own: Mapping[str, Any], here: Sequence[Exchanged], workers: Comm, same: bool, eager: bool
) -> None:
    """Load DiLoCo's part of a state; collective over the workers, blocking.

    `same` says whether all ranks continue from where they saved; with `eager` each worker then has
    its own outer weights, otherwise all take worker 0's.
    """
    saved = own.get("fragments", [None] * len(here))
    for (fragment, exchange, gradient), one in zip(here, saved, strict=True):
        if one is not None:
            fragment.outer_weights.copy_(one["outer_weights"])
            fragment.velocity.copy_(one["velocity"])
        for vector in () if same and eager else (fragment.outer_weights, fragment.velocity):
            workers.broadcast(vector, name=_NAME)
        kept = one if same and own.get("worker") == workers.rank else None
        exchange.load_state_dict({} if kept is None else kept["left_out"])
        gradient.load_state_dict({} if kept is None else kept.get("eager", {}))


def kept_outer(
    state: Mapping[str, Any], fragments: Sequence[Fragment]
) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """Return steps, outer weights and velocity of a full state, else raise ValueError; local."""
    own = state.get("diloco")
    if own is None:
        raise ValueError("DiLoCo: give restart() a whole state, which state_dict() returned")
    check_saved(own, fragments, leads=False)
    saved = own.get("fragments", [])
    return own["steps"], [(one["outer_weights"], one["velocity"]) for one in saved]


def take_outer(
    fragments: Sequence[Fragment],
    comm: Comm,
    source: int,
    steps: int,
    had: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Copy the outer state of rank `source` to all ranks; collective, blocking.

    If its `had` is empty, its weights and zero velocity are used.
    """
    for number, fragment in enumerate(fragments):
        weights = had[number][0].to("cpu", copy=True) if had else fragment.gathered()
        velocity = had[number][1].to("cpu", copy=True) if had else torch.zeros_like(weights)
        for vector in (weights, velocity):
            comm.broadcast(vector, source, name=_NAME)
        fragment.start_from(weights, velocity, steps)


def mean_outer(here: Exchanged, workers: Comm | None, outer: Nesterov) -> Tensor:
    """Return the workers' mean of the corrected outer weights; collective over them, blocking."""
    assert workers is not None, "this rank exchanges"
    mean: Tensor = workers.allreduce(_whole_outer(here, outer)[0], "mean", name=_NAME)
    return mean


def _whole_outer(here: Exchanged, outer: Nesterov) -> tuple[Tensor, Tensor]:
    """Return outer weights and velocity, corrected by what arrived since the last step; local."""
    weights, velocity = here.fragment.outer_weights.clone(), here.fragment.velocity.clone()
    if here.eager.late is not None:
        outer.amend(weights, velocity, here.eager.late)
    return weights, velocity


def average_outer(
    here: Exchanged, workers: Comm | None, outer: Nesterov, exact: bool, extra: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the workers' mean of corrected outer weights and velocity; collective, blocking.

    `extra` is averaged in place. `exact`: the fragment took outer weights after this very step;
    otherwise the mean also includes the workers' progress since then.
    """
    assert workers is not None, "this rank exchanges"
    weights, velocity = _whole_outer(here, outer)
    if not exact:
        weights.sub_(here.fragment.pseudo_gradient())
    for vector in (weights, velocity, extra):
        workers.allreduce(vector, "mean", out=vector, name=_NAME)
    return weights, velocity


def go_on_from(here: Exchanged, weights: Tensor, velocity: Tensor) -> None:
    """Set the outer state, and forget pending eager gradients; local."""
    here.fragment.outer_weights, here.fragment.velocity = weights, velocity
    here.eager.load_state_dict({})
