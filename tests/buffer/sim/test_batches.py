"""add_many: one call for many gradients, all of them or none."""

from __future__ import annotations

import gc
import math
import textwrap
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, explore
from kit import hooks
from kit.prepared import run_prepared

pytestmark = pytest.mark.core


class Money:
    def __init__(self, n: int) -> None:
        self.n = n

    def __add__(self, other: Any) -> Money:
        return Money(self.n + other.n)


def taken(buf: fanin.InputBuffer) -> list[Any]:
    return [x if x is None else x.tolist() for x in buf.take()]


def pair(budget: Any = None) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float32"), fanin.Slot()], budget=budget, name="grads")


X, Y = np.array([1, 2], np.float32), np.array([10, 20], np.float32)


@pytest.mark.parametrize("budget", [0, 8, None])
def test_a_batch_adds_as_add_does(budget: Any) -> None:
    batches: list[tuple[list[int], list[Any], Any]] = [
        ([0, 1, 0], [X, Y, Y], None),
        ([0, 0, 0], [X, Y, X], [2, 0, 1]),
        ([1, 0, 1], [X, None, Y], [0, 0, 1]),
        ([1, 0], [Money(3), X[::-1]], None),
        ([0, 1], [np.float64([[1, 2], [3, 4]]), 3], None),
        ([], [], None),
    ]
    for slots, gradients, keys in batches:
        one, many = pair(budget), pair(budget)
        for i, g in enumerate(gradients):
            one.add(slots[i], g, key=None if keys is None else keys[i])
        assert many.add_many(slots, gradients, keys=keys) is None
        a, b = one.take(), many.take()
        for p, q in zip(a, b, strict=True):
            if isinstance(p, Money):
                assert p.n == q.n
            else:
                np.testing.assert_array_equal(p, q)
        assert one.counters.adds == many.counters.adds == len(gradients)


BAD: list[tuple[str, list[Any], list[Any], dict[str, Any], type[Exception], str]] = [
    ("shape", [1, 0], [X, np.ones(3, np.float32)], {}, ValueError, "slot 0: expected a gradient of shape (2,)"),
    ("dtype", [1, 0], [X, X * 1j], {}, ValueError, "complex"),
    ("slot", [0, 2], [X, Y], {}, IndexError, "expected a slot from 0 to 1, got 2"),
    ("negative slot", [0, -1], [X, Y], {}, IndexError, "slot: expected a non-negative integer, got -1"),
    ("no array", [0, 1], [X, "x"], {}, TypeError, "a str is no array"),
    ("key twice", [0, 0], [X, Y], {"keys": [4, 4]}, ValueError, "key 4"),
    ("keys for some", [0, 0], [X, Y], {"keys": [0, None]}, ValueError, "with keys"),
    ("negative key", [0, 0], [X, Y], {"keys": [0, -3]}, ValueError, "expected a non-negative integer, got -3"),
    ("lengths", [0], [X, Y], {}, ValueError, "got 1 slot and 2 gradients"),
    ("lengths of keys", [0, 1], [X, Y], {"keys": [0]}, ValueError, "got 2 slots and 1 key"),
    ("a bare array", [0, 1], X, {}, TypeError, "give [x, ..]"),
    ("no sequence", 0, [X], {}, TypeError, "slots: expected a sequence, got an int"),
    ("stream", [0], [X], {"stream": 3.5}, TypeError, "expected a stream"),
    ("name", [0], [X], {"key": 1}, TypeError, "has no argument 'key'"),
]


@pytest.mark.parametrize(
    ("slots", "gradients", "options", "kind", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "items"])
def test_one_refused_gradient_refuses_the_whole_batch(
    plain: bool, slots: Any, gradients: Any, options: Any, kind: Any, words: str
) -> None:
    buf = pair()
    buf.add(1, X, key=7)
    if not plain:
        buf.explain(1)
    before, explained = buf.counters.adds, buf.explain(1)
    if plain:
        buf = pair()
        buf.add(1, X, key=7)
        if "keys" not in options and kind is ValueError and len(slots) == len(gradients) and slots[0] == 1:
            slots = [0, *slots[1:]]  # slot 1 has keys
    with pytest.raises(kind) as caught:
        buf.add_many(slots, gradients, **options)
    assert words in str(caught.value)
    assert buf.counters.adds == before and buf.explain(1) == explained
    assert taken(buf) == [None, [1, 2]]


