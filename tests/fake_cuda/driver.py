"""A CUDA driver for tests: the CUDA backend's own code, run where there is no GPU.

    driver = FakeDriver(devices=2, seed=0)
    with use_driver(driver):                            # "cuda:0" is a device of the fake driver
        a, b = driver.stream(), driver.stream()
        x = driver.array(np.ones(4, "f"))
        driver.launch(a, lambda x: np.multiply(x, 2, out=x), writes=[x])
        ...
        driver.synchronize()
    assert driver.races == 0

The driver is a shared library. It runs the package's own kernels on the host, on the streams
and events of a simulated machine, which runs work late and in any order that is allowed, and finds races as `fanin.sim`
does. It refuses what CUDA's driver refuses, with the same codes. One is in use at a time; a new one makes every handle
of the old one invalid.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import fanin
from fanin import _core, _kernels
from fanin._interop.protocols import NDArray
from kit.support import CSRC, build_c, compiler

__all__ = ["FakeDriver", "fake_library", "use_driver"]

HERE = Path(__file__).parent
TAG = 1 << 62
#: What the fake driver takes for kernels that it has itself: how a fatbin begins.
IMAGE = bytes.fromhex("50ed55ba")
#: What `FakeDriver.live` counts, in the library's order.
KINDS = ("contexts", "streams", "events", "modules", "functions", "objects", "memory", "pools", "graphs")
#: The core's element types, in its order (csrc/array/dtype.h).
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float32", "float64", "complex64", "complex128"),
)
LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@functools.cache
def fake_library() -> Path:
    """The fake driver's library, built of this folder and the core's lower rungs; kept until one of them changes."""
    if not compiler():
        pytest.skip("no C compiler: set CC")
    folders = [CSRC / "base", CSRC / "array", CSRC / "device", CSRC / "device/cpu", CSRC / "device/sim", HERE]
    sources = [path for folder in folders for path in sorted(folder.glob("*.c"))]
    link = ["-shared"] if sys.platform != "darwin" else ["-dynamiclib"]
    return build_c(sources, core=False, link=link)


class DriverError(RuntimeError):
    """A call that a test made of the fake driver was refused; `code` is CUDA's."""

    def __init__(self, call: str, code: int, message: str) -> None:
        super().__init__(f"{call} failed with {code}: {message}")
        self.code = code


