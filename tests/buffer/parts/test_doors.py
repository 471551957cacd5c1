"""Parked gradients may be memory and objects of other code: a change to them before the take ends in an error that
names the gradient, never in a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Slot, Sparse, sim

pytestmark = pytest.mark.core

N = 3000


def shrunk(a: Any) -> None:
    """Its memory goes elsewhere, or back: what was parked lies there no longer."""
    a.resize(5, refcheck=False)


def plain() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, a


def strided() -> tuple[Any, Any]:
    a = np.ones(2 * N)
    return a, a[::2]


def backwards() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, a[::-1]


def view() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, a[:]


def by_memoryview() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, np.asarray(memoryview(a))


def fortran() -> tuple[Any, Any]:
    a = np.ones((N // 10, 10), order="F")
    return a, a


def converted() -> tuple[Any, Any]:
    a = np.ones(N, np.float32)
    return a, a


def coo_values() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, Sparse("coo", (np.arange(N).reshape(1, N), a), (N,))


def coo_indices() -> tuple[Any, Any]:
    a = np.zeros((1, N), np.int64)
    return a, Sparse("coo", (a, np.ones(N)), (N,))


def csr_pointers() -> tuple[Any, Any]:
    a = np.arange(N + 1)
    return a, Sparse("csr", (a, np.zeros(N, np.int64), np.ones(N)), (N, 1))


WAYS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "take of two": lambda b, s: (b.add(0, np.ones(s)), b.take()),
    "take(out=)": lambda b, s: b.take(out=[np.empty(s)]),
    "take(out=) of two": lambda b, s: (b.add(0, np.ones(s)), b.take(out=[np.empty(s)])),
    "take(scale=)": lambda b, s: b.take(scale=2.0),
    "take(writable=True)": lambda b, s: b.take(writable=True),
    "snapshot": lambda b, s: (b.add(0, np.ones(s)), b[0]),
    "add": lambda b, s: (b.add(0, np.ones(s)), b.take()),
    "add_many": lambda b, s: (b.add_many([0], [np.ones(s)]), b.take()),
}


def elements(result: Any) -> Any:
    """Of what one of the ways returned: the bytes of the sum."""
    while isinstance(result, tuple | list):
        result = result[-1]
    return [np.asarray(x).tobytes() for x in (result.parts if isinstance(result, Sparse) else [result])]


MADE: list[Callable[[], tuple[Any, Any]]] = [
    plain,
    strided,
    view,
    by_memoryview,
    fortran,
    converted,
    coo_values,
    coo_indices,
    csr_pointers,
]


@pytest.mark.parametrize("made", MADE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_memory_that_was_resized_while_it_was_parked_is_not_read(made: Callable[[], tuple[Any, Any]], way: str) -> None:
    for stats, budget, copy in itertools.product((False, True), (0, None), (False, True)):
        owner, gradient = made()
        shape = tuple(gradient.shape)
        buf = fanin.InputBuffer([Slot(name="w1")], stats=stats, budget=budget, name="grads")
        buf.add(0, gradient, copy=copy)
        shrunk(owner)
        if copy:
            untouched = fanin.InputBuffer(1, stats=stats, budget=budget)
            untouched.add(0, made()[1])
            assert elements(WAYS[way](buf, shape)) == elements(WAYS[way](untouched, shape))
            continue
        with pytest.raises(
            RuntimeError,
            match=r"^grads: slot 0 \(w1\): a gradient added without a key was changed after it was added .*copy=True",
        ):
            WAYS[way](buf, shape)
        buf.clear()
        buf.add(0, np.ones(3))
        assert buf.take()[0].tolist() == [1, 1, 1]


def test_the_only_gradient_of_a_slot_with_statistics_is_checked_before_it_is_read() -> None:
    for made in MADE:
        owner, gradient = made()
        buf = fanin.InputBuffer(1, stats=True, name="grads")
        buf.add(0, gradient, key=5)
        shrunk(owner)
        for take in (lambda buf=buf: buf.take(), lambda buf=buf: buf.take(slot=0)):
            with pytest.raises(RuntimeError, match=r"^grads: slot 0: the gradient added with key 5 was changed"):
                take()


@pytest.mark.parametrize("donate", [False, True])
def test_the_key_of_a_gradient_that_was_changed_is_named(donate: bool) -> None:
    for sink in ("plain", "stats", "exact", "debug"):
        with fanin.set_options(debug=sink == "debug"):
            buf = fanin.InputBuffer(
                2, stats=sink == "stats", accumulate="exact" if sink == "exact" else None, name="grads"
            )
            a = np.ones(N)
            buf.add(1, np.ones(N), key=0)
            buf.add(1, a, key=7, donate=donate)
            shrunk(a)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"^grads: slot 1: the gradient added with key 7 was changed"):
                    buf.take()
            buf.clear()


def test_memory_that_an_object_of_another_slot_moves_during_the_take_is_not_read() -> None:
    """combine is others' code: it may resize what a later slot, or out=, is about to read or write."""
    moved: list[Any] = []

    def combine(old: Any, new: Any) -> Any:
        for a in moved:
            shrunk(a)
        moved.clear()
        return old + new

    for stats in (False, True):
        for what in ("term", "only term", "out"):
            buf = fanin.InputBuffer([Slot(combine=combine), Slot()], stats=stats, budget=float("inf"))
            a, out = np.ones(N), np.empty(N)
            buf.add(0, "x")
            buf.add(0, "y")
            buf.add(1, a)
            if what != "only term":
                buf.add(1, np.ones(N))
            moved.append(out if what == "out" else a)
            with pytest.raises(RuntimeError, match=r"slot 1: .*was changed"):
                buf.take(out=[None, out])
            assert not moved


