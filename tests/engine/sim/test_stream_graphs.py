"""Passes over graphs whose nodes are on the streams of two devices: no race, each node once, the same bits in any
order, and what a plain evaluation in float64 gives.

Happens-before is a matter of what is queued, not of when it runs: one run of a graph judges all orders of the device.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, explore
from kit import graphs, hooks
from kit.sample import sizes
from kit.stream_graphs import OnStreams, current, plainly, shape, shapes
from kit.world import World, world
from reference import engine as reference

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def mismatch_is_meant() -> Iterator[None]:
    with fanin.set_options(warn_stream_mismatch=False):
        yield


def seed_of() -> int:
    seed = int(os.environ.get("FANIN_SEED", 0)) or random.randrange(2**32)
    print(f"FANIN_SEED={seed}")
    return seed


def near(spec: graphs.Spec, values: dict[int, Any], passes: int) -> int:
    """Holds the leaves against the plain evaluation; how many are defined."""
    for i, (value, size) in graphs.plain(spec).items():
        got = values[i]
        assert (got is None) == bool(np.isnan(value)), f"leaf {i}: {got}, and expected {value}"
        assert got is None or np.all(np.abs(np.array(got) - passes * value) <= 1e-12 * passes * size), (i, got, value)
    return sum(x is not None for x in values.values())


# All shapes


def judge(w: World, spec: graphs.Spec, seed: int) -> None:
    """A shape on drawn streams, twice, then in another order: each node once, the same bits, the right numbers."""
    built = OnStreams(spec, w, random.Random(seed))
    inner = [i for i, n in enumerate(spec.nodes) if not n.leaf]
    built.run(keep=True)
    built.run(keep=False)
    assert sorted(built.ran) == sorted(inner * 2), seed
    values = built.values()
    near(spec, values, 2)
    other = OnStreams(spec, w, random.Random(seed))
    other.run(keep=True, schedule=random.Random(seed + 1).choice)
    other.run(keep=False, schedule=lambda ready: ready[-1])
    assert other.values() == values, seed
    if w.kind != "gpu":
        many_workers = OnStreams(spec, w, random.Random(seed))
        many_workers.run(keep=True, workers=2)
        many_workers.run(keep=False, workers=3)
        assert many_workers.values() == values and sorted(many_workers.ran) == sorted(inner * 2), seed


def test_the_enumeration_has_the_known_number_of_shapes() -> None:
    """Counted by hand up to four nodes."""
    assert [len(list(shapes(n))) for n in range(1, 6)] == [1, 1, 3, 16, 164]


@pytest.mark.rule("S18", "S20", "E4")
@pytest.mark.parametrize(("draws", "step"), sizes((1, 6), (3, 1)))
def test_every_shape_of_up_to_five_nodes_runs_without_a_race(draws: int, step: int) -> None:
    """The sample has each sixth of the shapes of five nodes, and all of fewer."""
    seed = seed_of()
    for n in range(1, 6):
        with world("sim", 2, seed % 1000) as w:
            for k, spec in enumerate(itertools.islice(shapes(n), 0, None, step if n == 5 else 1)):
                for draw in range(draws):
                    judge(w, spec, seed + 10 * k + draw)


@pytest.mark.rule("S18", "S20", "E4")
@pytest.mark.parametrize("kind", ["sim", "fake"])
@pytest.mark.parametrize("count", sizes(12, 40))
def test_shapes_of_six_nodes_run_without_a_race(count: int, kind: str) -> None:
    """A sample of them; the mark `slow` runs all."""
    seed = seed_of()
    r = random.Random(seed)
    with world(kind, 2, seed % 1000) as w:
        for k in range(count):
            edges = [(i, j) for i in range(6) for j in range(i) if r.random() < 0.4]
            edges += [(5, j) for j in range(5) if not any(to == j for _, to in edges)]
            judge(w, shape(6, edges), seed + k)


@pytest.mark.slow
@pytest.mark.rule("S18", "S20", "E4")
def test_every_shape_of_six_nodes_runs_without_a_race() -> None:
    seed = seed_of()
    every = list(shapes(6))
    assert len(every) == 3341
    for part in range(8):
        with world("sim", 2, seed % 1000) as w:
            for k, spec in enumerate(every):
                if k % 8 == part:
                    judge(w, spec, seed + k)


# Random graphs


def one(w: World, seed: int, seen: Counter[str]) -> None:
    r = random.Random(seed)
    spec = plainly(r, graphs.draw(r, "wide arrays"))
    built = OnStreams(spec, w, r)
    outcomes = [built.run(keep) for keep in ((True, False) if spec.keep else (False,))]
    values = built.values()
    whole = spec.inputs is None and "Boom" not in outcomes
    if whole:
        seen["defined"] += near(spec, values, len(outcomes))
        seen["undefined"] += sum(x is None for x in values.values())
    if not any(n.throws for n in spec.nodes):
        again = random.Random(seed)
        other = OnStreams(plainly(again, graphs.draw(again, "wide arrays")), w, again)
        assert [other.run(keep, schedule=r.choice) for keep in ((True, False) if spec.keep else (False,))] == outcomes
        assert other.values() == values, seed
        again = random.Random(seed)
        other = OnStreams(plainly(again, graphs.draw(again, "wide arrays")), w, again)
        assert [other.run(keep, workers=2) for keep in ((True, False) if spec.keep else (False,))] == outcomes
        assert other.values() == values, seed
        seen["two workers"] += 1
    seen["graphs"] += 1
    seen["Boom" if "Boom" in outcomes else "well"] += 1
    seen["grad"] += spec.capture
    seen["hook"] += any(kind == "hook" for kind, *_ in built.log)
    seen["nested"] += any(spec.nodes[i].nested for i in built.ran)
    seen["two devices"] += len({s.device for s in built.on}) == 2
    seen["caller of one device"] += len(built.callers) == 1


def many(kind: str, graphs_in_all: int) -> Counter[str]:
    first = seed_of()
    seen: Counter[str] = Counter()
    for at in range(0, graphs_in_all, 25):
        with world(kind, 2, (first + at) % 1000) as w:
            for k in range(at, min(at + 25, graphs_in_all)):
                one(w, first + k, seen)
            w.synchronize()
            assert w.races == 0, f"seed {first}: {w.race}"
    print(dict(seen))
    return seen


#: Of twenty draws the slowest finds each planted fault in 41 graphs.
SAMPLE = 75


@pytest.mark.rule("E4", "S18", "S19", "S20")
@pytest.mark.parametrize("kind", ["sim", "fake"])
@pytest.mark.parametrize("count", sizes(SAMPLE, 200))
def test_random_graphs_on_random_streams_give_the_results_of_plain_numbers(count: int, kind: str) -> None:
    seen = many(kind, count)
    wanted = (
        "defined",
        "undefined",
        "well",
        "Boom",
        "grad",
        "hook",
        "nested",
        "two devices",
        "two workers",
        "caller of one device",
    )
    for _ in range(8):  # one in a hundred draws of 200 leaves something out
        if not all(seen[x] for x in wanted):
            seen += many(kind, 50)
    assert not [x for x in wanted if not seen[x]], seen


@pytest.mark.slow
@pytest.mark.rule("E4", "S18", "S19", "S20")
def test_ten_thousand_random_graphs_on_random_streams_give_the_results_of_plain_numbers() -> None:
    many("sim", 10_000)


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize(
    "fault", ["END_WITHOUT_WAIT", "LEAF_WITHOUT_WAIT", "HOOK_ON_CALLER", "SUM_FOR_PRODUCER", "HAND_WITHOUT_WAIT"]
)
def test_random_graphs_find_a_planted_fault(fault: str) -> None:
    first = seed_of()
    hooks.fault(fault)
    try:
        for k in range(200):
            with world("sim", 2, k) as w:
                w.judges_itself("a fault is planted")
                try:
                    one(w, first + k, Counter())
                    w.synchronize()
                except (fanin.RaceError, AssertionError):
                    return
                if w.races:
                    return
    finally:
        hooks.fault(None)
    raise AssertionError(f"{fault} was not found in 200 graphs")


# Not one wait more than needed


def waits_of(call: Any) -> tuple[Counter[Any], int]:
    """Which streams wait for which in a call, and how many waits were omitted because they hold already."""
    with fanin.trace() as t:
        call()
    found: Counter[Any] = Counter()
    for line in t.lines:
        if line.kind == "wait":
            stream = re.fullmatch(r"stream (\d+) of (\S+)", line.label or "")
            assert stream, line
            number, device = stream.groups()
            prefix = device.partition(":")[0]
            found[(f"{prefix}:{line.device}", line.stream), (device, int(number))] += 1
    return found, sum(line.kind == "elided" for line in t.lines)


def as_reference(streams: Any) -> list[reference.Stream]:
    return [reference.Stream(s.device, s.handle) for s in streams]


def held_against_the_reference(w: World, spec: graphs.Spec, seed: int) -> tuple[int, int]:
    """A graph's passes queue the waits of the rules, and omit only waits that hold already: how many of each."""
    for n in spec.nodes:
        n.nested = 0  # its waits are those of another pass
        n.throws = False
    built, theirs = OnStreams(spec, w, random.Random(seed)), graphs.Built(spec, reference)
    for i in range(len(spec.nodes)):
        theirs.nodes[i].stream, theirs.nodes[i].place = as_reference([built.on[i]])[0], w.place(built.home[i])
    queued = left_out = 0
    for keep in (True, False) if spec.keep else (False,):
        expected = reference.Waits(*as_reference(built.callers))
        theirs.run(keep, waits=expected)
        found, elided = waits_of(lambda keep=keep: built.run(keep))
        wanted = Counter(tuple((s.device, s.number) for s in pair) for pair in expected)
        assert found <= wanted, f"seed {seed}: not needed: {found - wanted}"
        assert found.total() + elided == wanted.total(), f"seed {seed}: not queued: {wanted - found}"
        queued, left_out = queued + found.total(), left_out + elided
    return queued, left_out


