"""`functionalize`: the wrapper, its guard, the pure function, the compiled one; each rule by itself. The law over
random programs is in tests/laws.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import io
import itertools
import random
import re
import threading
import types
import warnings
from array import array as Buffer
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from fanin import analysis
from fanin import descriptors as d
from fanin.analysis import (
    BehaviourChangedError,
    GraphNames,
    LayoutChangedError,
    create_graph_signature,
    functionalize,
    picture,
)
from fanin.analysis import guards as guard_module
from fanin.analysis.calls import call_of
from kit.support import ROOT, run_python

#: Asked for its names, so that planted faults are met.
F = importlib.import_module("fanin.analysis.wrapper")


def itself(pure: Any) -> Any:
    return pure


def both(
    fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], calls: int = 2, **options: Any
) -> list[tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]]:
    """(result of fn, result of the wrapper, arguments of fn, arguments of the wrapper) of each of some calls."""
    wrapped = F.functionalize(fn, **options)
    found = []
    for _ in range(calls):
        one, two = make(), make()
        found.append((fn(*one), wrapped(*two), one, two))
    return found


def check_same(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], **options: Any) -> None:
    """Arguments and plain results are the same after both."""
    for expected, result, one, two in both(fn, make, **options):
        for a, b in zip((*one, expected), (*two, result), strict=True):
            np.testing.assert_array_equal(a, b)


WAYS: list[dict[str, Any]] = [{}, {"lend": True}, {"guard": "error"}, {"compiler": itself}]


# Writes


def overlapping() -> tuple[Any, ...]:
    w = np.arange(8.0)
    return w[:5], w[3:], w


def check_writes_reach_the_caller() -> None:
    def fn(a: Any, b: Any, w: Any) -> Any:
        a += 1
        b[::-1] *= 2
        np.asarray(w)[0] = 9
        return w.sum()

    for way in WAYS:
        check_same(fn, overlapping, **way)


def check_a_write_through_one_is_seen_by_another_within_the_call() -> None:
    def fn(a: Any, b: Any, w: Any) -> Any:
        a[4] = 50
        return b[1] + w[4]

    for way in WAYS:
        for expected, result, *_ in both(fn, overlapping, **way):
            assert expected == result == 100


def check_members_of_other_dtypes_are_one_base() -> None:
    def make() -> tuple[Any, ...]:
        memory = np.arange(40, dtype="u1")
        return memory[1:9].view("f4"), memory[4:12].view("i2"), memory[20:30][::-2].view("i1"), memory

    def fn(a: Any, b: Any, c: Any, memory: Any) -> None:
        a[:] = 1.5
        b[2] = -3
        c[1] = -1

    for way in WAYS:
        check_same(fn, make, **way)
    f = F.functionalize(fn, make())
    assert [x.expr() for x in f.pure.input_descs] == ["__make_synthetic_base(args[0])"]


def check_each_component_has_a_base_of_its_own() -> None:
    w = np.zeros((4, 6))
    args = w[:, 0], w[:2, 0], w[:, 1], w[1:, 1], w[:, 2], w[2:, 2], w[:, 3]

    def fn(a: Any, b: Any, c: Any, e: Any, f: Any, g: Any, h: Any) -> None:
        a += 1
        c += 1
        h += 1

    pure = F.functionalize(fn, args).pure
    assert [x.expr() for x in pure.input_descs] == [
        "__make_synthetic_base(args[0])", "__make_synthetic_base(args[2])", "args[4]", "args[5]", "args[6]",
    ]  # fmt: skip
    assert [x.expr() for x in pure.output_descs] == [
        "__input_mutation(__make_synthetic_base(args[0]))",
        "__input_mutation(__make_synthetic_base(args[2]))",
        "__input_mutation(args[6])",
        "output[0]",
    ]


def check_what_lies_between_is_not_written() -> None:
    memory = np.arange(12.0)

    def fn(column: Any) -> None:
        column += 1
        memory[1] = 77  # somebody else's, meanwhile

    for way in WAYS:
        memory[:] = np.arange(12.0)
        f = F.functionalize(fn, (memory[::3],), **way)
        f(memory[::3])
        f(memory[::3])
        assert memory.tolist() == [2, 77, 2, 5, 4, 5, 8, 7, 8, 11, 10, 11]


def check_nothing_changes_where_the_function_raises() -> None:
    stop = [False]

    def fn(a: Any, b: Any) -> None:
        a += 1
        b.shape = (2, 1)
        if stop[0]:
            raise KeyError("midway")

    for way in ({}, {"guard": "error"}, {"compiler": itself}):
        a, b = np.zeros(2), np.zeros(2)
        f = F.functionalize(fn, **way)
        stop[0] = False
        f(a, b)
        assert a.tolist() == [1, 1] and b.shape == (2, 1)
        b = b.reshape(2).copy()
        stop[0] = True
        with pytest.raises(KeyError, match="midway"):
            f(a, b)
        assert a.tolist() == [1, 1] and b.shape == (2,)


def check_read_only_arrays_stay_what_they_are() -> None:
    frozen = np.frombuffer(bytes(range(8)), "u1")

    def refused(x: Any) -> str:
        try:
            x[0] = 1
        except ValueError as e:
            return str(e)
        return "written"

    def made_writable(x: Any) -> str:
        try:
            x.flags.writeable = True
        except ValueError:
            return "cannot be"
        x[0] = 5
        return "can be"

    f = F.functionalize(refused)
    assert f(frozen) == f(frozen) == refused(frozen) and "read-only" in f(frozen)
    assert F.functionalize(made_writable)(frozen) == "cannot be"
    base = np.zeros(3)
    view = base.view()
    view.flags.writeable = False
    assert F.functionalize(made_writable)(view) == "can be"
    assert base.tolist() == [5, 0, 0] and view.flags.writeable


def check_padding_is_memory() -> None:
    kind = np.dtype([("a", "u1"), ("b", "f8")], align=True)

    def make() -> tuple[Any, ...]:
        x, y = np.zeros(3, kind), np.zeros((3, 2), kind)
        for array in (x, y):
            array.view("u1")[...] = np.arange(array.nbytes).reshape(array.view("u1").shape)
        return x, y[::2, 1]

    def fn(x: Any, y: Any) -> Any:
        x["a"] = 7
        return x.view("u1").sum()

    for way in WAYS:
        for expected, result, one, two in both(fn, make, **way):
            assert expected == result
            assert one[0].view("u1").tolist() == two[0].view("u1").tolist()
        f = F.functionalize(fn, **way)
        f(*make())
        assert [i.mutates_data for i in f.meta.input_info] == [True, False]


def check_what_is_no_part_of_the_layout_is_that_of_the_call() -> None:
    """Alignment, ownership, and whether read-only memory can be made writable."""

    def tries(x: Any) -> Any:
        aligned = x.flags.aligned, x.ctypes.data % 64, x.flags.owndata
        try:
            x.resize(x.size + 1, refcheck=False)
        except ValueError as e:
            return aligned[0], aligned[1], str(e)
        return aligned[0], x.size, "resized"

    memory = np.zeros(200, "u1")
    start = -memory.ctypes.data % 64
    made: list[Callable[[], Any]] = [
        lambda: memory[start : start + 24].view("f8"),
        lambda: memory[start + 8 : start + 32].view("f8"),
        lambda: memory[start + 3 : start + 27].view("f8"),
        lambda: np.zeros(3),
    ]
    for order in (made, made[::-1]):
        f = F.functionalize(tries)
        for one in (*order, *order):
            assert f(one()) == tries(one())
        assert f.layouts == 1

    def thaws(x: Any) -> str:
        try:
            x.flags.writeable = True
        except ValueError:
            return "cannot be"
        x[0] = 5
        return "can be"

    def read_only() -> Any:
        view = np.zeros(3, "u1").view()
        view.flags.writeable = False
        return view

    constant = bytes(3)
    for order in (
        (read_only, lambda: np.frombuffer(constant, "u1")),
        (lambda: np.frombuffer(constant, "u1"), read_only),
    ):
        f = F.functionalize(thaws)
        for one in (*order, *order):
            x = one()
            assert f(x) == thaws(one()) == ("can be" if x.any() else "cannot be")
        assert f.layouts == 1
    assert constant == bytes(3), "nobody has written what cannot be"
    f = F.functionalize(thaws, (read_only(),), compiler=itself)
    with pytest.raises(ValueError, match=r"args\[0\] was written, but its memory is read-only"):
        f(np.frombuffer(constant, "u1"))
    assert constant == bytes(3)
    pure = F.functionalize(tries, (memory[start + 3 : start + 27].view("f8"),)).pure
    assert pure(np.zeros(3))[:2] == [False, 3]


# Outputs


def check_outputs_are_the_callers_own() -> None:
    w = np.arange(8.0)
    a, b = w[:5], w[3:]

    def fn(a: Any, b: Any, w: Any) -> Any:
        b += 1
        fresh = np.zeros(4)
        v = a[1:]
        return a, v, v, b[::-1], w.reshape(2, 4), fresh, fresh[1:], [a], {"w": w}

    for way in WAYS:
        f = F.functionalize(fn, (a, b, w) if "compiler" in way else None, **way)
        for _ in range(3):
            x, v, v2, r, m, fresh, tail, box, named = f(a, b, w)
            assert x is a and box[0] is a and named["w"] is w and v is v2
            assert v.ctypes.data == a.ctypes.data + 8 and v.base is w and v.shape == (4,)
            assert r.ctypes.data == w.ctypes.data + 56 and r.strides == (-8,)
            assert m.base is w and m.shape == (2, 4)
            assert np.shares_memory(fresh, tail) and not np.shares_memory(fresh, w)
            assert tail.ctypes.data == fresh.ctypes.data + 8


def check_outputs_by_other_ways_are_the_callers_own() -> None:
    x = np.arange(4.0)
    for view in (lambda x: np.frombuffer(x, "u1"), lambda x: np.asarray(memoryview(x)), lambda x: np.from_dlpack(x)):
        f = F.functionalize(view)
        for _ in range(2):
            out = f(x)
            assert out.ctypes.data == x.ctypes.data and out.nbytes == 32


def check_what_lies_between_is_no_view_of_an_input() -> None:
    m = np.zeros((3, 2))
    f = F.functionalize(lambda x: (m[:, 1], m[1:, 0]))
    f(m[:, 0])
    assert [(o.output_type.name, o.base_idx) for o in f.meta.output_info] == [
        ("unsafe_view_alias", None),
        ("alias_of_input", 0),
    ]


def check_outputs_share_what_was_made_inside() -> None:
    def fn(x: Any) -> Any:
        t = x * 2
        return t[1:], t[:2], t[::-1], t[1:].view("u8")

    for way in WAYS:
        f = F.functionalize(fn, **way)
        for _ in range(2):
            outs = f(np.arange(3.0))
            start = outs[1].ctypes.data
            assert [o.ctypes.data - start for o in outs] == [8, 0, 16, 8]
            assert outs[3].dtype == "u8" and outs[0].tolist() == [2, 4] and outs[2].tolist() == [4, 2, 0]


def check_flags_of_outputs() -> None:
    def fn(x: Any) -> Any:
        frozen = x[1:]
        frozen.flags.writeable = False
        return np.broadcast_to(x, (2, 3)), frozen, x[:2]

    for way in WAYS:
        f = F.functionalize(fn, **way)
        for _ in range(2):
            assert [o.flags.writeable for o in f(np.ones(3))] == [False, False, True]


def check_classes_of_outputs_on_an_inputs_memory() -> None:
    x = np.zeros(4, [("a", "f8"), ("b", "i4")])
    out = F.functionalize(lambda x: x.view(np.recarray))(x)
    assert type(out) is np.recarray and np.shares_memory(out, x)

    def masked(x: Any) -> Any:
        x += 1
        return np.ma.array(x, copy=False)

    y = np.zeros(3)
    out = F.functionalize(masked)(y)
    assert type(out) is np.ma.MaskedArray and np.shares_memory(out, y) and y.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match=r"output\[0\] is a MaskedArray on the memory of an input"):
        F.functionalize(masked, compiler=itself)(y)
    assert y.tolist() == [1, 1, 1], "nothing was written"


# Geometry, flags, containers


def check_geometry_happens_to_the_callers_arrays() -> None:
    def fn(a: Any, b: Any, c: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            a.shape = (2, 2)
            a[0] = 7
            b.dtype = "u8"
            c.shape = (4, 1)
            c.strides = (0, 8)
        return a.T

    for way in WAYS:
        f = F.functionalize(fn, (np.ones(4), np.ones(4), np.ones(4)) if "compiler" in way else None, **way)
        for _ in range(2):
            a, b, c = np.ones(4), np.ones(4), np.ones(4)
            out = f(a, b, c)
            assert (
                a.shape == (2, 2)
                and a.tolist() == [[7, 7], [1, 1]]
                and np.shares_memory(out, a)
                and out.strides == (8, 16)
            )
            assert b.dtype == "u8" and c.shape == (4, 1) and c.strides == (0, 8)


def check_a_merged_array_can_change_its_geometry() -> None:
    def fn(a: Any, b: Any) -> None:
        a[1] = 5
        a.shape = (2, 2)

    for way in WAYS:
        for _, _, one, two in both(fn, lambda: (lambda w: (w[:4], w[1:]))(np.ones(6)), **way):
            assert one[0].shape == two[0].shape == (2, 2)
            assert one[1].tolist() == two[1].tolist() == [5, 1, 1, 1, 1]
    pure = F.functionalize(fn, (lambda w: (w[:4], w[1:]))(np.ones(6))).pure
    assert pure.output_descs[-1] == d.MetadataMutationAOTOutput(0)


def check_a_resize_happens_to_an_owner() -> None:
    def fn(x: Any) -> Any:
        x.resize(6, refcheck=False)
        x[5] = 9
        return x[4:]

    f = F.functionalize(fn)
    for _ in range(2):
        x = np.ones(4)
        out = f(x)
        assert x.tolist() == [1, 1, 1, 1, 0, 9] and np.shares_memory(out, x) and out.tolist() == [0, 9]


def check_flags_happen_to_the_callers_arrays() -> None:
    def fn(x: Any) -> Any:
        x[0] = 3
        x.flags.writeable = False
        return x[1:]

    for way in WAYS:
        f = F.functionalize(fn, **way)
        for _ in range(2):
            x = np.ones(2)
            out = f(x)
            assert not x.flags.writeable and not out.flags.writeable and x.tolist() == [3, 1]


def check_containers_are_the_callers_own() -> None:
    def fn(state: dict[str, Any], log: list[Any], pair: tuple[Any, Any]) -> Any:
        state["w"] = state["w"] - 1
        state["v"] += 1
        del state["old"]
        log.append(state["v"][1:])
        return state, log, pair, [log]

    f = F.functionalize(fn)
    for _ in range(2):
        v = np.zeros(3)
        w = np.ones(3)
        state, log = {"w": w, "v": v, "old": 3}, [v]
        out = f(state, log, (v, w))
        assert out[0] is state and out[1] is log and out[3][0] is log and out[2][0] is v
        assert list(state) == ["w", "v"] and state["v"] is v and v.tolist() == [1, 1, 1]
        assert state["w"] is not w and state["w"].tolist() == [0, 0, 0] and w.tolist() == [1, 1, 1]
        assert log[0] is v and np.shares_memory(log[1], v)


def check_results_of_any_class_are_on_the_callers_memory() -> None:
    kind = np.dtype([("a", "f8"), ("b", "i4")])

    def boxed(x: Any) -> Any:
        made = np.empty(1, object)
        made[0] = x[1:]
        return made

    cases: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda x: x.view(kind)[0], lambda o: o.__setitem__("a", 7)),
        (boxed, lambda o: o[0].fill(7)),
        (lambda x: np.ctypeslib.as_ctypes(x), lambda o: o.__setitem__(1, 7)),
        (memoryview, lambda o: o.__setitem__(1, 7)),
        (lambda x: x.flat, lambda o: o.__setitem__(1, 7)),
        (iter, lambda o: [next(o), None]),
        (lambda x: itertools.islice([x, x[1:]], 2), lambda o: next(o).fill(7)),
        (lambda x: {"w": x[1:]}.values(), lambda o: [v.fill(7) for v in o]),
        (lambda x: np.nditer(x, op_flags=[["readwrite"]]), lambda o: [v.fill(7) for v in o]),
        (lambda x: (v for v in [x[1:]]), lambda o: next(o).fill(7)),
        (Held, lambda o: o.array.fill(7)),
        (lambda x: np.ma.array(x, copy=False), lambda o: o.data.fill(7)),
        (lambda x: x.view(np.matrix), lambda o: o.fill(7)),
    ]
    for make, write in cases:
        seen = []
        for f in (make, F.functionalize(make)):
            for _ in range(2):
                x = np.arange(6.0)
                write(f(x))
                seen.append(x.tolist())
        assert seen[0] == seen[1] == seen[2] == seen[3], make
        assert make is iter or seen[0] != list(range(6))


def check_what_others_write_meanwhile_stays() -> None:
    closed = np.zeros(4)

    def fn(x: Any, y: Any) -> Any:
        x[0] += 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        closed[1] += 1
        return y[:1]

    def other() -> None:
        x[2] += 5
        y[1] += 5

    for way in WAYS[:3]:
        closed[:] = 0
        x, y = np.zeros(4), np.zeros(3)
        f = F.functionalize(fn, **way)
        for k in (1, 2):
            f(x, y)
            assert x.tolist() == [k, 0, 5 * k, 0] and y.tolist() == [0, 5 * k, 0], way
        y = closed
        if way != {"guard": "error"}:
            f(x, y)
            assert closed.tolist() == [0, 8, 0, 0]


def check_buffers_beside_an_array_are_one_memory() -> None:
    def fn(x: Any, raw: Any) -> Any:
        raw[0] = 3
        x[1] += raw[0]
        return bytes(raw)[:2]

    for make in (bytearray, lambda b: Buffer("B", b), lambda b: memoryview(bytearray(b))):
        f = F.functionalize(fn)
        for _ in range(2):
            raw = make(bytes(4))
            x = np.frombuffer(raw, "u1")
            assert f(x, raw) == b"\3\3" and x.tolist() == [3, 3, 0, 0]
        with pytest.raises(TypeError, match=r"args\[1\] shares memory with args\[0\]"):
            analysis.collect_metadata(fn, [x, raw])
        with pytest.raises(TypeError, match=r"args\[1\] shares memory with args\[0\]"):
            F.functionalize(fn, compiler=itself)(x, raw)
        assert x.tolist() == [3, 3, 0, 0]


def check_iterators_are_refused_among_the_arguments() -> None:
    a = np.zeros(3)
    for make in (
        lambda: iter([a]),
        lambda: iter((a,)),
        lambda: {"a": a}.values(),
        lambda: iter({"a": a}.items()),
        lambda: itertools.chain([a]),
        lambda: np.nditer(a),
        lambda: map(abs, [a]),
        lambda: iter(a),
        lambda: (x for x in [a]),
    ):
        for run in (lambda it: F.functionalize(list)(it), lambda it: analysis.collect_metadata(list, [it])):
            with pytest.raises(TypeError, match=r"args\[0\]: expected arrays in lists, tuples.*: pass list\(x\)"):
                run(make())


class Untagged(NamedTuple):
    x: Any
    y: Any


class Tagged(Untagged):
    """A named tuple with attributes."""

    note: str


def check_a_call_that_raises_leaves_all_as_it_was() -> None:
    def fn(a: Any, b: Any, c: Any, state: Any, v: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            a[0], b[...] = 9, 9
            a.shape, b.dtype = (2, 2), "u8"
            v.strides = (0,)
            c.resize(40, refcheck=False)
            c[:] = 5
            a.flags.writeable = False
            state["w"] = state.pop("x")
            state["log"].append(3)
            state["d"].clear()
        raise KeyError

    for way in WAYS[:3]:
        f = F.functionalize(fn, **way)
        for _ in range(2):
            a, b, c, d, v = np.ones(4), np.ones(2), np.ones(3), defaultdict(int, q=1), np.arange(3.0)
            log = [a]
            state = OrderedDict(x=a, log=log, d=d)
            with pytest.raises(KeyError):
                f(a, b, c, state, v[:])
            assert (
                a.shape == (4,)
                and a.tolist() == [1] * 4
                and a.flags.writeable
                and b.dtype == "f8"
                and b.tolist() == [1, 1]
            )
            assert c.tolist() == [1, 1, 1] and list(state) == ["x", "log", "d"] and log == [a] and dict(d) == {"q": 1}


def check_strides_that_mean_nothing_are_not_put_back() -> None:
    def stops(x: Any) -> None:
        x += 1
        raise KeyError

    wide, f = np.ones((4, 6)), F.functionalize(stops)
    for x in (np.ones((1, 3)), wide[:1, :3], wide[2:3, :3]):
        strides = x.strides
        with pytest.raises(KeyError):
            f(x)
        assert x.strides == strides and x.tolist() == [[1, 1, 1]]
    unmoved = np.arange(6.0)

    def hides(x: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            x.strides = (0,)
        raise KeyError

    with pytest.raises(KeyError):
        F.functionalize(hides)(unmoved)
    assert unmoved.tolist() == [0, 1, 2, 3, 4, 5] and unmoved.flags.c_contiguous, (
        "NumPy itself finds no way back from strides of 0"
    )


def check_private_memory_can_be_written_as_the_callers_can() -> None:
    view = np.zeros(3).view()
    view.flags.writeable = False
    seen = []

    def fn(x: Any) -> Any:
        try:
            x[0] = 1
            seen.append("written")
        except ValueError:
            seen.append("read-only")
        try:
            x.flags.writeable = True
            seen.append("thawed")
        except ValueError:
            seen.append("frozen")
        return np.from_dlpack(x) if x.flags.writeable else None

    for x in (np.zeros(3), view):
        meta = analysis.collect_metadata(fn, [x])
        assert (meta.output_info[0].output_type.name == "alias_of_input") is (seen[-1] == "thawed")
    assert seen == ["written", "thawed", "read-only", "thawed"]
    x = np.zeros(3)
    f = F.functionalize(lambda a, b: a.__iadd__(1), (x, x.view()), guard="error")
    with pytest.raises(
        ValueError, match=r"args\[1\]: identity: expected another array than args\[0\], on the same memory"
    ):
        f(x, x)
    assert not x.any()


def check_an_exception_carries_the_callers_array() -> None:
    def fn(x: Any) -> None:
        x += 1
        raise LookupError(x)

    x = np.zeros(2)
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            F.functionalize(fn)(x)
        assert caught.value.args[0] is x and x.tolist() == [0, 0]


def check_named_tuples_keep_their_attributes() -> None:
    def fn(p: Any) -> Any:
        p.x[0] += len(p.note)
        return p

    f = F.functionalize(fn)
    for _ in range(2):
        p = Tagged(np.zeros(2), 3)
        p.note = "abc"
        assert f(p) is p and p.x[0] == 3
    meta = analysis.collect_metadata(fn, [p])
    assert [i.mutates_data for i in meta.input_info] == [True, False] and p.x[0] == 3


def check_deeply_nested_lists_are_taken_apart() -> None:
    def fn(tree: Any) -> Any:
        while isinstance(tree, list):
            tree = tree[0]
        tree += 1
        return tree

    x = np.zeros(2)
    tree: Any = x
    for _ in range(900):
        tree = [tree]
    f = F.functionalize(fn)
    assert f(tree) is x and f(tree) is x and x.tolist() == [2, 2] and f.layouts == 1
    assert analysis.collect_metadata(fn, [tree]).input_info[0].mutates_data
    g = F.functionalize(lambda t: t, compiler=itself)
    assert g(tree) is tree and g(tree) is tree


def check_a_compiled_call_returns_the_callers_containers_and_classes() -> None:
    def fn(box: Any, pair: Any, x: Any, y: Any) -> Any:
        box[0][0] += 1
        return box, [box, {"p": pair}], y.view(np.matrix), x.view(np.recarray), (y * 2).view(np.matrix)

    f = F.functionalize(fn, compiler=itself)
    for _ in range(3):
        box, x = [np.zeros(2)], np.zeros(2, [("a", "f8")])
        pair = (x, 3)
        out = f(box, pair, x, np.ones((2, 2)))
        assert out[0] is box and out[1][0] is box and out[1][1]["p"] is pair and box[0].tolist() == [1, 0]
        assert type(out[2]) is np.matrix and type(out[3]) is np.recarray and np.shares_memory(out[3], x)
        assert type(out[4]) is np.matrix


def check_what_a_layout_wrote_counts_leaf_for_leaf_in_the_next() -> None:
    def fn(a: Any, b: Any, c: Any) -> None:
        c += 1

    f = F.functionalize(fn)
    a, b, c = np.zeros(2), np.zeros(2), np.zeros(2)
    f(a, a, b)
    f(a, b, c)
    assert [i.mutates_data for i in f.meta.input_info] == [False, False, True]
    g = F.functionalize(lambda a, b: a.__iadd__(1))
    g(a, b)
    for _ in range(3):
        assert g(a, a) is a
    assert a.tolist() == [4, 4] and g.meta.mutated_inp_runtime_indices == (0, 1)
    h = F.functionalize(lambda a, b: a.__iadd__(1))
    h(a, a)
    h(a, b)
    assert h.meta.mutated_inp_runtime_indices == (0,), "of a duplicate nobody knows through which leaf it was written"


def check_broadcast_arrays_cost_their_bytes() -> None:
    x = np.zeros(1)
    huge = as_strided(x, (1 << 30, 1 << 29), (0, 0))
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(100_000), 50_000)

    def fn(a: Any, b: Any) -> Any:
        a[0, 0] = 5
        return a[:2, :2]

    for way in ({}, {"lend": True}, {"guard": "error"}):
        f = F.functionalize(fn, **way)
        for _ in range(2):
            out = f(huge, windows)
            assert out.shape == (2, 2) and x[0] == 5 and np.shares_memory(out, x)
            x[0] = 0
    assert analysis.collect_metadata(fn, [huge, windows]).input_info[0].mutates_data and x[0] == 0
    few = as_strided(np.zeros(10), (4, 4), (8, 16))

    def last(a: Any) -> None:
        np.asarray(a)[-1, -1] = 1

    assert analysis.collect_metadata(last, [few]).input_info[0].mutates_data and not few.any()


# The guard


def check_duplicates_are_checked_at_each_call() -> None:
    def fn(a: Any, b: Any) -> Any:
        a += 1
        return a is b, b

    f = F.functionalize(fn)
    x, y = np.zeros(2), np.zeros(2)
    assert f(x, x)[0] and f(x, x)[1] is x and x.tolist() == [2, 2]
    assert not f(x, y)[0] and f(x, y)[1] is y and y.tolist() == [0, 0]
    twin = x.view()
    assert not f(x, twin)[0] and f(x, x)[0] and not f(x, twin)[0]
    assert f.layouts == 3


def check_empty_arrays_are_told_apart() -> None:
    def fn(a: Any, b: Any) -> bool:
        a.shape = (3, 0)
        return a is b and b.shape == (3, 0)

    f = F.functionalize(fn)
    assert not f(np.zeros((0, 3)), np.zeros((0, 3)))
    x = np.zeros((0, 3))
    assert f(x, x) and f.layouts == 2
    g = F.functionalize(fn, (np.zeros((0, 3)), np.zeros((0, 3))), guard="error")
    x = np.zeros((0, 3))
    with pytest.raises(
        ValueError, match=r"args\[1\]: identity: expected another array than args\[0\], found the same array"
    ):
        g(x, x)


def check_strides_that_mean_nothing_are_no_part_of_the_layout() -> None:
    w = np.zeros((4, 6))
    f = F.functionalize(lambda x: x.__iadd__(1), (w[:1, :3],), guard="error")
    y = np.zeros((1, 3))
    assert w[:1, :3].strides != y.strides and f(y) is y and y.tolist() == [[1, 1, 1]]
    with pytest.raises(ValueError, match=r"args\[0\]: shape"):
        f(np.zeros((1, 4)))


def check_the_guard_names_what_changed() -> None:
    w = np.zeros((6, 6))
    first = (w[0], w[1], w[1], {"p": w[2]}, 3)
    first = (*first[:2], first[1], *first[3:])

    def fn(a: Any, b: Any, c: Any, e: Any, n: Any) -> None:
        a += 1

    frozen = np.zeros(6)
    frozen.flags.writeable = False
    cases: list[tuple[tuple[Any, ...], str, Any]] = [
        (
            (w[0], w[1], w[2], {"p": w[3]}, 3),
            r"args\[2\]: identity: expected the very array that is args\[1\], found another",
            d.PlainAOTInput(2),
        ),
        (
            (w[0, :5], w[1], None, {"p": w[2]}, 3),
            r"args\[0\]: shape: expected \(6,\), found \(5,\)",
            d.PlainAOTInput(0),
        ),
        (
            (w[:, 0], w[1], None, {"p": w[2]}, 3),
            r"args\[0\]: strides: expected \(8,\), found \(48,\)|args\[0\]: overlap",
            d.PlainAOTInput(0),
        ),
        (
            (w[0].view("i8"), w[1], None, {"p": w[2]}, 3),
            r"args\[0\]: dtype: expected float64, found int64",
            d.PlainAOTInput(0),
        ),
        (
            (frozen, w[1], None, {"p": w[2]}, 3),
            r"args\[0\]: writeable: expected an array that can be written, found an array that is read-only",
            d.PlainAOTInput(0),
        ),
        (
            (w[0], w[1], None, {"p": w[0]}, 3),
            r"args\[3\] \(at args\[3\]\['p'\]\): identity|args\[3\].*overlap",
            d.PlainAOTInput(3),
        ),
        (
            (w[0], w[1], None, {"p": w.reshape(-1)[3:9]}, 3),
            r"args\[[013]\].*: overlap: expected no byte shared with args\[[013]\]",
            None,
        ),
        (
            (w[0], w[1], None, {"q": w[2]}, 3),
            r"expected arguments f\(\*, \*, \*, \{'p': \*\}, \*\), got f\(\*, \*, \*, \{'q': \*\}, \*\)",
            None,
        ),
        ((w[0], w[1], None, {"p": w[2]}, None), r"args\[4\]: type: expected int, found NoneType", d.PlainAOTInput(4)),
        (
            (w[0], w[1], None, {"p": w[2]}),
            r"expected arguments f\(\*, \*, \*, \{'p': \*\}, \*\), got f\(\*, \*, \*, \{'p': \*\}\)",
            None,
        ),
    ]
    f = F.functionalize(fn, first, guard="error")
    f(*first)
    for args, words, descriptor in cases:
        if len(args) > 2 and args[2] is None:
            args = (*args[:2], args[1], *args[3:])
        before = w.copy()
        with pytest.raises(ValueError, match=words) as caught:
            f(*args)
        assert type(caught.value).__name__ == "LayoutChangedError", words
        assert descriptor is None or caught.value.descriptor == descriptor
        assert (w == before).all()
    f(*first)


def check_the_guard_tells_overlaps_apart() -> None:
    w = np.zeros(20)

    def fn(a: Any, b: Any) -> None:
        a += 1

    f = F.functionalize(fn, (w[:6], w[4:10]), guard="error")
    f(w[8:14], w[12:18])
    for args, words in [
        ((w[:6], w[10:16]), "apart: expected bytes shared with"),
        ((w[:6], w[5:11]), "offset: expected the same place relative to"),
        ((w[4:10], w[:6]), "offset"),
    ]:
        with pytest.raises(ValueError, match=words):
            f(*args)
    g = F.functionalize(fn, (w[:6], w[6:12]), guard="error")
    g(w[6:12], w[:6])
    with pytest.raises(ValueError, match=r"overlap: expected no byte shared with args\[0\], found a shared one"):
        g(w[:6], w[5:11])


def check_what_is_an_array_and_what_not_is_part_of_the_layout() -> None:
    def fn(a: Any, b: Any) -> None:
        if isinstance(b, np.ndarray):
            b += 1
            raise KeyError

    f = F.functionalize(fn)
    f(np.zeros(2), None)
    b = np.zeros(2)
    with pytest.raises(KeyError):
        f(np.zeros(2), b)
    assert b.tolist() == [0, 0]


def check_layouts_are_recorded_one_by_one() -> None:
    f = F.functionalize(lambda x: x.__iadd__(1), layouts=3)
    for n in (2, 3, 4, 3, 2, 5, 2):
        x = np.zeros(n)
        assert f(x) is x and x.tolist() == [1] * n
    assert f.layouts == 3


def check_what_was_written_once_counts_as_written() -> None:
    def fn(x: Any, on: bool) -> None:
        if on:
            x += 1

    f = F.functionalize(fn)
    x = np.zeros(2)
    f(x, False)
    assert [i.expr() for i in f.pure.output_descs] == ["output[0]"]
    f(x, True)
    assert x.tolist() == [1, 1] and f.meta.input_info[0].mutates_data
    assert [i.expr() for i in f.pure.output_descs] == ["__input_mutation(args[0])", "output[0]"]
    f(np.zeros(3), False)
    assert f.meta.input_info[0].mutates_data, "a function that writes its argument at one layout does so at another"


# Behaviour that changes


def check_writes_that_differ_are_an_error_that_names_them() -> None:
    def fn(a: Any, b: Any, on: list[bool]) -> Any:
        a += 1
        if on[0]:
            b[0] = 9
        return a[1:] if on[0] is None else a

    a, b = np.zeros(2), np.zeros(2)
    f = F.functionalize(fn, (a, b, [False]), guard="error")
    f(a, b, [False])
    with pytest.raises(
        F.BehaviourChangedError,
        match=(
            r"args\[1\] is written by this call, and was not by the recorded one; the caller's arrays are as they were"
        ),
    ) as caught:
        f(a, b, [True])
    assert caught.value.descriptor == d.PlainAOTInput(1)
    assert a.tolist() == [1, 1] and b.tolist() == [0, 0]


def check_outputs_that_differ_are_an_error_that_names_them() -> None:
    def fn(a: Any, how: int) -> Any:
        b = a * 2
        if how == 4:
            a.shape = (2, 1)
        return [(a, b), (a[1:], b), (b, b), (a, b, a)][how % 4] if how < 4 else (a, b)

    f = F.functionalize(fn, (np.zeros(2), 0), guard="error")
    for how, words, descriptor in [
        (1, r"output\[0\] is a view of args\[0\], and was args\[0\]", d.PlainAOTOutput(0)),
        (2, r"output\[0\] is a value of its own, and was args\[0\]|output\[0\]", d.PlainAOTOutput(0)),
        (3, "the result is another tree", None),
        (4, r"args\[0\]: its geometry", d.PlainAOTInput(0)),
    ]:
        a = np.zeros(2)
        with pytest.raises(F.BehaviourChangedError, match=words) as caught:
            f(a, how)
        assert caught.value.descriptor == descriptor and a.shape == (2,)
    f(np.zeros(2), 0)


def check_lent_arrays_are_handed_out_themselves() -> None:
    seen = []
    x, y = np.zeros(2), np.zeros(2)

    def fn(x: Any, y: Any) -> Any:
        seen.append((x, y))
        x += 1
        return y, y[1:]

    f = F.functionalize(fn, lend=True)
    for _ in range(2):
        out = f(x, y)
        assert out[0] is y and out[1].base is y
    assert len(seen) == 2 and all(one is x and other is y for one, other in seen)
    stop = [False]

    def stops(x: Any, y: Any) -> None:
        x += 1
        if stop[0]:
            y += 1
            raise KeyError

    f, x, y = F.functionalize(stops, lend=True), np.zeros(2), np.zeros(2)
    f(x, y)
    stop[0] = True
    with pytest.raises(KeyError):
        f(x, y)
    assert x.tolist() == [1, 1] and y.tolist() == [1, 1], "what no call has written is not put back"
    for options in ({"guard": "error"}, {"compiler": itself}):
        with pytest.raises(ValueError, match="lend=True"):
            F.functionalize(fn, lend=True, **options)


# The pure function


def check_the_pure_function_writes_nothing() -> None:
    def fn(a: Any, b: Any, c: Any, n: int) -> Any:
        a[1:] += n
        b *= 2
        c[0] = 7
        return a, b[1:], c * 1

    w, c = np.arange(8.0), np.zeros(3)
    args = (w[:5], w[3:], c, 3)
    pure = F.functionalize(fn, args).pure
    expected = (w.copy(), c.copy())
    fn(expected[0][:5], expected[0][3:], expected[1], 3)
    base = w.view("u1").copy()
    inner = [base, c.copy(), 3]
    for x in inner[:2]:
        x.flags.writeable = False
    first, second = pure(*inner), pure(*inner)
    assert (base == w.view("u1")).all() and (inner[1] == c).all()
    assert first[0].view("f8").tolist() == expected[0].tolist() and first[1].tolist() == expected[1].tolist() == [
        7,
        0,
        0,
    ]
    for one, two in zip(first, second, strict=True):
        assert (one == two).all() and not np.shares_memory(one, two)
        assert not any(np.shares_memory(one, x) for x in inner[:2])
    assert [x.expr() for x in pure.output_descs] == [
        "__input_mutation(__make_synthetic_base(args[0]))",
        "__input_mutation(args[2])",
        "output[0]",
        "output[1]",
        "output[2]",
    ]
    assert len(first) == len(pure.output_descs)


def check_the_pure_function_takes_each_array_once() -> None:
    a, b, c = np.ones(2), np.ones(3), np.ones(4)

    def fn(a: Any, b: Any, a2: Any, c: Any) -> Any:
        a += 1
        return a2, c[1:]

    pure = F.functionalize(fn, (a, b, a, c)).pure
    assert [x.expr() for x in pure.input_descs] == ["args[0]", "args[1]", "args[3]"]
    inner = pure.inner_meta
    assert [i.mutates_data for i in inner.input_info] == [True, False, False]
    assert [(o.output_type.name, o.base_idx) for o in inner.output_info] == [("is_input", 0), ("alias_of_input", 2)]
    names = create_graph_signature(pure.names, inner)
    assert names.user_inputs_to_mutate == {"__input_mutation(args[0])": "args[0]"}
    assert names.user_outputs == ("output[0]", "output[1]")


def check_inner_metadata_has_bases() -> None:
    w = np.ones(6)

    def fn(a: Any, n: int, b: Any, c: Any) -> Any:
        b += 1
        a.shape = (2, 2)
        t = c * 2
        return a, c, t[1:], t[:1]

    f = F.functionalize(fn, (w[:4], 5, w[2:], np.ones(3)))
    inner = f.pure.inner_meta
    assert [x.expr() for x in f.pure.input_descs] == ["__make_synthetic_base(args[0])", "args[1]", "args[3]"]
    assert [(o.output_type.name, o.base_idx) for o in inner.output_info] == [
        ("alias_of_input", 0),
        ("is_input", 2),
        ("alias_of_intermediate_save_as_output", 0),
        ("alias_of_intermediate", 0),
        ("alias_of_input", 0),
    ]
    assert inner.num_forward_returns == len(f.pure.output_descs) == 7
    assert isinstance(f.pure.names, GraphNames)


def check_the_compiled_function_is_what_runs() -> None:
    ran = []

    def compiler(pure: Any) -> Any:
        def run(*inner: Any) -> list[Any]:
            ran.append(len(inner))
            return [np.array(v, copy=True) if isinstance(v, np.ndarray) else v for v in pure(*inner)]

        return run

    def fn(a: Any, b: Any, n: int) -> Any:
        a += n
        t = b * 2
        return a, a[1:], t, t[1:], n, b.T

    f = F.functionalize(fn, (np.ones(3), np.ones((2, 2)), 1), compiler=compiler)
    for k in range(1, 3):
        a, b = np.ones(3), np.ones((2, 2))
        out = f(a, b, k)
        assert out[0] is a and a.tolist() == [1 + k] * 3 and np.shares_memory(out[1], a) and np.shares_memory(out[5], b)
        assert np.shares_memory(out[2], out[3]) and out[4] == k
    assert ran == [3, 3]

    f = F.functionalize(fn, (np.ones(3), np.ones((2, 2)), 1), compiler=lambda pure: lambda *inner: [1])
    a = np.ones(3)
    with pytest.raises(
        ValueError,
        match=r"expected 7 values of the compiled function, __input_mutation\(args\[0\]\), output\[0\].*got 1",
    ):
        f(a, np.ones((2, 2)), 1)
    assert a.tolist() == [1, 1, 1]


def check_values_of_the_compiled_function_are_checked_before_a_write() -> None:
    w = np.arange(6.0)

    def fn(a: Any, b: Any, c: Any) -> Any:
        a += 1
        c += 1
        t = c * 2
        u = np.zeros(4)
        return t[1:], t[:1], u, u[2:]

    args = (w[:4], w[2:], np.zeros(3))
    for wrong, words in [
        (
            lambda v: [v[0][:-1], *v[1:]],
            r"__input_mutation\(__make_synthetic_base\(args\[0\]\)\): expected uint8, shape \(48,\); .* shape \(47,\)",
        ),
        (
            lambda v: [v[0], v[1].astype("f4"), *v[2:]],
            r"__input_mutation\(args\[2\]\): expected float64.* returned float32",
        ),
        (
            lambda v: [v[0], 0.0, *v[2:]],
            r"__input_mutation\(args\[2\]\): expected float64, shape \(3,\); .* shape \(\)",
        ),
        (lambda v: [*v[:4], v[4][:3], *v[5:]], r"output\[2\]: expected float64, shape \(4,\)"),
        (lambda v: [*v[:-1], v[-1][:1]], r"__intermediate_base\(output\[0\]\): expected float64, shape \(3,\)"),
    ]:
        f = F.functionalize(fn, args, compiler=lambda pure, wrong=wrong: lambda *inner: wrong(pure(*inner)))
        with pytest.raises(ValueError, match=words):
            f(*args)
        assert w.tolist() == [0, 1, 2, 3, 4, 5] and args[2].tolist() == [0, 0, 0]

    def strided(pure: Any) -> Any:
        """Values that lie otherwise than the recorded ones."""
        return lambda *inner: [v[::-1].copy()[::-1] if isinstance(v, np.ndarray) else v for v in pure(*inner)]

    t1, t0, u, u2 = F.functionalize(fn, args, compiler=strided)(*args)
    assert t1.tolist() == [2, 2] and t0.tolist() == [2] and t1.ctypes.data == t0.ctypes.data + 8
    assert np.shares_memory(u, u2) and u2.ctypes.data == u.ctypes.data + 16 and w.tolist() == [1, 2, 3, 4, 4, 5]


def check_the_pure_function_refuses_what_does_not_fit() -> None:
    def fn(a: Any, b: Any, on: bool) -> Any:
        a += 1
        if on:
            b += 1
        return b[1:] if on is None else b

    w = np.zeros(6)
    pure = F.functionalize(fn, (w[:4], w[:2].copy(), False)).pure
    a, b = np.zeros(4), np.zeros(2)
    for inner, words in [
        ((a, b), r"expected 3 arguments, args\[0\], args\[1\], args\[2\]; got 2"),
        ((a[:3], b, False), r"args\[0\]: expected an array of float64, shape \(4,\); got float64 \(3,\)"),
        ((a, b.astype("f4"), False), r"args\[1\]: expected an array of float64, shape \(2,\); got float32"),
        ((a, [1, 2], False), r"args\[1\]: expected an array .* got list"),
        ((a, b, True), r"args\[1\] is written, and was not at the recorded call"),
        ((a, b, None), r"output\[0\] is not what it was at the recorded call"),
    ]:
        with pytest.raises(ValueError, match=words):
            pure(*inner)
    assert not a.any() and not b.any()

    def grows(box: list[Any]) -> None:
        box.append(1)

    with pytest.raises(ValueError, match="changed a list or dict"):
        F.functionalize(grows, ([np.zeros(2)],)).pure(np.zeros(2))


# What is wrong


def check_bad_options_are_refused() -> None:
    for options, words in [
        ({"guard": "maybe"}, "expected guard among specialise, error; got 'maybe'"),
        ({"layouts": 0}, "layouts: expected an integer from 1 on, got 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            F.functionalize(lambda: None, **options)
    with pytest.raises(TypeError, match="expected a function, got 3"):
        F.functionalize(3)
    with pytest.raises(AttributeError, match="known from the first call on"):
        F.functionalize(lambda: None).meta


def check_bad_arguments_are_named() -> None:
    f = F.functionalize(lambda a, b: None)
    with pytest.raises(TypeError, match=r"takes 2 positional arguments, got 3: args\[2\]"):
        f(1, 2, 3)
    with pytest.raises(TypeError, match=r"functionalize: args\[1\]: expected an array of numbers"):
        f(1, np.array([None]))


# Containers


@dataclasses.dataclass
class Held:
    array: Any


class Boxed(list[Any]):
    pass


class Point(NamedTuple):
    x: Any
    y: Any


def check_containers_of_the_library_are_taken_apart_and_made_anew() -> None:
    def fn(d: Any, e: Any, p: Any) -> Any:
        d["a"][1:] = 5
        d.move_to_end("a")
        d["view"] = d["a"][1:]
        e["new"].append(d["a"])
        p.x[0] = 7
        return OrderedDict(z=d["a"], y=1), p, e, defaultdict(int, w=p.y[1:])

    for options in ({}, {"lend": True}):
        f = F.functionalize(fn, **options)
        for _ in range(2):
            seen = []
            for call in (fn, f):
                a, b, c = np.arange(4.0), np.arange(3.0), np.arange(5.0)
                d, e, p = OrderedDict(a=a, b=b), defaultdict(list), Point(b, c)
                out = call(d, e, p)
                assert type(out[0]) is OrderedDict and out[0]["z"] is a and out[1] is p and out[2] is e
                assert type(out[3]) is defaultdict and out[3].default_factory is int and out[3]["w"].base is c
                assert d["view"].base is a and e["new"][0] is a
                seen.append((list(d), list(out[0]), a.tolist(), b.tolist()))
            assert seen[0] == seen[1]
    meta = F.functionalize(lambda d: d["a"].fill(1), (OrderedDict(n=1, a=np.zeros(2)),)).meta
    assert [i.mutates_data for i in meta.input_info] == [False, True]

    def pure(d: Any) -> Any:
        d["a"] += 1
        return defaultdict(list, v=d["a"][1:])

    for expected, result, one, two in both(pure, lambda: (OrderedDict(a=np.zeros(2)),), compiler=itself):
        assert expected["v"].tolist() == result["v"].tolist() == [1] and one[0]["a"].tolist() == two[0]["a"].tolist()
        assert type(result) is defaultdict and result.default_factory is list


def check_arrays_out_of_sight_are_refused_among_the_arguments() -> None:
    ran = []

    def fn(x: Any) -> None:
        ran.append(x)

    a = np.zeros(3)
    boxes = [
        Held(a),
        Boxed([a]),
        collections.deque([[a]]),
        collections.UserList([a]),
        types.MappingProxyType({"a": a}),
        {1: Held({2: a})},
        [Boxed([Held(a)])],
        functools.partial(fn, a),
        iter(zip([a], strict=True)),
        map(abs, [a]),
        (x for x in [a]),
    ]
    for box in boxes:
        for run in (lambda box: F.functionalize(fn)(box), lambda box: analysis.collect_metadata(fn, [box])):
            with pytest.raises(TypeError, match=r"args\[0\].*: expected arrays in lists, tuples"):
                run(box)
    assert not ran and not a.any()
    f = F.functionalize(fn)
    for fine in (
        Held(3),
        Boxed([1]),
        collections.deque([2]),
        {1, 2},
        functools.partial(fn, 3),
        range(3),
        memoryview(b"x"),
    ):
        f(fine)
        f(fine)
        analysis.collect_metadata(fn, [fine])
    assert len(ran) == 21
    with pytest.raises(TypeError, match=r"args\[0\]: .* got a Held that holds a ndarray"):
        f(Held(a))  # of the layout of Held(3)


def check_memory_of_inputs_out_of_sight_is_refused_in_results() -> None:
    for hide in (
        Held,
        lambda v: Boxed([v]),
        lambda v: collections.deque([{"v": v}]),
        memoryview,
        lambda v: v.flat,
        lambda v: {"k": Held(v)},
    ):

        def fn(a: Any, hide: Any = hide) -> Any:
            a += 1
            return None, hide(a[1:])

        a = np.zeros(3)
        for run in (
            lambda a, fn=fn: F.functionalize(fn, compiler=itself)(a),
            lambda a, fn=fn: analysis.collect_metadata(fn, [a]),
        ):
            with pytest.raises(TypeError, match=r"output\[1\] is a \w+ that holds memory of an input"):
                run(a)
        assert not a.any(), "the caller's array is as it was"
        own = F.functionalize(lambda a, hide=hide: hide(a + 1))(a)
        assert type(own) is type(hide(a)), "memory of its own is the caller's to keep"

    def puts(a: Any, box: Any) -> None:
        a += 1
        box.append(Held(a))

    a, box = np.zeros(3), []
    F.functionalize(puts)(a, box)
    assert a.all() and box[0].array is a


def check_functions_that_run_later_are_refused() -> None:
    def generator(a: Any) -> Any:
        a += 1
        yield a

    async def coroutine(a: Any) -> None:
        a += 1

    async def both_of_them(a: Any) -> Any:
        yield a

    class Callable_:
        def __call__(self, a: Any) -> Any:
            yield a

    for fn, words in [
        (generator, "a generator function"),
        (functools.partial(generator, 1), "a generator function"),
        (Callable_(), "a generator function"),
        (coroutine, "a coroutine function"),
        (both_of_them, "an asynchronous generator function"),
    ]:
        for make in (F.functionalize, lambda fn: analysis.collect_metadata(fn, [np.zeros(3)])):
            with pytest.raises(
                TypeError, match=f"expected a function that has done its work when it returns, got {words}"
            ):
                make(fn)
    a = np.zeros(3)
    for later in (
        lambda a: (x for x in a),
        lambda a: map(abs, a),
        lambda a: [zip(a, a, strict=True)],
        lambda a: {1: generator(a)},
    ):
        with pytest.raises(TypeError, match=r"output\[0\] is a \w+: expected a result that is there when"):
            F.functionalize(later, compiler=itself)(a)
        with pytest.raises(TypeError, match=r"output\[0\] is a \w+: expected a result that is there when"):
            analysis.collect_metadata(later, [a])


class Machine:
    """A class with methods that write what they are given."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    @functionalize
    def step(self, x: Any) -> Any:
        """Scale in place."""
        x *= self.rate
        return x[1:]


