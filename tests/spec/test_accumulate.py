"""What comes back, and as what: rules A1-A8 and A14, sparse gradients, symbolic zeros, objects (D12-D17)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from kit.values import BFLOAT16, added_up, bits, same, show

pytestmark = pytest.mark.core
Total = Callable[..., Any]

f16, f32, f64 = np.float16, np.float32, np.float64
BUDGETS = (0, 24, math.inf)


def row(*values: Any, dtype: Any = f32) -> np.ndarray[Any, Any]:
    return np.array(values, dtype)


def coo(*entries: tuple[int, int, float], shape: Any = (2, 3), dtype: Any = f32, format: str = "coo") -> Any:
    """SciPy's array of (row, column, value), duplicates kept."""
    r, c, v = zip(*entries, strict=True) if entries else ((), (), ())
    made = sp.coo_array((np.array(v, dtype), (np.array(r, int), np.array(c, int))), shape=shape)
    if format in ("csr", "csc"):  # tocsr() would add duplicates up
        major, minor = (r, c) if format == "csr" else (c, r)
        order = np.argsort(major, kind="stable")
        lines = shape[0] if format == "csr" else shape[1]
        pointers = np.concatenate([[0], np.cumsum(np.bincount(np.array(major, int), minlength=lines))])
        parts = (np.array(v, dtype)[order], np.array(minor, int)[order], pointers)
        made = (sp.csr_array if format == "csr" else sp.csc_array)(parts, shape=shape)
    return made


