"""DistributedOptimizer: a user's optimizer that steps on gradients of all ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from hsgd.config import Config
from hsgd.optim.replicas.replica_guard import ReplicaGuard
from hsgd.torch.adasum_optimizer import AdasumDistributed
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.gradients.gradient_buckets import Options
from hsgd.torch.gradients.overlap import OverlapChoice
from hsgd.torch.gradients.reducer import GradientReducer
from hsgd.torch.job import runtime
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.operations.reductions import ADASUM, AVERAGE
from hsgd.torch.strategy_table import (
    BUCKET_CAP_MB,
    STRATEGIES,
    Request,
    Strategy,
    refuse_options,
    share_optimizer,
    start_strategy,
)

__all__ = ["Distributed", "DistributedOptimizer"]

_OVERLAP = {"overlap": "always", "after_backward": "never"}


class Distributed(torch.optim.Optimizer):
    """The base that is put before the class of a user's optimizer."""

    _reducer: GradientReducer
    _names: dict[int, str]
    _synchronized: bool
    _should_synchronize: bool
    process_set: ProcessSet
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """Horovod's attribute, which scripts read."""
        groups = self.param_groups
        return {each: self._names[id(each)] for group in groups for each in group["params"]}

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes between two steps."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the backward passes per step; local, equal on all ranks."""
        self._reducer.set_passes(passes)

    @property
    def overlap_choice(self) -> OverlapChoice:
        """When gradients are reduced, and the trial's result; not a name of Horovod's; local."""
        return self._reducer.overlap.choice

    def synchronize(self) -> None:
        """Reduce the gradients, unless backward() has done so; collective, blocking.

        For Horovod scripts, which then call step() within skip_synchronize(). Gradients may be
        clipped or unscaled with and without it.
        """
        if self._reducer.active:
            self._watch()
            self._reducer.settle()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Keep step() from synchronizing in the block."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Synchronize, unless told not to, and make the optimizer's own step.

        With a closure, gradients are reduced after each of its calls, and the optimizer gets the
        mean of the ranks' losses (with op Sum their sum), so that ranks decide equally.
        """
        if closure is not None and self._reducer.active:
            return self._step_with(closure)
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        self._reducer.end_step()
        return super().step(closure)

    def _step_with(self, closure: Any) -> Any:
        if self._reducer.open:
            self.synchronize()
        self._synchronized = False

        def evaluate() -> Any:
            self._reducer.end_step()
            loss = closure()
            self._watch()
            self._reducer.settle()
            return self._reducer.combine_loss(loss)

        try:
            return super().step(evaluate)
        finally:
            self._reducer.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; open ones are reduced before, so that ranks stay together."""
        if self._reducer.active:
            self._reducer.close_round()
            self._reducer.end_step()
            self._watch()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group whose gradients are reduced as well; on all ranks before the same step."""
        super().add_param_group(param_group)
        if hasattr(self, "_reducer"):
            _name(self._names, self.param_groups)
            if self._reducer.active:
                self._watch()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state and drop open gradients, on all ranks together if possible.

        It may be called after a HorovodInternalError.
        """
        if self._reducer.active:
            with contextlib.suppress(HorovodInternalError):  # the job is over, init() comes next
                self._reducer.close_round()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)

    def _watch(self) -> None:
        self._reducer.watch([group["params"] for group in self.param_groups])


def _name(names: dict[int, str], groups: Sequence[dict[str, Any]]) -> None:
    for i, group in enumerate(groups):
        for j, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), f"allreduce.noname.{i}.{j}")


