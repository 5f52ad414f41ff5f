"""The torch.distributed backend "hsgd": its registration.

torch calls register() when it is imported (entry point "torch.backends"), so a script needs no
import of hsgd. The first init_process_group loads the process group.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["NAME", "register"]

NAME = "hsgd"


def register() -> None:
    """Register the backend with torch.distributed; local. A second call does nothing."""
    import torch.distributed

    if torch.distributed.is_available() and NAME not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend(NAME, _create, extended_api=True, devices="cpu")
        from hsgd.c10d import env_rendezvous

        env_rendezvous.install(sys.modules["torch.distributed.rendezvous"])


def _create(options: Any, backend_options: Any) -> Any:
    from hsgd.c10d import torch_versions
    from hsgd.c10d.process_group import HsgdProcessGroup

    torch_versions.refuse_old()
    return HsgdProcessGroup(options, backend_options)
