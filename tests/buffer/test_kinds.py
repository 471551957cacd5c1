"""What goes in comes back: each kind of gradient, alone and in sums, and nothing of the caller's is written."""

from __future__ import annotations

import array
import copy
import decimal
import fractions
import gc
import itertools
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Slot, Sparse, Zero
from kit import hooks

pytestmark = pytest.mark.core

DTYPES = ["bool", *(k + b for k in ("int", "uint") for b in ("8", "16", "32", "64"))]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
LOW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


def through(*gradients: Any, slot: Slot | None = None, budget: float | None = None, **how: Any) -> Any:
    """What a slot makes of these gradients."""
    buf = fanin.InputBuffer([slot or Slot()], budget=budget, **how)
    for g in gradients:
        buf.add(0, g)
    return buf.take()[0]


# ndarrays


@pytest.mark.parametrize("dtype", DTYPES)
def test_ndarrays_of_every_dtype_come_back_as_ndarrays_of_it(dtype: str) -> None:
    x, y = np.array([[0, 1], [1, 1]]).astype(dtype), np.array([[1, 0], [1, 0]]).astype(dtype)
    result = through(x, y)
    assert type(result) is np.ndarray
    assert result.dtype == dtype
    assert np.array_equal(result, np.add(x, y))
    assert result.flags.writeable
    assert result.flags.aligned


@pytest.mark.parametrize("name", LOW)
def test_low_floats_of_ml_dtypes_come_back_as_themselves(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name))
    x, y = np.array([0.5, 1.0, -2.0]).astype(dtype), np.array([1.0, 0.5, 0.5]).astype(dtype)
    result = through(x, y)
    assert result.dtype == dtype
    assert result.astype(float).tolist() == [1.5, 1.5, -1.5]
    assert through(x.astype("float32"), slot=Slot(dtype=name)).dtype == dtype
    assert through(dtype.type(1.5), 1.0) == dtype.type(2.5)
    assert type(through(dtype.type(1.5), dtype.type(1.0))) is dtype.type


@pytest.mark.parametrize("name", ["int4", "float8_e4m3b11fnuz", "float8_e8m0fnu"])
def test_other_types_of_ml_dtypes_are_refused_by_name(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = getattr(ml_dtypes, name, None)
    if kind is None:
        pytest.skip(f"this ml_dtypes has no {name}")
    with pytest.raises(BufferError, match=name):
        through(np.ones(2).astype(kind))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[::-1],
        lambda a: a[::2, ::-3],
        lambda a: a[1:1],
        lambda a: a[0, 0],
        lambda a: a[..., None],
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: np.asfortranarray(a),
        lambda a: a.astype("f4"),
        lambda a: a[:, :1],
    ],
)
def test_any_strides_are_summed_and_never_written(view: Callable[[Any], Any]) -> None:
    base = np.arange(24.0).reshape(4, 6)
    kept = base.copy()
    x = np.asarray(view(base))
    for budget in (0, None, float("inf")):
        result = through(x, x, x, budget=budget)
        assert np.array_equal(result, x + x + x)
        assert np.array_equal(base, kept)
        assert not np.shares_memory(result, base)


def test_unaligned_memory_is_summed() -> None:
    raw = np.zeros(33, np.uint8)
    x = raw[1:33].view("f8")
    x[:] = [1, 2, 3, 4]
    assert not x.flags.aligned
    assert through(x, x).tolist() == [2, 4, 6, 8]


def test_a_single_contribution_is_the_very_object() -> None:
    for x in (
        np.ones(3),
        1,
        2.5,
        True,
        1j,
        np.float32(2),
        Zero((2,), "f4"),
        fractions.Fraction(1, 3),
        Sparse("coo", (np.zeros((1, 0), int), np.zeros(0)), (3,)),
    ):
        assert through(x) is x
        assert through(None, x, None) is x


def test_sixty_four_axes() -> None:
    if tuple(map(int, np.__version__.split(".")[:1])) < (2,):
        pytest.skip("NumPy 1 has 32 axes at most")
    x = np.ones((1,) * 63 + (2,))
    assert through(x, x).shape == x.shape


