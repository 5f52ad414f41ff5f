"""Elastic training: states that are saved, restored and sent, and the sampler that goes with them.

Owns the door to Horovod's `run`, whose driver starts and stops workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hsgd.torch import exceptions
from hsgd.torch.elastic.sampler import ElasticSampler
from hsgd.torch.elastic.state import ObjectState, State, TorchState
from hsgd.torch.job import basics, horovod_path

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Horovod's decorator for elastic training: runs `func(state, ...)` again after failures.

    Errors of hsgd.torch restore the state as Horovod's do. Raises MissingExtra without Horovod.
    """
    horovod_path.load("elastic.run")
    from horovod.common import elastic as theirs
    from horovod.common import exceptions as their_errors

    @functools.wraps(func)
    def translated(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except exceptions.HorovodInternalError as error:
            raise their_errors.HorovodInternalError(str(error)) from error
        except exceptions.HostsUpdatedInterrupt as update:
            raise their_errors.HostsUpdatedInterrupt(update.skip_sync) from update

    wrapped: Callable[..., Any] = theirs.run_fn(translated, _reset)
    return wrapped


def _reset() -> None:
    basics.shutdown()
    basics.init()
