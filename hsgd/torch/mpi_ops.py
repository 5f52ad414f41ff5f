"""All operations, in the module where Horovod has them."""

from hsgd.torch.barrier import barrier, join
from hsgd.torch.collectives.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from hsgd.torch.collectives.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from hsgd.torch.collectives.alltoall import alltoall, alltoall_async
from hsgd.torch.collectives.broadcast import (
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from hsgd.torch.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hsgd.torch.collectives.submission import poll, synchronize
from hsgd.torch.compression import Compression
from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.job import basics
from hsgd.torch.job.basics import *  # noqa: F403
from hsgd.torch.job.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hsgd.torch.operations.reductions import ADASUM as Adasum
from hsgd.torch.operations.reductions import AVERAGE as Average
from hsgd.torch.operations.reductions import MAX as Max
from hsgd.torch.operations.reductions import MIN as Min
from hsgd.torch.operations.reductions import PRODUCT as Product
from hsgd.torch.operations.reductions import SUM as Sum

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += basics.__all__
