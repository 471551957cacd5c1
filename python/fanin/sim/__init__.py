"""A simulated machine of devices with streams, which runs work late, in any allowed order, and finds races.

    m = fanin.sim.Machine(devices=2, seed=0)
    with m:                                               # "sim:0" names its first device
        a, b = m.stream(), m.stream()
        x, y = m.array(np.ones(4)), m.empty(4)
        m.launch(a, lambda x, y: np.multiply(x, 2, out=y), reads=[x], writes=[y], name="double")
        b.wait(a.record())                                # without it, the next line is a race
        m.launch(b, lambda y: ..., reads=[y])

Streams and events have CUDA's meaning. Nothing runs when it is queued; `synchronize`, `numpy()` and `step` run queued
work in an order that the seed picks. Each access is checked for happens-before when it is queued, so a race is found
whatever order was picked. One run has one order of host threads: `spawn` starts threads that the machine runs one at a
time, and `explore` tries every order of them.
"""

from __future__ import annotations

from .._core import Array
from .machine import Clock, DeadlockError, Machine, StuckError, Thread
from .search import Report, explore, replay, scenario, scenarios

__all__ = [
    "Array",
    "Clock",
    "DeadlockError",
    "Machine",
    "Report",
    "StuckError",
    "Thread",
    "explore",
    "replay",
    "scenario",
    "scenarios",
]

for _one in (Clock, DeadlockError, Machine, Report, StuckError, Thread, explore, replay, scenario, scenarios):
    _one.__module__ = __name__  # the module where users find it
