"""The fast path and the general path give the same: random programs are run twice, the second time under a trace, which
forces the general path.

Same values bit for bit, same types, the same object where one is handed through or written into (A6, A14), same errors,
same statistics, and what the caller gave is afterwards the same, too; under a budget without end the same counters and
words of explain.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core

try:
    import torch
except ImportError:
    torch = None
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

DTYPES: list[Any] = ["f4", "f4", "f8", "f2", "c8", "c16", "i4", "i8", "u1", "?"]
if ml_dtypes is not None:
    DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
NARROWER = {"f8": "f4", "f4": "f2", "c16": "c8", "i8": "i4"}
SHAPES: list[tuple[int, ...]] = [(5,), (5,), (2, 3), (), (0,), (3, 1), (2, 3, 2)]
LARGE = [(1 << 18,), (1 << 9, 1 << 9)]  #: of 4 bytes each 1 MiB: the fast path hands one through, and sums none


def array(r: random.Random, dtype: Any, shape: tuple[int, ...]) -> Any:
    values = np.array(
        [
            r.choice([0.5, 1, -2, 3, 0.1, 100, float("inf") if r.random() < 0.2 else 7])
            for _ in range(min(int(np.prod(shape)), 64))
        ]
    )
    with np.errstate(all="ignore"):
        return np.resize(values.astype(dtype), shape)


def scalar(r: random.Random, kind: str) -> Any:
    x = r.choice([0.5, 1.0, -3.25, 1e300, 7.0])
    if kind == "int":
        return r.choice([0, 1, -5, 2**40, 2**62])
    return {
        "float": x,
        "complex": complex(x, -x),
        "bool": x > 0,
        "f8": np.float64(x),
        "f4": np.float32(1.5),
        "i4": np.int32(-7),
        "c8": np.complex64(2 - 1j),
    }[kind]


def laid_out(x: Any, axes: list[int]) -> Any:
    """The same array in gap-free memory whose axes are in this order, from the slowest to the fastest."""
    return np.ascontiguousarray(x.transpose(axes)).reshape([x.shape[i] for i in axes]).transpose(np.argsort(axes))


def rows_of(x: Any, axis: int) -> Any:
    """The same array as a part of a larger one, with a gap along this axis."""
    larger = np.empty_like(x, shape=[n + 2 * (i == axis) for i, n in enumerate(x.shape)])
    part = larger[tuple(slice(1, n + 1) if i == axis else slice(None) for i, n in enumerate(x.shape))]
    part[...] = x
    return part


class World:
    """A buffer and all that a program gave it: two of one seed are twins."""

    def __init__(self, seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        r = self.r = random.Random(seed)
        self.given: list[Any] = []
        self.donated: list[Any] = []
        self.seen: list[Any] = []
        self.shape, self.dtype = r.choice(shapes), r.choice(DTYPES)
        self.axes = list(range(len(self.shape)))  #: from the slowest to the fastest in the memory of most gradients
        if r.random() < 0.4:
            r.shuffle(self.axes)
        self.gap = r.choice(self.axes) if self.axes and r.random() < 0.25 else None
        self.kind = r.choice(
            ["array", "array", "array", "torch", *("float", "int", "complex", "bool", "f8", "f4", "i4", "c8")]
        )
        if self.kind == "torch" and (torch is None or not isinstance(self.dtype, str) or self.dtype[0] in "cu"):
            self.kind = "array"
        self.keyed = r.random() < 0.5
        self.strict = r.random() < 0.7
        self.nslots = r.choice([1, 1, 2, 3])
        how: dict[str, Any] = {"budget": float("inf") if self.strict else r.choice([0, 30, 100, "auto"])}
        if r.random() < 0.3:
            how["stats"] = True
        if r.random() < 0.15:
            how["accumulate"] = r.choice(["float64", "float32", "complex128", "exact"])
        self.wishes = "accumulate" in how
        self.narrow = False  # whether a slot declares a dtype narrower than what comes (A10)
        self.buf = fanin.InputBuffer(
            [self.slot() for _ in range(self.nslots)] if r.random() < 0.5 else self.nslots, **how
        )

    def slot(self) -> Any:
        declared: dict[str, Any] = {}
        if self.r.random() < 0.4:
            declared["shape"] = self.shape
        if self.r.random() < 0.4 and self.kind in ("array", "torch") and not self.wishes:
            declared["dtype"] = NARROWER.get(self.dtype, self.dtype) if self.r.random() < 0.6 else self.dtype
            self.narrow |= declared["dtype"] != self.dtype
        if self.r.random() < 0.3:
            declared["combine"] = lambda a, b: (a, b)
        return fanin.Slot(**declared)

    def gradient(self) -> tuple[Any, bool]:
        """One, and whether the program keeps it."""
        r = self.r
        if r.random() < 0.1:
            return None, False
        kind = self.kind if r.random() < 0.95 else r.choice(["array", "float", "int"])
        if kind not in ("array", "torch"):
            return scalar(r, kind), True
        shape = self.shape if r.random() < 0.95 else (4,)
        dtype = self.dtype if r.random() < 0.95 else "f8"
        x = array(r, dtype, shape)
        if len(shape) == len(self.axes) and r.random() < 0.9:
            x = laid_out(x, self.axes)
            if self.gap is not None and r.random() < 0.8:
                x = rows_of(x, self.gap)
        if r.random() < 0.05:
            x = x[::-1] if x.ndim else x
        if r.random() < 0.1 and self.given and r.random() < 0.8:
            x = r.choice(self.given)
        elif kind == "torch" and isinstance(dtype, str):
            x = torch.from_numpy(x.copy(order="K") if self.gap is None or not x.flags.writeable else x)
            if r.random() < 0.05 and x.is_floating_point():
                x = r.choice([torch._neg_view(x), x.clone().requires_grad_()])
        elif r.random() < 0.1:
            x.flags.writeable = False
        return x, r.random() < 0.6

    def add(self) -> None:
        r = self.r
        x, kept = self.gradient()
        how: dict[str, Any] = {}
        if self.keyed != (r.random() < 0.03):
            how["key"] = r.choice([r.randrange(12), r.randrange(4), 2**61 + r.randrange(3), len(self.given)])
        way = r.random()
        known = any(x is g for g in self.given)
        if way < 0.15 and not known:  # who donates promises that nobody else touches it, other slots included
            how["donate"] = True
        elif way < 0.3:
            how["copy"] = True
        slot = r.randrange(self.nslots)
        if kept:
            (self.donated if "donate" in how else self.given).append(x)
        self.buf.add(slot, x, **how)

    def add_many(self) -> None:
        r = self.r
        some = [self.gradient() for _ in range(r.randrange(1, 4))]
        known = any(x is g for x, _ in some for g in self.given)
        self.given += [x for x, kept in some if kept]
        how: dict[str, Any] = {"keys": [r.randrange(30) for _ in some]} if self.keyed else {}
        if r.random() < 0.2:
            how[r.choice(["copy"] if known else ["donate", "copy"])] = True
        if "donate" in how:
            self.given, self.donated = (
                self.given[: len(self.given) - sum(kept for _, kept in some)],
                self.donated + [x for x, kept in some if kept],
            )
        self.buf.add_many([r.randrange(self.nslots) for _ in some], [x for x, _ in some], **how)

    def take(self) -> None:
        r = self.r
        how: dict[str, Any] = {}
        if r.random() < 0.3:
            how["writable"] = True
        if r.random() < 0.3:
            how["scale"] = r.choice([0.5, 2, -1, 1j, 2.0, True, None])
        if r.random() < 0.3:
            outs = []
            for _ in range(self.nslots):
                x = None if r.random() < 0.3 else array(r, self.dtype, self.shape)
                if x is not None and r.random() < 0.2:
                    some = [g for g in self.given if isinstance(g, np.ndarray) and g.shape == self.shape]
                    x = r.choice(some) if some else x
                    self.strict = False  # a single contribution that is its own out is not even read by the fast path
                elif x is not None and r.random() < 0.5:
                    x = laid_out(x, self.axes)
            if self.gap is not None and r.random() < 0.8:
                x = rows_of(x, self.gap)
                if isinstance(x, np.ndarray) and self.kind == "torch" and not any(x is g for g in self.given):
                    x = torch.from_numpy(x)
                outs.append(x)
            self.given += [x for x in outs if x is not None]
            how["out"] = outs
        one = r.randrange(self.nslots) if r.random() < 0.2 else None
        versions = [x._version for x in how.get("out", ()) if torch is not None and isinstance(x, torch.Tensor)]
        if one is not None:
            outs = how.pop("out", None)
            sums = [self.buf.take(slot=one, **(how | {"out": outs[one]} if outs else how))]
        else:
            sums = self.buf.take(**how)
        self.seen.append([self.described(x) for x in sums])
        assert one is not None or all(
            a <= x._version
            for a, x in zip(versions, [x for x in how.get("out", ()) if type(x).__name__ == "Tensor"], strict=True)
        )
        if self.r.random() < 0.5:
            self.given += [x for x in sums if x is not None and not any(x is d for d in self.donated)]

    def asked(self) -> None:
        r, i = self.r, self.r.randrange(self.nslots)
        what = r.choice(["snapshot", "expect", "ready", "stats", "clear", "explain"])
        if what == "snapshot":
            self.seen.append(self.described(self.buf[i]))
        elif what == "expect":
            self.buf.expect(i, r.randrange(6))
        elif what == "ready":
            self.seen.append(self.buf.ready(i))
        elif what == "explain":
            self.seen.append(self.compared(self.buf.explain(i)))
        elif what == "stats":
            self.seen.append(repr(self.buf.stats(i)))
        elif r.random() < 0.3:
            self.buf.clear()

    def compared(self, explained: str) -> str:
        """Of a finite budget: when it is passed is each way's own affair."""
        return explained if self.strict else explained.split(" came")[0]

    def described(self, x: Any) -> Any:
        """A result: which of the objects that the program has, or a new one; its type and its bits."""
        which = (
            next((i for i, g in enumerate([*self.donated, *self.given]) if g is x), None)
            if isinstance(x, np.ndarray) or type(x).__name__ == "Tensor"
            else None
        )
        return (which, *bits(x))

    def run(self, steps: int) -> list[Any]:
        for _ in range(steps):
            step = self.r.choices([self.add, self.add_many, self.take, self.asked], [10, 2, 3, 2])[0]
            mark = self.r.random()  # both worlds draw the same from here on, whatever the step did
            try:
                step()
                self.seen.append(step.__name__)
            except Exception as e:
                self.seen.append((step.__name__, type(e).__name__, str(e)))
            self.r = random.Random(mark)
            if self.strict:
                self.seen.append(dict(self.buf.counters))
        self.explained = [
            self.buf.explain(i) for i in range(self.nslots)
        ]  # last: it ends the fast path of what is parked
        self.seen += map(self.compared, self.explained)
        return [self.seen, [bits(x) for x in [*self.donated, *self.given]]]


def steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The strides of the axes that have more than one place."""
    return [stride for n, stride in zip(shape, strides, strict=True) if n > 1]


def bits(x: Any) -> Any:
    if torch is not None and isinstance(x, torch.Tensor):
        y = x.detach().resolve_neg()
        return (
            "tensor",
            str(y.dtype),
            tuple(y.shape),
            steps(y.shape, y.stride()),
            y.contiguous().view(torch.uint8).numpy().tobytes() if y.ndim and y.numel() else repr(y),
            x.requires_grad,
        )
    if isinstance(x, np.ndarray):
        return ("ndarray", str(x.dtype), x.shape, steps(x.shape, x.strides), x.tobytes(), x.flags.writeable)
    return (type(x).__name__, repr(x))


def general() -> Any:
    return fanin.trace()


def compare(
    seeds: range, second: Callable[[], Any] = general, shapes: list[tuple[int, ...]] = SHAPES, steps: int = 25
) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        with np.errstate(all="ignore"):
            twin = World(seed, shapes)
            one = twin.run(steps)
            with second():
                other = World(seed, shapes).run(steps)
        for i, (a, b) in enumerate(zip(one[0], other[0], strict=True)):
            assert a == b, f"seed {seed}, event {i}: {one[0][max(0, i - 6) : i]}\nshort   {a}\ngeneral {b}"
            counts["refused" if isinstance(a, tuple) and len(a) == 3 and isinstance(a[2], str) else "done"] += 1
        assert one[1] == other[1], f"seed {seed}: what was given"
        counts["narrow"] += twin.narrow
        counts["permuted"] += twin.axes != sorted(twin.axes)
        for rule in ("S2", "A6", "A7"):
            counts[rule] += sum(rule in re.findall(r"[A-Z]\d+", text.splitlines()[-1]) for text in twin.explained)
    return counts


@pytest.mark.rule("A6", "A10", "A14", "A15", "A16", "S2", "S22")
def test_both_ways_give_the_same() -> None:
    counts = compare(range(400))
    assert counts["done"] > 5000
    assert counts["refused"] > 300
    assert counts["narrow"] > 5
    assert counts["permuted"] > 20, "few programs add arrays that are not in C order"
    assert min(counts[rule] for rule in ("S2", "A6", "A7")) > 10, f"what explain said: {counts}"


def test_both_ways_give_the_same_for_large_arrays() -> None:
    counts = compare(range(40), shapes=LARGE, steps=12)
    assert counts["done"] > 300


@pytest.mark.slow
def test_both_ways_give_the_same_for_many_programs() -> None:
    compare(range(400, 12_000))
    compare(range(40, 1000), shapes=LARGE)


@pytest.mark.rule("A6", "A14")
@pytest.mark.parametrize("kind", [np.int32, np.float64, np.complex64])
def test_a_donated_number_comes_back_with_what_was_added_to_it(kind: Any) -> None:
    """A number's object is not the memory of its sum. Each has many holders: who reads the flags of an array in the
    memory behind one reads one's count, and that it can be written.
    """
    first = [kind(k % 50) for k in range(300)]
    holders = [x for x in first for _ in range(1024)]
    for x in first:
        buf = fanin.InputBuffer(1, budget=0)
        buf.add(0, x, donate=True)
        buf.add(0, kind(1))
        buf.add(0, kind(2))
        assert buf.take() == [x + kind(1) + kind(2)]
    assert [int(x.real) for x in first] == [int(kind(k % 50).real) for k in range(300)]
    del holders


def test_a_way_that_differed_would_be_found() -> None:
    with pytest.raises(AssertionError, match="seed"):
        compare(range(50), second=lambda: contextlib.closing(Doubled()))


class Doubled:
    """Something else in the second run: each array is twice as large."""

    def __init__(self) -> None:
        self.was = array
        globals()["array"] = lambda *a: self.was(*a) * 2 if a[1] != "?" else self.was(*a)

    def close(self) -> None:
        globals()["array"] = self.was
