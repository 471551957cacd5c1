"""Arrays and kernels of the simulated machine: memory, views, what a kernel may keep."""

from __future__ import annotations

import gc
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import fanin
from fanin.sim import Array, Machine
from kit.values import DTYPES

pytestmark = pytest.mark.core


# Arrays


@pytest.mark.parametrize(
    "dtype",
    [d.name for d in DTYPES],
)
def test_arrays_of_every_dtype_go_there_and_back(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    value = np.arange(6).reshape(2, 3).astype(kind)
    with Machine() as m:
        x = m.array(value, device=1)
        assert (x.shape, x.dtype, x.ndim, x.size, x.device) == ((2, 3), kind, 2, 6, "sim:1")
        assert (x.itemsize, x.nbytes, x.strides) == (
            kind.itemsize,
            6 * kind.itemsize,
            (3 * kind.itemsize, kind.itemsize),
        )
        back = x.numpy()
        assert back.dtype == kind and back.tobytes() == value.tobytes()
        assert m.empty((2, 0), dtype).numpy().shape == (2, 0)
        assert repr(x) == f"<fanin.sim.Array (2, 3) {dtype} on sim:1, {x.nbytes} B>"


@pytest.mark.parametrize(
    "value",
    [
        3,
        [1.5, 2],
        np.arange(12).reshape(3, 4)[::-1, ::2],
        np.broadcast_to(np.ones(3), (2, 3)),
        np.ones(()),
        np.ones((0, 3)),
    ],
)
def test_an_array_is_a_copy_of_the_ndarray_that_numpy_makes_of_the_argument(value: Any) -> None:
    with Machine() as m:
        x = m.array(value)
        before = np.array(value)
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = 7
        np.testing.assert_array_equal(x.numpy(), before)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), np.array([1], "M8[s]"), np.ones(2, ">f8")])
def test_an_array_of_another_dtype_is_refused(value: Any) -> None:
    with Machine() as m, pytest.raises((TypeError, BufferError)):
        m.array(value)


KEYS = [
    0,
    -1,
    slice(None),
    slice(1, 3),
    slice(None, None, -1),
    slice(None, None, 2),
    slice(5, 1, -2),
    slice(3, 3),
    ...,
    None,
    (),
    (1, 2),
    (slice(1, None), 2),
    (..., 0),
    (0, ...),
    (None, ..., None),
    (slice(None), None, 1),
    (0, 1, 2),
    (..., slice(None, None, -1)),
    np.int64(2),
    (slice(100, 200), 0),
    slice(-100, 100),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_indexing_gives_the_views_of_numpy(key: Any) -> None:
    value = np.arange(4 * 3 * 5).reshape(4, 3, 5)
    with Machine() as m:
        x = m.array(value)
        y = x[key]
        want = value[key]
        assert isinstance(y, Array) and y.shape == np.shape(want)
        np.testing.assert_array_equal(y.numpy(), want)
        if isinstance(want, np.ndarray) and want.size and want.base is not None:
            assert y.address - x.address == want.ctypes.data - value.ctypes.data
            assert [s for s, n in zip(y.strides, y.shape, strict=True) if n > 1] == [
                s for s, n in zip(want.strides, want.shape, strict=True) if n > 1
            ]


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (4, IndexError, "out of bounds for axis 0 with size 4"),
        ((0, -4), IndexError, "axis 1"),
        ((0,) * 4, IndexError, "too many indices"),
        ((..., ...), IndexError, "single ellipsis"),
        (True, TypeError, "bool"),
        ([0, 1], TypeError, "list"),
        (np.array([0]), TypeError, "ndarray"),
        (1.0, TypeError, "float"),
        ("a", TypeError, "str"),
        (slice(None, None, 0), ValueError, "zero"),
        (10**30, IndexError, "indices"),
    ],
    ids=repr,
)
def test_an_index_that_gives_no_view_is_refused(key: Any, error: type[Exception], words: str) -> None:
    with Machine() as m, pytest.raises(error, match=words):
        m.empty((4, 3, 5))[key]


