"""hsgd.torch on the tests' own ranks: no MPI, and no Horovod to be found.

Owns the hook that hides Horovod in a rank's process. Never runs in the process of pytest.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hsgd import Comm
from hsgd.config import Config
from ranks import PATIENT, Seat

__all__ = ["hide_horovod", "job"]


class _Hidden(MetaPathFinder):
    """As if Horovod had not been installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def hide_horovod() -> None:
    """From here on this process has no Horovod."""
    assert not [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    if not any(isinstance(finder, _Hidden) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hidden())
    find = importlib.util.find_spec
    if find.__name__ == "find_spec":
        importlib.util.find_spec = lambda name, package=None: (  # type: ignore[assignment]
            None if name.partition(".")[0] == "horovod" else find(name, package)
        )


@contextlib.contextmanager
def job(
    seat: Seat, path: str, size: int, config: Config = PATIENT, **options: Any
) -> Iterator[Any]:
    """hsgd.torch, initialized over the ranks 0..size-1 that meet at `path`."""
    hide_horovod()
    import torch

    torch.set_num_threads(1)
    import hsgd.torch as hvd

    hvd.init(Comm.local(path, seat.rank, size, config), **options)
    try:
        yield hvd
    finally:
        hvd.shutdown()
