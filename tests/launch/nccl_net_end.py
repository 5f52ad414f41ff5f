"""One end of a connection of NCCL's network plugin: python nccl_net_end.py send|receive FILE BYTES.

The receiver writes its handle to FILE. Messages of BYTES bytes go until a call fails; after the
first one each end prints "moved", and at the end the result and the plugin's last warning.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from ctypes import byref, c_char_p, c_int, c_ulong, c_void_p
from pathlib import Path
from typing import Any

from hsgd.jobs.launch import nccl_plugin

__all__: list[str] = []

CALLS = [
    *("name", "init", "devices", "properties", "listen", "connect", "accept"),
    *("reg_mr", "reg_dma_buf", "dereg_mr", "isend", "irecv", "iflush", "test"),
    *("close_send", "close_recv", "close_listen"),
]
LIMIT_S = 60
WARNING = 2
warnings: list[str] = []


@ctypes.CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)
def log(level: int, _flags: int, _file: bytes, _line: int, form: bytes, words: bytes) -> None:
    if level == WARNING:
        warnings.append((form % words).decode())


def main(role: str, path: Path, count: int) -> None:
    table = (c_void_p * len(CALLS)).in_dll(
        ctypes.CDLL(str(nccl_plugin.library())), "ncclNetPlugin_v8"
    )

    def call(name: str, *arguments: Any) -> int:
        by_value = (c_int, c_void_p)
        kinds = [type(each) if isinstance(each, by_value) else c_void_p for each in arguments]
        return int(ctypes.CFUNCTYPE(c_int, *kinds)(table[CALLS.index(name)])(*arguments))

    comm, listening, handle = c_void_p(), c_void_p(), ctypes.create_string_buffer(128)
    assert call("init", ctypes.cast(log, c_void_p)) == 0, warnings
    deadline = time.monotonic() + LIMIT_S
    if role == "receive":
        assert call("listen", c_int(0), handle, byref(listening)) == 0, warnings
        path.with_suffix(".part").write_bytes(handle.raw)
        path.with_suffix(".part").rename(path)
    else:
        while not path.exists() and time.monotonic() < deadline:
            os.sched_yield()
        handle.raw = path.read_bytes()
    while not comm.value and time.monotonic() < deadline:
        if role == "receive":
            assert call("accept", listening, byref(comm), None) == 0, warnings
        else:
            assert call("connect", c_int(0), handle, byref(comm), None) == 0, warnings
    data = ctypes.create_string_buffer(count)
    result, moved = 0, 0
    while result == 0 and time.monotonic() < deadline:
        request, done = c_void_p(), c_int()
        if role == "receive":
            buffers, sizes = (c_void_p * 1)(ctypes.addressof(data)), (c_int * 1)(count)
            tags = (c_int * 1)(0)
            result = call("irecv", comm, c_int(1), buffers, sizes, tags, None, byref(request))
        else:
            result = call("isend", comm, data, c_int(count), c_int(0), None, byref(request))
        while result == 0 and not done.value and time.monotonic() < deadline:
            result = call("test", request, byref(done), None)
        moved += done.value
        if moved == 1 and done.value:
            print("moved", flush=True)
    print(result, warnings[-1] if warnings else "", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