@pytest.mark.rule("S8", "S9", "S10", "S11", "S12", "S13", "S18", "S20")
@pytest.mark.parametrize("count", sizes(50, 300))
def test_passes_queue_the_waits_of_the_rules_and_no_other(count: int) -> None:
    first = seed_of()
    gc.collect()  # memory of earlier tests, which is freed with waits of its own
    queued = left_out = 0
    for at in range(0, count, 50):
        with world("sim", 2, at) as w:
            for k in range(at, at + 50):
                r = random.Random(first + k)
                one, two = held_against_the_reference(w, plainly(r, graphs.draw(r, "wide arrays")), first + k)
                queued, left_out = queued + one, left_out + two
    print(f"{queued} waits queued, {left_out} left out")
    assert queued > 1.6 * count and left_out > 0


# Two passes at once

#: Orders of the sample, beside twenty at random.
FEW = 20


def two_passes(m: Machine, spec: graphs.Spec, seed: int) -> Any:
    """Each on a thread, over one graph into the same leaves, from callers' streams of their own."""
    w = Entered(m)
    built = OnStreams(spec, w, random.Random(seed))
    mine, other = ([w.stream(d) for d in range(2)] for _ in range(2))

    def run(callers: list[Any]) -> None:
        with current(callers):
            fanin.backward(built.roots(), keep_graph=True)

    for callers in (mine, other):
        m.spawn(run, callers)
    m.join()
    for s, t in zip(mine, other, strict=True):
        s.wait(t)  # a reader waits for both passes
    built.callers = mine
    return built.values()


