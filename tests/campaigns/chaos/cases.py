"""Cases: which job is run, and what happens to whom, when. All of it follows from a number.

Owns the kinds of faults and the draw. Never runs anything.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from campaigns.chaos.layers import LAYERS, Layer

__all__ = ["FAULTS", "LINK_STATES", "STARTERS", "TIMEOUT_S", "Case", "Fault", "draw"]

STARTERS = {
    "fork": "on this machine, whose nodes are pretended",
    "nodes": "on virtual nodes, with links that are cut or slow; needs root",
    "mpirun": "by Open MPI's mpirun on virtual nodes, with the same links; needs root",
}

TIMEOUT_S = 2.0  # HSGD_TIMEOUT_S of all jobs


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    ends: the victim's process ends by it, and the kernel or the victim itself tells the others.
    hangs: the victim lives and does nothing: the others hear of it at their deadline.
    Neither: the job must end well.
    raises: the victim's own program sees it and fails by it, in its own way.
    cuts: no rank ends, and those on either side of the victim's link hear of it at the deadline.
    """

    about: str
    ends: bool = False
    hangs: bool = False
    raises: bool = False
    cuts: bool = False


FAULTS = {
    "kill": Fault("SIGKILL", ends=True),
    "abort": Fault("SIGABRT", ends=True),
    "exit": Fault("os._exit(3) in a thread", ends=True),
    "exception": Fault("the program raises between two steps", ends=True, raises=True),
    "interrupt": Fault("SIGINT, as Ctrl-C", ends=True, raises=True),
    "memory": Fault("no more memory for the process", raises=True),
    "disk": Fault("no file may grow", raises=True),
    "stop": Fault("SIGSTOP until the others have ended, then SIGCONT", hangs=True),
    "gil": Fault("a thread that holds the interpreter's lock for ever", hangs=True),
    "pause": Fault("SIGSTOP for less than the deadline, then SIGCONT"),
    "cut": Fault("the link of the victim's node goes down", cuts=True),
    "slow": Fault("that link has 4 Mbit/s for less than the deadline, then its old rate"),
}
LINK_STATES = {"cut": "down", "slow": "slow"}  # by fault; of virtual nodes alone
_WEIGHTS = {"kill": 4, "stop": 1, "gil": 1}  # those that wait for a deadline take long
_PHASES = {"setup": 0.25, "work": 0.35, "end": 0.004}  # the longest delay, seconds


@dataclass(frozen=True)
class Case:
    """A job and its fault.

    nodes: the node of each rank. phase: "setup": `delay_s` after the start of the processes;
    "work": after all are ready; "end": after the victim has made its last step. pause_s: of the
    faults "pause" and "slow". cores: how many the job may use; 0 is all. under: one of STARTERS.
    """

    number: int
    layer: str
    nodes: tuple[int, ...]
    fault: str
    victim: int
    phase: str
    delay_s: float
    pause_s: float
    cores: int
    under: str = "fork"

    @property
    def layout(self) -> str:
        """Ranks of each node, as 2+1."""
        return "+".join(str(self.nodes.count(node)) for node in sorted(set(self.nodes)))

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {**asdict(self), "nodes": list(self.nodes)}

    def __str__(self) -> str:
        cores = f" on {self.cores} core" if self.cores else ""
        return (
            f"case {self.number}: {self.layer}, {self.layout} ranks{cores}: {self.fault} of rank "
            f"{self.victim}, {self.phase} + {1e3 * self.delay_s:.1f} ms"
        )


def draw(
    number: int, layers: Collection[str] = (), faults: Collection[str] = (), under: str = "fork"
) -> Case:
    """The case of this number, among the layers and faults named, or all of hsgd's.

    Raises ValueError where no layer that is named can be started so, or meets no fault that is.
    """
    luck = random.Random(number)
    named = [each for each in LAYERS.values() if _is_named(each, layers) and _layouts(each, under)]
    if not named:
        raise ValueError(f"{', '.join(layers)}: not started by {under}")
    possible = {each: found for each in named if (found := _harmed(each, faults, under))}
    if not possible:
        names = ", ".join(each.name for each in named)
        raise ValueError(f"{', '.join(faults)}: no such fault for {names} under {under}")
    layer = luck.choices(list(possible), [each.weight for each in possible])[0]
    nodes = luck.choice(possible[layer])
    kinds = _kinds(layer, nodes, faults, under)
    fault = luck.choices(kinds, [_WEIGHTS.get(kind, 2) for kind in kinds])[0]
    phase = luck.choices(list(_PHASES), (2 if layer.has_setup else 0, 6, 1))[0]
    return Case(
        number=number,
        layer=layer.name,
        nodes=nodes,
        fault=fault,
        victim=luck.randrange(len(nodes)),
        phase=phase,
        delay_s=luck.random() * _PHASES[phase],
        pause_s=luck.uniform(0.01, 0.3) * TIMEOUT_S,
        cores=luck.choice((0, 0, 1)),
        under=under,
    )


def _is_named(layer: Layer, names: Collection[str]) -> bool:
    return layer.name in names if names else not layer.is_peer


def _layouts(layer: Layer, under: str) -> list[tuple[int, ...]]:
    """The nodes of its ranks where it is started so; none where it cannot be."""
    if (under == "mpirun") != (layer.launch is not None):
        return []
    return [nodes for nodes in layer.layouts if under != "nodes" or len(set(nodes)) > 1]


def _harmed(layer: Layer, faults: Collection[str], under: str) -> list[tuple[int, ...]]:
    """Of these layouts those on which it meets a fault that is named."""
    return [nodes for nodes in _layouts(layer, under) if _kinds(layer, nodes, faults, under)]


def _kinds(layer: Layer, nodes: tuple[int, ...], faults: Collection[str], under: str) -> list[str]:
    """Faults that ranks on these nodes meet; links are cut where ranks use virtual ones."""
    has_links = under != "fork" and len(set(nodes)) > 1
    return [
        kind
        for kind in FAULTS
        if (not faults or kind in faults)
        and kind not in layer.spared
        and (has_links or kind not in LINK_STATES)
    ]