# What is written, and what is not


def test_a_temporary_without_other_references_takes_the_sum() -> None:
    buf = fanin.InputBuffer(1, budget=0)
    buf.add(0, np.ones(8) * 1)
    address = weakref.ref(buf)  # keeps nothing
    for _ in range(3):
        buf.add(0, np.ones(8))
    assert address() is buf
    assert buf.counters.in_place == 3
    assert buf.take()[0].tolist() == [4] * 8


@pytest.mark.parametrize("keep", ["name", "view", "list", "weakref", "memoryview", "dict"])
def test_an_array_with_other_references_is_never_written(keep: str) -> None:
    x = np.ones(8)
    address = x.__array_interface__["data"][0]
    kept: Any = {
        "name": lambda: x,
        "view": lambda: x[::2],
        "list": lambda: [x],
        "weakref": lambda: weakref.ref(x),
        "memoryview": lambda: memoryview(x),
        "dict": lambda: {"x": x},
    }[keep]()
    buf = fanin.InputBuffer(2, budget=0)
    if keep != "weakref":
        del x
    buf.add(0, *[g for g in [locals().get("x")] if g is not None] or [kept_array(kept)])
    for _ in range(2):
        buf.add(0, np.ones(8))
    result = buf.take()[0]
    assert result.tolist() == [3] * 8
    assert np.frombuffer((np.ctypeslib.ctypes.c_double * 8).from_address(address)).tolist() == [1] * 8
    del kept


def kept_array(kept: Any) -> Any:
    """The array from which `kept` was made."""
    if isinstance(kept, memoryview):
        return kept.obj
    if isinstance(kept, list):
        return kept[0]
    if isinstance(kept, dict):
        return kept["x"]
    return kept.base if kept.base is not None else kept


def test_one_array_sent_to_two_slots_is_written_in_neither() -> None:
    buf = fanin.InputBuffer(2, budget=0)
    g = np.ones(4)
    buf.add(0, g)
    buf.add(1, g)
    del g
    for slot in (0, 1, 0, 1, 1):
        buf.add(slot, np.full(4, 10.0))
    assert [r.tolist() for r in buf.take()] == [[21] * 4, [31] * 4]


def test_the_same_array_twice_in_one_slot() -> None:
    buf = fanin.InputBuffer(1, budget=0)
    g = np.ones(4)
    buf.add(0, g)
    buf.add(0, g)
    buf.add(0, g)
    assert buf.take()[0].tolist() == [3] * 4
    assert g.tolist() == [1] * 4


def test_a_donated_array_takes_the_sum_and_keeps_its_identity() -> None:
    grad = np.ones(4)
    view = grad[:]
    buf = fanin.InputBuffer(1)
    buf.add(0, grad, donate=True)
    buf.add(0, np.full(4, 2.0))
    assert buf.take()[0] is grad
    assert view.tolist() == [3] * 4


@pytest.mark.parametrize("keys", [(0, 1, 2), (0, 2, 4)])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_scaled_sum_of_donated_arrays_lies_and_counts_alike_on_both_paths(keys: tuple[int, ...], slots: int) -> None:
    found = []
    for general in (False, True):
        with fanin.set_options(debug=general):
            buf = fanin.InputBuffer(slots)
            first, *others = [np.full(3, 2.0) for _ in keys]
            for key, x in zip(keys, (first, *others), strict=True):
                buf.add(0, x, key=key, donate=True)
            total = buf.take(scale=2.0)[0]
        assert total.tolist() == [12, 12, 12]
        found.append((total is first, first[0], buf.counters["in_place"]))
    assert found[0] == found[1] == (False, 2, 0)


@pytest.mark.parametrize(("keys", "in_place"), [((0, 1), 2), ((0, 2), 0), ((None, None), 2)])
def test_a_take_of_several_slots_sums_into_the_buffers_copies_where_no_key_is_missing(
    keys: tuple[int | None, int | None], in_place: int
) -> None:
    buf = fanin.InputBuffer(2)
    for slot in (0, 1):
        for key in keys:
            buf.add(slot, np.ones((4, 4))[::2, ::2], key=key, copy=True)
    assert [total.tolist() for total in buf.take()] == [[[2, 2], [2, 2]]] * 2
    assert buf.counters.in_place == in_place


