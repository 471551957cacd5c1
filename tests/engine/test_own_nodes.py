"""What an author of an engine makes of nodes: classes and attributes of his own, gradients that are kept, graphs that
are freed and drawn, roots that begin with a one of his own.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node

pytestmark = pytest.mark.core


class Mul(Node):
    """A node that knows what was multiplied."""

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


def test_a_class_without_an_init_of_its_own_takes_what_node_takes() -> None:
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


def test_a_node_whose_init_did_not_run_is_none() -> None:
    class Lazy(Node):
        def __init__(self) -> None:
            pass

    lazy = Lazy()
    for use in (lambda: Node(lambda g: g, edges=[(lazy, 0)]), lambda: fanin.backward([(lazy, 0, 1.0)]),
                lambda: fanin.backward([(w(), 0, np.ones(2))], [lazy])):  # fmt: skip
        with pytest.raises(TypeError, match="Lazy whose Node.__init__ has not run"):
            use()
    with pytest.raises(TypeError, match="call Node"):
        Node.__new__(Node)
    with pytest.raises(TypeError):
        copy.copy(Node(lambda g: g))
    assert repr(lazy) == "<Lazy whose Node.__init__ has not run>"


def test_init_runs_once() -> None:
    node = Mul(w(), 2.0)
    with pytest.raises(RuntimeError, match="Node.__init__ has run before"):
        node.__init__(w(), 3.0)  # type: ignore[misc]
    assert node.by == 2.0 and len(node.edges) == 1

    class Fails(Node):
        def __init__(self, x: Any) -> None:
            with pytest.raises(IndexError):
                super().__init__(lambda g: g, edges=[(x, 7)], name="first")
            super().__init__(lambda g: g, edges=[(x, 0)])

    with pytest.raises(RuntimeError, match="Node.__init__ has run before"):
        Fails(w())


def test_a_node_in_its_own_arguments_closes_no_cycle() -> None:
    class Circle(Node):
        def __init__(self) -> None:
            super().__init__(lambda g: g, edges=[(self, 0)])

    with pytest.raises(TypeError, match="whose Node.__init__ has not run"):
        Circle()


def test_a_chain_of_a_class_ends_without_recursion_and_leaves_nothing() -> None:
    node: Any = w()
    gone = []
    for _ in range(100_000):
        node = Mul(node, 1.0)
    weakref.finalize(node, gone.append, 1)
    node.self = node  # a circle through an attribute
    del node
    gc.collect()
    assert gone == [1]
    assert not [o for o in gc.get_objects() if isinstance(o, Mul)]
    before = sys.getrefcount(Mul)
    Mul(w(), 1.0)
    assert sys.getrefcount(Mul) == before
