"""The simulated machine as Python has it: arrays, kernels, threads, schedules, the messages of races."""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import fanin
from fanin import _core
from fanin._sim.machine import SCHEDULES
from fanin.sim import Array, Machine
from kit import hooks
from kit.support import run_python

pytestmark = pytest.mark.core


# Arrays


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ],
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
def test_an_array_is_a_copy_of_whatever_numpy_makes_of_it(value: Any) -> None:
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
def test_indexing_gives_the_views_that_numpy_gives(key: Any) -> None:
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
        (4, IndexError, "out of range for axis 0 of length 4"),
        ((0, -4), IndexError, "axis 1"),
        ((0,) * 4, IndexError, "too many indices: 4"),
        ((..., ...), IndexError, "one ellipsis"),
        (True, TypeError, "bool"),
        ([0, 1], TypeError, "list"),
        (np.array([0]), TypeError, "ndarray"),
        (1.0, TypeError, "float"),
        ("a", TypeError, "str"),
        (slice(None, None, 0), ValueError, "zero"),
        (10**30, IndexError, "fit"),
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
            with pytest.raises(ValueError, match="cannot be seen as"):
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
def test_shapes_that_no_machine_has_are_refused(n: int) -> None:
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


def test_a_device_without_memory_says_so() -> None:
    with Machine(1, memory=1 << 16) as m:
        with pytest.raises(fanin.DeviceOutOfMemoryError):
            m.empty(1 << 20)
        with pytest.raises(MemoryError):
            m.empty(1 << 20)
        m.array(np.ones(16)).numpy()  # and goes on


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
        assert kept[0].sum() != 3  # the array was given back, and is poisoned
    if how == "a generator":
        assert len(list(kept[0])) == 2


def test_what_a_kernel_lets_go_of_is_no_kept_view() -> None:
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


def test_the_views_of_a_kernel_that_raised_may_be_looked_at() -> None:
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


