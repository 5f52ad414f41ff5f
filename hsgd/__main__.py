"""`python -m hsgd`: the `hsgd` command, where its script is not on PATH."""

from __future__ import annotations

from hsgd.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
