"""Operands of every kind, for every operation: the numbers of NumPy, or an error by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.tape import Var

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"+": tape.add, "-": tape.sub, "*": tape.mul}


def in_place(sign: str, a: Any, b: Any) -> Any:
    if sign == "+":
        a += b
    elif sign == "-":
        a -= b
    else:
        a *= b
    return a


def ways(sign: str, w: Var, x: Any) -> list[Callable[[], Any]]:
    """An operand on either side, by operator, by function, and in place."""
    op, function = OPERATORS[sign], FUNCTIONS[sign]
    return [
        lambda: op(w, x),
        lambda: op(x, w),
        lambda: function(w, x),
        lambda: function(x, w),
        lambda: in_place(sign, w, x),
    ]


NO_NUMBERS: dict[str, Any] = {
    "None": None,
    "a str": "3.5",
    "bytes": b"3",
    "strs": ["1", "2", "3"],
    "an array of strs": np.array(["1", "2", "3"]),
    "a masked array": np.ma.array([1.0, 2, 3], mask=[1, 0, 0]),
    "a matrix": np.array([[1.0, 2, 3]]).view(np.matrix),
    "objects": np.array([1, 2, 3], object),
    "dates": np.array(["2020-01-01"] * 3, "M8[D]"),
    "times": np.array([1, 2, 3], "m8[s]"),
    "a structured array": np.zeros(3, [("a", "f8")]),
    "a set": {1},
    "a dict": {1: 2},
    "a generator": (i for i in range(3)),
    "ints beyond 64 bits": [10**30] * 3,
    "a Var in a list": [1, tape.array(np.ones(3)), 1],
    "a sparse array": fanin.Sparse("coo", (np.array([[0]]), np.array([1.0])), (3,)),
}


@pytest.mark.parametrize("sign", OPERATORS)
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_an_operand_that_is_no_array_of_numbers_is_a_type_error_of_the_operation(name: str, sign: str) -> None:
    x = NO_NUMBERS[name]
    for w in (tape.parameter(np.array([1.0, 2, 3])), tape.array(np.array([1, 2, 3], "i1"))):
        for way in ways(sign, w, x):
            with pytest.raises(
                TypeError, match=r"^(add|sub|mul): (expected numbers or an array|got a (masked|matrix))"
            ):
                way()


def test_ragged_lists_are_numpys_value_error() -> None:
    w = tape.parameter(np.ones(3))
    with pytest.raises(ValueError, match="inhomogeneous"):
        w * [[1], [2, 3]]


@pytest.mark.parametrize("value", ["a", None, np.ma.ones(2), np.array([1, None])])
def test_values_and_first_gradients_are_numbers_too(value: Any) -> None:
    w = tape.parameter(np.ones(2))
    for call in (
        lambda: tape.array(value),
        lambda: tape.parameter(value),
        lambda: tape.softmax(value),
        lambda: tape.tanh(value),
        lambda: tape.relu(value),
        lambda: w.reshape(1, 2) @ value,
        lambda: value @ w.reshape(1, 2),
    ):
        with pytest.raises(TypeError, match=r"expected numbers or an array of numbers|got a masked array"):
            call()
    if value is not None:
        with pytest.raises(TypeError, match=r"^backward: "):
            tape.backward(w * 2, [value])


BESIDE: list[tuple[str, Any, type[Exception] | None]] = [  # a Var's dtype, an operand, and how it is refused
    ("int8", np.array([300, 1, 1]), OverflowError),
    ("int8", np.array([-129, 1, 1]), OverflowError),
    ("int8", np.uint64(2**63), OverflowError),
    ("int8", np.array([2**64 - 1] * 3, "u8"), OverflowError),
    ("int8", 300, OverflowError),
    ("int8", [300, 1, 1], OverflowError),
    ("uint64", np.array([-1, 1, 1]), OverflowError),
    ("int64", np.array([2**63] * 3, "u8"), OverflowError),
    ("float64", 10**400, OverflowError),
    ("int8", np.ones(3), TypeError),
    ("int8", np.float32(1), TypeError),
    ("int8", 1j, TypeError),
    ("bool", np.array([1, 0, 1]), TypeError),
    ("bool", [1, 0, 1], TypeError),
    ("bool", np.ones(3), TypeError),
    ("float64", 1j, TypeError),
    ("float32", np.ones(3) * 1j, TypeError),
    ("int8", np.array([127, -128, 0]), None),
    ("int8", np.array([100, 0, 1], "u8"), None),
    ("int8", np.int64(5), None),
    ("int8", 5, None),
    ("int8", [1, 2, 3], None),
    ("int8", (1, 2, 3), None),
    ("int8", np.array(5), None),
    ("int8", np.zeros(0, "i8").reshape(0, 1), None),
    ("int8", True, None),
    ("int8", np.array([True, False, True]), None),
    ("uint8", np.array([0, 100, 2]), None),
    ("int64", np.array([1, 2, 3], "u8"), None),
    ("bool", np.array([True, False, True]), None),
    ("bool", np.True_, None),
    ("float32", np.array([1, 2, 3]), None),
    ("float32", [0.5, 1, 2], None),
    ("float32", np.array(0.5), None),
    ("float32", np.float64(0.5), None),
    ("float32", True, None),
    ("float16", np.ones(3), None),
    ("float64", np.longdouble(2), None),
    ("float64", range(3), None),
    ("complex64", 2j, None),
    ("complex64", np.ones(3), None),
    ("complex128", np.array([1, 2, 3]), None),
]


@pytest.mark.parametrize(("dtype", "x", "error"), BESIDE)
def test_an_operand_has_the_vars_dtype_or_does_not_fit(dtype: str, x: Any, error: type[Exception] | None) -> None:
    value = np.array([1, 0, 1], dtype)
    for sign in "+*":
        w = tape.array(value)
        for way in ways(sign, w, x):
            if error is not None:
                with pytest.raises(error):
                    way()
                continue
            y, wanted = way().numpy(), OPERATORS[sign](value, np.asarray(x).astype(dtype))
            assert y.dtype == wanted.dtype == value.dtype
            assert np.array_equal(y, wanted)


def test_an_overflow_names_operation_number_and_limits() -> None:
    w = tape.array(np.array([1, 2], "i1"))
    with pytest.raises(OverflowError, match=r"mul: 300 beside <Var .* does not fit into int8, from -128 to 127: make"):
        w * np.array([300, 2])


def test_two_vars_promote_as_in_numpy() -> None:
    values = [np.array([1, 0, 2], d) for d in ("bool", "int8", "uint64", "int64", "float16", "float32", "complex64")]
    for a in values:
        for b in values:
            y = (tape.array(a) * tape.array(b)).numpy()
            assert y.dtype == (a * b).dtype
            assert np.array_equal(y, a * b)


def test_an_ndarray_is_not_changed_in_place_by_a_var() -> None:
    x, w = np.ones(3), tape.parameter(np.ones(3))
    with pytest.raises(TypeError):
        x += w
    assert x.tolist() == [1, 1, 1]


def test_bfloat16_takes_what_fits_into_floats() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    w = tape.parameter(np.array([1, 2, 3], ml_dtypes.bfloat16))
    for x in (np.ones(3), np.array([1, 1, 1]), np.ones(3, ml_dtypes.bfloat16), [1, 1, 1]):
        assert (w * x).numpy().tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="mul: complex128 beside"):
        w * (np.ones(3) * 1j)


# Rows by number


def slope(op: Any, table: Any, index: Any, device: tape.Device = tape.cpu) -> Any:
    t = tape.parameter(table, device)
    y = op(t, index)
    tape.backward(y)
    g = t.grad
    if isinstance(g, fanin.Sparse):
        parts = [p if isinstance(p, np.ndarray) else p.numpy() for p in g.parts]
        made = np.zeros(g.shape)
        np.add.at(made, tuple(parts[0]), parts[1])
        return y.numpy(), made
    return y.numpy(), g if isinstance(g, np.ndarray) else g.numpy()


OPS = [tape.embedding, tape.gathered]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2)])
@pytest.mark.parametrize(
    "index",
    [[0, 1], (0, 1), [[], []], 1, np.int64(2), np.array(1), [], np.zeros((0, 2), int), np.array([[2, 2], [0, 2]]),
     *(np.array([2, 0, 2], d) for d in ("int8", "uint8", "int32", "uint32", "uint64"))],
)  # fmt: skip
def test_rows_are_those_of_numpy_and_their_gradient_counts_how_often_each_was_read(
    op: Any, shape: tuple[int, ...], index: Any
) -> None:
    table = np.arange(float(np.prod(shape))).reshape(shape)
    numbers = np.asarray(index, int)
    value, gradient = slope(op, table, index)
    assert np.array_equal(value, table[numbers])
    times = np.bincount(numbers.ravel(), minlength=3)
    assert np.array_equal(gradient, np.broadcast_to(times.reshape(3, *[1] * (len(shape) - 1)), shape))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (np.array([0, -1]), IndexError, r"expected indices from 0 to 2, got -1: index % 3"),
        (np.array([3]), IndexError, "index 3 is out of bounds"),
        (np.array([True, False, True]), TypeError, "expected integers, got bool"),
        (np.array([1.0]), TypeError, "expected integers, got float64"),
        (None, TypeError, "expected numbers"),
        (slice(2), TypeError, "expected numbers"),
        (np.ma.array([0, 1], mask=[1, 0]), TypeError, "masked array"),
    ],
)
def test_other_rows_are_refused_when_they_are_read(op: Any, index: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        op(tape.parameter(np.ones((3, 2))), index)


def test_a_negative_index_is_refused_by_the_kernel_of_a_device_and_of_a_recorded_step() -> None:
    with pytest.raises(IndexError, match="expected indices from 0"), fanin.sim.Machine(1) as m:
        [d0] = tape.devices(m)
        tape.embedding(tape.parameter(np.ones((3, 2)), d0), tape.array(np.array([-1]), d0)).numpy()
    t = tape.parameter(np.ones((3, 2)))
    step = tape.compiled(lambda i: tape.gathered(t, i).sum(), static=[t])
    assert step(np.array([0, 1])).numpy() == step(np.array([2, 1])).numpy() == 4
    with pytest.raises(IndexError, match="expected indices from 0"):
        step(np.array([0, -1]))


def test_narrow_indices_of_a_device_have_a_gradient() -> None:
    with fanin.sim.Machine(1) as m:
        [d0] = tape.devices(m)
        index = tape.array(np.array([1, 1], "i1"), d0)
        assert slope(tape.embedding, np.ones((3, 2)), index, d0)[1].tolist() == [[0, 0], [2, 2], [0, 0]]


@pytest.mark.parametrize(
    ("labels", "error"),
    [([2], IndexError), ([-1], IndexError), ([1.0], TypeError), ([True], TypeError), (None, TypeError),
     (["a"], TypeError), (np.ma.array([1], mask=[1]), TypeError), ([0, 1], ValueError)],
)  # fmt: skip
def test_labels_are_integers_that_name_a_class(labels: Any, error: type[Exception]) -> None:
    z = tape.parameter(np.zeros((1, 2)))
    with pytest.raises(error):
        tape.cross_entropy(z, labels)
    assert tape.cross_entropy(z, [1]).numpy() == pytest.approx(np.log(2))


# Means of nothing


def gradient(f: Callable[[Var], Var], *shape: int) -> tuple[Any, Any]:
    x = tape.parameter(np.zeros(shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = f(x)
        tape.backward(y)
    return y.numpy(), x.grad


@pytest.mark.parametrize(
    ("f", "shape", "result"),
    [
        (lambda x: x.mean(), (0, 3), ()),
        (lambda x: x.mean(0), (0, 3), (3,)),
        (lambda x: x.mean(1), (0, 3), (0,)),
        (lambda x: x.mean((0, 1)), (3, 0), ()),
        (lambda x: tape.cross_entropy(x, []), (0, 3), ()),
        (lambda x: tape.cross_entropy(x, []), (0, 0), ()),
    ],
)
def test_a_mean_of_nothing_is_nan_without_a_warning(
    f: Callable[[Var], Var], shape: tuple[int, ...], result: tuple[int, ...]
) -> None:
    y, g = gradient(f, *shape)
    assert y.shape == result
    assert np.isnan(y).all()
    assert g.shape == shape


def test_a_sum_of_nothing_is_zero_and_its_gradient_is_there() -> None:
    y, g = gradient(lambda x: x.sum(), 0, 3)
    assert y == 0
    assert g.shape == (0, 3)


def test_a_sum_of_losses_divided_by_zero_is_infinite() -> None:
    y, g = gradient(lambda x: tape.cross_entropy(x, [0], count=0), 1, 2)
    assert y == np.inf
    assert g.tolist() == [[-np.inf, np.inf]]


# Values and gradients at the edges


@pytest.mark.parametrize("axes", [(-1, 0, 1), (1, -1, 0), (-3, -1, -2), (2, 0, 1)])
def test_a_transpose_by_negative_axes_has_the_gradient_of_the_positive_ones(axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(2, 2, 2))
    seed = np.arange(8.0).reshape(2, 2, 2)
    gradients = []
    for given in (axes, [i % 3 for i in axes]):
        w = tape.parameter(x)
        y = tape.transpose(w, given)
        assert np.array_equal(y.numpy(), x.transpose(axes))
        tape.backward(y, [seed])
        gradients.append(w.grad)
    assert np.array_equal(*gradients)
    assert np.array_equal(np.transpose(gradients[0], axes), seed)


@pytest.mark.parametrize("axes", [(0, 0, 1), (3, 0, 1), (0, 1)])
def test_a_transpose_needs_each_axis_once(axes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"axes|axis"):
        tape.transpose(tape.parameter(np.ones((2, 2, 2))), axes)


def test_a_mean_of_float16_is_right_where_its_sum_is_beyond_float16() -> None:
    x = np.full(70_000, 2.0, "f2")
    w = tape.parameter(x)
    y = w.mean()
    assert y.numpy() == x.mean() == 2
    assert y.dtype == np.float16
    tape.backward(y)
    assert (w.grad == np.float16(1 / 70_000)).all()
