"""Gossip: local SGD whose ranks average their models in pairs, when a trigger says so.

Owns what a training script calls: the step, the metrics and the comparison of models. Source: the
adaptive gossip of Ho, Wu and Liu (CCGRID 2018), of which we know the abstract: models are exchanged
according to the change of the local model. The rest is our reconstruction; the exchange of a pair
is in pairs.py, when and with whom in triggers.py and topology.py.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hsgd.comm import Comm
from hsgd.errors import CollectiveTimeout, HsgdError
from hsgd.optim.flattened import Flattened
from hsgd.optim.pairs import Averaged, PairAverager
from hsgd.optim.topology import Topology
from hsgd.optim.triggers import RelativeChange, Trigger

__all__ = ["Gossip", "GossipMetrics", "Scores"]

_FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
_WIRE = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SETTLE_LOOK_S = 1e-4


@dataclass(frozen=True)
class GossipMetrics:
    """What this rank did since the beginning, or a resumed state."""

    steps: int
    triggers: int
    """Steps in which the trigger, or max_interval, called for an exchange."""
    asked: int
    """Requests that this rank made, again after a refusal included."""
    averaged: int
    """Averages that took place, asked for by this rank or by its peer."""
    refused: int
    """Requests of this rank that a peer refused, or did not live to answer."""
    skipped: int
    """Calls for an exchange for which there was nobody to ask."""
    messages: int
    local_bytes: int
    """Weights and halves that passed through shared memory."""
    remote_bytes: int
    """Those that this rank sent to other nodes."""
    last_distance: float
    """|w_peer - w| of the last average; nan before."""
    lost: tuple[int, ...]
    """Ranks that are skipped because they died or left."""


@dataclass(frozen=True)
class Scores:
    """One figure of all models; higher is better."""

    own: float
    worst: float
    average: float
    mean_model: float
    """Of the model whose weights are the mean over ranks."""


class Gossip(Optimizer):
    """Wraps an optimizer: each rank steps on its own gradients, and averages its weights with one
    peer at a time; collective, blocking. step() is local, and waits for nobody.

    optimizer: any torch optimizer. Schedulers take this object.
    params: the tensors that are averaged: dense, floating, on the CPU, equal in shapes and dtypes
        on all ranks. They become views of one vector. Rank 0's values are sent to all first.
    comm: the ranks. Over several nodes MPI needs MPI_THREAD_MULTIPLE.
    trigger: when to average, one object for each rank; None is RelativeChange(0.05).
    topology: "random", "ring", "exponential2", a graph or a Topology; see hsgd.optim.Topology.
    max_interval: average at the latest after so many steps without; None: no such limit.
    global_average_every: after so many steps, again and again, all ranks average all their models,
        which is collective and blocking; None: never.
    momentum: what happens to SGD's momentum_buffer, or Adam's exp_avg, in an average: "keep",
        "average" (with the weights; twice the bytes) or "reset" to 0.
    compression: None, "bfloat16" or "float16": what weights travel as. Both sides apply the same
        rounded difference, so sums are kept, but models differ by as much afterwards.
    hierarchical: gradients are averaged inside groups in every step, and the first ranks of the
        groups gossip. step() is then collective in its group.
    group_size: ranks of a group, which follow one another; None is the node.
    buffers: floating tensors that are averaged too, such as BatchNorm's statistics.
    patience_s: how long step() waits for the answer of the peer that it asked. 0 goes on at once
        and takes the answer in a later step.
    seed: of random topologies, equal on all ranks.
    timeout_s: until close() and settle() give up; None is the deadline of `comm`.

    A peer that is slow has its answer taken when it comes, and is asked again only after; one that
    died is left out, with a warning. Raises ValueError for arguments and tensors that cannot work.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Iterable[Tensor],
        comm: Comm,
        trigger: Trigger | None = None,
        topology: Any = "random",
        *,
        max_interval: int | None = None,
        global_average_every: int | None = None,
        momentum: str = "keep",
        compression: str | None = None,
        hierarchical: bool = False,
        group_size: int | None = None,
        buffers: Iterable[Tensor] = (),
        patience_s: float = 0.0,
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups, state and defaults are those of the wrapped one.
        self._optimizer, self._comm = optimizer, comm
        self._take_over()
        self._trigger = RelativeChange(0.05) if trigger is None else trigger
        _check(self._trigger, max_interval, global_average_every, momentum, compression)
        if group_size is not None and not hierarchical:
            raise ValueError("Gossip: group_size is for hierarchical=True")
        self._max_interval, self._global_every = max_interval, global_average_every
        self._patience_s, self._momentum = patience_s, momentum
        self._timeout_s = comm.timeout_s if timeout_s is None else timeout_s
        self._split(hierarchical, group_size)
        self._topology = topology
        if not isinstance(topology, Topology):
            self._topology = Topology(topology, self._places, seed)
        if self._topology.size != self._places:
            raise ValueError(
                f"Gossip: the topology is for {self._topology.size} ranks, but {self._places} "
                "gossip; with hierarchical=True those are the groups"
            )
        self._flat = Flattened(params)
        self._extra = Flattened(buffers, "buffer")
        self._moments: Flattened | None = None
        if momentum == "average":
            self._moments = Flattened([torch.zeros_like(p) for p in self._flat.views])
        for vector in (*self._flat.vectors, *self._extra.vectors):
            comm.broadcast(vector, name="weights of Gossip")
        self._pairs: PairAverager | None = None
        if self._gossips is not None:
            known = [self._topology.neighbours(rank) for rank in range(self._places)]
            self._pairs = PairAverager(
                self._gossips,
                self._averaged(),
                known,
                wire_dtype=_WIRE[compression],
                timeout_s=timeout_s,
            )
        self._trigger.reset(self._flat.vectors)
        self._steps = self._turn = self._silent = self._owed = 0
        self._yielded: int | None = None  # whose request is looked for before it is asked
        self._since_call = 0  # steps since the trigger last called for an exchange
        self._met_next = False  # the peer of the next turn came first
        self._counts = dict.fromkeys(("triggers", "asked", "averaged", "refused", "skipped"), 0)
        self._distance = float("nan")
        self._told: set[int] = set()
        self._closed = False

    # --- what training scripts call ---

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """The optimizer's own step, and what gossip there is to do; local and not blocking, but
        for `patience_s`, `hierarchical` and `global_average_every`.
        """
        if self._closed:
            raise HsgdError("this Gossip is closed")
        if self._group is not None:
            if closure is not None:
                raise TypeError("Gossip.step: hierarchical=True takes no closure; call backward()")
            self._average_gradients(self._group)
        result = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self._steps += 1
        with torch.no_grad():
            self._adopt_moments()
            changed = self._gossip()
            if self._global_every is not None and self._steps % self._global_every == 0:
                self.global_average()
            elif self._group is not None:
                self._tell_group(self._group, changed)
        return result

    def global_average(self) -> None:
        """Make all models the mean over ranks; collective, blocking. Settles before."""
        self.settle()
        with torch.no_grad():
            for vector in self._averaged():
                self._comm.allreduce(vector, "mean", out=vector, name="global average")
            self._reset(averaged=True)

    def settle(self) -> None:
        """Return when no average of any rank is half done; collective, blocking. For saving models
        whose sum is to be exact.
        """
        with torch.no_grad():
            if self._pairs is not None:
                self._note(self._pairs.wait(self._timeout_s))
            here = self._comm.barrier_async()
            while not here.done():
                if self._pairs is not None:
                    self._note(self._pairs.poll())
                time.sleep(_SETTLE_LOOK_S)
            here.wait()
            if self._pairs is not None and self._pairs.open:
                late = ", ".join(map(str, self._pairs.open))
                raise CollectiveTimeout(
                    f"Gossip.settle: rank {late} has not answered within {self._timeout_s:g} s"
                )
            if self._group is not None:
                self._tell_group(self._group, True)

    def consensus_distance(self) -> float:
        """Root of the mean over ranks of |w - mean(w)|^2; collective, blocking."""
        squares = 0.0
        for vector in self._flat.vectors:
            mean = self._comm.allreduce(vector, "mean", name="consensus")
            squares += float((vector - mean).double().square().sum())
        every = self._comm.allgather(np.array([squares]), name="consensus distance")
        return float(np.sqrt(np.mean(every)))

    @contextlib.contextmanager
    def mean_model(self) -> Iterator[None]:
        """Within it the tensors are the mean over ranks; collective, blocking."""
        every = (self._flat, self._extra)
        kept = [one.copies() for one in every]
        for vector in (v for one in every for v in one.vectors):
            self._comm.allreduce(vector, "mean", out=vector, name="mean model")
        try:
            yield
        finally:
            for one, copies in zip(every, kept, strict=True):
                one.restore(copies)

    def compare(self, score: Callable[[], float]) -> Scores:
        """Call `score` with this rank's model, and with the mean one; collective, blocking."""
        own = float(score())
        every = self._comm.allgather(np.array([own]), name="scores")
        with self.mean_model():
            mean = float(score())
        return Scores(own, float(every.min()), float(every.mean()), mean)

    def metrics(self) -> GossipMetrics:
        """Counters of this rank; local."""
        pairs = self._pairs
        return GossipMetrics(
            steps=self._steps,
            **self._counts,
            messages=0 if pairs is None else pairs.traffic.messages,
            local_bytes=0 if pairs is None else pairs.traffic.local_bytes,
            remote_bytes=0 if pairs is None else pairs.traffic.remote_bytes,
            last_distance=self._distance,
            lost=() if pairs is None else tuple(sorted(pairs.lost)),
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; local."""
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's and, under "gossip", where this rank's gossip is; local. The
        weights are the model's.
        """
        state = self._optimizer.state_dict()
        state["gossip"] = {
            "trigger": self._trigger.state_dict(),
            "steps": self._steps,
            "turn": self._turn,
            "silent": self._silent,
            "owed": self._owed,
            "yielded": self._yielded,
            "since_call": self._since_call,
            "met_next": self._met_next,
            "counts": dict(self._counts),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back; local. A wrapped optimizer's own will do too."""
        gossip = state_dict.get("gossip")
        self._optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "gossip"})
        self._take_over()
        if gossip is None:
            return
        self._trigger.load_state_dict(gossip["trigger"])
        self._steps, self._turn = gossip["steps"], gossip["turn"]
        self._silent, self._owed = gossip["silent"], gossip["owed"]
        self._yielded, self._since_call = gossip["yielded"], gossip["since_call"]
        self._met_next = gossip["met_next"]
        self._counts = dict(gossip["counts"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what is averaged is fixed when this is made."""
        if "_flat" in self.__dict__:
            raise ValueError("Gossip: parameters cannot be added; make a new one")

    def close(self) -> None:
        """Take the last answers and leave; local, but collective between nodes and in groups. A
        second call does nothing. The weights stay as they are.

        Raises CollectiveTimeout naming peers that did not answer.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with torch.no_grad():
                if self._pairs is not None:
                    self._note(self._pairs.close())
                if self._group is not None and not self._group.closed:
                    self._tell_group(self._group, True)
        finally:
            for comm in self._made:
                comm.close()

    def __repr__(self) -> str:
        return f"Gossip({self._optimizer!r}, {self._trigger!r}, {self._topology!r})"

    # --- set-up ---

    def _take_over(self) -> None:
        self.defaults = self._optimizer.defaults
        self.param_groups = self._optimizer.param_groups
        self.state = self._optimizer.state

    def _split(self, hierarchical: bool, group_size: int | None) -> None:
        """Who gossips, and in which group this rank is."""
        comm = self._comm
        self._made: list[Comm] = []
        self._group: Comm | None = None
        self._gossips: Comm | None = comm
        self._places = comm.size
        if not hierarchical:
            return
        if group_size is not None and (group_size < 1 or comm.size % group_size):
            raise ValueError(
                f"Gossip: group_size is {group_size}; give a divisor of {comm.size}, the ranks"
            )
        number = comm.cross_rank if group_size is None else comm.rank // group_size
        groups = comm.allgather(np.array([number], np.int64), name="groups")
        self._places = len(set(groups.tolist()))
        self._group = comm.split(number, key=comm.rank)
        assert self._group is not None
        self._gossips = comm.split(0 if self._group.rank == 0 else None, key=number)
        self._made = [one for one in (self._group, self._gossips) if one is not None]

    def _averaged(self) -> list[Tensor]:
        """All that goes into an average."""
        moments = [] if self._moments is None else self._moments.vectors
        return [*self._flat.vectors, *self._extra.vectors, *moments]

    # --- a step ---

    def _gossip(self) -> bool:
        """Take and give answers, and ask when it is time; whether weights changed."""
        if self._pairs is None:
            return False
        changed = self._note(self._pairs.poll())
        self._silent += 1
        self._since_call += 1
        due = self._trigger.step(self._steps, self._flat.vectors, self._rate())
        if self._max_interval is not None and self._silent >= self._max_interval:
            due = True
        self._counts["triggers"] += due
        yielded, self._yielded = self._yielded, None
        asked = yielded is not None and self._ask(self._pairs, yielded)
        if due and self._is_met():
            self._turn += 1
        elif due or self._owed:
            asked = self._turn_to_next(self._pairs) or asked
        if due:
            self._since_call, self._met_next = 0, False
        if asked and self._patience_s > 0:
            changed = self._note(self._pairs.wait(self._patience_s)) or changed
        return changed

    def _is_met(self) -> bool:
        """Whether the peer of this turn has just asked this rank, so that the pair is done. Just:
        less than half of the time since the last call ago.
        """
        return self._met_next and 2 * (self._silent - 1) < self._since_call

    def _turn_to_next(self, pairs: PairAverager) -> bool:
        """Ask the next peer; whether that was done."""
        assert self._gossips is not None
        place = self._gossips.rank
        peer = self._topology.choose(place, self._turn, {*pairs.open, *pairs.lost})
        if peer is None:
            self._counts["skipped"] += 1
            return False
        self._turn += 1
        self._owed = max(0, self._owed - 1)
        if self._topology.mutual and peer < place:
            # It has probably chosen this rank too: its request comes, and two would be too many.
            self._yielded = peer
            self._reset(averaged=False)
            return False
        return self._ask(pairs, peer)

    def _ask(self, pairs: PairAverager, peer: int) -> bool:
        if not pairs.ask(peer):
            self._counts["skipped"] += 1
            return False
        self._counts["asked"] += 1
        self._reset(averaged=False)
        return True

    def _note(self, done: list[Averaged]) -> bool:
        for entry in done:
            if entry.committed:
                self._counts["averaged"] += 1
                if entry.peer == self._yielded:
                    self._yielded = None
                elif self._topology.mutual and not entry.asked and self._gossips is not None:
                    place = self._gossips.rank
                    if entry.peer == self._topology.choose(place, self._turn):
                        self._met_next = True
                self._distance = entry.distance
            elif entry.asked:
                self._counts["refused"] += 1
                self._owed = 1  # the next step asks somebody else
        committed = any(entry.committed for entry in done)
        if committed:
            self._reset(averaged=True)
        if self._pairs is not None and len(self._pairs.lost) > len(self._told):
            for rank, why in self._pairs.lost.items():
                if rank not in self._told and not why.endswith("closed"):
                    warnings.warn(f"Gossip goes on without rank {rank}: {why}", stacklevel=4)
            self._told |= self._pairs.lost.keys()
        return committed

    def _reset(self, *, averaged: bool) -> None:
        self._silent = 0
        self._trigger.reset(self._flat.vectors)
        if averaged and self._momentum == "reset":
            for state in self.state.values():
                for name in _FIRST_MOMENTS:
                    if isinstance(state.get(name), Tensor):
                        state[name].zero_()

    def _adopt_moments(self) -> None:
        """Make first moments views of what is averaged, as soon as they are there."""
        if self._moments is None:
            return
        for parameter, place in zip(self._flat.views, self._moments.views.values(), strict=True):
            state = self.state.get(parameter, {})
            for name in _FIRST_MOMENTS:
                moment = state.get(name)
                if isinstance(moment, Tensor) and moment.data_ptr() != place.data_ptr():
                    place.copy_(moment)
                    state[name] = place

    def _average_gradients(self, group: Comm) -> None:
        for parameter in self._flat.views:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad.contiguous()
            group.allreduce(gradient, "mean", out=gradient)
            if gradient is not parameter.grad:
                parameter.grad.copy_(gradient)

    def _tell_group(self, group: Comm, changed: bool) -> None:
        """Give a group the weights of its first rank, if these changed."""
        flag = np.array([changed], np.uint8)
        group.broadcast(flag, name="whether weights changed")
        if flag[0]:
            for vector in self._averaged():
                group.broadcast(vector, name="weights of the group")

    def _rate(self) -> float:
        return float(self.param_groups[0].get("lr", 1.0))


def _check(
    trigger: Any,
    max_interval: int | None,
    global_average_every: int | None,
    momentum: str,
    compression: str | None,
) -> None:
    if not isinstance(trigger, Trigger):
        raise TypeError(
            f"Gossip: trigger is a {type(trigger).__name__}; give one of hsgd.optim.triggers, or "
            "an object with step, reset, state_dict and load_state_dict"
        )
    for name, value in (
        ("max_interval", max_interval),
        ("global_average_every", global_average_every),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"Gossip: {name} is {value!r}; give steps, 1 or more, or None")
    if momentum not in ("keep", "average", "reset"):
        raise ValueError(f'Gossip: momentum is {momentum!r}; use "keep", "average" or "reset"')
    if compression not in _WIRE:
        raise ValueError(
            f'Gossip: compression is {compression!r}; use None, "bfloat16" or "float16"'
        )
