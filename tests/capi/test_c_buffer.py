"""The buffer of the C API (docs/c-api.md): its sums are InputBuffer's, on any thread, without the interpreter."""

from __future__ import annotations

import ctypes as ct
import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from kit import c_api
from kit.c_api import Buffer, Deleted, Failed, Gradient, Struct, Value, api, call, declared, dropped, seen, value, view
from kit.prepared import run_prepared
from kit.sample import sizes
from kit.support import sanitizer

pytestmark = pytest.mark.core

F = np.float32


def test_the_sum_of_views_is_theirs() -> None:
    b = Buffer(2)
    x = np.arange(4, dtype=F)
    b.add(0, x)
    b.add(0, x[::-1])
    b.add(1, None)
    assert [s if s is None else s.tolist() for s in b.take()] == [[3, 3, 3, 3], None]
    assert b.take() == [None, None]


# The same as Python's


def arrays(r: random.Random, dtype: str, shape: tuple[int, ...], n: int) -> list[Any]:
    g = np.random.default_rng(r.getrandbits(32))
    made = []
    for _ in range(n):
        x = np.asarray(np.asarray(g.standard_normal(shape) * 8).astype("i4" if dtype == "u1" else dtype).astype(dtype))
        layout = r.randrange(5)
        if layout == 1 and x.ndim:
            x = np.asfortranarray(x)
        elif layout == 2 and x.ndim:
            x = np.repeat(x, 2, axis=-1)[..., ::2]
        elif layout == 3 and x.ndim:
            x = x[::-1]
        elif layout == 4 and x.size:
            x = np.broadcast_to(x.reshape(-1)[:1].reshape((1,) * x.ndim), shape)
        made.append(x)
    return made


BUDGETS = {c_api.AUTO: "auto", c_api.EAGER: 0, c_api.FUSED: float("inf"), 100: 100}


@pytest.mark.parametrize("seed", range(60))
def test_sums_of_the_c_api_have_the_bits_of_input_buffer(seed: int) -> None:
    r = random.Random(seed)
    shape = r.choice([(), (3,), (16,), (4, 5), (2, 3, 4), (2, 1, 3, 2), (0, 3), (70, 300), (2, 2, 2, 2, 2)])
    dtype = r.choice(["f4", "f8", "f2", "i4", "u1", "c8", "?"])
    budget = r.choice(list(BUDGETS))
    stats = r.random() < 0.3 and dtype != "?"
    mine = Buffer(2, budget=budget, flags=c_api.STATS if stats else 0)
    ours = fanin.InputBuffer(2, budget=BUDGETS[budget], stats=stats)
    if r.random() < 0.3:
        exact, wide = dtype[0] == "f" and r.random() < 0.5, dtype == "f2"
        slot = declared(shape, dtype, accumulate="f4" if wide and not exact else None, exact=exact, name="w")
        mine = Buffer(2, [slot, slot], budget=budget, flags=c_api.STATS if stats else 0)
        how = {"accumulate": "exact" if exact else "float32" if wide else None}
        spec = fanin.Slot(shape=shape, dtype=dtype, name="w", **how)
        ours = fanin.InputBuffer([spec, spec], budget=BUDGETS[budget], stats=stats)
    for _ in range(3):
        keys = {s: r.sample(range(12), 12) if r.random() < 0.4 else None for s in (0, 1)}
        xs = arrays(r, dtype, shape, 12)
        for x in xs:
            slot = r.randrange(2)
            key = keys[slot].pop() if keys[slot] else None
            way = r.randrange(5)
            if way == 0:
                mine.add(slot, None, key=key)
                ours.add(slot, None, key=key)
                continue
            if way == 1:
                v = value(x)
                mine.add(slot, v, key=key, copy=r.random() < 0.3)
                api.drop(ct.byref(v))
            elif way == 2:
                mine.add_many([slot], [x], keys=None if key is None else [key])
            elif way == 3:
                mine.add(slot, x.copy("K") if x.flags.c_contiguous else x, key=key, copy=True)
            else:
                mine.add(slot, x, key=key)
            ours.add(slot, x, key=key)
        scale = r.choice([None, None, 2.0, 3])
        out = [np.empty(shape, dtype) for _ in range(2)] if r.random() < 0.2 else None
        one = r.randrange(2) if r.random() < 0.3 and not out else None
        if dtype == "?":
            scale = None
        writable = r.random() < 0.5
        if one is not None:
            got, want = [mine.take(one, scale=scale, writable=writable)], [ours.take(slot=one, scale=scale)]
            mine.clear()
            ours.clear()
        else:
            got = mine.take(scale=scale, out=out, writable=writable)
            want = ours.take(scale=scale)
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None)
            if g is not None:
                w = np.asarray(w)
                assert g.dtype == w.dtype and g.shape == w.shape and g.tobytes() == w.tobytes()
        for slot in () if one is not None or not stats else (0, 1):
            theirs, s = ours.stats(slot), mine.stats(slot)
            assert bool(s.defined) == (theirs is not None)
            if theirs is not None:
                assert (s.count, s.sumsq, s.absmax, s.nonfinite, s.norm) == (
                    theirs.count,
                    theirs.sumsq,
                    theirs.absmax,
                    theirs.nonfinite,
                    theirs.norm,
                )


