"""What the fast path carries, under every order of host threads: numbers, copies, donations, undefined gradients,
scaled takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core


@pytest.mark.parametrize("make", [lambda k: float(10**k), lambda k: np.float32([10**k, 1])], ids=["numbers", "arrays"])
@pytest.mark.parametrize("wish", [{}, {"scale": 2.0}, {"writable": True}])
def test_every_order_of_adds_by_keys_gives_one_sum(make: Any, wish: dict[str, Any]) -> None:
    def scenario(m: Any) -> Any:
        buf = fanin.InputBuffer(1)
        m.spawn(lambda: buf.add(0, make(0), key=0))
        m.spawn(
            lambda: (
                buf.add(0, None, key=1),
                buf.add(0, make(2), key=2, **({"copy": True} if "scale" in wish else {"donate": True})),
            )
        )
        m.join()
        return np.asarray(buf.take(**wish)[0]).tolist(), buf.counters.adds

    report = fanin.sim.explore(scenario)
    assert report.ok, report.errors
    assert report.runs > 1
