"""Iteration: delivers the batches of one epoch, as arrays or tensors."""

from __future__ import annotations

import functools
import os
import queue
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hsgd.errors import DataError

from ..format.ragged import Block, Ragged
from .batch_source import BatchSource, Filled
from .decode_stage import in_own_thread
from .device_transfer import DeviceTransfer
from .error_policy import ErrorPolicy
from .pinned_memory import tensor_of

__all__ = ["Batch", "Counts", "Iteration", "IterationSettings", "Progress"]

# Field name -> CPU torch tensor or NumPy array, samples along axis 0; a Ragged of them.
Batch = dict[str, Any]


@dataclass
class Counts:
    """Counters of what the training loop got, in one epoch or in all."""

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    skipped: int = 0  # batches left out on all ranks, as a rank could not read its own
    substituted: int = 0  # samples that replaced unreadable ones


@dataclass
class Progress(Counts):
    """Counters of one epoch; `ended` is true once the loop has seen its end."""

    ended: bool = False

    @property
    def has_begun(self) -> bool:
        """True if the loop got anything, even if only the end of an epoch without batches."""
        return self.ended or self.batches + self.skipped > 0


@dataclass(frozen=True)
class IterationSettings:
    """How batches are delivered; `source` names dataset and rank in messages."""

    as_torch: bool
    timeout_s: float
    source: str
    transform: Callable[[Batch], Any] | None = None
    transform_threads: int = 0
    to_device: DeviceTransfer | None = None  # applied last


class Iteration(Iterator[Any]):
    """Iterator over the batches of `source`; calls `finished` once its threads have ended."""

    def __init__(
        self,
        source: BatchSource,
        settings: IterationSettings,
        policy: ErrorPolicy,
        finished: Callable[[Progress], None],
    ) -> None:
        self.progress = Progress()
        self.source, self._settings, self._policy = source, settings, policy
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._anew: Callable[[], Iterator[Any]] | None = None
        self._other: Iterator[Any] | None = None
        self._ahead: deque[tuple[Future[Any], int, int]] = deque()
        self._step = 0  # of the next batch from the threads
        self._left_out = 0  # skipped steps after the last batch
        self._ended = self._at_end = False
        if settings.transform is not None and settings.transform_threads:
            self._pool = ThreadPoolExecutor(settings.transform_threads, "hsgd-transform")
        # The finalizer, which also runs at exit, ends the threads.
        self._stop = weakref.finalize(
            self,
            _stop,
            source,
            self._pool,
            self._pid,
            settings.timeout_s,
            functools.partial(finished, self.progress),
        )

    def __next__(self) -> Any:
        if self._anew is not None:
            if self._other is None:
                self._other = self._anew()
            return next(self._other)
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"iteration over {self._settings.source} belongs to process {self._pid}, this is "
                f"{os.getpid()}; call iter(loader) here"
            )
        began = time.perf_counter()
        found = self._transformed() if self._pool is not None else self._plain()
        self.progress.wait_s += time.perf_counter() - began
        if found is None:
            self._finish()
            raise StopIteration
        batch, count, steps = found
        if self._settings.to_device is not None:
            try:
                batch = self._settings.to_device(batch)
            except BaseException:
                self.close()  # the batch is lost
                raise
        self.progress.batches += 1
        self.progress.skipped += steps - 1
        self.progress.samples += count
        self.progress.substituted = self._policy.substituted
        return batch

    def supersede(self, anew: Callable[[], Iterator[Any]]) -> None:
        """Replace this iteration by that of `anew`, called when the next batch is requested.

        Does nothing if the loop got a batch already, or the iteration was closed.
        """
        if not self._ended and not self.progress.has_begun:
            self.close()
            self._anew = anew

    def close(self) -> None:
        if self._anew is not None and self._other is None:
            self._other = iter(())
        if isinstance(self._other, Iteration):
            self._other.close()
        self._ended, self._at_end = True, False
        self._ahead.clear()
        self._stop()

    def _finish(self) -> None:
        """Count steps left out at the end, and end the threads; warn of what could not be read."""
        self.progress.skipped += self._left_out
        self._left_out = 0
        self.progress.ended |= self._at_end
        self.progress.substituted = self._policy.substituted
        self.close()
        reason = self._policy.take_reason()
        if reason:
            skipped, steps = self.progress.skipped, self.progress.skipped + self.progress.batches
            warnings.warn(
                f"{self._settings.source}: {skipped} of {steps} batches of this epoch were left "
                f'out (on_error="skip"); the first of them: {reason}',
                stacklevel=3,
            )

    def _plain(self) -> tuple[Any, int, int] | None:
        """Return the next batch, its samples, and the steps that it took; None at the end."""
        found = self._next_batch()
        if found is None:
            return None
        batch, count, steps = found
        transform = self._settings.transform
        return batch if transform is None else transform(batch), count, steps

    def _transformed(self) -> tuple[Any, int, int] | None:
        """Return the same, in order, while threads transform the next batches."""
        assert self._pool is not None and self._settings.transform is not None
        while not self._ended and len(self._ahead) <= self._settings.transform_threads:
            found = self._next_batch()
            if found is None:
                break
            batch, count, steps = found
            self._ahead.append((self._pool.submit(self._settings.transform, batch), count, steps))
        if not self._ahead:
            return None
        task, count, steps = self._ahead.popleft()
        return task.result(self._settings.timeout_s), count, steps

    def _next_batch(self) -> tuple[Batch, int, int] | None:
        """Return the next batch that the policy delivers; None at the end; an error ends all."""
        steps = 0
        while (found := self._fetch()) is not None:
            failure = found if isinstance(found, BaseException) else None
            filled = found if isinstance(found, Filled) else None
            arrays = {} if filled is None else self.source.arrays(filled)
            steps += 1
            step, self._step = self._step, self._step + 1
            try:
                delivered = self._policy.judge(filled, step, failure, arrays)
            except BaseException:
                self.close()
                raise
            if delivered and filled is not None:
                batch = _as_tensors(arrays) if self._settings.as_torch else arrays
                return batch, filled.count, steps
        self._left_out += steps
        return None

    def _fetch(self) -> Filled | BaseException | None:
        """Return the next batch, or an error in its place; None at the end."""
        if self._ended:
            return None
        try:
            found = self.source.get(self._settings.timeout_s)
        except queue.Empty:
            return self._give_up()
        except MemoryError as error:
            return error
        if found is None:
            self._ended = self._at_end = True
        return found

    def _give_up(self) -> DataError:
        """Return the error of a timeout; do not wait for threads blocked by the file system."""
        self._ended = True
        self.source.close()
        self._stop.detach()
        error = DataError(
            f"{self._settings.source}: batch {self._step} did not arrive within "
            f"{self._settings.timeout_s} s; check the file system or raise timeout_s"
        )
        error.rank = self._policy.rank
        return error


def _as_tensors(arrays: dict[str, Block]) -> Batch:
    return {
        name: Ragged(tensor_of(block.values), tensor_of(block.offsets))
        if isinstance(block, Ragged)
        else tensor_of(block)
        for name, block in arrays.items()
    }


def _stop(
    source: BatchSource,
    pool: ThreadPoolExecutor | None,
    pid: int,
    timeout_s: float,
    finished: Callable[[], None],
) -> None:
    """End the threads and wait for them; do nothing in a forked child, which has none."""
    if os.getpid() != pid:
        return
    source.close()
    has_ended = source.release(timeout_s)
    if pool is not None:
        pool.shutdown(wait=not in_own_thread(), cancel_futures=True)
    if has_ended:
        finished()