@pytest.mark.rule("A9", "A10")
def test_shapes_and_dtypes_are_converted_as_for_input_buffer() -> None:
    b = Buffer(1, [declared((3,), F)])
    b.add(0, np.ones((2, 3)))
    b.add(0, np.ones(3, np.int16))
    assert b.take()[0].tolist() == [3, 3, 3]


# What is lent, copied, given away


@pytest.mark.rule("A14")
@pytest.mark.parametrize("budget", list(BUDGETS))
@pytest.mark.parametrize("way", ["plain", "key", "general", "many", "large"])
def test_lent_memory_is_never_the_sum(budget: int, way: str) -> None:
    b = Buffer(1, budget=budget)
    x = np.arange(200_000 if way == "large" else 4, dtype=F)
    if way == "many":
        b.add_many([0], [x])
    else:
        b.add(0, x[::-1] if way == "general" else x, key=0 if way == "key" else None)
    v = b.take_values(0)
    assert v.data and not x.ctypes.data <= v.data < x.ctypes.data + x.nbytes
    x[:] = 9
    assert dropped(v).max() == (199_999 if way == "large" else 3)


def test_lent_memory_is_read_at_the_take_and_copied_memory_is_not() -> None:
    b = Buffer(2, budget=c_api.FUSED)
    x = np.ones(4, F)
    b.add(0, x)
    b.add(1, x, copy=True)
    x[:] = 5
    assert [s.tolist() for s in b.take()] == [[5] * 4, [1] * 4]


@pytest.mark.rule("A14")
def test_a_single_value_is_handed_through_and_copied_where_it_must_be_writable() -> None:
    b = Buffer(1)
    v = value(np.arange(4, dtype=F))
    b.add(0, v)
    got = b.take_values(0)
    assert got.data == v.data
    api.drop(ct.byref(got))
    b.add(0, v)
    got = b.take_values(0, writable=True)
    assert got.data != v.data and dropped(got).tolist() == dropped(v).tolist() == [0, 1, 2, 3]


@pytest.mark.rule("A6")
def test_donated_memory_takes_the_sum() -> None:
    for budget in BUDGETS:
        b = Buffer(1, budget=budget)
        grad = np.ones(4, F)
        b.add(0, grad, donate=True)
        b.add(0, np.ones(4, F))
        got = b.take_values(0)
        assert got.data == grad.ctypes.data and grad.tolist() == [2] * 4
        api.drop(ct.byref(got))


def test_out_takes_the_sum_and_is_shown() -> None:
    b, out = Buffer(2), np.zeros(4, F)
    b.add(0, np.ones(4, F))
    b.add(0, np.ones(4, F))
    b.add(1, np.ones(3, F))
    sums = b.take_values(out=[out, None])
    assert sums[0].data == out.ctypes.data and out.tolist() == [2] * 4 and seen(sums[1]).tolist() == [1] * 3
    for v in sums:
        api.drop(ct.byref(v))


def test_debug_finds_lent_memory_that_its_caller_changed() -> None:
    x = np.ones(4, F)
    with fanin.set_options(debug=True):
        b = Buffer(1, name=b"grads")
        b.add(0, x, key=3)
        b.add(0, x, key=4)
        x[0] = 7
        with pytest.raises(Failed, match=r"grads: slot 0: the gradient added with key 3 was changed") as e:
            b.take()
    assert e.value.status == c_api.STATE and (e.value.object, e.value.slot, e.value.key) == ("grads", 0, -1)


