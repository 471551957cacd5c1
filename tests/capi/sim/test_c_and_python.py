"""One buffer in two languages: a fanin.InputBuffer as the `fanin_buffer` of a C author (docs/c-api.md)."""

from __future__ import annotations

import ctypes as ct
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import sim
from kit import c_api
from kit.c_api import ANY, Buffer, Deleted, Failed, Machine, Value, api, call, dropped, value, view
from kit.prepared import run_prepared

pytestmark = pytest.mark.core

F = np.float32
SPARSE = fanin.Sparse("coo", (np.array([[1]]), np.array([2], F)), (4,))


def test_gradients_of_both_languages_meet_in_one_sum() -> None:
    ours = fanin.InputBuffer(2, name="both")
    c = Buffer.of_python(ours)
    x, v = np.arange(4, dtype=F), value(np.full(4, 10, F))
    ours.add(0, x)
    c.add(0, x[::-1])
    c.add(0, v)
    c.add_many([1, 1], [x, v])
    ours.add(1, x)
    api.drop(ct.byref(v))
    assert ours.take(slot=0).tolist() == [13] * 4
    assert c.take(1).tolist() == [10, 12, 14, 16]
    assert c.take() == [None, None] and ours.counters.adds == c.counters()["adds"] == 6


@pytest.mark.parametrize("budget", ["auto", 0, float("inf")])
@pytest.mark.parametrize("keyed", [False, True])
def test_each_order_of_the_two_gives_the_bits_of_python_alone(budget: Any, keyed: bool) -> None:
    xs = [np.random.default_rng(i).standard_normal((3, 5)).astype(F) for i in range(6)]
    alone = fanin.InputBuffer(1, budget=budget)
    for i, x in enumerate(xs):
        alone.add(0, x, key=i if keyed else None)
    want = alone.take()[0].tobytes()
    for mask in range(64):
        ours = fanin.InputBuffer(1, budget=budget)
        c = Buffer.of_python(ours)
        order = reversed(range(6)) if keyed and mask % 2 else range(6)
        for i in order:
            (c if mask >> i & 1 else ours).add(0, xs[i], key=i if keyed else None)
        got = c.take(0) if mask % 3 else ours.take(slot=0)
        assert got.tobytes() == want


def test_the_memory_of_a_view_is_the_callers_when_the_add_returns() -> None:
    for budget in ("auto", 0, float("inf")):
        ours = fanin.InputBuffer(1, budget=budget)
        c, x = Buffer.of_python(ours), np.ones(4, F)
        for _ in range(3):
            c.add(0, x)
            x[:] = 7
            c.add(0, x[::-1])
            x[:] = 1
        assert ours.take()[0].tolist() == [24] * 4
        c.add(0, x)
        got = ours.take()[0]
        x[:] = 9
        assert got.tolist() == [1] * 4


def test_donated_memory_of_the_caller_takes_the_sum() -> None:
    ours = fanin.InputBuffer(1, budget=0)
    c, grad = Buffer.of_python(ours), np.ones(4, F)
    c.add(0, grad, donate=True)
    c.add(0, np.ones(4, F))
    got = c.take_values(0)
    assert got.data == grad.ctypes.data and grad.tolist() == [2] * 4
    api.drop(ct.byref(got))


def test_each_holds_what_the_other_takes() -> None:
    ours = fanin.InputBuffer(1)
    c, t = Buffer.of_python(ours), Deleted(np.arange(4, dtype=F))
    v = t.value()
    c.add(0, v)
    api.drop(ct.byref(v))
    got = ours.take()[0]
    assert got.tolist() == [0, 1, 2, 3] and np.shares_memory(got, t.x) and t.calls == 0
    del got
    gc.collect()
    assert t.calls == 1
    x = np.ones(4, F)
    gone = weakref.ref(x)
    ours.add(0, x)
    taken = c.take_values(0)
    assert taken.data == x.ctypes.data
    del x
    assert gone() is not None and dropped(taken).tolist() == [1] * 4
    assert gone() is None


def test_the_handle_keeps_the_buffer_and_gives_it_back() -> None:
    ours = fanin.InputBuffer(1)
    gone = weakref.ref(ours)
    one, other = Buffer.of_python(ours), Buffer.of_python(ours)
    assert api.buffer_to_python(one.at) is ours
    del ours
    one.free()
    gc.collect()
    other.add(0, np.ones(2, F))
    assert gone() is api.buffer_to_python(other.at)
    other.free()
    assert gone() is None


def test_only_an_input_buffer_is_one() -> None:
    for wrong, text in (
        (None, "expected a fanin.InputBuffer, got None"),
        ([1], "expected a fanin.InputBuffer, got a list"),
        (fanin.InputBuffer(1, create_graph=True), "create_graph=True"),
    ):
        with pytest.raises(TypeError, match=text):
            api.buffer_of_python(wrong)
    made = Buffer(1, name=b"grads")
    with pytest.raises(TypeError, match="grads was made by buffer_new, and Python has no object of it"):
        api.buffer_to_python(made.at)


@pytest.mark.rule("A16")
def test_expect_ready_target_clear_stats_and_explain_are_those_of_the_buffer() -> None:
    ours = fanin.InputBuffer([fanin.Slot((3,), F, name="w")], stats=True, name="grads")
    c = Buffer.of_python(ours)
    c.expect(0, 2)
    with c.target(0) as t:
        t += 1
    assert not ours.ready(0)
    with ours.target(0) as t:
        t += 1
    assert c.ready(0) and c.explain(0) == ours.explain(0)
    assert ours.take()[0].tolist() == [2] * 3
    assert c.stats(0).count == 3 and c.stats(0).absmax == ours.stats(0).absmax == 2
    c.add(0, np.ones(3, F))
    c.clear()
    assert c.counters() == {name: getattr(ours.counters, name) for name in c_api.COUNTERS}
    with pytest.raises(Failed, match=r"^grads: slot 0 \(w\): expected a gradient of shape \(3,\)") as e:
        c.add(0, np.ones(4, F))
    assert e.value.status == c_api.VALUE and e.value.slot_name == "w"


