"""Nodes for authors of engines: subclasses and attributes, retained gradients, graphs that are freed and drawn, roots
that begin with the engine's own one.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node
from kit.pictures import Read, outside

pytestmark = pytest.mark.core


class Mul(Node):
    """A node that keeps the factors."""

    def __init__(self, x: Any, by: float) -> None:
        super().__init__(self.gradients, edges=[(x, 0)])
        self.by = by

    def gradients(self, g: Any) -> Any:
        return g * self.by


def w() -> Any:
    return Leaf(np.zeros(2), name="w")


def test_a_class_of_nodes_has_attributes_and_runs_as_any_node() -> None:
    x = w()
    node = Mul(Mul(x, 2.0), 3.0)
    node.tag = "mine"  # type: ignore[attr-defined]
    assert isinstance(node, Node) and node.by == 3.0 and node.inputs == 1
    assert node.edges[0][0].by == 2.0  # type: ignore[index, union-attr]
    fanin.backward([(node, 0, np.ones(2))], keep_graph=True)
    assert x.grad.tolist() == [6, 6] and repr(node) == f"<Mul {node.sequence_nr}, 1 input, 1 edge>"
    assert fanin.grad([(node, 0, np.ones(2))], [node.edges[0]])[0].tolist() == [3, 3]  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match=rf"^Mul {node.sequence_nr} was freed by pass"):
        fanin.backward([(node, 0, np.ones(2))])


def test_a_class_without_its_own_init_takes_the_arguments_of_node() -> None:
    class Plain(Node):
        __slots__ = ("more",)

    x = w()
    node = Plain(lambda g: g, 1, [(x, 0)], name="plain", group="one")
    node.more = 1
    fanin.backward([(node, 0, np.ones(2))])
    assert x.grad.tolist() == [1, 1] and node.group == "one" and not hasattr(node, "__dict__")
    with pytest.raises(TypeError, match=r"Node\(\) has no argument 'no'"):
        Plain(lambda g: g, no=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Node(lambda g: g).tag = 1  # type: ignore[attr-defined]


def test_a_node_whose_init_did_not_run_is_refused() -> None:
    class Lazy(Node):
        def __init__(self) -> None:
            pass

    lazy = Lazy()
    for use in (lambda: Node(lambda g: g, edges=[(lazy, 0)]), lambda: fanin.backward([(lazy, 0, 1.0)]),
                lambda: fanin.backward([(w(), 0, np.ones(2))], [lazy])):  # fmt: skip
        with pytest.raises(TypeError, match=r"Lazy whose Node\.__init__ has not run"):
            use()
    with pytest.raises(TypeError, match="call Node"):
        Node.__new__(Node)
    with pytest.raises(TypeError):
        copy.copy(Node(lambda g: g))
    assert repr(lazy) == "<Lazy whose Node.__init__ has not run>"


def test_init_runs_once() -> None:
    node = Mul(w(), 2.0)
    with pytest.raises(RuntimeError, match=r"Node\.__init__ of this Mul has already run"):
        node.__init__(w(), 3.0)  # type: ignore[misc]
    assert node.by == 2.0 and len(node.edges) == 1

    class Fails(Node):
        def __init__(self, x: Any) -> None:
            with pytest.raises(IndexError):
                super().__init__(lambda g: g, edges=[(x, 7)], name="first")
            super().__init__(lambda g: g, edges=[(x, 0)])

    with pytest.raises(RuntimeError, match=r"Node\.__init__ of this Fails has already run"):
        Fails(w())


def test_a_node_in_its_own_arguments_closes_no_cycle() -> None:
    class Circle(Node):
        def __init__(self) -> None:
            super().__init__(lambda g: g, edges=[(self, 0)])

    with pytest.raises(TypeError, match=r"whose Node\.__init__ has not run"):
        Circle()


def test_a_chain_of_a_class_ends_without_recursion_and_leaves_nothing() -> None:
    node: Any = w()
    gone = []
    for _ in range(40_000):  # of 8 MiB of stack 200 bytes for each
        node = Mul(node, 1.0)
    weakref.finalize(node, gone.append, 1)
    node.self = node  # a circle through an attribute
    del node
    gc.collect()
    assert gone == [1]
    assert not [o for o in gc.get_objects() if isinstance(o, Mul)]
    before = sys.getrefcount(Mul)
    Mul(w(), 1.0)
    gc.collect()
    assert sys.getrefcount(Mul) == before


def square(x: Leaf) -> Node:
    return Node(lambda g: g * 2 * x.array, edges=[(x, 0)], slots=[fanin.Slot((2,))], name="square")


def test_a_node_that_retains_its_gradient_has_it_as_the_hooks_leave_it_and_adds_further_passes() -> None:
    x = Leaf(np.array([1.0, 2.0]))
    inner = square(x)
    outer = Node(lambda g: (g, g * 3), edges=[(inner, 0), (inner, 0)])
    assert inner.grad is None
    inner.retain_grad()
    inner.register_hook(lambda g: g * 10)  # registered later, and runs before the copy
    for times in (1, 2):
        fanin.backward([(outer, 0, np.ones(2))], keep_graph=True)
        assert inner.grad.tolist() == [40.0 * times, 40.0 * times]
    assert outer.grad is None and x.grad.tolist() == [160, 320], "what is kept changes no leaf"
    inner.grad = None
    assert inner.grad is None
    fanin.grad([(outer, 0, np.ones(2))], [x], keep_graph=True, workers=2)
    assert inner.grad.tolist() == [40, 40]
    with pytest.raises(TypeError, match="grad: expected None"):
        inner.grad = np.ones(2)  # type: ignore[assignment]
    with pytest.raises(IndexError, match="square: expected a slot from 0 to 0, got 1"):
        inner.retain_grad(1)


def test_of_several_slots_only_retained_ones_are_kept() -> None:
    x = w()
    both = Node(lambda a, b, c: np.zeros(2), 3, edges=[(x, 0)])
    both.retain_grad(2)
    both.retain_grad(slot=0)
    fanin.backward([(both, 0, np.ones(2))], keep_graph=True)
    [a, b, c] = both.grad
    assert a.tolist() == [1, 1] and b is None and c is None
    fanin.backward([(both, 2, np.full(2, 5.0)), (both, 1, np.ones(2))], keep_graph=True)
    [a, b, c] = both.grad
    assert a.tolist() == [1, 1] and b is None and c.tolist() == [5, 5]


def test_a_retained_gradient_is_a_copy_which_the_function_cannot_write() -> None:
    def writes(g: Any) -> Any:
        g *= 10
        return g

    node = Node(writes, edges=[(w(), 0)])
    top = Node(lambda g: (g * 1, g * 1), edges=[(node, 0), (node, 0)])
    node.retain_grad()
    fanin.backward([(top, 0, np.ones(2))])
    assert node.grad.tolist() == [2, 2]


def test_a_retained_gradient_on_a_device_is_there_on_the_nodes_stream() -> None:
    def scene(m: fanin.sim.Machine) -> Any:
        with fanin.stream(m.stream()):
            x = Leaf(m.array(np.zeros(2)))
            node = Node(lambda g: g, edges=[(x, 0)])
        node.retain_grad()
        for _ in range(2):
            fanin.backward([(node, 0, m.array(np.ones(2)))], keep_graph=True)
        return node.grad.numpy().tolist()

    report = fanin.sim.explore(scene, limit=200)
    assert report.ok and report.results == ([2.0, 2.0],), report


def test_a_graph_is_freed_without_a_pass() -> None:
    x, calls = w(), []
    inner = Node(lambda g: g, edges=[(x, 0)], release=lambda: calls.append("inner"), name="inner")
    outer = Node(lambda a, b: (a, b), 2, edges=[(inner, 0), (inner, 0)], release=lambda: calls.append("outer"))
    fanin.free([(outer, 1), x])
    fanin.free([outer])
    assert calls == ["outer", "inner"] and inner.freed and outer.fn is None
    with pytest.raises(RuntimeError, match=r"was freed by fanin\.free\(\): its function is gone \(E10\)"):
        fanin.backward([(outer, 0, np.ones(2))])
    for roots, message in ((outer, "expected a sequence"), ([3], "root 0: expected a fanin.Node"), ([()], "root 0")):
        for call in (fanin.free, fanin.draw):
            with pytest.raises(TypeError, match=message):
                call(roots)  # type: ignore[arg-type]


def test_each_node_is_freed_even_if_releases_raise() -> None:
    def no() -> None:
        raise OSError("no")

    chain: Any = w()
    for i in range(3):
        chain = Node(lambda g: g, edges=[(chain, 0)], release=no if i else None, name=f"n{i}")
    with pytest.raises(OSError, match="no") as caught:
        fanin.free([chain])
    assert [str(note) for note in caught.value.__notes__] == [
        "raised by the release of <fanin.Node n2, 1 input, 1 edge, freed>",
        "1 more of these nodes' releases raised",
    ]
    assert chain.freed and chain.edges[0][0].edges[0][0].freed


def test_a_graph_is_drawn_before_and_after_a_pass() -> None:
    x = Leaf(np.zeros(2), name='a "leaf"')
    inner = Mul(x, 2.0)
    two = Node(lambda a, b: (a, b, None), 2, edges=[(inner, 0), (x, 0), None], name="two")
    text = fanin.draw([two])
    assert text.splitlines() == [
        "digraph fanin {",
        "  node [fontsize=10];",
        '  n0 [label="two", shape=ellipse];',
        f'  n1 [label="Mul {inner.sequence_nr}", shape=ellipse];',
        '  n2 [label="a \\"leaf\\" (2,)", shape=box];',
        "  n0 -> n1;",
        "  n0 -> n2;",
        "  n1 -> n2;",
        "}",
    ]
    assert '[label="1"]' in fanin.draw([Node(lambda g: g, edges=[(two, 1)])])
    fanin.backward([(two, 0, np.ones(2)), (two, 1, np.ones(2))])
    assert fanin.draw([two]).count("fillcolor=grey") == 2


def test_a_drawing_is_a_picture_of_its_own() -> None:
    weights, x = w(), Leaf(np.zeros(2), name='a "leaf" <&>')
    two = Node(lambda a, b: (a, b), 2, edges=[(weights, 0), (x, 0)], name="two")
    roots = [Node(lambda g: (g, g), edges=[(two, 0), (two, 1)], name="n" * 99), Node(lambda g: g, edges=[(x, 0)])]
    drawing = fanin.draw(roots)
    assert drawing.svg() == fanin.draw(roots).svg() and "max-width: 100%" in drawing._repr_svg_()
    picture = Read(drawing.svg())
    assert outside(picture) == []
    assert len(picture.shapes("node")) == 3 and len(picture.shapes("leaf")) == 2
    assert len(picture.shapes("arrows", "path")) == len(picture.shapes("heads", "path")) == drawing.count("->") == 5
    assert sorted(picture.texts("heads")) == ["0", "1"], "the slots of a node that has several"
    assert 'a "leaf" <&> (2,)' in picture.texts() and sum("nnn…nnn" in text for text in picture.texts()) == 1
    assert fanin.draw([])._repr_svg_() is None and outside(Read(fanin.draw([]).svg())) == []
    copied = pickle.loads(pickle.dumps(drawing))
    assert copied == drawing and copied.svg() == drawing.svg()


def test_roots_without_a_gradient_begin_with_the_engines_own_one() -> None:
    seen = []

    def one(node: Any, slot: int) -> Any:
        seen.append((node, slot))
        return np.full(2, 3.0)

    x = w()
    node = square(Leaf(np.ones(2)))
    fanin.backward([x, (x, 0, np.ones(2)), (x, 0)], one=one)
    assert seen == [(x, 0), (x, 0)] and x.grad.tolist() == [7, 7]
    assert fanin.grad([node], [node], one=one)[0].tolist() == [3, 3]
    with pytest.raises(TypeError, match=r"backward: root 0 \(square, slot 0\): one= returned None"):
        fanin.backward([node], one=lambda node, slot: None)
    with pytest.raises(ZeroDivisionError):
        fanin.backward([node], one=lambda node, slot: 1 / 0)
    with pytest.raises(TypeError, match="grad: one: expected a function"):
        fanin.grad([node], [node], one=1)  # type: ignore[arg-type]