SHAPES = [(60,), (4, 15), (12, 5), (2, 2, 3, 5), (4, 3, 5), (4, 1, 3, 5, 1), (-1,), (4, -1), (2, -1, 5), (-1, 60)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["whole", "reversed", "transposed", "every other", "narrow"])
def test_reshape_is_a_view_where_numpy_needs_no_copy(shape: tuple[int, ...], how: str) -> None:
    parts_of: Any = {
        "whole": lambda a: a,
        "reversed": lambda a: a[::-1],
        "transposed": lambda a: a.transpose(2, 0, 1),
        "every other": lambda a: a[..., ::2],
        "narrow": lambda a: a[:, :1],
    }[how]
    value = np.arange(60).reshape(4, 3, 5)
    with Machine() as m:
        mine, its = parts_of(m.array(value)), parts_of(value)
        try:
            want = its.reshape(shape)
        except ValueError:
            with pytest.raises(ValueError, match="has no view of shape"):
                mine.reshape(shape)
            return
        if not np.shares_memory(want, its):
            with pytest.raises(ValueError, match="without a copy"):
                mine.reshape(*shape)
            return
        np.testing.assert_array_equal(mine.reshape(shape).numpy(), want)


def test_views_of_other_shapes() -> None:
    value = np.arange(24).reshape(2, 3, 4)
    with Machine() as m:
        x = m.array(value)
        np.testing.assert_array_equal(x.T.numpy(), value.T)
        np.testing.assert_array_equal(x.transpose((1, 0, -1)).numpy(), value.transpose(1, 0, 2))
        np.testing.assert_array_equal(x[0, 0].broadcast_to((5, 4)).numpy(), np.broadcast_to(value[0, 0], (5, 4)))
        assert len(x) == 2
        assert m.empty(0).reshape(0, 3).shape == (0, 3)
        assert m.array(5).reshape(1, 1).numpy() == 5
        for wrong in ((0, 1), (0, 0, 1), (0, 1, 5)):
            with pytest.raises(ValueError, match="each of 3 axes once"):
                x.transpose(wrong)
        with pytest.raises(ValueError):
            x.broadcast_to((3, 4))
        with pytest.raises(TypeError, match="len"):
            len(m.array(1))
        with pytest.raises(TypeError):
            x.reshape("a")
        with pytest.raises(ValueError, match="64 dimensions"):
            x.reshape((1,) * 65)


@pytest.mark.parametrize("n", [2**62, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, -(2**64), 10**30])
def test_impossible_shapes_are_refused(n: int) -> None:
    with Machine() as m:
        for x in (m.empty((2, 3)), m.empty(1), m.empty(()), m.empty((0, 3))):
            for shape in ((n,), (n, 1), (1, n), (n, n), (2, n), (-1, n), (n, -1), (n, 2, 3), (0, n)):
                for call in (x.reshape, x.broadcast_to, x.transpose):
                    for how in ((shape,), shape):
                        with pytest.raises(ValueError):
                            call(*how)
            with pytest.raises(ValueError):
                x.reshape(n)
            with pytest.raises(ValueError):
                m.empty((n, 8) if n > 0 else n)


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.add.reduce,
        np.sum,
        lambda x: np.ones(3) + x,
        lambda x: np.add(x, x),
        lambda x: x == 1,
        lambda x: x != x,
        lambda x: x < 1,
        bool,
        lambda x: np.array_equal(x, x),
        lambda x: np.concatenate([x, x]),
    ],
    ids=range(11),
)
def test_numpy_does_not_reach_through_silently(use: Any) -> None:
    with Machine() as m, pytest.raises(TypeError, match=r"numpy\(\)"):
        use(m.array(np.ones(3)))


