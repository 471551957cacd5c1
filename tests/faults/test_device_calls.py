"""Every call of the device fails once: the slot is as before or poisoned until clear(), the buffer can be thrown away,
nothing leaks.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks

pytestmark = pytest.mark.core


def one_pass(m: fanin.sim.Machine, budget: Any, fail: int, memory: bool) -> tuple[str, bool]:
    """Two producers, a consumer; device call `fail` of the pass fails. Returns the outcome."""
    p, q, c = (m.stream() for _ in range(3))
    buf = fanin.InputBuffer([fanin.Slot(dtype="float32")], stream=c, budget=budget)
    g = [m.array(np.full(4, k, dtype)) for k, dtype in ((1, np.float32), (2, np.float64), (4, np.float32))]
    hooks.fail_call(m, fail, memory)
    happened = "nothing"
    try:
        for k, (x, s) in enumerate(zip(g, (p, q, p), strict=True)):
            buf.add(0, x, key=k, stream=s)
        result = buf.take()[0]
    except fanin.DeviceOutOfMemoryError:
        happened = "no memory"
    except fanin.DeviceError:
        happened = "failed"
    finally:
        hooks.fail_call(m, -1)
    if happened == "nothing":
        with fanin.stream(c):
            assert result.numpy().tolist() == [7] * 4
        return happened, False
    poisoned = False
    try:
        buf.ready(0)
    except RuntimeError as e:
        poisoned = "poisoned" in str(e)
    except ValueError:
        pass
    if poisoned:
        for call in (buf.take, lambda: buf[0], lambda: buf.add(0, g[0], key=9)):
            with pytest.raises(RuntimeError, match="poisoned until clear"):
                call()
    buf.clear()
    buf.add(0, g[0], stream=p)
    buf.add(0, g[2], stream=q)
    [again] = buf.take()
    with fanin.stream(c):
        assert again.numpy().tolist() == [5] * 4
    return happened, poisoned


@pytest.mark.parametrize("memory", [False, True], ids=["a call fails", "no device memory"])
@pytest.mark.parametrize("budget", [0, None])
def test_a_failed_device_call_poisons_at_most_its_slot(budget: Any, memory: bool) -> None:
    gc.collect()
    baseline = hooks.memory()[0]
    outcomes: dict[str, int] = {}
    poisonings = 0
    for fail in range(200):
        with fanin.sim.Machine(devices=1) as m:
            happened, poisoned = one_pass(m, budget, fail, memory)
        outcomes[happened] = outcomes.get(happened, 0) + 1
        poisonings += poisoned
        if outcomes.get("nothing", 0) > 30:
            break
    del m
    gc.collect()
    assert hooks.memory()[0] == baseline
    assert outcomes.get("no memory" if memory else "failed", 0) > 5, outcomes
    assert memory or poisonings > 0
    assert outcomes.get("nothing", 0) > 0, "the plan ran out of calls to fail"


def batch(m: fanin.sim.Machine, fail: int) -> tuple[bool, list[Any]]:
    """Add two gradients to each of three slots that have one; device call `fail` of add_many fails. Return whether it
    raised, and of each slot the sum, or "poisoned".
    """
    p, q, c = (m.stream() for _ in range(3))
    buf = fanin.InputBuffer(3, stream=c, budget=0)
    for slot in range(3):
        buf.add(slot, m.array(np.full(4, 1, np.float32)), stream=p)
    g = [m.array(np.full(4, 2, np.float32)) for _ in range(6)]
    q.wait(p)
    hooks.fail_call(m, fail, False)
    raised = False
    try:
        buf.add_many([0, 1, 2] * 2, g, stream=q)
    except fanin.DeviceError:
        raised = True
    finally:
        hooks.fail_call(m, -1)
    found: list[Any] = []
    for slot in range(3):
        try:
            total = buf.take(slot=slot)
        except RuntimeError as e:
            assert "poisoned until clear" in str(e)
            found.append("poisoned")
        else:
            with fanin.stream(c):
                found += set(total.numpy().tolist())
    return raised, found


def test_a_batch_that_fails_adds_nothing_or_poisons_a_slot() -> None:
    """A caller that adds again after the error gets no sum that has a gradient twice."""
    outcomes: set[str] = set()
    for fail in range(100):
        with fanin.sim.Machine(devices=1) as m:
            raised, found = batch(m, fail)
        assert set(found) <= {1, 5, "poisoned"}, found
        if raised:
            assert found == [1] * 3 or "poisoned" in found, (fail, found)
        outcomes.add(f"raised, {found}" if raised else str(found))
    assert {"[5.0, 5.0, 5.0]", "raised, ['poisoned', 5.0, 5.0]"} <= outcomes, outcomes


def partial_pass(m: fanin.sim.Machine, fail: int, memory: bool) -> str:
    """Partial gradients that meet, and a dense one behind them; device call `fail` fails. Returns the outcome."""
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer([fanin.Slot(dtype="float32")], stream=c)
    parts = [fanin.Partial(m.array(np.full(2, k, np.float32)), at, 4) for k, at in ((1, np.s_[:2]), (2, np.s_[1:3]))]
    last = m.array(np.full(4, 4, np.float32))
    happened = "nothing"
    hooks.fail_call(m, fail, memory)
    try:
        for k, x in enumerate([*parts, last]):
            buf.add(0, x, key=k, stream=p)
        result = buf.take()[0]
    except fanin.DeviceOutOfMemoryError:
        happened = "no memory"
    except fanin.DeviceError:
        happened = "failed"
    finally:
        hooks.fail_call(m, -1)
    if happened == "nothing":
        with fanin.stream(c):
            assert result.numpy().tolist() == [5, 7, 6, 4]
        return happened
    buf.clear()
    buf.add(0, parts[0], stream=p)
    buf.add(0, parts[1], stream=p)
    with fanin.stream(c):
        assert buf.take()[0].numpy().tolist() == [1, 3, 2, 0]
    return happened


@pytest.mark.rule("P1")
@pytest.mark.parametrize("memory", [False, True], ids=["a call fails", "no device memory"])
def test_a_device_call_of_a_partial_sum_that_fails_loses_nothing_else(memory: bool) -> None:
    gc.collect()
    baseline, outcomes = hooks.memory()[0], []
    for fail in range(60):
        with fanin.sim.Machine() as m:
            outcomes.append(partial_pass(m, fail, memory))
        if outcomes[-1] == "nothing":
            break
    del m
    gc.collect()
    assert outcomes[-1] == "nothing" and len(outcomes) > 3, outcomes
    assert hooks.memory()[0] == baseline
