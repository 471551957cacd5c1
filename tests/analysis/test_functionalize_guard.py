"""`functionalize`: its guard, and functions whose behaviour changes between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fanin import descriptors as d
from fanin.analysis import guards as guard_module
from fanin.analysis.calls import call_of
from kit.functionalized import F, checks_of, itself, rule_of

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


def changed(w: Any) -> list[tuple[tuple[Any, ...], str, Any]]:
    """Arguments (args[2] is args[1] where it is None), the message, the descriptor that the error names."""
    frozen = np.zeros(6)
    frozen.flags.writeable = False
    return [
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


def check_the_guard_names_what_changed() -> None:
    w = np.zeros((6, 6))
    first = (w[0], w[1], w[1], {"p": w[2]}, 3)
    first = (*first[:2], first[1], *first[3:])

    def fn(a: Any, b: Any, c: Any, e: Any, n: Any) -> None:
        a += 1

    f = F.functionalize(fn, first, guard="error")
    f(*first)
    for args, words, descriptor in changed(w):
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
        (
            1,
            r"output\[0\] is a view of args\[0\], otherwise than at the recorded call \(args\[0\]\)",
            d.PlainAOTOutput(0),
        ),
        (2, r"output\[0\] is a value of its own, otherwise than at the recorded call", d.PlainAOTOutput(0)),
        (3, "the result is another tree", None),
        (4, r"args\[0\] has another geometry", d.PlainAOTInput(0)),
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


CHECKS = checks_of(globals())


@pytest.mark.parametrize("check", CHECKS, ids=rule_of)
def test_a_rule(check: Callable[[], None]) -> None:
    check()


def test_the_guard_of_one_layout_takes_other_memory_of_the_same_layout() -> None:
    w = np.zeros(20)
    guard = guard_module.Guard(call_of((w[:6], w[4:10]), {}, "test"))
    other = np.zeros(20)
    assert guard.arrays((other[8:14], other[12:18]), {}) is not None
    assert guard.change(call_of((other[8:14], other[12:18]), {}, "test")) is None
    assert guard.arrays((other[8:14], other[13:19]), {}) is None
