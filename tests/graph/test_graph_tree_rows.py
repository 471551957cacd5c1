"""The rows of docs/graph-trees.md, reached by scripted calls that report what they did and why; except T18, an error
(test_graph_trees.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin

Calls = list[tuple[str, tuple[str, ...]]]


class Script:
    """A tree, functions of it by name, and what calls did."""

    def __init__(self, m: Any) -> None:
        self.m = m
        self.tree = fanin.GraphTree(m.place(), memory=1 << 16, limit=1)
        self.x = m.array(np.ones(4))
        self.calls: Calls = []

    def times(self, factor: float, **how: Any) -> Any:
        def f(x: Any) -> Any:
            y = self.m.empty(x.shape, x.dtype)
            here = self.m.current_stream()
            self.m.launch(here, lambda a, b: np.multiply(a, factor, out=b), reads=[x], writes=[y])
            return y

        return self.tree.function(f, **how)

    def doubled_in_place(self, **how: Any) -> Any:
        def doubled_in_place(x: Any) -> None:
            fanin.add_n([x, x], out=x)

        return self.tree.function(doubled_in_place, **how)

    def call(self, f: Any, *operands: Any) -> Any:
        out = f(*operands)
        rules = tuple(r for r in f.last.rules if r not in ("T5", "T17"))
        assert "T17" in f.last.rules and (f.last.reason is None) == (f.last.did == "replayed")
        self.calls.append((f.last.did, rules))
        return out

    def taken(self) -> Calls:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture(params=["sim", "fake", "cpu"])
def script(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Iterator[Script]:
    made = Script(a_world(request.param, 1, seed=3))
    yield made
    vars(made).clear()


def test_warm_ups_recordings_replays_and_branches(script: Script) -> None:
    a, b, c, d = (script.times(k) for k in (2, 3, 5, 7))
    steps = []
    for step in range(4):
        with script.tree.step():
            y = script.call(a, script.x)
            z = script.call(b, y)
            if step >= 2:
                v = script.call(c, y)
                u = script.call(d, v)
        steps.append(script.taken())
    assert z is not u
    assert steps == [
        [("warmed", ("T9",)), ("warmed", ("T4", "T10"))],
        [("recorded", ("T4", "T16")), ("recorded", ("T3", "T16"))],
        [("replayed", ("T1", "T11")), ("replayed", ("T11",)), ("warmed", ("T8",)), ("warmed", ("T4", "T10"))],
        [
            ("replayed", ("T4", "T11")),
            ("replayed", ("T11",)),
            ("recorded", ("T15", "T16")),
            ("recorded", ("T3", "T16")),
        ],
    ]


def test_a_path_of_which_nothing_lives_ends(script: Script) -> None:
    kept, a = script.times(11, keep=True), script.times(2)
    with script.tree.step():
        for _ in range(4):
            script.call(kept, script.x)
    assert script.taken() == [
        ("warmed", ("T9",)),
        ("recorded", ("T4", "T16")),
        ("replayed", ("T2", "T11")),
        ("replayed", ("T11", "T12", "T13")),
    ]
    for _ in range(3):
        with script.tree.step():
            script.call(a, script.x)
    script.taken()
    with script.tree.step():
        script.call(a, script.x)
        script.call(kept, script.x)
    assert script.taken() == [("replayed", ("T11", "T12")), ("replayed", ("T11", "T12", "T13"))]


def test_an_operand_that_moves_is_counted_and_then_copied(script: Script) -> None:
    w = script.times(13, roles="static")
    others = [script.m.array(np.ones(4)) for _ in range(3)]
    reasons = []
    copied = script.m.kind != "fake"  # where kernels of others could be recorded, nothing shows that none writes it
    words = "copies operand 0 from now on" if copied else "runs without a recording: operand 0"
    with pytest.warns(RuntimeWarning, match=words) as warned:
        for o in [script.x, script.x, *others]:
            with script.tree.step():
                script.call(w, o)
                reasons.append(w.last.reason or "")
    assert len(warned) == 1
    if not copied:
        assert [did for did, _ in script.calls] == ["warmed", "recorded", "recorded", "raw", "raw"]
        return
    assert [did for did, _ in script.calls] == ["warmed", "recorded", "recorded", "recorded", "replayed"]
    assert ["T14" in rules for _, rules in script.calls] == [False, False, True, True, False]
    assert ["copied from now on" in reason for reason in reasons] == [False, False, False, True, False]


def test_a_function_that_writes_a_copied_operand_runs_eagerly(script: Script) -> None:
    writes, inc = script.doubled_in_place(), script.doubled_in_place(roles="static")
    with pytest.warns(RuntimeWarning, match="runs without a recording"):
        for _ in range(3):
            with script.tree.step():
                script.call(writes, script.x)
    assert [did for did, _ in script.calls] == ["warmed", "raw", "raw"]
    assert script.taken()[1:] == [("raw", ("T6",))] * 2
    with pytest.warns(RuntimeWarning, match="runs without a recording: operand 0 lay elsewhere more than 1 times"):
        for o in [script.x, script.x, *(script.m.array(np.ones(4)) for _ in range(3))]:
            with script.tree.step():
                script.call(inc, o)
    assert script.calls[-1] == ("raw", ("T7",)) and "cannot be copied" in inc.last.reason


def test_a_function_recorded_twice_after_itself_is_reported(script: Script) -> None:
    a = script.times(2)
    with pytest.warns(RuntimeWarning, match="runs again and again"):
        for _ in range(3):
            with script.tree.step():
                ys = [script.call(a, script.x) for _ in range(4)]
    assert len(ys) == 4 and any("T19" in rules for _, rules in script.calls)
