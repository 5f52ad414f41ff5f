"""The `hsgd` command, also as `python -m hsgd`."""

from hsgd.tools.cli.commands import main, make_parser

__all__ = ["main", "make_parser"]
