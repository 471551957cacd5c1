"""Narrow dtypes on their way (N11): contributions are rounded first, on any number of ranks, and the bits of their sum
are those of one process.

The oracle is `kit.wires`: the rounding in plain NumPy, and `fanin.add_n` of rounded contributions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from fanin import _core, dist
from fanin.dist import options, wire
from fanin.dist import reducer as reducers
from fanin.dist.group import Group
from fanin.dist.layout import Leaf
from kit import wires
from kit.ranks import NO_MPI, under_mpiexec
from kit.sample import every, sizes
from kit.support import run_python
from kit.values import bits

core = pytest.mark.core
partners = pytest.mark.partners

WIRES = list(wires.FORMATS)
NARROW = [  #: a gradient's dtype, and what it travels as
    *itertools.product(("float32", "float64", "complex64", "complex128"), WIRES),
    *itertools.product(("float16", "bfloat16"), ("float8_e4m3fn", "float8_e5m2")),
]
#: Nothing, one element without an axis, whole blocks and parts of blocks.
SHAPES: list[tuple[int, ...]] = [(), (0,), (256,), (257,), (3, 700)]


def on_ranks(n: int, fn: Callable[..., Any], *args: Any, nodes: Any = 1, **options: Any) -> list[Any]:
    return dist.threads(n, lambda group: fn(group, *args, **options), nodes=nodes, timeout=None)


# ---------------------------------------------------------------- the law


@core
@pytest.mark.parametrize(("dtype", "name"), every(4, NARROW))
@pytest.mark.parametrize(("ranks", "shapes"), sizes(((1, 3), ((), (3, 700))), ((1, 2, 3, 4), SHAPES)))
def test_a_sum_has_the_bits_of_one_process_that_rounds_each_contribution_first(
    dtype: str, name: str, ranks: tuple[int, ...], shapes: list[Any]
) -> None:
    for n, shape in itertools.product(ranks, shapes):
        assert on_ranks(n, wires.wrongs, name, dtype, shape) == [[]] * n, n


@core
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize(("n", "nodes"), every(2, [(4, 2), (6, [7, 5, 5, 7, 5, 7])]))
def test_exact_sums_over_nodes_have_the_same_bits(name: str, n: int, nodes: Any) -> None:
    assert on_ranks(n, wires.wrongs, name, "float32", (3, 700), ["exact"], nodes=nodes) == [[]] * n
    arrays = wires.drawn((3000,), "float32")[:n]
    for wire_out in (None, name):
        expected = wires.alone(arrays, "exact", name, wire_out)
        one_each = on_ranks(n, wires.summed, arrays, "exact", wires.in_runs, nodes=nodes, wire=name, wire_out=wire_out)
        assert {bits(x) for x in one_each} == {bits(expected)}


@core
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("wire_out", [None, "bfloat16", "float8_e4m3fn"])
def test_shards_and_the_sum_of_one_rank_have_the_bits_of_all(name: str, wire_out: str | None) -> None:
    arrays = wires.drawn((3, 700), "float32")
    for n, order in ((1, "key"), (3, "key"), (4, "exact")):
        expected = wires.alone(arrays, order, name, wire_out)
        how = {"wire": name, "wire_out": wire_out}
        shards = on_ranks(n, wires.summed, arrays, order, wires.uneven, into="shard", **how)
        assert bits(np.concatenate(shards)) == bits(expected)
        got = on_ranks(n, wires.summed, arrays, order, wires.uneven, into=n - 1, **how)
        assert [x is None for x in got] == [True] * (n - 1) + [False] and bits(got[-1]) == bits(expected)


@core
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_by_rank_the_fold_of_each_rank_is_rounded_once(name: str, n: int) -> None:
    for dtype in ("float32", "bfloat16") if name.startswith("float8") else ("float32", "float64"):
        arrays, wide = wires.drawn((900,), dtype), np.dtype("f8" if dtype == "float64" else "f4")
        folds = [fanin.add_n([a.astype(wide) for a in arrays[r::n]]) for r in range(n)]
        expected = np.empty(900, wires.dtype_of(dtype))
        fanin.add_n([wires.rounded(x, name) for x in folds], out=expected, scale=0.5)
        for order in ("rank", None):
            for out in on_ranks(n, wires.summed, arrays, order, lambda k, size: k % size, wire=name, scale=0.5):
                assert bits(out) == bits(expected), (dtype, order)


@core
def test_one_contribution_of_each_rank_has_the_same_bits_by_key_by_rank_and_by_default() -> None:
    arrays = wires.drawn((900,), "float32")[:3]
    for name in WIRES:
        expected = wires.alone(arrays, "key", name, weights=wires.WEIGHTS[:3])
        for order in ("key", "rank", None):
            got = on_ranks(3, wires.summed, arrays, order, lambda k, n: k, wire=name, weights=wires.WEIGHTS)
            assert {bits(x) for x in got} == {bits(expected)}


@core
def test_weights_of_exact_sums_that_only_some_ranks_pack() -> None:
    """Rank 0 sends its one contribution as it is, rank 1 a sum of products."""
    arrays, weights = wires.drawn((900,), "float32")[:4], [3.0, 0.5, -1.25, 1 / 3]
    for name, mean in itertools.product(WIRES, (False, True)):
        expected = wires.alone(arrays, "exact", name, weights=weights, mean=mean)
        how = {"wire": name, "weights": weights, "mean": mean}
        got = on_ranks(2, wires.summed, arrays, "exact", wires.uneven, **how)
        assert {bits(x) for x in got} == {bits(expected)}, (name, mean)


# ---------------------------------------------------------------- reducers


SIZES: list[tuple[int, ...]] = [(300,), (), (5,), (2, 350), (0,), (256,)]


def gradients(seed: int = 0) -> list[list[Any]]:
    """Of each micro-batch, those of all leaves."""
    of_leaves = [wires.drawn(s, "float32", seed + i) for i, s in enumerate(SIZES)]
    return [list(each) for each in zip(*of_leaves, strict=True)]


def reduced(
    group: Group,
    order: Any,
    name: Any,
    owner: wires.Dealing,
    bucket_bytes: int,
    reverse: bool,
    **options: Any,
) -> list[Any]:
    """The sums of all leaves, of which each rank has the gradients of its micro-batches."""
    leaves = [fanin.Leaf(np.zeros(s, "f4"), name=f"w{i}") for i, s in enumerate(SIZES)]
    given = leaves[::-1] if reverse else leaves
    reducer = dist.Reducer(given, group, order=order, bucket_bytes=bucket_bytes, wire=name, missing="skip", **options)
    mine = [k for k in range(wires.MICRO) if owner(k, group.size) == group.rank]
    grads = gradients()
    for k in mine[:-1]:
        with reducer.accumulate(k if order == "key" else None):
            fanin.backward([(w, 0, g) for w, g in zip(leaves, grads[k], strict=True)])
    with reducer.at(mine[-1] if order == "key" and mine else None):
        if mine:
            fanin.backward([(w, 0, g) for w, g in zip(leaves, grads[mine[-1]], strict=True)])
    return [w.grad for w in leaves]


def wrong_sums(order: str, name: str, wire_out: str | None = None, ranks: tuple[int, ...] = (1, 2, 3)) -> list[str]:
    wrong = []
    expected = [wires.alone(x, order, name, wire_out, scale=1 / 3) for x in zip(*gradients(), strict=True)]
    cases = [(n, b, r) for n in ranks for b, r in ((1, False), (2000, True), (25 << 20, False))]
    for (n, bucket, reverse), owner in itertools.product(cases, wires.DEALINGS[:2]):
        how = {"scale": 1 / 3, "wire_out": wire_out}
        for got in on_ranks(n, reduced, order, name, owner, bucket, reverse, **how):
            if [bits(x) for x in got] != [bits(x) for x in expected]:
                wrong.append(f"{n} ranks, buckets of {bucket}, {reverse}, {owner.__name__}")
    return wrong


@core
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("order", ["key", "exact"])
def test_the_bits_of_a_reducer_do_not_depend_on_ranks_buckets_or_the_order_of_leaves(order: str, name: str) -> None:
    assert wrong_sums(order, name) == []
    assert wrong_sums(order, name, name, ranks=(1, 2)) == []


@core
def test_a_block_is_counted_from_the_first_element_of_its_leaf() -> None:
    """The first leaf ends in the middle of a block, and the second one is far smaller."""
    grads = [np.full(300, 2.0**20, "f4"), np.full(100, 1.0 + 2.0**-3, "f4")]

    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(g.shape, "f4")) for g in grads]
        reducer = dist.Reducer(leaves, group, wire="float8_e4m3fn", missing="skip")
        roots = [(w, 0, g) for w, g in zip(leaves, grads, strict=True)]
        fanin.backward(roots if group.rank == 0 else [], reducer=reducer)
        return [w.grad for w in leaves]

    for n in (1, 2):
        for got in on_ranks(n, rank):
            assert [bits(x) for x in got] == [bits(g) for g in grads]


@core
@pytest.mark.parametrize("wire_out", [None, *WIRES])
def test_a_large_leaf_alone_in_its_bucket_has_the_same_bits(wire_out: str | None) -> None:
    """Its gradient travels from its own memory, and .grad takes the array of the sum where that is not widened."""
    elements = 3 * reducers.LARGE // 8 + 5
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(elements).astype("f4") for _ in range(4)]

    def rank(group: Group, order: Any, name: str, passes: int) -> Any:
        leaf = fanin.Leaf(np.zeros(elements, "f4"))
        reducer = dist.Reducer([leaf], group, order=order, wire=name, wire_out=wire_out)
        mine = arrays[group.rank * passes : (group.rank + 1) * passes]
        for k, x in enumerate(mine):
            key = group.rank * passes + k if order == "key" else None
            last = k == passes - 1
            with reducer.at(key) if last else reducer.accumulate(key):
                fanin.backward([(leaf, 0, x.copy())])
        return leaf.grad

    for order, name, (n, passes) in itertools.product(("key", "exact"), WIRES[::3], ((1, 4), (4, 1), (2, 2))):
        expected = wires.alone(arrays, order, name, wire_out)
        assert {bits(x) for x in on_ranks(n, rank, order, name, passes)} == {bits(expected)}, (order, name, n)


@core
@pytest.mark.parametrize("n", [1, 2])
def test_an_overflow_of_the_narrow_dtype_is_found_on_all_ranks(n: int) -> None:
    def rank(group: Group, order: Any, passes: int, value: float, name: str) -> Any:
        leaf = fanin.Leaf(np.zeros(700, "f4"), name="w")
        reducer = dist.Reducer([leaf], group, order=order, detect=True, wire=name)
        g = np.ones(700, "f4")
        g[600:603] = value if group.rank == n - 1 else 1
        try:
            for _ in range(passes - 1):
                with reducer.accumulate():
                    fanin.backward([(leaf, 0, g)])
            fanin.backward([(leaf, 0, g)], reducer=reducer)
        except (FloatingPointError, fanin.PeerError) as e:
            assert leaf.grad is None
            return str(e), getattr(e, "leaf", None), getattr(e, "rank", None)
        return leaf.grad[600]

    for order in ("key", "exact", "rank", None):
        texts = on_ranks(n, rank, order, 1, 70000.0, "float16")
        assert texts[-1] == ("Reducer: w: 3 elements inf or NaN", "w", None)
        assert all("FloatingPointError: Reducer: w: 3 elem" in t and (w, r) == ("w", n - 1) for t, w, r in texts[:-1])
        assert on_ranks(n, rank, order, 1, 65000.0, "float16") == [np.float32(64992 + n - 1)] * n
        assert on_ranks(n, rank, order, 1, 70000.0, "bfloat16") == [np.float32(70144 + n - 1)] * n
    for order in ("rank", None):  # 40000 fits, and the fold of two does not
        text, leaf, _ = on_ranks(n, rank, order, 2, 40000.0, "float16")[-1]
        assert text == "Reducer: w: 3 elements inf or NaN in this rank's fold as float16" and leaf == "w"
    assert on_ranks(n, rank, "key", 2, 40000.0, "float16") == [np.float32(80000 + 2 * (n - 1))] * n


@core
def test_statistics_name_the_first_contribution_that_is_inf_as_it_travels() -> None:
    def rank(group: Group) -> Any:
        leaf = fanin.Leaf(np.zeros(2, "f4"), name="w")
        reducer = dist.Reducer([leaf], group, order="exact", stats=True, wire="float16")
        fanin.backward([(leaf, 0, np.float32([1, 7e4 if group.rank == 1 else 1]))], reducer=reducer)
        return reducer.stats()

    for stats in on_ranks(3, rank):
        assert stats.bad == dist.BadTerm(rank=1, leaf="w", elements=1, contribution=0, key=None)
        assert stats.nonfinite == 1


@core
@pytest.mark.parametrize("missing", ["error", "skip"])
def test_a_leaf_without_a_gradient_is_no_term(missing: Any) -> None:
    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(300, "f4"), name=f"w{i}") for i in range(3)]
        reducer = dist.Reducer(leaves, group, missing=missing, wire="float8_e5m2", wire_out="float8_e5m2")
        grads = wires.drawn((300,), "float32")
        some = [0, 1] if group.rank == 0 or missing == "error" else [1]
        fanin.backward([(leaves[i], 0, grads[i]) for i in some], reducer=reducer)
        return [w.grad for w in leaves]

    grads = wires.drawn((300,), "float32")
    for first, second, third in on_ranks(2, rank):
        n = 2 if missing == "error" else 1
        assert bits(first) == bits(wires.alone(grads[:1] * n, "key", "float8_e5m2", "float8_e5m2"))
        assert bits(second) == bits(wires.alone(grads[1:2] * 2, "key", "float8_e5m2", "float8_e5m2"))
        assert third is None


@core
def test_leaves_of_several_dtypes_travel_each_as_it_can() -> None:
    """Narrower floats, integers and bool as they are."""
    dtypes = ["float64", "bfloat16", "float16", "float32", "float8_e4m3fn"]
    arrays = [wires.drawn((300,), d)[0] if d != "float8_e4m3fn" else np.ones(300, wires.dtype_of(d)) for d in dtypes]

    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(x.shape, x.dtype)) for x in arrays]
        reducer = dist.Reducer(leaves, group, wire="bfloat16", scale=0.5)
        fanin.backward([(w, 0, x) for w, x in zip(leaves, arrays, strict=True)], reducer=reducer)
        return [w.grad for w in leaves]

    for got in on_ranks(2, rank):
        for x, dtype, total in zip(arrays, dtypes, got, strict=True):
            narrowed = wires.rounded(x, "bfloat16") if dtype in ("float32", "float64") else x
            assert bits(total) == bits(fanin.add_n([narrowed, narrowed], scale=0.5)) and total.dtype == x.dtype


@core
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
@pytest.mark.parametrize("order", ["key", "exact", "rank"])
def test_integers_travel_as_they_are(dtype: str, order: str) -> None:
    arrays = [np.arange(600).astype(dtype) for _ in range(4)]
    for got in on_ranks(2, wires.summed, arrays, order, wires.in_runs, wire="float8_e4m3fn", wire_out="float16"):
        assert bits(got) == bits(fanin.add_n(arrays))


# ---------------------------------------------------------------- roundings


def odd_values(dtype: str) -> Any:
    """Every exponent of a dtype, halves of steps, zeros, subnormals, and pairs of blocks of each magnitude."""
    info: Any = ml_dtypes.finfo(wires.dtype_of(dtype)) if dtype == "bfloat16" else np.finfo(dtype)
    rng = np.random.default_rng(1)
    low, high = int(info.minexp) - int(info.nmant), int(info.maxexp)
    mantissas = np.array([1, 1.0625, 1.125, 1.1875, 1.875, 1.9375, 1.96875, 2 - float(info.eps)])
    blocks = []
    for e in range(low, high):
        x = np.ldexp(rng.choice(mantissas, 256), e - rng.integers(0, 36, 256)) * rng.choice([-1, 1], 256)
        x[:4] = np.ldexp([1, mantissas[e % len(mantissas)], 0, -0.0], e)
        blocks.append(x)
    return np.concatenate([*blocks, np.zeros(256), -np.zeros(256)]).astype(wires.dtype_of(dtype))


@core
@pytest.mark.parametrize(("dtype", "name"), [case for case in NARROW if not case[0].startswith("complex")])
def test_every_magnitude_is_rounded_to_nearest_even_and_a_second_rounding_changes_nothing(
    dtype: str, name: str
) -> None:
    x = odd_values(dtype)
    once = on_ranks(1, lambda group: dist.add_n([x], group, "key", wire=name))[0]
    assert bits(once) == bits(wires.rounded(x, name))
    finite = np.isfinite(once.astype("f8"))
    whole = np.repeat(finite.reshape(-1, 256).all(1), 256)  # one that overflows has another power of two afterwards
    twice = on_ranks(1, lambda group: dist.add_n([once], group, "key", wire=name))[0]
    assert bits(twice[whole]) == bits(once[whole]) and np.array_equal(finite, np.isfinite(twice.astype("f8")))
    if name.startswith("float8") and dtype != "float64":  # the largest numbers of all are rounded to inf
        assert (~finite).sum() <= 256
    assert np.array_equal(np.signbit(once.astype("f8"))[finite], np.signbit(x.astype("f8"))[finite])


@core
@pytest.mark.parametrize("name", WIRES)
def test_inf_and_nan_stay_and_the_rest_of_their_block_too(name: str) -> None:
    for dtype in ("float32", "float64"):
        x = np.linspace(-3, 3, 600).astype(dtype)
        x[[5, 300, 301]] = np.inf, -np.inf, np.nan
        for order in ("key", "exact"):
            for got in on_ranks(2, wires.summed, [x], order, lambda k, n: 1, wire=name):
                assert bits(got) == bits(wires.rounded(x, name))
                is_inf = np.isnan if name == "float8_e4m3fn" else np.isinf
                assert is_inf(got[[5, 300]]).all() and np.isnan(got[301]) and np.isfinite(got).sum() == 597


@core
@pytest.mark.parametrize("name", WIRES)
def test_the_modes_of_the_calling_thread_change_no_bit(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.ldexp(np.linspace(1, 2, 512), np.repeat([-140, -3], 256)).astype("f4")
    expected = wires.rounded(x, name)
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor has no such mode")
    try:
        with np.errstate(all="raise"):
            got = dist.add_n([x], dist.group(OneRank(), timeout=None), "key", wire=name)
    finally:
        torch.set_flush_denormal(False)
    assert bits(got) == bits(expected)


class OneRank:
    """An engine of one rank, on the thread that calls."""

    rank, size, name, nodes = 0, 1, "one rank", 1

    def __fanin_group__(self) -> Any:
        return self

    def exchange(self, data: bytes) -> Any:
        return Ready([data])

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


class Ready:
    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self, timeout: float | None) -> Any:
        return self.result


@core
def test_an_array_is_not_written() -> None:
    x = wires.drawn((600,), "float32")[0]
    kept = x.copy()
    for order, name in itertools.product(("key", "exact", "rank"), WIRES):
        on_ranks(2, lambda group, o=order, w=name: dist.add_n([x, x], group, o, wire=w, wire_out=w))
    assert bits(x) == bits(kept)


# ---------------------------------------------------------------- bytes


def sent_bytes(group: Group, **options: Any) -> int:
    x = np.random.default_rng(group.rank).standard_normal(1 << 16).astype("f4")
    before = group.counters.bytes_sent
    dist.add_n([x] * options.pop("times", 1), group, **options)
    return group.counters.bytes_sent - before


@core
@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 2),
        ({"wire": "bfloat16"}, 1.5),
        ({"wire_out": "float16"}, 1.5),
        ({"wire": "float16", "wire_out": "bfloat16"}, 1),
        ({"wire": "float8_e4m3fn"}, 1.25 + 1 / 1024),
        ({"wire": "float8_e5m2", "wire_out": "float8_e4m3fn"}, 0.5 + 2 / 1024),
        ({"wire": "bfloat16", "into": "shard"}, 0.5),
        ({"wire": "bfloat16", "order": "exact"}, 1.5),
        ({"wire": "float8_e5m2", "wire_out": "float8_e5m2", "order": "exact"}, 0.5 + 2 / 1024),
        ({"wire": "bfloat16", "wire_out": "bfloat16", "order": "rank", "times": 5}, 1),
        ({"wire": "bfloat16", "wire_out": "bfloat16", "order": "key", "times": 5}, 3),
    ],
)
def test_what_travels_is_narrow(options: dict[str, Any], share: float) -> None:
    """In units of the array's bytes, of which two ranks each send half to the other; beside headers of some hundred."""
    for n in on_ranks(2, sent_bytes, **options):
        assert share <= n / (4 << 15) < share + 0.02


