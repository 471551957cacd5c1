"""One device for two drivers: a GPU through its own driver, or the fake one, asked alike, so that one script runs on
both.

`delay` holds a stream up: on a GPU by a kernel that spins, on the fake driver by work that the schedule may run as late
as it likes.
"""

from __future__ import annotations

import ctypes
import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fanin import _core
from fanin.testing import FakeDriver, use_driver
from fanin.testing.driver import DriverError

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


class Fake(FakeDriver):
    """The fake driver."""

    real = False

    def delay(self, stream: Any, us: float = 0) -> None:
        self.launch(stream, lambda: None, name="delay")

    def fill(self, stream: Any, x: Any, value: float) -> None:
        self.launch(stream, lambda v: v.fill(value), writes=[x], name="fill")

    def read(self, stream: Any, x: Any) -> Any:
        """x's bytes as they are on that stream, by the driver's own copy: no rule of ours orders it."""
        seen = np.empty(x.shape, x.dtype)
        with self.context():
            self.call(
                "cuMemcpyDtoHAsync_v2",
                seen.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_uint64(x.address),
                ctypes.c_size_t(seen.nbytes),
                ctypes.c_void_p(stream.handle),
            )
            self.call("cuStreamSynchronize", ctypes.c_void_p(stream.handle))
        return seen


class Real(Fake):
    """A GPU's driver. What a test may ask of it is what it may ask of the fake one, but for faults, counts and
    races.
    """

    real = True

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._streams: list[int] = []
        self._mine: dict[int, Any] = {}
        self._runs: dict[int, int] = {}
        context, module, self._spin = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call(
            "cuDevicePrimaryCtxRetain", ctypes.byref(context), 0
        )  # for good: with its last hold all that is in it goes
        with self.context():
            self.call("cuModuleLoadData", ctypes.byref(module), SPIN)
            self.call("cuModuleGetFunction", ctypes.byref(self._spin), module, b"spin")

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"").decode())

    def delay(self, stream: Any, us: float = 5000) -> None:
        wanted = ctypes.c_uint64(int(us * 1000))
        given = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(wanted), ctypes.c_void_p))
        with self.context():
            self.call("cuLaunchKernel", self._spin, 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream.handle), given, None)

    def fill(self, stream: Any, x: Any, value: float) -> None:
        assert x.dtype == np.float32 and x.strides[-1] == 4
        x.used_on(stream)
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        with self.context():
            self.call(
                "cuMemsetD32Async",
                ctypes.c_uint64(x.address),
                ctypes.c_uint(bits),
                ctypes.c_size_t(x.size),
                ctypes.c_void_p(stream.handle),
            )

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

    def close(self) -> None:
        """Give back the streams that were made."""
        gc.collect()
        self.synchronize()
        with self.context():
            for one in self._streams:
                self.call("cuStreamDestroy_v2", ctypes.c_void_p(one))

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


@contextmanager
def device(which: str, seed: int) -> Iterator[Any]:
    """The fake driver ("fake") or the GPU's ("gpu"), in use inside the block."""
    gc.collect()
    if which == "gpu":
        with use_driver(None):
            made: Fake = real()
            yield made
            made.close()
        return
    made = Fake(1, seed=seed)
    with use_driver(made):
        yield made
        made.synchronize()


def real() -> Real:
    """The GPU's driver; skips the test that asks for it where there is none, and says why."""
    found = _core.cuda_info()
    if "why" in found or not found["devices"]:
        pytest.skip(f"no GPU: {found.get('why', 'the driver has no device')}")
    return Real()
