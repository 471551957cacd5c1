"""tape.compiled: where a replay could give other numbers than the step as it is, it gives the right ones or refuses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin._interop.protocols import NDArray
from fanin.sim import Machine
from fanin.tape import Var
from kit import hooks
from kit.recorded_steps import refused, run_program
from kit.sample import sizes
from kit.support import ROOT


def positives(x: NDArray) -> NDArray:
    return x[x > 0]


@pytest.mark.parametrize("fn, now, change", [
    (positives, [5.0, -1, -1], r"shape \(1,\) and dtype float64, .* shape \(3,\) and dtype float64"),
    (lambda x: np.asfortranarray(np.outer(x, x)) if x[0] > 4 else np.outer(x, x), [5.0, 1, 1], "another order of axes"),
    (np.unique, [2.0, 2, 2], r"shape \(1,\) and dtype float64, .* shape \(3,\)"),
    (lambda x: x.astype("f4" if x[0] > 3 else "f8"), [5.0, 1, 1], r"dtype float32, .* dtype float64"),
])  # fmt: skip
def test_a_result_of_another_shape_or_dtype_than_the_recorded_one_is_refused(fn: Any, now: Any, change: str) -> None:
    op = tape.Op("own", fn, shape=lambda x: fn(np.array([1.0, 2, 3])).shape)
    step = tape.compiled(lambda a: op(tape.array(a)))
    for x in (np.array([1.0, 2, 3]), np.array([3.0, 2, 1]), np.array([1.0, 2, 3])):
        with pytest.raises(fanin.CaptureError, match=f"^own: .*{change}"):
            step(np.array(now))
        assert step(x).numpy().tolist() == fn(x).tolist()
    assert step.stats.replayed == 1


@pytest.mark.parametrize("where", ["sim", "cpu tree"])
def test_a_device_operation_with_another_shape_than_declared_is_refused(where: str) -> None:
    op = tape.Op("own", positives, shape=lambda x: x.shape)
    with pytest.raises(fanin.CaptureError, match=r"own: .*shape \(1,\).*shape \(3,\)"):
        if where == "sim":
            with Machine() as m:
                op(tape.array(np.array([1.0, -1, -1]), tape.devices(m)[0])).numpy()
        else:
            tree = fanin.GraphTree("cpu")
            fn = tree.function(lambda x: op(tape.array(x)).data)
            with tree.step():
                fn(np.array([1.0, -1, -1]))


@pytest.mark.parametrize("layout", ["static flat", "one array", "crossing"])
def test_gradients_that_share_memory_are_those_of_the_step_as_it_is(layout: str) -> None:
    """A flat buffer whose slices are the gradients, and which the step reads, zeroes or changes."""

    def network() -> tuple[list[Var], NDArray, Callable[[NDArray], Var]]:
        w, v, flat = tape.parameter(np.ones(2), name="w"), tape.parameter(np.ones(2), name="v"), np.zeros(4)
        first, second = {
            "static flat": (flat[:2], flat[2:]), "one array": (flat[:2], flat[:2]), "crossing": (flat[:2], flat[1:3])
        }[layout]  # fmt: skip
        w.grad, v.grad = first, second

        def step(x: NDArray) -> Var:
            y = (tape.array(x) * w).sum() + (tape.array(x) * v * 3).sum()
            tape.backward(y)
            tape.update(lambda g, p: np.subtract(p, g, out=p), [flat[:2]], [w])
            tape.update(lambda f: np.multiply(f, 0.5, out=f), [], [Var(flat, tape.cpu)])
            return y

        return [w, v], flat, step

    (ps, flat, eager), (qs, own, inner) = network(), network()
    step = tape.compiled(inner, static=[*qs, own])
    for i in range(5):
        x = np.array([i + 1.0, 2])
        assert step(x).numpy().tobytes() == eager(x).numpy().tobytes()
        assert flat.tobytes() == own.tobytes(), i
        assert [p.data.tobytes() for p in ps] == [q.data.tobytes() for q in qs], i
    assert (step.stats.recorded, step.stats.replayed) == (1, 3)
    [w, v] = qs
    w.grad, v.grad = np.zeros(2), np.zeros(2)  # apart from now on: recorded anew
    ps[0].grad, ps[1].grad = np.zeros(2), np.zeros(2)
    for _ in range(3):
        assert step(np.ones(2)).numpy().tobytes() == eager(np.ones(2)).numpy().tobytes()
        assert [p.grad.tobytes() for p in ps] == [q.grad.tobytes() for q in qs]
        assert [p.data.tobytes() for p in ps] == [q.data.tobytes() for q in qs]
    assert step.stats.recorded == 2 and step.stats.raw == 0


def test_gradients_that_are_disjoint_slices_of_one_buffer_are_added_to_there() -> None:
    ws = [tape.parameter(np.ones(2)) for _ in range(3)]
    step = tape.compiled(lambda x: tape.backward([(tape.array(x) * w).sum() for w in ws]), static=ws)
    for turn in range(4):
        flat = np.zeros(6)
        for w, g in zip(ws, [flat[::3], flat[1::3], flat[2::3]], strict=True):
            w.grad = g
        step(np.array([1.0, 2 + turn]))
        assert flat.tolist() == [1, 1, 1, 2 + turn, 2 + turn, 2 + turn]
    assert step.stats.recorded == 1 and step.stats.replayed == 2


def test_an_error_leaves_gradients_that_share_memory_as_they_were() -> None:
    w, flat, fail = tape.parameter(np.ones(2)), np.full(2, 7.0), [True]
    w.grad = flat

    def step(x: NDArray) -> None:
        tape.backward((tape.array(x) * w).sum())
        if fail.pop():
            raise KeyError("half-way")

    with pytest.raises(KeyError):
        tape.compiled(step, static=[w, flat])(np.ones(2))
    assert w.grad is flat and flat.tolist() == [7, 7] and flat.flags.writeable


def test_an_argument_that_lies_in_a_gradient_is_refused() -> None:
    w = tape.parameter(np.ones(2))

    def train(x: NDArray) -> None:
        tape.backward((w * 2).sum())
        tape.update(np.add, [w, x], [w])

    step = tape.compiled(train, static=[w])
    step(np.ones(2))  # as it is it reads what the pass has added
    for _ in range(3):
        w.grad = np.ones(2)
        try:
            step(w.grad)
        except ValueError as e:
            assert "operands 2 and 0 share memory" in str(e) and "operand 2 is .grad of" in e.__notes__[-1]
            assert w.grad.tolist() == [1, 1]
        else:
            assert step.last is not None and step.last.did == "warmed" and w.grad.tolist() == [3, 3]
        step(np.ones(2))
    assert step.stats.warmed == 3 and step.stats.raw == 0


def test_a_numpy_number_that_an_update_reads_is_refused() -> None:
    other = np.ones(2)
    for number in (np.float64, np.float32, np.int64, np.bool_):
        v = np.zeros(1)

        def train(v: NDArray = v, number: Any = number) -> None:
            tape.update(lambda a, out: np.add(out, a, out=out), [number(other.max())], [Var(v, tape.cpu)])

        assert "may depend on values" in refused(train, static=[v])
        assert v.tolist() == [0]
    v = np.zeros(1)
    step = tape.compiled(lambda x: tape.update(np.maximum, [x, 2], [Var(v, tape.cpu)]), static=[v])  # Python's own
    for i in range(4):
        step(np.full(1, float(i)))
        assert v.tolist() == [max(i, 2)]


@pytest.mark.parametrize("read", [lambda w: w.grad, lambda w: w.leaf().grad])
def test_a_kernel_that_reads_a_gradient_itself_is_refused(read: Callable[[Var], Any]) -> None:
    w = tape.parameter(np.ones(2))

    def train(x: NDArray) -> None:
        tape.backward((tape.array(x) * w).sum())
        tape.update(lambda p: np.subtract(p, read(w), out=p), [], [w])

    assert "'update' reads .grad" in refused(train, np.ones(2), static=[w])
    assert w.data.tolist() == [1, 1] and w.grad is None


def test_a_kernel_that_reads_a_gradient_in_a_replay_alone_is_refused() -> None:
    w, reads = tape.parameter(np.ones(2)), list[int]()

    def apply(g: NDArray, p: NDArray) -> None:
        p -= w.grad if reads else g

    def train(x: NDArray) -> None:
        tape.backward((tape.array(x) * w).sum())
        tape.update(apply, [w.grad], [w])

    step = tape.compiled(train, static=[w])
    for _ in range(4):
        step(np.ones(2))
    assert step.last is not None and step.last.did == "replayed"
    reads.append(1)
    with pytest.raises(fanin.CaptureError, match=r"'update' reads .grad of .*: pass it among its reads or writes"):
        step(np.ones(2))


def test_an_argument_with_gaps_reversed_or_repeated_gives_the_bits_of_the_step_as_it_is() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=(40, 60)).astype("f4")
    each = [
        base[::2, ::3], base[::-1], base[:, ::-1], base[::-2, ::-1].T, base.T, base.T[::3],
        np.broadcast_to(base[:1], (40, 60)), np.broadcast_to(base[:, :1], (40, 60)), base.reshape(8, 5, 60)[:, ::2],
    ]  # fmt: skip

    def step(x: NDArray) -> list[Var]:
        y = tape.array(x)
        out = tape.array([0.0])
        tape.update(lambda a, o: np.copyto(o, a.sum()), [x], [out])
        return [y.sum(), tape.total(y, 0), tape.total(y, 1), (y * y).sum(), tape.total(y * 0.3, 0), out]

    for x in each:
        compiled = tape.compiled(step)
        for k in range(4):
            moved = np.roll(base, k)
            with np.errstate(all="ignore"):
                at = np.lib.stride_tricks.as_strided(
                    moved.reshape(-1)[(x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 4 :],
                    x.shape, x.strides,
                ) if x.base is not None else x  # fmt: skip
            want, got = step(at), compiled(at)
            assert [y.numpy().tobytes() for y in want] == [y.numpy().tobytes() for y in got], (x.shape, x.strides, k)
        assert compiled.stats.replayed == 2


def test_a_gradient_that_a_step_replaces_stays_as_the_step_as_it_is_leaves_it() -> None:
    def network() -> tuple[Var, Callable[[NDArray], None]]:
        w = tape.parameter(np.ones(2))

        def step(x: NDArray) -> None:
            tape.backward((tape.array(x) * w).sum())
            w.grad = None
            tape.backward((tape.array(x) * w * 10).sum())

        return w, step

    (w, eager), (v, inner) = network(), network()
    step = tape.compiled(inner, static=[v])
    for i in range(4):
        held, own = np.ones(2), np.ones(2)
        w.grad, v.grad = held, own
        eager(np.full(2, i + 1.0))
        step(np.full(2, i + 1.0))
        assert held.tolist() == own.tolist() == [i + 2, i + 2]
        assert w.grad.tolist() == v.grad.tolist() and v.grad is not own


def test_arguments_may_be_named_and_lie_in_dicts() -> None:
    def train(batch: dict[str, Any], *, rate: NDArray, scale: float = 1.0) -> Var:
        x = batch["x"] if isinstance(batch["x"], Var) else tape.array(batch["x"])
        return x * tape.array(batch["more"]["y"]) * tape.array(rate) * scale

    step = tape.compiled(train)
    for i in range(5):
        for scale in ({}, {"scale": 3.0}):
            given = {"x": np.full(2, i + 1.0), "more": {"y": np.full(2, 2.0)}}
            want = train(given, rate=np.array(i + 0.5), **scale).numpy()
            assert step(given, rate=np.array(i + 0.5), **scale).numpy().tobytes() == want.tobytes()
    assert (step.stats.recorded, step.stats.replayed) == (2, 6)
    step({"x": np.ones(3), "more": {"y": np.ones(3)}}, rate=np.array(1.0))
    step({"x": Var(np.ones(3), tape.cpu), "more": {"y": np.ones(3)}}, rate=np.array(1.0))
    assert step.stats.warmed == 4
    with pytest.raises(TypeError, match=r"argument 0\['more'\]\['y'\]: expected an ndarray"):
        step({"x": np.ones(3), "more": {"y": [1.0]}}, rate=np.array(1.0))
    v = np.ones(2)

    def grow(a: NDArray, *, b: dict[str, NDArray]) -> None:
        tape.update(np.add, [v, a], [Var(v, tape.cpu)])

    grown = tape.compiled(grow, static=[v])
    grown(np.ones(2), b={"k": np.ones(2)})
    with pytest.raises(ValueError, match="operands 2 and 1 share memory") as e:
        grown(np.ones(2), b={"k": v})
    assert "operand 1 is argument b['k'], operand 2 is static[0]" in e.value.__notes__[-1]


def test_an_empty_dict_is_no_empty_tuple() -> None:
    step = tape.compiled(lambda d: tape.array([float(isinstance(d, dict))]))
    for d in ({}, ()) * 4:
        assert step(d).numpy().tolist() == [float(isinstance(d, dict))]


# ---------------------------------------------------------------- verify=


class Unseen:
    """Steps that depend on work that a replay does not repeat: `change()` changes it after the first call."""

    rate, on, t = 1.0, True, 0

    def __init__(self) -> None:
        self.w = tape.parameter(np.ones(4), name="w")
        self.draw = random.Random(3)
        self.change: Callable[[], object] = lambda: None

    def python_number(self, x: NDArray) -> Var:
        self.change = lambda: setattr(self, "rate", 2.0)
        return tape.array(x) * self.w * self.rate

    def branch_on_data(self, x: NDArray) -> Var:
        self.change = lambda: setattr(self, "on", False)
        y = tape.array(x) * self.w
        return tape.tanh(y) if self.on else -y

    def branch_on_a_var(self, x: NDArray) -> Var:
        y = tape.array(x) * self.w
        return tape.tanh(y) if y.data[0] < 2 else y + 1 + 1

    def host_read(self, x: NDArray) -> Var:
        return tape.array(x) * float(x[0]) * self.w

    def a_global(self, x: NDArray) -> Var:
        self.change = lambda: globals().__setitem__("SCALE", SCALE + 1.0)
        return tape.array(x) * self.w * SCALE

    def step_counter(self, x: NDArray) -> None:
        self.t += 1
        correction = 1 - 0.9**self.t
        tape.backward((tape.array(x) * self.w).sum())
        tape.update(lambda g, w: np.subtract(w, g / correction, out=w), [self.w.grad], [self.w])
        self.w.grad = None

    def dropout(self, x: NDArray) -> Var:
        keep = [float(self.draw.random() > 0.5) for _ in range(4)]
        return tape.array(x) * tape.array(keep) * self.w

    def hook(self, x: NDArray) -> Var:
        self.change = lambda: self.w.register_hook(lambda g: tape.mul(g, 2.0))
        y = (tape.array(x) * self.w).sum()
        tape.backward(y)
        return y

    def drawn_in_a_kernel(self, x: NDArray) -> Var:
        y = tape.array([0.0])
        tape.update(lambda out: out.fill(self.draw.random()), [], [y])
        return y


SCALE = 1.0


@pytest.mark.parametrize("name, what", [
    ("python_number", "output 0 differs"), ("branch_on_data", "output 0 differs"), ("a_global", "output 0 differs"),
    ("step_counter", "operand 1 .static. differs"), ("dropout", "output 0 differs"), ("hook", "output 1 differs"),
    ("drawn_in_a_kernel", "output 0 differs"),
])  # fmt: skip
def test_verify_finds_what_a_replay_does_not_do_again(name: str, what: str) -> None:
    own = Unseen()
    step = tape.compiled(getattr(own, name), static=[own.w], verify=1)
    for _ in range(2):
        own.w.grad = None
        step(np.arange(1.0, 5))
    own.change()
    own.w.grad = None
    w = own.w.data.tobytes()
    for _ in range(2):
        with pytest.raises(fanin.CaptureError, match=rf"{name}: the function as it is gives .*{what}") as e:
            step(np.arange(2.0, 6))
        assert own.w.data.tobytes() == w and own.w.grad is None
    if name == "a_global":
        assert "SCALE was " in str(e.value)


@pytest.mark.parametrize("name", ["branch_on_a_var", "host_read"])
def test_a_value_read_in_a_step_is_refused(name: str) -> None:
    own = Unseen()
    with pytest.raises(TypeError, match="is not made a Python number"):
        tape.compiled(getattr(own, name), static=[own.w])(np.arange(1.0, 5))


def test_verify_is_over_after_so_many_replays_of_each_recording() -> None:
    calls: list[int] = []

    def count(x: NDArray) -> Var:
        calls.append(len(x))
        return tape.array(x) * 2.0

    step = tape.compiled(count, verify=2)
    for _ in range(6):
        for n in (3, 4):
            assert step(np.ones(n)).numpy().tolist() == [2.0] * n
    assert calls.count(3) == calls.count(4) == 4
    with pytest.raises(ValueError, match="compiled: verify: expected how many replays are verified, got -1"):
        tape.compiled(count, verify=-1)


@pytest.mark.parametrize("count", sizes(12, 40))
def test_verify_finds_nothing_in_what_is_replayed_as_it_is(count: int) -> None:
    for seed in range(count):
        run_program(seed, verify=3)


def test_verify_finds_a_kernel_that_is_not_replayed() -> None:
    p = tape.parameter(np.ones(3))
    step = tape.compiled(lambda x: tape.update(np.add, [p, x], [p]), static=[p], verify=2)
    step(np.ones(3))
    step(np.ones(3))
    hooks.fault("KERNEL_NOT_REPLAYED")
    try:
        with pytest.raises(fanin.CaptureError, match=r"operand 1 .static. differs"):
            step(np.ones(3))
    finally:
        hooks.fault(None)
    assert p.data.tolist() == [3, 3, 3]


def test_an_error_of_the_step_while_it_is_verified_leaves_everything_as_it_was() -> None:
    p, fail = tape.parameter(np.ones(3)), list[int]()
    p.grad = np.ones(3)

    def train(x: NDArray) -> None:
        tape.backward((p * tape.array(x)).sum())
        tape.update(np.add, [p, x], [p])
        if fail:
            raise KeyError("half-way")

    step = tape.compiled(train, static=[p], verify=2)
    step(np.ones(3))
    step(np.ones(3))
    fail.append(1)
    g = p.grad
    with pytest.raises(KeyError):
        step(np.ones(3))
    assert p.grad is g and g.tolist() == [3, 3, 3] and p.data.tolist() == [3, 3, 3]
    fail.clear()
    step(np.ones(3))
    assert p.grad is g and g.tolist() == [4, 4, 4] and p.data.tolist() == [4, 4, 4]


@pytest.mark.parametrize("shared", [False, True])
def test_verify_compares_gradients_that_share_memory_too(shared: bool) -> None:
    w, flat = tape.parameter(np.ones(2)), np.zeros(4)
    w.grad = flat[:2]
    step = tape.compiled(
        lambda x: tape.backward((tape.array(x) * w).sum()), static=[w, flat] if shared else [w], verify=5
    )
    for i in range(6):
        step(np.ones(2))
        assert flat.tolist() == [i + 1, i + 1, 0, 0]


def test_the_recipes_of_the_page_run() -> None:
    text = (ROOT / "docs" / "recorded-steps.md").read_text().partition("## Recipes")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
        assert names["step"].stats.raw == 0 and names["step"].last.did == "replayed"


def test_a_kernel_that_keeps_its_argument_is_refused() -> None:
    kept: list[NDArray] = []
    v = np.ones(2)
    step = tape.compiled(lambda x: tape.update(lambda a, out: kept.append(a), [x], [v]), static=[v])
    with pytest.raises(RuntimeError, match="kernel 'update' kept its argument 0 after its run"):
        step(np.ones(2))
    assert v.flags.writeable and step.stats.nodes == 0
