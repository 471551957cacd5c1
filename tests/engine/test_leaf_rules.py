"""The rules L: what a leaf does with the gradient of a pass, and whose memory `.grad` then is."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from reference import engine as reference

pytestmark = pytest.mark.core

F = np.float32


def into(leaf: Any, g: Any, *, e: Any = fanin) -> None:
    """One pass whose only producer makes g."""
    e.backward([(leaf, 0, g)])


def fresh(leaf: Any, make: Any) -> None:
    """One pass whose producer makes an array without other references."""
    fanin.backward([(fanin.Node(lambda g: make(), edges=[(leaf, 0)]), 0, 1.0)])


@pytest.mark.rule("L1")
def test_an_undefined_gradient_changes_nothing_and_calls_no_hook(e: Any, log: Any) -> None:
    w = e.Leaf(np.zeros(2, F))
    w.register_hook(log.hook("hook"))
    w.register_post_accumulate_grad_hook(log.hook("after"))
    nothing = e.Node(lambda g: (None, None), edges=[(w, 0), (w, 0)])
    e.backward([(nothing, 0, np.ones(2, F))], keep_graph=True)
    assert w.grad is None and log == []
    into(w, np.ones(2, F), e=e)
    before = w.grad
    e.backward([(nothing, 0, np.ones(2, F))])
    assert w.grad is before and before.tolist() == [1, 1] and log == ["hook", "after"]


@pytest.mark.rule("L2")
def test_a_gradient_without_other_references_becomes_grad() -> None:
    w = fanin.Leaf(np.zeros((2, 3), F))
    where: list[int] = []

    def make() -> Any:
        made = np.ones((2, 3), F)
        where.append(made.ctypes.data)
        return made

    fresh(w, make)
    assert w.grad.ctypes.data == where[0]


@pytest.mark.rule("L2")
def test_a_sum_that_the_pass_made_becomes_grad() -> None:
    w = fanin.Leaf(np.zeros(64, F))
    before = fanin.counters().copies
    g = np.ones(64, F)
    two = fanin.Node(lambda s: (g, g), edges=[(w, 0), (w, 0)])
    fanin.backward([(two, 0, 1.0)])
    assert w.grad.tolist() == [2] * 64 and g.tolist() == [1] * 64
    assert not np.shares_memory(w.grad, g) and fanin.counters().copies == before


@pytest.mark.rule("L4")
def test_a_gradient_with_other_references_is_copied(e: Any) -> None:
    w, g = e.Leaf(np.zeros(2, F)), np.ones(2, F)
    into(w, g, e=e)
    assert w.grad is not g and not np.shares_memory(w.grad, g)
    into(w, g, e=e)
    assert w.grad.tolist() == [2, 2] and g.tolist() == [1, 1]


@pytest.mark.rule("L4")
@pytest.mark.parametrize("layout", ["C", "F"])
def test_the_copy_is_laid_out_like_the_leaf(layout: Any) -> None:
    w = fanin.Leaf(np.zeros((3, 4), F, order=layout))
    for make in (lambda: np.ones((3, 4), F, order="F" if layout == "C" else "C"), lambda: np.ones((6, 8), F)[::2, ::2]):
        fresh(w, make)
        assert w.grad.flags[f"{layout}_CONTIGUOUS"], (layout, w.grad.strides)
        w.grad = None


@pytest.mark.rule("L4", "A13")
def test_an_expanded_gradient_becomes_whole() -> None:
    w = fanin.Leaf(np.zeros((3, 4), F))
    fresh(w, lambda: np.broadcast_to(np.ones(1, F), (3, 4)))
    assert w.grad.flags.writeable and w.grad.strides == (16, 4)
    fresh(w, lambda: np.broadcast_to(np.ones(1, F), (3, 4)))
    assert w.grad.tolist() == [[2] * 4] * 3


@pytest.mark.rule("L5")
def test_grad_keeps_its_identity_and_its_memory(e: Any) -> None:
    w = e.Leaf(np.zeros(2, F))
    into(w, np.ones(2, F), e=e)
    held, where = w.grad, w.grad.ctypes.data
    for i in range(2, 5):
        into(w, np.ones(2, F), e=e)
        assert w.grad is held and held.ctypes.data == where and held.tolist() == [i, i]


@pytest.mark.rule("L5")
def test_passes_add_to_a_grad_that_was_set() -> None:
    w, mine = fanin.Leaf(np.zeros(2, F)), np.full(2, 10, F)
    w.grad = mine
    into(w, np.ones(2, F))
    assert w.grad is mine and mine.tolist() == [11, 11]
    w.grad = None
    into(w, np.ones(2, F))
    assert w.grad.tolist() == [1, 1] and mine.tolist() == [11, 11]
    del w.grad
    assert w.grad is None


@pytest.mark.rule("L5", "L7")
def test_two_leaves_may_share_one_grad() -> None:
    """A flat buffer, as optimizers keep one: each leaf's part is added to where it lies."""
    flat = np.zeros(4, F)
    a, b = fanin.Leaf(np.zeros(2, F)), fanin.Leaf(np.zeros(2, F))
    a.grad, b.grad = flat[:2], flat[2:]
    fanin.backward([(a, 0, np.ones(2, F)), (b, 0, 2 * np.ones(2, F))])
    assert flat.tolist() == [1, 1, 2, 2]


