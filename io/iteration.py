"""One pass over an epoch: batches out of the ring, as arrays or tensors, until it ends or is left.

Owns the life of the reading threads and what the training loop sees of them: batches, errors,
time-outs. Never reads (fill.py) and never decides the order (partition.py).
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hsgd.io.fill import Filled, Filler, Starved
from hsgd.io.ring import BufferRing
from numpy.typing import NDArray

from hsgd.errors import DataError

__all__ = ["Batch", "Iteration", "Progress", "Settings"]

Batch = dict[str, Any]  # field name -> CPU torch tensor or NumPy array, samples along axis 0
_RELEASE_S = 10.0  # for another thread of the program to drop batches when memory has run out


@dataclass
class Progress:
    """What the training loop has had of an epoch."""

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True)
class Settings:
    """How batches are handed out. source: the dataset and rank, for messages."""

    as_torch: bool
    timeout_s: float
    source: str
    transform: Callable[[Batch], Any] | None = None
    transform_threads: int = 0


class Iteration(Iterator[Any]):
    """Starts the threads of `filler`, and ends them however the loop ends.

    finished: called once, in the process of the threads, when they have ended.
    """

    def __init__(
        self,
        filler: Filler,
        ring: BufferRing,
        settings: Settings,
        finished: Callable[[], None],
    ) -> None:
        self.progress = Progress()
        self._filler, self._ring, self._settings = filler, ring, settings
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[Future[Any], int]] = deque()
        self._ended = False
        if settings.transform is not None and settings.transform_threads:
            self._pool = ThreadPoolExecutor(settings.transform_threads, "hsgd-transform")
        # Daemons, so that a forgotten iterator never keeps the interpreter from ending; the
        # finalizer, which also runs at exit, lets them end by themselves.
        self._stop = weakref.finalize(
            self, _stop, filler, ring, self._pool, self._pid, settings.timeout_s, finished
        )
        filler.start()

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"iteration over {self._settings.source} belongs to process {self._pid}, this is "
                f"{os.getpid()}; call iter(loader) here"
            )
        began = time.perf_counter()
        batch, count = self._transformed() if self._pool is not None else self._plain()
        self.progress.wait_s += time.perf_counter() - began
        self.progress.batches += 1
        self.progress.samples += count
        return batch

    def close(self) -> None:
        """End the reading threads; the iteration is over."""
        self._ended = True
        self._stop()

    def _plain(self) -> tuple[Any, int]:
        """The next batch and its samples; StopIteration at the end."""
        filled = self._filled()
        if filled is None:
            raise StopIteration
        batch = self._batch(filled)
        transform = self._settings.transform
        return batch if transform is None else transform(batch), filled.count

    def _transformed(self) -> tuple[Any, int]:
        """The same, with transforms of the next batches under way in threads, in order."""
        assert self._pool is not None and self._settings.transform is not None
        while not self._ended and len(self._ahead) <= self._settings.transform_threads:
            filled = self._filled()
            if filled is None:
                break
            task = self._pool.submit(self._settings.transform, self._batch(filled))
            self._ahead.append((task, filled.count))
        if not self._ahead:
            self.close()
            raise StopIteration
        task, count = self._ahead.popleft()
        return task.result(self._settings.timeout_s), count

    def _filled(self) -> Filled | None:
        """The next batch from the threads; None, or an exception, ends the iteration."""
        if self._ended:
            return None
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            try:
                found = self._filler.get(max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._give_up()
            except BaseException:
                self.close()
                raise
            if isinstance(found, Starved):
                self._make_room()
            elif isinstance(found, BaseException):
                self.close()
                raise found
            elif found is None:
                if self._pool is None:
                    self.close()
                self._ended = True
                return None
            else:
                if found.bad:
                    self.close()
                    raise found.bad[0][1]
                return found

    def _make_room(self) -> None:
        """Add slots when the loop keeps so many batches that none is left to read into."""
        if not self._filler.is_stuck():
            return
        if self._ring.can_grow():
            self._ring.grow(max(1, self._ring.base_slots // 2))
            return
        deadline = time.monotonic() + min(_RELEASE_S, self._settings.timeout_s)
        while self._filler.is_stuck():
            if time.monotonic() > deadline:
                self.close()
                raise MemoryError(
                    f"{self._settings.source}: the program keeps batches of "
                    f"{self._ring.nbytes >> 20} MiB, all that memory_limit allows; drop them "
                    "before asking for more, or raise memory_limit"
                )
            time.sleep(0.01)  # a destructor in another thread tells nobody

    def _give_up(self) -> None:
        """Nothing came in time: leave without waiting for threads that the file system holds."""
        self._ended = True
        self._filler.close()
        self._stop.detach()
        raise DataError(
            f"{self._settings.source}: batch {self.progress.batches} did not arrive within "
            f"{self._settings.timeout_s} s; check the file system or raise timeout_s"
        ) from None

    def _batch(self, filled: Filled) -> Batch:
        if filled.slot is None:
            arrays = self._ring.empty()
        else:
            arrays = self._ring.arrays(filled.slot, filled.count)
        return _as_tensors(arrays) if self._settings.as_torch else arrays


def _as_tensors(arrays: dict[str, NDArray[Any]]) -> Batch:
    """The same memory as torch tensors."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _stop(
    filler: Filler,
    ring: BufferRing,
    pool: ThreadPoolExecutor | None,
    pid: int,
    timeout_s: float,
    finished: Callable[[], None],
) -> None:
    """Release the threads and wait for them; a forked child has none, and locks may be held."""
    if os.getpid() != pid:
        return
    filler.close()
    deadline = time.monotonic() + timeout_s
    for thread in filler.threads:
        if thread is not threading.current_thread():  # the garbage collector may run anywhere
            thread.join(max(0.0, deadline - time.monotonic()))
    if pool is not None:
        pool.shutdown(wait=True, cancel_futures=True)
    if not any(thread.is_alive() for thread in filler.threads):
        filler.release()
        finished()
