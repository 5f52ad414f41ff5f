"""ExchangesUnderWay: the queue of exchanges that have begun and are not applied yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.errors import ReplicasDiffer
from hsgd.optim.background_thread import BackgroundThread
from hsgd.optim.diloco.diloco_metrics import DiLoCoMetrics
from hsgd.optim.diloco.pseudo_gradient_exchange import Exchange
from hsgd.optim.replicas.replica_guard import ReplicaGuard

__all__ = ["ExchangesUnderWay", "Means", "Saved"]

Means = tuple[Tensor, Tensor]
"""Means over workers: of the pseudo-gradient, and of the buffers (of one fragment, else empty)."""
Saved = list[tuple[int, int, Means | None]]
"""For each exchange its fragment, the step after which it is applied, and the result."""


@dataclass
class _UnderWay:
    fragment: int
    due: int
    done: Future[Means] | None  # None: this rank does not exchange


class ExchangesUnderWay:
    """The pending exchanges of one rank, the same on all ranks.

    Args:
        workers: the ranks that exchange; None if this rank does not.
        in_background: run exchanges in a thread, not in begin().
        guards: compare, per fragment, what workers must hold equal before an exchange; or None.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        workers: Comm | None,
        in_background: bool,
        guards: Sequence[ReplicaGuard | None],
    ) -> None:
        self._exchanges, self._workers, self._guards = exchanges, workers, guards
        self._thread = BackgroundThread("hsgd-diloco", self._abort) if in_background else None
        self._queue: list[_UnderWay] = []
        self.seconds = 0.0
        self.node_bytes = self.sent_bytes = 0

    def begin(self, fragment: int, due: int, mine: Tensor, buffers: Tensor) -> None:
        """Begin an exchange, due after step `due`; collective, not blocking in the background."""
        done: Future[Means] | None = None
        if self._workers is not None:
            if self._thread is not None:
                done = self._thread.submit(self._average, fragment, due, mine, buffers)
            else:
                done = Future()
                try:
                    done.set_result(self._average(fragment, due, mine, buffers))
                except ReplicasDiffer as error:  # wait_first() raises it on the worker's ranks
                    done.set_exception(error)
        self._queue.append(_UnderWay(fragment, due, done))

    def first(self, step: int | None) -> int | None:
        """Return the fragment of the first exchange if it is due; for None, any exchange is."""
        if not self._queue or (step is not None and self._queue[0].due > step):
            return None
        return self._queue[0].fragment

    def wait_first(self) -> Means:
        """Return the result of the first exchange, or raise its error; blocking. It stays first."""
        done = self._queue[0].done
        assert done is not None
        return done.result()

    def drop_first(self) -> None:
        self._queue.pop(0)

    def drain(self) -> None:
        """Wait for all exchanges and drop them; blocking."""
        while self._queue:
            done = self._queue[0].done
            if done is not None:
                done.exception()
            self._queue.pop(0)

    def saved(self) -> Saved:
        """Return the results, up to the first exchange that failed; blocking."""
        found: Saved = []
        for one in self._queue:
            if one.done is not None and (one.done.cancelled() or one.done.exception() is not None):
                break
            found.append((one.fragment, one.due, None if one.done is None else one.done.result()))
        return found

    def load(self, saved: Saved) -> None:
        """Continue with saved exchanges; none may be under way."""
        for fragment, due, means in saved:
            done: Future[Means] | None = None
            if self._workers is not None and means is not None:
                done = Future()
                done.set_result((means[0].clone(), means[1].clone()))
            self._queue.append(_UnderWay(fragment, due, done))

    def added_to(self, metrics: DiLoCoMetrics) -> DiLoCoMetrics:
        return replace(
            metrics,
            exchange_s=metrics.exchange_s + self.seconds,
            node_bytes=metrics.node_bytes + self.node_bytes,
            sent_bytes=metrics.sent_bytes + self.sent_bytes,
        )

    def close(self) -> None:
        """Wait for exchanges and end the thread; blocking. An interrupt breaks `workers`."""
        try:
            if self._thread is not None:
                self._thread.shutdown()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Break the workers' communicator, so that no worker waits for this one; never blocks."""
        self._abort()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _abort(self) -> None:
        if self._workers is not None and not self._workers.closed:
            self._workers.abort()

    def _average(self, fragment: int, due: int, mine: Tensor, buffers: Tensor) -> Means:
        workers = self._workers
        assert workers is not None, "this rank exchanges"
        begin = time.perf_counter()
        guard = self._guards[fragment]
        if guard is not None:
            guard.check(workers, due)
        mean = self._exchanges[fragment].average(mine, due)
        if buffers.numel():
            workers.allreduce(buffers, "mean", out=buffers, name="buffers of DiLoCo")
        now = workers.metrics()  # in this thread, since it waits for running collectives
        self.node_bytes, self.sent_bytes = now.intra_bytes, now.inter_bytes_sent
        self.seconds += time.perf_counter() - begin
        return mean, buffers