def test_a_small_add_allocates_nothing() -> None:
    if not hasattr(_core, "_test_memory"):
        pytest.skip("allocations are counted by a development build")
    x, y = np.ones(16, F), value(np.ones(16, F))
    tensor, b = view(x), Buffer(1, budget=c_api.EAGER)
    why, o = c_api.Failure(), c_api.AddOptions(flags=c_api.KEY)
    for _ in range(3):
        b.add(0, x)
    before = _core._test_memory()
    for _ in range(100):
        assert api.buffer_add(b.at, 0, ct.byref(tensor), None, ct.byref(why)) == c_api.OK
        assert api.buffer_add_value(b.at, 0, ct.byref(y), None, ct.byref(why)) == c_api.OK
    assert _core._test_memory() == before
    assert b.take()[0].tolist() == [203] * 16
    parks = Buffer(1, budget=c_api.FUSED)
    for k in range(2):  # the first pass makes the list
        for i in range(64):
            o.key = i
            made = _core._test_memory()[1]
            assert api.buffer_add(parks.at, 0, ct.byref(tensor), ct.byref(o), ct.byref(why)) == c_api.OK
            assert k == 0 or _core._test_memory()[1] == made
        assert parks.take()[0].tolist() == [64] * 16
    api.drop(ct.byref(y))


@pytest.mark.parametrize("budget", list(BUDGETS))
def test_a_snapshot_is_the_sum_so_far_and_never_lent_memory(budget: int) -> None:
    b, x, v = Buffer(1, budget=budget), np.ones(4, F), Value()
    call("buffer_snapshot", b.at, 0, None, ct.byref(v))
    assert not v.array
    for n in (1, 2, 3):
        b.add(0, x)
        call("buffer_snapshot", b.at, 0, None, ct.byref(v))
        assert not x.ctypes.data <= v.data < x.ctypes.data + x.nbytes
        assert dropped(v).tolist() == [n] * 4
    assert b.take(0).tolist() == [3] * 4
    with pytest.raises(Failed, match="no slot 1"):
        call("buffer_snapshot", b.at, 1, None, ct.byref(v))
    assert not v.array


# Tensors that own their memory


def test_a_tensor_is_deleted_with_the_last_value_of_it() -> None:
    t = Deleted(np.arange(4, dtype=F))
    v, b = t.value(), Buffer(1)
    b.add(0, v)
    api.drop(ct.byref(v))
    assert t.calls == 0
    got = b.take_values(0)
    assert got.data == t.x.ctypes.data and t.calls == 0
    assert dropped(got).tolist() == [0, 1, 2, 3] and t.calls == 1


@pytest.mark.parametrize(
    "status, text, fields",
    [
        (c_api.BUFFER, "DLPack version 2.1; expected major version 1", {"major": 2}),
        (c_api.TYPE, "type code 2 with 80 bits", {"bits": 80}),
        (c_api.VALUE, "no device of type 77", {"device_type": 77}),
        (c_api.BUFFER, "simulated machine's memory", {"device_type": 12}),
        (c_api.VALUE, "has 65 axes", {"ndim": 65}),
        (c_api.VALUE, "at address NULL", {"data": None}),
        (c_api.VALUE, "and no shape", {"shape": None}),
    ],
)
def test_a_tensor_that_is_refused_is_deleted(status: int, text: str, fields: dict[str, Any]) -> None:
    t = Deleted(np.arange(4, dtype=F), **fields)
    with pytest.raises(Failed, match=text) as e:
        t.value()
    assert e.value.status == status and t.calls == 1


def test_a_value_goes_out_as_a_tensor_that_holds_its_memory() -> None:
    v, out = value(np.arange(6, dtype=F).reshape(2, 3)), ct.POINTER(c_api.Managed)()
    call("to_managed", ct.byref(v), ct.byref(out))
    api.drop(ct.byref(v))
    t = out.contents.tensor
    assert (t.ndim, t.shape[0], t.shape[1], t.device_type, t.bits) == (2, 2, 3, 1, 32)
    back = Value()
    call("of_managed", out, ct.byref(back))
    assert dropped(back).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(Failed, match="undefined"):
        call("to_managed", ct.byref(Value()), ct.byref(out))


