"""Topology: which ranks may average with one another, and in which order.

Pairs average in both directions, so graphs are undirected. Source: exponential graphs as in SGP
(arXiv:1811.10792); the hypercube is their form for two-way exchanges.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

__all__ = ["NAMES", "Topology", "described", "graph_of"]

NAMES = ("random", "ring", "exponential2")
_IN_TURN = ("ring", "exponential2")


class Topology:
    """A graph over ranks, and the order in which each rank visits its neighbours; local.

    With "ring", and with "exponential2" of a power of two, ranks that have chosen equally often
    choose each other; with an odd number of ranks not all do.

    Args:
        spec: "random": the complete graph, visited at random. "ring": two neighbours; even ranks
            start with the right one, odd ranks with the left one. "exponential2": ranks whose
            numbers differ in one bit (a hypercube) if `size` is a power of two, else ranks 2^k
            apart, visited in the order of k. Otherwise a graph, visited at random: a list of the
            neighbours of each rank, or a square matrix with nonzero entries for edges.
        size: number of ranks.
        seed: of random visits; equal on all ranks.

    Raises:
        ValueError: the graph has the wrong size, is not connected, has a self loop or a one-way
            edge; names the ranks.
    """

    def __init__(self, spec: Any, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"Topology: size is {size}; give 1 or more ranks")
        if isinstance(spec, str) and spec not in NAMES:
            raise ValueError(
                f'Topology: "{spec}" is not known; use {", ".join(NAMES)}, or give the neighbours '
                "of each rank"
            )
        self.name = spec if isinstance(spec, str) else "graph"
        self._in_turn = self.name in _IN_TURN
        hypercube = self.name == "exponential2" and size & (size - 1) == 0
        self.mutual = self.name == "ring" or hypercube
        """Whether ranks that have chosen equally often choose each other."""
        self.size, self.seed = size, operator.index(seed)
        if isinstance(spec, str):
            self._neighbours = [_named(spec, rank, size) for rank in range(size)]
        else:
            self._neighbours = _checked(_lists(spec), size)

    def neighbours(self, rank: int) -> list[int]:
        """Return the ranks that `rank` may average with, in the order of visits."""
        return list(self._neighbours[rank])

    def choose(self, rank: int, turn: int, without: Collection[int] = ()) -> int | None:
        """Return the next peer of `rank` after `turn` choices, except `without`; None if none."""
        known = self._neighbours[rank]
        if self._in_turn:
            order = [known[(turn + k) % len(known)] for k in range(len(known))]
        else:
            order = random.Random(f"{self.seed} {rank} {turn}").sample(known, len(known))
        return next((peer for peer in order if peer not in without), None)

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, size={self.size})"


def _named(name: str, rank: int, size: int) -> list[int]:
    if name == "random":
        return [peer for peer in range(size) if peer != rank]
    if name == "ring":
        sides = (1, -1) if rank % 2 == 0 else (-1, 1)
        peers = [(rank + side) % size for side in sides]
    elif size & (size - 1) == 0:
        peers = [rank ^ (1 << bit) for bit in range(size.bit_length() - 1)]
    else:
        hops = [1 << bit for bit in range((size - 1).bit_length())]
        peers = [(rank + sign * hop) % size for hop in hops for sign in (1, -1)]
    return [peer for peer in dict.fromkeys(peers) if peer != rank]


def _lists(spec: Any) -> list[list[int]]:
    if hasattr(spec, "shape"):
        if len(spec.shape) != 2 or spec.shape[0] != spec.shape[1]:
            raise ValueError(
                f"Topology: a matrix of shape {tuple(spec.shape)} is no graph; give a square one"
            )
        return [[k for k, edge in enumerate(row) if edge] for row in spec.tolist()]
    if not isinstance(spec, Sequence) or not all(isinstance(row, Iterable) for row in spec):
        raise TypeError(
            f"Topology: expected {', '.join(NAMES)}, the neighbours of each rank or a matrix, got "
            f"{type(spec).__name__}"
        )
    return [sorted({operator.index(peer) for peer in row}) for row in spec]


def _checked(graph: list[list[int]], size: int) -> list[list[int]]:
    if len(graph) != size:
        raise ValueError(
            f"Topology: a graph of {len(graph)} ranks for {size}; give the neighbours of each"
        )
    for rank, peers in enumerate(graph):
        for peer in peers:
            if not 0 <= peer < size:
                raise ValueError(
                    f"Topology: rank {rank} has a neighbour {peer}; ranks are 0 to {size - 1}"
                )
            if peer == rank:
                raise ValueError(
                    f"Topology: rank {rank} is its own neighbour; take the self loop out"
                )
            if rank not in graph[peer]:
                raise ValueError(
                    f"Topology: rank {rank} has the neighbour {peer}, but not the other way round; "
                    "pairs average in both directions"
                )
    reached, edge = {0}, [0]
    while edge:
        more = set(graph[edge.pop()]) - reached
        reached |= more
        edge += more
    if len(reached) < size:
        apart = sorted(set(range(size)) - reached)
        raise ValueError(
            f"Topology: no path from rank 0 to rank {', '.join(map(str, apart))}; "
            "connect the graph, or their models are never averaged with that of rank 0"
        )
    return graph


def graph_of(topology: Any, size: int, seed: int) -> Topology:
    """Return the graph of Gossip's `topology`; local. Raises ValueError if its size differs."""
    graph = topology if isinstance(topology, Topology) else Topology(topology, size, seed)
    if graph.size == size:
        return graph
    raise ValueError(
        f"Gossip: the topology is for {graph.size} ranks, but {size} gossip; with "
        "hierarchical=True those are the groups"
    )


def described(topology: Any) -> str:
    """Return Gossip's `topology` as text that distinguishes graphs; local. Raises TypeError."""
    if isinstance(topology, str):
        return topology
    if isinstance(topology, Topology) and topology.name != "graph":
        return f"{topology!r} of seed {topology.seed}"
    own = isinstance(topology, Topology)
    graph = [topology.neighbours(k) for k in range(topology.size)] if own else _lists(topology)
    return f"a graph of {graph}"
