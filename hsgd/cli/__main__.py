"""`python -m hsgd.cli`: the `hsgd` command."""

from __future__ import annotations

from hsgd.cli.commands import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