def test_a_deleter_may_call_the_buffer_that_drops_its_tensor() -> None:
    for eager in (c_api.EAGER, c_api.FUSED):
        b = Buffer(2, budget=eager)
        x, calls = np.ones(4, F), []

        def again(b: Buffer = b, x: Any = x, calls: list[int] = calls) -> None:
            b.add(1, x)
            calls.append(b.counters()["adds"])

        for _ in range(3):
            v = Deleted(np.ones(4, F), again)
            t = v.value()
            b.add(0, t)
            calls.append(v)  # type: ignore[arg-type]
            api.drop(ct.byref(t))
        assert b.take(0).tolist() == [3] * 4
        assert b.take(1).tolist() == [3] * 4


def test_python_memory_in_a_buffer_needs_no_interpreter() -> None:
    b, v, x = Buffer(1), Value(), np.ones(4, F)
    assert api.of_python(x, ct.byref(v)) == 0
    b.add(0, v)
    b.add(0, v)
    api.drop(ct.byref(v))
    del x
    assert b.take()[0].tolist() == [2] * 4


# Errors


def test_a_failure_has_the_fields_of_its_text() -> None:
    b = Buffer(1, [declared((3,), F, name="w1")], name=b"grads")
    with pytest.raises(Failed, match=r"^grads: slot 0 \(w1\), key 7: expected a gradient of shape \(3,\)") as e:
        b.add(0, np.ones(4, F), key=7)
    f = e.value
    assert (f.status, f.object, f.slot, f.slot_name, f.key) == (c_api.VALUE, "grads", 0, "w1", 7)
    assert f.got == "(4,)" and f.expected.startswith("a gradient of shape (3,)")
    for slot in (1, 2**63):
        with pytest.raises(Failed, match="no slot") as e:
            b.add(slot, np.ones(3, F))
        assert e.value.status == c_api.INDEX
    with pytest.raises(Failed, match="no slot"):
        b.take(5)
    with pytest.raises(Failed, match="expected room for 1 sum"):
        call("buffer_take", b.at, None, (Value * 2)(), 2)
    assert b.take() == [None]


def test_a_failure_that_is_not_wanted_is_a_status_alone() -> None:
    b = Buffer(1)
    assert api.buffer_add(b.at, 3, None, None, None) == c_api.INDEX
    short = c_api.Failure(struct_size=16)
    assert api.buffer_add(b.at, 3, None, None, ct.byref(short)) == c_api.INDEX
    assert short.status == c_api.INDEX and short.text == b"" and short.slot == 0


@pytest.mark.parametrize(
    "options, text",
    [
        ({"struct_size": 8}, "struct_size: expected sizeof"),
        ({"struct_size": 4096}, "struct_size: expected sizeof"),
        ({"flags": 64}, "unknown bits 0x40"),
        ({"flags": c_api.KEY, "key": -1}, "key: expected a non-negative integer, got -1"),
        ({"flags": c_api.DONATE | c_api.COPY}, "give one of them"),
    ],
)
def test_options_that_are_none_are_refused_and_nothing_is_added(options: dict[str, int], text: str) -> None:
    b, x = Buffer(1), view(np.ones(3, F))
    with pytest.raises(Failed, match=text) as e:
        call("buffer_add", b.at, 0, ct.byref(x), ct.byref(c_api.AddOptions(**options)))
    assert e.value.status == c_api.VALUE
    if "key" not in options:
        one = Gradient(slot=0)
        with pytest.raises(Failed, match=text):
            call("buffer_add_many", b.at, ct.byref(one), 1, ct.byref(c_api.AddOptions(**options)))
    assert b.take() == [None]


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Buffer(1, struct_size=3), "fanin_buffer_options: struct_size"),
        (lambda: Buffer(1, flags=256), "unknown bits"),
        (lambda: Buffer(1, flags=4, accumulate=99), "there is no dtype 99"),
        (lambda: Buffer(1, flags=12), "expected one of accumulate and exact"),
        (lambda: Buffer(1, [declared((3,), F, accumulate="f8", exact=True)]), "expected one of accumulate and exact"),
        (lambda: Buffer(1, [declared((-3,), F)]), "non-negative extent"),
        (lambda: Buffer(1, [declared(device=(77, 0))]), "no device of type 77"),
        (lambda: Buffer(1, [Struct.__new__(c_api.Slot)]), "fanin_slot: struct_size"),
    ],
)
def test_a_buffer_of_wrong_options_is_not_made(make: Any, text: str) -> None:
    with pytest.raises(Failed, match=text):
        make()