def test_a_sum_that_is_no_dense_array_is_refused_and_stays_for_python() -> None:
    for gradient in (SPARSE, Raises(), fanin.Zero((4,), "f4")):
        ours = fanin.InputBuffer(2, name="grads")
        ours.add(0, np.ones(4, F))
        ours.add(1, gradient)
        c = Buffer.of_python(ours)
        for take in (lambda c=c: c.take(1), c.take):
            with pytest.raises(Failed, match="grads: slot 1: take: the sum is no dense array: take it in Python") as e:
                take()
            assert e.value.status == c_api.TYPE
        assert c.take(0).tolist() == [1] * 4
        assert type(ours.take(slot=1)) is type(gradient)


def test_sparse_gradients_come_through_python_and_meet_dense_ones_of_c() -> None:
    ours = fanin.InputBuffer(1)
    c = Buffer.of_python(ours)
    c.add(0, np.ones(4, F))
    ours.add(0, SPARSE)
    assert c.take(0).tolist() == [1, 3, 1, 1]


class Raises:
    """A gradient of its author's own."""

    def __add__(self, other: Any) -> Any:
        raise KeyError("by +")

    __radd__ = __add__


def test_an_exception_of_python_is_set_or_is_the_text_where_there_is_no_interpreter() -> None:
    ours = fanin.InputBuffer(1, budget=0)
    c, why = Buffer.of_python(ours), c_api.Failure()
    ours.add(0, Raises())
    v, tensor = value(np.ones(3, F)), view(np.ones(3, F))
    with pytest.raises(Failed, match=r"KeyError: 'by \+'") as e:  # ctypes has released the lock
        c.add(0, v)
    assert e.value.status == c_api.PYTHON
    inside = ct.PYFUNCTYPE(*c_api.FUNCTIONS["buffer_add"])(c_api.table.buffer_add)
    with pytest.raises(KeyError, match=r"by \+"):
        inside(c.at, 0, ct.byref(tensor), None, ct.byref(why))
    assert why.status == c_api.PYTHON
    api.drop(ct.byref(v))


@pytest.mark.threads
def test_threads_of_both_languages_fill_one_buffer() -> None:
    ours = fanin.InputBuffer(1)
    c, each, errors = Buffer.of_python(ours), 200, []
    x = [np.full(64, 2.0**i, F) for i in range(4)]

    def run(i: int) -> None:
        try:
            for k in range(each):
                (ours if i % 2 else c).add(0, x[i], key=4 * k + i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and ours.take()[0].tolist() == [15.0 * each] * 64


def test_device_arrays_go_both_ways_and_stay_on_their_device() -> None:
    m = Machine()
    try:
        v = m.array(np.arange(3, dtype=F))
        shown = api.to_python(ct.byref(v))
        assert isinstance(shown, fanin.sim.Array)
        back = Value()
        assert api.of_python(shown, ct.byref(back)) == 0
        assert (back.data, back.device_type) == (v.data, c_api.SIM)
        ours = fanin.InputBuffer(1)
        c = Buffer.of_python(ours)
        c.add(0, back)
        ours.add(0, shown)
        got = ours.take()[0]
        assert isinstance(got, fanin.sim.Array) and got.numpy().tolist() == [0, 2, 4]
        for held in (v, back):
            api.drop(ct.byref(held))
        with pytest.raises(TypeError, match="expected an array or None, got NULL"):
            api_of_null(ct.byref(back))
    finally:
        m.close()


def api_of_null(out: Any) -> None:
    ct.PYFUNCTYPE(ct.c_int, ANY, ANY)(c_api.table.of_python)(None, out)


AT_EXIT = """
import ctypes as ct, numpy as np, fanin
from kit.c_api import api, Buffer
b = Buffer.of_python(fanin.InputBuffer(1))
b.add(0, np.ones(3, "f4"))
at = b.at
b.__class__.__del__ = lambda self: None
import atexit
atexit.register(lambda: api.buffer_free(at))
"""


def test_a_handle_that_is_freed_when_the_interpreter_ends_is_harmless() -> None:
    run_prepared(AT_EXIT)


def test_a_call_of_a_closed_context_is_one_of_the_buffer() -> None:
    ours = fanin.InputBuffer([fanin.Slot((3,), F)])
    c, t, v = Buffer.of_python(ours), ANY(), Value()
    call("buffer_target", c.at, 0, None, ct.byref(t), ct.byref(v))
    c.free()
    call("target_end", t, 1)
    assert ours.take()[0].tolist() == [0] * 3


def test_every_order_of_a_thread_of_each_language_gives_one_sum() -> None:
    def scenario(m: sim.Machine) -> list[float]:
        ours = fanin.InputBuffer(1)
        c = Buffer.of_python(ours)
        x = [np.full(2, 2.0**24, F), np.ones(2, F), np.full(2, -(2.0**24), F)]

        def in_c() -> None:
            c.add(0, x[0], key=0)
            c.add(0, x[2], key=2)

        m.spawn(in_c)
        m.spawn(lambda: ours.add(0, x[1], key=1))
        m.join()
        got: list[float] = c.take(0).tolist()
        c.free()
        return got

    report = sim.explore(scenario)
    assert report.ok and report.complete and report.runs > 1
