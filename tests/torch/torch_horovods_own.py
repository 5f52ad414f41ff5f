"""Run under mpirun with 2 ranks: what hsgd.torch leaves to Horovod is what Horovod gives."""

from __future__ import annotations

from typing import Any

import torch

import hsgd.torch as hvd

__all__: list[str] = []


def adasum() -> None:
    mine = torch.tensor([1.0, 2.0, 3.0]) * (hvd.rank() + 1)
    in_place = mine.clone()
    found = [
        hvd.allreduce(mine, op=hvd.Adasum, name="one"),
        hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum, name="two")),
        hvd.allreduce_(in_place, op=hvd.Adasum),
    ]
    doubled = hvd.grouped_allreduce([mine, mine * 2], op=hvd.Adasum, name="three")[1]
    import horovod.torch as theirs

    expected = theirs.allreduce(mine, op=theirs.Adasum)
    assert all(torch.equal(result, expected) for result in (*found, in_place))
    assert torch.equal(doubled, theirs.allreduce(mine * 2, op=theirs.Adasum))


def adasum_optimizer() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict(), 0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights[0], weights[1])


class NoDriver:
    """In place of what listens to Horovod's elastic launcher."""

    def init(self) -> None: ...

    def register_listener(self, listener: object) -> None: ...

    def remove_listener(self, listener: object) -> None: ...


def elastic_run() -> None:
    """A failure restores, shuts down, starts again and goes on."""
    from horovod.common import elastic as loop

    loop.notification_manager = NoDriver()
    failures = iter([hvd.HorovodInternalError("lost a rank, says the test")])

    def train(state: Any) -> int:
        state.epoch += 1
        for failure in failures:
            raise failure
        return int(state.epoch)

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
    assert hvd.elastic.run(train)(state) == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2


if __name__ == "__main__":
    hvd.init()
    adasum()
    adasum_optimizer()
    elastic_run()
    print("as Horovod's", flush=True)
