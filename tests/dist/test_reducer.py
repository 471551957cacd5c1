"""Reducers: buckets that travel while passes run."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core, dist
from fanin.dist import reducer as reducer_module
from fanin.dist.group import Group
from fanin.dist.norms import Squares, root
from fanin.dist.reducer import Reducer, _Bucket
from kit import hooks
from kit.values import bits

pytestmark = pytest.mark.core

# ---------------------------------------------------------------- one pass


def leaves_of(n: int, size: int = 300) -> list[fanin.Leaf]:
    return [fanin.Leaf(np.zeros(size, "f4"), name=f"w{i}") for i in range(n)]


def roots(leaves: list[fanin.Leaf], value: float, skip: tuple[int, ...] = ()) -> list[Any]:
    return [(w, 0, np.full(w.array.shape, value, "f4")) for i, w in enumerate(leaves) if i not in skip]


def outcomes(n: int, fn: Callable[[Group], Any]) -> list[Any]:
    return dist.threads(n, fn, timeout=None)


def test_hooks_before_get_the_sum_of_their_rank_and_hooks_after_get_the_sum_of_all() -> None:
    def rank(group: Group) -> Any:
        [w] = leaves_of(1, 2)
        seen: list[Any] = []
        w.register_hook(lambda g: seen.append(g.tolist()))
        w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.tolist()))
        fanin.backward(roots([w], 1.0 + group.rank), reducer=Reducer([w], group))
        return seen

    assert outcomes(2, rank) == [[[1, 1], [3, 3]], [[2, 2], [3, 3]]]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_pass_of_another_thread_over_other_leaves_during_the_pass_is_refused(workers: int) -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(3)
        reducer = Reducer(leaves, group, bucket_bytes=1, missing="skip")
        errors: list[BaseException] = []

        def other() -> None:
            with pytest.raises(RuntimeError) as e:
                fanin.backward(roots(leaves, 8, skip=(0, 1)))
            errors.append(e.value)

        def during_the_pass(g: Any) -> Any:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return g, g

        node = fanin.Node(during_the_pass, edges=[(leaves[0], 0), (leaves[1], 0)])
        fanin.backward([(node, 0, np.ones(300, "f4"))], reducer=reducer, workers=workers)
        [error] = errors
        text = "w2 got a gradient during the reducer's pass, of a pass in another thread: join the thread before"
        assert text in str(error)
        found = [None if w.grad is None else float(w.grad[0]) for w in leaves]
        fanin.backward(roots(leaves, 8, skip=(0, 1)))
        return found, float(leaves[2].grad[0])

    assert outcomes(2, rank) == [([2.0, 2.0, None], 8.0)] * 2


def test_a_pass_inside_a_node_of_the_pass_is_part_of_it() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(2)

        def inside(g: Any) -> Any:
            fanin.backward(roots(leaves, 4, skip=(0,)))
            return g

        for workers in (1, 2):
            node = fanin.Node(inside, edges=[(leaves[0], 0)])
            fanin.backward([(node, 0, np.ones(300, "f4"))], reducer=Reducer(leaves, group), workers=workers)
        return [float(w.grad[0]) for w in leaves]

    assert outcomes(2, rank) == [[4.0, 16.0]] * 2


def test_passes_add_to_the_gradient_that_is_there() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(3)
        reducer = Reducer(leaves, group, bucket_bytes=1)
        for _ in range(2):
            fanin.backward(roots(leaves, 1), reducer=reducer)
        return [float(w.grad[0]) for w in leaves]

    assert outcomes(3, rank) == [[6.0] * 3] * 3


def test_a_rank_alone_hands_an_unshared_gradient_through_and_copies_a_shared_one() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(3, 4)
        scratch, made = np.empty(4, "f4"), []

        def fresh(g: Any) -> Any:
            x = g + 1
            made.append(_core.address(x))
            return x

        def reused(g: Any) -> Any:
            return np.multiply(g, 10, out=scratch)  # the next call writes into it

        nodes = [fanin.Node(fn, edges=[(w, 0)]) for fn, w in zip([fresh, reused, reused], leaves, strict=True)]
        one = np.ones(4, "f4")
        passes = [(nodes[0], 0, one), (nodes[1], 0, one), (nodes[2], 0, 2 * one)]
        reducer = Reducer(leaves, group, missing="skip")
        fanin.backward(passes, reducer=reducer, keep_graph=True)
        assert _core.address(leaves[0].grad) == made[0]
        first = [w.grad.tolist() for w in leaves]
        fanin.backward(passes[:1], reducer=reducer, keep_graph=True)
        return first, [w.grad.tolist() for w in leaves]

    [(first, second)] = outcomes(1, rank)
    assert first == [[2.0] * 4, [10.0] * 4, [20.0] * 4]
    assert second == [[4.0] * 4, *first[1:]]


def test_a_rank_alone_changes_no_gradient_in_a_pass_that_raises_or_gives_a_leaf_two() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(2, 4)

        def breaks(g: Any) -> Any:
            raise ArithmeticError("planted")

        wrong = fanin.Node(breaks, edges=[(leaves[0], 0)])
        reducer = Reducer(leaves, group)
        with pytest.raises(ArithmeticError, match="planted"):
            fanin.backward([*roots(leaves[1:], 5), (wrong, 0, np.ones(4, "f4"))], reducer=reducer)
        with pytest.raises(ValueError, match="w1 got a second gradient"), reducer.accumulate():
            fanin.backward(roots(leaves[1:], 1))
            fanin.backward(roots(leaves[1:], 1))
        assert [w.grad for w in leaves] == [None, None]
        with reducer.accumulate():
            fanin.backward(roots(leaves, 2))
        fanin.backward(roots(leaves, 3), reducer=reducer)
        assert "Terms: 2 of rank 0" in reducer.explain(0)
        return [w.grad.tolist() for w in leaves]

    assert outcomes(1, rank) == [[[5.0] * 4] * 2]


@pytest.mark.parametrize("order", ["key", "exact", "rank"])
def test_one_contribution_has_the_same_bits_on_a_rank_alone_and_beside_ranks_without_any(order: Any) -> None:
    given = np.array([0x80000000, 0x7FC01234, 1, 0xFFA00001], np.uint32).view("f4")  # -0.0, two NaNs, a denormal

    def rank(group: Group) -> Any:
        w, other = leaves_of(2, 4)
        mine = [(w, 0, given.copy())] if group.rank == 0 else roots([other], 1)
        fanin.backward(mine, reducer=Reducer([w], group, order=order, missing="skip"))
        return bits(w.grad)

    assert len({one for n in (1, 2, 3) for one in outcomes(n, rank)}) == 1


@pytest.mark.parametrize("by_engine", [False, True])
def test_the_first_rank_leaf_and_node_with_inf_or_nan_are_named_on_every_rank(by_engine: bool) -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(3)
        reducer = Reducer(leaves, group, detect=not by_engine, bucket_bytes=1)
        makes = node(leaves[1], lambda g: g * (np.inf if group.rank == 1 else 1), "Exp")
        some = [*roots(leaves, 1, skip=(1,)), (makes, 0, np.ones(300, "f4"))]
        kind = FloatingPointError if group.rank == 1 else fanin.PeerError
        with pytest.raises(kind, match="inf") as e:
            fanin.backward(some, reducer=reducer, detect=by_engine)
        assert all(w.grad is None for w in leaves)
        if group.rank == 1:
            return None
        assert ("Exp" if by_engine else "w1: 300 elements inf or NaN") in str(e.value)
        return e.value.rank, e.value.leaf  # type: ignore[attr-defined]

    assert outcomes(3, rank)[::2] == [(1, None if by_engine else "w1")] * 2


@pytest.mark.threads
def test_several_workers_and_sparse_gradients_give_the_same_sums() -> None:
    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros((4, 3), "f4"), name=f"w{i}") for i in range(6)]
        values = np.float32([1.0, 2.0])
        some: list[Any] = []
        for i, w in enumerate(leaves):
            g: Any = np.ones((4, 3), "f4")
            if i == 2:
                g = fanin.Sparse("coo", (np.array([[0, 3], [1, 1]]), values), (4, 3))
            some.append((node(w, lambda g: g, "Id"), 0, g))
        fanin.backward(some, workers=3, reducer=Reducer(leaves, group, bucket_bytes=60, order="exact"))
        return [float(w.grad.sum()) for w in leaves]

    assert outcomes(2, rank) == [[24.0, 24.0, 6.0, 24.0, 24.0, 24.0]] * 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("order", ["key", "exact", "rank"])
@pytest.mark.parametrize(("array", "gradient"), [("f2", "f4"), ("f8", "f4"), ("i4", "f4"), ("?", "c8"), ("f4", "f2")])
def test_the_sum_of_a_leaf_has_the_dtype_that_it_declares_for_gradients(
    array: str, gradient: str, order: Any, ranks: int
) -> None:
    def rank(group: Group) -> Any:
        w, v = fanin.Leaf(np.ones(3, array), grad_dtype=gradient), fanin.Leaf(np.ones(3, "f4"))
        reducer = Reducer([w, v], group, order=order)
        for _ in range(2):
            terms = [(leaf, 0, np.array([1, 2, 3], gradient)) for leaf in (w, v) if leaf is w or gradient != "c8"]
            fanin.backward([*terms, (v, 0, np.ones(3, "f4"))], reducer=reducer)
        return w.grad, reducer.explain(w), reducer.norm() > 0

    for grad, text, has_norm in outcomes(ranks, rank):
        assert grad.dtype == gradient and grad.tolist() == [2 * ranks, 4 * ranks, 6 * ranks]
        assert np.dtype(gradient).name in text and has_norm


def test_a_rank_alone_hands_a_gradient_of_a_declared_dtype_through() -> None:
    def rank(group: Group) -> Any:
        w = fanin.Leaf(np.ones(3, "f2"), grad_dtype="f4")
        made: list[int] = []

        def function(g: Any) -> Any:
            new = g * 2
            made.append(new.ctypes.data)
            return new

        fanin.backward([(fanin.Node(function, edges=[(w, 0)]), 0, np.ones(3, "f4"))], reducer=Reducer([w], group))
        return w.grad.ctypes.data == made[0], w.grad.tolist()

    assert outcomes(1, rank) == [(True, [2, 2, 2])]


def test_leaves_that_the_reducer_does_not_have_accumulate_on_their_rank() -> None:
    def rank(group: Group) -> Any:
        a, b = leaves_of(2)
        fanin.backward(roots([a, b], 1), reducer=Reducer([a], group))
        return float(a.grad[0]), float(b.grad[0])

    assert outcomes(2, rank) == [(2.0, 1.0)] * 2


def test_a_leaf_without_a_gradient_on_one_rank_is_named_or_skipped() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(3)
        some = roots(leaves, 1, skip=(1, 2) if group.rank == 1 else (2,))
        with pytest.raises(fanin.PeerError, match=r"w1 has a gradient on ranks \[0, 2\] and none on ranks \[1\]") as e:
            fanin.backward(some, reducer=Reducer(leaves, group))
        assert (e.value.leaf, e.value.rank) == ("w1", 1) and all(w.grad is None for w in leaves)
        fanin.backward(some, reducer=Reducer(leaves, group, missing="skip"))
        return [None if w.grad is None else float(w.grad[0]) for w in leaves]

    assert outcomes(3, rank) == [[3.0, 2.0, None]] * 3


def test_a_leaf_that_had_a_gradient_in_the_pass_before_may_get_none() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(2)
        reducer = Reducer(leaves, group)
        for skip in ((), (1,)):
            for w in leaves:
                w.grad = None
            fanin.backward(roots(leaves, 1, skip=skip), reducer=reducer)
        return [w.grad is None for w in leaves]

    assert outcomes(2, rank) == [[False, True]] * 2


def test_shards_are_left_with_their_owners() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(2, 700)
        reducer = Reducer(leaves, group, into="shard", order="exact")
        fanin.backward(roots(leaves, 1), reducer=reducer)
        assert all(w.grad is None for w in leaves)
        return reducer.shards, reducer.norm()

    ranks = outcomes(3, rank)
    for i in range(2):
        assert bits(np.concatenate([shards[i] for shards, _ in ranks])) == bits(np.full(700, 3, "f4"))
    assert {norm for _, norm in ranks} == {float(np.sqrt(9 * 1400))}


def test_one_rank_may_get_the_sums() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(2)
        reducer = Reducer(leaves, group, into=1)
        fanin.backward(roots(leaves, 1), reducer=reducer)
        return [w.grad is not None for w in leaves], reducer.norm()

    norm = float(np.sqrt(4 * 600))
    assert outcomes(2, rank) == [([False, False], norm), ([True, True], norm)]


def node(leaf: fanin.Leaf, fn: Callable[[Any], Any], name: str) -> fanin.Node:
    return fanin.Node(fn, edges=[(leaf, 0)], name=name)


def raises(g: Any) -> Any:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("at", ["first", "last", "accumulate"])
def test_a_pass_that_raises_ends_the_pass_of_all_ranks_and_the_next_one_works(at: str) -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(4)
        reducer = Reducer(leaves, group, bucket_bytes=1)
        bad = leaves[-1] if at == "first" else leaves[0]
        some = [
            (node(w, raises if group.rank == 1 and w is bad else lambda g: g, "Mul"), 0, np.ones(300, "f4"))
            for w in leaves
        ]
        fails = ZeroDivisionError if group.rank == 1 else fanin.PeerError
        with pytest.raises(fails, match="planted") as e:
            if at == "accumulate":
                with reducer.accumulate():
                    fanin.backward(some)
            fanin.backward(some if at != "accumulate" else roots(leaves, 1), reducer=reducer)
        if group.rank != 1:
            assert e.value.rank == 1 and "rank 1 failed" in str(e.value) and "Mul" in str(e.value)  # type: ignore[attr-defined]
        assert all(w.grad is None for w in leaves)
        fanin.backward(roots(leaves, 1), reducer=reducer)
        return [float(w.grad[0]) for w in leaves]

    assert outcomes(3, rank) == [[3.0] * 4] * 3


def test_leaves_that_differ_are_named_on_every_rank() -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(3)
        if group.rank == 2:
            leaves[1] = fanin.Leaf(np.zeros((2, 2), "f4"), name="w1")
        with pytest.raises(fanin.PeerError, match=r"rank 2 has w1: float32 of shape \(2, 2\); rank 0 has w1") as e:
            fanin.backward(roots(leaves, 1), reducer=Reducer(leaves, group))
        return e.value.leaf

    assert outcomes(3, rank) == ["w1"] * 3


@pytest.mark.parametrize("other", [{"order": "exact"}, {"missing": "skip"}, {"scale": 2}, {"bucket_bytes": 1}])
def test_options_that_differ_are_an_error_on_every_rank(other: Any) -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(3)
        reducer = Reducer(leaves, group, **(other if group.rank else {}))
        with pytest.raises(fanin.PeerError, match="rank 1 has "):
            fanin.backward(roots(leaves, 1), reducer=reducer)
        return True

    assert all(outcomes(2, rank))


REFUSED: list[tuple[Callable[[Group], Any], type[Exception], str]] = [
    (lambda g: Reducer([np.ones(2)], g), TypeError, "expected a fanin.Leaf"),
    (lambda g: Reducer([fanin.Leaf(like=((2,), "f4", None), accumulate=print)], g), TypeError, "like="),
    (lambda g: Reducer([fanin.Leaf(np.ma.ones(2))], g), TypeError, "leaf of an array, got one of .*MaskedArray, which"),
    (lambda g: Reducer([], g), ValueError, "expected leaves, got none"),
    (lambda g: Reducer(leaves_of(1) * 2, g), ValueError, "each leaf once"),
    (lambda g: Reducer(leaves_of(1), g, order="x"), ValueError, "order"),  # type: ignore[arg-type]
    (lambda g: Reducer(leaves_of(1), g, missing="x"), ValueError, "missing"),  # type: ignore[arg-type]
    (lambda g: Reducer(leaves_of(1), g, bucket_bytes=0), ValueError, "bucket_bytes"),
    (lambda g: Reducer(leaves_of(1), g, scale=1j), ValueError, "^Reducer: scale=0\\+1j: .* real number"),
    (lambda g: Reducer(leaves_of(1)[0], g), TypeError, r"several leaves, got a Leaf: give \[leaf\]"),  # type: ignore[arg-type]
    (lambda g: Reducer(3, g), TypeError, "several leaves, got an int"),  # type: ignore[arg-type]
    (lambda g: Reducer(leaves_of(1), g).at(-1), ValueError, "keys"),
    (lambda g: fanin.backward([], reducer=3), TypeError, "expected a fanin.dist.Reducer, got an int"),
    (lambda g: fanin.backward([], reducer=Reducer(leaves_of(1), g), create_graph=True), ValueError, "create_graph"),
    (lambda g: dist.clip_norm(Reducer(leaves_of(1), g), -1), ValueError, "max_norm"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(call: Any, kind: type[Exception], words: str) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(kind, match=words):
            call(group)

    outcomes(1, rank)


def test_two_gradients_of_one_leaf_in_one_contribution_are_refused() -> None:
    def rank(group: Group) -> None:
        leaves = leaves_of(1)
        reducer = Reducer(leaves, group)
        with pytest.raises(ValueError, match="w0 got a second gradient"), reducer.accumulate():
            fanin.backward(roots(leaves, 1))
            fanin.backward(roots(leaves, 1))
        fanin.backward(roots(leaves, 1), reducer=reducer)
        assert leaves[0].grad[0] == 1

    outcomes(1, rank)


def test_a_sum_of_another_group_inside_a_pass_is_refused_on_every_rank() -> None:
    def rank(group: Group) -> Any:
        [w] = leaves_of(1)
        other = Group(group._engine, timeout=None)
        n = node(w, lambda g: dist.add_n([g], other), "Inner")
        with pytest.raises(RuntimeError, match="inside a pass of another group"):
            fanin.backward([(n, 0, np.ones(300, "f4"))], reducer=Reducer([w], group))
        return w.grad is None

    assert outcomes(2, rank) == [True, True]


@pytest.mark.threads
def test_buckets_travel_while_the_pass_goes_on() -> None:
    def rank(group: Group) -> Any:
        first, last = leaves_of(2)
        sent = threading.Event()

        class Tells(Reducer):
            def _sum(self, call: Any, bucket: _Bucket) -> None:
                super()._sum(call, bucket)
                sent.set()

        reducer = Tells([first, last], group, bucket_bytes=1)
        waits = node(first, lambda g: g if sent.wait() else None, "Waits")
        # the newest ready node runs first: leaves before it
        fanin.backward([(waits, 0, np.ones(300, "f4")), (last, 0, np.ones(300, "f4"))], reducer=reducer)
        return float(first.grad[0])

    assert outcomes(2, rank) == [2.0, 2.0]


@pytest.mark.parametrize("one", [True, False])
def test_one_small_bucket_travels_at_the_end_of_its_pass_without_a_thread_and_with_one_header(one: bool) -> None:
    def rank(group: Group) -> Any:
        leaves = leaves_of(2, 512)
        reducer = Reducer(leaves, group, bucket_bytes=1 << 12 if one else 1 << 11)
        before = group.counters.messages
        fanin.backward(roots(leaves, 1), reducer=reducer)
        return reducer._sender._begun, group.counters.messages - before, float(leaves[0].grad[0])

    # for each bucket a header, terms and the sum; with several a header more, of how the pass ended
    assert outcomes(2, rank) == [(False, 3, 2.0) if one else (True, 7, 2.0)] * 2


@pytest.mark.parametrize("small", [0, reducer_module.SMALL])
def test_ranks_of_which_one_fails_all_fail_and_the_next_pass_is_right(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer_module, "SMALL", small)

    def rank(group: Group) -> Any:
        leaves = leaves_of(2)
        reducer = Reducer(leaves, group)
        other = Reducer([*leaves, *leaves_of(1)], group) if group.rank else reducer
        bad = node(leaves[0], raises if group.rank else lambda g: g, "Mul")
        with pytest.raises(ZeroDivisionError if group.rank else fanin.PeerError, match="planted"):
            fanin.backward([*roots(leaves[1:], 1), (bad, 0, np.ones(300, "f4"))], reducer=reducer)
        with pytest.raises(fanin.PeerError, match="rank 1 has"):
            fanin.backward(roots(leaves, 1), reducer=other)
        some = roots(leaves[: 1 + group.rank], 1)
        with pytest.raises(fanin.PeerError, match="w1 has a gradient on ranks"):
            fanin.backward(some, reducer=reducer)
        assert [w.grad for w in leaves] == [None, None]
        fanin.backward(roots(leaves, 1), reducer=reducer)
        return [float(w.grad[0]) for w in leaves]

    assert outcomes(2, rank) == [[2.0, 2.0]] * 2


# ---------------------------------------------------------------- the norm


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_the_norm_is_exact(dtype: str) -> None:
    from fractions import Fraction

    rng = np.random.default_rng(2)
    x = rng.standard_normal(1000) * 2.0 ** rng.integers(-12, 12, 1000)
    x = (x + 1j * rng.standard_normal(1000)).astype(dtype) if "complex" in dtype else x.astype(dtype)
    if dtype == "float64":
        x[:4] = [5e-324, 1e300, -1e-310, 3e200]
    squares = Squares()
    for piece in np.split(x, [3, 500]):
        squares.add(piece)
    n, e = squares.total()
    parts = np.concatenate([x.real, x.imag]).tolist() if "complex" in dtype else x.tolist()
    assert Fraction(n) * Fraction(2) ** e == sum(Fraction(v) ** 2 for v in parts)
    assert root([(n, e)]) == pytest.approx(float(np.hypot.reduce(parts)), rel=1e-12)


def test_the_root_of_a_sum_just_above_a_tie_is_rounded_up() -> None:
    even = 2**52 + 2
    tie = (even << 12 | 0x800) ** 2
    assert root([(tie - 1, 0)]) == root([(tie, 0)]) == float(even << 12)
    assert root([(tie + 1, 0)]) == float((even + 1) << 12)


def test_norms_and_clipping_are_the_same_for_any_number_of_ranks() -> None:
    rng = np.random.default_rng(9)
    arrays = [rng.standard_normal(300).astype("f4") for _ in range(8)]

    def run(n: int, into: Any) -> Any:
        def rank(group: Group) -> Any:
            [w] = leaves_of(1)
            reducer = Reducer([w], group, order="exact", into=into)
            mine = arrays[group.rank :: n]
            for g in mine[:-1]:
                with reducer.accumulate():
                    fanin.backward([(w, 0, g)])
            fanin.backward([(w, 0, mine[-1])], reducer=reducer)
            norm = dist.clip_norm(reducer, 1.0)
            return norm, reducer.norm(), w.grad if into == "all" else reducer.shards[0]

        got = outcomes(n, rank)
        clipped = got[0][2] if into == "all" else np.concatenate([x for _, _, x in got])
        return {(a, b) for a, b, _ in got}, bits(clipped)

    first = run(1, "all")
    assert all(run(n, into) == first for n in (2, 3, 8) for into in ("all", "shard"))
    assert next(iter(first[0]))[1] == pytest.approx(1, rel=1e-6)


def test_a_rank_that_gets_no_sum_keeps_its_gradient_when_sums_are_clipped() -> None:
    def rank(group: Group) -> Any:
        [w] = leaves_of(1, 4)
        w.grad = np.full(4, 100, "f4")
        reducer = Reducer([w], group, into=1)
        fanin.backward(roots([w], 50), reducer=reducer)
        return dist.clip_norm(reducer, 100.0), w.grad.tolist()

    assert outcomes(2, rank) == [(400.0, [100.0] * 4), (400.0, [50.0] * 4)]


def test_inf_and_nan_make_the_norm_inf_and_nothing_is_scaled() -> None:
    def rank(group: Group) -> Any:
        [w] = leaves_of(1)
        reducer = Reducer([w], group)
        fanin.backward(roots([w], float("nan") if group.rank else 1), reducer=reducer)
        return dist.clip_norm(reducer, 1.0)

    assert outcomes(2, rank) == [float("inf")] * 2


@pytest.mark.parametrize("block", [False, True])
def test_a_grad_that_is_set_while_a_reducer_collects_is_refused(block: bool) -> None:
    def rank(group: Group) -> Any:
        w, other = leaves_of(2, 2)
        reducer = Reducer([w, other], group)

        def sets(g: Any) -> Any:
            w.grad = None
            with pytest.raises(RuntimeError, match=r"w0: grad: a fanin\.dist\.Reducer collects its gradients now"):
                w.grad = np.full(2, 100, "f4")
            return g

        other.register_hook(sets)
        if block:
            with reducer.accumulate():
                fanin.backward(roots([w, other], 1))
        fanin.backward(roots([w, other], 1), reducer=reducer)
        found = w.grad.tolist(), other.grad.tolist()
        w.grad = np.full(2, 100, "f4")
        return *found, w.grad.tolist()

    total = [2.0 * (1 + block)] * 2
    assert outcomes(2, rank) == [(total, total, [100.0, 100.0])] * 2


def test_a_reducer_ends_with_its_last_reference_and_so_does_its_thread() -> None:
    """Without a collection of cycles: each would keep buckets and a thread until the next one."""

    def rank(group: Group) -> list[bool]:
        leaf, gone = fanin.Leaf(np.zeros(3), name="w"), []
        for _ in range(3):
            reducer = dist.Reducer([leaf], group)
            with reducer.accumulate():
                fanin.backward([(leaf, 0, np.ones(3))])
            fanin.backward([(leaf, 0, np.ones(3))], reducer=reducer)
            alive = weakref.ref(reducer)
            del reducer
            gone.append(alive() is None)
        return gone

    before = set(threading.enumerate())
    gc.disable()
    try:
        assert dist.threads(2, rank, timeout=None) == [[True] * 3] * 2
    finally:
        gc.enable()
    for thread in set(threading.enumerate()) - before:
        thread.join()


# Copies


def layouts() -> dict[str, Any]:
    """Gradients of 4 x 6 numbers, in every order of memory."""
    made = np.arange(96, dtype="f4").reshape(8, 12)
    return {
        "in C order": made[:4, :6].copy(),
        "its axes in another order": np.asfortranarray(made[:4, :6]),
        "with gaps": made[::2, ::2],
        "backward": made[3::-1, 5::-1],
        "expanded": np.broadcast_to(made[0, :6], (4, 6)),
        "not writable": np.frombuffer(made[:2].tobytes(), "f4").reshape(4, 6),
    }


def wrong_copies() -> list[str]:
    """The layouts of which the sum of two equal gradients has other numbers; the first pass of two makes the memory."""

    def rank(group: Group) -> list[str]:
        given = layouts()
        leaves = {name: fanin.Leaf(np.zeros((4, 6), "f4"), name=name) for name in given}
        reducer = Reducer(leaves.values(), group)
        for _ in range(2):
            for leaf in leaves.values():
                leaf.grad = None
            fanin.backward([(leaf, 0, given[name]) for name, leaf in leaves.items()], reducer=reducer)
        return [name for name, leaf in leaves.items() if bits(leaf.grad) != bits(2 * np.ascontiguousarray(given[name]))]

    first, second = dist.threads(2, rank, timeout=None)
    assert first == second
    return first


def test_gradients_of_every_layout_are_copied_by_their_places() -> None:
    assert wrong_copies() == []


def test_a_copy_in_the_order_of_memory_is_found() -> None:
    hooks.fault("COPY_AS_IT_LIES")
    try:
        assert wrong_copies() == ["its axes in another order"]
    finally:
        hooks.fault(None)
