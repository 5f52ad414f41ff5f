"""DiLoCo: local steps, and an outer step on the mean of how far the workers came.

Owns when a fragment is exchanged, what is under way, and the metrics. Never computes an inner
update: the wrapped optimizer does. Sources: DiLoCo (Douillard et al., arXiv:2311.08105) for the
rule; Streaming DiLoCo (arXiv:2501.18512) for fragments, delay and alpha.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.comm import Comm
from hsgd.optim.background import BackgroundThread
from hsgd.optim.diloco.fragments import Fragment, Fragments, cut, phases
from hsgd.optim.diloco.outer_optimizer import Nesterov
from hsgd.optim.diloco.pseudo_gradient_exchange import Compression, exchange_of
from hsgd.optim.flat_vectors import joined, views_of
from hsgd.optim.initial_weights import broadcast_initial
from hsgd.optim.process_groups import comm_of
from hsgd.optim.worker_group import WorkerGroup, split_workers
from hsgd.optim.wrapping_optimizer import WrappingOptimizer, tensors_of

__all__ = ["DiLoCo", "DiLoCoMetrics"]


@dataclass
class DiLoCoMetrics:
    """What this rank did since its DiLoCo was made. Seconds are of the calling thread, but for
    exchange_s; bytes are those of hsgd.Comm.metrics().
    """

    steps: int = 0
    outer_steps: int = 0
    """Of all fragments."""
    wait_s: float = 0.0
    """Waiting for exchanges that took longer than `delay` steps: exposed communication."""
    exchange_s: float = 0.0
    """Of exchanges between workers, in the background."""
    apply_s: float = 0.0
    """Reading weights, outer steps and writing weights."""
    group_s: float = 0.0
    """Averaging gradients in the worker, and telling its ranks the outer weights."""
    node_bytes: int = 0
    """Between workers, through shared memory."""
    sent_bytes: int = 0
    """Between workers, to other nodes."""


_Means = tuple[Tensor, Tensor]
"""Over workers: of the pseudo-gradient, and of the buffers, which are empty but for one fragment"""


@dataclass
class _UnderWay:
    fragment: int
    due: int  # the step after which it is applied
    exchange: Future[_Means] | None  # None: this rank does not exchange


class DiLoCo(WrappingOptimizer):
    """Wraps an optimizer: each worker steps on its own gradients; every `sync_every` steps all
    workers average how far they came from the outer weights, take an outer step on it, and go on
    from there. Made collectively; step() is local but for a worker's own ranks, and for waits.

    optimizer: any torch optimizer, the inner one; its state stays with the worker.
    params: the model, or its parameters: floating, equal in shape on all ranks. Rank 0's values are
        where all begin. Of a model its floating buffers, such as BatchNorm's statistics, are
        averaged too, with the last fragment.
    comm: the ranks, or a process group of torch.distributed of any backend.
    outer: the outer optimizer.
    sync_every: steps from one exchange of a fragment to the next, H in the papers.
    fragments: parts of the model that are exchanged at different steps, sync_every / fragments
        apart: a number, or a list of modules or of lists of parameters.
    delay: so many steps before it is applied an exchange begins; until then it goes on behind
        computation, and step() waits only if it takes longer. Below sync_every.
    alpha: share of the worker's own weights that stays when outer weights come; 0 takes the outer
        weights as they are.
    compression: None, "bfloat16", "int8", "topk", or hsgd.optim.diloco's Int8 or TopK: what
        pseudo-gradients travel as. The last two keep what is left out for the next time.
    group: "node": the ranks of a node are one worker, whose gradients are averaged in every step
        through shared memory (parameters are float32 on the CPU then); None: each rank is a worker;
        a number: so many ranks that follow one another are.

    Raises ValueError and TypeError for arguments that cannot work, and what collectives raise:
    PeerLost where a rank died, CollectiveTimeout where one did not come.
    """

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
        compression: Compression = None,
        group: Literal["node"] | int | None = "node",
    ) -> None:
        super().__init__(optimizer)
        _check(sync_every, delay, alpha)
        self.outer = Nesterov() if outer is None else outer
        self._period, self._delay, self._alpha = sync_every, delay, alpha
        parameters, self._buffers = tensors_of(params, "DiLoCo")
        parts = cut(parameters, fragments)
        steps = phases(len(parts), sync_every)
        self._comm, owned = comm_of(comm, "DiLoCo")
        self._made: list[Comm] = [self._comm] if owned else []
        broadcast_initial(self._comm, params, parameters)
        self._group, self._workers = self._split(group, parameters)
        self._worker_count = int(
            self._comm.allreduce(np.array([self._workers is not None], np.int64))[0]
        )
        self._fragments = [
            Fragment(part, phase, self._workers is not None)
            for part, phase in zip(parts, steps, strict=True)
        ]
        self._exchanges = []
        if self._workers is not None:
            self._exchanges = [
                exchange_of(compression, self._workers, one.count) for one in self._fragments
            ]
        self._thread = BackgroundThread("hsgd-diloco")
        self._under_way: list[_UnderWay] = []
        self._metrics = DiLoCoMetrics()

    # --- what training scripts call ---

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the wrapped optimizer, and what exchange there is to begin or to apply;
        local, but for the worker's own ranks. Blocking where an exchange takes longer than `delay`.
        A closure is called once in a group, before the gradients are averaged.
        """
        self._check_open()
        value = None
        if self._group is not None:
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
                closure = None
            begin = time.perf_counter()
            self._group.average_gradients(False)
            self._metrics.group_s += time.perf_counter() - begin
        result = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self._metrics.steps += 1
        with torch.no_grad():
            self._apply(self._metrics.steps)
            self._begin_due()
            if self._delay == 0:
                self._apply(self._metrics.steps)
        return value if result is None else result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; local. In a worker of several ranks gradients are zeroed where they are
        averaged.
        """
        if self._group is not None:
            self._group.zero_gradients()
        else:
            self._optimizer.zero_grad(set_to_none)

    def settle(self) -> None:
        """Apply what is under way now, not `delay` steps later; blocking, collective in a worker.
        All ranks call it after the same step.
        """
        self._check_open()
        with torch.no_grad():
            self._apply(None)

    def synchronize_weights(self) -> None:
        """Exchange all fragments now, and give all workers the outer weights; collective, blocking.
        For the end of training: the models of all ranks are equal then.
        """
        self.settle()
        with torch.no_grad():
            for number in range(len(self._fragments)):
                self._begin(number)
            self._apply(None, alpha=0.0)

    @contextlib.contextmanager
    def at_outer_weights(self) -> Iterator[None]:
        """Within it the parameters are the outer weights, for evaluation; local, in a worker
        collective.
        """
        self._check_open()
        parameters = [p.detach() for fragment in self._fragments for p in fragment.parameters]
        kept = [parameter.clone() for parameter in parameters]
        for fragment in self._fragments:
            fragment.take(self._outer_weights_of(fragment), 0.0)
        try:
            yield
        finally:
            for parameter, weights in zip(parameters, kept, strict=True):
                parameter.copy_(weights)

    def metrics(self) -> DiLoCoMetrics:
        """What this rank did; local."""
        if self._workers is None or self._workers.closed:
            return replace(self._metrics)
        now = self._workers.metrics()
        return replace(self._metrics, node_bytes=now.intra_bytes, sent_bytes=now.inter_bytes_sent)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's and, under "diloco", the outer weights, their velocity, what
        compression left out, and the exchanges under way, for which it waits; local. The worker's
        own weights are the model's.
        """
        under_way = [
            (one.fragment, one.due, None if one.exchange is None else one.exchange.result())
            for one in self._under_way
        ]
        own: dict[str, Any] = {
            "steps": self._metrics.steps,
            "workers": self._worker_count,
            "under_way": under_way,
        }
        if self._workers is not None:
            own["worker"] = self._workers.rank
            own["fragments"] = [
                {
                    "outer_weights": fragment.outer_weights.clone(),
                    "velocity": fragment.velocity.clone(),
                    "left_out": exchange.state_dict(),
                }
                for fragment, exchange in zip(self._fragments, self._exchanges, strict=True)
            ]
        return {**self._optimizer.state_dict(), "diloco": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back; collective, blocking. Each rank loads what it saved, or all load what rank
        0 saved: outer weights and velocity become those of rank 0, so that the number of workers
        may differ. Where it does, what is under way is dropped; what compression left out goes on
        with the worker that left it out. A wrapped optimizer's own state will do on all ranks:
        then nothing else changes.

        Raises ValueError, before anything is changed, where the state is of another model or of
        other fragments.
        """
        self._check_open()
        own = state_dict.get("diloco")
        if own is not None:
            self._check_state(own)
        self._optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "diloco"})
        self._take_over()
        if own is not None:
            self._metrics.steps = own["steps"]
            same = own["workers"] == self._worker_count
            self._load_under_way(own["under_way"] if same else [])
            if self._workers is not None:
                self._load_fragments(own, self._workers, same)

    def close(self) -> None:
        """Wait for exchanges under way, without applying them, and leave; local. A second call does
        nothing. The weights stay as they are.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.shutdown()
        finally:
            self._leave()

    def _abandon(self) -> None:
        """Its communicators end with the one that it was given."""
        self._closed = True
        self._thread.shutdown(wait=False)
        if self._group is not None:
            self._group.unhook()

    def __repr__(self) -> str:
        return (
            f"DiLoCo({self._optimizer!r}, {self.outer!r}, sync_every={self._period}, "
            f"fragments={len(self._fragments)}, delay={self._delay}, alpha={self._alpha})"
        )

    # --- exchanges ---

    def _begin_due(self) -> None:
        for number, fragment in enumerate(self._fragments):
            if (self._metrics.steps + self._delay - fragment.phase) % self._period == 0:
                self._begin(number)

    def _begin(self, number: int) -> None:
        fragment = self._fragments[number]
        buffers = self._buffers if number == len(self._fragments) - 1 else []
        if self._group is not None:
            self._group.average([buffer.detach() for buffer in buffers])
        exchange: Future[_Means] | None = None
        if self._workers is not None:
            begin = time.perf_counter()
            mine = fragment.pseudo_gradient()
            extra = joined([b.cpu().float() for b in buffers]) if buffers else torch.empty(0)
            self._metrics.apply_s += time.perf_counter() - begin
            exchange = self._thread.submit(self._average, self._workers, number, mine, extra)
        self._under_way.append(_UnderWay(number, self._metrics.steps + self._delay, exchange))

    def _average(self, workers: Comm, number: int, mine: Tensor, buffers: Tensor) -> _Means:
        begin = time.perf_counter()
        mean = self._exchanges[number].average(mine)
        if buffers.numel():
            workers.allreduce(buffers, "mean", out=buffers, name="buffers of DiLoCo")
        self._metrics.exchange_s += time.perf_counter() - begin
        return mean, buffers

    def _apply(self, step: int | None, alpha: float | None = None) -> None:
        """What is due at the step, or all; in the order of beginning, which all ranks share."""
        while self._under_way and (step is None or self._under_way[0].due <= step):
            self._finish(self._under_way.pop(0), self._alpha if alpha is None else alpha)

    def _finish(self, under_way: _UnderWay, alpha: float) -> None:
        fragment, exchange = self._fragments[under_way.fragment], under_way.exchange

        def read() -> list[Tensor]:
            assert exchange is not None
            begin = time.perf_counter()
            mean, buffers = exchange.result()
            self._metrics.wait_s += time.perf_counter() - begin
            fragment.step(self.outer, mean)
            return [fragment.outer_weights, buffers]

        buffers = self._buffers if under_way.fragment == len(self._fragments) - 1 else []
        arrived = self._shared(fragment.count + sum(b.numel() for b in buffers), read)
        begin = time.perf_counter()
        fragment.take(arrived[: fragment.count], alpha)
        for buffer, mean in zip(buffers, views_of(arrived[fragment.count :], buffers), strict=True):
            buffer.copy_(mean)
        self._metrics.apply_s += time.perf_counter() - begin
        self._metrics.outer_steps += 1

    def _outer_weights_of(self, fragment: Fragment) -> Tensor:
        return self._shared(fragment.count, lambda: [fragment.outer_weights])

    def _shared(self, count: int, read: Callable[[], list[Tensor]]) -> Tensor:
        """`count` values that the worker's first rank reads, on all of its ranks."""
        if self._group is None:
            return joined(read())
        flat = torch.empty(count)
        begin, waited = time.perf_counter(), self._metrics.wait_s
        self._group.share(flat, read, "outer weights")
        self._metrics.group_s += time.perf_counter() - begin - (self._metrics.wait_s - waited)
        return flat

    # --- saving and loading ---

    def _check_state(self, own: dict[str, Any]) -> None:
        saved = [len(one["outer_weights"]) for one in own.get("fragments", [])]
        here = [fragment.count for fragment in self._fragments]
        if saved and saved != here:
            raise ValueError(
                f"DiLoCo: the state has fragments of {saved} values, this optimizer of {here}; "
                "it is of another model, or fragments= differs"
            )
        if self._workers is not None and self._workers.rank == 0 and not saved:
            raise ValueError(
                "DiLoCo: the state has no outer weights; load on rank 0 what rank 0 saved"
            )

    def _load_under_way(self, saved: list[tuple[int, int, _Means | None]]) -> None:
        self._under_way.clear()
        for fragment, due, means in saved:
            done: Future[_Means] | None = None
            if self._workers is not None and means is not None:
                done = Future()
                done.set_result((means[0].clone(), means[1].clone()))
            self._under_way.append(_UnderWay(fragment, due, done))

    def _load_fragments(self, own: dict[str, Any], workers: Comm, same: bool) -> None:
        saved = own.get("fragments", [None] * len(self._fragments))
        for fragment, exchange, one in zip(self._fragments, self._exchanges, saved, strict=True):
            if one is not None:
                fragment.outer_weights.copy_(one["outer_weights"])
                fragment.velocity.copy_(one["velocity"])
            for vector in (fragment.outer_weights, fragment.velocity):
                workers.broadcast(vector, name="outer weights of DiLoCo")
            kept = one is not None and same and own.get("worker") == workers.rank
            exchange.load_state_dict(one["left_out"] if one is not None and kept else {})

    # --- set-up and end ---

    def _split(
        self, group: Literal["node"] | int | None, parameters: list[Tensor]
    ) -> tuple[WorkerGroup | None, Comm | None]:
        """This rank's worker, if that has several ranks, and the workers' first ranks."""
        comm = self._comm
        if group is None:
            workers = comm.split(0, key=comm.rank)
            assert workers is not None
            self._made.append(workers)
            return None, workers
        size = None if group == "node" else group
        members = split_workers(comm, size, 'DiLoCo: give group "node", None or a number; group')
        self._made.append(members)
        workers = comm.split(0 if members.rank == 0 else None, key=comm.rank)
        if workers is not None:
            self._made.append(workers)
        if members.size == 1:
            return None, workers
        for index, p in enumerate(parameters):
            if p.dtype != torch.float32 or p.device.type != "cpu":
                raise TypeError(
                    f"DiLoCo: parameter {index} is {p.dtype} on {p.device}, and a worker has "
                    f"{members.size} ranks, whose gradients are averaged in float32 on the CPU; "
                    "use group=None, and average gradients inside the node by other means"
                )
        return WorkerGroup(members, parameters), workers

    def _leave(self) -> None:
        with contextlib.ExitStack() as last_first:
            for comm in self._made:
                last_first.callback(comm.close)
            if self._group is not None:
                self._group.unhook()


def _check(sync_every: int, delay: int, alpha: float) -> None:
    if not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"DiLoCo: sync_every is {sync_every!r}; give steps, 1 or more")
    if not isinstance(delay, int) or not 0 <= delay < sync_every:
        raise ValueError(
            f"DiLoCo: delay is {delay!r}; give steps, from 0 to below sync_every={sync_every}"
        )
    if not 0 <= alpha < 1:
        raise ValueError(f"DiLoCo: alpha is {alpha!r}; give a share from 0 to below 1")
