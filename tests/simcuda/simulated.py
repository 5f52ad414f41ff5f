"""Simulated GPUs for tests: memory, streams, events and kernels of libsimcuda.so, by ctypes.

Owns the calls and their types. A Simulator keeps the primary context of one device and makes it
current in the thread that asks; the product under test makes its own calls beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Counters", "CudaError", "DeviceArray", "Simulator"]

KERNEL_DTYPES = ("float32", "float64", "int32", "int64")
GEQ, EQ = 0, 1  # flags of wait_value

_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [c_void_p],
    "cuDeviceGetCount": [c_void_p],
    "cuDeviceGetAttribute": [c_void_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxGetCurrent": [c_void_p],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuDeviceGetUuid_v2": [c_void_p, c_int],
    "cuMemAlloc_v2": [c_void_p, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostGetDevicePointer_v2": [c_void_p, c_void_p, c_uint],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemsetD8Async": [c_uint64, c_ubyte, c_size_t, c_void_p],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuStreamCreate": [c_void_p, c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamQuery": [c_void_p],
    "cuStreamIsCapturing": [c_void_p, c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuStreamWriteValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint],
    "cuStreamWaitValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint],
    "cuLaunchHostFunc": [c_void_p, c_void_p, c_void_p],
    "cuEventCreate": [c_void_p, c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventDestroy_v2": [c_void_p],
    "cuGetErrorName": [c_int, c_void_p],
    "simcuda_set_capturing": [c_void_p, c_int],
    "simcuda_launch_scale_add": [c_void_p, c_uint64, c_uint64, c_size_t, c_int, c_double, c_double],
    "simcuda_launch_add": [c_void_p, c_uint64, c_uint64, c_size_t, c_int],
}
_CONTROLS: dict[str, list[Any]] = {
    "simcuda_get_counters": [c_void_p],
    "simcuda_reset_counters": [],
    "simcuda_fail": [ctypes.c_char_p, c_int, c_int],
    "simcuda_leave_out": [ctypes.c_char_p, c_int, c_int],
    "simcuda_recover": [],
    "simcuda_set_delays": [c_uint64, c_uint32],
    "simcuda_set_attribute": [c_int, c_int],
}


class Counters(NamedTuple):
    """What the process did so far; see driver/controls.hpp."""

    d2h_bytes: int
    h2d_bytes: int
    d2d_bytes: int
    pageable_copies: int
    host_synchronizations: int
    device_allocations_live: int
    registered_bytes_live: int
    streams_live: int
    events_live: int
    violations: int


class CudaError(RuntimeError):
    """A call of the driver failed. `code`: its CUresult."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.code = code


