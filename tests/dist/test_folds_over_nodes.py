"""Left folds that run from node to node: the bits of one level, fewer bytes between nodes, and planted faults."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist import chain
from fanin.dist.group import Group
from fanin.dist.reducer import Reducer
from kit.sample import sizes
from kit.values import bits

pytestmark = pytest.mark.core

#: How contributions are dealt out: in runs; in runs, the last rank first; in turn; to two nodes alone.
DEALINGS: dict[str, Any] = {
    "runs": lambda k, n, each: k // each,
    "back": lambda k, n, each: n - 1 - k // each,
    "turns": lambda k, n, each: k % n,
    "few": lambda k, n, each: n - 1 if k < 2 else 0,
}

#: Options of a sum: its order, how many contributions a rank has, how many elements, and more.
CASES: list[tuple[Any, int, int, dict[str, Any]]] = [
    ("key", 1, 5000, {}),
    ("key", 2, 5000, {"wire": "bfloat16", "wire_out": "bfloat16"}),
    ("key", 2, 3000, {"wire": "float8_e4m3fn", "into": "shard", "weighs": True}),
    ("rank", 2, 3000, {"scale": 1 / 3}),
    ("rank", 2, 3000, {"wire": "bfloat16", "mean": True, "weighs": True, "into": 2}),
    (None, 1, 700, {"mean": True, "weighs": True}),
    (None, 3, 70, {}),
    ("key", 3, 9001, {"wire_out": "float16", "mean": True, "weighs": True, "scale": 0.3}),
]

LAYOUTS: list[tuple[int, Any]] = [(4, 2), (6, 3), (6, [5, 5, 3, 3, 4, 4]), (6, [7, 5, 5, 7, 5, 7]), (8, 2), (8, 4)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the running sum has several."""
    monkeypatch.setattr(chain, "PIECE", 300)


def arrays_of(n: int, size: int, dtype: str) -> list[Any]:
    rng = np.random.default_rng(n + size)
    return [
        (rng.standard_normal(size) * 2.0 ** rng.integers(-6, 6, size)).astype(getattr(ml_dtypes, dtype, dtype))
        for _ in range(n)
    ]


def summed(n: int, nodes: Any, case: tuple[Any, int, int, dict[str, Any]], dealing: str, dtype: str) -> list[Any]:
    """The bytes of the sum, and those between nodes, on each rank."""
    order, each, size, options = case
    how = {name: value for name, value in options.items() if name != "weighs"}
    arrays = arrays_of(n * each, size, dtype)

    def rank(group: Group) -> Any:
        mine = [k for k in range(n * each) if DEALINGS[dealing](k, n, each) == group.rank]
        if "weighs" in options:
            how["weights"] = [k % 3 + 0.5 for k in mine]
        keys = mine if order == "key" else None
        out = dist.add_n([arrays[k] for k in mine], group, order, keys=keys, **how)
        return None if out is None else bits(out), group.counters.bytes_between

    return dist.threads(n, rank, nodes=nodes, timeout=None)


