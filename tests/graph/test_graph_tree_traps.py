"""Graph trees in cases that are easy to get wrong: operands that overlap, equal keys, kept memory."""

from __future__ import annotations

import collections
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import sim
from kit import hooks
from kit.child import in_child
from kit.graph_trees import did, launch, scaled, tree_on
from kit.pictures import Read, outside


def test_memory_that_a_function_keeps_is_found_only_by_the_check_for_it(m: Any) -> None:
    kept: list[Any] = []

    def keeps(x: Any) -> None:
        kept.append(scaled(m, 2)(x))

    def adopts() -> bool:
        tree = tree_on(m)
        f = tree.function(keeps)
        try:
            with tree.step():
                f(m.array(np.ones(4)))
        except RuntimeError:
            return False
        return True

    assert not adopts()
    hooks.fault("TREE_ADOPTED")
    try:
        assert adopts()
    finally:
        hooks.fault(None)


def test_a_view_of_an_operand_in_the_pool_is_kept_as_a_view(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    middle = tree.function(lambda y: y[1:3], keep=True)
    for i in range(4):
        with tree.step():
            kept = middle(double(m.array(np.arange(4.0) + i)))
        assert kept.numpy().tolist() == [2.0 * (i + 1), 2.0 * (i + 2)]
    assert did(middle) == "replayed"


def test_a_copied_operand_shares_no_memory_with_a_written_one(m: Any) -> None:
    tree = tree_on(m)

    def update(w: Any, v: Any, one: Any) -> Any:
        fanin.add_n([w, one], out=w)
        return scaled(m, 2)(v)

    copied = tree.function(update, roles=("static", "copy", "static"))
    in_place = tree.function(update, roles="static")
    w, v, one = m.array(np.zeros(4)), m.array(np.zeros(2)), m.array(np.ones(4))
    said = "update: operands 0 and 1 share memory; the function writes into operand 0, but operand 1 is a copy"
    for i in range(4):
        if i:
            with tree.step(), pytest.raises(ValueError, match=said):
                copied(w, w[:2], one)
        with tree.step():
            assert copied(w, v, one).numpy().tolist() == [0.0, 0.0]
    assert did(copied) == "replayed"
    for i in range(4):
        with tree.step():
            assert in_place(w, w[:2], one).numpy().tolist() == [2.0 * (i + 5)] * 2
    assert did(in_place) == "replayed"


def test_an_accumulated_operand_overlaps_nothing_at_a_replay_either(m: Any) -> None:
    tree = tree_on(m)
    add = tree.function(
        lambda g, x: launch(m, lambda a, b: np.add(a, b, out=b), [x], [g]), roles=("accumulate", "copy")
    )
    g, x = m.array(np.zeros(3)), m.array(np.ones(3))
    for _ in range(3):
        with tree.step():
            add(g, x)
    with tree.step(), pytest.raises(ValueError, match="operands 0 and 1 share memory"):
        add(g, g)
    assert did(add) == "replayed"
    assert g.numpy().tolist() == [3.0] * 3


@pytest.mark.parametrize("kept", [lambda x: x, lambda x: x[1:]], ids=["itself", "a view"])
def test_a_copied_operand_that_the_function_keeps_is_found(m: Any, kept: Callable[[Any], Any]) -> None:
    tree, seen, double = tree_on(m), [], scaled(m, 2)

    def keeps(x: Any) -> Any:
        seen.append(kept(x))
        return double(x)

    keeping = tree.function(keeps)
    for i in range(3):
        x = m.array(np.ones(3))
        with tree.step():
            if i == 0:
                keeping(x)
                continue
            with pytest.raises(RuntimeError, match="keeps: a reference keeps 24 bytes"):
                keeping(x)
        with pytest.raises(RuntimeError, match="in a call that failed"):
            seen[-1].numpy()
    assert tree.stats.nodes == 0


def test_an_operand_with_a_view_among_the_outputs_never_becomes_a_copied_one(m: Any) -> None:
    tree = tree_on(m, limit=2)
    tail = tree.function(lambda w: w[1:], roles="static")
    held = [m.array(np.arange(3.0) + i) for i in range(8)]
    with pytest.warns(RuntimeWarning, match="returns a view of it, so it cannot be copied"):
        for i, w in enumerate(held):
            with tree.step():
                assert tail(w).numpy().tolist() == [i + 1.0, i + 2.0]
    assert did(tail) == "raw"
    assert "operand 0 lay elsewhere more than 2 times, and the function" in tail.explain()
    with tree.step():
        assert tail(held[1]).numpy().tolist() == [2.0, 3.0]
    assert did(tail) == "replayed"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (np.float32(0), np.float32(-0.0)),
        (0j, complex(0, -0.0)),
        (1, True),
        ((1,), (1.0,)),
        ((0, (0.0,)), (0, (-0.0,))),
        (np.int8(1), np.int64(1)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("how", ["operand", "key"])
def test_values_that_are_equal_and_not_the_same_have_recordings_of_their_own(
    m: Any, one: Any, other: Any, how: str
) -> None:
    tree, now = tree_on(m), [one]

    def show(x: Any, value: Any) -> Any:
        y, size = m.empty(x.shape, x.dtype), len(repr(value))
        launch(m, lambda a, b: np.add(a, size, out=b), [x], [y])
        return y

    f = tree.function(show) if how == "operand" else tree.function(lambda x: show(x, now[0]), key=lambda x: now[0])
    x = m.array(np.zeros(2))
    for value in (one, other) * 3:
        now[0] = value
        with tree.step():
            y = f(x, value) if how == "operand" else f(x)
            assert y.numpy().tolist() == [len(repr(value))] * 2
    assert (did(f), tree.stats.nodes) == ("replayed", 2)


def test_a_nan_is_one_value(m: Any) -> None:
    tree, double = tree_on(m), scaled(m, 2)
    f = tree.function(lambda x, limit: double(x))
    x = m.array(np.ones(2))
    for _ in range(4):
        with tree.step():
            f(x, float("nan"))
    assert (did(f), tree.stats.nodes) == ("replayed", 1)


class Foreign:
    """An array of another library: it may be hashed, and it changes."""

    def __dlpack__(self, **how: Any) -> Any:
        raise AssertionError(how)


def test_an_array_of_another_library_is_no_key(m: Any) -> None:
    tree, double = tree_on(m), scaled(m, 2)
    f, keyed = tree.function(lambda x, k: double(x)), tree.function(double, key=lambda x: (1, Foreign()))
    x = m.array(np.ones(2))
    with tree.step():
        for call, operands in ((f, (x, Foreign())), (f, (x, (2, Foreign()))), (keyed, (x,))):
            with pytest.raises(TypeError, match="a Foreign, whose values may change"):
                call(*operands)
    assert tree.stats.warmed == 0


@pytest.mark.parametrize("by", ["shape", "key"])
def test_the_kind_of_operands_that_was_not_used_for_longest_gives_way_to_a_new_one(m: Any, by: str) -> None:
    tree = tree_on(m)
    f = tree.function(lambda x, k: scaled(m, k)(x))
    arrays = {k: m.array(np.ones(k if by == "shape" else 2)) for k in range(1, 130)}

    def call(k: int) -> str:
        with tree.step():
            factor = k if by == "key" else 2
            assert f(arrays[k], factor).numpy().tolist() == [factor] * arrays[k].shape[0]
        return str(did(f))

    assert [call(1) for _ in range(3)] == ["warmed", "recorded", "replayed"]
    for k in range(2, 65):
        call(k)
    assert call(1) == "replayed"
    with pytest.warns(RuntimeWarning, match="with more combinations of shapes, dtypes and keys") as warned:
        for k in range(65, 120):
            assert [call(k), call(k), call(k)] == ["warmed", "recorded", "replayed"]
            assert call(1) == "replayed", "what is used stays"
    assert len(warned) == 1
    assert call(2) == "warmed", "what was not used for longest has gone"
    assert tree.stats.nodes <= 65


def test_recordings_after_an_evicted_one_are_dropped_with_it(m: Any) -> None:
    tree, alive = tree_on(m), weakref.WeakSet[Any]()
    f, g = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for n in range(1, 100):
            for _ in range(3):
                with tree.step():
                    y = g(f(m.array(np.ones(n))))
                    assert y.numpy().tolist() == [6.0] * n
                    alive.add(y)
    del y
    assert tree.stats.nodes <= 2 * 65 and len(alive) == 0


@pytest.mark.threads
def test_overlapping_steps_of_threads_end_with_a_limit_on_recordings(m: Any) -> None:
    """Each order in which their calls fall is a path of its own."""
    tree, wrong = tree_on(m, memory=1 << 20), []
    f, g = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))

    def work(seed: int) -> None:
        with m.on_this_thread():
            x = m.array(np.full(2, float(seed)))
            for _ in range(200 if m.kind == "fake" else 700):
                with tree.step():
                    try:
                        y = g(f(x))
                        if y.numpy().tolist() != [6.0 * seed] * 2:
                            wrong.append(seed)
                    except RuntimeError as e:  # a step of another thread may have ended the output
                        if "output of" not in str(e):
                            wrong.append(e)

    with warnings.catch_warnings(record=True) as warned, tree.step():
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong
    assert tree.stats.nodes <= 2 * 2048
    if tree.stats.raw:
        assert any("it has 2048 recordings" in str(w.message) for w in warned)
        assert len([w for w in warned if "it has 2048 recordings" in str(w.message)]) <= 2


