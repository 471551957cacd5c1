"""The floating-point modes of a thread change no bit of a sum (A15), and a call leaves them as they were."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from kit import float_modes, hooks
from kit.float_modes import MODES, current, modes, same_bits, terms

pytestmark = [
    pytest.mark.core,
    pytest.mark.rule("A15"),
    pytest.mark.skipif(not float_modes.KNOWN, reason="the modes are set through glibc's fenv_t on x86-64"),
]
planted = pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")

FLOATS = [np.dtype(d) for d in ("f4", "f8", "c8", "c16", "f2", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)]
LARGE = 400_000  # elements that several threads sum: over 4 MB read and written


def summed(xs: list[Any], **options: Any) -> Any:
    buf = fanin.InputBuffer(1, **options)
    for x in xs:
        buf.add(0, x)
    return buf.take()[0]


def cast(xs: list[Any], to: str, n: int) -> Any:
    buf = fanin.InputBuffer([fanin.Slot(shape=(n,), dtype=to)])
    for x in xs:
        buf.add(0, x)
    return buf.take()[0]


def reduced(xs: list[Any], shape: tuple[int, ...], **options: Any) -> Any:
    buf = fanin.InputBuffer([fanin.Slot(shape=shape)], **options)
    for x in xs:
        buf.add(0, x.reshape(-1, *shape))
    return buf.take()[0]


def measured(xs: list[Any]) -> Any:
    buf = fanin.InputBuffer(len(xs), stats=True)
    for i, x in enumerate(xs):
        buf.add(i, x)
    sums = buf.take()
    stats = [buf.stats(i) for i in range(len(xs))]
    norm = fanin.global_norm(buf)
    fanin.clip_norm(buf, sums, 0.3)
    return [np.array([[s.sumsq, s.absmax, s.norm] for s in stats if s]), np.array(norm), *sums]


def sparse(xs: list[Any]) -> Any:
    n = len(xs[0])
    index = np.arange(n)[None] // 3
    out = [summed([fanin.Sparse("coo", (index, x), (n,)) for x in xs], budget=budget) for budget in (0, None)]
    into = summed([np.zeros(n, xs[0].dtype), fanin.Sparse("coo", (index, xs[1]), (n,))])
    return [*(fanin.add_n([s], scale=0.3).parts[-1] for s in out), into]


def on_device(xs: list[Any]) -> Any:
    with fanin.sim.Machine() as m:
        s = m.stream()
        buf = fanin.InputBuffer(1, stats=True, stream=s)
        with fanin.stream(s):
            for x in xs:
                buf.add(0, m.array(x))
            [total] = buf.take()
        m.synchronize()
        stats = buf.stats(0)
        assert stats is not None
        return [total.numpy(), np.array([stats.sumsq, stats.norm])]


def passed_back(xs: list[Any], workers: int) -> Any:
    leaf = fanin.Leaf(np.zeros(len(xs[0]), xs[0].dtype))
    nodes = [fanin.Node(lambda g, x=x: (x,), edges=[(leaf, 0)]) for x in xs]
    fanin.backward([(node, 0, np.ones(1)) for node in nodes], workers=workers)
    return leaf.grad


def over_ranks(xs: list[Any], order: str) -> Any:
    def rank(group: Any) -> Any:
        leaf = fanin.Leaf(np.zeros(len(xs[0]), xs[0].dtype), name="w")
        reducer = fanin.dist.Reducer([leaf], group, order=order, stats=True)
        fanin.backward([(leaf, 0, xs[group.rank].copy())], reducer=reducer)
        stats = reducer.stats()
        fanin.dist.clip_norm(reducer, 0.3)
        return [leaf.grad, np.array([stats.norm, stats.absmax])]

    return [x for parts in fanin.dist.threads(2, rank) for x in parts]


def ways() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what computes arrays), of every kind of arithmetic that the package does."""
    for d in FLOATS:
        few = terms(d, 300)
        yield f"{d}: small", partial(summed, few)
        yield f"{d}: small, at once", partial(summed, few, budget=0)
        yield f"{d}: add_n", partial(fanin.add_n, few)
        yield f"{d}: one number", partial(fanin.add_n, [x[:1] for x in few])
        yield f"{d}: scaled", partial(fanin.add_n, few, scale=1 / 3)
        yield f"{d}: one scaled to a subnormal", partial(fanin.add_n, few[:1], scale=1e-30)
        yield f"{d}: with gaps", partial(fanin.add_n, [x[::2] for x in few])
        yield f"{d}: summed to a shape", partial(reduced, few, (3,))
        yield f"{d}: summed to a number", partial(reduced, few, ())
        yield f"{d}: statistics", partial(measured, few)
        yield f"{d}: sparse", partial(sparse, few)
        yield f"{d}: on a device", partial(on_device, few)
        yield f"{d}: exact", partial(fanin.add_n, few, accumulate="exact")
        yield f"{d}: exact, a buffer", partial(summed, few, accumulate="exact", budget=0)
        yield f"{d}: exact, scaled", partial(fanin.add_n, few, accumulate="exact", scale=0.7)
    for d in (np.dtype("f4"), np.dtype("c8")):
        tiny = [np.full(3, 1e-30, d)] * 2
        for factor in (1e39, -1e39):
            yield f"{d}: scaled by {factor}", partial(fanin.add_n, tiny, scale=factor)
            yield f"{d}: scaled by {factor}, a term", partial(fanin.add_n, tiny[:1], scale=factor)
    yield "float64: statistics with a subnormal sum of squares", partial(measured, [np.full(3, 1.3e-160)])
    for d in FLOATS[:4]:
        many = terms(d, LARGE * 4 // d.itemsize, 2)
        yield f"{d}: large", partial(fanin.add_n, many)
        yield f"{d}: large, scaled", partial(fanin.add_n, many, scale=1 / 3)
        yield f"{d}: large, with gaps", partial(fanin.add_n, [np.repeat(x, 2)[::2] for x in many])
        yield f"{d}: large, with statistics", partial(measured, many[:1])
    for wide, narrow in (("f8", "f4"), ("c16", "c8"), ("f4", "f2"), ("f4", "bfloat16"), ("f8", "bfloat16")):
        yield f"{wide} cast to {narrow}", partial(cast, terms(np.dtype(wide), 300), narrow, 300)
    for k in (1, 2, 4):
        yield f"a pass on {k} threads", partial(passed_back, terms(np.dtype("f4"), 300), k)
    for order in ("key", "exact"):
        yield f"over ranks, {order}", partial(over_ranks, terms(np.dtype("f8"), 300), order)


#: Of each way its name, what computes, and what that returns in the default modes.
Ways = list[tuple[str, Callable[[], Any], Any]]


@pytest.fixture(scope="module")
def right() -> Ways:
    assert current() == float_modes.DEFAULT
    with np.errstate(all="ignore"), fanin.set_options(threads=3):
        return [(name, way, way()) for name, way in ways()]


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_the_calling_thread_changes_a_bit(mode: str, right: Ways) -> None:
    wrong = []
    for name, way, want in right:
        with np.errstate(all="ignore"), fanin.set_options(threads=3), modes(mode) as mine:
            found = way()
            kept = current() == mine
        if not kept:
            wrong.append(f"{name}: the thread's modes were changed")
        if not same_bits(found, want):
            wrong.append(f"{name}: other bits")
    assert not wrong


def test_the_chosen_numbers_differ_between_modes() -> None:
    """NumPy, which computes in the thread's modes, gets other bits from the same numbers in each of them."""
    xs = terms(np.dtype("f4"), 300)
    want = xs[0] + xs[1]
    for mode in MODES:
        with modes(mode):
            found = xs[0] + xs[1]
        assert not same_bits(found, want), mode


@contextmanager
def threads(n: int) -> Iterator[None]:
    """The helper threads are new: those of another number end first."""
    with fanin.set_options(threads=1):
        pass
    with fanin.set_options(threads=n):
        yield


@cache
def long_terms() -> list[Any]:
    """Two terms whose sum takes long enough for every thread, and depends on the modes."""
    return [np.tile(np.array([1e-40, x], "f4"), 2_000_000) for x in (1.0, 1e-7 / 3)]


def started_in(mode: str, n: int) -> Any:
    """Large sums in the default modes, whose helper threads were started in another."""
    with threads(n):
        with modes(mode):
            fanin.add_n(long_terms())
        return [fanin.add_n(long_terms()) for _ in range(3)]


@pytest.mark.parametrize("mode", ["both", "up"])
def test_helper_threads_have_the_default_modes_in_every_caller(mode: str) -> None:
    with fanin.set_options(threads=1):
        want = fanin.add_n(long_terms())
    for n in (2, 4):
        assert all(same_bits(x, want) for x in started_in(mode, n)), n


def test_a_call_that_raises_leaves_the_modes() -> None:
    def refuses(old: object, new: object) -> object:
        raise LookupError

    buf = fanin.InputBuffer([fanin.Slot(combine=refuses)])
    buf.add(0, {1})
    buf.add(0, {2})
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (LookupError, buf.take),
        (ValueError, lambda: fanin.add_n([np.ones(2), np.ones(3)])),
        (ValueError, lambda: fanin.add_n([np.ones(3)], scale=1, out=np.ones(2))),
        (ValueError, lambda: summed([fanin.Sparse("coo", (np.array([[9]]), np.ones(1)), (3,))] * 2)),
    ]
    for mode in MODES:
        for error, call in calls:
            with modes(mode) as mine:
                with pytest.raises(error):
                    call()
                kept = current()
            assert kept == mine


