"""One copy of the parameters per node: the idea of HSGD carried to its end.

Owns where parameters, gradients and optimizer state lie, and which rank updates which part. Never
computes an update: an optimizer of the user's class does that on views of this rank's part.

Source: Wang, Lu, Chen, Li, IEICE Trans. Inf. & Syst. E103-D(12), 2020 (first-layer models exchanged
through shared memory); one copy per node, sharded updates and shared state are our own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, StateDict

from hsgd import _native
from hsgd.comm import Comm
from hsgd.optim.lamb import LAMB
from hsgd.optim.lars import LARS

__all__ = ["NodeSharedOptimizer", "SharedParameters", "share_parameters"]

_STREAMED_BYTES = 1 << 20  # about a second-level cache
_ALIGNMENT = 16  # elements: parameters begin at multiples of a cache line
# Whether an optimizer updates elements one by one; the others need whole tensors for their norms.
_ELEMENTWISE: dict[type[Optimizer], bool] = {
    torch.optim.SGD: True,
    torch.optim.Adam: True,
    torch.optim.AdamW: True,
    LARS: False,
    LAMB: False,
}


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in the array of its dtype."""

    start: int
    count: int
    shape: torch.Size

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.count].view(self.shape)


class SharedParameters:
    """Parameters that all ranks of a node see in one memory; share_parameters() makes it.

    A write to a parameter is seen by the whole node at once. So whatever writes outside of
    NodeSharedOptimizer.step() (load_state_dict, initialization, a swap with averaged weights) is
    done by one rank of each node, or by all with the same values, and between two calls of
    synchronize(), which keep it apart from readers and other writers.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: Comm, root: int = 0) -> None:
        self.comm = comm
        self.parameters = list(dict.fromkeys(parameters))
        self._local = comm if comm.cross_size == 1 else comm.split(comm.cross_rank, comm.rank)
        for index, parameter in enumerate(self.parameters):
            if parameter.device.type != "cpu" or not parameter.is_floating_point():
                raise ValueError(
                    f"share_parameters: parameter {index}, shape {tuple(parameter.shape)}, is "
                    f"{parameter.dtype} on {parameter.device}; only floating point numbers in host "
                    "memory can be shared"
                )
        self.places: list[_Place] = []
        self.counts: dict[torch.dtype, int] = {}
        for parameter in self.parameters:
            start = self.counts.get(parameter.dtype, 0)
            self.places.append(_Place(start, parameter.numel(), parameter.shape))
            end = start + parameter.numel()
            self.counts[parameter.dtype] = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.flats = {
            dtype: comm.shared(count, dtype, name="parameters")
            for dtype, count in self.counts.items()
        }
        self._move(root)

    def _move(self, root: int) -> None:
        """Put the root's values into the shared arrays, and the parameters there."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            value = parameter.detach().clone(memory_format=torch.contiguous_format)
            self.comm.broadcast(value.view(-1), root, name="parameters")
            view = place.view(self.flats[parameter.dtype])
            if self.comm.local_rank == 0:
                view.copy_(value)
            parameter.data = view
        self.synchronize()

    @property
    def local(self) -> Comm:
        """The communicator of this node."""
        assert self._local is not None
        return self._local

    def synchronize(self) -> None:
        """Wait for all ranks of the node; collective over them, blocking."""
        self.local.barrier()

    def check(self) -> None:
        """Raise RuntimeError where a parameter was moved out of the shared memory."""
        for index, (parameter, place) in enumerate(zip(self.parameters, self.places, strict=True)):
            flat = self.flats[parameter.dtype]
            if parameter.data_ptr() != flat.data_ptr() + place.start * flat.element_size():
                raise RuntimeError(
                    f"node_shared: parameter {index}, shape {tuple(place.shape)}, no longer lies "
                    "in shared memory; something assigned its .data (model.to(), .float()): do "
                    "that before sharing, and write values with copy_()"
                )


def share_parameters(model: nn.Module, comm: Comm, root: int = 0) -> SharedParameters:
    """Make the parameters of a model views of memory that all ranks of a node share; collective
    over `comm`, blocking.

    All ranks get the values of rank `root`, as from broadcast_parameters. Buffers (running
    statistics of normalization) stay each rank's own. Parameters keep their identity, so an
    optimizer made before or after is the same; non-contiguous ones become contiguous.
    Raises ValueError for parameters that are not floating point numbers in host memory, and
    SharedMemoryError.
    """
    return SharedParameters(model.parameters(), comm, root)


@dataclass(frozen=True)
class _Piece:
    """What this rank updates of one parameter: elements [begin, end) of it."""

    index: int  # of the parameter
    begin: int
    end: int


