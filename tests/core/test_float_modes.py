"""Ranks whose threads flush subnormals to zero get the bits of all others."""

from __future__ import annotations

import numpy as np
import torch

from hsgd import Comm
from hsgd.optim import LARS
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

LARGE = 300_007  # elements: several steps of a pipeline


def do_sum_subnormals(seat: Seat, path: str) -> list[bytes]:
    values = np.arange(1, LARGE + 1, dtype=np.int32).view(np.float32)  # subnormals, all of them
    flushes = seat.rank == 1 and torch.set_flush_denormal(True)
    assert flushes == (seat.rank == 1)
    try:
        with Comm.local(path, seat.rank, 2, PATIENT) as comm:
            results = [comm.allreduce(values[:n], op) for n in (7, LARGE) for op in ("sum", "mean")]
            results.append(comm.allreduce_async(values).wait())
            weight = torch.from_numpy(values.copy()).requires_grad_()
            weight.grad = torch.from_numpy(values.copy())
            LARS([weight], lr=0.5, momentum=0.9, trust_coefficient=1.0).step()
            results.append(weight.detach().numpy())
    finally:
        torch.set_flush_denormal(False)
    return [result.tobytes() for result in results]


def test_subnormals_are_summed_alike_where_one_rank_flushes_them() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(do_sum_subnormals, meeting_point())
    assert first == second
    assert any(first[1])