def check_methods_are_bound() -> None:
    for rate in (2.0, 3.0):
        x, machine = np.ones(3), Machine(rate)
        view = machine.step(x)
        assert x.tolist() == [rate] * 3 and view.base is x
    assert Machine.step.layouts == 1 and machine.step.layouts == 1 and "args[1]" in repr(machine.step.pure)
    assert Machine.step.__doc__ == "Scale in place." and Machine.step(machine, x).base is x
    with pytest.raises(TypeError, match=r"takes 2 positional arguments, got 3"):
        machine.step(x, 3)


def check_a_function_that_calls_itself_has_one_record() -> None:
    for options in ({}, {"lend": True}, {"guard": "error"}, {"compiler": itself}):

        def fn(a: Any, n: int) -> Any:
            a += n
            if n > 0:
                f(a, n - 1)  # noqa: B023
            return a

        f = F.functionalize(fn, **options)
        a = np.zeros(2)
        assert f(a, 3) is a and a.tolist() == [6, 6] and f.layouts == 1
        assert f(a, 3) is a and f.layouts == 1


def check_a_function_that_changes_a_list_is_not_compiled() -> None:
    def fn(box: list[Any]) -> None:
        box[0] += 1
        box.append(3)

    a = np.zeros(2)
    box, words = [a], "changes a list or dict among its arguments: a compiled function cannot"
    f = F.functionalize(fn, compiler=itself)
    with pytest.raises(ValueError, match=words):
        f(box)
    with pytest.raises(ValueError, match=words):
        F.functionalize(fn, (box,), compiler=itself)
    assert len(box) == 1 and not a.any() and f.layouts == 0


