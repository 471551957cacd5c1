"""Nodes whose functions are in C (docs/c-api.md): what they get and give beside Python's, and what goes wrong."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from fanin import Leaf, Node, Slot
from kit import c_nodes, hooks
from kit.c_nodes import CALL_PYTHON, FAIL, FRESH, IN_PLACE, LONG, NOTHING, PASS, RAISE, SCALE, WRAP
from kit.sample import sizes

pytestmark = pytest.mark.core

F = np.float32


@pytest.fixture(scope="module")
def c() -> ModuleType:
    return c_nodes.module()


def test_the_header_is_in_the_folder_of_get_include() -> None:
    assert (Path(fanin.get_include()) / "fanin.h").is_file()


def test_a_chain_of_c_nodes_gives_what_pythons_gives(c: ModuleType) -> None:
    for what in (SCALE, IN_PLACE):
        w = Leaf(np.zeros(16, F))
        fanin.backward([(c.many(1000, w, what, -1.0, True), 0, np.arange(16, dtype=F))])
        assert w.grad.tolist() == list(range(16)) and w.grad.flags.writeable


def test_a_python_node_after_c_nodes_gets_an_ndarray(c: ModuleType) -> None:
    seen: list[Any] = []
    low = Node(lambda g: seen.append((type(g), g.tolist())), edges=[(Leaf(np.zeros(16, F)), 0)])
    fanin.backward([(c.many(100, low, SCALE, 1.0, True), 0, np.ones(16, F))])
    assert seen == [(np.ndarray, [1.0] * 16)]


def test_sums_of_c_nodes_are_those_of_pythons_bit_for_bit(c: ModuleType) -> None:
    r = np.random.default_rng(1)
    factors = r.standard_normal(50)
    g = r.standard_normal(16).astype(F)
    got = []
    for in_c in ([True] * 50, [False] * 50, [i % 2 == 0 for i in range(50)]):
        w = Leaf(np.zeros(16, F))
        mid = Node(lambda g: g, edges=[(w, 0)])
        tops = [
            c.node(c.function(SCALE, 1, 1, x), ((mid, 0),)) if yes else Node(lambda g, x=x: g * F(x), edges=[(mid, 0)])
            for x, yes in zip(factors, in_c, strict=True)
        ]
        fanin.backward([(t, 0, g) for t in tops])
        got.append(w.grad.tobytes())
    assert got[0] == got[1] == got[2]


def test_a_c_node_is_a_node_like_any_other(c: ModuleType) -> None:
    w = Leaf(np.zeros(3, F), name="w")
    node = Node(c.function(SCALE, 2, 2, 3.0), edges=[(w, 0), None], name="both")
    assert node.inputs == 2 and node.name == "both" and "C" in repr(node.fn)
    one, none = node.fn(np.ones(3, F), None)
    assert one.tolist() == [3, 3, 3] and none is None
    assert c.function(PASS, 1, 1)(None) is None
    assert c.function(NOTHING, 1, 0)(np.ones(2)) == ()
    seen: list[Any] = []
    node.register_hook(lambda g: seen.append(("slot", g.tolist())))
    node.register_prehook(lambda sums: seen.append(("pre", sums[1])))
    node.register_posthook(lambda sums, gradients: seen.append(("post", gradients[0].tolist())))
    fanin.backward([(node, 0, np.ones(3, F))], keep_graph=True)
    assert seen == [("slot", [1, 1, 1]), ("pre", None), ("post", [3, 3, 3])] and w.grad.tolist() == [3, 3, 3]
    for n, sums in (p := fanin.walk([(node, 0, np.ones(3, F))])):
        p.give(n.fn(*sums))
    assert w.grad.tolist() == [6, 6, 6]


def test_python_gets_gradients_of_c_nodes_as_ndarrays(c: ModuleType) -> None:
    w, seen = Leaf(np.zeros(3, F)), []
    low = c.node(c.function(PASS, 1, 1), ((w, 0),), "low")
    mid = Node(lambda g: seen.append(g) or g, edges=[(low, 0)])
    top = c.node(c.function(SCALE, 1, 1, 2.0), ((mid, 0),))
    (got, sum_) = fanin.grad([(top, 0, np.ones(3, F))], [w, (low, 0)], keep_graph=True)
    assert [type(x) for x in (got, sum_, *seen)] == [np.ndarray] * 3
    assert got.tolist() == sum_.tolist() == [2, 2, 2]
    for node, sums in (p := fanin.walk([(c.node(c.function(PASS, 1, 1), ((top, 0),)), 0, np.ones(3, F))])):
        assert all(type(x) is np.ndarray for x in sums)
        p.give(node.fn(*sums))
    owner = Leaf(like=((3,), "float32", "cpu"), accumulate=seen.append)
    fanin.backward([(c.node(c.function(SCALE, 1, 1, 2.0), ((owner, 0),)), 0, np.ones(3, F))])
    assert type(seen[-1]) is np.ndarray
    wide = Leaf(np.zeros(3, F), accumulate="float64")
    for _ in range(2):
        fanin.backward([(c.node(c.function(SCALE, 1, 1, 2.0), ((wide, 0),)), 0, np.ones(3, F))])
    assert wide.grad.tolist() == [4, 4, 4]


@pytest.mark.rule("L2", "L4", "L5")
def test_a_gradient_owned_by_the_pass_becomes_grad_and_a_referenced_one_is_copied(c: ModuleType) -> None:
    w, kept = Leaf(np.zeros(3, F)), np.ones(3, F)
    fanin.backward([(c.node(c.function(PASS, 1, 1), ((w, 0),)), 0, kept)])
    w.grad[0] = 7
    assert kept.tolist() == [1, 1, 1]
    one, two = Leaf(np.zeros(3, F)), Leaf(np.zeros(3, F))
    both = c.node(c.function(PASS, 1, 2), ((one, 0), (two, 0)))
    fanin.backward([(c.node(c.function(SCALE, 1, 1, 2.0), ((both, 0),)), 0, kept)])
    one.grad[0] = 7
    assert two.grad.tolist() == [2, 2, 2]
    was = one.grad
    fanin.backward([(c.node(c.function(SCALE, 1, 1, 1.0), ((one, 0),)), 0, kept)])
    assert one.grad is was and was.tolist() == [8, 3, 3]


def test_memory_of_the_authors_is_released_once_and_not_before_its_last_reader(c: ModuleType) -> None:
    w = Leaf(np.zeros(4), name="w")
    _, before = c.counts()
    fn = c.function(WRAP, 1, 1)
    g = fn(np.ones(4))
    assert g.tolist() == [0, 1, 2, 3] and not g.flags.writeable and c.counts()[1] == before
    del g
    assert c.counts()[1] == before + 1
    fanin.backward([(c.node(fn, ((w, 0),)), 0, np.ones(4)), (c.node(fn, ((w, 0),)), 0, np.ones(4))])
    assert w.grad.tolist() == [0, 2, 4, 6] and c.counts()[1] == before + 3


@pytest.mark.rule("E10")
def test_release_is_called_after_the_node_has_run_or_was_freed(c: ModuleType) -> None:
    w = Leaf(np.zeros(3, F))
    gc.collect()
    before = c.counts()[0]
    top = c.many(5, w, SCALE, 1.0, True)
    fanin.backward([(top, 0, np.ones(3, F))], keep_graph=True)
    assert c.counts()[0] == before
    fanin.backward([(top, 0, np.ones(3, F))])
    assert c.counts()[0] == before + 5 and top.fn is None
    with pytest.raises(RuntimeError, match=r"freed by pass"):
        fanin.backward([(top, 0, np.ones(3, F))])
    top = c.many(5, w, SCALE, 1.0, True)
    del top
    assert c.counts()[0] == before + 10


@pytest.mark.rule("E11")
def test_a_c_node_that_makes_a_nan_is_named(c: ModuleType) -> None:
    w = Leaf(np.zeros(3, F))
    bad = c.node(c.function(SCALE, 1, 1, float("nan")), ((w, 0),), "Mul")
    with pytest.raises(FloatingPointError, match=r"Mul returned a gradient that is not finite at index 0"):
        fanin.backward([(c.many(3, bad, SCALE, 1.0, True), 0, np.ones(3, F))], detect=True)
    assert w.grad is None


@pytest.mark.rule("E6", "V3")
@pytest.mark.parametrize("where", ["chain", "sum"])
@pytest.mark.parametrize(
    "status, kind",
    [
        (c_nodes.TYPE, TypeError),
        (c_nodes.VALUE, ValueError),
        (c_nodes.STATE, RuntimeError),
        (c_nodes.NOMEM, MemoryError),
    ],
)
def test_a_c_node_that_fails_ends_the_pass_and_is_named(c: ModuleType, status: int, kind: Any, where: str) -> None:
    w = Leaf(np.zeros(3, F))
    gc.collect()
    before = c.counts()[0]
    fails = c.node(c.function(FAIL, 1, 2, 1.0, status, "too cold"), ((w, 0), (w, 0)), "Mul")
    roots = [(Node(lambda g: g, edges=[(fails, 0)]), 0, np.ones(3, F)) for _ in range(1 if where == "chain" else 2)]
    with pytest.raises(kind, match=r"^Mul: too cold") as e:
        fanin.backward(roots)
    assert e.value.__notes__[0].startswith("in Mul (node ") and w.grad is None
    del e, fails, roots
    gc.collect()
    assert c.counts()[0] == before + 1


def test_a_malformed_error_of_a_c_node_is_still_an_error(c: ModuleType) -> None:
    def run(*args: Any) -> None:
        fanin.backward([(c.node(c.function(*args), ((Leaf(np.zeros(3, F)), 0),), "Mul"), 0, np.ones(3, F))])

    with pytest.raises(ValueError, match=r"^Mul: \.{400}"):  # text without an end
        run(FAIL, 1, 1, 1.0, c_nodes.VALUE, "endless")
    with pytest.raises(ValueError, match="failed without a message"):
        run(FAIL, 1, 1, 1.0, c_nodes.VALUE)
    with pytest.raises(MemoryError):
        run(FAIL, 1, 1, 1.0, c_nodes.NOMEM)
    with pytest.raises(SystemError, match="returned 5 without an exception"):
        run(FAIL, 1, 1, 1.0, c_nodes.PYTHON)
    with pytest.raises(SystemError, match="returned 77"):
        run(FAIL, 1, 1, 1.0, 77)
    with pytest.raises(KeyError, match="raised"):  # it returns success
        run(RAISE, 1, 1)
    with pytest.raises(ValueError, match=r"Mul: axis 1: expected a non-negative extent, got -1"):
        run(FRESH, 1, 1, 1.0, 13)
    with pytest.raises(TypeError, match=r"Mul: there is no dtype 99"):
        run(FRESH, 1, 1, 1.0, 99)


@pytest.mark.rule("V1", "V2", "V3")
def test_gradients_of_a_c_node_are_checked_like_any_other(c: ModuleType) -> None:
    w = Leaf(np.zeros(3, F), name="w")
    with pytest.raises(ValueError, match=r"^Mul returned an invalid number of gradients: expected 2, got 1"):
        fanin.backward([(Node(c.function(PASS, 1, 1), edges=[(w, 0), None], name="Mul"), 0, np.ones(3, F))])
    for shape in ((4,), (4, 2)):
        with pytest.raises(ValueError, match=r"^Mul returned an invalid gradient at index 0: expected .*\(3,\)"):
            fanin.backward([(c.node(c.function(PASS, 1, 1), ((w, 0),), "Mul"), 0, np.ones(shape, F))])
    with pytest.raises(ValueError, match=r"inputs: its function takes 2, got 3"):
        Node(c.function(PASS, 2, 1), 3, edges=[(w, 0)])
    fanin.backward([(c.node(c.function(PASS, 1, 1), ((w, 0),), "Mul"), 0, np.ones((2, 3), F))])  # A9
    fanin.backward([(c.node(c.function(PASS, 1, 1), ((w, 0),), "Mul"), 0, np.ones(3))])  # A10
    assert w.grad.tolist() == [3, 3, 3] and w.grad.dtype == F


def test_a_gradient_that_a_function_in_c_cannot_take_is_refused_by_name(c: ModuleType) -> None:
    w = Leaf(np.zeros((1, 3), F))
    for g in (sp.coo_array(np.ones((1, 3), F)), Fraction(1)):
        with pytest.raises(TypeError, match=r"^Mul takes arrays on the CPU, got a "):
            fanin.backward([(c.node(c.function(PASS, 1, 1), ((w, 0),), "Mul"), 0, g)])
    with pytest.raises(TypeError, match="takes 1 sums by position, got 2"):
        c.function(PASS, 1, 1)(np.ones(2), np.ones(2))
    with pytest.raises(TypeError, match="expected floats in C order"):
        c.function(SCALE, 1, 1)(np.ones(2, int))
    got: list[Any] = []
    fanin.backward(
        [(c.node(c.function(PASS, 1, 1), ((Leaf(like=((), None, None), accumulate=got.append), 0),)), 0, 2.5)]
    )
    assert got == [2.5]


def test_functions_and_edges_that_are_none_are_refused(c: ModuleType) -> None:
    w = Leaf(np.zeros(3))
    words = {0: "struct_size: expected .*, 48, got 8", 5: "struct_size: expected .*, 48, got 56"}
    words |= {1: "got NULL", 2: "got one, 0 inputs", 3: "flags 8", 4: "reserved: expected 0, got 1"}
    for which, text in words.items():
        with pytest.raises(ValueError, match=f"^function_new: .*{text}"):
            c.refused(which)
    with pytest.raises(TypeError, match="node_new: expected a function of function_new, got a builtin"):
        c.node(print, ())
    with pytest.raises(IndexError, match=r"Mul: edge 0: expected a slot from 0 to 0, got 1"):
        c.node(c.function(PASS, 1, 1), ((w, 1),), "Mul")
    with pytest.raises(TypeError, match=r"Mul: edge 1: expected a fanin.Node, a fanin.Leaf or NULL"):
        c.node(c.function(PASS, 1, 2), ((w, 0), (3, 0)), "Mul")


def test_a_c_node_may_call_python_and_let_others_run(c: ModuleType) -> None:
    for flags in (0, LONG):
        w = Leaf(np.zeros(3, F))
        calls = c.function(CALL_PYTHON, 1, 1, 1.0, 0, "", lambda g: g * 2, flags)
        fanin.backward([(c.node(calls, ((w, 0),)), 0, np.ones(3, F))])
        assert w.grad.tolist() == [2, 2, 2]
        fails = c.node(c.function(CALL_PYTHON, 1, 1, 1.0, 0, "", lambda g: 1 / 0, flags), ((w, 0),), "Mul")
        with pytest.raises(ZeroDivisionError) as e:
            fanin.backward([(fails, 0, np.ones(3, F))])
        assert e.value.__notes__[0].startswith("in Mul")


def test_a_chain_of_c_nodes_ends_without_recursion(c: ModuleType) -> None:
    gc.collect()
    before = c.counts()[0]
    w = Leaf(np.zeros(1, F))
    top = c.many(100_000, w, PASS, 1.0, True)
    fanin.backward([(top, 0, np.ones(1, F))], keep_graph=True)
    del top
    assert c.counts()[0] == before + 100_000 and w.grad.tolist() == [1]


# At random


def random_graph(c: ModuleType, seed: int, in_c: Callable[[random.Random], bool]) -> list[Any]:
    """A graph of nodes that scale, some in C: what its leaves get."""
    r = random.Random(seed)
    own = random.Random(seed)
    leaves = [Leaf(np.zeros(4, F)) for _ in range(3)]
    nodes: list[Any] = list(leaves)
    for _ in range(r.randrange(3, 20)):
        n, m = r.randrange(1, 3), r.randrange(1, 4)
        edges = [(to, r.randrange(getattr(to, "inputs", 1))) if (to := r.choice([*nodes, None])) else None
                 for _ in range(m)]  # fmt: skip
        factor = r.choice([1.0, -1.0, 0.5, 3.0, 0.1])
        slots = [Slot((4,), "float32") if r.random() < 0.3 else None for _ in range(n)]
        hook = r.random() < 0.2

        def fn(*sums: Any, m: int = m, n: int = n, factor: float = factor) -> Any:
            return tuple(None if (g := sums[i % n]) is None else g * F(factor) for i in range(m))

        what = own.choice((SCALE, IN_PLACE))
        node = Node(c.function(what, n, m, factor) if in_c(own) else fn, n, edges=edges, slots=slots)
        if hook:
            node.register_hook(lambda g: g + F(1))
        nodes.append(node)
    tops = [x for x in nodes if isinstance(x, Node)]
    roots = [(r.choice(tops), 0, np.array([r.uniform(-1, 1) for _ in range(4)], F)) for _ in range(r.randrange(1, 4))]
    keep = r.random() < 0.5
    fanin.backward(roots, keep_graph=keep)
    if keep:
        fanin.backward(roots)
    return [None if x.grad is None else x.grad.tobytes() for x in leaves]


@pytest.mark.parametrize("count", sizes(100, 400))
def test_random_graphs_give_the_same_bits_with_nodes_in_c(c: ModuleType, count: int) -> None:
    first = random.randrange(2**32)
    print(f"seed {first}")
    some = nothing = 0
    random_graph(c, first, lambda r: r.random() < 0.5)
    gc.collect()
    fanin.trim()
    before = hooks.blocks()
    for seed in range(first, first + count):
        expected = random_graph(c, seed, lambda r: False)
        assert random_graph(c, seed, lambda r: True) == expected, seed
        assert random_graph(c, seed, lambda r: r.random() < 0.5) == expected, seed
        some += sum(x is not None for x in expected)
        nothing += sum(x is None for x in expected)
    gc.collect()
    fanin.trim()
    assert hooks.blocks() == before and some > 3 * count // 4 and nothing > count // 4, (some, nothing)


@pytest.mark.rule("E6", "E14")
def test_an_allocation_that_fails_leaves_leaves_whole_or_untouched(c: ModuleType) -> None:
    def graph() -> tuple[list[Leaf], Any]:
        leaves = [Leaf(np.zeros(3, F)) for _ in range(3)]
        low = Node(c.function(SCALE, 2, 3, 2.0), edges=[(x, 0) for x in leaves])
        mid = [Node(lambda g: g, edges=[(low, 0)]), *(c.node(c.function(SCALE, 1, 1, x), ((low, 1),)) for x in (1, 2))]
        return leaves, Node(c.function(IN_PLACE, 1, 3, 1.0), edges=[(m, 0) for m in mid])

    leaves, top = graph()
    fanin.backward([(top, 0, np.ones(3, F))])
    whole = [x.grad.tolist() for x in leaves]
    del leaves, top
    gc.collect()
    gc.collect()
    baseline, refused = hooks.memory()[0], 0
    for n in range(500):
        leaves, top = graph()
        before = hooks.memory()[2]
        hooks.fail_at(n, 1)
        try:
            fanin.backward([(top, 0, np.ones(3, F))])
        except MemoryError:
            refused += 1
        finally:
            hooks.fail_at(-1, 0)
        met = hooks.memory()[2] > before
        for x, expected in zip(leaves, whole, strict=True):
            assert x.grad is None or x.grad.tolist() == expected, n
        del leaves, top, x
        gc.collect()
        assert hooks.memory()[0] == baseline, n
        if not met:
            break
    assert refused > 5