def test_an_empty_or_hand_through_gradient_that_was_resized_is_no_error() -> None:
    for _ in range(2):
        a, b = np.ones(N), np.ones((0, 3))
        buf = fanin.InputBuffer(2)
        buf.add(0, a)
        buf.add(1, b)
        buf.add(1, np.ones((0, 3)))
        shrunk(a)
        one, two = buf.take()
        assert one is a  # A14: the same object, with its current content
        assert two.shape == (0, 3)


# ---------------------------------------------------------------- sparse gradients whose parts are not what they should
# be (16)


def sparse_parts(format: str) -> tuple[list[Any], tuple[int, ...]]:
    if format == "coo":
        return [np.array([[0, 1]]), np.ones(2)], (4,)
    values = np.ones((3, 1, 1)) if format in ("bsr", "bsc") else np.ones(3)
    return [np.arange(4), np.arange(3), values], (3, 3)


WRONG: dict[str, Any] = {
    "None": None,
    "int": 1,
    "list": [1, 2, 3],
    "str": "x",
    "bytes": b"xyz",
    "objects": np.array([object()] * 3),
    "masked": np.ma.ones(3),
    "0-d": np.array(1.0),
    "Zero": fanin.Zero((3,), "int32"),
    "object": object(),
    "memoryview": memoryview(b"abcd"),
    "strings": np.array(["a"] * 3),
    "long double": np.zeros(3, "g"),
    "4 axes": np.zeros((2, 3, 4, 5)),
    "Sparse": Sparse("coo", (np.array([[0]]), np.ones(1)), (3,)),
    "huge": np.broadcast_to(np.int64(2**62), (3,)),
    "type": type,
    "function": np.ones,
    "struct": np.zeros(3, [("a", "i4")]),
    "dates": np.zeros(3, "M8[s]"),
    "foreign": np.zeros(3, np.dtype("i4").newbyteorder()),
    "int8": np.zeros(3, np.int8),
    "none": np.zeros(0, np.int64),
    "negative": np.full(4, -1),
    "short": np.zeros(1, np.int64),
}


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_part_of_a_sparse_gradient_that_is_no_part_is_an_error_that_names_the_slot(format: str) -> None:
    refused = taken = 0
    good, shape = sparse_parts(format)
    for at, (_, wrong) in itertools.product(range(len(good)), WRONG.items()):
        parts = [*good[:at], wrong, *good[at + 1 :]]
        buf = fanin.InputBuffer([Slot(name="w1")], name="grads")
        try:
            buf.add(0, Sparse(format, tuple(parts), shape))
            buf.add(0, Sparse(format, tuple(good), shape))
            buf.take()
            taken += 1
        except (TypeError, ValueError, BufferError) as e:
            assert str(e).startswith("grads: slot 0 (w1): "), e
            refused += 1
    assert refused >= 20 * len(good)
    assert taken or format not in ("csr", "csc")  # values of int8, and the like
    buf = fanin.InputBuffer(1)
    buf.add(0, Sparse(format, tuple(good), shape))
    assert isinstance(buf.take()[0], Sparse)


# ---------------------------------------------------------------- results that their library refuses (19)


