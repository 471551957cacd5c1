"""The tape: gradients are right, every sum is a buffer's, nodes run in their order and on their streams."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.cli import plain
from fanin.tape import Var

Array = Any
RNG = np.random.default_rng


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """Leaves consume on streams of their own here: S6 would warn once."""
    with fanin.set_options(warn_stream_mismatch=False):
        yield


def host(g: Any) -> Array:
    if isinstance(g, fanin.Sparse):
        dense = np.zeros(g.shape)
        index, values = (p if isinstance(p, np.ndarray) else p.numpy() for p in g.parts)
        np.add.at(dense, tuple(index), values)
        return dense
    return g if isinstance(g, np.ndarray) else g.numpy()


# Values


def table(t: Var) -> Var:
    """An embedding that is tied to the layer after it: sparse and dense gradients meet."""
    return tape.embedding(t, tape.array(np.array([[0, 1, 1], [2, 0, 0]]))).reshape(6, 3) @ t.T


def tied(w: Var, x: Var) -> Var:
    h = tape.tanh(x @ w)
    h = h + tape.tanh(h @ w)
    return h @ w.T


def parts(a: Var) -> Var:
    first, _, third = tape.split(a, 3)
    return first * third + first


OPERATIONS: dict[str, tuple[Callable[..., Var], list[tuple[int, ...]]]] = {
    "add, broadcast": (lambda a, b: a + b, [(3, 4), (4,)]),
    "sub, broadcast": (lambda a, b: a - b, [(4,), (3, 4)]),
    "mul, broadcast": (lambda a, b: a * b, [(3, 4), (3, 1)]),
    "numbers": (lambda a: 1 - (2 * a + 3) * a - -a, [(3,)]),
    "matmul": (lambda a, b: a @ b, [(3, 4), (4, 5)]),
    "tanh": (tape.tanh, [(3, 4)]),
    "relu": (tape.relu, [(3, 4)]),
    "reshape, transpose": (lambda a: a.reshape(4, 3).T, [(3, 4)]),
    "transpose by axes": (lambda a: tape.transpose(a, (1, 2, 0)) * 2, [(2, 3, 4)]),
    "split": (parts, [(6, 2)]),
    "sum": (lambda a: a.sum() * a.sum(1), [(3, 4)]),
    "mean": (lambda a: a.mean((0, 2)), [(3, 4, 2)]),
    "pool": (lambda a: tape.pool(a, 2), [(2, 4, 4, 3)]),
    "conv2d": (tape.conv2d, [(2, 4, 4, 3), (3, 3, 3, 2)]),
    "cross entropy": (lambda z: tape.cross_entropy(z, tape.array(np.array([0, 2, 1]))), [(3, 4)]),
    "embedding, tied": (table, [(4, 3)]),
    "residual, tied": (tied, [(4, 4), (3, 4)]),
}


@pytest.mark.rule("A9")
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    f, shapes = OPERATIONS[name]
    rng, eps = RNG(len(name)), 1e-6
    values = [rng.normal(size=s) for s in shapes]
    parameters = [tape.parameter(v) for v in values]
    y = f(*parameters)
    seed = rng.normal(size=y.shape)
    tape.backward(y, [seed])
    for value, p in zip(values, parameters, strict=True):
        wanted = np.zeros_like(value)
        for i in np.ndindex(*value.shape):
            sides = []
            for d in (eps, -eps):
                keep, value[i] = value[i], value[i] + d
                sides.append((f(*map(tape.parameter, values)).numpy() * seed).sum())
                value[i] = keep
            wanted[i] = (sides[0] - sides[1]) / (2 * eps)
        np.testing.assert_allclose(host(p.grad), wanted, rtol=1e-6, atol=1e-7)


def test_the_demos_plain_gradients_are_those_of_finite_differences() -> None:
    """The reference of the demo is checked too."""
    rng = RNG(3)
    shapes = {"intensity": (17, 2), "position": (8, 8, 2), "conv": (3, 3, 2, 3), "block": (3, 3, 3, 3)}
    shapes |= {"side": (128, 48), "out": (48, 10), "bias": (10,)}
    p = {name: rng.normal(size=s) / 4 for name, s in shapes.items()}
    digits, labels = rng.integers(0, 17, (5, 8, 8)), rng.integers(0, 10, 5)
    _, gradients, _ = plain.gradients(p, digits, labels, 9, 2)
    assert gradients.keys() == p.keys()
    for name, value in p.items():
        direction = rng.normal(size=value.shape)
        losses = [plain.gradients({**p, name: value + d * direction}, digits, labels, 9, 2)[0] for d in (1e-5, -1e-5)]
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx((gradients[name] * direction).sum(), rel=1e-6), name


# Second derivatives


def curve(f: Callable[..., Var], values: list[Array], seed: Array, direction: list[Array]) -> list[Array]:
    """The gradients of <gradients of <f, seed>, direction>, where f is a function of parameters."""
    parameters = [tape.parameter(v) for v in values]
    slopes = tape.grad(f(*parameters), parameters, [seed], create_graph=True)
    there = [(s * d).sum() for s, d in zip(slopes, direction, strict=True) if s.node is not None]
    if not there:
        return [np.zeros_like(v) for v in values]
    curves = tape.grad(there, parameters)
    return [np.zeros_like(v) if c is None else host(c) for c, v in zip(curves, values, strict=True)]


@pytest.mark.rule("A1", "A9")
@pytest.mark.parametrize("name", OPERATIONS)
def test_second_derivatives_are_those_of_finite_differences(name: str) -> None:
    f, shapes = OPERATIONS[name]
    rng, eps = RNG(len(name)), 1e-6
    values = [rng.normal(size=s) for s in shapes]
    seed = rng.normal(size=f(*map(tape.parameter, values)).shape)
    direction = [rng.normal(size=s) for s in shapes]

    def slopes(at: list[Array]) -> list[Array]:
        parameters = [tape.parameter(v) for v in at]
        return [host(g) for g in tape.grad(f(*parameters), parameters, [seed])]

    got = curve(f, values, seed, direction)
    ahead = slopes([v + eps * d for v, d in zip(values, direction, strict=True)])
    behind = slopes([v - eps * d for v, d in zip(values, direction, strict=True)])
    for g, a, b in zip(got, ahead, behind, strict=True):
        np.testing.assert_allclose(g, (a - b) / (2 * eps), rtol=1e-5, atol=1e-7)


def test_hessian_vector_products_are_those_of_hips_autograd() -> None:
    autograd = pytest.importorskip("autograd")
    anp = pytest.importorskip("autograd.numpy")
    rng = RNG(0)
    x0, w0, v0, d = (rng.normal(size=s) for s in ((5, 4), (4, 4), (4,), (4, 4)))

    def theirs(w: Any) -> Any:
        h = anp.tanh(anp.dot(x0, w))
        return anp.sum(anp.sum((h * h * v0), 1) * anp.mean(anp.maximum(h, 0) + anp.dot(h, w), 1))

    def ours(w: Var) -> Var:
        h = tape.tanh(tape.array(x0) @ w)
        return ((h * h * v0).sum(1) * (tape.relu(h) + h @ w).mean(1)).sum()

    w = tape.parameter(w0)
    [slope] = tape.grad(ours(w), [w], create_graph=True)
    slope_theirs = autograd.grad(theirs)
    np.testing.assert_allclose(slope.numpy(), slope_theirs(w0), rtol=1e-12)
    [product] = tape.grad((slope * d).sum(), [w], create_graph=True)
    np.testing.assert_allclose(product.numpy(), autograd.grad(lambda w: anp.sum(slope_theirs(w) * d))(w0), rtol=1e-11)
    third = autograd.grad(lambda w: anp.sum(autograd.grad(lambda w: anp.sum(slope_theirs(w) * d))(w) * d))
    np.testing.assert_allclose(tape.grad((product * d).sum(), [w])[0], third(w0), rtol=1e-10)


@pytest.mark.rule("L6")
def test_while_recording_grad_is_a_new_object_that_can_be_differentiated() -> None:
    w = tape.parameter(np.array([2.0, 3.0]))
    cube = (w * w * w).sum()
    tape.backward(cube, create_graph=True)
    first = w.grad
    assert isinstance(first, Var) and first.numpy().tolist() == [12, 27]
    assert tape.grad(first.sum(), [w])[0].tolist() == [12, 18]
    tape.backward(cube, create_graph=True)
    assert w.grad is not first
    assert first.numpy().tolist() == [12, 27]
    assert w.grad.numpy().tolist() == [24, 54]
    w.grad = None
    tape.backward(cube)
    assert isinstance(w.grad, np.ndarray)


def test_an_operation_of_ones_own_records_itself_if_its_backward_is_written_for_vars() -> None:
    w = tape.parameter(np.array([2.0, 3.0]))
    [y] = tape.custom("square", lambda x: [x * x], [w], lambda grads, need: [grads[0] * 2 * w])
    [slope] = tape.grad(y * y, [w], create_graph=True)
    assert slope.numpy().tolist() == [32, 108]
    assert tape.grad(slope, [w])[0].tolist() == [48, 108]
    [z] = tape.custom("wrong", lambda x: [x * 2], [w], lambda grads, need: [grads[0].reshape(1, 2, 1)])
    with pytest.raises(ValueError, match=r"expected a gradient of shape \(2,\)"):
        tape.grad(z, [w], create_graph=True)


def test_second_derivatives_on_streams_are_those_on_the_cpu() -> None:
    rng = RNG(2)
    x0, w0, d = rng.normal(size=(3, 4)), rng.normal(size=(4, 4)), rng.normal(size=(4, 4))

    def product(device: tape.Device, on: list[Callable[[], Any]]) -> Array:
        w = tape.parameter(w0, device)
        with on[0]():
            h = tape.tanh(tape.array(x0, device) @ w)
        with on[1]():
            y = (h @ w * h).sum()
        with on[0]():
            [slope] = tape.grad(y, [w], create_graph=True)
            [got] = tape.grad((slope * d).sum(), [w])
        return host(got)

    wanted = product(tape.cpu, [nullcontext] * 2)
    for seed in range(3):
        with fanin.sim.Machine(1, seed) as m:
            [d0] = tape.devices(m)
            got = product(d0, [partial(fanin.stream, m.stream()) for _ in range(2)])
            assert m.races == 0
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_a_graph_may_be_deep() -> None:
    w = tape.parameter(np.ones(2))
    x = w
    for _ in range(3000):
        x = x + w
    tape.backward(x)
    assert (w.grad == 3001).all()


def test_unreferenced_objects_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        w = tape.parameter(np.ones((2, 2)))
        loss = tape.tanh(w @ w).sum()
        tape.backward(loss)
        node = weakref.ref(loss.node)
        del loss
        assert node() is None
    finally:
        gc.enable()


# Buffers


@pytest.mark.rule("A16", "E1")
def test_every_fan_in_is_a_buffers_sum_and_a_key_is_the_number_of_an_edge() -> None:
    w = tape.parameter(np.ones(6), name="w")
    a, b, c = tape.split(w * w, 3)
    with fanin.trace() as t:
        tape.backward((a + a + b).sum())
    adds = [str(line).split() for line in t if str(line).startswith("add")]
    slots = [(words[2], " ".join(words[3:7])) for words in adds]
    assert slots == [
        ("split", "slot 0, key 0"),
        ("split", "slot 0, key 1"),
        ("mul", "slot 0, key 0"),
        ("mul", "slot 0, key 1"),
        ("w", "slot 0, key 0"),
        ("w", "slot 0, key 1"),
    ], "a from both sides; b, alone in its slot, is handed through, c gets nothing; two parts reach the product"
    assert (w.grad == [4, 4, 2, 2, 0, 0]).all()
    assert c.shape == (2,)


@pytest.mark.rule("L5")
def test_a_second_pass_adds_to_grad_in_place() -> None:
    w = tape.parameter(np.ones((2, 2)))
    loss = (w @ w).sum()
    tape.backward(loss)
    first = w.grad
    assert (first == 4).all()
    tape.backward(loss)
    assert w.grad is first
    assert (first == 8).all()
    w.grad = None
    tape.backward(loss)
    assert w.grad is not first
    assert (first == 8).all()


@pytest.mark.rule("L2", "L4")
def test_two_leaves_that_get_one_gradient_do_not_share_it() -> None:
    a, b = tape.parameter(np.zeros(3)), tape.parameter(np.zeros(3))
    seed = np.ones(3)
    tape.backward(a + b, [seed])
    assert not np.shares_memory(a.grad, b.grad)
    tape.backward(a * 2, [seed])
    assert (a.grad == 3).all()
    assert (b.grad == 1).all()
    assert (seed == 1).all()


@pytest.mark.rule("S2")
def test_undefined_gradients_reach_no_parameter() -> None:
    w = tape.parameter(np.ones(4), name="w")
    ran = []

    def none(grads: list[Any], need: list[bool]) -> list[Any]:
        ran.append(grads)
        return [None]

    [y] = tape.custom("stop", lambda x: [x + 0], [w * 2], none)
    tape.backward(y)
    assert len(ran) == 1
    assert w.grad is None, "undefined is not zero"


# The order of nodes


def logged(log: list[str], name: str, *inputs: Var) -> Var:
    """The sum of its inputs; records when its backward runs."""

    def back(grads: list[Any], need: list[bool]) -> list[Any]:
        log.append(name)
        return grads * len(inputs)

    [y] = tape.custom(name, lambda *xs: [sum(xs)], inputs, back)
    return y


@pytest.mark.rule("E1", "E2")
def test_later_nodes_run_first_and_no_node_before_all_its_gradients_arrived() -> None:
    log: list[str] = []
    w = tape.parameter(np.ones(2))
    first = logged(log, "first", w)
    left = logged(log, "left", first)
    right = logged(log, "right", first)
    join = logged(log, "join", left, right)
    side = logged(log, "side", first, join)
    tape.backward(side)
    assert log == ["side", "join", "right", "left", "first"]
    assert (w.grad == 3).all()


@pytest.mark.rule("E2")
def test_leaves_go_before_all() -> None:
    log: list[str] = []
    early, late = tape.parameter(np.ones(2)), tape.parameter(np.ones(2))
    early.register_hook(lambda g: log.append("early leaf"))
    late.register_hook(lambda g: log.append("late leaf"))
    x = logged(log, "x", early)
    tape.backward(logged(log, "y", x, late))
    assert log == ["y", "late leaf", "x", "early leaf"]


@pytest.mark.rule("E4")
def test_a_hook_gets_the_finished_sum_once_and_may_replace_it() -> None:
    w = tape.parameter(np.ones(3))
    seen: list[Any] = []
    h = w * 2
    h.register_hook(lambda g: seen.append(g.copy()))
    h.register_hook(lambda g: g * 10)
    tape.backward(h + h * 3)
    assert [s.tolist() for s in seen] == [[4, 4, 4]]
    assert (w.grad == 80).all()


@pytest.mark.rule("E7")
def test_a_pass_may_start_inside_a_node() -> None:
    w = tape.parameter(np.full(2, 3.0))

    def back(grads: list[Any], need: list[bool]) -> list[Any]:
        inner = tape.parameter(w.numpy())
        tape.backward((inner * inner).sum())  # recomputed, as checkpoints do
        return [inner.grad * grads[0]]

    [y] = tape.custom("checkpoint", lambda x: [(x * x).sum()], [w], back)
    tape.backward(y * 2)
    assert (w.grad == 12).all()


@pytest.mark.rule("E8")
def test_grad_runs_only_what_the_inputs_need_and_leaves_grad_alone() -> None:
    log: list[str] = []
    w, other = tape.parameter(np.ones(2)), tape.parameter(np.ones(2))
    x = logged(log, "x", w)
    y = logged(log, "y", x)
    beside = logged(log, "beside", other)
    loss = logged(log, "loss", y, x, beside)
    gx, gw = tape.grad(loss, [x, w])
    assert gx.tolist() == [2, 2]
    assert gw.tolist() == [2, 2]
    assert log == ["loss", "y", "x"]
    assert w.grad is None
    log.clear()
    [gx] = tape.grad([loss, beside], [x], [np.full(2, 5.0), np.ones(2)])
    assert gx.tolist() == [10, 10]
    assert log == ["loss", "y"], "x itself need not run"
    assert tape.grad(y, [other]) == [None]


# Errors


@pytest.mark.rule("E6")
def test_an_error_ends_the_pass_and_leaves_whole_gradients_or_none() -> None:
    a, b = tape.parameter(np.ones(2), name="a"), tape.parameter(np.ones(2), name="b")
    tape.backward(a + b)
    kept = b.grad

    def fail(grads: list[Any], need: list[bool]) -> list[Any]:
        raise ZeroDivisionError("of its own")

    [x] = tape.custom("breaks", lambda x: [x + 0], [b], fail)
    loss = x + b + b + a  # b has had two of its three gradients when "breaks" breaks
    with pytest.raises(ZeroDivisionError, match="of its own") as e:
        tape.backward(loss)
    assert e.value.__notes__[0] == f"in breaks (node {x.node.sequence_nr}): 4 of 6 nodes had run"
    assert e.value.__notes__[1].startswith("lost with the pass: edge 1 of add")
    assert b.grad is kept
    assert (b.grad == 1).all()
    assert (a.grad == 2).all(), "a had its whole gradient before"
    tape.backward(a + b)
    assert (b.grad == 2).all()


def returning(*gradients: Any) -> Var:
    """A node named Mul with two inputs of shape (3, 4) that returns these."""
    a, b = tape.parameter(np.ones((3, 4))), tape.parameter(np.ones((3, 4)))
    [y] = tape.custom("Mul", lambda x, y: [x * y], [a, b], lambda grads, need: gradients)
    return y


@pytest.mark.rule("V1")
@pytest.mark.parametrize("given", [(), (np.ones((3, 4)),), (None, None, None)])
def test_as_many_gradients_as_inputs(given: tuple[Any, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"^Mul returned an invalid number of gradients: expected 2, got {len(given)}"
    ):
        tape.backward(returning(*given))


@pytest.mark.rule("V2", "V3")
def test_an_invalid_gradient_is_named_by_node_and_index() -> None:
    good = np.ones((3, 4))
    with pytest.raises(
        ValueError, match=r"^Mul returned an invalid gradient at index 1: expected .*\(3, 4\).*, got \(4, 3\)"
    ):
        tape.backward(returning(good, good.T))
    with pytest.raises(ValueError, match=r"^Mul returned an invalid gradient at index 0: .*complex128"):
        tape.backward(returning(good * 1j, good))
    with pytest.raises(TypeError, match=r"^Mul returned an invalid gradient at index 0: "):
        tape.backward(returning("words", good))
    tape.backward(returning(None, np.ones((2, 3, 4))))  # nothing, and what broadcasts from the input: fine


def test_the_error_for_misuse_names_the_right_call() -> None:
    x = tape.array(np.ones(2))
    for call, words in [
        (lambda: tape.backward(x), "depends on no parameter"),
        (lambda: tape.grad(x * 2, [x]), "make it a tape.parameter"),
        (lambda: x.grad, "tape.grad"),
        (lambda: x.register_hook(print), "constant"),
    ]:
        with pytest.raises(TypeError, match=words):
            call()
    w = tape.parameter(np.ones(3))
    with pytest.raises(ValueError, match="expected 1 gradient to begin with, got 2"):
        tape.backward(w * 2, [None, None])
    with pytest.raises(
        ValueError, match=r"backward was given an invalid gradient at index 0: expected .*\(3,\).*, got \(\)"
    ):
        tape.backward(w * 2, [1.0])
    with pytest.raises(ValueError, match="3 rows cannot be cut into 2"):
        tape.split(w, 2)


# On the simulated device


class Launches(fanin.sim.Machine):
    """A machine that writes down which kernel was queued where."""

    log: list[tuple[str, Any]]

    def launch(self, stream: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault("log", []).append((kwargs["name"], stream))
        super().launch(stream, fn, *args, **kwargs)


def network(p: list[Var], x: Var, side: Any) -> Var:
    """A branch on another stream, a residual join, tied weights, a broadcast."""
    w, b = p
    h = tape.tanh(x @ w + b)
    with side:
        branch = tape.relu(h @ w)
    return ((h + branch + tape.tanh(h @ w)) * b).sum()


def on_two_devices(m: fanin.sim.Machine, passes: int = 1, budget: float | None = None) -> list[Array]:
    """Gradients of four micro-batches over two devices and four streams, and of the first input."""
    rng = RNG(11)
    d = tape.devices(m)
    with fanin.stream(m.stream(device=0)):
        p = [tape.parameter(rng.normal(size=s).astype("f4"), d[0], "w") for s in ((5, 5), (5,))]
    streams = [[m.stream(device=i) for _ in range(3)] for i in (0, 1)]
    inputs = [rng.normal(size=(3, 5)).astype("f4") for _ in range(4)]
    pixels = tape.parameter(inputs[0], d[0], "pixels")
    for _ in range(passes):
        there = [v.to(d[1]) for v in p]
        losses = []
        for i, x in enumerate(inputs):
            with fanin.stream(streams[i % 2][i // 2]):
                q, v = (p, there)[i % 2], pixels if i == 0 else tape.array(x, d[i % 2])
                losses.append(network(q, v, fanin.stream(streams[i % 2][2])))
        tape.backward(losses, budget=budget)
    [dx] = tape.grad(losses, [pixels])
    return [*(v.grad.numpy() for v in p), pixels.grad.numpy(), dx.numpy()]


def on_the_cpu(passes: int = 1) -> list[Array]:
    rng = RNG(11)
    p = [tape.parameter(rng.normal(size=s).astype("f4")) for s in ((5, 5), (5,))]
    inputs = [rng.normal(size=(3, 5)).astype("f4") for _ in range(4)]
    pixels = tape.parameter(inputs[0])
    for _ in range(passes):
        tape.backward([network(p, pixels if i == 0 else tape.array(x), nullcontext()) for i, x in enumerate(inputs)])
    [dx] = tape.grad(network(p, pixels, nullcontext()), [pixels])
    return [*(v.grad for v in p), pixels.grad, dx]


@pytest.mark.core
@pytest.mark.rule("A15", "S20")
@pytest.mark.parametrize("schedule", ["seeded", "fifo", "lifo", "round robin"])
def test_streams_and_devices_change_nothing(schedule: str) -> None:
    wanted = on_the_cpu(passes=2)
    bits = set()
    for seed in range(3 if schedule == "seeded" else 1):
        for budget in (None, 0, float("inf")):
            with fanin.sim.Machine(2, seed, schedule=schedule) as m:
                got = on_two_devices(m, passes=2, budget=budget)
                assert m.races == 0
            for g, w in zip(got, wanted, strict=True):
                np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5)
            bits.add(b"".join(g.tobytes() for g in got))
    assert len(bits) == 1, "keys make the bits the same whatever the schedule and the budget"


@pytest.mark.core
@pytest.mark.parametrize("word", ["S9.record", "S12.record", "S12.wait", "S12.mark", "S18.wait", "S20.wait"])
def test_a_wait_that_is_left_out_is_found(word: str) -> None:
    with pytest.raises(fanin.RaceError), fanin.sim.Machine(2) as m:
        m.leave_out(word)
        on_two_devices(m, passes=2)


@pytest.mark.rule("E4")
def test_the_backward_runs_on_the_stream_of_the_forward() -> None:
    with Launches(2) as m:
        [d0, d1] = tape.devices(m)
        a, b, c = m.stream(device=0), m.stream(device=0), m.stream(device=1)
        w = tape.parameter(np.ones((2, 2)), d0)
        with fanin.stream(a):
            x = tape.tanh(w)
        with fanin.stream(b):
            y = x @ w
        with fanin.stream(c):
            z = tape.relu(y.to(d1, on=d1))
            far = z * tape.array(np.ones((2, 2)), d1)
        tape.backward(far)
        assert host(w.grad).shape == (2, 2)
        where = {name: {s for n, s in m.log if n == name} for name, _ in m.log}
        for name, stream in {"tanh": a, "matmul": b, "copy": c, "relu": c, "mul": c}.items():
            assert where[name] == where[f"{name}'"] == {stream}, name


@pytest.mark.rule("A12")
def test_gradients_of_what_is_read_over_the_link_go_back_to_where_it_lies() -> None:
    with fanin.sim.Machine(2) as m:
        [d0, d1] = tape.devices(m)
        w = tape.parameter(np.full(3, 2.0), d1)
        with fanin.stream(m.stream(device=0)):
            y = tape.array(np.arange(6.0).reshape(2, 3), d0) * w
        tape.backward(y)
        assert w.grad.device == "sim:1"
        assert w.grad.numpy().tolist() == [3, 5, 7]


@pytest.mark.rule("S22")
def test_copies_may_share_memory_for_their_sums() -> None:
    with fanin.sim.Machine(2) as m:
        [d0, d1] = tape.devices(m)
        stage = d1.put(np.zeros(4))
        push = m.stream(device=0)
        with fanin.stream(push):
            ws = [tape.parameter(np.full(4, float(i + 1)), d0) for i in range(3)]
            copies = [w.to(d1, stage=stage) for w in ws]
        losses = []
        for _ in range(2):
            with fanin.stream(m.stream(device=1)):
                losses.append((copies[0] * copies[1] * copies[2]).sum())
        tape.backward(losses)
        assert [w.grad.numpy().tolist() for w in ws] == [[12.0] * 4, [6.0] * 4, [4.0] * 4]


def test_copies_that_share_memory_for_their_sums_do_so_on_the_cpu_too() -> None:
    stage = np.zeros(4)
    ws = [tape.parameter(np.full(4, float(i + 1))) for i in range(3)]
    copies = [w.to(tape.cpu, stage=stage) for w in ws]
    losses = [(copies[0] * copies[1] * copies[2]).sum() for _ in range(2)]
    tape.backward(losses)
    assert [w.grad.tolist() for w in ws] == [[12.0] * 4, [6.0] * 4, [4.0] * 4]
    assert not any(np.shares_memory(w.grad, stage) for w in ws)


def test_sparse_gradients_cross_devices() -> None:
    with fanin.sim.Machine(2) as m:
        [d0, d1] = tape.devices(m)
        t = tape.parameter(np.arange(8.0).reshape(4, 2), d0)
        rows = [np.array([0, 3, 3]), np.array([1, 3])]
        there = t.to(d1)
        with fanin.stream(m.stream(device=0)):
            near = tape.embedding(t, tape.array(rows[0], d0))
        with fanin.stream(m.stream(device=1)):
            far = tape.embedding(there, tape.array(rows[1], d1))
        tape.backward([near, far])
        assert isinstance(t.grad, fanin.Sparse)
        assert host(t.grad)[:, 0].tolist() == [1, 1, 0, 3]


def test_values_of_two_machines_do_not_mix() -> None:
    with fanin.sim.Machine(1) as m:
        [d0] = tape.devices(m)
        w = tape.parameter(np.ones(2), d0)
        with pytest.raises(ValueError, match=r"add: .* lie on no one machine"):
            w + tape.array(np.ones(2))


def test_an_update_waits_for_the_pass_and_the_next_pass_for_the_update() -> None:
    with fanin.sim.Machine(1, 5) as m:
        [d0] = tape.devices(m)
        work = m.stream()
        w = tape.parameter(np.ones(2), d0)
        for _ in range(3):
            with fanin.stream(work):
                loss = (w * w).sum()
            tape.backward(loss)
            tape.update(lambda g, w: np.subtract(w, 0.25 * g, w), [w.grad], [w])
            w.grad = None
        assert w.numpy().tolist() == [0.125, 0.125]
        assert m.races == 0


# What would be a wrong number


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            lambda w: w.reshape(2, 2, 2) @ w.reshape(2, 2, 2),
            ValueError,
            r"expected two matrices, got shapes \(2, 2, 2\)",
        ),
        (lambda w: w.reshape(2, 4) @ np.ones(4), ValueError, r"expected two matrices, got shapes \(2, 4\) and \(4,\)"),
        (lambda w: w.reshape(2, 4) @ np.ones((3, 4)), ValueError, r"got shapes \(2, 4\) and \(3, 4\); \(n, k\) with"),
        (lambda w: w.reshape(2, 4) @ 2, ValueError, r"got shapes \(2, 4\) and \(\)"),
        (lambda w: w.reshape(2, 4).sum(5), ValueError, r"axis 5: expected axes of a value of shape \(2, 4\), each"),
        (lambda w: w.reshape(2, 4).mean(-3), ValueError, r"axis -3: expected axes of a value of shape \(2, 4\)"),
        (lambda w: w.reshape(2, 4).sum((0, -2)), ValueError, r"axis \(0, -2\): expected axes"),
        (lambda w: w.sum().sum(0), ValueError, r"axis 0: expected axes of a value of shape \(\)"),
        (
            lambda w: tape.array(np.arange(8), w.device) * np.full(8, 0.5),
            TypeError,
            "float64 beside .* would lose values in int64",
        ),
        (lambda w: w * np.full(8, 1j), TypeError, "complex128 beside .* would lose values in float64"),
        (lambda w: tape.backward(w * 2, [np.full(8, 1j)]), TypeError, "complex128 beside"),
        (lambda w: tape.parameter([2, 1], w.device), ValueError, "real or complex floats, got int64"),
        (lambda w: tape.cross_entropy(w.reshape(2, 4), np.array([1])), ValueError, "expected a label for each row"),
        (lambda w: tape.split(w, 0), ValueError, "8 rows cannot be cut into 0 equal parts"),
    ],
)
def test_an_expression_without_a_meaning_is_refused_where_it_is_written(
    wrong: Callable[[Var], object], error: type[Exception], message: str
) -> None:
    with fanin.sim.Machine() as m:
        for device in [tape.cpu, *tape.devices(m)]:
            with pytest.raises(error, match=message):
                wrong(tape.parameter(np.ones(8), device))


def test_a_label_below_zero_is_no_label_from_the_end() -> None:
    with pytest.raises(IndexError, match="expected non-negative labels, got -1"):
        tape.cross_entropy(tape.parameter(np.ones((2, 3))), np.array([0, -1]))


def test_an_array_of_a_callers_own_is_read_when_the_operation_is_called() -> None:
    with fanin.sim.Machine(1) as m:
        [d0] = tape.devices(m)
        w, t = tape.parameter(np.ones(3), d0), tape.parameter(np.arange(6.0).reshape(3, 2), d0)
        factor, index = np.full(3, 2.0), np.array([0, 1])
        product, read = w * factor, tape.embedding(t, index)
        factor[:], index[:] = 7, 2  # as for a copy of the same program on the CPU, that is too late
        tape.backward([product, read])
        assert product.numpy().tolist() == w.grad.numpy().tolist() == [2.0, 2.0, 2.0]
        assert read.numpy().tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert host(t.grad).tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def test_an_ndarray_may_be_on_either_side_of_a_product() -> None:
    x, w = RNG(0).normal(size=(2, 3)), tape.parameter(RNG(1).normal(size=(3, 3)))
    tape.backward(((x @ w) @ w.numpy()).sum())
    assert np.allclose(w.grad, x.T @ np.ones((2, 3)) @ w.numpy().T)


@pytest.mark.parametrize("made", [tape.tanh, lambda t: t.T.T, lambda t: tape.split(t, 2)[1]])
def test_an_embedding_of_what_an_operation_made_has_the_gradient_of_the_dense_one(made: Callable[[Var], Var]) -> None:
    start = RNG(0).normal(size=(4, 3))
    index = np.array([[0, 3], [3, 1]])

    def slope(op: Any, device: tape.Device) -> Array:
        w = tape.parameter(start, device)
        y = made(w)
        rows = tape.array(index[:, :1] % y.shape[0], device)
        read = op(y, tape.array(index % y.shape[0], device))
        tape.backward([read * read, op(y, rows)])
        return host(w.grad)

    expected = slope(tape.gathered, tape.cpu)
    assert np.abs(expected).max() > 1
    with fanin.sim.Machine(1) as m:
        for device in [tape.cpu, *tape.devices(m)]:
            assert np.allclose(slope(tape.embedding, device), expected)
