"""Weights over ranks (W8): the bits of one process, for any number of ranks and any dealing."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist import products
from fanin.dist.group import Group
from kit import weighted

N, MICRO = 700, 8  # elements: three blocks, so that of four ranks three own some
KINDS = ("float32", "float64", "float16", "bfloat16")


def terms_of(dtype: str, seed: int = 0, n: int = N) -> list[Any]:
    rng = np.random.default_rng(seed)
    scale = {"float16": 3, "bfloat16": 20}.get(dtype, 30)
    made = [rng.standard_normal(n) * 2.0 ** rng.integers(-scale, scale, n) / 2**8 for _ in range(MICRO)]
    return [x.astype(weighted.dtype_of(dtype)) for x in made]


def weights_of(seed: int, kind: str) -> list[Any]:
    r = random.Random(seed)
    if kind == "tokens":
        return [r.randint(0, 5000) for _ in range(MICRO)]
    return [r.choice([0.1, -2.5, 1.0, 1 / 3, 1e-3, 7.0]) * r.random() for _ in range(MICRO)]


def in_runs(k: int, ranks: int) -> int:
    return k * ranks // MICRO


def round_robin(k: int, ranks: int) -> int:
    return (ranks - 1 - k) % ranks


def uneven(k: int, ranks: int) -> int:
    """The last rank has most, and of three or more the first one nothing."""
    return min(ranks - 1, 1 if k == 0 else ranks - 1)


DEALINGS = (in_runs, round_robin, uneven)


def on(ranks: int, fn: Callable[..., Any], *args: Any, nodes: int = 1, **options: Any) -> list[Any]:
    return dist.threads(ranks, lambda group: fn(group, *args, **options), nodes=nodes, timeout=None)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def summed(
    group: Group,
    terms: list[Any],
    weights: Any,
    order: str,
    mean: bool,
    owner: Callable[..., int],
    into: Any,
    **options: Any,
) -> Any:
    mine = [k for k in range(MICRO) if owner(k, group.size) == group.rank]
    if order == "key":
        options["keys"] = mine
    given = None if weights is None else [weights[k] for k in mine]
    return dist.add_n([terms[k] for k in mine], group, order, weights=given, mean=mean, into=into, **options)


def oracle(terms: list[Any], weights: Any, order: str, mean: bool, dtype: str) -> Any:
    each = [1] * MICRO if weights is None else weights
    divisor = sum(map(Fraction, each)) if mean else None
    if order == "exact":
        return weighted.exact(terms, each, 1 if divisor is None else divisor, dtype)
    return weighted.folded(terms, each, divisor, "float64" if dtype == "float64" else "float32", dtype)


@pytest.mark.core
@pytest.mark.rule("W8")
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("order", ["key", "exact"])
@pytest.mark.parametrize("dtype", KINDS)
def test_a_weighted_sum_has_the_bits_of_one_process_for_any_number_of_ranks(dtype: str, order: str, mean: bool) -> None:
    n = 300 if order == "exact" else N
    terms = terms_of(dtype, n=n)
    for kind, weights in (("tokens", weights_of(1, "tokens")), ("floats", weights_of(2, "floats")), ("none", None)):
        expected = bits(oracle(terms, weights, order, mean, dtype))
        for ranks in (1, 2, 3, 4):
            for owner in DEALINGS:
                got = on(ranks, summed, terms, weights, order, mean, owner, "all")
                assert [bits(x) for x in got] == [expected] * ranks, (kind, ranks, owner)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_exact_sums_in_two_levels_have_the_same_bits(dtype: str, mean: bool) -> None:
    terms, weights = terms_of(dtype, 3, 600), weights_of(4, "floats")
    expected = bits(oracle(terms, weights, "exact", mean, dtype))
    for ranks in (4, 6):
        for owner in DEALINGS:
            got = on(ranks, summed, terms, weights, "exact", mean, owner, "all", nodes=2)
            assert [bits(x) for x in got] == [expected] * ranks, (ranks, owner)


def test_some_ranks_with_weights_and_some_without_are_one_sum() -> None:
    terms, weights = terms_of("float32", 5, 300), weights_of(6, "tokens")
    mixed = [w if k >= 4 else 1 for k, w in enumerate(weights)]

    def run(group: Group, owner: Callable[..., int]) -> Any:
        mine = [k for k in range(MICRO) if owner(k, group.size) == group.rank]
        given = [weights[k] for k in mine] if any(k >= 4 for k in mine) else None
        return dist.add_n([terms[k] for k in mine], group, "exact", weights=given, mean=True)

    expected = bits(weighted.exact(terms, mixed, sum(mixed)))
    for ranks in (2, 4):
        assert [bits(x) for x in on(ranks, run, in_runs)] == [expected] * ranks


def test_order_rank_folds_products_of_each_rank_and_then_the_ranks() -> None:
    terms, weights = terms_of("float32", 7), weights_of(8, "tokens")
    for ranks in (1, 2, 3):
        each = []
        for r in range(ranks):
            mine = [k for k in range(MICRO) if in_runs(k, ranks) == r]
            each.append(weighted.folded([terms[k] for k in mine], [weights[k] for k in mine]))
        expected = bits(weighted.folded(each, [1] * ranks, sum(weights)))
        assert {bits(x) for x in on(ranks, summed, terms, weights, "rank", True, in_runs, "all")} == {expected}


@pytest.mark.parametrize("order", ["key", "exact"])
def test_shards_and_a_sum_on_one_rank_are_parts_of_the_same_mean(order: str) -> None:
    terms, weights = terms_of("float32", 9), weights_of(10, "tokens")
    expected = oracle(terms, weights, order, True, "float32")
    shards = on(3, summed, terms, weights, order, True, in_runs, "shard")
    assert bits(np.concatenate(shards)) == bits(expected)
    one = on(3, summed, terms, weights, order, True, in_runs, 1)
    assert one[0] is one[2] is None and bits(one[1]) == bits(expected)


def test_scale_multiplies_the_mean() -> None:
    terms, weights = [np.full(3, 6.0)] * MICRO, list(range(1, MICRO + 1))
    for order in ("key", "exact"):
        got = on(2, summed, terms, weights, order, True, in_runs, "all", scale=0.5)
        assert got[0].tolist() == [3] * 3


def test_undefined_arrays_count_with_their_weights() -> None:
    def run(group: Group) -> Any:
        if group.rank:
            return dist.add_n([np.full(2, 12.0), None], group, weights=[3, 4], mean=True)
        return dist.add_n([None], group, weights=[5], mean=True)

    assert [x.tolist() for x in dist.threads(2, run, timeout=None)] == [[3, 3]] * 2
    without = dist.threads(2, lambda group: dist.add_n([np.ones(2) * 3, None, None], group, mean=True), timeout=None)
    assert without[0].tolist() == [1, 1]


def test_infinities_nans_and_zeros_of_products_are_those_of_one_process() -> None:
    special = np.array([np.inf, -np.inf, np.nan, -0.0, 0.0, 1e-40, 3e38, 2.0], "f4")
    terms = [special, special[::-1].copy(), np.zeros(8, "f4"), *[np.full(8, -0.0, "f4")] * 5]
    third = 1 / 3
    for weights in ([0.0] + [third] * 7, [-1.5, third, 0.1] + [2.0] * 5, [third, -third, 5.0] + [1.0] * 5):
        with np.errstate(all="ignore"):
            one = fanin.add_n(terms, weights=weights, accumulate="exact")
        for ranks in (1, 2, 3):
            for owner in (in_runs, round_robin):
                got = on(ranks, summed, terms, weights, "exact", False, owner, "all")
                assert np.array_equal(np.signbit(got[0]), np.signbit(one)) or np.isnan(one).any()
                np.testing.assert_array_equal(got[0], one)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_product_in_pieces_is_exact(dtype: str) -> None:
    rng = np.random.default_rng(11)
    x = (rng.standard_normal(200) * 2.0 ** rng.integers(-60, 60, 200)).astype(dtype)
    for w in [*rng.standard_normal(20), 3.0, 2.0**40 + 1, -1 / 3, 0.1]:
        pieces = list(products.products(x, float(w), "float32" if dtype == "f4" else "float64"))
        for i, g in enumerate(x):
            assert sum(Fraction(float(p[i])) for p in pieces) == Fraction(float(g)) * Fraction(float(w))


def test_a_product_that_a_rank_cannot_send_exactly_is_refused_on_every_rank() -> None:
    def run(group: Group) -> Any:
        many = [np.full(3, 1e-300)] * 2 if group.rank else [np.ones(3)]
        try:
            return dist.add_n(many, group, "exact", weights=[0.1] * len(many))
        except (ValueError, fanin.PeerError) as e:
            return str(e)

    first, second = dist.threads(2, run, timeout=None)
    assert "2**-958" in second and "2**-958" in first and "rank 1" in first


# ---------------------------------------------------------------- reducers


def of_reducer(
    group: Group, terms: list[Any], weights: Any, order: Any, mean: bool, owner: Callable[..., int], how: str
) -> list[Any]:
    """Two steps of a reducer over two leaves; the gradients of the second."""
    dtype = terms[0].dtype
    leaves = [fanin.Leaf(np.zeros(terms[0].shape, dtype), name=f"w{i}") for i in range(2)]
    reducer = dist.Reducer(leaves, group, order=order, mean=mean, bucket_bytes=1)
    mine = [k for k in range(MICRO) if owner(k, group.size) == group.rank]
    made: list[Any] = []
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        for k in mine:
            roots = [(leaf, 0, terms[k]) for leaf in leaves]
            key = k if order == "key" else None
            weight = None if weights is None else weights[k]
            if k != mine[-1]:
                with reducer.accumulate(key, weight=weight):
                    fanin.backward(roots)
            elif how == "with":
                with reducer.at(key, weight=weight):
                    fanin.backward(roots)
            elif how == "at":
                fanin.backward(roots, reducer=reducer.at(key, weight))
            else:
                fanin.backward(roots, reducer=reducer.at(key), weight=weight)
        made = [leaf.grad for leaf in leaves]
    return made


@pytest.mark.core
@pytest.mark.parametrize("how", ["with", "at", "weight"])
@pytest.mark.parametrize("order", ["key", "exact"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reducer_makes_the_mean_of_one_process(dtype: str, order: str, how: str) -> None:
    terms = terms_of(dtype, 12, 300)
    for weights in (weights_of(13, "tokens"), None):
        expected = bits(oracle(terms, weights, order, True, dtype))
        for ranks in (1, 2, 4):
            for owner in (in_runs, round_robin):
                got = on(ranks, of_reducer, terms, weights, order, True, owner, how)
                assert [bits(g) for of_rank in got for g in of_rank] == [expected] * 2 * ranks, (ranks, owner, weights)


@pytest.mark.parametrize("order", ["key", "exact", None])
def test_a_reducer_without_mean_sums_the_products(order: Any) -> None:
    terms, weights = terms_of("float32", 14, 300), weights_of(15, "floats")
    got = on(1, of_reducer, terms, weights, order, False, in_runs, "weight")
    expected = oracle(terms, weights, "exact" if order == "exact" else "key", False, "float32")
    assert bits(got[0][0]) == bits(expected)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("order", [None, "key", "rank", "exact"])
def test_the_only_contribution_of_a_rank_is_multiplied_by_its_weight(order: Any, ranks: int) -> None:
    def rank(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(2), name="w")
        one_pass(w, dist.Reducer([w], group, order=order), 3)
        return w.grad.tolist()

    assert on(ranks, rank) == [[3.0 * ranks] * 2] * ranks


def test_a_contribution_counts_for_leaves_that_it_does_not_reach() -> None:
    def run(group: Group) -> Any:
        often, rare = (fanin.Leaf(np.zeros(2, "f4"), name=n) for n in ("often", "rare"))
        reducer = dist.Reducer([often, rare], group, mean=True, missing="skip")
        with reducer.accumulate(weight=3):
            fanin.backward([(often, 0, np.full(2, 8, "f4"))])
        roots = [(often, 0, np.full(2, 16, "f4"))]
        if group.rank == 1:
            roots.append((rare, 0, np.full(2, 32, "f4")))
        fanin.backward(roots, reducer=reducer, weight=5)
        return often.grad.tolist(), rare.grad.tolist()

    assert dist.threads(2, run, timeout=None) == [([13, 13], [10, 10])] * 2


def test_a_mean_is_added_to_an_earlier_gradient_on_every_rank() -> None:
    def run(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(2))
        w.grad = np.full(2, 100.0)
        fanin.backward([(w, 0, np.full(2, 4.0))], reducer=dist.Reducer([w], group, mean=True), weight=group.rank + 1)
        return w.grad.tolist()

    assert dist.threads(3, run, timeout=None) == [[104, 104]] * 3


def test_explain_has_weights_and_the_divisor() -> None:
    def run(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(2, "f4"), name="w")
        reducer = dist.Reducer([w], group, mean=True)
        before = reducer.explain(w)
        fanin.backward([(w, 0, np.ones(2, "f4"))], reducer=reducer, weight=3 + group.rank)
        return before, reducer.explain(w)

    before, after = dist.threads(2, run, timeout=None)[0]
    assert "by that of the weights of all ranks, before it rounds (N10)" in before
    assert "multiplied by their weights: 3 of rank 0, 4 of rank 1 (N10)" in after
    assert "by that of the weights of all ranks, 7, before it rounds (N10)" in after


# ---------------------------------------------------------------- mistakes


def ends(group: Group, run: Callable[[Group, Any], None]) -> Any:
    """How a pass of a reducer ends on this rank, its gradients, and the mean of the next pass."""
    w = fanin.Leaf(np.zeros(2), name="w")
    w.grad = np.full(2, 7.0)
    end: Any = None
    try:
        run(group, w)
    except Exception as e:
        end = type(e).__name__, str(e), getattr(e, "rank", None)
    kept = w.grad.tolist()
    w.grad = None
    fanin.backward([(w, 0, np.full(2, 2.0 * group.rank))], reducer=dist.Reducer([w], group, mean=True), weight=2)
    return end, kept, w.grad.tolist()


def one_pass(w: Any, reducer: dist.Reducer, weight: Any) -> None:
    fanin.backward([(w, 0, np.ones(2))], reducer=reducer, weight=weight)


def checked(run: Callable[[Group, Any], None], ranks: int = 3) -> list[Any]:
    found = on(ranks, ends, run)
    assert [kept for _, kept, _ in found] == [[7, 7]] * ranks
    assert [after for _, _, after in found] == [[ranks - 1, ranks - 1]] * ranks
    return [end for end, _, _ in found]


@pytest.mark.core
@pytest.mark.parametrize("order", ["key", "exact", "rank"])
@pytest.mark.parametrize("weights", [(0, 0, 0), (1.5, -2.5, 1.0)])
def test_a_divisor_of_zero_is_an_error_by_name_on_every_rank(weights: Any, order: Any) -> None:
    found = checked(lambda group, w: one_pass(w, dist.Reducer([w], group, order=order, mean=True), weights[group.rank]))
    assert [kind for kind, _, _ in found] == ["ZeroDivisionError"] * 3
    assert all("weights of all ranks sum to 0" in text for _, text, _ in found)


@pytest.mark.core
def test_mean_on_one_rank_only_is_an_error_on_every_rank() -> None:
    found = checked(lambda group, w: one_pass(w, dist.Reducer([w], group, mean=group.rank == 1), 2))
    assert [(kind, rank) for kind, _, rank in found] == [("PeerError", 1)] * 3
    assert all("mean=True" in text for _, text, _ in found)


@pytest.mark.core
def test_weights_of_another_kind_on_one_rank_are_an_error_on_every_rank() -> None:
    found = checked(lambda group, w: one_pass(w, dist.Reducer([w], group, mean=True), 2.0 if group.rank == 2 else 2))
    assert [(kind, rank) for kind, _, rank in found] == [("PeerError", 2)] * 3
    assert all("rank 2 gives floats as weights and rank 0 integers" in text for _, text, _ in found)


@pytest.mark.parametrize(
    ("bad", "kind", "match"),
    [
        (float("nan"), "ValueError", "finite"),
        (float("inf"), "ValueError", "finite"),
        (True, "ValueError", "bool"),
        (np.int64(2**53 + 1), "ValueError", "would be rounded"),
        ("3", "TypeError", "str"),
        (np.ones(1), "TypeError", "ndarray"),
        (1j, "TypeError", "complex"),
        (10**400, "ValueError", "finite"),
    ],
)
def test_what_is_no_weight_is_refused_before_the_pass_runs(bad: Any, kind: str, match: str) -> None:
    def run(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(2))
        reducer = dist.Reducer([w], group, mean=True)
        for call in (
            lambda: one_pass(w, reducer, bad),
            lambda: reducer.accumulate(weight=bad),
            lambda: reducer.at(None, weight=bad),
            lambda: dist.add_n([np.ones(2)], group, weights=[bad]),
        ):
            try:
                call()
            except Exception as e:
                assert type(e).__name__ == kind and match in str(e), e
            else:
                raise AssertionError(call)
        one_pass(w, reducer, 3)
        return w.grad.tolist()

    assert dist.threads(1, run, timeout=None) == [[1, 1]]


def test_a_weight_of_add_n_that_is_none_on_one_rank_is_an_error_on_the_others() -> None:
    def run(group: Group) -> Any:
        try:
            dist.add_n([np.ones(2)], group, weights=["x" if group.rank else 2])
        except Exception as e:
            return type(e).__name__, "weight: expected a real number" in str(e)
        return None

    assert dist.threads(2, run, timeout=None) == [("PeerError", True), ("TypeError", True)]


def test_integers_take_integer_weights_and_no_mean() -> None:
    def run(group: Group) -> Any:
        found = [
            dist.add_n([np.array([group.rank + 1])], group, order, weights=[3]).tolist()
            for order in ("key", "exact", "rank")
        ]
        for options in ({"weights": [2.5]}, {"mean": True}):
            try:
                dist.add_n([np.array([1])], group, **options)  # type: ignore[arg-type]
            except (TypeError, ValueError) as e:
                found.append(str(e))
        return found

    first, _ = dist.threads(2, run, timeout=None)
    assert first[:3] == [[9], [9], [9]]
    assert "integer" in first[3] and "floats" in first[4]


def test_a_weight_at_two_places_is_refused() -> None:
    def run(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(2), name="w")
        reducer = dist.Reducer([w], group, mean=True)
        with pytest.raises(ValueError, match=r"weight= and reducer\.at"):
            fanin.backward([(w, 0, np.ones(2))], reducer=reducer.at(None, weight=2), weight=3)
        reducer.at(None)
        with pytest.raises(ValueError, match=r"w: weight: .* reducer\.accumulate\(weight=\)"), reducer.accumulate():
            fanin.backward([(w, 0, np.ones(2))], weight=3)
        one_pass(w, reducer, 3)
        return w.grad.tolist()

    assert dist.threads(1, run, timeout=None) == [[1, 1]]


# ---------------------------------------------------------------- planted faults


def test_the_law_finds_a_rank_that_forgets_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    terms, weights = terms_of("float32", 20, 300), weights_of(21, "tokens")
    expected = bits(oracle(terms, weights, "key", True, "float32"))
    real = dist.sums.weighing_of
    monkeypatch.setattr(dist.sums, "weighing_of", lambda weights: real([None, *weights[1:]]))
    monkeypatch.setattr(dist.sums.Sum, "rounded", _forgetful)
    got = on(2, summed, terms, weights, "key", True, in_runs, "all")
    assert bits(got[0]) != expected


def _forgetful(self: Any, terms: Any, weights: Any, out: Any, scale: Any, accumulate: Any) -> None:
    fanin._core.add_n_over(terms, out, accumulate, scale, [None, *weights[1:]], self.parts)


def test_the_law_finds_products_that_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    terms, weights = terms_of("float32", 22, 300), weights_of(23, "floats")
    expected = bits(oracle(terms, weights, "exact", False, "float32"))
    monkeypatch.setattr(
        dist.sums, "products", lambda x, w, dtype: iter([np.asarray(x).astype("f8") * np.float32(w).astype("f8")])
    )
    got = on(2, summed, terms, weights, "exact", False, in_runs, "all")
    assert bits(got[0]) != expected
