"""Train torchrec's DLRM on random clicks: embedding tables are sharded over the ranks, the dense
layers are DDP's, all over gloo.

    PYTHONPATH=.. torchrun --standalone --nproc-per-node 2 train.py --steps 40
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain

from record import Record

BATCH = 128
FEATURES = 8
ROWS = 20_000
DENSE = 13
LOOKUPS = 10


def model() -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(
            name=f"table{k}", embedding_dim=64, num_embeddings=ROWS, feature_names=[f"feature{k}"]
        )
        for k in range(FEATURES)
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables),
        dense_in_features=DENSE,
        dense_arch_layer_sizes=[512, 256, 64],
        over_arch_layer_sizes=[512, 512, 256, 1],
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={
            table.name: ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])
            for table in tables
        },
    )
    sharders = [EmbeddingBagCollectionSharder()]
    whole = DLRMTrain(dlrm)
    plan = planner.collective_plan(whole, sharders, dist.group.WORLD)
    return DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=sharders)


def clicks(generator: torch.Generator):
    """Dense values, ids and labels of one batch."""
    ids = torch.randint(ROWS, (FEATURES * BATCH * LOOKUPS,), generator=generator)
    lengths = torch.full((FEATURES * BATCH,), LOOKUPS, dtype=torch.int32)
    names = [f"feature{k}" for k in range(FEATURES)]
    dense = torch.randn(BATCH, DENSE, generator=generator)
    labels = (dense.sum(1) > 0).float()
    return dense, KeyedJaggedTensor.from_lengths_sync(names, ids, lengths), labels


class Batch:
    """What DLRMTrain takes."""

    def __init__(self, dense, sparse, labels) -> None:
        self.dense_features, self.sparse_features, self.labels = dense, sparse, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the later steps there")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    sharded = model()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    record = Record(options.trace)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss, _ = sharded(Batch(*clicks(generator)))
        loss.backward()
        optimizer.step()
        record.step(loss.item())
    record.end(shown=dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