def test_a_function_that_wrote_into_a_copy_once_is_recorded_where_nothing_is_copied(m: Any) -> None:
    """T6 is judged call by call: of a clone outside of the tree it writes into a copy, of the output it does not."""
    tree = tree_on(m)
    first, seen = tree.function(scaled(m, 1)), []

    def inc(one: Any, x: Any) -> None:
        fanin.add_n([x, one], out=x)

    one, x, other = m.array(np.ones(3)), m.array(np.zeros(3)), m.array(np.zeros(3))
    g = tree.function(inc, roles=("static", "auto"))
    with pytest.warns(RuntimeWarning, match="it writes into operand 1, which is copied") as warned:
        for turn in range(8):
            with tree.step():
                y = first(x)
                operand = other if turn % 4 == 1 else y
                g(one, operand)
                seen.append(did(g))
                assert y.numpy().tolist() == [0.0 if operand is other else 1.0] * 3
                del y, operand
    assert other.numpy().tolist() == [2.0] * 3 and len(warned) == 1
    assert (seen[1], seen[5]) == ("raw", "raw") and "raw" not in seen[2:5] + seen[6:]
    assert seen[-1] == "replayed"


def strided_operands(m: Any) -> dict[str, Any]:
    """Arrays with gaps, reversed, broadcast and with axes in other orders, of values whose sums depend on order."""
    rng = np.random.default_rng(5)
    base = np.exp(rng.normal(0, 12, (24, 40))).astype(np.float32)
    return {
        "gaps": base[:, 3:37], "rows": base[::3], "columns": base[:, 7], "reversed": base[::-1, ::-1],
        "reversed rows": base[::-2], "turned": base.T[2:, 5:], "broadcast": np.broadcast_to(base[3], (9, 40)),
        "broadcast columns": np.broadcast_to(base[:, :1], (24, 33)),
        "windows": np.lib.stride_tricks.sliding_window_view(base[0], 7),
        "three axes": base.reshape(4, 6, 40)[:, ::-2, 1::3].transpose(2, 0, 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", strided_operands(None))
def test_operands_of_any_layout_are_summed_in_the_order_in_which_they_lie(name: str) -> None:
    """A library chooses the order of its sums by strides: a copy without gaps would give other bits."""
    x = strided_operands(None)[name]
    with fanin.GraphTree("cpu") as tree:
        f = tree.function(lambda a: (a.sum(), a.sum(0), a.sum(-1), a.mean(), np.einsum("...i->...", a)))
        want = [np.asarray(w) for w in (x.sum(), x.sum(0), x.sum(-1), x.mean(), np.einsum("...i->...", x))]
        for _ in range(4):
            with tree.step():
                got = [y.numpy() for y in f(x)]
                assert [g.tobytes() for g in got] == [w.tobytes() for w in want]
        assert did(f) == "replayed"


def test_a_named_tuple_is_refused_and_not_replayed_as_a_tuple(m: Any) -> None:
    pair: Any = collections.namedtuple("pair", "a b")
    double = scaled(m, 2)
    tree = tree_on(m)
    f = tree.function(lambda x: pair(double(x), double(x)))
    with tree.step(), pytest.raises(TypeError, match="output 0 is a pair"):
        f(m.array(np.ones(2)))


def on_a_thread(m: Any, *calls: Callable[[], Any]) -> list[Any]:
    """What the calls gave or raised, each on a thread of its own, at once."""
    out: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        with m.on_this_thread():
            try:
                out[i] = calls[i]()
            except Exception as e:
                out[i] = str(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def test_a_step_ends_on_the_thread_that_began_it_and_with_its_last_reference(m: Any) -> None:
    tree, other = tree_on(m), tree_on(m)
    steps = [tree.step()]
    steps[0].__enter__()
    assert on_a_thread(m, lambda: steps[0].__exit__(None, None, None)) == [
        "the step was begun on another thread: end it there"
    ]
    with pytest.raises(RuntimeError, match="a step of another graph tree is open"), other.step():
        pass
    steps.clear()
    with other.step():
        pass
    tree.close()


def test_a_step_may_end_in_a_body(m: Any) -> None:
    tree, double = tree_on(m), scaled(m, 2)

    def call() -> Any:
        step = tree.step()
        step.__enter__()

        def ends(x: Any) -> Any:
            step.__exit__(None, None, None)
            return double(x)

        y = tree.function(ends)(m.array(np.ones(2)))
        with tree.step():
            tree.function(double)(m.array(np.ones(2)))
            y.numpy()

    assert "this is an output of ends" in on_a_thread(m, call)[0]


def test_functions_of_two_trees_that_call_each_other_on_two_threads_do_not_wait_for_each_other(m: Any) -> None:
    trees, both = (tree_on(m), tree_on(m)), threading.Barrier(2)
    inner = [tree.function(scaled(m, 2)) for tree in trees]

    def calls(k: int) -> Callable[[], Any]:
        def body(x: Any) -> Any:
            both.wait()
            return inner[1 - k](x)

        outer = trees[k].function(body)

        def call() -> Any:
            with trees[k].step():
                return outer(m.array(np.ones(2))).numpy().tolist()

        return call

    assert on_a_thread(m, calls(0), calls(1)) == [[2.0, 2.0]] * 2
    assert [f.last.reason for f in inner] == ["it is called by a function of another tree"] * 2


def test_a_tree_whose_recordings_need_no_memory_has_a_picture(m: Any) -> None:
    tree, g = tree_on(m), m.array(np.zeros(2))
    add = tree.function(lambda g: launch(m, lambda a: np.add(a, 1, out=a), [], [g]), roles="accumulate")
    for _ in range(3):
        with tree.step():
            add(g)
    picture = Read(tree.plot())
    assert outside(picture) == [] and len([text for text in picture.texts() if ", owns 0 B" in text]) == 1


def test_repeated_queries_of_the_last_call_leak_nothing(m: Any) -> None:
    tree, double = tree_on(m), scaled(m, 2)
    x = m.array(np.ones(2))
    for _ in range(5):
        f = tree.function(lambda x, k: double(x))
        for k in range(60):
            for _ in range(2):
                with tree.step():
                    f(x, k)
    assert f.last.node == 299  # no number that Python has already
    f.last
    before = sys.getallocatedblocks()
    for _ in range(1000):
        f.last
    assert sys.getallocatedblocks() - before < 500


def doubled_on(m: sim.Machine) -> Callable[[Any], Any]:
    def doubled(x: Any) -> Any:
        y = m.empty(x.shape, x.dtype)
        m.launch(fanin.current_stream("sim:0"), lambda a, b: np.multiply(a, 2, out=b), reads=[x], writes=[y])
        return y

    return doubled


def test_a_thread_drops_operands_while_another_one_records() -> None:
    def scene(m: Any) -> Any:
        tree = fanin.GraphTree("sim:0", memory=1 << 16)
        double = tree.function(doubled_on(m))
        for _ in range(2):
            with tree.step():
                double(m.array(np.ones(2)))

        def work(k: float) -> None:
            with tree.step():
                assert double(m.array(np.full(2, k))).numpy().tolist() == [2 * k] * 2

        for k in (1.0, 2.0):
            m.spawn(functools.partial(work, k))
        m.join()
        return tree.stats.nodes

    found = sim.explore(scene, limit=20, samples=20)
    assert not found.errors, found
    assert {1, 2} <= set(found.results)


@pytest.mark.parametrize("waits", [False, True])
def test_a_function_that_waits_for_another_threads_call_of_its_tree_is_explored_as_a_deadlock(waits: bool) -> None:
    def scene(m: Any) -> Any:
        tree, x = fanin.GraphTree("sim:0", memory=1 << 14), m.array(np.ones(2))
        inner = tree.function(doubled_on(m))

        def work() -> None:
            with tree.step():
                inner(x)

        def starts(x: Any) -> Any:
            m.spawn(work)
            if waits:
                m.join()
            return doubled_on(m)(x)

        with tree.step():
            y = tree.function(starts)(x).numpy().tolist()
        m.join()
        return y

    found = sim.explore(scene, limit=100, samples=20)
    assert not found.errors and not found.races and found.runs, found
    assert found.deadlocks == (found.runs if waits else 0), found


@pytest.mark.parametrize("keep", [1, "yes", None, 2.5, (1, 0), (1, True)], ids=repr)
def test_keep_is_a_bool_or_one_for_each_output(m: Any, keep: Any) -> None:
    with pytest.raises(TypeError, match="keep= is True, False, or one of them for each output"):
        tree_on(m).function(scaled(m, 2), keep=keep)


def test_the_error_for_an_invalid_role_names_the_valid_ones(m: Any) -> None:
    with pytest.raises(TypeError, match="roles= is one word for all operands, or one for each"):
        tree_on(m).function(scaled(m, 2), roles=3)


def test_keep_for_another_number_of_outputs_is_refused_by_name(m: Any) -> None:
    tree, x = tree_on(m), m.array(np.ones(4))
    double = scaled(m, 2)
    for keep, outputs in (((True, False, True), 2), ((True, False), 1), ((True,), 2), ((False,), 0)):
        f = tree.function(lambda x, n=outputs: tuple(double(x) for _ in range(n)), keep=keep)
        said = (
            rf"<lambda> returned {outputs} outputs?, but keep= has {len(keep)}: give one for each, or one bool for all"
        )
        with tree.step(), pytest.raises(ValueError, match=said):
            f(x)
        assert tree.stats.in_use == 0 and f.last is None
    tree.close()


# Functions without references


def test_recordings_of_dropped_functions_are_freed_before_the_tree_is_closed(m: Any) -> None:
    tree, x = tree_on(m), m.array(np.ones(4))
    first = tree.function(scaled(m, 2))
    for _ in range(20):
        then = tree.function(scaled(m, 3))
        for _ in range(4):
            with tree.step():
                z = then(first(x))
                assert z.numpy().tolist() == [6.0] * 4
                del z
        assert did(then) == "replayed"
        del then
        with tree.step():
            first(x)
    assert tree.stats.nodes <= 2 and len(tree._recordings()) == tree.stats.nodes, tree.stats
    driver = tree.stats.driver_bytes
    with tree.step():
        assert first(x).numpy().tolist() == [2.0] * 4 and did(first) == "replayed"
    assert tree.stats.driver_bytes <= driver
    tree.close()


def test_a_recording_of_a_dropped_function_is_freed_with_all_after_it(m: Any) -> None:
    """No call leads there any more."""
    tree, x = tree_on(m), m.array(np.ones(4))
    first, then = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))
    for _ in range(4):
        with tree.step():
            z = then(first(x))
    assert did(then) == "replayed" and tree.stats.nodes == 2
    del first
    other = tree.function(scaled(m, 5))
    with tree.step():
        with pytest.raises(RuntimeError, match="output of times_3"):
            z.numpy()
        assert other(x).numpy().tolist() == [5.0] * 4
    assert tree.stats.nodes == 0
    for _ in range(3):
        with tree.step():
            assert then(other(x)).numpy().tolist() == [15.0] * 4
    assert did(then) == "replayed" and tree.stats.nodes == 2
    tree.close()


def test_a_function_dropped_within_a_step_leaves_its_outputs_unchanged(m: Any) -> None:
    tree, x = tree_on(m), m.array(np.ones(4))
    other = tree.function(scaled(m, 5))
    for i in range(5):
        f = tree.function(scaled(m, 2))
        for _ in range(3):
            with tree.step():
                y = f(x)
                if i % 2:
                    del f
                    z = other(y)
                    assert z.numpy().tolist() == [10.0] * 4 and y.numpy().tolist() == [2.0] * 4
                    break
                assert y.numpy().tolist() == [2.0] * 4
        with tree.step(), pytest.raises(RuntimeError, match="this is an output of times"):
            y.numpy()
    tree.close()


# Churn


def test_a_function_makes_no_more_recordings_than_the_limit_allows(m: Any) -> None:
    """Each of 2**5 sets of outputs that live would have a recording of its own. Here: the first, three more, the one
    that fits them all, and one at the root."""
    tree = tree_on(m, limit=3)
    five = tree.function(lambda x: tuple(scaled(m, k)(x) for k in range(1, 6)), keep=False)
    then = tree.function(scaled(m, 2))
    x, one = m.array(np.ones(4)), m.array(np.full(4, 7.0))
    seen, wrong = [], 0
    for turn in range(3):
        for lives in [31 - i for i in range(32)] if turn == 1 else range(32):
            with tree.step():
                held = [y if lives >> i & 1 else None for i, y in enumerate(five(x))]
                z = then(one)
                wrong += z.numpy().tolist() != [14.0] * 4
                wrong += any(y is not None and y.numpy().tolist() != [i + 1.0] * 4 for i, y in enumerate(held))
                seen.append(did(then))
                del held, z
    recordings = [n for n, _, f, *_ in tree._recordings() if f == "times_2"]
    assert wrong == 0 and 2 <= len(recordings) <= 6, (len(recordings), seen)
    assert set(seen[-32:]) == {"replayed"}
    tree.close()


# Forks


def test_a_child_forked_during_a_call_of_another_thread_gets_an_error_and_does_not_hang(m: Any) -> None:
    tree, x = tree_on(m), m.array(np.ones(4))
    inside, go = threading.Event(), threading.Event()

    def waits(x: Any) -> None:
        inside.set()
        go.wait()

    f, step = tree.function(waits), tree.step

    def call() -> None:
        with step():
            f(x)

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait()

    def ask() -> None:
        with pytest.raises(RuntimeError, match="another thread was in a call of this graph tree when the process was"):
            step().__enter__()
        assert repr(tree) and tree.stats and tree._recordings() == [] and not tree.closed
        tree.close()
        assert tree.closed

    try:
        assert in_child(ask) == 0
    finally:
        go.set()
        caller.join()
    with tree.step():
        assert tree.function(scaled(m, 2))(x).numpy().tolist() == [2.0] * 4
    tree.close()


def test_a_child_forked_between_calls_uses_the_tree_as_the_parent_does() -> None:
    with sim.Machine(1) as m:
        tree = fanin.GraphTree("sim:0", memory=1 << 14)
        x = m.array(np.ones(4))
        f = tree.function(lambda x: fanin.add_n([x, x]))

        def use() -> None:
            for _ in range(3):
                with tree.step():
                    assert f(x).numpy().tolist() == [2.0] * 4
            assert f.last is not None and f.last.did == "replayed"

        assert in_child(use) == 0
        use()
        tree.close()


# Memory that is full


def test_a_function_without_memory_runs_eagerly_once_and_warns(m: Any) -> None:
    tree = fanin.GraphTree(m.place(), memory=512)
    added, runs = m.array(np.zeros(100)), []

    def body(x: Any, g: Any) -> Any:
        runs.append(1)
        fanin.add_n([g, x], out=g)
        return scaled(m, 2)(x), x

    f = tree.function(body, roles=("static", "accumulate"))
    kept = tree.function(body, roles=("copy", "accumulate"), keep=True)
    for i in range(1, 5):
        x = m.array(np.full(100, float(i)))
        with tree.step():
            y, same = f(x, added)
            assert same is x and y.numpy().tolist() == [2.0 * i] * 100
            assert did(f) == "raw" and "no room for 800 bytes" in f.last.reason and "memory=" in f.last.reason
            z, mine = kept(x, added)
            assert z.numpy().tolist() == [2.0 * i] * 100
            assert mine.numpy().tolist() == [i] * 100 and mine.address != x.address
    assert added.numpy().tolist() == [20.0] * 100 and len(runs) == 8
    assert tree.stats.raw == 8 and tree.stats.nodes == 0
    small = m.array(np.ones(4)), m.array(np.zeros(4))
    for _ in range(3):
        with tree.step():
            f(*small)
    assert did(f) == "replayed" and small[1].numpy().tolist() == [3.0] * 4
    tree.close()


def test_a_function_without_memory_for_its_recording_runs_eagerly_once(m: Any) -> None:
    """What is warmed up has room, and the copies that a recording needs beside it have none."""
    tree = fanin.GraphTree(m.place(), memory=1024)
    runs, total = [], m.array(np.zeros(100))

    def body(x: Any, g: Any) -> Any:
        runs.append(1)
        fanin.add_n([g, x], out=g)
        return scaled(m, 2)(x)

    f = tree.function(body, roles=("copy", "accumulate"))
    said = []
    for i in range(6):
        x = m.array(np.full(100, float(i)))
        with tree.step():
            y = f(x, total)
            assert y.numpy().tolist() == [2.0 * i] * 100
            said.append(did(f))
            del y
    assert said == ["warmed", "raw"] * 3 and len(runs) == 6
    assert total.numpy().tolist() == [15.0] * 100
    assert tree.stats.nodes == 0 and (tree.stats.warmed, tree.stats.raw) == (3, 3)
    with tree.step():
        pass
    tree.close()


def test_a_result_of_a_raw_call_in_device_memory_is_readable_after_the_step_and_never_overwritten(m: Any) -> None:
    """The first output has room and ends with the step; the second has none, and stays as it was."""
    tree = tree_on(m, memory=1024)
    two, writes = tree.function(lambda x: (scaled(m, 2)(x), scaled(m, 3)(x))), tree.function(lambda x: scaled(m, 2)(x))
    kept = []
    for i in range(5):
        x = m.array(np.full(100, float(i)))
        with tree.step():
            inside, outside = two(x)
            assert did(two) == "raw" and "no room for 800 bytes" in two.last.reason
            assert inside.numpy().tolist() == [2.0 * i] * 100 and outside.numpy().tolist() == [3.0 * i] * 100
        with pytest.raises(RuntimeError, match="this is an output of <lambda>"):
            inside.numpy()
        kept.append(outside)
        with tree.step():
            writes(m.array(np.ones(50)))
    assert did(writes) == "replayed"
    assert [y.numpy().tolist() for y in kept] == [[3.0 * i] * 100 for i in range(5)]
    tree.close()
    assert kept[4].numpy().tolist() == [12.0] * 100


@pytest.mark.parametrize("m", ["sim", "cpu"], indirect=True)  # if the writes of a kernel are tracked
def test_a_call_that_writes_a_copied_operand_returns_an_ordinary_array(m: Any) -> None:
    tree = tree_on(m)

    def spoils(x: Any) -> Any:
        launch(m, lambda a: np.add(a, 1, out=a), [], [x])
        return scaled(m, 2)(x)

    f, kept = tree.function(spoils), []
    for i in range(4):
        with tree.step():
            if i == 1:
                with pytest.warns(RuntimeWarning, match="it writes into operand 0, which is copied"):
                    kept.append(f(m.array(np.full(3, float(i)))))
            else:
                kept.append(f(m.array(np.full(3, float(i)))))
            assert did(f) == ("raw" if i else "warmed")
    assert [y.numpy().tolist() for y in kept[1:]] == [[4.0] * 3, [6.0] * 3, [8.0] * 3]
    with pytest.raises(RuntimeError, match="this is an output of spoils"):
        kept[0].numpy()


# The picture


def test_the_picture_shows_what_recordings_own_and_share(m: Any) -> None:
    """Two branches follow `first` and use the same memory: each shares with the other, and `first` shares only what
    it needs while it runs."""
    from fanin.graph.picture import shared_memory

    tree = tree_on(m)
    first, left = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))
    right = tree.function(lambda x: scaled(m, 5)(scaled(m, 7)(x)))
    x = m.array(np.ones(64))
    for then in (left, right):
        for _ in range(4):
            with tree.step():
                y = first(x)
                z = then(y)
                assert z.numpy()[0] in (6, 70)
    names = {node: (f, parent) for node, parent, f, *_ in tree._recordings()}
    shared = {names[n][0]: sum(hi - lo for lo, hi in all_) for n, all_ in shared_memory(tree._memory()).items()}
    owned = {n: sum(hi - lo for node, lo, hi, owns in tree._memory() if node == n and owns) for n in names}
    assert len(names) == 3 and owned == {n: owns for n, _, _, owns, *_ in tree._recordings()}
    behind = [n for n, (_, parent) in names.items() if parent >= 0]
    assert len(behind) == 2 and shared["times_3"] >= 512 and shared["<lambda>"] >= 512
    picture = Read(tree.plot())
    texts = set(picture.texts())
    for n, _parent, f, owns, _reaches, replays, *_ in tree._recordings():
        bytes_ = sum(hi - lo for lo, hi in shared_memory(tree._memory())[n])
        assert f"{n}: {f}, owns {owns} B, shares {bytes_} B, replayed {replays} times" in texts
    hatched = {n for n in names if picture.shapes(f"shared-{n}")}
    assert hatched == {n for n, all_ in shared_memory(tree._memory()).items() if all_} and hatched
    tree.close()


def test_shared_memory_is_found_piece_by_piece() -> None:

    from fanin.graph.picture import shared_memory

    assert shared_memory(
        [(0, 0, 8, True), (1, 4, 12, False), (2, 10, 20, True), (2, 0, 2, False), (3, 30, 40, True)]
    ) == {
        0: [(0, 2), (4, 8)],
        1: [(4, 8), (10, 12)],
        2: [(0, 2), (10, 12)],
        3: [],
    }
