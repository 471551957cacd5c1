"""`fanin.compare` names the first node, slot and key in which two passes differ, and nothing where none do (G3)."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin._trace import compare as under_test
from fanin._trace.digests import CONTRIBUTION, SUM, run_of
from fanin.cli import main
from kit.sample import sizes
from kit.two_runs import PLANTS, Net, Plant, drawn, run

pytestmark = [pytest.mark.core, pytest.mark.rule("G3")]


def planted(seed: int, kind: str) -> tuple[Net, Plant]:
    """A graph, and a node of it at which a difference of this kind can be seen."""
    r = random.Random(seed)
    for k in range(100):
        net = drawn(seed + 1000 * k)
        places = net.swappable() if kind == "order" else list(net.nodes)
        if places:
            return net, Plant(kind, r.choice(places))
    raise AssertionError(f"seed {seed}: no graph for {kind}")


def wrong(found: Any, net: Net, plant: Plant) -> str:
    """What is wrong with a difference that was found; "": nothing."""
    d = found.difference
    if d is None:
        return f"nothing was found, and {plant} was planted"
    if plant.kind == "order":
        swapped = {next(iter(net.fans[plant.at])), net.fans[plant.at][-1]}
        expected: tuple[Any, ...] = ("sum", "order", True, "")  # it may be an earlier sum of one of the two
        got: tuple[Any, ...] = (d.what, d.reason, bool(swapped & set(net.fans[d.node])), d.maker)
    elif plant.kind == "hook":
        expected = ("sum after hooks", "missing", plant.at, "")
        got = (d.what, d.reason, d.node, d.maker)
    else:
        to = net.nodes[plant.at][-1][0]
        reason = {"value": "value", "dtype": "dtype", "missing": "dtype"}[plant.kind]
        expected = ("contribution", reason, to, plant.at)
        got = (d.what, d.reason, d.node, d.maker)
    if got != expected:
        return f"expected {expected}, got {got}: {d}"
    if plant.kind != "order" and plant.kind != "hook" and d.key != key_of(net, plant.at):
        return f"expected key {key_of(net, plant.at)}, got {d.key}"
    named = d.node if plant.kind == "order" else plant.at
    return "" if f"node {named}" in str(d) else f"{named} is not named: {d}"


def key_of(net: Net, at: str) -> int:
    """The key of the last edge of a node."""
    to = net.nodes[at][-1][0]
    return max(i for i, name in enumerate(net.fans[to]) if name == at)


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("count", sizes(10, 100))
def test_each_planted_difference_is_named(kind: str, count: int) -> None:
    for seed in range(count):
        net, plant = planted(seed, kind)
        said = wrong(fanin.compare(run(net), run(net, plant)), net, plant)
        assert not said, f"seed {seed}: {said}"


@pytest.mark.parametrize("count", sizes(10, 100))
def test_equal_runs_differ_in_nothing(count: int) -> None:
    """On several workers, in any order of nodes, with any budget: the bits are the same (A15), so the digests are."""
    compared = 0
    for seed in range(count):
        net = drawn(seed)
        one = run(net)
        for how in ({}, {"workers": 2}, {"budget": 0}, {"schedule": random.Random(seed).choice}, {"keep_graph": True}):
            found = fanin.compare(one, run(net, **how))
            assert found and found.unknown == 0, f"seed {seed}, {how}: {found}"
            compared += found.compared
    assert compared > 100 * count


@pytest.mark.rule("A11")
def test_an_exact_sum_of_equal_contributions_is_equal_in_any_order() -> None:
    seen = 0
    for seed in range(60):
        plain = drawn(seed)
        for at in plain.swappable(nodes=True)[:1]:
            net = Net(plain.leaves, plain.nodes, exact=True)
            assert fanin.compare(run(net), run(net, Plant("order", at)))
            assert not fanin.compare(run(plain), run(plain, Plant("order", at)))
            seen += 1
    assert seen > 5, "no graph had a sum that its order changes"


# Checkers that see less must fail


def ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = under_test.Walk.in_pass

    def half(self: Any, units: Any) -> Any:
        return whole(self, [u.__class__(u.name, u.nodes, u.records[: len(u.records) // 2]) for u in units])

    monkeypatch.setattr(under_test.Walk, "in_pass", half)


def sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = under_test.Walk.in_pass

    def some(self: Any, units: Any) -> Any:
        return whole(self, [u.__class__(u.name, u.nodes, tuple(r for r in u.records if r.what == SUM)) for u in units])

    monkeypatch.setattr(under_test.Walk, "in_pass", some)


def contributions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = under_test.Walk.in_pass

    def some(self: Any, units: Any) -> Any:
        given = [tuple(r for r in u.records if r.what == CONTRIBUTION) for u in units]
        return whole(self, [u.__class__(u.name, u.nodes, g) for u, g in zip(units, given, strict=True)])

    monkeypatch.setattr(under_test.Walk, "in_pass", some)


def half_of_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = under_test.run_of

    def run_of(lines: Any, dropped: int = 0) -> Any:
        found = whole(lines, dropped)
        units = [u.__class__(u.name, u.nodes, tuple(r._replace(digest=1) for r in u.records)) for u in found.units]
        return found.__class__(tuple(units), dropped)

    monkeypatch.setattr(under_test, "run_of", run_of)


@pytest.mark.parametrize("plant", [ends_early, sums_alone, contributions_alone, half_of_a_digest])
def test_a_comparison_that_stops_early_or_leaves_something_out_is_found(
    plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    said = Counter(
        bool(wrong(fanin.compare(run(net), run(net, p)), net, p))
        for kind in PLANTS
        for seed in range(10)
        for net, p in [planted(seed, kind)]
    )
    assert said[True], "the planted fault is not found"


# What a difference says


def test_a_difference_is_a_sentence_with_pass_node_slot_and_key() -> None:
    net = Net(("w",), {"a": (("w", 2.0),), "b": (("w", 3.0),), "top": (("a", 1.0), ("b", 1.0))}, exact=False)
    found = fanin.compare(run(net), run(net, Plant("value", "b")))
    assert not found
    first, second = str(found).splitlines()
    assert first.startswith("first difference of b and a: pass 1, slot 0 of node w, key 0: contribution float64 (5,) ")
    assert second == (
        "node b made it at index 0: its own sums are equal, so look at its function, its hooks and its data."
    )
    assert (found.difference.node, found.difference.slot, found.difference.key) == ("w", 0, 0)
    assert (found.difference.rank, found.difference.maker, found.difference.unit) == (None, "b", 0)


def test_a_root_that_differs_was_given_by_the_caller() -> None:
    def one(c: float) -> Any:
        w = fanin.Leaf(np.zeros(2), name="w")
        with fanin.trace(digests=True) as t:
            fanin.backward([(w, 0, np.ones(2)), (w, 0, np.full(2, c))])
        return t

    found = fanin.compare(one(1.0), one(2.0))
    assert "The caller of the pass gave it, as root 1" in str(found)
    assert found.difference.key == 1 and found.difference.maker == ""


def test_a_leaf_that_was_not_cleared_is_named() -> None:
    def one(start: Any) -> Any:
        w = fanin.Leaf(np.zeros(2), name="w")
        w.grad = start
        with fanin.trace(digests=True) as t:
            fanin.backward([(w, 0, np.ones(2))])
        return t

    found = fanin.compare(one(None), one(np.ones(2)))
    assert found.difference.what == "leaf" and "the leaf's gradient before the pass differs" in str(found)
    assert not fanin.compare(one(None), one(np.ones(2)), leaves=True)
    assert fanin.compare(one(np.ones(2)), one(np.ones(2)))


def test_a_hook_that_changes_a_sum_is_named() -> None:
    net = drawn(3)
    found = fanin.compare(run(net, Plant("hook", "top")), run(net))
    assert found.difference.what == "sum after hooks" and found.difference.reason == "missing"


def test_objects_have_no_digest_and_are_counted() -> None:
    class Word:
        def __add__(self, other: Any) -> Any:
            return self

    def one() -> Any:
        sink = fanin.Node(lambda g: None, name="sink")
        node = fanin.Node(lambda g: (Word(), np.ones(2)), edges=[(sink, 0), (fanin.Leaf(np.zeros(2)), 0)], name="node")
        with fanin.trace(digests=True) as t:
            fanin.backward([(node, 0, np.ones(2))])
        return t

    found = fanin.compare(one(), one())
    assert found and found.unknown == 2 and str(found).endswith("equal; 2 digests missing")
    texts = [line.label for line in one().lines if line.kind == "digest" and not line.digest]
    assert texts == ["Word: no digest: an object of its own"] * 2


# Buffers outside of passes


def buffered(order: Any, *, keys: bool = False, budget: Any = "auto", spoil: int = -1) -> Any:
    values = [np.full(3, x) for x in (1 / 3, 1e17, -1e17, 3e-5, 0.1)]
    if spoil >= 0:
        values[spoil][1] += 1e-6
    with fanin.trace(digests=True) as t:
        buf = fanin.InputBuffer([fanin.Slot(name="x"), fanin.Slot(name="bias")], budget=budget)
        for k in order:
            buf.add(1, values[k], key=k if keys else None)
        buf.take()
    return t


def test_contributions_without_keys_that_arrive_in_another_order_lack_keys() -> None:
    found = fanin.compare(buffered((0, 1, 2, 3, 4)), buffered((4, 1, 2, 3, 0)))
    assert (found.difference.node, found.difference.slot, found.difference.reason) == ("bias", 1, "order")
    assert "have no keys: give add(key=)" in str(found)
    for budget in (0, "auto"):
        assert fanin.compare(buffered((0, 1, 2, 3, 4), keys=True), buffered((4, 1, 2, 3, 0), keys=True, budget=budget))


def test_swapped_keys_of_a_buffer_are_named() -> None:
    def one(keys: Any) -> Any:
        with fanin.trace(digests=True) as t:
            buf = fanin.InputBuffer(1, name="grads")
            for k, x in zip(keys, (1 / 3, 1e17, -1e17, 0.1), strict=True):
                buf.add(0, np.full(3, x), key=k)
            buf.take()
        return t

    found = fanin.compare(one((0, 1, 2, 3)), one((3, 1, 2, 0)))
    assert found.difference.reason == "order" and "they were swapped" in str(found)


def test_a_contribution_of_a_buffer_that_differs_is_named_by_its_key() -> None:
    found = fanin.compare(buffered((0, 1, 2, 3, 4), keys=True), buffered((3, 1, 2, 0, 4), keys=True, spoil=3))
    assert (found.difference.what, found.difference.key, found.difference.slot) == ("contribution", 3, 1)
    assert "The caller of add() gave it" in str(found)


# Files


def test_a_slot_of_a_buffer_is_named_by_its_own_name() -> None:
    def run(value: float) -> Any:
        with fanin.trace(digests=True) as trace:
            buf = fanin.InputBuffer([fanin.Slot(name="weight"), fanin.Slot(name="bias"), fanin.Slot()])
            for slot, x in ((2, 1.0), (0, 1.0), (1, value)):
                buf.add(slot, np.full(2, x))
            buf.take()
        return trace

    assert "buffer weight, taken the 1st time, slot 1 (bias), the 1st contribution" in str(
        fanin.compare(run(1.0), run(2.0))
    )


def saved(t: Any, path: Path) -> Path:
    t.save(path)
    return path


def test_files_and_traces_compare_alike(tmp_path: Path) -> None:
    net, plant = planted(5, "value")
    one, two = run(net), run(net, plant)
    a, b = saved(one, tmp_path / "a.json"), saved(two, tmp_path / "b.json")
    assert fanin.compare(a, one) and fanin.compare(one, a) and fanin.compare(str(b), two)
    assert fanin.compare(a, b).difference.maker == plant.at
    assert str(fanin.compare(a, b)).startswith(f"first difference of {b} and {a}: pass 1, ")


def test_keys_that_arrive_in_another_order_are_no_other_order_of_the_sum() -> None:
    """Of keyed contributions the keys are the order: what differs here is the dtype in which they are summed."""
    terms = [np.float32([x]) for x in (1, 2**-24, 0.9 * 2**-24)]
    traces = []
    for arrival, accumulate in (((0, 1, 2), "float32"), ((0, 2, 1), "float64")):
        with fanin.trace(digests=True) as trace:
            buf = fanin.InputBuffer(1, accumulate=accumulate, name="grads")
            for key in arrival:
                buf.add(0, terms[key], key=key)
            buf.take()
        traces.append(trace)
    found = fanin.compare(*traces)
    assert found.difference is not None
    assert (found.difference.what, found.difference.reason) == ("sum", "value")


def test_a_pass_that_fails_before_a_node_runs_is_compared() -> None:
    def failed(x: float) -> Any:
        node = fanin.Node(lambda g: g, edges=[(fanin.Leaf(np.zeros(2)), 0)], name="low")
        with fanin.trace(digests=True) as trace, pytest.raises(ValueError, match="expected a gradient of shape"):
            fanin.backward([(node, 0, np.full(3, x)), (node, 0, np.ones(2))])
        assert not [line for line in trace.lines if line.kind == "node"]
        return trace

    assert fanin.compare(failed(1), failed(1))
    found = fanin.compare(failed(1), failed(2))
    assert found.difference is not None and found.difference.what == "contribution"


def test_a_sum_that_one_run_alone_took_is_missing() -> None:
    def added(take: bool) -> Any:
        with fanin.trace(digests=True) as trace:
            buf = fanin.InputBuffer(1, name="grads")
            buf.add(0, np.ones(2))
            if take:
                buf.take()
        return trace

    for runs in ((True, False), (False, True)):
        found = fanin.compare(*map(added, runs))
        assert found.difference is not None
        assert (found.difference.what, found.difference.reason) == ("sum", "missing")


def test_nodes_that_were_made_in_another_order_are_named_by_run() -> None:
    def summed(names: tuple[str, str]) -> Any:
        leaf = fanin.Leaf(np.zeros(2), name="w")
        factors = {"left": 1 / 3, "right": 1e17, "last": -1e17}
        made = {
            name: fanin.Node(lambda g, name=name: g * factors[name], edges=[(leaf, 0)], name=name)
            for name in (*names, "last")
        }
        with fanin.trace(digests=True) as trace:
            fanin.backward([(made[name], 0, np.ones(2)) for name in factors])
        return trace

    a, b = summed(("left", "right")), summed(("right", "left"))
    assert "the 2nd is edge 0 of node left, not edge 0 of node right" in str(fanin.compare(a, b))
    assert "the 2nd is edge 0 of node right, not edge 0 of node left" in str(fanin.compare(b, a))


def broken(change: Any) -> Any:
    def file(path: Path) -> Path:
        found = json.loads(saved(run(drawn(1)), path).read_text())
        change(found)
        path.write_text(json.dumps(found))
        return path

    return file


def digests(found: Any) -> Any:
    return found["otherData"]["digests"]


def unit(found: Any) -> Any:
    return digests(found)["ranks"][0]["units"][0]


WRONG = {
    "not JSON": (lambda path: path.write_text("{") and path, "it is no JSON"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe\x00") and path, "it is no JSON"),
    "deep": (lambda path: path.write_text("[" * 100_000) and path, "it is no JSON"),
    "a list": (lambda path: path.write_text("[]") and path, "it is no trace of fanin's"),
    "of torch": (lambda path: path.write_text('{"traceEvents": []}') and path, "it is no trace of fanin's"),
    "no digests": (broken(lambda f: f["otherData"].pop("digests")), "the trace has no digests"),
    "version": (broken(lambda f: digests(f).update(version=7)), "of version 7, and this fanin reads version 1"),
    "no version": (broken(lambda f: digests(f).pop("version")), "of version None"),
    "ranks": (broken(lambda f: digests(f).update(ranks=3)), "broken: ranks: expected a list, got int"),
    "no ranks": (broken(lambda f: digests(f).update(ranks=[])), r"they are of (0 and 1|1 and 0) ranks"),
    "units": (broken(lambda f: digests(f)["ranks"][0].pop("units")), r"ranks\[0\]\.units: expected a list"),
    "record": (broken(lambda f: unit(f)["records"][2].pop()), r"records\[2\]: expected 10 values, got 9"),
    "what": (broken(lambda f: unit(f)["records"][0].__setitem__(0, "x")), r"expected a contribution, a sum or a leaf"),
    "digest": (broken(lambda f: unit(f)["records"][0].__setitem__(8, "zz")), "expected a digest of 16 hexadecimal"),
    "minus": (broken(lambda f: unit(f)["records"][0].__setitem__(8, "-1")), "expected a digest of 16 hexadecimal"),
    "slot": (broken(lambda f: unit(f)["records"][0].__setitem__(6, -1)), "expected a number from 0 on"),
    "key": (broken(lambda f: unit(f)["records"][0].__setitem__(7, 1.5)), "expected an integer, got 1.5"),
    "wide": (
        broken(lambda f: unit(f)["records"][0].__setitem__(7, 1 << 63)),
        "expected an integer, got 9223372036854775808",
    ),
    "node": (broken(lambda f: unit(f)["records"][0].__setitem__(4, "y")), "its node is not among the nodes"),
    "place": (broken(lambda f: unit(f)["nodes"][0].pop()), "expected a name and a number, got 1 values"),
    "dropped": (broken(lambda f: digests(f)["ranks"][0].update(dropped=3)), "3 lines did not fit and are lost"),
    "empty": (broken(lambda f: digests(f)["ranks"][0].update(units=[])), "no pass and no buffer ran"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_file_and_the_cause(name: str, tmp_path: Path) -> None:
    make, said = WRONG[name]
    path = make(tmp_path / "wrong.json")
    good = saved(run(drawn(1)), tmp_path / "good.json")
    for pair in ((path, good), (good, path)):
        with pytest.raises(ValueError, match=said) as e:
            fanin.compare(*pair)
        assert "wrong.json" in str(e.value)


def test_a_file_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere\.json"):
        fanin.compare(tmp_path / "nowhere.json", run(drawn(1)))


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    text = saved(run(drawn(1)), tmp_path / "a.json").read_bytes()
    cut = tmp_path / "cut.json"
    for n in range(0, len(text) - 1, len(text) // 40):
        cut.write_bytes(text[:n])
        with pytest.raises(ValueError, match=r"cut\.json"):
            fanin.compare(tmp_path / "a.json", cut)


def test_a_trace_without_digests_is_refused() -> None:
    with fanin.trace() as t:
        fanin.add_n([np.ones(2)] * 2)
    with pytest.raises(ValueError, match=r"compare: a: the trace has no digests: record it with"):
        fanin.compare(t, t)
    with fanin.trace(digests=True) as empty:
        pass
    with pytest.raises(ValueError, match="compare: a: it has no digests: no pass and no buffer ran"):
        fanin.compare(empty, empty)
    with fanin.trace(digests=True, capacity=4) as short:
        fanin.add_n([np.ones(2)] * 9)
    with pytest.raises(ValueError, match="did not fit and are lost: record with a larger capacity="):
        fanin.compare(short, short)


def test_runs_of_other_graphs_are_refused_with_the_first_other_node() -> None:
    def chain(*names: str, slot: int = 0) -> Any:
        node: Any = fanin.Leaf(np.zeros(2), name="w")
        at = 0
        for name in names:
            node = fanin.Node(lambda *g: g[0] if g[0] is not None else g[1], 2, edges=[(node, at)], name=name)
            at = slot
        with fanin.trace(digests=True) as t:
            fanin.backward([(node, 0, np.ones(2))])
        return t

    with pytest.raises(
        ValueError, match="a and b are not runs of one graph: first other node: pass 1: node c ran in a"
    ):
        fanin.compare(chain("a", "b", "c"), chain("a", "b"))
    with pytest.raises(ValueError, match="first other node: pass 1: node x ran in b and not in a"):
        fanin.compare(chain("a", "b"), chain("a", "b", "x"))
    with pytest.raises(ValueError, match="edge 0 of node c leads to slot 0 of node b in a and not in b"):
        fanin.compare(chain("a", "b", "c"), chain("a", "b", "c", slot=1))
    two = chain("a")
    with two:
        w = fanin.Leaf(np.zeros(2), name="w")
        fanin.backward([(w, 0, np.ones(2))])
    with pytest.raises(ValueError, match="pass 2 ran in b and not in a, and all before it is equal"):
        fanin.compare(chain("a"), two)
    with fanin.trace(digests=True) as other:
        fanin.InputBuffer(1).add(0, np.ones(2))
    with pytest.raises(ValueError, match="taken the 1st time ran in b and not in a, and all before"):
        fanin.compare(chain("a"), other)


def test_unnamed_nodes_are_matched_by_the_order_in_which_they_were_made() -> None:
    def one(c: float) -> Any:
        for _ in range(random.randrange(3)):
            fanin.Leaf(np.zeros(1))
        w = fanin.Leaf(np.zeros(2))
        low = fanin.Node(lambda g: g * c, edges=[(w, 0)])
        top = fanin.Node(lambda g: (g, g), edges=[(low, 0), (low, 0)])
        with fanin.trace(digests=True) as t:
            fanin.backward([(top, 0, np.ones(2))])
        return t

    assert fanin.compare(one(2.0), one(2.0))
    found = fanin.compare(one(2.0), one(3.0))
    assert found.difference.maker == "node" and "the 2nd of that name, the last made first" in str(found)


def test_wrong_arguments_of_compare() -> None:
    t = run(drawn(1))
    with pytest.raises(TypeError, match="compare: a: expected a trace or the path of one, got an int"):
        fanin.compare(3, t)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compare: b: expected a second trace, or ranks=True"):
        fanin.compare(t)
    with pytest.raises(ValueError, match="compare: b: with ranks=True the ranks of one run are compared: leave b out"):
        fanin.compare(t, t, ranks=True)
    with pytest.raises(ValueError, match="a: it is of one rank"):
        fanin.compare(t, ranks=True)
    with pytest.raises(TypeError, match="compare: ranks: expected"):
        fanin.compare(t, t, ranks=3)  # type: ignore[arg-type]


def leaf_alone(
    c: float = 1.0, before: float | None = None, weight: float | None = None, hook_raises: bool = False
) -> Any:
    """A trace of a pass into one leaf."""

    def raises(g: Any) -> None:
        if hook_raises:
            raise OSError("planted")

    w = fanin.Leaf(np.zeros(2), name="w")
    w.grad = None if before is None else np.full(2, before)
    w.register_hook(raises)
    low = fanin.Node(lambda g: c * g, edges=[(w, 0)], name="low")
    with fanin.trace(digests=True) as trace:
        try:
            fanin.backward([(low, 0, np.ones(2))], weight=weight)
        except OSError:
            assert hook_raises
    return trace


def test_a_leaf_that_differs_says_only_what_is_true_of_its_sum() -> None:
    equal = "The sum of this pass is equal"
    for other in (leaf_alone(before=1.0), leaf_alone(weight=2.0)):
        found = fanin.compare(leaf_alone(), other)
        assert found.difference is not None and found.difference.what == "leaf"
        assert equal in str(found) and "weight=" in str(found)
    found = fanin.compare(leaf_alone(), leaf_alone(c=3.0), leaves=True)
    assert "The sum of this pass differs, too" in str(found) and equal not in str(found)
    found = fanin.compare(leaf_alone(), leaf_alone(hook_raises=True))
    assert found.difference is not None and found.difference.reason == "missing"
    assert "It was not accumulated" in str(found) and equal not in str(found)


class Counted(int):
    """A number of a node or buffer that counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        Counted.lookups += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.lookups += 1
        return super().__eq__(other)


