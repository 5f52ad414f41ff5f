"""NodeSharedOptimizer: updates parameters that exist once per node."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, StateDict

from hsgd.comm.agree import agree
from hsgd.optim.fixed_parameters import FixedParameters
from hsgd.optim.large_batch.lamb import LAMB
from hsgd.optim.large_batch.lars import LARS
from hsgd.optim.node_shared.node_gradients import ClusterGradients, NodeGradients
from hsgd.optim.node_shared.node_guard import node_guard, option_terms, options_of
from hsgd.optim.node_shared.shared_parameters import (
    ALIGNMENT,
    ParameterSlice,
    SharedParameters,
    aligned,
    share_parameters,
)

__all__ = ["NodeSharedOptimizer", "SharedParameters", "share_parameters"]

_BATCH = 1 << 20  # elements that are averaged together, and updated while they are in a cache
# The supported optimizers, with the names of their state that has a parameter's shape.
_STATE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    LARS: ("momentum_buffer",),
    LAMB: ("exp_avg", "exp_avg_sq"),
}
# Those that need whole tensors for their norms, and keep state in float32 for 16-bit parameters.
_BY_TENSOR = (LARS, LAMB)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _reported(method: _Method) -> _Method:
    """Wrap a method in the context of reporting()."""

    @functools.wraps(method)
    def call(self: NodeSharedOptimizer, *args: Any, **kwargs: Any) -> Any:
        with self.reporting():
            return method(self, *args, **kwargs)

    return cast(_Method, call)


@dataclass(frozen=True)
class _Batch:
    """Pieces that one optimizer updates together, with room for most of their mean gradients."""

    pieces: list[ParameterSlice]
    parts: list[nn.Parameter]
    means: list[Tensor | None]
    optimizer: Any


class NodeSharedOptimizer(Optimizer):
    """Updates shared parameters: each rank of a node reduces and updates its part of them.

    With L ranks on a node, each averages 1/L of the gradients over all ranks of all nodes and
    updates 1/L of the parameters; optimizer state exists once per node, in shared memory. Then the
    ranks of the node wait for one another. The result is bitwise that of the same optimizer after
    an allreduce with op "mean". Sharded updates and shared state are our own; for the source of the
    idea see shared_parameters.py.

    Gradients that other ranks of the node average are moved to shared memory as soon as autograd
    has made them; gradients assigned to `parameter.grad` are moved in step(). On one node the mean
    of a few gradients is computed and used at a time, while it is in the cache.

    Parameters without a gradient on all ranks are not updated; if only some ranks have one, the
    others count as zeros. Schedulers and users see and change `param_groups`, which are those of
    `optimizer`. SGD, Adam and AdamW split the parameters evenly, to the element; LARS and LAMB need
    whole tensors, so each goes to one rank, as evenly as possible. A share of the nodes' copies and
    the ranks' options are compared in each step.

    step() is collective over all ranks, blocking; it raises what collectives do, and
    ReplicasDiffer.

    Args:
        optimizer: torch.optim.SGD, Adam, AdamW, hsgd.optim.LARS or LAMB, without state yet.
        shared: what share_parameters() returned for the model; it must contain every parameter of
            `optimizer`.
        sparse_as_dense: make sparse gradients dense. Without it they raise TypeError.
        names: of the parameters, for errors; others are numbered.

    Raises:
        ValueError: another optimizer, one with state, or foreign parameters; also if
            torch.amp.GradScaler makes the step.
    """

    loads_together = True

    def __init__(
        self,
        optimizer: Optimizer,
        shared: SharedParameters,
        *,
        sparse_as_dense: bool = False,
        names: Mapping[Tensor, str] | None = None,
    ) -> None:
        self._shared = shared
        self._comm = shared.comm
        self._kind: Any = type(optimizer)
        self._index = {parameter: i for i, parameter in enumerate(shared.parameters)}
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        agree(self._comm, "node_shared", lambda: self._terms(optimizer, sparse_as_dense))
        every = shared.parameters
        self._fixed = FixedParameters("node_shared", self, every, every, every)
        self._guard = node_guard(shared, self.param_groups, self._fixed, names or {})
        optimizer.state.clear()  # LARS makes its buffers at once; ours are shared
        self._ranges = {dtype: self._split(dtype) for dtype in shared.counts}
        self._gradients: NodeGradients | ClusterGradients
        place = NodeGradients if shared.comm.cross_size == 1 else ClusterGradients
        self._gradients = place(shared, self._ranges, sparse_as_dense)
        self._batches = [batch for dtype in shared.counts for batch in self._make_batches(dtype)]
        self._used = torch.zeros(len(shared.parameters), dtype=torch.uint8)
        self._steps = [0] * len(shared.parameters)
        self._state_flats: dict[tuple[str, torch.dtype], Tensor] = {}
        self._moved: set[tuple[ParameterSlice, str]] = set()  # state that is already in them
        self._hooked: set[int] = set()
        self._is_reduced = False
        super().__setstate__({})  # hooks around step()
        self.zero_grad()

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that converts errors of collectives, for subclasses; local."""
        return contextlib.nullcontext()

    @property
    def _step_supports_amp_scaling(self) -> bool:  # GradScaler.step() reads it first
        raise ValueError(
            "node_shared: GradScaler decides on each rank by itself whether to step, and ranks "
            "would wait for one another; use torch.autocast with bfloat16, which needs no scaler"
        )

    @staticmethod
    def check_kind(optimizer: Optimizer) -> None:
        """Raise ValueError if the optimizer cannot update parts of parameters; local."""
        kind = type(optimizer)
        if kind not in _STATE:
            known = ", ".join(known.__name__ for known in _STATE)
            raise ValueError(
                f"node_shared: {kind.__name__} is not supported, its update may need more than "
                f"this rank's part of the parameters; use {known}, or node_shared=False"
            )

    # --- which rank owns what ---

    def _terms(self, optimizer: Optimizer, sparse_as_dense: bool) -> dict[str, object]:
        self.check_kind(optimizer)
        self._check(optimizer)
        terms = {"optimizer": self._kind.__name__, "sparse_as_dense": sparse_as_dense}
        terms |= option_terms(self.param_groups)
        for number, indices in enumerate(self._indices()):
            terms[f"group {number}"] = f"parameters {indices}"
        return terms

    def _check(self, optimizer: Optimizer) -> None:
        values = (value for state in optimizer.state.values() for value in state.values())
        if any(bool(torch.as_tensor(value).any()) for value in values):
            raise ValueError(
                f"node_shared: the {self._kind.__name__} has state already; share the parameters "
                "first, then load its state_dict"
            )
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in self._index:
                    raise ValueError(
                        f"node_shared: parameter {place} of group {number}, shape "
                        f"{tuple(parameter.shape)}, is not among the shared ones; share the whole "
                        "model"
                    )

    def _split(self, dtype: torch.dtype) -> list[int]:
        """Return the bounds of the parts of this node's ranks in the array of a dtype."""
        parts, count = self._comm.local_size, self._shared.counts[dtype]
        bounds = [count * part // parts // ALIGNMENT * ALIGNMENT for part in range(parts)]
        if self._kind in _BY_TENSOR:  # round to the nearest beginning of a parameter
            starts = [place.start for _, place in self._shared.of(dtype)] + [count]
            bounds = [min(starts, key=lambda start: abs(start - bound)) for bound in bounds]
        return [*bounds, count]

    def _pieces(self, dtype: torch.dtype) -> Iterator[ParameterSlice]:
        """Yield this rank's parts, cut into pieces if the optimizer allows it."""
        rank = self._comm.local_rank
        first, last = self._ranges[dtype][rank : rank + 2]
        for index, place in self._shared.of(dtype):
            begin, end = max(first, place.start), min(last, place.stop)
            most = max(place.count, 1) if self._kind in _BY_TENSOR else _BATCH
            for at in range(begin, end, most):
                yield ParameterSlice(index, at - place.start, min(at + most, end) - place.start)

    def _make_batches(self, dtype: torch.dtype) -> Iterator[_Batch]:
        room = torch.empty(_BATCH, dtype=dtype)
        held: list[ParameterSlice] = []
        filled = 0
        for piece in self._pieces(dtype):
            size = aligned(piece.end - piece.begin)
            if held and filled + size > _BATCH:
                yield self._make_batch(held, room)
                held, filled = [], 0
            held.append(piece)
            filled += size
        if held:
            yield self._make_batch(held, room)

    def _make_batch(self, pieces: list[ParameterSlice], room: Tensor) -> _Batch:
        parts: list[nn.Parameter] = []
        means: list[Tensor | None] = []
        begin = 0
        for piece in pieces:
            place = self._shared.places[piece.index]
            part = piece.of(place.view(self._shared.flats[room.dtype]))
            parts.append(nn.Parameter(part))
            end = begin + part.numel()
            means.append(room[begin:end].view(part.shape) if end <= _BATCH else None)
            begin = aligned(end)
        by_index: dict[int, list[nn.Parameter]] = {}
        for piece, parameter in zip(pieces, parts, strict=True):
            by_index.setdefault(piece.index, []).append(parameter)
        groups = [
            {**options, "params": [part for i in indices for part in by_index.get(i, ())]}
            for options, indices in zip(options_of(self.param_groups), self._indices(), strict=True)
        ]
        optimizer = self._kind(groups)
        if self._kind is LARS:
            optimizer.keeps_norms = False  # any rank of the node may write to the weights
        return _Batch(pieces, parts, means, optimizer)

    def _indices(self) -> list[list[int]]:
        return [[self._index[p] for p in group["params"]] for group in self.param_groups]

    def _mine(self) -> Iterator[tuple[ParameterSlice, nn.Parameter, dict[str, Any]]]:
        for batch in self._batches:
            for piece, part in zip(batch.pieces, batch.parts, strict=True):
                yield piece, part, batch.optimizer.state.get(part, {})

    # --- gradients ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients to None or zero; local."""
        self._is_reduced = False
        for index, parameter in enumerate(self._shared.parameters):
            if index not in self._hooked and parameter.requires_grad:
                hook = _hook_of(self)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooked.add(index)
            self._gradients.clear(index, set_to_none)

    @_reported
    def synchronize(self) -> None:
        """Average each rank's part of the gradients over all ranks; collective, blocking.

        step() does it unless it was done. `parameter.grad` is not the average afterwards: use
        clip_grad_norm_() to clip.
        """
        self._complete()
        self._gradients.reduce(self._used_pieces())
        self._is_reduced = True

    def _complete(self) -> None:
        """Wait for the gradients of all ranks, and find out which parameters have one."""
        came = torch.tensor(self._gradients.complete(), dtype=torch.uint8)
        self._used.copy_(came)
        self._comm.allreduce(self._used, "max", out=self._used, name="used parameters")

    def _used_pieces(self) -> list[ParameterSlice]:
        used = self._used.tolist()
        return [piece for batch in self._batches for piece in batch.pieces if used[piece.index]]

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Do nothing, for Horovod scripts: step() does not repeat synchronize() anyway."""
        yield

    @_reported
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the averaged gradients to a total norm of at most `max_norm`; collective, blocking.

        Call it between backward() and step(). Returns the norm before, as
        torch.nn.utils.clip_grad_norm_ does for whole gradients.
        """
        if not self._is_reduced:
            self.synchronize()
        parts = [self._gradients.part(piece) for piece in self._used_pieces()]
        norms = [torch.zeros((), dtype=torch.float64)]
        norms += [torch.linalg.vector_norm(part.double(), norm_type) for part in parts]
        if norm_type == float("inf"):
            total = torch.stack(norms).max()
            self._shared.local.allreduce(total, "max", out=total, name="norm")
        else:
            total = torch.stack([norm**norm_type for norm in norms]).sum()
            self._shared.local.allreduce(total, "sum", out=total, name="norm")
            total = total ** (1 / norm_type)
        if self._comm.cross_size > 1:  # nodes with other parts round differently
            self._comm.broadcast(total, name="norm")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for part in parts:
            part.mul_(factor.to(part.dtype))
        return total

    # --- the step ---

    @_reported
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average gradients, update this rank's part, wait for the node; collective, blocking."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._fixed.check(self)
        if not self._is_reduced and isinstance(self._gradients, NodeGradients):
            self._complete()
        elif not self._is_reduced:
            self.synchronize()
        used = self._used.tolist()
        options = options_of(self.param_groups)
        for batch in self._batches:
            for group, inner in zip(options, batch.optimizer.param_groups, strict=True):
                inner.update(group)
            for piece, part, room in zip(batch.pieces, batch.parts, batch.means, strict=True):
                part.grad = self._mean(piece, room) if used[piece.index] else None
            batch.optimizer.step()
            for part in batch.parts:
                part.grad = None  # it may be a view of memory that the user wants to free
        for index, was_used in enumerate(used):
            self._steps[index] += was_used
        self._share_state()
        self._shared.synchronize()
        self._is_reduced = False
        self._guard.check(self._comm)  # before a rank can bring new gradients
        return loss

    def _mean(self, piece: ParameterSlice, room: Tensor | None) -> Tensor:
        """Return the average of a piece, computed now unless it was before."""
        if isinstance(self._gradients, NodeGradients) and not self._is_reduced:
            return self._gradients.mean(piece, room)
        return self._gradients.part(piece)

    def _share_state(self) -> None:
        """Move new optimizer state into shared memory; collective if there is any."""
        for name in _STATE[self._kind]:
            for dtype in self._shared.counts:
                self._share_named(name, dtype)

    def _share_named(self, name: str, dtype: torch.dtype) -> None:
        key = (name, dtype)
        if key not in self._state_flats:
            used = any(self._steps[index] for index, _ in self._shared.of(dtype))
            if not used or not self._keeps(name):
                return
            wide = torch.promote_types(dtype, torch.float32) if self._kind in _BY_TENSOR else dtype
            count = self._shared.counts[dtype]
            self._state_flats[key] = self._shared.local.shared(count, wide, name=name)
        for piece, part, state in self._mine():
            if part.dtype == dtype and (piece, name) not in self._moved and name in state:
                place = self._shared.places[piece.index]
                view = piece.of(place.view(self._state_flats[key]))
                if state[name] is not None:
                    state[name] = view.copy_(state[name])
                    self._moved.add((piece, name))

    def _keeps(self, name: str) -> bool:
        """Return whether any group's options make the optimizer keep this state."""
        needs = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}.get(name)
        return needs is None or any(group[needs] for group in self.param_groups)

    # --- state in the ordinary form ---

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """A copy of the state of whole parameters, as the optimizer has it in one process."""
        found = {
            parameter: self._state_of(index)
            for index, parameter in enumerate(self._shared.parameters)
            if self._steps[index]
        }
        return {parameter: state for parameter, state in found.items() if state}

    def _state_of(self, index: int) -> dict[str, Any]:
        dtype, place = self._shared.parameters[index].dtype, self._shared.places[index]
        state: dict[str, Any] = {
            name: place.view(flat).clone()
            for (name, of), flat in self._state_flats.items()
            if of == dtype
        }
        if self._kind is LAMB:
            state["step"] = self._steps[index]
        elif self._kind in (torch.optim.Adam, torch.optim.AdamW):
            state["step"] = torch.tensor(float(self._steps[index]))
        return state

    def state_dict(self) -> StateDict:
        """Return options and whole state, as the optimizer has them in one process; local.

        Any number of ranks, or one process without hsgd, can load it. The state is that after the
        last step of all ranks of the node.
        """
        order = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        groups = [
            {**group, "params": [order[p] for p in group["params"]]} for group in self.param_groups
        ]
        state = {order[p]: value for p, value in self.state.items() if p in order}
        return {"state": state, "param_groups": groups}

    @_reported
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the same ordinary state on all ranks; collective over the node, blocking."""
        whole = self._kind([{"params": group["params"]} for group in self.param_groups], lr=0.0)
        whole.load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, whole.param_groups, strict=True):
            group.update({k: v for k, v in loaded.items() if k != "params"})
        self._steps = [0] * len(self._steps)
        for parameter, state in whole.state.items():
            counted = state.get("step", 1 if state else 0)
            self._steps[self._index[cast(nn.Parameter, parameter)]] = int(counted)
        self._moved.clear()
        for batch in self._batches:
            batch.optimizer.state.clear()
            for piece, part in zip(batch.pieces, batch.parts, strict=True):
                state = whole.state.get(self._shared.parameters[piece.index], {})
                mine = {name: self._cut(value, piece) for name, value in state.items()}
                if mine:
                    batch.optimizer.state[part] = mine
        self._share_state()
        self._shared.synchronize()

    def _cut(self, value: Any, piece: ParameterSlice) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() and value.shape == self._shared.places[piece.index].shape:
            return piece.of(value.contiguous()).clone()
        return value.clone()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, since the division of the parameters is fixed."""
        raise ValueError("node_shared: groups cannot be added; give all of them at the start")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("node_shared: this optimizer cannot be pickled; save its state_dict()")

    def __repr__(self) -> str:
        return f"NodeSharedOptimizer of {self._kind.__name__}, {len(self.param_groups)} groups"


def _hook_of(optimizer: NodeSharedOptimizer) -> Callable[[Tensor], None]:
    """Return a hook that holds the optimizer weakly."""
    reference = weakref.ref(optimizer)

    def hook(parameter: Tensor) -> None:
        target = reference()
        if target is not None:
            target._gradients.take(target._index[cast(nn.Parameter, parameter)])

    return hook