def test_what_a_kernel_raises_is_raised_by_the_call_that_ran_it() -> None:
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
            (lambda m, s, x, us=us: m.launch(s, len, us=us), ValueError, f"us .*{us}")
            for us in (-1, -1e-9, -math.inf, math.inf, math.nan)
        ],
        (lambda m, s, x: m.spawn(3), TypeError, "cannot be called"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(call: Any, error: Any, words: str) -> None:
    with Machine() as m, pytest.raises(error, match=words):
        call(m, m.stream(), m.empty(2))


def test_what_is_left_by_an_exception_is_dropped() -> None:
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


def test_a_machine_goes_on_after_an_exception() -> None:
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
        m.join()  # its threads were told to end: that is the end of it


# Schedules


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_seed_and_a_schedule_give_the_same_run_again(schedule: str) -> None:
    def run(seed: int) -> list[int]:
        ran: list[int] = []
        with Machine(2, seed, schedule=schedule) as m:
            for i in range(12):
                m.launch(m.stream(i % 2), lambda x, i=i: ran.append(i), writes=[m.empty(1, device=i % 2)])
        return ran

    assert run(3) == run(3)
    assert sorted(run(4)) == list(range(12))
    if schedule == "seeded":
        assert len({tuple(run(seed)) for seed in range(8)}) > 1
    if schedule == "fifo":
        assert run(0) == list(range(12))
    if schedule == "lifo":
        assert run(0) == list(range(12))[::-1]


def test_the_starved_stream_runs_last() -> None:
    ran: list[str] = []
    first = Machine(1).stream().handle
    with Machine(1, schedule="starve", starve=first) as m:
        starved, other = m.stream(), m.stream()
        assert starved.handle == first
        for s, word in ((starved, "starved"), (other, "other"), (other, "other")):
            m.launch(s, lambda x, word=word: ran.append(word), writes=[m.empty(1)])
    assert ran == ["other", "other", "starved"]


def test_steps_run_one_thing_at_a_time() -> None:
    ran: list[int] = []
    with Machine(1) as m:
        s = m.stream()
        for i in range(3):
            m.launch(s, lambda x, i=i: ran.append(i), writes=[m.empty(1)])
        while not ran:
            assert m.step()
        assert ran == [0]
        while m.step():
            pass
        assert ran == [0, 1, 2]
        assert not m.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "1 to 64"),
        ({"devices": 65}, "1 to 64"),
        ({"schedule": "no"}, "round robin"),
        ({"memory": 0}, "memory"),
        *[({name: x}, f"{name} .*{x}") for name in ("launch_us", "gbytes_per_s") for x in (-1, math.nan, math.inf)],
    ],
)
def test_a_machine_that_cannot_be_says_why(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Machine(**options)


def test_the_clock_counts_overlap() -> None:
    def took(streams: int) -> float:
        with Machine(1) as m:
            all_ = [m.stream() for _ in range(streams)]
            for i in range(4):
                m.launch(all_[i % streams], lambda x: None, writes=[m.empty(1)], us=1000)
            return m.clock().device_us

    assert 4000 <= took(1) < 4100
    assert 1000 <= took(4) < 1100
    assert took(1) > 3 * took(4)


# Races


def test_a_race_names_both_sides_and_the_wait_that_is_missing() -> None:
    with Machine(2) as m:
        a, b = m.stream(0), m.stream(1)
        x = m.empty(4)
        m.launch(a, lambda x: x.fill(1), writes=[x], name="writer")
        with pytest.raises(fanin.RaceError) as caught:
            m.launch(b, lambda x: None, reads=[x], name="reader")
        text = str(caught.value)
        for word in (
            "writer",
            "reader",
            f"stream {a.handle}",
            f"stream {b.handle}",
            "sim:0",
            "sim:1",
            "test_sim.py:",
            "wait",
        ):
            assert word in text, text
        assert m.races == 1
        m.synchronize()  # it was raised once


def test_bytes_that_do_not_meet_are_no_race() -> None:
    with Machine() as m:
        a, b, c = m.stream(), m.stream(), m.stream()
        x = m.empty((4, 6))
        m.launch(a, lambda v: v.fill(1), writes=[x[:, ::2]])
        m.launch(b, lambda v: v.fill(2), writes=[x[:, 1::2]])
        with pytest.raises(fanin.RaceError):
            m.launch(c, lambda v: None, reads=[x[3]])
        c.wait(a)
        m.launch(c, lambda v: None, reads=[x[3, ::2]])
        c.wait(b)
        m.launch(c, lambda v: None, reads=[x])
        m.synchronize()


def test_a_blocking_stream_synchronizes_with_the_legacy_stream() -> None:
    def race(blocking: bool) -> bool:
        with Machine() as m:
            legacy, s = fanin.Stream("sim:0", 1), m.stream(blocking=blocking)
            x = m.empty(1)
            m.launch(s, lambda v: v.fill(1), writes=[x])
            try:
                m.launch(legacy, lambda v: None, reads=[x])
            except fanin.RaceError:
                return True
            return False

    assert race(False) and not race(True)


def test_an_unchecked_machine_finds_nothing() -> None:
    with Machine(check=False) as m:
        x = m.empty(1)
        m.launch(m.stream(), lambda v: None, writes=[x])
        m.launch(m.stream(), lambda v: None, writes=[x])
        assert m.races == 0


def test_a_race_that_no_call_could_raise_is_raised_at_the_end() -> None:
    """A release cannot raise."""
    m = Machine()
    m.leave_out("S19.mark")
    with pytest.raises(fanin.RaceError), m:
        s, other = m.stream(), m.stream()
        buf = fanin.InputBuffer(1, stream=s)
        for _ in range(2):
            g = m.empty(4)
            m.launch(s, lambda v: v.fill(1), writes=[g])
            buf.add(0, g, stream=s)
        (total,) = buf.take(stream=other)
        m.launch(other, lambda v: None, reads=[total])
        del total
    assert m.races >= 1


def test_leave_out_lists_its_words() -> None:
    with Machine() as m:
        with pytest.raises(ValueError, match=r"S12\.wait"):
            m.leave_out("no such rule")
        for wrong in ("", "S1", "S12.", "wait", "S12.no"):
            with pytest.raises(ValueError, match="leave_out"):
                m.leave_out("S12", wrong)
        with pytest.raises(ValueError):
            m.leave_out(12)  # type: ignore[arg-type]
        m.leave_out("S12", "S9.mark")
        m.leave_out()


# Host threads


def test_threads_run_at_join_by_turns() -> None:
    with Machine() as m:
        seen: list[Any] = []
        threads = [m.spawn(lambda i=i: (seen.append(i), i * 10)[1], name=f"t{i}") for i in range(4)]
        assert not seen and "not ended" in repr(threads[0])
        with pytest.raises(RuntimeError, match="join"):
            threads[0].result
        m.join()
        assert sorted(seen) == [0, 1, 2, 3]
        assert [t.result for t in threads] == [0, 10, 20, 30]
        assert repr(threads[1]) == "<fanin.sim.Thread 't1', ended>"


def test_what_a_thread_raises_is_raised_by_join() -> None:
    with Machine() as m:
        good = m.spawn(lambda: 1)
        bad = m.spawn(lambda: 1 // 0, name="bad")
        with pytest.raises(ZeroDivisionError) as caught:
            m.join()
        assert any("'bad'" in note for note in caught.value.__notes__)
        assert good.result == 1
        with pytest.raises(ZeroDivisionError):
            bad.result
        m.join()  # once


def test_a_thread_may_spawn_another() -> None:
    with Machine() as m:
        inner: list[Any] = []
        m.spawn(lambda: inner.append(m.spawn(lambda: 5)))
        m.join()
        assert inner[0].result == 5


def test_a_thread_cannot_join_itself() -> None:
    with Machine() as m:
        m.spawn(m.join)
        with pytest.raises(RuntimeError, match="is one of those"):
            m.join()


def test_threads_share_one_buffer() -> None:
    for seed in range(10):
        with Machine(2, seed) as m:
            c = m.stream()
            buf = fanin.InputBuffer(1, stream=c)

            def producer(key: int, m: Machine = m, buf: Any = buf) -> None:
                s = m.stream(key % 2)
                g = m.empty(8, device=0)
                m.launch(s, lambda v: v.fill(2.0**key), writes=[g])
                buf.add(0, g, key=key, stream=s)

            for key in range(4):
                m.spawn(producer, key)
            m.join()
            (total,) = buf.take()
            with fanin.stream(c):
                assert total.numpy().tolist() == [15.0] * 8
            assert len(m.host_schedule) > 4


def test_threads_make_streams_at_once() -> None:
    for seed in range(5):
        with Machine(2, seed) as m:
            all_threads = []
            for turn in range(2):
                threads = [m.spawn(lambda i=i: m.stream(i % 2)) for i in range(32)]
                all_threads += threads
                m.join()
                assert len(m.streams) == 32 * (turn + 1)
                assert {t.result for t in threads} <= set(m.streams)
                assert len({(s.device, s.handle) for s in m.streams}) == len(m.streams)
            for _ in range(32):
                m.spawn(lambda: None)
            with pytest.raises(ValueError, match="at most 32"):
                m.spawn(lambda: None)


def test_ctrl_c_is_heard_while_threads_run() -> None:
    code = """
import fanin, faulthandler, os, signal

faulthandler.dump_traceback_later(40, exit=True)  # where it hangs, should it

def spin():
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass

try:
    with fanin.sim.Machine() as m:
        m.spawn(spin)
        m.join()
except KeyboardInterrupt:
    print("heard", flush=True)
    os._exit(0)  # the one that spins is not waited for
"""
    assert run_python(code, timeout=60).stdout.strip() == "heard"


def test_ctrl_c_is_heard_while_kernels_run() -> None:
    code = """
import fanin, faulthandler, os, signal

faulthandler.dump_traceback_later(40, exit=True)  # where it hangs, should it

def spin(v):
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass

try:
    with fanin.sim.Machine() as m:
        m.launch(m.stream(), spin, writes=[m.empty(1)])
        m.synchronize()
except KeyboardInterrupt:
    print("heard", flush=True)
    os._exit(0)  # the one that spins is not waited for
"""
    assert run_python(code, timeout=60).stdout.strip() == "heard"


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        (lambda m, x: m.synchronize(), fanin.sim.DeadlockError),
        (lambda m, x: x.numpy(), (fanin.RaceError, fanin.sim.DeadlockError)),
        (lambda m, x: m.step(), None),
        (lambda m, x: m.spawn(len, "a"), None),
        (lambda m, x: m.stream().record(), None),
    ],
    ids=["synchronize", "numpy", "step", "spawn", "record"],
)
def test_a_kernel_that_asks_the_machine_gets_an_answer(kernel: Any, error: Any) -> None:
    m = Machine()
    x = m.empty(2)
    m.launch(m.stream(), lambda v: kernel(m, x), writes=[x])
    m.launch(m.stream(), lambda v: None, writes=[m.empty(1)])
    if error is None:
        m.synchronize()
    else:
        with pytest.raises(error):
            m.synchronize()
    m.synchronize()


