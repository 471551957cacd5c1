"""Running sums of a rank's contributions: they have the bits of a sum of all at once, and their memory does not grow
with the number of contributions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist import layout, sums
from fanin.dist.group import Group
from fanin.dist.reducer import Reducer, _Bucket
from kit.messages import Messages
from kit.sample import every
from kit.values import bits

pytestmark = pytest.mark.core

FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
SIZE = 700


def contribution(dtype: str, k: int) -> Any:
    """With denormals, inf, NaN and -0.0."""
    rng = np.random.default_rng(k)
    x = rng.standard_normal(SIZE) * 2.0 ** rng.integers(-20, 12, SIZE)
    x[k % SIZE :: 97] = -0.0
    x[:3] = -0.0
    if k % 3 == 0:
        x[50 + k] = np.inf
        x[90 + k] = np.nan
    if dtype.startswith("complex"):
        return np.column_stack([x, x[::-1]]).view("c16").ravel().astype(dtype)
    return x.astype(dtype)


def dealt(ranks: int, counts: Sequence[int]) -> list[list[int]]:
    """The numbers of each rank's contributions."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, counts[r % len(counts)])) for r in range(ranks)]


WEIGHTS: dict[str, list[float | None]] = {
    "none": [None],
    "integers": [2, 3, 1, 5],
    "floats": [0.5, 1 / 3, 2.75, -1.0],
    "some": [None, 0.3],
}


def by_reducer(group: Group, numbers: list[int], dtype: str, order: Any, options: Any, weights: Any) -> Any:
    leaves = [fanin.Leaf(np.zeros(SIZE, dtype), name=name) for name in ("a", "b")]
    reducer = Reducer(leaves, group, order=order, **options)
    for k in numbers:
        # The last one has the other leaf too, which has no gradient before.
        some = [(w, 0, contribution(dtype, k)) for w in (leaves if k == numbers[-1] else leaves[:1])]
        if k == numbers[-1]:
            fanin.backward(some, reducer=reducer, weight=weights[k % len(weights)])
        else:
            with reducer.accumulate(weight=weights[k % len(weights)]):
                fanin.backward(some)
    return [w.grad for w in leaves]


def at_once(group: Group, numbers: list[int], dtype: str, order: Any, options: Any, weights: Any) -> Any:
    given = [weights[k % len(weights)] for k in numbers]
    more = {} if weights == [None] else {"weights": [1.0 if w is None else w for w in given]}
    terms = [contribution(dtype, k) for k in numbers]
    first = dist.add_n(terms, group, order, **options, **more)
    nothing = complex(-0.0, -0.0) if dtype.startswith("complex") else -0.0
    absent = [np.full_like(terms[0], nothing) for _ in numbers[:-1]]
    second = dist.add_n([*absent, terms[-1]], group, order, **options, **more)
    return [first, second]


def differ(dtypes: Sequence[str], weights: str, options: Any) -> list[str]:
    """Which sums of a reducer have other bits than `add_n` of all contributions at once."""
    wrong = []
    for dtype, order, counts in itertools.product(dtypes, (None, "rank", "key", "exact"), ([1, 4], [5], [2, 3, 1])):

        def rank(group: Group, dtype: str = dtype, order: Any = order, counts: Any = counts) -> bool:
            numbers = dealt(group.size, counts)[group.rank]
            args = (numbers, dtype, order, options, WEIGHTS[weights])
            a, b = by_reducer(group, *args), at_once(group, *args)
            return [bits(x) for x in a] == [bits(x) for x in b]

        for n in (1, 2, 3):
            if not all(dist.threads(n, rank, timeout=None)):
                wrong.append(f"{dtype} order={order} {counts} on {n} ranks")
    return wrong


@pytest.mark.parametrize(("weights", "scale"), every(3, [*itertools.product(WEIGHTS, (None, 0.125))]))
def test_running_sums_of_floats_have_the_bits_of_a_sum_at_once(weights: str, scale: float | None) -> None:
    assert differ(FLOATS, weights, {"scale": scale}) == []


def test_running_means_have_the_bits_of_a_mean_at_once() -> None:
    assert differ(FLOATS[:3], "integers", {"mean": True}) == []