def test_arrays_are_made_by_machines() -> None:
    with pytest.raises(TypeError, match=r"Machine.array"):
        Array()
    with Machine(2) as m:
        for call in (
            lambda: m.array(1, device=2),
            lambda: m.empty(1, device=-1),
            lambda: m.stream(2),
            lambda: m.event(1 << 70),
        ):
            with pytest.raises(ValueError, match="2 devices, numbered from 0"):
                call()
        with pytest.raises(TypeError, match="expected a device's number, 0 to 1, got 'sim:0'"):
            m.stream("sim:0")  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            m.empty(-1)
        with pytest.raises((ValueError, TypeError)):
            m.empty(3, "no dtype")
        with pytest.raises((ValueError, MemoryError)):
            m.empty((1 << 40, 1 << 40))


def test_a_device_out_of_memory_raises_a_clear_error() -> None:
    with Machine(1, memory=1 << 16) as m:
        with pytest.raises(fanin.DeviceOutOfMemoryError):
            m.empty(1 << 20)
        with pytest.raises(MemoryError):
            m.empty(1 << 20)
        m.array(np.ones(16)).numpy()  # and the machine still works


def test_fresh_memory_is_poisoned() -> None:
    with Machine() as m:
        x = m.empty(64, "float32")
        assert not np.array_equal(x.numpy(), np.zeros(64, "float32"))


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr"])
def test_sparse_arrays_have_their_parts_on_the_device(kind: str) -> None:
    value = scipy.sparse.random_array((6, 4), density=0.4, rng=np.random.default_rng(1)).asformat(kind)
    with Machine() as m:
        x = m.array(value, device=1)
        assert isinstance(x, fanin.Sparse) and x.format == kind and tuple(x.shape) == (6, 4)
        assert all(isinstance(part, Array) and part.device == "sim:1" for part in x.parts)
        np.testing.assert_array_equal(x.parts[-1].numpy(), value.data)
        again = m.array(fanin.Sparse(kind, tuple(p.numpy() for p in x.parts), x.shape))
        assert [p.numpy().tolist() for p in again.parts] == [p.numpy().tolist() for p in x.parts]
        with pytest.raises(TypeError, match="tocoo"):
            m.array(value.tolil())


def test_memory_is_reused_once_it_may_be() -> None:
    with Machine(1, memory=1 << 16) as m:
        s = m.stream()
        for _ in range(64):
            x = m.empty(1 << 10, "float64")
            m.launch(s, lambda x: x.fill(1), writes=[x])
            del x
        m.synchronize()


def test_arrays_outlive_their_machine_and_have_weak_references() -> None:
    m = Machine()
    x = m.array(np.arange(3.0))
    gone = weakref.ref(x)
    del m
    gc.collect()
    np.testing.assert_array_equal(x.numpy(), np.arange(3.0))
    del x
    assert gone() is None


# Kernels


def test_a_kernel_runs_late_on_views_of_device_memory() -> None:
    with Machine() as m:
        s = m.stream()
        x, y = m.array(np.arange(4.0)), m.empty(4)
        ran: list[Any] = []

        def double(x: Any, y: Any) -> str:
            ran.append((type(x), x.flags.writeable, y.flags.writeable))
            np.multiply(x, 2, out=y)
            return "ignored"

        m.launch(s, double, reads=[x], writes=[y])
        assert not ran
        s.synchronize()
        assert ran == [(np.ndarray, False, True)]
        with fanin.stream(s):
            np.testing.assert_array_equal(y.numpy(), [0, 2, 4, 6])


def test_numpy_waits_for_the_current_stream_alone() -> None:
    with Machine() as m:
        s, other = m.stream(), m.stream()
        x, y = m.empty(1), m.empty(1)
        ran: list[str] = []
        m.launch(other, lambda y: ran.append("other"), writes=[y])
        m.launch(s, lambda x: (ran.append("mine"), x.fill(1)), writes=[x])
        with fanin.stream(s):
            assert x.numpy() == 1
        assert "mine" in ran
        with pytest.raises(fanin.RaceError, match="host"):
            y.numpy()


def keep_in_a_generator(kept: list[Any], x: np.ndarray) -> None:
    def elements() -> Iterator[Any]:
        yield from x

    kept.append(elements())
    next(kept[0])