class Tracked:
    """An object of the user's own: it sums, and writes down in which order."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Any) -> Tracked:
        return Tracked(f"({self.text}+{text_of(other)})")

    def __radd__(self, other: Any) -> Tracked:
        return Tracked(f"({text_of(other)}+{self.text})")

    def __repr__(self) -> str:
        return self.text


def text_of(x: Any) -> str:
    return x.text if isinstance(x, Tracked) else str(x.tolist()) if isinstance(x, np.ndarray) else type(x).__name__


# Handed through


class Sub(np.ndarray[Any, Any]):
    pass


@pytest.mark.rule("A14")
def test_a_single_contribution_comes_back_as_the_very_object(make_buffer: Any, lib: Any) -> None:
    single = [
        row(1, 2),
        row(1, 2)[::-1],
        np.broadcast_to(row(1), (3,)),
        row(1, 2).view(Sub),
        np.zeros((0, 2)),
        np.array(1.5),
        f32(1.5),
        np.bool_(True),
        True,
        3,
        2.5,
        1j,
        coo((0, 1, 2.0)),
        sp.csr_matrix(np.eye(2)),
        sp.dia_array(np.eye(2)),
        lib.Zero((2,), f32),
        lib.Sparse("coo", (np.array([[0, 1]]), row(1, 2)), (3,)),
        Tracked("a"),
        Fraction(1, 3),
        np.ma.masked_array([1.0], [True]),
        np.array([Fraction(1)], object),
        row(1, dtype=BFLOAT16),
    ]
    for budget in BUDGETS:
        b = make_buffer(len(single), budget=budget)
        for i, x in enumerate(single):
            b.add(i, x)
        for x, y in zip(single, b.take(), strict=True):
            assert y is x
    for how in ({"accumulate": "float64"}, {"leaf": True}, {"create_graph": True}):
        b = make_buffer(1, **how)
        b.add(0, single[0])
        assert b.take()[0] is single[0]


@pytest.mark.rule("A14", "S2")
def test_beside_undefined_gradients_and_zeros_a_gradient_still_counts_as_single(make_buffer: Any, lib: Any) -> None:
    x = row(1, 2)
    b = make_buffer(1)
    for g in (None, lib.Zero((2,), f32), x, None, lib.Zero((2,), f32)):
        b.add(0, g)
    assert b.take()[0] is x


@pytest.mark.rule("A14")
def test_options_that_need_a_copy_get_one(make_buffer: Any, lib: Any) -> None:
    x = row(1, 2)
    for slot, add, take in [
        (lib.Slot(dtype="float64"), {}, {}),
        (lib.Slot(shape=(1, 2)), {}, {}),
        (lib.Slot(), {"copy": True}, {}),
        (lib.Slot(), {}, {"writable": True}),
        (lib.Slot(), {}, {"scale": 1}),
        (lib.Slot(), {}, {"out": [np.zeros(2, f32)]}),
    ]:
        b = make_buffer([slot])
        b.add(0, x.reshape(slot.shape or (2,)) if slot.shape is None else np.broadcast_to(x, (1, 2)), **add)
        y = b.take(**take)[0]
        assert y is not x
        if slot.shape is None:
            assert not np.may_share_memory(x, y)
            assert y.flags.writeable
        assert y.reshape(-1).tolist() == [1, 2]


@pytest.mark.rule("A14")
def test_writable_copies_what_is_shared_and_leaves_what_is_donated(make_buffer: Any) -> None:
    x, y, z = row(1, 2), row(1, 2), _locked(row(1, 2))
    b = make_buffer(4)
    b.add(0, x, donate=True)
    b.add(1, y)
    b.add(2, z, donate=True)
    b.add(3, 2.5)
    first, second, third, fourth = b.take(writable=True)
    assert first is x
    assert not np.may_share_memory(second, y)
    assert not np.may_share_memory(third, z)
    assert second.flags.writeable
    assert third.flags.writeable
    assert fourth == 2.5


def _locked(x: Any) -> Any:
    x.flags.writeable = False
    return x


# In place


@pytest.mark.rule("A6")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("keys", [(None, None, None), (0, 1, 2), (0, 2, 1), (3, 5, 4)], ids=str)
def test_a_donated_first_gradient_becomes_the_sum(make_buffer: Any, keys: Any, budget: Any) -> None:
    for other in (row(10, 20), coo((0, 1, 20), (0, 0, 10), shape=(1, 2)), np.broadcast_to(row(10), (2,))):
        x = row(1, 2).reshape(np.shape(other))
        b = make_buffer(2, budget=budget)
        for key, g in zip(keys, (x, other, other), strict=True):
            b.add(0, g, key=key, donate=g is x)
        y = b.take()[0]
        assert y is x
        assert x.reshape(-1)[0] == 21


@pytest.mark.rule("A6")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_donated_gradient_that_is_not_reusable_is_not_written(make_buffer: Any, budget: Any) -> None:
    memory = np.zeros(8, f32)
    for x, other in [
        (_locked(row(1, 2)), row(1, 1)),
        (np.broadcast_to(row(1), (2,)), row(1, 1)),
        (memory[:4:2], row(1, 1)),
        (row(1, 2, dtype=f16), row(1, 1, dtype=f16)),
        (row(1, 2), row(1, 1, dtype=f64)),
        (memory[:4], memory[2:6]),
    ]:
        before = bits(x)
        b = make_buffer(1, budget=budget)
        b.add(0, x, donate=True)
        b.add(0, other)
        y = b.take()[0]
        assert y is not x
        assert bits(x) == before


@pytest.mark.rule("A6")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_donated_gradient_in_the_gaps_of_others_becomes_the_sum(make_buffer: Any, budget: Any) -> None:
    """What counts is the bytes that are shared, not whether the one lies between the others' first and last (D43)."""
    seen = {True: 0, False: 0}
    for column, start in product(range(8), range(5)):
        for others in ((np.s_[:, column],), (np.s_[::-1, column], np.s_[:, column]), (np.s_[1::-1, column],)):
            memory = np.arange(32, dtype=f32).reshape(4, 8)
            given = [memory[o] for o in others]
            x = memory[1, start : start + given[0].size]
            before, apart = memory.copy(), not any(np.shares_memory(x, g) for g in given)
            expected = (x + sum(given)).tolist()
            b = make_buffer(1, budget=budget)
            b.add(0, x, donate=True)
            for g in given:
                b.add(0, g)
            y = b.take()[0]
            assert y.tolist() == expected
            assert (y is x) == apart, (others, start)
            if not apart:
                assert memory.tolist() == before.tolist()
            seen[apart] += 1
    assert min(seen.values()) > 20, seen


@pytest.mark.rule("A3", "A4")
@pytest.mark.parametrize("donate", [False, True])
def test_dense_after_sparse_is_dense_in_the_dense_ones_memory_only_if_donated(make_buffer: Any, donate: bool) -> None:
    s, d = coo((0, 1, 2.0), (1, 2, 3.0)), np.ones((2, 3), f32)
    b = make_buffer(1)
    b.add(0, s)
    b.add(0, d, donate=donate)
    y = b.take()[0]
    assert type(y) is np.ndarray
    assert y.tolist() == [[1, 3, 1], [1, 1, 4]]
    if not donate:
        assert d.tolist() == np.ones((2, 3)).tolist()
        assert not np.may_share_memory(y, d)


# Cast