@pytest.mark.parametrize(
    ("dtypes", "layouts"),
    sizes(
        (("float32",), LAYOUTS[1:3]),
        (("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "complex64", "complex128"), LAYOUTS),
    ),
)
@pytest.mark.parametrize("dealing", DEALINGS)
def test_a_fold_over_nodes_has_the_bits_of_one_level(dealing: str, dtypes: Any, layouts: Any) -> None:
    for dtype, (n, nodes), case in itertools.product(dtypes, layouts, CASES):
        one = summed(n, 1, case, dealing, dtype)
        two = summed(n, nodes, case, dealing, dtype)
        assert [a for a, _ in one] == [a for a, _ in two], (dtype, n, nodes, case)


def between(n: int, nodes: Any, dealing: str, each: int = 2) -> int:
    """The bytes that all ranks send to other nodes, headers included."""
    return sum(sent for _, sent in summed(n, nodes, ("key", each, 65_536, {}), dealing, "float32"))


def test_one_running_sum_travels_between_nodes_and_no_terms() -> None:
    size = 4 * 65_536
    turns, runs = between(8, 2, "turns"), between(8, 2, "runs")
    assert turns > size * (16 / 2 + 4), "each contribution, and each owner's sum to the ranks of the other node"
    assert runs < size * 2.55, "the running sum, half of it to owners, and each half back"
    assert between(8, 4, "runs") < size * (3 + 3 / 4 + 3) * 1.02


def test_integers_of_any_dealing_have_one_sum_a_node() -> None:
    arrays = [np.arange(5000) * k for k in range(8)]

    def rank(group: Group) -> Any:
        out = dist.add_n([arrays[k] for k in range(group.rank, 8, 4)], group, "key", keys=[group.rank, group.rank + 4])
        return bits(out), group.counters.bytes_between < 2.1 * arrays[0].nbytes / 2

    assert dist.threads(4, rank, nodes=2, timeout=None) == [(bits(fanin.add_n(arrays)), True)] * 4


def test_nodes_are_in_the_order_of_their_terms_or_there_is_none() -> None:
    nodes = (0, 0, 1, 1, 2, 2)
    assert chain.nodes_in_order(nodes, [(5, 0), (9, 1), (1, 4), (3, 2)]) == (2, 1, 0)
    assert chain.nodes_in_order(nodes, [(1, 0), (2, 4), (3, 1)]) is None
    assert chain.nodes_in_order(nodes, []) == ()


@pytest.mark.parametrize(("largest", "heads_and_data"), [(1 << 31, 2 + 7 + 1), (10_000, 2 + 2 + 2)])
def test_a_fold_whose_messages_may_be_too_large_has_one_level(largest: int, heads_and_data: int) -> None:
    """In two levels the first node sends seven pieces and a sum; in one a rank sends both ranks of the other node."""

    def rank(group: Group) -> Any:
        group._engine.largest = largest  # type: ignore[attr-defined]
        total = dist.add_n([np.ones(1024, "f4")] * 2, group, "key")
        return total[0], group.counters.messages_between

    found = dist.threads(4, rank, nodes=2, timeout=None)[0]
    assert found == (8.0, heads_and_data)


def explained(group: Group) -> str:
    w = fanin.Leaf(np.zeros(4096, "f4"), name="w")
    reducer = Reducer([w], group, order="key")
    fanin.backward([(w, 0, np.ones(4096, "f4"))], reducer=reducer)
    return reducer.explain(w)


def test_explain_names_the_nodes_through_which_a_fold_runs() -> None:
    text = dist.threads(4, explained, nodes=2, timeout=None)[0]
    assert "The fold runs through the nodes 0, 1, in float32; the last one sends owners their sums (N12)." in text
    assert "This rank sent float32 to the ranks of its node: 8 KiB." in text
    assert "to a rank of every node, and these to all ranks of their nodes" in text
    assert "N12" not in dist.threads(4, explained, nodes=[0, 1, 0, 1], timeout=None)[0]


# ---------------------------------------------------------------- planted faults


def wrong(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, of: Any = chain.Chain) -> bool:
    """Whether the law above finds a fault."""
    monkeypatch.setattr(of, name, fault)
    dealings = [(case, dealing) for case in CASES[:1] for dealing in ("runs", "back")]
    pairs = [(summed(6, 1, *one, "float32"), summed(6, 3, *one, "float32")) for one in dealings]
    return any([a for a, _ in one] != [a for a, _ in two] for one, two in pairs)


def test_the_law_holds_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wrong(monkeypatch, "add", chain.Chain.add)


def test_nodes_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = chain.nodes_in_order
    assert wrong(monkeypatch, "nodes_in_order", lambda nodes, terms: in_order(nodes, terms)[::-1], dist.sums)


def test_a_running_sum_that_is_added_last_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(self: Any, piece: Any, total: Any, terms: Any, weights: Any, continued: bool) -> None:
        out = total[piece].view("f4")
        every = [term[piece.start // 4 : piece.stop // 4] for term in terms]
        fanin.add_n([*every, out] if continued else every, out=out)

    assert wrong(monkeypatch, "add", last)


def test_a_piece_of_another_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = chain.Chain.piece
    assert wrong(monkeypatch, "piece", lambda self, number: piece(self, 0 if number == 1 else number))
