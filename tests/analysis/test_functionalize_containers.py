"""`functionalize`: containers, methods, functions that run later."""

from __future__ import annotations

import collections
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from fanin import analysis
from fanin.analysis import functionalize
from kit.functionalized import F, Held, both, checks_of, itself, rule_of


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
    with pytest.raises(TypeError, match=r"args\[0\]: .* got a Held that holds an ndarray"):
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

    for wrong, found in ((None, "None"), (np.ones(2), "an ndarray"), (3, "an int")):
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
    f = F.functionalize(fn, (np.zeros(2),), compiler=lambda pure: lambda *inner: collections.deque(pure(*inner)))
    a = np.zeros(2)
    assert f(a).tolist() == [2, 2] and a.tolist() == [1, 1]


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


CHECKS = checks_of(globals())


@pytest.mark.parametrize("check", CHECKS, ids=rule_of)
def test_a_rule(check: Callable[[], None]) -> None:
    check()
