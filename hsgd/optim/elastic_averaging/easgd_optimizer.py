"""ElasticAveraging: workers that train locally, and a shared centre that attracts them.

Sources: EASGD (Zhang, Choromanska, LeCun, arXiv:1412.6651) for the rule. ShmCaffe (Ahn et al.,
ICDCS 2018) for the shared box, the push in the background and the hybrid of synchronous groups: our
reconstruction from its abstract and public descriptions.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.comm.communicator import Comm
from hsgd.errors import HsgdError
from hsgd.onesided.networks import Network
from hsgd.onesided.parameter_box import ParameterBox
from hsgd.optim.background_thread import BackgroundThread
from hsgd.optim.elastic_averaging.easgd_progress import COUNTERS, Progress, StopRule
from hsgd.optim.elastic_averaging.easgd_rate import checked_moving_rate, checked_pull_rate
from hsgd.optim.fixed_parameters import FixedParameters
from hsgd.optim.flat_vectors import joined, values_kept, views_of
from hsgd.optim.initial_weights import broadcast_initial
from hsgd.optim.layouts import layout_terms
from hsgd.optim.optimizer_ranks import OptimizerRanks
from hsgd.optim.triggers.communication_triggers import FixedPeriod, Trigger
from hsgd.optim.worker_group import WorkerGroup
from hsgd.optim.wrapping_optimizer import WrappingOptimizer, check_choice, tensors_of

__all__ = ["EASGDMetrics", "ElasticAveraging", "Mode", "Order"]

Mode = Literal["async", "hybrid"]
Order = Literal["shmcaffe", "easgd"]
_COMPRESSIONS = {None: torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class EASGDMetrics:
    """Counters of a worker since it was made. Seconds are of the calling thread, except push_s."""

    steps: int = 0
    exchanges: int = 0
    wait_s: float = 0.0
    """Waits for the worker's previous push, if the steps between were shorter."""
    mix_s: float = 0.0
    """Reading the centre and moving the weights, in one pass."""
    follow_s: float = 0.0
    """Hybrid: sending the move to the group, and averaging its buffers."""
    allreduce_s: float = 0.0
    """Hybrid: averaging gradients in the group."""
    push_s: float = 0.0
    """Adding to the centre, in the background."""
    read_bytes: int = 0
    """Of the centre."""
    pushed_bytes: int = 0
    """Sent to the box."""
    group_bytes: int = 0
    """Hybrid: payload of the group's collectives."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of pushes by the number of others' changes between their read and their end.

    Between nodes it is an upper bound, as a read may be newer than the version it reports.
    """


