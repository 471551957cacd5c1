"""A pass backward over two streams: one script on the fake driver, where the checker judges, and on a GPU, where
kernels that spin make what is not waited for late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks

pytestmark = pytest.mark.core

N = 1 << 12


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def m(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    return a_world(request.param, 1, seed=3)


@pytest.fixture(autouse=True)
def mismatch_is_meant() -> Iterator[None]:
    with fanin.set_options(warn_stream_mismatch=False):
        yield
    hooks.fault(None)


def zeros(m: Any) -> Any:
    return m.array(np.zeros(N, "f4"))


class Pass:
    """Two nodes on two streams give 2 and 3, late; their leaf is on the second, the caller on a third."""

    def __init__(self, m: Any) -> None:
        self.m = m
        self.s, self.t, self.c = (m.stream() for _ in range(3))
        self.seen: list[Any] = []
        self.w = fanin.Leaf(zeros(m), stream=self.t, name="w")
        low = [fanin.Node(self.late(c), edges=[(self.w, 0)], stream=on) for c, on in ((2, self.s), (3, self.t))]
        self.top = fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in low], stream=self.c)

    def late(self, value: float) -> Callable[[Any], Any]:
        made = zeros(self.m)

        def fn(g: Any) -> Any:
            now = self.m.current_stream()
            self.seen.append(now)
            self.m.delay(now)
            self.m.fill(now, made, value)
            return made

        return fn

    def run(self) -> Any:
        with fanin.stream(self.c):
            fanin.backward([(self.top, 0, zeros(self.m))], keep_graph=True)
        return self.m.read(self.c, self.w.grad)


@pytest.mark.rule("E4", "S18", "S20")
def test_a_pass_over_two_streams_is_whole_on_the_callers(m: Any) -> None:
    p = Pass(m)
    for passes in (1, 2, 3):
        assert np.all(p.run() == 5 * passes)
    assert p.seen == [p.t, p.s] * 3
    m.synchronize()
    assert m.races == 0, m.race


@pytest.mark.rule("S20")
@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
def test_without_the_waits_at_its_end_the_caller_is_early(m: Any) -> None:
    p = Pass(m)
    hooks.fault("END_WITHOUT_WAIT")
    seen = p.run()
    m.races_are_planted()
    m.synchronize()
    assert m.races > 0 or (m.real and not np.all(seen == 5))


@pytest.mark.rule("K1", "K4", "S20")
def test_a_pass_over_two_streams_is_captured_and_replayed(m: Any) -> None:
    p = Pass(m)
    p.run()
    g = zeros(m)
    m.begin_capture(p.c, "relaxed")
    m.fill(p.c, p.w.grad, 1.0)
    with fanin.stream(p.c):
        fanin.backward([(p.top, 0, g)], keep_graph=True)
    graph = m.end_capture(p.c)
    for _ in range(2):
        m.launch_graph(graph, p.c)
        assert np.all(m.read(p.c, p.w.grad) == 6)
    m.synchronize()
    assert m.races == 0, m.race
    m.destroy_graph(graph)