@pytest.mark.rule("A10")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("general", [False, True], ids=["fast path", "general path"])
def test_a_dense_float64_gradient_is_cast_to_the_float32_that_is_declared(
    make_buffer: Any, lib: Any, general: bool, budget: Any
) -> None:
    """Each by itself, before it is summed: bit by bit what NumPy casts and adds in float32, with every other term."""
    tie = 1 + 2.0**-24  # between two numbers of float32: to the even one
    wide = row(tie, tie + 2.0**-40, 2.0**24 + 1, 1e300, -1e-60, -0.0, 1e-45, np.inf, np.nan, dtype=f64)
    narrow = row(*(1.5,) * 9)
    for terms, how in product(
        [(wide,), (wide, narrow), (narrow, wide), (wide, wide), (wide, wide[::-1], narrow), (narrow, wide, wide, wide)],
        [{}, {"copy": True}, {"donate": True}],
    ):
        with np.errstate(all="ignore"):
            cast = [t.astype(f32) for t in terms]
            expected = cast[0]
            for t in cast[1:]:
                expected = expected + t
        b = make_buffer([lib.Slot(dtype="float32")], budget=budget)
        given = [t.copy() for t in terms]
        before = [bits(g) for g in given]
        with fanin.trace() if general else contextlib.nullcontext():
            for key, g in enumerate(given):
                b.add(0, g, key=key, **how)
            (y,) = b.take()
        assert (type(y), y.dtype, y.shape) == (np.ndarray, f32, (9,))
        assert bits(y) == bits(expected), (len(terms), how)
        for g, was in zip(given, before, strict=True):
            assert g.dtype == f32 or bits(g) == was, "what was given is not written: the cast is in memory of its own"
            assert g.dtype == f32 or not np.may_share_memory(g, y)


# Sparse


@pytest.mark.rule("A5")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("format", ["coo", "csr", "csc"])
def test_sparse_of_one_kind_stays_of_that_kind(total: Total, format: str, budget: Any) -> None:
    x = coo((1, 2, 1), (0, 1, 2), (1, 2, 4), format=format)
    y = coo((1, 2, 8), (0, 0, 0.0), format=format)
    result = total(x, y, budget=budget)
    assert type(result) is type(x)
    assert (result.dtype, result.shape) == (f32, (2, 3))
    assert added_up(result) == {(0, 0): 0, (0, 1): 2, (1, 2): 13}, "an explicit zero stays"
    assert added_up(x) == {(0, 1): 2, (1, 2): 5}
    if format != "coo":
        assert result.nnz == 3
        assert result.has_canonical_format


@pytest.mark.rule("A5")
def test_blocks_are_merged_as_blocks(total: Total, lib: Any) -> None:
    x = sp.bsr_array((np.arange(8.0).reshape(2, 2, 2), np.array([1, 0]), np.array([0, 1, 2])), shape=(4, 4))
    y = sp.bsr_array((np.ones((1, 2, 2)), np.array([0]), np.array([0, 1, 1])), shape=(4, 4))
    result = total(x, y)
    assert type(result) is sp.bsr_array
    assert result.blocksize == (2, 2)
    assert result.toarray().tolist() == (x.toarray() + y.toarray()).tolist()
    assert result.data.shape[0] == 3
    parts = (np.array([0, 1, 2]), np.array([1, 0]), np.arange(8.0).reshape(2, 2, 2))
    mine = lib.Sparse("bsc", parts, (4, 4))
    twice = total(mine, mine)
    assert (type(twice), twice.format, tuple(twice.shape)) == (lib.Sparse, "bsc", (4, 4))
    assert added_up(twice) == {i: 2 * v for i, v in added_up(mine).items()}


@pytest.mark.rule("A5")
@pytest.mark.parametrize("budget", BUDGETS)
def test_coo_does_not_grow_without_bound(make_buffer: Any, lib: Any, budget: Any) -> None:
    for new in (
        lambda: coo((1, 1, 1.0), (0, 1, 1.0)),
        lambda: lib.Sparse("coo", (np.array([[1, 0]]), np.ones((2, 4), f32)), (3, 4)),
    ):
        b = make_buffer(1, budget=budget)
        for _ in range(40):
            b.add(0, new())
        result = b.take()[0]
        count = len(result.parts[-1]) if hasattr(result, "parts") else result.nnz
        assert count <= 2 * 2 + 2
        assert set(added_up(result).values()) == {40.0}


