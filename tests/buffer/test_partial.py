"""Partial gradients (rules P), beside an oracle that adds one number after the other (kit/partial_lists.py)."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Diagonal, Partial
from kit import hooks
from kit.partial_lists import BUDGETS, a_list, dtype_of, fold
from kit.values import bits

pytestmark = pytest.mark.core
Array = np.ndarray[Any, Any]
s_ = np.s_


@pytest.mark.rule("P1", "P2", "P4")
@pytest.mark.parametrize("seed", range(8))
def test_each_element_is_the_left_fold_of_the_terms_that_reach_it(seed: int) -> None:
    draw = random.Random(seed)
    met = 0
    for _ in range(150):
        shape, terms = a_list(draw)
        if not any(isinstance(x, Partial) for x in terms):
            continue
        order = draw.sample(range(len(terms)), len(terms))
        budget = draw.choice(BUDGETS)
        buf = fanin.InputBuffer(1, budget=budget)
        copy, keyed = draw.random() < 0.3, draw.random() < 0.5
        for i in order if keyed else range(len(terms)):
            buf.add(0, terms[i], **({"key": i} if keyed else {}), copy=copy)
            if draw.random() < 0.2:
                _ = buf[0]
        with np.errstate(all="ignore"):
            expected = fold(terms, shape)
        [got] = buf.take()
        met += 1
        assert got.dtype == expected.dtype and got.shape == shape, (seed, shape, terms)
        assert bits(got) == bits(expected), (seed, budget, shape, terms, got, expected)
    assert met > 80


@pytest.mark.rule("P5")
def test_a_weight_multiplies_the_values_in_the_accumulation_dtype() -> None:
    draw = random.Random(5)
    met = 0
    for _ in range(300):
        shape, terms = a_list(draw)
        dtypes = {dtype_of(x) for x in terms}
        if not any(isinstance(x, Partial) for x in terms) or any(d.kind in "buic" for d in dtypes):
            continue
        weights = [draw.choice([None, 3, 0.1, -2.5, 0, 1]) for _ in terms]
        buf = fanin.InputBuffer(1, budget=draw.choice(BUDGETS))
        for x, w in zip(terms, weights, strict=True):
            buf.add(0, x, **({} if w is None else {"weight": w}))
        with np.errstate(all="ignore"):
            expected = fold(terms, shape, weights=weights)
        got = buf.take()[0]
        assert bits(got) == bits(expected), (shape, terms, weights, got, expected)
        met += 1
    assert met > 60


@pytest.mark.rule("P5")
def test_a_mean_and_weights_at_the_take_count_a_partial_gradient_like_any_other() -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, part([1, 2], s_[:2]), weight=3)
    buf.add(0, part([4], s_[1:2]))
    assert buf.take(mean=True)[0].tolist() == [0.75, 2.5, 0, 0]
    buf = fanin.InputBuffer(1, budget=math.inf)
    buf.add(0, part([1, 2], s_[:2]), key=0)
    buf.add(0, part([4], s_[1:2]), key=1)
    assert buf.take(weights={0: 2.0, 1: 0.5})[0].tolist() == [2, 6, 0, 0]
    lone = fanin.InputBuffer([fanin.Slot(partial=True)])
    lone.add(0, part([1, 2], s_[:2]), weight=2)
    got = lone.take()[0]
    assert isinstance(got, Partial) and got.dense().tolist() == [2, 4, 0, 0]


# ---------------------------------------------------------------- By hand

f32 = np.float32


def total(*terms: Any, **options: Any) -> Any:
    buf = fanin.InputBuffer(1, **options)
    for x in terms:
        buf.add(0, x)
    return buf.take()[0]


def part(values: Any, at: Any, shape: Any = 4, dtype: Any = f32) -> Partial:
    return Partial(np.array(values, dtype), at, shape)


@pytest.mark.rule("P1")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_first_touch_stores_and_what_none_reaches_is_zero(budget: Any) -> None:
    minus = part([-0.0, -0.0], s_[:2])
    assert bits(total(minus, budget=budget)) == bits(f32([-0.0, -0.0, 0, 0]))
    assert bits(total(minus, part([-0.0, 2], s_[1:3]), budget=budget)) == bits(f32([-0.0, -0.0, 2, 0]))
    assert bits(total(minus, part([0.0], s_[:1]), budget=budget)) == bits(f32([0, -0.0, 0, 0]))
    assert bits(total(minus, f32([-0.0, 1, -0.0, 0]), budget=budget)) == bits(f32([-0.0, 1, -0.0, 0]))
    one = fanin.Sparse("coo", (np.array([[1, 3]]), f32([-0.0, -0.0])), (4,))
    assert bits(total(minus, one, budget=budget)) == bits(f32([-0.0, -0.0, 0, -0.0]))


@pytest.mark.rule("P1")
def test_a_complex_zero_keeps_both_of_its_signs() -> None:
    x = np.array([complex(-0.0, -0.0), complex(-0.0, 0.0)])
    sum_ = total(Partial(x, s_[1:3], 4), Partial(x, s_[2:], 4))
    assert bits(sum_) == bits(np.array([0, complex(-0.0, -0.0), x[1] + x[0], x[1]]))


@pytest.mark.rule("P1")
def test_it_is_one_contribution_with_its_key() -> None:
    buf = fanin.InputBuffer([fanin.Slot(shape=4, dtype=f32, name="w")])
    buf.expect(0, 2)
    buf.add(0, part([1], s_[:1]), key=5)
    assert not buf.ready(0)
    with pytest.raises(ValueError, match=r"slot 0 \(w\), key 5: .*already.*A16"):
        buf.add(0, part([2], s_[1:2]), key=5)
    buf.add(0, part([2**24], s_[:1]), key=4)
    with pytest.raises(ValueError, match=r"slot 0 \(w\), key 9.*more"):
        buf.add(0, part([2], s_[1:2]), key=9)
    assert buf.ready(0) and buf.take()[0].tolist() == [2**24 + 1 - 1, 0, 0, 0]


@pytest.mark.rule("P2")
@pytest.mark.parametrize(
    ("at", "values", "whole"),
    [
        (2, 5, [[0, 0, 5]]),
        (s_[::-2], [1, 2], [[2, 0, 1]]),
        (s_[None, -1:], [[7]], [[0, 0, 7]]),
        (s_[..., 1], 3, [[0, 3, 0]]),
        ((), [1, 2, 3], [[1, 2, 3]]),
        (s_[3:1], [], [[0, 0, 0]]),
    ],
)
def test_a_basic_index_says_where_the_values_are(at: Any, values: Any, whole: Any) -> None:
    assert part(values, at, 3).dense().tolist() == whole[0]


@pytest.mark.rule("P2")
def test_a_diagonal_is_a_place() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    for offset in range(-4, 5):
        for axes in itertools.permutations(range(3), 2):
            at = Diagonal(offset, *axes)
            own = np.diagonal(x, offset, *axes)
            whole = np.zeros_like(x)
            for index in np.ndindex(x.shape):
                if index[axes[1]] - index[axes[0]] == offset:
                    whole[index] = x[index]
            assert (Partial(own, at, x.shape).dense() == whole).all(), at


@pytest.mark.rule("P2")
def test_the_whole_is_made_once_and_no_term_reads_it() -> None:
    n, parts = 4096, 64
    k = n // parts
    buf = fanin.InputBuffer(1)
    for i in range(parts):
        buf.add(0, part(np.ones(k), s_[i * k : (i + 1) * k], n))
    assert (buf.take()[0] == 1).all()
    assert buf.counters["bytes_written"] == n * 4, "each element once"
    for _ in range(2):
        for i in range(parts):
            buf.add(0, part(np.ones(k), s_[i * k : (i + 1) * k], n))
    before = buf.counters["bytes_written"]
    assert (buf.take()[0] == 2).all()
    assert buf.counters["bytes_written"] - before == 2 * n * 4, "the second touch adds"


@pytest.mark.rule("P2")
def test_partial_gradients_wait_for_a_dense_one_whatever_the_budget() -> None:
    buf = fanin.InputBuffer(1, budget=0)
    for _ in range(3):
        buf.add(0, part([1, 1], s_[:2]))
    assert buf.counters["folds"] == 0
    buf.add(0, f32([1, 1, 1, 1]))
    assert buf.counters["folds"] == 1
    buf.add(0, part([1], s_[3:]))
    assert buf.take()[0].tolist() == [4, 4, 1, 2]


@pytest.mark.rule("P2")
def test_partial_gradients_that_cover_the_whole_are_summed_within_the_budget() -> None:
    buf = fanin.InputBuffer(1, budget=0)
    for i in (2, 0, 3):
        buf.add(0, part([-0.0], s_[i : i + 1]))
    assert buf.counters["folds"] == 0
    buf.add(0, part([-0.0], s_[1:2]))
    assert buf.counters["folds"] == 1, "each element was reached"
    buf.add(0, part([1], s_[:1]))
    assert buf.counters["folds"] == 2
    assert bits(buf.take()[0]) == bits(f32([1, -0.0, -0.0, -0.0]))
    for at in (s_[:2], s_[1:3]):  # as many elements, of which one is reached twice
        buf.add(0, part([-0.0, -0.0], at))
    assert buf.counters["folds"] == 2
    assert bits(buf.take()[0]) == bits(f32([-0.0, -0.0, -0.0, 0]))


@pytest.mark.rule("P3")
def test_a_lone_one_is_handed_to_a_slot_that_takes_it() -> None:
    one = part([1, 2], s_[:2])
    buf = fanin.InputBuffer([fanin.Slot(partial=True), fanin.Slot()])
    buf.add(0, one)
    buf.add(1, one)
    first, second = buf.take()
    assert first is one
    assert second.tolist() == [1, 2, 0, 0]
    buf.add(0, one, copy=True)
    [again, _] = buf.take()
    assert isinstance(again, Partial) and again.values is not one.values
    assert (again.dense() == one.dense()).all() and again.shape == (4,)
    buf.add(0, one)
    buf.add(0, one)
    assert buf.take()[0].tolist() == [2, 4, 0, 0]
    buf.add(0, one)
    assert buf.take(scale=2.0)[0].tolist() == [2, 4, 0, 0]


@pytest.mark.rule("P3")
@pytest.mark.parametrize(
    "at", [s_[:2], s_[1:3], s_[1], s_[::2, 1:], s_[3:0:-2], s_[::-1, ::-1], s_[None, 2, ..., None], s_[4:4], s_[..., 2],
           Diagonal(), Diagonal(1), Diagonal(-2, 1, 0)]
)  # fmt: skip
def test_a_partial_that_the_core_makes_names_its_place(at: Any) -> None:
    numbers = np.arange(15, dtype=np.float32).reshape(5, 3)
    whole = fanin.tape.read_at(numbers, at)
    buf = fanin.InputBuffer([fanin.Slot(partial=True)])
    buf.add(0, Partial(whole, at, (5, 3)), copy=True)
    [again] = buf.take()
    assert fanin.tape.read_at(numbers, again.at).tolist() == again.values.tolist() == whole.tolist()


@pytest.mark.rule("P3")
def test_a_node_says_by_its_slot_that_it_takes_partial_sums() -> None:
    found: list[Any] = []
    for slots in ([fanin.Slot(partial=True)], [None]):
        consumer = fanin.Node(lambda g: found.append(g), slots=slots)
        producer = fanin.Node(lambda g: part(g, s_[1:3]), edges=[(consumer, 0)])
        fanin.backward([(producer, 0, f32([1, 2]))])
    assert isinstance(found[0], Partial) and found[1].tolist() == [0, 1, 2, 0]


@pytest.mark.rule("P4")
@pytest.mark.skipif(int(np.__version__.partition(".")[0]) < 2, reason="NumPy 1 has 32 axes at most")
@pytest.mark.parametrize("axes", [63, 64])
def test_a_complex_sum_of_partial_and_sparse_gradients_has_at_most_63_axes(axes: int) -> None:
    buf, shape = fanin.InputBuffer(1), (2, *[1] * (axes - 1))
    buf.add(0, Partial(np.full((1,) * axes, 1 - 1j), np.s_[:1], shape))
    buf.add(0, fanin.Sparse("coo", (np.zeros((axes, 1), int), np.array([1j])), shape))
    if axes == 63:
        assert buf.take()[0].ravel().tolist() == [1, 0]
        return
    with pytest.raises(ValueError, match="at most 63 axes"):
        buf.take()
    buf.clear()


def test_an_index_stored_twice_reaches_its_element_twice() -> None:
    big = fanin.Sparse("coo", (np.array([[1, 1]]), f32([2**24, 1])), (4,))
    one = part([1, 1], s_[1:3])
    assert total(one, big).tolist() == [0, 2**24, 1, 0]
    assert total(big, one).tolist() == [0, 2**24, 1, 0]
    assert total(one, one, big).tolist() == [0, 2**24 + 4, 2, 0], "2 + 2**24, and 1 to the even one"


@pytest.mark.rule("P5")
def test_an_exact_sum_and_one_to_a_declared_shape_make_it_dense_first() -> None:
    exact = total(part([2**24, 1], s_[:2]), part([1, 1], s_[:2]), part([-(2**24)], s_[:1]), accumulate="exact")
    assert exact.tolist() == [1, 2, 0, 0]
    buf = fanin.InputBuffer([fanin.Slot(shape=(1, 4), dtype="float64")])
    buf.add(0, part([[1], [2], [4]], s_[:, 1:2], (3, 4)))
    assert buf.take()[0].tolist() == [[0, 7, 0, 0]]


@pytest.mark.rule("P5")
def test_statistics_are_of_the_sum_and_name_the_key_that_brought_a_nan() -> None:
    buf = fanin.InputBuffer(1, stats=True)
    buf.add(0, part([3, np.nan], s_[:2]), key=7)
    buf.add(0, part([1, 4], s_[0::3]), key=2)
    buf.take()
    stats = buf.stats(0)
    assert stats is not None
    assert (stats.count, stats.nonfinite, stats.first_bad_key, stats.sumsq) == (4, 1, 7, 32)


@pytest.mark.rule("P5")
def test_an_object_meets_it_as_a_dense_array() -> None:
    class Own:
        def __radd__(self, other: Any) -> Any:
            return other.tolist(), "own"

    assert total(part([1, 2], s_[:2]), Own()) == ([1, 2, 0, 0], "own")


@pytest.mark.rule("P5")
def test_values_may_share_memory_with_what_they_are_added_to() -> None:
    x = f32([1, 2, 3, 4])
    assert total(x, Partial(x[1:3], s_[:2], 4)).tolist() == [3, 5, 3, 4] and x.tolist() == [1, 2, 3, 4]
    buf = fanin.InputBuffer(1)
    buf.add(0, x, donate=True)
    buf.add(0, Partial(x[1:3], s_[:2], 4))
    assert buf.take()[0].tolist() == [3, 5, 3, 4]
    y = f32([1, 2, 3, 4])
    buf.add(0, y, donate=True)
    buf.add(0, part([1, 1], s_[:2]))
    got = buf.take()[0]
    assert got is y and got.tolist() == [2, 3, 3, 4], "a donated one takes the sum"


@pytest.mark.parametrize(
    ("values", "at", "shape", "error", "words"),
    [
        (np.ones(2), [0, 1], 4, TypeError, "no basic index.*fanin.add_rows"),
        (np.ones(2), np.array([True, False, True, False]), 4, TypeError, "no basic index.*fanin.add_rows"),
        (np.ones(2), (s_[:], np.array([1, 2])), (4, 4), TypeError, "no basic index.*fanin.add_rows"),
        (np.ones(2), True, 4, TypeError, "mask.*fanin.add_rows"),
        (np.ones(()), 4, 4, IndexError, "4 is out of range along axis 0.*\\(4,\\)"),
        (np.ones(()), (0, -3), (4, 2), IndexError, "-3 is out of range along axis 1"),
        (np.ones(2), (0, 1), 4, IndexError, "2 indices"),
        (np.ones(2), (..., ...), 4, IndexError, "one ..."),
        (np.ones(2), s_[:3], 4, ValueError, "expected an array of shape \\(3,\\).*got one of shape \\(2,\\)"),
        (1.0, 0, 4, TypeError, "expected an array of shape \\(\\)"),
        ([1.0], s_[:1], 4, TypeError, "expected an array of shape \\(1,\\)"),
        (np.ones(2), s_[::0], 4, ValueError, "step"),
        (np.ones(2), s_["a":], 4, TypeError, "slice of integers"),  # type: ignore[misc]
        (np.ones(2), Diagonal(0, 1, 1), (2, 2), ValueError, "two axes"),
        (np.ones(2), Diagonal(0, 0, 2), (2, 2), ValueError, "two axes"),
    ],
)
def test_a_wrong_place_is_an_error_that_says_what_would_be_right(
    values: Any, at: Any, shape: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Partial(values, at, shape)


@pytest.mark.parametrize(
    "compute",
    [
        np.asarray,
        np.sum,
        np.zeros_like,
        lambda p: np.stack([p, p]),
        lambda p: np.ones(4) + p,
        lambda p: np.float64(2) * p,
    ],
)
def test_numpy_makes_no_array_of_an_object_from_it(compute: Any) -> None:
    with pytest.raises(TypeError, match=r"<fanin.Partial at .*> is no array: dense\(\) makes one"):
        compute(part([1, 2], s_[:2]))


def test_an_error_names_slot_and_key_and_loses_nothing() -> None:
    buf = fanin.InputBuffer([fanin.Slot(shape=4, dtype="int32", name="w")])
    buf.add(0, part([1], s_[:1], dtype="int32"), key=0)
    with pytest.raises(ValueError, match=r"slot 0 \(w\), key 2: expected dtype int32, got float32"):
        buf.add(0, part([1], s_[:1]), key=2)
    with pytest.raises(ValueError, match=r"slot 0 \(w\), key 2: expected a gradient of shape \(4,\).*got \(5,\)"):
        buf.add(0, part([1], s_[:1], 5, dtype="int32"), key=2)
    with pytest.raises(TypeError, match=r"slot 0 \(w\), key 2: .*dense array as its values"):
        buf.add(0, of_objects(), key=2)
    assert buf.take()[0].tolist() == [1, 0, 0, 0]


def of_objects() -> Partial:
    return Partial(np.array([object()]), s_[:1], 4)


def test_values_that_changed_since_are_found() -> None:
    x = f32([1, 2])
    one = Partial(x, s_[:2], 4)
    x.resize(3, refcheck=False)
    with pytest.raises(ValueError, match=r"slot 0: .*changed their shape from \(2,\) to \(3,\)"):
        fanin.InputBuffer(1).add(0, one)
    x.resize(2, refcheck=False)
    buf = fanin.InputBuffer(1)
    with fanin.set_options(debug=True):
        buf.add(0, Partial(x, s_[:2], 4))
        x[0] = 9
        with pytest.raises(RuntimeError, match="was changed after it was added"):
            buf.take()


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("fault", ["PADDED_ADD", "PATCH_STEP", "FIRST_TOUCH_MISSED"])
def test_the_oracle_finds_a_planted_fault(fault: str) -> None:
    draw = random.Random(1)
    lists = [a_list(draw) for _ in range(300)]
    wrong = 0
    hooks.fault(fault)
    try:
        for shape, terms in lists:
            if any(isinstance(x, Partial) for x in terms):
                with np.errstate(all="ignore"):
                    wrong += bits(total(*terms, budget=0)) != bits(fold(terms, shape))
    finally:
        hooks.fault(None)
    assert wrong > 0, fault


def test_the_attributes_of_a_partial_gradient_cannot_be_changed() -> None:
    x = np.ones(2)
    part = Partial(x, np.s_[:2], 5)
    for name, value in (("values", np.zeros(2)), ("at", 0), ("shape", (9,)), ("_place", ()), ("other", 1)):
        with pytest.raises(
            AttributeError, match=rf"Partial: {name}: a partial gradient cannot be changed: make another"
        ):
            setattr(part, name, value)
    with pytest.raises(AttributeError, match=r"Partial: at: a partial gradient cannot be changed"):
        del part.at
    assert (part.values is x, part.at, part.shape) == (True, s_[:2], (5,))
    assert part.dense().tolist() == [1, 1, 0, 0, 0]
    for again in (copy.copy(part), copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert again.at == part.at and again.dense().tolist() == [1, 1, 0, 0, 0]
    diagonal = Diagonal(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagonal.offset = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(diagonal)) == diagonal == Diagonal(np.int64(1))  # type: ignore[arg-type]


@pytest.mark.rule("P1", "P2")
def test_the_layout_of_a_sum_does_not_depend_on_the_budget() -> None:
    """A partial gradient that reaches each element is dense after a fold, before the Fortran-ordered one comes."""
    fortran = np.asfortranarray(np.ones((2, 3)))
    whole, some = Partial(np.ones((2, 3)), (), (2, 3)), Partial(np.ones(3), 0, (2, 3))
    for terms, order in (
        ([whole, fortran], "C"),
        ([some, fortran], "C"),
        ([fortran, whole], "F"),
        ([fortran, some], "F"),
    ):
        for budget in BUDGETS:
            buf = fanin.InputBuffer(1, budget=budget)
            for key, x in enumerate(terms):
                buf.add(0, x, key=key)
            assert buf.take(writable=True)[0].flags[f"{order}_CONTIGUOUS"], (terms, budget)
