"""Passes, leaves and overlap of the C API (docs/c-api.md)."""

from __future__ import annotations

import ctypes as ct
import random
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node
from kit.c_api import Failed, Root, Value, api, backward, call, dropped, ints, value, view

pytestmark = pytest.mark.core

F = np.float32


def test_a_pass_from_c_goes_into_leaves_made_in_c() -> None:
    x = value(np.zeros(3, F))
    w = api.leaf_new(ct.byref(x), id("w"))
    assert type(w) is Leaf and w.name == "w" and w.array.ctypes.data == x.data
    node = Node(lambda g: 2 * g, edges=[(w, 0)])
    g, got = value(np.arange(3, dtype=F)), Value()
    for _ in range(2):
        backward([(node, 0, g)], flags=1)
    assert api.leaf_grad(w, ct.byref(got)) == 0 and dropped(got).tolist() == [0, 4, 8]
    assert w.grad.tolist() == [0, 4, 8]
    for v in (x, g):
        api.drop(ct.byref(v))


def test_grad_from_c_is_fanin_grad() -> None:
    w, u = Leaf(np.zeros(3, F)), Leaf(np.zeros(3, F))
    low = Node(lambda g: (3 * g, None), edges=[(w, 0), (u, 0)])
    top = Node(lambda g: g * F(0.1), edges=[(low, 0)])
    g, sums = value(np.ones(3, F)), []  # type: tuple[Value, list[Any]]
    backward([(top, 0, g)], [(w, 0), (low, 0), (u, 0)], sums, flags=1, workers=2)
    want = fanin.grad([(top, 0, np.ones(3, F))], [w, (low, 0), u], keep_graph=True)
    assert [None if s is None else s.tobytes() for s in sums] == [None if s is None else s.tobytes() for s in want]
    api.drop(ct.byref(g))
    scalar = Node(lambda g: g, slots=[fanin.Slot((), "f8")], edges=[(Leaf(np.zeros(())), 0)])
    ones: list[Any] = []
    backward([(scalar, 0, None)], [(scalar, 0)], ones)
    assert ones == [1]


def test_calls_that_python_refuses_are_refused_from_c_with_the_same_exception() -> None:
    w, g = Leaf(np.zeros(3, F)), value(np.ones(3, F))
    node = Node(lambda g: g, edges=[(w, 0)], name="Mul")
    with pytest.raises(TypeError, match=r"backward: root 0: expected \(node, slot, gradient\)"):
        backward([("w", 0, g)])
    with pytest.raises(IndexError, match="root 0: expected a slot from 0 to 0"):
        backward([(node, 7, g)])
    with pytest.raises(TypeError, match="input 0: Mul is no leaf"):
        backward([(node, 0, g)], [(node, 0)])
    with pytest.raises(ValueError, match="workers: expected a number of threads"):
        backward([(node, 0, g)], workers=2**31)
    with pytest.raises(ValueError, match="unknown bits 0x40"):
        backward([(node, 0, g)], flags=64)
    with pytest.raises(ValueError, match="fanin_root: struct_size"):
        api.backward(ct.byref(Root(struct_size=3)), 1, None)
    with pytest.raises(ValueError, match="at least one"):
        backward([(node, 0, g)], [])
    with pytest.raises(ValueError, match=r"expected a gradient of shape \(3,\)"):
        bad = value(np.ones((2, 2), F))
        backward([(Node(lambda g: g, slots=[fanin.Slot((3,))], edges=[(w, 0)], name="Mul"), 0, bad)])
    for what in (None, node):
        with pytest.raises(TypeError, match=r"leaf_grad: expected a fanin\.Leaf"):
            api.leaf_grad(what, ct.byref(Value()))
    with pytest.raises(TypeError, match="expected an array on the CPU"):
        api.leaf_new(ct.byref(Value()), None)
    assert w.grad is None
    api.drop(ct.byref(g))


# Overlap


def overlap(a: Any, b: Any, budget: int = 1 << 20) -> tuple[int, Any]:
    out, at_a, at_b = ct.c_int(), ints([0] * 64), ints([0] * 64)
    call("overlap", ct.byref(view(a)), ct.byref(view(b)), budget, at_a, at_b, ct.byref(out))
    return out.value, (tuple(at_a[: a.ndim]), tuple(at_b[: b.ndim]))


@pytest.mark.parametrize("seed", range(40))
def test_overlap_is_fanin_overlap(seed: int) -> None:
    r = random.Random(seed)
    base = np.zeros(400, "u1").view(r.choice(["u1", "f4", "i2"]))

    def some() -> Any:
        x = base[r.randrange(len(base)) :][:: r.choice([-3, -1, 1, 2, 5])]
        if len(x) % 2 == 0 and r.random() < 0.4:
            x = x.reshape(2, -1).T
        return x

    a, b = some(), some()
    got, (at_a, at_b) = overlap(a, b)
    want = fanin.overlap(a, b)
    assert ("disjoint", "overlap", "unknown")[got] == want.kind
    if got == 1:
        spans = []
        for x, at in ((a, at_a), (b, at_b)):
            first = x.ctypes.data + sum(i * s for i, s in zip(at, x.strides, strict=True))
            spans.append(range(first, first + x.itemsize))
        assert set(spans[0]) & set(spans[1])


def test_overlap_refuses_what_it_cannot_compare() -> None:
    t, out = view(np.zeros(3)), ct.c_int()
    there = view(np.zeros(3))
    there.device_type = 2
    with pytest.raises(Failed, match="different devices"):
        call("overlap", ct.byref(t), ct.byref(there), 0, None, None, ct.byref(out))
    t.ndim = 65
    with pytest.raises(Failed, match="0 to 64 axes"):
        call("overlap", ct.byref(t), ct.byref(t), 0, None, None, ct.byref(out))
    assert out.value == 2, "a refusal is no DISJOINT"