def test_references_to_refused_gradients_are_dropped() -> None:
    buf = pair()
    for extra in ([np.ones(3)], [Money(1), np.ones(3)]):
        mine = [X.copy(), Y.copy()]
        gc.collect()
        blocks = hooks.memory()[0]
        with pytest.raises(ValueError, match="shape"):
            buf.add_many([0, 0, *([1] if len(extra) > 1 else []), 0], [*mine, *extra])
        gc.collect()
        assert hooks.memory()[0] == blocks
        mine[0].resize(4, refcheck=True)  # no other reference exists
        assert taken(buf) == [None, None]


def test_expect_counts_the_whole_batch() -> None:
    buf = pair()
    buf.expect(0, 2)
    with pytest.raises(ValueError, match="A16"):
        buf.add_many([0, 0, 0], [X, X, X])
    assert not buf.ready(0)
    buf.add_many([0, 0], [X, X])
    assert buf.ready(0)
    assert taken(buf)[0] == [2, 4]


def test_a_failed_allocation_adds_no_gradient_of_the_batch() -> None:
    for n in range(200):
        buf = pair()
        buf.add(0, X, copy=True)
        buf.explain(0)  # on the general path from here on
        gc.collect()
        blocks = hooks.memory()[0]
        hooks.fail_at(n, 1)
        try:
            buf.add_many([0, 1, 0], [X, Money(1), X * 2], copy=True)
            done = True
        except MemoryError:
            done = False
            assert hooks.memory()[0] == blocks
        finally:
            hooks.fail_at(-1)
        assert buf.take()[0].tolist() == ([4, 8] if done else [1, 2])
        if done:
            assert n > 5
            break
    else:
        raise AssertionError("it never succeeded")


@pytest.mark.parametrize("seed", range(4))
def test_on_streams_it_waits_as_add_does(seed: int) -> None:
    counted = []
    for many in (False, True):
        with Machine(2, seed=seed) as m:
            c, p = m.stream(), m.stream()
            buf = fanin.InputBuffer(2, stream=c)
            made = []
            for k in range(4):
                g = m.empty(3)
                m.launch(p, lambda v, k=k: v.fill(k + 1), writes=[g], name="produce")
                made.append(g)
            slots = [0, 1, 0, 1]
            if many:
                buf.add_many(slots, made, stream=p)
            else:
                for s, g in zip(slots, made, strict=True):
                    buf.add(s, g, stream=p)
            sums = buf.take()
            m.synchronize()
            assert [x.numpy().tolist() for x in sums] == [[4.0] * 3, [6.0] * 3]
            counted.append((buf.counters.waits + buf.counters.waits_elided, buf.counters.folds))
    assert counted[0] == counted[1]


@pytest.mark.threads
def test_takes_and_batches_do_not_deadlock() -> None:
    buf = fanin.InputBuffer(3)
    one = np.ones(2)
    rounds, total = 400, [0.0]
    stop = threading.Event()

    def add(order: list[int], **options: Any) -> None:
        for _ in range(rounds):
            buf.add_many(order, [one] * len(order), **options)

    def take() -> None:
        while not stop.is_set():
            total[0] += sum(float(x[0]) for x in buf.take() if x is not None)

    adders = [
        threading.Thread(target=add, args=([2, 1, 0],), kwargs={"copy": True}),
        threading.Thread(target=add, args=([0, 2, 1, 1],)),
    ]
    taker = threading.Thread(target=take)
    for t in (*adders, taker):
        t.start()
    for t in adders:
        t.join()
    stop.set()
    taker.join()
    assert total[0] + sum(float(x[0]) for x in buf.take() if x is not None) == rounds * 7