def test_views_that_cannot_be_read_are_refused() -> None:
    b, x = Buffer(1), np.ones((2, 3), F)
    for fields, text in (
        ({"device_type": 2}, "a view is of memory on the CPU"),
        ({"device_type": 12}, "a view is of memory on the CPU"),
        ({"data": None}, "at address NULL"),
        ({"lanes": 4}, "4 lanes"),
        ({"ndim": -1}, "-1 axes"),
        ({"shape": None}, "and no shape"),
        ({"shape": c_api.ints([-2, -3])}, "expected a non-negative extent"),
        ({"shape": c_api.ints([2**32, 2**33])}, "too many bytes"),
        ({"byte_offset": 2**63}, "leaves the address space"),
    ):
        t = view(x)
        for name, field in fields.items():
            setattr(t, name, field)
        with pytest.raises(Failed, match=text):
            call("buffer_add", b.at, 0, ct.byref(t), None)
    with pytest.raises(Failed, match="the CPU has no streams"):
        b.add(0, x, stream=c_api.Stream(device_type=1))
    assert b.take() == [None]


def test_a_batch_is_added_as_a_whole_or_not_at_all() -> None:
    b, x = Buffer(2, budget=c_api.FUSED), np.ones(3, F)
    b.add_many([0, 1, 0], [x, value(x), None])
    for slots, xs, text in (
        ([0, 5], [x, x], "no slot 5"),
        ([0, 1], [x, np.ones(4, F)], r"slot 1: expected a gradient of shape \(3,\)"),
    ):
        with pytest.raises(Failed, match=text):
            b.add_many(slots, xs)
    both = Gradient(slot=0, view=ct.pointer(view(x)), value=ct.pointer(value(x)))
    with pytest.raises(Failed, match="gradient 0: expected a view or a value, got both"):
        call("buffer_add_many", b.at, ct.byref(both), 1, None)
    with pytest.raises(Failed, match="fanin_gradient: struct_size"):
        call("buffer_add_many", b.at, ct.byref(Gradient(struct_size=8)), 1, None)
    assert [s.tolist() for s in b.take()] == [[1] * 3, [1] * 3]
    b.add_many([0, 0], [x, 2 * x], keys=[1, 0])
    with pytest.raises(Failed, match="this key has contributed already"):
        b.add_many([0], [x], keys=[1])
    with pytest.raises(Failed, match="key: expected a non-negative"):
        b.add_many([0], [x], keys=[-1])
    assert b.take()[0].tolist() == [3] * 3


def test_every_allocation_that_fails_leaves_the_buffer_as_it_was() -> None:
    if not hasattr(_core, "_test_fail_at"):
        pytest.skip("allocations fail in a development build")
    x, f = np.ones((2, 3), F), np.ones((2, 3), order="F")

    def steps(b: Buffer) -> list[Any]:
        return [
            lambda: b.add(0, x),
            lambda: b.add(0, f[::-1]),
            lambda: b.add(0, x, copy=True),
            lambda: b.add(0, x.copy(), donate=True),
            lambda: b.add_many([0, 1], [x, f]),
            lambda: b.explain(0),
            lambda: b.take(),
            lambda: Buffer(9, [declared((2,), F, name="w")] * 9, name=b"n").free(),
        ]

    gc.collect()
    blocks, refused = _core._test_memory()[0], 0
    for at in range(len(steps(Buffer(2)))):
        for skip in range(100):
            b = Buffer(2)
            for step in steps(b)[: min(at, 5)]:
                step()
            _core._test_fail_at(skip)
            try:
                steps(b)[at]()
            except (Failed, MemoryError) as e:
                assert isinstance(e, MemoryError) or e.status == c_api.NOMEM
                done = False
                refused += 1
            else:
                done = True
            finally:
                _core._test_fail_at(-1, 0)
            n = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}.get(min(at, 5), 5) + (done and at < 5)
            if at != 6 or not done:
                got = b.take()[0]
                assert (got is None and n == 0) or (got is not None and got.tolist() == [[n] * 3] * 2)
            b.free()
            if done:
                break
    assert refused > 20
    gc.collect()
    assert _core._test_memory()[0] == blocks


# Threads