class Number:
    """An object with a `+` that reports the modes in which it runs."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def __add__(self, other: object) -> Number:
        self.seen.append(current())
        return self


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_functions_of_a_user_run_in_the_modes_of_the_thread_that_calls(workers: int, mode: str) -> None:
    seen: list[int] = []

    def noted(g: Any) -> tuple[Any]:
        seen.append(current())
        return (g,)

    def combine(old: Any, new: Any) -> Any:
        seen.append(current())
        return old

    def hook(g: Any) -> None:
        seen.append(current())

    leaf = fanin.Leaf(np.zeros(3))
    leaf.register_hook(hook)
    nodes = [fanin.Node(noted, edges=[(leaf, 0)]) for _ in range(16)]
    with modes(mode) as mine:
        fanin.backward([(node, 0, np.ones(3)) for node in nodes], workers=workers, keep_graph=True)
        fanin.add_n([Number(seen), Number(seen), Number(seen)])
        buf = fanin.InputBuffer([fanin.Slot(combine=combine)])
        buf.add(0, {1})
        buf.add(0, {2})
        buf.take()
    assert len(seen) == 16 + 1 + 2 + 1 and set(seen) == {mine}
    seen.clear()
    fanin.backward([(node, 0, np.ones(3)) for node in nodes], workers=workers, keep_graph=True)
    assert set(seen) == {float_modes.DEFAULT}, "the threads of the pass before serve this one, too"


@pytest.mark.parametrize("mode", ["both", "up"])
def test_ranks_on_threads_start_in_the_modes_of_the_thread_that_starts_them(mode: str) -> None:
    with modes(mode) as mine:
        seen = fanin.dist.threads(3, lambda group: current())
    assert seen == [mine] * 3


def interrupted(mode: str) -> tuple[int, int]:
    """The modes in which a signal's handler ran during a long sum, and those after it."""
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(current())
        raise KeyboardInterrupt

    long = np.broadcast_to(np.float32(1e-40), (1 << 40,))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with modes(mode):
            buf = fanin.InputBuffer([fanin.Slot(shape=())])
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                buf.add(0, long)
            after = current()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return seen[0], after


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize("mode", ["both", "up"])
def test_a_signal_handler_has_the_modes_of_its_thread(mode: str) -> None:
    assert interrupted(mode) == (float_modes.DEFAULT | MODES[mode],) * 2


