"""Starts a rank: `python rank.py NAME ARGS...` runs workers.NAME with these arguments.

Modules find one another because this file lies beside their packages.
"""

from __future__ import annotations

import runpy
import sys

__all__: list[str] = []

if __name__ == "__main__":
    name = sys.argv.pop(1)
    runpy.run_module(f"workers.{name}", run_name="__main__")