class Shrinking:
    """An index that takes the list apart while it is read."""

    def __init__(self, victim: list[Any]) -> None:
        self.victim = victim

    def __index__(self) -> int:
        self.victim.clear()
        return 1


def test_lists_that_change_while_they_are_read_do_no_harm() -> None:
    with Machine() as m:
        shape: list[Any] = []
        shape += [Shrinking(shape), 2, 3]
        assert m.empty(shape).shape == (1, 2, 3)
        axes: list[Any] = []
        axes += [Shrinking(axes), 0]
        with pytest.raises(ValueError):
            m.empty((2, 3)).transpose(axes + [0])
        assert m.empty((2, 3)).transpose([Shrinking([]), 0]).shape == (3, 2)


def test_deadlocks_name_what_is_stuck() -> None:
    """Two threads that wait for each other's sums, through a combine that takes the other buffer."""
    with Machine() as m:
        one, other = (fanin.InputBuffer([fanin.Slot(combine=lambda a, b, i=i: hold(i, a, b))]) for i in range(2))
        buffers = [one, other]

        def hold(i: int, a: Any, b: Any) -> Any:
            buffers[1 - i].take()
            return a

        for i, buf in enumerate(buffers):
            buf.add(0, {"n": i})
            buf.add(0, {"n": i})
        for buf in buffers:
            m.spawn(buf.take)
        with pytest.raises(fanin.sim.DeadlockError, match=r"host thread 0 .*waits for.*host thread 1 .*waits for"):
            m.join()


