"""Whether the start-up hook works in this interpreter. Owns its name."""

from __future__ import annotations

import sys

from hsgd.errors import LaunchError

__all__ = ["MISSING_REMEDY", "NAME", "check_installed", "find_elsewhere", "is_installed"]

NAME = "hsgd_horovod_hook"
MISSING_REMEDY = "install hsgd with pip install . (an editable install may lack it)"


def is_installed() -> bool:
    """Whether the hook ran when this interpreter started; local."""
    return NAME in sys.modules


def find_elsewhere(module: str) -> str | None:
    """Where a module is that the hook might stand in for; None where it is not. Local."""
    for finder in sys.meta_path:
        if type(finder).__module__ == NAME:
            continue
        spec = finder.find_spec(module, None)
        if spec is not None:
            return spec.origin or "an unknown place"
    return None


def check_installed(what: str) -> None:
    """Raise LaunchError where `what` would do nothing without the hook; local."""
    if not is_installed():
        raise LaunchError(
            f"{what}: the start-up hook does not run in {sys.executable}; {MISSING_REMEDY}"
        )
