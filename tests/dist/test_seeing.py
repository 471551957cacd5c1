"""Reports of groups and reducers: traces of all ranks, counters, how a bucket is summed, statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import ranks

import fanin
from fanin import _core, dist
from fanin._trace.line import HOST, Line
from fanin.dist.group import Group
from fanin.dist.reducer import Reducer
from fanin.dist.traces import ROUNDS, offsets
from kit.pictures import Read, outside
from kit.ranks import check_messages, gathered


def leaves_of(*sizes: int, dtype: str = "f4") -> list[fanin.Leaf]:
    return [fanin.Leaf(np.zeros(n, dtype), name=f"w{i}") for i, n in enumerate(sizes)]


def node(leaf: fanin.Leaf) -> Any:
    """A root: a node that gives its gradient to the leaf."""
    return fanin.Node(lambda g: g, edges=[(leaf, 0)], name="Id"), 0, np.ones(leaf.array.shape, leaf.array.dtype)


# ---------------------------------------------------------------- traces


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_bucket_has_an_arrow_from_each_sender_to_each_owner_and_back(n: int) -> None:
    whole, *others = dist.threads(n, gathered, timeout=None)
    assert others == [None] * (n - 1)
    check_messages(whole, n)


def test_steps_of_a_bucket_follow_each_other_on_the_sending_thread() -> None:
    whole = dist.threads(2, gathered, timeout=None)[0]
    picture = whole.picture()
    for rank in range(2):
        mine = [s for s in picture.slices if s.lane.rank == rank and s.bucket]
        assert [s.name for s in mine] == [
            f"bucket {b}: {step}" for b in (0, 1) for step in ("pack", "headers", "to owners", "sum", "back")
        ] + ["pass end: headers"]
        assert all(a.end <= b.start + 1e-3 for a, b in itertools.pairwise(mine))
        nodes = {(n.name, n.lane.stream) for n in picture.nodes if n.lane.rank == rank}
        assert nodes == {("Id", 0), ("w0", 0), ("w1", 0)}, "nodes are on the pass's thread"


def test_the_file_has_a_process_for_each_rank_and_arrows_between_their_slices(tmp_path: Path) -> None:
    whole = dist.threads(2, gathered, timeout=None)[0]
    whole.save(tmp_path / "ranks.json")
    events = json.loads((tmp_path / "ranks.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    slices = [e for e in events if e["ph"] == "X"]
    ends: dict[int, list[Any]] = {}
    for e in events:
        if e["ph"] in "sf" and e["cat"] == "message":
            ends.setdefault(e["id"], []).append(e)
            inside = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] <= e["ts"] <= s["ts"] + s["dur"]
            ]
            assert any(s["cat"] == "bucket" for s in inside)
    assert len(ends) == 8
    for one, other in ends.values():
        assert (one["ph"], other["ph"]) == ("s", "f") and {one["pid"], other["pid"]} == {0, 1}
    flows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(flows) == len(set(flows))


def test_each_rank_has_its_passes_in_the_summary() -> None:
    lines = dist.threads(2, gathered, timeout=None)[0].summary().splitlines()
    assert [line.partition(", pass")[0] for line in lines[::2]] == ["rank 0", "rank 1"]
    assert [line.partition(":")[0] for line in lines[1::2]] == [f"critical path of rank {r}" for r in (0, 1)]


def test_the_picture_has_a_lane_for_each_pass_and_sender(tmp_path: Path) -> None:
    whole = dist.threads(2, gathered, timeout=None)[0]
    whole.plot(tmp_path / "ranks.svg")
    picture = Read((tmp_path / "ranks.svg").read_bytes())
    assert picture.texts("lanes") == ["rank 0", "rank 0, sending", "rank 1", "rank 1, sending"]
    assert "bucket 0: pack" in picture.texts("words") and picture.shapes("wires", "path")
    assert outside(picture) == []


def test_sums_of_arrays_are_traced_too() -> None:
    def rank(group: Group) -> Any:
        with fanin.trace() as t:
            dist.add_n([np.ones(600)], group, into=1)
        return dist.gather_trace(t, group, into=1)

    _, whole = dist.threads(2, rank, timeout=None)
    picture = whole.picture()
    steps = [s.name for s in picture.slices if s.bucket and s.lane.rank == 0]
    assert steps == [f"add_n: {step}" for step in ("headers", "to owners", "sum", "back")]
    assert [(m.source.name, m.target.lane.rank, m.bytes) for m in picture.messages] == [
        ("add_n: to owners", 1, 8 * 344),
        ("add_n: back", 1, 8 * 256),
        ("add_n: to owners", 0, 8 * 256),
    ]


def test_sums_in_two_levels_have_an_arrow_for_each_message() -> None:
    def rank(group: Group) -> Any:
        with fanin.trace() as t:
            dist.add_n([np.ones(1024)], group, "exact")
        return dist.gather_trace(t, group)

    picture = dist.threads(4, rank, nodes=2, timeout=None)[0].picture()
    for r in range(4):
        steps = [s.name for s in picture.slices if s.bucket and s.lane.rank == r]
        names = ("headers", "to node", "sum", "sizes", "to owners", "sum", "back", "back in node")
        assert steps == [f"add_n: {step}" for step in names]
    mate, other = {0: 1, 1: 0, 2: 3, 3: 2}, {0: 2, 2: 0, 1: 3, 3: 1}
    for step, peer in (
        ("to node", mate),
        ("sizes", other),
        ("to owners", other),
        ("back", other),
        ("back in node", mate),
    ):
        found = [m for m in picture.messages if m.source.name == f"add_n: {step}"]
        assert {m.source.lane.rank: m.target.lane.rank for m in found} == peer and len(found) == 4
    assert len(picture.messages) == 5 * 4


def test_messages_of_another_group_have_no_arrows() -> None:
    def rank(group: Group) -> Any:
        other = Group(group._engine, timeout=None)
        with fanin.trace() as t:
            dist.add_n([np.ones(600)], other)
        return dist.gather_trace(t, group)

    picture = dist.threads(2, rank, timeout=None)[0].picture()
    assert picture.messages == [] and sum(s.name == "add_n: back" for s in picture.slices) == 2


def test_a_rank_may_have_an_empty_trace() -> None:
    def rank(group: Group) -> Any:
        with fanin.trace() if group.rank else contextlib.nullcontext():
            dist.add_n([np.ones(3)], group)
        t = fanin.trace()
        if group.rank:
            with t:
                dist.add_n([np.ones(3)], group)
        else:
            dist.add_n([np.ones(3)], group)
        return dist.gather_trace(t, group)

    whole = dist.threads(2, rank, timeout=None)[0]
    assert whole.picture().messages == [] and [len(mine) > 0 for mine in whole.lines] == [False, True]


def test_a_trace_that_cannot_be_gathered_is_refused_on_every_rank() -> None:
    def refused(group: Group, kind: type[Exception], words: str, *args: Any, **options: Any) -> None:
        with pytest.raises(kind if group.rank == 1 else fanin.PeerError, match=words):
            dist.gather_trace(*args, group, **options)

    def rank(group: Group) -> Any:
        here = group.rank == 1
        with fanin.trace() as t:
            refused(group, ValueError, "is recording", t if here else fanin.trace())
        refused(group, TypeError, "expected a trace by fanin.trace", 3 if here else t)
        refused(group, ValueError, "a rank from 0 to 1, got 2", t, into=2 if here else 0)
        with fanin.sim.Machine(1) as m, fanin.trace() as device:
            m.launch(m.stream(), lambda: None)
        refused(group, ValueError, "got one of a device", device if here else t)
        with pytest.raises(fanin.PeerError, match="rank 1 has into=1; rank 0 has into=0"):
            dist.gather_trace(t, group, into=group.rank)
        return dist.gather_trace(t, group) is None

    assert dist.threads(2, rank, timeout=None) == [False, True]


# ---------------------------------------------------------------- clocks


def exchanged(rng: np.random.Generator, ahead: Any, rounds: int) -> Any:
    """Return [begin, end] of exchanges, of ranks with clocks that are ahead: no exchange ends before all have begun."""
    made, now = [], np.zeros(len(ahead))
    for _ in range(rounds):
        begin = now + rng.exponential(50_000, len(ahead))
        now = np.maximum(begin.max(), begin) + rng.exponential(20_000, len(ahead))
        made.append(np.stack([begin + ahead, now + ahead], axis=1))
    return np.array(made).astype(np.int64).transpose(1, 0, 2)


def test_the_offset_of_a_clock_is_within_its_stated_error() -> None:
    rng = np.random.default_rng(1)
    worst = 0
    for _ in range(200):
        ahead = rng.integers(-(10**12), 10**12, 4)
        into = int(rng.integers(4))
        found, errors = offsets(exchanged(rng, ahead, ROUNDS), into)
        for r in range(4):
            assert abs(found[r] - (ahead[r] - ahead[into])) <= errors[r] + 2
        worst = max(worst, *errors)
    assert worst < 100_000, "some exchange of 32 is short"


def test_lines_are_moved_to_the_gathering_ranks_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's clock is an hour ahead: the arrows do not show it."""
    hour = 3600 * 10**9
    real_lines, real_ns = fanin._trace.recording.Trace.lines.fget, time.monotonic_ns  # type: ignore[attr-defined]
    import threading

    def ahead() -> int:
        return hour if threading.current_thread().name == "rank 1" else 0

    def lines(self: Any) -> tuple[Line, ...]:
        from fanin._trace.ranks import moved

        return tuple(moved(line, ahead()) for line in real_lines(self))

    def rank(group: Group) -> Any:
        with fanin.trace() as t:
            dist.add_n([np.ones(600)], group)
        return dist.gather_trace(t, group)

    monkeypatch.setattr(fanin._trace.recording.Trace, "lines", property(lines))
    monkeypatch.setattr("fanin.dist.traces.time.monotonic_ns", lambda: real_ns() + ahead())
    whole = dist.threads(2, rank, timeout=None)[0]
    assert whole.offsets_ns[0] == 0 and abs(whole.offsets_ns[1] - hour) <= whole.errors_ns[1] < 10**9
    assert all(line.device == HOST for mine in whole.lines for line in mine)
    assert len(whole.picture().messages) == 4
    assert max(s.end for s in whole.picture().slices) < 60e6


