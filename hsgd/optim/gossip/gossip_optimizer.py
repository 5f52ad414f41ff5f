"""Gossip: local SGD whose ranks average their models in pairs, when a trigger says so.

Owns what a training script calls: the step, the metrics and the comparison of models. Source: the
adaptive gossip of Ho, Wu and Liu (CCGRID 2018), of which we know the abstract: models are exchanged
according to the change of the local model. The rest is our reconstruction; the exchange of a pair
is in pair_averaging.py, when and with whom in communication_triggers.py and topology.py. Rounds of
`outer` are in noloco.py.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.comm import Comm
from hsgd.errors import CollectiveTimeout, about
from hsgd.networks import Network
from hsgd.optim.flat_vectors import Flattened
from hsgd.optim.gossip.gossip_records import GossipMetrics, Scores
from hsgd.optim.gossip.gossip_turns import Turns
from hsgd.optim.gossip.noloco import NoLoCo, OuterRounds, read_outer
from hsgd.optim.gossip.pair_averaging import Averaged, PairAverager
from hsgd.optim.gossip.topology import Topology
from hsgd.optim.triggers.communication_triggers import FixedPeriod, RelativeChange, Trigger
from hsgd.optim.wrapping_optimizer import WrappingOptimizer, check_choice, tensors_of

__all__ = ["Gossip", "Momentum"]

Momentum = Literal["keep", "average", "reset"]
_FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
_WIRE = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SETTLE_LOOK_S = 1e-4


class Gossip(WrappingOptimizer):
    """Wraps an optimizer: each rank steps on its own gradients, and averages its weights with one
    peer at a time; collective, blocking. step() is local, and waits for nobody.

    optimizer: any torch optimizer. Schedulers take this object.
    params: the tensors that are averaged, or a model: its trainable parameters, and its floating
        buffers as `buffers` are. Dense, floating, on the CPU, equal in shapes and dtypes on all
        ranks. They become views of one vector. Rank 0's values are sent to all first.
    comm: the ranks.
    trigger: when to average, one object for each rank; None is RelativeChange(0.05), with
        `outer` FixedPeriod(50).
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
        and takes the answer in a later step. None is 0, and with `outer` the deadline of `comm`.
    outer: "noloco", or NoLoCo(lr, momentum, pull): whenever the trigger says so, ranks meet in
        pairs that `seed` draws for each round, wait for each other, at most for `patience_s`, and
        take an outer step (arXiv:2506.10911). A rank whose partner is late, or dead, takes it
        alone. Triggers must say so equally often on all ranks. Not with a topology, compression
        or network="mpi".
    network: what carries weights between nodes, "sockets", "mpi", which needs
        MPI_THREAD_MULTIPLE, or "auto"; see hsgd.NotifiedWindow. Over MPI a rank that dies on
        another node ends the job, and one that stands still may hold up its neighbours.
    seed: of random topologies, equal on all ranks.
    timeout_s: until close() and settle() give up; None is the deadline of `comm`.

    A peer that is slow has its answer taken when it comes, and is asked again only after; one that
    died is left out, with a warning. Raises ValueError for arguments and tensors that cannot work.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: nn.Module | Iterable[Tensor],
        comm: Comm,
        trigger: Trigger | None = None,
        topology: Any = "random",
        *,
        max_interval: int | None = None,
        global_average_every: int | None = None,
        momentum: Momentum = "keep",
        compression: Literal["bfloat16", "float16"] | None = None,
        hierarchical: bool = False,
        group_size: int | None = None,
        buffers: Iterable[Tensor] = (),
        patience_s: float | None = None,
        outer: Literal["noloco"] | NoLoCo | None = None,
        network: Network = "sockets",
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._comm = comm
        trigger = _usual_trigger(outer) if trigger is None else trigger
        _check(trigger, max_interval, global_average_every, momentum, compression)
        if group_size is not None and not hierarchical:
            raise ValueError("Gossip: group_size is for hierarchical=True")
        self._global_every = global_average_every
        rule = read_outer(outer, topology, compression, network)
        self._momentum = momentum
        self._timeout_s = comm.timeout_s if timeout_s is None else timeout_s
        waits = 0.0 if rule is None else self._timeout_s
        self._patience_s = waits if patience_s is None else patience_s
        self._split(hierarchical, group_size)
        graph = _graph_of(topology, self._places, seed)
        parameters, own_buffers = tensors_of(params, "Gossip")
        self._flat = Flattened(parameters)
        self._extra = Flattened([*own_buffers, *buffers], "buffer")
        self._moments: Flattened | None = None
        if momentum == "average":
            self._moments = Flattened([torch.zeros_like(p) for p in self._flat.views])
        for vector in (*self._flat.vectors, *self._extra.vectors):
            comm.broadcast(vector, name="weights of Gossip")
        self._pairs: PairAverager | None = None
        self._rounds: OuterRounds | None = None
        if self._gossips is not None and rule is not None:
            self._rounds = self._outer_rounds(self._gossips, rule, seed)
        elif self._gossips is not None:
            self._pairs = self._averager(self._gossips, graph, compression, network, timeout_s)
        place = 0 if self._gossips is None else self._gossips.rank
        remote = () if self._pairs is None else self._pairs.remote
        self._turns = Turns(trigger, graph, place, max_interval, remote)
        self._watched = list(self._flat.views.values())
        self._turns.reset(self._watched)
        self._steps, self._distance = 0, float("nan")
        self._counts = dict.fromkeys(("asked", "averaged", "refused", "global_averages"), 0)
        self._global_bytes = np.zeros(2, np.int64)  # inside the node, and to others
        self._told: set[int] = set()
        self._described = f"{trigger!r}, {graph!r}"
        self._close_before(comm, self._group, self._gossips)

    # --- what training scripts call ---

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """The optimizer's own step, and what gossip there is to do; local and not blocking, but
        for `patience_s`, `hierarchical` and `global_average_every`.
        """
        self._check_open()
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
        before = self._comm.metrics()
        with torch.no_grad():
            for vector in self._averaged():
                self._comm.allreduce(vector, "mean", out=vector, name="global average")
            self._mixed()
            if self._rounds is not None:
                self._rounds.restart()
        now = self._comm.metrics()
        self._global_bytes += (
            now.intra_bytes - before.intra_bytes,
            now.inter_bytes_sent - before.inter_bytes_sent,
        )
        self._counts["global_averages"] += 1

    def settle(self) -> None:
        """Return when no average of any rank is half done; collective, blocking. For saving models
        whose sum is to be exact. No weights change between the return of the first rank and that
        of the last.
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
            if self._group is not None:
                self._tell_group(self._group, True)
            # A rank that leaves may ask at once, and one that still looks would answer: so nobody
            # leaves before all have stopped looking.
            self._comm.barrier()
            if self._pairs is not None and self._pairs.open:
                late = ", ".join(map(str, self._pairs.open))
                raise about(
                    self._pairs.open[0],
                    CollectiveTimeout(
                        f"Gossip.settle: rank {late} has not answered within {self._timeout_s:g} s"
                    ),
                )

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
        pairs = self._pairs if self._rounds is None else self._rounds.pairs
        inside, between = self._global_bytes.tolist()
        return GossipMetrics(
            steps=self._steps,
            triggers=self._turns.triggers,
            skipped=self._turns.skipped,
            **self._counts,
            messages=0 if pairs is None else pairs.traffic.messages,
            local_bytes=inside + (0 if pairs is None else pairs.traffic.local_bytes),
            remote_bytes=between + (0 if pairs is None else pairs.traffic.remote_bytes),
            last_distance=self._distance,
            lost=() if pairs is None else tuple(sorted(pairs.lost)),
        )

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's and, under "gossip", where this rank's gossip is; local. The
        weights are the model's.
        """
        state = self._optimizer.state_dict()
        state["gossip"] = {
            "turns": self._turns.state_dict(),
            "steps": self._steps,
            "counts": dict(self._counts),
        }
        if self._rounds is not None:
            state["gossip"]["outer"] = self._rounds.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back; local. A wrapped optimizer's own will do too; outer weights are then the
        model's, which is to be loaded before.
        """
        gossip = state_dict.get("gossip")
        self._optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "gossip"})
        self._take_over()
        if gossip is not None:
            self._turns.load_state_dict(gossip["turns"])
            self._steps = gossip["steps"]
            self._counts.update(gossip["counts"])
        if self._rounds is not None and gossip is not None and "outer" in gossip:
            self._rounds.load_state_dict(gossip["outer"])
        elif self._rounds is not None:
            self._rounds.restart()

    def close(self) -> None:
        """Take the last answers and leave; local, but collective between nodes and in groups. A
        second call does nothing. The weights stay as they are.

        Raises CollectiveTimeout naming peers that did not answer, or did not take an answer.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with torch.no_grad():
                if self._pairs is not None:
                    self._note(self._pairs.close())
                if self._rounds is not None:
                    self._rounds.pairs.close()
                if self._group is not None and not self._group.closed:
                    self._tell_group(self._group, True)
        finally:
            self._let_go()

    def _abandon(self) -> None:
        self._closed = True
        try:
            pairs = self._pairs if self._rounds is None else self._rounds.pairs
            if pairs is not None:
                pairs.abandon()
        finally:
            self._let_go(abort=True)

    def __repr__(self) -> str:
        return f"Gossip({self._optimizer!r}, {self._described})"

    # --- set-up ---

    def _split(self, hierarchical: bool, group_size: int | None) -> None:
        """Who gossips, and in which group this rank is."""
        comm = self._comm
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

    def _averager(
        self,
        comm: Comm,
        graph: Topology,
        compression: str | None,
        network: Network,
        timeout_s: float | None,
    ) -> PairAverager:
        return PairAverager(
            comm,
            self._averaged(),
            [graph.neighbours(rank) for rank in range(self._places)],
            wire_dtype=_WIRE[compression],
            network=network,
            timeout_s=timeout_s,
        )

    def _outer_rounds(self, comm: Comm, rule: NoLoCo, seed: int) -> OuterRounds:
        weights, also = self._flat.vectors, self._averaged()[len(self._flat.vectors) :]
        return OuterRounds(comm, rule, weights, also, seed=seed, timeout_s=self._timeout_s)

    def _averaged(self) -> list[Tensor]:
        """All that goes into an average."""
        moments = [] if self._moments is None else self._moments.vectors
        return [*self._flat.vectors, *self._extra.vectors, *moments]

    # --- a step ---

    def _gossip(self) -> bool:
        """Take and give answers, and ask when it is time; whether weights changed."""
        if self._rounds is not None:
            return self._take_round(self._rounds)
        if self._pairs is None:
            return False
        changed = self._note(self._pairs.poll())
        busy = {*self._pairs.open, *self._pairs.lost}
        chosen = self._turns.next(self._steps, self._watched, self._rate(), busy)
        asked = [peer for peer in chosen if self._pairs.ask(peer)]
        self._counts["asked"] += len(asked)
        self._turns.skipped += len(chosen) - len(asked)
        if asked or self._turns.yields:
            self._turns.reset(self._watched)
        if asked and self._patience_s > 0:
            changed = self._note(self._pairs.wait(self._patience_s)) or changed
        return changed

    def _take_round(self, rounds: OuterRounds) -> bool:
        """An outer step when it is time; whether weights changed."""
        if not self._turns.due(self._steps, self._watched, self._rate()):
            return False
        met = rounds.step(self._patience_s)
        self._turns.skipped += met is None
        self._counts["asked"] += met is not None
        if not self._note([] if met is None else [met]):
            self._mixed()
        return True

    def _note(self, done: list[Averaged]) -> bool:
        """Count what happened; whether weights changed."""
        committed = [entry for entry in done if entry.committed]
        self._counts["averaged"] += len(committed)
        self._counts["refused"] += sum(entry.asked and not entry.committed for entry in done)
        self._turns.note(done)
        if committed:
            self._distance = committed[-1].distance
            self._mixed()
        pairs = self._pairs if self._rounds is None else self._rounds.pairs
        if pairs is not None and len(pairs.lost) > len(self._told):
            for rank, why in pairs.lost.items():
                if rank not in self._told and not why.endswith("closed"):
                    warnings.warn(f"Gossip goes on without rank {rank}: {why}", stacklevel=4)
            self._told |= pairs.lost.keys()
        return bool(committed)

    def _mixed(self) -> None:
        """The weights are new."""
        self._turns.reset(self._watched)
        self._reset_moments()

    def _reset_moments(self) -> None:
        if self._momentum == "reset":
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
        """Where nobody has a gradient there is none, or weight decay would move the tensor."""
        parameters = list(self._flat.views)
        used = np.array([parameter.grad is not None for parameter in parameters], np.uint8)
        group.allreduce(used, "max", out=used, name="which tensors have gradients")
        for parameter in (p for p, some in zip(parameters, used, strict=True) if some):
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
            self._reset_moments()  # as the first rank has done

    def _rate(self) -> float:
        return float(self.param_groups[0].get("lr", 1.0))


def _graph_of(topology: Any, size: int, seed: int) -> Topology:
    graph = topology if isinstance(topology, Topology) else Topology(topology, size, seed)
    if graph.size == size:
        return graph
    raise ValueError(
        f"Gossip: the topology is for {graph.size} ranks, but {size} gossip; with "
        "hierarchical=True those are the groups"
    )


def _usual_trigger(outer: object) -> Trigger:
    """Partners of NoLoCo meet in the same steps."""
    return RelativeChange(0.05) if outer is None else FixedPeriod(50)


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
    check_choice("Gossip: momentum", momentum, get_args(Momentum))
    check_choice("Gossip: compression", compression, _WIRE)
