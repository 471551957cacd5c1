"""The default budget: gradients that only the buffer keeps alive are summed while they are cached; others wait."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from kit import hooks

pytestmark = pytest.mark.core

MIB = 1 << 20
N = 2000  # elements of a gradient, float64
ONE = 8 * N


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Limits by which four gradients that only the buffer references may wait, and ten with other references."""
    hooks.auto_budget(4 * ONE, 10 * ONE)
    yield 4, 10
    hooks.auto_budget()


def made(k: int) -> Any:
    return np.full(N, float(k))


# Its value, and how it is shown


def test_the_default_is_auto_and_numbers_stay_numbers() -> None:
    assert fanin.InputBuffer(1).budget == "auto" == fanin.InputBuffer(9, name="x").budget
    for number in (0, 1, 10**12, math.inf):
        assert fanin.InputBuffer(1, budget=number).budget == number
    with fanin.set_options(budget=77):
        assert fanin.InputBuffer(1).budget == fanin.InputBuffer(1, budget=None).budget == 77
        assert fanin.InputBuffer(1, budget="auto").budget == "auto"
        with fanin.set_options(budget="auto"):
            assert fanin.InputBuffer(1).budget == "auto"
        assert fanin.InputBuffer(1).budget == 77
    assert fanin.InputBuffer(1).budget == "auto" == _core.get_options()["budget"]


@pytest.mark.parametrize(
    ("bad", "error"), [("Auto", ValueError), ("", ValueError), (True, TypeError), ([], TypeError), (b"auto", TypeError)]
)
def test_the_error_for_an_invalid_budget_names_the_valid_ones(bad: Any, error: type[Exception]) -> None:
    for call in (lambda: fanin.InputBuffer(1, budget=bad), lambda: fanin.set_options(budget=bad)):
        with pytest.raises(error, match='expected "auto", a number of bytes'):
            call()


def test_its_limits_are_a_part_of_the_cache_and_64_mib() -> None:
    alone, held = hooks.auto_budget()
    assert 16 << 10 <= alone <= 16 * MIB and held == 64 * MIB


def test_explain_shows_the_budget(limits: tuple[int, int]) -> None:
    buf, keep = fanin.InputBuffer(1), [made(k) for k in range(6)]
    for g in keep:
        buf.add(0, g)
    said = (
        'budget="auto": of contributions that only the buffer holds 0 B wait, 62.5 KiB may;'
        " of those that other code holds 93.75 KiB wait, 156.2 KiB may."
    )
    assert said in buf.explain(0)
    few = fanin.InputBuffer(1, budget=1 << 20)
    few.add(0, keep[0])
    assert "budget=1048576: 15.62 KiB wait in all slots, 1 MiB may." in few.explain(0)
    few = fanin.InputBuffer(1, budget=math.inf)
    few.add(0, keep[0])
    assert "budget=inf: 15.62 KiB wait in all slots." in few.explain(0)


# The patterns of callers: which references to a gradient exist when the next one arrives


def temporary(buf: Any, n: int) -> None:
    for k in range(n):
        buf.add(0, made(k))


def rebound(buf: Any, n: int) -> None:
    for k in range(n):
        g = made(k)
        buf.add(0, g)


def deleted(buf: Any, n: int) -> None:
    for k in range(n):
        g = made(k)
        buf.add(0, g)
        del g


def popped(buf: Any, n: int) -> None:
    """HIPS autograd's pass: gradients wait in a dict until their node is reached."""
    out = {0: made(0)}
    for k in range(n):
        g = out.pop(k)
        out[k + 1] = g + 1
        buf.add(0, g)


def through_a_function(buf: Any, n: int) -> None:
    def accumulate(slot: int, gradient: Any) -> None:
        buf.add(slot, gradient)

    for k in range(n):
        accumulate(0, made(k))


def pairs(buf: Any, n: int) -> None:
    """What a node returns is a tuple, which lives until all of it is added."""
    for k in range(0, n, 2):
        for g in (made(k), made(k + 1)):
            buf.add(0, g)


def views(buf: Any, n: int) -> None:
    for k in range(n):
        buf.add(0, made(k).reshape(2, -1).reshape(-1))