def keep_in_an_exception(kept: list[Any], x: np.ndarray) -> None:
    try:
        raise LookupError(str(x.shape))
    except LookupError as e:
        kept.append(e)


KEEPERS: dict[str, Callable[[list[Any], np.ndarray], object]] = {
    "itself": lambda kept, x: kept.append(x),
    "a view of it": lambda kept, x: kept.append(x[1:].reshape(1, -1).T),
    "its buffer": lambda kept, x: kept.append(memoryview(x)),
    "other hands": lambda kept, x: kept.append(np.from_dlpack(x) if x.flags.writeable else np.frombuffer(x)),
    "a function": lambda kept, x: kept.append(lambda: x),
    "a generator": keep_in_a_generator,
    "a traceback": keep_in_an_exception,
}


@pytest.mark.parametrize("how", KEEPERS)
@pytest.mark.parametrize("written", [False, True])
def test_a_view_that_a_kernel_keeps_is_refused_and_its_memory_stays_mapped(how: str, written: bool) -> None:
    """Its bytes may be another array's by now: so it is an error, but no crash."""
    kept: list[Any] = []
    m = Machine()
    x, y = m.array(np.arange(3.0)), m.array(np.arange(3.0))
    arrays: Any = {"writes" if written else "reads": [x], "reads" if written else "writes": [y]}

    def keep(*views: np.ndarray) -> None:
        KEEPERS[how](kept, views[written])

    m.launch(m.stream(), keep, **arrays, name="mul")
    which = "(reads|writes)" if how == "a traceback" else "writes" if written else "reads"
    with pytest.raises(RuntimeError, match=rf"kernel 'mul' kept {which}\[0\].*copy"):
        m.synchronize()
    m.synchronize()
    del x, y, arrays
    m.synchronize()
    del m
    gc.collect()
    if how in ("itself", "a view of it"):
        assert kept[0].sum() != 3  # the array was freed, and is poisoned
    if how == "a generator":
        assert len(list(kept[0])) == 2


def test_a_view_that_a_kernel_drops_is_not_kept() -> None:
    """Nor what it returns, nor a cycle that the collector takes apart."""

    def cycle(x: np.ndarray) -> None:
        def down(n: int) -> int:
            return down(n - 1) if n else len(x)

        assert down(3) == 3

    def caught(x: np.ndarray) -> None:
        try:
            raise LookupError(x)
        except LookupError as e:
            mine = [e]  # the frame holds the error, and the error the frame
        assert mine

    def lazy(x: np.ndarray) -> Iterator[Any]:
        yield from x

    with Machine() as m:
        x, s = m.array(np.arange(3.0)), m.stream()
        weak: list[Any] = []
        for kernel in (
            cycle,
            caught,
            lazy,
            lambda x: x,
            lambda x: weak.append(weakref.ref(x)),
            lambda x: weak.append(x.copy()),
        ):
            m.launch(s, kernel, reads=[x])
        gc.disable()
        try:
            m.synchronize()
            assert not gc.isenabled()
        finally:
            gc.enable()
        assert weak[0]() is None and weak[1].tolist() == [0, 1, 2]


def test_the_views_of_a_kernel_that_raised_may_be_read() -> None:
    """What it raised is the news; its traceback holds the views."""
    m = Machine()
    x = m.array(np.arange(3.0))

    def fail(view: np.ndarray) -> None:
        raise LookupError("in the kernel")

    m.launch(m.stream(), fail, writes=[x])
    with pytest.raises(LookupError, match="in the kernel") as caught:
        m.synchronize()
    del x, m
    gc.collect()
    frame = caught.tb
    while frame.tb_next:
        frame = frame.tb_next
    assert frame.tb_frame.f_locals["view"].shape == (3,)
    assert len(frame.tb_frame.f_locals["view"].tolist()) == 3


