"""Calls of the C API that are wrong: each is refused by name, changes nothing, and leaves every result defined."""

from __future__ import annotations

import ctypes as ct
import threading
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from kit import c_api
from kit.c_api import (
    ANY,
    AddOptions,
    Buffer,
    Deleted,
    Failed,
    Gradient,
    Machine,
    Stream,
    TakeOptions,
    Tensor,
    Value,
    api,
    call,
    declared,
    ints,
    value,
    view,
)

pytestmark = pytest.mark.core

F = np.float32
GARBAGE = 0x5A


def garbage(n: int = 1) -> Any:
    """Values as they lie on a stack: a call that fails must leave them undefined, so that they can be dropped."""
    values = (Value * n)()
    ct.memset(values, GARBAGE, ct.sizeof(values))
    return values


def undefined(values: Any) -> bool:
    return all(not v.array and not v.data and v.size == 0 for v in values)


@pytest.mark.parametrize("n", [2**64 - 1, 2**61, 2**60 + 1, 2**56])
def test_more_slots_than_memory_can_hold_are_refused(n: int) -> None:
    """The product of 2**60 + 1 and the size of a slot wraps to a few bytes."""
    at = ANY(1)
    with pytest.raises(Failed, match=f"out of memory for {n} slots") as e:
        call("buffer_new", n, None, ct.byref(at))
    assert e.value.status == c_api.NOMEM and not at


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("buffer_add", lambda b: (b.at, 0, ct.byref(view(np.ones(3, F))), ct.byref(AddOptions(reserved=1)))),
        ("buffer_add_many", lambda b: (b.at, ct.byref(Gradient(slot=0)), 1, ct.byref(AddOptions(reserved=1)))),
        ("buffer_take", lambda b: (b.at, ct.byref(TakeOptions(reserved=1)), garbage(), 1)),
        ("buffer_take_one", lambda b: (b.at, 0, ct.byref(TakeOptions(reserved=1)), garbage())),
    ],
)
def test_a_reserved_field_is_0_so_that_it_can_get_a_meaning(name: str, arguments: Any) -> None:
    b = Buffer(1)
    with pytest.raises(Failed, match="reserved: expected 0, got 1") as e:
        call(name, *arguments(b))
    assert e.value.status == c_api.VALUE and b.counters()["adds"] == 0


def test_a_root_with_a_reserved_field_is_refused() -> None:
    w = fanin.Leaf(np.zeros(3, F))
    root = c_api.Root(node=id(w), reserved=1)
    with pytest.raises(ValueError, match="fanin_root: reserved: expected 0, got 1"):
        api.backward(ct.byref(root), 1, None)


def test_a_shape_that_is_null_is_refused() -> None:
    v = garbage()
    text = (ct.c_char * 512)()
    for name, arguments in (
        ("empty", (13, 2, None)),
        ("wrap", (view(np.ones(3, F)).data, 13, 2, None, None, None, None)),
    ):
        assert getattr(api, name)(*arguments, v, text) == c_api.VALUE and undefined(v)
        assert text.value == b"expected a shape of 2 extents, got NULL"
    slot = declared((3, 4), F)
    slot.shape = None
    with pytest.raises(Failed, match="fanin_slot: expected a shape of 2 extents, got NULL"):
        Buffer(1, [slot])


def test_arguments_that_are_null_are_refused_where_they_are_needed() -> None:
    b, v, out = Buffer(1), value(np.ones(3, F)), garbage()
    for status, text, name, arguments in (
        (c_api.VALUE, "expected 2 gradients, got NULL", "buffer_add_many", (b.at, None, 2, None)),
        (c_api.TYPE, "expected a tensor, got NULL", "of_managed", (None, out)),
        (c_api.TYPE, "expected a tensor, got NULL", "value_read", (ct.byref(v), None, None)),
    ):
        with pytest.raises(Failed, match=text) as e:
            call(name, *arguments)
        assert e.value.status == status
    assert undefined(out)
    api.drop(ct.byref(v))
    m = Machine()
    try:
        s = m.stream()
        for status, text, name, arguments in (
            (c_api.TYPE, "stream_wait: expected an event, got NULL", "stream_wait", (ct.byref(s), None)),
            (c_api.TYPE, "event_record: expected a stream, got NULL", "event_record", (None, ct.byref(ANY()))),
            (c_api.TYPE, "expected a tensor, got NULL", "machine_array", (m.at, 0, None, out)),
            (c_api.VALUE, "machine_spawn: expected a function, got NULL", "machine_spawn", (m.at, None, None)),
            (c_api.VALUE, "machine_launch: expected a function, got NULL", "machine_launch", (m.at, ct.byref(s), None)),
        ):
            with pytest.raises(Failed, match=text) as e:
                call(name, *arguments)
            assert e.value.status == status
        call("machine_join", m.at)
    finally:
        m.close()
    for free in ("buffer_free", "event_free", "machine_free"):
        getattr(api, free)(None)


