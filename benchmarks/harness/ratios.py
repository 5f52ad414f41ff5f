"""Figures that compare: the time of a peer, or of the limit, over that of hsgd in the same run.

Owns the keys of "ratios" in the JSON, COMPARISON/WHAT/LAYOUT/SIZE, and the arithmetic: medians of
one case, above 1 is ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import report
from harness.candidates import CANDIDATES, JOBS

__all__ = ["FROM_C", "SHOWN", "SUBJECTS", "Subject", "ratios"]

# Compared by themselves: they serve inference on one node, with few spinning ranks.
APART = frozenset({"deepspeed", "vllm", "vllm-bf16"})
# Of another dtype: no peer of those that have not named it.
OTHER_DTYPE = frozenset({"gloo-bf16", "vllm-bf16"})
_NATIVE = {job.name for job in JOBS if job.native}
FROM_C = {candidate.name for candidate in CANDIDATES if candidate.job in _NATIVE}


@dataclass(frozen=True)
class Subject:
    """A way to use hsgd and what it is compared with."""

    candidate: str
    suffix: str  # of the collective, in the keys
    limits: tuple[str, ...] = ()
    from_c: bool = True  # peers called from C count too
    peers: tuple[str, ...] = ()  # these alone; empty: all

    def rivals(self, medians: Mapping[str, float], kinds: Mapping[str, str]) -> dict[str, float]:
        """Times of the peers that it is compared with."""
        return {
            name: value
            for name, value in medians.items()
            if kinds[name] == "peer"
            and (self.from_c or name not in FROM_C)
            and (name in self.peers if self.peers else name not in OTHER_DTYPE)
        }


SUBJECTS = (
    Subject("hsgd-c", "", limits=("limit-line", "limit", "limit-past", "limit-link")),
    Subject("hsgd", "_python", from_c=False),
    Subject("hsgd-tcp", "_tcp", limits=("limit-link",), from_c=False),
    Subject("hsgd-c10d", "_c10d", limits=("hsgd-c",), peers=("gloo", "deepspeed", "vllm")),
    Subject("hsgd-c10d-bf16", "_c10d_bf16", peers=("gloo-bf16", "vllm-bf16")),
    Subject("hsgd-operator", "_operator", limits=("hsgd-c",), peers=("gloo", "deepspeed", "vllm")),
    Subject("hsgd-bf16-c", "_bf16", limits=("limit-link",)),
    Subject("hsgd-arena-c", "_arena", limits=("limit-arena", "limit-arena-past", "limit-link")),
    Subject("hsgd-arena", "_arena_python", from_c=False),
    Subject("horovod-plugin", "_horovod_plugin", peers=("horovod",)),
)

# What tables and plots show: comparison, suffix, title of the column, label of the line.
SHOWN = (
    ("vs_peer", "", "ahead", "best peer / hsgd (C)"),
    ("vs_peer", "_python", "(Python)", "best peer / hsgd, from Python"),
    ("vs_peer", "_tcp", "(TCP)", "best peer / hsgd over TCP, from Python"),
    ("vs_gloo", "_tcp", "gloo (TCP)", "gloo / hsgd over TCP"),
    ("vs_peer", "_c10d", "(c10d)", "gloo / hsgd through torch.distributed"),
    ("vs_limit", "_c10d", "core/c10d", "hsgd (C) / hsgd through torch.distributed"),
    ("vs_peer", "_c10d_bf16", "(c10d bf16)", "the same of bfloat16"),
    ("vs_vllm", "_c10d", "vLLM/c10d", "vLLM / hsgd through torch.distributed"),
    ("vs_vllm-bf16", "_c10d_bf16", "(bf16)", "the same of bfloat16"),
    ("vs_vllm", "_operator", "vLLM/operator", "vLLM / hsgd's operator of torch"),
    ("vs_peer", "_operator", "(operator)", "gloo / hsgd's operator of torch"),
    ("vs_limit", "_operator", "core/operator", "hsgd (C) / hsgd's operator of torch"),
    ("vs_peer", "_arena", "(arena)", "best peer / arena (C)"),
    ("vs_peer", "_bf16", "(bf16)", "best peer / bf16 (C)"),
    ("vs_deepspeed", "", "(DeepSpeed)", "DeepSpeed / hsgd (C)"),
    ("vs_peer", "_horovod_plugin", "(Horovod)", "Horovod / Horovod+hsgd-mpi"),
    ("vs_limit", "", "of limit", "limit / hsgd (C)"),
    ("vs_limit", "_tcp", "(TCP)", "limit / hsgd over TCP"),
    ("vs_limit", "_arena", "(arena)", "limit / arena (C)"),
)


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures per case from rows of results."""
    found: dict[str, float] = {}
    for (layout, collective, nbytes), here in report.grouped(
        rows, "layout", "collective", "bytes"
    ).items():
        medians = {row["candidate"]: row["median_us"] for row in here}
        kinds = {row["candidate"]: row["kind"] for row in here}
        for subject in SUBJECTS:
            ours = medians.get(subject.candidate)
            if not ours:
                continue
            what = f"{collective}{subject.suffix}/{layout}/{report.size_label(nbytes)}"
            rivals = subject.rivals(medians, kinds)
            limit = min((medians[name] for name in subject.limits if name in medians), default=None)
            for comparison, share in report.versus(ours, rivals, limit, APART).items():
                found[f"{comparison}/{what}"] = share
    return found
