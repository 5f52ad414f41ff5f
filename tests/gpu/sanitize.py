"""Programs of these tests under NVIDIA's compute-sanitizer, one process of it for each rank.

`python sanitize.py` starts the ranks and says what was found; with a program, a rank and a meeting
point it is a rank. The ranks of the tests end without their exit handlers, in which the sanitizer
would report. A rank that gives a wrong address shows first that errors are found.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import core_programs
import torch_programs
from places import Place, why_not_cuda
from ranks import Seat, meeting_point

__all__: list[str] = []

SIZE = 2
LIMIT_S = 300
FOUND = 99  # exit code of the sanitizer
SANITIZER = ("compute-sanitizer", "--error-exitcode", str(FOUND), "--require-cuda-init", "no")


def wrong_address(seat: Seat, path: str, size: int, kind: str) -> None:
    """Sets memory that nobody has allocated; the driver refuses that."""
    place = Place(kind, seat.rank)
    place.wait()
    torch.ones(1, device=place.device)
    assert ctypes.CDLL("libcuda.so.1").cuMemsetD8_v2(ctypes.c_uint64(4096), 0, 16) != 0


PROGRAMS: dict[str, Callable[..., Any]] = {
    "all_calls": core_programs.all_calls,
    "several_streams": core_programs.several_streams,
    "operations": torch_programs.operations,
    "no_waits_of_a_step": torch_programs.no_waits_of_a_step,
}


def run(name: str, size: int) -> list[subprocess.CompletedProcess[str]]:
    """A program on ranks of its own, each under the sanitizer."""
    point = meeting_point()
    deadline = time.monotonic() + LIMIT_S
    with contextlib.ExitStack() as ended:
        ranks = []
        for rank in range(size):
            output = ended.enter_context(tempfile.TemporaryFile("w+"))
            words = [*SANITIZER, sys.executable, __file__, name, str(rank), point, str(size)]
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
            ended.callback(process.wait)
            ended.callback(process.kill)
            ranks.append((process, output))
        done = []
        for process, output in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            code = -1 if process.poll() is None else process.returncode
            output.seek(0)
            done.append(subprocess.CompletedProcess(process.args, code, output.read()))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    options = parser.parse_args()
    reason = why_not_cuda()
    if reason or shutil.which(SANITIZER[0]) is None:
        print(reason or f"no {SANITIZER[0]} on PATH; it is a part of the CUDA toolkit")
        return 1
    (control,) = run("wrong_address", 1)
    if control.returncode != FOUND or "ERROR SUMMARY: 1 error" not in control.stdout:
        print(f"compute-sanitizer does not find errors here: {control.stdout[-2000:]}")
        return 1
    failed = 0
    for name in options.programs:
        for rank, done in enumerate(run(name, SIZE)):
            summary = re.findall("ERROR SUMMARY: (.*)", done.stdout)
            print(f"{name}, rank {rank}: exit code {done.returncode}, {summary}", flush=True)
            if done.returncode != 0 or summary != ["0 errors"]:
                failed += 1
                print(done.stdout[-4000:])
    return min(failed, 1)


def be_rank(name: str, rank: int, point: str, size: int) -> None:
    program = {**PROGRAMS, "wrong_address": wrong_address}[name]
    _, pipe = multiprocessing.Pipe()
    program(Seat(rank, pipe), point, size, "cuda")


if __name__ == "__main__":
    if len(sys.argv) == 5 and not sys.argv[1].startswith("-"):
        be_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(main())
