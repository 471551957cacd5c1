"""The laws of an engine: what a backward pass does with pullbacks and with the sums between them. Numbers like E1 are
those of docs/rules.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import fanin
from fanin._interop.protocols import NDArray

from .protocols import Engine, Pullback
from .values import at_once, has_part, late, left_fold, same_bits, seen, some, takes


def ones() -> NDArray:
    """A new array: an engine may write into those of another law."""
    return np.ones(3)


class Planted(Exception):
    """The error of a pullback."""


def times(*factors: float) -> Pullback:
    """The pullback of a sum of inputs, each with a factor."""
    return lambda g: tuple(g * c for c in factors)


def giving(array: NDArray) -> Pullback:
    """The pullback that returns this very array."""
    return lambda g: (array,)


def grad(engine: Engine, leaf: Any) -> NDArray | None:
    g = engine.grad(leaf)
    return None if g is None else np.asarray(g)


class Graph:
    """A random graph of operations with whole factors: what each pullback must get, and the order of the calls."""

    def __init__(self, engine: Engine, seed: int, ops: int = 25) -> None:
        r = random.Random(seed)
        self.engine, self.calls, self.got = engine, [], {}
        self.leaves = [engine.leaf(ones()) for _ in range(3)]
        self.inputs: list[list[int]] = [[], [], []]
        self.factors: list[list[int]] = [[], [], []]
        values = list(self.leaves)
        for i in range(3, 3 + ops):
            self.inputs.append([r.randrange(max(0, i - 6), i) for _ in range(r.randint(1, 3))])
            self.factors.append([r.choice((1, 2)) for _ in self.inputs[-1]])
            values.append(engine.op(ones(), self.pullback(i), [values[k] for k in self.inputs[-1]]))
        self.root = values[-1]
        self.want = [0] * (2 + ops) + [1]
        self.reached = {len(values) - 1}
        for i in reversed(range(len(values))):
            if i in self.reached:
                self.reached.update(self.inputs[i])
                for k, c in zip(self.inputs[i], self.factors[i], strict=True):
                    self.want[k] += self.want[i] * c

    calls: list[int]
    got: dict[int, Any]

    def pullback(self, i: int) -> Pullback:
        def run(g: Any) -> Sequence[Any]:
            self.calls.append(i)
            self.got[i] = np.array(g)
            return tuple(g * c for c in self.factors[i])

        return run


# Values


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_chain_composes_its_pullbacks(engine: Engine, dtype: str) -> None:
    g = np.array([1.5, -2.0, 0.25], dtype)
    x = engine.leaf(np.zeros(3, dtype))
    y = x
    for factor in (2, 3, 5):
        y = engine.op(np.zeros(3, dtype), times(factor), [y])
    engine.backward(y, g)
    assert same_bits(grad(engine, x), g * 30)


def test_a_value_that_is_used_twice_gets_the_sum(engine: Engine) -> None:
    x = engine.leaf(ones())
    a, b = engine.op(ones(), times(2), [x]), engine.op(ones(), times(5), [x])
    engine.backward(engine.op(ones(), times(1, 10), [a, b]), ones())
    assert same_bits(grad(engine, x), ones() * 52)


def test_one_operation_may_use_a_value_twice(engine: Engine) -> None:
    """E1: an edge that is there twice counts twice."""
    x = engine.leaf(ones())
    engine.backward(engine.op(ones(), times(2, 3), [x, x]), ones())
    assert same_bits(grad(engine, x), ones() * 5)


@pytest.mark.parametrize("seed", range(4))
def test_each_pullback_gets_the_whole_sum(engine: Engine, seed: int) -> None:
    """E1."""
    graph = Graph(engine, seed)
    engine.backward(graph.root, ones())
    for i, g in graph.got.items():
        assert same_bits(g, ones() * graph.want[i]), i
    for i, leaf in enumerate(graph.leaves):
        if i in graph.reached:
            assert same_bits(grad(engine, leaf), ones() * graph.want[i])


def test_a_sum_is_a_left_fold_in_some_order(engine: Engine) -> None:
    """A15."""
    parts = some(1, 4, dtype="float64")
    x = engine.leaf(np.zeros((4, 5)))
    ops = [engine.op(np.zeros((4, 5)), giving(p), [x]) for p in parts]
    engine.backward(engine.op(np.zeros((4, 5)), lambda g: (g,) * 4, ops), np.zeros((4, 5)))
    total = grad(engine, x)
    assert any(same_bits(total, left_fold(list(order))) for order in itertools.permutations(parts))


def test_a_graph_that_is_built_again_gives_the_same_bits(engine: Engine) -> None:
    """A15, E2."""
    parts = some(2, 6, dtype="float64")
    seen = []
    for _ in range(10):
        x = engine.leaf(np.zeros((4, 5)))
        ops = [engine.op(np.zeros((4, 5)), giving(p), [x]) for p in parts]
        engine.backward(engine.op(np.zeros((4, 5)), lambda g: (g,) * 6, ops), np.zeros((4, 5)))
        seen.append(grad(engine, x))
    assert all(same_bits(total, seen[0]) for total in seen)


# Order, exactly once


@pytest.mark.parametrize("seed", range(4))
def test_each_pullback_runs_once_after_those_that_use_its_result(engine: Engine, seed: int) -> None:
    """E1."""
    graph = Graph(engine, seed)
    engine.backward(graph.root, ones())
    assert sorted(graph.calls) == sorted(i for i in graph.reached if i >= 3)
    place = {i: n for n, i in enumerate(graph.calls)}
    for i in graph.calls:
        assert all(place[i] < place[k] for k in graph.inputs[i] if k >= 3)


def test_a_ladder_of_diamonds_takes_one_call_each(engine: Engine) -> None:
    calls = 0

    def pullback(g: Any) -> Sequence[Any]:
        nonlocal calls
        calls += 1
        if calls > 1000:
            raise Planted("more calls than operations")
        return (g / 2, g / 2)

    x = engine.leaf(ones())
    y = x
    for _ in range(30):
        y = engine.op(ones(), pullback, [y, y])
    engine.backward(y, ones())
    assert calls == 30
    assert same_bits(grad(engine, x), ones())


def test_a_chain_may_be_deeper_than_the_stack(engine: Engine) -> None:
    """E13."""
    x = engine.leaf(ones())
    y = x
    for _ in range(3000):
        y = engine.op(ones(), times(1), [y])
    engine.backward(y, ones())
    assert same_bits(grad(engine, x), ones())


def test_what_the_root_does_not_depend_on_is_not_run(engine: Engine) -> None:
    def never(g: Any) -> Sequence[Any]:
        raise Planted("an operation outside the pass")

    x, z = engine.leaf(ones()), engine.leaf(ones())
    y = engine.op(ones(), times(2), [x])
    outside = engine.op(ones(), never, [x, z, y])
    engine.backward(y, ones())
    assert same_bits(grad(engine, x), ones() * 2)
    assert outside is not None and grad(engine, z) is None


def test_undefined_adds_nothing(engine: Engine) -> None:
    """S2."""
    has_part(engine, "undefined")
    x, z = engine.leaf(ones()), engine.leaf(ones())
    a, b = engine.op(ones(), times(4), [x]), engine.op(ones(), lambda g: (None, None), [x, z])
    engine.backward(engine.op(ones(), times(1, 1), [a, b]), ones())
    assert same_bits(grad(engine, x), ones() * 4)
    assert grad(engine, z) is None


# Aliasing


@pytest.mark.parametrize("last", [False, True], ids=["made first", "made last"])
def test_one_array_for_two_inputs_stays_as_it_is(engine: Engine, last: bool) -> None:
    """A7: z = x + y sends one gradient both ways."""
    held: list[NDArray] = []

    def both(g: Any) -> Sequence[Any]:
        held.append(np.array(g))
        return (held[0], held[0])

    x, y = engine.leaf(ones()), engine.leaf(ones())
    pullbacks = [times(10, 100), both] if last else [both, times(10, 100)]
    engine.backward(engine.op(ones(), times(1, 1), [engine.op(ones(), f, [x, y]) for f in pullbacks]), ones())
    assert same_bits(held[0], ones())
    assert same_bits(grad(engine, x), ones() * 11) and same_bits(grad(engine, y), ones() * 101)


def test_what_a_pullback_returned_is_never_written(engine: Engine) -> None:
    parts = [ones() * 1, ones() * 2, ones() * 4]
    x = engine.leaf(ones())
    ops = [engine.op(ones(), giving(p), [x]) for p in parts]
    engine.backward(engine.op(ones(), lambda g: (g,) * 3, ops), ones())
    assert same_bits(grad(engine, x), ones() * 7)
    assert [p[0] for p in parts] == [1, 2, 4]


def test_the_gradient_that_a_pass_begins_with_is_never_written(engine: Engine) -> None:
    g = ones()
    x = engine.leaf(ones())
    for _ in range(2):
        a = engine.op(ones(), lambda g: (g, g), [x, x])
        engine.backward(engine.op(ones(), lambda g: (g,), [a]), g)
    assert same_bits(g, ones())


def test_the_gradients_of_two_leaves_share_no_memory(engine: Engine) -> None:
    """L4."""
    has_part(engine, "accumulate")
    x, y = engine.leaf(ones()), engine.leaf(ones())
    for _ in range(2):
        engine.backward(engine.op(ones(), lambda g: (g, g), [x, y]), ones())
    assert same_bits(grad(engine, x), ones() * 2) and same_bits(grad(engine, y), ones() * 2)


def test_a_gradient_may_be_read_only_or_broadcast(engine: Engine) -> None:
    """A13."""
    has_part(engine, "arrays")
    row, frozen = np.broadcast_to(np.array(2.0), 3), ones()
    frozen.flags.writeable = False
    x = engine.leaf(ones())
    ops = [engine.op(ones(), giving(p), [x]) for p in (row, frozen, row)]
    engine.backward(engine.op(ones(), lambda g: (g,) * 3, ops), ones())
    assert same_bits(grad(engine, x), ones() * 5) and same_bits(frozen, ones())


# Several passes


def test_passes_add_up(engine: Engine) -> None:
    """L5."""
    has_part(engine, "accumulate")
    x = engine.leaf(ones())
    for factor in (1, 10, 100):
        engine.backward(engine.op(ones(), times(factor), [x]), ones())
    assert same_bits(grad(engine, x), ones() * 111)


def test_a_second_pass_over_a_graph_is_right_or_refused(engine: Engine) -> None:
    """E10."""
    x = engine.leaf(ones())
    y = engine.op(ones(), times(3), [engine.op(ones(), times(2), [x])])
    engine.backward(y, ones())
    try:
        engine.backward(y, ones())
    except Exception:
        want = 6
    else:
        want = 6 if "accumulate" in getattr(engine, "lacks", {}) else 12
    assert same_bits(grad(engine, x), ones() * want)


def test_a_pass_may_begin_inside_a_pullback(engine: Engine) -> None:
    """E7."""
    inner = engine.leaf(ones())

    def pullback(g: Any) -> Sequence[Any]:
        engine.backward(engine.op(ones(), times(7), [inner]), ones())
        return (g * 2,)

    x = engine.leaf(ones())
    a, b = engine.op(ones(), pullback, [x]), engine.op(ones(), times(3), [x])
    engine.backward(engine.op(ones(), times(1, 1), [a, b]), ones())
    assert same_bits(grad(engine, inner), ones() * 7)
    assert same_bits(grad(engine, x), ones() * 5)


# Errors


def refuses(engine: Engine, root: Any, gradient: NDArray) -> None:
    """A pass raises, whichever error the engine has for it."""
    try:
        engine.backward(root, gradient)
    except Exception:
        return
    pytest.fail("the pass raised no error", pytrace=False)


def throws(g: Any) -> Sequence[Any]:
    raise Planted("the pullback's own error")


def test_the_error_of_a_pullback_reaches_the_caller(engine: Engine) -> None:
    """E6; the engine works as before."""
    x = engine.leaf(ones())
    with pytest.raises(Planted, match="own error"):
        engine.backward(engine.op(ones(), throws, [x]), ones())
    y = engine.leaf(ones())
    engine.backward(engine.op(ones(), times(2), [y]), ones())
    assert same_bits(grad(engine, y), ones() * 2)


def test_no_leaf_is_left_half_summed(engine: Engine) -> None:
    """E6: of a leaf with several uses, one of which fails."""
    for bad in range(8):
        x = engine.leaf(ones())
        ops = [engine.op(ones(), throws if i == bad else times(2), [x]) for i in range(8)]
        with pytest.raises(Planted):
            engine.backward(engine.op(ones(), times(*[1] * 8), ops), ones())
        assert grad(engine, x) is None


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_gradients_is_an_error(engine: Engine, count: int) -> None:
    """V1."""
    x, y = engine.leaf(ones()), engine.leaf(ones())
    root = engine.op(ones(), lambda g: (g,) * count, [x, y])
    refuses(engine, root, ones())


def test_a_gradient_of_another_shape_is_an_error(engine: Engine) -> None:
    """V2."""
    x = engine.leaf(ones())
    root = engine.op(ones(), times(1), [engine.op(ones(), lambda g: (np.ones(4),), [x])])
    refuses(engine, root, ones())


def test_a_first_gradient_of_another_shape_is_an_error(engine: Engine) -> None:
    """V2."""
    root = engine.op(ones(), times(1), [engine.leaf(ones())])
    refuses(engine, root, np.ones(4))


# Threads


def test_passes_of_several_threads_are_independent(engine: Engine) -> None:
    """E15."""

    has_part(engine, "threads")

    def run() -> None:
        for seed in range(10):
            graph = Graph(engine, seed, 12)
            engine.backward(graph.root, ones())
            assert sorted(graph.calls) == sorted(i for i in graph.reached if i >= 3)
            assert all(same_bits(g, ones() * graph.want[i]) for i, g in graph.got.items())

    at_once(run, run, run)


def test_each_pass_of_several_threads_is_summed_once(engine: Engine) -> None:
    """E15, L5."""
    has_part(engine, "threads")
    has_part(engine, "accumulate")
    x = engine.leaf(ones())

    def run(factor: float) -> Callable[[], None]:
        def passes() -> None:
            for _ in range(100):
                engine.backward(engine.op(ones(), times(factor), [x]), ones())

        return passes

    at_once(run(1), run(1000), run(1e6))
    assert same_bits(grad(engine, x), ones() * 100 * 1001001)


# Streams, on the simulated machine, which raises RaceError where an order is missing


@pytest.fixture
def streamed(engine: Engine) -> Iterator[Engine]:
    """The engine under test, for laws about streams."""
    has_part(engine, "streams")
    if not takes(engine.op, "stream"):
        pytest.skip("this engine's op has no stream=")
    with fanin.set_options(warn_stream_mismatch=False):  # of fanin's leaves
        yield engine


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_of_several_streams_waits_for_each_producer(streamed: Engine, seed: int) -> None:
    """S12, E4: two operations on streams of their own, and one on a third that gets their sum."""
    found: list[NDArray] = []
    with fanin.sim.Machine(seed=seed) as m:
        one, two, three = (m.stream() for _ in range(3))
        value = m.array(np.zeros(3))
        x = streamed.leaf(value)

        def consume(g: Any) -> Sequence[Any]:
            m.launch(three, lambda v: found.append(v.copy()), reads=[g], name="consume")
            return (late(m, three, ones()),)

        y = streamed.op(value, consume, [x], stream=three)
        a = streamed.op(value, lambda g: (late(m, one, ones() * 2),), [y], stream=one)
        b = streamed.op(value, lambda g: (late(m, two, ones() * 5),), [y], stream=two)
        root = streamed.op(value, lambda g: (g, g), [a, b], stream=three)
        streamed.backward(root, value)
        m.synchronize()
    assert same_bits(found[0], ones() * 7)


@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_is_handed_on_waits_for_its_producer(streamed: Engine, seed: int) -> None:
    """S18."""
    found: list[NDArray] = []
    with fanin.sim.Machine(seed=seed) as m:
        one, two = m.stream(), m.stream()
        value = m.array(np.zeros(3))

        def consume(g: Any) -> Sequence[Any]:
            found.append(seen(m, two, g))
            return (g,)

        y = streamed.op(value, consume, [streamed.leaf(value)], stream=two)
        streamed.backward(streamed.op(value, lambda g: (late(m, one, ones() * 2),), [y], stream=one), value)
    assert same_bits(found[0], ones() * 2)
