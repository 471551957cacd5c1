"""Every allocation fails once: MemoryError or success, the state as before, nothing leaked."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from fake_cuda import FakeDriver, use_driver
from fanin.analysis.memory import Layout, Snapshot
from kit import hooks

pytestmark = pytest.mark.core

F = np.float32


class Word:
    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Word) -> Word:
        return Word(self.text + other.text)


def plain(budget: Any = None, **how: Any) -> Callable[[], Any]:
    def scenario() -> Any:
        buf = fanin.InputBuffer(2, budget=budget)
        for k in range(3):
            yield lambda k=k: buf.add(0, np.full(5, k, F), key=k, **how)
        yield lambda: buf.take()[0].tolist()

    return scenario


def backwards(make: Callable[[int], Any]) -> Callable[[], Any]:
    """Keys last to first, so many that the ledger is a set of its own from the third step on."""

    def scenario() -> Any:
        buf = fanin.InputBuffer(1)
        for k in range(100, 37, -1):
            buf.add(0, make(k), key=k)
        for k in (37, 36, 5000, 35, 2**40, 34):
            yield lambda k=k: buf.add(0, make(k), key=k)
        yield lambda: buf.take()[0].tolist()

    return scenario


def terms(*xs: Any, slots: Any = 1, take: Any = None, budget: Any = None, stats: bool = False) -> Callable[[], Any]:
    def scenario() -> Any:
        buf = fanin.InputBuffer(slots, budget=budget, stats=stats)
        for x in xs:
            yield lambda x=x: buf.add(0, x)
        yield lambda: seen(buf.take(**(take or {}))[0])

    return scenario


def weighted(*xs: Any, slots: Any = 1, budget: Any = None, late: bool = False, mean: bool = True) -> Callable[[], Any]:
    """Contributions with weights, which come with them or with the take."""

    def scenario() -> Any:
        buf = fanin.InputBuffer(slots, budget=budget)
        for k, x in enumerate(xs):
            yield lambda k=k, x=x: buf.add(0, x, key=k, weight=None if late else k + 2)
        how: dict[str, Any] = {"weights": {k: k + 2 for k in range(len(xs))}} if late else {}
        yield lambda: seen(buf.take(mean=mean, **how)[0])

    return scenario


def many_terms(dtype: Any, stats: bool = False) -> Callable[[], Any]:
    """More terms than a sum of the fast path takes at once: its take needs scratch memory, in two places with `out`."""

    def scenario() -> Any:
        buf, given = fanin.InputBuffer(9, stats=stats), [None] * 8
        for _ in range(100):
            buf.add(0, np.ones(4, dtype))
        yield lambda: buf.take()[0].tolist()
        for _ in range(100):
            buf.add(0, np.ones(4, dtype))
        yield lambda: buf.take(out=[np.zeros(4, dtype), *given])[0].tolist()

    return scenario


def seen(x: Any) -> Any:
    if isinstance(x, Word):
        return x.text
    if isinstance(x, np.ndarray) and x.nbytes >= LARGE.nbytes:
        return hash(x.tobytes())
    if isinstance(x, fanin.Zero):
        return repr(x)
    if isinstance(x, fanin.Partial):
        return x.values.tolist(), x.at, x.shape
    return x.toarray().tolist() if sp.issparse(x) else np.asarray(x).tolist()


def snapshot() -> Any:
    buf = fanin.InputBuffer(1)
    yield lambda: buf.add(0, np.ones(4, np.float16))
    yield lambda: buf.add(0, np.ones(4, np.float16))
    yield lambda: buf[0].tolist()
    yield lambda: buf.take()[0].tolist()


def out() -> Any:
    buf, target = fanin.InputBuffer(2), np.zeros(4, F)
    yield lambda: buf.add(0, np.ones(4, F))
    yield lambda: buf.add(0, np.ones(4, F))
    yield lambda: buf.add(1, target)
    yield lambda: buf.take(out=[target, None])[0].tolist()


def machine() -> Any:
    with fanin.sim.Machine(devices=1) as m:
        p, c = m.stream(), m.stream()
        buf = fanin.InputBuffer(1, stream=c, budget=0)
        g = [m.array(np.full(4, k, F)) for k in range(3)]
        for k in range(3):
            yield lambda k=k: buf.add(0, g[k], stream=p, key=k)
        yield lambda: buf.take()


def machine_sparse() -> Any:
    with fanin.sim.Machine(devices=1) as m:
        buf = fanin.InputBuffer(1)
        g = m.array(sp.coo_array(np.eye(3, dtype=F)))
        yield lambda: buf.add(0, g)
        yield lambda: buf.add(0, g)
        yield lambda: buf.take()


def on_cuda() -> Any:
    driver = FakeDriver(1, memory=1 << 20)
    with use_driver(driver):
        p, c = driver.stream(), driver.stream()
        buf = fanin.InputBuffer(1, stream=c, budget=0)
        g = [driver.array(np.full((2, 2), k, F)) for k in range(3)]
        rows = fanin.Sparse("coo", (driver.array(np.array([[0, 1]])), g[1]), (2, 2))
        for k in range(3):
            yield lambda k=k: buf.add(0, g[k], stream=p, key=k)
        yield lambda: buf.add(0, rows, stream=p, key=3)
        yield lambda: driver.array(np.ones((3, 4))).T[::2].numpy().tolist()
        yield lambda: buf.take()


def made() -> Any:
    kept: list[Any] = []
    yield lambda: kept.append(
        fanin.InputBuffer([fanin.Slot(shape=(2, 2), dtype="float32", name="w"), fanin.Slot()], name="n")
    )


def made_again() -> Any:
    """In the memory of a buffer without references."""
    kept: list[Any] = []
    slots = [fanin.Slot((2, 2), "float32", name="w"), fanin.Slot(combine=lambda a, b: a), fanin.Slot((), float)]
    for _ in range(3):
        fanin.InputBuffer(3)
        yield lambda: kept.append(fanin.InputBuffer(slots))
        kept.clear()


def explained() -> Any:
    buf = fanin.InputBuffer(1)
    yield lambda: buf.add(0, np.ones(3))
    yield lambda: buf.add(0, np.ones(3))
    yield lambda: buf.explain(0)


def hard() -> tuple[Any, Any]:
    """A pair that a search gives up: it needs a table."""
    memory = np.empty(300_000_000, "i1")
    strided = np.lib.stride_tricks.as_strided
    return strided(memory, (1049,) * 3, (36674, 61119, 85569)), strided(memory[64023025:], (1049,) * 2, (12223, 12224))


def one_overlap() -> Any:
    x, y = hard()
    yield lambda: fanin.overlap(x, y, budget=2**26)
    yield lambda: fanin.overlap(x[:, 1], x)


def overlapping() -> Any:
    m = np.zeros((8, 9))
    strided = [m[i : i + 3, j : j + 2] for i in range(4) for j in range(8)]
    yield lambda: (lambda found: (found.components, found.indices, found.pairs))(fanin.sharing.overlaps(strided))
    found = fanin.sharing.overlaps(strided)
    yield lambda: found.pairs


def recorded() -> Any:
    made: list[Any] = []
    m, n = np.zeros((8, 9)), np.zeros((9, 9))
    yield lambda: made.append(Layout([m[:, i] for i in range(9)]))
    yield lambda: made.append(Snapshot([m[:, i] for i in range(9)]))
    yield lambda: made[0].check([m[:, i] for i in range(9)])
    yield lambda: made[0].check([n[:8, 8 - i] for i in range(9)])


LARGE = np.ones(1 << 18, F)  #: 1 MiB: summed in recycled memory, handed through as it came
EYE = sp.csr_array(np.eye(3, dtype=F))
EXACT = fanin.Slot(accumulate="exact")


def part(first: int, end: int, dtype: Any = F) -> fanin.Partial:
    return fanin.Partial(np.ones(end - first, dtype), slice(first, end), 4)


SPARSE_BYTES = fanin.Sparse("coo", (np.array([[0, 3]]), np.ones(2, np.int8)), (4,))


class Adds:
    def __radd__(self, other: Any) -> Any:
        return Word(str(other.tolist()))


def rows(accumulate: Any = None) -> Any:
    yield lambda: fanin.add_rows([1, 0, 1], np.ones((3, 2), F), 3, accumulate=accumulate).tolist()
    yield lambda: fanin.add_rows([1, 0, 1], np.ones((3, 2), np.float64)[:, ::-1], 3, accumulate=accumulate).tolist()


SCENARIOS: dict[str, Callable[[], Any]] = {
    "made": made,
    "made again": made_again,
    "fused": plain(),
    "eager": plain(0),
    "bounded": plain(30),
    "copied": plain(copy=True),
    "donated": plain(0, donate=True),
    "eager, the general path": terms(*[np.full(5, k, F)[::-1] for k in range(3)], budget=0),
    "eager, rows with gaps": terms(*[np.full(10, k, F)[::2] for k in range(3)], budget=0),
    "keys out of order": backwards(lambda k: np.full(5, k, F)),
    "keys out of order, the general path": backwards(lambda k: np.full(5, k, F)[::-1]),
    "large, alone": terms(LARGE),
    "large, alone, behind an undefined one": terms(None, LARGE, None),
    "large": terms(LARGE, LARGE),
    "large, eager": terms(LARGE, LARGE, budget=0),
    "large, writable": terms(LARGE, take={"writable": True}),
    "low precision": terms(np.ones(5, np.float16), np.ones(5, np.float16)),
    "widening": terms(np.ones(5, np.int8), np.ones(5, np.int64), np.ones(5, F), budget=0),
    "cast": terms(np.ones(5), np.ones(5), slots=[fanin.Slot(dtype="float32")]),
    "reduced": terms(np.ones((4, 5)), np.ones((4, 5)), slots=[fanin.Slot(shape=(5,))]),
    "expanded": terms(np.broadcast_to(np.ones(1), (7,)), np.broadcast_to(np.ones(1), (7,))),
    "csr": terms(EYE, EYE),
    "coo": terms(EYE.tocoo(), EYE.tocoo(), budget=0),
    "two kinds of sparse": terms(EYE, EYE.tocsc()),
    "partial": terms(*[part(k, k + 1) for k in range(3)]),
    "partial, that meet": terms(part(0, 2), part(1, 3), part(0, 1, np.float64)),
    "partial, integers and then floats": terms(part(0, 2, np.int8), SPARSE_BYTES, part(1, 3)),
    "partial, eager, and dense": terms(part(0, 2), np.ones(4, F), part(1, 3), budget=0),
    "partial, exact": terms(part(0, 2), part(1, 3), slots=[EXACT]),
    "partial, to a shape": terms(part(0, 2), slots=[fanin.Slot(shape=(1,))]),
    "partial, cast": terms(part(0, 2, np.float64), part(1, 3), slots=[fanin.Slot(dtype="float32")]),
    "partial, alone, taken as it is": terms(part(0, 2), slots=[fanin.Slot(partial=True)]),
    "partial and an object": terms(part(0, 2), Adds()),
    "rows": rows,
    "rows, exact": lambda: rows("exact"),
    "exact": terms(np.ones(3, F), np.ones(3, F), np.ones(3, F), slots=[EXACT], budget=30),
    "exact, csr": terms(EYE, EYE, slots=[EXACT]),
    "exact, two kinds of sparse": terms(EYE, EYE.tocoo(), EYE.tocsc().astype(np.float64), slots=[EXACT]),
    "exact, sparse and dense": terms(EYE, np.ones((3, 3), F), EYE, slots=[EXACT], budget=0),
    "exact, sparse into a state": terms(np.ones((3, 3), F), np.ones((3, 3)), EYE, slots=[EXACT], budget=0),
    "exact, sparse, with statistics": terms(EYE, EYE, slots=[EXACT], stats=True),
    "sparse and dense": terms(EYE, np.ones((3, 3), F), EYE, budget=0),
    "zeros": terms(fanin.Zero((3,), "float32"), fanin.Zero((3,), "float64")),
    "objects": terms(Word("a"), Word("b"), Word("c")),
    "array and object": terms(
        np.ones(3, np.float16), np.ones(3, np.float16), slots=[fanin.Slot(combine=lambda a, b: a)]
    ),
    "scaled": terms(np.ones(3, F), np.ones(3, F), take={"scale": 2}),
    "writable": terms(np.ones(3, F), take={"writable": True}),
    "many terms in a wider dtype": many_terms(np.float16),
    "many terms with statistics": many_terms(F, stats=True),
    "weights": weighted(np.ones(3, F), np.ones(3, F), mean=False),
    "weights, eager": weighted(np.ones(3, F), np.ones(3, F), np.ones(3, F), budget=0),
    "weights, late": weighted(np.ones(3, F), np.ones(3, F), budget=math.inf, late=True),
    "weights, sparse and dense": weighted(EYE, np.ones((3, 3), F), EYE, budget=0),
    "weights, exact": weighted(np.ones(3, F), np.ones(3, F), slots=[EXACT]),
    "a mean of an exact state": weighted(*[np.ones(3, F)] * 4, slots=[EXACT], budget=0, late=False),
    "snapshot": snapshot,
    "out": out,
    "machine": machine,
    "machine, sparse": machine_sparse,
    "cuda": on_cuda,
    "explained": explained,
    "a pair": one_overlap,
    "a list of arrays": overlapping,
    "a recorded layout": recorded,
}


def play(scenario: Callable[[], Any], fail: tuple[int, int, int] | None) -> tuple[list[Any], bool, bool]:
    """Runs the steps; in step `fail[0]` allocation `fail[1]` fails, and the step is then done again. Returns the
    results of the steps, whether one was refused, and whether there was such an allocation.
    """
    gave, refused, met = [], False, False
    for i, step in enumerate(scenario()):
        if fail and i == fail[0]:
            before = hooks.memory()[2]
            hooks.fail_at(fail[1], fail[2])
            try:
                value = step()
            except MemoryError:
                refused = True
            finally:
                hooks.fail_at(-1, 0)
            met = hooks.memory()[2] > before
            if not refused:
                gave.append(value)
                continue
        gave.append(step())
    return gave, refused, met


#: Plain arrays only: from the buffer's making to its end nothing of the core's is allocated once there was one before
#: it.
PLAIN = {"array and object", "bounded", "copied", "donated", "eager", "fused", "low precision", "scaled", "writable"}
PLAIN |= {"large, alone", "large, alone, behind an undefined one", "weights"}
#: One allocation that fails sends the step to the general path, which finds memory.
ANOTHER_WAY = {"keys out of order", "many terms in a wider dtype", "many terms with statistics"}


@pytest.mark.parametrize("count", [1, -1], ids=["once", "from then on"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_allocation_that_fails_is_an_error_and_changes_nothing(name: str, count: int) -> None:
    scenario = SCENARIOS[name]
    expected = [str(x) for x in play(scenario, None)[0]]
    gc.collect()
    baseline = hooks.memory()[0]
    refusals = 0
    for step in range(len(expected)):
        for n in range(200):
            gave, refused, met = play(scenario, (step, n, count))
            refusals += refused
            if "machine" not in name:
                assert [str(x) for x in gave] == expected, (step, n)
            del gave
            if not met:
                break
        else:
            pytest.fail("200 allocations in one step")
    gc.collect()
    assert hooks.memory()[0] == baseline
    assert (refusals > 0) == (name not in PLAIN and not (count == 1 and name in ANOTHER_WAY))


def test_the_hook_itself_makes_a_step_fail() -> None:
    buf = fanin.InputBuffer(1)
    hooks.fail_at(0, 1)
    try:
        with pytest.raises(MemoryError):
            buf.add(0, np.ones(3)[::-1], donate=True)
    finally:
        hooks.fail_at(-1, 0)
    assert buf.take() == [None]


def test_a_planted_leak_of_a_contribution_is_found() -> None:
    gc.collect()
    before = hooks.memory()[0]
    kept = fanin.InputBuffer(1)
    assert hooks.memory()[0] > before
    del kept
    assert hooks.memory()[0] == before