def test_a_read_only_array_is_never_written_even_donated() -> None:
    x = np.ones(4)
    x.flags.writeable = False
    buf = fanin.InputBuffer(1, budget=0)
    buf.add(0, x, donate=True)
    buf.add(0, np.ones(4))
    assert buf.take()[0].tolist() == [2] * 4
    assert x.tolist() == [1] * 4


def test_copy_frees_the_caller_to_change_what_was_added() -> None:
    x = np.ones(4)
    buf = fanin.InputBuffer(1)
    buf.add(0, x, copy=True)
    x[:] = 100
    assert buf.take()[0].tolist() == [1] * 4


# Subclasses


def test_a_copy_and_a_conversion_are_counted_with_what_they_read_and_write() -> None:
    for slot, asked, written in ((None, True, 2000), ("float64", False, 4000)):
        buf = fanin.InputBuffer([fanin.Slot(dtype=slot)])
        buf.add(0, np.ones(1000, "f4")[::2], copy=asked)
        c = buf.counters
        assert (c.copies, c.passes, c.bytes_read, c.bytes_written) == (1, 1, 2000, written)


def test_a_memmap_is_summed_as_an_ndarray_and_not_written(tmp_path: Path) -> None:
    m = np.memmap(tmp_path / "x", dtype="f8", shape=(4,), mode="w+")
    m[:] = 1
    result = through(m, m, budget=0)
    assert type(result) is np.ndarray
    assert result.tolist() == [2] * 4
    assert m.tolist() == [1] * 4
    assert through(m) is m


class Plain(np.ndarray):
    pass


