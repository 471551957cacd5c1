"""`fanin.compare` of ranks: which rank differs, and in what (G4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from kit.sample import sizes

pytestmark = [pytest.mark.core, pytest.mark.rule("G4")]


def train(odd: int, what: str, own_data: bool = False) -> Any:
    """The gathered traces of a pass on three ranks, of which one differs (-1: none)."""

    def rank(group: dist.Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(40), name=f"w{i}") for i in range(2)]
        reducer = dist.Reducer(leaves, group, bucket_bytes=1) if own_data else None
        differs = group.rank == odd
        scale = 1.0 + group.rank * own_data

        def low(g: Any) -> Any:
            g = g * 3.0
            if differs and what == "value":
                g[7] = np.nextafter(g[7], 9)
            return g

        if differs and what == "leaf":
            leaves[1].grad = np.ones(40)
        nodes = [fanin.Node(low, edges=[(w, 0)], name=f"low{i}") for i, w in enumerate(leaves)]
        top = fanin.Node(lambda g: (g, 2 * g), edges=[(n, 0) for n in nodes], name="top")
        with fanin.trace(digests=True) as t:
            fanin.backward([(top, 0, scale * np.linspace(0.1, 1, 40))], reducer=reducer)
        return dist.gather_trace(t, group)

    return dist.threads(3, rank, timeout=None)[0]


@pytest.mark.parametrize("count", sizes(4, 10))
def test_the_rank_that_differs_is_named(count: int, tmp_path: Path) -> None:
    for k in range(count):
        found = fanin.compare(train(k % 3, "value"), ranks=True)
        d = found.difference
        assert (d.rank, d.maker, d.what) == (k % 3, "low1", "contribution"), found
    train(1, "value").save(tmp_path / "ranks.json")
    assert fanin.compare(tmp_path / "ranks.json", ranks=True).difference.rank == 1


def test_ranks_that_are_equal_differ_in_nothing() -> None:
    for _ in range(4):
        found = fanin.compare(train(-1, ""), ranks=True)
        assert found and found.compared > 8 and not found.unknown


def test_ranks_with_data_of_their_own_share_the_sums_of_leaves() -> None:
    ranks = train(-1, "", own_data=True)
    assert fanin.compare(ranks, ranks=True).difference.what == "contribution"
    found = fanin.compare(ranks, ranks=True, leaves=True)
    assert found and found.compared == 2
    found = fanin.compare(train(2, "leaf", own_data=True), ranks=True, leaves=True)
    assert (found.difference.rank, found.difference.node, found.difference.what) == (2, "w1", "leaf")


def test_two_runs_of_several_ranks_are_compared_rank_by_rank() -> None:
    found = fanin.compare(train(-1, ""), train(2, "value"))
    assert (found.difference.rank, found.difference.maker) == (2, "low1")
    assert str(found).startswith("first difference of b (rank 2) and a (rank 2): pass 1, ")
    assert fanin.compare(train(-1, ""), train(-1, ""))
    with fanin.trace(digests=True) as t:
        fanin.add_n([np.ones(2)] * 2)
    with pytest.raises(ValueError, match="a and b: they are of 3 and 1 ranks"):
        fanin.compare(train(-1, ""), t)
