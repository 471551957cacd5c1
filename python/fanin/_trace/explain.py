"""The decisions about a slot, in sentences with the numbers of the rules (`InputBuffer.explain`)."""

from __future__ import annotations

from typing import Literal, TypedDict

from .._words import counted, ordinal, rules_of, size


class Contribution(TypedDict):
    """One that is parked. Streams are handles, 0: none."""

    key: int
    form: str
    dtype: str
    producer: int
    event: bool
    donated: bool
    ready: bool


class View(TypedDict):
    """A slot as the core describes it (csrc/py/buffer/view.c). Streams are handles, 0 for none."""

    buffer: str
    slot: int
    name: str | None
    rules: int
    how: str
    consumer: int
    accum: int
    ready: int
    event: bool
    has_value: bool
    value_ours: bool
    value_form: str
    poisoned: str | None
    dtype: str
    accumulate: str
    count: int
    expected: int
    items: list[Contribution]
    budget: float | Literal["auto"]
    limits: tuple[int, int]
    parked_bytes: int
    alone_bytes: int
    next_key: int
    next_action: str
    next_rules: int
    reuse: str


CASES = {
    "A": "The producer's stream is the consumer's, {consumer}: the sum is taken there, without a wait (S8).",
    "a": (
        "The producer's stream is not the consumer's, {consumer}, of the same device: the sum is taken on {consumer}"
        " (S9)."
    ),
    "B": "The consumer's stream is on another device: the sum is taken on the producer's stream, {accum} (S10).",
    "C": (
        "Neither stream is on the gradients' device: the sum is taken on its current stream (under capture: one of its"
        " pool), {accum} (S11)."
    ),
}

#: What each action of the accumulate rules will do, for dense and sparse alike.
ACTIONS = {
    "into old": "the others will be added into the first, in place",
    "into new": "the first will be added into the second, in place",
    "fresh": "a fresh array will take the sum",
    "merge": "they will be merged as sparse arrays of one kind",
    "merge coo": "they are of two sparse kinds and will be merged as COO",
    "object": "they will be summed by combine or by their own +",
    "exact": "they will be summed exactly and rounded once",
}


def contribution(item: Contribution, place: int) -> str:
    text = f"key {item['key']}" if item["key"] >= 0 else f"the {ordinal(place)} to come"
    if not item["ready"]:  # nothing else is defined until then
        return text + ": still arriving"
    text += ": " + (item["form"] if item["dtype"] == "none" else f"{item['form']} {item['dtype']}")
    if item["producer"]:
        text += f", made on stream {item['producer']}" + (", with an event" if item["event"] else "")
    if item["donated"]:
        text += ", donated"
    return text


def explain(view: View) -> str:
    """Sentences about a slot; the first begins with buffer and slot."""
    where = f"{view['buffer']}: slot {view['slot']}" + (f" ({view['name']})" if view["name"] else "")
    count, expected = view["count"], view["expected"]
    if view["poisoned"]:
        return f"{where}: it is poisoned until clear() empties it: {view['poisoned']}"
    if count == 0 and not view["has_value"]:
        due = f"; {counted(expected, 'contribution')} expected (A16)" if expected >= 0 else ""
        return f"{where}: nothing has come yet{due}."
    items = view["items"]
    of = f" of {expected} expected (A16)" if expected >= 0 else ""
    lines = [f"{where}: {counted(count, 'contribution')}{of} came, {len(items)} of them parked."]
    lines += [*streams(view), *value(view, count - len(items))]
    lines += [f"Parked, {contribution(item, count - len(items) + i + 1)}." for i, item in enumerate(items)]
    lines += [*gap(view), *coming(view), *budget(view)]
    if view["rules"]:
        lines.append(f"Rules that decided so far: {rules_of(view['rules'])}.")
    return "\n".join(lines)


def streams(view: View) -> list[str]:
    if view["how"] not in CASES:
        return ["On the CPU: no streams, so no waits (S3)."]

    def named(stream: int) -> str:
        return f"stream {stream}" if stream else "a stream of its own"

    text = CASES[view["how"]].format(consumer=named(view["consumer"]), accum=named(view["accum"]))
    if not view["ready"]:
        return [text]
    return [
        text,
        f"The value is ready on {named(view['ready'])}" + (", which an event marks." if view["event"] else "."),
    ]


def value(view: View, summed: int) -> list[str]:
    if not view["has_value"]:
        return []
    whose = "the buffer's own memory" if view["value_ours"] else "memory that was added"
    what = f"the sum of {summed}" if summed > 1 else "the first contribution"
    text = f"The slot holds {what}, {view['value_form']}, in {whose}"
    if summed > 1 and view["accumulate"] != "none" and view["accumulate"] != view["dtype"]:
        text += f"; it runs in {view['accumulate']} and will be rounded to {view['dtype']} once (A11)"
    return [text + "."]


def budget(view: View) -> list[str]:
    most, parked, alone = view["budget"], view["parked_bytes"], view["alone_bytes"]
    if most == "auto":
        of = [size(n) for n in view["limits"]]
        return [
            f'budget="auto": of contributions that only the buffer holds {size(alone)} wait, {of[0]} may;'
            f" of those that other code holds {size(parked - alone)} wait, {of[1]} may."
        ]
    may = "" if most == float("inf") else f", {size(most)} may"
    return [f"budget={most}: {size(parked)} wait in all slots{may}."]


def gap(view: View) -> list[str]:
    keys = [item["key"] for item in view["items"]]
    due = view["next_key"]
    if due < 0 or not keys or due in keys:
        return []
    return [f"Key {due} is due next: what lies beyond it waits for it, or for take(), which skips gaps (A15)."]


def coming(view: View) -> list[str]:
    action = view["next_action"]
    if len(view["items"]) + view["has_value"] == 1:
        return [] if view["count"] > 1 else ["It is alone: if it stays so, take() hands it through (A14)."]
    if action not in ACTIONS:
        return []
    why = f": {view['reuse']}" if action in ("fresh", "into old") else ""
    return [f"At the next sum {ACTIONS[action]}{why} ({rules_of(view['next_rules'])})."]
