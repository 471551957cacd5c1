"""The decisions about a slot, in sentences with the numbers of the rules (`InputBuffer.explain`)."""

from __future__ import annotations

from typing import Any

from .._words import counted, ordinal, rules_of, size

__tracebackhide__ = True  # no frames of ours in reports of pytest

View = dict[str, Any]  #: a slot as csrc/py/buffer/buffer.c describes it; streams are handles, 0 for none

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


def explain(view: View) -> str:
    """Sentences about a slot; the first begins with buffer and slot."""
    where = f"{view['buffer']}: slot {view['slot']}" + (f" ({view['name']})" if view["name"] else "")
    count, expected, items = view["count"], view["expected"], view["items"]
    if view["poisoned"]:
        return f"{where}: it is poisoned until clear() empties it: {view['poisoned']}"
    if count == 0 and not view["has_value"]:
        due = f"; {counted(expected, 'contribution')} expected (A16)" if expected >= 0 else ""
        return f"{where}: nothing has come yet{due}."
    of = f" of {expected} expected (A16)" if expected >= 0 else ""
    lines = [f"{where}: {counted(count, 'contribution')}{of} came, {len(items)} of them parked."]

    def stream(handle: int) -> str:
        return f"stream {handle}" if handle else "a stream of its own"

    if view["how"] in CASES:
        lines.append(CASES[view["how"]].format(consumer=stream(view["consumer"]), accum=stream(view["accum"])))
        if view["ready"]:
            event = ", which an event marks" if view["event"] else ""
            lines.append(f"The value is ready on {stream(view['ready'])}{event}.")
    else:
        lines.append("On the CPU: no streams, so no waits (S3).")
    summed = count - len(items)
    if view["has_value"]:
        owner = "the buffer's own memory" if view["value_ours"] else "memory that was added"
        what = f"the sum of {summed}" if summed > 1 else "the first contribution"
        text = f"The slot holds {what}, {view['value_form']}, in {owner}"
        if summed > 1 and view["accumulate"] != "none" and view["accumulate"] != view["dtype"]:
            text += f"; it runs in {view['accumulate']} and will be rounded to {view['dtype']} once (A11)"
        lines.append(text + ".")
    for place, item in enumerate(items, summed + 1):
        text = f"key {item['key']}" if item["key"] >= 0 else f"the {ordinal(place)} to come"
        if item["ready"]:
            text += ": " + (item["form"] if item["dtype"] == "none" else f"{item['form']} {item['dtype']}")
            if item["producer"]:
                text += f", made on stream {item['producer']}" + (", with an event" if item["event"] else "")
            text += ", donated" if item["donated"] else ""
        else:  # nothing else is defined until then
            text += ": still arriving"
        lines.append(f"Parked, {text}.")
    keys, due = [item["key"] for item in items], view["next_key"]
    if due >= 0 and keys and due not in keys:
        lines.append(f"Key {due} is due next: what lies beyond it waits for it, or for take(), which skips gaps (A15).")
    action = view["next_action"]
    if len(items) + view["has_value"] == 1:
        if count == 1:
            lines.append("It is alone: if it stays so, take() hands it through (A14).")
    elif action in ACTIONS:
        why = f": {view['reuse']}" if action in ("fresh", "into old") else ""
        lines.append(f"At the next sum {ACTIONS[action]}{why} ({rules_of(view['next_rules'])}).")
    most, parked, alone = view["budget"], view["parked_bytes"], view["alone_bytes"]
    if most == "auto":
        limits = [size(n) for n in view["limits"]]
        lines.append(
            f'budget="auto": of contributions that only the buffer holds {size(alone)} wait, {limits[0]} may;'
            f" of those that other code holds {size(parked - alone)} wait, {limits[1]} may."
        )
    else:
        may = "" if most == float("inf") else f", {size(most)} may"
        lines.append(f"budget={most}: {size(parked)} wait in all slots{may}.")
    if view["rules"]:
        lines.append(f"Rules that decided so far: {rules_of(view['rules'])} (docs/rules.md).")
    return "\n".join(lines)