@pytest.fixture
def plant() -> Iterator[Callable[[str], None]]:
    yield hooks.fault
    hooks.fault(None)


@planted
@pytest.mark.unsanitized  # an exact sum then reads subnormal numbers as 0, of which there is no logarithm
def test_sums_in_the_modes_of_the_caller_are_found(plant: Callable[[str], None], right: Ways) -> None:
    plant("FLOAT_MODE_OF_CALLER")
    found = set()
    for name, way, want in right:
        for mode in ("both", "up"):
            with np.errstate(all="ignore"), fanin.set_options(threads=1), modes(mode):
                if not same_bits(way(), want):
                    found.add(name)
    rounds = ("float32", "float64", "complex64", "complex128", "a pass", "over ranks")  # few numbers of the others do
    names = {name for name, *_ in right if name.startswith(rounds) and "one number" not in name and "exact" not in name}
    assert sorted(names - found) == []
    assert {"float32: exact", "complex64: exact, scaled", "over ranks, exact"} <= found


@planted
def test_helpers_in_other_modes_are_found(plant: Callable[[str], None]) -> None:
    with fanin.set_options(threads=1):
        want = fanin.add_n(long_terms())
    plant("FLOAT_MODE_OF_HELPER")
    try:
        while all(same_bits(x, want) for x in started_in("both", 4)):  # until a helper is in time to take part
            pass
    finally:
        hooks.fault(None)
        with threads(2):  # the helpers with other modes end
            pass


@planted
def test_a_handler_in_the_modes_of_a_sum_is_found(plant: Callable[[str], None]) -> None:
    plant("FLOAT_MODE_OF_CALLBACK")
    assert interrupted("both")[0] == float_modes.DEFAULT


@planted
def test_a_job_in_the_modes_of_its_thread_is_found(plant: Callable[[str], None]) -> None:
    seen: list[int] = []

    def noted(g: Any) -> tuple[Any]:
        seen.append(current())
        return (g,)

    def run() -> set[int]:
        seen.clear()
        barrier = threading.Barrier(2)
        leaf = fanin.Leaf(np.zeros(3))

        def meets(g: Any) -> tuple[Any]:
            barrier.wait()
            return noted(g)

        nodes = [fanin.Node(meets, edges=[(leaf, 0)]) for _ in range(2)]
        fanin.backward([(node, 0, np.ones(3)) for node in nodes], workers=2)
        return set(seen)

    assert run() == {float_modes.DEFAULT}  # the pool has a thread
    with modes("up") as mine:
        assert run() == {mine}
    plant("FLOAT_MODE_OF_JOB")
    with modes("down") as mine:
        # a thread that the pool starts now, as the other is not back yet, has the modes of this one
        assert any(run() != {mine} for _ in range(100))
