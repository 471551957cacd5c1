"""What a sum is, to the last bit: rules A9-A13 and A15, on the description and on the core. Expected values are typed
by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kit.values import BFLOAT16, DTYPES, E4M3, E5M2, INTEGERS, LOW, bits

pytestmark = pytest.mark.core
Total = Callable[..., Any]

f16, f32, f64 = np.float16, np.float32, np.float64
BUDGETS = (0, 24, None, math.inf)


def row(*values: Any, dtype: Any = f32) -> np.ndarray[Any, Any]:
    return np.array(values, dtype)


@pytest.mark.rule("A15")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_sum_is_the_left_fold_in_the_order_of_arrival(total: Total, budget: Any) -> None:
    big, one = row(2.0**24, -0.0), row(1, -0.0)
    assert bits(total(big, one, -big, budget=budget)) == bits(row(0, 0))
    assert bits(total(big, -big, one, budget=budget)) == bits(row(1, 0))
    assert bits(total(one, one, big, budget=budget)) == bits(row(2**24 + 2, -0.0)), "-0.0 is not turned into 0.0"


@pytest.mark.rule("A15")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_with_keys_the_order_of_arrival_does_not_matter(make_buffer: Any, order: Any, budget: Any) -> None:
    terms = [row(2.0**24), row(1), row(-(2.0**24))]
    b = make_buffer(1, budget=budget)
    for key in order:
        b.add(0, terms[key], key=key)
    assert b.take()[0].tolist() == [0.0]


@pytest.mark.rule("A15")
def test_gaps_between_keys_are_skipped_at_take(make_buffer: Any) -> None:
    b = make_buffer(1, budget=0)
    for key, x in ((2**62, -(2.0**24)), (3, 1.0), (0, 2.0**24)):
        b.add(0, row(x), key=key)
    assert b.take()[0].tolist() == [0.0]


@pytest.mark.rule("A11")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("dtype", "terms", "once", "each"),
    [
        (np.dtype(f16), (2048, 1, 1), 2050, 2048),
        (BFLOAT16, (256, 1, 1), 258, 256),
        (E4M3, (16, 1, 1), 18, 16),
        (E5M2, (8, 1, 1), 10, 8),
        (E4M3, (448, 448, -448), 448, math.nan),
        (E5M2, (57344, 57344, -57344), 57344, math.inf),
        (np.dtype(f16), (65504, 65504, -65504), 65504, math.inf),
    ],
)
def test_a_low_float_is_summed_in_float32_and_rounded_once(
    total: Total, dtype: Any, terms: Any, once: float, each: float, budget: Any
) -> None:
    arrays = [row(t, dtype=dtype) for t in terms]
    assert bits(total(*arrays, budget=budget)) == bits(row(once, dtype=dtype))
    rounded = total(*arrays, accumulate=dtype.name, budget=budget)
    assert bits(rounded) == bits(row(each, dtype=dtype)), "accumulate= the slot's own dtype rounds each time"


@pytest.mark.rule("A11")
@pytest.mark.parametrize(
    ("dtype", "value", "nearest"),
    [
        (BFLOAT16, 1 + 2**-8 + 2**-40, 1 + 2**-7),  # float32 on the way would fall on the tie, and to 1
        (BFLOAT16, 1 + 2**-8, 1),
        (BFLOAT16, 1 + 3 * 2**-8 - 2**-40, 1 + 2**-7),
        (np.dtype(f16), 1 + 2**-11 + 2**-40, 1 + 2**-10),
        (E4M3, 1 + 2**-4 + 2**-40, 1 + 2**-3),
        (E5M2, 1 + 2**-3 + 2**-40, 1 + 2**-2),
        (E5M2, 61440.0, math.inf),
        (E5M2, 61440.0 - 2**-20, 57344.0),
        (E4M3, 464.0, 448.0),
        (E4M3, 464.0 + 2**-30, math.nan),
        (E4M3, math.inf, math.nan),
        (BFLOAT16, 2**-134 * (1 + 2**-40), 2**-133),
        (BFLOAT16, 2**-134, 0.0),
        (BFLOAT16, 3.4e38 * 1.01, math.inf),
    ],
)
def test_a_rounding_is_to_nearest_even_and_one_rounding(
    total: Total, lib: Any, dtype: Any, value: float, nearest: float
) -> None:
    x, expected = row(value, -value, dtype=f64), row(nearest, -nearest, dtype=dtype)
    assert bits(total(x, slot=lib.Slot(dtype=dtype))) == bits(expected)
    halves = [x / 2, x / 2] if math.isfinite(value) else [x, x]
    out = np.empty(2, dtype)
    assert bits(total(*halves, out=out)) == bits(expected) == bits(out)


@pytest.mark.rule("A10")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_running_sum_widens_at_the_key_that_widens_it(make_buffer: Any, budget: Any) -> None:
    def summed(*terms: Any) -> Any:
        b = make_buffer(1, budget=budget)
        for key, t in reversed(list(enumerate(terms))):
            b.add(0, t, key=key)
        return b.take()[0]

    big, one = row(2.0**24), row(1)
    wide = summed(big, one, one.astype(f64))
    assert (wide.dtype, wide.tolist()) == (f64, [2**24 + 1]), "the first two were summed in float32"
    assert summed(big, one.astype(f64), one).tolist() == [2**24 + 2]
    whole = summed(row(2**53 + 1, dtype=np.int64), row(0, dtype=f64))
    assert (whole.dtype, whole.tolist()) == (f64, [2**53])
    odd = summed(row(100, dtype=np.int8), row(100, dtype=np.int8), row(1000, dtype=np.int16))
    assert (odd.dtype, odd.tolist()) == (np.int16, [944]), "100 + 100 is -56 in int8"
    few = summed(row(1, dtype=np.int8), row(1, dtype=np.uint8), row(1, dtype=f16))
    assert few.dtype == f16, "of all at once"


@pytest.mark.rule("A10")
def test_each_dtype_is_summed_as_numpy_adds_it(total: Total) -> None:
    for dtype in DTYPES:
        x, y = row(1, 0, 1, dtype=dtype), row(1, 1, 0, dtype=dtype)
        with np.errstate(all="ignore"):
            expected = x + y
        result = total(x, y)
        assert (result.dtype, bits(result)) == (dtype, bits(expected)), dtype
    assert total(row(200, dtype=np.uint8), row(100, dtype=np.uint8)).tolist() == [44]
    assert total(row(True, False, dtype=bool), row(True, False, dtype=bool)).tolist() == [True, False]
    big = row(2**63 - 1, dtype=np.int64)
    assert total(big, row(1, dtype=np.int64)).tolist() == [-(2**63)]
    assert total(row(1 + 2j, dtype=np.complex64), row(1j, dtype=np.complex64)).tolist() == [1 + 3j]


@pytest.mark.rule("A10")
def test_a_bool_is_true_for_every_nonzero_byte(total: Total) -> None:
    odd = np.array([0, 1, 2, 255], np.uint8).view(bool)
    result = total(odd, np.zeros(4, bool))
    assert result.view(np.uint8).tolist() == [0, 1, 1, 1]
    assert total(odd, np.zeros(4, np.int8)).tolist() == [0, 1, 1, 1]


@pytest.mark.rule("A10")
def test_a_declared_dtype_rounds_each_gradient_first(total: Total, lib: Any) -> None:
    x = row(1 + 2**-11, dtype=f32)
    result = total(x, x, slot=lib.Slot(dtype="float16"))
    assert (result.dtype, result.tolist()) == (f16, [2.0])
    result = total(row(2**24 + 1, dtype=np.int64), row(1, dtype=np.int64), slot=lib.Slot(dtype=f32))
    assert result.tolist() == [2**24], "2**24 + 1 is not in float32, and 2**24 + 1 is not either"
    wrapped = total(row(300, dtype=np.int64), slot=lib.Slot(dtype=np.int8))
    assert (wrapped.dtype, wrapped.tolist()) == (np.int8, [44])


@pytest.mark.rule("A10")
@pytest.mark.parametrize(
    ("given", "declared", "words"),
    [
        (np.complex64, "float64", ("complex64", "float64")),
        (f32, "int64", ("float32", "int64")),
        (np.int8, "bool", ("int8", "bool")),
        (np.int64, "uint8", ("int64", "uint8")),
        (BFLOAT16, "int32", ("bfloat16", "int32")),
    ],
)
def test_a_cast_that_loses_kind_is_an_error(make_buffer: Any, lib: Any, given: Any, declared: str, words: Any) -> None:
    b = make_buffer([lib.Slot(dtype=declared)], name="grads")
    with pytest.raises(ValueError, match=r"grads.*slot 0.*key 5") as e:
        b.add(0, np.zeros(2, given), key=5)
    assert all(w in str(e.value) for w in words)
    assert b.take() == [None]


@pytest.mark.rule("A10")
def test_two_kinds_of_float8_have_no_sum(make_buffer: Any) -> None:
    b = make_buffer(1)
    b.add(0, np.ones(2, E4M3))
    with pytest.raises(ValueError, match="slot 0"):
        b.add(0, np.ones(2, E5M2))
    b.add(0, np.ones(2, E4M3))
    assert b.take()[0].astype(f32).tolist() == [2, 2]


# Python scalars


@pytest.mark.rule("A10")
@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ((1, 2), 3),
        ((1, 2.5), 3.5),
        ((True, True), True),
        ((True, 2), 3),
        ((1, 2j), 1 + 2j),
        ((2**62, 2**62, -(2**62)), 2**62),
        ((0.1, 0.2), 0.1 + 0.2),
    ],
)
def test_python_scalars_sum_to_a_python_scalar(total: Total, terms: Any, expected: Any) -> None:
    result = total(*terms)
    assert (type(result), result) == (type(expected), expected)


@pytest.mark.rule("A10")
def test_python_scalars_are_weak_beside_arrays_and_numpys_scalars(total: Total) -> None:
    for terms, dtype, value in [
        ((f32(1), 2.5), f32, 3.5),
        ((2.5, f32(1)), f32, 3.5),
        ((np.int8(1), 2), np.int8, 3),
        ((np.int8(1), 2.5), f64, 3.5),
        ((np.float64(1), 2j), np.complex128, 1 + 2j),
        ((np.bool_(True), 1), np.int64, 2),
    ]:
        result = total(*terms)
        assert isinstance(result, np.generic), terms
        assert (result.dtype, result) == (dtype, value)
    result = total(1.5, np.array(1, f16))
    assert isinstance(result, np.ndarray)
    assert (result.dtype, result.shape, result.item()) == (f16, (), 2.5)
    low = total(BFLOAT16.type(1), 1.5)
    assert (low.dtype, float(low)) == (BFLOAT16, 2.5)


@pytest.mark.rule("A10")
def test_an_integer_that_does_not_fit_is_an_error(make_buffer: Any, lib: Any) -> None:
    b = make_buffer([lib.Slot(), lib.Slot(dtype="uint8"), lib.Slot()])
    for slot, x in ((0, 2**63), (0, -(2**63) - 1), (1, 256), (1, -1)):
        with pytest.raises(ValueError if slot else OverflowError, match=rf"slot {slot}"):
            b.add(slot, x)
    b.add(0, np.uint8(5))
    b.add(2, 300)
    b.add(1, 255)
    assert [int(x) for x in b.take()] == [5, 255, 300]
    for order in ((np.uint8(5), 300), (300, np.uint8(5))):  # undeclared: a later one may widen the sum (D5)
        for x in order:
            b.add(0, x)
        with pytest.raises(ValueError):
            b.take()
        with pytest.raises(ValueError):
            b[0]
        b.add(0, np.uint16(1))
        assert b.take()[0] == 306


# Shapes


@pytest.mark.rule("A9")
@pytest.mark.parametrize(
    ("declared", "given"),
    [((3,), (1,)), ((3,), ()), ((3,), (3, 1)), ((1, 3), (3,)), ((2, 1), (3, 3)), ((0,), (3,)), ((3,), (0,))],
)
def test_a_shape_is_never_broadcast_silently(make_buffer: Any, lib: Any, declared: Any, given: Any) -> None:
    b = make_buffer([lib.Slot(shape=declared)], name="grads")
    with pytest.raises(ValueError, match=r"grads.*slot 0") as e:
        b.add(0, np.zeros(given))
    assert str(declared) in str(e.value)
    assert str(given) in str(e.value)
    assert b.take() == [None]
    c = make_buffer(1)
    c.add(0, np.zeros(declared))
    with pytest.raises(ValueError, match="slot 0") as e:
        c.add(0, np.zeros(given))
    assert str(declared) in str(e.value)
    assert str(given) in str(e.value)


@pytest.mark.rule("A9")
@pytest.mark.parametrize(
    ("declared", "given", "expected"),
    [
        ((3,), (2, 3), [3, 5, 7]),
        ((2, 1), (2, 3), [[3], [12]]),
        ((), (2, 3), 15),
        ((1, 1), (2, 3), [[15]]),
        ((1, 3), (2, 1, 3), [[3, 5, 7]]),
        ((2, 3), (2, 3), [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_a_gradient_is_summed_to_the_declared_shape(
    total: Total, lib: Any, declared: Any, given: Any, expected: Any
) -> None:
    x = np.arange(6.0, dtype=f32).reshape(given)
    result = total(x, slot=lib.Slot(shape=declared))
    assert (result.shape, result.tolist()) == (declared, expected)
    twice = total(x, result, slot=lib.Slot(shape=declared))
    assert twice.tolist() == (2 * np.array(expected)).tolist()


@pytest.mark.rule("A9", "A13")
def test_a_reduction_runs_in_float64_in_order_and_rounds_once(total: Total, lib: Any) -> None:
    x = row(2.0**24, 1, 1)
    assert total(x, slot=lib.Slot(shape=())).tolist() == 2**24 + 2
    low = row(2048, 1, 1, 1, dtype=f16)
    assert total(low, slot=lib.Slot(shape=())).tolist() == 2052, "float16 has no 2051"
    assert total(low, np.array(-1, f16), slot=lib.Slot(shape=())).tolist() == 2050, "2051 - 1: the rounding comes last"
    wide = row(2.0**53, 1, 1, dtype=f64)
    assert total(wide, slot=lib.Slot(shape=())).tolist() == 2**53, "one after the other"
    assert total(row(100, 100, dtype=np.int8), slot=lib.Slot(shape=(1,))).tolist() == [-56]
    assert total(row(False, True, dtype=bool), slot=lib.Slot(shape=())).tolist() is True
    assert total(row(-0.0), slot=lib.Slot(shape=())).tobytes() == f32(-0.0).tobytes(), (
        "one term: nothing is added to it"
    )


@pytest.mark.rule("A9")
def test_an_axis_of_size_zero_sums_to_zeros(total: Total, lib: Any) -> None:
    for dtype in DTYPES:
        result = total(np.zeros((0, 3), dtype), slot=lib.Slot(shape=(3,)))
        assert (result.dtype, result.shape, bits(result)) == (dtype, (3,), bits(np.zeros(3, dtype)))
    assert total(np.zeros((0, 3), f32), row(1, 2, 3), slot=lib.Slot(shape=(3,))).tolist() == [1, 2, 3]


@pytest.mark.rule("A13")
def test_expanded_gradients_stay_expanded_until_memory_is_needed(total: Total) -> None:
    x, y = np.broadcast_to(row(1, 2), (1000, 2)), np.broadcast_to(row(10, 20), (1000, 2))
    assert total(x) is x
    result = total(x, y)
    assert (result.shape, result.strides[0]) == ((1000, 2), 0)
    assert result[7].tolist() == [11, 22]
    writable = total(x, y, writable=True)
    assert writable.flags.writeable
    assert writable.strides[0] != 0
    writable[0] = 0
    assert writable[1].tolist() == [11, 22]
    mixed = total(x, np.ones((1000, 2), f32))
    assert mixed.flags.writeable
    assert mixed[999].tolist() == [2, 3]


@pytest.mark.rule("A13")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reducing_an_expanded_axis_gives_the_result_of_the_full_array(total: Total, lib: Any, dtype: Any) -> None:
    x = np.broadcast_to(row(1, 0, 1, dtype=dtype)[:, None], (2, 3, 5))
    for shape in ((3, 5), (3, 1), (1, 1), (), (5,)):
        assert bits(total(x, slot=lib.Slot(shape=shape))) == bits(total(x.copy(), slot=lib.Slot(shape=shape)))


# Layout, scale, out


@pytest.mark.rule("A7")
def test_a_fresh_sum_has_the_stride_order_of_the_first_and_no_gaps(total: Total) -> None:
    x = np.zeros((2, 3, 4), f32).transpose(2, 0, 1)
    for first in (x, x[::-1], np.zeros((8, 4, 6), f32).transpose(1, 2, 0)[:, ::3, ::4]):
        result = total(first, np.zeros(first.shape, f32))
        order = np.argsort([-abs(s) for s in first.strides], kind="stable")
        expected = np.empty([first.shape[i] for i in order], f32).transpose(np.argsort(order))
        assert result.strides == expected.strides
        assert result.flags.writeable
    assert total(np.zeros((2, 3), f32), np.zeros((3, 2), f32).T).flags.c_contiguous


@pytest.mark.rule("A14")
def test_scale_multiplies_before_the_one_rounding(total: Total) -> None:
    x = row(2048, dtype=f16)
    one = row(1, dtype=f16)
    assert total(x, one, scale=3).tolist() == [6148], "3 * 2049 = 6147; 3 * 2048 would be 6144"
    assert total(x, scale=0.5).tolist() == [1024]
    assert total(row(3, dtype=np.int8), row(4, dtype=np.int8), scale=-2).tolist() == [-14]
    assert total(row(100, dtype=np.int8), scale=3.0).tolist() == [44]
    assert total(row(True, dtype=bool), scale=0).tolist() == [False]
    assert total(row(1 + 2j, dtype=np.complex64), scale=1j).tolist() == [-2 + 1j]
    assert total(3, 4, scale=2) == 14
    assert total(row(0.1, dtype=f64), scale=3).tolist() == [0.1 * 3]
    assert total(row(1, dtype=f32), scale=0.1).tolist() == [float(f32(0.1))], "the scale is float32 too"


@pytest.mark.rule("A14")
@pytest.mark.parametrize(
    ("x", "scale", "error"),
    [
        (row(1), 1j, ValueError),
        (row(1, dtype=np.int8), 0.5, ValueError),
        (row(1, dtype=np.int8), math.inf, ValueError),
        (row(1, dtype=bool), 0.5, ValueError),
        (row(1, dtype=np.int64), 2**64, ValueError),
        (row(1, dtype=np.int64), math.nan, ValueError),
        (row(1), "2", TypeError),
        (row(1), row(2), TypeError),
    ],
)
def test_a_scale_that_the_sum_cannot_hold_is_an_error(make_buffer: Any, x: Any, scale: Any, error: Any) -> None:
    b = make_buffer(1)
    b.add(0, x)
    with pytest.raises(error):
        b.take(scale=scale)
    assert b.take()[0] is x


@pytest.mark.rule("A11", "A14")
def test_out_is_written_in_one_rounding_from_the_accumulation_dtype(total: Total) -> None:
    x, one = row(2048, dtype=f16), row(1, dtype=f16)
    for dtype, expected in ((f32, 2049), (f64, 2049), (f16, 2048), (BFLOAT16, 2048)):
        out = np.full(1, 7, dtype)
        assert total(x, one, out=out) is out
        assert out.tolist() == [expected]
    out = np.zeros(2, np.complex64)
    assert total(row(1, 2), row(1, 2), out=out, scale=0.5).tolist() == [1, 2]
    back = np.zeros((4, 3), f32)[::-2, ::-1]
    assert total(np.arange(6, dtype=np.int8).reshape(2, 3), out=back).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.rule("A14")
def test_out_may_be_one_of_the_contributions_or_overlap_them(make_buffer: Any) -> None:
    memory = np.arange(6.0)
    x, y, between = memory[:4], memory[2:], memory[1:5]
    expected = (x + y).tolist()
    for out in (x, y, between, x[::-1]):
        memory[:] = np.arange(6)
        b = make_buffer(1)
        b.add(0, x)
        b.add(0, y)
        assert b.take(out=[out])[0].tolist() == expected
    memory[:] = np.arange(6)
    b = make_buffer(2)
    b.add(0, x)
    b.add(0, x)
    b.add(1, y)
    first, second = b.take(out=[between, None])
    assert first.tolist() == [0, 2, 4, 6]
    assert second.tolist() == [2, 3, 4, 5], "as if all had been read first"


@pytest.mark.rule("A14")
def test_out_for_an_undefined_slot_is_not_written(make_buffer: Any) -> None:
    b = make_buffer(2)
    b.add(1, None)
    outs = [np.full(2, 5.0), np.full(3, 5.0)]
    assert b.take(out=outs) == [None, None]
    assert [o.tolist() for o in outs] == [[5, 5], [5, 5, 5]]


@pytest.mark.rule("A14")
def test_out_for_an_undefined_slot_is_not_written_even_if_other_slots_read_it(make_buffer: Any) -> None:
    for how in ({}, {"scale": 1}):
        b = make_buffer(2)
        x, y = row(1, 2), row(3, 4)
        b.add(1, x)
        b.add(1, y)
        first, second = b.take(out=[x, None], **how)
        assert (first, second.tolist()) == (None, [4, 6])
        assert x.tolist() == [1, 2]


@pytest.mark.rule("A14")
def test_a_scale_is_checked_only_for_slots_with_a_sum(make_buffer: Any, lib: Any) -> None:
    b = make_buffer(3)
    b.add(1, row(1j, dtype=np.complex64))
    b.add(2, None)
    assert [x if x is None else x.tolist() for x in b.take(scale=2j)] == [None, [-2], None]
    b.add(0, lib.Zero((2,), np.float32))
    with pytest.raises(ValueError, match="slot 0"):
        b.take(scale=2j)


def _read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


@pytest.mark.rule("A14")
@pytest.mark.parametrize(
    ("out", "error"),
    [
        ([], ValueError),
        ([None, None], ValueError),
        ([np.zeros(3, f32)], ValueError),
        ([np.zeros((1, 2), f32)], ValueError),
        ([np.zeros(2, np.int64)], ValueError),
        ([_read_only(np.zeros(2))], BufferError),
        ([np.lib.stride_tricks.as_strided(np.zeros(1), (2,), (0,))], BufferError),
        ([np.zeros(2, ">f8")], BufferError),
        ([[0.0, 0.0]], (TypeError, BufferError)),
        (np.zeros((1, 2)), TypeError),
        ("no", TypeError),
    ],
)
def test_an_out_that_cannot_take_the_sum_is_an_error_and_nothing_is_lost(
    make_buffer: Any, out: Any, error: Any
) -> None:
    b = make_buffer(1, name="grads")
    x = row(1, 2)
    b.add(0, x)
    with pytest.raises(error):
        b.take(out=out)
    assert b.take()[0] is x


@pytest.mark.rule("A14")
def test_two_outs_that_share_memory_are_an_error(make_buffer: Any) -> None:
    b = make_buffer(2)
    for i in (0, 1):
        b.add(i, row(1, 2))
    memory = np.zeros(3, f32)
    with pytest.raises(ValueError, match="out"):
        b.take(out=[memory[:2], memory[1:]])
    assert memory.tolist() == [0, 0, 0]
    assert [t.tolist() for t in b.take()] == [[1, 2], [1, 2]]


@pytest.mark.rule("A11")
def test_accumulate_must_hold_the_sum(make_buffer: Any, lib: Any, total: Total) -> None:
    assert total(row(2.0**24), row(1), row(1), accumulate="float64").tolist() == [2**24 + 2]
    assert total(row(2.0**24), row(1), row(1), accumulate=f64, slot=lib.Slot(accumulate="float32")).tolist() == [2**24]
    assert total(*[row(100, dtype=np.int8)] * 3, accumulate="int64", scale=1).tolist() == [44]
    with pytest.raises(ValueError, match="float64"):
        make_buffer([lib.Slot(dtype="float64")], accumulate="float32")
    b = make_buffer(1, accumulate="float32")
    b.add(0, row(1, dtype=f16))
    with pytest.raises(ValueError, match="slot 0"):
        b.add(0, row(1, dtype=f64))
    for bad in (row(1, dtype=np.int8), row(1j, dtype=np.complex64)):
        with pytest.raises(ValueError, match="slot 0"):
            make_buffer(1, accumulate="float64").add(0, bad)
    assert b.take()[0].tolist() == [1]


@pytest.mark.rule("A11", "A15")
@pytest.mark.parametrize("budget", BUDGETS)
def test_accumulate_must_hold_each_contribution_in_every_order(make_buffer: Any, lib: Any, budget: Any) -> None:
    pairs: list[tuple[str, Any, Any]] = [  # a contribution that it holds, and one that it does not
        ("float64", f64(1), 1),
        ("float64", row(1), row(100, dtype=np.int8)),
        ("float32", row(1), 1.5),
        ("complex128", row(1j, dtype=np.complex64), row(1)),
        ("float64", f32(1), lib.Zero((), "int8")),
        ("int16", row(1, dtype=np.int16), row(True, dtype=np.bool_)),
    ]
    for accumulate, *terms in pairs:
        for order in ([0, 1], [1, 0]):
            b = make_buffer(1, accumulate=accumulate, budget=budget)
            refused = []
            for key in order:
                try:
                    b.add(0, terms[key], key=key)
                except ValueError:
                    refused.append(key)
            assert refused == [1], (accumulate, terms, order)
            assert np.shape(b.take()[0]) == np.shape(terms[0])
    held = (("float64", 1.5, f32(1)), ("int64", 1, np.int8(1)), ("float32", row(1, dtype=f16), row(1, dtype=BFLOAT16)))
    for accumulate, *terms in held:
        for order in ([0, 1], [1, 0]):
            b = make_buffer(1, accumulate=accumulate, budget=budget)
            for key in order:
                b.add(0, terms[key], key=key)
            assert b.take()[0] == terms[0] + 1


@pytest.mark.rule("A10", "A11")
def test_every_pair_of_dtypes_sums_as_converted_first(total: Total) -> None:
    """Numbers that every dtype holds: conversion is exact, so any order of conversion and addition gives the same."""
    for a in DTYPES:
        for b in DTYPES:
            if {a, b} == {E4M3, E5M2}:
                continue
            x, y = row(1, 0, dtype=a), row(0, 1, dtype=b)
            result = total(x, y)
            assert result.astype(np.complex128).tolist() == [1, 1], (a, b)
            plain = a in INTEGERS and b in INTEGERS
            assert not plain or result.dtype == np.result_type(a, b)
            low = a in LOW and b in LOW
            assert not low or result.dtype.name in ("float32", a.name, b.name)