@pytest.mark.rule("L3", "L5")
def test_sparse_gradients(e: Any) -> None:
    w = e.Leaf(np.zeros((3, 3), F))
    g = sp.coo_array(np.eye(3, dtype=F))
    into(w, g, e=e)
    assert sp.issparse(w.grad) and w.grad.toarray().tolist() == np.eye(3).tolist()
    into(w, g, e=e)
    assert sp.issparse(w.grad) and w.grad.toarray().tolist() == (2 * np.eye(3)).tolist()
    assert g.toarray().tolist() == np.eye(3).tolist()
    into(w, np.ones((3, 3), F), e=e)
    assert isinstance(w.grad, np.ndarray) and w.grad.tolist() == (2 * np.eye(3) + 1).tolist()
    held = w.grad
    into(w, g, e=e)
    assert w.grad is held and held.tolist() == (3 * np.eye(3) + 1).tolist()


@pytest.mark.rule("L3")
def test_the_parts_of_a_sparse_gradient_without_other_references_become_grad() -> None:
    w = fanin.Leaf(np.zeros((3, 3), F))
    where: list[int] = []

    def make() -> Any:
        values = np.ones(3, F)
        where.append(values.ctypes.data)
        return fanin.Sparse("coo", (np.array([[0, 1, 2], [0, 1, 2]]), values), (3, 3))

    fresh(w, make)
    assert w.grad.parts[-1].ctypes.data == where[0]


@pytest.mark.rule("L3", "L7")
@pytest.mark.parametrize("kind", [sp.coo_array, sp.csr_array, sp.csc_matrix])
@pytest.mark.parametrize("keep", ["nothing", "object", "values", "view", "indices"])
def test_the_parts_of_a_scipy_gradient_become_grad_if_none_has_other_references(kind: Any, keep: str) -> None:
    w = fanin.Leaf(np.zeros((3, 3), F))
    held: list[Any] = []
    where: list[int] = []

    def make() -> Any:
        made = kind(np.eye(3, dtype=F))
        made.data = made.data.copy()
        where.append(made.data.ctypes.data)
        if kind is sp.coo_array:
            made.coords = tuple(x.copy() for x in made.coords)
        else:
            made.indices, made.indptr = made.indices.copy(), made.indptr.copy()
        if keep == "object":
            held.append(made)
        elif keep == "values":
            held.append(made.data)
        elif keep == "view":
            held.append(made.data[1:])
        elif keep == "indices":
            held.append(made.coords[1] if kind is sp.coo_array else made.indices)
        return made

    fresh(w, make)
    assert w.grad.toarray().tolist() == np.eye(3).tolist()
    assert (w.grad.data.ctypes.data == where[0]) == (keep == "nothing")