def in_threads(n: int, run: Any) -> None:
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            run(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


@pytest.mark.threads
@pytest.mark.parametrize("size", [4, 40_000])
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_threads_without_the_interpreter_fill_one_buffer(size: int, budget: int) -> None:
    b, each = Buffer(2, budget=budget), 30 if size > 4 else 300
    x = [np.full(size, 2.0**i, F) for i in range(3)]
    taken = np.zeros(size, F)

    def run(i: int) -> None:
        if i == 3:
            for _ in range(20):
                got = b.take(1)
                if got is not None:
                    taken[:] += got
            return
        v = value(x[i])
        for k in range(each):
            b.add(0, x[i], key=3 * k + i)
            b.add(1, v)
        api.drop(ct.byref(v))

    in_threads(4, run)
    rest = b.take()
    assert rest[0].tolist() == [7.0 * each] * size
    taken += rest[1] if rest[1] is not None else 0
    assert taken.tolist() == [7.0 * each] * size
    assert b.counters()["adds"] == 6 * each


@pytest.mark.threads
def test_a_deleter_may_wait_for_the_interpreter_of_a_thread_that_waits_for_the_buffer() -> None:
    b, x = Buffer(1, budget=c_api.EAGER), np.ones(8, F)
    add = ct.PYFUNCTYPE(*c_api.FUNCTIONS["buffer_add"])(c_api.table.buffer_add)  # keeps the interpreter
    tensor, kept = view(x), []  # type: tuple[Any, list[Deleted]]

    def run(i: int) -> None:
        for _ in range(300):
            if i:
                assert add(b.at, 0, ct.byref(tensor), None, None) == c_api.OK
            else:
                kept.append(Deleted(x))  # a deleter of Python's; the collector may end what nothing refers to
                v = kept[-1].value()
                b.add(0, v)
                api.drop(ct.byref(v))

    in_threads(3, run)
    assert b.take()[0].tolist() == [900] * 8
    assert [t.calls for t in kept] == [1] * 300


def test_counters_are_part_of_those_of_the_process() -> None:
    b, before = Buffer(1), fanin.counters().adds
    b.add(0, np.ones(3, F))
    b.add(0, np.ones(3, F))
    assert fanin.counters().adds == before + 2
    b.take()
    assert fanin.counters().adds == before + 2 == before + b.counters()["adds"]
    b.add(0, np.ones(3, F))
    b.free()
    assert fanin.counters().adds == before + 3


FORKED = """
import os, sys, threading
import numpy as np
from kit.c_api import Buffer, EAGER
b, x = Buffer(1, budget=EAGER), np.ones(1 << 20, "f4")
stop = threading.Event()
def run():
    while not stop.is_set():
        b.add(0, x)
t = threading.Thread(target=run)
t.start()
while b.counters()["adds"] < 3: pass
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        b.clear()
        b.add(0, x)
        b.add(0, x)
        os._exit(0 if b.take()[0].max() == 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
t.join()
"""


@pytest.mark.skipif("thread" in sanitizer(), reason="the thread sanitizer ends a child that starts threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("forks", sizes(5, 20))
def test_a_forked_child_uses_a_buffer_that_a_thread_of_its_parent_was_in(forks: int) -> None:
    run_prepared(FORKED, str(forks))


# The other calls


@pytest.mark.parametrize("slot", [1, 2**63])
@pytest.mark.parametrize(
    "called",
    [lambda b, slot: b.ready(slot), lambda b, slot: b.expect(slot, 1), lambda b, slot: b.stats(slot)],
    ids=["ready", "expect", "stats"],
)
def test_a_question_about_a_slot_that_is_not_there_is_refused(called: Callable[[Buffer, int], Any], slot: int) -> None:
    b = Buffer(1)
    with pytest.raises(Failed, match=f"no slot {slot}; it has 1") as e:
        called(b, slot)
    assert e.value.status == c_api.INDEX


@pytest.mark.rule("A16")
def test_expect_ready_and_one_too_many() -> None:
    b = Buffer(1)
    with pytest.raises(Failed, match="needs expect"):
        b.ready(0)
    b.expect(0, 2)
    b.add(0, np.ones(3, F))
    assert not b.ready(0)
    with pytest.raises(Failed, match="expected 2 contributions, got 1"):
        b.take()
    b.add(0, np.ones(3, F))
    assert b.ready(0)
    with pytest.raises(Failed, match="got one more"):
        b.add(0, np.ones(3, F))
    assert b.take()[0].tolist() == [2] * 3


def test_a_target_is_added_into_and_a_bad_one_poisons_until_clear() -> None:
    b = Buffer(1, [declared((3,), F)], budget=c_api.EAGER)
    with b.target(0, key=0) as t:
        t += 1
    b.add(0, np.ones(3, F), key=1)
    with b.target(0, key=2) as t:
        assert t.tolist() == [2] * 3
        t += 1
    assert b.take()[0].tolist() == [3] * 3
    for _ in range(2):
        b.add(0, np.ones(3, F))
    with pytest.raises(ZeroDivisionError), b.target(0):
        raise ZeroDivisionError
    with pytest.raises(Failed, match="the body of target"):
        b.take()
    b.clear()
    assert b.take() == [None]
    with pytest.raises(Failed, match="declares its shape and dtype"), Buffer(1).target(0):
        pass


@pytest.mark.rule("W1")
def test_a_target_has_a_weight() -> None:
    b = Buffer(1, [declared((3,), F)], budget=c_api.EAGER)
    b.add(0, np.ones(3, F))
    with b.target(0, weight=4) as t:
        assert t.tolist() == [0] * 3
        t += 2
    assert b.take()[0].tolist() == [9] * 3
    with pytest.raises(Failed, match="finite"), b.target(0, weight=float("nan")):
        pass


def test_stats_name_the_first_bad_key() -> None:
    b = Buffer(1, flags=c_api.STATS)
    for k, x in enumerate(([1, 2], [3, float("nan")], [float("inf"), 0])):
        b.add(0, np.array(x, F), key=k)
    b.take()
    s = b.stats(0)
    assert (s.defined, s.count, s.nonfinite, s.has_bad, s.first_bad_key) == (1, 2, 2, 1, 1)
    b.add(0, None, key=0)
    b.take()
    assert not b.stats(0).defined
    with pytest.raises(Failed, match="stats"):
        Buffer(1).stats(0)


@pytest.mark.parametrize("size", [1e200, 1e-200, 1.0])
def test_stats_have_the_norm_where_the_squares_leave_float64(size: float) -> None:
    b = Buffer(1, flags=c_api.STATS)
    b.add(0, np.array([3 * size, 4 * size, np.inf]))
    b.take()
    assert b.stats(0).norm == pytest.approx(5 * size, rel=1e-15)


@pytest.mark.parametrize("size", [56, 60, 64])
def test_a_caller_that_was_built_before_stats_had_a_norm_gets_as_many_bytes_as_it_has(size: int) -> None:
    b = Buffer(1, flags=c_api.STATS)
    b.add(0, np.array([3.0, 4.0]))
    b.take()
    memory = (ct.c_ubyte * 80)(*[0xA5] * 80)
    stats = c_api.Stats.from_buffer(memory)
    stats.struct_size = size
    call("buffer_stats", b.at, 0, ct.byref(stats))
    assert (stats.struct_size, stats.count, stats.sumsq, stats.defined) == (size, 2, 25.0, 1)
    assert bytes(memory)[size:] == b"\xa5" * (80 - size)
    assert size < 64 or stats.norm == 5.0
    for wrong in (0, 48, 55, 65):
        stats.struct_size = wrong
        with pytest.raises(Failed, match=f"fanin_stats: struct_size: expected .*, 64, got {wrong}"):
            call("buffer_stats", b.at, 0, ct.byref(stats))


def test_explain_is_input_buffers() -> None:
    mine, ours = Buffer(1, [declared((3,), F, name="w")]), fanin.InputBuffer([fanin.Slot((3,), "f4", name="w")])
    for b in (mine, ours):
        b.add(0, np.ones(3, F))
    one, other = mine.explain(0), ours.explain(0)
    assert (
        one.splitlines()[0]
        == other.splitlines()[0]
        == "InputBuffer: slot 0 (w): 1 contribution came, 1 of them parked."
    )
    with pytest.raises(IndexError, match="no slot 3"):
        mine.explain(3)


def test_a_freed_buffer_releases_everything() -> None:
    held = [Deleted(np.ones(3, F)) for _ in range(5)]
    b = Buffer(2)
    for t in held:
        v = t.value()
        b.add(0, v)
        api.drop(ct.byref(v))
    b.free()
    assert [t.calls for t in held] == [1] * 5
    api.buffer_free(None)
