"""The build of the core that has fault points, for ranks of the tests.

Owns where that build lies and how a process takes it instead of the installed one: as long as it
has not loaded hsgd._native yet, it may load another file under that name. Its counters may begin at
another number than 0. The installed build has no points, and is never touched. Never decides what
happens at a point.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

__all__ = ["FOLDER", "build", "count_from", "named_in_sources", "on_visit", "use"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "fault-points"
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_kept: list[object] = []  # the core may call it until the process ends


def build() -> None:
    """Bring the build up to date; minutes on a slow machine if there is something to do."""
    command = [sys.executable, "setup.py", "--quiet", "fault_points"]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"no build with fault points:\n{done.stdout}{done.stderr}")


def named_in_sources() -> set[str]:
    """The names of all points, as the sources of the core spell them."""
    sources = (path.read_text() for path in (ROOT / "hsgd" / "csrc").rglob("*.cpp"))
    return {
        name for text in sources for name in re.findall(r'HSGD_FAULT_POINT\("([^"]+)"\);', text)
    }


def use() -> None:
    """Load the build with fault points as this process's hsgd._native."""
    import hsgd

    if "hsgd._native" in sys.modules:
        raise RuntimeError("this process has loaded the installed hsgd._native already")
    path = FOLDER / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("hsgd._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hsgd._native"] = module
    spec.loader.exec_module(module)
    over_mpi = module.MpiLibrary
    module.MpiLibrary = lambda path: over_mpi(str(FOLDER / Path(path).name))
    hsgd._native = module


def count_from(count: int) -> None:
    """Use that build, and have all that this process makes from now on count from `count`, a
    multiple of 8 that is the same on all ranks.
    """
    use()
    core = ctypes.CDLL(str(FOLDER / "libhsgd_core.so"))
    core.hsgd_count_from(ctypes.c_uint64(count))


def on_visit(point: str, visit: int, act: Callable[[], object]) -> None:
    """Have act() called, once, when this process comes to `point` for the `visit`-th time."""
    left = [visit]

    def reached(name: bytes) -> None:
        if name.decode() == point:
            left[0] -= 1
            if left[0] == 0:
                act()

    callback = _Callback(reached)
    _kept.append(callback)
    ctypes.CDLL(str(FOLDER / "libhsgd_core.so")).hsgd_on_fault_point(callback)
