"""The network plugin of NCCL: its path for NCCL_NET_PLUGIN, and a check that it loads.

Nothing here loads the plugin into this process, nor NCCL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hsgd.base.programs import answer_of
from hsgd.errors import LaunchError

__all__ = ["library", "loadable"]

_NAME = "libnccl-net-hsgd.so"
_MOST_LETTERS = 254  # that NCCL takes of a name
_CHECK = """
import ctypes, sys
try:
    ctypes.c_char_p.in_dll(ctypes.CDLL(sys.argv[1]), "ncclNetPlugin_v12")
except (OSError, ValueError) as error:
    raise SystemExit(str(error))
"""
_CHECK_LIMIT_S = 60


def library() -> Path:
    """Return the path of the plugin; local.

    Raises LaunchError if it was not built, or if NCCL would not take its path: NCCL_NET_PLUGIN is a
    list with commas, and a long name is left out without a warning.
    """
    path = Path(__file__).parents[2] / _NAME
    if not path.is_file():
        raise LaunchError(f"the NCCL plugin {path} is missing; install hsgd again: pip install .")
    if "," in str(path) or len(os.fsencode(path)) > _MOST_LETTERS:
        raise LaunchError(
            f"NCCL does not take {path} as NCCL_NET_PLUGIN: the path has a comma, or more than "
            f"{_MOST_LETTERS} letters; install hsgd into another folder"
        )
    return path


def loadable() -> Path:
    """Return the plugin's path after a new interpreter has loaded it; local, blocking.

    Raises LaunchError with the linker's reason.
    """
    path = library()
    try:
        words = [sys.executable, "-I", "-S", "-c", _CHECK, str(path)]
        child = answer_of(words, _CHECK_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the NCCL plugin {path} does not load: no answer within {_CHECK_LIMIT_S} s"
        ) from None
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise LaunchError(f"the NCCL plugin {path} does not load: {lines[0]}")
    return path
