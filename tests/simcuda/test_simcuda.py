"""The simulated driver keeps the real one's rules, and shows when a program breaks them.

Owns no process state: what a test leaves wrong is put right before the next one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simcuda_build import FOLDER, build
from simulated import EQ, CudaError, DeviceArray, Simulator
from toolkit.processes import run_together

__all__: list[str] = []

COUNT = 5003  # elements of float32: a copy of them is a long one
SEEDS = 50
DELAY_US = 200


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    made = Simulator(build())
    made.recover()
    made.reset_counters()
    made.set_delays(0, DELAY_US)
    before = made.counters()
    yield made
    made.recover()
    made.set_delays(0, DELAY_US)
    after = made.counters()
    assert after[5:9] == before[5:9], f"left: {after}"


@pytest.fixture
def numbers(simulator: Simulator) -> Iterator[DeviceArray]:
    with simulator.array(np.arange(COUNT, dtype=np.float32)) as array:
        yield array
        simulator.recover()


@pytest.fixture
def streams(simulator: Simulator) -> Iterator[list[int]]:
    made = [simulator.stream() for _ in range(2)]
    yield made
    simulator.recover()
    for stream in made:
        simulator.destroy_stream(stream)


def run_program(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program of a few lines, with a Simulator `s`, in a process of its own."""
    head = "from simcuda_build import build\nfrom simulated import *\ns = Simulator(build())\n"
    return subprocess.run(
        [sys.executable, "-c", head + text],
        cwd=Path(__file__).parent,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    )


@pytest.mark.long
@pytest.mark.parametrize("access", ["string_at(p, 1)", "memset(p, 0, 1)", "string_at(p + 4095, 1)"])
def test_the_host_cannot_touch_device_memory(access: str) -> None:
    run = run_program(f"import ctypes\np = s.alloc(4096)\nctypes.{access}")
    assert run.returncode == -signal.SIGSEGV, run


def test_new_memory_is_not_zero(simulator: Simulator) -> None:
    pointer = simulator.alloc(64)
    assert simulator.download(pointer, 64, np.uint8).all()
    simulator.free(pointer)


def doubled(simulator: Simulator, streams: list[int], seed: int, ordered: bool) -> bool:
    """Whether a copy on one stream finds what kernels on another one wrote."""
    first, second = streams
    simulator.set_delays(seed, DELAY_US)
    event, found = simulator.event(), np.zeros(COUNT, np.float32)
    with (
        simulator.array(np.ones(COUNT, np.float32)) as array,
        simulator.registered(found) as target,
    ):
        for _ in range(3):
            simulator.scale_add(first, array.pointer, array.pointer, COUNT, "float32", 2)
        simulator.record(event, first)
        if ordered:
            simulator.wait_event(second, event)
        simulator.download_async(target, array.pointer, second)
        simulator.synchronize(second)
    simulator.destroy_event(event)
    return bool((found == 8).all())


def test_a_missing_event_shows_as_wrong_data(simulator: Simulator, streams: list[int]) -> None:
    right = [doubled(simulator, streams, seed, False) for seed in range(SEEDS)]
    assert sum(right) < SEEDS / 2
    assert simulator.counters().violations == 0


def test_an_event_orders_two_streams(simulator: Simulator, streams: list[int]) -> None:
    assert all(doubled(simulator, streams, seed, True) for seed in range(SEEDS))


def test_an_early_reuse_of_host_memory_shows(simulator: Simulator, streams: list[int]) -> None:
    wrong = 0
    with (
        simulator.registered(np.zeros(COUNT, np.float32)) as source,
        simulator.array(source) as target,
    ):
        for seed in range(SEEDS):
            simulator.set_delays(seed, DELAY_US)
            source[:] = 1
            simulator.upload_async(target.pointer, source, streams[0])
            source[:] = 2
            simulator.synchronize(streams[0])
            wrong += bool((target.numpy() != 1).any())
    assert wrong > SEEDS / 2


def test_pageable_memory_is_read_in_the_call(
    simulator: Simulator, numbers: DeviceArray, streams: list[int]
) -> None:
    source, found = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    simulator.upload_async(numbers.pointer, source, streams[0])
    source[:] = 2
    simulator.download_async(found, numbers.pointer, streams[0])
    assert (found == 1).all()
    assert simulator.counters().pageable_copies == 2


