"""The thread of a NotifiedTree that sums gradients upwards and passes weights downwards.

Owns what a leader does when a notification arrives; other ranks of a node need no thread, because
their leader reads and writes their segments. Never touches the model: it works on views of the
segments.

Flow control needs no acknowledgements of its own. A rank writes its gradient of step v of a layer
only when it has the weights of step v - 1, which the root makes from everybody's gradient of step
v - 1: the place that it overwrites was read. The root makes weights of step v when everybody's
gradient of step v is there: nobody uses the weights that they overwrite, nor passes them on.
tests/models/tree.pml checks this, and that it fails without either rule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.exchange import Exchange
from hsgd.optim.tree_plan import Layer, Plan, Team, as_memory

__all__ = ["GIVEN_UP", "Engine", "reason_in"]

GIVEN_UP = 1 << 62  # the version that says: nothing comes any more
_LOOK_S = 1.0  # the engine waits as long as the program computes; its caller has the deadline

Entry = tuple[Layer, list[Tensor], list[bool]]  # mean gradients, and whether any rank had one


class Engine:
    """Sums, updates and forwards, layer by layer, in a thread of its own on leaders.

    update: called on the root with a version and, for each layer or with whole_step for all at
        once, what has come.
    """

    def __init__(
        self,
        exchange: Exchange,
        plan: Plan,
        team: Team,
        update: Callable[[int, list[Entry]], None],
        *,
        whole_step: bool = False,
        before_notify: Callable[[], None] | None = None,
    ) -> None:
        self._exchange, self._plan, self._team = exchange, plan, team
        self._update, self._whole_step = update, whole_step
        self._before_notify = before_notify or (lambda: None)
        self.error: BaseException | None = None
        self._memory = {rank: as_memory(exchange.segment(rank)) for rank in team.members}
        self._steps = [0] * len(plan.layers)  # whose gradients have gone up, by layer
        self._held: dict[int, Entry] = {}
        self._sources: dict[int, tuple[int, int]] = {}  # slot: rank, layer
        self._bind()
        self._seen = dict.fromkeys([Plan.STOP, *self._watched()], 0)
        self._thread = threading.Thread(target=self._run, name="hsgd-tree", daemon=True)
        if team.leads:
            self._thread.start()

    def notify(
        self, target: int, slot: int, version: int, pieces: list[tuple[object, int]] | None = None
    ) -> None:
        """Write to a rank; what is written must stay until the flow control frees it."""
        self._before_notify()
        self._exchange.put_list_notify(pieces or [], target, slot, version)

    def stop(self) -> None:
        """End the thread; local, blocking."""
        if self._thread.is_alive():
            self._exchange.put_notify(None, self._team.rank, Plan.STOP, 1)
            self._thread.join()

    def missing(self, layer: int) -> str:
        """Which ranks hold up a layer here, as far as this rank can tell."""
        version = self._steps[layer] + 1
        late = [
            str(rank)
            for slot, (rank, which) in self._sources.items()
            if which == layer and slot != self._plan.weights_slot(layer)
            if self._exchange.test(slot) < version
        ]
        return f"no gradient from rank {', '.join(late)}" if late else ""

    def _bind(self) -> None:
        team, plan = self._team, self._plan
        for layer in range(len(plan.layers)):
            above = team.members[0] if not team.leads else max(team.spread_from, -1)
            above = team.rank if above < 0 else above
            self._sources[plan.weights_slot(layer)] = (above, layer)
            self._sources[plan.own_slot(layer)] = (team.rank, layer)
            if team.leads:
                for child, rank in enumerate(team.gather_from):
                    self._sources[plan.child_slot(layer, child)] = (rank, layer)
                for local_rank, rank in enumerate(team.members[1:], 1):
                    self._sources[plan.local_slot(layer, local_rank)] = (rank, layer)
        for slot, (rank, _) in self._sources.items():
            self._exchange.bind(slot, rank)

    def _watched(self) -> list[int]:
        """Slots in the order in which they are served: what the next forward needs first."""
        plan = self._plan
        root = self._team.is_root
        return [
            slot
            for slot, (_, layer) in sorted(self._sources.items())
            if not (root and slot == plan.weights_slot(layer))
        ]

    # --- the thread ---

    def _run(self) -> None:
        try:
            torch.set_grad_enabled(False)
            slots = list(self._seen)
            while True:
                try:
                    known = [self._seen[slot] for slot in slots]
                    slot, version = self._exchange.wait_any(slots, known, _LOOK_S)
                except CollectiveTimeout as error:
                    if "not delivered" in str(error):
                        raise
                    continue
                if slot == Plan.STOP:
                    self._exchange.drain()
                    return
                self._take(slot, version)
        except BaseException as error:  # told to everybody who may wait for this rank
            self.error = error
            self._give_up(str(error))

    def _take(self, slot: int, version: int) -> None:
        rank, layer = self._sources[slot]
        if version >= GIVEN_UP:
            raise PeerLost(reason_in(self._memory[self._team.rank]) or f"rank {rank} gave up")
        self._seen[slot] = version
        if slot == self._plan.weights_slot(layer):
            self._pass_on(layer, version)
        else:
            self._gather(layer)

    def _inputs(self, layer: int) -> list[int]:
        return [
            slot
            for slot, (_, which) in self._sources.items()
            if which == layer and slot != self._plan.weights_slot(layer)
        ]

    def _gather(self, layer: int) -> None:
        """Add up what has come, in the order of local ranks, then of child nodes."""
        version = self._steps[layer] + 1
        if min(self._seen[slot] for slot in self._inputs(layer)) < version:
            return
        self._steps[layer] = version
        plan, team = self._plan, self._team
        own, mine = plan.own[layer], self._memory[team.rank]
        like = plan.layers[layer].parameters
        sums, used = own.views(mine, like), own.in_use(mine)
        others = [(own, self._memory[rank]) for rank in team.members[1:]]
        others += [(block, mine) for block in plan.inbox[layer][: len(team.gather_from)]]
        for block, memory in others:
            for total, part in zip(sums, block.views(memory, like), strict=True):
                total.add_(part)
            used.bitwise_or_(block.in_use(memory))
        if team.is_root:
            self._finish(layer, version, sums, [bool(flag) for flag in used.tolist()])
            return
        whole = mine[own.offset : own.offset + own.size]
        there = plan.inbox[layer][team.place].offset
        slot = plan.child_slot(layer, team.place)
        self.notify(team.gather_to, slot, version, [(whole, there)])

    def _finish(self, layer: int, version: int, sums: list[Tensor], used: list[bool]) -> None:
        for total in sums:
            total.div_(self._team.size)
        entry = (self._plan.layers[layer], sums, used)
        if not self._whole_step:
            self._update(version, [entry])
            self._pass_on(layer, version)
            return
        self._held[layer] = entry
        if len(self._held) == len(self._plan.layers):
            self._update(version, [self._held[index] for index in sorted(self._held)])
            self._held.clear()
            for index in range(len(self._plan.layers)):
                self._pass_on(index, version)

    def _pass_on(self, layer: int, version: int) -> None:
        """The node's weights are new: to child nodes first, whose way is longer."""
        plan, team = self._plan, self._team
        block, slot = plan.weights[layer], plan.weights_slot(layer)
        weights = self._memory[team.rank][block.offset : block.offset + block.size]
        for rank in (*team.spread_to, *team.members[1:]):
            self.notify(rank, slot, version, [(weights, block.offset)])
        if team.is_root:
            self.notify(team.rank, slot, version)

    def _give_up(self, why: str) -> None:
        """Tell all neighbours, as far as they can be reached; their engines tell theirs."""
        plan, team = self._plan, self._team
        words = f"rank {team.rank} gave up: {why}".encode()[: Plan.REASON - 1]
        reason = np.zeros(Plan.REASON, np.uint8)
        reason[: len(words)] = np.frombuffer(words, np.uint8)
        neighbours = {*team.spread_to, *team.members, team.gather_to} - {-1}
        for rank in neighbours:
            pieces = [(reason, 0)] if rank != team.rank else []
            up = rank == team.gather_to and rank not in team.spread_to
            for layer in range(len(plan.layers)):
                slot = plan.child_slot(layer, team.place) if up else plan.weights_slot(layer)
                try:
                    self._exchange.put_list_notify(pieces, rank, slot, GIVEN_UP, 0.0)
                except (HsgdError, ValueError):
                    break  # that way is closed; its deadline tells them
                if up:
                    break  # one is enough for an engine


def reason_in(memory: Tensor) -> str:
    """What another rank wrote about why it gave up."""
    return bytes(memory[: Plan.REASON].tolist()).split(b"\0", 1)[0].decode(errors="replace")
