"""core_errors_as_horovods(): errors of the core by the name that Horovod's scripts catch.

Owns the translation. Never handles an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hsgd.errors import HsgdError, ReplicasDiffer
from hsgd.torch.exceptions import HorovodInternalError

__all__ = ["core_errors_as_horovods"]


@contextlib.contextmanager
def core_errors_as_horovods() -> Iterator[None]:
    """Raise HorovodInternalError in place of an HsgdError; but ReplicasDiffer stays, since to
    restore and go on would not end it; local.
    """
    try:
        yield
    except ReplicasDiffer:
        raise
    except HsgdError as error:
        raise HorovodInternalError(str(error)) from error
