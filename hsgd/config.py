"""Configuration: every HSGD_* variable is one documented field of Config.

For programs without Python, csrc/core/base/options.cpp reads the same names; a test compares the
two.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

__all__ = ["Config"]

_SIGNALS = {"TERM", "USR1", "USR2", "HUP", "QUIT", "ALRM", "XCPU"}  # that schedulers send
# The number forms that C's strtod reads in every locale; int() and float() also read "1_000", " 5
# ".
_FORMS = {int: r"[+-]?[0-9]+", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}


def _variable(variable: str, default: object, read: Callable[[str], object], expected: str) -> Any:
    return dataclasses.field(
        default=default, metadata={"variable": variable, "read": read, "expected": expected}
    )


def _between(
    kind: type[float], least: float, most: float, other: float | None = None
) -> Callable[[str], float]:
    def read(text: str) -> float:
        if not re.fullmatch(_FORMS[kind], text, re.ASCII):
            raise ValueError(text)
        value = kind(text)
        if not least <= value <= most and value != other:
            raise ValueError(text)
        return value

    return read


def _choice(variable: str, default: str, *choices: str) -> Any:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return _variable(variable, default, read, f"{', '.join(choices[:-1])} or {choices[-1]}")


def _switch(variable: str, default: bool) -> Any:
    return _variable(variable, default, lambda text: bool(_between(int, 0, 1)(text)), "0 or 1")


def _signals(text: str) -> str:
    if text != "none" and not set(text.split(",")) <= _SIGNALS:
        raise ValueError(text)
    return text


def _ports(text: str) -> str:
    found = re.fullmatch(r"([1-9][0-9]{0,4})-([1-9][0-9]{0,4})", text, re.ASCII)
    if text != "any" and not (found and int(found[1]) <= int(found[2]) <= 65535):
        raise ValueError(text)
    return text


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings from HSGD_* variables; `docs/configuration.md` explains each field."""

    timeout_s: float = _variable(
        "HSGD_TIMEOUT_S", 1800.0, _between(float, 1e-3, 1e9), "seconds from 0.001 to 1e9"
    )
    """Seconds that one collective, or the set-up, may take."""
    abort_after_s: float = _variable(
        "HSGD_ABORT_AFTER_S", 30.0, _between(float, 0, 1e9), "seconds from 0 to 1e9"
    )
    """Over MPI: seconds that a failed rank waits before it aborts the job; 0 never aborts."""
    oneshot_bytes: int = _variable(
        "HSGD_ONESHOT_BYTES",
        -1,
        _between(int, -1, 1 << 20),
        "bytes from 0 to 1048576, -1 to choose",
    )
    """Largest payload, bytes, of one synchronization (each rank reads all); -1 measures."""
    chunk_bytes: int = _variable(
        "HSGD_CHUNK_BYTES",
        -1,
        _between(int, 4096, 1 << 28, -1),
        "bytes from 4096 to 268435456, -1 to choose",
    )
    """Payload of one pipeline step inside a node, bytes; -1 measures."""
    wire_oneshot_bytes: int = _variable(
        "HSGD_WIRE_ONESHOT_BYTES", 32 << 10, _between(int, 0, 1 << 20), "bytes from 0 to 1048576"
    )
    """Most bytes that a node sends for one payload without splitting it, to all other nodes."""
    wire_chunk_bytes: int = _variable(
        "HSGD_WIRE_CHUNK_BYTES", 0, _between(int, 0, 1 << 28), "bytes from 0 to 268435456"
    )
    """Payload of one pipeline step with several nodes, bytes; 0 chooses by nodes and leaders."""
    wire_radix: int = _variable(
        "HSGD_WIRE_RADIX", 16, _between(int, 2, 64), "a whole number from 2 to 64"
    )
    """Up to this many nodes exchange data directly, each with each.

    More than 8 nodes exchange in rounds, in groups of at most this size. This sets the order in
    which the nodes' parts are summed.
    """
    flat_ranks: int = _variable(
        "HSGD_FLAT_RANKS", 16, _between(int, 1, 1024), "a whole number from 1 to 1024"
    )
    """Up to this many ranks of a node check one another; more do so by cache and NUMA node."""
    near_nic: int = _variable(
        "HSGD_NEAR_NIC",
        -1,
        _between(int, -1, 1024),
        "an adapter's number from 1 to 1024, 0 for none, -1 to ask the kernel",
    )
    """The network adapter near this rank, counted from 1; 0 means none; -1 asks the kernel.

    It may differ between ranks. With several nodes, ranks near an adapter are preferred for the
    traffic between nodes.
    """
    wire_dtype: Literal["none", "bfloat16", "float16"] = _choice(
        "HSGD_WIRE_DTYPE", "none", "none", "bfloat16", "float16"
    )
    """How float32 travels between nodes: "none" sends float32.

    The others halve the bytes, and round the sums of nodes and the results.
    """
    interfaces: str = _variable(
        "HSGD_INTERFACES", "all", str, "names of network interfaces, as eth0,eth1"
    )
    """Interfaces for TCP, with commas, in order of preference; "all" is all but loopback."""
    ports: str = _variable(
        "HSGD_PORTS", "any", _ports, "the first and the last port, as 21000-21999, or any"
    )
    """Ports at which ranks listen for other nodes; "any" are free ones of the kernel's choice."""
    step_dir: str = _variable("HSGD_STEP_DIR", "", str, "a folder that all nodes share")
    """Under srun without MPI: where rank 0 tells the others its address; "" is the user's cache."""
    slots: int = _variable("HSGD_SLOTS", 4, _between(int, 3, 64), "a whole number from 3 to 64")
    """Staging slots per rank, used in turn."""
    spin: int = _variable(
        "HSGD_SPIN", -1, _between(int, -1, 1e9), "iterations, 0 to yield at once, -1 to choose"
    )
    """Busy-wait iterations before a waiting rank yields its core; -1 chooses by cores and ranks."""
    store: Literal["ordinary", "nontemporal", "auto"] = _choice(
        "HSGD_STORE", "auto", "ordinary", "nontemporal", "auto"
    )
    """Stores into shared memory; "auto" measures both kinds, on one node continuously."""
    overlap: Literal["auto", "always", "never"] = _choice(
        "HSGD_OVERLAP", "auto", "auto", "always", "never"
    )
    """hsgd.torch: send gradients during backward: always, never, or as first steps show."""
    check_replicas: Literal["share", "0", "1"] = _choice(
        "HSGD_CHECK_REPLICAS", "share", "share", "0", "1"
    )
    """Which share of the parameters is compared between ranks in each step.

    "share" compares a part of them, so that all are compared within 520 steps; "0" nothing; "1"
    all.
    """
    preempt_signals: str = _variable(
        "HSGD_PREEMPT_SIGNALS",
        "TERM,USR1,USR2",
        _signals,
        "names of signals, as TERM,USR1, or none",
    )
    """preempted(): signals that ask the job to save and end, with commas."""
    min_bytes: int = _variable("HSGD_MIN_BYTES", 1024, _between(int, 0, 1e15), "bytes from 0")
    """Interposer: payloads of fewer bytes go to MPI."""
    report: bool = _switch("HSGD_REPORT", False)
    """Interposer, hsgd.torch and HSGD_AS_GLOO: print one line of counters per rank at the end."""
    as_gloo: bool = _switch("HSGD_AS_GLOO", False)
    """torch.distributed: hsgd serves process groups that a program creates with gloo."""
    as_horovod: Literal["0", "1", "force"] = _choice("HSGD_AS_HOROVOD", "0", "0", "1", "force")
    """`import horovod.torch` imports hsgd.torch; force: even if Horovod is installed."""
    cuda_library: str = _variable(
        "HSGD_CUDA_LIBRARY", "libcuda.so.1", str, "a library's name or path"
    )
    """NVIDIA's driver library; the first array on a CUDA device loads it."""
    nccl_library: str = _variable(
        "HSGD_NCCL_LIBRARY", "auto", str, "a library's name or path, auto or none"
    )
    """NCCL, for ranks of a node that have a device each, or share devices if NCCL allows it.

    "auto" uses torch's NCCL, else libnccl.so.2 if it is found. With "none", devices exchange data
    through host memory.
    """
    device_chunk_bytes: int = _variable(
        "HSGD_DEVICE_CHUNK_BYTES",
        4 << 20,
        _between(int, 1 << 16, 1 << 28),
        "bytes from 65536 to 268435456",
    )
    """Payload of one step between the copies from and to a CUDA device, bytes."""
    dump: bool = _switch("HSGD_DUMP", True)
    """If a collective passes its deadline, print once what the ranks of the node are doing."""
    dump_dir: str | None = _variable("HSGD_DUMP_DIR", None, str, "a folder")
    """A folder for the same report, with files for torchfrtrace; None writes none.

    The report is also written there if a rank is lost.
    """
    debug: bool = _switch("HSGD_DEBUG", False)
    """Command line: show tracebacks instead of one line."""
    cache_dir: str | None = _variable("HSGD_CACHE", None, str, "a folder")
    """Folder for built wheels; None is $XDG_CACHE_HOME/hsgd or ~/.cache/hsgd."""

    def __post_init__(self) -> None:
        """Check values set by a program against the same bounds; ValueError names the field."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_text = isinstance(field.default, str | types.NoneType)
            try:
                if isinstance(value, str) and not is_text:  # refused, as the variable is
                    raise ValueError(value)
                if value != field.default:
                    field.metadata["read"](str(int(value) if isinstance(value, bool) else value))
            except ValueError:
                expected = field.metadata["expected"]
                raise ValueError(f"Config.{field.name}={value!r}: expected {expected}") from None

    @property
    def port_range(self) -> range:
        """`ports`, or ports below Linux's for clients (ip_local_port_range)."""
        if self.ports == "any":
            return range(20_000, 32_000)
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Return the names of the variables by field."""
        return {f.name: f.metadata["variable"] for f in dataclasses.fields(cls)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the environment (default `os.environ`); ValueError names a wrong variable; local."""
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for field in dataclasses.fields(cls):
            variable = field.metadata["variable"]
            text = environ.get(variable, "")
            if not text:
                continue
            try:
                values[field.name] = field.metadata["read"](text)
            except ValueError:
                expected = field.metadata["expected"]
                raise ValueError(f"{variable}={text}: expected {expected}") from None
        return cls(**values)  # type: ignore[arg-type]
