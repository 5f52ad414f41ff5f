"""The sum of sparse COO tensors over all ranks, as in gloo, for DDP with sparse embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["allreduce_sparse"]

Gather = Callable[[torch.Tensor], torch.Tensor]


def allreduce_sparse(tensor: torch.Tensor, gather: Gather, size: int) -> None:
    """Replace `tensor` by the sum over all ranks; collective, blocking.

    Shape and dtype are equal on all ranks; the numbers of elements may differ. `gather` takes a
    flat tensor of equal size on all ranks and returns all of them in rank order.
    """
    own = tensor.detach().coalesce()
    counts = gather(torch.tensor([own._nnz()], device="cpu")).tolist()
    most = max(counts)
    indices, values = own.indices(), own.values()
    # Ranks with fewer elements pad theirs; the padding is cut off below.
    padded_indices = indices.new_zeros(indices.shape[0], most)
    padded_indices[:, : own._nnz()] = indices
    padded_values = values.new_zeros(most, *values.shape[1:])
    padded_values[: own._nnz()] = values
    all_indices = gather(padded_indices.reshape(-1)).view(size, -1, most)
    all_values = gather(padded_values.reshape(-1)).view(size, most, *values.shape[1:])
    total = torch.sparse_coo_tensor(
        torch.cat([all_indices[rank, :, :count] for rank, count in enumerate(counts)], dim=1),
        torch.cat([all_values[rank, :count] for rank, count in enumerate(counts)]),
        tensor.shape,
        device=values.device,
    ).coalesce()
    with torch.no_grad():  # a detached sparse tensor would share the new elements
        tensor.copy_(total)
