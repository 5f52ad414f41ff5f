"""Turns: which peer a rank of Gossip asks in which step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from hsgd.optim.gossip.pair_averaging import Averaged
from hsgd.optim.gossip.topology import Topology
from hsgd.optim.triggers.communication_triggers import Trigger

__all__ = ["Turns"]


class Turns:
    """The requests of one rank: the trigger says when, the topology whom; local.

    If ranks choose one another, both may ask in the same step, and their requests would cross. So
    the higher rank yields, unless the peer is remote: it waits one step for the peer's request
    before it asks. A rank whose next peer has asked it first counts that as its own turn.

    Args:
        place: this rank's number in the topology.
        max_interval: ask after so many steps without an average.
        remote: peers for which crossing requests make one average, so that yielding is not needed.
    """

    def __init__(
        self,
        trigger: Trigger,
        topology: Topology,
        place: int,
        max_interval: int | None,
        remote: Collection[int] = (),
    ) -> None:
        self._trigger, self._topology, self._place = trigger, topology, place
        self._max_interval, self._remote = max_interval, remote
        self.triggers = self.skipped = 0
        self._turn = 0
        self._silent = 0  # steps since the last average, or request
        self._since_call = 0  # steps since the trigger last called
        self._owed = False  # a request was refused, so another peer is asked
        self._yielded: int | None = None
        self._met_next = False  # the peer of the next turn has asked this rank

    def go_on_among(self, topology: Topology, place: int, remote: Collection[int]) -> None:
        """Continue among other ranks; forget what concerns single peers."""
        self._topology, self._place, self._remote = topology, place, remote
        self._owed, self._yielded, self._met_next = False, None, False

    def reset(self, params: Sequence[Tensor]) -> None:
        """Note that the weights are new, or were sent."""
        self._silent = 0
        self._trigger.reset(params)

    def note(self, done: Iterable[Averaged]) -> None:
        """Record averages and refusals."""
        for entry in done:
            if not entry.committed:
                self._owed = self._owed or entry.asked  # the next step asks another peer
            elif entry.peer == self._yielded:
                self._yielded = None
            elif not entry.asked and self._topology.mutual:
                next_peer = self._topology.choose(self._place, self._turn)
                self._met_next = self._met_next or entry.peer == next_peer

    def next(
        self, step: int, params: Sequence[Tensor], lr: float, busy: Collection[int]
    ) -> list[int]:
        """Return the peers to ask after local step `step`, without those in `busy`."""
        due = self.due(step, params, lr)
        chosen = [] if self._yielded is None else [self._yielded]
        self._yielded = None
        if due and self._is_met():
            self._turn += 1
        elif due or self._owed:
            chosen += self._choose({*busy, *chosen})
        if due:
            self._since_call, self._met_next = 0, False
        return chosen

    def due(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether to exchange after local step `step`; call it once per step."""
        self._silent += 1
        self._since_call += 1
        due = self._trigger.step(step, params, lr)
        if self._max_interval is not None and self._silent >= self._max_interval:
            due = True
        self.triggers += due
        return due

    def _is_met(self) -> bool:
        """Return whether this turn's peer has recently asked this rank.

        "Recently" is less than half of the time since the last call ago.
        """
        return self._met_next and 2 * (self._silent - 1) < self._since_call

    def _choose(self, busy: Collection[int]) -> list[int]:
        peer = self._topology.choose(self._place, self._turn, busy)
        if peer is None:
            self.skipped += 1
            return []
        self._turn += 1
        self._owed = False
        if self._topology.mutual and peer < self._place and peer not in self._remote:
            self._yielded = peer
            return []
        return [peer]

    @property
    def yields(self) -> bool:
        """Whether a request is postponed by one step."""
        return self._yielded is not None

    def state_dict(self) -> dict[str, Any]:
        return {
            "trigger": self._trigger.state_dict(),
            "triggers": self.triggers,
            "skipped": self.skipped,
            "turn": self._turn,
            "silent": self._silent,
            "since_call": self._since_call,
            "owed": self._owed,
            "yielded": self._yielded,
            "met_next": self._met_next,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trigger.load_state_dict(state["trigger"])
        self.triggers, self.skipped = state["triggers"], state["skipped"]
        self._turn, self._silent = state["turn"], state["silent"]
        self._since_call, self._owed = state["since_call"], state["owed"]
        self._yielded, self._met_next = state["yielded"], state["met_next"]