class Simulator:
    """One simulated device, in this process.

    `libraries`: what build() gave. A stream of 0 is the default stream. All calls may raise
    CudaError. Not thread-safe in itself; call use() in each further thread.
    """

    def __init__(self, libraries: tuple[Path, Path], device: int = 0) -> None:
        self.cuda = ctypes.CDLL(str(libraries[0]))
        self.nccl = ctypes.CDLL(str(libraries[1]))
        for name, types in (_SIGNATURES | _CONTROLS).items():
            function = getattr(self.cuda, name)
            function.argtypes = types
            function.restype = None if name in _CONTROLS else c_int
        self.cuda.simcuda_last_violation.restype = ctypes.c_char_p
        self.device = device
        self.call("cuInit", 0)
        self.context = self._made("cuDevicePrimaryCtxRetain", device)
        self.use()

    def call(self, function: str, *arguments: Any) -> None:
        """A call of the driver by name; raises CudaError unless it gives CUDA_SUCCESS."""
        code = self.code(function, *arguments)
        if code != 0:
            raise CudaError(function, code, self.error_name(code))

    def code(self, function: str, *arguments: Any) -> int:
        """The CUresult of a call."""
        assert function in _SIGNATURES, f"{function}: its types are not known here"
        return int(getattr(self.cuda, function)(*arguments))

    def error_name(self, code: int) -> str:
        name = ctypes.c_char_p()
        self.cuda.cuGetErrorName(code, ctypes.byref(name))
        return "unknown" if name.value is None else name.value.decode()

    def use(self) -> None:
        """Makes the device's context current in this thread."""
        self.call("cuCtxSetCurrent", self.context)

    def close(self) -> None:
        """Gives the context back. Does not free what is left."""
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)

    def uuid(self) -> bytes:
        answer = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid_v2", answer, self.device)
        return answer.raw

    # Memory

    def alloc(self, nbytes: int) -> int:
        """Device memory, full of junk; its address cannot be read or written by the host."""
        return self._made("cuMemAlloc_v2", nbytes)

    def free(self, pointer: int) -> None:
        """Waits for all work of the device."""
        self.call("cuMemFree_v2", pointer)

    def upload(self, pointer: int, array: npt.NDArray[Any]) -> None:
        """Copies to the device, after work of the default stream only, and waits."""
        source = np.ascontiguousarray(array)
        self.call("cuMemcpyHtoD_v2", pointer, source.ctypes.data, source.nbytes)

    def download(
        self, pointer: int, shape: int | tuple[int, ...], dtype: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        """Copies from the device, after work of the default stream only, and waits."""
        array = np.empty(shape, dtype)
        self.call("cuMemcpyDtoH_v2", array.ctypes.data, pointer, array.nbytes)
        return array

    def upload_async(self, pointer: int, array: npt.NDArray[Any], stream: int = 0) -> None:
        """Keep the array as it is until the stream is done, if its memory is registered."""
        assert array.flags.c_contiguous
        self.call("cuMemcpyHtoDAsync_v2", pointer, array.ctypes.data, array.nbytes, stream)

    def download_async(self, array: npt.NDArray[Any], pointer: int, stream: int = 0) -> None:
        """Into an array; waits if its memory is not registered."""
        assert array.flags.c_contiguous
        self.call("cuMemcpyDtoHAsync_v2", array.ctypes.data, pointer, array.nbytes, stream)

    def copy_async(self, to: int, source: int, nbytes: int, stream: int = 0) -> None:
        self.call("cuMemcpyDtoDAsync_v2", to, source, nbytes, stream)

    def register(self, array: npt.NDArray[Any]) -> None:
        """Makes host memory known to the device; undo it before the array is gone."""
        self.call("cuMemHostRegister_v2", array.ctypes.data, array.nbytes, 0)

    def unregister(self, array: npt.NDArray[Any]) -> None:
        self.call("cuMemHostUnregister", array.ctypes.data)

    @contextmanager
    def registered(self, array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        self.register(array)
        try:
            yield array
        finally:
            self.unregister(array)

    # Streams and events

    def stream(self) -> int:
        return self._made("cuStreamCreate", 1)

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Waits for a stream; None: for all of the device."""
        if stream is None:
            self.call("cuCtxSynchronize")
        else:
            self.call("cuStreamSynchronize", stream)

    def done(self, stream: int) -> bool:
        """Whether a stream has no work left."""
        return self._ready("cuStreamQuery", stream)

    def event(self) -> int:
        return self._made("cuEventCreate", 2)

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int = 0) -> None:
        self.call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Work that the stream gets from now on waits for the event's latest record."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_event(self, event: int) -> None:
        self.call("cuEventSynchronize", event)

    def reached(self, event: int) -> bool:
        return self._ready("cuEventQuery", event)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """A 32-bit word of device memory or of registered host memory."""
        self.call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def wait_value(self, stream: int, address: int, value: int, flags: int = GEQ) -> None:
        self.call("cuStreamWaitValue32_v2", stream, address, value, flags)

    def set_capturing(self, stream: int, status: int) -> None:
        """What cuStreamIsCapturing says; other calls on the stream are refused unless it is 0."""
        self.call("simcuda_set_capturing", stream, status)

    # Kernels

    def scale_add(
        self,
        stream: int,
        to: int,
        source: int,
        count: int,
        dtype: npt.DTypeLike,
        a: float,
        b: float = 0.0,
    ) -> None:
        """to[i] = a * source[i] + b, of float32, float64, int32 or int64."""
        kind = KERNEL_DTYPES.index(np.dtype(dtype).name)
        self.call("simcuda_launch_scale_add", stream, to, source, count, kind, a, b)

    def add(self, stream: int, to: int, source: int, count: int, dtype: npt.DTypeLike) -> None:
        """to[i] += source[i]"""
        kind = KERNEL_DTYPES.index(np.dtype(dtype).name)
        self.call("simcuda_launch_add", stream, to, source, count, kind)

    # What only a simulator can do

    def counters(self) -> Counters:
        words = (c_uint64 * len(Counters._fields))()
        self.cuda.simcuda_get_counters(words)
        return Counters(*words)

    def reset_counters(self) -> None:
        """All but those of live things."""
        self.cuda.simcuda_reset_counters()

    def last_violation(self) -> str:
        text: bytes = self.cuda.simcuda_last_violation()
        return text.decode()

    def fail(self, function: str, nth: int, code: int) -> None:
        """The nth call of a function from now (1: the next) gives the code; also of NCCL's."""
        self.cuda.simcuda_fail(function.encode(), nth, code)

    def leave_out(self, function: str, every: int, at: int) -> None:
        """Have the call at `at` of every so many do as if the program had left it out: see
        driver/controls.hpp.
        """
        self.cuda.simcuda_leave_out(function.encode(), every, at)

    def recover(self) -> None:
        """Forgets errors that stick and failures that have not come."""
        self.cuda.simcuda_recover()

    def set_delays(self, seed: int, max_us: int) -> None:
        """Begins the random delays of all streams anew; 0: none."""
        self.cuda.simcuda_set_delays(seed, max_us)

    def set_attribute(self, attribute: int, value: int) -> None:
        """What cuDeviceGetAttribute says; 1 unless set."""
        self.cuda.simcuda_set_attribute(attribute, value)

    def array(self, values: npt.NDArray[Any], stream: int | None = None) -> DeviceArray:
        return DeviceArray.from_numpy(self, values, stream)

    def _made(self, function: str, *arguments: Any) -> int:
        """A pointer or handle that a call gives through its first argument."""
        answer = c_uint64()
        self.call(function, ctypes.byref(answer), *arguments)
        return answer.value

    def _ready(self, function: str, handle: int) -> bool:
        code = self.code(function, handle)
        if code not in (0, 600):
            raise CudaError(function, code, self.error_name(code))
        return code == 0


class DeviceArray:
    """An array in device memory, C-contiguous, that others see by __cuda_array_interface__.

    `stream`: the one that its values are made on, for the key of that name; None: no key, so its
    consumers need not wait. Does not own the memory unless it was made by from_numpy().
    """

    def __init__(
        self,
        simulator: Simulator,
        pointer: int,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike,
        stream: int | None = None,
    ) -> None:
        self.simulator = simulator
        self.pointer = pointer
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.stream = stream
        self._owned = False

    @classmethod
    def from_numpy(
        cls, simulator: Simulator, values: npt.NDArray[Any], stream: int | None = None
    ) -> DeviceArray:
        """A copy; free() gives its memory back. Empty arrays have the pointer 0."""
        pointer = simulator.alloc(values.nbytes) if values.nbytes else 0
        made = cls(simulator, pointer, values.shape, values.dtype, stream)
        made._owned = pointer != 0
        if pointer:
            simulator.upload(pointer, values)
        return made

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }
        if self.stream is not None:
            # The protocol forbids 0: the default stream is 1 there.
            interface["stream"] = self.stream or 1
        return interface

    def __array__(self, *_: object, **__: object) -> npt.NDArray[Any]:
        raise TypeError("no implicit copy to the host, as in CuPy: use numpy()")

    def __array_function__(self, function: Any, *_: object) -> Any:
        raise TypeError(f"{function.__name__}() of NumPy is not for arrays of a device")

    def numpy(self) -> npt.NDArray[Any]:
        """The values, once the array's stream, or the default one, is done."""
        if self.stream:
            self.simulator.synchronize(self.stream)
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        return self.simulator.download(self.pointer, self.shape, self.dtype)

    def free(self) -> None:
        """Gives the memory back if it is the array's own; the second time does nothing."""
        if self._owned:
            self._owned = False
            self.simulator.free(self.pointer)

    def __enter__(self) -> DeviceArray:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
