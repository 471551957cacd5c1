"""take(slot=): one sum comes back, bare, and the other slots stay as they are."""

from __future__ import annotations

import math
import random
import threading
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, explore

F = np.float32([1, 2, 3])


def three(**how: Any) -> fanin.InputBuffer:
    """Slot 0 holds one contribution, slot 1 three of them, slot 2 none."""
    buf = fanin.InputBuffer(3, name="w", **how)
    for slot, n in ((0, 1), (1, 3)):
        for k in range(n):
            buf.add(slot, (k + 1) * F)
    return buf


@pytest.mark.parametrize("budget", [0, None, math.inf])
@pytest.mark.parametrize("plain", [True, False])
def test_one_sum_comes_back_bare_and_the_others_stay(budget: Any, plain: bool) -> None:
    buf = three(budget=budget)
    if not plain:
        buf.add(1, np.zeros((3, 2), np.float32)[:, 0])
    assert buf.take(slot=1).tolist() == (6 * F).tolist()
    assert buf.take(slot=1) is None and buf.take(slot=2) is None
    one, two, three_ = buf.take()
    assert one.tolist() == F.tolist() and two is three_ is None


def test_a_single_contribution_comes_back_as_it_is() -> None:
    buf, g = fanin.InputBuffer(2), F.copy()
    buf.add(0, g)
    assert buf.take(slot=0) is g
    buf.add(0, g)
    assert not np.shares_memory(buf.take(slot=0, writable=True), g)
    buf.add(0, "ab" and np.array("ab", object))
    assert buf.take(slot=np.int64(0)).item() == "ab"


def test_out_scale_and_keys_are_those_of_the_slot() -> None:
    for scale in (None, 2):
        buf, out = three(), np.zeros(3, np.float32)
        buf.add(0, F)
        assert buf.take(slot=1, out=out, scale=scale) is out and out.tolist() == (6 * (scale or 1) * F).tolist()
        assert buf.take(slot=2, out=out) is None and out[0] == 6 * (scale or 1)
        assert buf.take(slot=0, out=None, scale=scale).tolist() == (2 * (scale or 1) * F).tolist()
    buf = fanin.InputBuffer(2)
    for k in (2, 0, 1):
        buf.add(1, np.float32([10.0**k]), key=k)
    x = np.float32([5])
    buf.add(0, x)
    assert buf.take(None, slot=1).tolist() == [111] and buf.take(slot=0, out=x) is x and x[0] == 5


def test_an_error_names_the_slot_and_changes_nothing() -> None:
    buf = three()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"slot": 3}, IndexError, "w: .*from 0 to 2"),
        ({"slot": -1}, IndexError, "w: "),
        ({"slot": "1"}, TypeError, "slot"),
        ({"slot": True}, TypeError, "slot"),
        ({"slot": 1, "out": [np.zeros(3, np.float32)]}, TypeError, "with slot= give the array itself"),
        ({"slot": 1, "out": np.zeros(4, np.float32)}, ValueError, r"w: slot 1: out= has shape \(4,\)"),
        ({"slot": 1, "out": np.zeros(3, np.int32)}, ValueError, r"w: slot 1: out= of dtype int32"),
        ({"slot": 1, "out": 1.0}, TypeError, "w: slot 1: out: expected a dense array"),
        ({"slot": 1, "scale": 1j}, ValueError, "w: slot 1: .*scale"),
        ({"slot": 1, "slots": 1}, TypeError, "no argument 'slots'"),
    ]
    for how, error, words in wrong:
        with pytest.raises(error, match=words):
            buf.take(**how)
    with pytest.raises(TypeError, match="by position"):
        buf.take(None, 1)  # type: ignore[call-overload]
    assert [None if x is None else x.tolist() for x in buf.take()] == [F.tolist(), (6 * F).tolist(), None]


def test_expect_is_checked_for_the_taken_slot_alone_and_stays() -> None:
    buf = fanin.InputBuffer(2, name="w")
    buf.expect(0, 2)
    buf.expect(1, 1)
    for _ in range(2):
        buf.add(1, F)
        assert buf.take(slot=1) is F
        with pytest.raises(ValueError, match="w: slot 0: expected 2 contributions, got 0"):
            buf.take(slot=0)
    buf.add(0, F)
    buf.add(0, F)
    assert buf.ready(0) and buf.take(slot=0).tolist() == (2 * F).tolist() and not buf.ready(0)


def test_statistics_counters_and_explain_are_of_that_slot() -> None:
    buf = three(stats=True)
    assert buf.take(slot=1).tolist() == (6 * F).tolist()
    assert buf.stats(1).sumsq == 36 * 14
    with pytest.raises(ValueError, match="no sum was taken"):
        buf.stats(0)
    assert buf.explain(1) == "w: slot 1: nothing has come yet." and "nothing has come" not in buf.explain(0)
    assert buf.counters.adds == 4 and buf.counters.folds == 1
    buf.add(1, F)
    assert buf.take(slot=0) is not None and buf.stats(0).sumsq == 14


