"""Train GraphSAGE on a graph that PyG's FakeDataset draws, with sampled neighbourhoods and DDP over
gloo.

    PYTHONPATH=.. torchrun --standalone --nproc-per-node 2 train.py --steps 40
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GraphSAGE

from record import Record

BATCH = 32
NEIGHBOURS = 5
LAYERS = 2


class Sampler:
    """Neighbourhoods of random nodes: PyG's own loaders need a compiled extension."""

    def __init__(self, graph: Data, seed: int) -> None:
        order = graph.edge_index[1].argsort(stable=True)
        self.sources = graph.edge_index[0][order]
        self.degrees = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
        self.begins = self.degrees.cumsum(0) - self.degrees
        self.graph, self.generator = graph, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Features, edges and labels; the first BATCH nodes are those that are trained on."""
        while True:
            count = self.graph.num_nodes
            nodes = torch.randperm(count, generator=self.generator)[:BATCH]
            frontier, edges = nodes, []
            for _ in range(LAYERS):
                edges.append(self.draw(frontier[self.degrees[frontier] > 0]))
                frontier = edges[-1][0].unique()
            both = torch.cat(edges, dim=1)
            others = both.unique()
            nodes = torch.cat([nodes, others[~torch.isin(others, nodes)]])
            places = torch.empty(count, dtype=torch.long)
            places[nodes] = torch.arange(len(nodes))
            yield self.graph.x[nodes], places[both], self.graph.y[nodes[:BATCH]]

    def draw(self, nodes: torch.Tensor) -> torch.Tensor:
        chances = torch.rand(len(nodes), NEIGHBOURS, generator=self.generator)
        picks = self.begins[nodes, None] + (chances * self.degrees[nodes, None]).long()
        return torch.stack([self.sources[picks].flatten(), nodes.repeat_interleave(NEIGHBOURS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the later steps there")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    graph = FakeDataset(
        num_graphs=1, avg_num_nodes=5000, avg_degree=20, num_channels=256, num_classes=10
    )[0]
    model = GraphSAGE(256, 1024, num_layers=LAYERS, out_channels=10)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    record = Record(options.trace)
    for _, (features, edges, labels) in zip(
        range(options.steps), Sampler(graph, dist.get_rank()), strict=False
    ):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(features, edges)[:BATCH], labels)
        loss.backward()
        optimizer.step()
        record.step(loss.item())
    record.end(shown=dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