def lookups(run: Any, n: int) -> int:
    """Of reading the digests of a trace of `run(n)`."""
    with fanin.trace(digests=True) as trace:
        run(n)
    lines = [
        replace(line, node=Counted(line.node), to=Counted(line.to), buffer=Counted(line.buffer)) for line in trace.lines
    ]
    Counted.lookups = 0
    run_of(lines)
    return Counted.lookups


def chain(n: int) -> None:
    at: Any = fanin.Leaf(np.zeros(1))
    for _ in range(n):
        at = fanin.Node(lambda g: g, edges=[(at, 0)])
    fanin.backward([(at, 0, np.ones(1))])


def buffers(n: int) -> None:
    for _ in range(n):
        fanin.add_n([np.ones(1), np.ones(1)])
        buffer = fanin.InputBuffer(1)
        buffer.add(0, np.ones(1))
        buffer.take()


@pytest.mark.parametrize("run", [chain, buffers])
def test_the_digests_of_a_long_trace_are_read_in_linear_time(run: Any) -> None:
    assert lookups(run, 400) < 5 * lookups(run, 100)


def merged_by_insertion(orders: list[list[str]]) -> list[str]:
    """Each item that is missing is put behind the one that it follows in its own order."""
    made: list[str] = []
    for order in orders:
        for i, item in enumerate(order):
            if item not in made:
                made.insert(made.index(order[i - 1]) + 1 if i else 0, item)
    return made


