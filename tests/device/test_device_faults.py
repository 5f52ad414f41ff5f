"""What goes wrong with arrays of a device: lost ranks, errors of the driver, calls that differ.

Owns the proof that each is an exception on all ranks, that no result is one in silence, and that
nothing is left of a communicator.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_programs import LIBRARIES, simulator
from hsgd import Comm
from hsgd.config import Config
from hsgd.errors import HsgdError, PeerLost, SignatureMismatch
from outcomes import told_by
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat, meeting_point
from simcuda_build import build
from simulated import DeviceArray, Simulator
from toolkit.forked_child import in_forked_child

__all__: list[str] = []

COUNT = 50_000
NAMED = 10  # errors between nodes call rank 1 so, rank 2 twice that, ...
CUDA, NCCL = LIBRARIES / "libsimcuda.so", LIBRARIES / "libsimnccl.so"


@pytest.fixture(scope="module", autouse=True)
def libraries() -> tuple[Path, Path]:
    return build(LIBRARIES)


def config(nccl: bool) -> Config:
    return dataclasses.replace(
        PATIENT,
        timeout_s=15.0,
        cuda_library=str(CUDA),
        nccl_library=str(NCCL) if nccl else "none",
        device_chunk_bytes=1 << 16,
    )


def opened(
    seat: Seat, where: str, size: int, nccl: bool, nodes: list[int] | None = None
) -> tuple[Comm, Simulator]:
    os.environ["SIMCUDA_GPU"] = str(seat.rank if nccl else 0)
    device = simulator(seat.rank, 300)
    seat.kept["device"] = device
    if nodes is None:
        return seat.comm(where, size, config(nccl)), device
    members = [NAMED * rank for rank in range(size)]
    return meet(seat, where, nodes, config(nccl), members=members), device


def array(device: Simulator, count: int = COUNT, dtype: str = "float32") -> DeviceArray:
    return device.array(np.ones(count, dtype), device.stream())


def until_lost(seat: Seat, where: str, size: int, nccl: bool, nodes: list[int] | None) -> Any:
    """Allreduces until one fails: the error, seconds from the last success, and whether the array
    of the failed one holds anything that could be a result.
    """
    comm, device = opened(seat, where, size, nccl, nodes)
    source, out = array(device), array(device)
    comm.allreduce(source, out=out)
    seat.tell("begun")
    began = time.monotonic()
    handles: list[Any] = []
    try:
        while True:
            began = time.monotonic()
            handles.append(comm.allreduce_async(source, out=out))
            handles[-1].wait()
            device.synchronize(out.stream)
            comm.check_device()
    except HsgdError as error:
        passed_s = time.monotonic() - began
        comm.close()
        values = out.numpy()
        return error, passed_s, bool(np.isin(values, [0, 1]).any())


@pytest.mark.long
@pytest.mark.parametrize(
    ("nccl", "nodes"),
    [(False, None), (True, None), (False, [0, 0, 1, 1]), (True, [0, 0, 1, 1])],
    ids=["host memory", "NCCL", "host memory between nodes", "NCCL between nodes"],
)
def test_a_killed_rank(nccl: bool, nodes: list[int] | None, tmp_path: Path) -> None:
    size = len(nodes or "123")
    where = meeting_point() if nodes is None else str(tmp_path)
    lost = size - 1
    with Ranks(size) as ranks:
        ranks.start(until_lost, where, size, nccl, nodes)
        assert [ranks.hear(rank) for rank in range(size)] == ["begun"] * size
        time.sleep(0.05)
        ranks.signal(lost, signal.SIGKILL)
        outcomes = [outcome.value for outcome in ranks.finish(range(lost))]
    for error, passed_s, plausible in outcomes:
        assert isinstance(error, PeerLost), error
        named = lost if nodes is None else NAMED * lost
        assert error.rank == named and f"rank {named} " in str(error), error
        assert passed_s < 10, passed_s
        assert not plausible or nccl  # what NCCL has not written stays as it was


def failing(seat: Seat, where: str, function: str, code: int, nccl: bool) -> Any:
    """Rank 1's driver fails once; what each rank gets."""
    comm, device = opened(seat, where, 2, nccl)
    source, out = array(device), array(device)
    comm.allreduce(source, out=out)
    if seat.rank == 1:
        device.fail(function, 3, code)
    try:
        for _ in range(50):
            comm.allreduce(source, out=out)
            device.synchronize(out.stream)
    except HsgdError as error:
        began = time.monotonic()
        comm.close()
        return error, time.monotonic() - began
    except RuntimeError as error:  # of the simulator: the context is lost
        try:
            comm.allreduce(source, out=out)
        except HsgdError as own:
            comm.close()
            return own, 0.0
        return error, 0.0
    return None, 0.0


