"""Whether the start-up hook works in this interpreter. Owns its name."""

from __future__ import annotations

import sys

from hsgd.errors import LaunchError

__all__ = ["MISSING_REMEDY", "NAME", "check_installed", "is_installed"]

NAME = "hsgd_horovod_hook"
MISSING_REMEDY = "install hsgd with pip install . (an editable install may lack it)"


def is_installed() -> bool:
    """Whether the hook ran when this interpreter started; local."""
    return NAME in sys.modules


def check_installed(what: str) -> None:
    """Raise LaunchError where `what` would do nothing without the hook; local."""
    if not is_installed():
        raise LaunchError(
            f"{what}: the start-up hook does not run in {sys.executable}; {MISSING_REMEDY}"
        )