class ElasticAveraging(WrappingOptimizer):
    """Wraps an optimizer: workers train locally; every few steps a worker and the centre attract.

    With u = weights - centre, weights -= pull_rate * u at once, and a background thread makes
    centre += moving_rate * u; the next exchange waits for it. Workers wait for nothing else.
    Construction is collective, steps are local.

    Args:
        optimizer: any torch optimizer.
        params: the model, or its parameters: float32, C-contiguous, on the CPU, equal in shape on
            all ranks. All start from rank 0's values. A model's floating buffers, such as
            BatchNorm's statistics, are averaged too.
        comm: the ranks, used here and by group steps, load_state_dict() and close().
        mode: "async": each rank is a worker. "hybrid": each group is one, which averages gradients
            in every step; its first rank exchanges for the group.
        moving_rate: None is 0.9 / (workers + 1). From min(2 / (workers + 1), pi / (2 workers)) on
            the centre may oscillate with growing amplitude (easgd_rate.py), which a warning says.
        pull_rate: None is moving_rate, as in EASGD: the weights lose what the centre gains. About
            0.9 keeps workers with different data near the centre, whatever their number;
            moving_rate must then be below 1 / workers.
        update_interval: steps between exchanges, or a trigger (hsgd.optim.triggers) that decides
            equally on all ranks of a group.
        group_size: ranks of a group, in rank order; None is the ranks of a node. Hybrid only.
        order: "shmcaffe" exchanges after the optimizer's step, so gradients are those of the moved
            weights; "easgd" between gradient and step, as in the paper.
        stop_rule: `done` becomes true when worker 0 ("master"), any worker ("fastest") or the
            average worker ("mean") has made max_steps steps; max_steps=None never.
        compression: None, or "bfloat16": the move is rounded before use, so that the weights lose
            what the centre gains.
        overlap: False: push before step() returns, inside a node in the same pass over memory.
        timeout_s: limit of a wait for the box; None is the deadline of `comm`.
        network: of the box, between nodes; see ParameterBox.over.

    Raises:
        CollectiveTimeout: a process was stopped within a change. A worker that dies leaves the
            centre intact and the other workers undisturbed.
    """

    loads_together = True
    _parameters: list[Tensor]
    _buffers: list[Tensor]
    _box: ParameterBox | None = None
    _progress: Progress | None = None
    _push: Future[None] | None = None
    _made = 0  # version of the centre after the last push

    def __init__(
        self,
        optimizer: Optimizer,
        params: nn.Module | Iterable[Tensor],
        comm: Comm,
        mode: Mode = "async",
        moving_rate: float | None = None,
        update_interval: int | Trigger = 1,
        group_size: int | None = None,
        order: Order = "shmcaffe",
        stop_rule: StopRule = "master",
        compression: Literal["bfloat16"] | None = None,
        *,
        pull_rate: float | None = None,
        max_steps: int | None = None,
        overlap: bool = True,
        timeout_s: float | None = None,
        network: Network = "sockets",
    ) -> None:
        super().__init__(optimizer)
        self._order, self._overlap = order, overlap
        given = params if isinstance(params, nn.Module) else list(params)
        options = {
            "mode": mode,
            "moving_rate": moving_rate,
            "update_interval": update_interval,
            "group_size": group_size,
            "order": order,
            "stop_rule": stop_rule,
            "compression": compression,
            "pull_rate": pull_rate,
            "max_steps": max_steps,
            "network": network,
        }
        terms = partial(self._take, given, options)
        self._ranks = OptimizerRanks(comm, "ElasticAveraging", terms)
        self._fixed = FixedParameters("ElasticAveraging", optimizer, given, self._parameters)
        broadcast_initial(comm, given, self._weights())
        # For a constant such as a mask of -inf, the distance from the centre is not defined.
        self._buffers = [b for b in self._buffers if bool(torch.isfinite(b).all())]
        self._group = self._join_group(group_size) if mode == "hybrid" else None
        self.workers, self._team = self._ranks.count, self._ranks.between
        self.moving_rate = checked_moving_rate(
            moving_rate, self.workers, own_pull=pull_rate is not None, warn=comm.rank == 0
        )
        self.pull_rate = checked_pull_rate(pull_rate, self.moving_rate)
        self._delta = self._room_for_move(_COMPRESSIONS[compression])
        if self._team is not None:
            start = joined(self._weights())
            self._box = ParameterBox.over(
                self._team, start, counters=COUNTERS, timeout_s=timeout_s, network=network
            )
            self._progress = Progress(self._box, self._team, stop_rule, max_steps)
        self._pusher = BackgroundThread("hsgd-push")
        self._over = self._done = False
        self._metrics = EASGDMetrics()
        self._trigger.reset(self._watched())
        self._ranks.before_close(self._abandon)  # communicators split off it end first

    def _room_for_move(self, dtype: torch.dtype) -> Tensor:
        """Return a vector for the move of all weights; in a group shared and collective."""
        count = sum(weight.numel() for weight in self._weights())
        if self._group is None:
            return torch.empty(count, dtype=dtype)
        move: Tensor = self._group.comm.empty(count, dtype, name="move of the group")
        return move

    def _take(
        self, params: nn.Module | Sequence[Tensor], options: dict[str, Any]
    ) -> dict[str, object]:
        """Check and store the arguments; return what must be equal on all ranks; local."""
        _check(options)
        self._trigger = _trigger_of(options["update_interval"])
        self._parameters, self._buffers = tensors_of(params, "ElasticAveraging")
        _check_weights(self._weights())
        if not isinstance(options["update_interval"], int):
            del options["update_interval"]  # a trigger of this rank's own
        return {**options, **layout_terms(params)}

    def _join_group(self, group_size: int | None) -> WorkerGroup:
        members = self._ranks.divide(group_size, "ElasticAveraging: group_size")
        trained = [p for p in self._parameters if p.requires_grad]
        return WorkerGroup(members, trained, self._fixed.named(), self._ranks.comm.rank)

    # --- what training scripts call ---

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer, and exchange if due; local, in a group collective.

        A group calls a closure once, before it averages the gradients.
        """
        self._check_open()
        self._fixed.check(self._optimizer)
        value = None
        if self._group is not None and closure is not None:
            with torch.enable_grad():
                value = closure()
            closure = None
        if self._order == "easgd" and self._metrics.steps > 0:
            self._exchange_if_due()
        if self._group is not None:
            begin = time.perf_counter()
            self._done = self._group.average_gradients(self._over)
            self._metrics.allreduce_s += time.perf_counter() - begin
            self._metrics.group_bytes += self._group.gradient_bytes
        loss = self._optimizer.step(closure)
        if loss is None:
            loss = value
        self._metrics.steps += 1
        if self._order == "shmcaffe":
            self._exchange_if_due()
        if self._progress is not None:
            self._over = self._progress.report(self._metrics.steps)
        if self._group is None:
            self._done = self._over
        return loss

    @property
    def done(self) -> bool:
        """Whether the stop rule has ended training, on all ranks of a group after the same step."""
        return self._done

    def metrics(self) -> EASGDMetrics:
        return replace(self._metrics, staleness=self._metrics.staleness.copy())

    def finish_push(self) -> None:
        """Wait until this worker's last push is in the centre; blocking."""
        if self._push is not None:
            push, self._push = self._push, None
            begin = time.perf_counter()
            push.result()
            self._metrics.wait_s += time.perf_counter() - begin

    def consensus_distance(self) -> float:
        """Return |weights - centre| after the last push; local. NaN on ranks without a box."""
        if self._box is None:
            return math.nan
        self.finish_push()
        scratch = torch.empty(self._delta.numel())
        _, squares = self._box.elastic(self._weights(), 0.0, scratch)
        return math.sqrt(squares)

    def centre(self) -> list[Tensor]:
        """Return copies of the centre's parameters, then buffers; local.

        Raises HsgdError on ranks that do not exchange.
        """
        return self._read_centre()[1]

    @contextlib.contextmanager
    def at_centre(self) -> Iterator[None]:
        """Set the weights to the centre's values in the block; local, in a group collective."""
        weights = self._weights()
        with values_kept(weights):
            for weight, value in zip(weights, self._centre_of_all(), strict=True):
                weight.copy_(value)
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with the centre under "elastic"; local.

        Waits for the last push. "elastic" also has the centre's version and the trigger's state.
        """
        state = self._optimizer.state_dict()
        own: dict[str, Any] = {"steps": self._metrics.steps, "trigger": self._trigger.state_dict()}
        if self._box is not None:
            own["version"], own["centre"] = self._read_centre()
        return {**state, "elastic": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the newest centre of all workers counts; collective, blocking."""
        self.finish_push()
        own = state_dict.get("elastic", {})
        sizes = [weight.numel() for weight in self._weights()]
        found = [tensor.numel() for tensor in own.get("centre", [])]
        if "centre" in own and found != sizes:
            raise ValueError(
                f"ElasticAveraging: the centre that is loaded has {len(found)} tensors of "
                f"{sum(found)} values, this model {len(sizes)} of {sum(sizes)}; it is of another "
                "model"
            )
        self._load_wrapped(state_dict, "elastic")
        self._metrics.steps = own.get("steps", self._metrics.steps)
        if "trigger" in own:
            self._trigger.load_state_dict(own["trigger"])
        if self._team is not None and self._box is not None:
            version = int(own.get("version", 0)) if "centre" in own else -1
            versions = self._team.allgather(np.array([version], np.int64))
            if version >= 0 and self._team.rank == int(versions.argmax()):
                self._box.write(joined(own["centre"]))
            self._team.barrier()
            self._box.refresh()
            self._team.barrier()  # no worker changes it before all have read it

    def close(self) -> None:
        """Finish the last push and leave the box; collective between nodes. The weights stay.

        A second call does nothing. If the communicator closes first, the last push may be lost.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last_first:  # calls each, even if another raises
            last_first.callback(self._ranks.leave)
            if self._group is not None:
                last_first.callback(self._group.unhook)
            if self._box is not None:
                last_first.callback(self._box.close)
            if self._progress is not None:
                last_first.callback(self._progress.close)
            last_first.callback(self._pusher.shutdown)
            self.finish_push()

    def _abandon(self) -> None:
        self._closed = True
        with contextlib.ExitStack() as last_first:  # as in close()
            last_first.callback(self._ranks.leave, abort=True)
            if self._progress is not None:
                last_first.callback(self._progress.abandon)
            if self._box is not None:
                last_first.callback(self._box.close, waits=False)
            if self._group is not None:
                last_first.callback(self._group.unhook)
            self._pusher.shutdown(wait=False)

    def __repr__(self) -> str:
        return f"ElasticAveraging({self._optimizer!r}, moving_rate={self.moving_rate:g})"

    # --- an exchange ---

    def _exchange_if_due(self) -> None:
        lr = float(self._optimizer.param_groups[0]["lr"])
        if not self._trigger.step(self._metrics.steps, self._watched(), lr):
            return
        self._exchange(self._weights())
        self._trigger.reset(self._watched())

    def _watched(self) -> list[Tensor]:
        """Return what the trigger sees; not the buffers, which differ within a group."""
        return [parameter.detach() for parameter in self._parameters]

    def _exchange(self, weights: list[Tensor]) -> None:
        metrics, group = self._metrics, self._group
        delta: Tensor | None = None
        version = 0
        metrics.exchanges += 1
        if group is not None and self._buffers:
            group.average([buffer.detach() for buffer in self._buffers])
        if self._box is not None:
            self.finish_push()
            begin = time.perf_counter()
            alone = not self._overlap and group is None and self._delta.dtype == torch.float32
            alone = alone and self.pull_rate == self.moving_rate
            delta = None if alone else self._delta
            version, _ = self._box.elastic(weights, self.pull_rate, delta)
            metrics.mix_s += time.perf_counter() - begin
            metrics.read_bytes += 4 * self._delta.numel()
            metrics.pushed_bytes += self._delta.element_size() * self._delta.numel()
        if group is not None:
            begin = time.perf_counter()
            group.follow(self._delta, weights)
            metrics.follow_s += time.perf_counter() - begin
            metrics.group_bytes += self._delta.element_size() * self._delta.numel()
        if self._box is not None and delta is not None:
            self._push = self._pusher.submit(self._accumulate, self._box, version)
            if not self._overlap:
                self.finish_push()

    def _accumulate(self, box: ParameterBox, version: int) -> None:
        begin = time.perf_counter()
        if self.pull_rate != self.moving_rate:
            self._delta.mul_(self.moving_rate / self.pull_rate)
        before, self._made = self._made, box.accumulate(self._delta)
        self._metrics.push_s += time.perf_counter() - begin
        # A rank's read always includes its own last push, whatever version the read reports.
        self._metrics.staleness[self._made - 1 - version - (before > version)] += 1

    def _read_centre(self) -> tuple[int, list[Tensor]]:
        """Return the centre's tensors, with a version that they include."""
        if self._box is None:
            raise HsgdError("ElasticAveraging.centre: this rank is not the first of its group")
        self.finish_push()
        flat = torch.empty(self._delta.numel())
        self._box.refresh()
        version = self._box.read(flat)
        return version, views_of(flat, self._weights())

    def _centre_of_all(self) -> list[Tensor]:
        if self._group is None:
            return self.centre()
        weights = self._weights()
        flat = torch.empty(sum(weight.numel() for weight in weights))
        self._group.share(flat, self.centre, "centre")
        return views_of(flat, weights)

    # --- set-up ---

    def _weights(self) -> list[Tensor]:
        return [tensor.detach() for tensor in (*self._parameters, *self._buffers)]