@core
def test_exact_sums_of_narrow_contributions_are_packed_in_fewer_bytes() -> None:
    wide, narrow, least = (
        on_ranks(2, sent_bytes, order="exact", times=3, wire=name)[0] for name in (None, "bfloat16", "float8_e4m3fn")
    )
    assert least < narrow < wide


# ---------------------------------------------------------------- what does not fit


@core
@pytest.mark.parametrize("option", ["wire", "wire_out"])
@pytest.mark.parametrize(
    ("value", "error", "got"),
    [
        ("bf16", ValueError, "'bf16'"),
        ("int8", ValueError, "int8"),
        ("float32", ValueError, "float32"),
        (np.float64, ValueError, "float64"),
        ("float8_e4m3fnuz", ValueError, "float8_e4m3fnuz"),
        (ml_dtypes.float8_e4m3fnuz, ValueError, "float8_e4m3fnuz"),
        (16, TypeError, "an int"),
        (True, TypeError, "a bool"),
        (np.ones(2), TypeError, "an ndarray"),
    ],
)
def test_another_dtype_is_refused_with_those_that_there_are(
    option: str, value: Any, error: type[Exception], got: str
) -> None:
    words = rf"{option}: expected 'bfloat16', 'float16', 'float8_e4m3fn' or 'float8_e5m2', got {got}"
    leaf = fanin.Leaf(np.zeros(3))

    def rank(group: Group) -> None:
        with pytest.raises(error, match=f"add_n: {words}"):
            dist.add_n([np.ones(3)], group, **{option: value})
        with pytest.raises(error, match=f"Reducer: {words}"):
            dist.Reducer([leaf], group, **{option: value})
        assert dist.add_n([np.ones(3)], group, **{option: None}).tolist() == [2.0] * 3

    on_ranks(2, rank)