def test_an_event_means_its_latest_record(
    simulator: Simulator, numbers: DeviceArray, streams: list[int]
) -> None:
    first, second = streams
    event, gate = simulator.event(), np.zeros(1, np.uint32)
    with simulator.registered(gate):
        assert simulator.reached(event)
        simulator.wait_event(second, event)  # never recorded: done
        simulator.synchronize(second)
        simulator.wait_value(first, gate.ctypes.data, 1)
        simulator.record(event, first)
        simulator.wait_event(second, event)
        simulator.wait_value(first, gate.ctypes.data, 2)
        simulator.record(event, first)
        assert not simulator.reached(event)
        gate[0] = 1
        simulator.synchronize(second)  # waits for the first record only
        assert not simulator.reached(event)
        gate[0] = 2
        simulator.synchronize_event(event)
        assert simulator.reached(event)
    simulator.destroy_event(event)


def test_values_order_a_host_thread_and_two_streams(
    simulator: Simulator, numbers: DeviceArray, streams: list[int]
) -> None:
    first, second = streams
    word = simulator.alloc(4)
    simulator.upload(word, np.zeros(1, np.uint32))
    flags = np.zeros(2, np.uint32)

    def answer() -> None:
        while flags[0] != 7:
            pass
        flags[1] = 9

    both = numbers.pointer, numbers.pointer
    with simulator.registered(flags):
        thread = threading.Thread(target=answer)
        thread.start()
        request, reply = flags.ctypes.data, flags.ctypes.data + 4
        simulator.wait_value(second, word, 1, EQ)
        simulator.scale_add(second, *both, COUNT, "float32", 1, 1)
        simulator.scale_add(first, *both, COUNT, "float32", 2)
        simulator.write_value(first, request, 7)
        simulator.wait_value(first, reply, 9)
        simulator.write_value(first, word, 1)
        simulator.synchronize(second)
        thread.join()
    assert np.array_equal(numbers.numpy(), np.arange(COUNT) * 2 + 1)
    simulator.free(word)


def test_values_are_compared_in_a_circle(simulator: Simulator, streams: list[int]) -> None:
    word = np.array([5], np.uint32)
    with simulator.registered(word):
        simulator.wait_value(streams[0], word.ctypes.data, 0xFFFFFFFF)
        simulator.synchronize(streams[0])
        simulator.wait_value(streams[0], word.ctypes.data, 6)
        assert not simulator.done(streams[0])
        word[0] = 6
        simulator.synchronize(streams[0])
    with pytest.raises(CudaError) as caught:
        simulator.wait_value(streams[0], word.ctypes.data, 6)
    assert caught.value.code == 1


def test_use_after_free_is_a_violation_that_sticks(
    simulator: Simulator, numbers: DeviceArray, streams: list[int]
) -> None:
    gone = simulator.alloc(4 * COUNT)
    simulator.free(gone)
    other = simulator.alloc(4 * COUNT)
    assert other != gone
    simulator.add(streams[0], numbers.pointer, gone, COUNT, "float32")
    assert simulator.code("cuStreamSynchronize", streams[0]) == 700
    assert "freed" in simulator.last_violation()
    assert simulator.counters().violations == 1
    for call in (
        lambda: simulator.alloc(4),
        lambda: simulator.download(numbers.pointer, COUNT, "float32"),
        lambda: simulator.synchronize(),
        simulator.stream,
    ):
        with pytest.raises(CudaError) as caught:
            call()
        assert caught.value.code == 700
    assert simulator.code("cuMemFree_v2", other) == 700


def test_a_copy_across_the_end_is_a_violation(simulator: Simulator, numbers: DeviceArray) -> None:
    found = np.empty(COUNT + 1, np.float32)
    with pytest.raises(CudaError) as caught:
        simulator.download_async(found, numbers.pointer)
    assert caught.value.code == 700
    assert "cross the end" in simulator.last_violation()


def test_a_double_free_is_a_violation(simulator: Simulator) -> None:
    pointer = simulator.alloc(100)
    simulator.free(pointer)
    with pytest.raises(CudaError) as caught:
        simulator.free(pointer)
    assert caught.value.code == 1
    assert "freed before" in simulator.last_violation()
    simulator.synchronize()


def test_memory_that_is_given_back_early_is_a_violation(
    simulator: Simulator, numbers: DeviceArray, streams: list[int]
) -> None:
    target, gate = np.zeros(COUNT, np.float32), np.zeros(1, np.uint32)
    with simulator.registered(gate):
        simulator.register(target)
        simulator.wait_value(streams[0], gate.ctypes.data, 1)
        simulator.download_async(target, numbers.pointer, streams[0])
        simulator.unregister(target)
        gate[0] = 1
        assert simulator.code("cuStreamSynchronize", streams[0]) == 700
        simulator.recover()
    assert simulator.counters().violations == 1


def test_freeing_waits_for_work(simulator: Simulator, streams: list[int]) -> None:
    for seed in range(10):
        simulator.set_delays(seed, DELAY_US)
        pointer = simulator.alloc(4 * COUNT)
        simulator.scale_add(streams[0], pointer, pointer, COUNT, "float32", 2)
        simulator.free(pointer)
    simulator.synchronize()
    assert simulator.counters().violations == 0