@pytest.mark.rule("A5", "A15")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("format", ["coo", "csr", "csc"])
def test_duplicates_are_added_in_the_order_of_key_and_position(total: Total, format: str, budget: Any) -> None:
    big = 2.0**24
    x = coo((0, 0, big), (0, 0, 1.0), (0, 0, -big), format=format)
    y = coo((0, 0, 1.0), format=format)
    assert added_up(total(x, y, budget=budget)) == {(0, 0): 1.0}
    assert added_up(total(y, x, budget=budget)) == {(0, 0): 0.0}
    ones = np.zeros((2, 3), f32)
    assert total(x, ones, y, budget=budget)[0, 0] == 1.0
    assert total(y, ones, x, budget=budget)[0, 0] == 0.0, "2**24 + 1 is 2**24"
    assert total(ones, y, x, budget=budget)[0, 0] == 0.0


@pytest.mark.rule("A5", "A10")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("format", ["coo", "csr", "csc"])
def test_duplicates_are_added_in_the_dtype_that_the_sum_then_has(
    make_buffer: Any, format: str, copy: bool, budget: Any
) -> None:
    x = coo((0, 0, 200), (0, 0, 100), dtype=np.uint8, format=format)
    for terms, expected in (
        ((x, coo((0, 0, 0.0))), 44.0),
        ((coo((0, 0, 0.0)), x), 300.0),
        ((np.zeros((2, 3), f32), x), 300.0),
    ):
        b = make_buffer(1, budget=budget)
        for g in terms:
            b.add(0, g, copy=copy)
        result = b.take()[0]
        assert (result if isinstance(result, np.ndarray) else result.toarray())[0, 0] == expected


@pytest.mark.rule("A5")
def test_a_sparse_sum_of_a_dtype_that_scipy_lacks_comes_back_as_fanin_sparse(total: Total, lib: Any) -> None:
    for format in ("coo", "csr", "csc"):
        x = coo((0, 1, 1), dtype=np.int8, format=format)
        for result in (
            total(x, lib.Zero((2, 3), f16)),
            total(x, slot=lib.Slot(dtype="bfloat16")),
            total(x, x, slot=lib.Slot(dtype=f16)),
        ):
            assert (type(result), result.format) == (lib.Sparse, format)


@pytest.mark.rule("A4", "A6", "A7")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_dense_value_without_a_stored_entry_keeps_its_bits(total: Total, lib: Any, budget: Any) -> None:
    s, d = coo((0, 1, -0.0), (1, 0, 2.0)), np.full((2, 3), -0.0, f32)
    expected = bits(np.array([[-0.0, -0.0, -0.0], [2, -0.0, -0.0]], f32))
    assert bits(total(s, d, budget=budget)) == expected
    assert bits(total(d, s, budget=budget)) == expected
    assert bits(total(s, s, d, budget=budget)) == bits(np.array([[-0.0, -0.0, -0.0], [4, -0.0, -0.0]], f32))
    for narrow, wide in ((np.int8, f32), (np.bool_, f64), (f32, np.complex64), (f16, np.complex128)):
        one = lib.Sparse("coo", (np.array([[1]]), np.ones(1, narrow)), (2,))
        dense = np.full(2, -0.0, wide)
        if dense.dtype.kind == "c":
            dense.imag = -0.0
        expected = dense.copy()
        expected[1] += 1
        assert bits(total(one, dense, budget=budget)) == bits(expected), (narrow, wide)
        assert bits(total(dense, one, budget=budget)) == bits(expected), (narrow, wide)


@pytest.mark.rule("A7")
@pytest.mark.parametrize("budget", BUDGETS)
def test_sparse_of_two_kinds_becomes_coo(total: Total, lib: Any, budget: Any) -> None:
    x, y = coo((0, 1, 1), format="csr"), coo((0, 1, 2), (1, 0, 4), format="csc")
    for terms in ((x, y), (y, x), (x, x, y), (coo((0, 1, 1)), y)):
        result = total(*terms, budget=budget)
        assert type(result) is sp.coo_array
        assert result.toarray().tolist() == sum(t.toarray() for t in terms).tolist()
    assert type(total(sp.csr_matrix(x), y)) is sp.coo_matrix, "the first one's family"
    mine = lib.Sparse("csr", (np.array([0, 1, 1]), np.array([1]), row(1)), (2, 3))
    mixed = total(mine, y)
    assert (type(mixed), mixed.format) == (lib.Sparse, "coo")
    assert added_up(mixed) == {(0, 1): 3, (1, 0): 4}


