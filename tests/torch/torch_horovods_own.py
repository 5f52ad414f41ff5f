"""Run under mpirun with 2 or 4 ranks: Adasum is as Horovod's, and what is left to Horovod
works.
"""

from __future__ import annotations

from typing import Any

import torch

import hsgd.torch as hvd

__all__: list[str] = []


def adasum() -> None:
    """Native, beside Horovod's."""
    import horovod.torch as theirs

    theirs.init()
    for dtype, near in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.float16, 1e-2)):
        for shape in ((3,), (40, 7), (1000,)):
            torch.manual_seed(hvd.rank())
            mine = torch.randn(shape).to(dtype)
            found = hvd.allreduce(mine, op=hvd.Adasum)
            expected = theirs.allreduce(mine, op=theirs.Adasum)
            assert torch.allclose(found, expected, rtol=near, atol=near), (dtype, shape)


def adasum_optimizer() -> None:
    results = []
    import horovod.torch as theirs

    for package in (hvd, theirs):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        named = model.named_parameters()
        optimizer = package.DistributedOptimizer(plain, named, op=package.Adasum)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2) * (hvd.rank() + step + 1)).sum().backward()
            optimizer.step()
        results.append([each.detach() for each in model.parameters()])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-6), (found, expected)


def elastic_run() -> None:
    """A failure restores, shuts down, starts again and goes on, without an agent too."""
    failures = iter([hvd.HorovodInternalError("lost a rank, says the test")])

    def train(state: Any) -> int:
        state.epoch += 1
        for failure in failures:
            raise failure
        return int(state.epoch)

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
    assert hvd.elastic.run(train)(state) == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


if __name__ == "__main__":
    hvd.init()
    adasum()
    adasum_optimizer()
    elastic_run()
    print("as Horovod's", flush=True)
