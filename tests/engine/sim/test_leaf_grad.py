"""`leaf.grad` while others use the leaf: read, set and summed by threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from kit.prepared import run_prepared

pytestmark = pytest.mark.core

F = np.float32


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.threads
@pytest.mark.rule("E15", "L5")
@pytest.mark.usefixtures("hasty")
def test_a_pass_during_a_read_of_a_wider_leaf_is_in_the_next_read() -> None:
    g = np.ones(300_000, F)
    for _ in range(30):
        w = fanin.Leaf(np.zeros_like(g), accumulate="float64")
        for _ in range(2):
            fanin.backward([(w, 0, g)])
            assert w.grad is not None
        fanin.backward([(w, 0, g)])
        reads = threading.Thread(target=lambda w=w: w.grad)
        reads.start()
        fanin.backward([(w, 0, g)])
        reads.join()
        assert w.grad[0] == w.grad[-1] == 4


class Tensor:
    """Has a gradient of its own, as torch's have, and sums by `+`."""

    def __init__(self, value: float, requires_grad: bool = False) -> None:
        self.value, self.requires_grad = value, requires_grad
        self.grad: Tensor | None = None

    def __add__(self, other: Tensor) -> Tensor:
        return Tensor(self.value + other.value)


@pytest.mark.rule("L2", "L5")
@pytest.mark.parametrize("asks", [True, False])
def test_the_gradient_of_an_array_that_requires_one_is_kept_in_its_own_grad(asks: bool) -> None:
    x, mine = Tensor(0.0, requires_grad=asks), Tensor(10.0)
    w = fanin.Leaf(x)
    for value in (1.0, 3.0):
        fanin.backward([(w, 0, Tensor(value))])
        assert (x.grad is w.grad) == asks
    assert w.grad.value == 4.0
    w.grad = mine
    assert (x.grad is mine) == asks and w.grad is mine
    w.grad = None
    assert x.grad is None and w.grad is None


#: Reads a wider leaf, which rounds into the array that `.grad` is, while the collector would free that array.
LET_GO = """
import gc, numpy as np, fanin
g = np.ones(9_000_000, np.float32)  # above 32 MiB: memory of its own, unmapped when it is let go
w = fanin.Leaf(np.zeros_like(g), accumulate="float64")
for _ in range(2):
    fanin.backward([(w, 0, g)])
    assert w.grad[0]
fanin.backward([(w, 0, g)])
refused = []
def let_go(phase, info):
    try:
        w.grad = None
    except RuntimeError as e:
        refused.append(str(e))
gc.callbacks.append(let_go)
gc.set_threshold(1)
try:
    print(w.grad[0])
finally:
    gc.callbacks.clear()
print(refused[:1])
"""


@pytest.mark.rule("E15", "L5")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the collector no longer runs in the midst of a call")
def test_a_wider_leafs_grad_is_not_freed_while_a_read_rounds_into_it() -> None:
    said = run_prepared(LET_GO).stdout
    assert said == "3.0\n['leaf 0: a gradient comes to this leaf from within its own accumulation']\n"


@pytest.mark.parametrize("wide", [None, "float64"])
@pytest.mark.parametrize(("strides", "overlaps"), [((8, 8), True), ((0, 8), True), ((8, 16), False), ((32, 8), False)])
def test_a_gradient_that_is_set_has_memory_of_its_own_for_each_element(
    strides: tuple[int, ...], overlaps: bool, wide: str | None
) -> None:
    leaf = fanin.Leaf(np.zeros((2, 2)), accumulate=wide)
    grad = np.lib.stride_tricks.as_strided(np.zeros(9), (2, 2), strides)
    if overlaps:
        with pytest.raises(ValueError, match=r"grad: expected an array whose elements .* overlaps itself: set a copy"):
            leaf.grad = grad
        assert leaf.grad is None
    else:
        leaf.grad = grad
    fanin.backward([(leaf, 0, np.ones((2, 2)))])
    assert leaf.grad.tolist() == [[1.0, 1.0]] * 2


def test_a_gradient_that_is_set_lies_on_the_leafs_device_and_machine() -> None:
    with Machine() as one, Machine() as other:
        leaf, host = fanin.Leaf(one.array(np.ones(3))), fanin.Leaf(np.ones(3))
        for x, text in (
            (other.array(np.ones(3)), "sim:0, got one on sim:0 of another machine"),
            (one.array(np.ones(3), 1), "sim:0, got one on sim:1"),
            (np.ones(3), "sim:0, got one on cpu"),
        ):
            with pytest.raises(ValueError, match=f"grad: expected an array on {text}$"):
                leaf.grad = x
            assert leaf.grad is None
        with pytest.raises(ValueError, match="grad: expected an array on cpu, got one on sim:0"):
            host.grad = one.array(np.ones(3))
        leaf.grad = one.array(np.ones(3))
        fanin.backward([(leaf, 0, one.array(np.ones(3)))])
        assert leaf.grad.numpy().tolist() == [2.0] * 3
