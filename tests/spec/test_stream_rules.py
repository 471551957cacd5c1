"""Rules S as a table: every combination of streams, the readable Python against the C core; some rows by hand.

What the plans lead to on a device is tested where there is one; here nothing runs.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kit.inside import inside
from spec import stream_rules as page
from spec.stream_rules import NOWHERE, Add, Convert, Finish, Fold, Slot, Take, Term

pytestmark = pytest.mark.core

DEVICES = (1, 2)
STREAMS = (1, 2, 3)
PLACES = [NOWHERE, *product(DEVICES, STREAMS)]  # "not set", and two devices of three streams
SET = PLACES[1:]

core = SimpleNamespace(
    sync_add=lambda *a: made(Add, inside().rules_sync_add(*a)),
    sync_convert=lambda *a: made(Convert, inside().rules_sync_convert(*a)),
    sync_fold=lambda *a: made(Fold, inside().rules_sync_fold(*a)),
    sync_take=lambda *a: made(Take, inside().rules_sync_take(*a)),
    sync_finish=lambda *a: made(Finish, inside().rules_sync_finish(*a)),
    sync_term=lambda *a: made(Term, inside().rules_sync_term(*a)),
    capture=lambda *a: inside().rules_capture(*a),
)


def made(kind: type, answer: dict[str, Any]) -> Any:
    assert set(answer) == set(kind._fields)
    if "slot" in answer:
        answer["slot"] = Slot(*answer["slot"])
    return kind(**answer)


@pytest.fixture(params=["page", "C"])
def rules(request: pytest.FixtureRequest) -> Any:
    return page if request.param == "page" else core


def slots(events: bool = True) -> list[Slot]:
    """Every state that a slot can be in: empty, empty with a consumer, or with a value."""
    some = [Slot(), *(Slot(C=C) for C in SET)]
    return some + [
        Slot(C, A, R, e) for C, A, R in product(SET, repeat=3) for e in ((False, True) if events else (True,))
    ]


# Rows by hand


@pytest.mark.rule("S3")
def test_a_device_without_streams_has_no_stream_and_no_event(rules: Any) -> None:
    plan = rules.sync_add(0, (1, 1), (1, 2), NOWHERE, Slot())
    assert plan == Add("-", NOWHERE, Slot(), False, False, {"S3"})
    assert rules.sync_fold(Slot()) == Fold(Slot(), {"S3"})
    assert rules.sync_take(Slot(), (1, 1)) == Take(False, False, False, frozenset())


@pytest.mark.rule("S4")
def test_a_missing_producer_stream_is_the_current_stream_of_the_gradients_device(rules: Any) -> None:
    plan = rules.sync_add(1, NOWHERE, (1, 2), (1, 3), Slot())
    assert plan == Add("a", (1, 3), Slot((1, 2), (1, 2), (1, 3), True), True, True, {"S4", "S9"})
    later = rules.sync_add(1, NOWHERE, (1, 2), (1, 2), plan.slot)
    assert (later.P, later.record, later.rules) == ((1, 2), False, {"S4"})


@pytest.mark.rule("S5")
def test_a_missing_consumer_stream_is_fixed_at_the_slots_first_gradient(rules: Any) -> None:
    plan = rules.sync_add(1, (1, 2), NOWHERE, (1, 3), Slot())
    assert plan == Add("a", (1, 2), Slot((1, 3), (1, 3), (1, 2), True), True, True, {"S5", "S9"})
    assert rules.sync_add(1, (1, 2), NOWHERE, (1, 1), Slot(C=(1, 3))).slot.C == (1, 3), "not again"


@pytest.mark.rule("S8")
def test_same_stream_nothing_waits_and_nothing_is_recorded(rules: Any) -> None:
    plan = rules.sync_add(1, (1, 2), (1, 2), (1, 1), Slot())
    assert plan == Add("A", (1, 2), Slot((1, 2), (1, 2), (1, 2), False), False, False, {"S8"})


@pytest.mark.rule("S9")
def test_other_stream_the_sum_is_on_the_consumers_and_the_gradient_is_used_there(rules: Any) -> None:
    plan = rules.sync_add(1, (1, 1), (1, 2), (1, 3), Slot())
    assert plan == Add("a", (1, 1), Slot((1, 2), (1, 2), (1, 1), True), True, True, {"S9"})
    across = rules.sync_add(1, (2, 1), (1, 1), (1, 3), Slot())
    assert across.how == "a", "stream 1 of device 2 is not stream 1 of device 1"


@pytest.mark.rule("S10")
def test_producer_only_the_sum_is_on_the_producers_stream_and_the_consumer_will_wait(rules: Any) -> None:
    plan = rules.sync_add(1, (1, 1), (2, 1), (1, 3), Slot())
    assert plan == Add("B", (1, 1), Slot((2, 1), (1, 1), (1, 1), True), True, False, {"S10"})


@pytest.mark.rule("S11")
def test_neither_stream_the_sum_is_on_the_current_stream_even_if_both_are_the_same(rules: Any) -> None:
    plan = rules.sync_add(1, (2, 1), (2, 1), (1, 3), Slot())
    assert plan == Add("C", (2, 1), Slot((2, 1), (1, 3), (2, 1), True), True, False, {"S11"})


@pytest.mark.rule("S12")
def test_a_fold_waits_for_each_other_stream_and_marks_its_gradients_as_used(rules: Any) -> None:
    terms = [rules.sync_term((1, 1), P, False, False) for P in ((1, 2), (1, 1), (2, 1), NOWHERE)]
    assert [t.wait for t in terms] == [True, False, True, False]
    assert all(t.mark for t in terms), "its memory may be a third stream's, wherever it was made"
    assert terms[0].rules == {"S12"}
    assert rules.sync_term(NOWHERE, NOWHERE, False, False) == Term(False, False, frozenset())
    assert rules.sync_term((1, 1), (1, 2), False, True) == Term(False, True, {"S12"}), "a newer event of P is enough"
    later = rules.sync_add(1, (1, 2), NOWHERE, (1, 3), Slot((1, 1), (1, 1), (1, 1), False))
    assert (later.how, later.record, later.slot.A) == ("+", True, (1, 1))


@pytest.mark.rule("S13")
def test_the_first_fold_waits_for_the_first_producer(rules: Any) -> None:
    slot = Slot((1, 2), (1, 2), (1, 1), True)
    assert rules.sync_term(slot.A, slot.R, True, False) == Term(True, True, {"S13"})
    again = rules.sync_fold(slot).slot
    assert rules.sync_term(again.A, again.R, True, False) == Term(False, True, frozenset()), "the second does not"


@pytest.mark.rule("S14", "S17")
def test_the_sum_runs_on_the_accumulation_stream_and_is_ready_there(rules: Any) -> None:
    plan = rules.sync_fold(Slot((2, 1), (1, 3), (2, 1), True))
    assert plan.slot.R == plan.slot.A == (1, 3)
    assert {"S14", "S17"} <= plan.rules


@pytest.mark.rule("S15")
def test_a_sum_on_another_stream_than_the_consumers_gets_a_new_event(rules: Any) -> None:
    plan = rules.sync_fold(Slot((2, 1), (1, 1), (1, 1), True))
    assert plan == Fold(Slot((2, 1), (1, 1), (1, 1), True), {"S14", "S15", "S17"})


@pytest.mark.rule("S16")
def test_a_sum_on_the_consumers_stream_needs_no_event(rules: Any) -> None:
    plan = rules.sync_fold(Slot((1, 2), (1, 2), (1, 1), True))
    assert plan == Fold(Slot((1, 2), (1, 2), (1, 2), False), {"S14", "S16", "S17"})


@pytest.mark.rule("S18")
def test_a_consumer_elsewhere_waits_and_an_event_that_is_missing_is_recorded_now(rules: Any) -> None:
    assert rules.sync_take(Slot((1, 2), (1, 2), (1, 1), True), (1, 2)) == Take(True, False, True, {"S18", "S19"})
    assert rules.sync_take(Slot((1, 1), (1, 1), (1, 1), False), (1, 3)) == Take(True, True, True, {"S18", "S19"})


@pytest.mark.rule("S19")
def test_the_value_is_used_on_the_consumers_stream_with_or_without_a_wait(rules: Any) -> None:
    assert rules.sync_take(Slot((1, 1), (1, 1), (1, 1), False), (1, 1)) == Take(False, False, True, {"S19"})
    same_index = rules.sync_take(Slot((2, 1), (1, 1), (1, 1), True), (2, 1))
    assert same_index.mark and same_index.wait, "stream 1 of device 2 is not stream 1 of device 1"


@pytest.mark.rule("S21")
def test_a_conversion_runs_on_the_producers_stream_if_that_is_on_the_gradients_device(rules: Any) -> None:
    assert rules.sync_convert(1, (1, 2), (1, 1)) == Convert(True, {"S21"})
    assert rules.sync_convert(1, (2, 2), (1, 1)) == Convert(False, {"S21"})
    assert rules.sync_convert(0, NOWHERE, NOWHERE).on_producer


@pytest.mark.rule("S22")
def test_finishing_runs_on_the_accumulation_stream_after_the_takers(rules: Any) -> None:
    slot = Slot((2, 1), (1, 1), (1, 2), True)
    assert rules.sync_finish(slot, True, (2, 1)) == Finish(True, True, slot._replace(R=(1, 1)), {"S22"})
    assert rules.sync_finish(slot, False, (2, 1)) == Finish(False, False, slot._replace(R=(1, 1)), {"S22"})
    mine = Slot((1, 1), (1, 1), (1, 2), True)
    assert rules.sync_finish(mine, True, (1, 1)) == Finish(False, True, Slot((1, 1), (1, 1), (1, 1)), {"S22"})


@pytest.mark.rule("S7")
@pytest.mark.parametrize(
    ("s", "t", "free", "legacy", "decided"),
    [
        (0, 0, False, True, "go"),
        (5, 5, False, False, "go"),
        (0, 5, True, False, "redirect"),
        (0, 5, True, True, "redirect"),
        (0, 5, False, True, "error"),
        (0, 5, False, False, "go"),
        (5, 0, True, False, "error"),
        (5, 6, True, False, "error"),
    ],
)
def test_the_waits_that_a_capture_permits(rules: Any, s: int, t: int, free: bool, legacy: bool, decided: str) -> None:
    assert rules.capture(s, t, free, legacy) == decided


# The whole table


@pytest.mark.rule("S3", "S4", "S5", "S8", "S9", "S10", "S11")
def test_every_arrival_is_decided_in_c_as_on_the_page() -> None:
    seen: dict[str, int] = {}
    states = [Slot(), *(Slot(C=C) for C in SET), *(Slot(C, A, (1, 1), True) for C, A in product(SET, repeat=2))]
    for D, P, C, slot in product((0, *DEVICES), PLACES, PLACES, states):
        for current in [NOWHERE] if D == 0 else [p for p in SET if p[0] == D]:
            plan = page.sync_add(D, P, C, current, slot)
            assert core.sync_add(D, P, C, current, slot) == plan, (D, P, C, current, slot)
            seen[plan.how] = seen.get(plan.how, 0) + 1
    assert set(seen) == set("-AaBC+"), seen
    assert sum(seen.values()) == 7 * 7 * 43 * (1 + 2 * 3)


@pytest.mark.rule("S14", "S15", "S16", "S17")
def test_every_fold_is_decided_in_c_as_on_the_page() -> None:
    plans = [page.sync_fold(slot) for slot in slots()]
    assert [core.sync_fold(slot) for slot in slots()] == plans
    assert {p.rules & {"S15", "S16"} for p in plans[7:]} == {frozenset({"S15"}), frozenset({"S16"})}


@pytest.mark.rule("S12", "S13")
def test_every_term_of_a_fold_is_decided_in_c_as_on_the_page() -> None:
    table = {key: page.sync_term(*key) for key in product(PLACES, PLACES, (False, True), (False, True))}
    assert {key: core.sync_term(*key) for key in table} == table
    assert {p.rules for p in table.values()} == {frozenset(), frozenset({"S12"}), frozenset({"S13"})}


@pytest.mark.rule("S18", "S19")
def test_every_take_is_decided_in_c_as_on_the_page() -> None:
    table = {(slot, c): page.sync_take(slot, c) for slot, c in product(slots(), PLACES)}
    assert {key: core.sync_take(*key) for key in table} == table
    assert {(p.wait, p.record_now, p.mark) for p in table.values()} == {
        (False, False, False), (False, False, True), (True, False, True), (True, True, True),
    }  # fmt: skip


@pytest.mark.rule("S21", "S22")
def test_every_conversion_and_finish_is_decided_in_c_as_on_the_page() -> None:
    for D, P, A in product((0, *DEVICES), PLACES, PLACES):
        assert core.sync_convert(D, P, A) == page.sync_convert(D, P, A)
    for slot, out, taker in product(slots(), (False, True), PLACES):
        assert core.sync_finish(slot, out, taker) == page.sync_finish(slot, out, taker)


@pytest.mark.rule("S7")
def test_every_wait_under_capture_is_decided_in_c_as_on_the_page() -> None:
    table = {key: page.capture(*key) for key in product((0, 1, 2), (0, 1, 2), (False, True), (False, True))}
    assert {key: core.capture(*key) for key in table} == table
    assert set(table.values()) == {"go", "redirect", "error"}


# What must hold in every row


@pytest.mark.rule("S4", "S5", "S10", "S11")
def test_the_accumulation_stream_is_always_on_the_gradients_device() -> None:
    for D, P, C in product(DEVICES, PLACES, PLACES):
        for current in [p for p in SET if p[0] == D]:
            plan = page.sync_add(D, P, C, current, Slot())
            assert plan.slot.A[0] == D
            assert plan.record or plan.slot.A == plan.P, "someone will wait for a producer elsewhere"


@pytest.mark.rule("S15", "S16", "S17", "S18")
def test_after_any_fold_a_consumer_finds_the_event_or_is_on_the_stream_itself() -> None:
    for slot in slots()[7:]:
        after = page.sync_fold(slot).slot
        take = page.sync_take(after, after.C)
        assert take.wait == (after.C != after.A)
        assert not take.record_now, "the event is there"
