"""Graph trees on a GPU: one script on the fake driver, where the checker judges, and on a GPU, where kernels that spin
make what is not waited for late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core

N = 1 << 12


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def m(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    return a_world(request.param, 1, seed=11)


def full(m: Any, value: float) -> Any:
    return m.array(np.full(N, value, "f4"))


def value_of(x: Any) -> float:
    seen = x.numpy()
    assert (seen == seen[0]).all(), "not all of it was there"
    return float(seen[0])


def test_steps_are_warmed_recorded_and_replayed_after_late_work(m: Any) -> None:
    s = m.stream()
    tree = fanin.GraphTree(m.place(), memory=1 << 20)
    f = tree.function(lambda x, w: fanin.add_n([x, w, w]), roles=("copy", "static"))
    w, x, did = full(m, 10), full(m, 0), []
    with fanin.stream(s):
        for i in range(5):
            m.delay(s)
            m.fill(s, x, i)
            m.delay(s)
            m.fill(s, w, 10 * i)
            with tree.step():
                assert value_of(f(x, w)) == 21 * i
                did.append(f.last.did)
    assert did == ["warmed", "recorded", "replayed", "replayed", "replayed"]
    assert tree.stats.driver_bytes >= 0
    tree.close()


def test_a_sum_over_streams_has_the_bits_of_the_sequential_sum(m: Any) -> None:
    rng = np.random.default_rng(7)
    sides = [m.stream() for _ in range(3)]
    tree = fanin.GraphTree(m.place(), memory=1 << 20)

    def micro(*operands: Any) -> None:
        *xs, g = operands
        here, buf = m.current_stream(), fanin.InputBuffer(1, name="micro")
        for i, x in enumerate(xs):
            s = sides[i % len(sides)]
            s.wait(here)
            with fanin.stream(s):
                y = fanin.add_n([x, x])
            buf.add(0, y, key=i, stream=s)
            here.wait(s)
        (total,) = buf.take(stream=here)
        fanin.add_n([g, total], out=g)

    f = tree.function(micro, roles=("copy",) * 5 + ("accumulate",))
    want, g = np.zeros(N, "f4"), full(m, 0)
    for _ in range(6):
        xs = [rng.standard_normal(N).astype("f4") for _ in range(5)]
        with tree.step():
            f(*(m.array(x) for x in xs), g)
        total = xs[0] + xs[0]
        for x in xs[1:]:
            total = total + (x + x)
        want = want + total
    assert f.last.did == "replayed"
    assert g.numpy().tobytes() == want.tobytes()
    tree.close()


def test_branches_share_memory_and_an_ended_handle_raises(m: Any) -> None:
    tree = fanin.GraphTree(m.place(), memory=1 << 20)
    a, b, c = (tree.function(lambda x, k=k: fanin.add_n([x] * k)) for k in (2, 3, 5))
    for i in range(8):
        with tree.step():
            y = a(full(m, i + 1))
            z = (b if i % 2 else c)(y)
            assert value_of(z) == (i + 1) * (6 if i % 2 else 10)
    assert a.last.did == b.last.did == c.last.did == "replayed"
    with pytest.raises(RuntimeError, match="which ended at"):
        z.numpy()
    assert tree.stats.high_water == 2 * N * 4
    tree.close()


def test_a_recording_that_is_broken_is_ended_and_made_the_next_time(m: Any) -> None:
    tree, x, breaks = fanin.GraphTree(m.place(), memory=1 << 20), full(m, 1), [False]

    def f(x: Any) -> Any:
        y = fanin.add_n([x, x])
        if breaks[0]:
            y.numpy()
        return y

    g = tree.function(f)
    for broken in (False, True, False, False):
        breaks[0] = broken
        with tree.step():
            if broken:
                with pytest.raises(fanin.CaptureError, match="captured"):
                    g(x)
            else:
                assert value_of(g(x)) == 2
    assert g.last.did == "replayed"
    tree.close()


def test_a_pipeline_reads_on_the_host_between_pieces_that_are_replayed_after_late_work(m: Any) -> None:
    """What the host reads, the branch that it takes, and a held output, which is copied when the step ends."""
    s = m.stream()
    tree = fanin.GraphTree(m.place(), memory=1 << 20)
    double = tree.function(lambda x: fanin.add_n([x, x]), keep="held")
    add = tree.function(lambda y, w: fanin.add_n([y, w]), roles=("auto", "static"))
    triple = tree.function(lambda y: fanin.add_n([y, y, y]))
    w, x, held = full(m, 1), full(m, 0), []

    def body(x: Any) -> Any:
        y = double(x)
        seen = yield y
        assert (seen == seen[0]).all()
        if seen[0] == 4:
            held.append(y)
            return None
        m.delay(s)
        m.fill(s, w, seen[0] * 10)
        z = add(y, w) if seen[0] > 4 else triple(y)
        del y
        both = yield (z,)
        assert (both[0] == both[0][0]).all()
        return z

    step = tree.pipeline(body)
    got = []
    with fanin.stream(s):
        for i in (0, 3, 1, 4, 2, 5, 0, 2, 6):
            m.delay(s)
            m.fill(s, x, i)
            got.append(step(x))
        want = [None if i == 2 else 22 * i if i > 2 else 6 * i for i in (0, 3, 1, 4, 2, 5, 0, 2, 6)]
        assert [None if y is None else value_of(y) for y in got] == want
        assert [value_of(y) for y in held] == [4, 4]
    assert {did for _, did in step.last} == {"replayed"}
    tree.close()


def test_pieces_of_few_kernels_run_plainly(m: Any) -> None:
    tree = fanin.GraphTree(m.place(), memory=1 << 20)
    f = tree.function(lambda x: fanin.add_n([x, x]), min_kernels=4)
    g = tree.function(
        lambda x: fanin.add_n([fanin.add_n([fanin.add_n([fanin.add_n([x, x]), x]), x]), x]), min_kernels=4
    )
    for i in range(6):
        with tree.step():
            assert value_of(g(f(full(m, i)))) == 10 * i
    assert (f.last.did, g.last.did) == ("raw", "replayed")
    assert [(r.function, r.kernels) for r in tree.recordings] == [("<lambda>", 4)]
    tree.close()
