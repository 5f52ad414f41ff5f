"""`python -m hsgd`: the `hsgd` command, for when its script is not on PATH."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hsgd.tools.cli import main

__all__: list[str] = []


def refuse_sources() -> None:
    """Exit with an error if `python -m` found unbuilt sources in the current folder."""
    here = Path(__file__).resolve().parent
    native = importlib.util.find_spec("hsgd._native")
    if native is None or Path(native.origin or "").resolve().parent != here:
        sys.exit(
            f"hsgd: error: python -m hsgd in {here.parent} takes the sources there, which are not "
            "built, not the installed hsgd: call hsgd, or python -m hsgd in another folder"
        )


if __name__ == "__main__":
    refuse_sources()
    raise SystemExit(main())
