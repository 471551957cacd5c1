"""One world for one suite: the simulated machine ("sim"), the CUDA backend on the fake driver ("fake"), or on a GPU
("gpu"), with one interface; for graph trees the CPU ("cpu"), which has no streams.

    with world("sim") as w:
        s, x = w.stream(), w.array(np.zeros(4))
        w.launch(s, lambda v: v.fill(1), writes=[x])

At the end of the block everything has run, and the world checks for every test: nothing raced, no needed wait was
omitted, no device has an error, options are restored, and nothing leaked: no memory, event or stream, on the device and
in the core. A test that plants a race calls `w.races_are_planted()`; then there must be one.

A world has mainly streams, arrays and launches. It also has direct calls of the driver (`record`, `wait`, `unsafe`,
..), which no rule of fanin orders. Calls that only one kind has are methods of `w.machine` or `w.driver`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from fake_cuda.driver import DriverError
from fanin import _core
from fanin.sim import Machine
from kit import hooks

#: Spins until so many nanoseconds have passed on the device's clock.
SPIN = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 wanted)
{
    .reg .u64 %t<5>;
    .reg .pred %more;
    ld.param.u64 %t1, [wanted];
    mov.u64 %t2, %globaltimer;
again:
    mov.u64 %t3, %globaltimer;
    sub.u64 %t4, %t3, %t2;
    setp.lt.u64 %more, %t4, %t1;
    @%more bra again;
    ret;
}
"""

#: What a driver counts, and a test may not leak.
COUNTED = ("contexts", "streams", "events", "modules", "memory", "objects", "graphs")


def world(kind: str, devices: int = 2, seed: int = 0, **options: Any) -> World:
    """A world of this kind; `options` are the schedule's and the memory's, as of `fanin.sim.Machine`."""
    return {"sim": Sim, "fake": Fake, "gpu": Gpu, "cpu": Cpu}[kind](devices, seed, **options)


