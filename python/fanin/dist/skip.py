"""A step in which a rank has nothing: it takes part, without contributions, in the calls that the others make.

A rank that skips sends a header that says so in the place of the next call's. Then every rank sends what a rank needs
to take part in that call, and every rank begins the call again: the one that skips makes it, too, or returns, if the
others are at a later step. So a call has the headers, and the errors, of one that no rank skips.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from typing import Any

from fanin._words import type_of
from fanin.errors import PeerError

from .group import Call, Group, Header, TimeLimit, limit_of, skips_by
from .reducer import Reducer
from .sums import add_n

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: What ranks that closed their group, or ended, without an error say of themselves.
LEFT = re.compile(r"rank \d+ (closed its group|ended) (after pass \d+|before a pass)(; |$)")


@skips_by
def skip(group: Group, reducers: object, timeout: TimeLimit) -> list[Any]:
    """`Group.skip`, in the group's step: the sums of the others' `add_n`."""
    given = reducers_of(group, reducers)
    sums: list[Any] = []
    while (found := _next_call(group, timeout)) is not None:
        header, needs = found
        group._passes -= 1  # the call counts it
        try:
            _take_part(group, header["call"], needs, given, sums, timeout)
        except PeerError:
            if group.closed is not None:
                raise
    return sums


def _next_call(group: Group, timeout: TimeLimit) -> tuple[Header, Header] | None:
    """The header of the next call that another rank makes in this step, and what a rank needs to take part in it;
    None: there is none.
    """
    limit = limit_of("skip", timeout, group.timeout)
    with group.entered("skip"), Call(group, "skip", group._passes, 0, limit) as call:
        try:
            headers = call.say({"skip": True})
        except PeerError as e:
            if LEFT.search(str(e)):
                return None
            raise
        group._passes = max([group._passes, *(h["pass"] for h in headers if "skip" not in h)])
        call.check_steps(headers)
        needs = call.say({})
        last = max(h["step"] for h in headers)
        calls = [rank for rank, h in enumerate(headers) if "skip" not in h and h["step"] == last]
        if group.step == last and calls:
            failed = any(headers[rank]["failure"] for rank in calls)
            return headers[calls[0]], {**needs[calls[0]], "failed": failed}
        if calls:
            group._passes -= 1  # this rank makes that call in the next step
        together = not calls and all(h["step"] == last for h in headers)
        if group.step < last or together:
            return None
    return _next_call(group, timeout)  # those that skipped an earlier step have left it


def _take_part(
    group: Group, call: str, needs: Header, reducers: Sequence[Reducer], sums: list[Any], timeout: TimeLimit
) -> None:
    """Make a call without contributions; or end it with an error on every rank."""
    if call == "barrier":
        group.barrier(timeout)
        return
    if needs["failed"]:
        with group.call(call, timeout) as one:
            one.meet({})  # raises
    if call == "add_n":
        sums.append(add_n([], group, timeout=timeout, **options_of(needs["options"])))
        return
    if call == "backward" and reducers:
        reducer = next((one for one in reducers if one._digest == needs["digest"]), reducers[0])
        _without_gradients(group, reducer)
        return
    remedy = {
        "backward": "expected group.skip(step, reducers=[reducer]), so that its .grad gets the sum, too",
        "accumulate": 'expected an empty block of fanin.torch.accumulate(.., missing="skip") instead of group.skip()',
    }
    with group.call(call, timeout):
        raise RuntimeError(
            f"skip: rank {group.rank} skips step {group.step} and cannot take part in {call}:"
            f" {remedy.get(call, 'expected no such call in a step that a rank skips')}"
        )


@functools.lru_cache(maxsize=16)  # what reads a literal leaves cycles behind
def options_of(text: str) -> dict[str, Any]:
    """The options of an `add_n`, of their text (`Options.text`)."""
    call = ast.parse(f"options({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {one.arg: value_of(one.value) for one in call.keywords if one.arg is not None}


def value_of(expression: ast.expr) -> Any:
    """The value of a literal, or of inf and nan, for which Python has none."""
    text = ast.unparse(expression)
    return float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(expression)


def _without_gradients(group: Group, reducer: Reducer) -> None:
    """A pass of the reducer to which this rank brings nothing."""
    reducer._reset()
    with reducer._reduced(block=True):
        reducer._counted.clear()  # it has no part in the divisor of a mean
        if reducer.missing == "error":
            raise ValueError(
                f"skip: rank {group.rank} skips step {group.step} and brings no gradient: expected a reducer with"
                ' missing="skip" on every rank'
            )


def reducers_of(group: Group, reducers: object) -> list[Reducer]:
    """The reducers, checked: those of the group."""
    given = [reducers] if isinstance(reducers, Reducer) else reducers
    if not isinstance(given, list | tuple):
        raise TypeError(f"skip: reducers: expected reducers of the group, got {type_of(reducers)}")
    for one in given:
        if not isinstance(one, Reducer):
            raise TypeError(f"skip: reducers: expected reducers of the group, got {type_of(one)}")
        if one.group is not group:
            raise ValueError(f"skip: reducers: expected reducers of this group, got one of {one.group!r}")
    return list(given)
