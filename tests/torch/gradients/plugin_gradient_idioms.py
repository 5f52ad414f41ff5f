"""Run under `horovodrun --plugin hsgd`: the gradient idioms as scripts of Horovod, each against one
process that has the whole batch. Rank 0 prints one line for each idiom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from gradient_idioms import IDIOMS, WRAP_THEMSELVES, Net, Script, bits_of, largest_difference

__all__: list[str] = []


def run(idiom: Callable[[Script], None], *, distributed: bool) -> Net:
    torch.manual_seed(5)
    model = Net()
    script = Script(model, None, lambda **_: None, lambda rows: rows, model)
    script.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if distributed:

        def wrap(*, named: bool = True, **options: Any) -> None:
            names = model.named_parameters() if named else None
            inner = script.optimizer
            script.optimizer = hvd.DistributedOptimizer(inner, names, **options)

        script.wrap = wrap
        script.take_part(hvd.rank(), hvd.size())
        if idiom not in WRAP_THEMSELVES:
            wrap()
    idiom(script)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    for idiom in IDIOMS:
        model = run(idiom, distributed=True)
        found = hvd.allgather_object(
            (largest_difference(model, run(idiom, distributed=False)), bits_of(model))
        )
        if hvd.rank() == 0:
            equal = all(bits == found[0][1] for _, bits in found)
            right = equal and max(difference for difference, _ in found) < 1e-9
            print(f"|{idiom.__name__} {'right' if right else 'wrong'}|", flush=True)
    hvd.shutdown()
