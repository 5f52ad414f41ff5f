"""Small collectives of tensor parallelism through torch.distributed: hsgd against gloo, in one run.

Sizes are chosen here; command.py says how it is measured.
"""

from __future__ import annotations

import sys

from harness.command import Benchmark, run

__all__ = ["TENSOR_PARALLEL"]

TENSOR_PARALLEL = Benchmark(
    name="tensor_parallel",
    about="Measure all_reduce and all_gather of 1 KB to 1 MB through torch.distributed.",
    collectives=("allreduce", "allgather"),
    sizes=tuple(1024 * 4**k for k in range(6)),
    quick_sizes=(1 << 10, 8 << 10, 64 << 10, 1 << 20),
    rounds=8,
    quick_rounds=3,
    quick_budget_s=0.1,
    candidates=(
        *("hsgd-c10d", "hsgd-c10d-bf16", "hsgd-operator", "hsgd-c"),
        *("gloo", "gloo-bf16", "deepspeed", "vllm", "vllm-bf16"),
    ),
    notes="""\
A model that is split over ranks adds up its activations twice per layer: a token of 48 layers takes
96 all_reduces of some KB. c10d is torch.distributed.all_reduce and all_gather_into_tensor in a
group of backend "hsgd", hsgd (C) the same call of the core from C: what the first takes more is the
path through Python. The operators are torch.ops.hsgd.allreduce_ and allgather_into
(hsgd.operators), which compiled programs call; vLLM's operators, from its wheel for CPUs (some
200 MB, fetched once), are called alike. DeepSpeed's all_reduce for inference in shared memory is
called from C.
vs_limit/allreduce_c10d/... is the core's time over that of the path through torch.distributed.

examples:
  python benchmarks/tensor_parallel.py --quick
  python benchmarks/tensor_parallel.py --np 2 4 --json tensor_parallel.json --png parallel.png
""",
)

if __name__ == "__main__":
    sys.exit(run(TENSOR_PARALLEL))
