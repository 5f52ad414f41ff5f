"""TreePlan and Team: the trees of a NotifiedTree, and the places of its data in segments.

Gradient tree: the binomial tree of CaffeGPI (arXiv:1706.00095); weights: a k-ary tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hsgd.optim.flat_vectors import in_memory
from hsgd.optim.notified_tree.tree_parts import Layer, Part, padded

__all__ = [
    "Block",
    "Team",
    "TreePlan",
    "best_arity",
    "gather_children",
    "gather_parent",
    "share_roots",
    "spread_children",
    "spread_parent",
    "teams_of",
]


def gather_parent(node: int) -> int:
    """Return where a node's gradients go: its number without the highest bit; -1 for node 0."""
    return node - (1 << (node.bit_length() - 1)) if node else -1


def gather_children(node: int, nodes: int) -> list[int]:
    """Return the nodes whose gradients come to a node, in the order of the sum."""
    first = node.bit_length()
    return [
        node + (1 << bit) for bit in range(first, nodes.bit_length()) if node + (1 << bit) < nodes
    ]


def spread_parent(node: int, arity: int) -> int:
    """Return the node that a node's weights come from; -1 for node 0."""
    return (node - 1) // arity if node else -1


def spread_children(node: int, arity: int, nodes: int) -> list[int]:
    """Return the nodes that a node passes weights to."""
    return list(range(arity * node + 1, min(arity * node + arity + 1, nodes)))


def best_arity(nodes: int, shared_roots: bool = False) -> int:
    """Return the least k with the least k * levels; a node sends k times per level.

    `shared_roots`: the greatest such k. Nodes then send equally much for any k, and fewer levels
    wake fewer threads.
    """

    def cost(arity: int) -> int:
        node, levels = nodes - 1, 0
        while node > 0:
            node, levels = (node - 1) // arity, levels + 1
        return arity * levels

    arities = range(1, max(nodes, 2))
    return min(arities, key=lambda arity: (cost(arity), -arity if shared_roots else arity))


def share_roots(sizes: Sequence[int], nodes: int) -> list[int]:
    """Return each layer's root node: largest layers first, each to the least loaded node."""
    roots, loads = [0] * len(sizes), [0] * nodes
    for layer in sorted(range(len(sizes)), key=lambda layer: -sizes[layer]):
        root = min(range(nodes), key=loads.__getitem__)
        roots[layer] = root
        loads[root] += sizes[layer]
    return roots