def _names(
    groups: Sequence[dict[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[int, str]:
    """Return names of parameters by id(); raises ValueError as Horovod does."""
    if named_parameters is None:
        names: dict[int, str] = {}
        _name(names, groups)
        return names
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    names = {id(parameter): name for name, parameter in pairs}
    unnamed = [id(p) for group in groups for p in group["params"] if id(p) not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(map(str, unnamed))}"
        )
    return names


def _check_groups(groups: Any) -> None:
    if isinstance(groups, list):
        seen: set[int] = set()
        for group in groups:
            for parameter in group:
                if not isinstance(parameter, Tensor):
                    raise ValueError("groups must consist of torch.Tensor.")
                if id(parameter) in seen:
                    raise ValueError("A parameter can only appear once in groups.")
                seen.add(id(parameter))
    elif groups is not None and not groups > 0:
        raise ValueError(
            "groups should be a non-negative integer or a list of list of torch.Tensor."
        )


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    strategy: Strategy = "auto",
    node_shared: bool = False,
    model: torch.nn.Module | None = None,
    strategy_options: dict[str, Any] | None = None,
) -> Any:
    """Return an optimizer like `optimizer`, of a subclass, that steps on gradients of all ranks.

    Local; its first step is collective and agrees on the buckets. It shares parameter groups and
    state with `optimizer`, which must not be used any more.

    Args:
        optimizer: any torch optimizer.
        named_parameters: model.named_parameters(); names are for reports, equal on all ranks.
        compression: how gradients are sent.
        backward_passes_per_step: passes whose gradients are accumulated before the reduction.
        op: Average, Sum, Min, Max, Product, or Adasum, which combines the ranks' steps instead of
            their gradients.
        gradient_predivide_factor: divides before the sum and multiplies after it, with Average
            only.
        num_groups: old name of `groups`.
        groups: number of buckets, or lists of parameters that share one.
        sparse_as_dense: reduce sparse gradients in buckets.
        process_set: the ranks.
        bucket_cap_mb: maximum MiB of a bucket without groups.
        strategy: "overlap" starts a bucket when its last gradient has come, "after_backward" starts
            all when backward() ends; "auto" tries both in the first steps and keeps the faster,
            unless HSGD_OVERLAP chooses; results are bitwise the same, see `overlap_choice`.
            "notified_tree" sends each layer through a tree of one-sided writes, and the next
            forward pass waits for its layers one by one (hsgd.optim.NotifiedTree; needs `model`).
            Collective: "gossip", in which ranks train locally and average weights with one peer at
            a time (hsgd.optim.Gossip); "diloco", in which nodes train locally and average their
            progress about every hundred steps (hsgd.optim.DiLoCo); "easgd_async" and
            "easgd_hybrid", in which ranks or nodes train locally around a centre
            (hsgd.optim.ElasticAveraging); these four average the buffers of `model` too.
        node_shared: keep the parameters once per node; each of its ranks reduces and updates a part
            of them after the backward pass. All get rank 0's values, which makes the call
            collective. For SGD, Adam, AdamW, LARS and LAMB, with op Average and without
            compression, groups, bucket_cap_mb, strategy="overlap" or a process set; clip with its
            clip_grad_norm_(). See hsgd.optim.NodeSharedOptimizer.
        model: see `strategy`.
        strategy_options: further arguments of the last four, such as trigger, sync_every or
            moving_rate.

    Raises:
        ValueError: an argument is out of range.
    """
    if gradient_predivide_factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if strategy not in get_args(Strategy):
        known = ", ".join(get_args(Strategy))
        raise ValueError(f'strategy is "{strategy}"; use one of {known}')
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; give MiB above 0")
    if named_parameters is not None:
        named_parameters = list(named_parameters)  # a generator can be read only once
    size = runtime.current().comm.size
    if op == ADASUM and size > 1 and not node_shared and strategy not in STRATEGIES:
        refuse_options(strategy, strategy_options)
        wrapped = _behind(AdasumDistributed, optimizer)
        wrapped._names = _names(optimizer.param_groups, named_parameters)
        wrapped._compression, wrapped.process_set = compression, process_set
        wrapped.backward_passes_per_step = backward_passes_per_step
        wrapped._guard = _guard_of(wrapped)
        return wrapped
    names = _names(optimizer.param_groups, named_parameters)
    _check_groups(groups)
    if strategy in STRATEGIES or node_shared:
        transport = {
            "op": op,
            "compression": compression,
            "backward_passes_per_step": backward_passes_per_step,
            "gradient_predivide_factor": gradient_predivide_factor,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set,
            "node_shared": node_shared,
            "bucket_cap_mb": bucket_cap_mb,
        }
        request = Request(optimizer, strategy, model, named_parameters, strategy_options, transport)
        return start_strategy(request) if strategy in STRATEGIES else share_optimizer(request)
    refuse_options(strategy, strategy_options)
    options = Options(
        compression,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        bucket_cap_mb,
        _OVERLAP.get(strategy) or Config.from_env().overlap,
    )
    wrapped = _behind(Distributed, optimizer)
    wrapped._reducer = GradientReducer(options, backward_passes_per_step, names)
    wrapped._names = names
    wrapped._reducer.guard = _guard_of(wrapped)
    wrapped.process_set, wrapped.op = process_set, op
    wrapped.gradient_predivide_factor = gradient_predivide_factor
    wrapped.sparse_as_dense = sparse_as_dense
    wrapped._synchronized, wrapped._should_synchronize = False, True
    if wrapped._reducer.active:
        wrapped._watch()
    return wrapped


def _guard_of(wrapped: Distributed | AdasumDistributed) -> ReplicaGuard:
    found = weakref.ref(wrapped)  # the optimizer holds the guard

    def tensors() -> list[tuple[str, Tensor]]:
        alive = found()
        assert alive is not None
        return [(name, parameter) for parameter, name in alive._parameter_names.items()]

    return ReplicaGuard(tensors)


def _behind(front: type, optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer that shares all with `optimizer`, with `front` before its class."""
    kind: Any = type(
        type(optimizer).__name__,
        (front, type(optimizer)),
        {"__module__": __name__, "__doc__": type(optimizer).__doc__},
    )
    wrapped = kind.__new__(kind)
    # A scheduler of `optimizer` may have replaced its step there.
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    return wrapped