def test_ten_to_the_five_slots_take_no_memory_once_they_have_it() -> None:
    n = 100_000
    buf = fanin.InputBuffer(n)
    slots, arrays = list(range(n)), [np.ones(4, np.float32) for _ in range(n)]
    for _ in range(2):
        buf.add_many(slots, arrays)
        buf.take()
    made = hooks.memory()[1]
    for _ in range(2):
        buf.add_many(slots, arrays)
        buf.add_many(slots, arrays)
        out = buf.take()
    assert out[-1].tolist() == [2, 2, 2, 2]
    assert hooks.memory()[1] == made


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="memory is counted in development builds alone: FANIN_DEV=1")
def test_a_small_pass_takes_no_memory_of_the_core() -> None:
    # In a process of its own: buffers of other sizes, dropped before, may have taken the places of those that are kept.
    code = """
        import numpy as np, fanin
        from fanin import _core

        def life():
            buf = fanin.InputBuffer(2)
            for k in range(3):
                buf.add(0, np.ones(2), key=k)
            buf.add(1, np.ones(2))
            return buf.take()

        life()
        made = _core._test_memory()[1]
        for _ in range(10):
            assert life()[0].tolist() == [3, 3]
        assert _core._test_memory()[1] == made
    """
    run_prepared(textwrap.dedent(code))


def test_a_reused_buffer_keeps_no_gradient() -> None:
    for turn in range(20):
        old = fanin.InputBuffer(1)
        ref = weakref.ref(old)
        old.expect(0, 1)
        old.add(0, X)
        if turn % 2:
            old.explain(0)
        del old
        assert ref() is None
        new = fanin.InputBuffer(1)
        assert ref() is None and new.name == "InputBuffer" and set(new.counters.values()) == {0}
        with pytest.raises(ValueError, match="expect"):
            new.ready(0)
        assert new.take() == [None]


class Evil:
    """An index that changes the lists while it is read."""

    def __init__(self, *lists: list[Any], value: int = 0) -> None:
        self.lists, self.value = lists, value

    def __index__(self) -> int:
        for x in self.lists:
            x.clear()
        return self.value


def test_lists_that_change_during_a_batch_are_read_as_they_were() -> None:
    buf = fanin.InputBuffer(2, budget=1000)
    slots, grads = [0] * 200, [np.ones(16) for _ in range(200)]
    g = np.ones(16)
    keep = weakref.ref(g, lambda _: slots.clear())
    buf.add(0, g)
    del g
    buf.add_many(slots, grads)
    assert buf.take()[0][0] == 201
    assert keep() is None
    grads = [np.ones(3)] * 50
    buf = fanin.InputBuffer(2)
    buf.add_many([Evil(grads)] * 50, grads)
    assert buf.take()[0][0] == 50
    mine: list[Any] = []
    mine.append(Evil(mine, value=10**30))
    with pytest.raises((IndexError, ValueError, OverflowError)):
        buf.add_many(mine, [np.ones(3)])


def test_a_refused_batch_leaves_no_shape_or_dtype_in_its_slots() -> None:
    buf = fanin.InputBuffer(2, stats=True)
    buf.add(0, np.ones(7))
    buf.take()
    buf.add(1, np.ones(2))
    with pytest.raises(ValueError, match="shape"):
        buf.add_many([0, 1], [np.ones(3), np.ones(9)])
    assert buf.stats(0).count == 7
    buf.take()
    buf.add(0, None)
    buf.add(1, np.ones(2))
    with pytest.raises(ValueError, match="shape"):
        buf.add_many([0, 1], [np.ones(3), np.ones(9)])
    buf.add(0, np.ones(4))
    buf = fanin.InputBuffer(2)
    buf.add(0, 1)
    buf.add(1, np.ones(2))
    with pytest.raises(ValueError, match="shape"):
        buf.add_many([0, 1], [1000, np.ones(9)])
    buf.add(0, np.int8(3))
    assert buf.take()[0] == 4


