"""GradientReducer: reduces gradients over all ranks while the backward pass runs.

A round goes from the first gradient to the last collective and ends with the last backward pass of
a step: when backward() returns, gradients are those of all ranks. Buckets are reduced in one order,
which the ranks agree on once, when they first meet; later parameters (new groups, or thawed ones)
are appended in the same way.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm, Op
from hsgd.errors import HsgdError
from hsgd.optim.optimizer_ranks import weakly
from hsgd.optim.replicas.replica_guard import ReplicaGuard
from hsgd.torch.collectives.allreduce import sparse_allreduce_async
from hsgd.torch.exceptions import HorovodInternalError, core_errors_as_horovods
from hsgd.torch.gradients.agreement import agree, split
from hsgd.torch.gradients.backward_pass import BackwardPass, hook_leaf
from hsgd.torch.gradients.gradient_buckets import Bucket, Options
from hsgd.torch.gradients.overlap import Overlap
from hsgd.torch.gradients.packing import HOT_COUNT
from hsgd.torch.gradients.stand_in import StandIn, end_round, tells_of_join
from hsgd.torch.job import runtime
from hsgd.torch.job.operation_timeline import add_levels
from hsgd.torch.operations.reductions import AVERAGE, SUM

__all__ = ["GradientReducer"]


class GradientReducer:
    """The hooks and buckets of an optimizer; `names` has all parameters by id()."""

    def __init__(self, options: Options, passes: int, names: dict[int, str]) -> None:
        self.passes = passes
        self.guard: ReplicaGuard | None = None
        """Compares the parameters at the end of each round."""
        self._with_joined = False  # whether ranks have joined in this round
        self._options = options
        self._names = names
        self._watched: list[int] = []  # all parameters of the optimizer, by id()
        self._resting: list[Tensor] = []  # those of them that need no gradients
        self._known: dict[Tensor, int] = {}  # parameters with hooks, and their remaining passes
        self._counted = False  # whether some have fewer passes than at the start of the step
        self._arrived: list[Tensor] = []  # parameters whose gradients came, not yet processed
        self._hooks: dict[Tensor, Any] = {}
        self._wake = _weak_hook(self)
        self._pass = BackwardPass(_weak_hook(self, "_begin_pass"), weakly(self._end_pass, None))
        self._passes_left = passes  # of this round
        self._rounds = 0  # since the last step
        self._order: dict[Tensor, None] = {}  # new parameters, in the order of their gradients
        self._places: dict[Tensor, tuple[Bucket, int]] = {}
        self._sparse: dict[Tensor, None] = {}
        self._buckets: list[Bucket] = []
        self._next = 0  # the bucket to launch next
        self._begun = False  # whether all collectives of the round were started
        self._touched = False  # whether a gradient came since the last round
        self.overlap = Overlap(options.overlap)
        """Decides whether collectives start during backward."""
        self._job = runtime.latest()  # the job of the current gradients
        self._alone = False  # whether that job has no other ranks
        self._comm: Comm | None = None
        self._stand_in: StandIn | None = None
        self._inspected: Callable[[], list[tuple[str, float]]] = weakly(self._pending, [])  # stalls

    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Follow new parameters that need gradients; local. Cheap if the groups are unchanged."""
        ids = [number for group in groups for number in map(id, group)]
        if ids != self._watched:
            self._watched = ids
            self._resting = [p for group in groups for p in group if p not in self._known]
        if self._resting:
            self._resting = [p for p in self._resting if not self._follow(p)]

    def _follow(self, parameter: Tensor) -> bool:
        if not parameter.is_leaf:
            return False
        if parameter not in self._hooks:
            self._hook(parameter, self._wake)
        if not parameter.requires_grad:
            return False
        self._known[parameter] = self.passes
        return True

    @property
    def active(self) -> bool:
        """Whether there are other ranks; local."""
        members = self._options.process_set
        if not runtime.is_initialized() or not members.included():
            return False
        return (members.size() or 1) > 1

    @property
    def open(self) -> bool:
        """Whether some gradients came and were not reduced."""
        return self._touched or bool(self._arrived)

    def set_passes(self, passes: int) -> None:
        """Change the passes per step, from the next step on; local."""
        self.passes = self._passes_left = passes
        for parameter in self._known:
            self._known[parameter] = passes
        self._counted = False

    def reduce(self) -> None:
        """Reduce all gradients over the process set; collective, blocking.

        Parameters without a gradient count as zero. Raises HorovodInternalError if ranks disagree
        or one is lost: gradients are dropped then, and the next call makes new buckets.
        """
        with self._ending_on_error():
            comm = self._follow_job()
        self.overlap.ready()
        self._look()
        with self._ending_on_error():
            self._finish_round(comm)
            self.overlap.end_step(comm)
        self._end_round()
        self._rounds += 1
        self._check_replicas(comm)

    def settle(self) -> None:
        """Reduce, unless this step's gradients are reduced already; collective, blocking."""
        if self.open or not self._rounds:
            self.reduce()

    def end_step(self) -> None:
        """Note that later gradients belong to another step; local."""
        self._rounds = 0
        self._pass.reset()

    def combine_loss(self, loss: Any) -> Any:
        """Return the mean of the ranks' losses, or their sum if gradients are summed.

        Collective, blocking, after a round. The type is that of `loss`; other types are returned
        unchanged.
        """
        number = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1)
        if not number:
            return loss
        assert self._comm is not None
        total = torch.as_tensor(loss).detach().to("cpu", torch.float64).reshape(1).clone()
        how: Op = "sum" if self._options.op == SUM else "mean"
        with self._ending_on_error():
            self._comm.allreduce(total, how, total, "optimizer loss")
        if isinstance(loss, Tensor):
            return total.reshape(loss.shape).to(loss.device, loss.dtype)
        return float(total)

    def _check_replicas(self, comm: Comm) -> None:
        """Compare the replicas at the end of a round without joined ranks; collective."""
        if self.guard is not None and not self._with_joined:
            with core_errors_as_horovods():
                self.guard.check(comm)
        self._with_joined = False

    def close_round(self) -> None:
        """Reduce open gradients (collective), or drop them in a new job, which has other ranks."""
        if self._job is not runtime.latest():
            self._start_anew(keep=True)
        elif self.open:
            self.reduce()

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """End the round on errors in the block; convert errors of the core to Horovod's."""
        try:
            yield
        except (HsgdError, HorovodInternalError) as error:
            # All ranks get this error. Collectives under way may wait for calls that no rank makes
            # any more, and write to their buckets until then, so these are not used again.
            self._start_anew(keep=False)
            if isinstance(error, HorovodInternalError):
                raise
            raise HorovodInternalError(str(error)) from error
        except Exception:  # of a compression; other ranks continue if all collectives began
            begun = self._begun
            met = [bucket.abandon(begun=begun) for bucket in self._buckets]
            if begun and self._comm is not None:
                self._rounds += 1
                with contextlib.suppress(HsgdError):  # the next step raises it too
                    self.overlap.end_step(self._comm)
                    self._check_replicas(self._comm)
            if not begun and any(error and not tells_of_join(error) for error in met):
                self._start_anew(keep=False)  # others gave up earlier, and start anew too
            else:
                self._end_round()
            raise
        except BaseException:  # Ctrl-C: do not wait
            self._start_anew(keep=False)
            raise

    def _end_round(self) -> None:
        self._touched = self._begun = False
        self._next = 0
        self._passes_left = self.passes
        if self._counted:
            self.set_passes(self.passes)

    def _hook(self, parameter: Tensor, call: Callable[[Tensor], None]) -> None:
        """Register `call` as the parameter's only hook."""
        if parameter in self._hooks:
            self._hooks[parameter].remove()
        if (handle := hook_leaf(parameter, call)) is not None:
            self._hooks[parameter] = handle

    def _came(self, parameter: Tensor) -> None:
        """Process a gradient of a parameter that is new, large, or completes a bucket."""
        if self._job is not runtime.latest():
            self._start_anew(keep=True)
        if self._alone:
            self._arrived.clear()
            return
        if self._pass.due:
            self._begin_pass(parameter)
        if parameter not in self._known and not self._follow(parameter):
            return
        self._arrived.append(parameter)
        self._look()
        if self._next_is_complete():
            self.overlap.ready()
            # Launch at the next hook: later hooks of the script may still change the gradient.
            self._pass.due = self.overlap.active

    def _begin_pass(self, parameter: Tensor) -> None:
        """Begin a pass with its first gradient, or launch buckets after one is complete."""
        if self._job is not runtime.latest():
            self._start_anew(keep=True)
        if self._alone:
            return
        if self._pass.begin():
            self._refuse_second_sum(parameter)
        elif self._next_is_complete():
            with self._ending_on_error():
                self._launch_complete()

    def _refuse_second_sum(self, first: Tensor) -> None:
        """Raise if summed gradients would be summed again; a repeated mean changes nothing."""
        if not self._rounds or self._options.op == AVERAGE:
            return
        bucket, index = self._places.get(first, (None, 0))
        kept = bucket is not None and first.grad is bucket.packing.views[index]
        others = [p.grad for p in self._known if p is not first and p.grad is not None]
        if any(map(torch.count_nonzero, others)) or (kept and not others):
            raise AssertionError(
                "DistributedOptimizer: backward() was called again, and gradients that ranks have "
                "combined already (op is not Average) would be combined once more; call step() or "
                "zero_grad() of the optimizer in between, or set backward_passes_per_step"
            )

    def _end_pass(self) -> None:
        """Handle the end of a pass; collective and blocking if it was the round's last one."""
        if self._job is not runtime.latest() or self._alone:
            return
        self._look()
        self._passes_left -= 1
        if self._passes_left <= 0:
            self._resting = [p for p in self._resting if not self._follow(p)]
            self.reduce()

    def _look(self) -> None:
        arrived = self._arrived[:]
        del self._arrived[: len(arrived)]
        if arrived and not self._count_run(arrived):
            for parameter in arrived:
                self._count(parameter)

    def _count_run(self, arrived: Sequence[Tensor]) -> bool:
        """Count gradients at once if they are neighbours in a bucket, in order: the usual case."""
        place = self._places.get(arrived[0])
        if place is None or self.passes != 1:
            return False
        bucket, index = place
        if not bucket.take_run(index, list(map(id, arrived))):
            return False
        self._touched = True
        if arrived[-1].numel() >= HOT_COUNT:  # only the last can be large: its hook led here
            bucket.packing.adopt(index + len(arrived) - 1)
        return True

    def _count(self, parameter: Tensor) -> None:
        place = self._places.get(parameter)
        left = self._known[parameter]
        if left <= 0 or (place is not None and place[0].has_taken(place[1])):
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._touched = self._counted = True
        self._known[parameter] = left - 1
        if left > 1:
            return
        if place is None:
            if parameter not in self._sparse:
                self._order[parameter] = None
            return
        bucket, index = place
        bucket.waiting -= 1
        if parameter.numel() >= HOT_COUNT:
            bucket.packing.adopt(index)

    def _next_is_complete(self) -> bool:
        return self._next < len(self._buckets) and self._buckets[self._next].waiting == 0

    def _launch_complete(self) -> None:
        while self._next_is_complete():
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        tracer = None if self._job is None else self._job.tracer
        begin_s = time.monotonic()
        bucket.launch(self._rounds)
        if tracer is not None:
            tracer("pack", bucket.label, begin_s, bucket.launched_s)

    def _finish_round(self, comm: Comm) -> None:
        self._complete()
        sparse = [(p, self._start_sparse(p)) for p in self._sparse]
        if len(self._places) + len(self._sparse) < len(self._known):
            # On all ranks in the same step; else they wait, and the stall inspector reports it.
            new = [p for p in self._known if p not in self._places and p not in self._sparse]
            sparse += self._extend(new)
        self._begun = True
        if end_round(comm, self._buckets):
            self._with_joined = True
            self._abandon_trial()
        self._trace_collectives()
        for parameter, finish in sparse:
            parameter.grad = finish()

    def _trace_collectives(self) -> None:
        tracer = None if self._job is None else self._job.tracer
        if tracer is None or self._comm is None:
            return
        for record in self._comm.take_records():
            if not record.name.startswith(Bucket.LABEL):
                continue
            cut = (b.label for b in self._buckets if b.label.startswith(record.name))
            name, (begin_s, end_s, _) = next(cut, record.name), record.call
            tracer("collective", name, begin_s, end_s, bytes=record.payload_bytes)
            add_levels(tracer, name, record)

    def _complete(self) -> None:
        """Launch the remaining buckets, with zeros for missing gradients."""
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._next = len(self._buckets)

    def _extend(self, new: Sequence[Tensor]) -> list[tuple[Tensor, Callable[[], Tensor]]]:
        """Agree on the order of new parameters, make their buckets, and launch them."""
        assert self._comm is not None and self._job is not None and self._stand_in is not None
        for parameter in new:
            self._order.setdefault(parameter)
        names = {parameter: self._names[id(parameter)] for parameter in self._order}
        wanted = self.overlap.wanted
        ordered, sparse, overlap = agree(
            self._comm,
            names,
            wanted,
            self._options.terms(self.passes),
            sparse_as_dense=self._options.sparse_as_dense,
        )
        if overlap != wanted:
            self.overlap = Overlap(overlap)
        self._order.clear()
        begun = [(parameter, self._start_sparse(parameter)) for parameter in sparse]
        light = self._pass.hook(self._arrived.append)
        self._sparse.update(dict.fromkeys(sparse))
        # Make all before the first launch: a compression may fail, and must not skip buckets.
        for members in split(ordered, self._options.groups, self._options.bucket_cap_mb):
            number = len(self._buckets)
            bucket = Bucket(
                self._comm,
                number,
                self._names[id(members[0])],
                members,
                self._options,
                self._job.threaded,
            )
            for index, parameter in enumerate(members):
                self._places[parameter] = (bucket, index)
                if index < len(members) - 1 and parameter.numel() < HOT_COUNT:
                    self._hook(parameter, light)
            self._buckets.append(bucket)
            self._stand_in.collectives.append(bucket.collective)
        if all(bucket.collective.device.type == "cpu" for bucket in self._buckets):
            self.overlap.begin(len(self._buckets))  # device streams run beside backward anyway
        self._complete()
        return begun

    def _start_sparse(self, parameter: Tensor) -> Callable[[], Tensor]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter).to_sparse()
        options = self._options
        name = f"sparse.{self._names[id(parameter)]}"
        return sparse_allreduce_async(parameter.grad, name, options.op, options.process_set)

    def _follow_job(self) -> Comm:
        """Return the communicator of the buckets; collective if it is new.

        Raises HorovodInternalError if named operations have failed, since the job is over then.
        """
        job = runtime.current()
        if self._job is not job:
            self._start_anew(keep=True)
        number = self._options.process_set.process_set_id
        if (reason := job.coordinator(number, "optimizer").ended) is not None:
            raise HorovodInternalError(reason)
        if self._comm is None:
            self._comm = job.private_comm(number, "optimizer")
            if self._comm.size == job.comm.size:
                job.carriers.append(self._comm)
            self._alone = False
            if self._inspected not in job.watched:
                job.watched.append(self._inspected)
            self._stand_in = StandIn(
                self._comm, weakly(self._reduce_open, None), weakly(self._abandon_trial, None)
            )
            job.joining.append(self._stand_in)
        return self._comm

    def _start_anew(self, *, keep: bool) -> None:
        """Reset to no gradients, in the current job; local. Do not `keep` values after an error."""
        for bucket in self._buckets:
            bucket.packing.release(keep=keep)
        if self._job is not None and self._stand_in is not None:
            self._job.joining.remove(self._stand_in)
        for parameter in self._known:
            self._hook(parameter, self._wake)
        self._arrived.clear()
        self._order.clear()
        self._places.clear()
        self._sparse.clear()
        self._buckets.clear()
        self.overlap = Overlap(self._options.overlap)
        self._comm = self._stand_in = None
        self._job = runtime.latest()
        self._alone = not self.active
        self._counted = True
        self._rounds = 0
        self._with_joined = False
        self._end_round()

    def _reduce_open(self) -> None:
        if self._job is runtime.latest() and self.open:
            self.reduce()

    def _abandon_trial(self) -> None:
        """Stop the trial, as ranks have joined and do not step; on all ranks after such a round."""
        self.overlap.abandon()
        if self.guard is not None:
            self.guard.restart()

    def _pending(self) -> list[tuple[str, float]]:
        return [(b.label, b.launched_s) for b in list(self._buckets) if b.launched_s]


# Parameters and the job outlive an optimizer, and must not keep its buckets.
def _weak_hook(reducer: GradientReducer, method: str = "_came") -> Callable[[Tensor], None]:
    found = weakref.ref(reducer)

    def hook(parameter: Tensor) -> None:
        alive = found()
        if alive is not None:
            getattr(alive, method)(parameter)

    return hook
