"""Cycles through parked gradients: the collector traverses what a view keeps alive, and spares referenced objects."""

from __future__ import annotations

import array
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core


class Bytes(bytearray):
    """An owner of memory that can have attributes."""


class Doubles(array.array):  # type: ignore[type-arg]
    """Another."""


class Probe:
    """Goes when its owner goes."""


OWNERS: dict[str, Callable[[], Any]] = {"bytearray": lambda: Bytes(64), "array": lambda: Doubles("d", [0.0] * 8)}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "memoryview": lambda o: memoryview(memoryview(o).cast("B")).cast("d"),
    "ndarray": np.frombuffer,
    "strided ndarray": lambda o: np.frombuffer(o)[::2],
    "reversed ndarray": lambda o: np.frombuffer(o)[::-1],
    "view of a view": lambda o: np.frombuffer(o)[2:].reshape(2, 3).T,
}


def cycle(owner: str, view: str, n: int, budget: Any) -> tuple[Any, weakref.ref[Any], Any]:
    """A buffer with parked views of an owner that refers to the buffer; a weak reference to it; one of the views."""
    o, buf = OWNERS[owner](), fanin.InputBuffer(1, budget=budget)
    o.probe, o.buf = Probe(), buf
    views = [VIEWS[view](o) for _ in range(n)]
    for v in views:
        buf.add(0, v)
    return buf, weakref.ref(o.probe), views[0]


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_cycle_through_a_parked_view_is_collected(owner: str, view: str, n: int, budget: Any) -> None:
    gone = cycle(owner, view, n, budget)[1]
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_referenced_view_keeps_its_owner_and_buffer_alive(owner: str, view: str, n: int) -> None:
    buf, gone, mine = cycle(owner, view, n, None)
    known = weakref.ref(buf)
    del buf
    gc.collect()
    probe = gone()
    assert probe is not None
    assert np.asarray(mine).sum() == 0
    buf = known()
    assert buf is not None
    assert np.asarray(buf.take()[0]).sum() == 0
    del buf, mine, probe
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("view", VIEWS)
def test_a_referenced_buffer_keeps_parked_gradients_alive(view: str) -> None:
    buf, gone, _ = cycle("bytearray", view, 2, None)
    del _
    gc.collect()
    assert gone() is not None
    assert np.asarray(buf.take()[0]).sum() == 0
    del buf
    gc.collect()
    assert gone() is None


def test_a_view_in_two_buffers_is_not_collected_while_one_buffer_is_referenced() -> None:
    o = Bytes(64)
    first, second = fanin.InputBuffer(1), fanin.InputBuffer(1)
    o.probe, o.buf = Probe(), first  # type: ignore[attr-defined]
    gone = weakref.ref(o.probe)  # type: ignore[attr-defined]
    v = np.frombuffer(o)[::2]
    for buf in (first, second):
        buf.add(0, v)
    del o, v, first, buf
    gc.collect()
    assert gone() is not None
    assert second.take()[0].sum() == 0
    gc.collect()
    assert gone() is None
