"""Buffers of the C API compute in the default floating-point modes whichever the calling thread has (A15), and its
deleters and callbacks run in those of the thread that calls.
"""

from __future__ import annotations

import ctypes as ct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import fanin
from kit import c_api, float_modes, hooks
from kit.c_api import Buffer, Deleted, Value, api, declared, value
from kit.float_modes import MODES, current, modes, same_bits, terms

pytestmark = [
    pytest.mark.core,
    pytest.mark.rule("A15"),
    pytest.mark.skipif(not float_modes.KNOWN, reason="the modes are set through glibc's fenv_t on x86-64"),
]

N = 300


def summed(xs: list[Any], make: Callable[[], Buffer], add: str = "view", **take: Any) -> Any:
    """The sum, and its statistics if the buffer computes them."""
    b = make()
    values = [value(x) for x in xs] if add == "value" else []
    if add == "many":
        b.add_many([0] * len(xs), xs)
    else:
        for x in values or xs:
            b.add(0, x)
    found = [b.take(**take)[0]]
    try:
        s = b.stats(0)
        found.append(np.array([s.sumsq, s.absmax, s.norm]))
    except c_api.Failed:
        pass
    for v in values:
        api.drop(ct.byref(v))
    return found


def taken_into(xs: list[Any], make: Callable[[], Buffer]) -> Any:
    out = np.zeros(N, xs[0].dtype)
    b = make()
    for x in xs:
        b.add(0, x)
    b.take_values(out=[out])
    return out


def of_python(**options: Any) -> Buffer:
    return Buffer.of_python(fanin.InputBuffer(1, **options))


def ways() -> Iterator[tuple[str, Callable[[], Any]]]:
    buffers: dict[str, Callable[[], Buffer]] = {
        "eager": partial(Buffer, 1, budget=c_api.EAGER),
        "fused": partial(Buffer, 1, budget=c_api.FUSED),
        "with statistics": partial(Buffer, 1, flags=c_api.STATS),
        "of Python": of_python,
        "of Python, with statistics": partial(of_python, stats=True),
    }
    for dtype in ("f4", "f8", "c8", "f2"):
        xs = terms(np.dtype(dtype), N)
        for name, make in buffers.items():
            for add in ("view", "value", "many"):
                yield f"{dtype}: {name}, by {add}", partial(summed, xs, make, add)
            yield f"{dtype}: {name}, scaled", partial(summed, xs, make, scale=1 / 3)
            yield f"{dtype}: {name}, into memory of the caller", partial(taken_into, xs, make)
        exact = partial(Buffer, 1, [declared((N,), dtype, exact=True)])
        yield f"{dtype}: exact", partial(summed, xs, exact)
        if dtype != "f2":
            reduced = partial(Buffer, 1, [declared((3,), dtype)])
            yield f"{dtype}: summed to a shape", partial(summed, [x.reshape(-1, 3) for x in xs], reduced)
    narrow = partial(Buffer, 1, [declared((N,), "f4")])
    yield "cast to a narrower dtype", partial(summed, terms(np.dtype("f8"), N), narrow)


Ways = list[tuple[str, Callable[[], Any], Any]]


@pytest.fixture(scope="module")
def right() -> Ways:
    assert current() == float_modes.DEFAULT
    return [(name, way, way()) for name, way in ways()]


def differ(mode: str, right: Ways) -> list[str]:
    """The ways whose bits, or the modes after which, are others."""
    wrong = []
    for name, way, want in right:
        with modes(mode) as mine:
            found = way()
            kept = current() == mine
        if not kept or not same_bits(found, want):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_the_thread_that_calls_changes_a_bit_of_a_buffer_in_c(mode: str, right: Ways) -> None:
    assert differ(mode, right) == []


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
def test_sums_in_the_modes_of_the_caller_are_found() -> None:
    right = [(name, way, way()) for name, way in ways()]
    hooks.fault("FLOAT_MODE_OF_CALLER")
    try:
        found = {name for mode in ("both", "up") for name in differ(mode, right)}
    finally:
        hooks.fault(None)
    few = ("f2", "f4: exact", "f8: exact", "c8: exact")  # of their numbers few depend on the modes
    missed = [name for name, *_ in right if name not in found and not name.startswith(few)]
    assert missed == []


#: What runs a deleter in a call of the C API, for a gradient with a hold of the buffer's alone.
def dropped(v: Value) -> None:
    api.drop(ct.byref(v))


def added(v: Value, budget: int, **how: Any) -> Buffer:
    b = Buffer(1, budget=budget)
    for _ in range(2):
        b.add(0, v)
    api.drop(ct.byref(v))
    return b


CALLS: dict[str, Callable[[Value], object]] = {
    "drop": dropped,
    "the take": lambda v: added(v, c_api.FUSED).take(),
    "the take of one slot": lambda v: added(v, c_api.FUSED).take(0),
    "clear": lambda v: added(v, c_api.FUSED).clear(),
    "free": lambda v: added(v, c_api.FUSED).free(),
    "an add that sums at once": lambda v: added(v, c_api.EAGER).take(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_a_deleter_runs_in_the_modes_of_the_thread_that_calls(name: str, mode: str) -> None:
    seen: list[int] = []
    deleted = Deleted(terms(np.dtype("f4"), N)[0], then=lambda: seen.append(current()))
    with modes(mode) as mine:
        CALLS[name](deleted.value())
        after = current()
    assert seen == [mine] and after == mine and deleted.calls == 1


@pytest.mark.parametrize("mode", ["both", "up"])
def test_a_deleter_that_computes_gets_the_bits_of_its_thread(mode: str) -> None:
    """NumPy computes in the modes of the thread, in a deleter too."""
    xs = terms(np.dtype("f4"), N)
    made: list[Any] = []
    with modes(mode):
        want = xs[0] + xs[1]
        deleted = Deleted(xs[0], then=lambda: made.append(xs[0] + xs[1]))  # which outlives its memory
        CALLS["the take"](deleted.value())
    assert same_bits(made[0], want) and not same_bits(made[0], xs[0] + xs[1])


@pytest.mark.parametrize("mode", ["both", "down"])
def test_a_thread_without_the_interpreter_has_its_own_modes_in_a_deleter(mode: str) -> None:
    """Another thread drops the last hold, in its modes."""
    seen: list[int] = []
    deleted = Deleted(np.ones(4, "f4"), then=lambda: seen.append(current()))
    v = deleted.value()

    def other() -> None:
        with modes(mode):
            api.drop(ct.byref(v))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [float_modes.DEFAULT | MODES[mode]] and current() == float_modes.DEFAULT
