"""The public names of hsgd.torch by whose they are.

`python -m hsgd.torch.names` prints the table of docs/torch.md, and a test compares the two.

Owns the families and their order. The names themselves are read from the modules.
"""

from __future__ import annotations

import importlib

__all__ = ["FAMILIES", "HOROVODS_OWN", "table"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "job": ("job.basics", "job.process_sets", "barrier"),
    "operations": (
        "collectives.allreduce",
        "collectives.allgather",
        "collectives.broadcast",
        "collectives.alltoall",
        "collectives.reducescatter",
        "collectives.submission",
    ),
    "models": (
        "functions",
        "optimizer",
        "strategy_table",
        "sync_batch_norm",
        "compression",
    ),
    "elastic": ("elastic", "elastic.recovery_loop", "elastic.state"),
    "constants and errors": ("exceptions",),
}
"""Modules of hsgd.torch by family."""

HOROVODS_OWN = {
    "tensors on other accelerators": (
        "`ValueError`",
        "Horovod's own where it was built for them, else `ValueError`",
    ),
}
"""What needs Horovod: without it, and with it."""

_NATIVE = ("tensors on CPU and CUDA",)

_OF_OTHERS = {  # modules
    "models": ("guard",),
    "constants and errors": ("Adasum", "Average", "Sum", "Min", "Max", "Product"),
}
_INTERNAL = {
    "hand_over",
    "local_root",
    "named",
    "submit",
    "takes",
    "take_over",
    "Distributed",
    "share_optimizer",
    "start_strategy",
    "refuse_options",
    "BUCKET_CAP_MB",
    "Request",
    "STRATEGIES",
    "coordinator_of",
    "reduce_op",
    "NoneCompressor",
    "FP16Compressor",
    "BF16Compressor",
    "Compressor",
    "warn_of_overflow",
}


def table() -> str:
    """The table in Markdown; local. Imports hsgd.torch."""
    lines = ["| names | without Horovod | with Horovod |", "|---|---|---|"]
    for family, modules in FAMILIES.items():
        names = [name for module in modules for name in _public(module)]
        names += _OF_OTHERS.get(family, ())
        listed = ", ".join(f"`{name}`" for name in sorted(set(names), key=str.lower))
        lines.append(f"| {family}: {listed} | native | native |")
    lines += [f"| {what} | native | native |" for what in _NATIVE]
    for names_of, (without, having) in HOROVODS_OWN.items():
        lines.append(f"| {names_of} | {without} | {having} |")
    return "\n".join(lines)


def _public(module: str) -> list[str]:
    found = importlib.import_module(f"hsgd.torch.{module}")
    prefix = "elastic." if module.startswith("elastic") else ""
    return [prefix + name for name in found.__all__ if name not in _INTERNAL]


if __name__ == "__main__":
    print(table())
