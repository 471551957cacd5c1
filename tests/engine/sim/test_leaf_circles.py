"""Leaves that wait for each other: a `+` that runs a pass while its leaf is its own, into a leaf that another has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fanin
from fanin.sim import Machine, Report, explore
from kit import hooks
from kit.sample import sizes

pytestmark = pytest.mark.core

needs_faults = pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")

ENDLESS = "none of them would end"
ITSELF = "a gradient comes to this leaf from within its own accumulation, on another worker"


@pytest.fixture(autouse=True)
def nothing_stays_planted() -> Iterator[None]:
    yield
    hooks.fault(None) if hooks.DEVELOPMENT else None


class Number:
    """Sums by its own `+` (A8), in which it does something."""

    def __init__(self, value: float, meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.value, self.meanwhile = value, meanwhile

    def __add__(self, other: Number) -> Number:
        other.meanwhile()
        return Number(self.value + other.value)


def leaf(name: str) -> fanin.Leaf:
    made = fanin.Leaf(Number(0.0), name=name)
    made.grad = Number(0.0)
    return made


def value(w: fanin.Leaf) -> float:
    now: float = w.grad.value
    return now


def error_of_pass(w: fanin.Leaf, g: Number) -> str:
    """What became of a pass that brings g to a leaf."""
    try:
        fanin.backward([(w, 0, g)])
    except RuntimeError as e:
        return str(e)
    return ""


def branches(*leaves: fanin.Leaf, fn: Callable[[Any], Any] = lambda g: g) -> fanin.Node:
    """A node that gives to one in front of each leaf, which has a function of its own."""
    nodes = [fanin.Node(fn, edges=[(w, 0)]) for w in leaves]
    return fanin.Node(lambda g: [g] * len(nodes), edges=[(n, 0) for n in nodes])


def ends_well(report: Report) -> bool:
    """No order has a race, a deadlock or an error of the search, whether or not the passes raise."""
    return report.races == report.deadlocks == report.errors == 0 and report.runs > 20


def two_leaves(m: Machine) -> tuple[float, float, str]:
    """Two threads: each brings 10 to its leaf, and in that `+` 1 to the other's."""
    a, b = leaf("a"), leaf("b")
    threads = [
        m.spawn(error_of_pass, one, Number(10.0, lambda other=other: fanin.backward([(other, 0, Number(1.0))])))
        for one, other in ((a, b), (b, a))
    ]
    m.join()
    said = [t.result for t in threads]
    return value(a), value(b), "; ".join(sorted(x for x in said if x))


#: Orders of a sample, in which each outcome and each planted fault is found, and those of the whole.
FEW, MANY = {"limit": 10, "samples": 30}, {"limit": 300, "samples": 600}
ALL = {"limit": 6_000}


@pytest.mark.rule("E15", "L5")
@pytest.mark.parametrize("how", sizes(FEW, ALL))
def test_two_leaves_that_wait_for_each_other_are_an_error_and_no_deadlock_in_any_order(how: dict[str, int]) -> None:
    report = explore(two_leaves, **how)
    assert ends_well(report) and (report.complete or how is FEW), report
    said = "this gradient comes from within the accumulation of {}, for which that of {} waits: " + ENDLESS
    assert set(report.results) == {
        (11.0, 11.0, ""),  # one after the other
        (1.0, 10.0, "b: " + said.format("a", "b")),  # a's pass has failed, b's is whole
        (10.0, 1.0, "a: " + said.format("b", "a")),
    }


def with_helpers(m: Machine) -> tuple[float, float, str]:
    """The `+` of a runs a pass of two workers, of which one may come to a itself."""
    a, c = leaf("a"), leaf("c")
    top = branches(a, c)
    thread = m.spawn(error_of_pass, a, Number(10.0, lambda: fanin.backward([(top, 0, Number(1.0))], workers=2)))
    m.join()
    return value(a), value(c), str(thread.result)


@pytest.mark.rule("E12", "E15")
@pytest.mark.parametrize("how", sizes(FEW, MANY))
def test_a_leaf_that_waits_for_itself_by_a_helper_is_an_error_in_orders_drawn_at_random(how: dict[str, int]) -> None:
    report = explore(with_helpers, **how)
    assert ends_well(report), report
    own = ITSELF.removesuffix(", on another worker")
    assert {r[2] for r in report.results} == {f"a: {ITSELF}", f"a: {own}"}
    assert {r[0] for r in report.results} == {0.0} and {r[1] for r in report.results} <= {0.0, 1.0}


