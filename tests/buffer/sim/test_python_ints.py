"""Python ints beside narrow integers (D5): each counts with its value, in the dtype of the whole sum, in every order;
one that does not fit is a ValueError in every order.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core

A = np.array
ROWS = [
    ([A(1, "u8"), -2, A(0.5)], -0.5),
    ([A(1, "i4"), 2**40, A(0.5)], 1099511627777.5),
    ([A(1, "i1"), 300, A(0.5)], 301.5),
    ([A(1, "i1"), 300, A(7, "i4")], 308),
    ([A(1, "i4"), 2**40, A(7, "i8")], 2**40 + 8),
    ([A(1, "i1"), 300, fanin.Zero((), "f8")], 301.0),
    ([fanin.Zero((), "f8"), A(1, "i1"), 300], 301.0),
    ([300, A(1, "i1"), A(0.5)], 301.5),
    ([A(1, "i1"), 300, -7, A(2, "i2"), A(0.5)], 296.5),
    ([A(1, "u1"), -1, A(2, "i1")], 2),
    ([np.int8(1), 300, np.int16(2)], 303),
    # a zero after numbers narrows no sum that later terms extend
    ([100, 100, fanin.Zero((), "i1"), A(1, "i2")], 201),
    ([2**31, -129, fanin.Zero((), "f4"), A(26)], 2147483545.0),
    ([0.1, 1e-9, fanin.Zero((), "f4"), A(1.0)], 0.1 + 1e-9 + 1.0),
    ([A(1, "i1"), 300], None),
    ([300, A(1, "i1")], None),
    ([A(1, "u8"), -2], None),
    ([A(1, "i1"), 100, -200, A(1, "u1"), 2**15], None),
]


def in_every_order(terms: list[Any], w: Any = None) -> Counter[str]:
    """What take gives by each order of arrival and budget, and how often; w: on its device."""
    found: Counter[str] = Counter()
    for order, budget in itertools.product(itertools.permutations(range(len(terms))), (0, None)):
        buf = fanin.InputBuffer([fanin.Slot(device=w.place() if w else None)], budget=budget, name="g")
        for key in order:
            is_array = w and isinstance(terms[key], np.ndarray)
            buf.add(0, w.array(terms[key]) if is_array else terms[key], key=key)
        try:
            sums = [buf[0], *buf.take()]
        except ValueError as e:
            assert "g: slot 0, key " in str(e) and "does not fit dtype" in str(e)
            buf.add(0, A(0.5), key=len(terms))  # nothing is lost, and a wider one mends it
            buf.take()
            found["ValueError"] += 1
            continue
        if w:
            w.synchronize()
        for made in sums:
            made = made.numpy() if hasattr(made, "numpy") else made
            found[f"{np.asarray(made).dtype} {np.asarray(made)}"] += 1
    return found


@pytest.mark.rule("A10", "A15")
@pytest.mark.parametrize("terms, want", ROWS, ids=[str(i) for i in range(len(ROWS))])
def test_a_python_int_has_its_value_or_is_refused_in_every_order(terms: list[Any], want: Any) -> None:
    found = in_every_order(terms)
    assert len(found) == 1, found
    (word,) = found
    if want is None:
        assert word == "ValueError"
    else:
        total = np.result_type(*(getattr(x, "dtype", x) for x in terms))
        assert word == f"{total} {np.asarray(want, total)}"


def test_on_a_device_it_has_its_value_too(a_world: Callable[..., Any]) -> None:
    w = a_world("sim")
    for terms, want in ROWS[:5]:
        found = in_every_order(terms, w)
        assert [k.split()[1] for k in found] == [str(np.asarray(want))], found


@pytest.mark.parametrize("accumulate", [None, "exact"])
def test_random_lists_of_ints_and_integers_have_one_answer(accumulate: Any) -> None:
    """Where each running sum of NumPy's integers is in range, it is the exact one."""
    r = random.Random(9)
    print("seed 9")
    counted: Counter[str] = Counter()
    for _ in range(120):
        terms = [
            r.choice([r.randint(-3, 3), r.choice([200, -200, 40_000, -40_000, 2**33])])
            if r.random() < 0.5
            else A(r.randint(0, 2), r.choice(["i1", "u1", "i2", "i4", "i8", "f8"]))
            for _ in range(r.randint(2, 4))
        ]
        results = set()
        for _ in range(6):
            order = r.sample(range(len(terms)), len(terms))
            buf = fanin.InputBuffer(1, budget=r.choice([0, 20, None]), accumulate=accumulate)
            for key in order:
                buf.add(0, terms[key], key=key)
            try:
                (made,) = buf.take()
                results.add(str(np.asarray(made).item()))
            except ValueError:
                results.add("ValueError")
        assert len(results) == 1, (terms, results)
        (word,) = results
        counted["refused" if word == "ValueError" else "summed"] += 1
        if word != "ValueError":
            exact = sum(Fraction(x if isinstance(x, int) else x.item()) for x in terms)
            strong = [x for x in terms if not isinstance(x, int)]
            dtype = np.result_type(*strong) if strong else np.dtype("i8")
            narrow = dtype.kind in "iu" and not np.iinfo(dtype).min <= exact <= np.iinfo(dtype).max
            assert narrow or Fraction(word) == exact, (terms, word)
    assert min(counted.values()) > 0, counted