class World:
    """The interface that all kinds share; see the head of this file."""

    kind = ""
    prefix = "cuda"
    real = False
    on: Any  # a Machine, a FakeDriver, or the GPU's driver

    def __init__(self, devices: int, seed: int, **options: Any) -> None:
        self._how = (devices, seed, options)
        self._planted = self._lost = False
        self._forgiven: set[str] = set()
        self.failed = False  # set by the test: leaks are not checked
        self.keep = SimpleNamespace()  # references that a test keeps; dropped at the end

    # The block

    def __enter__(self) -> Self:
        self._blocks, self._options = blocks(), _core.get_options()
        devices, seed, options = self._how
        self.open(devices, seed, options)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        bad = kind is not None or self.failed
        wrong: list[str] = []
        try:
            if not bad:
                wrong += self.run_out()
        finally:
            self.keep = SimpleNamespace()
            self.close(bad)
            self.on = None
        if not bad:
            wrong += self.left()
            assert not wrong, "; ".join(wrong)

    def run_out(self) -> list[str]:
        """All that is queued runs; what was wrong with it."""
        wrong = []
        try:
            self.synchronize()
        except (DriverError, fanin.DeviceError) as e:
            if not (self._lost or self._planted):
                wrong.append(f"the device is in an error: {e}")
        if self._planted and not self.races:
            wrong.append("no race was found, and one was planted")
        if self.races and not self._planted:
            wrong.append(f"{self.races} races: {self.race}")
        return wrong

    def left(self) -> list[str]:
        """What leaked, once the world has ended."""
        wrong = self.uneven()
        if wrong or blocks() > self._blocks:
            gc.collect()  # objects in a cycle are no leak
            wrong = self.uneven()
            if (n := blocks() - self._blocks) > 0:
                wrong.append(f"{n} blocks of the core left behind: {alive()}")
        if (now := _core.get_options()) != self._options:
            wrong.append(f"options were {self._options} and are {now}")
        return wrong

    def uneven(self) -> list[str]:
        return [f"{n} {what} left behind" for what, n in self.counts().items() if n and what not in self._forgiven]

    def races_are_planted(self) -> None:
        """This test plants a race: at the end there must be one."""
        self._planted = True

    def device_is_lost(self) -> None:
        """This test plants an error that stays: at the end a device must be in it, and what is there stays too."""
        self._lost = True

    def judges_itself(self, why: str) -> None:
        """This test plants a fault that may show anywhere, and checks its effect itself: the world checks nothing."""
        assert why
        self.failed = True

    def forgive(self, *counts: str) -> None:
        """This test lets the very call fail that gives these back: some may stay."""
        assert set(counts) <= set(COUNTED), counts
        self._forgiven |= set(counts)

    # What each kind does by itself

    def open(self, devices: int, seed: int, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def close(self, bad: bool) -> None:
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """What the device counts, by name."""
        return {}

    @property
    def races(self) -> int:
        return int(self.on.races)

    @property
    def race(self) -> str:
        """The first race in words, where the kind keeps them."""
        return getattr(self.on, "race", "")

    # Streams, memory, work

    def place(self, device: int = 0) -> str:
        """A device's name."""
        return f"{self.prefix}:{device}"

    def stream(self, device: int = 0, *, blocking: bool = False) -> fanin.Stream:
        return self.on.stream(device, blocking=blocking)  # type: ignore[no-any-return]

    def legacy(self, device: int = 0) -> fanin.Stream:
        return fanin.Stream(self.place(device), 1)

    def on_this_thread(self) -> contextlib.AbstractContextManager[Any]:
        """What a thread of a test's enters that the world did not begin on."""
        return contextlib.nullcontext()

    def current_stream(self, device: int = 0) -> fanin.Stream:
        return fanin.current_stream(self.place(device))

    def array(self, values: Any, device: int = 0) -> Any:
        return self.on.array(values, device)

    def empty(self, shape: Any, dtype: Any = np.float64, device: int = 0) -> Any:
        return self.on.empty(shape, dtype, device)

    def launch(self, stream: Any, fn: Callable[..., Any], **how: Any) -> None:
        self.on.launch(stream, fn, **how)

    def fill(self, stream: Any, x: Any, value: float) -> None:
        self.launch(stream, lambda v: v.fill(value), writes=[x], name="fill")

    def delay(self, stream: Any, us: float = 5000) -> None:
        """Holds a stream up: on a GPU by a kernel that spins, elsewhere by work that may run as late as the schedule
        likes.
        """
        self.launch(stream, lambda: None, name="delay")

    def synchronize(self) -> None:
        self.on.synchronize()

    def step(self) -> Any:
        return self.on.step()

    def leave_out(self, *words: str) -> None:
        self.on.leave_out(*words)

    # Capture

    def begin_capture(self, stream: Any, mode: str = "global") -> None:
        self.on.begin_capture(stream, mode)

    def end_capture(self, stream: Any) -> Any:
        return self.on.end_capture(stream)

    def launch_graph(self, graph: Any, stream: Any) -> None:
        self.on.launch_graph(graph, stream)

    def destroy_graph(self, graph: Any) -> None:
        """Where graphs are numbers; elsewhere one goes with its last name."""


class Sim(World):
    """The simulated machine."""

    kind, prefix = "sim", "sim"

    @property
    def machine(self) -> Machine:
        return self.on  # type: ignore[no-any-return]

    def on_this_thread(self) -> contextlib.AbstractContextManager[Any]:
        return self.machine

    def open(self, devices: int, seed: int, options: dict[str, Any]) -> None:
        self.on = Machine(devices, seed, **options)
        self.on.__enter__()

    def run_out(self) -> list[str]:
        wrong = super().run_out()
        if unsound := self.unsound():
            wrong.append(f"{unsound} waits were left out whose order did not hold")
        return wrong

    def unsound(self) -> int:
        return hooks.unsound(self.machine)

    def close(self, bad: bool) -> None:
        self.on.__exit__(AssertionError if bad else None, None, None)

    def launches(self, call: Callable[[], Any]) -> int:
        """How many kernels of ours a call queues."""
        with fanin.trace() as t:
            call()
        return sum(line.kind == "kernel" for line in t.lines)

    # A caller of the driver

    def event(self) -> Any:
        return self.on.event()

    def record(self, e: Any, s: Any) -> None:
        e.record(s)

    def wait(self, s: Any, e: Any) -> None:
        s.wait(e)

    def sync(self, s: Any) -> None:
        s.synchronize()

    def query(self, e: Any) -> None:
        e.query()

    def sync_event(self, e: Any) -> None:
        e.synchronize()

    def device_sync(self) -> None:
        self.on.synchronize()

    def unsafe(self) -> None:
        """A call that no capture allows."""
        hooks.unsafe(self.machine)

    def state(self, s: Any) -> int:
        """0: not captured; 1: captured; 2: in a capture that is broken."""
        return hooks.capture_state(s)


class Cpu(World):
    """The CPU: no streams, and work is done at once, or recorded in a function of a graph tree."""

    kind, prefix, races = "cpu", "cpu", 0

    def open(self, devices: int, seed: int, options: dict[str, Any]) -> None:
        self.on = None

    def close(self, bad: bool) -> None:
        pass

    def place(self, device: int = 0) -> str:
        return "cpu"

    def stream(self, device: int = 0, *, blocking: bool = False) -> Any:
        return None

    def current_stream(self, device: int = 0) -> Any:
        return None

    def array(self, values: Any, device: int = 0) -> Any:
        values = np.asarray(values)
        made = _core.cpu_empty(values.shape, values.dtype)
        _core.cpu_launch(lambda x, out: np.copyto(out, x), "copy", (values,), (made,))
        return made

    def empty(self, shape: Any, dtype: Any = np.float64, device: int = 0) -> Any:
        return _core.cpu_empty(tuple(np.atleast_1d(shape)) if np.ndim(shape) == 0 else tuple(shape), np.dtype(dtype))

    def launch(self, stream: Any, fn: Callable[..., Any], **how: Any) -> None:
        _core.cpu_launch(fn, how.get("name") or fn.__name__, tuple(how.get("reads", ())), tuple(how.get("writes", ())))

    def synchronize(self) -> None:
        pass


class Raw(World):
    """A driver's own functions: what the backend refuses beforehand reaches the driver here."""

    @property
    def driver(self) -> Any:
        return self.on

    def call(self, name: str, *args: Any) -> None:
        with self.on.context():
            self.on.call(name, *args)

    def read(self, stream: Any, x: Any) -> Any:
        """x's bytes as they are on that stream, by the driver's own copy."""
        seen = np.empty(x.shape, x.dtype)
        at = seen.ctypes.data_as(ctypes.c_void_p)
        size = ctypes.c_size_t(seen.nbytes)
        self.call("cuMemcpyDtoHAsync_v2", at, ctypes.c_uint64(x.address), size, ctypes.c_void_p(stream.handle))
        self.sync(stream)
        return seen

    def destroy_graph(self, graph: Any) -> None:
        self.on.destroy_graph(graph)

    def event(self) -> Any:
        made = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(made), 2)
        self._events.append(made)
        return made

    def record(self, e: Any, s: Any) -> None:
        self.call("cuEventRecord", e, ctypes.c_void_p(s.handle))

    def wait(self, s: Any, e: Any) -> None:
        self.call("cuStreamWaitEvent", ctypes.c_void_p(s.handle), e, 0)

    def sync(self, s: Any) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(s.handle))

    def query(self, e: Any) -> None:
        self.call("cuEventQuery", e)

    def sync_event(self, e: Any) -> None:
        self.call("cuEventSynchronize", e)

    def device_sync(self) -> None:
        self.call("cuCtxSynchronize")

    def unsafe(self) -> None:
        """A call that the mode of a capture may allow. To free the memory waits for the device: none allows that."""
        out = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(64))
        self.on.at_end.append(lambda: self.call("cuMemFree_v2", out))

    def state(self, s: Any) -> int:
        status = ctypes.c_int()
        self.call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(s.handle), ctypes.byref(status), None, None, None, None)
        return status.value

    def launches(self, call: Callable[[], Any]) -> int:
        """How many kernels a call queues."""
        before = self.on.calls("LaunchKernel")
        call()
        return int(self.on.calls("LaunchKernel")) - before


