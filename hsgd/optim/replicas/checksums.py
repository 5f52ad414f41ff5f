"""Checksums of tensors: of the bits of their values, and of how these lie in memory.

Owns the sums. Never communicates, and never waits for a device: what is summed there stays there.
In host memory the core sums, in one pass; on a device torch does, by the same formula.

A sum is that of 32-bit words, each times a random odd number of 64 bits, modulo 2^64: one flipped
bit always changes it, and any other change goes unseen once in 2^32 times. Source of the family:
Lemire, Kaser, "Strongly universal string hashing is fast", arXiv:1202.4961 (multilinear).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator

import torch
from hsgd import _native
from hsgd.optim.layouts import strides_of
from torch import Tensor, nn

__all__ = ["CHUNK_WORDS", "fold", "layout_sum", "value_sums", "word_count"]

CHUNK_WORDS = 1 << 15
"""Words that are summed at once: what lies in a cache of a core, and what torch leaves to one."""
_WORD = 4
_FACTOR = 0x9E3779B97F4A7C15  # odd: nothing is lost
_MASK = (1 << 64) - 1
_KINDS = (Tensor, nn.Parameter)


def word_count(tensor: Tensor) -> int:
    """Return how many words value_sums() has for a tensor, the last one perhaps of fewer bytes; 0
    where values are no replica's or cannot be read as they lie: of subclasses, as DTensor, of
    sparse tensors, and of those without memory; local.
    """
    plain = type(tensor) in _KINDS and tensor.layout == torch.strided and not tensor.is_meta
    return -(-tensor.numel() * tensor.element_size() // _WORD) if plain else 0


def layout_sum(name: str, tensor: Tensor) -> int:
    """Of name, shape, dtype and strides, but those of dimensions of one element, which have no
    meaning; local.
    """
    text = f"{name} {tuple(tensor.shape)} {strides_of(tensor)} {tensor.dtype}"
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True
    )


def value_sums(tensor: Tensor, begin: int, end: int) -> Iterator[int | Tensor]:
    """Of words [begin, end) of a tensor as its values lie in memory, each sum on its device; local.
    Blocking on the CPU only.
    """
    if begin >= end:
        return  # nothing that can be read: see word_count()
    values = _without_gaps(tensor)
    whole = values.numel() * values.element_size() // _WORD
    addressed = values.device.type == "cpu" and values.data_ptr() % _WORD == 0
    words = None if addressed else _words(values, whole)
    for at in range(begin, min(end, whole), CHUNK_WORDS):
        count = min(CHUNK_WORDS, end - at, whole - at)
        if words is None:
            weights = _weights(values.device).data_ptr()
            yield _native.weighted_sum(values.data_ptr() + at * _WORD, weights, count)
        else:
            yield _sum(words[at : at + count])
    if end > whole:
        yield _sum(_octets(values)[whole * _WORD :])


def fold(sums: Iterable[int | Tensor]) -> int:
    """Return one number of many, and of their order, from -2^63 to 2^63 - 1; blocking."""
    found = list(sums)
    devices = {each.device for each in found if isinstance(each, Tensor)}
    for device in devices:  # one copy from each, not one for each sum
        here = [i for i, s in enumerate(found) if isinstance(s, Tensor) and s.device == device]
        values = torch.stack([torch.as_tensor(found[index]) for index in here]).tolist()
        for index, value in zip(here, values, strict=True):
            found[index] = value
    total = 0
    for each in found:
        total = (total * _FACTOR + int(each) + 1) & _MASK
    return total - (1 << 64) if total >> 63 else total


def _without_gaps(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where there are gaps between its values."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    values = tensor.detach()
    if torch.empty_like(values, device="meta").stride() == values.stride():
        return values
    return values.contiguous()


@torch.no_grad()
def _octets(values: Tensor) -> Tensor:
    """The bytes of values without gaps, in the order of memory."""
    return values.detach().as_strided((values.numel(),), (1,)).view(torch.uint8)


@torch.no_grad()
def _words(values: Tensor, whole: int) -> Tensor:
    octets = _octets(values)[: whole * _WORD]
    if octets.storage_offset() % _WORD:
        octets = octets.clone()
    return octets.view(torch.int32)


@torch.no_grad()
def _sum(words: Tensor) -> Tensor:
    return (words.to(torch.int64) * _weights(words.device)[: words.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """The same on all ranks."""
    made = torch.Generator().manual_seed(20201203)
    weights = torch.randint(-(1 << 62), 1 << 62, (CHUNK_WORDS,), generator=made, device="cpu")
    return (weights * 2 + 1).to(device)