class NodeSharedOptimizer(Optimizer):
    """Updates shared parameters: each rank of a node reduces and updates its part of them.

    With L ranks on a node, each averages 1/L of the gradients over all ranks of all nodes and
    updates 1/L of the parameters; optimizer state exists once per node, in shared memory. Then all
    ranks of the node wait for one another. The result is bit for bit that of the same optimizer
    after an allreduce with op "mean".

    Gradients lie in memory of the node, too: a gradient is moved there when autograd has made it,
    while it is in the cache, and what the user puts into `parameter.grad` is moved in step().
    Parameters without a gradient on all ranks are left alone; where only some ranks have one, the
    others count as zeros.

    Schedulers and users see and change `param_groups`, which are those of `optimizer`. SGD, Adam
    and AdamW split the parameters evenly, to the element; LARS and LAMB need whole tensors, so each
    goes to one rank, and the parts are as even as that allows.

    Args:
        optimizer: torch.optim.SGD, Adam, AdamW, hsgd.optim.LARS or LAMB, without state yet.
        shared: what share_parameters() returned for the model; every parameter of `optimizer`
            belongs to it.

    Raises ValueError for other optimizers, for one with state, and for foreign parameters.
    step() is collective over all ranks and blocking; it raises what collectives raise.
    """

    def __init__(self, optimizer: Optimizer, shared: SharedParameters) -> None:
        self.check_kind(optimizer)
        self._shared = shared
        self._comm = shared.comm
        self._kind: Any = type(optimizer)
        self._index = {parameter: i for i, parameter in enumerate(shared.parameters)}
        self._check(optimizer)
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        optimizer.state.clear()  # LARS makes its buffers at once; ours are shared
        self._cross = self._make_cross()
        self._grads = {
            dtype: self._comm.empty(count, dtype, name="gradients")
            for dtype, count in shared.counts.items()
        }
        self._views = [self._view(index) for index in range(len(shared.parameters))]
        self._addresses = [view.data_ptr() for view in self._views]
        self._ranges = {dtype: self._split(dtype) for dtype in shared.counts}
        self._make_inner()
        self._used = torch.zeros(len(shared.parameters), dtype=torch.uint8)
        self._steps = [0] * len(shared.parameters)
        self._state_flats: dict[tuple[str, torch.dtype], Tensor] = {}
        self._moved: set[tuple[int, str]] = set()  # state of pieces that lies there already
        self._hooked: set[int] = set()
        self._is_reduced = False
        self.zero_grad()

    @staticmethod
    def check_kind(optimizer: Optimizer) -> None:
        """Raise ValueError where parts of the parameters cannot be updated by themselves. Local."""
        kind = type(optimizer)
        if kind not in _ELEMENTWISE:
            known = ", ".join(known.__name__ for known in _ELEMENTWISE)
            raise ValueError(
                f"node_shared: {kind.__name__} is not supported, its update may need more than "
                f"this rank's part of the parameters; use {known}, or node_shared=False"
            )

    # --- which rank owns what ---

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

    def _make_cross(self) -> Comm | None:
        """The ranks that own the same part on all nodes; None where there is nothing to exchange,
        or nodes have different numbers of ranks.
        """
        comm = self._comm
        if comm.cross_size == 1:
            return None
        sizes = comm.allgather(torch.tensor([comm.local_size]), name="ranks per node")
        self._is_uneven = len(set(sizes.tolist())) > 1
        if self._is_uneven:
            return None
        return comm.split(comm.local_rank, comm.rank)

    _is_uneven = False

    def _split(self, dtype: torch.dtype) -> list[int]:
        """Bounds of the parts of the ranks of this node in the array of a dtype."""
        parts, count = self._comm.local_size, self._shared.counts[dtype]
        bounds = [count * part // parts // _ALIGNMENT * _ALIGNMENT for part in range(parts)]
        if not _ELEMENTWISE[self._kind]:  # move to the nearest beginning of a parameter
            places = self._places(dtype)
            starts = [place.start for _, place in places] + [count]
            bounds = [min(starts, key=lambda start: abs(start - bound)) for bound in bounds]
        return [*bounds, count]

    def _places(self, dtype: torch.dtype) -> list[tuple[int, _Place]]:
        shared = self._shared
        pairs = zip(shared.parameters, shared.places, strict=True)
        return [(i, place) for i, (p, place) in enumerate(pairs) if p.dtype == dtype]

    def _own(self, dtype: torch.dtype) -> slice:
        rank = self._comm.local_rank
        return slice(self._ranges[dtype][rank], self._ranges[dtype][rank + 1])

    def _pieces(self) -> Iterator[_Piece]:
        """This rank's parts, of all parameters."""
        for dtype in self._shared.counts:
            own = self._own(dtype)
            for index, place in self._places(dtype):
                begin = max(own.start - place.start, 0)
                end = min(own.stop - place.start, place.count)
                if begin < end:
                    yield _Piece(index, begin, end)

    def _piece_of(self, piece: _Piece, flat: Tensor) -> Tensor:
        place = self._shared.places[piece.index]
        if (piece.begin, piece.end) == (0, place.count):
            return place.view(flat)
        return flat[place.start + piece.begin : place.start + piece.end]

    def _make_inner(self) -> None:
        """The user's optimizer on this rank's pieces; its options are copied in every step."""
        self._mine: dict[int, tuple[_Piece, nn.Parameter]] = {}
        for piece in self._pieces():
            flat = self._shared.flats[self._shared.parameters[piece.index].dtype]
            self._mine[piece.index] = piece, nn.Parameter(self._piece_of(piece, flat))
        groups = []
        for group in self.param_groups:
            owned = [self._index[p] for p in group["params"] if self._index[p] in self._mine]
            options = {name: value for name, value in group.items() if name != "params"}
            options.pop("param_names", None)
            groups.append({**options, "params": [self._mine[i][1] for i in owned]})
        self._inner = self._kind(groups)
        self._parts = {
            index: self._piece_of(piece, self._grads[part.dtype])
            for index, (piece, part) in self._mine.items()
        }

    # --- gradients ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero. Local."""
        self._is_reduced = False
        for index, parameter in enumerate(self._shared.parameters):
            if index not in self._hooked and parameter.requires_grad:
                hook = _hook_of(self)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooked.add(index)
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = self._views[index].zero_()

    def _view(self, index: int) -> Tensor:
        return self._shared.places[index].view(self._grads[self._shared.parameters[index].dtype])

    def _arrive(self, parameter: Tensor) -> None:
        """A gradient is ready: it moves to where it is reduced."""
        index = self._index[parameter]  # type: ignore[index]
        view, grad = self._views[index], parameter.grad
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise TypeError(
                f"node_shared: parameter {index}, shape {tuple(parameter.shape)}, has a sparse "
                "gradient; make it dense, for example Embedding(sparse=False)"
            )
        if grad.data_ptr() != view.data_ptr():
            _move(view, grad)
            parameter.grad = view

    def synchronize(self) -> None:
        """Average the gradients over all ranks, each rank its part; collective, blocking.

        step() does it unless it was done. `parameter.grad` is not the average afterwards: clip with
        clip_grad_norm_().
        """
        used: list[int] = []
        for index, parameter in enumerate(self._shared.parameters):
            grad = parameter.grad
            if grad is None:
                self._views[index].zero_()
                used.append(0)
                continue
            used.append(1)
            if grad.layout is not torch.strided or grad.data_ptr() != self._addresses[index]:
                self._arrive(parameter)  # put there by hand, or without a hook
        self._used.copy_(torch.tensor(used, dtype=torch.uint8))
        self._comm.allreduce(self._used, "max", out=self._used, name="used parameters")
        for dtype, flat in self._grads.items():
            self._reduce(flat, self._ranges[dtype], self._own(dtype))
        self._is_reduced = True

    def _reduce(self, flat: Tensor, bounds: list[int], own: slice) -> None:
        part = flat[own]
        if self._is_uneven:
            self._comm.allreduce(flat, "mean", out=flat, name="gradients")
            return
        counts = [bounds[i + 1] - bounds[i] for i in range(len(bounds) - 1)]
        op = "mean" if self._cross is None else "sum"
        self._shared.local.reduce_scatter(flat, op, out=part, counts=counts, name="gradients")
        if self._cross is not None:
            self._cross.allreduce(part, "sum", out=part, name="gradients")
            part.div_(self._comm.size)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts that call synchronize() themselves, as with Horovod: step() does not repeat
        it anyway.
        """
        yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the averaged gradients so that their norm over all parameters is `max_norm` at
        most; collective, blocking. Call it between backward() and step().

        Returns the norm before, as torch.nn.utils.clip_grad_norm_ does for whole gradients.
        """
        if not self._is_reduced:
            self.synchronize()
        parts = [self._grads[dtype][self._own(dtype)] for dtype in self._grads]
        norms = [torch.linalg.vector_norm(part.double(), norm_type) for part in parts]
        if norm_type == float("inf"):
            total = torch.stack(norms).max()
            self._shared.local.allreduce(total, "max", out=total, name="norm")
        else:
            total = torch.stack([norm**norm_type for norm in norms]).sum()
            self._shared.local.allreduce(total, "sum", out=total, name="norm")
            total = total ** (1 / norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for part in parts:
            part.mul_(factor.to(part.dtype))
        return total

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average gradients, update this rank's part, wait for the node; collective, blocking."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._shared.check()
        if not self._is_reduced:
            self.synchronize()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({k: v for k, v in group.items() if k not in ("params", "param_names")})
        used = self._used.tolist()
        for index, (_, part) in self._mine.items():
            part.grad = self._parts[index] if used[index] else None
        self._inner.step()
        for index, was_used in enumerate(used):
            self._steps[index] += was_used
        self._share_state()
        self._shared.synchronize()
        self._is_reduced = False
        return loss

    def _share_state(self) -> None:
        """Move state that the optimizer has just made into shared memory, so that it can be read
        whole. Collective when there is new state; the names are the same on all ranks.
        """
        for name in _STATE[self._kind]:
            for dtype in self._shared.counts:
                self._share_named(name, dtype)

    def _share_named(self, name: str, dtype: torch.dtype) -> None:
        key = (name, dtype)
        if key not in self._state_flats:
            used = any(self._steps[index] for index, _ in self._places(dtype))
            if not used or not self._keeps(name):
                return
            wide = torch.promote_types(dtype, torch.float32) if _is_wide(self._kind) else dtype
            count = self._shared.counts[dtype]
            self._state_flats[key] = self._shared.local.shared(count, wide, name=name)
        for index, (piece, part) in self._mine.items():
            if part.dtype != dtype or (index, name) in self._moved:
                continue
            state = self._inner.state.get(part, {})
            if state.get(name) is not None:
                view = self._piece_of(piece, self._state_flats[key])
                state[name] = view.copy_(state[name])
                self._moved.add((index, name))

    def _keeps(self, name: str) -> bool:
        """Whether the options of any group make the optimizer keep this state."""
        needs = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}.get(name)
        return needs is None or any(group[needs] for group in self.param_groups)

    # --- state in the ordinary form ---

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """State of whole parameters, as the optimizer would have it in one process: a copy."""
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
        """Options and whole state, as the optimizer has them in one process. Local.

        Any number of ranks, or one process without hsgd, can load it. What is read is the state
        after the last step of all ranks of the node.
        """
        order = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        groups = [
            {**group, "params": [order[p] for p in group["params"]]} for group in self.param_groups
        ]
        state = {order[p]: value for p, value in self.state.items() if p in order}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take options and state of the ordinary form; collective over the node, blocking: all
        ranks load the same.
        """
        whole = self._kind([{"params": group["params"]} for group in self.param_groups], lr=0.0)
        whole.load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, whole.param_groups, strict=True):
            group.update({k: v for k, v in loaded.items() if k != "params"})
        self._steps = [0] * len(self._steps)
        for parameter, state in whole.state.items():
            counted = state.get("step", 1 if state else 0)
            self._steps[self._index[cast(nn.Parameter, parameter)]] = int(counted)
        self._inner.state.clear()
        self._moved.clear()
        for index, (piece, part) in self._mine.items():
            state = whole.state.get(self._shared.parameters[index], {})
            place = self._shared.places[index]
            mine = {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == place.shape and value.dim():
                    value = value.reshape(-1)[piece.begin : piece.end].clone()
                    value = value.view(part.shape)
                elif isinstance(value, Tensor):
                    value = value.clone()
                mine[name] = value
            if mine:
                self._inner.state[part] = mine
        self._share_state()
        self._shared.synchronize()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the division of the parameters is fixed."""
        raise ValueError("node_shared: groups cannot be added; give all of them at the start")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("node_shared: this optimizer cannot be pickled; save its state_dict()")

    def __repr__(self) -> str:
        return f"NodeSharedOptimizer of {self._inner!r}"


def _move(view: Tensor, grad: Tensor) -> None:
    """Copy a gradient to where it is reduced; a large one past the caches, which it would leave
    before that.
    """
    size = view.numel() * view.element_size()
    alike = grad.dtype == view.dtype and grad.is_cpu and type(grad) is Tensor
    if size >= _STREAMED_BYTES and alike and grad.is_contiguous():
        _native.stream_copy(view.data_ptr(), grad.data_ptr(), size)
    else:
        view.copy_(grad)


def _hook_of(optimizer: NodeSharedOptimizer) -> Callable[[Tensor], None]:
    """A hook that does not keep the optimizer alive."""
    reference = weakref.ref(optimizer)

    def hook(parameter: Tensor) -> None:
        target = reference()
        if target is not None:
            target._arrive(parameter)

    return hook


_STATE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    LARS: ("momentum_buffer",),
    LAMB: ("exp_avg", "exp_avg_sq"),
}


def _is_wide(kind: type[Optimizer]) -> bool:
    """Whether 16-bit parameters have state in float32."""
    return kind in (LARS, LAMB)