@pytest.mark.rule("A11")
@pytest.mark.parametrize("budget", BUDGETS)
def test_sparse_low_floats_are_rounded_once(total: Total, lib: Any, budget: Any) -> None:
    def sparse(*values: float) -> Any:
        indices = np.zeros((1, len(values)), np.int64)
        return lib.Sparse("coo", (indices, row(*values, dtype=BFLOAT16)), (2,))

    result = total(sparse(256), sparse(1), sparse(1), budget=budget)
    assert result.parts[-1].dtype == BFLOAT16
    assert {i: float(v) for i, v in added_up(result).items()} == {(0,): 258}
    mixed = total(sparse(256), row(1, 0, dtype=BFLOAT16), sparse(1, 1), budget=budget)
    assert mixed.astype(f32).tolist() == [260, 0], "259 is 260 in bfloat16"


@pytest.mark.rule("A9", "A10")
def test_sparse_gradients_are_conformed_to_the_declaration(make_buffer: Any, lib: Any, total: Total) -> None:
    x = coo((0, 1, 1.5), (0, 1, 2.0), (1, 2, 3.0), dtype=f64)
    result = total(x, slot=lib.Slot(dtype="float32"))
    assert type(result) is sp.coo_array
    assert (result.dtype, result.nnz) == (f32, 3)
    reduced = total(x, slot=lib.Slot(shape=(3,)))
    assert type(reduced) is np.ndarray
    assert reduced.tolist() == [0, 3.5, 3]
    b = make_buffer([lib.Slot(shape=(3, 2), dtype="float32")])
    with pytest.raises(ValueError, match="slot 0"):
        b.add(0, x)
    with pytest.raises(ValueError, match="slot 0"):
        b.add(0, coo((0, 1, 1j), shape=(3, 2), dtype=np.complex64))


@pytest.mark.rule("A9", "A10")
def test_a_sparse_gradient_is_cast_to_the_declared_dtype_before_it_is_reduced(total: Total, lib: Any) -> None:
    small = coo((0, 1, 200), (0, 1, 100), (1, 1, 100), dtype=np.uint8)
    assert total(small, slot=lib.Slot(shape=(3,), dtype="float64")).tolist() == [0, 400, 0]
    assert total(small, slot=lib.Slot(shape=(3,), dtype="uint16")).tolist() == [0, 400, 0]
    assert total(small, slot=lib.Slot(shape=(3,))).tolist() == [0, 400 - 256, 0]
    wide = coo((0, 1, 2049.0), (1, 1, 2049.0), dtype=f64)
    assert total(wide, slot=lib.Slot(shape=(3,), dtype="float16")).tolist() == [0, 4096, 0], "2049 is 2048 in float16"
    huge = coo((0, 1, 1e30), (1, 1, -1e30), dtype=f64)
    assert math.isnan(total(huge, slot=lib.Slot(shape=(3,), dtype="float16"))[1]), "inf - inf"


@pytest.mark.rule("A14")
def test_sparse_sums_take_scale_out_and_writable(total: Total) -> None:
    x = coo((0, 1, 1.5), (0, 1, 2.0))
    scaled = total(x, x, scale=2)
    assert type(scaled) is sp.coo_array
    assert added_up(scaled) == {(0, 1): 14}
    assert added_up(x) == {(0, 1): 3.5}
    out = np.full((2, 3), 9.0)
    assert total(x, x, out=out) is out
    assert out.tolist() == [[0, 7, 0], [0, 0, 0]]
    low = np.ones((2, 3), f16)
    assert total(coo((0, 1, 65504), (0, 1, 65504), (0, 1, -65504)), out=low) is low
    assert low[0].tolist() == [0, 65504, 0], "rounded once"
    mine = total(x, writable=True)
    assert mine is not x
    assert not np.may_share_memory(mine.data, x.data)
    assert total(x, np.ones((2, 3), f32), out=out).tolist() == [[1, 4.5, 1], [1, 1, 1]]


@pytest.mark.rule("A5")
@pytest.mark.parametrize(
    ("format", "parts", "shape"),
    [
        ("coo", (np.array([[0, 3]]), row(1, 2)), (3,)),
        ("coo", (np.array([[0, -1]]), row(1, 2)), (3,)),
        ("coo", (np.array([[0, 1]]), row(1)), (3,)),
        ("csr", (np.array([0, 1]), np.array([0]), row(1)), (2, 2)),
        ("csr", (np.array([0, 2, 1]), np.array([0]), row(1)), (2, 2)),
        ("csr", (np.array([1, 1, 1]), np.array([0]), row(1)), (2, 2)),
        ("csc", (np.array([0, 1, 1]), np.array([2]), row(1)), (2, 2)),
        ("bsr", (np.array([0, 1]), np.array([0]), np.ones((1, 2, 2))), (3, 2)),
        ("nil", (np.array([[0, 1]]), row(1, 2)), (3,)),
    ],
)
def test_a_sparse_gradient_that_contradicts_itself_is_an_error(
    make_buffer: Any, lib: Any, format: str, parts: Any, shape: Any
) -> None:
    b = make_buffer(1)
    with pytest.raises((ValueError, TypeError)):
        b.add(0, lib.Sparse(format, parts, shape))
    assert b.take() == [None]