@dataclass(frozen=True)
class Block:
    """Tensors in a segment: a flag byte per tensor (whether there is a gradient), then values."""

    offset: int
    flags: int
    places: tuple[int, ...]
    size: int

    def in_use(self, memory: Tensor) -> Tensor:
        """Return the flags; `memory` is the segment as uint8."""
        return memory[self.offset : self.offset + self.flags]

    def views(self, memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the block's values in `memory` as tensors with the shapes, strides of `like`."""
        views = []
        for place, tensor in zip(self.places, like, strict=True):
            flat = in_memory(memory, self.offset + place, tensor.numel(), tensor.dtype)
            views.append(flat.as_strided(tensor.size(), tensor.stride()))
        return views

    def bytes(self, memory: Tensor) -> Tensor:
        """Return the whole block."""
        return memory[self.offset : self.offset + self.size]

    def at(self, offset: int) -> Block:
        """Return the same block at another offset."""
        return Block(offset, self.flags, self.places, self.size)


def _block(sizes: Sequence[int]) -> Block:
    """Return a block for tensors of these sizes in bytes."""
    places, end = [], padded(len(sizes))
    for size in sizes:
        places.append(end)
        end += padded(size)
    return Block(0, len(sizes), tuple(places), end)


class TreePlan:
    """Places and slots, the same on all ranks.

    A segment begins with REASON bytes that say why a rank gave up. Then, for each layer: its
    weights, and for each of its parts the rank's own gradient and those of its children.
    """

    REASON = 512
    STOP = 0  # slot that ends the engine, or reports that another one has ended

    def __init__(
        self,
        layers: Sequence[Layer],
        parts: Sequence[Part],
        children: int,
        local_size: int,
        ranks: int,
    ) -> None:
        self.layers, self.parts = list(layers), list(parts)
        self.parts_of: list[list[Part]] = [[] for _ in layers]
        for part in parts:
            self.parts_of[part.layer].append(part)
        self._inputs = 2 + children + local_size - 1
        end = self.REASON
        self.weights: list[Block] = []  # by layer, the others by part
        self.own: list[Block] = []
        self.inbox: list[list[Block]] = []
        for layer in layers:
            block = _block([p.numel() * p.element_size() for p in layer.parameters])
            self.weights.append(block.at(end))
            end += block.size
            for part in self.parts_of[layer.index]:
                block = _block([stretch.bytes for stretch in part.stretches])
                places = [block.at(end + k * block.size) for k in range(1 + children)]
                self.own.append(places[0])
                self.inbox.append(places[1:])
                end += (1 + children) * block.size
        self.segment_bytes = end
        # Slot that tells the ranks of a node that their leader's engine has ended.
        self.gone_slot = 1 + len(self.parts) * self._inputs
        self.leave_slot = self.gone_slot + 1  # and one for each further round
        self.leave_rounds = (ranks - 1).bit_length()
        self.slots = self.leave_slot + self.leave_rounds
        self._children = children

    def weights_range(self, part: Part) -> tuple[int, int]:
        """Return begin and number of bytes of a part's weights."""
        block, first, last = self.weights[part.layer], part.stretches[0], part.stretches[-1]
        begin = block.places[first.index] + first.begin * first.parameter.element_size()
        end = block.places[last.index] + last.end * last.parameter.element_size()
        return block.offset + begin, end - begin

    def _slot(self, part: int, which: int) -> int:
        return 1 + part * self._inputs + which

    def weights_slot(self, part: int) -> int:
        """Return the slot for a new version of a part's weights."""
        return self._slot(part, 0)

    def own_slot(self, part: int) -> int:
        """Return the slot for this rank's own gradient in its segment."""
        return self._slot(part, 1)

    def child_slot(self, part: int, child: int) -> int:
        """Return the slot that announces a child node's gradient of this part in the inbox."""
        return self._slot(part, 2 + child)

    def local_slot(self, part: int, local_rank: int) -> int:
        """Return a leader's slot for the gradient of another rank of its node."""
        return self._slot(part, 1 + self._children + local_rank)


@dataclass(frozen=True)
class Team:
    """A rank's neighbours in both trees of one root, which join the leaders of the nodes."""

    rank: int
    size: int
    members: tuple[int, ...]  # of this node, the leader first
    gather_to: int  # a rank, or -1
    place: int  # among the children of gather_to
    gather_from: tuple[int, ...]
    spread_from: int  # a rank, or -1
    spread_to: tuple[int, ...]
    most_children: int  # of any rank
    most_local: int

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader of its node."""
        return self.rank == self.members[0]

    @property
    def is_root(self) -> bool:
        """Whether this rank updates the weights."""
        return self.leads and self.gather_to < 0

    @classmethod
    def of(cls, rank: int, nodes: Sequence[int], arity: int, root: int = 0) -> Team:
        """Return a rank's team. `nodes` has the node of each rank; `root` rotates the nodes."""
        members: dict[int, list[int]] = {}
        for other, node in enumerate(nodes):
            members.setdefault(node, []).append(other)
        order = sorted(members)
        count = len(order)
        leaders = [members[order[(root + turned) % count]][0] for turned in range(count)]
        node = (order.index(nodes[rank]) - root) % count
        up, down = gather_parent(node), spread_parent(node, arity)
        return cls(
            rank=rank,
            size=len(nodes),
            members=tuple(members[nodes[rank]]),
            gather_to=leaders[up] if up >= 0 else -1,
            place=gather_children(up, count).index(node) if up >= 0 else 0,
            gather_from=tuple(leaders[c] for c in gather_children(node, count)),
            spread_from=leaders[down] if down >= 0 else -1,
            spread_to=tuple(leaders[c] for c in spread_children(node, arity, count)),
            most_children=len(gather_children(0, count)),
            most_local=max(map(len, members.values())),
        )


def teams_of(
    rank: int, nodes: Sequence[int], arity: int | None, sizes: Sequence[int], shared: bool
) -> list[Team]:
    """Return a rank's neighbours for each layer; `nodes` has the node of each rank."""
    count = len(set(nodes))
    spread = best_arity(count, shared) if arity is None else arity
    roots = share_roots(sizes, count) if shared else [0] * len(sizes)
    teams = {root: Team.of(rank, nodes, spread, root) for root in set(roots)}
    return [teams[root] for root in roots]