@core
@pytest.mark.parametrize("option", ["wire", "wire_out"])
def test_ranks_that_differ_are_an_error_on_every_rank_that_names_both(option: str) -> None:
    def rank(group: Group, value: Any) -> None:
        leaf = fanin.Leaf(np.zeros(3, "f4"))
        mine = {option: value if group.rank == 1 else "bfloat16"}
        theirs = "order=None" if value is None else f"{option}='{value}'"
        words = rf"rank 1 has .*{theirs}.*; rank 0 has .*{option}='bfloat16'"
        with pytest.raises(fanin.PeerError, match=words) as e:
            dist.add_n([np.ones(3, "f4")], group, **mine)
        assert e.value.rank == 1
        with pytest.raises(fanin.PeerError, match=words):
            fanin.backward([(leaf, 0, np.ones(3, "f4"))], reducer=dist.Reducer([leaf], group, **mine))
        assert dist.add_n([np.ones(3, "f4")], group, wire="float16").tolist() == [3.0] * 3

    for value in ("float16", "float8_e5m2", None):
        on_ranks(3, rank, value)


@core
def test_dtypes_of_every_library_name_one_dtype() -> None:
    torch = pytest.importorskip("torch")

    def rank(group: Group) -> Any:
        one = ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16)[group.rank]
        return dist.add_n([np.float32([1.01])], group, wire=one)

    assert {x.tolist()[0] for x in on_ranks(4, rank)} == {4 * 1.0078125}