def test_where_a_dtype_is_declared_add_refuses_at_once() -> None:
    buf = fanin.InputBuffer([fanin.Slot(dtype="i1")])
    with pytest.raises(ValueError, match="a Python int among its contributions, 300, does not fit dtype int8"):
        buf.add(0, 300)
    buf.add(0, 100)
    assert buf.take()[0] == 100


def test_ints_before_an_object_fit_the_sum_before_it_or_are_refused() -> None:
    class Thing:
        def __radd__(self, other: Any) -> Any:
            return float(other)

    for budget in (0, None):
        buf = fanin.InputBuffer(1, budget=budget)
        for key, x in enumerate([A(1, "i1"), 100, Thing(), 300]):
            buf.add(0, x, key=key)
        assert buf.take() == [401.0]
        for key, x in enumerate([A(1, "i1"), 300, Thing()]):
            buf.add(0, x, key=key)
        with pytest.raises(ValueError, match="300, does not fit dtype int8"):
            buf.take()
        buf.clear()


@pytest.mark.rule("A10", "A15")
@pytest.mark.parametrize("budget", [0, 10, None])
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_a_sum_of_ints_that_leaves_its_dtype_is_refused_on_every_device(
    a_world: Callable[..., Any], where: str, budget: Any
) -> None:
    w = a_world(where)

    def value(total: Any) -> int:
        w.synchronize()
        return int(total.numpy() if hasattr(total, "numpy") else total)

    rows: list[tuple[list[Any], dict[str, Any], int | None]] = [
        ([2**62, 2**62], {}, None),
        ([2**62, 2**62, -1], {}, 2**63 - 1),
        ([True, 2**62, 2**62, -3], {}, 2**63 - 2),
        ([100, 27], {"dtype": "int8"}, 127),
        ([100, 27, True], {"dtype": "int8"}, None),
        ([2**62] * 3, {"dtype": "uint64"}, 3 * 2**62),
        ([2**62, True, 2**62], {"dtype": "float64"}, 2**63),
    ]
    refused = 0
    for terms, declared, want in rows:
        buf = fanin.InputBuffer([fanin.Slot(device=w.place(), **declared)], budget=budget)
        for k, x in enumerate(terms):
            buf.add(0, x, key=k)
        if want is None:
            refused += 1
            for call in (buf.take, lambda buf=buf: buf[0]):
                with pytest.raises(OverflowError, match="the sum of its Python ints does not fit"):
                    call()
            buf.add(0, -100, key=len(terms))
            want = sum(terms) - 100
        if want < 2**63 or declared:
            assert value(buf.take()[0]) == want, (terms, declared)
    assert refused == 2


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_a_sum_of_ints_that_a_failed_take_made_still_counts_in_full(a_world: Callable[..., Any], where: str) -> None:
    w = a_world(where)
    buf = fanin.InputBuffer([fanin.Slot(device=w.place())] * 2)
    for x in (2**61, 2**61):
        buf.add(0, x)
    for _ in range(2):
        buf.add(1, 2**62)
    with pytest.raises(OverflowError, match="slot 1"):
        buf.take()
    buf.add(0, 2**62)
    with pytest.raises(OverflowError, match="slot 0"):
        buf.take(slot=0)
