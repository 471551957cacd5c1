"""What bad input gets: an error that names node and index, and all is as it was. Nothing crashes, hangs or leaks."""

from __future__ import annotations

import functools
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node, Slot
from kit import hooks
from kit.prepared import run_prepared

pytestmark = pytest.mark.core

F = np.float32


def left() -> int:
    """Blocks of the core's memory that are alive, but for what is kept for next time."""
    gc.collect()
    fanin.trim()
    return hooks.blocks()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A refused pass drops all its references, those to gradients of other nodes included."""
    before = left()
    yield
    assert left() == before


def ones(*shape: int) -> Any:
    return np.ones(shape, F)


def leaf(*shape: int) -> Any:
    return Leaf(np.zeros(shape or (2,), F), name="w")


def passed_on(g: Any) -> Any:
    return g


# A node that is made


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda w: Node(7, edges=[(w, 0)]), TypeError, "fn"),
        (lambda w: Node(passed_on, -1), ValueError, "inputs"),
        (lambda w: Node(passed_on, "two"), TypeError, "inputs|int"),
        (lambda w: Node(passed_on, 2, slots=[Slot()]), ValueError, "slots"),
        (lambda w: Node(passed_on, slots=[7]), (TypeError, ValueError), "slot"),
        (lambda w: Node(passed_on, edges=7), TypeError, "edges|iterable"),
        (lambda w: Node(passed_on, edges=[7], name="Mul"), TypeError, "^Mul: edge 0"),
        (lambda w: Node(passed_on, edges=[w], name="Mul"), TypeError, "^Mul: edge 0"),
        (lambda w: Node(passed_on, edges=[(w, 0), (w, 1)], name="Mul"), IndexError, "^Mul: edge 1: expected a slot"),
        (lambda w: Node(passed_on, edges=[(w, -1)], name="Mul"), IndexError, "^Mul: edge 0: expected a slot .*got -1"),
        (lambda w: Node(passed_on, edges=[(w, 2**70)], name="Mul"), IndexError, "^Mul: "),
        (lambda w: Node(passed_on, edges=[(w, "0")], name="Mul"), TypeError, "^Mul: "),
        (lambda w: Node(passed_on, edges=[(w, 0, 0)], name="Mul"), (TypeError, ValueError), "^Mul: edge 0"),
        (lambda w: Node(passed_on, release=7), TypeError, "release"),
        (lambda w: Leaf("text"), TypeError, "str"),
        (lambda w: Leaf(), TypeError, "Leaf"),
        (lambda w: Leaf(np.zeros(2), accumulate="int32"), (TypeError, ValueError), "int32"),
        (lambda w: Leaf(np.zeros(2), grad_dtype="no such dtype"), (TypeError, ValueError), "no such dtype"),
        (lambda w: Leaf(like=((2,), "float32", "cpu")), (TypeError, ValueError), "accumulate"),
    ],
)
def test_invalid_arguments_of_node_and_leaf_are_refused(make: Callable[[Any], Any], kind: Any, text: str) -> None:
    w = leaf()
    with pytest.raises(kind, match=text):
        make(w)
    fanin.backward([(w, 0, ones(2))])
    assert w.grad.tolist() == [1, 1]


def test_the_error_for_an_edge_to_a_missing_slot_names_both_nodes() -> None:
    add = Node(passed_on, 2, name="Add")
    with pytest.raises(IndexError, match=r"^Mul: edge 1: expected a slot from 0 to 1 of Add, got 2$"):
        Node(passed_on, edges=[(add, 1), (add, 2)], name="Mul")


def test_an_edge_that_closes_a_cycle_is_refused_when_it_is_made() -> None:
    w = leaf()
    low = Node(passed_on, edges=[(w, 0)], name="Add")
    mid = Node(passed_on, edges=[(low, 0)], name="Sub")
    top = Node(passed_on, edges=[(mid, 0)], name="Mul")
    for node in (low, mid, top):
        with pytest.raises(ValueError, match=rf"^Add: an edge to {node.name} closes a cycle"):
            low.edges.append((node, 0))
    assert len(low.edges) == 1
    fanin.backward([(top, 0, ones(2))])
    assert w.grad.tolist() == [1, 1]


def test_an_edge_may_come_later_and_lead_to_a_later_node() -> None:
    w, v = leaf(), leaf()
    first = Node(lambda g: (g, g), edges=[(w, 0)], name="first")
    later = Node(passed_on, edges=[(v, 0)], name="later")
    first.edges.append((later, 0))
    fanin.backward([(first, 0, ones(2))], keep_graph=True)
    assert w.grad.tolist() == [1, 1] and v.grad.tolist() == [1, 1]
    with pytest.raises(ValueError, match="closes a cycle"):
        later.edges.append((first, 0))
    with pytest.raises((TypeError, IndexError)):
        first.edges.append(7)
    with pytest.raises(IndexError, match=r"^first: edge 2: expected a slot"):
        first.edges.append((later, 1))
    first.edges.append(None)
    assert len(first.edges) == 3


def test_an_edge_that_is_appended_during_a_pass_counts_from_the_next_one() -> None:
    w, v = leaf(), leaf()

    def fn(g: Any) -> Any:
        n = len(low.edges)
        if n == 1:
            low.edges.append((v, 0))
        return [g] * n

    low = Node(fn, edges=[(w, 0)], name="low")
    top = Node(passed_on, edges=[(low, 0)])
    fanin.backward([(top, 0, ones(2))], keep_graph=True)
    assert w.grad.tolist() == [1, 1] and v.grad is None
    fanin.backward([(top, 0, ones(2))])
    assert w.grad.tolist() == [2, 2] and v.grad.tolist() == [1, 1]


def test_a_cycle_through_a_function_is_collected() -> None:
    class Held:
        pass

    def build() -> weakref.ref[Held]:
        held = Held()
        node = Node(lambda g: (held, node))
        leaf_ = Leaf(np.zeros(2))
        leaf_.register_hook(lambda g: (held, leaf_))
        return weakref.ref(held)

    gone = build()
    gc.collect()
    assert gone() is None


# Arguments of a pass

NODE, SCALAR = Node(passed_on, name="Mul"), Node(passed_on, slots=[Slot(shape=())], name="Sum")
W = leaf()


@pytest.mark.parametrize(
    ("roots", "kind", "text"),
    [
        (7, TypeError, "roots|iterable|sequence"),
        ([7], TypeError, "root 0"),
        ([(7, 0, 1.0)], TypeError, "root 0"),
        ([(NODE, 0, 1.0), (NODE, 1, 1.0)], IndexError, "root 1"),
        ([(NODE, -1, 1.0)], IndexError, "root 0"),
        ([(NODE, "0", 1.0)], TypeError, "root 0|int"),
        ([(NODE, 0, 1.0, 1.0)], (TypeError, ValueError), "root 0"),
        ([()], (TypeError, ValueError), "root 0"),
        ([NODE], ValueError, r"^backward: root 0 \(Mul, slot 0\): "),
        ([(W, 0)], ValueError, r"^backward: root 0 \(w, slot 0\): "),
        ([(SCALAR, 0, ones(3, 2)), (W, 0, "text")], (TypeError, ValueError), "^backward was given an invalid gradient"),
        ([(W, 0, ones(3))], ValueError, r"^backward was given an invalid gradient at index 0: expected .*2.*3"),
        ([(W, 0, ones(2) + 1j)], ValueError, "^backward was given an invalid gradient at index 0: .*complex"),
        ([(W, 0, ones(2), None, None)], (TypeError, ValueError), "root 0"),
    ],
)
def test_invalid_roots_are_refused(roots: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        fanin.backward(roots)
    assert W.grad is None


def test_a_pass_without_roots_does_nothing() -> None:
    fanin.backward([])
    assert fanin.grad([], [W]) == [None]


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [(7, TypeError), ([7], TypeError), ([(NODE, 1)], IndexError), ([(NODE, "0")], TypeError), ([None], TypeError)],
)
def test_invalid_inputs_are_refused(inputs: Any, kind: Any) -> None:
    with pytest.raises(kind):
        fanin.grad([(NODE, 0, 1.0)], inputs)


def test_inputs_of_a_pass_may_be_a_dict_of_leaves() -> None:
    w, v = leaf(), leaf()
    top = Node(lambda g: (g, 2 * g), edges=[(w, 0), (v, 0)])
    fanin.backward([(top, 0, ones(2))], inputs={"v": v}, keep_graph=True)
    assert w.grad is None and v.grad.tolist() == [2, 2]
    for node, sums in (p := fanin.walk([(top, 0, ones(2))], inputs={"w": w}, keep_graph=True)):
        p.give(node.fn(*sums))
    assert w.grad.tolist() == [1, 1] and v.grad.tolist() == [2, 2]
    for other in ({0: 1}, {}, {w}, MappingProxyType({"w": w})):
        with pytest.raises((TypeError, ValueError), match=r"^backward: input"):
            fanin.backward([(top, 0, ones(2))], inputs=other, keep_graph=True)
    with pytest.raises(TypeError, match=r"^grad: inputs: expected a sequence of .*, got a dict"):
        fanin.grad([(top, 0, ones(2))], {"w": w})


def test_backward_takes_leaves_alone_as_inputs() -> None:
    w = leaf()
    top = Node(passed_on, edges=[(w, 0)])
    with pytest.raises(TypeError, match=r"^backward: input 0: .* is no leaf .*fanin\.grad"):
        fanin.backward([(top, 0, ones(2))], [top])
    assert w.grad is None


def test_invalid_options_are_refused() -> None:
    with pytest.raises(TypeError):
        fanin.backward([(NODE, 0, 1.0)], None, True)  # keep_graph is a keyword
    with pytest.raises(TypeError, match="schedule"):
        fanin.backward([(NODE, 0, 1.0)], schedule=7)
    with pytest.raises(TypeError):
        fanin.backward([(NODE, 0, 1.0)], no_such_option=1)


# What functions and hooks return


class NoArray:
    """What has no sum."""

    __slots__ = ()


#: Of two edges, to a slot of shape (3, 4) and float32, the gradient for index 1; the rest of the message.
NONSENSE: dict[str, tuple[Any, Any, str]] = {
    "shape": (ones(4, 3), ValueError, r"expected .*\(3, 4\).*got .*\(4, 3\)"),
    "fewer axes": (ones(4), ValueError, "expected"),
    "dtype": (ones(3, 4) * 1j, ValueError, "expected .*float32.*complex"),
    "strings": (np.full((3, 4), "x"), TypeError, ""),
    "foreign byte order": (ones(3, 4).astype(">f4"), BufferError, ""),
    "a list": ([[1.0] * 4] * 3, TypeError, "list"),
    "an object": (NoArray(), TypeError, "NoArray"),
    "a class": (NoArray, TypeError, ""),
    "a node": (NODE, TypeError, ""),
    "sparse, wrong shape": (fanin.Sparse("coo", (np.zeros((2, 1), int), ones(1)), (4, 3)), ValueError, "expected"),
    "zero, wrong shape": (fanin.Zero((4, 3), "float32"), ValueError, "expected"),
}


@pytest.mark.rule("V2", "V3")
@pytest.mark.parametrize("producers", [1, 2])
@pytest.mark.parametrize("what", NONSENSE)
def test_a_gradient_that_does_not_fit_its_slot(what: str, producers: int) -> None:
    """The slot may have one producer, whose gradient is handed through, or a buffer."""
    bad, kind, text = NONSENSE[what]
    w = leaf()
    low = Node(lambda g: (), slots=[Slot(shape=(3, 4), dtype="float32")], name="low")
    mul = Node(lambda g: [ones(2), bad] + [ones(3, 4)] * (producers - 1),
               edges=[(w, 0)] + [(low, 0)] * producers, name="Mul")  # fmt: skip
    with pytest.raises(kind, match=rf"(?s)^Mul returned an invalid gradient at index 1: .*{text}") as caught:
        fanin.backward([(mul, 0, 1.0)])
    assert caught.value.__notes__[0].startswith("in Mul (node")
    assert w.grad is None


@pytest.mark.rule("V1", "V3")
@pytest.mark.parametrize(
    ("gives", "kind", "text"),
    [
        (lambda: (1.0,), ValueError, "expected 2, got 1"),
        (lambda: (1.0, 1.0, 1.0), ValueError, "expected 2, got 3"),
        (lambda: (x for x in (1.0, 1.0)), TypeError, "expected a tuple of 2, got a generator"),
        (lambda: ones(2, 2), TypeError, "expected a tuple of 2, got a numpy.ndarray"),
        (lambda: None, TypeError, "expected a tuple of 2, got"),
        (lambda: {0: 1.0, 1: 1.0}, TypeError, "expected a tuple of 2, got a dict"),
    ],
)
def test_a_wrong_number_of_gradients_is_refused(gives: Callable[[], Any], kind: Any, text: str) -> None:
    w = leaf(1)
    mul = Node(lambda g: gives(), edges=[(w, 0), (w, 0)], name="Mul")
    with pytest.raises(kind, match=rf"^Mul returned an invalid number of gradients: {text}"):
        fanin.backward([(mul, 0, 1.0)])
    assert w.grad is None


def test_a_node_without_edges_returns_nothing() -> None:
    for nothing in (None, (), []):
        fanin.backward([(Node(lambda g, nothing=nothing: nothing), 0, 1.0)])
    with pytest.raises((TypeError, ValueError), match=r"^sink returned an invalid number of gradients"):
        fanin.backward([(Node(lambda g: (g, g), name="sink"), 0, 1.0)])


@pytest.mark.rule("E9", "V3")
@pytest.mark.parametrize(
    "new",
    [ones(3), np.ones(2), "text", NoArray(), ones(2) * 1j],
    ids=["a shape", "a dtype", "a text", "an object", "complex"],
)
@pytest.mark.parametrize("where", ["slot", "pre", "post", "leaf"])
def test_invalid_results_of_hooks_are_refused(where: str, new: Any) -> None:
    """Of another dtype, what a post-hook gives is a gradient like any other, and is cast (A10)."""
    w = leaf()
    mul = Node(passed_on, slots=[Slot(shape=(2,), dtype="float32")], edges=[(w, 0)], name="Mul")
    if where == "slot":
        mul.register_hook(lambda g: new)
        text = "^a hook of slot 0 of Mul returned an invalid gradient"
    elif where == "pre":
        mul.register_prehook(lambda sums: (new,))
        text = "^a pre-hook of Mul returned an invalid gradient at index 0: "
    elif where == "post":
        mul.register_posthook(lambda sums, gradients: (new,))
        text = "^a post-hook of Mul returned an invalid gradient at index 0: "
    else:
        w.register_hook(lambda g: new)
        text = "^a hook of (slot 0 of )?w returned an invalid gradient"
    if where == "post" and isinstance(new, np.ndarray) and new.shape == (2,) and new.dtype == float:
        fanin.backward([(mul, 0, ones(2))])
        assert w.grad.dtype == np.float32 and (w.grad == new).all()
        return
    with pytest.raises((TypeError, ValueError), match=text):
        fanin.backward([(mul, 0, ones(2))])
    assert w.grad is None


def run_a_pass(roots: Any, workers: int) -> None:
    fanin.backward(roots, workers=workers)


def run_by_hand(roots: Any, workers: int) -> None:
    for node, sums in (p := fanin.walk(roots)):
        p.give(node.fn(*sums))


@pytest.mark.rule("E9", "V3")
@pytest.mark.parametrize("run", [run_a_pass, run_by_hand])
@pytest.mark.parametrize(
    ("hooks", "whose"),
    [
        ({}, "Mul"),
        ({"see": None}, "Mul"),
        ({"same": lambda good, bad: (good, bad)}, "Mul"),
        ({"other": lambda good, bad: (good * 2, bad)}, "Mul"),
        ({"bad": lambda good, bad: (good, ones(3))}, "a post-hook of Mul"),
        ({"bad": lambda good, bad: (good, ones(3)), "same": lambda good, bad: (good, bad)}, "a post-hook of Mul"),
        ({"swap": lambda good, bad: (None, good), "bad": lambda none, good: (none, ones(3))}, "a post-hook of Mul"),
    ],
    ids=lambda x: "-".join(x) or "none" if isinstance(x, dict) else "",
)
def test_a_wrong_gradient_is_attributed_to_the_node_or_the_post_hook_that_returned_it(
    run: Any, hooks: Any, whose: str
) -> None:
    """Of several post-hooks it does not matter which one it was; what they hand on is whose it was."""
    for workers in (1, 2):
        w = leaf()
        mul = Node(lambda g: (g, ones(5)), edges=[(w, 0), (w, 0)], name="Mul")
        for hook in hooks.values():
            mul.register_posthook(lambda sums, gradients, hook=hook: hook and hook(*gradients))
        with pytest.raises(
            ValueError, match=rf"^{whose} returned an invalid gradient at index 1: expected .* shape \(2,\)"
        ):
            run([(mul, 0, ones(2))], workers)
        assert w.grad is None


@pytest.mark.rule("E9", "V3")
def test_a_wrong_sum_of_a_pre_hook_is_named_with_its_index() -> None:
    w = leaf()
    for new, slots, text in [
        (ones(3), 2, r"expected \(2,\) float32 on cpu, got \(3,\) float32 on cpu"),
        (None, 2, "expected a gradient, as there is a sum, got None"),
        (5, 1, "expected None, as there is no sum, got an int"),
    ]:
        mul = Node(lambda a, b: a, 2, edges=[(w, 0)], name="Mul")
        mul.register_prehook(lambda sums, new=new: (sums[0], new))
        with pytest.raises(ValueError, match=rf"^a pre-hook of Mul returned an invalid gradient at index 1: {text}\n"):
            fanin.backward([(mul, slot, ones(2)) for slot in range(slots)])
    assert w.grad is None


WRONG_KINDS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Node(7), "fn: expected a function, got an int"),  # type: ignore[arg-type]
    (lambda: Node(None), "fn: expected a function, got None"),  # type: ignore[arg-type]
    (lambda: Node(passed_on, release=[]), "release: expected a function, got a list"),  # type: ignore[arg-type]
    (lambda: Node(passed_on).register_hook(7), "hook: expected a function, got an int"),
    (lambda: fanin.backward([7]), "root 0: expected (node, slot, gradient), .* got an int"),  # type: ignore[list-item]
    (lambda: fanin.backward([], [None]), "input 0: .* got None"),  # type: ignore[list-item]
    (
        lambda: fanin.backward([leaf(1)], schedule=7),  # type: ignore[arg-type]
        "backward: schedule: expected a function, got an int",
    ),
    (
        lambda: fanin.backward([leaf(1)], workers="2"),  # type: ignore[arg-type]
        "backward: workers: expected an integer, got a str",
    ),
    (
        lambda: fanin.backward([leaf(1)], workers=None),  # type: ignore[arg-type]
        "backward: workers: expected an integer, got None",
    ),
    (lambda: fanin.walk([leaf(1)]).explain(1), "explain: .* got an int"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "text"), WRONG_KINDS, ids=[text for _, text in WRONG_KINDS])
def test_messages_name_kinds_of_objects_in_usual_words(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"{text.replace('(', '[(]').replace(')', '[)]')}$"):
        make()


@pytest.mark.parametrize("given", [2**31 - 1, 2**40, 2**70, 0, -1], ids=str)
def test_a_number_of_inputs_that_no_node_has_is_refused_with_both_bounds(given: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^inputs: expected a number of gradients from 1 to 2147483646, got {given}$"
    ):
        Node(passed_on, given)


@pytest.mark.parametrize("make", [lambda name: Node(passed_on, name=name), lambda name: Leaf(ones(1), name=name)])
def test_a_name_that_utf8_cannot_hold_is_refused_as_a_name(make: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"^name: expected text without surrogates, got 'a\\ud800'") as e:
        make("a\ud800")
    assert type(e.value) is ValueError


def test_slices_of_edges_are_lists_of_edges() -> None:
    w, v = leaf(), leaf()
    node = Node(passed_on, edges=[(w, 0), None, (v, 0)])
    every = list(node.edges)
    for which in (slice(None), slice(1, None), slice(-1, None), slice(None, None, -2), slice(5, 9)):
        assert node.edges[which] == every[which]
    assert node.edges[-1] == (v, 0) == node.edges[np.int64(2)]  # type: ignore[index]
    for at in (3, -4):
        with pytest.raises(IndexError, match=f"expected an edge below 3, got {at}"):
            node.edges[at]
    with pytest.raises(TypeError, match="edge: expected an integer or a slice, got a str"):
        node.edges["0"]  # type: ignore[call-overload]


CALLS = {"backward": fanin.backward, "grad": fanin.grad, "walk": fanin.walk}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("name", "bad"),
    [("roots", 5), ("roots", {1}), ("inputs", 5), ("inputs", "ab"), ("schedule", 5), ("progress", 5),
     ("workers", "2"), ("workers", 2**70), ("workers", 1.5), ("workers", 0)],
)  # fmt: skip
def test_each_refused_argument_of_a_pass_is_named_with_the_call(call: str, name: str, bad: Any) -> None:
    if name == "workers" and call == "walk":
        return
    w = leaf()
    given = {"roots": [(w, 0, ones(2))], "inputs": [w], name: bad}
    with pytest.raises((TypeError, ValueError), match=f"^{call}: {name}: expected "):
        CALLS[call](**given)


def test_a_dtype_of_foreign_byte_order_is_refused_with_the_one_to_name_instead() -> None:
    for make in (lambda: Slot(dtype=">f4"), lambda: Leaf(ones(2), grad_dtype=">f4")):
        with pytest.raises(ValueError, match=r"expected native byte order, 'float32': x\.astype\('float32'\)$"):
            make()


@pytest.mark.rule("E9", "V1")
@pytest.mark.parametrize("new", [(), (1.0, 1.0), 7, "x", {}], ids=repr)
def test_hooks_that_return_another_number(new: Any) -> None:
    w = leaf()
    for register, word in (("register_prehook", "pre"), ("register_posthook", "post")):
        mul = Node(lambda a: (None, a), edges=[None, (w, 0)], name="Mul")
        if word == "post" and new == (1.0, 1.0):
            continue
        getattr(mul, register)(lambda *args: new)
        with pytest.raises((TypeError, ValueError), match=f"a {word}-hook of Mul|Mul returned"):
            fanin.backward([(mul, 0, ones(2))])
    assert w.grad is None


def test_invalid_hooks_are_refused() -> None:
    node = Node(passed_on, name="Mul")
    for register in (node.register_hook, node.register_prehook, node.register_posthook, W.register_hook,
                     W.register_post_accumulate_grad_hook):  # fmt: skip
        with pytest.raises(TypeError):
            register(7)
    for slot in (1, -1):
        with pytest.raises(IndexError):
            node.register_hook(passed_on, slot=slot)


@pytest.mark.rule("A8", "V2", "V3")
@pytest.mark.parametrize("slot", [Slot((2,), "float64"), Slot((2,)), Slot(dtype="float64")], ids=repr)
@pytest.mark.parametrize("ways", [1, 2])
def test_a_slot_with_a_declaration_refuses_an_array_of_objects(e: Any, slot: Any, ways: int) -> None:
    called: list[Any] = []
    objects = np.ones(7, object)
    to = e.Node(called.append, slots=[slot], name="to")
    mul = e.Node(lambda g: (objects,) * ways, edges=[(to, 0)] * ways, name="Mul")
    with pytest.raises(TypeError, match=r"^Mul returned an invalid gradient at index 0: expected an array of numbers"):
        e.backward([(mul, 0, np.ones(2))])
    assert called == []
    as_object = fanin.Slot((2,), combine=lambda a, b: a + b)
    e.backward([(e.Node(called.append, slots=[as_object], name="to"), 0, objects)])
    assert len(called) == 1 and called[0] is objects


class Own:
    """Sums by its own +."""

    def __add__(self, other: object) -> Own:
        return self


class Loud(np.ndarray[Any, Any]):
    """Has operators of its own."""

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        return self


@pytest.mark.rule("L5", "V2", "V3")
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize(
    "g", [np.ones(2, object), Own(), np.ma.ones(2), np.ones(2).view(Loud)], ids=lambda g: type(g).__name__
)
def test_the_leaf_of_an_array_refuses_objects_that_sum_by_their_own_plus(e: Any, g: Any, ways: int) -> None:
    for before in (None, np.ones(2)):
        w = e.Leaf(np.zeros(2), name="w")
        if before is not None:
            e.backward([(w, 0, before)])
        mul = e.Node(lambda s: (g,) * ways, edges=[(w, 0)] * ways, name="Mul")
        with pytest.raises(TypeError, match=r"^Mul returned an invalid gradient at index 0: expected an array"):
            e.backward([(mul, 0, 1.0)])
        assert w.grad is None if before is None else w.grad.tolist() == [1, 1]
    with pytest.raises(TypeError, match=r"^w: grad: expected an array"):
        fanin.Leaf(np.zeros(2), name="w").grad = g
    whole = e.Leaf(np.zeros(2), accumulate="float64", name="w")
    with pytest.raises(TypeError, match="expected an array"):
        e.backward([(whole, 0, g)])
    assert whole.grad is None


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


@pytest.mark.rule("L5")
@pytest.mark.parametrize("accumulate", [None, "float64"])
@pytest.mark.parametrize(
    ("bad", "kind"), [(1.0, TypeError), (F(1), TypeError), (read_only(ones()), ValueError), (np.array(1j), ValueError)]
)
def test_a_grad_that_no_pass_could_add_to_is_refused_when_it_is_set(bad: Any, kind: Any, accumulate: Any) -> None:
    w = Leaf(np.zeros((), F), accumulate=accumulate, name="w")
    fanin.backward([(w, 0, ones())])
    with pytest.raises(kind, match=r"^w: grad: expected"):
        w.grad = bad
    fanin.backward([(w, 0, ones())])
    assert w.grad == 2


def test_a_numbers_leaf_has_numbers() -> None:
    w = Leaf(2.0)
    w.grad = 1.0
    fanin.backward([(w, 0, 3.0)])
    assert w.grad == 4.0


@pytest.mark.parametrize("bad", [ones(3), "text", ones(2) * 1j, 7])
def test_invalid_values_of_grad_are_refused(bad: Any) -> None:
    w = leaf()
    with pytest.raises((TypeError, ValueError, BufferError), match=r"^w: "):
        w.grad = bad
    assert w.grad is None
    fanin.backward([(w, 0, ones(2))])
    assert w.grad.tolist() == [1, 1]


# Passes that are disturbed


def chain(n: int, end: Any, fn: Callable[[Any], Any] = passed_on) -> Any:
    node = end
    for _ in range(n):
        node = Node(fn, edges=[(node, 0)])
    return node


@pytest.mark.rule("E14")
def test_ctrl_c_while_nodes_run(log: Any) -> None:
    """The signal reaches a thread that runs nodes which do not poll for signals."""
    w = leaf()
    at = 50

    def fn(g: Any) -> Any:
        log.append(1)
        if len(log) == at:
            signal.raise_signal(signal.SIGINT)
        return g

    top = chain(200, w, fn)
    with pytest.raises(KeyboardInterrupt):
        fanin.backward([(top, 0, ones(2))], keep_graph=True)
    assert at <= len(log) <= at + 2 and w.grad is None
    log.clear()
    at = 1000
    fanin.backward([(top, 0, ones(2))], keep_graph=True)
    assert w.grad.tolist() == [1, 1]


@pytest.mark.rule("E10", "E15")
@pytest.mark.threads
def test_a_graph_that_is_dropped_while_another_thread_walks_it() -> None:
    for _ in range(5):
        w, begun, dropped = leaf(), threading.Event(), threading.Event()
        here: list[Any] = []

        def wait(g: Any, begun: Any = begun, dropped: Any = dropped) -> Any:
            begun.set()
            dropped.wait()
            return g

        here.append(Node(wait, edges=[(chain(500, w), 0)]))
        errors: list[BaseException] = []

        def walk(top: list[Any] = here, errors: list[BaseException] = errors) -> None:
            try:
                fanin.backward([(top[0], 0, ones(2))])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=walk)
        thread.start()
        begun.wait()
        here.clear()
        gc.collect()
        dropped.set()
        thread.join()
        assert not errors and w.grad.tolist() == [1, 1]


@pytest.mark.rule("E10")
def test_a_graph_that_drops_itself_while_it_is_walked() -> None:
    """Functions, hooks and a release that drop the nodes, their edges and their hooks."""
    w, held = leaf(), {}

    def drop(*_: Any) -> None:
        held.clear()
        gc.collect()

    def fn(g: Any) -> Any:
        drop()
        return g

    for where in ("fn", "hook", "pre", "post", "release", "leaf"):
        node = Node(fn if where == "fn" else passed_on, edges=[(w, 0)], release=drop if where == "release" else None)
        held["top"] = Node(passed_on, edges=[(node, 0)])
        handle = {
            "hook": lambda node=node: node.register_hook(drop),
            "pre": lambda node=node: node.register_prehook(drop),
            "post": lambda node=node: node.register_posthook(drop),
            "leaf": lambda: w.register_hook(drop),
        }.get(where, lambda: None)()
        del node
        fanin.backward([(held["top"], 0, ones(2))])
        if handle is not None:
            handle.remove()
    assert w.grad.tolist() == [6, 6]


@pytest.mark.rule("E9")
def test_a_hook_that_removes_itself_and_others() -> None:
    w = leaf()
    handles: list[Any] = []

    def clear(g: Any) -> None:
        for handle in handles:
            handle.remove()

    handles += [w.register_hook(clear) for _ in range(10)]
    for _ in range(2):
        fanin.backward([(w, 0, ones(2))])
    assert w.grad.tolist() == [2, 2]


#: Lets the collector run at each allocation, which takes hooks out while one is added, or another removed.
COLLECTED = """
import gc
import fanin

