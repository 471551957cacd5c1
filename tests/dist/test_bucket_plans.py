"""Plans of the buckets of reducers: sums without headers have the bits of those with, whatever ranks bring; ranks that
bring something else than before are a right sum or the error that it always was, on every rank.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist.bucket_plans import OfTerms
from fanin.dist.frames import ALL, FRAME, HEAD, HEAD_SIZE, PART
from fanin.dist.group import Call, Group
from fanin.dist.reducer import Reducer, _Bucket
from kit.planned import Padded, wrong_reducers, wrongs

SIZES = {ALL: 100, PART: 20_000, HEAD: 40_000}


def reducer_of(group: Group, size: int = 100, buckets: int = 1, **options: Any) -> tuple[list[fanin.Leaf], Reducer]:
    leaves = [fanin.Leaf(np.zeros(size), name=f"w{i}") for i in range(buckets)]
    return leaves, Reducer(leaves, group, bucket_bytes=1, **options)


def step(leaves: list[fanin.Leaf], reducer: Reducer, has: Any = None) -> list[Any]:
    """The sums of a pass in which a rank's gradients are its number and 1, of the leaves that it has."""
    value = 1.0 + reducer.group.rank
    for w in leaves:
        w.grad = None
    roots = [(w, 0, np.full(w.array.shape, value)) for i, w in enumerate(leaves) if has is None or i in has]
    fanin.backward(roots, reducer=reducer)
    return [None if w.grad is None else float(w.grad[0]) for w in leaves]


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("n", [1, 2, 3])
def test_buckets_with_plans_have_the_bits_of_one_process(n: int) -> None:
    assert dist.threads(n, wrong_reducers, timeout=None) == [[]] * n


def test_buckets_in_two_levels_with_plans_have_the_bits_of_one_process() -> None:
    assert dist.threads(4, wrong_reducers, nodes=2, timeout=None) == [[]] * 4


def test_a_term_in_the_wrong_place_of_a_bucket_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfTerms, "flats", lambda self, x: [x[0][::-1].copy()])
    assert all(dist.threads(2, wrong_reducers, timeout=None))


