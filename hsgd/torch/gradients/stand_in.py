"""Rounds of an optimizer in which ranks that have joined take part with zeros.

Owns what is called on the optimizer's communicator for that. A rank that has joined calls a
collective of its own where others call that of a bucket; as ranks compare what they call before
data moves, all learn of it from that very call, and nothing has to be asked while no rank has
joined. So it goes with each bucket of the round; then ranks tell who has joined, and make the round
again, together.
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


def end_round(comm: Comm, buckets: Sequence[Bucket]) -> bool:
    """Wait for the collectives of all buckets, made again where ranks have joined, and make the
    gradients those of all ranks; whether ranks have joined. Collective, blocking. Raises as
    Handle.wait().

    Who has joined differs from the others in every bucket, so the first one tells. Any other
    difference is an error of the program, which waiting for more would hide.
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
    """Return whether any rank has joined; collective, blocking. Raises SignatureMismatch if ranks
    called something else.
    """
    joined = bytearray([own])
    comm.allreduce(joined, "max", joined, _WHO)
    return bool(joined[0])


class StandIn:
    """What a rank does for one optimizer when it has joined.

    before: called first. taken_part: called after each round of the others. Holds none of the
    optimizer's memory: ranks forget an optimizer at different times, and each takes part until the
    job ends.
    """

    def __init__(
        self, comm: Comm, before: Callable[[], None], taken_part: Callable[[], None]
    ) -> None:
        self.collectives: list[Collective] = []
        """Of the optimizer's buckets, in order."""
        self._comm = comm
        self._before, self._taken_part = before, taken_part

    def __call__(self) -> None:
        """Take part until all ranks have joined; collective, blocking. Raises HorovodInternalError
        when one is lost, or does something else.
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
            self._comm.close()  # or the others would wait for this rank
            if isinstance(error, HsgdError):
                raise HorovodInternalError(str(error)) from error
            raise

    def _all_joined(self) -> bool:
        try:
            meet(self._comm, _JOINED)
        except SignatureMismatch:  # met a bucket of the others
            return False
        return True


@contextlib.contextmanager
def standing_in(
    optimizers: Sequence[Callable[[], None]], failed: Callable[[str], None]
) -> Iterator[None]:
    """Run each of these, a StandIn, in a thread of its own within the block; they have ended
    when it is left without an error. failed: told why, when one of them fails; what it raised is
    then raised in place of what the context raises.
    """
    errors: list[BaseException] = []

    def run(optimizer: Callable[[], None]) -> None:
        try:
            optimizer()
        except BaseException as error:
            errors.append(error)
            failed(str(error))

    # Daemons: they must not outlive a program that is interrupted while it waits for the others.
    threads = [
        threading.Thread(target=run, args=(optimizer,), name="hsgd.torch join", daemon=True)
        for optimizer in optimizers
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    except HorovodInternalError as error:
        raise (errors or [error])[0] from None
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
