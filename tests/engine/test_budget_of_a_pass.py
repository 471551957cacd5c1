"""`budget=` of a pass is that of its buffers alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape

CALLS = ("backward", "grad", "walk")


class Logged:
    """An object whose sums are written down."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __add__(self, other: Logged) -> Logged:
        self.log.append(f"{self.name} + {other.name}")
        return Logged(f"({self.name} {other.name})", self.log)


def sums(call: str, meet: Callable[[], object] = lambda: None, **options: Any) -> list[str]:
    """What a pass does, whose last fan-in has three gradients: functions that ran, and sums."""
    log: list[str] = []

    def function(name: str) -> Callable[[Any], Any]:
        def run(_: Any) -> Any:
            meet()
            log.append(name)
            return Logged(name, log)

        return run

    last = fanin.Node(lambda g: None, edges=[None], name="last")
    nodes = [fanin.Node(function(name), edges=[(last, 0)], name=name) for name in "abc"]
    roots = [(node, 0, np.ones(1)) for node in nodes]
    if call == "backward":
        fanin.backward(roots, **options)
    elif call == "grad":
        fanin.grad(roots, [last], **options)
    else:
        for node, given in (walk := fanin.walk(roots, **options)):
            walk.give(node.fn(*given))
    return log


EAGER = ["c", "b", "c + b", "a", "(c b) + a"]
LAZY = ["c", "b", "a", "c + b", "(c b) + a"]


@pytest.mark.parametrize("call", CALLS)
def test_a_pass_sums_when_its_own_budget_is_exceeded(call: str) -> None:
    assert sums(call, budget=0) == EAGER
    assert sums(call, budget=math.inf) == LAZY
    with fanin.set_options(budget=0):
        assert sums(call) == EAGER
        assert sums(call, budget=math.inf) == LAZY
    with fanin.set_options(budget=math.inf):
        assert sums(call) == LAZY
        assert sums(call, budget=0) == EAGER


def test_a_traced_pass_has_its_own_budget() -> None:
    with fanin.trace():
        assert sums("backward", budget=0) == EAGER
        assert sums("backward", budget=math.inf) == LAZY


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), ("words", ValueError), ([], TypeError)])
def test_a_budget_that_is_none_is_refused_before_the_pass(call: str, bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="budget"):
        sums(call, budget=bad)


def in_two_threads(*calls: Callable[[], object], barriers: Sequence[threading.Barrier]) -> None:
    failed: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as e:
            failed.append(e)
            for barrier in barriers:  # the other thread must not wait for this one
                barrier.abort()

    threads = [threading.Thread(target=guarded, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def option() -> object:
    return fanin.InputBuffer(1).budget


def test_two_passes_at_once_have_each_their_budget_and_leave_the_option_alone() -> None:
    """Every function waits for the other pass's, so that the passes overlap from end to end."""
    before, both = option(), threading.Barrier(2)
    logs: dict[float, list[str]] = {}
    seen: list[object] = []

    def one(budget: float) -> None:
        def meet() -> None:
            both.wait()
            seen.append(option())
            both.wait()

        logs[budget] = sums("backward", meet, budget=budget)

    in_two_threads(lambda: one(0), lambda: one(math.inf), barriers=[both])
    assert logs == {0: EAGER, math.inf: LAZY}
    assert seen == [before] * 6
    assert option() == before


@pytest.mark.parametrize("call", ["backward", "grad"])
def test_overlapping_passes_of_the_tape_leave_the_option_alone(call: str) -> None:
    """The first to begin is the first to end, too: an option that each sets for its time would stay the second's."""
    before, begun, ended = option(), threading.Barrier(2), threading.Barrier(2)
    seen: list[object] = []

    def one(budget: int, first: bool) -> None:
        w = tape.parameter(np.ones(3))

        def hook(g: object) -> None:
            begun.wait()
            seen.append(option())
            if not first:
                ended.wait()

        h = w * 2
        h.register_hook(hook)
        if call == "backward":
            tape.backward(h, budget=budget)
        else:
            tape.grad(h, [w], budget=budget)
        if first:
            ended.wait()

    in_two_threads(lambda: one(111, True), lambda: one(222, False), barriers=[begun, ended])
    assert seen == [before] * 2
    assert option() == before
