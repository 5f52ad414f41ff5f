"""What a forked child of this process finds in what it inherited.

Owns the child until it has ended, which it does without the end of the interpreter.
"""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["in_forked_child"]


def in_forked_child(call: Callable[[], Any]) -> Any:
    """Return the value of call() in a child, which must end well; AssertionError if it raises."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads
        child = os.fork()
    if child == 0:
        code = 0
        try:
            said = pickle.dumps(call())
        except BaseException:
            code, said = 1, pickle.dumps(traceback.format_exc())
        with open(write, "wb") as pipe:
            pipe.write(said)
        os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    value = pickle.loads(said) if said else "it said nothing"
    assert status == 0, f"the forked child ended with wait status {status}: {value}"
    return value