# Symbolic zeros


@pytest.mark.rule("A2")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_symbolic_zero_adds_its_dtype_and_nothing_else(total: Total, lib: Any, budget: Any) -> None:
    zero, x = lib.Zero((2,), f64), row(-0.0, 2**-149)
    for terms in ((zero, x), (x, zero)):
        result = total(*terms, budget=budget)
        assert result.dtype == f64
        assert bits(result) == bits(x.astype(f64))
    assert total(zero, budget=budget) is zero
    two = total(lib.Zero((2,), f32), zero, budget=budget)
    assert show(two) == ("zero", (2,), "float64")
    sparse = total(lib.Zero((2, 3), f64), coo((0, 1, 2.0)), budget=budget)
    assert type(sparse) is sp.coo_array
    assert sparse.dtype == f64
    t = Tracked("t")
    assert total(zero, t, zero) is t


@pytest.mark.rule("A2", "A9", "A10")
def test_a_symbolic_zero_is_checked_like_a_gradient(make_buffer: Any, lib: Any, total: Total) -> None:
    b = make_buffer([lib.Slot(shape=(3,), dtype="float32")])
    for bad in (lib.Zero((2,), f32), lib.Zero((3,), np.complex64), lib.Zero((3, 1), f32)):
        with pytest.raises(ValueError, match="slot 0"):
            b.add(0, bad)
    b.add(0, lib.Zero((2, 3), f16))
    assert show(b.take()[0]) == ("zero", (3,), "float32")
    out = np.ones(2, f64)
    assert total(lib.Zero((2,), f32), out=out) is out
    assert out.tolist() == [0, 0]
    assert show(total(lib.Zero((2,), f32), scale=2)) == ("zero", (2,), "float32")


# Objects


@pytest.mark.rule("A8")
@pytest.mark.parametrize("budget", BUDGETS)
def test_objects_sum_by_their_own_plus_in_order(total: Total, budget: Any) -> None:
    a, b, c = (Tracked(t) for t in "abc")
    assert total(a, b, c, budget=budget).text == "((a+b)+c)"
    assert total(Fraction(1, 2), Fraction(1, 3), budget=budget) == Fraction(5, 6)
    assert total(row(1), row(2), a, row(3), budget=budget).text == "(([3.0]+a)+[3.0])", "arrays before it are one sum"
    assert total(a, None, row(1, dtype=f16), budget=budget).text == "(a+[1.0])"
    low = [row(2048, dtype=f16), row(1, dtype=f16), row(1, dtype=f16)]
    assert total(*low, a, budget=budget).text == "([2050.0]+a)", "rounded once, when it meets the object"


@pytest.mark.rule("A8", "A9", "A10")
@pytest.mark.parametrize("budget", BUDGETS)
def test_beside_an_object_a_gradient_is_conformed_to_the_declaration(total: Total, lib: Any, budget: Any) -> None:
    slot = lib.Slot(shape=(1,), dtype="float16")
    t, x = Tracked("t"), row(2048, 1, 1, 1)
    assert total(x, t, slot=slot, budget=budget).text == "([2052.0]+t)", "2051, rounded"
    assert total(t, x, slot=slot, budget=budget).text == "(t+[2052.0])"
    seen = []
    both = lib.Slot(shape=(1,), dtype="float16", combine=lambda old, new: seen.append((old, new)) or "sum")
    assert total(t, x, x, slot=both, budget=budget) == "sum"
    assert [type(new) for _, new in seen] == [np.ndarray, np.ndarray]
    assert [new.dtype for _, new in seen] == [f16, f16]


@pytest.mark.rule("A8")
def test_an_objects_own_method_is_called_beside_an_array(total: Total) -> None:
    class Reluctant(Tracked):
        __array_priority__ = -1.0

        def __array__(self, *a: Any, **k: Any) -> Any:
            raise AssertionError("NumPy was asked")

    assert total(row(1), Reluctant("r")).text == "([1.0]+r)"
    assert total(Reluctant("r"), row(1)).text == "(r+[1.0])"


@pytest.mark.rule("A8")
def test_after_something_sparse_the_object_comes_first(total: Total) -> None:
    assert total(coo((0, 1, 1.0)), Tracked("t")).text == "(t+coo_array)"


