"""out= of small arrays: the fast path gives the result of the general one, for every overlap in memory."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from kit import hooks
from kit.sample import sizes

pytestmark = pytest.mark.core

SLOTS = 12


def views(store: np.ndarray[Any, Any], size: int, draw: random.Random) -> Callable[[], Any]:
    """A maker of arrays of `size` elements: most of their own, some anywhere in one store, so that they meet."""

    def one() -> Any:
        if draw.random() < 0.6:
            return np.arange(size).astype(store.dtype) + draw.randrange(5)
        at = draw.randrange(0, store.size - size, size) if draw.random() < 0.7 else draw.randrange(store.size - size)
        return store[at : at + size]

    return one


def case(seed: int) -> tuple[list[list[Any]], list[Any], Any]:
    """Contributions of each slot, outs, and the store in which some of them meet."""
    draw = random.Random(seed)
    dtype = np.dtype(draw.choice(["f4", "f8", "f2", "i4", "c8"]))
    size = draw.choice([1, 3, 16])
    store = np.arange(40 * size).astype(dtype)
    one = views(store, size, draw)
    terms = [[one() for _ in range(draw.choice([0, 1, 1, 2, 3, 9]))] for _ in range(SLOTS)]
    outs: list[Any] = [None] * SLOTS
    if draw.random() < 0.7:  # the outs do not meet each other
        places = [store[i * size : (i + 1) * size] for i in draw.sample(range(40), SLOTS)]
    else:
        places = [one() for _ in range(SLOTS)]
    for i in range(SLOTS):
        kind = draw.randrange(4)
        outs[i] = None if kind == 0 else draw.choice(terms[i]) if kind == 1 and terms[i] else places[i]
    return terms, outs, store


def run(seed: int, general: bool) -> Any:
    """What came of one case: the results, the whole memory, what was returned by identity."""
    terms, outs, store = case(seed)
    buf = fanin.InputBuffer(SLOTS, budget=float("inf"))
    for slot, some in enumerate(terms):
        for x in some:
            buf.add(slot, x)
    try:
        if general:
            with fanin.trace():
                sums = buf.take(out=outs)
        else:
            sums = buf.take(out=outs)
    except ValueError as e:
        return str(e).replace(repr(buf), ""), [x.tolist() for some in terms for x in some], store.tolist()
    same = [out is not None and s is out for s, out in zip(sums, outs, strict=True)]
    return (
        [s if s is None else s.tolist() for s in sums],
        same,
        [x.tolist() for some in terms for x in some],
        store.tolist(),
    )


@pytest.mark.parametrize("seeds", sizes(300, 1500))
def test_out_gives_the_result_of_the_general_path_for_every_overlap(seeds: int) -> None:
    outcomes = {"written": 0, "refused": 0}
    for seed in range(seeds):
        short, general = run(seed, False), run(seed, True)
        if len(short) == 3:
            outcomes["refused"] += 1
            assert short[0].split(":", 1)[1] == general[0].split(":", 1)[1], f"seed {seed}"
            assert short[1:] == general[1:], f"seed {seed}"
        else:
            outcomes["written"] += 1
            assert short == general, f"seed {seed}"
    print(outcomes)
    assert min(outcomes.values()) > seeds // 15, outcomes


def test_the_fast_path_runs_unless_an_out_is_still_read() -> None:
    """The two paths differ in memory: the fast path of one slot allocates none."""
    a, b, out = np.ones(8, "f4"), np.ones(8, "f4"), np.empty(8, "f4")
    memory = np.ones(16, "f4")
    buf = fanin.InputBuffer(1)

    def allocations(*terms: Any, to: Any) -> int:
        for x in terms:
            buf.add(0, x)
        before = hooks.memory()[1]
        buf.take(out=[to])
        return hooks.memory()[1] - before

    allocations(a, b, to=out)
    assert allocations(a, b, to=out) == 0
    assert allocations(a, b, to=a) == 0, "in place"
    assert allocations(a, b, to=b) == 0, "into the second"
    assert allocations(a, b, to=None) == 0, "into a new array"
    out_of_place = (a + memory[:8]).tolist()
    assert allocations(a, memory[:8], to=memory[4:12]) > 0
    assert memory.tolist() == [1] * 4 + out_of_place + [1] * 4


@pytest.mark.parametrize(("dtype", "wish"), [("f2", None), (ml_dtypes.bfloat16, None), ("f4", "float64")])
@pytest.mark.parametrize("seeds", sizes(100, 300))
def test_out_of_a_wider_sum_is_what_the_general_path_writes(dtype: Any, wish: str | None, seeds: int) -> None:
    """Key 3 is missing until the take, so the first three are a wide sum and the rest is parked."""
    met = 0
    for seed in range(seeds):
        draw, taken = random.Random(seed), []
        n, scale, size = draw.choice([3, 5, 9, 66, 130]), draw.choice([None, 0.5]), draw.choice([1, 5, 33])
        place = draw.choice([None, *range(n)]) if n < 66 else draw.choice([None, n - 1])
        values = np.random.default_rng(seed).normal(size=(n, size)).astype(dtype)
        for general in (False, True):
            terms = [x.copy() for x in values]
            buf = fanin.InputBuffer([fanin.Slot(dtype=str(values.dtype), accumulate=wish)], budget=0)
            for k in [*range(3), *range(4, n)]:
                buf.add(0, terms[k], key=k)
            out = np.empty(size, dtype) if place is None else terms[place]
            with fanin.trace() if general else contextlib.nullcontext():
                assert buf.take(out=[out], scale=scale)[0] is out
            taken.append([out.tobytes(), *(x.tobytes() for x in terms), buf.counters])
        assert taken[0] == taken[1], seed
        met += place is not None and place != 3
    assert met > seeds // 6


def test_out_of_a_wider_sum_needs_no_memory() -> None:
    out, g = np.empty(16, "f2"), np.full(16, 0.5, "f2")
    buf = fanin.InputBuffer(1, budget=0)
    for n in (3, 150, 150):  # the first of 150 make room in the list
        for k in [0, 1, 2, *range(4, n)]:
            buf.add(0, g, key=k)
        made = hooks.memory()[1]
        buf.take(out=[out])
        assert hooks.memory()[1] == made
        assert out.tolist() == [0.5 * (n - (n > 3))] * 16


@pytest.mark.parametrize("n", [2, 3, 8, 64, 65, 130])
@pytest.mark.parametrize("place", [None, 0, 1, -1])
@pytest.mark.parametrize("dtype", ["f4", "f2", "i8"])
def test_a_sum_of_n_goes_into_one_of_its_terms(n: int, place: int | None, dtype: str) -> None:
    terms = [np.arange(5).astype(dtype) + k % 7 for k in range(n)]
    want = fanin.add_n([x.copy() for x in terms], keys=list(range(n)))
    out = np.empty(5, dtype) if place is None else terms[place]
    buf = fanin.InputBuffer(1, budget=float("inf"))
    for x in terms:
        buf.add(0, x)
    copies = [x.copy() for x in terms]
    (s,) = buf.take(out=[out])
    assert s is out
    assert s.tobytes() == want.tobytes()
    for x, c in zip(terms, copies, strict=True):
        assert x is out or x.tolist() == c.tolist()
    assert fanin.add_n(copies, out=np.empty(5, dtype)).tobytes() == want.tobytes()
    assert fanin.add_n(copies, out=copies[place or 0]).tobytes() == want.tobytes()


@pytest.mark.parametrize("size", [2, 9, 40, 200])
@pytest.mark.parametrize("shift", [-3, -1, 0, 1, 3])
def test_add_n_into_memory_that_its_terms_show_reads_them_first(shift: int, size: int) -> None:
    store = np.arange(3.0 * size + 10)
    terms = [store[4 : 4 + size], np.ones(size), store[4 + size : 4 + 2 * size]]
    want = terms[0] + terms[1] + terms[2]
    out = store[4 + shift : 4 + shift + size]
    assert fanin.add_n(terms, out=out) is out
    np.testing.assert_array_equal(out, want)


def test_the_fast_path_counts_what_the_general_path_counts() -> None:
    for n in (1, 2, 3):
        for place in (None, "fresh", 0, n - 1):
            counted = []
            for general in (False, True):
                xs = [np.ones(4, "f4") for _ in range(n)]
                out = None if place is None else np.empty(4, "f4") if place == "fresh" else xs[place]
                buf = fanin.InputBuffer(1, budget=float("inf"))
                for x in xs:
                    buf.add(0, x)
                if general:
                    with fanin.trace():
                        buf.take(out=[out])
                else:
                    buf.take(out=[out])
                counted.append({k: v for k, v in buf.counters.items() if k != "peak_parked_bytes"})
            if n == 1 and place == 0:  # what is there already is not even read
                assert counted[0]["passes"] == 0
            else:
                assert counted[0] == counted[1], (n, place)


def test_one_contribution_is_copied_into_its_out() -> None:
    x, out = np.arange(4.0), np.zeros(4)
    buf = fanin.InputBuffer(2)
    buf.add(0, x)
    assert buf.take(out=[out, None])[0] is out
    assert out.tolist() == [0, 1, 2, 3]
    buf.add(0, x)
    assert buf.take(out=[x, None])[0] is x
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("out", [np.empty(4, "f8"), np.empty(3, "f4"), np.empty((4, 1), "f4"), np.empty(8, "f4")[::2]])
def test_an_out_of_another_kind_takes_the_general_path(out: Any) -> None:
    x = np.ones(4, "f4")
    buf = fanin.InputBuffer(1, name="grads")
    buf.add(0, x)
    buf.add(0, x)
    if out.shape == (4,):
        (s,) = buf.take(out=[out])
        assert s is out
        assert s.tolist() == [2] * 4
    else:
        with pytest.raises(ValueError, match=r"grads.*slot 0: out= has shape .*, the sum \(4,\)"):
            buf.take(out=[out])
        assert buf.take()[0].tolist() == [2] * 4


def test_a_read_only_out_is_refused_and_nothing_is_lost() -> None:
    x, out = np.ones(4, "f4"), np.zeros(4, "f4")
    out.flags.writeable = False
    buf = fanin.InputBuffer(1)
    buf.add(0, x)
    buf.add(0, x)
    with pytest.raises(BufferError, match="read-only"):
        buf.take(out=[out])
    with pytest.raises(BufferError, match="read-only"):
        fanin.add_n([x, x], out=out)
    assert buf.take()[0].tolist() == [2] * 4
    assert out.tolist() == [0] * 4


def test_many_outs_in_any_order_of_addresses() -> None:
    """More than a handful: they are sorted by digits. Both orders of slots, and one that is given twice."""
    n = 5000
    store = np.zeros((n, 3), "f4")
    order = list(range(n))
    random.Random(5).shuffle(order)
    terms = np.arange(3 * n, dtype="f4").reshape(n, 3)
    for places in (order, sorted(order), sorted(order, reverse=True)):
        buf = fanin.InputBuffer(n, budget=float("inf"))
        outs = [store[i] for i in places]
        for t in (terms, terms):
            buf.add_many(range(n), list(t))
        made = hooks.memory()[1]
        buf.take(out=outs)
        assert hooks.memory()[1] - made < 10, "the general path makes two allocations for each slot"
        assert (np.stack(outs) == 2 * terms).all()
    buf.add_many(range(n), list(terms))
    outs[7] = outs[4001]
    with pytest.raises(ValueError, match=r"out= of slots 7 and 4001 may share memory"):
        buf.take(out=outs)
    assert (np.stack(buf.take()) == terms).all()


def test_sums_that_are_made_without_the_interpreter_are_right_while_others_run() -> None:
    """Of 64 KiB to 1 MiB: at the same time another thread adds to the next pass and changes the lists."""
    size = 100_000
    xs = [np.full(size, k, "f4") for k in range(4)]
    buf = fanin.InputBuffer(1, budget=float("inf"))
    stop = threading.Event()
    lists = [list(xs)]

    def other() -> None:
        while not stop.is_set():
            lists[0].pop()
            lists[0] = list(xs)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(60):
            for x in xs:
                buf.add(0, x)
            assert buf.take()[0][::5000].tolist() == [6] * 20
            assert fanin.add_n([*xs])[::5000].tolist() == [6] * 20
            s = fanin.add_n(lists[0])
            assert s[0] in (3, 6)
    finally:
        stop.set()
        thread.join()


def test_a_finalizer_may_add_to_any_slot_while_a_take_drops_what_it_summed() -> None:
    buf = fanin.InputBuffer(3, budget=float("inf"))
    heard: list[Any] = []

    class Owner:
        def __init__(self, slot: int) -> None:
            self.data = np.full(2, 10.0)
            self.slot = slot

        @property
        def __array_interface__(self) -> dict[str, Any]:
            return dict(self.data.__array_interface__)

        def __del__(self) -> None:
            try:
                buf.add(self.slot, np.array([1.0, 1.0]))
                heard.append(self.slot)
            except BaseException as e:
                heard.append(e)

    for slot in range(3):
        for _ in range(2):
            buf.add(slot, np.asarray(Owner(2 - slot)))
    assert [x.tolist() for x in buf.take()] == [[20, 20]] * 3
    assert sorted(heard, key=str) == [0, 0, 1, 1, 2, 2]
    assert [x.tolist() for x in buf.take()] == [[2, 2]] * 3


def test_a_gradient_that_changed_while_parked_is_named() -> None:
    x = np.ones(4)
    buf = fanin.InputBuffer(2, name="grads")
    buf.add(1, np.ones(4), key=0)
    buf.add(1, x, key=7)
    x.resize((2,), refcheck=False)
    with pytest.raises(
        RuntimeError, match="grads: slot 1: the gradient added with key 7 was changed after it was added"
    ):
        buf.take()


def test_a_gradient_that_was_changed_keeps_none_of_those_before_it_alive() -> None:
    gradients = [np.ones(8) for _ in range(3)]
    before = [sys.getrefcount(gradients[i]) for i in range(3)]
    buf = fanin.InputBuffer(1, budget=math.inf)
    buf.add_many([0, 0, 0], gradients)
    gradients[1].resize(16, refcheck=False)
    buf.add(0, np.ones(8)[::-1])  # so the sum is the general path's, which makes values of the others
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was changed after it was added"):
            buf.take()
    buf.clear()
    assert [sys.getrefcount(gradients[i]) for i in range(3)] == before


@pytest.mark.parametrize("general", [False, True], ids=["short", "general"])
def test_an_out_that_a_later_slot_still_reads_is_written_after_it(general: bool) -> None:
    x, y, z = np.array([1.0, 2.0]), np.array([10.0, 20.0]), np.zeros(2)
    buf = fanin.InputBuffer(2)
    buf.add(0, y)
    buf.add(1, x)
    if general:
        with fanin.trace():
            buf.take(out=[x, z])
    else:
        buf.take(out=[x, z])
    assert (x.tolist(), z.tolist()) == ([10, 20], [1, 2])


@pytest.mark.parametrize("part", ["dense", "values", "indices"])
def test_an_out_over_a_gradient_that_is_handed_through_from_another_slot_spares_it(part: str) -> None:
    memory = np.arange(3, dtype=np.int64)
    rows, values = (memory, np.ones(3, np.int64)) if part == "indices" else (np.arange(3), memory)
    x = memory if part == "dense" else fanin.Sparse("coo", (rows[None, :], values), (3,))
    buf = fanin.InputBuffer(2, stats=True)
    buf.add(0, x)
    buf.add(1, np.full(3, 7))
    one, two = buf.take(out=[None, memory])
    assert two is memory and memory.tolist() == [7, 7, 7]
    spared = one if part == "dense" else one.parts[part == "values"]
    assert spared.ravel().tolist() == [0, 1, 2]


def test_an_out_in_the_reach_of_rows_with_gaps_is_written_after_they_are_read() -> None:
    memory = np.arange(16, dtype="f8").reshape(4, 4)
    rows, other = memory[:, :2], np.ones((4, 4))[:, :2]
    expected = rows + other
    buf = fanin.InputBuffer(2)
    for x in (np.full(2, 100.0), np.full(2, 200.0)):
        buf.add(0, x)
    for x in (rows, other):
        buf.add(1, x)
    out = memory[3, :2]
    sums = buf.take(out=[out, None])
    assert out.tolist() == [300.0, 300.0]
    assert sums[1].tolist() == expected.tolist()
