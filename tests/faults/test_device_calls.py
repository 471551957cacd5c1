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
