"""The C API: deleters, release functions and finalizers of others, and the locks that their caller has."""

from __future__ import annotations

import ctypes as ct
import dataclasses
import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fanin
from kit import c_api, hooks
from kit.c_api import Buffer, Deleted, Machine, Value, api
from kit.support import CSRC, TEST_C, WITHOUT_SOURCES, extension

pytestmark = pytest.mark.core
F = np.dtype("f4")


def inside(name: str) -> Callable[..., Any]:
    """A function of the table that is called with the interpreter's lock, as an extension calls it."""
    result, *arguments = c_api.FUNCTIONS[name]
    return ct.PYFUNCTYPE(*(arguments if result == "py" else [result, *arguments]))(getattr(c_api.table, name))


@functools.cache
def native() -> ModuleType:
    """tests/c/deleters.c."""
    return extension("deleters", [TEST_C / "deleters.c"], "-O2", f"-I{fanin.get_include()}", "-pthread")


# Scenarios: each prepares what a call needs, and returns the call, in which a deleter is due


def owned(way: str) -> Value:
    """A value over memory whose deleter waits for a thread that needs the interpreter."""
    x, at, v = np.ones(4, F), native().deleter(), Value()
    if way == "wrap":
        status = api.wrap(x.ctypes.data, c_api.DTYPES[F][0], 1, c_api.ints([4]), None, at, None, ct.byref(v), None)
        assert status == c_api.OK
        v.keep = x  # type: ignore[attr-defined]
        return v
    t = Deleted(x)
    t.managed.deleter = c_api.DELETER(at)
    v = t.value()
    v.keep = t  # type: ignore[attr-defined]
    return v


@dataclasses.dataclass
class Setting:
    """What a scenario is made of."""

    way: str  # how memory with a deleter comes: "wrap", or "of_managed"
    python: bool  # buffers are handles of InputBuffers
    kept: list[Any] = dataclasses.field(default_factory=list)  # memory of the caller's

    def buffer(self, budget: int = c_api.EAGER, n: int = 1) -> Buffer:
        """Its first slot has one gradient, whose last hold is the buffer's."""
        if self.python:
            b = Buffer.of_python(fanin.InputBuffer([fanin.Slot((4,), F)], budget=0 if budget == c_api.EAGER else None))
        else:
            b = Buffer(1, [c_api.declared((4,), F)], budget=budget)
        for _ in range(n):
            v = owned(self.way)
            self.kept.append(v)
            b.add(0, v)
            api.drop(ct.byref(v))
        self.kept.append(b)
        return b

    def release(self) -> Any:
        """A machine and a stream of it, which has a kernel that has not run, whose release is the deleter."""
        m = Machine()
        stream = m.stream()
        kernel = c_api.Kernel(name=b"waits", call=c_api.CALL(lambda ctx: c_api.OK))
        kernel.release = c_api.RELEASE(native().deleter())
        self.kept += [m, kernel]
        c_api.call("machine_launch", m.at, ct.byref(stream), ct.byref(kernel))
        return m, stream


def ok(name: str, *arguments: Any) -> Callable[[], None]:
    def run() -> None:
        assert inside(name)(*arguments) in (None, c_api.OK)

    return run


def drop(s: Setting) -> Callable[[], None]:
    v = owned(s.way)
    s.kept.append(v)
    return ok("drop", ct.byref(v))


def of_managed(s: Setting) -> Callable[[], None]:
    t = Deleted(np.ones(4, F), major=2)
    t.managed.deleter = c_api.DELETER(native().deleter())
    s.kept.append(t)

    def run() -> None:
        assert inside("of_managed")(ct.byref(t.managed), ct.byref(Value()), None) == c_api.BUFFER

    return run


def buffer_free(s: Setting) -> Callable[[], None]:
    b = s.buffer()
    at, b.at = b.at, c_api.ANY()
    return ok("buffer_free", at)


def buffer_clear(s: Setting) -> Callable[[], None]:
    return ok("buffer_clear", s.buffer().at, None)


def buffer_take(s: Setting) -> Callable[[], None]:
    sums = (Value * 1)()
    s.kept.append(sums)
    return ok("buffer_take", s.buffer(c_api.FUSED, 2).at, None, sums, 1, None)