def with_helpers_and_another(m: Machine) -> tuple[float, float, str]:
    """.. a helper of the one comes to b, whose `+` on another thread brings something to a."""
    a, b, c = leaf("a"), leaf("b"), leaf("c")
    top = branches(b, c)
    threads = [
        m.spawn(error_of_pass, a, Number(10.0, lambda: fanin.backward([(top, 0, Number(1.0))], workers=2))),
        m.spawn(error_of_pass, b, Number(10.0, lambda: fanin.backward([(a, 0, Number(1.0))]))),
    ]
    m.join()
    return value(a), value(b), "; ".join(sorted(t.result for t in threads if t.result))


@pytest.mark.rule("E12", "E15")
@pytest.mark.parametrize("how", sizes(FEW, MANY))
def test_a_circle_through_a_helper_is_an_error_in_orders_drawn_at_random(how: dict[str, int]) -> None:
    report = explore(with_helpers_and_another, **how)
    assert ends_well(report), report
    assert {r[:2] for r in report.results} == {(11.0, 11.0), (1.0, 10.0), (10.0, 1.0)}, report
    assert all((ENDLESS in said) == ((a, b) != (11.0, 11.0)) for a, b, said in report.results), report


@needs_faults
@pytest.mark.rule("E15")
@pytest.mark.parametrize("scenario", [two_leaves, with_helpers, with_helpers_and_another])
def test_a_circle_that_no_check_finds_is_reported_as_a_deadlock(scenario: Callable[[Machine], Any]) -> None:
    hooks.fault("LEAF_CIRCLE")
    report = explore(scenario, **FEW, stop_at_first=True)
    assert report.failed and "deadlock" in str(report), report


def run(*calls: Callable[[], str]) -> list[str]:
    """What became of each, on a thread of its own."""
    said = [""] * len(calls)

    def one(i: int) -> None:
        said[i] = calls[i]()

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return said


@pytest.mark.rule("E15")
def test_a_circle_of_four_names_its_leaves_and_ends_one_pass_alone() -> None:
    leaves = [leaf(name) for name in "abcd"]
    met = threading.Barrier(4)

    def call(i: int) -> Callable[[], str]:
        def meanwhile() -> None:
            met.wait()
            fanin.backward([(leaves[(i + 1) % 4], 0, Number(1.0))])

        return lambda: error_of_pass(leaves[i], Number(10.0, meanwhile))

    said = run(*(call(i) for i in range(4)))
    [(i, message)] = [(i, x) for i, x in enumerate(said) if x]
    has, wants, then, last = ("abcd"[(i + k) % 4] for k in range(4))
    assert message == (
        f"{wants}: this gradient comes from within the accumulation of {has}, for which that of {last} waits,"
        f" for which that of {then} waits, for which that of {wants} waits: {ENDLESS}"
    )
    values = [value(w) for w in leaves]
    assert values[i] == 1.0 and sorted(values) == [1.0, 10.0, 11.0, 11.0] and values[(i + 1) % 4] == 10.0


@pytest.mark.rule("E12", "E15")
@pytest.mark.parametrize("how", sizes(FEW, MANY))
def test_workers_at_one_leaf_wait_for_one_another_in_random_orders(how: dict[str, int]) -> None:
    """The caller of a pass releases the leaves that it claimed, even if its helpers fail."""

    def scenario(m: Machine) -> tuple[float, float, float, str]:
        shared, x, y = leaf("shared"), leaf("x"), leaf("y")

        def fn(g: Number) -> Number:
            fanin.backward([(shared, 0, Number(1.0))])
            return g

        top = branches(x, y, fn=fn)
        thread = m.spawn(lambda: fanin.backward([(top, 0, Number(1.0))], workers=2))
        m.join()
        return value(shared), value(x), value(y), str(thread.result)

    report = explore(scenario, **how)
    assert not report.failed and report.results == ((2.0, 1.0, 1.0, "None"),), (report, report.error)