class Louder(np.ndarray):
    """Its sums are its own business."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        inputs = tuple(np.asarray(x).view(np.ndarray) for x in inputs)
        return (10 * getattr(ufunc, method)(*inputs, **kw)).view(Louder)


def test_a_plain_subclass_is_an_array() -> None:
    x = np.ones(3).view(Plain)
    result = through(x, x)
    assert type(result) is np.ndarray
    assert result.tolist() == [2] * 3


def test_a_subclass_with_ufuncs_of_its_own_sums_by_them() -> None:
    x = np.ones(3).view(Louder)
    for gradients in ((x, np.ones(3)), (np.ones(3), x), (x, x)):
        result = through(*gradients)
        assert type(result) is Louder
        assert result.tolist() == [20] * 3


def test_masked_arrays_keep_their_masks() -> None:
    x = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
    for gradients in ((x, np.ones(3)), (np.ones(3), x), (x, x)):
        result = through(*gradients)
        assert type(result) is np.ma.MaskedArray
        assert result.mask.tolist() == [False, True, False]


def test_a_matrix_stays_a_matrix() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        x = np.matrix([[1.0, 2.0]])
    assert type(through(x, x)) is np.matrix


def test_object_arrays_sum_by_the_plus_of_their_elements() -> None:
    x = np.array([fractions.Fraction(1, 3), decimal.Decimal(1)], object)
    result = through(x, x)
    assert result.dtype == object
    assert result.tolist() == [fractions.Fraction(2, 3), decimal.Decimal(2)]


@pytest.mark.parametrize(
    "x",
    [
        np.array(["a"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1], "m8[s]"),
        np.zeros(2, "f8,i4"),
        np.zeros(2, "V8"),
        np.datetime64("2020-01-01"),
        np.timedelta64(1, "s"),
        np.str_("x"),
        np.bytes_(b"x"),
        np.void(b"x"),
    ],
)
def test_an_object_without_a_sum_is_a_type_error(x: Any) -> None:
    with pytest.raises(TypeError, match=r"slot 0: .* has no sum"):
        through(x)


# Scalars


@pytest.mark.parametrize(
    ("gradients", "total"),
    [
        ((1, 2), 3),
        ((1.0, 2.0), 3.0),
        ((1, 2.0), 3.0),
        ((True, False), True),
        ((False, False), False),
        ((1j, 2), 2 + 1j),
        ((True, 2), 3),
        ((2**62, -(2**62)), 0),
    ],
)
def test_python_scalars_come_back_as_python_scalars(gradients: tuple[Any, ...], total: Any) -> None:
    result = through(*gradients)
    assert result == total
    assert type(result) is type(total)


@pytest.mark.parametrize(
    "scalar", [np.bool_, np.int8, np.uint64, np.float16, np.float32, np.float64, np.complex64, np.complex128]
)
def test_numpy_scalars_come_back_as_numpy_scalars(scalar: Any) -> None:
    for gradients in ((scalar(1), scalar(1)), (scalar(1), 1), (1, scalar(1))):
        result = through(*gradients)
        assert isinstance(result, np.generic)
    assert type(through(scalar(1), scalar(1))) is scalar
    assert type(through(scalar(1), np.array(1, scalar))) is np.ndarray
    assert type(through(np.array(1, scalar), scalar(1))) is np.ndarray
    assert type(through(1, np.array(1, scalar))) is np.ndarray


def test_python_scalars_promote_weakly() -> None:
    assert through(np.float32(1), 1.0).dtype == np.float32
    assert through(np.ones((), np.int8), 3).dtype == np.int8
    assert through(1.0, np.ones((), np.int8)).dtype == np.float64


@pytest.mark.parametrize("n", [2**63, -(2**63) - 1, 10**30])
def test_an_int_beyond_int64_overflows(n: int) -> None:
    with pytest.raises(OverflowError, match=r"slot 0: an integer of \d+ bits does not fit int64"):
        through(n)


def test_subclasses_of_numbers_are_objects() -> None:
    class Count(int):
        def __add__(self, other: object) -> Any:
            return Count(int(self) + int(other) + 100)  # type: ignore[call-overload]

    result = through(Count(1), Count(2))
    assert (type(result), int(result)) == (Count, 103)


# Objects


class Money:
    """Adds its own kind, and plain numbers and arrays, on the left and the right."""

    def __init__(self, n: Any) -> None:
        self.n = n

    def __add__(self, other: Any) -> Any:
        return Money(self.n + getattr(other, "n", other))

    def __radd__(self, other: Any) -> Any:
        return Money(other + self.n)


@pytest.mark.parametrize("budget", [0, None])
def test_objects_sum_by_their_own_plus_which_numpy_does_not_broadcast_over(budget: float | None) -> None:
    for gradients in (
        (Money(1), Money(2)),
        (Money(1), 2),
        (1, Money(2)),
        (Money(np.ones(2)), np.ones(2)),
        (np.ones(2), Money(np.ones(2))),
    ):
        result = through(*gradients, budget=budget)
        assert type(result) is Money
    result = through(np.ones(3), np.ones(3), Money(np.ones(3)), np.ones(3), budget=budget)
    assert (type(result), result.n.tolist()) == (Money, [4.0] * 3)


def test_an_object_that_cannot_be_added_to_an_array_is_a_type_error_that_names_both() -> None:
    class Shy:
        def __add__(self, other: object) -> Any:
            return NotImplemented

        __radd__ = __add__

    for gradients in ((np.ones(2), Shy()), (Shy(), np.ones(2))):
        with pytest.raises(TypeError, match=r"numpy.ndarray and a .*Shy|Shy and a numpy.ndarray"):
            through(*gradients)


def test_a_combine_sums_every_kind_that_it_accepts() -> None:
    union = Slot(combine=lambda a, b: a | b)
    assert through({1}, {2}, {3}, slot=union) == {1, 2, 3}
    assert through([1], [2], slot=Slot(combine=lambda a, b: a + b)) == [1, 2]
    assert through({"a": 1}, {"b": 2}, slot=union) == {"a": 1, "b": 2}
    assert through("a", "b", slot=Slot(combine=lambda a, b: a + b)) == "ab"
    assert through(object, slot=Slot(combine=print)) is object
    with pytest.raises(TypeError, match="by combine is None; expected the sum"):
        through({1}, {2}, slot=Slot(combine=lambda a, b: None))
    assert through(np.ones(2), np.ones(2), slot=union).tolist() == [2, 2], "arrays are summed as arrays"


@pytest.mark.parametrize("x", [[1.0], (1.0,), {"a": 1}, "x", b"x", bytearray(b"x"), {1}, frozenset({1})])
def test_containers_need_a_combine(x: Any) -> None:
    with pytest.raises(TypeError, match=r"slot 0: .*give combine="):
        through(x)


@pytest.mark.parametrize("x", [object(), len, fanin, type, lambda: 0])
def test_an_object_without_a_plus_needs_a_combine(x: Any) -> None:
    with pytest.raises(TypeError, match=r"slot 0: .*has no \+"):
        through(x)


def test_an_error_in_the_plus_of_an_object_reaches_the_caller_and_nothing_is_lost() -> None:
    class Bad(Money):
        def __add__(self, other: Any) -> Any:
            raise error

    error = ZeroDivisionError("mine")
    buf = fanin.InputBuffer(1, name="b")
    first, second = Bad(1), Money(2)
    buf.add(0, first)
    buf.add(0, second)
    with pytest.raises(ZeroDivisionError) as caught:
        buf.take()
    assert caught.value is error
    Bad.__add__ = Money.__add__  # type: ignore[method-assign]
    assert buf.take()[0].n == 3
    error.__traceback__ = None


def test_a_callback_into_its_own_slot_gets_a_runtime_error() -> None:
    def combine(a: Any, b: Any) -> Any:
        for call in (buf.take, buf.clear, lambda: buf[0], lambda: buf.add(0, {9})):
            with pytest.raises(RuntimeError):
                call()
        return a | b

    buf = fanin.InputBuffer([Slot(combine=combine)])
    buf.add(0, {1})
    buf.add(0, {2})
    assert buf.take() == [{1, 2}]


def test_parts_are_the_memory_of_an_object() -> None:
    class Holder(Money):
        def __fanin_parts__(self) -> Any:
            return [self.n]

    assert through(Holder(np.ones(4)), Holder(np.ones(4))).n.tolist() == [2] * 4
    buf = fanin.InputBuffer(1, budget=16)
    buf.add(0, Holder(np.ones(4)))
    buf.add(0, Holder(np.ones(4)))
    assert buf.counters.folds == 1, "its bytes count for the budget"

    class Wrong(Money):
        def __fanin_parts__(self) -> Any:
            return self.n

    for wrong, kind in (
        (3, TypeError),
        ([object()], TypeError),
        (["x"], TypeError),
        ([None], TypeError),
        ([np.ones(2, ">f8")], BufferError),
    ):
        with pytest.raises(kind, match="slot 0"):
            through(Wrong(wrong))


def test_each_of_several_parts_lives_as_long_as_the_object_that_is_handed_through() -> None:
    class Several(Money):
        def __fanin_parts__(self) -> Any:
            return self.n

    held = [np.ones(n) for n in (4, 2, 3)]
    alive = [weakref.ref(x) for x in held]
    total = through(Several(held))
    assert [x.tolist() for x in total.n] == [[1] * 4, [1] * 2, [1] * 3]
    del held, total
    assert [x() for x in alive] == [None] * 3


# Zeros


def test_zeros_add_their_dtype_and_nothing_else() -> None:
    z = Zero((2,), "float64")
    assert through(z, z) is z
    result = through(z, np.float32([1, 2]))
    assert result.dtype == np.float64
    assert result.tolist() == [1, 2]
    x = np.float64([-0.0, 1])
    assert through(Zero((2,), "f4"), x, Zero((2,), "f4")) is x
    with pytest.raises(ValueError, match="shape"):
        through(z, np.ones(3))
    mixed = through(Zero((2,), "float32"), Zero((2,), "int64"))
    assert isinstance(mixed, Zero)


# Sparse


def test_sparse_parts_come_back_as_sparse_parts() -> None:
    x = Sparse("coo", (np.array([[0, 2]]), np.array([1.0, 2.0])), (4,))
    result = through(x, x)
    assert (type(result), result.format, result.shape) == (Sparse, "coo", (4,))
    assert fanin.add_n([result, np.zeros(4)]).tolist() == [2, 0, 4, 0]
    assert type(through(x, np.ones(4))) is np.ndarray
    assert type(through(np.ones(4), x)) is np.ndarray


@pytest.mark.parametrize(("parts", "shape", "kind"), [
    ((np.array([[4]]), np.array([1.0])), (4,), ValueError),
    ((np.array([[-1]]), np.array([1.0])), (4,), ValueError),
    ((np.array([0]), np.array([1.0])), (4,), ValueError),
    ((np.array([[0.5]]), np.array([1.0])), (4,), TypeError),
    ((np.array([[0]]), np.array([1.0, 2.0])), (4,), ValueError),
    ((np.array([[0]]), np.array(["x"])), (4,), TypeError),
    ((np.array([[0]]), [1.0]), (4,), TypeError),
    ((np.array([[0]]), np.ma.array([1.0])), (4,), TypeError),
    ((np.array([[0]]), np.array([1.0], ">f8")), (4,), BufferError),
    ((np.array([[0]]), np.array([1.0])), (2**62, 2**62), ValueError),
])  # fmt: skip
def test_sparse_parts_that_do_not_fit_are_refused(parts: Any, shape: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="slot 0"):
        through(Sparse("coo", parts, shape), np.zeros(shape) if max(shape) < 100 else None)


SCIPY = ["coo", "csr", "csc", "bsr", "dia", "lil", "dok"]


@pytest.mark.parametrize("format", SCIPY)
@pytest.mark.parametrize("family", ["array", "matrix"])
def test_scipy_sparse_comes_back_as_scipy_sparse(format: str, family: str) -> None:
    sp = pytest.importorskip("scipy.sparse")
    dense = np.array([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 4.0], [0.0, 5.0, 6.0, 0.0]])
    x = getattr(sp, f"{format}_{family}")(dense)
    assert through(x) is x
    result = through(x, x)
    assert sp.issparse(result)
    assert isinstance(result, sp.sparray) == (family == "array")
    assert np.array_equal(result.toarray(), 2 * dense)
    assert np.array_equal(x.toarray(), dense)
    other = getattr(sp, f"csc_{family}")(dense)
    assert np.array_equal(through(x, other).toarray(), 2 * dense)
    for gradients in ((x, dense), (dense, x)):
        result = through(*gradients)
        assert type(result) is np.ndarray
        assert np.array_equal(result, 2 * dense)


def test_a_sparse_vector_of_scipy() -> None:
    sp = pytest.importorskip("scipy.sparse")
    x = sp.coo_array(np.array([0.0, 1.0, 2.0]))
    if x.ndim != 1:
        pytest.skip("this SciPy has no sparse vectors")
    assert through(x, x).toarray().tolist() == [0, 2, 4]


def test_sparse_dtypes_that_are_not_summed_are_refused() -> None:
    sp = pytest.importorskip("scipy.sparse")
    with pytest.raises(BufferError, match=r"slot 0: .*float128|slot 0: .*longdouble"):
        through(sp.csr_array(np.eye(2, dtype=np.longdouble)))


# Buffers of other kinds of memory


def test_memory_by_the_buffer_protocol_is_an_array() -> None:
    x = array.array("f", [1, 2])
    result = through(x, memoryview(x))
    assert (type(result), result.dtype, result.tolist()) == (np.ndarray, np.float32, [2, 4])
    assert through(x) is x


# Garbage


def test_an_abandoned_pass_in_a_cycle_is_freed() -> None:
    class Node:
        buf: Any

        def __add__(self, other: Any) -> Any:
            return self

    gc.collect()
    before = hooks.memory()[0]
    node = Node()
    node.buf = fanin.InputBuffer([Slot(), Slot(combine=lambda a, b, c=node: c)])
    node.buf.add(0, np.ones(1000))
    node.buf.add(0, np.ones(1000))
    node.buf.add(1, node)
    alive = weakref.ref(node), weakref.ref(node.buf)
    del node
    gc.collect()
    assert [a() for a in alive] == [None, None]
    assert hooks.memory()[0] == before


def test_counts_of_references_are_as_before() -> None:
    x, f = np.ones(3), Money(np.ones(3))
    counts = [sys.getrefcount(o) for o in (x, f)]
    for _ in range(5):
        through(x, x)
        through(x)
        through(f, x)
        buf = fanin.InputBuffer([x])
        buf.add(0, x, key=3)
        with pytest.raises(ValueError, match="already"):
            buf.add(0, x, key=3)
        buf[0]
        del buf
    gc.collect()
    assert [sys.getrefcount(o) for o in (x, f)] == counts


# A pass that records itself (A1)


def test_recorded_sums_are_made_by_the_arrays_own_plus() -> None:
    buf = fanin.InputBuffer([Slot(shape=(2,), dtype="float32")], create_graph=True)
    buf.add(0, np.ones((3, 2)))
    buf.add(0, np.ones(2, np.float32))
    (result,) = buf.take()
    assert (result.dtype, result.tolist()) == (np.float32, [4, 4])
    for bad in (np.ones(3), np.ones((2, 3)), np.ones(2, complex)):
        with pytest.raises(ValueError, match="slot 0: expected"):
            buf.add(0, bad)
    buf = fanin.InputBuffer(1, create_graph=True)
    buf.add(0, np.ones((3, 1)))
    buf.add(0, np.ones(3))
    with pytest.raises(ValueError, match="expected a gradient of shape"):
        buf.take()
    buf.clear()
    assert buf.take() == [None]


def test_the_collector_clears_a_buffer_that_a_tuple_refers_to() -> None:
    """The collector cannot clear a tuple, only the buffer; only the memory in use shows that it did."""

    def cycle(n: int) -> None:
        buf = fanin.InputBuffer([Slot(combine=lambda old, new: (*old, *new))] * 2)
        for _ in range(n):
            buf.add(0, (buf,))
            buf.add(1, np.ones(3))

    for n in (1, 3, 6):
        cycle(n)
        gc.collect()
        before = hooks.memory()[0]
        for _ in range(5):
            cycle(n)
        gc.collect()
        assert hooks.memory()[0] <= before, n


def test_counters_are_objects_like_any_other() -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, 1.5)
    counters = buf.counters
    assert (counters.adds, counters["adds"], dict(counters)["peak_parked_bytes"]) == (1, 1, 8)
    assert counters == buf.counters == copy.copy(counters) == pickle.loads(pickle.dumps(counters))
    assert "adds=1" in repr(counters)
    table = str(fanin.counters()).splitlines()
    assert [line.split()[0] for line in table] == list(fanin.counters()) and max(map(len, table)) <= 80
    assert list(fanin.counters())[: len(counters)] == list(counters)
    with pytest.raises(AttributeError):
        counters.adds = 2


def test_numbers_come_back_as_their_own_kind() -> None:
    for x, y in (
        (1.5, 2.25),
        (3, -5),
        (True, False),
        (1 + 2j, 3j),
        (np.float32(1), np.float32(2)),
        (np.int16(7), np.int16(-9)),
        (np.bool_(True), np.bool_(False)),
    ):
        assert through(x, y) == x + y if not isinstance(x, bool | np.bool_) else through(x, y) == (x or y)
        assert type(through(x, y)) is type(x)
        assert through(x) is x  # A14
    with pytest.raises(OverflowError):
        through(2**62, 2**62)


@pytest.mark.core
def test_a_large_gradient_is_copied_once() -> None:
    import tracemalloc

    gradient = np.ones(1 << 20)
    buf = fanin.InputBuffer(1)
    tracemalloc.start()
    try:
        buf.add(0, gradient, copy=True)
        _, numpys = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert buf.counters["copies"] == 1
    assert numpys < gradient.nbytes, "the core's own copy is not in NumPy's memory: a second one was made there"


@pytest.mark.rule("A6")
def test_a_sparse_sum_that_was_coalesced_goes_into_a_dense_gradient_that_is_donated() -> None:
    sp = pytest.importorskip("scipy.sparse")
    buf = fanin.InputBuffer([fanin.Slot(shape=(4, 4), dtype="float32")], budget=0)
    for _ in range(3):
        buf.add(0, sp.coo_array(np.eye(4, dtype=np.float32)))
    dense = np.ones((4, 4), np.float32)
    where = dense.ctypes.data
    buf.add(0, dense, donate=True)
    del dense
    (total,) = buf.take()
    assert total.ctypes.data == where and total.tolist() == (3 * np.eye(4) + 1).tolist()


@pytest.mark.parametrize("kind", ["csr", "csc", "bsr"])
def test_a_sparse_gradient_is_parked_with_all_its_parts(kind: str) -> None:
    sp = pytest.importorskip("scipy.sparse")
    x = getattr(sp, f"{kind}_array")(np.eye(4, dtype=np.float32))
    buf = fanin.InputBuffer(1)
    buf.add(0, x)
    assert f"1 parked, {x.data.nbytes + x.indices.nbytes + x.indptr.nbytes} B" in repr(buf)


@pytest.mark.rule("A8")
@pytest.mark.parametrize("keys", [(0, 1, 2, 3), (0, 2, 4, 6)])
@pytest.mark.parametrize("budget", [0, 100, None, 10**9])
def test_an_object_is_added_to_the_same_kind_and_structure_under_every_budget(
    budget: Any, keys: tuple[int, ...]
) -> None:
    met: list[Any] = []

    class Thing:
        def __add__(self, other: Any) -> Any:
            met.append(
                (type(other).__name__, getattr(other, "nnz", None), np.asarray(getattr(other, "data", other)).sum())
            )
            return self

        __radd__ = __add__

    sp = pytest.importorskip("scipy.sparse")
    eye, block = np.eye(2), np.ones((1, 1, 2))
    rows: list[tuple[list[Any], Any]] = [
        ([sp.coo_array(eye), sp.coo_array(eye)], ("coo_array", 2, 4)),
        (
            [sp.csr_array(eye), fanin.Sparse("bsr", (np.array([0, 0, 1]), np.array([0]), block), (2, 2))],
            ("coo_array", 3, 4),
        ),
        ([sp.coo_matrix(eye), sp.coo_array(eye), sp.coo_array(eye)], ("coo_matrix", 2, 6)),
        ([np.ones(2, "f2"), np.ones(2, "f2")], ("ndarray", None, 4)),
        ([np.float32(1), 2.0], ("float32", None, 3)),
    ]
    for terms, want in rows:
        buf = fanin.InputBuffer(1, budget=budget)
        for key, x in zip(keys, [*terms, Thing()], strict=False):
            buf.add(0, x, key=key)
        buf.take()
        (found,) = met
        met.clear()
        assert found == want


def sparse_of(format: str, x: np.ndarray) -> Sparse:
    """Each number of x, stored."""
    rows, columns = (np.ravel(i) for i in np.indices(x.shape))
    if format == "coo":
        return Sparse("coo", (np.stack([rows, columns]), x.ravel()), x.shape)
    if format == "csc":
        x_of_columns, columns, rows = x.T.ravel(), *(np.ravel(i) for i in np.indices(x.T.shape))
        pointers = np.arange(x.shape[1] + 1) * x.shape[0]
        return Sparse("csc", (pointers, rows, x_of_columns), x.shape)
    return Sparse("csr", (np.arange(x.shape[0] + 1) * x.shape[1], columns, x.ravel()), x.shape)


@pytest.mark.rule("A5", "A7")
@pytest.mark.parametrize("formats", list(itertools.product(("coo", "csr", "csc"), repeat=3)), ids="-".join)
def test_sparse_gradients_are_merged_where_all_have_one_format_and_become_coo_otherwise(
    formats: tuple[str, ...],
) -> None:
    x = np.arange(6.0).reshape(2, 3)
    buf = fanin.InputBuffer(1)
    for format in formats:
        buf.add(0, sparse_of(format, x))
    with fanin.trace() as t:
        (total,) = buf.take()
    one = len(set(formats)) == 1
    assert total.format == (formats[0] if one else "coo")
    (fold,) = [line for line in t.lines if line.kind == "fold"]
    assert ("A5" in fold.rules, "A7" in fold.rules) == (one, not one)
