"""`functionalize`: the wrapper, its guard, the pure function, the compiled one; each rule by itself. The law over
random programs is in tests/laws.
"""

from __future__ import annotations

import itertools
import threading
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
from kit.functionalized import F, Held, both, checks_of, itself, rule_of


def agree(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], **options: Any) -> None:
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
        agree(fn, overlapping, **way)


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
        agree(fn, make, **way)
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
        memory[1] = 77  # changed by other code at that time

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


CHECKS = checks_of(globals())


@pytest.mark.parametrize("check", CHECKS, ids=rule_of)
def test_a_rule(check: Callable[[], None]) -> None:
    check()


# What an undo must not touch, and what it must not leave


def raises(fn: Callable[..., object], *args: Any) -> list[str]:
    """Has a function run, which raises at its end; the notes of the error."""

    def stops(*args: Any) -> None:
        fn(*args)
        raise KeyError

    with pytest.raises(KeyError) as caught:
        analysis.functionalize(stops)(*args)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("n", [1_000, 1_000_000])
def test_memory_that_the_base_array_has_freed_is_neither_read_nor_written(n: int) -> None:
    base = np.ones(n)
    [note] = raises(lambda v: base.resize(10 * n, refcheck=False), base[:])
    assert note == (
        "functionalize: args[0] could not be put back: RuntimeError: "
        "the function resized the array that owns its memory, which is gone"
    )
    base = np.ones(n)
    analysis.functionalize(lambda v: base.resize(10 * n, refcheck=False))(base[1:])
    step = analysis.functionalize(lambda v: base.resize(10 * n, refcheck=False), [np.ones(n)[1:]])
    base = np.ones(n)
    step(base[1:])


def test_an_array_that_grew_and_is_of_another_dtype_is_put_back() -> None:
    for dtype in ("u1", "f4", "c16", [("a", "u1"), ("b", "f8")]):
        x = np.arange(6.0).reshape(2, 3).copy()

        def grows(x: Any, dtype: Any = dtype) -> None:
            x.resize(1800, refcheck=False)
            x.dtype = dtype

        assert not raises(grows, x)
        assert x.shape == (2, 3) and x.dtype == float and x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_names_of_fields_are_put_back() -> None:
    inner = np.dtype([("re", "f4"), ("im", "f4")])
    x = np.zeros(3, [("a", "f8"), ("b", inner, 2)])

    def renames(x: Any) -> None:
        x.dtype.names = ("c", "d")
        inner.names = ("x", "y")

    assert not raises(renames, x)
    assert x.dtype.names == ("a", "b") and x.dtype["b"].base.names == ("re", "im")


def test_one_array_that_cannot_be_put_back_keeps_no_other_from_it() -> None:
    base, y = np.ones(5), np.arange(3.0)
    held = [1]

    def fn(v: Any, y: Any, held: list[int]) -> None:
        y += 1
        held.clear()
        base.resize(10**6, refcheck=False)

    [note] = raises(fn, base[:2], y, held)
    assert "args[0]" in note and y.tolist() == [0, 1, 2] and held == [1]
