"""The start-up hook: its name, and whether it works in this interpreter."""

from __future__ import annotations

import sys

from hsgd.errors import LaunchError

__all__ = ["MISSING_REMEDY", "NAME", "check_installed", "find_elsewhere", "is_installed"]

NAME = "hsgd_horovod_hook"
MISSING_REMEDY = "install hsgd with pip install . (an editable install may lack it)"


def is_installed() -> bool:
    """Return whether the hook ran when this interpreter started; local."""
    return NAME in sys.modules


def find_elsewhere(module: str) -> str | None:
    """Return the place of a module that the hook might replace; None if there is none; local."""
    for finder in sys.meta_path:
        if type(finder).__module__ == NAME:
            continue
        spec = finder.find_spec(module, None)
        if spec is not None:
            return spec.origin or "an unknown place"
    return None


def check_installed(what: str) -> None:
    """Raise LaunchError if `what` needs the hook, which is missing; local."""
    if not is_installed():
        raise LaunchError(
            f"{what}: the start-up hook does not run in {sys.executable}; {MISSING_REMEDY}"
        )