# ---------------------------------------------------------------- counters


@pytest.mark.parametrize("order", ["key", "rank", "exact"])
def test_counters_have_the_messages_and_bytes_of_a_pass(order: str) -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(256 * 8, 256 * 4)
        reducer = Reducer(leaves, group, order=order, bucket_bytes=1)  # type: ignore[arg-type]
        before = group.counters
        fanin.backward([node(w) for w in leaves], reducer=reducer)
        now, headers = group.counters, group._tally.first_bytes
        return now.sums - before.sums, now.messages - before.messages, now.bytes_sent - before.bytes_sent - headers

    for sums, messages, sent in dist.threads(4, rank, timeout=None):
        # three other ranks: two buckets of headers, terms and sums, and the headers of the pass's end
        assert (sums, messages) == (2, 3 * (2 * 3 + 1))
        back = 3 * 4 * (256 * 12) // 4
        assert sent == 2 * back  # one contribution travels as it is in each order


def counted(n: int, nodes: Any, each: int, size: int, order: Any = "exact") -> list[dist.GroupCounters]:
    """The counters of a sum of `each` arrays of ones on each rank, of `size` float32, without the bytes of headers."""

    def rank(group: Group) -> dist.GroupCounters:
        dist.add_n([np.ones(size, "f4")] * each, group, order)
        made, tally = group.counters, group._tally
        sent, between = made.bytes_sent - tally.first_bytes, made.bytes_between - tally.first_between
        return dataclasses.replace(made, bytes_sent=sent, bytes_between=between)

    return dist.threads(n, rank, nodes=nodes, timeout=None)