def test_other_threads_may_use_a_machine_too() -> None:
    with Machine() as m:
        out: list[Any] = []

        def work(i: int) -> None:
            s = m.stream()
            x = m.empty(4)
            for k in range(20):
                m.launch(s, lambda v, k=k: v.fill(k), writes=[x])
            s.synchronize()
            with fanin.stream(s):
                out.append(x.numpy().tolist())

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert out == [[19.0] * 4] * 4


# Failures


def a_machine_at_work() -> None:
    with fanin.trace() as t, Machine(2) as m:
        c = m.stream()
        s = c
        buf = fanin.InputBuffer(1, stream=c)
        for k in range(2):
            s, g = m.stream(k), m.empty(16, device=0)
            m.launch(s, lambda v: v.fill(1), writes=[g])
            buf.add(0, g, stream=s)
        (x,) = buf.take()
        e = m.event()
        e.record(c)
        s.wait(e)
        s.wait(c)
        with fanin.stream(c):
            assert (x[::2].reshape(2, 4).T.broadcast_to(3, 4, 2).numpy() == 2).all()
        m.spawn(lambda: m.event().record(c))
        m.join()
        x.record_stream(s)
        _core.pass_end(s, [c], [x])
    assert t.lines


def two_orders() -> None:
    def scenario(m: Machine) -> None:
        s = m.stream()
        for _ in range(2):
            m.spawn(lambda: s.record())

    report = fanin.sim.explore(scenario)
    if report.error is not None:
        raise report.error


