"""Overlap sets of tensors beside PyTorch's own, and beside their bytes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fanin import analysis
from fanin.analysis import overlapping

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.__version__ < (2, 13):
    pytest.skip(f"compared with torch 2.13 and newer, this is {torch.__version__}", allow_module_level=True)

import logging  # noqa: E402

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def random_view(rng: random.Random, base: Any) -> Any:
    """A view of a base of some axes: blocks, steps, transposes, columns, diagonals, strided at will, empty, 0-d."""
    x = base
    for _ in range(rng.randint(1, 3)):
        what = rng.randrange(8)
        if x.ndim == 0:
            break
        axis = rng.randrange(x.ndim)
        n = x.shape[axis]
        if what <= 2:
            a = rng.randint(0, n)
            x = x.narrow(axis, a, rng.randint(0 if rng.random() < 0.1 else min(1, n - a), n - a))
        elif what == 3 and n:
            x = x[(slice(None),) * axis + (slice(rng.randrange(n), None, rng.randint(1, 3)),)]
        elif what == 4 and n:
            x = x.select(axis, rng.randrange(n))
        elif what == 5:
            x = x.transpose(axis, rng.randrange(x.ndim))
        elif what == 6:
            x = x.unsqueeze(axis) if x.ndim < 4 else x
        elif what == 7 and n:
            x = x.narrow(axis, 0, 1).expand(*x.shape[:axis], 2, *x.shape[axis + 1 :])
    return x


def random_set(rng: random.Random) -> list[Any]:
    shape = rng.choice(((8, 9), (5, 6, 7), (30,), (4, 12), (6, 1, 5)))
    size = int(np.prod(shape))
    base = torch.zeros(size, dtype=torch.float32).reshape(shape)
    found = []
    for _ in range(rng.randint(2, 5)):
        which = rng.random()
        if which < 0.06 and found:
            found.append(found[0])
        elif which < 0.15:
            a = rng.randrange(size * 4)
            found.append(base.view(-1).view(torch.int8)[a : a + rng.randint(0, 40)])
        elif which < 0.5 and len(shape) == 2:  # blocks of rows, which rule 6 is about
            h, w = shape
            i, j = rng.randrange(h), rng.randrange(w)
            found.append(base[i : i + rng.randint(1, h - i), j : j + rng.randint(1, w - j)])
        else:
            found.append(random_view(rng, base))
    return found


def bytes_of(x: Any) -> set[int]:
    """The bytes that a view touches, counted one by one."""
    size = x.element_size()
    reach = (
        range(0)
        if x.numel() == 0
        else [sum(i * s for i, s in zip(at, x.stride(), strict=True)) for at in np.ndindex(*x.shape)]
    )
    return {(x.storage_offset() + e) * size + k for e in reach for k in range(size)}


def compare_sets(seeds: range, brute: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        views = random_set(rng)
        theirs = set(torch._C._dynamo.guards.compute_overlapping_tensors(views, symbolic=False))
        ours = analysis.compute_overlapping_inputs(views, compat="torch")
        assert ours == theirs, (seed, [(v.shape, v.stride(), v.storage_offset(), v.dtype) for v in views])
        exact = analysis.compute_overlapping_inputs(views)
        found = analysis.explain_overlap_differences(views)
        if not found:
            assert exact == ours, seed
        counts["sets"] += 1
        counts["sets that differ"] += exact != ours
        for x in found:
            counts[f"{x.torch}, in truth {x.exact}, by {x.rule}"] += 1
            assert x.rule in overlapping.WHY, (seed, x)
        if seed < brute:
            touched = [bytes_of(v) for v in views]
            pairs = {(i, j) for i, j in itertools.combinations(range(len(views)), 2) if touched[i] & touched[j]}
            assert exact == {i for pair in pairs for i in pair}, seed
            for i, j in itertools.combinations(range(len(views)), 2):
                counts["pairs that overlap"] += (i, j) in pairs
                counts["pairs that do not"] += (i, j) not in pairs
                said = next((x for x in found if x.pair == (i, j)), None)
                if said:
                    assert (said.exact == "overlap") == ((i, j) in pairs) and said.torch != said.exact
    return counts


def test_the_overlap_set_of_pytorch_is_reproduced_and_each_difference_to_the_truth_has_a_rule() -> None:
    counts = compare_sets(range(10_000), brute=300)
    print(f"seeds 0 to 9999: {dict(counts)}")
    for what in (
        "disjoint, in truth overlap, by 6c",
        "overlap, in truth disjoint, by 7",
        "overlap, in truth disjoint, by 1",
    ):
        assert counts[what] > 0, what
    assert counts["disjoint, in truth overlap, by units"] and counts["overlap, in truth disjoint, by units"]
    assert counts["pairs that overlap"] > 100 and counts["pairs that do not"] > 100
    assert counts["sets that differ"] > 100


def test_fake_and_meta_tensors_are_compared_within_their_storage() -> None:
    for make in (lambda x: FakeTensorMode().from_tensor(x), lambda x: x.to("meta")):
        base, other = make(torch.zeros(8, 9)), make(torch.zeros(8, 9))
        x, y, z = base[0:4, 0:4], base[2:6, 0:4], other[0:4]
        assert analysis.compute_overlapping_inputs([x, y, z]) == {0, 1}
        assert analysis.compute_overlapping_inputs([x, y], compat="torch") == set()
    mixed = torch.zeros(8)
    assert analysis.compute_overlapping_inputs([mixed, mixed.numpy()]) == {0, 1}


class Mine(torch.Tensor):  # type: ignore[misc,name-defined]
    """A subclass without a mind of its own."""


def test_a_tensor_of_a_subclass_shares_its_memory_with_tensors_and_arrays_beside_it() -> None:
    x = torch.zeros(8)
    mine, fake = x[:4].as_subclass(Mine), FakeTensorMode().from_tensor(torch.zeros(3))
    for others in ([], [fake]):  # all in memory, or one of them nowhere
        asked = [mine, x[3:], torch.zeros(2), *others]
        assert analysis.compute_overlapping_inputs(asked) == {0, 1}
        assert analysis.compute_overlapping_inputs([x.numpy(), *asked[2:], mine], [0, *range(1, len(asked))]) == {
            0,
            len(asked) - 1,
        }
    with pytest.raises(TypeError, match="strided torch tensors, got a Tensor at 1"):
        analysis.compute_overlapping_inputs([x, torch.nested.nested_tensor([x])])
    with pytest.raises(TypeError, match="strided torch tensors, got a bytearray at 0"):
        analysis.compute_overlapping_inputs([bytearray(2), x], compat="torch")