WITHOUT_ML_DTYPES = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
from fanin import dist
x = np.ldexp(np.linspace(-3, 3, 700), np.arange(700) % 30 - 15).astype("f4")
if sys.argv[1] == "torch":
    import torch
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        for order in ("key", "exact"):
            how = {"order": order, "wire": name, "wire_out": name}
            print(dist.threads(2, lambda group: dist.add_n([x, x], group, **how), timeout=None)[1].tobytes().hex())
else:
    try:
        dist.threads(1, lambda group: dist.add_n([x], group, wire="bfloat16"), timeout=None)
    except TypeError as e:
        print(e)
"""


@partners
def test_torch_has_the_narrow_dtypes_where_ml_dtypes_is_not_installed() -> None:
    pytest.importorskip("torch")
    x = np.ldexp(np.linspace(-3, 3, 700), np.arange(700) % 30 - 15).astype("f4")
    expected = [wires.alone([x] * 4, order, name, name) for name in WIRES for order in ("key", "exact")]
    got = run_python(WITHOUT_ML_DTYPES, "torch").stdout.split()
    assert [bits(np.frombuffer(bytes.fromhex(text), "f4")) for text in got] == [bits(one) for one in expected]


@core
def test_a_narrow_dtype_that_no_library_has_is_refused_by_name() -> None:
    assert "add_n: wire: bfloat16: NumPy has it through ml_dtypes" in run_python(WITHOUT_ML_DTYPES, "none").stdout


# ---------------------------------------------------------------- what a reducer says


@core
def test_explain_says_what_is_rounded_and_the_bytes_that_travelled() -> None:
    def rank(group: Group, order: Any, passes: int) -> str:
        leaf = fanin.Leaf(np.zeros(1024, "f4"), name="w")
        reducer = dist.Reducer([leaf], group, order=order, wire="float8_e4m3fn", wire_out="bfloat16")
        for _ in range(passes - 1):
            with reducer.accumulate():
                fanin.backward([(leaf, 0, np.ones(1024, "f4"))])
        fanin.backward([(leaf, 0, np.ones(1024, "f4"))], reducer=reducer)
        return reducer.explain(leaf)

    key, fold = (on_ranks(2, rank, order, passes)[0] for order, passes in (("key", 1), ("rank", 2)))
    rounded = "rounded to float8_e4m3fn, with a power of two for each 256 elements of a leaf (N11)."
    assert f"Contributions are {rounded}" in key and f"A rank's fold is {rounded}" in fold
    for text in (key, fold):
        assert "This rank sent float8_e4m3fn to owners: 514 B." in text
        assert "to all ranks, as bfloat16; this rank 1 KiB to each (N6)." in text


# ---------------------------------------------------------------- torch


@partners
@pytest.mark.parametrize("name", every(2, WIRES))
def test_accumulate_over_ranks_has_the_bits_of_one_process(name: str) -> None:
    torch = pytest.importorskip("torch")
    grads = [[torch.from_numpy(x) for x in each] for each in gradients()]

    def rank(group: Group, order: Any) -> Any:
        parameters = [torch.zeros(s, requires_grad=True) for s in SIZES]
        mine = [k for k in range(wires.MICRO) if wires.round_robin(k, group.size) == group.rank]
        how = {"order": order, "scale": 1 / 3, "wire": name, "wire_out": name}
        with fanin.torch.accumulate(parameters, group=group, **how) as block:
            for k in mine:
                if order == "key":
                    block.at(k)
                torch.autograd.backward(parameters, grads[k])
        return [bits(p.grad.numpy()) for p in parameters]

    for order in ("key", "exact"):
        expected = [bits(wires.alone(x, order, name, name, scale=1 / 3)) for x in zip(*gradients(), strict=True)]
        for n in (1, 3):
            assert on_ranks(n, rank, order) == [expected] * n, (order, n)


@partners
def test_a_block_without_ranks_refuses_narrow_dtypes() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="accumulate: wire= is for sums over ranks"):
        fanin.torch.accumulate([torch.zeros(3, requires_grad=True)], wire="bfloat16")


def with_ddp(group: Any) -> list[str]:
    """Which steps of DDP have other bits than the sum of both ranks' rounded gradients."""
    torch = pytest.importorskip("torch")
    ddp, wrong = torch.nn.parallel.DistributedDataParallel, []
    torch.set_num_threads(1)
    for name, order, out in [*itertools.product(WIRES, ("key", "exact"), (None,)), ("float8_e5m2", "key", "bfloat16")]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 17))
        model = ddp(net, bucket_cap_mb=0.001)
        model.register_comm_hook(None, fanin.torch.ddp_hook(order, wire=name, wire_out=out))
        for step in range(2):  # DDP deals parameters out to buckets anew after the first one
            xs = [torch.randn(4, 30, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(2)]
            each = [torch.autograd.grad(net(x).square().mean(), list(net.parameters())) for x in xs]
            model.zero_grad()
            model(xs[group.rank]).square().mean().backward()
            for p, *grads in zip(net.parameters(), *each, strict=True):
                expected = wires.alone([g.numpy() for g in grads], order, name, out, scale=0.5)
                if bits(p.grad.numpy()) != bits(expected):
                    wrong.append(f"{name} {order} {out} step {step} {tuple(p.shape)}")
    return wrong


@partners
def test_ddp_has_the_bits_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    assert on_processes(2, with_ddp, tmp_path) == [[], []]


@partners
def test_ddp_refuses_another_dtype() -> None:
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"ddp_hook: wire_out: expected 'bfloat16', .* got float64"):
        fanin.torch.ddp_hook(wire_out="float64")