@pytest.mark.parametrize("work", [a_machine_at_work, two_orders])
def test_every_allocation_may_fail(work: Any) -> None:
    """Each once: MemoryError, or it went well all the same; nothing is left behind."""
    work()
    gc.collect()
    live, failed, n = hooks.memory()[0], 0, 0
    hit = True
    while hit:
        before = hooks.memory()[2]
        hooks.fail_at(n)
        try:
            work()
        except MemoryError:
            failed += 1
        finally:
            hooks.fail_at(-1)
        hit = hooks.memory()[2] > before
        n += 1
        if n % 8 == 0:
            gc.collect()  # CPython keeps few MemoryErrors; beyond them one is shared and never lets go of its frames
    gc.collect()
    assert failed > 30 and n > failed
    assert hooks.memory()[0] == live


@pytest.mark.parametrize("nth", range(4))
def test_a_thread_that_cannot_be_started_ends_the_join(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, starts = threading.Thread.start, iter(range(10))

    def sometimes(self: threading.Thread) -> None:
        if next(starts) == nth:
            raise RuntimeError("can't start new thread")
        start(self)

    ran: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", sometimes)
    with Machine() as m:
        for i in range(3):
            m.spawn(ran.append, i)
        if nth < 3:
            with pytest.raises(RuntimeError, match="can't start"):
                m.join()
            with pytest.raises(RuntimeError, match="make a new one"):
                m.synchronize()
            assert not ran
        else:  # the one that listens for Ctrl-C: it can be done without
            m.join()
            assert sorted(ran) == [0, 1, 2]


def test_a_machine_has_a_number_of_devices() -> None:
    for wrong, error in ((True, TypeError), ("2", TypeError), (0, ValueError), (65, ValueError)):
        with pytest.raises(error, match="devices" if error is ValueError or wrong is True else "integer"):
            Machine(devices=wrong)  # type: ignore[arg-type]


def test_ctrl_c_inside_synchronize_leaves_a_machine_without_host_threads_usable() -> None:
    lines = 0

    def interrupted_at(n: int) -> bool:
        """An interrupt at the n-th line that synchronize runs; False: it has no so many."""
        nonlocal lines
        lines, raised = 0, False

        def trace(frame: Any, event: str, arg: object) -> Any:
            nonlocal lines, raised
            if frame.f_code.co_filename != Machine.synchronize.__code__.co_filename:
                return None
            if event == "line":
                lines += 1
                if lines == n + 1:
                    raised = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        m = Machine(1)
        s, x = m.stream(), m.array(np.zeros(2))
        m.launch(s, lambda v: v.fill(1), writes=[x])
        old = sys.gettrace()
        sys.settrace(trace)
        try:
            m.synchronize()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(old)
        m.launch(s, lambda v: np.add(v, 1, out=v), writes=[x])
        m.spawn(lambda: m.launch(s, lambda v: np.add(v, 1, out=v), writes=[x]))
        m.synchronize()
        assert x.numpy().tolist() == [3, 3]
        return raised

    n = 0
    while interrupted_at(n):
        n += 1
    assert n >= 5, "the loop never came into synchronize"


def test_ctrl_c_inside_a_kernel_leaves_the_machine_usable() -> None:
    m = Machine(1)
    s, x = m.stream(), m.array(np.zeros(2))

    def interrupt(v: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    m.launch(s, interrupt, writes=[x])
    m.launch(s, lambda v: v.fill(1), writes=[x])
    with pytest.raises(KeyboardInterrupt):
        m.synchronize()
    m.synchronize()
    assert x.numpy().tolist() == [1, 1]


def test_the_views_of_a_kernel_that_raised_show_what_was_there_then() -> None:
    def inner(part: Any, back: Any) -> None:
        raise LookupError("in the kernel")

    def fail(view: Any, grid: Any) -> None:
        view[0] = 7
        try:
            inner(view[1:], grid[::-1, 0])
        except LookupError:
            raise LookupError("in the kernel")  # noqa: B904

    m = Machine(1)
    s, x, y = m.stream(), m.array(np.arange(4.0)), m.array(np.arange(12.0).reshape(3, 4)[:, ::-1])
    m.launch(s, fail, writes=[x, y])
    with pytest.raises(LookupError, match="in the kernel") as caught:
        m.synchronize()
    m.launch(s, lambda *v: [one.fill(-1) for one in v] and None, writes=[x, y])
    m.synchronize()
    frames = {
        f.f_code.co_name: f
        for e in (caught.value, caught.value.__context__)
        for f, _ in traceback.walk_tb(e.__traceback__)
    }  # type: ignore[union-attr]
    assert frames["fail"].f_locals["view"].tolist() == [7, 1, 2, 3]
    assert frames["fail"].f_locals["grid"].tolist() == np.arange(12.0).reshape(3, 4)[:, ::-1].tolist()
    assert frames["inner"].f_locals["part"].tolist() == [1, 2, 3]
    assert frames["inner"].f_locals["back"].tolist() == [11, 7, 3]
    frames["fail"].f_locals["view"][:] = 100  # nobody's but the traceback's
    assert x.numpy().tolist() == [-1] * 4 and y.numpy().tolist() == [[-1] * 4] * 3
    del m, s, x, y
    gc.collect()
    assert frames["inner"].f_locals["part"].shape == (3,)


def test_a_release_race_is_told_by_a_later_call_of_any_kind() -> None:
    calls: dict[str, Callable[[Machine, Any, Any, Any], object]] = {
        "launch": lambda m, s, y, g: m.launch(s, lambda v: None, reads=[y]),
        "synchronize": lambda m, s, y, g: m.synchronize(),
        "stream": lambda m, s, y, g: s.synchronize(),
        "event": lambda m, s, y, g: g[1].synchronize(),
        "read": lambda m, s, y, g: y.numpy(),
        "step": lambda m, s, y, g: m.step(),
        "graph": lambda m, s, y, g: m.launch_graph(g[0], s),
        "take": lambda m, s, y, g: [g[2].clear(), g[2].add(0, y), g[2].add(0, y), g[2].take()],
    }
    for name, call in calls.items():
        m = Machine(1)
        s, t, y = m.stream(), m.stream(), m.array(np.zeros(4))
        m.begin_capture(s)
        m.launch(s, lambda v: None, reads=[y])
        graph, buf = m.end_capture(s), fanin.InputBuffer(1, stream=s)
        event = s.record()
        with fanin.stream(s):
            first = fanin.InputBuffer(1)
            for _ in range(2):
                first.add(0, m.array(np.ones(4)))
            (x,) = first.take()
        t.wait(s)
        m.launch(t, lambda v: None, reads=[x], name="late")
        assert m.races == 0
        del x  # nobody marked it: this call cannot raise
        assert m.races == 1
        with pytest.raises(fanin.RaceError, match=r"memory is given back .* while 'late'"):
            call(m, s, y, (graph, event, buf))
        call(m, s, y, (graph, event, buf))  # told once
        assert m.races == 1, name


def test_a_captured_kernel_ends_with_its_graph() -> None:
    class Fn:
        def __call__(self, v: Any) -> None:
            v += 1

    for launches in range(3):
        m = Machine(1)
        s, x, fn = m.stream(), m.array(np.zeros(1)), Fn()
        gone = weakref.ref(fn)
        m.begin_capture(s)
        m.launch(s, fn, writes=[x])
        graph = m.end_capture(s)
        del fn
        for _ in range(launches):
            m.launch_graph(graph, s)
        assert gone() is not None
        del graph
        assert (gone() is not None) == (launches > 0), "what is on its way keeps it"
        m.synchronize()
        assert gone() is None
        assert x.numpy() == launches