def test_orders_are_merged_as_by_insertion() -> None:
    draw = random.Random(5)
    for _ in range(300):
        orders = [draw.sample("abcdefghij", draw.randrange(11)) for _ in range(draw.randint(1, 4))]
        assert under_test.merged(orders) == merged_by_insertion(orders), orders


def test_orders_without_a_common_item_are_merged_in_linear_time() -> None:
    def lookups_of(n: int) -> int:
        orders = [[Counted(first + i) for i in range(n)] for first in (0, n)]
        Counted.lookups = 0
        assert len(under_test.merged(orders)) == 2 * n
        return Counted.lookups

    assert 0 < lookups_of(400) < 5 * lookups_of(100)


def test_slots_of_a_buffer_may_be_filled_in_any_order() -> None:
    def filled(*order: int) -> Any:
        buffer = fanin.InputBuffer([fanin.Slot(name="weight"), fanin.Slot(name="bias")], name="linear")
        with fanin.trace(digests=True) as trace:
            for slot in order:
                buffer.add(slot, np.full(2, slot + 1.0))
            buffer.take()
        return trace

    found = fanin.compare(filled(0, 1), filled(1, 0))
    assert found and (found.compared, found.buffers) == (4, 1)


def test_a_name_that_ends_with_the_number_of_the_node_is_a_name() -> None:
    first = fanin.Leaf(np.zeros(1)).sequence_nr + 2

    def chained() -> Any:
        """The first time each name ends with the node's own number."""
        at: Any = fanin.Leaf(np.zeros(2))
        for i in range(3):
            at = fanin.Node(lambda g: g, edges=[(at, 0)], name=f"layer {first + i}")
        at = fanin.Node(lambda g: g, edges=[(at, 0)])
        with fanin.trace(digests=True) as trace:
            fanin.backward([(at, 0, np.ones(2))])
        return trace

    one = chained()
    names = [line.label for line in one.lines if line.kind == "node" and not line.in_place]
    assert names == [f"layer {first + i}" for i in (2, 1, 0)]
    assert fanin.compare(one, chained())