def broadcast(x: Any, n: int) -> Tensor:
    t = view(x)
    t.ndim, t.shape, t.strides = 1, ints([n]), ints([0])
    return t


@pytest.mark.parametrize("budget", [c_api.AUTO, c_api.EAGER, c_api.FUSED])
def test_memory_to_write_into_must_not_overlap_itself(budget: int) -> None:
    b, x, y = Buffer(1, budget=budget), np.arange(3, dtype=F), np.zeros(3, F)
    for _ in range(2):
        b.add(0, x)
    out = (ct.POINTER(Tensor) * 1)(ct.pointer(broadcast(y, 3)))
    o, sums = TakeOptions(out=out), garbage()
    for name, arguments in (("buffer_take", (sums, 1)), ("buffer_take_one", (sums,))):
        before = (b.at,) if name == "buffer_take" else (b.at, 0)
        with pytest.raises(
            Failed, match="out: expected memory that can be written, got a tensor that overlaps itself"
        ) as e:
            call(name, *before, ct.byref(o), *arguments)
        assert e.value.status == c_api.BUFFER and undefined(sums)
    assert y.tolist() == [0] * 3 and b.take(0).tolist() == [0, 2, 4]
    v = value(x)
    with pytest.raises(Failed, match="value_read: expected memory that can be written"):
        call("value_read", ct.byref(v), None, ct.byref(broadcast(y, 3)))
    api.drop(ct.byref(v))
    y2 = np.zeros((2, 3), F)
    for _ in range(2):
        b.add(0, x)
    got = b.take_values(0, out=[y2[0, ::-1]])
    assert y2.tolist() == [[4, 2, 0], [0, 0, 0]]
    api.drop(ct.byref(got))


def test_donated_broadcast_memory_is_read_and_not_written() -> None:
    for budget in (c_api.AUTO, c_api.EAGER, c_api.FUSED):
        b, y, x = Buffer(1, budget=budget), np.ones(3, F), np.arange(3, dtype=F)
        o = AddOptions(flags=c_api.DONATE)
        call("buffer_add", b.at, 0, ct.byref(broadcast(y, 3)), ct.byref(o))
        b.add(0, x)
        assert b.take(0).tolist() == [1, 2, 3] and y.tolist() == [1] * 3


def test_donated_read_only_memory_of_python_is_not_written() -> None:
    for budget in (c_api.AUTO, c_api.EAGER, c_api.FUSED):
        b, x, v = Buffer(1, budget=budget), np.ones(3, F), Value()
        x.flags.writeable = False
        assert api.of_python(x, ct.byref(v)) == 0
        b.add(0, v, donate=True)
        api.drop(ct.byref(v))
        b.add(0, np.ones(3, F))
        assert b.take(0).tolist() == [2] * 3 and x.tolist() == [1] * 3


@pytest.mark.parametrize("flags", [1, 2, 3])
def test_donated_read_only_tensors_are_not_written(flags: int) -> None:
    for budget in (c_api.AUTO, c_api.EAGER, c_api.FUSED):
        t, b = Deleted(np.ones(3, F), flags=flags), Buffer(1, budget=budget)
        v = t.value()
        b.add(0, v, donate=True)
        api.drop(ct.byref(v))
        b.add(0, np.ones(3, F))
        assert b.take(0).tolist() == [2] * 3 and t.x.tolist() == [1] * 3 and t.calls == 1


