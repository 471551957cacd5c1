"""A race on the simulated device makes another sum of equal contributions, and `fanin.compare` names it (G3)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from kit.sample import sizes

pytestmark = [pytest.mark.core, pytest.mark.rule("G2", "G3")]


def run(seed: int, schedule: int, *out: str, spoil: bool = False) -> tuple[Any, Any]:
    """The trace of a pass whose nodes are on streams of their own, and the gradient of the leaf."""
    r = random.Random(seed)
    with fanin.set_options(warn_stream_mismatch=False), Machine(check=False, seed=schedule) as m:
        m.leave_out(*out)
        factors = [r.uniform(-2, 2) for _ in range(r.randint(2, 4))]
        w = fanin.Leaf(m.array(np.zeros(16)), name="w", stream=m.stream())
        low = [
            fanin.Node(times(m, c + (1e-9 if spoil and i == 1 else 0)), edges=[(w, 0)], name=f"n{i}", stream=m.stream())
            for i, c in enumerate(factors)
        ]
        top = fanin.Node(lambda g: (g,) * len(low), edges=[(n, 0) for n in low], name="top", stream=m.stream())
        with fanin.trace(digests=True) as t:
            fanin.backward([(top, 0, m.array(np.linspace(0.1, 1, 16)))])
        m.synchronize()
        return t, w.grad.numpy()


def times(m: Machine, c: float) -> Any:
    def fn(g: Any) -> Any:
        made = m.empty(16)
        stream = fanin.current_stream("sim:0")
        m.launch(stream, lambda v, to: np.multiply(v, c, out=to), reads=[g], writes=[made], us=50)
        return made

    return fn


@pytest.mark.parametrize("count", sizes(10, 60))
def test_a_race_is_a_sum_that_differs_where_its_contributions_do_not(count: int) -> None:
    seen: Counter[str] = Counter()
    seed = 0
    while seen["race"] < count:
        seed += 1
        assert seed < 40 * count, seen
        right, expected = run(seed, seed)
        raced, got = run(seed, seed + 1, "S12.wait")
        found = fanin.compare(right, raced)
        differs = got.tobytes() != expected.tobytes()
        assert bool(found) != differs, f"seed {seed}: {found}"
        if found:
            seen["equal"] += 1
            continue
        d = found.difference
        assert (d.node, d.what, d.reason) == ("w", "sum", "value"), f"seed {seed}: {found}"
        assert "a race (fanin.sim finds it)" in str(found)
        seen["race"] += 1


@pytest.mark.parametrize("count", sizes(10, 60))
def test_equal_runs_under_other_schedules_differ_in_nothing(count: int) -> None:
    for seed in range(count):
        one = run(seed, 3 * seed)[0]
        found = fanin.compare(one, run(seed, 3 * seed + 1)[0])
        assert found and found.unknown == 0 and found.compared >= 8, f"seed {seed}: {found}"


def test_a_node_on_a_stream_that_makes_another_gradient_is_named() -> None:
    found = fanin.compare(run(1, 1)[0], run(1, 2, spoil=True)[0])
    assert found.difference.maker == "n1"


def test_digests_add_no_wait_and_no_record() -> None:
    """A wait would hide the race that is looked for; copies are read when the trace ends."""

    def ordered(digests: bool) -> list[str]:
        with Machine() as m:
            streams = [m.stream() for _ in range(3)]
            with fanin.trace(digests=digests) as t:
                buf = fanin.InputBuffer(1, stream=streams[0])
                for k, s in enumerate(streams):
                    x = m.empty(8)
                    m.launch(s, lambda v, k=k: v.fill(k), writes=[x])
                    buf.add(0, x, key=k, stream=s)
                buf.take()
                return [line.kind for line in t.lines if line.kind in ("wait", "record", "sync", "elided")]

    assert ordered(True) == ordered(False) != []


def test_a_digest_of_device_memory_is_that_of_the_same_array_on_the_host() -> None:
    def one(make: Any) -> list[tuple[int, str]]:
        with fanin.trace(digests=True) as t:
            buf = fanin.InputBuffer(1)
            buf.add(0, make(np.arange(12.0).reshape(3, 4)), key=0)
            buf.add(0, make(np.ones((3, 4))), key=1)
            buf.take()
        return [(line.digest, line.label) for line in t.lines if line.kind == "digest"]

    with Machine() as m:
        assert one(m.array) == one(np.array)
    with fanin.trace(digests=True) as t, Machine() as m:  # the machine ends before the trace
        buf = fanin.InputBuffer(1)
        buf.add(0, m.array(np.ones(3)))
    assert [line.digest != 0 for line in t.lines if line.kind == "digest"] == [True]


def test_what_is_captured_or_recorded_has_no_digest_and_says_so() -> None:
    with Machine() as m:
        s, x = m.stream(), m.array(np.ones(3))
        with fanin.trace(digests=True) as t:
            m.begin_capture(s)
            buf = fanin.InputBuffer(1, stream=s)
            buf.add(0, x, stream=s)
            buf.take()
            m.end_capture(s)
    labels = [line.label for line in t.lines if line.kind == "digest"]
    assert labels == ["float64 (3,): no digest: recorded"] * 2
    tree = fanin.GraphTree("cpu", memory=1 << 16)
    step = tree.function(lambda a: fanin.add_n([a, a, a]))
    with fanin.trace(digests=True) as t:
        for _ in range(3):
            with tree.step():
                step(np.ones(4))
    for line in t.lines:
        if line.kind == "digest":
            assert line.digest or "no digest: recorded" in line.label
