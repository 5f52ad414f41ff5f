"""Adasum: sums in which common parts of the ranks' vectors count once.

Two vectors become (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b; more ranks combine in pairs, in a
binary tree (Maleki et al., Scaling Distributed Training with Adaptive Summation, arXiv:2006.02924).
Each rank combines its slice of all vectors; only the products of whole vectors are exchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.torch.operations.reductions import Allreduce

__all__ = ["Adasum", "combine"]

_LEAST_SQUARE = sys.float_info.min**0.5  # smaller vectors have no direction, as in Horovod
Segments = Sequence[tuple[int, slice]]


class Adasum(Allreduce):
    """An allreduce with op Adasum; each tensor of a group is combined by itself."""

    kind = "adasum"

    def move(self, comm: Comm) -> None:
        outputs, label = self._outputs(), f"{self.compared_name()} adasum {self.scales}"
        for dtype in dict.fromkeys(tensor.dtype for tensor in self.inputs):
            places = [n for n, tensor in enumerate(self.inputs) if tensor.dtype == dtype]
            vectors = [self._prescaled(self.inputs[n]).reshape(-1) for n in places]
            found = combine(comm, vectors, f"{label} {dtype}")
            for n, vector in zip(places, found, strict=True):
                outputs[n].copy_(vector.view_as(outputs[n]))
                if self.scales[1] != 1.0:
                    outputs[n].mul_(self.scales[1])
        self.publish(outputs)

    def start(self, comm: Comm) -> None:
        """Return None, since it is more than one collective."""
        return None

    def check(self, tensor: Tensor) -> None:
        super().check(tensor)
        if not tensor.is_floating_point():
            raise ValueError(f"Adasum of {tensor.type()} has no meaning; give tensors of floats.")


def combine(comm: Comm, vectors: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return Adasum of each vector over any number of ranks; collective, blocking.

    Vectors are flat, of one float dtype, of equal lengths on all ranks. Results are new and bitwise
    equal on all ranks; half precision is combined in float32.
    """
    lengths = [len(vector) for vector in vectors]
    joined = torch.cat(list(vectors))
    dtype = joined.dtype
    if comm.size == 1 or not len(joined):
        return list(torch.split(joined, lengths))
    if dtype not in (torch.float32, torch.float64):
        joined = joined.float()
    rows = -(-len(joined) // comm.size)
    padded = torch.nn.functional.pad(joined, (0, rows * comm.size - len(joined)))
    slices = torch.empty_like(padded)
    comm.alltoall(padded, [rows] * comm.size, out=slices, name=f"{name} slices")
    own = _tree(comm, list(slices.view(comm.size, rows)), lengths, name)
    comm.allgather(own, out=padded, name=f"{name} result")
    return list(torch.split(padded[: len(joined)].to(dtype), lengths))


def _tree(comm: Comm, parts: list[Tensor], lengths: Sequence[int], name: str) -> Tensor:
    """Return this rank's slice of the result, from its slices of all ranks' vectors."""
    segments = list(_segments(lengths, comm.rank * len(parts[0]), len(parts[0])))
    while len(parts) > 1:
        pairs = list(zip(parts[::2], parts[1::2], strict=False))
        products = torch.zeros(len(pairs), len(lengths), 3, dtype=torch.float64, device="cpu")
        for pair, (a, b) in enumerate(pairs):
            for number, place in segments:
                one, other = a[place].double(), b[place].double()
                products[pair, number] = torch.stack([one @ other, one @ one, other @ other])
        comm.allreduce(products, out=products, name=f"{name} products of {len(parts)}")
        alone = parts[2 * len(pairs) :]
        factors = _factors(products).to(parts[0].dtype).tolist()
        parts = [
            _together(*pair, segments, found) for pair, found in zip(pairs, factors, strict=True)
        ]
        parts += alone
    return parts[0].contiguous()


def _segments(lengths: Sequence[int], begin: int, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield the vectors in a slice of all vectors joined, and their places in it."""
    first = -begin
    for number, length in enumerate(lengths):
        place = slice(max(first, 0), min(first + length, rows))
        if place.start < place.stop:
            yield number, place
        first += length


def _factors(products: Tensor) -> Tensor:
    """Return the factors [..., 2] for the products a.b, a.a and b.b in [..., 3]."""
    squares = products[..., 1:]
    return torch.where(
        squares >= _LEAST_SQUARE, 1.0 - products[..., :1] / squares * 0.5, torch.ones_like(squares)
    )


def _together(a: Tensor, b: Tensor, segments: Segments, factors: list[list[float]]) -> Tensor:
    result = torch.zeros_like(a)
    for number, place in segments:
        left, right = factors[number]
        result[place] = a[place] * left + b[place] * right
    return result
