"""The law of the ways: a list of contributions has one sum, whichever way brings it in.

Random lists (kit/lists.py) are brought in by the rows of one table (kit/ways.py), on the CPU, the simulated device and
the fake CUDA driver, and each result is compared with what the whole list sums to (reference/whole.py): its kind,
dtype, bits, places of stored entries, strides, memory, statistics, and of errors the type, the slot and the key.

    FANIN_SEED=7 pytest tests/laws/parts/test_ways.py      another seed
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks, law
from kit.lists import NAMESPACE, WIDE, case, dropped, read_only, smaller
from kit.values import show
from kit.ways import cells, drawn

SEED = int(os.environ.get("FANIN_SEED", "0"))


def met(tally: law.Tally, place: str) -> None:
    """What a run must have met: each cell of (row, kind of list, option), on a device each two of the three; both
    outcomes, each mark of a way, each order of arrival of two and three contributions.
    """
    print(f"{place}: {dict(tally.outcomes)}")
    due, seen = cells(place), set(tally.cells)
    if place != "host":
        due, seen = pairs(due), pairs(seen)
    missing = sorted(due - seen)
    assert not missing, f"{len(missing)} cells were not met: {missing[:9]}"
    assert min(tally.outcomes[x] for x in ("summed", "refused")) > 100, tally.outcomes
    for mark in ("budget 0", "budget inf", "kept", "alone", "donated", "copied", "snapshots", "trace", "beside"):
        assert tally.marks[mark] > 20, (mark, tally.marks)
    for n in (2, 3):
        assert all(tally.orders[order] > 5 for order in permutations(range(n))), tally.orders


def pairs(some: set[tuple[str, str, str]]) -> set[tuple[str, ...]]:
    return {pair for cell in some for pair in combinations(cell, 2)}


@pytest.mark.rule("A2", "A6", "A9", "A10", "A11", "A13", "A14", "A15", "A16", "S2", "S22")
@pytest.mark.rule("W1", "W2", "W3", "W4", "W5", "W6", "W7")
def test_a_list_has_one_sum_by_every_way() -> None:
    met(law.hold(SEED, range(10_000), ways=1), "host")


@pytest.mark.core
@pytest.mark.rule("A9", "A10", "A15", "S12", "S21")
@pytest.mark.parametrize("place", ["sim", "fake"])
def test_a_list_has_the_same_sum_on_a_device(place: str) -> None:
    met(law.hold(SEED, range(2_000), place, ways=1), place)


#: Planted faults (base/fault.h), where lists find them, and lists of which kinds.
FAULTS = {
    "MERGED_BEFORE_CAST": ("sim", ("sparse",)),
    "SCALED_BEFORE_WIDENED": ("host", ("zeros",)),
    "INT_WRAPS": ("host", ("scalars",)),
    "STATS_OF_STORED": ("host", ("sparse",)),
    "STATS_OF_LEFT_FOLD": ("host", ("sparse",)),
    "SUM_LEFT_LOOSE": ("host", ("sparse",)),
    "KIND_OF_LAST": ("host", ("sparse", "scalars")),
    "AXES_FORGOTTEN": ("host", ("dense",)),
    "EXPANDED_WRITTEN_OUT": ("host", ("expanded",)),
    "COPY_KEEPS_INDICES": ("host", ("sparse",)),
    "SHARED_EVENT_COVERS": ("sim", ("dense",)),
    "WEIGHT_DROPPED": ("host", ("dense",)),
    "PRODUCT_FUSED": ("host", ("dense",)),
    "PADDED_ADD": ("host", ("partial",)),
    "PATCH_STEP": ("host", ("partial",)),
    "FIRST_TOUCH_MISSED": ("sim", ("partial",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_a_way_is_found(fault: str) -> None:
    place, flavours = FAULTS[fault]
    hooks.fault(fault)
    try:
        with pytest.raises(AssertionError, match=f"seed {SEED}, list"):
            law.hold(SEED, range(2_000), place, ways=2, flavours=flavours, shrink=False)
    finally:
        hooks.fault(None)


class Other(np.ndarray[Any, Any]):
    """A class that no contribution has."""


def dense(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.size > 0 and x.dtype != np.bool_


def changed(x: Any) -> Any:
    """The same array but for its first element."""
    y = np.array(x, order="K")
    first = y.ravel("K")[:1]
    first[...] = 5 if first[0] == 7 else 7
    return y


def more(x: float) -> float:
    return 2 * abs(x) + 1


def other_dtype(x: Any) -> Any:
    return np.zeros(x.shape, "int8" if x.dtype != np.int8 else "int16")


def in_two_orders(x: Any) -> bool:
    return dense(x) and x.ndim > 1 and min(x.shape) > 1


def places(x: fanin.Sparse) -> list[tuple[int, ...]]:
    """Of a COO gradient where each entry is; all of them, if each is elsewhere."""
    found = [tuple(at) for at in x.parts[0].T.tolist()] if x.format == "coo" else []
    return found if len(set(found)) == len(found) else []


def backwards(x: fanin.Sparse) -> fanin.Sparse:
    return fanin.Sparse("coo", (x.parts[0][:, ::-1], x.parts[1][::-1]), x.shape)


def figures(s: Any, **others: Any) -> Any:
    names = ("count", "sumsq", "absmax", "nonfinite", "first_bad_key", "norm")
    return SimpleNamespace(**{n: getattr(s, n) for n in names if hasattr(s, n)} | others)


def error(e: Any, kind: type[Exception] | None = None, **others: Any) -> Any:
    made = (kind or type(e))(str(e))
    vars(made).update(vars(e), **others)
    return made


#: What can be wrong with an outcome: the first word of what the law reports of it; whether it can be planted in the
#: outcome of a list by a way; what is planted.
Planted = tuple[str, Callable[[Any, Any, Any], bool], Callable[[Any], dict[str, Any]]]
WRONG: dict[str, Planted] = {
    "another class": (
        "kind",
        lambda o, c, way: dense(o.result),
        lambda o: {"result": o.result.view(Other)},
    ),
    "another dtype": (
        "dtype",
        lambda o, c, way: dense(o.result),
        lambda o: {"result": other_dtype(o.result)},
    ),
    "another shape": (
        "shape",
        lambda o, c, way: dense(o.result),
        lambda o: {"result": o.result[None]},
    ),
    "another number": (
        "bits",
        lambda o, c, way: dense(o.result) and o.same is None,
        lambda o: {"result": changed(o.result)},
    ),
    "another axis order": (
        "strides",
        lambda o, c, way: in_two_orders(o.result) and o.same is None and not c.wanted.out,
        lambda o: {"result": np.array(o.result, order="CF"[o.result.flags.c_contiguous])},
    ),
    "entries in another order": (
        "places",
        lambda o, c, way: isinstance(o.result, fanin.Sparse) and o.same is None and len(places(o.result)) > 1,
        lambda o: {"result": backwards(o.result)},
    ),
    "read-only": (
        "writable",
        lambda o, c, way: c.wanted.writable and dense(o.result),
        lambda o: {"result": read_only(o.result.copy("K"))},
    ),
    "a copy of one that is handed through": (
        "same",
        lambda o, c, way: o.same is not None and not np.isscalar(o.result) and c.wanted.scale is None,
        lambda o: {"same": None},
    ),
    "memory of others": (
        "memory",
        lambda o, c, way: dense(o.result) and o.same is None,
        lambda o: {"shared": [0]},
    ),
    "one of others was written": (
        "contribution",
        lambda o, c, way: True,
        lambda o: {"written": [0]},
    ),
    "expanded axes written out": (
        "bytes",
        lambda o, c, way: o.error is None and law.stays_expanded(c, way),
        lambda o: {"bytes_written": 8 * WIDE},
    ),
    "no error": (
        "expected",
        lambda o, c, way: o.error is not None,
        lambda o: {"error": None, "result": np.ones(3)},
    ),
    "an error": (
        "expected",
        lambda o, c, way: o.error is None,
        lambda o: {"error": ValueError("planted")},
    ),
    "an error of another type": (
        "expected",
        lambda o, c, way: hasattr(o.error, "slot"),
        lambda o: {"error": error(o.error, KeyError)},
    ),
    "an error of another slot": (
        "the",
        lambda o, c, way: hasattr(o.error, "slot"),
        lambda o: {"error": error(o.error, slot=9)},
    ),
    "an error of a key that never came": (
        "the",
        lambda o, c, way: hasattr(o.error, "key"),
        lambda o: {"error": error(o.error, key=99)},
    ),
    "another snapshot": (
        "bits",
        lambda o, c, way: o.error is None and bool(o.seen) and dense(o.seen[-1]),
        lambda o: {"seen": [changed(o.seen[-1])]},
    ),
    "no statistics": (
        "no",
        lambda o, c, way: hasattr(o.stats, "norm"),
        lambda o: {"stats": None},
    ),
    "another norm of all": (
        "global_norm",
        lambda o, c, way: o.norm is not None and math.isfinite(o.norm),
        lambda o: {"norm": more(o.norm)},
    ),
}


def another(name: str) -> Planted:
    """A figure of the statistics."""

    def planted(o: Any) -> dict[str, Any]:
        old = getattr(o.stats, name)
        return {"stats": figures(o.stats, **{name: 99 if old is None else more(old)})}

    return name, lambda o, c, way: hasattr(o.stats, "norm") and 1e-290 < o.stats.sumsq < math.inf, planted


WRONG |= {f"another {n}": another(n) for n in ("count", "nonfinite", "absmax", "sumsq", "norm", "first_bad_key")}


@pytest.mark.parametrize("what", WRONG)
def test_errors_of_an_outcome_are_reported(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    word, can_be, planted = WRONG[what]
    run, found = law.run, 0
    for n in range(2000):
        draw = random.Random(f"planted {n}")
        c = case(draw, flavours=("expanded",) if word == "bytes" else ())
        entry = draw.choice(["add, keys", "add_many, keys"])
        way = replace(drawn(draw, c, "host", entry), hold="kept")
        outcome = run(c, way)
        if not can_be(outcome, c, way) or law.broken(law.Law(c), way):
            continue
        other = replace(outcome, **planted(outcome))
        monkeypatch.setattr(law, "run", lambda *_, other=other: other)
        reported = law.broken(law.Law(c), way)
        monkeypatch.setattr(law, "run", run)
        assert word in map(law.first_word, reported), f"list {n}: {way}: {reported}"
        found += 1
        if found == 5:
            return
    raise AssertionError(f"planted {found} times")


@pytest.mark.core
@pytest.mark.rule("A6", "A14", "S2")
def test_the_short_path_and_the_general_one_have_equal_counts_messages_and_errors() -> None:
    """One list enters a buffer of plain entries (D27) twice, the second time under a trace, which takes the general
    road.
    """
    print(f"seed {SEED}")
    outcomes: Counter[str] = Counter()
    for n in range(500):
        draw = random.Random(f"{SEED} {n}")
        c = case(draw, flavours=("dense", "scalars", "wrong"))
        way = drawn(draw, c, "host", draw.choice(["add", "add, keys", "add_many", "add_many, keys"]))
        wrong = law.roads_differ(c, way)
        assert not wrong, f"seed {SEED}, list {n}: {way}: {wrong}\n{law.script(c, way)}"
        outcomes[type(law.run(c, way).error).__name__] += 1
    assert outcomes["NoneType"] > 200 and outcomes["ValueError"] > 20, outcomes


@pytest.mark.slow
def test_a_hundred_thousand_lists_have_one_sum_each() -> None:
    met(law.hold(SEED + 1, range(100_000), ways=1), "host")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sim", "fake"])
def test_twenty_thousand_lists_have_the_same_sum_on_a_device(place: str) -> None:
    met(law.hold(SEED + 1, range(20_000), place, ways=1), place)


def test_a_list_is_made_by_its_text_as_it_is_made_without() -> None:
    kinds: set[str] = set()
    for n in range(400):
        c = case(random.Random(f"{SEED} {n}"))
        g: list[Any] = []
        for x, made in zip(c.terms, c.made(), strict=True):
            g.append(eval(x.text(), NAMESPACE | {"g": g}))
            assert show(g[-1]) == show(made)
            kinds |= {x.kind, x.layout}
    assert len(kinds) > 15, kinds


def test_a_list_that_fails_is_made_smaller() -> None:
    """Two float64 arrays of more than one number are what fails here: nothing else is left of a list."""

    def fails(c: Any) -> bool:
        return sum(x.dtype == "float64" and x.kind == "dense" for x in c.terms) >= 2

    tried = 0
    for n in range(1000):
        c = case(random.Random(f"{SEED} {n}"))
        if fails(c):
            small = law.smallest(c, fails)
            assert len(small.terms) == 2, small
            assert not any(fails(less) for less in smaller(small))
            tried += 1
    assert tried > 25


def test_a_dropped_contribution_leaves_the_list_whole() -> None:
    for n in range(300):
        c = case(random.Random(f"{SEED} {n}"))
        for k in range(len(c.terms)):
            less = dropped(c, k)
            assert len(less.terms) == len(c.terms) - 1
            less.made()


@pytest.mark.core
@pytest.mark.rule("A6", "A14")
@pytest.mark.parametrize("kind", [np.int32, np.float64, np.complex64])
def test_a_donated_number_comes_back_with_what_was_added_to_it(kind: Any) -> None:
    """A number's object is not the memory of its sum, however many references to it there are."""
    first = [kind(k % 50) for k in range(300)]
    holders = [x for x in first for _ in range(1024)]
    for x in first:
        buf = fanin.InputBuffer(1, budget=0)
        buf.add(0, x, donate=True)
        buf.add(0, kind(1))
        buf.add(0, kind(2))
        assert buf.take() == [x + kind(1) + kind(2)]
    assert [int(x.real) for x in first] == [int(kind(k % 50).real) for k in range(300)]
    del holders
