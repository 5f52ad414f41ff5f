"""Gossip: local SGD whose ranks average their models in pairs when a trigger says so.

Source: adaptive gossip (Ho, Wu, Liu, CCGRID 2018), which exchanges models according to the change
of the local model; reconstructed from its abstract.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.errors import CollectiveTimeout, about
from hsgd.onesided.networks import Network
from hsgd.optim.fixed_parameters import FixedParameters
from hsgd.optim.flat_vectors import Flattened, values_kept
from hsgd.optim.gossip.first_moments import FirstMoments, Momentum
from hsgd.optim.gossip.gossip_metrics import GossipMetrics, Scores
from hsgd.optim.gossip.gossip_ranks import GossipRanks, distance_from_mean
from hsgd.optim.gossip.gossip_terms import WIRE, checked_rule, terms_of, usual_trigger
from hsgd.optim.gossip.gossip_turns import Turns
from hsgd.optim.gossip.joint_start import Past, start_together
from hsgd.optim.gossip.noloco import NoLoCo, OuterRounds
from hsgd.optim.gossip.pair_averaging import LEFT, Averaged, PairAverager, Traffic
from hsgd.optim.gossip.pair_rounds import PairRounds
from hsgd.optim.gossip.topology import Topology, graph_of
from hsgd.optim.optimizer_ranks import refusals_told
from hsgd.optim.restartable_optimizer import RestartableOptimizer
from hsgd.optim.triggers.communication_triggers import Trigger
from hsgd.optim.wrapping_optimizer import tensors_of

__all__ = ["Gossip"]

_SETTLE_LOOK_S = 1e-4


class Gossip(RestartableOptimizer):
    """Wraps an optimizer: ranks train locally and average their weights with one peer at a time.

    Construction is collective and blocking; step() is local and does not wait. The answer of a slow
    peer is used when it arrives, and the peer is asked again only then; a peer that died is skipped
    with a warning.

    Args:
        optimizer: any torch optimizer. Schedulers take this object.
        params: the tensors to average, or a model: its trainable parameters, and its floating
            buffers as `buffers`. Dense, floating, on the CPU, equal in shape and dtype on all
            ranks. They become views of one vector and start from rank 0's values.
        comm: the ranks, or a torch.distributed process group of any backend. None: this call is
            local, and restart() sets the ranks before the first step.
        trigger: when to average, one object per rank; None is RelativeChange(0.05), with `outer`
            FixedPeriod(50).
        topology: "random", "ring", "exponential2", a graph or a Topology; see hsgd.optim.Topology.
        max_interval: average after so many steps without an average; None: no limit.
        global_average_every: every so many steps all ranks average all models, which is collective
            and blocking; None: never.
        momentum: SGD's momentum_buffer, or Adam's exp_avg, in an average: "keep", "average" (with
            the weights; twice the bytes) or "reset" to 0.
        compression: None, "bfloat16" or "float16": how weights are sent. Both sides apply the same
            rounded difference, so sums are kept, but models differ by the rounding.
        hierarchical: groups average gradients in every step, and their first ranks gossip. step()
            is then collective in the group.
        group_size: number of consecutive ranks in a group; None is the node.
        buffers: floating tensors that are averaged too, such as BatchNorm's statistics.
        patience_s: how long step() waits for the peer's answer. 0 continues at once and uses the
            answer in a later step. None is 0, or with `outer` the deadline of `comm`.
        outer: "noloco", or NoLoCo(lr, momentum, pull): at each trigger, ranks meet in random pairs,
            wait for the partner at most `patience_s`, and take an outer step (arXiv:2506.10911),
            alone if the partner is late or dead. Triggers must fire equally often on all ranks. Not
            with a topology, compression or network="mpi".
        network: between nodes: "sockets", "mpi", which needs MPI_THREAD_MULTIPLE, or "auto"; see
            hsgd.NotifiedWindow. Over MPI a rank that dies on another node ends the job, and a
            stopped one may delay its neighbours.
        seed: of random topologies and pairs, equal on all ranks.
        timeout_s: limit of close() and settle(); None is the deadline of `comm`.

    Raises:
        ValueError, TypeError: an argument or tensor is invalid.
    """

    _ranks: GossipRanks

    def __init__(
        self,
        optimizer: Optimizer,
        params: nn.Module | Iterable[Tensor],
        comm: Any,
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
        self._trigger = usual_trigger(outer) if trigger is None else trigger
        options = {
            "topology": topology,
            "max_interval": max_interval,
            "global_average_every": global_average_every,
            "momentum": momentum,
            "compression": compression,
            "hierarchical": hierarchical,
            "group_size": group_size,
            "outer": outer,
            "network": network,
            "seed": seed,
        }
        given = params if isinstance(params, nn.Module) else list(params)
        with refusals_told(comm, "Gossip"):
            self._rule = checked_rule(self._trigger, options)
            parameters, own_buffers = tensors_of(given, "Gossip")
            extra = [*own_buffers, *buffers]
            self._flat, self._extra = Flattened(parameters), Flattened(extra, "buffer")
        self._terms = partial(terms_of, self._trigger, self._rule, options, given, extra)
        self._fixed = FixedParameters("Gossip", optimizer, given, parameters, parameters)
        self._global_every = global_average_every
        self._topology, self._seed, self._network = topology, seed, network
        self._wire = WIRE[compression]
        self._given_timeout_s, self._given_patience_s = timeout_s, patience_s
        self._groups = (hierarchical, group_size)
        self._moments = FirstMoments(momentum, self._flat.views)
        self._watched = list(self._flat.views.values())
        self._turns = Turns(self._trigger, Topology("random", 1), 0, max_interval)
        self._steps, self._distance = 0, float("nan")
        self._counts = dict.fromkeys(("asked", "averaged", "refused", "global_averages"), 0)
        self._global_bytes = np.zeros(2, np.int64)  # inside the node, and to other nodes
        self._earlier = Traffic()  # of the time before a restart
        self._pairs: PairAverager | None = None
        self._rounds: OuterRounds | None = None
        self._kept_outer: Mapping[str, Any] | None = None  # state of rounds that have ended
        self._was_in = self._has_called = False  # see Past
        self._join(comm)

    # --- what training scripts call ---

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the wrapped optimizer, then take part in gossip.

        Local and not blocking, except for `patience_s`, `hierarchical` and `global_average_every`.
        """
        self._check_open()
        self._fixed.check(self._optimizer)
        if self._ranks.inside is not None:
            if closure is not None:
                raise TypeError("Gossip.step: hierarchical=True takes no closure; call backward()")
            self._ranks.average_gradients(list(self._flat.views))
        result = self._step_wrapped(closure)
        self._steps += 1
        with torch.no_grad():
            self._moments.adopt(self.state)
            changed = self._gossip()
            if self._global_every is not None and self._steps % self._global_every == 0:
                self.global_average()
            else:
                self._tell_group(changed)
        return result

    def global_average(self) -> None:
        """Settle, then make all models the mean over ranks; collective, blocking."""
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
        """Wait until all averages of all ranks are complete; collective, blocking.

        No weights change between the first and the last return, so saved models have an exact sum.
        """
        self._check_ranks()
        with torch.no_grad():
            if self._pairs is not None:
                self._note(self._pairs.wait(self._timeout_s))
            here = self._comm.barrier_async()
            while not here.done():
                if self._pairs is not None:
                    self._note(self._pairs.poll())
                time.sleep(_SETTLE_LOOK_S)
            here.wait()
            self._tell_group(True)
            # A rank that returns may ask at once, and a rank that still polls would answer. So no
            # rank returns before all have stopped polling.
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
        """Return the root of the mean over ranks of |w - mean(w)|^2; collective, blocking."""
        return distance_from_mean(self._comm, self._flat.vectors)

    @contextlib.contextmanager
    def mean_model(self) -> Iterator[None]:
        """Set the tensors to the mean over ranks in the block; collective, blocking."""
        vectors = [*self._flat.vectors, *self._extra.vectors]
        with values_kept(vectors):
            for vector in vectors:
                self._comm.allreduce(vector, "mean", out=vector, name="mean model")
            yield

    def compare(self, score: Callable[[], float]) -> Scores:
        """Call `score` with this rank's model and with the mean model; collective, blocking."""
        own = float(score())
        every = self._comm.allgather(np.array([own]), name="scores")
        with self.mean_model():
            mean = float(score())
        return Scores(own, float(every.min()), float(every.mean()), mean)

    def metrics(self) -> GossipMetrics:
        exchange = self._exchange()
        traffic = self._earlier if exchange is None else self._earlier.plus(exchange.traffic)
        inside, between = self._global_bytes.tolist()
        return GossipMetrics(
            steps=self._steps,
            triggers=self._turns.triggers,
            skipped=self._turns.skipped,
            **self._counts,
            messages=traffic.messages,
            local_bytes=inside + traffic.local_bytes,
            remote_bytes=between + traffic.remote_bytes,
            last_distance=self._distance,
            lost=() if exchange is None else tuple(sorted(exchange.lost)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with this rank's gossip under "gossip"; local."""
        state = self._optimizer.state_dict()
        state["gossip"] = {
            "turns": self._turns.state_dict(),
            "steps": self._steps,
            "counts": dict(self._counts),
            "was_in": self._was_in,
            "has_called": self._has_called,
        }
        outer = self._kept_outer if self._rounds is None else self._rounds.state_dict()
        if outer is not None:
            state["gossip"]["outer"] = outer
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; local.

        A state without "gossip" is accepted; outer weights then start from the model, which must be
        loaded first.
        """
        gossip = state_dict.get("gossip")
        self._load(state_dict)
        if self._rounds is not None and gossip is not None and "outer" in gossip:
            self._rounds.load_state_dict(gossip["outer"])
        elif self._rounds is not None:
            self._rounds.restart()
        elif self._waits_for_ranks or self._left:
            self._kept_outer = None if gossip is None else gossip.get("outer")

    def abort(self) -> None:
        """Stop waiting for partners, and fail waits in groups; local, from any thread.

        Never blocks. Collectives of all ranks end with their communicator. restart() may follow.
        """
        super().abort()
        if (exchange := self._exchange()) is not None:
            exchange.stop_waiting()

    def restart(self, comm: Any, state_dict: dict[str, Any] | None = None) -> None:
        """Continue with another communicator after ranks were lost or joined; collective, blocking.

        Old pairs are broken, so no rank waits there. `comm` is as in the constructor; graphs and
        Topology objects must fit the number of ranks. `state_dict` is a copy of this rank's
        state_dict(), which is loaded first; the model of that time must be loaded before.

        All ranks start from the mean of the finite models of ranks that were in before, or if there
        are none, that have taken steps. With `outer` the mean is the outer weights, and velocities
        are averaged as well. Steps and rounds are those of the rank with the most steps; so is the
        trigger on ranks that have other steps or have not called it. Each rank or group keeps its
        inner optimizer's state. If it raises, another restart() may follow.
        """
        self._check_not_closed()
        if state_dict is not None and "gossip" not in state_dict:
            raise ValueError("Gossip: give restart() a whole state, which state_dict() returned")
        self._lose_ranks()
        if state_dict is not None:
            self._load(state_dict)
            own, stayed = state_dict["gossip"], self._steps > 0
            self._kept_outer = own.get("outer")
            self._was_in = own.get("was_in", stayed)
            self._has_called = own.get("has_called", stayed)
        self._join(comm)

    def close(self) -> None:
        """Take the last answers and leave; collective between nodes and in groups, else local.

        A second call does nothing. The weights stay. Models can still be compared, but not over a
        process group. Raises CollectiveTimeout naming peers that did not answer or take an answer.
        """
        if self._closed:
            return
        self._closed = True
        if self._aborted:
            return self._leave(abort=True)
        try:
            with torch.no_grad():
                if self._pairs is not None:
                    self._note(self._pairs.close())
                if self._rounds is not None:
                    self._rounds.pairs.close()
                if self._ranks.inside is not None and not self._ranks.inside.closed:
                    self._tell_group(True)
        finally:
            self._ranks.leave(abort=False)

    def _leave(self, abort: bool) -> None:
        """Leave without waiting; an average that was committed here may be lost on the peer."""
        if self._rounds is not None:
            self._kept_outer = self._rounds.state_dict()
        try:
            if (exchange := self._exchange()) is not None:
                self._earlier = self._earlier.plus(exchange.traffic)
                exchange.abandon()
        finally:
            self._pairs = self._rounds = None
            self._ranks.leave(abort=True)

    def __repr__(self) -> str:
        return f"Gossip({self._optimizer!r}, {self._described})"

    # --- set-up ---

    def _join(self, comm: Any) -> None:
        """Start together with the ranks of `comm`; collective over it, blocking."""
        self._waits_for_ranks, self._left, self._aborted = True, False, False
        self._ranks = ranks = GossipRanks(comm, *self._groups, self._fixed.named(), self._terms)
        try:
            given, usual = self._given_timeout_s, ranks.comm.timeout_s
            self._timeout_s = usual if given is None else given
            waits = 0.0 if self._rule is None else self._timeout_s
            self._patience_s = waits if self._given_patience_s is None else self._given_patience_s
            # A single rank that waits for restart() is in no graph.
            graph = graph_of("random" if comm is None else self._topology, ranks.count, self._seed)
            with torch.no_grad():
                self._start(ranks, graph)
        except BaseException:
            ranks.leave(abort=True)
            raise
        self._has_called = ranks.between is not None
        self._was_in = self._was_in or comm is not None
        self._waits_for_ranks = comm is None
        ranks.before_close(self._comm_closes)

    def _start(self, ranks: GossipRanks, graph: Topology) -> None:
        """Agree on the start, and form pairs; collective, blocking."""
        self._share_inner_state(ranks.inside, self._steps)
        comm, outer, vectors = ranks.comm, self._kept_outer or {}, self._flat.vectors
        own = self._steps, outer.get("rounds", 0), outer.get("velocity")
        past = Past(*own, was_in=self._was_in, has_called=self._has_called)
        start = start_together(comm, past, vectors, self._extra.vectors)
        if any(start.takes):
            turns = self._turns.state_dict()
            given = comm.broadcast_object(turns, start.source, "triggers")
            if start.takes[comm.rank]:
                counts = {name: turns[name] for name in ("triggers", "skipped")}
                self._turns.load_state_dict({**given, **counts})
        here = ranks.between
        if here is not None and self._rule is not None:
            also = self._averaged()[len(vectors) :]
            self._rounds = OuterRounds(
                here, self._rule, vectors, also, seed=self._seed, timeout_s=self._timeout_s
            )
            self._rounds.go_on(start.velocity, start.rounds)
        elif here is not None:
            self._pairs = PairAverager(
                here,
                self._averaged(),
                [graph.neighbours(rank) for rank in range(ranks.count)],
                wire_dtype=self._wire,
                network=self._network,
                timeout_s=self._given_timeout_s,
            )
        place = 0 if here is None else here.rank
        self._turns.go_on_among(graph, place, () if self._pairs is None else self._pairs.remote)
        self._steps, self._kept_outer = start.steps, None
        self._described = f"{self._trigger!r}, {graph!r}"
        self._told: set[int] = set()
        self._turns.reset(self._watched)
        if self._steps:
            self._moments.reset(self.state)

    def _exchange(self) -> PairAverager | PairRounds | None:
        rounds = self._rounds  # read once, since abort() runs in other threads
        return self._pairs if rounds is None else rounds.pairs

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        self._load_wrapped(dict(state_dict), "gossip")
        self._moments.adopt(self.state)
        if (gossip := state_dict.get("gossip")) is not None:
            self._turns.load_state_dict(gossip["turns"])
            self._steps = gossip["steps"]
            self._counts.update(gossip["counts"])

    def _averaged(self) -> list[Tensor]:
        return [*self._flat.vectors, *self._extra.vectors, *self._moments.vectors]

    # --- a step ---

    def _gossip(self) -> bool:
        """Use and give answers, and ask a peer if due; return whether weights changed."""
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
        """Make an outer step if due; return whether weights changed."""
        if not self._turns.due(self._steps, self._watched, self._rate()):
            return False
        met = rounds.step(self._patience_s)
        self._turns.skipped += met is None
        self._counts["asked"] += met is not None
        if not self._note([] if met is None else [met]):
            self._mixed()
        return True

    def _note(self, done: list[Averaged]) -> bool:
        """Count the averages; return whether weights changed."""
        committed = [entry for entry in done if entry.committed]
        self._counts["averaged"] += len(committed)
        self._counts["refused"] += sum(entry.asked and not entry.committed for entry in done)
        self._turns.note(done)
        if committed:
            self._distance = committed[-1].distance
            self._mixed()
        exchange = self._exchange()
        if exchange is not None and len(exchange.lost) > len(self._told):
            for rank in sorted(exchange.lost.keys() - self._told):
                if (why := exchange.lost[rank]) != LEFT:
                    warnings.warn(f"Gossip goes on without rank {rank}: {why}", stacklevel=4)
            self._told |= exchange.lost.keys()
        return bool(committed)

    def _mixed(self) -> None:
        self._turns.reset(self._watched)
        self._moments.reset(self.state)

    def _tell_group(self, changed: bool) -> None:
        if self._ranks.inside is not None and self._ranks.tell_group(self._averaged(), changed):
            self._moments.reset(self.state)  # as the first rank has done

    def _rate(self) -> float:
        return float(self.param_groups[0].get("lr", 1.0))
