"""StandIn: rounds of an optimizer in which joined ranks take part with zeros.

A joined rank calls a collective of its own instead of a bucket's. Ranks compare what they call
before data moves, so all learn of the join from this call, and nothing is asked while no rank has
joined. This happens for each bucket of the round; then the ranks tell who has joined, and repeat
the round together.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from hsgd.comm.communicator import Comm
from hsgd.errors import HsgdError, SignatureMismatch
from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.gradients.gradient_buckets import Bucket, Collective
from hsgd.torch.operations.operation import meet

__all__ = ["StandIn", "end_round", "standing_in", "tells_of_join"]

_JOINED = "optimizer joined"
_WHO = "optimizer join"
_REASON_S = 2.0  # that the reason of an error may take to arrive


def end_round(comm: Comm, buckets: Sequence[Bucket]) -> bool:
    """Wait for all buckets, repeat them if ranks have joined, and set the gradients.

    Collective, blocking. Returns whether ranks have joined; raises as Handle.wait(). A join causes
    a mismatch in every bucket, so the first one shows it. Any other mismatch is a program error,
    which waiting for more would hide.
    """
    mismatch = buckets[0].wait() if buckets else None
    if mismatch is not None and not tells_of_join(mismatch):
        raise mismatch
    for bucket in buckets:
        later = bucket.wait()
        if mismatch is None:
            if later is not None:
                raise later
            bucket.finish()
    if mismatch is None:
        return False
    try:
        joined = _anybody_joined(comm, own=False)
    except SignatureMismatch:
        raise mismatch from None
    if not joined:
        raise mismatch
    for bucket in buckets:
        bucket.repeat()
        bucket.finish()
    return True


def tells_of_join(error: HsgdError) -> bool:
    """Return whether a collective failed only because ranks have joined."""
    return isinstance(error, SignatureMismatch) and _JOINED in error.names


def _anybody_joined(comm: Comm, *, own: bool) -> bool:
    """Return whether any rank has joined; collective, blocking.

    Raises SignatureMismatch if ranks called something else.
    """
    joined = bytearray([own])
    comm.allreduce(joined, "max", joined, _WHO)
    return bool(joined[0])


class StandIn:
    """The part of a joined rank in one optimizer.

    `before` is called first, `taken_part` after each round of the others. It holds none of the
    optimizer's memory: ranks drop an optimizer at different times, and each takes part until the
    job ends.
    """

    def __init__(
        self, comm: Comm, before: Callable[[], None], taken_part: Callable[[], None]
    ) -> None:
        self.collectives: list[Collective] = []
        """Those of the optimizer's buckets, in order."""
        self._comm = comm
        self._before, self._taken_part = before, taken_part

    def __call__(self) -> None:
        """Take part until all ranks have joined; collective, blocking.

        Raises HorovodInternalError if a rank is lost or calls something else.
        """
        self._before()
        try:
            if any(collective.device.type != "cpu" for collective in self.collectives):
                raise HorovodInternalError(
                    "join() with a DistributedOptimizer whose parameters are on a device: give all "
                    "ranks as many steps"
                )
            while not self._all_joined():
                for _ in self.collectives[1:]:
                    self._all_joined()
                _anybody_joined(self._comm, own=True)
                for collective in self.collectives:
                    collective.run_with_zeros()
                self._taken_part()
        except BaseException as error:
            self._comm.close()  # else the others would wait for this rank
            if isinstance(error, HsgdError):
                raise HorovodInternalError(str(error)) from error
            raise

    def _all_joined(self) -> bool:
        try:
            meet(self._comm, _JOINED)
        except SignatureMismatch:  # another rank called a bucket's collective
            return False
        return True


@contextlib.contextmanager
def standing_in(
    optimizers: Sequence[Callable[[], None]], failed: Callable[[str], None]
) -> Iterator[None]:
    """Run each StandIn in its own thread within the block, and join the threads at its end.

    If one fails, `failed` is called with the reason, and its error replaces the block's.
    """
    errors: list[BaseException] = []
    known = threading.Event()  # whether there are errors

    def run(optimizer: Callable[[], None]) -> None:
        try:
            optimizer()
        except BaseException as error:
            errors.append(error)
            known.set()
            failed(str(error))

    # Daemons, so that they do not outlive an interrupted program.
    threads = [
        threading.Thread(target=run, args=(optimizer,), name="hsgd.torch join", daemon=True)
        for optimizer in optimizers
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    except HorovodInternalError as error:
        # It may only say that another rank has left; a StandIn knows why, or soon will.
        known.wait(_REASON_S if threads else 0)
        raise (errors or [error])[0] from None
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
