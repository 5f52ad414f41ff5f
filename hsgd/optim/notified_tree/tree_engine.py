"""Engine: the thread of a NotifiedTree that sums gradients upwards and passes weights downwards.

Only leaders have a thread; they read and write the segments of the other ranks of their node.
hsgd/csrc/onesided/tree/gradient_tree.hpp does the work without the GIL, and explains why flow
control needs no acknowledgements.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hsgd import _native
from hsgd.errors import HsgdError
from hsgd.onesided.notified_window import NotifiedWindow
from hsgd.optim.notified_tree.tree_parts import Part
from hsgd.optim.notified_tree.tree_plan import Team, TreePlan

__all__ = ["GIVEN_UP", "Engine", "reason_in"]

GIVEN_UP = 1 << 62  # the version that announces that nothing more comes

# Numbers of hsgd_dtype, and how many of its values an element has.
_DTYPES = {
    torch.float32: (0, 1),
    torch.float64: (1, 1),
    torch.float16: (2, 1),
    torch.bfloat16: (3, 1),
    torch.complex64: (0, 2),
    torch.complex128: (1, 2),
}


class Engine:
    """Sums, updates and forwards parts of layers, in a thread on leaders.

    Args:
        teams: this rank's neighbours, layer by layer.
        update: called on roots with a version and parts whose mean gradients lie in `plan.own` of
            the root's segment; not for parts that the engine updates itself, after set_tensors()
            and set_rules().
        whole_step: call `update` once, with all parts.
        before_notify: called before each notification that the program makes.
    """

    def __init__(
        self,
        window: NotifiedWindow,
        plan: TreePlan,
        teams: Sequence[Team],
        update: Callable[[int, Sequence[int]], None],
        *,
        whole_step: bool = False,
        before_notify: Callable[[], None] | None = None,
    ) -> None:
        self._window, self._plan = window, plan
        self._teams = [teams[part.layer] for part in plan.parts]
        team = self._team = teams[0]  # for rank, size and node, which all teams share
        self._update, self._before_notify = update, before_notify
        self.error: BaseException | None = None
        self._bind()
        self._thread: threading.Thread | None = None
        self._tree: _native.Tree | None = None
        if not team.leads:
            return
        options = _native.TreeOptions(
            divisor=team.size,
            whole_step=whole_step,
            stop_slot=plan.STOP,
            given_up=GIVEN_UP,
            reason_bytes=plan.REASON,
        )
        parts = [self._native_part(part) for part in plan.parts]
        self._tree = window.make_tree(parts, options)
        self._thread = threading.Thread(target=self._run, name="hsgd-tree", daemon=True)
        self._thread.start()

    def notify(self, part: int, version: int) -> None:
        """Announce that this rank's gradient of a part is in its segment."""
        if self._before_notify is not None:
            self._before_notify()
        team, plan = self._team, self._plan
        if team.leads:
            slot = plan.own_slot(part)
        else:
            slot = plan.local_slot(part, team.members.index(team.rank))
        self._window.put_notify(None, team.members[0], slot, version)

    def set_rules(self, version: int, rules: list[_native.LarsRule]) -> None:
        """Set the rules for updates without `update`, before a step's first gradient."""
        if (tree := self._tree) is not None:
            tree.set_rules(version, rules)

    def set_tensors(self, part: int, places: list[tuple[int, int, int]]) -> None:
        """Set the addresses of a part's parameters and momenta, until forget_tensors()."""
        if (tree := self._tree) is not None:
            tree.set_tensors(part, places)

    def forget_tensors(self) -> None:
        """Use `update` for all parts again; returns when no part is updated without it."""
        if (tree := self._tree) is not None:
            tree.forget_tensors()

    def stop(self) -> None:
        """End the thread; local, blocking."""
        if self._thread is not None and self._thread.is_alive():
            self._window.put_notify(None, self._team.rank, TreePlan.STOP, 1)
            self._thread.join()

    def sent(self) -> list[tuple[int, int, float, float]]:
        """Return layer, target, begin and end (time.monotonic()) of recent sends between nodes."""
        sent = tree.sent() if (tree := self._tree) is not None else []
        parts = self._plan.parts
        return [(parts[part].layer, target, begin, end) for part, target, begin, end in sent]

    def missing(self, layer: int, version: int) -> list[int]:
        """Return ranks whose gradients are missing here for a version, in the order of the sum."""
        if not self._team.leads:
            return []
        late = {
            rank: None
            for part in self._plan.parts_of[layer]
            for slot, rank, _ in self._inputs(part.index)
            if self._window.test(slot) < version
        }
        return list(late)

    # --- set-up ---

    def _inputs(self, part: int) -> list[tuple[int, int, tuple[int, int]]]:
        """Return slot, writer and memory (rank, offset) of a leader's inputs, in sum order."""
        team, plan = self._teams[part], self._plan
        own = plan.own[part].offset
        inputs = [(plan.own_slot(part), team.rank, (team.rank, own))]
        for local_rank, rank in enumerate(team.members[1:], 1):
            inputs.append((plan.local_slot(part, local_rank), rank, (rank, own)))
        for child, rank in enumerate(team.gather_from):
            inbox = plan.inbox[part][child].offset
            inputs.append((plan.child_slot(part, child), rank, (team.rank, inbox)))
        return inputs

    def _bind(self) -> None:
        plan = self._plan
        for part, team in enumerate(self._teams):
            above = team.members[0] if not team.leads else max(team.spread_from, -1)
            self._window.bind(plan.weights_slot(part), team.rank if above < 0 else above)
            if team.leads:
                for slot, rank, _ in self._inputs(part):
                    self._window.bind(slot, rank)

    def _native_part(self, part: Part) -> _native.TreeLayer:
        plan, index = self._plan, part.index
        team, own = self._teams[index], plan.own[index]
        numbers = []
        for place, stretch in zip(own.places, part.stretches, strict=True):
            dtype, times = _DTYPES[stretch.parameter.dtype]
            numbers.append((place, (stretch.end - stretch.begin) * times, dtype))
        up = []
        if not team.is_root:
            inbox = plan.inbox[index][team.place].offset
            up.append((team.gather_to, plan.child_slot(index, team.place), inbox, own.size))
        slot = plan.weights_slot(index)
        weights, size = plan.weights_range(part)
        # Child nodes first, since their way is longer; the program of this rank last.
        ranks = (*team.spread_to, *team.members[1:])
        down = [(rank, slot, weights, size) for rank in ranks]
        down += [(team.rank, slot, 0, 0)] if team.is_root else []
        return _native.TreeLayer(
            numbers=numbers,
            flags=own.flags,
            gradients=[(slot, memory, offset) for slot, _, (memory, offset) in self._inputs(index)],
            up=up,
            weights=(slot, team.rank, weights),
            down=down,
        )

    # --- the thread ---

    def _run(self) -> None:
        try:
            torch.set_grad_enabled(False)
            assert self._tree is not None
            self._window.work(self._tree, self._update)
        except BaseException as error:  # reported to all ranks that may wait for this one
            self.error = error
            self._give_up(str(error))
        finally:
            self._tree = None  # it keeps the memory alive

    def _give_up(self, why: str) -> None:
        """Notify the programs of this node and the neighbours' engines, which pass it on."""
        plan, team = self._plan, self._team
        words = f"rank {team.rank} gave up: {why}".encode()[: TreePlan.REASON - 1]
        reason = np.zeros(TreePlan.REASON, np.uint8)
        reason[: len(words)] = np.frombuffer(words, np.uint8)
        for rank in team.members:
            self._tell(rank, plan.gone_slot, [(reason, 0)] if rank != team.rank else [])
        far = {rank for each in self._teams for rank in (each.gather_to, *each.spread_to)}
        for rank in sorted(far - {-1}):
            self._tell(rank, plan.STOP, [(reason, 0)])

    def _tell(self, rank: int, slot: int, pieces: Sequence[tuple[object, int]]) -> None:
        with contextlib.suppress(HsgdError, ValueError):  # unreachable ranks have a deadline
            self._window.put_list_notify(pieces, rank, slot, GIVEN_UP, 0.0)


def reason_in(memory: Tensor) -> str:
    """Return another rank's reason for giving up."""
    return bytes(memory[: TreePlan.REASON].tolist()).split(b"\0", 1)[0].decode(errors="replace")