# ---------------------------------------------------------------- MPI


MPI = """
from fanin import dist
from kit import wires
group = dist.group(timeout=None)
wrong = [x for name in wires.FORMATS for x in wires.wrongs(group, name, "float32", (3, 700))]
print(wrong)
"""


@partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
def test_sums_by_mpi_have_the_bits_of_one_process() -> None:
    done = under_mpiexec(2, "-c", MPI)
    assert (done.returncode, "".join(done.stdout.split())) == (0, "[][]"), done.stdout + done.stderr


# ---------------------------------------------------------------- planted faults


@core
@pytest.mark.parametrize("name", WIRES)
def test_a_rank_alone_that_does_not_round_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = wire.layout_of

    def layout_of(leaves: Any, ranks: int, sent: Any, back: Any) -> Any:
        return real(leaves, ranks, None if ranks == 1 else sent, back)

    monkeypatch.setattr(options, "layout_of", layout_of)
    for order in ("key", "exact"):
        wrong = wrong_sums(order, name)
        assert len(wrong) == 6 and all(w.startswith("1 ranks") for w in wrong)


@core
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_blocks_that_are_counted_through_a_bucket_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = wire.starts_of
    monkeypatch.setattr(wire, "starts_of", lambda sizes: real([sum(sizes)]))
    assert any("buckets of 26214400" in w for w in wrong_sums("key", name))