def check_what_a_compiled_function_must_return_is_said() -> None:
    def fn(a: Any) -> Any:
        a += 1
        return a * 2

    for wrong, found in ((None, "None"), (np.ones(2), "a ndarray"), (3, "a int")):
        f = F.functionalize(fn, (np.zeros(2),), compiler=lambda pure, wrong=wrong: lambda *inner: wrong)
        a = np.zeros(2)
        with pytest.raises(
            TypeError,
            match=(
                r"expected 2 values of the compiled function, __input_mutation\(args\[0\]\), output\[0\], as a list;"
                rf" got {found}"
            ),
        ):
            f(a)
        assert not a.any()


def check_flags_are_counted_before_anything_runs() -> None:
    ran = []
    for flags in ([True], [True] * 3, ()):
        for who, run in (
            (
                "functionalize",
                lambda flags: F.functionalize(lambda a, b: ran.append(1), requires_grad=flags)(np.ones(1), 2),
            ),
            (
                "functionalize",
                lambda flags: F.functionalize(lambda a, b: ran.append(1), (np.ones(1), 2), requires_grad=flags),
            ),
            (
                "collect_metadata",
                lambda flags: analysis.collect_metadata(
                    lambda a, b: ran.append(1), [np.ones(1), 2], requires_grad=flags
                ),
            ),
        ):
            with pytest.raises(
                ValueError, match=rf"^{who}: requires_grad: expected a flag for each of the 2 inputs, got {len(flags)}"
            ):
                run(flags)
    assert not ran
    assert (
        F.functionalize(lambda a: None, (np.ones(1),), requires_grad=(True for _ in range(1)))
        .meta.input_info[0]
        .requires_grad
    )


