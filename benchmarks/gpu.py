"""Sums on a GPU beside torch's and the rate of a copy.

Without a GPU, or without torch for the peers, there is nothing to time, and a line is printed. "min" and "median" are
the host's clock, until the device has done the work; "device" is the time between two events of the driver's around it,
while the device is kept busy before, so that the host is ahead: by that the targets go. "host" is what the host pays to
queue work.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import fanin
from fanin import _core

from .common import size_text
from .timing import Result, Target, at_least, at_most, measure, peer

COPY, CHAIN, FOREACH, COMPILED, FUSED = (
    "a copy",
    "torch add_ chain",
    "torch._foreach_add_",
    "torch.compile of the sum",
    "cupy.fuse of the sum",
)
SUM = "fanin.add_n(out=)"


class Plain:
    """fanin's own arrays on "cuda:0", with no peer: for a machine without torch, and for tests on the fake driver."""

    torch: Any = None

    def array(self, elements: int, value: float) -> Any:
        return _core.device_array("cuda:0", np.full(elements, value, "f4"), False)

    def low(self, elements: int, value: float) -> Any:
        return _core.device_array("cuda:0", np.full(elements, value, "f2"), False)

    def numbers(self, x: Any) -> Any:
        return _core.device_array("cuda:0", x, False)

    def stream(self) -> Any:
        return fanin.current_stream("cuda:0")

    def synchronize(self) -> None:
        self.stream().synchronize()

    def copy(self, out: Any, x: Any) -> None:
        fanin.add_n([x], out=out)

    def handle(self) -> int:
        return int(self.stream().handle)


