"""The rules S again, as readable Python: pure functions of (device, stream) pairs, written from the page of rules and
not from C, which is compared with them case by case (test_stream_rules.py).

D is the device of the incoming gradient; P, C the producer's and the consumer's stream; A the accumulation stream;
R the stream where the slot's value became ready; E the event recorded there.
"""

from __future__ import annotations

from typing import NamedTuple

StreamId = tuple[int, int]  # (device, stream); device 0 is every device without streams, stream 0 is "not set"
NOWHERE: StreamId = (0, 0)
Rules = frozenset[str]


class Slot(NamedTuple):
    """What a slot remembers of streams."""

    C: StreamId = NOWHERE
    A: StreamId = NOWHERE
    R: StreamId = NOWHERE
    has_event: bool = False


class Add(NamedTuple):
    how: str  # "-" no streams, "A" same stream, "a" other, "B" producer only, "C" neither, "+" a later gradient
    P: StreamId
    slot: Slot
    record: bool  # an event on P
    mark: bool  # the gradient is used on A from now on
    rules: Rules


def sync_add(D: int, P: StreamId, C: StreamId, current: StreamId, slot: Slot) -> Add:
    """S3-S5, S8-S12: a gradient arrives; `current` is D's current stream, or, under a capture that cannot have it (S7),
    one of D's pool.
    """
    if D == 0:
        return Add("-", NOWHERE, slot, False, False, frozenset({"S3"}))
    rules = set()
    if not P[1]:
        P = current
        rules.add("S4")
    if slot.A[1]:
        return Add("+", P, slot, P != slot.A, False, frozenset(rules))
    if slot.C[1]:
        C = slot.C
    elif not C[1]:
        C = current
        rules.add("S5")
    if C[0] == D:
        how, A, rule = ("A", C, "S8") if C == P else ("a", C, "S9")
    elif P[0] == D:
        how, A, rule = "B", P, "S10"
    else:
        how, A, rule = "C", current, "S11"
    record = how != "A"
    return Add(how, P, Slot(C, A, P, record), record, how == "a", frozenset(rules | {rule}))


class Convert(NamedTuple):
    on_producer: bool
    rules: Rules


def sync_convert(D: int, P: StreamId, A: StreamId) -> Convert:
    """S21: a conversion runs on P, before P's event, if P is on D; else on A, after A waited for P."""
    here = D == 0 or P[0] == D
    return Convert(here, frozenset({"S21"}))


class Term(NamedTuple):
    wait: bool  # A waits for P's event
    mark: bool  # the gradient is used on A
    rules: Rules


def sync_term(A: StreamId, P: StreamId, first: bool, covered: bool = False) -> Term:
    """S12, S13: one term of a sum on A; the first is the slot's value, or what was its first gradient.

    It is used on A wherever it was made: its memory may be a third stream's (Lifetime). A newer event of the same
    stream that another term has covers it.
    """
    apart = A[1] != 0 and P[1] != 0 and P != A
    return Term(apart and not covered, A[1] != 0, frozenset({"S13" if first else "S12"} if apart else set()))


class Fold(NamedTuple):
    slot: Slot  # with an event, if one was recorded on A
    rules: Rules


def sync_fold(slot: Slot) -> Fold:
    """S14-S17: the sum stays in the slot."""
    if not slot.A[1]:
        return Fold(slot, frozenset({"S3"}))
    away = slot.C != slot.A
    rules = {"S14", "S17", "S15" if away else "S16"}
    return Fold(slot._replace(R=slot.A, has_event=away), frozenset(rules))


class Take(NamedTuple):
    wait: bool
    record_now: bool
    mark: bool
    rules: Rules


def sync_take(slot: Slot, consumer: StreamId) -> Take:
    """S18, S19: the consumer's stream waits for a defined value, and uses it."""
    if not slot.R[1] or not consumer[1]:
        return Take(False, False, False, frozenset())
    if consumer == slot.R:
        return Take(False, False, True, frozenset({"S19"}))
    return Take(True, not slot.has_event, True, frozenset({"S18", "S19"}))


class Finish(NamedTuple):
    wait_taker: bool
    mark_out: bool
    slot: Slot
    rules: Rules


def sync_finish(slot: Slot, has_out: bool, taker: StreamId) -> Finish:
    """S22: rounding, `scale` and `out` run on A, after A waited for the taker's stream if `out` is given.

    The event on A is left to S18 where the consumer is on A already, as in S16.
    """
    if not slot.A[1]:
        return Finish(False, False, slot, frozenset({"S3"}))
    away = slot.C != slot.A
    wait = has_out and taker[1] != 0 and taker != slot.A
    return Finish(wait, has_out, slot._replace(R=slot.A, has_event=away), frozenset({"S22"}))


def capture(s: int, t: int, free: bool, legacy: bool) -> str:
    """S7: stream s is to wait for stream t; s and t are the numbers of the captures they are in (0: none).

    free: redirection is on, and the slot is empty or s is only the consumer's. legacy: s is the legacy default stream.
    """
    if s == t:
        return "go"  # in no capture, or both in the same one
    if s:
        return "error"  # a captured stream cannot wait for what the capture does not hold
    if free:
        return "redirect"
    return "error" if legacy else "go"