class Space:
    """A library by the array API standard, whose `from_dlpack` fails when a test requests it."""

    __name__ = "space_of_test_doors"

    def __init__(self) -> None:
        self.calls = 0
        self.fails: dict[int, type[BaseException]] = {}
        self.seen: list[Any] = []
        self.during: Callable[[], None] = lambda: None

    def from_dlpack(self, x: Any) -> Any:
        self.calls += 1
        self.during()
        if self.calls in self.fails:
            self.seen.append(np.from_dlpack(x))  # the library keeps a reference
            raise self.fails[self.calls]("no room at export")
        return Foreign(np.from_dlpack(x))


space = Space()


class Foreign:
    def __init__(self, x: Any) -> None:
        self.x = np.asarray(x, np.float64)

    def __array_namespace__(self, **_: Any) -> Any:
        return space

    def __dlpack__(self, **how: Any) -> Any:
        how.pop("stream", None)
        if np.lib.NumpyVersion(np.__version__) < "2.1.0":
            how.pop("max_version", None)
        return self.x.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


TAKES: dict[str, Callable[[fanin.InputBuffer, list[Any]], Any]] = {
    "take()": lambda b, o: b.take(),
    "scale": lambda b, o: b.take(scale=2.0),
    "writable": lambda b, o: b.take(writable=True),
    "out of one": lambda b, o: b.take(out=[None, o[1], None, None]),
    "out, its own term": lambda b, o: b.take(out=[None, o[0], None, None]),
    "all": lambda b, o: b.take(out=[None, o[1], None, None], scale=2.0, writable=True),
}


def four_slots(budget: Any, stats: bool, keyed: bool) -> tuple[fanin.InputBuffer, list[Any]]:
    """Sums that are exported, one into out=, one handed through, and one of an object; what may become out=."""
    buf = fanin.InputBuffer(4, budget=budget, stats=stats)
    own = np.full(5, 1.0)
    for i, x in enumerate([np.arange(5.0), np.full(5, 0.5)]):
        buf.add(0, Foreign(x), key=i if keyed else None)
        buf.add(2, Foreign(x), key=i if keyed else None, copy=True)
    buf.add(1, own, key=0 if keyed else None)
    buf.add(1, np.full(5, 2.0), key=1 if keyed else None)
    buf.add(3, Foreign(np.ones(5)), key=3 if keyed else None, copy=True)
    return buf, [own, np.empty(5)]


def shown(sums: list[Any]) -> list[Any]:
    return [getattr(s, "x", s).tolist() for s in sums]


@pytest.mark.rule("A6")
@pytest.mark.parametrize("again", ["target", "add", "donated"])
def test_a_sum_that_a_library_refused_but_references_is_not_written_again(again: str) -> None:
    donate = again == "donated"
    buf = fanin.InputBuffer([fanin.Slot(shape=(5,), dtype="float64")], budget=0)
    for x in (np.arange(5.0), np.ones(5)):
        buf.add(0, Foreign(x), donate=donate)
    space.calls, space.fails, space.seen = 0, {1: RuntimeError}, []
    with pytest.raises(RuntimeError, match="no room at export"):
        buf.take(scale=1.0 if donate else None)
    kept = space.seen[0].copy()
    if again == "target":
        with buf.target(0) as out:
            assert out.tolist() == [0] * 5, "zeros are lent: somebody has seen the sum"
            out += 1
    else:
        buf.add(0, np.ones(5))
    space.fails = {}
    assert shown(buf.take()) == [(np.arange(5) + 2).tolist()]
    assert space.seen[0].tolist() == kept.tolist()


@pytest.mark.parametrize("way", TAKES)
def test_a_result_that_its_library_refuses_loses_no_sum(way: str) -> None:
    faults = 0
    for budget, stats, keyed in itertools.product((0, None), (False, True), (False, True)):
        space.fails.clear()
        space.calls = 0
        buf, others = four_slots(budget, stats, keyed)
        before = space.calls
        want = shown(TAKES[way](buf, others))
        exports = space.calls - before
        assert exports >= 3
        for at, error in itertools.product(range(1, exports + 1), (RuntimeError, MemoryError, KeyboardInterrupt)):
            buf, others = four_slots(budget, stats, keyed)
            kept = [a.copy() for a in others]
            space.calls, space.fails = 0, {at: error}
            with pytest.raises(error, match="no room at export"):
                TAKES[way](buf, others)
            space.fails = {}
            seen = [a.copy() for a in space.seen]
            for a, b in zip(others[:1], kept[:1], strict=True):
                assert np.array_equal(a, b)  # no out was written
            buf.add(1, np.zeros(5), key=2 if keyed else None)
            buf.add(0, np.zeros(5), key=2 if keyed else None)
            assert shown(TAKES[way](buf, others)) == want
            for a, b in zip(space.seen, seen, strict=True):
                assert np.array_equal(a, b)  # no memory was written to which another reference exists
            assert buf.take() == [None] * 4
            space.seen.clear()
            faults += 1
    assert faults >= 8 * 3 * 3


