"""`fanin.backward(roots, weight=w)`: what a pass adds to leaves is multiplied (W8)."""

from __future__ import annotations

import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from kit import weighted
from kit.values import BFLOAT16

pytestmark = pytest.mark.core

WEIGHTS = (3, 0.1, 1, 2.5)


def terms(dtype: str, n: int = 40) -> list[Any]:
    rng = np.random.default_rng(1)
    return [(rng.standard_normal(n) * 2.0 ** rng.integers(-3, 3, n)).astype(weighted.dtype_of(dtype)) for _ in WEIGHTS]


@pytest.mark.rule("W8", "L5")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_pass_adds_its_rounded_product(dtype: str) -> None:
    leaf = fanin.Leaf(np.zeros(40, dtype))
    for w, g in zip(WEIGHTS, terms(dtype), strict=True):
        fanin.backward([(leaf, 0, g)], weight=w)
    assert np.array_equal(leaf.grad, weighted.folded(terms(dtype), WEIGHTS, wide=dtype))


def test_a_product_is_not_rounded_to_sixteen_bits_before_it_is_added() -> None:
    leaf, expected = fanin.Leaf(np.zeros(40, BFLOAT16)), None
    for w, g in zip(WEIGHTS, terms("bfloat16"), strict=True):
        fanin.backward([(leaf, 0, g)], weight=w)
        both = [g] if expected is None else [expected, g]
        expected = weighted.folded(both, [w] if expected is None else [1, w], dtype="bfloat16")
    assert leaf.grad.tobytes() == expected.tobytes()


def test_a_leaf_that_sums_in_a_wider_dtype_rounds_once() -> None:
    leaf = fanin.Leaf(np.zeros(40, np.float16), accumulate="float32")
    for w, g in zip(WEIGHTS, terms("float16"), strict=True):
        fanin.backward([(leaf, 0, g)], weight=w)
    assert np.array_equal(leaf.grad, weighted.folded(terms("float16"), WEIGHTS, dtype="float16"))
    leaf.grad = None
    fanin.backward([(leaf, 0, np.ones(40, np.float16))], weight=2)
    assert set(leaf.grad.tolist()) == {2.0}


def test_a_mean_over_tokens_is_a_division_away() -> None:
    leaf = fanin.Leaf(np.zeros(3), accumulate="float64")
    tokens = (5, 1, 10)
    for n, mean in zip(tokens, (1.0, 8.0, 4.0), strict=True):
        fanin.backward([(leaf, 0, np.full(3, mean))], weight=n)
    assert (leaf.grad / sum(tokens)).tolist() == [float(Fraction(5 + 8 + 40, 16))] * 3


def test_a_weight_of_one_or_none_changes_nothing() -> None:
    given = np.ones(3)
    for weight in (1, 1.0, None, np.float32(1)):
        leaf = fanin.Leaf(np.zeros(3))
        seen: list[Any] = []
        node = fanin.Node(lambda g: g * 2, edges=[(leaf, 0)])
        node.register_posthook(lambda sums, gradients, seen=seen: seen.extend(gradients))
        fanin.backward([(node, 0, given)], weight=weight)
        assert leaf.grad.tolist() == [2, 2, 2] and len(seen) == 1


def test_hooks_of_the_gradient_see_the_sum_and_hooks_after_it_the_product() -> None:
    leaf = fanin.Leaf(np.zeros(2))
    before: list[Any] = []
    after: list[Any] = []
    leaf.register_hook(lambda g: before.append(g.tolist()))
    leaf.register_post_accumulate_grad_hook(lambda one: after.append(one.grad.tolist()))
    fanin.backward([(leaf, 0, np.full(2, 3.0))], weight=4)
    assert (before, after) == ([[3, 3]], [[12, 12]])


def test_the_gradient_of_the_caller_is_not_written() -> None:
    leaf, given = fanin.Leaf(np.zeros(3)), np.ones(3)
    fanin.backward([(leaf, 0, given)], weight=5)
    fanin.backward([(leaf, 0, given)], weight=5)
    assert given.tolist() == [1, 1, 1] and leaf.grad.tolist() == [10, 10, 10]


def test_the_gradient_is_laid_out_like_the_leaf() -> None:
    array = np.asfortranarray(np.zeros((3, 4)))
    leaf = fanin.Leaf(array)
    fanin.backward([(leaf, 0, np.arange(12.0).reshape(3, 4))], weight=2)
    assert leaf.grad.strides == array.strides and np.array_equal(leaf.grad, 2 * np.arange(12.0).reshape(3, 4))


def test_sparse_gradients_are_weighed_in_their_values() -> None:
    leaf = fanin.Leaf(np.zeros(4, "f4"))
    for w in (2, 3):
        sparse = fanin.Sparse("coo", (np.array([[1, 1]]), np.float32([5, 7])), (4,))
        fanin.backward([(leaf, 0, sparse)], weight=w)
    dense = leaf.grad if isinstance(leaf.grad, np.ndarray) else fanin.add_n([leaf.grad, np.zeros(4, "f4")])
    assert dense.tolist() == [0, 60, 0, 0]