def buffer_take_one(s: Setting) -> Callable[[], None]:
    return ok("buffer_take_one", s.buffer(c_api.FUSED, 2).at, 0, None, ct.byref(Value()), None)


def buffer_add(s: Setting) -> Callable[[], None]:
    return ok("buffer_add", s.buffer().at, 0, ct.byref(c_api.view(np.ones(4, F))), None, None)


def buffer_add_value(s: Setting) -> Callable[[], None]:
    v = c_api.value(np.ones(4, F))
    return ok("buffer_add_value", s.buffer().at, 0, ct.byref(v), None, None)


def buffer_add_many(s: Setting) -> Callable[[], None]:
    view = c_api.view(np.ones(4, F))
    one = c_api.Gradient(slot=0, view=ct.pointer(view))
    s.kept += [view, one]
    return ok("buffer_add_many", s.buffer().at, ct.byref(one), 1, None, None)


def buffer_target(s: Setting) -> Callable[[], None]:
    t, v = c_api.ANY(), Value()
    b = s.buffer()

    def run() -> None:
        assert inside("buffer_target")(b.at, 0, None, ct.byref(t), ct.byref(v), None) == c_api.OK
        ct.memset(v.data, 0, 16)
        c_api.call("target_end", t, 1)

    return run


def target_end(s: Setting) -> Callable[[], None]:
    """The buffer was freed while its target was open, so that the target's end is the buffer's."""
    t, v = c_api.ANY(), Value()
    b = s.buffer(c_api.FUSED)
    c_api.call("buffer_target", b.at, 0, None, ct.byref(t), ct.byref(v))
    ct.memset(v.data, 0, 16)
    b.free()
    return ok("target_end", t, 1, None)


def machine_synchronize(s: Setting) -> Callable[[], None]:
    return ok("machine_synchronize", s.release()[0].at, None)


def stream_sync(s: Setting) -> Callable[[], None]:
    return ok("stream_sync", ct.byref(s.release()[1]), None)


def machine_free(s: Setting) -> Callable[[], None]:
    m, _ = s.release()
    c_api.api.machine_leave(m.at)
    at, m.at = m.at, c_api.ANY()
    return ok("machine_free", at)


def event_free(s: Setting) -> Callable[[], None]:
    """The event is the last one to hold its machine."""
    m, stream = s.release()
    e = c_api.ANY()
    c_api.call("event_record", ct.byref(stream), ct.byref(e))
    m.close()
    return ok("event_free", e)


def machine_join(s: Setting) -> Callable[[], None]:
    m, _ = s.release()
    m.spawn(lambda: m.synchronize())
    return ok("machine_join", m.at, None)


def deleted(name: str, way: str = "wrap", python: bool = False) -> tuple[int, int]:
    """How often the call of a scenario called the deleter, and how often with the interpreter's lock."""
    setting = Setting(way, python)
    native().counts()
    run = SCENARIOS[name](setting)
    assert native().counts() == (0, 0)
    run()
    counts = native().counts()
    for machine in (m for m in setting.kept if isinstance(m, Machine)):
        machine.close()
    return counts  # type: ignore[no-any-return]


SCENARIOS = {
    f.__name__: f
    for f in (
        drop, of_managed, buffer_free, buffer_clear, buffer_take, buffer_take_one, buffer_add, buffer_add_value,
        buffer_add_many, buffer_target, target_end, machine_synchronize, stream_sync, machine_free,
        event_free, machine_join,
    )
}  # fmt: skip


#: Functions that call no deleter, and why.
NEVER = {
    "empty": "a new array",
    "like": "a new array",
    "share": "one hold more",
    "wrap": "a failure leaves the memory to the caller",
    "may_write": "reads counts of holds",
    "to_managed": "one hold more",
    "buffer_new": "an empty buffer",
    "buffer_expect": "the slot keeps its gradients",
    "buffer_ready": "the slot keeps its gradients",
    "buffer_snapshot": "the slot keeps its gradients",
    "buffer_stats": "reads figures",
    "buffer_counters": "reads figures",
    "buffer_explain": "the slot keeps its gradients",
    "overlap": "reads addresses",
    "machine_new": "a machine without work",
    "machine_entered": "the thread holds the machine that it has entered",
    "machine_enter": "one hold more",
    "machine_leave": "the handle holds the machine",
    "machine_races": "reads a figure",
    "buffer_of_python": "one hold more",
    "buffer_to_python": "one hold more",
}