@pytest.mark.rule("A8")
@pytest.mark.parametrize("budget", BUDGETS)
def test_combine_sums_objects_that_are_no_arrays(total: Total, lib: Any, budget: Any) -> None:
    slot = lib.Slot(combine=lambda old, new: [*old, *new])
    assert total([1], (2,), [3], slot=slot, budget=budget) == [1, 2, 3]
    words = lib.Slot(combine=lambda old, new: f"<{text_of(old)} {text_of(new)}>")
    assert total(Tracked("a"), Tracked("b"), slot=words, budget=budget) == "<a b>"
    plain = total(row(1), row(2), slot=words, budget=budget)
    assert plain.tolist() == [3], "arrays are summed as arrays"
    single = {"a": 1}
    assert total(single, slot=words) is single


@pytest.mark.rule("A8")
def test_masked_arrays_and_subclasses_that_sum_their_own_way_are_objects(total: Total) -> None:
    masked = total(row(1, 2), np.ma.masked_array(row(10, 20), [False, True]))
    assert isinstance(masked, np.ma.MaskedArray)
    assert masked.tolist() == [11, None]

    class Own(np.ndarray[Any, Any]):
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
            return ufunc.__name__

    assert total(row(1).view(Own), row(2).view(Own)) == "add"
    plain = total(row(1).view(Sub), row(2).view(Sub))
    assert type(plain) is np.ndarray, "a subclass that does not is an array"
    boxed = total(np.array([Fraction(1, 2)], object), np.array([Fraction(1, 2)], object))
    assert boxed.tolist() == [Fraction(1)]


@pytest.mark.rule("A8")
@pytest.mark.parametrize("bad", [[1.0], (1.0,), {"a": 1}, "1", b"1", {1}, object(), lambda: 1, np.array(["a"])])
def test_an_object_without_a_sum_is_a_type_error(make_buffer: Any, bad: Any) -> None:
    b = make_buffer(1, name="grads")
    with pytest.raises(TypeError):
        b.add(0, bad)
    assert b.take() == [None]


@pytest.mark.rule("A8")
def test_arrays_that_cannot_be_imported_are_refused(make_buffer: Any) -> None:
    b = make_buffer(1)
    for bad in (np.zeros(2, ">f8"), np.zeros(2, np.longdouble)):
        with pytest.raises(BufferError):
            b.add(0, bad)
    for bad in (np.zeros(2, "m8[s]"), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "f4")]), np.zeros(2, "S3")):
        with pytest.raises(TypeError):
            b.add(0, bad)
    assert b.take() == [None]


@pytest.mark.rule("A8")
def test_an_object_has_no_memory_to_scale_or_to_write(make_buffer: Any) -> None:
    b = make_buffer(1)
    b.add(0, Tracked("a"))
    b.add(0, Tracked("b"))
    for how in ({"scale": 2}, {"out": [np.zeros(2)]}, {"scale": 2j}):
        with pytest.raises(TypeError):
            b.take(**how)
    assert b.take(writable=True)[0].text == "(a+b)"
    b.add(0, row(1, 2))
    b.add(0, Tracked("a"))
    for how in ({"scale": 2}, {"out": [np.zeros(3, np.int8)]}, {"scale": 2j}):
        with pytest.raises(TypeError):
            b.take(**how)
    assert b.take()[0].text == "([1.0, 2.0]+a)"


@pytest.mark.rule("A8", "S14")
def test_a_sum_that_raises_leaves_every_contribution_where_it_was(make_buffer: Any, lib: Any) -> None:
    fails = [True]

    def combine(old: Any, new: Any) -> Any:
        if fails[0]:
            raise KeyError("not now")
        return f"{old}{new}"

    b = make_buffer([lib.Slot(), lib.Slot(combine=combine)])
    for key, x in ((0, 2.0**24), (5, -(2.0**24))):
        b.add(0, row(x), key=key)
    b.add(1, "a")
    b.add(1, "b")
    with pytest.raises(KeyError, match="not now"):
        b.take()
    b.add(0, row(1.0), key=3)
    fails[0] = False
    arrays, text = b.take()
    assert arrays.tolist() == [0.0], "key 3 still goes between keys 0 and 5"
    assert text == "ab"