def come_and_go(change):
    node = fanin.Node(lambda g: None)
    called = []
    handles = [node.register_prehook(called.append) for _ in range(60)]
    inside = False
    def take_one(phase, info):
        nonlocal inside
        if not inside and phase == "start" and len(handles) > 9:
            inside = True
            handles.pop(0).remove()
            inside = False
    gc.enable()
    gc.callbacks.append(take_one)
    gc.set_threshold(1)
    for k in range(400):
        if change == "add":
            handles.append(node.register_prehook(called.append))
        elif len(handles) > 9:
            handles.pop().remove()
    gc.callbacks.clear()
    gc.disable()
    fanin.backward([(node, 0, 1.0)])
    return len(called) == len(handles)

for change in ("add", "remove"):
    print(change, come_and_go(change))
"""


@functools.cache
def collected() -> list[str]:
    return run_prepared(COLLECTED).stdout.splitlines()


@pytest.mark.rule("E9")
@pytest.mark.parametrize("change", ["add", "remove"])
def test_the_collector_may_remove_hooks_while_others_are_added_and_removed(change: str) -> None:
    assert f"{change} True" in collected()


@pytest.mark.rule("E7", "E10")
def test_a_nested_pass_that_frees_nodes_of_the_outer_pass() -> None:
    w = leaf()
    low = Node(passed_on, edges=[(w, 0)], name="low")
    top = Node(lambda g: fanin.backward([(low, 0, g)]) or g, edges=[(low, 0)], name="top")
    with pytest.raises(RuntimeError, match=r"low was freed by pass \d+") as caught:
        fanin.backward([(top, 0, ones(2))])
    assert caught.value.__notes__[0].startswith("in low (node")
    assert w.grad.tolist() == [1, 1]  # of the inner one, whole


@pytest.mark.rule("E7")
def test_a_pass_inside_a_pass_inside_a_pass() -> None:
    w = leaf()

    def nested(depth: int) -> Any:
        def fn(g: Any) -> Any:
            if depth:
                fanin.backward([(nested(depth - 1), 0, g)])
            return g

        return Node(fn, edges=[(w, 0)])

    fanin.backward([(nested(20), 0, ones(2))])
    assert w.grad.tolist() == [21, 21]


def test_endless_nested_passes_are_an_error_that_names_the_place_once() -> None:
    def again(g: Any) -> Any:
        fanin.backward([(node, 0, g)], keep_graph=True)
        return g

    node = fanin.Node(again, edges=[(fanin.Leaf(np.zeros(2)), 0)], name="again")
    with pytest.raises(RuntimeError) as raised:  # a RecursionError of Python's, or ours of 1,000 passes
        fanin.backward([(node, 0, np.ones(2))], keep_graph=True)
    assert raised.value.__notes__ == [f"in again (node {node.sequence_nr}): 0 of 2 nodes had run"]


def test_an_error_a_thousand_passes_deep_has_a_handful_of_notes() -> None:
    def deeper(g: Any) -> Any:
        fanin.backward([(Node(deeper, edges=[None]), 0, 1.0)])

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with pytest.raises(RuntimeError, match="1000 deep") as e:
            deeper(None)
    finally:
        sys.setrecursionlimit(limit)
    notes = e.value.__notes__
    assert len(notes) == 17
    assert notes[15].startswith("in node ") and "had run" in notes[15]  # the innermost are there
    assert notes[16] == ".. and 986 notes more, of the passes around these"


def test_notes_of_the_users_own_stay_where_notes_are_folded() -> None:
    def deeper(depth: int) -> Any:
        def fn(g: Any) -> Any:
            if depth == 40:
                raise ValueError("deep")
            try:
                fanin.backward([(Node(deeper(depth + 1)), 0, 1.0)])
            except ValueError as e:
                e.add_note(f"mine {depth}")
                raise

        return fn

    with pytest.raises(ValueError, match="deep") as e:
        fanin.backward([(Node(deeper(0)), 0, 1.0)])
    assert [note for note in e.value.__notes__ if note.startswith("mine")] == [f"mine {i}" for i in range(39, -1, -1)]
    folded = [note for note in e.value.__notes__ if note.startswith("..")]
    assert folded == [".. and 33 notes more, of the passes around these"]


def test_a_function_that_changes_its_own_node() -> None:
    w, v = leaf(), leaf()

    def fn(g: Any) -> Any:
        node.edges.append((v, 0))
        node.register_hook(lambda g: g * 100)
        return g

    node = Node(fn, edges=[(w, 0)], name="Mul")
    fanin.backward([(node, 0, ones(2))], keep_graph=True)
    assert w.grad.tolist() == [1, 1] and v.grad is None


class Lies(list[Any]):
    """A list whose length, items and iterator contradict each other."""

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, i: Any) -> Any:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Forgets:
    """A number that empties the list when it is converted."""

    def __init__(self, memory: list[Any]) -> None:
        self.memory = memory

    def __index__(self) -> int:
        self.memory.clear()
        gc.collect()
        return 0


def test_sequences_that_change_while_they_are_read_cause_no_crash() -> None:
    """What is in them is read once, and kept while it is needed."""
    w, held = leaf(), []
    held += [(w, Forgets(held)), (Node(passed_on, edges=[(w, 0)]), 0)]
    try:
        node = Node(passed_on, edges=held, name="Mul")
        assert len(node.edges) in (1, 2)
    except (IndexError, TypeError, RuntimeError):
        pass
    roots: list[Any] = []
    roots += [(Node(passed_on, edges=[(w, 0)]), Forgets(roots), ones(2)), (w, 0, ones(2))]
    try:
        fanin.backward(roots)
        assert w.grad.tolist() in ([1, 1], [2, 2])
    except (IndexError, TypeError, RuntimeError):
        assert w.grad is None
    lies = Lies([(w, 0, ones(2))])
    try:
        fanin.backward(lies)
    except (TypeError, ValueError):
        pass
    try:
        Node(lambda g: Lies([g]), edges=[(w, 0)])
        fanin.backward([(Node(lambda g: Lies([g]), edges=[(w, 0)]), 0, ones(2))])
    except (TypeError, ValueError):
        pass


def test_an_error_in_a_comparison_or_an_add_of_objects_ends_the_pass() -> None:
    class Bad:
        def __add__(self, other: Any) -> Any:
            raise ZeroDivisionError("in +")

    low = Node(lambda g: (), name="low")
    top = Node(lambda g: (Bad(), Bad()), edges=[(low, 0), (low, 0)], name="top")
    with pytest.raises(ZeroDivisionError) as caught:
        fanin.backward([(top, 0, 1.0)])
    assert caught.value.__notes__


def test_invalid_arguments_of_a_walk_are_refused() -> None:
    w = leaf()
    mul = Node(passed_on, edges=[(w, 0)], name="Mul")
    for bad, kind in ((ones(3), ValueError), ((ones(2), ones(2)), ValueError), ("text", TypeError)):
        p = fanin.walk([(mul, 0, ones(2))], keep_graph=True)
        next(p)
        with pytest.raises(kind, match=r"^Mul returned an invalid"):
            p.give(bad)
        assert list(p) == []  # it ended there (E6)
    assert w.grad is None