@pytest.mark.rule("L7")
@pytest.mark.parametrize("keep", ["view", "base", "weak", "memory"])
def test_memory_with_another_view_is_not_stolen(keep: str) -> None:
    """The count of references alone does not decide: the object has one reference, but its memory has another view."""
    import weakref

    w, held = fanin.Leaf(np.zeros(4, F)), []

    def make() -> Any:
        if keep == "view":
            made = np.ones(4, F)
            held.append(made[:2])
            return made
        if keep == "base":
            held.append(np.ones(8, F))
            return held[0][:4]
        if keep == "weak":
            made = np.ones(4, F)
            held.append(weakref.ref(made))
            return made
        made = np.ones(4, F)
        held.append(memoryview(made))
        return made

    fresh(w, make)
    fresh(w, lambda: np.ones(4, F))
    assert w.grad.tolist() == [2] * 4
    if keep != "weak":
        assert np.asarray(held[0]).ravel()[:2].tolist() == [1, 1]
    elif held[0]() is not None:
        assert held[0]() is not w.grad


@pytest.mark.rule("L7")
def test_one_gradient_for_two_leaves_is_stolen_by_neither() -> None:
    a, b = fanin.Leaf(np.zeros(2, F)), fanin.Leaf(np.zeros(2, F))

    def fn(_: Any) -> Any:
        g = np.ones(2, F)
        return g, g

    fanin.backward([(fanin.Node(fn, edges=[(a, 0), (b, 0)]), 0, 1.0)])
    assert not np.shares_memory(a.grad, b.grad)
    into(a, np.ones(2, F))
    assert a.grad.tolist() == [2, 2] and b.grad.tolist() == [1, 1]


@pytest.mark.rule("L8")
def test_borrowed_memory_is_not_stolen(tmp_path: Any) -> None:
    memory = bytearray(np.ones(4, F).tobytes())
    mapped = np.memmap(tmp_path / "g", F, "w+", shape=4)
    mapped[:] = 1
    for g in (np.frombuffer(memory, F), mapped):
        w = fanin.Leaf(np.zeros(4, F))
        fresh(w, lambda g=g: g)
        g[:] = 7  # the lender uses it again
        assert w.grad.tolist() == [1] * 4 and type(w.grad) is np.ndarray
    wrapped = np.frombuffer(bytes(16), F)  # read-only
    w = fanin.Leaf(np.zeros(4, F))
    fresh(w, lambda: wrapped)
    assert w.grad.flags.writeable


@pytest.mark.rule("L9")
def test_hooks_run_before_and_after_the_accumulate(e: Any, log: Any) -> None:
    w = e.Leaf(np.zeros(2, F))
    w.register_hook(lambda g: log.append(("before", g.tolist(), None if w.grad is None else w.grad.tolist())))
    w.register_post_accumulate_grad_hook(lambda x: log.append(("after", x.grad.tolist())))
    for _ in range(2):
        into(w, np.ones(2, F), e=e)
    assert log == [("before", [1, 1], None), ("after", [1, 1]), ("before", [1, 1], [1, 1]), ("after", [2, 2])]


@pytest.mark.rule("L9")
def test_a_hook_after_the_accumulate_may_remove_grad() -> None:
    """As optimizers do that step in the middle of the pass."""
    w, steps = fanin.Leaf(np.zeros(2, F)), []

    def step(x: Any) -> None:
        steps.append(x.grad.tolist())
        x.grad = None

    w.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        into(w, np.ones(2, F))
    assert steps == [[1, 1], [1, 1]] and w.grad is None


@pytest.mark.rule("L9")
def test_hooks_run_outside_of_the_leafs_lock() -> None:
    """A pass within a hook adds to the same leaf; one on another thread, that the hook waits for, does too."""
    w = fanin.Leaf(np.zeros(2, F))
    inside: list[bool] = []

    def hook(*_: Any) -> None:
        if not inside:
            inside.append(True)
            into(w, np.ones(2, F))
            other = threading.Thread(target=into, args=(w, np.ones(2, F)))
            other.start()
            other.join()

    w.register_hook(hook)
    into(w, np.ones(2, F))
    assert w.grad.tolist() == [3, 3]
    inside.clear()
    v = fanin.Leaf(np.zeros(2, F))
    w = v
    v.register_post_accumulate_grad_hook(hook)
    into(v, np.ones(2, F))
    assert v.grad.tolist() == [3, 3]