def in_fortran_order(buf: Any, n: int) -> None:
    for k in range(n):
        buf.add(0, np.full((2, N // 2), float(k), order="F"))


def by_key(buf: Any, n: int) -> None:
    for k in range(n):
        buf.add(0, made(k), key=k)


def copied(buf: Any, n: int) -> None:
    g = made(1)
    for _ in range(n):
        buf.add(0, g, copy=True)


def converted(buf: Any, n: int) -> None:
    g = made(1).astype(np.float32)
    for _ in range(n):
        buf.add(0, g)


DROPPED = [temporary, rebound, deleted, popped, through_a_function, pairs, views, in_fortran_order, by_key, copied]


@pytest.mark.parametrize("producer", DROPPED, ids=lambda f: f.__name__)
def test_a_gradient_that_its_producer_drops_is_summed_early(
    limits: tuple[int, int], producer: Callable[[Any, int], None]
) -> None:
    sums = []
    for budget in ("auto", math.inf):
        buf = fanin.InputBuffer(1, budget=budget)
        producer(buf, 40)
        now = buf.counters
        sums.append(buf.take()[0])
        if budget == "auto":
            assert now.folds >= 6 and now.peak_parked_bytes <= (limits[0] + 3) * ONE, now
        else:
            assert now.folds == 0 and now.peak_parked_bytes == 40 * ONE
    assert sums[0].tobytes() == sums[1].tobytes()


def test_a_converted_gradient_is_owned_by_the_buffer_alone(limits: tuple[int, int]) -> None:
    buf = fanin.InputBuffer([fanin.Slot(shape=(N,), dtype="float64")])
    converted(buf, 40)
    assert buf.counters.peak_parked_bytes <= (limits[0] + 1) * ONE and buf.take()[0][0] == 40


@pytest.mark.parametrize("owned", ["converted", "dropped"])
def test_an_owned_gradient_on_the_general_path_counts_before_its_slot_is_rechecked(
    limits: tuple[int, int], owned: str
) -> None:
    """Four slots with one each are below the limit; the fifth, to any of them, is beyond it."""
    buf, held = fanin.InputBuffer([fanin.Slot(dtype="float64") for _ in range(4)]), np.ones(N, "f4")
    for slot in (0, 1, 2, 3, 0):
        assert buf.counters.folds == 0
        buf.add(slot, held if owned == "converted" else made(1)[::-1])
    assert buf.counters.folds == 1


def kept(k: int) -> Any:
    return made(k)


def view_of_kept(k: int) -> Any:
    return made(k)[:]  # the list below keeps the base


@pytest.mark.parametrize("kind", ["arrays", "views", "fortran"])
def test_a_gradient_with_other_references_waits_longer(limits: tuple[int, int], kind: str) -> None:
    keep = [np.full((2, N // 2), float(k), order="F" if kind == "fortran" else "C") for k in range(40)]
    buf = fanin.InputBuffer(1)
    for k, g in enumerate(keep):
        buf.add(0, g[:] if kind == "views" else g)
        assert buf.counters.folds == (0 if k < limits[1] else buf.counters.folds)
    assert buf.counters.folds == 3 and (limits[1] + 1) * ONE == buf.counters.peak_parked_bytes
    assert buf.take()[0][0, 0] == sum(range(40))
    assert all((g == k).all() for k, g in enumerate(keep))


def test_device_and_sparse_gradients_wait_like_referenced_ones(limits: tuple[int, int]) -> None:
    """Arrays of a simulated device, and sparse ones, count against the larger limit, even without other references."""
    with fanin.sim.Machine(devices=1, seed=0) as m:
        buf = fanin.InputBuffer(1)
        for k in range(9):
            buf.add(0, m.array(made(k)))
        assert buf.counters.folds == 0
        for k in range(2):
            buf.add(0, m.array(made(k)))
        assert buf.counters.folds == 1
        assert buf.take()[0].numpy()[0] == sum(range(9)) + 1
    sparse = fanin.InputBuffer(1)
    for _ in range(9):
        sparse.add(0, fanin.Sparse("coo", (np.arange(N // 2)[None], np.ones(N // 2)), (N,)))
    assert sparse.counters.folds == 0
    sparse.clear()


def test_owned_and_referenced_gradients_are_counted_apart(limits: tuple[int, int]) -> None:
    keep = [made(k) for k in range(9)]
    buf = fanin.InputBuffer(2)
    for g in keep:
        buf.add(0, g)
    for _ in range(4):
        buf.add(1, made(1))
    assert buf.counters.folds == 0  # nine held, four of its own
    buf.add(1, made(1))
    assert buf.counters.folds == 1
    assert [s[0] for s in buf.take()] == [36, 5]


@pytest.mark.parametrize("make", [made, lambda k: made(k)[::-1]], ids=["forward", "backward"])
def test_a_gradient_counts_as_owned_once_its_last_other_reference_is_dropped(
    limits: tuple[int, int], make: Any
) -> None:
    buf, held = fanin.InputBuffer(1), [make(k) for k in range(6)]
    for g in held:
        buf.add(0, g)
    assert buf.counters.folds == 0
    del held, g
    for _ in range(2):  # the holders are counted at one of them
        buf.add(0, make(1))
    assert buf.counters.folds == 1


def test_each_of_many_slots_is_rechecked_when_its_next_gradient_arrives(limits: tuple[int, int]) -> None:
    """One gradient a slot cannot be summed; the second is, at once, where the buffer's own are too many."""
    buf = fanin.InputBuffer(20)
    for rounds in range(3):
        for i in range(20):
            g = made(i)
            buf.add(i, g)
        assert buf.counters.peak_parked_bytes <= 22 * ONE, rounds
    assert buf.counters.folds >= 20
    assert [s[0] for s in buf.take()] == [3 * i for i in range(20)]


def test_the_last_gradient_is_rechecked_when_the_next_one_goes_to_another_slot() -> None:
    hooks.auto_budget(4 * ONE, 1000 * ONE)
    try:
        buf = fanin.InputBuffer(20)
        for i in range(20):
            g = made(i)
            buf.add(i, g)
        assert buf.counters.folds == 0
        buf.add(0, g)
        assert buf.counters.folds == 1, "the gradients of the other slots are the buffer's alone, and too many"
    finally:
        hooks.auto_budget()


def test_a_gradient_for_two_slots_is_held_and_never_written(limits: tuple[int, int]) -> None:
    buf = fanin.InputBuffer(2)
    alive = []
    for k in range(30):
        g = made(k)
        alive.append(weakref.ref(g))
        buf.add(0, g)
        buf.add(1, g)
        del g
    one, two = buf.take()
    assert one[0] == two[0] == sum(range(30))
    assert sum(r() is not None for r in alive) == 0


# Memory


def test_memory_goes_back_at_once() -> None:
    """A gradient that the caller dropped is freed when the call that sums it ends, not when the sum is taken."""
    hooks.auto_budget(3 * ONE, 10 * ONE)
    try:
        buf, alive = fanin.InputBuffer(1), 0
        seen: list[Any] = []
        for k in range(50):
            g = made(k)
            seen.append(weakref.ref(g))
            buf.add(0, g)
            del g
            alive = max(alive, sum(r() is not None for r in seen))
        assert alive <= 5, alive
        assert buf.take()[0][0] == sum(range(50))
    finally:
        hooks.auto_budget()


def test_the_first_that_is_the_buffers_alone_is_where_the_sum_is(limits: tuple[int, int]) -> None:
    """A6: the sum allocates no memory. A gradient with other references is not changed."""
    buf = fanin.InputBuffer(1)
    first = made(1)
    address = first.ctypes.data
    buf.add(0, first)
    del first
    for _ in range(19):
        buf.add(0, made(1))
    assert buf.counters.folds == 4 and buf.counters.in_place >= 16
    total = buf.take()[0]
    assert total.ctypes.data == address and (total == 20).all()
    held = made(1)
    buf.add(0, held)
    for _ in range(19):
        buf.add(0, made(1))
    total = buf.take()[0]
    assert (held == 1).all() and (total == 20).all() and total.ctypes.data != held.ctypes.data


def test_one_with_a_weak_reference_is_not_written(limits: tuple[int, int]) -> None:
    buf, first = fanin.InputBuffer(1), made(1)
    seen = weakref.ref(first)
    buf.add(0, first)
    del first
    buf.add(0, made(1))
    was = seen()
    assert was is not None and (was == 1).all()
    for _ in range(10):
        buf.add(0, made(1))
    assert (was == 1).all() and buf.take()[0][0] == 12


def test_one_in_the_pool_is_summed_into_too() -> None:
    buf = fanin.InputBuffer(1)
    for k in range(6):
        buf.add(0, np.full(MIB // 2, float(k)))  # 4 MiB each
    assert buf.counters.in_place == 5 and buf.counters.peak_parked_bytes <= 8 * MIB
    assert buf.take()[0][-1] == 15


def test_memory_that_is_wanting_while_it_is_due_loses_nothing(limits: tuple[int, int]) -> None:
    """Each add counts or raises; a fold that cannot be made now is made later."""
    refused = passed = 0
    for first_held in (False, True):
        for n in range(40):
            buf, held, came = fanin.InputBuffer(1), made(1), 0
            before = hooks.memory()[2]
            for k in range(14):
                g = held if first_held and k == 0 else made(1)
                if k == 4:
                    hooks.fail_at(n, 2)
                try:
                    buf.add(0, g)
                    came += 1
                except MemoryError:
                    refused += 1
            hooks.fail_at(-1)
            passed += hooks.memory()[2] > before
            assert buf.take()[0].tolist() == [float(came)] * N, (first_held, n)
    assert passed > 3, (refused, passed)


# What has been summed early is a slot as any other


def early(n: int = 12, **how: Any) -> Any:
    buf = fanin.InputBuffer(1, **how)
    for k in range(n):
        buf.add(0, made(k), key=k)
    assert buf.counters.folds >= 2
    return buf


def test_the_ledger_counts_gradients_that_were_summed_early(limits: tuple[int, int]) -> None:
    buf = early()
    for key in (0, 3, 11):
        with pytest.raises(ValueError, match=f"key {key}: this key has contributed already"):
            buf.add(0, made(0), key=key)
    with pytest.raises(ValueError, match="key"):
        buf.add(0, made(0))
    buf.add(0, made(12), key=12)
    assert buf.take()[0][0] == sum(range(13))


def test_expect_counts_gradients_that_were_summed_early(limits: tuple[int, int]) -> None:
    buf = fanin.InputBuffer(1)
    buf.expect(0, 13)
    for k in range(12):
        buf.add(0, made(k))
    assert not buf.ready(0)
    with pytest.raises(ValueError, match="12"):
        buf.expect(0, 11)
    buf.add(0, made(12))
    assert buf.ready(0)
    with pytest.raises(ValueError, match="13"):
        buf.add(0, made(0))
    assert buf.take()[0][0] == sum(range(13))
    for k in range(12):
        buf.add(0, made(k))
    with pytest.raises(ValueError, match="12"):
        buf.take()


def test_a_snapshot_of_an_early_sum_does_not_change(limits: tuple[int, int]) -> None:
    buf = early()
    before = buf[0]
    for k in range(12, 30):
        buf.add(0, made(k), key=k)
    assert (before == sum(range(12))).all() and (buf[0] == sum(range(30))).all()
    assert (buf.take()[0] == sum(range(30))).all() and (before == sum(range(12))).all()


@pytest.mark.parametrize(
    "how", ["out", "scale", "writable", "clear", "explain", "dropped", "trace", "other dtype", "fortran", "debug"]
)
def test_every_kind_of_gradient_may_follow_an_early_sum(limits: tuple[int, int], how: str) -> None:
    buf, total = early(), float(sum(range(12)))
    if how == "out":
        out = np.empty(N)
        assert buf.take(out=[out])[0] is out and (out == total).all()
    elif how == "scale":
        assert (buf.take(scale=0.5)[0] == total / 2).all()
    elif how == "writable":
        got = buf.take(writable=True)[0]
        assert got.flags.writeable and (got == total).all()
    elif how == "clear":
        buf.clear()
        assert buf.take() == [None]
    elif how == "explain":
        said = buf.explain(0)
        assert "12 contributions came" in said and "sum of" in said and "in the buffer's own memory" in said
        assert buf.take()[0][0] == total
    elif how == "dropped":
        del buf
        gc.collect()
    elif how == "trace":
        with fanin.trace():
            buf.add(0, made(12), key=12)
        assert buf.take()[0][0] == total + 12
    elif how == "debug":
        with fanin.set_options(debug=True):
            buf.add(0, made(12), key=12)
        assert buf.take()[0][0] == total + 12
    elif how == "other dtype":
        buf.add(0, made(12).astype(np.float32), key=12)
        assert buf.take()[0][0] == total + 12
    else:
        other = fanin.InputBuffer(1)
        for k in range(12):
            other.add(0, np.full((2, N // 2), float(k)))
        other.add(0, np.full((2, N // 2), 12.0, order="F"))
        assert (other.take()[0] == total + 12).all()


def test_a_gradient_beyond_a_gap_waits_whether_or_not_it_is_referenced(limits: tuple[int, int]) -> None:
    buf = fanin.InputBuffer(1)
    for k in range(1, 12):
        buf.add(0, made(k), key=k)
    assert buf.counters.folds == 0
    buf.add(0, made(0), key=0)
    assert buf.counters.folds == 1 and buf.counters.peak_parked_bytes == 12 * ONE
    buf.add(0, made(13), key=13)
    assert buf.take()[0][0] == sum(range(14)) - 12


def test_one_that_was_changed_while_it_waited_is_found_before_it_is_read(limits: tuple[int, int]) -> None:
    buf = fanin.InputBuffer(1)
    first = made(0)
    buf.add(0, first)
    first.resize(4, refcheck=False)
    with pytest.raises(RuntimeError, match="changed after it was added"):
        for _ in range(12):
            buf.add(0, made(1))
        buf.take()


def test_low_precision_is_rounded_once_all_the_same(limits: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    parts = [rng.standard_normal(4 * N).astype(np.float16) for _ in range(40)]
    buf = fanin.InputBuffer(1)
    for p in parts:
        buf.add(0, p.copy())
    assert buf.counters.folds > 3
    assert buf.take()[0].tobytes() == fanin.add_n(parts).tobytes()


# Random programs


def script(rng: np.random.Generator, slots: int) -> list[tuple[Any, ...]]:
    """Adds of gradients that are dropped at once, soon, or never, with other calls in between."""
    keyed = rng.random() < 0.5
    next_key = [0] * slots
    steps: list[tuple[Any, ...]] = []

    def key(slot: int) -> int | None:
        if not keyed:
            return None if rng.random() < 0.99 else 0
        next_key[slot] += 1
        return next_key[slot] - 1 + (0 if rng.random() < 0.9 else int(rng.integers(-2, 3)))

    for _ in range(60):
        what = rng.random()
        if what < 0.8:
            slot = int(rng.integers(slots))
            layout = ["plain"] * 12 + ["view", "fortran", "strided", "float32", "wrong shape"]
            steps.append(
                (
                    "add",
                    slot,
                    str(rng.choice(layout)),
                    key(slot),
                    str(rng.choice(["drop", "hold", "next"])),
                    int(rng.integers(1 << 30)),
                )
            )
        elif what < 0.85:
            steps.append(("many", [int(s) for s in rng.integers(0, slots, 3)], int(rng.integers(1 << 30))))
        elif what < 0.9:
            steps.append(("look", int(rng.integers(slots))))
        elif what < 0.93:
            steps.append(("expect", int(rng.integers(slots)), int(rng.integers(2, 12))))
        elif what < 0.94:
            steps.append(("clear",))
            next_key = [0] * slots
        else:
            steps.append(("take", str(rng.choice(["plain", "scale", "writable", "out"]))))
            next_key = [0] * slots
    return [*steps, ("take", "plain")]


def gradient(layout: str, seed: int) -> Any:
    x = np.random.default_rng(seed).standard_normal((4, 6)) * 8
    if layout == "view":
        return x.reshape(24).reshape(4, 6)
    if layout == "fortran":
        return np.asfortranarray(x)
    if layout == "strided":
        return x[:, ::-1].copy()[:, ::-1]
    if layout == "float32":
        return x.astype(np.float32)
    return x[:2].copy() if layout == "wrong shape" else x


def run(steps: list[tuple[Any, ...]], slots: int, budget: Any) -> tuple[list[Any], Any]:
    buf = fanin.InputBuffer(slots, budget=budget)
    said: list[Any] = []
    kept: list[Any] = []
    held: list[tuple[Any, bytes]] = []
    for name, *rest in steps:
        g = None
        try:
            if name == "add":
                slot, layout, key, held_by, seed = rest
                keys = {} if key is None else {"key": key}
                if held_by == "drop":
                    buf.add(slot, gradient(layout, seed), **keys)
                else:
                    g = gradient(layout, seed)
                    if held_by == "hold":
                        held.append((g, g.tobytes()))
                    buf.add(slot, g, **keys)
            elif name == "many":
                buf.add_many(rest[0], [gradient("plain", rest[1] + i) for i in range(3)])
            elif name == "look":
                kept.append(buf[rest[0]])
            elif name == "expect":
                buf.expect(*rest)
            elif name == "clear":
                buf.clear()
            else:
                how: dict[str, Any] = {"scale": {"scale": 0.5}, "writable": {"writable": True}}.get(rest[0], {})
                if rest[0] == "out":
                    how = {"out": [np.empty((4, 6)) for _ in range(slots)]}
                said.append([None if x is None else (str(x.dtype), x.shape, x.tobytes()) for x in buf.take(**how)])
        except (ValueError, TypeError, RuntimeError, BufferError) as e:
            said.append((name, type(e).__name__, str(e)))
    assert all(g.tobytes() == was for g, was in held), "something that somebody holds was written"
    said.append([None if x is None else x.tobytes() for x in kept])
    return said, buf.counters


def test_no_bit_error_or_snapshot_depends_on_other_references() -> None:
    refused = folds = in_place = 0
    try:
        for seed in range(250):
            rng = np.random.default_rng(seed)
            slots = int(rng.integers(1, 4))
            steps = script(rng, slots)
            one = int(rng.integers(1, 6)) * 192
            hooks.auto_budget(one, int(rng.integers(1, 4)) * one)
            auto, now = run(steps, slots, "auto")
            later, _ = run(steps, slots, math.inf)
            assert auto == later, f"seed {seed}"
            refused += sum(isinstance(s, tuple) for s in auto)
            folds += now.folds
            in_place += now.in_place
    finally:
        hooks.auto_budget()
    assert refused > 100 and folds > 1000 and in_place > 500, (refused, folds, in_place)


@pytest.mark.threads
def test_threads_that_add_to_one_slot_while_it_is_summed() -> None:
    """Larger sums are computed without the interpreter's lock: other threads that use the slot wait."""
    size, each = 40_000, 40
    hooks.auto_budget(2 * 8 * size, 64 * MIB)
    buf = fanin.InputBuffer(1)

    def work(first: int) -> None:
        for k in range(each):
            buf.add(0, np.full(size, 1.0), key=first + 3 * k)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert buf.counters.folds > 10
        assert (buf.take()[0] == 3 * each).all()
    finally:
        hooks.auto_budget()


def test_under_every_schedule_the_automatic_budget_shows_what_the_whole_search_shows() -> None:
    """What is due hangs on the bytes of all slots: so adds to different slots are tried in both orders once they may
    decide.
    """

    def scenario(m: Any) -> Any:
        buf = fanin.InputBuffer(2)

        def produce(slot: int) -> None:
            for k in range(2):
                buf.add(slot, np.full(N, 1.0 + slot), key=k)

        for i in range(2):
            m.spawn(produce, i)
        m.join()
        folds = buf.counters.folds
        return folds, *(float(x[0]) for x in buf.take())

    for most, results in [(9 * ONE, {(0, 2.0, 4.0)}), (2 * ONE, {(0, 2.0, 4.0), (1, 2.0, 4.0)})]:
        hooks.auto_budget(most, 10 * ONE)
        try:
            reduced, whole = fanin.sim.explore(scenario), fanin.sim.explore(scenario, reduce=False)
        finally:
            hooks.auto_budget()
        assert reduced.complete and whole.complete and reduced.runs <= whole.runs
        assert set(reduced.results) == set(whole.results) == results, (most, reduced, whole)