#: Functions that release the interpreter's lock for the whole call (FAN_API_RUN), as machine_synchronize does.
UNLOCKED = {
    "event_record", "stream_wait", "value_read", "machine_stream", "machine_array", "machine_launch", "machine_spawn",
}  # fmt: skip

#: Functions that need the interpreter's lock: a deleter that they call may not wait for it (docs/c-api.md).
LOCKED = {
    "function_new", "node_new", "to_python", "of_python", "leaf_new", "leaf_grad", "backward", "grad",
}  # fmt: skip


def unclassified(functions: Iterable[str]) -> set[str]:
    """Functions of the table of which this file states nothing, or two things."""
    lists = [set(SCENARIOS), set(NEVER), UNLOCKED, LOCKED]
    return {name for name in functions if sum(name in names for names in lists) != 1}


def test_each_function_of_the_table_is_one_of_those_whose_deleters_may_wait_or_has_a_reason() -> None:
    assert unclassified(c_api.FUNCTIONS) == set()
    assert {*SCENARIOS, *NEVER, *UNLOCKED, *LOCKED} == set(c_api.FUNCTIONS)
    assert unclassified([*c_api.FUNCTIONS, "buffer_new_entry"]) == {"buffer_new_entry"}


@pytest.mark.skipif(bool(WITHOUT_SOURCES), reason=WITHOUT_SOURCES)
def test_the_functions_that_release_the_lock_for_the_whole_call_are_those_of_the_sources() -> None:
    files = "".join(path.read_text() for path in sorted((CSRC / "py/api").rglob("*.c")))
    bodies = dict(re.findall(r"^(?:fanin_status|void) fan_api_(\w+)\([^{;]*\)\n\{\n(.*?)^\}", files, re.M | re.S))
    whole = {name for name, body in bodies.items() if "FAN_API_RUN(" in body}
    assert whole - set(SCENARIOS) == UNLOCKED


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="plants a fault: needs a development build")
@pytest.mark.parametrize("fault", ["API_RELEASE_LOCKED", "API_DROP_AT_ONCE"])
def test_a_deleter_that_is_called_with_the_lock_is_found(fault: str) -> None:
    hooks.fault(fault)
    try:
        found = {name for name in SCENARIOS if deleted(name)[1]}
    finally:
        hooks.fault(None)
    before = {"machine_synchronize", "stream_sync", "machine_join", "buffer_target"}  # have released it by then
    assert found == ({"drop"} if fault == "API_DROP_AT_ONCE" else set(SCENARIOS) - before)


def test_a_finalizer_of_python_may_wait_for_a_thread_that_uses_the_buffer() -> None:
    b, one, counts = Buffer(1, budget=c_api.EAGER), np.ones(4, F), []

    def use() -> None:
        counts.append(b.counters()["adds"])

    def end() -> None:
        other = threading.Thread(target=use)
        other.start()
        other.join()

    x, v, view = np.ones(4, F), Value(), c_api.view(one)
    weakref.finalize(x, end)
    assert api.of_python(x, ct.byref(v)) == 0
    del x
    b.add(0, v)
    api.drop(ct.byref(v))
    add = inside("buffer_add")
    assert add(b.at, 0, ct.byref(view), None, None) == c_api.OK  # sums, and drops the ndarray
    assert counts == [2]
    assert b.take(0).tolist() == [2] * 4


@pytest.mark.parametrize("python", [False, True], ids=["own", "python"])
@pytest.mark.parametrize("way", ["wrap", "of_managed"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_deleter_in_a_call_may_wait_for_a_thread_that_needs_the_interpreter(
    name: str, way: str, python: bool
) -> None:
    calls, locked = deleted(name, way, python)
    assert calls > 0 and locked == 0, (calls, locked)


def test_the_exception_of_a_caller_is_set_aside_while_a_deleter_runs() -> None:
    x, seen = np.ones(4, F), []
    t = Deleted(x, lambda: seen.append(1))
    v = t.value()
    assert native().drop_failing(ct.addressof(v)) is KeyError
    assert seen == [1]