def test_results_are_undefined_after_every_failure() -> None:
    b, v = Buffer(2), garbage(3)
    for name, arguments in (
        ("buffer_take", (b.at, None, v, 3)),
        ("buffer_take", (b.at, ct.byref(TakeOptions(struct_size=4)), v, 2)),
        ("buffer_take_one", (b.at, 7, None, v)),
        ("buffer_target", (b.at, 0, None, ct.byref(ANY(1)), v)),
        ("of_managed", (ct.byref(Deleted(np.ones(3, F), major=2).managed), v)),
    ):
        with pytest.raises(Failed):
            call(name, *arguments)
        assert undefined(v[: 2 if name == "buffer_take" else 1]), name
        ct.memset(v, GARBAGE, ct.sizeof(v))
    w = fanin.Leaf(np.zeros(3, F))
    edge = (c_api.Edge * 1)(c_api.Edge(next=id(w), slot=0))
    o = c_api.PassOptions(inputs=edge, ninputs=1)
    root = c_api.Root(node=id(w), slot=99)
    with pytest.raises(IndexError):
        api.grad(ct.byref(root), 1, ct.byref(o), v)
    assert undefined(v[:1])
    m, at = Machine(), ANY(1)
    try:
        with pytest.raises(Failed, match="has no device 3"):
            call("machine_array", m.at, 3, ct.byref(view(np.ones(2, F))), v)
        with pytest.raises(Failed, match="has the handle 999"):
            call("event_record", ct.byref(Stream(device_type=c_api.SIM, handle=999)), ct.byref(at))
        assert undefined(v[:1]) and not at
    finally:
        m.close()


@pytest.mark.parametrize("n", [0, 1, 3, ct.sizeof(Value) * 2, 2**64 - 1])
def test_a_take_with_room_for_another_number_of_sums_writes_only_as_many_as_there_are_slots(n: int) -> None:
    b, v = Buffer(2), garbage(4)
    with pytest.raises(Failed, match=f"room for 2 sums, one for each slot, got {n}$") as e:
        call("buffer_take", b.at, None, v, n)
    assert e.value.status == c_api.VALUE
    assert undefined(v[: min(n, 2)])
    assert bytes(v)[ct.sizeof(Value) * min(n, 2) :] == bytes(garbage(4))[ct.sizeof(Value) * min(n, 2) :]


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"bits": 4}, "elements of whole bytes, got 1 lanes of 4 bits"),
        ({"bits": 0}, "elements of whole bytes, got 1 lanes of 0 bits"),
        ({"lanes": 0}, "elements of whole bytes, got 0 lanes of 32 bits"),
        ({"byte_offset": 2**64 - 1}, "byte_offset 18446744073709551615 leaves the address space"),
        ({"device_type": 2}, "on different devices"),
        ({"ndim": 65}, "0 to 64 axes"),
    ],
)
def test_a_question_of_overlap_that_is_refused_is_unknown(fields: dict[str, int], text: str) -> None:
    x, v = np.ones(4, F), ct.c_int(0)
    wrong = view(x)
    for name, field in fields.items():
        setattr(wrong, name, field)
    with pytest.raises(Failed, match=text):
        call("overlap", ct.byref(view(x)), ct.byref(wrong), 0, None, None, ct.byref(v))
    assert v.value == 2
    pairs = view(x)
    pairs.bits, pairs.lanes = 4, 8  # eight elements of four bits: four bytes
    call("overlap", ct.byref(view(x)), ct.byref(pairs), 0, None, None, ct.byref(v))
    assert v.value == 1


def test_a_buffer_dropped_while_it_has_a_target_is_freed_when_the_target_ends() -> None:
    for good in (0, 1):
        held = Deleted(np.ones(3, F))
        b, t, v = Buffer(1, [declared((3,), F)]), ANY(), Value()
        call("buffer_target", b.at, 0, None, ct.byref(t), ct.byref(v))
        one = held.value()
        b.add(0, one)
        api.drop(ct.byref(one))
        b.free()
        assert held.calls == 0
        ct.memset(v.data, 1, 12)
        call("target_end", t, good)
        assert held.calls == 1