class Torch(Plain):
    """torch's tensors and its current stream."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def array(self, elements: int, value: float) -> Any:
        return self.torch.full((elements,), value, device="cuda")

    def low(self, elements: int, value: float) -> Any:
        return self.torch.full((elements,), value, device="cuda", dtype=self.torch.bfloat16)

    def numbers(self, x: Any) -> Any:
        return self.torch.from_numpy(x).cuda()

    def stream(self) -> Any:
        return self.torch.cuda.current_stream()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def copy(self, out: Any, x: Any) -> None:
        out.copy_(x)

    def handle(self) -> int:
        return int(self.stream().cuda_stream)


class Events:
    """Two events of the driver's on a stream of device 0, and the time between them, by calls of the driver alone."""

    def __init__(self, stream: int) -> None:
        self._lib = ctypes.CDLL(_core.cuda_info()["path"])
        self._stream = ctypes.c_void_p(stream)
        self._context = ctypes.c_void_p()
        self._pair = [ctypes.c_void_p(), ctypes.c_void_p()]
        self._outside("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        for e in self._pair:
            self._call("cuEventCreate", ctypes.byref(e), 0)

    def _outside(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            raise RuntimeError(f"{name} failed: CUDA's code {code}")

    def _call(self, name: str, *args: Any) -> None:
        old = ctypes.c_void_p()
        self._outside("cuCtxPushCurrent_v2", self._context)
        try:
            self._outside(name, *args)
        finally:
            self._outside("cuCtxPopCurrent_v2", ctypes.byref(old))

    def record(self, which: int) -> None:
        self._call("cuEventRecord", self._pair[which], self._stream)

    def nanoseconds(self) -> float:
        """From the first to the second, which is waited for."""
        found = ctypes.c_float()
        self._call("cuEventSynchronize", self._pair[1])
        self._call("cuEventElapsedTime", ctypes.byref(found), *self._pair)
        return found.value * 1e6

    def close(self) -> None:
        for e in self._pair:
            self._call("cuEventDestroy_v2", e)
        self._outside("cuDevicePrimaryCtxRelease_v2", 0)


def on_device(
    at: Plain, work: Mapping[str, Callable[[], object] | None], rounds: int, after: Callable[[], object]
) -> dict[str, list[float]]:
    """Nanoseconds that the device takes for each: rounds in turns, while a copy keeps it busy until all is queued."""
    busy, events = [at.array(1 << 18 if rounds < 5 else 1 << 27, 0) for _ in range(2)], Events(at.handle())
    present = {name: one for name, one in work.items() if one is not None}
    times: dict[str, list[float]] = {name: [] for name in present}
    try:
        for _ in range(rounds + 1):
            for name, one in present.items():
                at.copy(*busy)
                events.record(0)
                one()
                events.record(1)
                times[name].append(events.nanoseconds())
                after()
    finally:
        events.close()
    return {name: all_[1:] for name, all_ in times.items()}  # the first time was to warm up


def timed(
    at: Plain,
    title: str,
    work: Mapping[str, Callable[[], object] | None],
    base: str,
    quick: bool,
    targets: Sequence[Target] = (),
    after: Callable[[], object] = lambda: None,
    **how: Any,
) -> Result:
    """Work that is queued, by the host's clock and by the device's, which decides."""

    def ended(one: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            one()
            at.synchronize()

        return run

    rounds = 2 if quick else 25
    host = {name: one and ended(one) for name, one in work.items()}
    result = measure(title, host, base=base, unit="us", after=after, rounds=rounds, longest=5, **how)
    times = on_device(at, work, rounds, after)
    for name, all_ in times.items():
        result["rows"][name] |= {"device": statistics.median(all_) / 1e3, "device_min": min(all_) / 1e3}
    return {**result, "targets": [t.outcome(times) for t in targets], "targets_by": "device"}


def place() -> Plain | None:
    """Where to measure; None: there is no GPU."""
    if not _core.cuda_info().get("devices"):
        return None
    torch = peer("torch")
    return Torch(torch) if torch is not None and torch.cuda.is_available() else Plain()


def large(at: Plain, n: int, size: int, quick: bool) -> Result:
    """One sum of n gradients, and a copy of one in the same run: it moves 2 where the sum moves n + 1."""
    xs, out = [at.array(size // 4, k + 0.5) for k in range(n)], at.array(size // 4, 0)
    buf = fanin.InputBuffer(1, stream=at.stream())

    def buffer() -> None:
        for k, x in enumerate(xs):
            buf.add(0, x, key=k)
        buf.take()

    work: dict[str, Any] = {
        COPY: lambda: at.copy(out, xs[0]),
        SUM: lambda: fanin.add_n(xs, out=out),
        "adds and take()": buffer,
        **peers(at, xs, out),
    }
    fair = (n + 1) / 2
    targets = [at_most(fair / 0.9, SUM, COPY), *([at_least(2.2, SUM, CHAIN)] if n == 8 else [])]
    title = f"gpu: {n} x {size_text(size)} float32; a copy of one moves 1 / {fair:g} of the bytes"
    return timed(at, title, work, COPY, quick, targets, more={"moved": (n + 1) * size})


def peers(at: Plain, xs: list[Any], out: Any) -> dict[str, Any]:
    """The same sum by others."""
    work: dict[str, Any] = {CHAIN: None, COMPILED: None, FUSED: None}
    torch, cupy = at.torch, peer("cupy")
    if torch is not None:

        def chain() -> None:
            torch.add(xs[0], xs[1], out=out)
            for x in xs[2:]:
                out.add_(x)

        def total(*terms: Any) -> Any:
            sum_ = terms[0]
            for x in terms[1:]:
                sum_ = sum_ + x
            return sum_

        compiled = torch.compile(total)
        work |= {CHAIN: chain, COMPILED: lambda: compiled(*xs)}
        if cupy is not None and len(xs) <= 16:
            fused, given = cupy.fuse(total), [cupy.from_dlpack(x) for x in xs]
            work[FUSED] = lambda: fused(*given)
    return work


def running(at: Plain, size: int, quick: bool) -> Result:
    """float32 += bfloat16 (float16 without torch), four times: each begins with the running sum of the one before."""
    xs, out = [at.low(size // 2, k + 0.5) for k in range(4)], at.array(size // 2, 0)
    other = at.low(size // 2, 0)
    buf = fanin.InputBuffer([fanin.Slot(accumulate="float32")], stream=at.stream(), budget=0)

    def ours() -> None:
        for x in xs:
            buf.add(0, x)
        buf.take(out=[out])

    def chain() -> None:
        out.zero_()
        for x in xs:
            out.add_(x)

    work = {
        COPY: lambda: at.copy(other, xs[0]),
        "adds and take(out=)": ours,
        CHAIN: chain if at.torch is not None else None,
    }
    title = f"gpu: float32 running sum of 4 x {size_text(size)} bfloat16"
    return timed(at, title, work, COPY, quick, after=buf.clear)


def over_axes(at: Plain, rows: int, columns: int, quick: bool) -> Iterator[Result]:
    """Sums to a declared shape: over rows, over columns, over all; a copy of the gradient moves twice what is read."""
    x = at.array(rows * columns, 1)
    x = x.reshape(rows, columns)
    out = at.array(rows * columns, 0).reshape(rows, columns)
    for declared in ((columns,), (rows, 1), ()):
        buf = fanin.InputBuffer([fanin.Slot(shape=declared)], stream=at.stream())

        def ours(buf: Any = buf) -> None:
            buf.add(0, x)
            buf.take()

        def theirs(declared: Any = declared) -> None:
            x.sum_to_size(declared)

        work = {
            COPY: lambda: at.copy(out, x),
            "add, take()": ours,
            "torch sum_to_size": theirs if at.torch is not None else None,
        }
        title = f"gpu: ({rows}, {columns}) float32 summed to {declared}"
        yield timed(at, title, work, COPY, quick, [at_most(3, "add, take()", COPY)])


def embedding(at: Plain, entries: int, rows: int, each: int, quick: bool) -> Iterator[Result]:
    """COO gradients into a dense sum in place, their rows as they please and sorted; a copy of as many bytes."""
    rng = np.random.default_rng(0)
    values, into = at.array(entries * each, 1).reshape(entries, each), at.array(rows * each, 0).reshape(rows, each)
    source, out = (at.array(max(1, entries * (8 + 12 * each) // 8), 0) for _ in range(2))
    for word in ("in any order", "sorted"):
        drawn = rng.integers(0, rows, (1, entries))
        index = at.numbers(np.sort(drawn) if word == "sorted" else drawn)
        gradient = fanin.Sparse("coo", (index, values), (rows, each))
        buf = fanin.InputBuffer(1, stream=at.stream(), budget=0)

        def ours(buf: Any = buf, gradient: Any = gradient) -> None:
            buf.add(0, into, donate=True)
            buf.add(0, gradient)

        def theirs(index: Any = index) -> None:
            into.index_add_(0, index[0], values)

        work = {
            COPY: lambda: at.copy(out, source),
            "add of COO": ours,
            "torch index_add_": theirs if at.torch is not None else None,
        }
        title = f"gpu: {entries} rows of {each} float32 into {rows}, {word}; a copy moves as many bytes"
        yield timed(at, title, work, COPY, quick, [at_most(3, "add of COO", COPY)], after=buf.clear)


def many(at: Plain, slots: int, size: int, quick: bool) -> Result:
    """acc += g in every slot."""
    every = list(range(slots))
    accs, gs = [at.array(size // 4, 0) for _ in every], [at.array(size // 4, 1) for _ in every]
    buf = fanin.InputBuffer(slots, stream=at.stream(), budget=float("inf"))

    def ours() -> None:
        buf.add_many(every, accs)
        buf.add_many(every, gs)
        buf.take(out=accs)

    def foreach() -> None:
        at.torch._foreach_add_(accs, gs)

    work = {"add_many, take(out=)": ours, FOREACH: foreach if at.torch is not None else None}
    targets = [at_least(5, "add_many, take(out=)", FOREACH)] if slots == 10_000 else []
    title = f"gpu: {slots} slots of {size_text(size)}, in place"
    return timed(at, title, work, "add_many, take(out=)", quick, targets, after=buf.clear)


def host(at: Plain, quick: bool) -> Result:
    """What the host pays for an add that is parked, and for a small sum that is queued; nothing is waited for."""
    x, here, calls = at.array(256, 1), np.ones(256, "f4"), 20 if quick else 500
    on_device, on_host = (
        fanin.InputBuffer(1, stream=at.stream(), budget=float("inf")),
        fanin.InputBuffer(1, budget=float("inf")),
    )
    xs, out = [at.array(256, k) for k in range(4)], at.array(256, 0)

    def after() -> None:
        at.synchronize()
        on_device.clear()
        on_host.clear()

    add = "a parked add on the GPU"
    work: dict[str, Any] = {
        "a parked add on the CPU": "on_host.add(0, here)",
        add: "on_device.add(0, x)",
        "add_n(out=) of 4, queued": "add_n(xs, out=out)",
        "torch out.add_, queued": "out.add_(x)" if at.torch is not None else None,
    }
    names = {
        "on_host": on_host,
        "on_device": on_device,
        "here": here,
        "x": x,
        "xs": xs,
        "out": out,
        "add_n": fanin.add_n,
    }
    return measure(
        "gpu: host time of 1 KB gradients",
        work,
        base="a parked add on the CPU",
        unit="ns",
        targets=[Target(add, ("a parked add on the CPU",), "<=", 3)],
        names=names,
        calls=calls,
        after=after,
        rounds=2 if quick else 50,
    )


def from_four_streams(xs: Sequence[Any], streams: Sequence[Any], current: Any) -> Any:
    """Gradients of torch streams that are forked from the current one: their sum, which joins them."""
    buf = fanin.InputBuffer(1, stream=current)
    for s in streams:
        s.wait_stream(current)
    for k, x in enumerate(xs):
        buf.add(0, x, key=k, stream=streams[k % len(streams)])
    return buf.take()[0]


def graph(at: Plain, quick: bool) -> Result:
    """Eight gradients of four streams: queued anew each time, and as a replayed graph."""
    torch = at.torch
    streams, xs = (
        [torch.cuda.Stream() for _ in range(4)],
        [torch.full((1 << 14,), k + 0.5, device="cuda") for k in range(8)],
    )

    def anew() -> Any:
        return from_four_streams(xs, streams, torch.cuda.current_stream())

    for _ in range(3):
        anew()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        anew()
    work = {"adds and take()": anew, "the captured graph": captured.replay}
    return timed(
        at, "gpu: 8 x 64 KB from four streams, under torch.cuda.graph", work, "adds and take()", quick, calls=10
    )


def results_on(at: Plain, quick: bool, large_size: int = 256 << 20, slots: int = 10_000) -> Iterator[Result]:
    """All of them on one device."""
    for n in (2, 4, 8, 16):
        yield large(at, n, large_size, quick)
    yield running(at, large_size, quick)
    yield from over_axes(at, *((8192, large_size // 32768) if large_size >= 1 << 24 else (32, 32)), quick)
    yield from embedding(at, *((1_000_000, 50_000, 64) if large_size >= 1 << 24 else (300, 50, 4)), quick)
    yield many(at, slots, 1024, quick)
    yield host(at, quick)
    if at.torch is not None:
        yield graph(at, quick)


def results(quick: bool) -> Iterator[Result]:
    """N by size, many slots, the host's time, a graph; nothing where there is no GPU."""
    at = place()
    if at is None:
        print(f"gpu: no GPU: {_core.cuda_info().get('why', 'the driver has no device')}")
    else:
        yield from results_on(at, quick, *((1 << 20, 100) if quick else ()))
