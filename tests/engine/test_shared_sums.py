"""A function must not write a sum that others have: where it does, it is an error or changes nothing of theirs (E4)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node
from kit import hooks

pytestmark = pytest.mark.core

READ_ONLY = "read-only"


def scale(g: Any) -> Any:
    g *= 10
    return g


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=READ_ONLY):
        call()


def two_branches(first: Any, second: Any, root: Any, **how: Any) -> tuple[Any, Any]:
    """The gradients of two leaves whose branches get the same gradient."""
    x, y = Leaf(np.zeros(3), name="x"), Leaf(np.zeros(3), name="y")
    one, two = Node(first, edges=[(x, 0)], name="one"), Node(second, edges=[(y, 0)], name="two")
    top = Node(lambda g: (g, g), edges=[(one, 0), (two, 0)], name="top")
    fanin.backward([(top, 0, root)], **how)
    return x.grad, y.grad


@pytest.mark.rule("E4", "A14")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_function_that_writes_a_sum_of_another_branch_is_an_error_in_every_order(last: bool, workers: int) -> None:
    root = np.ones(3)
    functions = (scale, lambda g: g) if last else (lambda g: g, scale)
    refused(lambda: two_branches(*functions, root, workers=workers))
    assert root.tolist() == [1, 1, 1] and root.flags.writeable


@pytest.mark.rule("E4")
def test_the_callers_own_root_gradient_is_not_written() -> None:
    root = np.ones(3)
    refused(lambda: fanin.backward([(Node(scale, edges=[None]), 0, root)]))
    assert root.tolist() == [1, 1, 1] and root.flags.writeable


@pytest.mark.rule("E4")
def test_a_function_may_write_a_sum_without_other_references() -> None:
    x = Leaf(np.zeros(3))
    node = x
    for _ in range(3):
        node = Node(scale, edges=[(node, 0)])
    fanin.backward([(Node(lambda g: g * 1, edges=[(node, 0)]), 0, np.ones(3))])
    assert x.grad.tolist() == [1000.0] * 3
    both = [Node(lambda g: g * 1, edges=[(node, 0)]) for _ in range(2)]
    x.grad = None
    node = Node(scale, edges=[(x, 0)])
    both = [Node(lambda g: g * 1, edges=[(node, 0)]) for _ in range(2)]
    fanin.backward([(Node(lambda g: (g, g), edges=[(b, 0) for b in both]), 0, np.ones(3))])
    assert x.grad.tolist() == [20.0] * 3, "the sum of a fan-in is the function's own"


@pytest.mark.rule("E4")
def test_a_view_of_a_referenced_array_is_not_written() -> None:
    root = np.ones((2, 3))
    refused(lambda: two_branches(lambda g: scale(g)[0], lambda g: g[0], root))
    refused(lambda: two_branches(scale, lambda g: g, root[0]))
    parts = Node(lambda g: (g[0], g[1], g), edges=[(Node(scale, edges=[None]), 0), None, (Node(lambda g: None), 0)])
    refused(lambda: fanin.backward([(parts, 0, root * 1)]))
    assert root.tolist() == np.ones((2, 3)).tolist()


@pytest.mark.rule("E4", "E8")
def test_a_gradient_that_grad_returns_is_not_written_by_the_node_that_received_it() -> None:
    low = Node(scale, edges=[(x := Leaf(np.zeros(3)), 0)])
    top = Node(lambda g: g * 2, edges=[(low, 0)])
    refused(lambda: fanin.grad([(top, 0, np.ones(3))], [low, x]))


@pytest.mark.rule("E9")
@pytest.mark.parametrize("when", ["slot", "pre", "post", "post gradient", "leaf"])
def test_hooks_cannot_write_referenced_arrays(when: str) -> None:
    x, y = Leaf(np.zeros(3)), Leaf(np.zeros(3))
    one, two = Node(lambda g: g, edges=[(x, 0)]), Node(lambda g: g, edges=[(y, 0)])
    top = Node(lambda g: (g, g), edges=[(one, 0), (two, 0)])
    root = np.ones(3)
    register: dict[str, Any] = {
        "slot": lambda: one.register_hook(lambda g: None if g is None else scale(g)),
        "pre": lambda: one.register_prehook(lambda sums: (scale(sums[0]),)),
        "post": lambda: one.register_posthook(lambda sums, gradients: (scale(sums[0]),)),
        "post gradient": lambda: top.register_posthook(lambda sums, gradients: (scale(gradients[0]), gradients[1])),
        "leaf": lambda: x.register_hook(scale),
    }
    register[when]()
    refused(lambda: fanin.backward([(top, 0, root)]))
    assert root.tolist() == [1, 1, 1] and root.flags.writeable


@pytest.mark.rule("E4", "E16")
def test_sums_by_hand_are_read_only_until_the_gradients_are_given() -> None:
    root = np.ones(3)
    node = Node(lambda g: g, edges=[(Leaf(np.zeros(3)), 0)])
    p = fanin.walk([(node, 0, root)])
    _, (g,) = next(p)
    refused(lambda: scale(g))
    p.give(g)
    assert root.flags.writeable
    p = fanin.walk([(node, 0, root)], keep_graph=True) if not node.freed else fanin.walk([(Node(scale), 0, root)])
    next(p)
    assert not root.flags.writeable
    del p
    assert root.flags.writeable and root.tolist() == [1, 1, 1]


def test_an_array_read_only_for_the_caller_stays_read_only_and_the_same_object() -> None:
    root = np.ones(3)
    seen: list[Any] = []
    node = Node(lambda g: seen.append(g) or g, edges=[(x := Leaf(np.zeros(3)), 0)])  # type: ignore[func-returns-value]
    assert fanin.grad([(node, 0, root)], [x], keep_graph=True)[0] is root is seen[0]
    root.flags.writeable = False
    fanin.grad([(node, 0, root)], [x])
    assert not root.flags.writeable


def test_an_array_in_two_threads_and_a_nested_pass_is_read_only_until_the_last_ends() -> None:
    root, met = np.ones(3), threading.Barrier(2)
    said: list[bool] = []

    def late(g: Any) -> None:
        met.wait()
        met.wait()  # the other one's function has returned
        said.append(g.flags.writeable)

    def early(g: Any) -> None:
        met.wait()

    def inside(g: Any) -> None:
        fanin.backward([(Node(lambda g: said.append(g.flags.writeable)), 0, g)])
        said.append(g.flags.writeable)

    def other() -> None:
        fanin.backward([(Node(early), 0, root)])
        met.wait()

    thread = threading.Thread(target=other)
    thread.start()
    fanin.backward([(Node(late), 0, root)])
    thread.join()
    assert root.flags.writeable
    fanin.backward([(Node(inside), 0, root)])
    assert said == [False] * 3 and root.flags.writeable


def test_an_error_of_the_function_leaves_the_array_writable() -> None:
    root = np.ones(3)
    with pytest.raises(ZeroDivisionError):
        fanin.backward([(Node(lambda g: 1 / 0), 0, root)])
    assert root.flags.writeable


@pytest.mark.rule("E4")
def test_a_leaf_with_foreign_memory_does_not_write_the_sum_of_another_branch() -> None:
    root = np.ones(3)
    mine = Leaf(like=((3,), "float64", "cpu"), accumulate=scale)
    refused(lambda: fanin.backward([(mine, 0, root)]))
    assert root.tolist() == [1, 1, 1]


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
def test_sums_that_are_not_guarded_are_found() -> None:
    hooks.fault("SUM_UNGUARDED")
    try:
        x, _ = two_branches(lambda g: g, scale, np.ones(3))
    finally:
        hooks.fault(None)
    assert x.tolist() == [10] * 3, "it has what the other branch made"


@pytest.mark.partners
@pytest.mark.rule("E4")
@pytest.mark.parametrize("last", [False, True])
def test_a_function_that_writes_a_referenced_torch_tensor_is_an_error(last: bool) -> None:
    torch = pytest.importorskip("torch")

    def written(node: Callable[[Any], Any], root: Any) -> None:
        x, y = Leaf(torch.zeros(3)), Leaf(torch.zeros(3))
        ends = [Node(node, edges=[(x, 0)], name="scale"), Node(lambda g: g, edges=[(y, 0)])]
        top = Node(lambda g: (g, g), edges=[(e, 0) for e in (ends[::-1] if last else ends)])
        with pytest.raises(RuntimeError, match=r"^scale wrote into the sum of its slot 0, which has other references"):
            fanin.backward([(top, 0, root)])

    written(lambda g: g.mul_(10), torch.ones(3))
    written(lambda g: g[0].zero_() and g, torch.ones(3))
    with torch.no_grad():
        written(lambda g: g.mul_(10), torch.ones(3)[:])
    alone = Leaf(torch.zeros(3))
    fanin.backward(
        [(Node(lambda g: g * 1, edges=[(Node(lambda g: g.mul_(10), edges=[(alone, 0)]), 0)]), 0, torch.ones(3))]
    )
    assert alone.grad.tolist() == [10.0] * 3


@pytest.mark.partners
def test_an_exception_that_a_torch_mode_raises_about_a_gradient_ends_the_pass() -> None:
    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode

    class Stops(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == torch.Tensor.is_cpu.__get__:
                raise KeyboardInterrupt("stop here")
            return func(*args, **(kwargs or {}))

    sparse, leaf = torch.ones(3).to_sparse(), Leaf(torch.zeros(3))
    node = Node(lambda g: g, edges=[(leaf, 0)])
    with Stops(), pytest.raises(KeyboardInterrupt, match="stop here"):
        fanin.backward([(node, 0, sparse), (node, 0, sparse)], keep_graph=True)
    assert leaf.grad is None
    fanin.backward([(node, 0, sparse), (node, 0, sparse)])
    assert leaf.grad.to_dense().tolist() == [2.0] * 3