def test_errors_are_injected_and_stick(
    simulator: Simulator, numbers: DeviceArray, streams: list[int]
) -> None:
    simulator.fail("cuMemAlloc", 2, 2)
    simulator.free(simulator.alloc(4))
    assert simulator.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 4) == 2
    simulator.free(simulator.alloc(4))  # this one does not stick
    simulator.fail("cuMemsetD8Async", 1, 719)
    assert simulator.code("cuMemsetD8Async", numbers.pointer, 0, 4, streams[0]) == 719
    assert simulator.code("cuStreamSynchronize", streams[1]) == 719
    assert simulator.error_name(719) == "CUDA_ERROR_LAUNCH_FAILED"
    assert simulator.counters().violations == 0
    simulator.recover()
    simulator.synchronize()


def test_a_failed_context_ends_work_that_waits(simulator: Simulator) -> None:
    """And things can still be given back."""
    stream, event, pointer = simulator.stream(), simulator.event(), simulator.alloc(4)
    gate = np.zeros(1, np.uint32)
    simulator.register(gate)
    simulator.wait_value(stream, gate.ctypes.data, 1)
    simulator.fail("cuCtxSynchronize", 1, 700)
    assert simulator.code("cuCtxSynchronize") == 700
    assert simulator.code("cuMemFree_v2", pointer) == 700
    assert simulator.code("cuStreamDestroy_v2", stream) == 700
    assert simulator.code("cuEventDestroy_v2", event) == 700
    assert simulator.code("cuMemHostUnregister", gate.ctypes.data) == 700


def test_settings_come_from_the_environment() -> None:
    text = (
        "assert s.code('cuMemsetD8Async', 0, 0, 4, 0) == 1\n"
        "assert s.code('cuMemsetD8Async', 0, 0, 4, 0) == 801\n"
        "count = ctypes.c_int()\ns.cuda.cuDeviceGetCount(ctypes.byref(count))\n"
        "print(count.value, s.uuid().hex(), Simulator(build(), 1).uuid().hex())\n"
    )
    first = run_program("import ctypes\n" + text, **settings(5))
    second = run_program("import ctypes\n" + text, **settings(6))
    assert first.returncode == second.returncode == 0, first.stderr
    (count, a, b), (_, c, d) = first.stdout.split(), second.stdout.split()
    assert count == "2" and b == c and len({a, b, d}) == 3


def settings(gpu: int) -> dict[str, str]:
    fail = "cuMemsetD8Async:2:801,cuMemAlloc:9:2"
    return {"SIMCUDA_GPU": str(gpu), "SIMCUDA_DEVICES": "2", "SIMCUDA_FAIL": fail}


def test_a_process_ends_while_streams_wait() -> None:
    text = "w = s.alloc(4)\ns.wait_value(s.stream(), w, 5, 1)\ns.wait_value(0, w, 5, 1)\n"
    run = run_program(text)
    assert run.returncode == 0, run


def test_counters_count(simulator: Simulator, streams: list[int]) -> None:
    found = np.zeros(10, np.uint8)
    before = simulator.counters()
    array, event = simulator.array(found), simulator.event()
    with simulator.registered(found):
        simulator.download_async(found[:4], array.pointer, streams[0])
        simulator.copy_async(array.pointer + 5, array.pointer, 5, streams[0])
        simulator.synchronize(streams[0])
        simulator.record(event)
        simulator.synchronize_event(event)
        simulator.synchronize()
        now = simulator.counters()
    assert now.d2h_bytes == 4 and now.h2d_bytes == 10 and now.d2d_bytes == 5
    assert now.host_synchronizations == 4 and now.pageable_copies == 0
    assert now.device_allocations_live == before.device_allocations_live + 1
    assert now.registered_bytes_live == before.registered_bytes_live + 10
    assert now.events_live == before.events_live + 1
    simulator.destroy_event(event)
    array.free()
    simulator.reset_counters()
    assert simulator.counters() == before


def test_calls_need_a_context(simulator: Simulator, streams: list[int]) -> None:
    codes: list[int] = []

    def calls() -> None:
        answer = ctypes.c_uint64(1)
        codes.append(simulator.code("cuMemAlloc_v2", ctypes.byref(answer), 4))
        codes.append(simulator.code("cuStreamSynchronize", streams[0]))
        codes.append(simulator.code("cuCtxGetCurrent", ctypes.byref(answer)))
        codes.append(answer.value)
        simulator.use()
        codes.append(simulator.code("cuStreamSynchronize", streams[0]))

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert codes == [201, 201, 0, 0, 0]