CHECKS = [c for name, c in sorted(globals().items()) if name.startswith("check_") and name != "check_same"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_a_rule(check: Callable[[], None]) -> None:
    check()


def test_the_guard_of_one_layout_takes_other_memory_of_the_same_layout() -> None:
    w = np.zeros(20)
    guard = guard_module.Guard(call_of((w[:6], w[4:10]), {}, "test"))
    other = np.zeros(20)
    assert guard.arrays((other[8:14], other[12:18]), {}) is not None
    assert guard.change(call_of((other[8:14], other[12:18]), {}, "test")) is None
    assert guard.arrays((other[8:14], other[13:19]), {}) is None


def test_the_pages_example_prints_what_it_says() -> None:
    page = (ROOT / "docs" / "analysis.md").read_text()
    section = page.partition("## Functionalize")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1
    for code, printed in blocks:
        assert run_python(code).stdout == printed


def test_pictures_of_components() -> None:
    pytest.importorskip("matplotlib")
    w = np.zeros((4, 6))
    arrays = [w[:, 0], w[:2, :1], w[:, 3], np.zeros(0), np.zeros(())]
    text = analysis.alias_dot(arrays, ["a", 'b"', "c", "d", "e"])
    assert re.findall(r"n\d -- n\d", text) == ["n0 -- n1"] and text.count("subgraph") == 4
    assert 'n1 [label="b\\""]' in text and '{ label="152 bytes"; n0' in text
    for format, magic in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        out = io.BytesIO()
        analysis.alias_plot([*arrays, np.zeros((99, 99))[::2, ::2]], out, format=format)
        assert out.getvalue().startswith(magic)
    with pytest.raises(ValueError, match="no picture of the kind 'doc'"):
        analysis.alias_plot(arrays, io.BytesIO(), format="doc")
    with pytest.raises(ValueError, match="a name for each of 5 arrays, got 1"):
        analysis.alias_dot(arrays, ["a"])
    with pytest.raises(TypeError, match=r"args\[1\]: expected an ndarray, got int"):
        analysis.alias_dot([w, 3])


def test_runs_of_bytes_are_those_that_an_array_shows() -> None:
    memory = np.zeros(160, "u1")
    low = memory.ctypes.data
    draw = random.Random(20261121)
    several = 0
    for _ in range(300):
        shape = [draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 1, 2, 3]))]
        strides = [draw.choice([-6, -2, -1, 0, 1, 2, 3, 5, 8]) for _ in shape]
        x = np.ndarray(shape, draw.choice(["u1", "u2", "u4"]), buffer=memory, offset=80, strides=strides)
        memory[:] = 0
        x[...] = np.iinfo(x.dtype).max
        seen = {i for a, b in picture.runs(x) or [] for i in range(a - low, b - low)}
        assert seen == set(np.flatnonzero(memory).tolist())
        several += len(picture.runs(x) or []) > 1
    assert 50 < several < 250


def test_errors_are_value_errors() -> None:
    assert issubclass(LayoutChangedError, ValueError) and issubclass(BehaviourChangedError, ValueError)
    assert repr(functionalize(abs)) == "<functionalize(abs), 0 layouts>"


def test_what_has_no_bytes_keeps_its_old_geometry_in_what_a_pure_function_returns() -> None:
    def written_and_reshaped(x: Any) -> None:
        x[...] = x
        x.shape = (4,)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        f = functionalize(written_and_reshaped, (np.empty((4, 1), "V0"),), compiler=lambda pure: pure)
        for _ in range(2):
            x = np.empty((4, 1), "V0")
            f(x)
            assert x.shape == (4,)
