"""Partial gradients (rules P), beside an oracle that adds one number after the other (kit/partial_lists.py)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Partial
from kit.partial_lists import BUDGETS, a_list, fold
from kit.values import bits

pytestmark = pytest.mark.core
Array = np.ndarray[Any, Any]
s_ = np.s_


@pytest.mark.rule("P1", "P2", "P4")
@pytest.mark.parametrize("seed", range(8))
def test_each_element_is_the_left_fold_of_the_terms_that_reach_it(seed: int) -> None:
    draw = random.Random(seed)
    met = 0
    for _ in range(150):
        shape, terms = a_list(draw)
        if not any(isinstance(x, Partial) for x in terms):
            continue
        order = draw.sample(range(len(terms)), len(terms))
        budget = draw.choice(BUDGETS)
        buf = fanin.InputBuffer(1, budget=budget)
        copy, keyed = draw.random() < 0.3, draw.random() < 0.5
        for i in order if keyed else range(len(terms)):
            buf.add(0, terms[i], **({"key": i} if keyed else {}), copy=copy)
            if draw.random() < 0.2:
                _ = buf[0]
        with np.errstate(all="ignore"):
            expected = fold(terms, shape)
        [got] = buf.take()
        met += 1
        assert got.dtype == expected.dtype and got.shape == shape, (seed, shape, terms)
        assert bits(got) == bits(expected), (seed, budget, shape, terms, got, expected)
    assert met > 80