def test_numbers_and_objects_are_weighed_by_their_own_operator() -> None:
    leaf = fanin.Leaf(1.0)
    fanin.backward([(leaf, 0, 3.0)], weight=4)
    fanin.backward([(leaf, 0, 3.0)], weight=0.5)
    assert float(leaf.grad) == 13.5
    other = fanin.Leaf(like=fanin.Slot(), accumulate=(seen := []).append)
    fanin.backward([(other, 0, Fraction(1, 3))], weight=6)
    assert seen == [2]


def test_a_function_of_a_leaf_gets_the_product() -> None:
    seen: list[Any] = []
    leaf = fanin.Leaf(like=((2,), "float32", "cpu"), accumulate=seen.append)
    fanin.backward([(leaf, 0, np.full(2, 3, "f4"))], weight=4)
    assert seen[0].tolist() == [12, 12] and seen[0].dtype == np.float32


def test_complex_leaves_take_complex_weights_and_real_ones_do_not() -> None:
    leaf, real = fanin.Leaf(np.zeros(2, complex)), fanin.Leaf(np.zeros(2), name="real")
    fanin.backward([(leaf, 0, np.full(2, 1 + 2j))], weight=1j)
    assert leaf.grad.tolist() == [-2 + 1j] * 2
    with pytest.raises(ValueError, match=r"W4|complex|real"):
        fanin.backward([(real, 0, np.ones(2))], weight=1j)
    assert real.grad is None


BAD: list[tuple[Any, type[Exception]]] = [
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    (True, ValueError),
    ("3", TypeError),
    (np.ones(1), TypeError),
    ([2], TypeError),
    (10**400, ValueError),
]


@pytest.mark.parametrize(("bad", "kind"), BAD, ids=[str(one[0])[:8] for one in BAD])
def test_what_is_no_weight_is_refused_before_anything_runs(bad: Any, kind: type[Exception]) -> None:
    leaf = fanin.Leaf(np.zeros(2))
    node = fanin.Node(lambda g: pytest.fail("ran"), edges=[(leaf, 0)])
    with pytest.raises(kind, match=r"backward: weight"):
        fanin.backward([(node, 0, np.ones(2))], weight=bad)
    assert leaf.grad is None and not node.freed


def test_a_weight_too_large_for_the_sum_names_the_leaf_which_keeps_its_gradient() -> None:
    leaf = fanin.Leaf(np.zeros(2, "f4"), name="w")
    fanin.backward([(leaf, 0, np.ones(2, "f4"))])
    with pytest.raises(ValueError, match=r"not finite in float32"):
        fanin.backward([(leaf, 0, np.ones(2, "f4"))], weight=1e39)
    assert leaf.grad.tolist() == [1, 1]


def test_grad_and_walk_take_no_weight() -> None:
    leaf = fanin.Leaf(np.zeros(2))
    with pytest.raises(TypeError, match="weight"):
        fanin.grad([(leaf, 0, np.ones(2))], [leaf], weight=2)  # type: ignore[call-arg]


def test_threads_add_their_products_to_one_leaf() -> None:
    leaf = fanin.Leaf(np.zeros(1000))

    def run(w: int) -> None:
        for _ in range(20):
            fanin.backward([(leaf, 0, np.ones(1000))], weight=w)

    each = [threading.Thread(target=run, args=(w,)) for w in (2, 3, 5)]
    for one in each:
        one.start()
    for one in each:
        one.join()
    assert set(leaf.grad.tolist()) == {200.0}


def test_workers_make_the_same_bits() -> None:
    seen = []
    for workers in (1, 3):
        leaves = [fanin.Leaf(np.zeros(40, "f4")) for _ in range(6)]
        for w, g in zip(WEIGHTS, terms("float32"), strict=True):
            fanin.backward([(leaf, 0, g) for leaf in leaves for _ in range(2)], weight=w, workers=workers)
        seen.append([leaf.grad.tobytes() for leaf in leaves])
    assert seen[0] == seen[1]


def test_the_tape_weighs_its_passes_and_those_that_record_themselves() -> None:
    w = tape.parameter(np.array([2.0, 3.0]))
    tape.backward((w * w).sum(), weight=5)
    assert w.grad.tolist() == [20, 30]
    tape.backward((w * w).sum(), weight=-1)
    assert w.grad.tolist() == [16, 24]
    w.grad = None
    tape.backward((w * w * w).sum(), create_graph=True, weight=10)
    second = tape.grad(w.grad.sum(), [w])[0]
    assert w.grad.data.tolist() == [120, 270] and second.tolist() == [120, 180]


def test_a_recorded_step_weighs_as_the_step_itself() -> None:
    w = tape.parameter(np.array([2.0, 3.0]))

    def step(x: Any) -> Any:
        tape.backward((w * x).sum(), weight=3)
        return (w * x).sum()

    compiled = tape.compiled(step, static=[w])
    for k in range(4):
        w.grad = None
        compiled(np.array([1.0 + k, 2.0]))
        assert w.grad.tolist() == [3 * (1.0 + k), 6]
