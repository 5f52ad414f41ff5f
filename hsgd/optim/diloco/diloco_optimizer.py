"""DiLoCo: local steps, and outer steps on the mean progress of the workers.

Sources: DiLoCo (Douillard et al., arXiv:2311.08105) for the rule; Streaming DiLoCo (2501.18512) for
fragments, delay and alpha; Eager Updates (2502.12996) for eager.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.errors import HsgdError
from hsgd.optim.diloco.diloco_metrics import DiLoCoMetrics
from hsgd.optim.diloco.exchanges_under_way import ExchangesUnderWay
from hsgd.optim.diloco.fragments import (
    Fragment,
    Fragments,
    check_saved,
    check_schedule,
    exchanged_of,
    scheduled,
)
from hsgd.optim.diloco.outer_optimizer import Nesterov
from hsgd.optim.diloco.outer_state import (
    average_outer,
    exchanged_here,
    go_on_from,
    guards_of,
    kept_outer,
    load_fragments,
    mean_outer,
    saved_alike,
    saved_fragments,
    take_outer,
)
from hsgd.optim.diloco.pseudo_gradient_exchange import Compression, checked_compression
from hsgd.optim.diloco.worker_comms import WorkerComms
from hsgd.optim.fixed_parameters import FixedParameters
from hsgd.optim.flat_vectors import joined, values_kept, views_of
from hsgd.optim.initial_weights import broadcast_initial
from hsgd.optim.layouts import layout_terms
from hsgd.optim.optimizer_ranks import refusals_told
from hsgd.optim.restartable_optimizer import RestartableOptimizer

__all__ = ["DiLoCo"]

_Read = Callable[[], list[Tensor]]


class DiLoCo(RestartableOptimizer):
    """Wraps an optimizer: workers train locally and average their progress every few steps.

    Every `sync_every` steps the mean of outer weights - local weights is the gradient of an outer
    step, and training continues from the new outer weights. Construction is collective; step() is
    local, except for collectives inside a worker and waits for exchanges. All ranks must take the
    same number of steps, since exchanges depend on it.

    Args:
        optimizer: any torch optimizer, the inner one; its state stays with the worker.
        params: the model, or its parameters: floating, equal in shape on all ranks. All start from
            rank 0's values. A model's floating buffers, such as BatchNorm's statistics, are
            averaged with the last fragment.
        comm: the ranks, or a torch.distributed process group of any backend. None: this call is
            local, and restart() sets the ranks before the first step.
        outer: the outer optimizer.
        sync_every: steps between two exchanges of a fragment, H in the papers.
        fragments: parts of the model that are exchanged sync_every / fragments steps apart: a
            number, or a list of modules or of lists of parameters.
        delay: an exchange begins this many steps before it is applied, below sync_every. It
            overlaps computation; step() waits only if the exchange takes longer.
        alpha: share of the worker's own weights that remains when outer weights arrive.
        eager: an outer step uses the worker's own current part and the others' parts of one period
            ago, so an exchange may take a whole period. Outer weights then differ between workers,
            and only synchronize_weights() averages buffers.
        compression: how pseudo-gradients are sent: None, "bfloat16", "int8", "topk", or an Int8 or
            TopK of hsgd.optim. The last two carry their error over to the next exchange.
        group: "node": the ranks of a node form one worker, which averages gradients in every step
            through shared memory (parameters must be float32 on the CPU). None: each rank is a
            worker. A number: so many consecutive ranks form a worker.

    Raises:
        ValueError, TypeError: an argument is invalid.
        PeerLost, CollectiveTimeout: from collectives, if a rank died or did not make the call.
    """

    loads_together = True
    _ranks: WorkerComms

    def __init__(
        self,
        optimizer: Optimizer,
        params: nn.Module | Iterable[Tensor],
        comm: Any,
        *,
        outer: Nesterov | None = None,
        sync_every: int = 100,
        fragments: Fragments = 1,
        delay: int = 0,
        alpha: float = 0.0,
        eager: bool = False,
        compression: Compression = None,
        group: Literal["node"] | int | None = "node",
    ) -> None:
        super().__init__(optimizer)
        self.outer = Nesterov() if outer is None else outer
        self._period, self._delay, self._alpha, self._eager = sync_every, delay, alpha, eager
        self._params = params if isinstance(params, nn.Module) else list(params)
        with refusals_told(comm, "DiLoCo"):
            check_schedule(sync_every, delay, alpha, eager)
            checked_compression(compression)
            self._trained, self._buffers = exchanged_of(self._params)
            self._parts = scheduled(self._trained, fragments, sync_every)
        self._fixed = FixedParameters("DiLoCo", optimizer, self._params, self._trained)
        self._how = (group, compression)
        self._kept_for_restart: tuple[int, list[tuple[Tensor, Tensor]]] | None = None
        self._metrics = DiLoCoMetrics()
        self._join(comm, 0, [])

    # --- what training scripts call ---

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the wrapped optimizer, then begin and apply due exchanges; collective in a worker.

        Blocks if an exchange is late. A group calls a closure once, before it averages gradients.
        """
        self._check_open()
        self._fixed.check(self._optimizer)
        value = None
        if self._group is not None:
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
                closure = None
            begin = time.perf_counter()
            with self._ranks.told():
                self._group.average_gradients(False)
            self._metrics.group_s += time.perf_counter() - begin
        result = self._step_wrapped(closure)
        self._metrics.steps += 1
        with torch.no_grad(), self._ranks.told():
            self._apply(self._metrics.steps, self.outer, self._alpha)
            self._begin_due()
            self._apply(self._metrics.steps, self.outer, self._alpha)
        return value if result is None else result

    def settle(self) -> None:
        """Apply pending exchanges now; blocking, collective in a worker.

        All ranks call it after the same step. With eager=True it waits and changes no weights.
        """
        self._check_open()
        with torch.no_grad(), self._ranks.told():
            self._apply(None, self.outer, self._alpha)

    def synchronize_weights(self) -> None:
        """Give all workers equal weights, at the end of training; collective, blocking.

        Fragments exchanged after this step take their outer weights. For others the outer weights
        become the mean of the workers' weights, without momentum, since the period is not complete.
        With eager=True everything becomes the workers' mean, with all that has arrived. Raises
        HsgdError if ranks have taken different numbers of steps.
        """
        self.settle()
        here = self._metrics.steps
        least, most = self._ranks.combine(here, "min"), self._ranks.combine(here, "max")
        if least != most:
            raise HsgdError(
                f"DiLoCo: ranks have taken {least} to {most} steps; all must take the same number"
            )
        with torch.no_grad(), self._ranks.told():
            if self._eager:
                self._average_outer(here)
                return
            for number, fragment in enumerate(self._fragments):
                if fragment.taken != here:
                    self._begin(number)
            self._apply(None, None, alpha=0.0)
            for number, fragment in enumerate(self._fragments):
                fragment.take(self._outer_weights_of(number), 0.0)

    @contextlib.contextmanager
    def at_outer_weights(self, average: bool = False) -> Iterator[None]:
        """Set parameters to the outer weights in the block; local, in a worker collective.

        Buffers stay the worker's own. With eager=True outer weights differ between workers;
        `average` then uses their mean, which is collective and blocking.
        """
        self._check_open()
        if average and self._eager:
            self.settle()
        parameters = [p.detach() for fragment in self._fragments for p in fragment.parameters]
        with values_kept(parameters):
            for number, fragment in enumerate(self._fragments):
                with self._ranks.told():
                    weights = self._outer_weights_of(number, average)
                fragment.take(weights, 0.0)
            yield

    def metrics(self) -> DiLoCoMetrics:
        """Return this rank's counters; local, never blocks. Only finished exchanges count."""
        return self._queue.added_to(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state with DiLoCo's under "diloco"; local.

        It holds outer weights, velocity, compression errors and pending exchanges, for which the
        call waits; failed exchanges are left out. The worker's own weights belong to the model.
        """
        own: dict[str, Any] = {"steps": self._metrics.steps, "workers": self._ranks.count}
        own["eager"] = self._period if self._eager else 0
        own["under_way"] = self._queue.saved()
        if self._workers is not None and not self._waits_for_ranks:
            own["worker"] = self._workers.rank
            own["fragments"] = saved_fragments(self._exchanged)
        return {**self._optimizer.state_dict(), "diloco": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; collective, blocking; drops pending exchanges after waiting for them.

        Each rank loads what it saved, or all load rank 0's. Steps, outer weights and velocity
        become rank 0's, so the number of workers may differ. Saved exchanges are dropped if the
        number of workers, the saved steps, or with eager=True the period differ; otherwise each
        worker keeps its own. Compression errors stay with their worker. A state without "diloco",
        given on all ranks, loads the wrapped optimizer only. Raises ValueError, before any change,
        for a state of another model or other fragments.
        """
        self._check_open()
        own = state_dict.get("diloco")
        if own is not None:
            leads = self._workers is not None and self._workers.rank == 0
            check_saved(own, self._fragments, leads)
        self._queue.drain()
        self._load_wrapped(state_dict, "diloco")
        if own is None:
            return
        steps = np.array([own["steps"]], np.int64)
        self._ranks.comm.broadcast(steps, name="steps of DiLoCo")
        self._metrics.steps = int(steps[0])
        period = self._period if self._eager else 0
        same = saved_alike(own, self._ranks, self._metrics.steps, period)
        self._queue.load(own["under_way"] if same else [])
        if self._workers is not None:
            load_fragments(own, self._exchanged, self._workers, same, self._eager)

    def restart(self, comm: Any, state_dict: dict[str, Any] | None = None) -> None:
        """Continue with another communicator after ranks were lost or joined; collective, blocking.

        The old communicator is broken, so no rank waits there. `comm` is a Comm or a process group;
        `state_dict` is a copy of this rank's state_dict(), which is loaded first.

        Steps, outer weights and velocity become those of the lowest rank that has outer weights and
        the most steps; local progress since the last exchange is lost. If no rank has outer
        weights, because the first rank of each worker was lost, the weights of the lowest rank with
        the most steps become the outer weights. Each worker keeps the inner optimizer state of its
        rank with the most steps. Pending exchanges and compression errors are dropped. If it
        raises, another restart() may follow and starts from the same weights.
        """
        self._check_not_closed()
        kept = self._kept_for_restart
        if state_dict is not None:
            kept = kept_outer(state_dict, self._fragments)
        elif kept is None:
            there = () if self._waits_for_ranks else self._fragments
            had = [(one.outer_weights, one.velocity) for one in there if one.keeps_outer]
            kept = self._metrics.steps, had
        self._kept_for_restart = kept
        self._lose_ranks()
        self._metrics = self.metrics()  # includes the exchanges so far
        self._queue = ExchangesUnderWay([], None, False, [])
        self._optimizer.zero_grad()  # gradients may lie in memory of the old communicator
        if state_dict is not None:
            self._load_wrapped(state_dict, "diloco")
        self._join(comm, *kept)
        self._kept_for_restart = None

    def close(self) -> None:
        """Wait for pending exchanges without applying them, and leave; local. Weights stay.

        A second call does nothing. Closing `comm` first, for example by hvd.shutdown(), does the
        same; step() then raises, and restart() may follow.
        """
        if not self._closed:
            self._closed = True
            self._leave(abort=False)

    def _leave(self, abort: bool) -> None:
        if self._group is not None:
            self._optimizer.zero_grad()
            self._group = None
        try:
            if abort:
                self._queue.abandon()
            else:
                self._queue.close()
        finally:
            self._ranks.leave(abort)

    def __repr__(self) -> str:
        return (
            f"DiLoCo({self._optimizer!r}, {self.outer!r}, sync_every={self._period}, "
            f"fragments={len(self._fragments)}, delay={self._delay}, alpha={self._alpha}, "
            f"eager={self._eager})"
        )

    # --- exchanges ---

    def _begin_due(self) -> None:
        for number, fragment in enumerate(self._fragments):
            if (self._metrics.steps + self._delay - fragment.phase) % self._period == 0:
                self._begin(number)

    def _begin(self, number: int) -> None:
        fragment, buffers = self._fragments[number], self._buffers_of(number)
        if self._group is not None:
            self._group.average([buffer.detach() for buffer in buffers])
        begin = time.perf_counter()
        mine = sent = extra = torch.empty(0)
        if self._workers is not None:
            mine = fragment.pseudo_gradient()
            sent = mine.clone() if self._eager else mine
            extra = joined([b.cpu().float() for b in buffers]) if buffers else extra
        self._metrics.apply_s += time.perf_counter() - begin
        begin = time.perf_counter()
        due = self._metrics.steps + (self._period if self._eager else self._delay)
        self._queue.begin(number, due, sent, extra)
        self._metrics.wait_s += time.perf_counter() - begin  # without a delay the call blocks

        def read() -> list[Tensor]:
            begin = time.perf_counter()
            fragment.step(self.outer, self._exchanged[number].eager.begin(mine))
            self._metrics.apply_s += time.perf_counter() - begin
            return [fragment.outer_weights]

        if self._eager:
            self._take(number, read, self._alpha, buffers)
            self._metrics.outer_steps += 1

    def _average_outer(self, here: int) -> None:
        """Average all outer weights over the workers; collective. They stay if it fails."""
        found: list[tuple[Tensor, Tensor]] = []
        for number in range(len(self._fragments)):
            buffers = self._buffers_of(number, ending=True)
            if self._group is not None:
                self._group.average([buffer.detach() for buffer in buffers])
            extra = joined([torch.empty(0), *(b.cpu().float() for b in buffers)])

            def read(number: int = number, extra: Tensor = extra) -> list[Tensor]:
                mine, exact = self._exchanged[number], self._fragments[number].taken == here
                found.append(average_outer(mine, self._workers, self.outer, exact, extra))
                return [found[-1][0], extra]

            self._take(number, read, 0.0, buffers)
        for mine, (weights, velocity) in zip(self._exchanged, found, strict=True):
            go_on_from(mine, weights, velocity)

    def _apply(self, step: int | None, outer: Nesterov | None, alpha: float) -> None:
        """Apply exchanges due at `step`, or all, in order of beginning; failed ones stay queued."""
        while (number := self._queue.first(step)) is not None:
            self._finish(number, outer, alpha)
            self._queue.drop_first()

    def _finish(self, number: int, outer: Nesterov | None, alpha: float) -> None:
        fragment = self._fragments[number]

        def read() -> list[Tensor]:
            begin = time.perf_counter()
            mean, averaged = self._queue.wait_first()
            arrived = time.perf_counter()
            self._metrics.wait_s += arrived - begin
            if self._eager:
                self._exchanged[number].eager.arrive(mean)
            else:
                fragment.step(outer, mean)
            self._metrics.apply_s += time.perf_counter() - arrived
            return [] if self._eager else [fragment.outer_weights, averaged]

        if self._eager:
            self._shared(0, read)
        else:
            self._take(number, read, alpha, self._buffers_of(number))
            self._metrics.outer_steps += 1

    def _take(self, number: int, read: _Read, alpha: float, buffers: list[Tensor]) -> None:
        fragment = self._fragments[number]
        arrived = self._shared(fragment.count + sum(b.numel() for b in buffers), read)
        begin = time.perf_counter()
        fragment.take(arrived[: fragment.count], alpha)
        for buffer, mean in zip(buffers, views_of(arrived[fragment.count :], buffers), strict=True):
            buffer.copy_(mean)
        fragment.taken = self._metrics.steps
        self._metrics.apply_s += time.perf_counter() - begin

    def _buffers_of(self, number: int, ending: bool = False) -> list[Tensor]:
        last = number == len(self._fragments) - 1
        return self._buffers if last and (ending or not self._eager) else []

    def _outer_weights_of(self, number: int, average: bool = False) -> Tensor:
        def read() -> list[Tensor]:
            if average and self._eager:
                return [mean_outer(self._exchanged[number], self._workers, self.outer)]
            return [self._fragments[number].outer_weights]

        return self._shared(self._fragments[number].count, read)

    def _shared(self, count: int, read: _Read) -> Tensor:
        """Return on all ranks of the worker the `count` values that its first rank reads."""
        if self._group is None:
            parts = [part for part in read() if part.numel()]
            return parts[0] if len(parts) == 1 else joined([torch.empty(0), *parts])
        flat = torch.empty(count)
        begin, counted = time.perf_counter(), self._metrics.wait_s + self._metrics.apply_s
        self._group.share(flat, read, "outer weights")
        counted -= self._metrics.wait_s + self._metrics.apply_s
        self._metrics.group_s += time.perf_counter() - begin + counted
        return flat

    # --- set-up and end ---

    def _terms(self) -> dict[str, object]:
        group, compression = self._how
        places = {parameter: place for place, parameter in enumerate(self._trained)}
        return {
            "sync_every": self._period,
            "outer": self.outer,
            "fragments": len(self._parts),
            "delay": self._delay,
            "alpha": self._alpha,
            "eager": self._eager,
            "compression": checked_compression(compression),
            "group": group,
            **layout_terms(self._params),
            **{
                f"fragment {number}": f"trained parameters {[places[p] for p in part]}"
                for number, (part, _) in enumerate(self._parts)
            },
        }

    def _join(self, comm: Any, steps: int, had: list[tuple[Tensor, Tensor]]) -> None:
        """Form workers that start from the rank with the most steps; collective, blocking.

        `had` holds this rank's outer weights and velocity per fragment, or nothing.
        """
        group, compression = self._how
        self._waits_for_ranks, self._left, self._aborted = True, False, False
        named = self._fixed.named()
        self._ranks = WorkerComms(comm, group, self._trained, named, self._terms)
        try:
            inside = self._group = self._ranks.inside
            self._share_inner_state(None if inside is None else inside.comm, steps)
            source, steps, has_outer = self._ranks.furthest(steps, bool(had))
            broadcast_initial(self._ranks.comm, self._params, self._trained, root=source)
            workers = self._workers = self._ranks.between
            outer = workers is not None
            self._fragments = [Fragment(part, phase, outer) for part, phase in self._parts]
            if has_outer:
                take_outer(self._fragments, self._ranks.comm, source, steps, had)
        except BaseException:
            self._ranks.leave(abort=True)
            raise
        self._metrics.steps = steps
        self._exchanged = exchanged_here(self._fragments, compression, workers, self._ranks.count)
        exchanges = [each.exchange for each in self._exchanged]
        guards = guards_of(self._fragments, named, self._ranks.comm.rank, self._eager)
        behind = self._delay > 0 or self._eager
        self._queue = ExchangesUnderWay(exchanges, workers, behind, guards)
        self._waits_for_ranks = comm is None
        self._ranks.before_close(self._comm_closes)