class Watched(FakeDriver):
    """A fake driver with a list of its graphs, its world, and the function to call when it ends."""

    world: Fake

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.graphs: list[int] = []
        self.at_end: list[Callable[[], None]] = []

    def end_capture(self, stream: Any) -> int:
        self.graphs.append(super().end_capture(stream))
        return self.graphs[-1]

    def destroy_graph(self, graph: int) -> None:
        super().destroy_graph(graph)
        self.graphs.remove(graph)


class Fake(Raw):
    """The CUDA backend on the fake driver."""

    kind = "fake"

    def open(self, devices: int, seed: int, options: dict[str, Any]) -> None:
        gc.collect(0)
        self.on = self._counts = Watched(devices, seed, **options)
        self.on.world = self
        self._events: list[Any] = []
        self._use = use_driver(self.on)
        self._use.__enter__()

    def run_out(self) -> list[str]:
        self.on.fail(-1, 0)
        wrong = super().run_out()
        lost = 0
        for device in range(self.on.devices if self.on.live("contexts") else 0):
            with self.on.context(device):
                try:
                    self.on.call("cuCtxSynchronize")
                except DriverError as e:
                    lost += 1
                    if not self._lost:
                        wrong.append(f"device {device} is in an error: {e}")
        if self._lost and not lost:
            wrong.append("no device was lost, and one was to be")
        self._lost |= lost > 0
        return wrong

    def close(self, bad: bool) -> None:
        try:
            if not bad and not self._lost:
                self.give_back()
        finally:
            self._use.__exit__(None, None, None)

    def give_back(self) -> None:
        """What a test made of the driver itself."""
        for graph in list(self.on.graphs):
            self.call("cuGraphDestroy", ctypes.c_void_p(graph))
        self.wait_for_all()
        for call in self.on.at_end:
            call()
        for e in self._events:
            self.call("cuEventDestroy_v2", e)
        for s in self.on._streams:
            try:
                self.call("cuStreamDestroy_v2", ctypes.c_void_p(s))
            except DriverError:
                pass  # the test has done so

    def wait_for_all(self) -> None:
        """Collect objects in cycles; dropped ones are freed by the next call of their device."""
        for collects in (False, True, False):  # a collection takes long in a process that has run thousands of tests
            if not (self.on.live("contexts") and any(self.on.live(what) for what in ("memory", "events", "objects"))):
                return
            if collects:
                gc.collect()
            for device in range(self.on.devices):
                self.on.array(np.zeros(1), device)

    def counts(self) -> dict[str, int]:
        driver = self._counts
        found = {} if self._lost else {what: driver.live(what) for what in COUNTED}
        return {**found, "contexts on the stack": driver.depth, "capture mode": driver.capture_mode}


