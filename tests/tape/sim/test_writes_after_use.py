"""A write to what a derivative reads, between an operation and a pass: the gradient of then, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.tape import Var

Make = Callable[[tape.Device], tuple[Var, Any]]  # a result, and what is written


def start(device: tape.Device, *shape: int) -> Var:
    return tape.parameter(np.arange(1.0, 1 + np.prod(shape)).reshape(shape) / 4, device)


def own(device: tape.Device) -> tuple[Var, Var]:
    w = start(device, 3)
    return w * w, w


def factor(device: tape.Device) -> tuple[Var, Var]:
    w, x = start(device, 3), tape.array(np.ones(3), device)
    return x * w, x


def matrix(device: tape.Device) -> tuple[Var, Var]:
    w, x = start(device, 2, 2), tape.array(np.ones((2, 2)), device)
    return w @ x, x


def left_matrix(device: tape.Device) -> tuple[Var, Var]:
    w, x = start(device, 2, 2), tape.array(np.ones((2, 2)), device)
    return x @ w, x


def result_of_tanh(device: tape.Device) -> tuple[Var, Var]:
    y = tape.tanh(start(device, 3))
    return y, y


def sign(device: tape.Device) -> tuple[Var, Var]:
    w = start(device, 3)
    return tape.relu(w), w


def index(op: Any) -> Make:
    def make(device: tape.Device) -> tuple[Var, Var]:
        i = tape.array(np.array([0, 1, 1]), device)
        return op(start(device, 3, 2), i), i

    return make


def exponents(device: tape.Device) -> tuple[Var, Var]:
    z = start(device, 2, 3)
    return tape.softmax(z), z


def logits(device: tape.Device) -> tuple[Var, Var]:
    z = start(device, 2, 3)
    return tape.cross_entropy(z, tape.array(np.array([0, 2]), device)), z


def labels(device: tape.Device) -> tuple[Var, Var]:
    i = tape.array(np.array([0, 2]), device)
    return tape.cross_entropy(start(device, 2, 3), i), i


def a_view(device: tape.Device) -> tuple[Var, Var]:
    w = start(device, 4)
    return w * w, w.reshape(2, 2)


def the_base(device: tape.Device) -> tuple[Var, Var]:
    w = start(device, 4)
    half = tape.split(w, 2)[0]
    return half * half, w


def kernel(device: tape.Device) -> tuple[Var, Var]:
    k = tape.array(np.ones((3, 3, 2, 1)), device)
    return tape.conv2d(start(device, 1, 2, 2, 2), k), k


READ: dict[str, tuple[Make, str]] = {
    "mul, its own factor": (own, "mul"),
    "mul, a constant factor": (factor, "mul"),
    "matmul, right": (matrix, "matmul"),
    "matmul, left": (left_matrix, "matmul"),
    "tanh, its result": (result_of_tanh, "tanh"),
    "relu": (sign, "relu"),
    "embedding, its index": (index(tape.embedding), "embedding"),
    "gathered, its index": (index(tape.gathered), "gathered"),
    "softmax": (exponents, "softmax"),
    "cross entropy, its logits": (logits, "cross entropy"),
    "cross entropy, its labels": (labels, "cross entropy"),
    "conv2d, its kernel": (kernel, "matmul"),
    "through a view": (a_view, "mul"),
    "through the base": (the_base, "mul"),
}


def unread(op: Callable[[Var, Var], Var]) -> Make:
    def make(device: tape.Device) -> tuple[Var, Var]:
        w = start(device, 2, 2)
        return op(w, w + 1), w

    return make


NOT_READ: dict[str, Make] = {
    "neg": unread(lambda w, v: -v),
    "add": unread(lambda w, v: w + v),
    "sub": unread(lambda w, v: w - v),
    "mul by a number": unread(lambda w, v: w * 3),
    "reshape": unread(lambda w, v: w.reshape(4)),
    "transpose": unread(lambda w, v: w.T),
    "split": unread(lambda w, v: tape.split(w, 2)[1]),
    "sum": unread(lambda w, v: w.sum(0)),
    "mean": unread(lambda w, v: w.mean()),
    "a copy": unread(lambda w, v: v * w.to(w.device)),
    "embedding, its table": unread(lambda w, v: tape.gathered(w, np.array([1, 1]))),
    "pool": unread(lambda w, v: tape.pool(w.reshape(1, 2, 2, 1), 2)),
}


def write(x: Any, name: str = "the step") -> None:
    tape.update(lambda v: np.add(v, 1, out=v, casting="unsafe"), [], [x], name=name)


@pytest.fixture(params=["the CPU", "a device"])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "the CPU":
        yield tape.cpu
        return
    with fanin.sim.Machine() as m, fanin.set_options(warn_stream_mismatch=False):
        yield tape.devices(m)[0]


def leaves(y: Var) -> list[Any]:
    found, left = [], [y.edge]
    while left:
        edge = left.pop()
        if isinstance(edge[0], fanin.Leaf):
            found.append(edge)
        else:
            left.extend(e for e in edge[0].edges if e)
    return found


@pytest.mark.parametrize("name", READ)
def test_a_pass_over_an_operation_refuses_a_write_to_what_its_derivative_reads(name: str, device: tape.Device) -> None:
    make, op = READ[name]
    y, written = make(device)
    tape.backward(y)  # before the write: fine
    write(written)
    for run in (lambda: tape.backward(y), lambda: tape.grad(y, [leaf_of(y)])):
        with pytest.raises(
            RuntimeError, match=rf"^{op}: tape.update of 'the step' has changed its .*run the pass before"
        ):
            run()
    y, written = make(device)
    tape.backward(y)  # made anew after the write: fine


def leaf_of(y: Var) -> Var:
    x = Var(y.data, y.device)
    x.edge = leaves(y)[0]
    return x


@pytest.mark.parametrize("name", NOT_READ)
def test_a_write_to_what_no_derivative_reads_changes_no_gradient(name: str, device: tape.Device) -> None:
    def gradient(written: bool) -> Any:
        y, w = NOT_READ[name](device)
        if written:
            write(w)
        tape.backward(y)
        g = w.grad
        return g if isinstance(g, np.ndarray) else g.numpy()

    assert np.array_equal(gradient(True), gradient(False))


@pytest.mark.parametrize("name", ["mul, its own factor", "tanh, its result", "softmax", "cross entropy, its labels"])
def test_a_pass_that_records_itself_refuses_it_too(name: str) -> None:
    y, written = READ[name][0](tape.cpu)
    write(written)
    with pytest.raises(RuntimeError, match="has changed its"):
        tape.grad(y, [leaf_of(y)], create_graph=True)


def test_a_pass_that_records_itself_makes_the_result_again_and_so_needs_the_input_too() -> None:
    w = start(tape.cpu, 3)
    y = tape.tanh(w)
    write(w)
    assert np.allclose(tape.grad(y, [w])[0], 1 - y.numpy() ** 2)
    with pytest.raises(RuntimeError, match=r"tanh: .* has changed its argument 0"):
        tape.grad(y, [w], create_graph=True)


def test_only_gradients_that_are_needed_count() -> None:
    v, w = start(tape.cpu, 3), start(tape.cpu, 3)
    y = v * w
    write(v)
    assert tape.grad(y, [v])[0].tolist() == w.numpy().tolist()
    with pytest.raises(RuntimeError, match=r"mul: tape.update of 'the step' has changed its argument 0"):
        tape.grad(y, [w])


def test_an_update_of_other_memory_changes_nothing() -> None:
    w, other = start(tape.cpu, 3), start(tape.cpu, 3)
    y = w * w
    for _ in range(3):
        write(other)
    tape.update(np.copyto, [], [np.zeros(3), np.ones(3)])
    tape.backward(y)
    assert w.grad.tolist() == (2 * w.numpy()).tolist()


def test_the_name_of_an_update_without_one_is_that_of_its_function() -> None:
    def sgd(v: Any) -> None:
        v -= 1

    y, w = own(tape.cpu)
    tape.update(sgd, [], [w])
    with pytest.raises(RuntimeError, match=r"tape.update of 'sgd' has changed its argument 0, <Var \(3,\) float64"):
        tape.backward(y)


def test_memory_that_is_used_again_was_not_written() -> None:
    """Records of writes end with the memory."""
    w = start(tape.cpu, 3)
    for _ in range(50):
        constant = tape.array(np.ones(3))
        write(constant)
        del constant
        fresh = tape.array(np.ones(3))
        y = w * fresh
        write(tape.array(np.ones(3)))
        tape.backward(y)
    assert w.grad.tolist() == [50] * 3


# ndarrays of a caller's own


OPERANDS: dict[str, tuple[Callable[[Var, Any], Var], Any]] = {
    "mul": (lambda w, x: w * x, np.array([[1.0, 2], [3, 4]])),
    "mul, left": (lambda w, x: x * w, np.array([[1.0, 2], [3, 4]])),
    "mul, as a function": (tape.mul, np.array([[1.0, 2], [3, 4]])),
    "mul, float32": (lambda w, x: w * x, np.array([[1, 2], [3, 4]], "f4")),
    "mul, integers": (lambda w, x: w * x, np.array([[1, 2], [3, 4]])),
    "mul, transposed": (lambda w, x: w * x, np.array([[1.0, 2], [3, 4]]).T),
    "mul, broadcast": (lambda w, x: w * x, np.array([3.0])),
    "matmul": (lambda w, x: w @ x, np.array([[1.0, 2], [3, 4]])),
    "matmul, left": (lambda w, x: x @ w, np.array([[1.0, 2], [3, 4]])),
    "add": (lambda w, x: w + x, np.array([[1.0, 2], [3, 4]])),
    "embedding": (tape.embedding, np.array([1, 1, 0])),
    "gathered": (tape.gathered, np.array([1, 1, 0])),
    "cross entropy": (tape.cross_entropy, np.array([1, 1])),
    "conv2d": (lambda w, x: tape.conv2d(w.reshape(1, 2, 2, 1), x), np.ones((1, 1, 1, 2))),
}


def dense(g: Any) -> Any:
    if isinstance(g, fanin.Sparse):
        made = np.zeros(g.shape)
        np.add.at(made, tuple(p if isinstance(p, np.ndarray) else p.numpy() for p in g.parts[0]), host(g.parts[1]))
        return made
    return host(g)


def host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.numpy()


@pytest.mark.parametrize("name", OPERANDS)
def test_an_ndarray_is_read_when_the_operation_is_called(name: str) -> None:
    op, x = OPERANDS[name]
    got = []
    for changed in (False, True):
        w, mine = start(tape.cpu, 2, 2), x.copy("K")
        y = op(w, mine)
        if changed:
            mine[...] = 0
        tape.backward(y)
        got.append((y.numpy().tolist(), dense(w.grad).tolist()))
    assert got[0] == got[1]


# Writes that are not counted


@pytest.mark.parametrize("name", [n for n in READ if n not in ("through a view", "through the base")])
def test_debug_finds_a_write_by_numpy(name: str) -> None:
    make, op = READ[name]
    with fanin.set_options(debug=True):
        y, written = make(tape.cpu)
        tape.backward(y)
        written.data[...] = 0
        with pytest.raises(RuntimeError, match=rf"^{op}: a write without tape.update \(found by debug=True\)"):
            tape.backward(y)


def test_debug_finds_nothing_where_nothing_was_written() -> None:
    for make, _ in READ.values():
        with fanin.set_options(debug=True):
            y, _ = make(tape.cpu)
        tape.backward(y)  # also after the option's end
        write(np.zeros(1))
        tape.backward(y)


def test_another_array_in_a_var_does_not_change_what_an_operation_read() -> None:
    w = start(tape.cpu, 3)
    y = w * w * w
    was = w.data
    w.data = np.full(3, 100.0)
    assert np.allclose(tape.grad(y, [w])[0], 3 * was**2)
    [slope] = tape.grad(y, [w], create_graph=True)
    assert np.allclose(slope.numpy(), 3 * was**2)
    assert np.allclose(tape.grad(slope, [w])[0], 6 * was)


def test_another_array_in_a_var_of_a_device_does_not_change_what_an_operation_read() -> None:
    with fanin.sim.Machine(1) as m:
        [d0] = tape.devices(m)
        w = start(d0, 3)
        y = w * w
        was = w.numpy()
        w.data = m.array(np.full(3, 100.0))
        assert np.allclose(tape.grad(y, [w])[0].numpy(), 2 * was)