def test_a_sum_of_what_ranks_brought_before_that_is_another_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the law comes to the short way of a bucket."""
    real = _Bucket.again

    def turned(self: _Bucket, *args: Any) -> bool:
        done = real(self, *args)
        if done and self.total is not None:
            self.total = [x[::-1].copy() for x in self.total]
        return done

    monkeypatch.setattr(_Bucket, "again", turned)
    assert all(dist.threads(2, wrong_reducers, timeout=None))


def test_a_bucket_that_brings_something_else_than_before_does_not_go_the_short_way() -> None:
    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(4), name=f"w{i}") for i in range(2)]
        reducer = Reducer(leaves, group, missing="skip")
        found = []

        def one(has: tuple[int, ...], weight: float | None = None, before: bool = False) -> None:
            roots = [(leaves[i], 0, np.ones(4)) for i in has]
            if before:
                with reducer.accumulate():
                    fanin.backward(roots)
            fanin.backward(roots, reducer=reducer, weight=weight)
            found.append([None if w.grad is None else float(w.grad[0]) for w in leaves])
            for w in leaves:
                w.grad = None

        for _ in range(3):
            one((0, 1))
        one((0, 1), weight=3.0)
        one((0, 1))
        one((1,) if group.rank else (0, 1))
        one((0, 1))
        one((0, 1), before=True)
        one((0, 1))
        return found

    whole = [2.0, 2.0]
    expected = [*[whole] * 3, [6.0, 6.0], whole, [1.0, 2.0], whole, [4.0, 4.0], whole]
    assert dist.threads(2, rank, timeout=None) == [expected] * 2


@pytest.mark.partners
def test_buckets_of_gloo_with_plans_have_the_bits_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    assert on_processes(2, partial(wrong_reducers, every=5), tmp_path) == [[], []]


# ---------------------------------------------------------------- messages of one size


def padded(group: Group) -> Group:
    return Group(Padded(group._engine), timeout=None)


@pytest.mark.parametrize("n", [2, 3])
def test_sums_over_an_engine_whose_messages_have_one_size_have_the_bits_of_one_process(n: int) -> None:
    def rank(group: Group) -> Any:
        one = padded(group)
        return wrongs(one, ("float32",)) + wrong_reducers(one)

    assert dist.threads(n, rank, timeout=None) == [[]] * n


def test_first_messages_are_as_long_as_those_of_the_last_pass() -> None:
    def rank(group: Group) -> Any:
        one = padded(group)
        leaves, reducer = reducer_of(one, 10, 2)
        found = []
        for _ in range(4):
            one._engine.sizes.clear()
            step(leaves, reducer)
            found.append([*one._engine.sizes])
        return found

    for found in dist.threads(2, rank, timeout=None):
        assert set(found[0]) == {FRAME}
        assert found[-1] == [HEAD_SIZE + 80, HEAD_SIZE + 80, HEAD_SIZE]


def expecting(group: Group) -> bool:
    """Whether sums are right of which ranks expect other sizes, as rank 1 forgets a plan."""
    one = padded(group)
    found = []
    for turn, size in enumerate((10, 300, 10, 300, 10, 300, 10, 300)):
        if turn == 4 and one.rank == 1:
            one._plans.pop(next(name for name in one._plans if name[2] == (300,)))  # type: ignore[index]
        found.append(bool((dist.add_n([np.ones(size)], one) == 2).all()))
    return all(found)


def test_ranks_that_expect_other_sizes_go_by_the_largest() -> None:
    assert dist.threads(2, expecting, timeout=None) == [True, True]


def test_a_rank_that_goes_by_what_it_expects_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Call._padded

    def own(self: Call, *args: Any) -> Any:
        found = real(self, *args)
        last = self.group._last
        self.group._size_of_next = FRAME if last is None else last.after or FRAME
        return found

    monkeypatch.setattr(Call, "_padded", own)
    with pytest.raises(fanin.PeerError, match=r"messages of|broadcast"):
        dist.threads(2, expecting, timeout=None)


# ---------------------------------------------------------------- ranks that differ


@pytest.mark.parametrize("size", SIZES.values())
def test_a_bucket_whose_plan_one_rank_has_forgotten_is_a_right_sum(size: int) -> None:
    def rank(group: Group) -> Any:
        leaves, reducer = reducer_of(group, size)
        found = []
        for turn in range(6):
            if turn == 2 and group.rank == 1:
                reducer._buckets[0].plan = None
            assert step(leaves, reducer) == [3.0]
            found.append(reducer._buckets[0].is_planned)
        return found

    assert dist.threads(2, rank, timeout=None) == [[False, True, False, True, True, True]] * 2


def test_headers_that_change_cost_no_message_more() -> None:
    """Rank 1 has a gradient of the second leaf in each other pass."""

    def rank(group: Group) -> Any:
        leaves, reducer = reducer_of(group, 10, 2, missing="skip")
        found = []
        for turn in range(8):
            before = group.counters.messages
            has = {0, 1} if group.rank == 0 or turn % 2 else {0}
            assert step(leaves, reducer, has) == [3.0, 3.0 if turn % 2 else 1.0]
            found.append(group.counters.messages - before)
        return found

    for found in dist.threads(2, rank, timeout=None):
        # Two buckets and the end of the pass; a plan that only one rank has costs one message more, once.
        assert len(set(found[3:])) == 1 and sum(found) <= 8 * found[-1] + 4, found


def test_a_leaf_without_gradient_on_one_rank_is_named_though_there_is_a_plan() -> None:
    def rank(group: Group) -> Any:
        leaves, reducer = reducer_of(group, 10, 2)
        for _ in range(3):
            assert step(leaves, reducer) == [3.0, 3.0]
        with pytest.raises(fanin.PeerError, match=r"w1 has a gradient on ranks \[0\] and none on ranks \[1\]") as e:
            step(leaves, reducer, {0, 1} if group.rank == 0 else {0})
        return e.value.rank, step(leaves, reducer)

    assert dist.threads(2, rank, timeout=None) == [(1, [3.0, 3.0])] * 2


@pytest.mark.parametrize("buckets", [1, 3])
def test_a_rank_that_fails_is_named_though_the_others_have_plans(buckets: int) -> None:
    def rank(group: Group) -> Any:
        leaves, reducer = reducer_of(group, 20_000, buckets)
        for _ in range(3):
            step(leaves, reducer)
        with pytest.raises(ZeroDivisionError if group.rank else fanin.PeerError, match="spilt") as e, reducer:
            if group.rank:
                raise ZeroDivisionError("spilt")
            fanin.backward([(w, 0, np.ones(20_000)) for w in leaves])
        return getattr(e.value, "rank", 1), step(leaves, reducer)

    assert dist.threads(2, rank, timeout=None) == [(1, [3.0] * buckets)] * 2


def test_keys_of_planned_buckets_decide_the_order_and_are_checked() -> None:
    terms = [np.array([x], "f4") for x in (1e8, -1e8, 1.0)]

    def rank(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(1, "f4"), name="w")
        reducer = Reducer([w], group, order="key")

        def of(keys: list[Any]) -> float:
            w.grad = None
            fanin.backward([(w, 0, terms[group.rank])], reducer=reducer.at(keys[group.rank]))
            return float(w.grad[0])

        found = [of(keys) for keys in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [None] * 3)]
        for keys, words in (([5, 6, 5], "key 5 of rank 2 was given by rank 0"), ([None, 1, None], "rank 1 gives keys")):
            with pytest.raises(fanin.PeerError, match=words):
                of(keys)
        return found, group.counters.planned, of([0, 1, 2])

    orders = [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]
    right = [float(fanin.add_n([terms[k] for k in order])[0]) for order in orders]
    assert dist.threads(3, rank, timeout=None) == [(right, 5, right[0])] * 3


def test_weights_that_change_are_counted_though_there_is_a_plan() -> None:
    def rank(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(1), name="w")
        reducer, found = Reducer([w], group, mean=True), []
        for tokens in (1, 1, 1, 3, 3, 3, 1):
            w.grad = None
            fanin.backward([(w, 0, np.full(1, 8.0 * group.rank))], reducer=reducer, weight=tokens if group.rank else 1)
            found.append(float(w.grad[0]))
        return found, group.counters.planned

    (found, planned), other = dist.threads(2, rank, timeout=None)
    assert found == [4.0, 4.0, 4.0, 6.0, 6.0, 6.0, 4.0] and planned == 3 and other == (found, planned)


def test_reducers_of_other_leaves_are_an_error_that_names_them_though_both_have_plans() -> None:
    def rank(group: Group) -> Any:
        both = [reducer_of(group, size) for size in (3, 4)]
        for _ in range(2):
            for one in both:
                step(*one)
        with pytest.raises(fanin.PeerError, match=r"rank 1 has w0: float64 of shape \(4,\); rank 0") as e:
            step(*both[group.rank])
        return e.value.rank, step(*both[0])

    assert dist.threads(2, rank, timeout=None) == [(1, [3.0])] * 2


def test_messages_of_a_pass_are_one_for_each_bucket_and_one_for_its_end() -> None:
    def rank(group: Group) -> Any:
        leaves, reducer = reducer_of(group, 10, 3)
        step(leaves, reducer)
        before = group.counters
        step(leaves, reducer)
        return group.counters.messages - before.messages, group.counters.planned - before.planned

    assert dist.threads(2, rank, timeout=None) == [(4, 4)] * 2


def test_a_closed_reducer_has_no_plans() -> None:
    def rank(group: Group) -> Any:
        leaves, reducer = reducer_of(group)
        for _ in range(2):
            step(leaves, reducer)
        there = reducer._buckets[0].plan is not None
        reducer.close()
        return there, reducer._buckets[0].plan

    assert dist.threads(2, rank, timeout=None) == [(True, None)] * 2
