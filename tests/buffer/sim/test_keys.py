"""Keys in any order: the sums, the ledger (A16) and what is left after an error are those of keys in order, on the fast
path and on the general one.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.sample import sizes

pytestmark = pytest.mark.core


def gap_free(k: int) -> Any:
    return np.float32([k, 1 / (k + 1), -k])


def strided(k: int) -> Any:
    return gap_free(k)[::-1].copy()[::-1]  # takes the general path


def left_fold(keys: list[int]) -> list[float]:
    total = gap_free(min(keys))
    for k in sorted(keys)[1:]:
        total = total + gap_free(k)
    return total.tolist()


def orders(n: int, far: int, r: random.Random) -> list[list[int]]:
    keys = [far * k for k in range(n)]
    mixed = r.sample(keys, n)
    return [keys[::-1], mixed, keys[n // 2 :] + keys[: n // 2], keys[::2] + keys[1::2][::-1]]


@pytest.mark.rule("A15", "A16")
@pytest.mark.parametrize("make", [gap_free, strided])
@pytest.mark.parametrize("far", [1, 1000, 2**53])
@pytest.mark.parametrize("budget", [0, 12 * 40, float("inf")])
@pytest.mark.parametrize("most", sizes(70, 400))
def test_keys_in_any_order_give_the_left_fold_and_a_second_time_is_refused(
    make: Any, far: int, budget: float, most: int
) -> None:
    r = random.Random(7)
    refused = 0
    for n in (3, 70, 400 if far > 1000 else most):
        for which, order in enumerate(orders(n, far, r)):
            buf = fanin.InputBuffer(1, budget=budget)
            for i, k in enumerate(order):
                buf.add(0, make(k // far), key=k)
                if i == n - 1 or (i % 37 == 0 and which % 2):
                    again = order[r.randrange(i + 1)]
                    with pytest.raises(ValueError, match=rf"key {again}\b.*A16"):
                        buf.add(0, make(0), key=again)
                    refused += 1
                if i == n // 2 and which > 1:
                    assert buf[0].tolist() == left_fold([j // far for j in order[: i + 1]])
            assert buf.counters.adds == n
            assert buf.take()[0].tolist() == left_fold([j // far for j in order])
            assert buf.take() == [None]
    assert refused > 10


@pytest.mark.rule("A16")
@pytest.mark.parametrize("make", [gap_free, strided])
def test_a_batch_of_keys_in_any_order_is_added_whole_or_not_at_all(make: Any) -> None:
    r = random.Random(8)
    buf = fanin.InputBuffer(2)
    for n in (5, 90, 300):
        order = r.sample(range(n), n)
        some, rest = order[: n // 3], order[n // 3 :]
        buf.add_many([0] * len(some), [make(k) for k in some], keys=some)
        for wrong in (some[-1], rest[0]):
            with pytest.raises(ValueError, match=rf"key {wrong}\b.*A16"):
                buf.add_many([0] * len(rest) + [1, 0], [make(k) for k in [*rest, 0, 0]], keys=[*rest, 0, wrong])
            assert buf[0].tolist() == left_fold(some) and buf[1] is None
        buf.add_many([0] * len(rest), [make(k) for k in rest], keys=rest)
        assert buf.take()[0].tolist() == left_fold(order) == fanin.add_n([make(k) for k in order], keys=order).tolist()


@pytest.mark.rule("A15")
def test_gradients_added_out_of_order_are_reported_in_key_order() -> None:
    buf = fanin.InputBuffer(1)
    for k in reversed(range(200)):
        buf.add(0, gap_free(k), key=k)
    text = buf.explain(0)
    first, last = text.index("key 0"), text.index("key 199")
    assert first < text.index("key 5") < text.index("key 100") < last
    for k in (300, 250, 200):  # and goes on
        buf.add(0, gap_free(k), key=k)
    assert buf.take()[0].tolist() == left_fold([*range(200), 200, 250, 300])


@pytest.mark.rule("A16")
def test_exact_sums_and_undefined_gradients_keep_their_keys_out_of_order() -> None:
    r = random.Random(9)
    for budget in (0, float("inf")):
        order = r.sample(range(300), 300)
        buf = fanin.InputBuffer(2, accumulate="exact", budget=budget)
        for k in order:
            buf.add(0, np.float32([k]), key=k)
            buf.add(1, None if k % 3 else np.float32([k]), key=k)
        for k in (order[0], order[-1]):
            with pytest.raises(ValueError, match="A16"):
                buf.add(1, None, key=k)
        assert [x.tolist() for x in buf.take()] == [[sum(range(300))], [sum(range(0, 300, 3))]]


def test_passes_begin_anew_after_keys_out_of_order() -> None:
    buf = fanin.InputBuffer(1)
    for _ in range(3):
        for k in reversed(range(150)):
            buf.add(0, gap_free(k), key=k)
        buf.clear()
        for k in reversed(range(150)):
            buf.add(0, gap_free(k), key=k)
        assert buf.take()[0].tolist() == left_fold(list(range(150)))
        buf.add(0, gap_free(1))
        assert buf.take()[0].tolist() == gap_free(1).tolist()


@pytest.mark.rule("A15")
@pytest.mark.parametrize("how", ["plain", "keys", "shuffled", "scale", "stats", "out", "iterator"])
def test_add_n_of_many_small_arrays_is_the_left_fold_and_makes_no_block_for_each(how: str) -> None:
    n, wide = 3000, 5
    arrays = [np.float32([k, 1 / (k + 1), -k, 1, 0.1 * k]) for k in range(n)]
    keys = list(range(n))
    if how == "shuffled":
        random.Random(3).shuffle(keys)
    named: dict[str, Any] = {"keys": keys} if how in ("keys", "shuffled") else {}
    named |= {"scale": {"scale": 0.5}, "stats": {"stats": True}, "out": {"out": np.empty(wide, "f4")}}.get(how, {})
    want = arrays[keys.index(0)].copy()
    for k in range(1, n):
        want += arrays[keys.index(k)] if how == "shuffled" else arrays[k]
    if how == "scale":
        want *= np.float32(0.5)
    before = hooks.memory()[1] if hooks.DEVELOPMENT else 0
    got = fanin.add_n(iter(arrays) if how == "iterator" else arrays, **named)
    made = hooks.memory()[1] - before if hooks.DEVELOPMENT else 0
    sum_ = got[0] if how == "stats" else got
    assert sum_.tobytes() == want.tobytes()
    assert sum_ is named.get("out", sum_)
    assert made < 200, "a block for each contribution, or more: it went by the general path"


def test_add_n_that_leaves_the_fast_path_half_way_sums_all_and_names_what_is_wrong() -> None:
    arrays: list[Any] = [gap_free(k) for k in range(200)]
    assert fanin.add_n([*arrays, strided(200), None, *arrays]).tolist() == fanin.add_n(
        [*map(strided, range(201)), *map(strided, range(200))]
    ).tolist()  # fmt: skip
    with pytest.raises(ValueError, match=r"of shape \(3,\)") as caught:
        fanin.add_n([*arrays, np.ones(4, "f4")])
    assert caught.value.__notes__ == ["it was arrays[200] of add_n"]
    with pytest.raises(ValueError, match=r"key 7\b.*A16") as caught:
        fanin.add_n(arrays, keys=[*range(199), 7])
    assert caught.value.__notes__ == ["it was arrays[199] of add_n"]


def test_the_greatest_key_is_one_like_any_other() -> None:
    greatest = 2**63 - 1
    for budget in (0, None):
        buf = fanin.InputBuffer(1, budget=budget)
        for key in (greatest, greatest - 1):
            buf.add(0, np.ones(2), key=key)
        with pytest.raises(ValueError, match=r"contributed already in this pass \(A16\)"):
            buf.add(0, np.ones(2), key=greatest)
        assert buf.take()[0].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="slot 0: key: expected a non-negative integer that fits 64 bits"):
        buf.add(0, 1.0, key=2**63)
    total = fanin.add_n([np.ones(2), np.ones(2), np.ones(2)], keys=[greatest, 0, greatest - 1])
    assert total.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("far", [3, 100], ids=["shifted", "unsorted"])
@pytest.mark.parametrize("kind", ["few bytes", "strided", "device"])
def test_all_later_keys_are_summed_as_soon_as_the_missing_key_arrives(kind: str, far: int) -> None:
    with fanin.sim.Machine() as m:
        x = {"few bytes": np.ones(3), "strided": np.ones((3, 6)).T[::2], "device": m.array(np.ones(3))}[kind]
        buf = fanin.InputBuffer(1, budget=0)
        for key in range(far, 0, -1):
            buf.add(0, x, key=key)
        assert f"{far} parked" in repr(buf)
        buf.add(0, x, key=0)
        assert "parked" not in repr(buf) and buf.counters.folds == 1
        total = buf.take()[0]
        assert np.all((total if kind != "device" else total.numpy()) == far + 1)