@pytest.mark.parametrize("order", [None, "rank", "exact", "key"])
def test_leaves_of_several_dtypes_in_one_bucket_have_the_bits_of_a_sum_at_once(order: Any) -> None:
    def rank(group: Group) -> bool:
        leaves = [fanin.Leaf(np.zeros(SIZE, dtype), name=dtype) for dtype in FLOATS]
        reducer = Reducer(leaves, group, order=order)
        assert len(reducer._buckets) == 1
        for k in range(4):
            some = [(w, 0, contribution(w.name, k + group.rank)) for w in leaves]
            if k == 3:
                fanin.backward(some, reducer=reducer)
            else:
                with reducer.accumulate():
                    fanin.backward(some)
        terms = {w.name: [contribution(w.name, k + group.rank) for k in range(4)] for w in leaves}
        return all(bits(w.grad) == bits(dist.add_n(terms[w.name], group, order)) for w in leaves)

    assert dist.threads(3, rank, timeout=None) == [True] * 3


@pytest.mark.partners
@pytest.mark.parametrize("order", [None, "rank", "exact"])
def test_running_sums_of_bfloat16_have_the_bits_of_a_sum_at_once(order: Any) -> None:
    torch = pytest.importorskip("torch")

    def rank(group: Group) -> bool:
        terms = [torch.from_numpy(contribution("float32", k)).bfloat16() for k in (group.rank, 3, 4, 5)]
        w = torch.zeros(SIZE, dtype=torch.bfloat16, requires_grad=True)
        reducer = Reducer([("w", w)], group, order=order)
        for k, term in enumerate(terms):
            with reducer if k == 3 else reducer.accumulate():
                torch.autograd.backward(w, term)
        expected = dist.add_n(terms, group, order)
        return torch.equal(w.grad.view(torch.int16), expected.view(torch.int16))

    assert dist.threads(2, rank, timeout=None) == [True, True]


def from_zero(fold: sums.Fold, raws: Any, weights: Any) -> bool:
    """As `Fold.add`, but the first contribution is added to 0."""
    if fold.total is None:
        fold.total = np.zeros(fold.segment.size * layout.itemsize(fold.dtype), np.uint8)
    return REAL(fold, raws, weights)


def in_its_own_dtype(fold: sums.Fold, raws: Any, weights: Any) -> bool:
    """As `Fold.add`, but each sum is rounded to the dtype of the gradients."""
    taken = REAL(fold, raws, weights)
    total = layout.typed(fold.total, fold.dtype)
    total[...] = total.astype(fold.segment.dtype)
    return taken


def without_weights(fold: sums.Fold, raws: Any, weights: Any) -> bool:
    return REAL(fold, raws, [None] * len(raws))


def in_another_order(fold: sums.Fold, raws: Any, weights: Any) -> bool:
    """As `Fold.add`, but a later contribution is the first term."""
    if fold.total is None:
        return REAL(fold, raws, weights)
    total, fold.total = fold.total, None
    return REAL(fold, [*raws, total], [*weights, None])


REAL = sums.Fold.add


@pytest.mark.parametrize(
    ("fault", "dtype", "weights"),
    [
        (from_zero, "float32", "none"),
        (in_its_own_dtype, "float16", "none"),
        (without_weights, "float32", "floats"),
    ],
)
def test_the_law_finds_a_fold_that_is_wrong(
    fault: Any, dtype: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums.Fold, "add", fault)
    wrong = differ([dtype], weights, {})
    assert any("order=rank" in one for one in wrong) and any("order=None" in one for one in wrong)


def test_a_contribution_that_raises_is_in_no_running_sum() -> None:
    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(3, "f4"), name=name) for name in ("a", "b")]
        reducer = Reducer(leaves, group, order="rank")
        ones = [(w, 0, np.ones(3, "f4")) for w in leaves]
        bad = fanin.Node(lambda g: 1 / 0, edges=[(leaves[1], 0)], name="Bad")
        for _ in range(2):
            with reducer.accumulate():
                fanin.backward(ones)
        if group.rank == 1:
            with pytest.raises(ZeroDivisionError), reducer.accumulate():
                fanin.backward([ones[0], (bad, 0, np.ones(3, "f4"))])
        else:
            with pytest.raises(fanin.PeerError, match="Bad"):
                fanin.backward(ones, reducer=reducer)
        assert [w.grad for w in leaves] == [None, None]
        for _ in range(3):
            with reducer.accumulate():
                fanin.backward(ones)
        fanin.backward(ones, reducer=reducer)
        return [w.grad.tolist() for w in leaves]

    assert dist.threads(2, rank, timeout=None) == [[[8.0] * 3] * 2] * 2


