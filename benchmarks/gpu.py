"""Sums on a GPU beside torch's and the rate of a copy: python benchmarks/gpu.py [--quick] [--json FILE].

Without a GPU, or without torch for the peers, there is nothing to time, and it is said. Each call ends when the device
has done its work, but for "host": what the host pays to queue it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import main, size_text

import fanin
from fanin import _core
from fanin.cli.timing import Result, Target, at_least, at_most, measure, peer

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

    def stream(self) -> Any:
        return fanin.current_stream("cuda:0")

    def synchronize(self) -> None:
        self.stream().synchronize()

    def copy(self, out: Any, x: Any) -> None:
        fanin.add_n([x], out=out)


class Torch(Plain):
    """torch's tensors and its current stream."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def array(self, elements: int, value: float) -> Any:
        return self.torch.full((elements,), value, device="cuda")

    def low(self, elements: int, value: float) -> Any:
        return self.torch.full((elements,), value, device="cuda", dtype=self.torch.bfloat16)

    def stream(self) -> Any:
        return self.torch.cuda.current_stream()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def copy(self, out: Any, x: Any) -> None:
        out.copy_(x)


def place() -> Plain | None:
    """Where to measure; None: there is no GPU."""
    if not _core.cuda_info().get("devices"):
        return None
    torch = peer("torch")
    return Torch(torch) if torch is not None and torch.cuda.is_available() else Plain()


def effort(quick: bool) -> dict[str, Any]:
    return {"rounds": 2 if quick else 25, "longest": 5}


def large(at: Plain, n: int, size: int, quick: bool) -> Result:
    """One sum of n gradients, and a copy of one in the same run: it moves 2 where the sum moves n + 1."""
    xs, out = [at.array(size // 4, k + 0.5) for k in range(n)], at.array(size // 4, 0)
    buf = fanin.InputBuffer(1, stream=at.stream())

    def ended(work: Any) -> Any:
        def run() -> None:
            work()
            at.synchronize()

        return run

    def buffer() -> None:
        for k, x in enumerate(xs):
            buf.add(0, x, key=k)
        buf.take()

    work: dict[str, Any] = {
        COPY: ended(lambda: at.copy(out, xs[0])),
        SUM: ended(lambda: fanin.add_n(xs, out=out)),
        "adds and take()": ended(buffer),
    }
    work.update({name: one and ended(one) for name, one in peers(at, xs, out).items()})
    fair = (n + 1) / 2
    targets = [at_most(fair / 0.9, SUM, COPY), *([at_least(2.2, SUM, CHAIN)] if n == 8 else [])]
    title = f"gpu: {n} x {size_text(size)} float32; a copy of one moves 1 / {fair:g} of the bytes"
    return measure(title, work, base=COPY, unit="us", targets=targets, more={"moved": (n + 1) * size}, **effort(quick))


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
        at.synchronize()

    def chain() -> None:
        out.zero_()
        for x in xs:
            out.add_(x)
        at.synchronize()

    def copy() -> None:
        at.copy(other, xs[0])
        at.synchronize()

    work = {COPY: copy, "adds and take(out=)": ours, CHAIN: chain if at.torch is not None else None}
    title = f"gpu: float32 running sum of 4 x {size_text(size)} bfloat16"
    return measure(title, work, base=COPY, unit="us", after=buf.clear, **effort(quick))


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
            at.synchronize()

        def theirs(declared: Any = declared) -> None:
            x.sum_to_size(declared)
            at.synchronize()

        def copy() -> None:
            at.copy(out, x)
            at.synchronize()

        work = {COPY: copy, "add, take()": ours, "torch sum_to_size": theirs if at.torch is not None else None}
        title = f"gpu: ({rows}, {columns}) float32 summed to {declared}"
        targets = [at_most(3, "add, take()", COPY)]
        yield measure(title, work, base=COPY, unit="us", targets=targets, **effort(quick))


def many(at: Plain, slots: int, size: int, quick: bool) -> Result:
    """acc += g in every slot."""
    every = list(range(slots))
    accs, gs = [at.array(size // 4, 0) for _ in every], [at.array(size // 4, 1) for _ in every]
    buf = fanin.InputBuffer(slots, stream=at.stream(), budget=float("inf"))

    def ours() -> None:
        buf.add_many(every, accs)
        buf.add_many(every, gs)
        buf.take(out=accs)
        at.synchronize()

    def foreach() -> None:
        at.torch._foreach_add_(accs, gs)
        at.synchronize()

    work = {"add_many, take(out=)": ours, FOREACH: foreach if at.torch is not None else None}
    targets = [at_least(5, "add_many, take(out=)", FOREACH)] if slots == 10_000 else []
    return measure(
        f"gpu: {slots} slots of {size_text(size)}, in place",
        work,
        base="add_many, take(out=)",
        unit="us",
        after=buf.clear,
        targets=targets,
        **effort(quick),
    )


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


def graph(torch: Any, quick: bool) -> Result:
    """Eight gradients of four streams: queued anew each time, and as a replayed graph."""
    streams, xs = (
        [torch.cuda.Stream() for _ in range(4)],
        [torch.full((1 << 14,), k + 0.5, device="cuda") for k in range(8)],
    )

    def total() -> Any:
        c = torch.cuda.current_stream()
        buf = fanin.InputBuffer(1, stream=c)
        for s in streams:
            s.wait_stream(c)
        for k, x in enumerate(xs):
            buf.add(0, x, key=k, stream=streams[k % 4])
        return buf.take()[0]

    for _ in range(3):
        total()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        total()

    def anew() -> None:
        total()
        torch.cuda.synchronize()

    def replayed() -> None:
        captured.replay()
        torch.cuda.synchronize()

    work = {"adds and take()": anew, "the captured graph": replayed}
    return measure(
        "gpu: 8 x 64 KB from four streams, under torch.cuda.graph",
        work,
        base="adds and take()",
        unit="us",
        calls=10,
        **effort(quick),
    )


def results_on(at: Plain, quick: bool, large_size: int = 256 << 20, slots: int = 10_000) -> Iterator[Result]:
    """All of them on one device."""
    for n in (2, 4, 8, 16):
        yield large(at, n, large_size, quick)
    yield running(at, large_size, quick)
    yield from over_axes(at, *((8192, large_size // 32768) if large_size >= 1 << 24 else (32, 32)), quick)
    yield many(at, slots, 1024, quick)
    yield host(at, quick)
    if at.torch is not None:
        yield graph(at.torch, quick)


def results(quick: bool) -> Iterator[Result]:
    """N by size, many slots, the host's time, a graph; nothing where there is no GPU."""
    at = place()
    if at is not None:
        yield from results_on(at, quick, *((1 << 20, 100) if quick else ()))


if __name__ == "__main__":
    if place() is None:
        print(f"no GPU: {_core.cuda_info().get('why', 'the driver has no device')}")
    main(results)