@pytest.mark.threads
@pytest.mark.parametrize("lends", [False, True])
def test_a_target_may_end_on_another_thread(lends: bool) -> None:
    b, t, v = Buffer(1, [declared((3,), F)], budget=c_api.EAGER), ANY(), Value()
    for _ in range(3 if lends else 0):
        b.add(0, np.ones(3, F))
    call("buffer_target", b.at, 0, None, ct.byref(t), ct.byref(v))
    ct.cast(v.data, ct.POINTER(ct.c_float))[0] += 4
    other = threading.Thread(target=lambda: call("target_end", t, 1))
    other.start()
    other.join()
    assert b.take(0).tolist() == ([7, 3, 3] if lends else [4, 0, 0])


@pytest.mark.parametrize("key", [0, 2**48 - 1, 2**48, 2**62, 2**63 - 2, 2**63 - 1])
def test_keys_of_the_whole_range_are_in_order_and_contribute_once(key: int) -> None:
    big, one = np.full(3, 2.0**24, F), np.ones(3, F)
    last, other = (key + 1 if key < 2**63 - 1 else 5), (key - 1 if key else 2)
    for first in (True, False):
        b = Buffer(1)
        for k, x in ((key, big), (other, one)) if first else ((other, one), (key, big)):
            b.add(0, x, key=k)
        with pytest.raises(Failed, match="this key has contributed already") as e:
            b.add(0, one, key=key)
        assert e.value.key == key
        b.add(0, -big, key=last)
        ours = fanin.InputBuffer(1)
        for k, x in ((key, big), (other, one), (last, -big)):
            ours.add(0, x, key=k)
        assert b.take(0).tobytes() == ours.take()[0].tobytes()


@pytest.mark.parametrize("where", ["object", "slot"])
def test_names_that_are_no_utf8_are_explained_all_the_same(where: str) -> None:
    name = b"\xff\xfe grads"
    slot = declared((3,), F)
    slot.name = name if where == "slot" else None
    b = Buffer(1, [slot], **({"name": name} if where == "object" else {}))
    b.add(0, np.ones(3, F))
    assert "�� grads" in b.explain(0)
    with pytest.raises(IndexError, match="no slot 9"):
        b.explain(9)
    b.free()


WAYS: dict[str, Any] = {
    "a plain value": lambda b, v: b.add(0, v),
    "with a key": lambda b, v: b.add(0, v, key=2**62),
    "copied": lambda b, v: b.add(0, v, copy=True),
    "given away": lambda b, v: b.add(0, v, donate=True),
    "many": lambda b, v: b.add_many([0, 1], [v, v]),
    "to another slot's dtype": lambda b, v: b.add(1, v),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("python", [False, True])
def test_a_tensor_is_deleted_once_whichever_allocation_fails(way: str, python: bool) -> None:
    if not hasattr(_core, "_test_fail_at"):
        pytest.skip("allocations fail in a development build")
    refused = 0
    for skip in range(200):
        t, x = Deleted(np.arange(6, dtype=F).reshape(2, 3).T), np.ones((3, 2), F)
        b = Buffer(2, [declared(), declared((3, 2), "f8")])
        if python:
            b = Buffer.of_python(fanin.InputBuffer([fanin.Slot(), fanin.Slot((3, 2), "f8")]))
        values = (Value * 3)()
        managed = ct.POINTER(c_api.Managed)()
        _core._test_fail_at(skip)
        try:
            call("of_managed", ct.byref(t.managed), ct.byref(values[0]))
            WAYS[way](b, values[0])
            b.add(1, x)
            call("to_managed", ct.byref(values[0]), ct.byref(managed))
            call("buffer_take", b.at, None, ct.byref(values[1]), 2)
            done = True
        except (Failed, MemoryError) as e:
            assert isinstance(e, MemoryError) or e.status in (c_api.NOMEM, c_api.PYTHON), e
            done = False
            refused += 1
        finally:
            _core._test_fail_at(-1, 0)
        for v in values:
            api.drop(ct.byref(v))
        if managed:
            managed.contents.deleter(ct.addressof(managed.contents))
        b.free()
        assert t.calls == 1, f"allocation {skip}"
        if done:
            break
    assert done and refused > 2