@pytest.mark.parametrize(
    ("function", "code", "name"),
    [
        ("cuMemcpyDtoHAsync", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuMemcpyHtoDAsync", 719, "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuStreamWaitEvent", 1, "CUDA_ERROR_INVALID_VALUE"),
        ("cuStreamWaitValue32", 801, "CUDA_ERROR_NOT_SUPPORTED"),
        ("cuStreamWriteValue32", 801, "CUDA_ERROR_NOT_SUPPORTED"),
    ],
)
@pytest.mark.parametrize("nccl", [False, True], ids=["host memory", "NCCL"])
def test_an_error_of_the_driver(function: str, code: int, name: str, nccl: bool) -> None:
    if nccl and function not in ("cuStreamWaitEvent", "cuStreamWriteValue32"):
        return  # which NCCL's way does not call
    with Ranks(2) as ranks:
        (other, _), (own, closed_s) = ranks.run(failing, meeting_point(), function, code, nccl)
    assert isinstance(own, HsgdError)
    assert f"{function} failed: error {code} ({name})" in str(own), own
    assert isinstance(other, PeerLost), other
    assert other.rank == 1
    # The cause, unless rank 1 was in a collective with the other one, which then just ends.
    assert f"{function} failed" in str(other) or "closed its communicator" in str(other)
    assert closed_s < 5


def differing(seat: Seat, where: str, nccl: bool) -> Any:
    comm, device = opened(seat, where, 2, nccl)
    comm.allreduce(array(device), out=array(device))
    source, out = array(device, COUNT + seat.rank), array(device, COUNT + seat.rank)
    try:
        comm.allreduce(source, out=out, name="weights")
        device.synchronize(out.stream)
        comm.check_device()
    except HsgdError as error:
        comm.close()
        return error, bool((out.numpy() == 2).any())
    return None


@pytest.mark.long
@pytest.mark.parametrize("nccl", [False, True])
def test_calls_that_differ(nccl: bool) -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.run(differing, meeting_point(), nccl)
    for error, plausible in outcomes:
        assert isinstance(error, SignatureMismatch), error
        assert str(COUNT + 1) in str(error)
        assert "weights" in str(error)
        assert not plausible or nccl  # NCCL has summed what both gave


def with_other_counts(seat: Seat, where: str, what: str) -> Any:
    """Calls of equal shapes whose rows go elsewhere, or that are empty on one rank."""
    comm, device = opened(seat, where, 2, what != "empty")
    comm.allreduce(array(device), out=array(device))
    mine = [3, 5] if seat.rank == 0 else [5, 3]
    try:
        if what == "reduce_scatter":
            comm.reduce_scatter(array(device, 8), out=array(device, mine[seat.rank]), counts=mine)
        elif what == "alltoall":
            rows = 8 if seat.rank == 0 else 1000
            comm.alltoall(array(device, rows), out=array(device, rows))
        else:
            rows = 0 if seat.rank == 0 else 10
            comm.allreduce(array(device, rows), out=array(device, rows))
        device.synchronize()
        comm.check_device()
    except HsgdError as error:
        return error
    finally:
        comm.close()
    return None


@pytest.mark.parametrize("what", ["reduce_scatter", "alltoall", "empty"])
def test_counts_that_differ(what: str) -> None:
    with Ranks(2) as ranks:
        for error in ranks.run(with_other_counts, meeting_point(), what):
            assert isinstance(error, SignatureMismatch), error


def aborting(seat: Seat, where: str, nccl: bool) -> Any:
    """Rank 0 waits for rank 1 on the device, and gives up."""
    comm, device = opened(seat, where, 2, nccl)
    source, out = array(device), array(device)
    comm.allreduce(source, out=out)
    device.synchronize(out.stream)
    comm.barrier()
    if seat.rank == 1:
        seat.tell("waits")
        assert seat.pipe.recv() == "end"
        comm.close()
        return 0.0, ""
    comm.allreduce_async(source, out=out)
    time.sleep(0.2)
    began = time.monotonic()
    comm.abort()
    device.synchronize(out.stream)
    with pytest.raises(HsgdError) as caught:
        comm.check_device()
    comm.close()
    seat.tell("aborted")
    return time.monotonic() - began, str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("nccl", [False, True], ids=["host memory", "NCCL"])
def test_abort_ends_what_waits_on_the_device(nccl: bool) -> None:
    with Ranks(2) as ranks:
        ranks.start(aborting, meeting_point(), nccl)
        assert ranks.hear(1) == "waits"
        assert ranks.hear(0) == "aborted"
        ranks.send(1, "end")
        (passed_s, text), _ = (outcome.value for outcome in ranks.finish())
    assert passed_s < 5
    assert "abort" in text


def closing_alone(seat: Seat, where: str) -> None:
    """Rank 0 closes while rank 1 keeps its communicator."""
    comm, device = opened(seat, where, 2, True)
    out = array(device)
    comm.allreduce(array(device), out=out)
    device.synchronize()
    comm.barrier()
    if seat.rank == 1:
        assert seat.pipe.recv() == "end"
    comm.close()
    seat.tell("closed")


@pytest.mark.long
def test_close_waits_for_nobody() -> None:
    with Ranks(2) as ranks:
        ranks.start(closing_alone, meeting_point())
        assert ranks.hear(0) == "closed"
        ranks.send(1, "end")  # only now
        assert [outcome.error for outcome in ranks.finish()] == [None, None]


def forked(seat: Seat, where: str) -> tuple[str, str]:
    comm, device = opened(seat, where, 2, False)
    comm.allreduce(array(device), out=array(device))
    source: Any = array(device)
    source.device = types.SimpleNamespace(id=0)  # or the driver is asked, which is not there
    told: tuple[str, str] = in_forked_child(
        lambda: told_by(lambda: comm.allreduce(source, out=source))
    )
    comm.close()
    return told


@pytest.mark.long
def test_a_forked_child_is_refused() -> None:
    with Ranks(2) as ranks:
        for kind, text in ranks.run(forked, meeting_point()):
            assert kind == "HsgdError" and "fork" in text


def refused(seat: Seat, where: str) -> list[str]:
    """Words of errors that one rank alone finds, before anything is sent."""
    comm, device = opened(seat, where, 1, False)
    good, stream = array(device), device.stream()
    words = []

    def expect(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        words.append(str(caught.value))

    expect(ValueError, lambda: comm.allreduce(good, out=array(device, 7)))
    expect(ValueError, lambda: comm.allreduce(good, out=array(device, COUNT, "float64")))
    expect(TypeError, lambda: comm.allreduce(good, out=np.ones(COUNT, "float32")))
    expect(TypeError, lambda: comm.allreduce(np.ones(COUNT, "float32"), out=good))
    expect(TypeError, lambda: comm.allreduce(good))
    expect(TypeError, lambda: comm.allreduce(array(device, 8, "uint16"), out=good))
    expect(ValueError, lambda: comm.broadcast(good, 3))
    whole = array(device, COUNT, "int32")
    expect(ValueError, lambda: comm.allreduce(whole, "mean", out=whole))
    shifted = DeviceArray(device, good.pointer + 4, (COUNT - 1,), "float32")
    fewer = DeviceArray(device, good.pointer, (COUNT - 1,), "float32")
    expect(ValueError, lambda: comm.allreduce(fewer, out=shifted))
    captured = DeviceArray(device, good.pointer, good.shape, good.dtype, stream)
    device.set_capturing(stream, 1)
    expect(ValueError, lambda: comm.allreduce(captured, out=captured))
    device.set_capturing(stream, 0)
    comm.allreduce(captured, out=captured)
    comm.close()
    return words


def test_what_is_refused() -> None:
    with Ranks(1) as ranks:
        (words,) = ranks.run(refused, meeting_point())
    assert [text for text in words if "\n" in text] == []
    for text, part in zip(
        words,
        [
            *("another shape", "dtype float64", "is not an array on a CUDA device"),
            *("is not an array on a CUDA device", "give out=", "uint16", "root 3"),
            *("int32", "overlap", "CUDA graph"),
        ],
        strict=True,
    ):
        assert part in text


def without_driver(seat: Seat, where: str) -> str:
    device = simulator(0, 0)
    own = dataclasses.replace(PATIENT, cuda_library="libnodriver.so.1")
    comm = seat.comm(where, 1, own)
    with pytest.raises(HsgdError) as caught:
        comm.allreduce(array(device), out=array(device))
    comm.close()
    return str(caught.value)


def test_without_a_driver() -> None:
    with Ranks(1) as ranks:
        (text,) = ranks.run(without_driver, meeting_point())
    assert "no CUDA driver" in text
    assert "libnodriver.so.1" in text
    assert "\n" not in text


def without_driver_on_one(seat: Seat, where: str) -> str:
    os.environ["SIMCUDA_GPU"] = "0"
    device = simulator(0, 0)
    library = "libnodriver.so.1" if seat.rank == 1 else str(CUDA)
    comm = seat.comm(where, 2, dataclasses.replace(config(False), cuda_library=library))
    source: Any = array(device)
    source.device = types.SimpleNamespace(id=0)
    with pytest.raises(HsgdError) as caught:
        comm.allreduce(source, out=source)
    assert caught.value.rank == 1
    comm.barrier()  # it goes on
    comm.close()
    return str(caught.value)


def test_a_driver_that_one_rank_lacks_is_an_error_on_all() -> None:
    with Ranks(2) as ranks:
        for text in ranks.run(without_driver_on_one, meeting_point()):
            assert text.startswith("rank 1: no CUDA driver")


def counted(seat: Seat, where: str, nccl: bool, nodes: list[int] | None, size: int) -> Any:
    """What the device did for one large allreduce, and what is left at the end."""
    comm, device = opened(seat, where, size, nccl, nodes)
    source, out = array(device), array(device)
    streams = device.counters().streams_live
    comm.allreduce(source, out=out)
    device.synchronize()
    device.reset_counters()
    inter = comm.device_comm(source).inter_bytes()
    comm.allreduce(source, out=out)
    during = device.counters()
    device.synchronize()
    sent = comm.device_comm(source).inter_bytes() - inter
    comm.close()
    left = device.counters()
    return during, sent, (left.streams_live - streams, left.events_live, left.registered_bytes_live)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nccl", "nodes", "copied", "between"),
    [
        (False, None, 1.0, 0.0),
        (True, None, 0.0, 0.0),
        (False, [0, 1], 1.0, 1.0),
        (True, [0, 0, 1, 1], 0.5, 0.5),
    ],
    ids=["host memory", "NCCL", "host memory between nodes", "NCCL between nodes"],
)
def test_bytes_and_what_is_left(
    nccl: bool, nodes: list[int] | None, copied: float, between: float, tmp_path: Path
) -> None:
    """Over PCIe each rank copies its payload, or its slice, down and up once: 2 S of a node.
    Between nodes it sends (N - 1) / N of that and then as much of the sum: 2 (N - 1) / N S.
    """
    where = meeting_point() if nodes is None else str(tmp_path)
    size = len(nodes or "12")
    with Ranks(size) as ranks:
        outcomes = ranks.run(counted, where, nccl, nodes, size)
    payload = COUNT * 4
    for during, sent, left in outcomes:
        assert during.d2h_bytes == pytest.approx(copied * payload, rel=0.01)
        assert during.h2d_bytes == pytest.approx(copied * payload, rel=0.01)
        assert during.pageable_copies == 0
        assert during.host_synchronizations == 0
        assert sent == pytest.approx(between * payload, rel=0.02, abs=1000)
        assert left == (0, 0, 0)
