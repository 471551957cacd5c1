"""`functionalize`: the pure function, the compiled one, and options that are refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from fanin.analysis import (
    BehaviourChangedError,
    GraphNames,
    LayoutChangedError,
    create_graph_signature,
    functionalize,
)
from kit.functionalized import F, checks_of, rule_of
from kit.prepared import run_prepared
from kit.support import ROOT

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
        ((a, [1, 2], False), r"args\[1\]: expected an array .* got a list"),
        ((a, b, True), r"args\[1\] is written by this call, and was not by the recorded one"),
        ((a, b, None), r"output\[0\] is .*, otherwise than at the recorded call"),
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
        ({"layouts": 0}, "layouts: expected an integer of at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            F.functionalize(lambda: None, **options)
    with pytest.raises(TypeError, match="expected a function, got 3"):
        F.functionalize(3)
    with pytest.raises(AttributeError, match="recorded by the first call"):
        F.functionalize(lambda: None).meta


def check_bad_arguments_are_named() -> None:
    f = F.functionalize(lambda a, b: None)
    with pytest.raises(TypeError, match=r"takes 2 positional arguments, got 3: args\[2\]"):
        f(1, 2, 3)
    with pytest.raises(TypeError, match=r"functionalize: args\[1\]: expected an array of numbers"):
        f(1, np.array([None]))


CHECKS = checks_of(globals())


@pytest.mark.parametrize("check", CHECKS, ids=rule_of)
def test_a_rule(check: Callable[[], None]) -> None:
    check()


def test_the_pages_example_prints_its_output() -> None:
    page = (ROOT / "docs" / "analysis.md").read_text()
    section = page.partition("## Functionalize")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1
    for code, printed in blocks:
        assert run_prepared(code).stdout == printed


def test_errors_are_value_errors() -> None:
    assert issubclass(LayoutChangedError, ValueError) and issubclass(BehaviourChangedError, ValueError)
    assert repr(functionalize(abs)) == "<functionalize(abs), 0 layouts>"


def test_an_array_without_bytes_keeps_its_old_geometry_in_results_of_a_pure_function() -> None:
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


def test_a_dense_array_replaces_a_broadcast_one_if_its_values_repeat() -> None:
    fns: list[Callable[[Any], Any]] = [lambda x: x * 2, lambda x: x[0], lambda x: x.sum(0), lambda x: x[1:, ::-1]]
    for fn in fns:
        f = functionalize(fn)
        row = np.arange(4.0)
        broadcast = np.broadcast_to(row, (3, 4))
        f(broadcast)
        for dense in (np.tile(row, (3, 1)), np.asfortranarray(broadcast), np.tile(row, (3, 2))[:, :4]):
            [got] = f.pure(dense)
            assert np.array_equal(got, fn(broadcast))
        with pytest.raises(ValueError, match=r"pure: args\[0\]: expected an array whose elements are equal where they"):
            f.pure(np.arange(12.0).reshape(3, 4))


def resized_strides(x: Any) -> Any:
    x.strides = (16,)
    total = x.sum()
    x.strides = (8,)
    return total


BEYOND: dict[str, Callable[[Any], Any]] = {
    "strides": resized_strides,
    "strides that stay": lambda x: (setattr(x, "strides", (16,)), x.sum())[1],
    "as_strided": lambda x: as_strided(x, (3,), (16,)).sum(),
    "as_strided backwards": lambda x: as_strided(x, (2,), (-8,)).sum(),
    "base": lambda x: x.base.sum(),
    "base after a write": lambda x: (x.__iadd__(1), x.base * 1)[1],
    "row of the base": lambda x: x.base[-1] * 2,
    "memory around": lambda x: np.frombuffer(x.base, x.dtype)[:4].sum(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", BEYOND)
def test_a_function_reads_the_right_values_beyond_an_argument(how: str) -> None:
    fn = BEYOND[how]
    f = functionalize(fn, compiler=lambda pure: pure)
    for turn in range(3):
        one, two = (np.arange(6.0) + turn for _ in range(2))
        assert np.array_equal(fn(one[1:4]), f(two[1:4])) and np.array_equal(one, two)


def test_two_arguments_of_one_array_share_it() -> None:
    def fn(x: Any, y: Any) -> Any:
        y += 1
        return x.base * 1

    f = functionalize(fn, compiler=lambda pure: pure)
    for _ in range(2):
        one, two = np.arange(6.0), np.arange(6.0)
        assert np.array_equal(fn(one[:2], one[3:]), f(two[:2], two[3:])) and np.array_equal(one, two)


def test_the_surroundings_of_a_small_part_of_a_large_array_are_not_copied() -> None:
    from fanin.analysis import arrays

    whole = np.zeros(1 << 19)
    group = arrays.group_of([(0, whole[3:9])])
    plan = arrays.Plan((group,), (arrays.Position(0, 0),))
    assert arrays.Surroundings(plan, [whole[3:9]]).memory(group) is None
    near = whole[: 1 << 17].copy()
    group = arrays.group_of([(0, near[3:9])])
    assert arrays.Surroundings(arrays.Plan((group,), plan.where), [near[3:9]]).memory(group) is not None
