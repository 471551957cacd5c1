"""The law of the ways: a list of contributions has one sum, whichever way brings it in.

Random lists (kit/lists.py) are brought in by the rows of one table (kit/ways.py), on the CPU, the simulated device and
the fake CUDA driver, and each result is compared with what the whole list sums to (reference/whole.py): its kind,
dtype, bits, places of stored entries, strides, memory, statistics, and of errors the type, the slot and the key.

    FANIN_SEED=7 pytest tests/laws/test_ways.py      another seed
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks, law
from kit.lists import NAMESPACE, case, dropped, smaller
from kit.values import show
from kit.ways import cells, drawn

SEED = int(os.environ.get("FANIN_SEED", "0"))


def met(tally: law.Tally, place: str) -> None:
    """What a run must have met: each cell of (row, kind of list, option), on a device each two of the three; both
    outcomes, each mark of a way, each order of arrival of two and three contributions.
    """
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
def test_a_list_has_one_sum_whichever_way_brings_it_in() -> None:
    met(law.hold(SEED, range(10_000), ways=2), "host")


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
    "SUM_LEFT_LOOSE": ("host", ("sparse",)),
    "KIND_OF_LAST": ("host", ("sparse", "scalars")),
    "EXPANDED_WRITTEN_OUT": ("host", ("expanded",)),
    "COPY_KEEPS_INDICES": ("host", ("sparse",)),
    "SHARED_EVENT_COVERS": ("sim", ("dense",)),
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


@pytest.mark.core
@pytest.mark.rule("A6", "A14", "S2")
def test_the_short_road_and_the_general_one_count_say_and_raise_the_same() -> None:
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
    met(law.hold(SEED + 1, range(100_000), ways=3), "host")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sim", "fake"])
def test_twenty_thousand_lists_have_the_same_sum_on_a_device(place: str) -> None:
    met(law.hold(SEED + 1, range(20_000), place, ways=3), place)


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