@pytest.mark.rule("A10", "A11")
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_wider_dtype_is_rounded_when_grad_is_read(e: Any, dtype: Any) -> None:
    """2048 + 1 is 2048 in float16: a leaf that rounds each pass stays there for ever."""
    wide, narrow = (
        e.Leaf(np.zeros(1, dtype), accumulate="float32" if dtype is np.float16 else "float64"),
        e.Leaf(np.zeros(1, dtype)),
    )
    big = 2048 if dtype is np.float16 else 2**24
    for leaf in (wide, narrow):
        into(leaf, np.array([big], dtype), e=e)
        for _ in range(10):
            into(leaf, np.array([1], dtype), e=e)
    assert wide.grad.dtype == dtype and wide.grad[0] == big + 10 and narrow.grad[0] == big


@pytest.mark.rule("L5")
def test_a_wider_leaf_reads_as_one_array() -> None:
    """L5: `.grad` keeps its identity, so that optimizers may hold it."""
    w = fanin.Leaf(np.zeros(2, np.float16), accumulate="float32")
    into(w, np.ones(2, np.float16))
    held = w.grad
    into(w, np.ones(2, np.float16))
    assert w.grad is held and held.tolist() == [2, 2]
    w.grad = None
    assert w.grad is None
    into(w, np.ones(2, np.float16))
    assert w.grad.tolist() == [1, 1]


@pytest.mark.rule("A10")
def test_grad_dtype_is_another_than_the_arrays() -> None:
    w = fanin.Leaf(np.zeros(2, np.float16), grad_dtype="float32")
    into(w, np.full(2, 1 / 3, F))
    assert w.grad.dtype == F and w.grad[0] == F(1 / 3)


def test_a_leaf_for_foreign_memory_gets_each_sum_once(log: Any) -> None:
    w = fanin.Leaf(like=((2,), "float32", "cpu"), accumulate=lambda g: log.append(g.tolist()))
    two = fanin.Node(lambda g: (g, g), edges=[(w, 0), (w, 0)])
    for _ in range(2):
        fanin.backward([(two, 0, np.ones(2, F))], keep_graph=True)
    assert log == [[2, 2], [2, 2]]
    with pytest.raises(ValueError, match="expected"):
        into(w, np.ones(3, F))


@pytest.mark.threads
@pytest.mark.rule("E5", "E15")
def test_two_passes_at_once_add_to_one_leaf() -> None:
    n, threads = 200, 4
    w = fanin.Leaf(np.zeros(1000))
    start = threading.Barrier(threads)

    def add() -> None:
        start.wait()
        for _ in range(n):
            into(w, np.ones(1000))

    several = [threading.Thread(target=add) for _ in range(threads)]
    for t in several:
        t.start()
    for t in several:
        t.join()
    assert w.grad.tolist() == [n * threads] * 1000


@pytest.mark.parametrize(("given", "word"), [([1.0, 2.0], "list"), ((1.0, 2.0), "tuple")])
def test_the_error_for_a_leaf_of_a_list_names_the_conversion_to_an_array(given: Any, word: str) -> None:
    with pytest.raises(TypeError, match=rf"array: expected an array, got a {word}: pass np\.asarray\(x\)"):
        fanin.Leaf(given)


@pytest.mark.parametrize("dtype", ["int64", "int8", "bool"])
def test_a_leaf_of_integers_is_refused_unless_its_gradients_are_floats(dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"floats, got {dtype}: .*x.astype\(float\), or give grad_dtype="):
        fanin.Leaf(np.zeros(2, dtype))
    with pytest.raises(ValueError, match="floats, got"):
        reference.Leaf(np.zeros(2, dtype))
    with pytest.raises(ValueError, match="floats, got int16"):
        fanin.Leaf(np.zeros(2), grad_dtype="int16")
    with pytest.raises(ValueError, match=f"floats, got {dtype}"):
        fanin.Leaf(like=((2,), dtype, None), accumulate=lambda g: None)
    w = fanin.Leaf(np.zeros(2, dtype), grad_dtype="float32")
    fanin.backward([(w, 0, np.float32([1, 2]))])
    assert w.grad.dtype == np.float32
    for kind in ("complex64", "bfloat16", "float8_e4m3fn"):
        assert fanin.Leaf(like=((2,), kind, None), accumulate=lambda g: None).array is None
