"""`collect_metadata` on NumPy functions: each kind of input and output, by each route; what it is given stays as it
was.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from fanin import analysis
from fanin.analysis import MutationType, OutputType, arrays, collect, collect_metadata, functionalize

#: Names are read from the module at each use, so that a planted fault takes effect.
assert collect.collect_metadata

T = OutputType


def inputs(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return list(collect.collect_metadata(fn, args, **options).input_info)


def outputs(fn: Callable[..., Any], *args: Any) -> list[tuple[OutputType, int | None]]:
    return [(o.output_type, o.base_idx) for o in collect.collect_metadata(fn, args).output_info]


# Writes

ROUTES: dict[str, Callable[[Any], Any]] = {
    "an item": lambda x: x.__setitem__(0, 9),
    "a slice": lambda x: x.__setitem__(slice(1, 3), 9),
    "an operator in place": lambda x: x.__iadd__(1),
    "out=": lambda x: np.add(x, 1, out=x),
    "out= of a method": lambda x: x.cumsum(out=x),
    "out= of a function": lambda x: np.clip(x, 2, 3, out=x),
    "ufunc.at": lambda x: np.add.at(x, [0], 1),
    "copyto": lambda x: np.copyto(x, 7),
    "put": lambda x: np.put(x, [1], 7),
    "place": lambda x: np.place(x, x > 0, [7]),
    "fill": lambda x: x.fill(7),
    "sort": lambda x: x[::-1].sort(),
    "byteswap": lambda x: x.byteswap(inplace=True),
    "byteswap by position": lambda x: x.byteswap(True),
    "setfield": lambda x: x.setfield(5, np.dtype("i4"), 0),
    "a view of a view": lambda x: x.reshape(2, 2).T[1:].__setitem__(0, 9),
    "a view of another dtype": lambda x: x.view("u1").__setitem__(0, 9),
    "a view by the class": lambda x: x.view(np.ndarray).__setitem__(0, 9),
    "a view of another dtype by the class": lambda x: x.view("u1", type=np.ndarray).__setitem__(0, 9),
}
HIDDEN: dict[str, Callable[[Any], Any]] = {
    "asarray": lambda x: np.asarray(x).__setitem__(0, 9),
    "flat": lambda x: x.flat.__setitem__(0, 9),
    "memoryview": lambda x: memoryview(x).__setitem__(0, 9),
    "frombuffer": lambda x: np.frombuffer(x, "u1").__setitem__(0, 9),
    "ctypes": lambda x: ctypes.memset(x.ctypes.data, 7, 3),
    "the array interface": lambda x: as_strided(np.asarray(x), (2,), (8,)).__setitem__(0, 9),
    "DLPack": lambda x: np.from_dlpack(np.asarray(x)).__setitem__(0, 9),
}


@pytest.mark.parametrize("route", [*ROUTES, *HIDDEN])
def test_a_write_by_any_route_is_found(route: str) -> None:
    x, y = np.arange(4), np.arange(4)
    written, untouched = inputs(lambda x, y: {**ROUTES, **HIDDEN}[route](x), x, y)
    assert written.mutates_data and not untouched.mutates_data
    assert not written.mutates_metadata
    assert x.tolist() == y.tolist() == [0, 1, 2, 3], "the caller's arrays are as they were"
    assert written.mutations_hidden_from_autograd == (route in HIDDEN)


def check_routes() -> None:
    for route in [*ROUTES, *HIDDEN]:
        test_a_write_by_any_route_is_found(route)


def test_a_write_that_changes_no_byte_is_found_if_numpy_makes_it() -> None:
    for route in (
        lambda x: x.__imul__(1),
        lambda x: x.__setitem__(0, x[0]),
        lambda x: np.copyto(x, x.copy()),
        lambda x: x.sort(),
        lambda x: x[1:].fill(1),
    ):
        assert inputs(route, np.ones(3))[0].mutates_data


#: Writes of what is there already, to x, which is np.arange(6.); y is zeros of 6.
NO_CHANGE: dict[str, Callable[[Any, Any], Any]] = {
    "np.clip by position": lambda x, y: np.clip(x, 0, 99, x),
    "clip by position": lambda x, y: x.clip(0, 99, x),
    "np.round by position": lambda x, y: np.round(x, 0, x),
    "round by position": lambda x, y: x.round(0, x),
    "np.take by position": lambda x, y: np.take(x, range(6), 0, x),
    "take by position": lambda x, y: x.take(range(6), 0, x),
    "np.concatenate by position": lambda x, y: np.concatenate([x.copy()], 0, x),
    "np.dot by position": lambda x, y: np.dot(np.eye(6), x.copy(), x),
    "np.cumsum by position": lambda x, y: np.cumsum(np.diff(x, prepend=0), 0, None, x),
    "np.outer by position": lambda x, y: np.outer(np.ones(1), np.arange(6.0), x[None]),
    "np.sum by position": lambda x, y: np.sum(np.arange(6.0)[None], 0, None, x),
    "sum by position": lambda x, y: (y * 0 + x)[None].sum(0, None, x),
    "median, overwriting": lambda x, y: np.median(x, overwrite_input=True),
    "percentile, overwriting": lambda x, y: np.percentile(x, 50, overwrite_input=True),
    "nan_to_num without a copy": lambda x, y: np.nan_to_num(x, copy=False),
    "nan_to_num without a copy, by position": lambda x, y: np.nan_to_num(x, False),
    "copyto by name": lambda x, y: np.copyto(dst=x, src=x.copy()),
    "put by name": lambda x, y: np.put(a=x, ind=[0], v=[0.0]),
    "place by name": lambda x, y: np.place(arr=x, mask=x > 99, vals=[0]),
    "putmask": lambda x, y: np.putmask(x, mask=x > 99, values=0),
    "fill_diagonal by name": lambda x, y: np.fill_diagonal(a=x.reshape(1, 6), val=0),
    "put_along_axis by name": lambda x, y: np.put_along_axis(arr=x, indices=np.array([0]), values=0.0, axis=0),
    "the real part": lambda x, y: setattr(x, "real", x.copy()),
    "flat": lambda x, y: setattr(x, "flat", x.copy()),
    "linalg's out": lambda x, y: np.linalg.multi_dot([np.eye(6), np.arange(6.0)], out=x),
    "a member of a tuple": lambda x, y: np.modf(np.arange(6.0), out=(None, x)),
}


@pytest.mark.parametrize("name", NO_CHANGE)
def test_a_write_of_equal_values_is_found_for_every_way_to_name_the_array(name: str) -> None:
    x, y = np.arange(6.0), np.zeros(6)
    written, other = inputs(lambda x, y: NO_CHANGE[name](x, y) is None, x, y)
    assert written.mutates_data and not written.mutations_hidden_from_autograd and not other.mutates_data


def check_writes_of_what_is_there() -> None:
    for name in NO_CHANGE:
        test_a_write_of_equal_values_is_found_for_every_way_to_name_the_array(name)


def test_reads_are_no_writes() -> None:
    for fn in (
        lambda x: np.clip(x, 0, 9),
        lambda x: np.median(x),
        lambda x: np.percentile(x, 50, overwrite_input=False),
        lambda x: np.nan_to_num(x),
        lambda x: np.copyto(dst=np.zeros(6), src=x),
        lambda x: np.take(np.zeros(6), [0], 0, np.zeros(1)) + x,
        lambda x: np.concatenate([x], 0, np.zeros(6)),
        lambda x: x.sum(0, None, np.zeros(())),
        lambda x: x.real + x.imag,
        lambda x: x[3:3].__setitem__(..., 1),
        lambda x: np.nan_to_num(x.view("i8"), copy=False),
    ):
        assert not inputs(fn, np.arange(6.0))[0].mutates_data


#: Functions that return their argument itself.
SAME: dict[str, Callable[[Any], Any]] = {
    "asarray": np.asarray,
    "asanyarray": np.asanyarray,
    "ascontiguousarray": np.ascontiguousarray,
    "asfortranarray": np.asfortranarray,
    "array, copy=None": lambda x: np.array(x, copy=None),
    "require": lambda x: np.require(x, requirements="C"),
    "atleast_1d": np.atleast_1d,
    "np.squeeze": np.squeeze,
    "squeeze": lambda x: x.squeeze(),
    "np.real": np.real,
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "astype": lambda x: x.astype(float, copy=False),
    "__array__": lambda x: x.__array__(),
    "clip by position": lambda x: np.clip(x, 0, 9, x),
    "round by position": lambda x: np.round(x, 0, x),
    "sum by position": lambda x: np.sum(np.ones((2, 6)), 0, None, x),
    "take by position": lambda x: np.take(np.ones(6), range(6), 0, x),
    "nan_to_num": lambda x: np.nan_to_num(x, copy=False),
    "real_if_close": np.real_if_close,
    "getdata": np.ma.getdata,
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("owns", [True, False])
def test_an_output_that_is_the_input_is_distinguished_from_a_view_of_it(name: str, owns: bool) -> None:
    def make() -> Any:
        return np.arange(6.0) if owns else np.arange(9.0)[2:8]

    x = make()
    expected = (T.is_input, 0) if SAME[name](x) is x else (T.alias_of_input, 0)
    assert outputs(SAME[name], make()) == [expected]
    assert outputs(lambda x: SAME[name](x[...]), make()) == [(T.alias_of_input, 0)]
    x = make()
    assert outputs(lambda x, y: SAME[name](x), x, x[1:]) == [expected]
    f = functionalize(SAME[name], (make(),), guard="error")
    y = make()
    assert (f(y) is y) == (expected[0] is T.is_input)


def check_identity() -> None:
    for name in SAME:
        for owns in (True, False):
            test_an_output_that_is_the_input_is_distinguished_from_a_view_of_it(name, owns)


def test_an_input_that_is_returned_by_two_ways_is_one_object() -> None:
    f = functionalize(lambda a: list(np.broadcast_arrays(a, a)), (np.arange(3.0),), guard="error")
    a = np.arange(3.0)
    one, two = f(a)
    assert one is a and two is a


def test_a_write_that_changes_no_byte_counts_for_all_inputs_with_the_bytes() -> None:
    x = np.arange(6.0)

    def scaled(a: Any, b: Any, c: Any) -> None:
        a *= 1

    for args, expected in [
        ((x[:4], x[2:], x), [True, True, True]),
        ((x[2:], x[:4], x[5:]), [True, True, True]),
        ((x[:2], x[3:], x), [True, False, True]),
        ((x[:3], x[1:5], x[4:]), [True, True, False]),
        ((x[::2], x[1::2], x), [True, False, True]),
    ]:
        assert [i.mutates_data for i in inputs(scaled, *args)] == expected
    wrote = [i.mutates_data for i in inputs(lambda a, b: a[:2].__imul__(1) is None, x[:4], x[2:])]
    assert wrote == [True, False], "what was written is the view, not all of the array"


def test_a_write_that_is_refused_is_none() -> None:
    def fn(x: Any) -> None:
        for refused in (
            lambda: x.__setitem__(9, 1),
            lambda: np.add(x, np.ones(7), out=x),
            lambda: x.sort(axis=5),
            lambda: np.copyto(x, np.ones(9)),
        ):
            with contextlib.suppress(ValueError, IndexError):
                refused()
                raise AssertionError

    assert not inputs(fn, np.ones(3))[0].mutates_data


def test_reading_is_no_write() -> None:
    def reads(x: Any) -> Any:
        y = x.copy()
        y[0] = 5
        z = np.zeros_like(x)
        z += x * 2
        np.add(x, 1, out=y)
        x.astype("f4")[0] = 3
        x[[0, 1]][0] = 7
        x.flatten()[0] = 8
        np.sort(x)[0] = 1
        np.ndarray.copy(x)[0] = 2
        return float(x.sum()), x.mean(), x.max(), np.linalg.norm(x), y, z

    x = np.arange(4.0)
    assert not inputs(reads, x)[0].mutates_data
    assert [t for t, _ in outputs(reads, x)] == [T.non_alias] * 6


def test_a_write_counts_for_all_inputs_with_the_byte() -> None:
    w = np.arange(8.0)
    infos = inputs(lambda a, b, c: a.__setitem__(3, 9), w[:4], w[3:6], w[6:])
    assert [i.mutates_data for i in infos] == [True, True, False]
    assert not infos[1].mutations_hidden_from_autograd, "the write by the other was seen"


def test_bits_count_not_values() -> None:
    x = np.array([0.0, np.nan])
    assert inputs(lambda x: np.asarray(x).__setitem__(0, -0.0), x)[0].mutates_data
    assert not inputs(lambda x: np.asarray(x).__setitem__(1, x[1]), x)[0].mutates_data, "the same NaN is the same bits"
    padded = np.zeros(3, np.dtype([("a", "u1"), ("b", "f8")], align=True))
    assert inputs(lambda x: ctypes.memset(x.ctypes.data + 1, 1, 1), padded)[0].mutates_data, "padding is memory, too"
    wide = np.zeros(2, np.longdouble)
    if wide.itemsize == 16:
        assert inputs(lambda x: ctypes.memset(x.ctypes.data + 15, 1, 1), wide)[0].mutates_data


# Geometry


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("shape", lambda x: setattr(x, "shape", (2, 2))),
        ("strides", lambda x: setattr(x, "strides", (0,))),
        ("dtype", lambda x: setattr(x, "dtype", "u8")),
        ("narrower dtype", lambda x: setattr(x, "dtype", "f4")),
    ],
)
def test_geometry_that_changes_is_metadata(what: str, change: Callable[[Any], None]) -> None:
    def fn(x: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            change(x)

    x = np.arange(4.0)
    (info,) = inputs(fn, x)
    assert info.mutates_metadata and not info.mutates_data and not info.mutates_storage_metadata
    assert x.shape == (4,) and x.strides == (8,) and x.dtype == "f8"


def test_geometry_that_comes_back_is_no_change() -> None:
    def there_and_back(x: Any) -> None:
        x.shape = (2, 2)
        x.shape = (4,)

    assert not inputs(there_and_back, np.arange(4.0))[0].mutates_metadata


def test_a_resize_is_other_memory() -> None:
    x = np.arange(4.0)
    (info,) = inputs(lambda x: x.resize(9, refcheck=False), x)
    assert info.mutates_storage_metadata and info.mutates_metadata and not info.mutates_data
    assert x.shape == (4,)


def test_data_and_geometry_together() -> None:
    def both(x: Any) -> None:
        x.shape = (2, 2)
        x[1] = 5

    (info,) = inputs(both, np.arange(4.0))
    assert info.mutates_data and info.mutates_metadata


# Autograd's columns


def test_writes_under_no_grad_are_distinguished() -> None:
    grad = [True]

    @contextlib.contextmanager
    def no_grad() -> Any:
        grad[0] = False
        yield
        grad[0] = True

    def fn(a: Any, b: Any, c: Any) -> None:
        with no_grad():
            a += 1
            b += 1
        b += 1

    infos = inputs(fn, np.ones(2), np.ones(2), np.ones(2), grad_enabled=lambda: grad[0])
    assert [i.mutations_under_no_grad_or_inference_mode for i in infos] == [True, False, False]


def test_who_writes_follows_from_the_flags() -> None:
    def fn(a: Any, b: Any, c: Any) -> None:
        a += 1
        np.asarray(b)[0] = 5
        c[0] = 7

    args = [np.ones(2), np.ones(2), np.ones(2)]
    out = collect.collect_metadata(fn, args)
    assert [i.mutation_type for i in out.input_info] == [MutationType.MUTATED_OUT_GRAPH] * 3
    kept = collect.collect_metadata(fn, args, keep_input_mutations=True, requires_grad=[False, True, True])
    assert [i.mutation_type.name for i in kept.input_info] == [
        "MUTATED_IN_GRAPH",
        "MUTATED_IN_GRAPH",
        "MUTATED_OUT_GRAPH",
    ]
    assert kept.keep_input_mutations


def test_tangents_come_in_order() -> None:
    def fn(a: Any, b: Any) -> Any:
        a += 1
        t = b * 2
        return t[1:], t[:1], b.sum(keepdims=True), a * b, np.arange(3)

    meta = collect.collect_metadata(fn, [np.ones(3), np.ones(3)], requires_grad=[True, False])
    assert [d.expr() for d in meta.traced_tangents_descs] == [
        "__output_tangent(__input_mutation(args[0]))",
        "__output_tangent(output[2])",
        "__output_tangent(output[3])",
        "__output_tangent(__intermediate_base(output[0]))",
    ]
    assert [t.shape for t in meta.traced_tangents] == [(3,), (1,), (3,), (3,)]
    assert collect.collect_metadata(fn, [np.ones(3), np.ones(3)]).traced_tangents == ()


# Outputs


def test_each_kind_of_output() -> None:
    def fn(a: Any, b: Any) -> Any:
        t, own, other, alone = np.arange(6.0), np.zeros(3), np.zeros(4), np.zeros(5)
        return (
            a,
            a[1:],
            b.T,
            b,
            t[:2],
            t[4:],
            own,
            own[1:],
            other,
            other,
            alone[1:],
            a + 1,
            7,
            None,
            "word",
            np.float64(2),
        )

    assert outputs(fn, np.ones(3), np.ones((2, 2))) == [
        (T.is_input, 0), (T.alias_of_input, 0), (T.alias_of_input, 1), (T.is_input, 1),
        (T.alias_of_intermediate_save_as_output, 0), (T.alias_of_intermediate, 0),
        (T.non_alias, None), (T.alias_of_intermediate_base_is_user_output, 6),
        (T.non_alias, None), (T.alias_of_intermediate_base_is_user_output, 8),
        (T.unsafe_view_alias, None), (T.non_alias, None),
        (T.non_alias, None), (T.non_alias, None), (T.non_alias, None), (T.non_alias, None),
    ]  # fmt: skip


def test_an_element_or_a_copy_is_no_view() -> None:
    x = np.arange(4.0)
    for fresh in (
        lambda x: x[[0, 1]],
        lambda x: x[x > 1],
        lambda x: x[0],
        lambda x: x.copy(),
        lambda x: +x,
        lambda x: x.astype("f8"),
    ):
        assert outputs(fresh, x) == [(T.non_alias, None)]


def test_bases_are_counted() -> None:
    def fn() -> Any:
        s, t = np.arange(4.0), np.arange(4.0)
        return s[1:], t[1:], s[:1], t[::-1]

    meta = collect.collect_metadata(fn, [])
    assert meta.num_intermediate_bases == 2
    assert [o.base_idx for o in meta.output_info] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x.T,
        lambda x: x.reshape(-1),
        lambda x: np.broadcast_to(x, (2, 3, 4)),
        lambda x: x[::-1, ::2],
        lambda x: x[0],
        lambda x: x.diagonal(),
        lambda x: x.view("i8"),
        lambda x: np.asarray(x)[1:],
        lambda x: as_strided(x, (2,), (0,)),
        lambda x: x[..., None],
        lambda x: x[1, 1, ...],
        lambda x: np.frombuffer(x, "u1"),
        lambda x: np.moveaxis(x, 0, 1),
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 2, 1),
        lambda x: x[5:],
        lambda x: np.asarray(x)[...],
        lambda x: np.squeeze(x[:1]),
        lambda x: x.view(np.ndarray),
        lambda x: x.view(),
    ],
)
def test_a_view_of_an_input_is_found_by_its_memory(view: Callable[[Any], Any]) -> None:
    assert outputs(lambda y, x: view(x), np.ones(2), np.ones((3, 4))) == [(T.alias_of_input, 1)]


def test_of_overlapping_inputs_the_one_is_named_whose_view_it_was() -> None:
    w = np.arange(8.0)
    for k in range(3):
        assert outputs(lambda *xs, k=k: xs[k][1:2], w[:4], w[1:6], w) == [(T.alias_of_input, k)]


def test_a_duplicate_is_its_first_occurrence() -> None:
    a, b = np.ones(2), np.ones(3)
    assert outputs(lambda x, y, z: (z, y, y[1:]), a, b, b) == [(T.is_input, 1), (T.is_input, 1), (T.alias_of_input, 1)]


def test_a_view_has_its_place_and_geometry() -> None:
    (info,) = collect.collect_metadata(lambda x: x[1:, 2], [np.ones((3, 4))]).output_info
    assert info.view_meta_sequence is not None
    key = info.view_meta_sequence.metadata
    assert (key.size, key.stride, key.storage_offset) == ((2,), (32,), 48)
    assert info.view_meta_sequence.dtype == "f8" and info.raw_type is np.ndarray


def test_leaves_of_trees_are_counted_in_order() -> None:
    def fn(state: dict[str, Any], rest: list[Any], *, lr: float, extra: Any) -> Any:
        state["w"] -= lr * rest[0]
        return {"w": state["w"], "views": (rest[0][1:], extra)}

    w, g, e = np.ones(3), np.ones(3), np.ones(2)
    meta = collect.collect_metadata(fn, [{"n": 3, "w": w}, [g]], {"lr": 0.5, "extra": e})
    assert [i.mutates_data for i in meta.input_info] == [False, True, False, False, False]
    assert [(o.output_type, o.base_idx) for o in meta.output_info] == [
        (T.is_input, 1),
        (T.alias_of_input, 2),
        (T.is_input, 3),
    ]
    assert w.tolist() == [1, 1, 1]


# What it is given


def test_the_function_gets_arrays_with_the_layout_of_the_callers() -> None:
    w = np.arange(16.0)
    first = w[:8]
    args = (first, w[4:12].reshape(2, 4).T, w[12:], first)

    def fn(a: Any, b: Any, c: Any, d: Any) -> None:
        assert a is d and np.shares_memory(a, b) and not np.shares_memory(a, c)
        a[4] = 50
        assert b[0, 0] == 50
        assert [x.strides for x in (a, b, c)] == [x.strides for x in args[:3]]
        assert a.ctypes.data % 64 == args[0].ctypes.data % 64

    collect.collect_metadata(fn, args)
    assert w.tolist() == list(range(16))


def test_arguments_are_as_they_were_where_the_function_raises() -> None:
    x = np.arange(4.0)

    def fn(x: Any) -> None:
        x += 1
        x.shape = (2, 2)
        raise KeyError("midway")

    with pytest.raises(KeyError, match="midway"):
        collect.collect_metadata(fn, [x])
    assert x.tolist() == [0, 1, 2, 3]


BAD: list[tuple[list[Any], str]] = [
    ([np.ones(2), np.ones(2), np.ones(2)], r"takes 2 positional arguments, got 3: args\[2\] is the first"),
    ([[np.ones(2), np.ones(2)], np.ones(2), np.ones(2)], r"args\[3\] is the first"),
    ([np.ones(2)], "missing a required argument: 'b'"),
    ([np.ones(2), np.array([None])], r"args\[1\]: expected an array of numbers.*object"),
    ([np.ones(2), [1, np.array(["a"], object)]], r"args\[2\] \(at args\[1\]\[1\]\): expected an array"),
    ([np.ones(2).view(np.recarray), 1], r"args\[0\]: expected a plain ndarray, got a recarray.*np.asarray"),
    ([np.ma.array([1]), 1], r"args\[0\]: .*MaskedArray"),
    ([np.zeros(2, [("a", "O")]), 1], r"args\[0\]: expected an array of numbers"),
]


@pytest.mark.parametrize(("args", "words"), BAD)
def test_an_invalid_argument_is_named_by_descriptor_before_anything_runs(args: list[Any], words: str) -> None:
    ran = []
    with pytest.raises(TypeError, match=words):
        collect.collect_metadata(lambda a, b: ran.append(1), args)
    assert not ran


def check_bad_arguments() -> None:
    for args, words in BAD:
        test_an_invalid_argument_is_named_by_descriptor_before_anything_runs(args, words)


def test_flags_for_other_than_the_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match="a flag for each of the 2 inputs, got 1"):
        collect.collect_metadata(lambda x, y: None, [np.ones(2), 3], requires_grad=[True])


def test_descriptors_and_static_inputs_can_be_given() -> None:
    from fanin.descriptors import BufferAOTInput, ParamAOTInput, TangentAOTInput

    def fn(w: Any, x: Any) -> Any:
        w += x

    descs = [ParamAOTInput("w"), BufferAOTInput("x")]
    args = [np.ones(2), np.ones(2)]
    meta = analysis.collect_metadata(fn, args, requires_grad=[True, False], static_input_indices=[0], args_descs=descs)
    assert meta.static_input_indices == (0,)
    assert isinstance(meta.traced_tangents_descs[0], TangentAOTInput)
    assert meta.traced_tangents_descs[0].expr() == "__output_tangent(__input_mutation(self.get_parameter('w')))"
    with pytest.raises(TypeError, match=r"self\.get_buffer\('x'\) \(at args\[1\]\): expected an array of numbers"):
        analysis.collect_metadata(fn, [args[0], np.array([None])], args_descs=descs)
    for options, error, words in [
        ({"static_input_indices": [2]}, IndexError, "there is no input 2: there are 2"),
        ({"args_descs": descs[:1]}, ValueError, "expected a descriptor for each of the 2 inputs, got 1"),
        ({"args_descs": [3, descs[1]]}, TypeError, r"args_descs\[0\]: expected a descriptor of an input, got 3"),
    ]:
        with pytest.raises(error, match=words):
            analysis.collect_metadata(fn, args, **options)


def test_an_object_that_is_no_sequence_of_arguments_or_no_metadata_is_named() -> None:
    x = np.zeros(3)
    for run, words in [
        (
            lambda: analysis.collect_metadata(abs, x),
            r"collect_metadata: args: expected a list or tuple .* got an ndarray: one argument is \[x\]",
        ),
        (
            lambda: analysis.functionalize(abs, x),
            r"functionalize: example_args: expected a list or tuple .* got an ndarray",
        ),
        (lambda: analysis.functionalize(abs, 3), r"functionalize: example_args: .* got an int"),
        (
            lambda: analysis.compute_overlapping_inputs(x),
            r"expected a sequence of arrays, got an ndarray; one array is \[array\]",
        ),
        (lambda: analysis.compute_overlapping_inputs(None), "expected a sequence of arrays, got None"),
        (
            lambda: analysis.remove_dupe_metadata(None, [], []),
            "remove_dupe_metadata: expected a ViewAndMutationMeta, .* got None",
        ),
        (
            lambda: analysis.create_synthetic_base_metadata(3, [], [], [], []),
            "create_synthetic_base_metadata: expected a ViewAndMutationMeta",
        ),
    ]:
        with pytest.raises(TypeError, match=words):
            run()
    nothing = np.zeros(2, "V0")
    assert analysis.compute_overlapping_inputs([nothing, nothing, x]) == set()
    for run in (
        lambda: analysis.compute_overlapping_inputs([x, nothing], compat="torch"),
        lambda: analysis.explain_overlap_differences([nothing, x]),
    ):
        with pytest.raises(
            ValueError, match=r"array \d has a stride of 0 bytes and items of 0: no torch tensor is like it"
        ):
            run()


def test_read_only_memory_is_read_only_in_the_run_too() -> None:
    """bytes cannot be written, not even after setting the flag; nor can their copy."""
    words, seen = np.frombuffer(b"0123456789abcdef", "u1"), []

    def asks(*arrays: Any) -> None:
        for x in arrays:
            for target in (x, x.view(), x[...], np.asarray(x)):
                try:
                    target.flags.writeable = True
                    seen.append("was made writable")
                except ValueError as e:
                    seen.append(str(e))
            with pytest.raises(TypeError):
                memoryview(x)[:1] = b"x"

    for args in ([words], [words[2:]], [words[:9], words[5:]], [words.view("f8")], [words[::3]]):
        asks(*args)
        natively = seen.copy()
        seen.clear()
        assert not any(i.mutates_data for i in collect_metadata(asks, args).input_info)
        assert seen == natively and len(seen) == 4 * len(args)
        seen.clear()
        f = functionalize(asks, args)
        f.pure(*f.pure.inner(args, args))
        assert seen == 2 * natively
        seen.clear()


def test_the_copy_of_overlapping_elements_has_each_of_their_bytes() -> None:
    """Read at the function that the copy uses: fresh memory may hold the right bytes by chance."""
    memory = np.arange(40, dtype="u1")
    for shape, strides in [((3, 4, 2), (4, 2, 1)), ((5, 3), (1, 1)), ((3, 4), (6, 2)), ((2, 3, 4), (0, 3, 1))]:
        crowded = as_strided(memory, shape, strides)
        assert np.unique(arrays.each_byte_once(crowded)).tolist() == np.unique(crowded).tolist()


def exact(x: Any) -> Any:
    """A function as those of HIPS autograd are: it takes exactly an ndarray."""
    if type(x) is not np.ndarray:
        raise TypeError(f"Can't differentiate w.r.t. type {type(x)}")
    x[1:] -= 1
    return x[:2], x * 2


def test_a_function_that_takes_no_subclass_runs_on_plain_copies() -> None:
    x = np.ones(3)
    with pytest.raises(TypeError, match="Tracked") as raised:
        collect_metadata(exact, [x])
    assert "watch=False" in raised.value.__notes__[0]
    meta = collect_metadata(exact, [x], watch=False)
    assert meta.input_info[0].mutates_data
    assert [o.output_type for o in meta.output_info] == [T.alias_of_input, T.non_alias] and x.tolist() == [1, 1, 1]
    assert not collect_metadata(lambda x: x.fill(1), [x], watch=False).input_info[0].mutates_data, "no byte changed"
