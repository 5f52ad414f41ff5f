"""Checksums of tensors: of the bits of their values, and of their layout.

The core sums host memory in one pass; torch sums on devices, by the same formula and without
waiting. A sum is that of 32-bit words, each times a random odd 64-bit number, modulo 2^64: one
flipped bit always changes it, another change is missed once in 2^32 times. Source of the family:
Lemire, Kaser, "Strongly universal string hashing is fast", arXiv:1202.4961 (multilinear).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hsgd import _native
from hsgd.optim.layouts import strides_of

__all__ = ["CHUNK_WORDS", "fold", "layout_sum", "value_sums", "word_count"]

CHUNK_WORDS = 1 << 15
"""Words that are summed at once: they fit in a core's cache, and torch uses one core for them."""
_WORD = 4
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no information is lost
_MASK = (1 << 64) - 1
_KINDS = (Tensor, nn.Parameter)


def word_count(tensor: Tensor) -> int:
    """Return the number of words that value_sums() sums of a tensor; local.

    The last word may have fewer bytes. It is 0 for tensors that cannot be read as replicas:
    subclasses such as DTensor, sparse tensors, and tensors without memory.
    """
    plain = type(tensor) in _KINDS and tensor.layout == torch.strided and not tensor.is_meta
    return -(-tensor.numel() * tensor.element_size() // _WORD) if plain else 0


def layout_sum(name: str, tensor: Tensor) -> int:
    """Return a checksum of name, shape, dtype and strides; local."""
    text = f"{name} {tuple(tensor.shape)} {strides_of(tensor)} {tensor.dtype}"
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True
    )


def value_sums(tensor: Tensor, begin: int, end: int) -> Iterator[int | Tensor]:
    """Yield sums of words [begin, end) in memory order, on the device; blocks on the CPU only."""
    if begin >= end:
        return  # not readable: see word_count()
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
    """Return one number, from -2^63 to 2^63 - 1, for many sums and their order; blocking."""
    found = list(sums)
    devices = {each.device for each in found if isinstance(each, Tensor)}
    for device in devices:  # one copy per device, not per sum
        here = [i for i, s in enumerate(found) if isinstance(s, Tensor) and s.device == device]
        values = torch.stack([torch.as_tensor(found[index]) for index in here]).tolist()
        for index, value in zip(here, values, strict=True):
            found[index] = value
    total = 0
    for each in found:
        total = (total * _FACTOR + int(each) + 1) & _MASK
    return total - (1 << 64) if total >> 63 else total


def _without_gaps(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if there are gaps between its values."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    values = tensor.detach()
    if torch.empty_like(values, device="meta").stride() == values.stride():
        return values
    return values.contiguous()


@torch.no_grad()
def _octets(values: Tensor) -> Tensor:
    """Return the bytes of values without gaps, in memory order."""
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
    made = torch.Generator().manual_seed(20201203)
    weights = torch.randint(-(1 << 62), 1 << 62, (CHUNK_WORDS,), generator=made, device="cpu")
    return (weights * 2 + 1).to(device)