def _check(options: dict[str, Any]) -> None:
    for what, choices in (
        ("mode", get_args(Mode)),
        ("order", get_args(Order)),
        ("stop_rule", get_args(StopRule)),
        ("compression", _COMPRESSIONS),
    ):
        check_choice(f"ElasticAveraging: {what}", options[what], choices)
    if options["mode"] == "async" and options["group_size"] is not None:
        raise ValueError('ElasticAveraging: group_size is for mode="hybrid"; leave it out')


def _check_weights(weights: Sequence[Tensor]) -> None:
    if not weights:
        raise ValueError("ElasticAveraging: there are no parameters to average")
    for index, weight in enumerate(weights):
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise TypeError(
                f"ElasticAveraging: tensor {index} of shape {tuple(weight.shape)} is "
                f"{weight.dtype} on {weight.device}; the box takes float32 on the CPU"
            )
        if not weight.is_contiguous():
            raise ValueError(
                f"ElasticAveraging: tensor {index} of shape {tuple(weight.shape)} is not "
                "C-contiguous; call .contiguous() before the optimizer is made"
            )


def _trigger_of(given: int | Trigger) -> Trigger:
    if not isinstance(given, int):
        if not callable(getattr(given, "step", None)):
            raise TypeError("ElasticAveraging: update_interval is a number of steps or a trigger")
        return given
    if given < 1:
        raise ValueError(f"ElasticAveraging: update_interval is {given}; give 1 or more")
    return FixedPeriod(given)