def changed(how: Any) -> Any:
    a = np.ones(4096)
    buf = fanin.InputBuffer(1, name="g")
    buf.add(0, a)
    buf.add(0, np.ones(4096))
    how(a)
    return buf, a


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "how",
    [
        lambda a: setattr(a, "dtype", np.int8),
        lambda a: setattr(a, "shape", (64, 64)),
        lambda a: a.resize(16, refcheck=False),
        lambda a: setattr(a, "strides", (0,)),
    ],
    ids=["dtype", "shape", "resize", "strides"],
)
def test_an_array_that_changes_during_a_batch_is_found(how: Any) -> None:
    buf, a = changed(how)
    for call in (buf.take, lambda: buf[0], lambda: buf.take(scale=2.0), lambda: buf.explain(0)):
        with pytest.raises(RuntimeError, match="changed after it was added"):
            call()
    buf.clear()
    assert buf.take() == [None]
    assert a.size


@pytest.mark.parametrize(
    ("step", "slots", "beside"),
    [
        *(
            (1, slots, beside)
            for slots in ((0, 0), (0, 1, 0))
            for beside in ("take", "take out", "take out and an add")
        ),
        *((2, (0, 0), beside) for beside in ("take", "take out")),
    ],
)
def test_a_batch_with_two_for_one_slot_and_a_take_beside_it_end_in_every_order(
    step: int, slots: tuple[int, ...], beside: str
) -> None:
    """Each waited for the other once: the batch, in its slot for the first of the two, for the take to be over; the
    take for the slot.
    """

    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer(1 + max(slots), budget=math.inf)
        out = [np.zeros(2, np.float32) for _ in range(len(buf))]
        totals = [0.0]

        def count(sums: list[Any]) -> None:
            totals[0] += sum(float(x[0]) for x in sums if x is not None)

        parts = [np.full(2 * step, 10.0**k, np.float32)[::step] for k in range(len(slots))]
        m.spawn(buf.add_many, list(slots), parts)
        m.spawn(lambda: count(buf.take(out=out) if "out" in beside else buf.take()))
        if "add" in beside:
            m.spawn(buf.add, 0, np.full(2, 5e3, np.float32))
        m.join()
        early.add(totals[0])
        count(buf.take())
        assert totals[0] == sum(10.0**k for k in range(len(slots))) + (5e3 if "add" in beside else 0)

    early: set[float] = set()
    report = explore(scenario)
    assert report.ok and report.complete, str(report)
    assert len(early) >= 2, "the take came before the batch and behind it"


class Counted(Money):
    """Money that is not worth adding from ten on; `sums`: those that were made."""

    sums: list[weakref.ref[Counted]]

    def __add__(self, other: Any) -> Counted:
        if self.n >= 10:
            raise ValueError("too much")
        made = Counted(self.n + other.n)
        self.sums.append(weakref.ref(made))
        return made


def test_a_batch_that_is_undone_drops_its_attempted_sums() -> None:
    Counted.sums = []
    buf = fanin.InputBuffer([fanin.Slot(), fanin.Slot()], budget=0)
    buf.add_many([0, 1], [Counted(1), Counted(10)])
    with pytest.raises(ValueError, match="too much"):
        buf.add_many([0, 1], [Counted(2), Counted(20)])
    gc.collect()
    assert len(Counted.sums) == 1 and Counted.sums[0]() is None
    one, two = buf.take()
    assert (one.n, two.n) == (1, 10)


@pytest.mark.parametrize("slots", [[0], [0, 0], [0, 1], [1, 0, 0]])
def test_a_batch_whose_sum_raises_leaves_each_slot_as_it_was(slots: list[int]) -> None:
    """The sums in slot 0 raise, those in slot 1 do not."""
    buf = fanin.InputBuffer(2, budget=0)
    buf.add_many([0, 1], [Counted(10), Counted(1)])
    for _ in range(2):
        with pytest.raises(ValueError, match="too much"):
            buf.add_many(slots, [Counted(2) for _ in slots])
    assert [x.n for x in buf.take()] == [10, 1]
