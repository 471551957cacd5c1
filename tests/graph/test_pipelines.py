"""Pipelines: steps of recorded pieces with host parts between them (rules R). On the simulated device, on the CUDA
backend over the fake driver, and on the CPU.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.graph import Pipeline, Stop
from kit.graph_trees import did, launch, scaled, tree_on


def np_of(x: Any) -> list[float]:
    return np.asarray(x.numpy()).tolist()  # type: ignore[no-any-return]


def added(m: Any, name: str = "added") -> Callable[..., Any]:
    """A function of two operands: their sum."""

    def f(x: Any, y: Any) -> Any:
        z = m.empty(x.shape, x.dtype)
        launch(m, lambda a, b, out: np.add(a, b, out=out), [x, y], [z])
        return z

    f.__name__ = name
    return f


def descends(m: Any) -> Callable[..., Any]:
    """w -= scale * g, in place."""

    def descend(w: Any, g: Any, scale: Any) -> None:
        launch(m, lambda a, b, s, out: np.subtract(a, s * b, out=out), [w, g, scale], [w])

    return descend


def squared(m: Any) -> Callable[..., Any]:
    def norm(g: Any) -> Any:
        y = m.empty((1,), np.float64)
        launch(m, lambda a, out: out.fill(np.sqrt(np.sum(a * a))), [g], [y])
        return y

    return norm


def training(m: Any, tree: Any) -> tuple[Pipeline, Any, list[Any]]:
    """A step of three pieces: a gradient, its norm, an update; it ends early where the loss is a NaN."""

    def gradient(x: Any, w: Any) -> Any:
        loss, g = m.empty((1,), np.float64), m.empty(w.shape, np.float64)
        launch(m, lambda a, b, out: out.fill(np.sum((a - b) ** 2)), [x, w], [loss])
        launch(m, lambda a, b, out: np.multiply(b - a, 2.0, out=out), [x, w], [g])
        return loss, g

    pieces = [
        tree.function(gradient, roles=("copy", "static")),
        tree.function(squared(m)),
        tree.function(descends(m), roles=("static", "auto", "copy")),
    ]
    seen: list[Any] = []

    def train(x: Any, w: Any) -> Generator[Any, Any, Any]:
        loss, g = pieces[0](x, w)
        value = yield loss
        seen.append(float(value[0]))
        if np.isnan(value[0]):
            return None
        n = yield pieces[1](g)
        pieces[2](w, g, m.array(np.array([min(1.0, 1.0 / n[0])]) * 0.25))
        return loss

    return tree.pipeline(train), m.array(np.zeros(4)), seen


def eager(w: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> float:
    """The same step in NumPy."""
    loss = float(np.sum((x - w) ** 2))
    if not np.isnan(loss):
        g = (w - x) * 2.0
        w -= 0.25 * min(1.0, 1.0 / np.sqrt(np.sum(g * g))) * g
    return loss


# ---- pieces and host parts


@pytest.mark.rule("R1", "R4")
def test_a_step_with_host_parts_is_recorded_in_pieces_and_gives_the_numbers_of_the_eager_step(m: Any) -> None:
    tree = tree_on(m)
    step, w, seen = training(m, tree)
    want = np.zeros(4)
    losses = []
    for i in range(8):
        x = np.arange(4.0) + i
        losses.append(eager(want, x))
        loss = step(m.array(x), w)
        assert np_of(loss) == [losses[-1]]
        kinds = ["warmed", "recorded", *["replayed"] * 6]
        assert step.last == tuple((name, kinds[i]) for name in ("gradient", "norm", "descend"))
    assert w.numpy().tolist() == want.tolist() and seen == losses
    assert [s.replayed for s in step.stats] == [6, 6, 6] and tree.stats.nodes == 3
    assert [f.name for f in step.pieces] == ["gradient", "norm", "descend"]
    assert step.explain().splitlines()[0] == "train: 3 pieces"
    assert step.explain().splitlines()[2].startswith("piece 1: norm was replayed [T11")


@pytest.mark.rule("R1")
def test_each_piece_is_a_child_of_the_piece_before(m: Any) -> None:
    tree = tree_on(m)
    step, w, _ = training(m, tree)
    for i in range(3):
        step(m.array(np.arange(4.0) + i), w)
    assert [(r.function, r.parent) for r in tree.recordings] == [("gradient", None), ("norm", 0), ("descend", 1)]


@pytest.mark.rule("R4")
def test_a_step_that_ends_early_is_a_step_and_the_next_one_is_replayed(m: Any) -> None:
    tree = tree_on(m)
    step, w, _ = training(m, tree)
    want = np.zeros(4)
    for i in range(8):
        x = np.arange(4.0) + (np.nan if i == 5 else i)
        eager(want, x)
        assert (step(m.array(x), w) is None) == (i == 5)
        assert len(step.last) == (1 if i == 5 else 3)
    assert {d for _, d in step.last} == {"replayed"}
    assert w.numpy().tolist() == want.tolist()


@pytest.mark.rule("R2")
def test_the_parts_of_a_list_get_what_the_one_before_returned(m: Any) -> None:
    tree = tree_on(m)
    seen = []

    def pair(x: Any) -> Any:
        return scaled(m, 2)(x), scaled(m, 3)(x)

    def host(double: Any, triple: Any) -> Any:
        seen.append((np_of(double), np_of(triple)))
        return triple, np.full(3, 100.0)

    step = tree.pipeline([pair, host, added(m)])
    for i in range(5):
        assert np_of(step(m.array(np.full(3, float(i))))) == [100.0 + 3 * i] * 3
    assert seen == [([2.0 * i] * 3, [3.0 * i] * 3) for i in range(5)]
    assert step.last == (("pair", "replayed"), ("added", "replayed"))
    assert step.name == "pair -> added"


@pytest.mark.rule("R2")
def test_a_list_may_end_with_a_host_part_and_host_parts_may_return_nothing(m: Any) -> None:
    tree = tree_on(m)
    nothing = tree.pipeline([scaled(m, 2), lambda y: None, lambda: None, lambda: 7])
    ends = tree.pipeline([scaled(m, 2), lambda y: float(np_of(y)[0]) + 1])
    for i in range(3):
        assert ends(m.array(np.full(2, float(i)))) == 2.0 * i + 1
        assert nothing(m.array(np.ones(1))) == 7


@pytest.mark.rule("R2")
def test_a_floating_point_number_of_numpys_is_an_operand_and_other_values_select_the_recording(m: Any) -> None:
    tree = tree_on(m)

    def times(x: Any, s: Any, mode: str) -> Any:
        y = m.empty(x.shape, x.dtype)
        if mode == "up":
            launch(m, lambda a, b, out: np.multiply(a, b, out=out), [x, s], [y])
        else:
            launch(m, lambda a, b, out: np.divide(a, b, out=out), [x, s], [y])
        return y

    modes = ["up", "up", "down", "down", "up", "down"]
    number = iter(range(6))

    def host(y: Any) -> Any:
        i = next(number)
        return y, np.float64(i + 2.0), modes[i]

    step = tree.pipeline([scaled(m, 1), host, times])
    for i, mode in enumerate(modes):
        want = 12.0 * (i + 2) if mode == "up" else 12.0 / (i + 2)
        assert np_of(step(m.array(np.full(2, 12.0)))) == [want] * 2
    assert step.last[1] == ("times", "replayed")
    assert sorted(r.function for r in tree.recordings) == ["times", "times", "times_1"]


@pytest.mark.rule("R4")
def test_a_host_part_of_a_list_ends_the_step_early(m: Any) -> None:
    tree = tree_on(m)
    step = tree.pipeline([scaled(m, 2), lambda y: Stop("stopped") if np_of(y)[0] > 5 else y, scaled(m, 3)])
    for i in range(6):
        out = step(m.array(np.full(2, float(i))))
        assert out == "stopped" if i > 2 else np_of(out) == [6.0 * i] * 2
    kept = tree.pipeline([scaled(m, 2), Stop])
    for i in range(3):
        assert np_of(kept(m.array(np.full(2, float(i))))) == [2.0 * i] * 2


@pytest.mark.rule("R4")
def test_branches_after_a_host_part_are_children_of_one_piece_and_share_memory(m: Any) -> None:
    tree = tree_on(m)
    first, up, down = (tree.function(scaled(m, k)) for k in (2, 3, 5))

    def body(x: Any) -> Any:
        y = first(x)
        value = yield y
        return (up if value[0] > 4 else down)(y)

    step = tree.pipeline(body)
    for i in range(12):
        x = i % 4 + 1.0
        assert np_of(step(m.array(np.full(64, x)))) == [2 * x * (3 if 2 * x > 4 else 5)] * 64
    assert {d for _, d in step.last} == {"replayed"}
    rows = {r.function: r for r in tree.recordings}
    assert rows["times_3"].parent == rows["times_5"].parent == rows["times_2"].node
    assert rows["times_3"].reaches == rows["times_5"].reaches


def test_a_generator_may_call_another_number_of_pieces_in_each_step(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2))

    def body(x: Any, n: int) -> Any:
        for _ in range(n):
            x = f(x)
            yield x
        return x

    step = tree.pipeline(body)
    for n in (1, 3, 2, 3, 1, 2, 3, 1, 3, 2, 1, 3):
        assert np_of(step(m.array(np.ones(2)), n)) == [2.0**n] * 2
        assert len(step.last) == n
    assert {d for _, d in step.last} == {"replayed"}


# ---- what a yield gives, and results


@pytest.mark.rule("R3")
def test_a_yield_gives_values_that_no_write_changes(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(lambda x: (scaled(m, 2)(x), scaled(m, 3)(x), None))

    def body(x: Any) -> Any:
        a, b, nothing = f(x)
        one = yield a
        two, none = yield b, nothing
        three = yield [a[1:], b]
        four = yield {"a": a}
        assert type(one) is np.ndarray and none is None and type(three) is list
        assert (one.tolist(), two.tolist(), three[0].tolist()) == ([2.0] * 3, [3.0] * 3, [2.0] * 2)
        assert four["a"].tolist() == one.tolist()
        with pytest.raises(ValueError, match="read-only"):
            one[0] = 7
        return one

    step = tree.pipeline(body)
    for _ in range(3):
        assert step(m.array(np.ones(3))).tolist() == [2.0] * 3


@pytest.mark.rule("R5")
def test_results_of_a_step_of_its_own_are_copies_and_within_a_step_they_are_outputs(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))

    def body(x: Any) -> Any:
        y = double(x)
        seen = yield y
        return {"y": y, "again": [y, y[1:]], "seen": float(seen[0]), "x": x}

    step = tree.pipeline(body)
    kept = []
    for i in range(5):
        x = m.array(np.full(3, float(i)))
        out = step(x)
        assert out["again"][0] is out["y"] and out["x"] is x
        kept.append((i, out))
    for i, out in kept:
        assert np_of(out["y"]) == [2.0 * i] * 3 and np_of(out["again"][1]) == [2.0 * i] * 2 and out["seen"] == 2.0 * i
    with tree.step():
        inside = step(m.array(np.ones(3)))["y"]
        assert np_of(inside) == [2.0] * 3
        assert np_of(double(inside)) == [4.0] * 3
    with pytest.raises(RuntimeError, match="output of times_2"):
        inside.numpy()


@pytest.mark.rule("R5")
def test_a_handle_that_a_host_part_keeps_past_its_step_is_refused_by_name(m: Any) -> None:
    tree = tree_on(m)
    double, triple = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))
    kept: list[Any] = []

    def body(x: Any) -> Any:
        y = double(x)
        yield y
        kept.append(y)
        if len(kept) == 5:
            return triple(kept[0])
        return triple(y)

    step = tree.pipeline(body)
    for i in range(4):
        assert np_of(step(m.array(np.full(3, float(i))))) == [6.0 * i] * 3
    with pytest.raises(
        RuntimeError, match=r"times_3: operand 0: this is an output of times_2, made at .* in step 1"
    ) as e:
        step(m.array(np.ones(3)))
    assert any("raised in piece 1 (times_3) of the pipeline body; the step has ended" in n for n in e.value.__notes__)
    del e
    for y in kept:
        with pytest.raises(RuntimeError, match="output of times_2"):
            y.numpy()
    kept.clear()
    assert np_of(step(m.array(np.ones(3)))) == [6.0] * 3


def test_a_held_output_lives_on_while_later_pieces_are_recorded_and_replayed(m: Any) -> None:
    tree = tree_on(m)
    f = [tree.function(scaled(m, k)) for k in (2, 3, 5)]

    def body(x: Any, hold: bool) -> Any:
        a = f[0](x)
        b = f[1](a)
        yield b
        if not hold:
            del a
        c = f[2](b)
        total = yield c
        return float(total[0]) + (np_of(a)[0] if hold else 0)

    step = tree.pipeline(body)
    for i in range(12):
        want = 30.0 * i + (2.0 * i if i % 3 == 0 else 0)
        assert step(m.array(np.full(64, float(i))), i % 3 == 0) == want
    assert {d for _, d in step.last} == {"replayed"}


# ---- one pool and one liveness


@pytest.mark.rule("R1")
def test_a_result_that_nothing_reads_any_more_gives_its_memory_to_a_later_piece(m: Any) -> None:
    """Four pieces that each make one array from the last need the memory of two arrays; of four where all are held."""

    def most(drops: bool) -> tuple[int, Any]:
        tree = tree_on(m)
        pieces = [tree.function(scaled(m, k)) for k in (2, 3, 5, 7)]
        seen: list[Any] = []

        def body(x: Any) -> Any:
            made = []
            for f in pieces:
                x = f(x)
                yield x
                made.append(x)
                if drops:
                    made.clear()
            seen.append(float(np_of(x)[0]))

        step = tree.pipeline(body)
        for i in range(4):
            step(m.array(np.full(512, float(i))))
        assert seen == [210.0 * i for i in range(4)] and {d for _, d in step.last} == {"replayed"}
        rows = {r.function: [(lo, hi) for lo, hi, owns in r.memory if owns] for r in tree.recordings}
        high = tree.stats.high_water
        tree.close()
        return high, rows

    dropped, rows = most(True)
    held, _ = most(False)
    size = 512 * 8
    assert (dropped, held) == (2 * size, 4 * size)  # the copy of the operand gives its place to the second output
    assert rows["times_5"] == rows["times_2"] and rows["times_7"] == rows["times_3"] == [(0, size)]


# ---- operands of pieces


def test_operands_of_pieces_are_static_copied_or_added_into(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2), roles="copy")

    def grad(y: Any, total: Any) -> None:
        launch(m, lambda a, b, out: np.add(a, b, out=out), [y, total], [total])

    adds = tree.function(grad, roles=("auto", "accumulate"))
    total = m.array(np.zeros(3))

    def body(x: Any) -> Any:
        y = double(x)
        value = yield y
        if value[0] != 4:
            adds(y, total)

    step = tree.pipeline(body)
    for i in range(6):
        step(m.array(np.full(3, float(i))))
    assert total.numpy().tolist() == [2.0 * (0 + 1 + 3 + 4 + 5)] * 3
    assert {d for _, d in step.last} == {"replayed"}


def test_what_a_host_part_writes_into_a_static_operand_the_next_piece_reads(m: Any) -> None:
    tree = tree_on(m)
    first, second = tree.function(scaled(m, 2)), tree.function(added(m), roles=("auto", "static"))
    w = m.array(np.zeros(3))

    def body(x: Any) -> Any:
        y = first(x)
        value = yield y
        launch(m, lambda out: out.fill(value[0]), [], [w])
        return second(y, w)

    step = tree.pipeline(body)
    for i in range(5):
        assert np_of(step(m.array(np.full(3, float(i))))) == [4.0 * i] * 3
    assert {d for _, d in step.last} == {"replayed"}


@pytest.mark.parametrize("m", ["cpu"], indirect=True)
def test_a_piece_that_writes_into_an_operand_which_is_copied_runs_plainly(m: Any) -> None:
    tree = tree_on(m)
    first, second = tree.function(scaled(m, 2)), tree.function(descends(m), roles="copy")

    def body(x: Any, w: Any) -> Any:
        y = first(x)
        yield y
        second(w, y, np.ones(1))

    step, w = tree.pipeline(body), np.zeros(3)
    with pytest.warns(RuntimeWarning, match="descend runs without a recording: it writes into operand 0"):
        for _ in range(4):
            step(np.ones(3), w)
    assert w.tolist() == [-8.0] * 3
    assert step.last == (("times_2", "replayed"), ("descend", "raw"))
    assert "piece 1: descend ran without a recording: it writes into operand 0" in step.explain()


def test_a_static_operand_that_moves_is_recorded_again_in_its_piece_alone(m: Any) -> None:
    tree = tree_on(m, limit=2)
    first, second = tree.function(scaled(m, 2)), tree.function(added(m), roles=("auto", "static"))

    def body(x: Any, w: Any) -> Any:
        y = first(x)
        yield y
        return second(y, w)

    step = tree.pipeline(body)
    weights = [m.array(np.full(3, 10.0 * i)) for i in range(3)]
    for i in range(9):
        assert np_of(step(m.array(np.ones(3)), weights[i % 3])) == [2.0 + 10.0 * (i % 3)] * 3
    assert [f.stats.nodes for f in step.pieces] == [1, 3]


@pytest.mark.rule("R6")
def test_a_piece_of_few_kernels_runs_plainly(m: Any) -> None:
    tree = tree_on(m)

    def many(x: Any) -> Any:
        for _ in range(5):
            x = scaled(m, 2)(x)
        return x

    step = tree.pipeline([many, lambda y: y, scaled(m, 3), lambda y: y, many], min_kernels=4)
    for i in range(7):
        assert np_of(step(m.array(np.full(3, float(i))))) == [32.0 * 3 * 32 * i] * 3
    assert [d for _, d in step.last] == ["replayed", "raw", "replayed"]
    assert "piece 1: times_3 ran without a recording: its recording has 1 kernel, fewer than min_kernels=4" in (
        step.explain()
    )
    assert [s.nodes for s in step.stats] == [1, 0, 1] and step.stats[1].raw == 6
    assert [(r.function, r.kernels) for r in tree.recordings] == [("many", 5), ("many", 5)]


@pytest.mark.rule("R6")
def test_a_function_alone_has_the_same_limit_and_other_operands_are_counted_by_themselves(m: Any) -> None:
    tree = tree_on(m)

    def rounds(x: Any, n: int) -> Any:
        for _ in range(n):
            x = scaled(m, 2)(x)
        return x

    f = tree.function(rounds, min_kernels=3)
    for i in range(5):
        for n in (2, 4):
            with tree.step():
                assert np_of(f(m.array(np.full(3, float(i))), n)) == [2.0**n * i] * 3
    assert did(f) == "replayed" and (f.stats.raw, f.stats.replayed, f.stats.nodes) == (4, 3, 1)


@pytest.mark.rule("R6")
def test_only_the_sizes_of_only_are_recorded(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2), only=[4, 8])
    for _ in range(4):
        for n in (3, 4, 8):
            with tree.step():
                assert np_of(f(m.array(np.ones(n)))) == [2.0] * n
                assert (did(f) == "raw") == (n == 3)
                if n == 3:
                    assert f.last.reason == "the first axis of operand 0 has the size 3, which only= does not name"
    assert (f.stats.raw, f.stats.nodes) == (4, 2)
    for wrong, error in (
        (5, TypeError),
        ([], ValueError),
        ([-1], ValueError),
        (["4"], TypeError),
        ([1 << 63], ValueError),
    ):
        with pytest.raises(error, match="only"):
            tree.function(scaled(m, 2), only=wrong)
    with pytest.raises(ValueError, match="min_kernels"):
        tree.function(scaled(m, 2), min_kernels=-1)


@pytest.mark.rule("R7")
def test_after_warm_again_every_piece_is_warmed_and_recorded_again(m: Any) -> None:
    tree = tree_on(m)
    factor = [2.0]

    def f(x: Any) -> Any:
        return scaled(m, factor[0])(x)

    step = tree.pipeline([f, lambda y: y, scaled(m, 3)])

    def run(times: int) -> list[str]:
        seen = []
        for _ in range(times):
            out = step(m.array(np.ones(2)))
            seen.append(step.last[0][1])
            assert seen[-1] == step.last[1][1]
        assert np_of(out)[0] == (3 * factor[0] if seen[0] == "warmed" else 6.0)
        return seen

    assert run(3) == ["warmed", "recorded", "replayed"]
    factor[0] = 5.0
    assert run(2) == ["replayed"] * 2  # a number from outside is frozen
    tree.warm_again()
    assert tree.stats.nodes == 2  # the path still has them
    assert run(3) == ["warmed", "recorded", "replayed"]
    assert tree.stats.nodes == 2
    with tree.step():
        y = step(m.array(np.ones(2)))
        tree.warm_again()
        assert np_of(y) == [15.0] * 2
    assert run(1) == ["warmed"]

    def inside(x: Any) -> Any:
        tree.warm_again()
        return scaled(m, 2)(x)

    with tree.step(), pytest.raises(RuntimeError, match="warm_again: the recordings of a graph tree stay while"):
        tree.function(inside)(m.array(np.ones(2)))
    tree.close()
    with pytest.raises(RuntimeError, match="the graph tree is closed"):
        tree.warm_again()


def test_recordings_are_data_for_tools(m: Any) -> None:
    tree = tree_on(m)
    step, w, _ = training(m, tree)
    for i in range(3):
        step(m.array(np.arange(4.0) + i), w)
    rows = [r.to_dict() for r in tree.recordings]
    assert json.loads(json.dumps(rows)) == rows
    assert [(r["node"], r["function"], r["replays"], r["kernels"]) for r in rows] == [
        (0, "gradient", 1, 2),
        (1, "norm", 1, 1),
        (2, "descend", 1, 1),
    ]
    assert all(r["current"] and r["memory"] for r in rows)


def test_launches_of_pieces_are_lines_of_a_trace(m: Any) -> None:
    tree = tree_on(m)
    step, w, _ = training(m, tree)
    for i in range(3):
        step(m.array(np.arange(4.0) + i), w)
    with fanin.trace() as t:
        step(m.array(np.arange(4.0)), w)
    labels = [line.label for line in t.lines if "replay of" in line.label]
    assert labels == [f"replay of {name}, recording {i}" for i, name in enumerate(("gradient", "norm", "descend"))]


# ---- errors


class Oops(Exception):
    pass


@pytest.mark.rule("R8")
@pytest.mark.parametrize("when", range(4))
def test_an_exception_of_a_host_part_ends_the_step_and_the_next_one_works(m: Any, when: int) -> None:
    tree = tree_on(m)
    fail = [False]

    def host(y: Any) -> Any:
        if fail[0]:
            raise Oops("no")
        return y

    step = tree.pipeline([scaled(m, 2), host, scaled(m, 3)])
    for i in range(6):
        fail[0] = i == when
        x = m.array(np.full(3, float(i)))
        if not fail[0]:
            assert np_of(step(x)) == [6.0 * i] * 3
            continue
        with pytest.raises(Oops) as e:
            step(x)
        want = "raised in the host part after piece 0 (times_2) of the pipeline times_2 -> times_3; the step has ended"
        assert want in e.value.__notes__
        del e
        with pytest.raises(RuntimeError, match="outside of a step"):
            step.pieces[0](x)
    assert {d for _, d in step.last} == {"replayed"}


@pytest.mark.rule("R8")
def test_an_exception_of_a_piece_names_it_and_the_next_step_works(m: Any) -> None:
    tree = tree_on(m)
    fail = [False]

    def breaks(y: Any) -> Any:
        if fail[0]:
            raise Oops("no")
        return scaled(m, 3)(y)

    step = tree.pipeline([scaled(m, 2), lambda y: y, breaks])
    for i in range(6):
        fail[0] = i in (0, 2)
        x = m.array(np.full(3, float(i)))
        if fail[0]:
            with pytest.raises(Oops) as e:
                step(x)
            want = "raised in piece 1 (breaks) of the pipeline times_2 -> breaks; the step has ended"
            assert want in e.value.__notes__ and step.last[1] == ("breaks", "failed")
            assert "piece 1: breaks failed" in step.explain()
            del e
        else:
            assert np_of(step(x)) == [6.0 * i] * 3
    assert {d for _, d in step.last} == {"replayed"}


@pytest.mark.rule("R8")
def test_a_generator_may_handle_the_error_of_a_piece_and_go_on(m: Any) -> None:
    tree = tree_on(m)

    def breaks(y: Any) -> Any:
        raise Oops("no")

    f, g = tree.function(scaled(m, 2)), tree.function(breaks)

    def body(x: Any) -> Any:
        y = f(x)
        try:
            g(y)
        except Oops:
            value = yield y
        return float(value[0])

    step = tree.pipeline(body)
    for i in range(4):
        assert step(m.array(np.full(3, float(i)))) == 2.0 * i
    assert step.last == (("times_2", "replayed"), ("breaks", "failed"))


@pytest.mark.rule("R3", "R8")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda y: 3, r"a yield gives outputs of pieces, .* not an int"),
        (lambda y: None, r"a yield gives outputs of pieces, .* not None"),
        (lambda y: np.ones(3), "got an ndarray from a yield, whose values are on the host already"),
        (lambda y: (y, "text"), "a yield gives outputs of pieces, .* not a str"),
        (lambda y: np.float64(1), "got a float64 from a yield, whose values are on the host already"),
    ],
)
def test_a_yield_of_what_is_no_output_is_refused_at_its_line(m: Any, wrong: Callable[[Any], Any], words: str) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2))
    bad, cleaned = [False], []

    def body(x: Any) -> Any:
        y = f(x)
        try:
            value = yield wrong(y) if bad[0] else y
        finally:
            cleaned.append(1)
        return float(value[0])

    step = tree.pipeline(body)
    for i in range(5):
        bad[0] = i == 2
        if bad[0]:
            with pytest.raises(TypeError, match=f"body: {words}") as e:
                step(m.array(np.ones(3)))
            assert "after piece 0 (times_2) of the pipeline body; the step has ended" in e.value.__notes__[0]
            names = [frame.name for frame in e.traceback]
            assert "body" in names  # the line of the yield is in the report
            del e
        else:
            assert step(m.array(np.full(3, float(i)))) == 2.0 * i
    assert len(cleaned) == 5


@pytest.mark.rule("R8")
def test_a_generator_that_is_given_up_is_closed_and_its_handles_go(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2))
    closed = []

    class Stops(BaseException):
        pass

    def body(x: Any) -> Any:
        y = f(x)
        try:
            yield y
            raise Stops
        finally:
            closed.append(np_of(y))

    step = tree.pipeline(body)
    for i in range(4):
        with pytest.raises(Stops):
            step(m.array(np.full(3, float(i))))
    assert closed == [[2.0 * i] * 3 for i in range(4)]

    def stubborn(x: Any) -> Any:
        y = f(x)
        while True:
            try:
                yield y
                yield 5
            except TypeError:
                raise Oops from None

    with pytest.raises(Oops):
        tree.pipeline(stubborn)(m.array(np.ones(3)))
    with tree.step():
        assert np_of(f(m.array(np.ones(3)))) == [2.0] * 3


@pytest.mark.rule("R8")
def test_a_host_part_that_calls_its_own_pipeline_is_refused_by_name(m: Any) -> None:
    tree = tree_on(m)
    again = [False]

    def host(y: Any) -> Any:
        if again[0]:
            step(m.array(np.ones(3)))
        return y

    step = tree.pipeline([scaled(m, 2), host, scaled(m, 3)])
    for i in range(5):
        again[0] = i == 3
        if again[0]:
            words = r"the pipeline times_2 -> times_3 is called by the host part after piece 0 \(times_2\) of its own"
            with pytest.raises(RuntimeError, match=words):
                step(m.array(np.ones(3)))
        else:
            assert np_of(step(m.array(np.full(3, float(i))))) == [6.0 * i] * 3


@pytest.mark.rule("R8")
def test_a_host_part_may_call_functions_and_other_pipelines_of_the_tree(m: Any) -> None:
    tree = tree_on(m)
    extra = tree.function(scaled(m, 7))
    inner = tree.pipeline([scaled(m, 5), lambda y: y, scaled(m, 1)])

    def host(y: Any) -> Any:
        z = inner(extra(y))
        return y, z

    step = tree.pipeline([scaled(m, 2), host, added(m)])
    for i in range(5):
        assert np_of(step(m.array(np.full(3, float(i))))) == [2.0 * i + 70.0 * i] * 3
    assert [name for name, _ in step.last] == ["times_2", "times_7", "added"]
    assert [name for name, _ in inner.last] == ["times_5", "times_1"]
    assert {d for _, d in (*step.last, *inner.last)} == {"replayed"}


@pytest.mark.rule("R8")
def test_two_threads_in_one_pipeline_are_refused_by_name(m: Any) -> None:
    tree = tree_on(m)
    inside, go = threading.Event(), threading.Event()
    waits = [False]

    def host(y: Any) -> Any:
        if waits[0]:
            inside.set()
            go.wait()
        return y

    step = tree.pipeline([scaled(m, 2), host, scaled(m, 3)])
    for _ in range(3):
        step(m.array(np.ones(3)))
    waits[0] = True
    results: list[Any] = []

    def other() -> None:
        with m.on_this_thread():
            results.append(np_of(step(m.array(np.ones(3)))))

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    words = (
        r"times_2 -> times_3 runs on another thread, in the host part after piece 0 \(times_2\): let threads call it"
    )
    try:
        with pytest.raises(RuntimeError, match=words):
            step(m.array(np.ones(3)))
    finally:
        go.set()
        thread.join()
    waits[0] = False
    assert results == [[6.0] * 3]
    assert np_of(step(m.array(np.ones(3)))) == [6.0] * 3


@pytest.mark.rule("R8")
def test_a_pipeline_cannot_be_called_by_a_recorded_function(m: Any) -> None:
    tree = tree_on(m)
    step = tree.pipeline([scaled(m, 2), lambda y: y, scaled(m, 3)])
    outer = tree.function(lambda x: step(x))
    with tree.step(), pytest.raises(RuntimeError, match="a step cannot begin in a function of its graph tree") as e:
        outer(m.array(np.ones(3)))
    assert any("is a pipeline: its host parts run in each call" in n for n in e.value.__notes__)
    del e
    assert np_of(step(m.array(np.ones(3)))) == [6.0] * 3


def test_the_wrong_arguments_are_named(m: Any) -> None:
    tree, other = tree_on(m), tree_on(m)
    f, foreign = tree.function(scaled(m, 2)), other.function(scaled(m, 2))

    def body(x: Any) -> Any:
        yield f(x)

    async def later(x: Any) -> None:
        pass

    def same(y: Any) -> Any:
        return y

    cases: list[tuple[Any, type[Exception], str]] = [
        (same, TypeError, "expected a generator function, .* or a list"),
        (5, TypeError, "pipeline: parts: expected a sequence"),
        ([], ValueError, "got an empty one"),
        ([foreign], ValueError, r"part 0 \(times_2\) is a function of another graph tree"),
        ([f, f], TypeError, "part 1 is times_2, a function of the tree, in the place of a host part"),
        ([f, 7], TypeError, "part 1: expected a host part, a function of outputs, got an int"),
        ([f, later], TypeError, "part 1: expected a host part.* got a generator function or coroutine"),
        ([f, body], TypeError, "part 1: expected a host part.* got a generator function or coroutine"),
        ([body], TypeError, "part 0: expected a piece.* got a generator function or coroutine"),
        (["x"], TypeError, "part 0: expected a piece, a function of arrays, got a str"),
    ]
    for parts, error, words in cases:
        with pytest.raises(error, match=words):
            tree.pipeline(parts)
    with pytest.raises(ValueError, match="min_kernels= is for the pieces of a list"):
        tree.pipeline(body, min_kernels=2)
    with pytest.raises(ValueError, match="pipeline: min_kernels"):
        tree.pipeline([f], min_kernels=-1)
    two = tree.pipeline([f, lambda y: (y, y), tree.function(scaled(m, 3), roles=("auto",))])
    with pytest.raises(TypeError, match="times_3: got 2 operands, but roles= has 1") as e:
        two(m.array(np.ones(2)))
    assert any("piece 1 (times_3)" in n for n in e.value.__notes__)
    del e


def test_a_pipeline_of_a_closed_tree_is_refused_by_name_and_one_that_is_dropped_frees_its_recordings(m: Any) -> None:
    tree = tree_on(m)
    step = tree.pipeline([scaled(m, 2), lambda y: y, scaled(m, 3)])
    assert step.explain() == "times_2 -> times_3 has not been called yet" and step.last == ()
    for _ in range(3):
        step(m.array(np.ones(3)))
    gone = weakref.ref(step)
    assert "Pipeline times_2 -> times_3 on" in repr(step)
    del step
    gc.collect()
    assert gone() is None
    f = tree.function(scaled(m, 1))
    with tree.step():
        f(m.array(np.ones(1)))
    assert tree.stats.nodes == 0
    step = tree.pipeline([scaled(m, 2)])
    tree.close()
    with pytest.raises(RuntimeError, match="the graph tree is closed"):
        step(m.array(np.ones(3)))


def test_a_pipeline_binds_as_a_method(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))

    class Model:
        factor = 3.0

        @tree.pipeline
        def step(self, x: Any) -> Any:
            value = yield double(x)
            return self.factor * value[0]

    model = Model()
    assert [model.step(m.array(np.full(2, float(i)))) for i in range(4)] == [6.0 * i for i in range(4)]


def test_a_tree_without_room_gives_the_numbers_of_the_eager_step(m: Any) -> None:
    tree = tree_on(m, memory=512)
    step, w, _ = training(m, tree)
    want = np.zeros(4)
    for i in range(5):
        x = np.arange(4.0) + i
        loss = step(m.array(x), w)
        assert np_of(loss) == [eager(want, x)]
    assert w.numpy().tolist() == want.tolist()
    tree.close()


# ---- keep="held"


@pytest.mark.rule("R9")
def test_a_held_output_is_copied_when_its_step_ends_and_others_are_not(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2), keep="held")
    kept = []
    for i in range(6):
        with tree.step():
            for k in range(3):
                y = f(m.array(np.full(3, 10.0 * i + k)))
                if (i + k) % 3 == 0:
                    kept.append((y, 20.0 * i + 2 * k))
                assert np_of(y) == [20.0 * i + 2 * k] * 3
                del y
    for y, want in kept:
        assert np_of(y) == [want] * 3 and np_of(y[1:]) == [want] * 2
    assert len(kept) == 6
    with tree.step():
        assert np_of(f(kept[0][0])) == [2 * kept[0][1]] * 3  # and is an operand like any other
        assert did(f) in ("replayed", "recorded")
    tree.close()
    assert np_of(kept[1][0]) == [kept[1][1]] * 3


@pytest.mark.rule("R9")
@pytest.mark.parametrize("steps", range(1, 5))
def test_a_view_of_a_held_output_is_refused_by_name(m: Any, steps: int) -> None:
    tree = tree_on(m)
    f = tree.function(lambda x: (scaled(m, 2)(x), scaled(m, 3)(x)), keep="held")
    for _ in range(steps):
        with tree.step():
            a, b = f(m.array(np.ones(3)))
            view = a[1:]
        assert (np_of(a), np_of(b)) == ([2.0] * 3, [3.0] * 3)
        with pytest.raises(RuntimeError, match=r"output of <lambda>"):
            view.numpy()


@pytest.mark.rule("R9")
def test_outputs_that_nobody_holds_are_not_copied(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2), keep="held")
    for _ in range(4):
        with tree.step():
            f(m.array(np.ones(3)))
    with fanin.trace() as t:
        with tree.step():
            f(m.array(np.ones(3)))
        none = sum(line.label == "keep" for line in t.lines)
        with tree.step():
            y = f(m.array(np.ones(3)))
        one = sum(line.label == "keep" for line in t.lines)
    assert none == 0 and np_of(y) == [2.0] * 3
    assert one == 1 or m.kind == "cpu"  # a copy on the CPU has no line of its own


@pytest.mark.rule("R9")
def test_held_outputs_of_a_nested_step_are_copied_with_the_outer_one(m: Any) -> None:
    tree = tree_on(m)
    f, g = tree.function(scaled(m, 2), keep="held"), tree.function(scaled(m, 3))
    for i in range(4):
        with tree.step():
            with tree.step():
                y = f(m.array(np.full(3, float(i))))
            z = np_of(g(y))
        assert np_of(y) == [2.0 * i] * 3 and z == [6.0 * i] * 3
    assert did(f) == did(g) == "replayed"


@pytest.mark.rule("R9")
def test_the_error_of_a_step_is_raised_and_its_held_outputs_are_copied(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2), keep="held")
    kept = []
    for i in range(4):
        with pytest.raises(Oops), tree.step():
            kept.append(f(m.array(np.full(3, float(i)))))
            raise Oops
    assert [np_of(y) for y in kept] == [[2.0 * i] * 3 for i in range(4)]


@pytest.mark.rule("R9")
def test_a_step_that_ends_in_a_function_copies_nothing_and_says_so(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2), keep="held")
    step = tree.step()
    step.__enter__()
    y = f(m.array(np.ones(3)))

    def ends(x: Any) -> Any:
        step.__exit__(None, None, None)
        return scaled(m, 3)(x)

    with pytest.raises(RuntimeError, match="cannot be copied while one of its functions runs"):
        tree.function(ends)(m.array(np.ones(3)))
    with pytest.raises(RuntimeError, match="output of times_2"):
        y.numpy()
    with tree.step():
        assert np_of(f(m.array(np.ones(3)))) == [2.0] * 3


def test_pieces_with_held_outputs_give_what_host_parts_keep(m: Any) -> None:
    tree = tree_on(m)
    f, g = tree.function(scaled(m, 2), keep="held"), tree.function(scaled(m, 3))
    kept = []

    def body(x: Any) -> Any:
        y = f(x)
        yield y
        kept.append(y)
        return g(y)

    step = tree.pipeline(body)
    for i in range(5):
        assert np_of(step(m.array(np.full(3, float(i))))) == [6.0 * i] * 3
    assert [np_of(y) for y in kept] == [[2.0 * i] * 3 for i in range(5)]


@pytest.mark.rule("R8")
def test_two_threads_in_one_pipeline_are_explored_in_every_order() -> None:
    """Each order gives both results, or one and the refusal by name; a pipeline for each thread gives both always."""

    def scene(m: Any, shared: bool) -> Any:
        tree, x = fanin.GraphTree("sim:0", memory=1 << 14), m.array(np.ones(2))

        def double(x: Any) -> Any:
            y = m.empty(x.shape, x.dtype)
            m.launch(fanin.current_stream("sim:0"), lambda a, b: np.multiply(a, 2, out=b), reads=[x], writes=[y])
            return y

        functions = [tree.function(double, roles="static") for _ in range(2)]
        made = [tree.pipeline([f, lambda y: float(np_of(y)[0])]) for f in functions]
        got: list[Any] = []

        def work(step: Any) -> None:
            try:
                got.append(step(x))
            except RuntimeError as e:
                got.append("refused" if "runs on another thread" in str(e) else str(e))

        m.spawn(lambda: work(made[0]))
        m.spawn(lambda: work(made[0] if shared else made[1]))
        m.join()
        return sorted(map(str, got))

    for shared in (True, False):
        found = fanin.sim.explore(lambda m, shared=shared: scene(m, shared), limit=60, samples=30)
        assert not found.errors and not found.races and not found.deadlocks, found
        results = {tuple(r) for r in found.results}
        assert results == ({("2.0", "2.0"), ("2.0", "refused")} if shared else {("2.0", "2.0")})