# ---------------------------------------------------------------- memory

KB = 1 << 10
LEAVES = 256 * KB  #: bytes of all leaves


def passes(group: Group, order: Any, contributions: int, leaves: int, bucket: int) -> tuple[Reducer, list[fanin.Leaf]]:
    """Two steps of some contributions."""
    size = LEAVES // leaves // 4
    made = [fanin.Leaf(np.ones(size, "f4"), name=f"w{i}") for i in range(leaves)]
    roots = [(w, 0, np.full(size, 1.5, "f4")) for w in made]
    reducer = Reducer(made, group, order=order, bucket_bytes=bucket)
    for _ in range(2):
        for w in made:
            w.grad = None
        for _ in range(contributions - 1):
            with reducer.accumulate():
                fanin.backward(roots)
        fanin.backward(roots, reducer=reducer)
        group.barrier()  # no rank has a message of the step before
    return reducer, made


def most(monkeypatch: pytest.MonkeyPatch, order: Any, contributions: int, leaves: int = 4) -> tuple[int, int]:
    """The bytes of a rank at most, and those that stay after the last pass, without the gradients."""
    messages = Messages(monkeypatch)

    def rank(group: Group) -> int:
        kept = passes(group, order, contributions, leaves, LEAVES // leaves)
        for w in kept[1]:
            w.grad = None
        group.barrier()
        now = messages.now
        group.barrier()  # no rank ends before
        return now

    [stays, _] = dist.threads(2, rank, timeout=None)
    return messages.most // 2, stays // 2


@pytest.mark.parametrize("order", [None, "rank", "exact"])
def test_memory_does_not_grow_with_the_number_of_contributions(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = most(monkeypatch, order, 2), most(monkeypatch, order, 20)
    print(few, many)
    assert many[0] < few[0] + LEAVES // 2


@pytest.mark.parametrize("order", ["key", None, "rank", "exact"])
@pytest.mark.parametrize("contributions", [1, 2, 5])
def test_one_set_of_buckets_stays_after_a_sum(order: Any, contributions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stays = most(monkeypatch, order, contributions)[1]
    print(stays / LEAVES)
    assert stays == LEAVES


#: Bytes for each byte of gradients: those of one pass, running sums that are messages, the result, and two buckets.
BOUNDS: list[tuple[Any, int, float]] = [
    (None, 1, 1 + 1 + 1 + 2),
    ("rank", 16, 1 + 1 + 1 + 2 / 16),
    ("exact", 1, 1 + 0 + 1 + 2),
    ("exact", 16, 1 + 0 + 1 + 2 / 16),
]


@pytest.mark.parametrize(("order", "leaves", "bound"), BOUNDS)
def test_a_rank_needs_a_passs_gradients_the_running_sums_the_result_and_two_buckets(
    order: Any, leaves: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = most(monkeypatch, order, 3, leaves)[0] / LEAVES
    print(used, bound)
    assert used < bound + 0.1  # headers, and the blocks of exact sums


def keeps_each(bucket: _Bucket, i: int, segment: Any) -> None:
    """As `_Bucket.fold`, but the memory of each contribution stays."""
    bucket.__dict__.setdefault("planted", []).append(bucket.terms[-1].flats[i])
    FOLD(bucket, i, segment)
    bucket.spare, bucket.used = None, {k: one for k, one in bucket.used.items() if k == 0}


def keeps_sums(bucket: _Bucket) -> None:
    """As `_Bucket.forget`, but the running sums stay, for nothing."""
    bucket.__dict__["planted"] = bucket.folded or bucket.__dict__.get("planted")
    FORGET(bucket)


FOLD, FORGET = _Bucket.fold, _Bucket.forget


def test_contributions_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    few = most(monkeypatch, "rank", 2)
    monkeypatch.setattr(_Bucket, "fold", keeps_each)
    assert most(monkeypatch, "rank", 20)[0] > few[0] + 16 * LEAVES


def test_running_sums_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Bucket, "forget", keeps_sums)
    assert most(monkeypatch, "rank", 5)[1] > LEAVES