@pytest.mark.rule("A8")
@pytest.mark.parametrize("call", ["take", "clear", "snapshot"])
def test_a_callback_cannot_use_its_own_slot(make_buffer: Any, call: str) -> None:
    seen = []

    class Nosy(Tracked):
        def __add__(self, other: Any) -> Tracked:
            try:
                b.take() if call == "take" else b.clear() if call == "clear" else b[0]
            except RuntimeError as e:
                seen.append(str(e))
            try:
                b.add(0, Tracked("late"))
            except RuntimeError as e:
                seen.append(str(e))
            return super().__add__(other)

    b = make_buffer(1)
    b.add(0, Nosy("a"))
    b.add(0, Nosy("b"))
    assert b.take()[0].text == "(a+b)"
    assert len(seen) == 2
    assert all("slot 0" in s or "0" in s for s in seen)
    assert b.take() == [None]


# A pass that records itself


@pytest.mark.rule("A1")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_recording_pass_adds_by_the_arrays_operator_and_never_in_place(make_buffer: Any, budget: Any) -> None:
    x = row(2048, dtype=f16)
    b = make_buffer(2, create_graph=True, budget=budget)
    b.add(0, x, donate=True)
    b.add(0, row(1, dtype=f16))
    b.add(0, row(1, dtype=f16))
    b.add(1, row(1))
    b.add(1, Tracked("t"))
    low, mixed = b.take()
    assert low.tolist() == [2048], "float16's own + rounds each time"
    assert low is not x
    assert x.tolist() == [2048]
    assert mixed.text == "([1.0]+t)"


@pytest.mark.rule("A1", "A9")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_recording_pass_never_broadcasts_silently(make_buffer: Any, lib: Any, budget: Any) -> None:
    b = make_buffer([lib.Slot(), lib.Slot(shape=(2,), dtype="float32")], create_graph=True, budget=budget)

    def fails() -> None:  # at the add, or, as it is the arrays' own operator that sums, at the sum
        b.add(0, np.ones(3))
        b.add(0, np.ones((3, 1)))
        b.take()

    with pytest.raises(ValueError, match=r"\(3, 1\)"):
        fails()
    b.clear()
    with pytest.raises(ValueError, match="slot 1"):
        b.add(1, np.ones(3, np.complex64))
    b.add(1, np.ones((4, 2)))
    assert b.take()[1].tolist() == [4, 4]


# What comes back


@pytest.mark.rule("A14")
def test_a_snapshot_has_its_own_memory_and_changes_nothing(make_buffer: Any) -> None:
    for budget in BUDGETS:
        b = make_buffer(1, budget=budget)
        assert b[0] is None
        x = row(2048, 0, dtype=f16)
        b.add(0, x)
        alone = b[0]
        assert same(alone, x)
        assert not np.may_share_memory(alone, x)
        b.add(0, row(1, 1, dtype=f16))
        both = b[0]
        assert both.tolist() == [2048, 1], "rounded for the looker"
        both[:] = 0
        b.add(0, row(1, 1, dtype=f16))
        assert alone.tolist() == [2048, 0], "later adds do not change it"
        assert b.take()[0].tolist() == [2050, 2], "and it does not change the bits"
        assert b[0] is None


@pytest.mark.rule("A14")
def test_a_snapshot_of_any_kind_equals_the_result_of_take(make_buffer: Any, lib: Any) -> None:
    t = Tracked("t")
    for terms in (
        (coo((0, 1, 2.0), (0, 1, 3.0)),),
        (coo((0, 1, 2.0)), coo((0, 2, 2.0))),
        (lib.Zero((2,), f32),),
        (lib.Zero((2,), f32), lib.Zero((2,), f64)),
        (1, 2.5),
        (f32(1), 2),
        (t,),
        (t, t),
        (np.broadcast_to(row(1), (3,)),),
        (None,),
    ):
        b = make_buffer(1)
        for x in terms:
            b.add(0, x)
        snapshot = b[0]
        assert same(snapshot, b.take()[0])
        assert (snapshot is t) == (len(terms) == 1 and terms[0] is t)


@pytest.mark.rule("A14")
def test_the_sum_comes_back_as_the_kind_of_the_first_key(make_buffer: Any, tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", f32, "w+", shape=(2,))
    b = make_buffer(3)
    b.add(0, row(1, 2).view(Sub), key=1)
    b.add(0, mapped, key=0)
    b.add(1, sp.csr_matrix(np.eye(2)), key=1)
    b.add(1, sp.csr_array(np.eye(2)), key=0)
    b.add(2, 1.5, key=0)
    b.add(2, np.array(1.0), key=1)
    first, second, third = b.take()
    assert type(first) is np.ndarray
    assert type(second) is sp.csr_array
    assert type(third) is np.ndarray
    assert third.shape == ()