class FakeDriver:
    """A driver of `devices` fake GPUs (at most 8); what it runs next is picked by `seed` and `schedule`, as by
    `fanin.sim.Machine`.

    `memory` is the size of each device's memory in bytes (default 1 GiB of addresses). ValueError for what is out of
    range.

    >>> from fake_cuda import FakeDriver, use_driver
    >>> import fanin
    >>> with use_driver(FakeDriver(devices=1)):
    ...     fanin.devices()
    ['cpu', 'cuda:0']
    """

    _newest: FakeDriver | None = None

    def __init__(
        self,
        devices: int = 2,
        seed: int = 0,
        *,
        schedule: str = "seeded",
        starve: int = 1,
        memory: int = 0,
        check: bool = True,
    ) -> None:
        from fanin.sim.machine import SCHEDULES  # here: a test without a driver needs no fanin.sim

        if not 0 <= devices <= 8 or schedule not in SCHEDULES:
            raise ValueError(
                f"FakeDriver: expected 0 to 8 devices and a schedule of {SCHEDULES}, got {devices}, {schedule!r}"
            )
        self.path = fake_library()
        _kernels.IMAGES[os.path.realpath(self.path)] = IMAGE
        FakeDriver._newest = self
        self.devices = devices
        self._lib = ctypes.CDLL(str(self.path))
        self._lib.fanFakeRace.restype = self._lib.fanFakeMessage.restype = ctypes.c_char_p
        for name in ("fanFakeCalls", "fanFakeRaces", "fanFakeMapped"):
            getattr(self._lib, name).restype = ctypes.c_uint64
        self._lib.fanFakeLive.restype = ctypes.c_int64
        self._kernels: dict[int, Callable[[], object]] = {}
        self._tokens = itertools.count(1)
        self._failed: list[BaseException] = []
        self._called = LAUNCHED(self._run)
        self._streams: list[int] = []
        self._mine: dict[int, weakref.ref[_core.Array]] = {}
        order = SCHEDULES.index(schedule)
        if self._lib.fanFakeReset(
            devices, ctypes.c_uint64(seed), order, ctypes.c_uint64(starve), ctypes.c_uint64(memory), int(check)
        ):
            raise MemoryError(f"the fake driver cannot be made: {self.message}")

    # Calls of tests to the driver itself

    def call(self, name: str, *args: object) -> None:
        """One of the driver's functions, in the context of device 0 unless one is current; DriverError if it is
        refused.
        """
        if FakeDriver._newest is not self:
            raise RuntimeError(
                "another FakeDriver was made since, and this one's handles are invalid: there is one at a time"
            )
        code = getattr(self._lib, name)(*args)
        if code:
            raise DriverError(name, code, self.message)

    @contextmanager
    def context(self, device: int = 0) -> Iterator[int]:
        """The primary context of a device, current on this thread inside the block."""
        it, was = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(it), device)
        self.call("cuCtxPushCurrent_v2", it)
        try:
            yield it.value or 0
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(was))
            self.call("cuDevicePrimaryCtxRelease_v2", device)

    def stream(self, device: int = 0, *, blocking: bool = False) -> fanin.Stream:
        """A new stream of a device, made by the driver and handed to fanin by its number."""
        made = ctypes.c_void_p()
        with self.context(device):
            self.call("cuStreamCreate", ctypes.byref(made), 0 if blocking else 1)
        self._streams.append(made.value or 0)
        return fanin.Stream(f"cuda:{device}", made.value or 0)

    def array(self, values: npt.ArrayLike, device: int = 0) -> _core.Array:
        """An array on a device with these values, there when the call returns."""
        return self._own(_core.device_array(f"cuda:{device}", np.asarray(values), False))

    def _own(self, a: _core.Array) -> _core.Array:
        key, mine = id(a), self._mine
        mine[key] = weakref.ref(a, lambda _: mine.pop(key, None))
        return a

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64, device: int = 0) -> _core.Array:
        """An array on a device with the bytes that are there."""
        return self._own(_core.device_array(f"cuda:{device}", np.empty(shape, dtype), True))

    def launch(
        self,
        stream: fanin.Stream,
        fn: Callable[..., object],
        reads: Sequence[_core.Array] = (),
        writes: Sequence[_core.Array] = (),
        name: str = "kernel",
    ) -> None:
        """Queue a Python function as a kernel: it gets NumPy views of `reads` and `writes` when the machine runs it.

        Arrays that `array` and `empty` made are marked as used on the stream; what the buffer made is marked by its
        rules.
        """
        arrays = [*reads, *writes]
        token = next(self._tokens)
        views = [(a.address & ~TAG, a.dtype, a.shape, a.strides) for a in arrays]
        self._kernels[token] = lambda: fn(*(_view(*v) for v in views))
        for a in arrays:
            if id(a) in self._mine:
                a.record_stream(stream)
        with self.context(int(stream.device.partition(":")[2])):
            self.call(
                "fanFakeLaunch", ctypes.c_void_p(stream.handle), name.encode(), self._called, ctypes.c_int64(token),
                *_geometry(reads), *_geometry(writes),
            )  # fmt: skip

    def _run(self, token: int) -> None:
        try:
            self._kernels[token]()
        except BaseException as e:
            self._failed.append(e)

    def synchronize(self) -> None:
        """Run all queued work, and raise a kernel's exception."""
        self.call("fanFakeSynchronize")
        if self._failed:
            raise self._failed.pop(0)

    def step(self) -> None:
        """Run one piece of what is queued, if any of it may run."""
        self.call("fanFakeStep")

    # Capture, as a caller of the driver does it

    def begin_capture(self, stream: fanin.Stream, mode: str = "global") -> None:
        """Capture what is queued on a stream from now on; `mode` is "global", "thread-local" or "relaxed"."""
        number = ("global", "thread-local", "relaxed").index(mode)
        with self.context(int(stream.device.partition(":")[2])):
            self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.handle), number)

    def end_capture(self, stream: fanin.Stream) -> int:
        """The graph of what was captured."""
        graph = ctypes.c_void_p()
        with self.context(int(stream.device.partition(":")[2])):
            self.call("cuStreamEndCapture", ctypes.c_void_p(stream.handle), ctypes.byref(graph))
        return graph.value or 0

    def launch_graph(self, graph: int, stream: fanin.Stream) -> None:
        """Queue a graph on a stream."""
        with self.context(int(stream.device.partition(":")[2])):
            self.call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream.handle))

    def destroy_graph(self, graph: int) -> None:
        """Destroy a graph."""
        self.call("cuGraphDestroy", ctypes.c_void_p(graph))

    # Faults and figures

    def fail(self, at: int, code: int, *, call: str = "", sticky: bool = False) -> None:
        """The call number `at` from now (0: the next; -1: none), among those named `call` ("EventRecord") or all, fails
        with `code`, once; or, sticky, so do all that follow in the same context.
        """
        self._lib.fanFakeFail(call.encode(), ctypes.c_int64(at), code, int(sticky))

    def hide(self, *names: str) -> None:
        """Functions ("MemAllocAsync") that this driver has not. Before it is opened."""
        for place, name in enumerate(names):
            self._lib.fanFakeHide(place, name.encode())

    def set(
        self, *, version: int = 12040, pools: bool = True, coherent: bool = False, compute: tuple[int, int] = (7, 5)
    ) -> None:
        """The driver's version, whether its devices have memory pools, whether they read the host's memory (then a copy
        from there may read it after the call has returned), and their compute capability. Before it is opened.
        """
        self._lib.fanFakeSet(version, int(pools), int(coherent), 0, 10 * compute[0] + compute[1])

    def calls(self, name: str = "") -> int:
        """How often a function ("EventRecord") was called, or a kernel of fanin's ("fan_any") launched; all functions
        without a name.
        """
        return int(self._lib.fanFakeCalls(name.encode()))

    def live(self, kind: str = "memory") -> int:
        """How many contexts are retained, or how many objects of a kind (KINDS) were made and not freed."""
        return int(self._lib.fanFakeLive(KINDS.index(kind)))

    @property
    def mapped(self) -> int:
        """How often a pool had to get memory from the system."""
        return int(self._lib.fanFakeMapped())

    @property
    def depth(self) -> int:
        """Contexts on this thread's stack."""
        return int(self._lib.fanFakeDepth())

    @property
    def capture_mode(self) -> int:
        """This thread's own mode for unsafe calls beside a capture: 0 global, as it should be between calls."""
        return int(self._lib.fanFakeMode())

    @property
    def races(self) -> int:
        """Races so far."""
        return int(self._lib.fanFakeRaces())

    @property
    def race(self) -> str:
        """The first race in words; "" where there was none."""
        return str(self._lib.fanFakeRace().decode())

    @property
    def message(self) -> str:
        """The machine's last error message."""
        return str(self._lib.fanFakeMessage().decode())

    def leave_out(self, *names: str) -> None:
        """Leave waits, records and marks out on this driver's devices, as `Machine.leave_out`."""
        _core.cuda_leave_out(*names)


