"""Train ResNet-18 on images of handwritten digits: an ordinary script with DDP.

    torchrun --nproc-per-node 2 examples/gain/train_ddp.py                 # gloo
    torchrun --nproc-per-node 2 examples/gain/train_ddp.py --backend hsgd

compare.py beside it runs all ways in turns.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import add_options, build_model, make_sgd, run


class GroupRanks:
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier()

    def largest(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo", help="of torch.distributed (default: gloo)")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model())
    run(options, model, make_sgd(model), GroupRanks())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