class Entered(World):
    """A machine of explore as a world."""

    kind, prefix = "sim", "sim"

    def __init__(self, m: Machine) -> None:
        self.on = m


@pytest.mark.rule("E15", "S20", "L5")
@pytest.mark.parametrize("edges", [[(1, 0)], [(2, 0), (2, 1), (1, 0)]], ids=["chain", "fan-in"])
@pytest.mark.parametrize("limit", sizes(FEW, 150))
def test_two_passes_at_once_over_one_graph_race_in_no_order(limit: int, edges: list[tuple[int, int]]) -> None:
    spec = shape(1 + max(i for i, _ in edges), edges)
    for n in spec.nodes:
        n.makes = [(slot, graphs.TIMES, 0.5) for slot, _, _ in n.makes]  # exact in any order of the passes
    report = explore(lambda m: two_passes(m, spec, 3), limit=limit, samples=20)
    assert not report.failed and len(report.results) == 1 and report.runs > 1, report


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("fault", ["END_WITHOUT_WAIT", "LEAF_UNCLAIMED"])
def test_two_passes_at_once_with_a_fault_are_found(fault: str) -> None:
    hooks.fault(fault)
    try:
        report = explore(lambda m: two_passes(m, shape(2, [(1, 0)]), 3), limit=FEW, samples=20)
    finally:
        hooks.fault(None)
    assert report.failed, report
