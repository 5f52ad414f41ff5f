"""What is left of hsgd when the interpreter of a torch job ends: nothing that nanobind reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcomes import outcomes_of
from tiers import short_form

__all__: list[str] = []

BACKEND = """
import sys, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("hsgd", store=store, rank=rank, world_size=2)
"""
JOBS = {
    "groups that nobody destroys": BACKEND
    + """
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
part = dist.new_group([0, 1])
mesh = init_device_mesh("cpu", (2,))
work = dist.all_reduce(torch.ones(3), group=part, async_op=True)
chained = work.get_future().then(lambda future: future.value())
total = functional.all_reduce(torch.ones(3), "sum", mesh) + 1
dist.all_reduce(torch.ones(3))
""",
    "an error in DDP's backward": BACKEND
    + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(2):
    model(torch.ones(2, 8)).sum().backward()
try:
    dist.barrier() if rank else model(torch.ones(2, 8)).sum().backward()
except ValueError as error:
    kept = error
assert "SignatureMismatch" in repr(kept)
dist.destroy_process_group()
""",
    "hsgd.torch": """
import sys, torch
import hsgd.torch as hvd
from hsgd import Comm
hvd.init(Comm.local(sys.argv[2], int(sys.argv[1]), 2))
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
plain = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
for step in range(2):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
handle = hvd.allreduce_async(torch.ones(3))
hvd.synchronize(handle)
hvd.join()
""",
}


@pytest.mark.long
@pytest.mark.parametrize("name", short_form("torch", JOBS))
def test_a_job_ends_without_a_word_of_the_binding(name: str, tmp_path: Path) -> None:
    for rank in outcomes_of(JOBS[name], str(tmp_path / "meet")):
        assert rank.returncode == 0, rank.stderr
        assert "nanobind" not in rank.stderr
