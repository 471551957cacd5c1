"""The law of ranks: steps leave the same weights for any number of ranks, dealing of micro-batches and buckets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from fanin import dist
from kit.ranks import MICRO, alone, train
from kit.sample import every, sizes


def on_ranks(
    n: int, order: Any, bucket_bytes: int, owner: Callable[[int], int], steps: int, nodes: Any = 1
) -> list[bytes]:
    return dist.threads(n, lambda group: train(group, order, bucket_bytes, owner, steps), nodes=nodes, timeout=None)


#: In the sample the bits depend on the number of ranks where sums are made in the order of ranks.
SAMPLE, STEPS = (1, 2, 3), 2


@pytest.mark.parametrize(
    ("numbers", "buckets", "steps"),
    sizes((SAMPLE, (1, 25 << 20), STEPS), ((1, 2, 3, 4, 8), (1, 1000, 25 << 20), 20)),
)
@pytest.mark.parametrize("order", ["exact", "key"])
def test_weights_after_some_steps_are_those_of_one_process(
    order: str, numbers: tuple[int, ...], buckets: tuple[int, ...], steps: int
) -> None:
    expected = alone(order, steps)
    dealings: list[Callable[[int], Callable[[int], int]]] = [
        lambda n: lambda k: k % n,
        lambda n: lambda k: n - 1 - k * n // MICRO,
    ]
    for n, bucket, dealing in itertools.product(numbers, buckets, dealings):
        assert on_ranks(n, order, bucket, dealing(n), steps) == [expected] * n, (n, bucket)


@pytest.mark.parametrize("steps", sizes(3, 20))
@pytest.mark.parametrize("order", ["exact", "key"])
def test_weights_after_steps_with_plans_are_those_of_one_process(order: str, steps: int) -> None:
    """Each rank has one micro-batch, so from the second step on no bucket has a header."""

    def rank(group: dist.Group) -> tuple[bytes, int]:
        return train(group, order, bucket, lambda k: k, steps), group.counters.planned

    expected = alone(order, steps)
    for bucket, buckets in ((1000, 4), (25 << 20, 1)):
        planned = (steps - 1) * buckets
        for weights, without_headers in dist.threads(MICRO, rank, timeout=None):
            assert weights == expected and without_headers >= planned, (bucket, without_headers)


@pytest.mark.parametrize("steps", sizes(STEPS, 20))
@pytest.mark.parametrize(("n", "nodes"), every(3, [(4, 2), (8, 2), (8, 4), (8, [0, 1] * 4)]))
@pytest.mark.parametrize("order", ["exact", "key"])
def test_weights_after_some_steps_in_two_levels_are_those_of_one_process(
    order: str, n: int, nodes: Any, steps: int
) -> None:
    expected = alone(order, steps)
    for bucket, dealing in itertools.product((1000, 25 << 20), (lambda k: k % n, lambda k: n - 1 - k * n // MICRO)):
        assert on_ranks(n, order, bucket, dealing, steps, nodes) == [expected] * n, (n, bucket)


def test_the_law_of_ranks_finds_another_order() -> None:
    """By rank the bits change with the dealing: the law above can fail."""
    assert len({on_ranks(n, "rank", 1000, lambda k, n=n: k % n, STEPS)[0] for n in SAMPLE}) > 1
