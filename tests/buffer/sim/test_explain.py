"""`explain` describes past and coming decisions in sentences with the numbers of the rules."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import InputBuffer, Slot
from fanin._words import ordinal, rules_of


def test_an_empty_slot() -> None:
    buf = InputBuffer([Slot(name="w1")], name="grads")
    assert buf.explain(0) == "grads: slot 0 (w1): nothing has come yet."
    buf.expect(0, 1)
    assert buf.explain(0) == "grads: slot 0 (w1): nothing has come yet; 1 contribution expected (A16)."


@pytest.mark.core
def test_a_sum_on_the_cpu_with_a_gap() -> None:
    buf = InputBuffer(1, name="grads", budget=0)
    for key in (0, 1, 3):
        buf.add(0, np.ones(3, np.float16), key=key, donate=key == 3)
    assert buf.explain(0).splitlines() == [
        "grads: slot 0: 3 contributions came, 1 of them parked.",
        "On the CPU: no streams, so no waits (S3).",
        (
            "The slot holds the sum of 2, dense, in the buffer's own memory; it runs in float32 and will be rounded to"
            " float16 once (A11)."
        ),
        "Parked, key 3: dense float16, donated.",
        "Key 2 is due next: what lies beyond it waits for it, or for take(), which skips gaps (A15).",
        "At the next sum the others will be added into the first, in place: it is reusable (A6).",
        "budget=0: 6 B wait in all slots, 0 B may.",
        "Rules that decided so far: S3, A7 (docs/rules.md).",
    ]


@pytest.mark.core
@pytest.mark.parametrize(
    ("consumer", "producer", "words"),
    [
        (
            (0, 1),
            (0, 1),
            "The producer's stream is the consumer's, stream {C}: the sum is taken there, without a wait (S8).",
        ),
        (
            (0, 1),
            (0, 2),
            (
                "The producer's stream is not the consumer's, stream {C}, of the same device: the sum is taken on"
                " stream {C} (S9)."
            ),
        ),
        (
            (1, 1),
            (0, 2),
            "The consumer's stream is on another device: the sum is taken on the producer's stream, stream {P} (S10).",
        ),
        (
            (1, 1),
            (1, 2),
            (
                "Neither stream is on the gradients' device: the sum is taken on its current stream (under capture: one"
                " of its pool), stream 1 (S11)."
            ),
        ),
    ],
)
def test_the_four_cases_of_streams(consumer: tuple[int, int], producer: tuple[int, int], words: str) -> None:
    with fanin.sim.Machine(devices=2) as m:
        made = {(d, n): m.stream(device=d) for d in (0, 1) for n in (1, 2)}
        C, P = made[consumer], made[producer]
        buf = InputBuffer(1, stream=C)
        buf.add(0, m.array(np.ones(3)), stream=P)
        lines = buf.explain(0).splitlines()
        assert words.format(C=C.handle, P=P.handle) in lines
        event = "" if consumer == producer else ", with an event"
        assert f"Parked, the 1st to come: dense float64, made on stream {P.handle}{event}." in lines
        assert lines[-1] == f"Rules that decided so far: {re.findall(r'S[0-9]+', words)[0]} (docs/rules.md)."
        buf.take()


def test_why_a_fresh_array_takes_the_sum() -> None:
    x = np.ones(3)
    for first, why in (
        (x, "someone else may hold it"),
        (np.broadcast_to(1.0, (3,)), "its memory is not a gap-free layout"),
    ):
        buf = InputBuffer(1)
        buf.add(0, first)
        buf.add(0, np.ones(3))
        assert f"At the next sum a fresh array will take the sum: {why} (A7)." in buf.explain(0).splitlines()


def test_explain_distinguishes_objects_zeros_and_undefined_gradients() -> None:
    buf = InputBuffer([Slot(combine=lambda a, b: a)])
    for g in ({1}, None, fanin.Zero((3,), "float32")):
        buf.add(0, g)
    text = buf.explain(0)
    assert "3 contributions came" in text
    assert "object" in text
    assert "zero float32" in text


def test_words() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "112th",
    ]
    assert rules_of(0b1 | 1 << 21 | 1 << 22 | 1 << 37) == "S1, S22, A1, A16"


@pytest.mark.core
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("dense_first", [False, True])
def test_explain_describes_the_next_sum_as_it_then_runs(stats: bool, dense_first: bool) -> None:
    """With stats, a dense term among sparse ones is read again after the sum: nothing is summed into it."""
    row = fanin.Sparse("csr", (np.array([0, 2]), np.array([0, 2]), np.array([1.0, 2.0])), (1, 4))
    buf = InputBuffer(1, stats=stats)
    with fanin.trace() as t:
        for dense in (dense_first, not dense_first):
            buf.add(0, np.ones((1, 4)) if dense else row, donate=dense)
        said = buf.explain(0)
        np.testing.assert_array_equal(buf.take()[0], [[2, 1, 3, 1]])
    (fold,) = [line for line in t if line.kind == "fold"]
    in_place = dense_first and not stats
    rule = "A4" if not dense_first else "A7" if stats else "A6"
    assert ("into the first, in place" in said) == fold.in_place == in_place
    assert f"({rule})." in said
    assert rule in fold.rules
    if stats and dense_first:
        assert "a fresh array will take the sum: its elements are still to be looked at (A7)." in said


@pytest.mark.core
@pytest.mark.rule("A6", "A7")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("held", "bytes_each", "rules"),
    [(True, 4000, "S3, A6, A7"), (False, 4000, "S3, A6"), (True, 0, "S3"), (True, 2000, "S3, A7")],
)
def test_the_rules_of_sums_that_were_made_are_those_that_ran(
    traced: bool, held: bool, bytes_each: int, rules: str
) -> None:
    """The same by the fast path and, inside a trace, by the general one."""
    budget = {4000: 5000, 2000: 7000, 0: 5000}[bytes_each]
    gradients = [np.ones(bytes_each // 4, np.float32) for _ in range(4)]
    buf = InputBuffer(1, budget=budget)
    with fanin.trace() if traced else contextlib.nullcontext():
        for i in range(4):
            if held:
                buf.add(0, gradients[i])
            else:
                buf.add(0, gradients.pop())
        assert buf.explain(0).splitlines()[-1] == f"Rules that decided so far: {rules} (docs/rules.md)."


@pytest.mark.core
@pytest.mark.rule("A14")
@pytest.mark.parametrize(
    ("budget", "contributions", "single"),
    [(0, 4, False), (0, 2, False), (0, 1, True), (None, 1, True), (None, 4, False)],
)
@pytest.mark.parametrize("undefined", [False, True])
def test_a_sum_of_several_is_not_handed_through_as_a_single_one(
    budget: Any, contributions: int, single: bool, undefined: bool
) -> None:
    buf = InputBuffer(1, budget=budget)
    with fanin.trace() as t:
        for _ in range(contributions):
            buf.add(0, np.ones(3))
        if undefined:
            buf.add(0, None)
        buf.take()
    (line,) = [line for line in t if line.kind == "take"]
    assert ("A14" in line.rules) == single


@pytest.mark.core
def test_explain_names_an_exact_sum() -> None:
    buf = InputBuffer(1, accumulate="exact")
    for _ in range(2):
        buf.add(0, np.ones(3), donate=True)
    assert "At the next sum they will be summed exactly and rounded once (A11)." in buf.explain(0).splitlines()


def test_explain_reports_only_the_presence_of_a_contribution_that_is_still_arriving() -> None:
    """Its add converts it and records its event without the slot's lock: explain reads neither."""

    def scenario(m: fanin.sim.Machine) -> str:
        s, c = m.stream(), m.stream()
        buf = InputBuffer([Slot(shape=(2,), dtype="float64")], stream=c, budget=64)
        g = m.array(np.ones(2, np.float32))
        said: list[str] = []
        m.spawn(lambda: buf.add(0, g, stream=s))
        m.spawn(lambda: said.append(buf.explain(0)))
        m.join()
        return said[0]

    report = fanin.sim.explore(scenario)
    assert report.complete and not (report.races or report.deadlocks or report.errors)
    said = [str(text) for text in report.results]
    assert sum("the 1st to come: still arriving" in text for text in said) == 1, said
    assert any("dense float64, made on stream" in text for text in said)
    assert any("nothing has come yet" in text for text in said)