def test_a_buffer_of_a_node_is_no_buffer_outside_of_passes() -> None:
    """Roots that meet in a slot, a sparse root, and a leaf whose wider sum is read."""
    w = fanin.Leaf(np.zeros(2, "f2"), accumulate="float32", name="w")
    low = fanin.Node(lambda g: g, edges=[(w, 0)], name="low")
    wide = fanin.Leaf(np.zeros((2, 2)), name="wide")
    part = fanin.Partial(np.ones(2), 1, (2, 2))
    with fanin.trace(digests=True) as trace:
        for _ in range(2):
            fanin.backward([(low, 0, np.ones(2, "f2")), (low, 0, np.ones(2, "f2"))], keep_graph=True)
            fanin.backward([(wide, 0, part), (wide, 0, part)])
            assert w.grad is not None
    found = fanin.compare(trace, trace)
    assert found and (found.passes, found.buffers) == (4, 0)


def test_runs_without_a_digest_are_not_called_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name in "xy":
        with fanin.trace(digests=True) as trace:
            buf = fanin.InputBuffer([fanin.Slot(combine=lambda a, b: a + b)])
            buf.add(0, Fraction(1 if name == "x" else 2))
            buf.take()
        files.append(str(tmp_path / f"{name}.json"))
        trace.save(files[-1])
    found = fanin.compare(*files)
    assert found.difference is None and not found and str(found).startswith("nothing was compared: ")
    assert main(["compare", *files]) == 2
    assert "nothing was compared" in capsys.readouterr().out