def test_a_result_of_one_slot_that_its_library_refuses_loses_nothing() -> None:
    for how in ({}, {"scale": 1.0}, {"writable": True}):
        buf, _ = four_slots(None, False, True)
        space.calls, space.fails = 0, {1: KeyboardInterrupt}
        with pytest.raises(KeyboardInterrupt):
            buf.take(slot=0, **how)
        space.fails = {}
        assert shown([buf.take(slot=0, **how)]) == [[0.5, 1.5, 2.5, 3.5, 4.5]]
        assert shown(buf.take()[1:]) == [[3.0] * 5, [0.5, 1.5, 2.5, 3.5, 4.5], [1.0] * 5]


def test_a_snapshot_that_its_library_refuses_changes_nothing() -> None:
    buf, others = four_slots(0, False, True)
    space.calls, space.fails = 0, {1: RuntimeError}
    with pytest.raises(RuntimeError, match="no room at export"):
        buf[0]
    space.fails = {}
    assert shown([buf[0]]) == [[0.5, 1.5, 2.5, 3.5, 4.5]]
    assert shown(buf.take())[0] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert others[0].tolist() == [1.0] * 5


def test_an_add_during_the_conversion_of_a_result_raises_and_loses_nothing() -> None:
    buf, _ = four_slots(None, False, False)
    said: list[str] = []

    def adds() -> None:
        with pytest.raises(RuntimeError, match="from within a sum") as e:
            buf.add(1, np.ones(5))
        said.append(str(e.value))

    space.during = adds
    try:
        sums = buf.take()
    finally:
        space.during = lambda: None
    assert len(said) == 3
    assert shown(sums)[1] == [3.0] * 5


# ---------------------------------------------------------------- a batch is added as a whole (18)


class Cell:
    """An object with a + that raises when a test requests it."""

    fails: type[BaseException] | None = None

    def __init__(self, value: float, bad: bool = False) -> None:
        self.value, self.bad = value, bad

    def __add__(self, other: Any) -> Any:
        if Cell.fails and (self.bad or getattr(other, "bad", False)):
            raise Cell.fails("this + fails")
        return Cell(self.value + getattr(other, "value", other))

    __radd__ = __add__


def value(x: Any) -> Any:
    return None if x is None else x.value if isinstance(x, Cell) else np.asarray(x).tolist()


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("budget", [0, 8, None, "auto"])
def test_a_batch_in_which_a_sum_raises_is_not_added_at_all(budget: Any, keyed: bool) -> None:
    raised = added = 0
    for bad, error, dense in itertools.product((None, 0, 1, 2, 3), (ValueError, KeyboardInterrupt), (False, True)):
        buf = fanin.InputBuffer(5, budget=budget)

        def key(n: int) -> Any:
            return [n] * 5 if keyed else None

        def batch(bad: int | None = None, dense: bool = dense) -> list[Any]:
            cells: list[Any] = [Cell(2.0 ** (i + 1), i == bad) for i in range(4)]
            return [*cells, np.ones(3) if dense else None]

        Cell.fails = None
        buf.add_many(range(5), batch(), keys=key(0))
        looks = [buf.explain(i) for i in range(5)]
        adds, parked = buf.counters.adds, buf.counters
        Cell.fails = error
        try:
            buf.add_many(range(5), batch(bad), keys=key(1))
            added += 1
            pulled = 2
        except (ValueError, KeyboardInterrupt):
            raised += 1
            pulled = 1
            assert bad is not None
            assert buf.counters.adds == adds == parked.adds
            assert [buf.explain(i) for i in range(5)] == looks
        Cell.fails = None
        if pulled == 1:
            buf.add_many(range(5), batch(), keys=key(1))  # the same once more: none of it was there
        got = [value(x) for x in buf.take()]
        assert got == [4.0, 8.0, 16.0, 32.0, [2.0] * 3 if dense else None], (budget, bad)
    assert added
    assert raised == {0: 16, 8: 8}.get(
        budget, 0
    )  # an object counts one byte, so 8 are passed where the array comes too