class Driver(FakeDriver):
    """A GPU's driver. It has the methods of the fake one, except those for faults, counts and
    races.
    """

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._streams: list[int] = []
        self._mine: dict[int, Any] = {}
        self.at_end: list[Callable[[], None]] = []
        self._runs: dict[int, int] = {}
        context, module, self._spin = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        # for good: with its last hold all that is in it goes
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        with self.context():
            self.call("cuModuleLoadData", ctypes.byref(module), SPIN)
            self.call("cuModuleGetFunction", ctypes.byref(self._spin), module, b"spin")

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"").decode())

    def synchronize(self) -> None:
        with self.context():
            self.call("cuCtxSynchronize")

    def launch_graph(self, graph: int, stream: Any) -> None:
        with self.context():
            if graph not in self._runs:
                made = ctypes.c_void_p()
                self.call(
                    "cuGraphInstantiateWithFlags", ctypes.byref(made), ctypes.c_void_p(graph), ctypes.c_ulonglong(0)
                )
                self._runs[graph] = made.value or 0
            self.call("cuGraphLaunch", ctypes.c_void_p(self._runs[graph]), ctypes.c_void_p(stream.handle))

    def destroy_graph(self, graph: int) -> None:
        with self.context():
            if graph in self._runs:
                self.call("cuGraphExecDestroy", ctypes.c_void_p(self._runs.pop(graph)))
            self.call("cuGraphDestroy", ctypes.c_void_p(graph))

    @property
    def depth(self) -> int:
        now = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(now))
        return int(bool(now.value))

    @property
    def races(self) -> int:
        return 0

    @property
    def race(self) -> str:
        return ""


class Gpu(Raw):
    """A GPU, by its own driver. A race shows in wrong numbers there, if at all."""

    kind, real = "gpu", True

    def open(self, devices: int, seed: int, options: dict[str, Any]) -> None:
        gc.collect()
        self._use = use_driver(None)
        self._use.__enter__()
        self._events: list[Any] = []
        try:
            found = _core.cuda_info()
            if "why" in found or not found["devices"]:
                pytest.skip(f"no GPU: {found.get('why', 'the driver has no device')}")
            self.on = Driver()
        except BaseException:
            self._use.__exit__(None, None, None)
            raise

    def run_out(self) -> list[str]:
        self._planted = False  # none is counted
        return super().run_out()

    def close(self, bad: bool) -> None:
        gc.collect()
        try:
            for call in self.on.at_end:
                call()
            for e in self._events:
                self.call("cuEventDestroy_v2", e)
            for s in self.on._streams:
                self.call("cuStreamDestroy_v2", ctypes.c_void_p(s))
        finally:
            self._depth = self.on.depth
            self._use.__exit__(None, None, None)

    def counts(self) -> dict[str, int]:
        return {"contexts on the stack": self._depth}

    def delay(self, stream: Any, us: float = 5000) -> None:
        wanted = ctypes.c_uint64(int(us * 1000))
        given = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(wanted), ctypes.c_void_p))
        self.call("cuLaunchKernel", self.on._spin, 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream.handle), given, None)

    def fill(self, stream: Any, x: Any, value: float) -> None:
        assert x.dtype == np.float32 and x.strides[-1] == 4
        x.record_stream(stream)
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        size, at = ctypes.c_size_t(x.size), ctypes.c_uint64(x.address)
        self.call("cuMemsetD32Async", at, ctypes.c_uint(bits), size, ctypes.c_void_p(stream.handle))


def blocks() -> int:
    """Blocks of memory that the core holds, except those that it pools; a release does not count them."""
    fanin.trim()
    return hooks.blocks()


def alive() -> str:
    """Which objects of the package there are, for a message."""
    found: dict[str, int] = {}
    for x in gc.get_objects():
        kind = type(x)
        if str(kind.__module__).partition(".")[0] == "fanin":
            found[kind.__qualname__] = found.get(kind.__qualname__, 0) + 1
    return ", ".join(f"{n} {name}" for name, n in sorted(found.items())) or "no object that Python knows"