def test_one_buffer_serves_a_graph() -> None:
    """Sums are taken node by node, while contributions to others still arrive; compared with a dict of sums."""
    for seed in range(30):
        draw = random.Random(seed)
        n = draw.randint(2, 60)
        edges = {i: [draw.randrange(i) for _ in range(draw.randint(1, 4))] for i in range(1, n)}
        buf = fanin.InputBuffer(n, budget=draw.choice([0, 64, None, math.inf]))
        shape = draw.choice([(3,), (2, 300), ()])
        grads = {n - 1: np.ones(shape)}
        buf.add(n - 1, np.ones(shape))
        for i in reversed(range(n)):
            got, want = buf.take(slot=i), grads.pop(i, None)
            assert (got is None) == (want is None)
            if got is None:
                continue
            assert np.array_equal(got, want)
            for to in edges.get(i, []):
                g = got * draw.choice([0.5, 1.0, 2.0])
                buf.add(to, g)
                grads[to] = grads[to] + g if to in grads else g
        assert buf.take() == [None] * n


def test_code_that_sums_may_use_the_other_slots() -> None:
    """An object's combine adds to and takes other slots; its own is busy."""
    seen: list[Any] = []

    def combine(old: Any, new: Any) -> Any:
        buf.add(1, F)
        seen.append(buf.take(slot=1))
        buf.add(2, F)
        for call in (lambda: buf.take(slot=0), buf.take, lambda: buf.add(0, {3})):
            with pytest.raises(RuntimeError, match="from within a sum"):
                call()
        return old | new

    buf = fanin.InputBuffer([fanin.Slot(combine=combine), fanin.Slot(), fanin.Slot()])
    buf.add(0, {1})
    buf.add(0, {2})
    assert buf.take(slot=0) == {1, 2} and seen[0] is F and buf.take(slot=2) is F
    buf.add(0, {1})
    assert buf.take() == [{1}, None, None]


@pytest.mark.threads
def test_two_takes_of_each_others_slots_do_not_deadlock() -> None:
    met = threading.Barrier(2)
    failed: list[BaseException] = []

    def combine(me: int) -> Any:
        def run(old: Any, new: Any) -> Any:
            met.wait()
            try:
                buf.take(slot=1 - me)
            except RuntimeError as e:
                failed.append(e)
            return old | new

        return run

    buf = fanin.InputBuffer([fanin.Slot(combine=combine(i)) for i in range(2)])
    for i in range(2):
        buf.add(i, {1})
        buf.add(i, {2})
    got: list[Any] = [None, None]

    def take(i: int) -> None:
        got[i] = buf.take(slot=i)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [{1, 2}, {1, 2}] and len(failed) == 1 and "from within a sum" in str(failed[0])


def test_a_failed_slot_keeps_its_gradients_and_the_others_are_not_checked() -> None:
    def refuse(old: Any, new: Any) -> Any:
        raise ZeroDivisionError

    buf = fanin.InputBuffer([fanin.Slot(combine=refuse), fanin.Slot()])
    buf.add(0, {1})
    buf.add(0, {2})
    buf.add(1, F)
    with pytest.raises(ZeroDivisionError):
        buf.take(slot=0)
    assert buf.take(slot=1) is F
    with pytest.raises(ZeroDivisionError):
        buf.take()


@pytest.mark.parametrize("budget", [0, math.inf])
def test_on_streams_the_sum_is_ready_for_its_taker(w: Any, budget: Any) -> None:
    a, b, c = w.stream(), w.stream(), w.stream()
    buf = fanin.InputBuffer(3, budget=budget, stream=c)
    for k in range(2):
        for slot in range(3):
            with fanin.stream(a if k else b):
                buf.add(slot, w.array(np.full(4, float(slot + k))), key=k)
    mine = buf.take(b, slot=1)
    out = w.array(np.zeros(4))
    assert buf.take(slot=0, out=out, scale=2) is out
    with fanin.stream(b):
        assert mine.numpy().tolist() == [3.0] * 4
    with fanin.stream(c):
        assert out.numpy().tolist() == [2.0] * 4
        rest = buf.take()
        assert rest[0] is rest[1] is None and rest[2].numpy().tolist() == [5.0] * 4


def test_a_poisoned_slot_does_not_keep_the_others_back(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    s = driver.stream()
    buf = fanin.InputBuffer(2, stream=s, budget=math.inf)
    for slot in (0, 1):
        for _ in range(2):
            buf.add(slot, driver.array(np.ones(2)), stream=s)
    driver.fail(0, 1, call="LaunchKernel")
    with pytest.raises(fanin.DeviceError):
        buf.take(slot=0)
    with pytest.raises(RuntimeError, match="slot 0: poisoned"):
        buf.take(slot=0)
    with pytest.raises(RuntimeError, match="slot 0: poisoned"):
        buf.take()
    with fanin.stream(s):
        assert buf.take(slot=1).numpy().tolist() == [2, 2]
    buf.clear()


def test_every_order_of_two_threads_gives_each_slot_its_sum() -> None:
    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer(2, budget=math.inf)
        got: list[Any] = [0.0, 0.0]

        def work(slot: int) -> None:
            buf.add(slot, np.array([1.0]))
            got[slot] = buf.take(slot=slot)[0]

        for i in range(2):
            m.spawn(work, i)
        m.join()
        return got

    report = explore(scenario)
    assert report.ok and report.complete, str(report)

    def meeting(m: Machine) -> Any:
        buf = fanin.InputBuffer(2, budget=math.inf)
        got: list[float] = []

        def take() -> None:
            x = buf.take(slot=0)
            got.append(0.0 if x is None else float(x[0]))

        m.spawn(buf.add, 0, np.array([1.0]))
        m.spawn(buf.add, 0, np.array([2.0]))
        m.spawn(take)
        m.join()
        rest = buf.take(slot=0)
        return sum(got) + (0.0 if rest is None else float(rest[0]))

    report = explore(meeting)
    assert report.ok and report.complete and report.runs > 1, str(report)