def test_an_error_in_a_kernel_is_raised_by_the_call_that_ran_it() -> None:
    with Machine() as m:
        s = m.stream()
        x = m.empty(2)

        def fail(x: Any) -> None:
            raise LookupError("in the kernel")

        m.launch(s, fail, writes=[x])
        m.launch(s, lambda x: x.fill(5), writes=[x])
        with pytest.raises(LookupError, match="in the kernel"):
            m.synchronize()
        m.synchronize()
        with fanin.stream(s):
            assert x.numpy().tolist() == [5, 5]
        m.launch(s, fail, writes=[x])
        with pytest.raises(LookupError), fanin.stream(s):
            x.numpy()
        m.launch(s, fail, writes=[x])
        with pytest.raises(LookupError):
            while m.step():
                pass


def test_a_kernel_may_queue_more_work() -> None:
    with Machine(1) as m:
        s = m.stream()
        x = m.empty(1)
        m.launch(s, lambda x: m.launch(s, lambda x: x.fill(2), writes=[y], name="inner"), writes=[x], name="outer")
        y = m.empty(1)
        m.synchronize()
        with fanin.stream(s):
            assert y.numpy() == 2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m, s, x: m.launch(s, None), TypeError, "cannot be called"),
        (lambda m, s, x: m.launch(s, len, reads=x), TypeError, "sequence"),
        (lambda m, s, x: m.launch(s, len, reads=[np.ones(2)]), TypeError, r"reads\[0\]"),
        (lambda m, s, x: m.launch(s, len, writes=[x, None]), TypeError, r"writes\[1\]"),
        (lambda m, s, x: m.launch(s, len, writes=[x.broadcast_to((2, 2))]), ValueError, "read-only"),
        (lambda m, s, x: m.launch(None, len), (TypeError, ValueError), "stream"),
        (lambda m, s, x: m.launch(s, len, name=3), TypeError, "name"),
        (lambda m, s, x: m.launch(s, len, us="a"), (TypeError, ValueError), "a"),
        *[
            (lambda m, s, x, us=us: m.launch(s, len, us=us), ValueError, f"us: .*{us}")
            for us in (-1, -1e-9, -math.inf, math.inf, math.nan)
        ],
        (lambda m, s, x: m.spawn(3), TypeError, "cannot be called"),
    ],
)
def test_an_invalid_launch_is_refused(call: Any, error: Any, words: str) -> None:
    with Machine() as m, pytest.raises(error, match=words):
        call(m, m.stream(), m.empty(2))


def test_pending_work_is_dropped_after_an_exception() -> None:
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    with pytest.raises(KeyError), Machine() as m:
        x = m.empty(1)
        m.launch(m.stream(), lambda x, big=big, m=m: pytest.fail("it ran"), writes=[x])
        m.spawn(pytest.fail, "it ran")
        raise KeyError
    del big, m, x
    gc.collect()
    assert gone() is None


def test_a_machine_can_be_used_after_an_exception() -> None:
    m = Machine()
    with pytest.raises(KeyError), m:
        raise KeyError
    with m:
        t = m.spawn(lambda: 1)
    assert t.result == 1
    with pytest.raises(KeyError), m:
        m.spawn(lambda: 1)
        raise KeyError
    with m, pytest.raises(RuntimeError, match="make a new one"):
        m.join()  # its threads were requested to end: the machine is closed


def test_an_ndarray_of_no_axes_is_an_index_and_no_element_is_read() -> None:
    with Machine() as m:
        x = m.array(np.arange(6).reshape(2, 3))
        assert x[np.array(1)].address == x[1].address
        assert x[np.array(1), np.array(-1)].address == x[1, -1].address
        with pytest.raises(TypeError, match=r"indexed by integers, .* not by numpy.ndarray"):
            x[np.array([1])]


@pytest.mark.parametrize("op", [operator.neg, operator.pos, operator.invert, abs], ids=lambda op: op.__name__)
def test_an_operator_of_one_operand_is_refused_on_a_device(op: Any) -> None:
    with Machine() as m, pytest.raises(TypeError, match="computing with an array on a device is work for a stream"):
        op(m.array(np.arange(3)))
