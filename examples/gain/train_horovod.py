"""Train ResNet-18 on images of handwritten digits: an ordinary Horovod script.

    horovodrun -np 2 python examples/gain/train_horovod.py                   # plain Horovod
    horovodrun --plugin hsgd -np 2 python examples/gain/train_horovod.py     # hsgd.torch serves it
    horovodrun --plugin hsgd-mpi -np 2 python examples/gain/train_horovod.py # its MPI calls do

compare.py beside it runs all ways in turns.
"""

import argparse

import horovod.torch as hvd
import torch
from workload import add_options, build_model, make_sgd, run


class HorovodRanks:
    def __init__(self) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()

    def barrier(self) -> None:
        hvd.barrier()

    def largest(self, seconds: float) -> float:
        return max(hvd.allgather_object(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = build_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    run(options, model, optimizer, HorovodRanks())


if __name__ == "__main__":
    main()