def _view(address: int, dtype: np.dtype[np.generic], shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray:
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    if 0 in shape:
        return np.empty(shape, dtype)
    memory = np.frombuffer(memoryview((ctypes.c_char * (high - low)).from_address(address + low)), np.uint8)
    return np.ndarray(shape, dtype, memory, -low, strides)


def _geometry(arrays: Sequence[_core.Array]) -> tuple[object, int]:
    words: list[int] = []
    for a in arrays:
        words += [a.address, DTYPES.index(a.dtype.name), a.ndim, *a.shape, *a.strides]
    return (ctypes.c_int64 * max(1, len(words)))(*words), len(arrays)


_used: list[str | None] = []


@contextmanager
def use_driver(driver: FakeDriver | str | Path | None) -> Iterator[FakeDriver | None]:
    """Use a CUDA driver inside the block: a FakeDriver, the path of a library, or None for the system's.

    Objects made with another driver stay with it. The driver is opened at the first use of one of its devices.

    >>> from fake_cuda import FakeDriver, use_driver
    >>> import fanin
    >>> with use_driver(FakeDriver(devices=1)) as driver:
    ...     fanin.Stream("cuda:0", 1)
    Stream("cuda:0", 1)
    """
    path = None if driver is None else str(driver.path if isinstance(driver, FakeDriver) else driver)
    _core.cuda_use(path)
    _used.append(path)
    try:
        yield driver if isinstance(driver, FakeDriver) else None
    finally:
        _used.pop()
        _core.cuda_use(_used[-1] if _used else None)