def packed_bytes(terms: int, size: int) -> int:
    window = _core.window_new("float32", size)
    _core.window_add(window, (np.ones(size, "f4"),) * terms)
    return _core.window_pack(window, np.empty(_core.window_room(window), np.uint8))


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (4, 1), (4, 2), (6, 2), (6, 3), (8, 2), (9, 3)])
def test_the_model_has_the_messages_and_bytes_that_a_sum_counts_also_between_nodes(
    n: int, nodes: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bytes of headers, whose texts differ in length."""
    monkeypatch.setattr(ranks, "HEADER", 0)
    size, node = n * 512, n // nodes
    to_owner = packed_bytes(each, 512) / 2048 if each > 1 else ranks.ONE
    several = packed_bytes(each * node, 512) / 2048
    parts = [ranks.flat(4 * size, n, to_owner, node=node)]
    if nodes > 1:
        parts = ranks.two_levels(4 * size, n, to_owner, node, several)
    expected = [sum(s.messages for s in parts), sum(s.sent for s in parts)]
    expected += [sum(s.messages * s.far for s in parts), sum(s.sent * s.far for s in parts)]
    for c in counted(n, nodes, each, size):
        assert [c.messages, c.bytes_sent, c.messages_between, c.bytes_between] == pytest.approx(expected)


def test_a_node_sends_one_sum_to_each_other_node() -> None:
    """In one level each of its four ranks sends its own. A left fold runs through the first node to the last one."""
    flat, two = counted(8, [0, 1] * 4, 1, 8 * 512, "key")[0], counted(8, 2, 1, 8 * 512)[0]
    assert (flat.messages_between, two.messages_between) == (3 * 4, 4 + 3)
    assert [flat.bytes_between, two.bytes_between] == [4 * 2048 * 2, packed_bytes(4, 512) + 8 + 2048]
    first, *_, last = counted(8, 2, 1, 8 * 512, "key")
    assert (first.messages_between, last.messages_between) == (4 + 1 + 1, 4 + 1 + 1)
    assert [first.bytes_between, last.bytes_between] == [2 * 2048 + 2048, 2048 + 2048]


def test_the_share_of_sending_during_a_pass_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(waits: bool) -> list[float]:
        def rank(group: Group) -> float:
            first, last = leaves_of(3000, 3000)
            reducer = Reducer([first, last], group, bucket_bytes=1)
            made = group._tally

            def until_sent(g: Any) -> Any:
                while waits and made.counters().sums < 1:
                    os.sched_yield()
                return g

            late = fanin.Node(until_sent, edges=[(first, 0)], name="Late")
            ones = np.ones(3000, "f4")
            fanin.backward([(late, 0, ones), (last, 0, ones)], reducer=reducer)
            return group.counters.hidden

        return dist.threads(2, rank, timeout=None)

    assert all(0 < x <= 1 for x in share(True)), "the last bucket travelled while the pass waited for it"
    assert all(0 <= x <= 1 for x in share(False))


def test_a_group_without_sums_has_counted_nothing() -> None:
    def rank(group: Group) -> Any:
        before = group.counters
        group.barrier()
        return before == dist.GroupCounters(), group.counters.messages, group.counters.sums, group.counters.hidden

    assert dist.threads(3, rank, timeout=None) == [(True, 2, 0, 0.0)] * 3


# ---------------------------------------------------------------- explain


def data_sent(group: Group) -> int:
    """The bytes that travelled beside headers."""
    return group._tally.bytes_sent


def explained(group: Group, order: Any, **options: Any) -> tuple[str, str, int]:
    """The explanation of a bucket and of a leaf after a pass with two contributions of ranks 1 .., and the bytes that
    travelled beside headers.
    """
    a, b = fanin.Leaf(np.zeros(300, "f2"), name="a"), fanin.Leaf(np.zeros((40, 50), "f2"), name="b")
    reducer = Reducer([a, b], group, order=order, **options)
    assert "No sum of it was made yet" in reducer.explain(0)
    rng = np.random.default_rng(group.rank)

    def some() -> Any:
        return [(w, 0, rng.standard_normal(w.array.shape).astype("f2")) for w in (a, b)]

    for key in (group.rank + 10, None):
        if key and group.rank:
            with reducer.accumulate(key if order == "key" else None):
                fanin.backward(some())
        elif key is None:
            before = data_sent(group)
            fanin.backward(some(), reducer=reducer.at(group.rank if order == "key" else None))
    return reducer.explain(0), reducer.explain(a), data_sent(group) - before


def test_explain_names_owners_terms_order_and_wire() -> None:
    bucket, leaf, _ = dist.threads(3, lambda g: explained(g, "key", scale=0.5), timeout=None)[1]
    assert bucket.splitlines() == [
        "bucket 0 of 1: b, a: 2300 elements, 4.492 KiB.",
        "float16: rank 0 owns elements 0 to 767, rank 1 owns elements 768 to 1535, rank 2 owns elements 1536 to 2299"
        " (N1).",
        "Terms: 1 of rank 0, 2 of rank 1, 2 of rank 2.",
        "The owner folds from the left, in float32: key 0 of rank 0, key 1 of rank 1, key 2 of rank 2, key 11 of"
        " rank 1, key 12 of rank 2 (N2).",
        "This rank sent float16 to owners: 5.984 KiB.",
        "The owner multiplies the sum by 0.5 before it rounds (N5).",
        "Each owner sends its part of the sum to all ranks, as float16; this rank 1.5 KiB to each (N6).",
    ]
    assert leaf.splitlines()[1] == "a, float16: rank 2 owns elements 0 to 299 (N1)."


@pytest.mark.parametrize(("order", "rule"), [(None, "N4"), ("rank", "N4"), ("exact", "N3")])
def test_explain_has_the_rule_of_the_order_and_the_bytes_that_travelled(order: Any, rule: str) -> None:
    for rank, (text, _, sent) in enumerate(dist.threads(3, lambda g: explained(g, order, into="shard"), timeout=None)):
        assert f"({rule})" in text and 'into="shard": each owner keeps its part' in text
        line = next(line for line in text.splitlines() if line.startswith("This rank sent"))
        amount, unit = line.partition(": ")[2].split()[:2]
        if "packed: " in line:
            amount, unit = line.partition("packed: ")[2].split()[:2]
        exactly = float(amount) * {"B": 1, "KiB": 1024}[unit.rstrip(".,")]
        assert exactly == pytest.approx(sent, rel=1e-3), rank


def test_explain_names_the_levels_of_a_sum() -> None:
    def rank(group: Group) -> tuple[str, int]:
        w = fanin.Leaf(np.zeros(1024, "f4"), name="w")
        reducer = Reducer([w], group, order="exact")
        fanin.backward([node(w)], reducer=reducer)
        near = data_sent(group) - group._tally.bytes_between
        return reducer.explain(w), near - 2 * 1024  # the sum

    text, near = dist.threads(4, rank, nodes=2, timeout=None)[2]
    assert text.splitlines()[2:] == [
        "Terms: 1 of rank 0, 1 of rank 1, 1 of rank 2, 1 of rank 3.",
        "Each rank adds its terms exactly, then the ranks of a node add these sums; the owner adds the sums of 2 nodes,"
        " and rounds once (N3).",
        "This rank sent float32 to the ranks of its node: 2 KiB.",
        "It sent sums of its node to rank 0, packed.",
        "Each owner sends its part of the sum to a rank of every node, and these to all ranks of their nodes, as"
        " float32; this rank 1 KiB to each (N6).",
    ]
    assert near == 2048


def test_explain_names_the_ranks_without_a_gradient() -> None:
    def rank(group: Group) -> str:
        leaves = leaves_of(300, 300)
        reducer = Reducer(leaves, group, missing="skip")
        fanin.backward([node(w) for w in leaves[group.rank == 1 :]], reducer=reducer)
        return reducer.explain(leaves[0])

    assert "No term of w0 on rank 1 (N7)." in dist.threads(2, rank, timeout=None)[0]


def test_a_bucket_or_leaf_without_an_explanation_is_refused() -> None:
    def rank(group: Group) -> None:
        reducer = Reducer(leaves_of(3), group)
        for which, kind, words in (
            (1, IndexError, "a bucket from 0 to 0, got 1"),
            (fanin.Leaf(np.zeros(3)), ValueError, "a leaf of this reducer"),
            ("w0", ValueError, "a leaf of this reducer"),
        ):
            with pytest.raises(kind, match=words):
                reducer.explain(which)

    dist.threads(1, rank, timeout=None)


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(("n", "nodes"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("into", ["all", "shard", 1])
def test_statistics_are_those_of_the_whole_sum_on_every_rank(into: Any, n: int, nodes: int) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((2, 700)).astype("f4") for _ in range(n)]

    def rank(group: Group) -> Any:
        leaves = leaves_of(700, 700)
        reducer = Reducer(leaves, group, order="exact", into=into)
        fanin.backward([(w, 0, g) for w, g in zip(leaves, arrays[group.rank], strict=True)], reducer=reducer)
        return reducer.stats(), reducer.norm()

    total = fanin.add_n(arrays, accumulate="exact")
    for stats, norm in dist.threads(n, rank, nodes=nodes, timeout=None):
        assert stats.norm == norm == pytest.approx(float(np.linalg.norm(total.astype("f8"))))
        assert (stats.absmax, stats.nonfinite, stats.bad) == (float(np.abs(total).max()), 0, None)


@pytest.mark.parametrize(("order", "expected"), [("key", (2, 0, 5)), ("exact", (1, 1, None)), ("rank", (1, 1, None))])
def test_the_first_bad_contribution_is_named_on_every_rank(order: Any, expected: Any) -> None:
    """Rank 1's second contribution has key 11, rank 2's first one 5."""

    def rank(group: Group) -> Any:
        leaves = leaves_of(300, 300)
        reducer = Reducer(leaves, group, order=order, stats=True, bucket_bytes=1)
        bad = {(1, 1), (2, 0), (2, 1)}
        for turn, key in enumerate(([0, 1], [10, 11], [5, 6])[group.rank]):
            grads = [np.full(300, np.inf if (group.rank, turn) in bad and i == 1 else 1, "f4") for i in (0, 1)]
            some = [(w, 0, g) for w, g in zip(leaves, grads, strict=True)]
            number = key if order == "key" else None
            if turn == 0:
                with reducer.accumulate(number):
                    fanin.backward(some)
            else:
                fanin.backward(some, reducer=reducer.at(number))
        first = reducer.stats()
        for w in leaves:
            w.grad = None
        number = 20 + group.rank if order == "key" else None
        fanin.backward([(w, 0, np.ones(300, "f4")) for w in leaves], reducer=reducer.at(number))
        return first, reducer.stats()

    for first, second in dist.threads(3, rank, timeout=None):
        assert first.norm == float("inf") and (first.absmax, first.nonfinite) == (6.0, 300)
        r, place, key = expected
        assert first.bad == dist.BadTerm(r, "w1", 300, place, key)
        assert (second.nonfinite, second.bad) == (0, None), "of the last pass alone"


def test_without_stats_no_contribution_is_named() -> None:
    def rank(group: Group) -> Any:
        [w] = leaves_of(3)
        reducer = Reducer([w], group)
        fanin.backward([(w, 0, np.array([1, np.nan, 1], "f4"))], reducer=reducer)
        return reducer.stats()

    assert dist.threads(2, rank, timeout=None) == [dist.SumStats(float("inf"), 2.0, 1, None)] * 2
