"""The torch.distributed backend "hsgd", by its documented name: importing this registers it.

Owns nothing: hsgd.c10d does.
"""

from __future__ import annotations

from hsgd.c10d import register
from hsgd.c10d.process_group import HsgdProcessGroup

__all__ = ["HsgdProcessGroup", "register"]

register()