def test_pointers_are_told_apart(simulator: Simulator, numbers: DeviceArray) -> None:
    host, kind = np.zeros(10), ctypes.c_uint()

    def memory_type(pointer: int) -> tuple[int, int]:
        code = simulator.code("cuPointerGetAttribute", ctypes.byref(kind), 2, pointer)
        return code, kind.value if code == 0 else 0

    assert memory_type(numbers.pointer + 8) == (0, 2)
    assert memory_type(numbers.pointer + numbers.nbytes) == (1, 0)
    assert memory_type(host.ctypes.data) == (1, 0)
    with simulator.registered(host):
        assert memory_type(host.ctypes.data + 8) == (0, 1)
        with pytest.raises(CudaError, match="ALREADY_REGISTERED"):
            simulator.register(host[5:])
    with pytest.raises(CudaError, match="NOT_REGISTERED"):
        simulator.unregister(host)


def test_a_host_function_may_not_call_the_driver(simulator: Simulator, streams: list[int]) -> None:
    codes: list[int] = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    function = kind(lambda _: codes.append(simulator.code("cuCtxSynchronize")))
    simulator.call("cuLaunchHostFunc", streams[0], ctypes.cast(function, ctypes.c_void_p), None)
    simulator.synchronize(streams[0])
    assert codes == [800]
    assert simulator.counters().violations == 1


def test_a_capturing_stream_takes_no_work(
    simulator: Simulator, numbers: DeviceArray, streams: list[int]
) -> None:
    status = ctypes.c_int(-1)
    simulator.set_capturing(streams[0], 1)
    simulator.call("cuStreamIsCapturing", streams[0], ctypes.byref(status))
    assert status.value == 1
    assert simulator.code("cuMemsetD8Async", numbers.pointer, 0, 4, streams[0]) == 900
    assert simulator.code("cuStreamSynchronize", streams[0]) == 900
    simulator.set_capturing(streams[0], 0)
    simulator.synchronize(streams[0])


def test_a_handle_of_a_stream_that_was_destroyed_is_a_violation(simulator: Simulator) -> None:
    stream = simulator.stream()
    simulator.destroy_stream(stream)
    assert simulator.code("cuStreamSynchronize", stream) == 400
    assert simulator.code("cuStreamDestroy_v2", stream) == 400
    assert simulator.counters().violations == 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_kernels_are_numpys_arithmetic(simulator: Simulator, dtype: str) -> None:
    values = np.arange(17).astype(dtype)
    with simulator.array(values) as source, simulator.array(values) as target:
        simulator.scale_add(0, target.pointer, source.pointer, 17, dtype, 3, -2)
        simulator.add(0, target.pointer, source.pointer, 17, dtype)
        assert np.array_equal(target.numpy(), values * 3 - 2 + values)


def test_arrays_describe_themselves(simulator: Simulator, streams: list[int]) -> None:
    values = np.arange(6, dtype=np.int16).reshape(2, 3)
    with simulator.array(values, streams[0]) as array:
        interface = array.__cuda_array_interface__
        assert interface == {
            "shape": (2, 3),
            "typestr": "<i2",
            "data": (array.pointer, False),
            "strides": None,
            "version": 3,
            "stream": streams[0],
        }
        assert np.array_equal(array.numpy(), values)
    with simulator.array(np.empty((0, 3))) as empty:
        assert "stream" not in empty.__cuda_array_interface__
        assert empty.numpy().shape == (0, 3)
    assert DeviceArray(simulator, 16, 3, "f4", 0).__cuda_array_interface__["stream"] == 1


def test_the_real_names_lead_to_the_libraries(simulator: Simulator) -> None:
    again = ctypes.CDLL(str(FOLDER / "libcuda.so.1"))
    assert again.cuInit(0) == 0
    assert again.cuDeviceGetCount is not None
    counters = simulator.counters()
    words = (ctypes.c_uint64 * len(counters))()
    again.simcuda_get_counters(words)
    assert tuple(words) == counters


def test_several_processes_build_at_once(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\necho >>" + str(tmp_path / "calls") + "\n"
        'while [ "$1" != -o ]; do shift; done\nexec touch "$2"\n'
    )
    compiler.chmod(0o755)
    program = Path(__file__).with_name("simcuda_build.py")
    command = [sys.executable, str(program), str(tmp_path / "made")]
    env = os.environ | {"CXX": str(compiler)}
    runs = run_together([command] * 3, env, 120.0)
    assert [run.returncode for run in runs] == [0] * 3
    made = tmp_path / "made"
    assert {run.stdout for run in runs} == {f"{made}/libsimcuda.so\n{made}/libsimnccl.so\n"}
    assert (tmp_path / "calls").read_text().count("\n") == 2  # one for each library
