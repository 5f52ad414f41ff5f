"""What ranks do with Comm on tensors of a device; run by the tests of this folder.

Each is a function of a Seat, a path that is new to the ranks, their number and the kind of a Place.
Owns no values: see calls.py.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import torch

from calls import DTYPES, KINDS, Call, Started
from hsgd import Comm
from hsgd.comm.connect import own_node, tcp_meeting
from hsgd.config import Config
from hsgd.errors import PeerLost
from places import Place
from pretended_nodes import meet
from ranks import Seat

__all__ = ["all_calls", "between_nodes", "never_waits", "overlap", "several_streams", "until_lost"]

CHUNK = 1 << 16  # of one step between copies, the least there is: many steps with little data
SLOW = 30.0
COUNTS = (0, 1, 7, 1000, 300_001)
ALONE = "one rank per node"


def _comm(
    seat: Seat, path: str, size: int, chunk_bytes: int = CHUNK, timeout_s: float = SLOW
) -> Comm:
    config = Config(timeout_s=timeout_s, device_chunk_bytes=chunk_bytes)
    return Comm.local(path, seat.rank, size, config)


def _one(comm: Comm, call: Call, place: Place) -> None:
    started = call.start(comm, place.device)
    call.check(comm, started, started.wait())


def all_calls(seat: Seat, path: str, size: int, kind: str) -> None:
    """Every collective, dtype and size, in place and not, blocking and not."""
    place = Place(kind, seat.rank)
    comm = _comm(seat, path, size)
    place.check_way(comm)
    for step, dtype in enumerate(DTYPES):
        for count in COUNTS:
            for name in KINDS:
                for way in range(4) if count == 1000 or dtype == torch.float32 else (step % 4,):
                    _one(comm, Call(name, dtype, count, step, way < 2, way % 2 == 0), place)
    comm.close()
    comm = _comm(seat, f"{path}-large", size, chunk_bytes=Config().device_chunk_bytes)
    for dtype in (torch.float32, torch.bfloat16):
        _one(comm, Call("allreduce", dtype, 9_000_001, in_place=True), place)
        _one(comm, Call("allgather", dtype, 3_000_001, asynchronous=True), place)
    comm.close()


def several_streams(seat: Seat, path: str, size: int, kind: str) -> None:
    """Inputs are made late by their stream and overwritten at once; results are read by another
    stream. Whatever does not wait for the other makes them wrong.
    """
    place = Place(kind, seat.rank)
    comm = _comm(seat, path, size)
    place.check_way(comm)
    streams = [place.new_stream() for _ in range(3)]
    draw = random.Random(7)  # the same on all ranks, whose calls have one order
    late = random.Random(seat.rank)
    waiting: list[tuple[Call, Started, Any]] = []
    read: list[tuple[Call, Started, torch.Tensor]] = []

    def read_one() -> None:
        call, started, stream = waiting.pop(late.randrange(len(waiting)))
        # A blocking call is over for its own stream only.
        with place.on(late.choice(streams) if call.asynchronous else stream):
            result = started.wait()
            read.append((call, started, result.clone()))
            result.fill_(77)
            started.given.fill_(77)

    for step in range(60):
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.int32))
        ways = (draw.random() < 0.5, draw.random() < 0.7)
        call = Call(draw.choice(KINDS), dtype, draw.choice(COUNTS[1:]), step, *ways)
        stream = streams[step % 3]
        with place.on(stream):
            place.sleep(late.random() * 2)
            waiting.append((call, call.start(comm, place.device), stream))
        while len(waiting) > 4:
            read_one()
    while waiting:
        read_one()
    place.wait()
    for call, started, result in read:
        call.check(comm, started, result)
    comm.close()


def never_waits(seat: Seat, path: str, size: int, kind: str) -> None:
    """Calls return while the device has not even come to their inputs."""
    place = Place(kind, seat.rank)
    comm = _comm(seat, path, size)
    calls = [
        Call(name, torch.float32, 20_000, step, in_place=name != "alltoall", asynchronous=step > 5)
        for step, name in enumerate(2 * KINDS)
    ]
    for call in calls:
        _one(comm, call, place)
    with place.no_waits():
        place.sleep(1000)
        slept = place.mark()
        results = []
        for call in calls:
            started = call.start(comm, place.device)
            results.append((call, started, started.wait()))
        assert slept is None or not slept.query(), "a call waited for the device"
    for call, started, result in results:
        call.check(comm, started, result)
    comm.close()


def between_nodes(
    seat: Seat, path: str, size: int, kind: str, folder: str, nodes: list[int], reason: str
) -> None:
    """Over TCP between nodes that the ranks only pretend to be on. reason: why not by NCCL, ""
    where they use it.
    """
    place = Place(kind, seat.rank)
    if place.is_cuda:
        assert torch.cuda.nccl.version()  # NCCL is there
    config = Config(timeout_s=SLOW, device_chunk_bytes=CHUNK)
    try:
        comm = meet(seat, folder, nodes, config)
    finally:
        tcp_meeting.find_nodes = own_node.find_nodes
    assert comm.cross_size == len(set(nodes))
    for step, name in enumerate(KINDS):
        for count in COUNTS:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                _one(comm, Call(name, dtype, count, step, step % 2 == 0, count % 2 == 0), place)
    if place.is_cuda:
        layout = comm.device_comm(torch.ones(1, device=place.device)).layout
        assert bool(layout.nccl_library) == (not reason) and reason in layout.reason, layout
    comm.close()


def until_lost(seat: Seat, path: str, size: int, kind: str, victim: int) -> tuple[str, float]:
    """Rounds until the death of one rank is heard of: the error, and the seconds it took."""
    place = Place(kind, seat.rank)
    comm = _comm(seat, path, size, timeout_s=60.0)
    place.check_way(comm)
    tensor = torch.ones(1_000_000, device=place.device)
    last = time.monotonic()
    try:
        for number in range(1_000_000):
            if number == 5 and seat.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            handle = comm.allreduce_async(tensor, "mean", out=tensor)
            handle.wait()
            place.wait()
            comm.check_device()
            last = time.monotonic()
    except PeerLost as error:
        seconds = time.monotonic() - last
        place.wait()  # the device is free of what can no longer be done
        comm.close()
        return str(error), seconds
    raise AssertionError("no round failed")


def overlap(seat: Seat, path: str, size: int, kind: str, side: int = 4096) -> dict[str, float]:
    """Milliseconds of computing, of an allreduce, and of both at once on two streams."""
    place = Place(kind, seat.rank)
    comm = _comm(seat, path, size, chunk_bytes=Config().device_chunk_bytes)
    computing, moving = place.new_stream(), place.new_stream()
    matrix = torch.ones(side, side, device=place.device)
    tensor = torch.ones(side * side, device=place.device)

    def timed(computes: bool, moves: bool) -> float:
        place.wait()
        comm.barrier()
        begin, marks, started = place.mark(), [], time.perf_counter()
        if computes:
            with place.on(computing):
                for _ in range(20):
                    torch.mm(matrix, matrix)
                marks.append(place.mark())
        if moves:
            with place.on(moving):
                comm.allreduce_async(tensor, "mean", out=tensor).wait()
                marks.append(place.mark())
        place.wait()
        if begin is None:
            return (time.perf_counter() - started) * 1e3
        return float(max(begin.elapsed_time(mark) for mark in marks))

    ways: dict[str, Any] = {"compute": (True, False), "allreduce": (False, True)}
    ways["both"] = (True, True)
    for _ in range(2):  # the first time is that of a cold device
        found = {name: timed(*way) for name, way in ways.items()}
    assert float(tensor[-1]) == 1.0
    comm.close()
    return found
