"""NotifiedTree: synchronous SGD over trees of one-sided, notified writes, without collectives.

Source: CaffeGPI (arXiv:1706.00095): gradients go up a tree layer by layer during the backward pass,
weights come down. Our reconstruction, extended: in the next forward pass each layer waits for its
own weights only.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.comm.agree import agree
from hsgd.comm.communicator import Comm
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost, about
from hsgd.onesided.networks import Network, choose_network
from hsgd.onesided.notified_window import NotifiedWindow
from hsgd.optim.fixed_parameters import FixedParameters
from hsgd.optim.initial_weights import broadcast_values
from hsgd.optim.notified_tree.tree_checks import Roots, check_threads, terms_of
from hsgd.optim.notified_tree.tree_engine import Engine, reason_in
from hsgd.optim.notified_tree.tree_parts import (
    Layer,
    Part,
    Stretch,
    in_order_of,
    layers_of,
    parts_of,
)
from hsgd.optim.notified_tree.tree_plan import TreePlan, teams_of
from hsgd.optim.notified_tree.tree_state import gather_state, part_of_rank_0
from hsgd.optim.notified_tree.tree_updater import Options, Updater, updates_elements
from hsgd.optim.wrapping_optimizer import WrappingOptimizer

__all__ = ["NotifiedTree"]

_MOST_QUEUE = 1 << 16  # operations in the queue of a NotifiedWindow
_NO_OVERLAP = (
    "NotifiedTree: before_update needs the gradients of all layers, so no layer is updated before "
    "the last gradient has come, and the sending of weights no longer overlaps the backward pass"
)
_LEAVE_S = 5.0  # wait for other ranks at the end


class NotifiedTree(WrappingOptimizer):
    """Wraps an optimizer: roots update, layer by layer, from gradients averaged over all ranks.

    Sums are made in a fixed order: local ranks, then child nodes. A parameter without a gradient on
    all ranks is not updated. Between step() and the next call of the model its weights change: call
    wait() before reading them directly (state_dict() does).

    A weight may change once its gradient is complete. So a second backward() before step() fails in
    autograd ("modified by an inplace operation"): call all but the last within no_sync(). The same
    holds for a model that uses weight.detach() earlier in its forward pass than the weight itself.
    A layer whose module is not called itself, but used by its parent, is waited for by the parent.
    Buffers stay local, as BatchNorm's statistics do; average_buffers() makes them equal.

    Without close(), the end of the communicator ends this: it waits for the weights of its last
    step up to the deadline, then up to 5 s for ranks that still need data from it. Construction is
    collective.

    Args:
        optimizer: any torch optimizer whose step() needs no closure. Only the root of a layer runs
            it for that layer, and only there it has state. Options of param_groups are read there
            when the first gradient of a step arrives, so set them before backward(), equally on all
            ranks. Schedulers take this object.
        model: weights and trainable parameters equal in shape and dtype on all ranks, on the CPU.
            All start from rank 0's weights and buffers. Parameters move into the shared segment.
        comm: the ranks. Over several nodes MPI needs MPI_THREAD_MULTIPLE, except with sockets.
        arity: how many nodes each node passes weights to; None is the k with the least k * levels.
        overlap_forward: step() returns at once, and each module waits for its own weights when it
            is called. False: step() waits for all.
        roots: "first": rank 0 is the root of all layers. "shared": layers are divided among the
            first ranks of the nodes, so that all links carry the same; state_dict() and
            load_state_dict() are then collective.
        before_update: called on rank 0 with all parameters to update, with their mean gradients,
            before any is updated: for clipping by global norm and whatever needs all layers. Then
            nothing overlaps the backward pass, which a warning says. Needs roots="first".
        timeout_s: limit of a wait for other ranks; None is the deadline of `comm`.
        network: between nodes: "auto", "mpi" or "sockets"; see hsgd.NotifiedWindow.
        part_bytes: larger layers are sent and updated in parts of about this size, as a pipeline.
            Needs float32, torch.optim.SGD without dampening and maximize, and no before_update;
            other layers stay whole. None: 1 MB between nodes, more for models above 512 MB; on one
            node 0, which cuts nothing.

    Raises:
        PeerLost, CollectiveTimeout: from backward(), step() or the forward pass.
    """

    loads_together = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        comm: Comm,
        arity: int | None = None,
        overlap_forward: bool = True,
        *,
        roots: Roots = "first",
        before_update: Callable[[list[nn.Parameter]], object] | None = None,
        timeout_s: float | None = None,
        network: Network = "auto",
        part_bytes: int | None = None,
        _before_notify: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._model, self._comm, self._overlap_forward = model, comm, overlap_forward
        layers = layers_of(model)
        options = {"arity": arity, "roots": roots, "part_bytes": part_bytes, "network": network}
        whole = before_update is not None
        agree(comm, "NotifiedTree", lambda: terms_of(optimizer, model, options, whole_step=whole))
        if whole and comm.rank == 0:
            warnings.warn(_NO_OVERLAP, stacklevel=2)
        node_count = len(set(comm.nodes))
        self._shared = roots == "shared" and node_count > 1
        sizes = [layer.bytes for layer in layers]
        teams = teams_of(comm.rank, comm.nodes, arity, sizes, self._shared)
        self._owned = [layer.index for layer in layers if teams[layer.index].is_root]
        suits = np.array([not whole and updates_elements(optimizer)], np.uint8)
        if not comm.allgather(suits).all() or (part_bytes is None and node_count == 1):
            part_bytes = 0
        parts = parts_of(layers, part_bytes)
        self._plan = TreePlan(layers, parts, teams[0].most_children, teams[0].most_local, comm.size)
        sends = 2 * len(parts) * max(len(team.spread_to) + 1 for team in teams)
        self._window = self._open_window(sends, timeout_s, network)
        self._memory = torch.from_numpy(self._window.segment())
        self._blocks = self._views_of_blocks()
        self._sending, self._failed = True, False
        self._step = 0  # steps that step() has finished
        self._posted = [0] * len(layers)  # the step whose gradient was given to the engine
        self._arrived = [0] * len(layers)  # the step whose weights have arrived
        # By version. A layer that the next forward pass does not use may be updated after it, when
        # the options of the next step are already known.
        self._options: dict[int, Options] = {}
        self._placing = threading.Lock()  # updater and engine keep the same places
        self._move_weights()
        if self._shared:
            self._load_state_of_rank_0()
        owned = [p for index in self._owned for p in layers[index].parameters]
        trained = [p for layer in layers for p in layer.parameters]
        self._fixed = FixedParameters("NotifiedTree", optimizer, model, trained, trained)
        self._updater = Updater(optimizer, owned, before_update, len(parts) > len(layers))
        self._engine = Engine(
            *(self._window, self._plan, teams, self._update),
            whole_step=whole,
            before_notify=_before_notify,
        )
        comm.barrier()  # the last barrier: only notifications from here on
        self._hook()
        comm.before_close(self._leave)

    def _open_window(self, sends: int, timeout_s: float | None, network: Network) -> NotifiedWindow:
        """Return a window for the plan, and for `sends` concurrent sends."""
        self._patience_s = min(1.0, (self._comm.timeout_s if timeout_s is None else timeout_s) / 4)
        network = choose_network(self._comm, network, "NotifiedTree", any_thread=True)
        if network == "mpi":
            check_threads(self._comm)
        return NotifiedWindow(
            self._comm,
            self._plan.segment_bytes,
            self._plan.slots,
            queue=min(sends + 64, _MOST_QUEUE),
            timeout_s=timeout_s,
            network=network,
        )

    def _views_of_blocks(self) -> list[tuple[NDArray[np.uint8], list[Tensor]]]:
        """Return flags and gradients of each part in this rank's segment."""
        return [
            (
                block.in_use(self._memory).numpy(),
                block.views(self._memory, [s.of(s.parameter.detach()) for s in part.stretches]),
            )
            for block, part in zip(self._plan.own, self._plan.parts, strict=True)
        ]

    # --- what training scripts call ---

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Send the remaining gradients and end the step; collective.

        Returns at once with overlap_forward, else when all weights have arrived.
        """
        if closure is not None:
            raise TypeError("NotifiedTree.step: closures are not supported; call backward() before")
        self._check_open()
        self._fixed.check(self._optimizer)
        for layer in self._plan.layers:
            if self._posted[layer.index] <= self._step:
                self._post(layer)
        if self._owned and self._options[self._step + 1] != self._updater.snapshot():
            raise ValueError(
                "NotifiedTree.step: options of param_groups changed between backward() and "
                "step(), when layers were updated already; change them before backward()"
            )
        self._step += 1
        if not self._overlap_forward:
            self.wait()

    def wait(self) -> None:
        """Wait until the weights of the last step have arrived; blocking."""
        for layer in self._plan.layers:
            self._wait_for(layer.index)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the block, for all but the last backward() of a step."""
        self._sending = False
        try:
            yield
        finally:
            self._sending = True

    def average_buffers(self) -> None:
        """Average floating buffers, and copy rank 0's others; collective, blocking."""
        self._check_open()
        for name, buffer in self._model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(self._comm.allreduce(buffer.contiguous(), "mean", name=name))
            else:
                broadcast_values(self._comm, [buffer])

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state after the last step.

        With shared roots this is collective, and all ranks get all state. Else it is local, and
        only rank 0 has state.
        """
        self.wait()
        own = self._optimizer.state_dict()
        return gather_state(self._comm, own) if self._shared else own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load rank 0's state; with shared roots collective, else local."""
        self.wait()
        if self._shared:
            state_dict = part_of_rank_0(self._comm, state_dict, self._owned_numbers())
        self._forget_places()
        self._load_wrapped(state_dict)
        self._updater.share_state()

    def close(self) -> None:
        """Wait for the last step of all ranks and end the thread; collective, blocking.

        A second call does nothing. The model keeps its weights and loses the hooks.
        """
        if self._closed:
            return
        try:
            if self._is_sound():
                self.wait()
                self._comm.barrier()  # others may still need data from this rank
        finally:
            self._end()

    def _abandon(self) -> None:
        self._end(waits=False)

    def _leave(self) -> None:
        """End with the communicator if close() was not called.

        Without the weights of the last step this rank would leave with other weights than the rest,
        so they have until the deadline. Other ranks may still need what this rank passes on: it
        waits 5 s for them, not longer, since one may have failed. After an error it does not wait,
        so that the others learn of it.
        """
        if self._comm.left_by_error:
            return self._end(waits=False)
        between_steps = all(posted <= self._step for posted in self._posted)
        try:
            if between_steps and not self._closed and self._is_sound():
                self.wait()
                try:
                    self._meet(_LEAVE_S)
                finally:
                    self._window.drain()  # else closing would not wait for others over MPI
        except HsgdError:
            pass  # each rank's own waits report what is missing
        finally:
            self._end()

    def _meet(self, timeout_s: float) -> None:
        """Make a dissemination barrier (Hensgen, Finkel, Manber 1988) of notifications.

        Unlike an abandoned collective, it does not keep the communicator from ending.
        """
        rank, size, plan = self._comm.rank, self._comm.size, self._plan
        for turn in range(plan.leave_rounds):
            slot = plan.leave_slot + turn
            self._window.bind(slot, (rank - (1 << turn)) % size)
            self._window.put_notify(None, (rank + (1 << turn)) % size, slot, 1)
            self._window.wait_any([slot], timeout_s=timeout_s)

    def _is_sound(self) -> bool:
        return not (self._failed or self._engine.error or self._window.closed)

    def _end(self, *, waits: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        self._comm.not_before_close(self._leave)
        for hook in self._hooks:
            hook.remove()
        try:
            if not self._window.closed:
                self._engine.stop()
        finally:
            self._window.close(waits=waits)

    def __repr__(self) -> str:
        return f"NotifiedTree({self._optimizer!r})"

    # --- set-up ---

    def _move_weights(self) -> None:
        """Make weights views of the segment, with rank 0's values."""
        with torch.no_grad():
            broadcast_values(self._comm, self._model.buffers())
            for layer in self._plan.layers:
                block = self._plan.weights[layer.index]
                views = block.views(self._memory, layer.parameters)
                for parameter, view in zip(layer.parameters, views, strict=True):
                    view.copy_(parameter)
                    parameter.data = view
                self._comm.broadcast(block.bytes(self._memory), name=f"weights of {layer.name}")
            frozen = [p for p in self._model.parameters() if not p.requires_grad]
            broadcast_values(self._comm, frozen)

    def _load_state_of_rank_0(self) -> None:
        """Give each root the state of rank 0's optimizer for its layers."""
        own = self._optimizer.state_dict()
        first = part_of_rank_0(self._comm, own, self._owned_numbers())
        self._load_wrapped({**own, "state": first["state"]})

    def _owned_numbers(self) -> set[int]:
        """Return the parameters updated here, by their numbers in state dictionaries."""
        layers = self._plan.layers
        owned = {p for index in self._owned for p in layers[index].parameters}
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        return {number for number, p in enumerate(every) if p in owned}

    def _hook(self) -> None:
        """Register hooks that hold this object weakly, so that a model may outlive it."""
        me = weakref.ref(self)
        self._hooks: list[Any] = []
        self._called: set[nn.Module] = set()
        self._waits: dict[nn.Module, set[int]] = {}  # layers that a module waits for
        owner: dict[Tensor, Layer] = {
            p: layer for layer in self._plan.layers for p in layer.parameters
        }
        self._unready = [set(layer.parameters) for layer in self._plan.layers]

        def before_forward(module: nn.Module, _: Any) -> None:
            tree = me()
            if tree is not None:
                tree._called.add(module)
                for layer in sorted(tree._waits.get(module, ())):
                    tree._check_steady(layer)
                    tree._wait_for(layer)

        def before_state(*_: Any) -> None:
            tree = me()
            if tree is not None:
                tree.wait()

        def on_gradient(parameter: Tensor) -> None:
            tree = me()
            if tree is not None and tree._sending:
                tree._ready(owner[parameter], parameter)

        for module in self._model.modules():
            if not any(p in owner for p in module.parameters()):
                continue  # it uses no layer, and no module within it does
            own = {owner[p].index for p in module.parameters(recurse=False) if p in owner}
            self._waits[module] = own
            self._hooks.append(module.register_forward_pre_hook(before_forward))
        self._hooks.append(self._model.register_state_dict_pre_hook(before_state))  # type: ignore[no-untyped-call]
        for parameter in owner:
            hook = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    # --- a step ---

    def _ready(self, layer: Layer, parameter: Tensor) -> None:
        unready = self._unready[layer.index]
        if self._posted[layer.index] > self._step:
            raise HsgdError(
                f'NotifiedTree: layer "{layer.name}" has a second gradient before step(), and the '
                "first was sent; call all backward() but the last within no_sync()"
            )
        if layer.module not in self._called:
            self._delegate(layer)
        unready.discard(parameter)
        if not unready:
            self._post(layer)

    def _delegate(self, layer: Layer) -> None:
        """Make the nearest called parent wait for a layer whose module is not called itself."""
        names = layer.name.split(".")
        above = [self._model.get_submodule(".".join(names[:n])) for n in range(len(names))]
        user = next((m for m in reversed(above) if m in self._called), self._model)
        self._waits[user].add(layer.index)

    def _post(self, layer: Layer) -> None:
        """Hand a layer's gradient over; afterwards its weights may change at any time."""
        for parameter in layer.parameters:  # autograd then refuses to use old values
            torch.autograd.graph.increment_version(parameter)
        version, parts = self._step + 1, self._plan.parts_of[layer.index]
        if version not in self._options:
            self._begin_step(version)
        self._wait_for(layer.index)  # once its weights are here, the gradient may be overwritten
        self._posted[layer.index] = version
        self._unready[layer.index] = set(layer.parameters)
        gradients = [p.grad for p in layer.parameters]
        for part in parts:
            self._fill(part, gradients)
            try:
                self._engine.notify(part.index, version)
            except HsgdError:
                self._failed = True
                raise

    def _fill(self, part: Part, gradients: list[Tensor | None]) -> None:
        """Copy a part's share into its block; leaves gradients in the order of their parameters."""
        flags, views = self._blocks[part.index]
        with torch.no_grad():
            for index, (stretch, view) in enumerate(zip(part.stretches, views, strict=True)):
                gradient = gradients[stretch.index]
                flags[index] = gradient is not None
                if gradient is None:
                    view.zero_()
                    continue
                if not stretch.is_whole:
                    gradient = in_order_of(gradient, stretch.parameter)
                    gradients[stretch.index] = gradient
                view.copy_(stretch.of(gradient))

    def _begin_step(self, version: int) -> None:
        """Prepare updates of a step before its first gradient is handed over."""
        self._options.pop(version - 2, None)  # all layers have made that step
        self._options[version] = options = self._updater.snapshot() if self._owned else []
        if not self._owned:
            return
        if not self._updater.is_steady():
            self._forget_places()
        rules = self._updater.rules(options)
        if rules is not None:
            self._engine.set_rules(version, rules)

    def _forget_places(self) -> None:
        """Forget the addresses of the wrapped optimizer's state, which has moved."""
        with self._placing:
            self._engine.forget_tensors()
            self._updater.forget()

    def _check_steady(self, layer: int) -> None:
        if self._posted[layer] > self._step:
            raise HsgdError(
                f'NotifiedTree: layer "{self._plan.layers[layer].name}" is called between its '
                "backward pass and step(), when its weights may change at any time; call the "
                "model after step(), or use no_sync()"
            )

    def _wait_for(self, layer: int) -> None:
        """Wait until a layer's weights of the last step have arrived."""
        if self._arrived[layer] >= self._step:
            return
        self._check_open()
        for part in self._plan.parts_of[layer]:
            self._wait_for_part(layer, part.index)
        self._arrived[layer] = self._step

    def _wait_for_part(self, layer: int, part: int) -> None:
        slot, gone = self._plan.weights_slot(part), self._plan.gone_slot
        try:  # weights that came before a rank gave up count
            heard, _ = self._wait_or_hear_why(layer, [slot, gone])
        except (CollectiveTimeout, PeerLost) as error:
            self._failed = True
            if (given_up := self._engine.error) is not None:
                raise self._failure(layer, type(error), given_up) from given_up
            raise self._failure(layer, type(error), error, looks=True) from error
        if heard == gone:
            self._failed = True
            given_up = self._engine.error
            if given_up is None:
                raise self._failure(layer, PeerLost, reason_in(self._memory), looks=True)
            kind = type(given_up) if isinstance(given_up, HsgdError) else PeerLost
            raise self._failure(layer, kind, given_up) from given_up

    def _wait_or_hear_why(self, layer: int, slots: list[int]) -> tuple[int, int]:
        """Call wait_any(); after a timeout, wait a little longer for a reason from other ranks.

        Deadlines pass at about the same time on all ranks, and others may know whose gradient is
        missing.
        """
        seen = [self._step - 1, 0]
        try:
            return self._window.wait_any(slots, seen)
        except CollectiveTimeout:
            if self._engine.error is not None or self._engine.missing(layer, self._step):
                raise
            return self._window.wait_any(slots, seen, self._patience_s)

    def _failure(
        self, layer: int, kind: type[HsgdError], why: object, *, looks: bool = False
    ) -> HsgdError:
        """Return the error of a wait for weights.

        With `looks` it names the ranks whose gradients are missing, as far as this rank knows, and
        has the first of them as its rank.
        """
        missing = self._engine.missing(layer, self._step) if looks else []
        names = f" (no gradient from rank {', '.join(map(str, missing))})" if missing else ""
        name = self._plan.layers[layer].name
        rank = missing[0] if missing else getattr(why, "rank", -1)
        return about(
            rank, kind(f'NotifiedTree: weights of layer "{name}", step {self._step}: {why}{names}')
        )

    @property
    def closed(self) -> bool:
        """Whether this or its communicator was closed."""
        return self._closed or self._window.closed

    def _update(self, version: int, parts: Sequence[int]) -> None:
        """Update some parts at their root for step `version`; called in the engine's thread."""
        gradients: list[tuple[Stretch, Tensor | None]] = []
        for index in parts:
            flags, views = self._blocks[index]
            for stretch, view, flag in zip(
                self._plan.parts[index].stretches, views, flags, strict=True
            ):
                gradients.append((stretch, view if flag else None))
        places = self._updater.update(gradients, self._options[version])
        if places is not None and len(parts) == 1:
            with self._placing:
                self._updater.keep(parts[0], places)
                self._engine.set_tensors(parts[0], places.rows)
