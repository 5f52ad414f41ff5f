"""Checks of a PartitionedLoader's arguments against each other and against the data."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from .batches.dense_rows import DenseRows
from .batches.image_decoder import ImageDecoder
from .batches.mapped_batches import check_mappable
from .format.data_map import DataMap
from .format.slab_folder import FieldSpec
from .options import ErrorAction, ReadOptions
from .rank_group import RankGroup

__all__ = [
    "check_decoders",
    "check_packing",
    "check_policy",
    "check_reading",
    "check_torch_types",
    "decoders_of",
]


def decoders_of(
    decode: Mapping[str, ImageDecoder | DenseRows] | str | None,
) -> tuple[dict[str, ImageDecoder], dict[str, DenseRows]]:
    """Return the decoders of images, and those of matrices; none for "cf".

    Raises ValueError for another word, TypeError for what is no decoder.
    """
    if isinstance(decode, str):
        if decode != "cf":
            raise ValueError(f'decode={decode!r}; use "cf", or a decoder for each field')
        return {}, {}
    of_images, of_matrices = {}, {}
    for name, decoder in (decode or {}).items():
        if isinstance(decoder, DenseRows):
            of_matrices[name] = decoder
        elif isinstance(decoder, ImageDecoder):
            of_images[name] = decoder
        else:
            raise TypeError(
                f"decode: {name!r} has {decoder!r}; use hsgd.io.images(size=...) or hsgd.io.dense()"
            )
    return of_images, of_matrices


def check_packing(pack: int, batch_size: int, on_error: str, read: ReadOptions) -> None:
    """Raise ValueError for options that `pack` does not allow."""
    if read.verify:
        raise ValueError(
            "verify=True with pack=: checksums cover whole documents, not windows; check the "
            "files before with hsgd data verify"
        )
    if on_error == "substitute":
        raise ValueError(
            'on_error="substitute" with pack= would leave cu_seqlens of other windows; use '
            '"skip" or "raise"'
        )
    if isinstance(pack, int) and isinstance(batch_size, int) and pack * batch_size >= 1 << 31:
        raise ValueError(
            f"pack={pack} and batch_size={batch_size} make {pack * batch_size} elements, and "
            f"cu_seqlens counts to {(1 << 31) - 1}; lower one of them"
        )


def check_torch_types(specs: Sequence[FieldSpec]) -> None:
    """Raise TypeError for a field whose dtype torch does not have."""
    import torch

    for spec in specs:
        try:
            torch.from_numpy(np.empty(0, spec.dtype))
        except TypeError:
            raise TypeError(
                f"field {spec.name!r} has dtype {spec.dtype}, torch has no such type; "
                "use as_numpy=True or name other fields"
            ) from None


def check_policy(
    on_error: str, comm: RankGroup | None, world_size: int, specs: Sequence[FieldSpec]
) -> None:
    """Raise ValueError if `on_error` is unknown or impossible for these fields and ranks."""
    if on_error not in get_args(ErrorAction):
        known = ", ".join(map(repr, get_args(ErrorAction)))
        raise ValueError(f"on_error={on_error!r}; use one of {known}")
    ragged = [spec.name for spec in specs if spec.ragged]
    if on_error == "substitute" and ragged:
        raise ValueError(
            f'on_error="substitute" cannot put one sample in the place of another of ragged field '
            f'{ragged[0]!r}; use "skip" or "raise", or name other fields'
        )
    if on_error == "skip" and world_size > 1 and comm is None:
        raise ValueError(
            'on_error="skip" on several ranks needs comm=, a hsgd.Comm of these ranks: they skip a '
            "batch together, or their numbers of steps would differ"
        )


def check_reading(
    data: DataMap, shuffle: str, on_error: str, read: ReadOptions, makes_copies: bool
) -> None:
    """Raise ValueError if the data or this machine does not allow an option of `read`."""
    if read.verify:
        check_verifiable(data, shuffle)
    if read.pin_memory:
        check_pinning()
    if read.mapped:
        check_mappable(data, shuffle, on_error)
    if read.mapped and makes_copies:
        raise ValueError("mapped=True: pack=, decode= and cache= make copies; leave them out")


def check_decoders(decoders: Mapping[str, ImageDecoder], data: DataMap) -> None:
    """Raise ValueError for a decoder that does not fit its field."""
    specs = {spec.name: spec for spec in data.fields}
    for name in decoders:
        spec = specs.get(name)
        if spec is None:
            raise ValueError(f"decode: no field {name!r}; there are: {', '.join(specs)}")
        if not spec.ragged or spec.shape or spec.dtype != np.uint8:
            raise ValueError(
                f"decode: field {name!r} does not hold encoded samples (bytes of any length); make "
                "it with hsgd data convert --encoded"
            )


def check_verifiable(data: DataMap, shuffle: str) -> None:
    """Raise ValueError if checksums cannot be checked while reading in this order."""
    if not data.checksum_rows:
        raise ValueError(
            f"verify=True: {data.path} has no checksums; convert it with hsgd data convert"
        )
    if shuffle == "full":
        raise ValueError(
            'verify=True with shuffle="full" would read a block for every sample; use "block", or '
            "check the files before with hsgd data verify"
        )


def check_pinning() -> None:
    """Raise ValueError without a CUDA device, whose driver locks the pages."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return
    raise ValueError("pin_memory=True needs torch with a CUDA device; leave it out here")