def test_two_gradients_of_a_batch_in_one_slot_are_undone_together() -> None:
    for bad in range(6):
        buf = fanin.InputBuffer(2, budget=0)
        Cell.fails = ValueError
        slots = [1, 0, 1, 0, 1, 0]
        with pytest.raises(ValueError, match=r"this \+ fails"):
            buf.add_many(slots, [Cell(1.0, i == bad) for i in range(6)])
        Cell.fails = None
        assert buf.take() == [None, None]
        buf.add_many(slots, [Cell(1.0) for _ in range(6)])
        assert [value(x) for x in buf.take()] == [3.0, 3.0]


def test_a_batch_in_which_a_sum_raises_beside_other_threads_adds_and_takes() -> None:
    """While other threads add: a batch that raised has added nothing, any other batch has added all. Each + raises in
    the thread whose batch is to fail.
    """
    import threading

    counts = [0, 0]
    total = [0.0] * 3
    buf = fanin.InputBuffer(3, budget=0)
    lock = threading.Lock()
    mine = threading.local()

    class Odd(Cell):
        def __add__(self, other: Any) -> Any:
            mine.left = getattr(mine, "left", -1) - 1
            if mine.left == 0:
                raise ValueError("this + fails")
            return Odd(self.value + getattr(other, "value", other))

        __radd__ = __add__

    def adds(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            mine.left = int(rng.integers(1, 8))  # of the three or so that a batch makes
            try:
                buf.add_many(range(3), [Odd(1.0) for _ in range(3)])
                done = 0
            except ValueError:
                done = 1
            mine.left = -1
            with lock:
                counts[done] += 1
            if rng.random() < 0.2:
                sums = buf.take()
                with lock:
                    for i, s in enumerate(sums):
                        total[i] += 0.0 if s is None else s.value

    threads = [threading.Thread(target=adds, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, s in enumerate(buf.take()):
        total[i] += 0.0 if s is None else s.value
    assert total == [float(counts[0])] * 3
    assert min(counts) > 10


# ---------------------------------------------------------------- equal names (24), and concurrent calls (11)


def test_two_libraries_of_one_name_are_two() -> None:
    class One(Foreign):
        space: Any = None

        def __array_namespace__(self, **_: Any) -> Any:
            return type(self).space

    class Two(One):
        pass

    made: list[str] = []
    for kind in (One, Two):

        class Named:
            __name__ = "one_name_for_two"

            def __init__(self, kind: Any) -> None:
                self.kind = kind

            def from_dlpack(self, x: Any) -> Any:
                made.append(self.kind.__name__)
                return self.kind(np.from_dlpack(x))

        kind.space = Named(kind)
    for kind in (One, Two, One):
        sums = fanin.add_n([kind(np.ones(3)), kind(np.ones(3))])
        assert type(sums) is kind
        assert sums.x.tolist() == [2.0] * 3
    assert made == ["One", "Two", "One"]


def test_a_name_with_a_nul_character_is_a_value_error() -> None:
    for make in (lambda: fanin.InputBuffer(1, name="a\0b"), lambda: fanin.InputBuffer([Slot(name="a\0b")])):
        with pytest.raises(ValueError, match=r"name: expected text without a NUL character, got 'a.x00b'"):
            make()
    assert fanin.InputBuffer(1, name="größe").name == "größe"
    m = sim.Machine()
    with pytest.raises(ValueError, match=r"name: expected text without a NUL character, got 'a.x00b'"):
        m.launch(m.stream(), lambda: None, name="a\0b")


def test_a_valid_word_followed_by_a_nul_character_is_refused() -> None:
    m = sim.Machine()
    for make in (
        lambda: fanin.InputBuffer([Slot(device="cpu\0")]),
        lambda: fanin.GraphTree("cpu\0x"),
        lambda: fanin.Zero((2,), "float32\0"),
        lambda: fanin.InputBuffer(1, accumulate="float32\0x"),
        lambda: fanin.set_options(isa="sse2\0x"),
        lambda: m.leave_out("S12\0x"),
    ):
        with pytest.raises(ValueError, match=r"x00"):
            make()


def test_an_add_by_a_finalizer_at_the_start_of_a_take_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import sys

    unheard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    buf = fanin.InputBuffer(1)

    class Adds:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            buf.add(0, np.full(4, 100.0))

    before = gc.get_threshold()
    for _ in range(20):
        gc.collect()
        gc.disable()
        gc.set_threshold(1)
        try:
            buf.add(0, np.ones(4))
            buf.add(0, np.ones(4))
            Adds()
            gc.enable()
            sums = buf.take()
        finally:
            gc.set_threshold(*before)
            gc.enable()
        gc.collect()
        rest = buf.take()[0]
        assert sums[0][0] + (0.0 if rest is None else rest[0]) == 102.0
    assert unheard == []
