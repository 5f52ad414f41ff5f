"""Munge: credentials by which processes of one user on a cluster prove who they are.

Slurm authenticates its own messages so (https://dun.github.io/munge). A credential is encrypted and
signed by the daemon of the node; here only the same user, and root, can open one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

__all__ = ["MungeError", "is_usable", "seal_for_own_user", "unseal_of_own_user"]

_LIBRARY = "libmunge.so.2"
_UID_RESTRICTION = 9  # MUNGE_OPT_UID_RESTRICTION of its C interface


class MungeError(RuntimeError):
    """No credential could be made or opened, or another user made it."""


def is_usable() -> bool:
    """Return whether this process can make a credential and open it; local."""
    try:
        return unseal_of_own_user(seal_for_own_user(b"hsgd")) == b"hsgd"
    except MungeError:
        return False


def seal_for_own_user(payload: bytes) -> str:
    """Return a credential that only processes of this user, and root, can open; local."""
    munge = _library()
    context = ctypes.c_void_p(munge.munge_ctx_create())
    credential = ctypes.c_char_p()
    try:
        _check(munge.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_uint(os.geteuid())))
        _check(munge.munge_encode(ctypes.byref(credential), context, payload, len(payload)))
        return (credential.value or b"").decode()
    finally:
        munge.munge_ctx_destroy(context)
        munge.free(credential)


def unseal_of_own_user(credential: str) -> bytes:
    """Return the payload of a credential that this user, or root, made; local. Only once a node."""
    munge = _library()
    payload, length = ctypes.c_void_p(), ctypes.c_int()
    uid, gid = ctypes.c_uint(), ctypes.c_uint()
    told = (ctypes.byref(each) for each in (payload, length, uid, gid))
    try:
        _check(munge.munge_decode(credential.encode(), None, *told))
        if uid.value not in (os.geteuid(), 0):
            raise MungeError(f"user {uid.value} made the credential")
        return ctypes.string_at(payload, length.value)
    finally:
        munge.free(payload)


def _check(status: int) -> None:
    if status:
        raise MungeError((_library().munge_strerror(status) or b"").decode())


@functools.cache
def _library() -> Any:
    try:
        munge: Any = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MungeError(f"no {_LIBRARY} ({error})") from None
    munge.munge_ctx_create.restype = ctypes.c_void_p
    munge.munge_strerror.restype = ctypes.c_char_p
    munge.free = ctypes.CDLL(None).free
    return munge