@core
def test_exact_sums_of_contributions_that_are_not_rounded_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.Codec, "rounded", lambda self, raw, dtype: raw)
    assert wrong_sums("exact", "bfloat16") and not wrong_sums("key", "bfloat16")


@core
def test_a_mode_of_a_block_that_overflows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its largest magnitude one power of two higher a block overflows, with one lower it loses small numbers."""
    x = odd_values("float32")
    for name, (digits, top) in wire.BLOCKED.items():
        for other in (top - 1, top + 1):
            monkeypatch.setitem(wire.BLOCKED, name, wire.Blocks(digits, other))
            once = on_ranks(1, lambda group, w=name: dist.add_n([x], group, "key", wire=w))[0]
            assert bits(once) != bits(wires.rounded(x, name)), (name, other)


@core
def test_a_reducer_that_counts_what_came_and_not_what_travels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "rounded", lambda x, leaf, name: x)
    with pytest.raises(AssertionError):
        test_statistics_name_the_first_contribution_that_is_inf_as_it_travels()


@core
def test_starts_of_blocks_and_shards_of_whole_blocks() -> None:
    assert wire.starts_of([300, 0, 5]).tolist() == [0, 256, 300, 305]
    leaves = [Leaf("a", (300,), "float32"), Leaf("b", (), "float32"), Leaf("c", (1000,), "float32")]
    for ranks in range(1, 9):
        [segment] = wire.layout_of(leaves, ranks, "float8_e5m2", None).segments
        assert segment.starts is not None
        assert set(segment.bounds) <= set(segment.starts.tolist()) and segment.bounds[-1] == 1301
        codec = wire.sent_codec(segment)
        assert codec is not None and sum(codec.counts) == 1301 + 7
    for empty in (wire.layout_of([Leaf("a", (0,), "float32")], 3, name, name).segments[0] for name in WIRES):
        assert empty.bounds == (0, 0, 0, 0) and _core.message_new(0).size == 0
