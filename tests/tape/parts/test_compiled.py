"""tape.compiled: a step recorded once on the CPU gives, replayed, the bits that the same step gives as it is."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin._interop.protocols import NDArray
from fanin.cli import demo
from fanin.tape import Var
from kit import hooks
from kit.recorded_steps import refused, run_program
from kit.sample import sizes


def descend(g: NDArray, rate: NDArray, w: NDArray, v: NDArray) -> None:
    v *= 0.9
    v += g
    w -= rate * v


class Small:
    """A network of two layers and a bias, which meet in sums; a step of its training."""

    def __init__(self, dtype: str = "float32", micro: int = 1, update: bool = True) -> None:
        rng = np.random.default_rng(7)
        shapes = [(8, 16), (16, 4), (4,), (8, 4)]
        self.parameters = [
            tape.parameter(rng.normal(0, 0.5, s).astype(dtype), name=f"p{i}") for i, s in enumerate(shapes)
        ]
        self.speed = [np.zeros_like(p.data) for p in self.parameters]
        self.micro, self.update = micro, update

    def __call__(self, x: NDArray, labels: NDArray, rate: NDArray) -> Var:
        one, two, bias, past = self.parameters
        losses = []
        for a, t in zip(np.split(x, self.micro), np.split(labels, self.micro), strict=True):
            v = tape.array(a)
            y = tape.tanh(v @ one) @ two + bias + tape.relu(v @ past) + bias * 0.5
            losses.append(tape.cross_entropy(y, tape.array(t), count=len(x)))
        tape.backward(losses)
        if self.update:
            for p, v in zip(self.parameters, self.speed, strict=True):
                tape.update(descend, [p.grad, rate], [p, v])
                p.grad = None
        return sum(losses[1:], losses[0])

    @property
    def static(self) -> list[Var | NDArray]:
        return [*self.parameters, *self.speed]

    def state(self) -> list[bytes]:
        grads = [b"" if p.grad is None else p.grad.tobytes() for p in self.parameters]
        return [x.tobytes() for x in (*(p.data for p in self.parameters), *self.speed)] + grads


def batch(rng: np.random.Generator, n: int = 12, dtype: str = "float32") -> tuple[NDArray, NDArray, NDArray]:
    return rng.normal(size=(n, 8)).astype(dtype), rng.integers(0, 4, n), np.array(rng.uniform(0.01, 0.2), dtype)


def same(eager: Small, step: Any, own: Small, args: tuple[Any, ...]) -> None:
    assert eager(*args).numpy().tobytes() == step(*args).numpy().tobytes()
    assert eager.state() == own.state()


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_replay_gives_the_bits_of_the_step_as_it_is(dtype: str, micro: int) -> None:
    eager, own, rng = Small(dtype, micro), Small(dtype, micro), np.random.default_rng(3)
    step = tape.compiled(own, static=own.static)
    for _ in range(6):
        same(eager, step, own, batch(rng, dtype=dtype))
    assert step.last is not None
    assert step.last.did == "replayed"
    assert (step.stats.recorded, step.stats.replayed, step.stats.raw) == (1, 4, 0)


def test_a_step_is_recorded_again_if_shapes_dtypes_layouts_or_plain_values_change() -> None:
    eager, own, rng = Small(), Small(), np.random.default_rng(4)
    step = tape.compiled(own, static=own.static)
    first, labels, rate = batch(rng)
    for args in [
        (first, labels, rate),
        (first[:8], labels[:8], rate),
        (np.asfortranarray(first), labels, rate),
        (first.astype("f8"), labels, rate),
    ]:
        for did in ("warmed", "recorded", "replayed"):
            same(eager, step, own, args)
            assert step.last is not None and step.last.did == did
    same(eager, step, own, (first, labels, rate))
    assert step.last is not None
    assert step.last.did == "replayed"  # the first one fits again
    scaled = tape.compiled(lambda x, by: tape.array(x) * by)
    for did in ("warmed", "recorded", "replayed"):
        for by in (2.0, 3.0):
            assert scaled(np.ones(2), by).numpy().tolist() == [by, by]
            assert scaled.last is not None and scaled.last.did == did


def test_a_step_is_recorded_again_if_a_parameter_gets_another_array() -> None:
    p = tape.parameter(np.ones(3))
    step = tape.compiled(lambda x: tape.array(x) * p, static=[p])
    for _ in range(3):
        assert step(np.ones(3)).numpy().tolist() == [1, 1, 1]
    first, p.data = p.data, np.full(3, 5.0)
    assert step(np.ones(3)).numpy().tolist() == [5, 5, 5]
    assert step.last is not None and step.last.did == "recorded"
    p.data[:] = 6  # in place: nothing to record
    assert step(np.ones(3)).numpy().tolist() == [6, 6, 6]
    assert step.last.did == "replayed"
    p.data = first
    assert step(np.ones(3)).numpy().tolist() == [1, 1, 1]
    assert step.last.did == "replayed"


@pytest.mark.rule("L8", "L5")
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_gradients_of_k_calls_add_up_in_place_as_those_of_backward_do(k: int) -> None:
    eager, own, rng = Small(update=False), Small(update=False), np.random.default_rng(k)
    step = tape.compiled(own, static=own.static)
    for _ in range(3):
        for i in range(k):
            before = [p.grad for p in own.parameters]
            same(eager, step, own, batch(rng))
            assert all(p.grad is g for p, g in zip(own.parameters, before, strict=True)) or i == 0
        held = [(p.grad, p.grad.copy()) for p in own.parameters]
        for net in (eager, own):
            for p in net.parameters:
                p.grad = None
        same(eager, step, own, batch(rng))
        assert all((g == was).all() for g, was in held), "a gradient that somebody keeps is nobody's pool"
        for net in (eager, own):
            for p in net.parameters:
                p.grad = None
    assert step.stats.recorded == step.stats.warmed == (1 if k == 1 else 2)  # without gradients, and with them
    assert step.stats.replayed > 0 and step.stats.raw == 0


def test_the_demos_network_trains_to_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    digits = demo.Digits(rng)
    start = demo.initial(rng)
    eager, own = (demo.Net(start, demo.Spread(None), sparse=False) for _ in range(2))
    step = demo.recorded(own)
    batches = digits.batches(rng)
    for i in range(7):
        d, t = next(batches)
        d, t = (d[:16], t[:16]) if i in (2, 4, 5) else (d[:32], t[:32])
        rate = np.array(0.1 / (i + 1), "f4")
        assert float(demo.train_step(eager)(d, t, rate).numpy()) == float(step(d, t, rate).numpy())
        for name, p in eager.parameters.items():
            assert p.data.tobytes() == own.parameters[name].data.tobytes(), name
            assert eager.speed[name].tobytes() == own.speed[name].tobytes(), name
    assert (step.stats.warmed, step.stats.recorded, step.stats.replayed, step.stats.raw) == (2, 2, 3, 0)


# ---------------------------------------------------------------- random programs


def programs(seeds: range) -> None:
    recorded = replayed = 0
    for seed in seeds:
        r, p = run_program(seed)
        recorded, replayed = recorded + r, replayed + p
    print(f"seeds {seeds}: {recorded} recordings, {replayed} replays")
    assert recorded >= len(seeds)
    assert replayed >= len(seeds)


@pytest.mark.parametrize("count", sizes(25, 150))
def test_random_programs_give_the_bits_of_the_program_as_it_is(count: int) -> None:
    programs(range(count))


@pytest.mark.slow
def test_ten_thousand_random_programs_do() -> None:
    programs(range(1000, 11000))


def test_the_programs_find_a_planted_fault() -> None:
    hooks.fault("KERNEL_NOT_REPLAYED")
    try:
        with pytest.raises(AssertionError):
            programs(range(25))
    finally:
        hooks.fault(None)
    programs(range(5))


# ---------------------------------------------------------------- memory


def adopted() -> None:
    """L8: two leaves that get one array, which lies in a recording's memory, and are added to."""

    def step(x: NDArray) -> None:
        for _ in range(2):
            tape.backward(((p + q) * tape.array(x)).sum())

    p, q = (tape.parameter(np.ones(3)) for _ in range(2))
    own = tape.compiled(step, static=[p, q])
    for _ in range(4):
        p.grad = q.grad = None
        own(np.full(3, 2.0))
        assert p.grad.tolist() == q.grad.tolist() == [4, 4, 4] and p.grad is not q.grad


@pytest.mark.rule("L8")
def test_a_leaf_copies_what_a_recording_lends_it() -> None:
    p = tape.parameter(np.ones(3))
    step = tape.compiled(lambda: tape.backward((p * 2).sum()), static=[p])
    step()
    adopted()
    first = p.grad
    p.grad = None
    step()
    p.grad[:] = 7
    assert first.tolist() == [2, 2, 2]
    step()
    assert p.grad.tolist() == [9, 9, 9]


def test_each_replay_allocates_as_much_as_the_one_before_and_a_recording_goes_with_its_step() -> None:
    gc.collect()
    before, _, _ = hooks.memory()
    own, rng = Small(), np.random.default_rng(5)
    step = tape.compiled(own, static=own.static)
    args = batch(rng)
    made = [hooks.memory()]
    for _ in range(8):
        step(*args)
        made.append(hooks.memory())
    live, counts = [m[0] for m in made], [b[1] - a[1] for a, b in pairwise(made)]
    assert len(set(live[-5:])) == 1 and len(set(counts[-5:])) == 1
    del step, own
    gc.collect()
    assert hooks.memory()[0] <= before + 8  # parked buffers of the frontend


def test_other_shapes_take_the_memory_of_the_largest_and_ten_calls_no_more_than_one() -> None:
    own, rng = Small(), np.random.default_rng(5)
    step = tape.compiled(own, static=own.static)
    for _ in range(2):
        step(*batch(rng, 16))
    one = step.stats.high_water
    for _ in range(10):
        step(*batch(rng, 16))
    for n in (4, 8, 12):
        for _ in range(3):
            step(*batch(rng, n))
    assert step.stats.high_water == one and step.stats.nodes == 4
    kept = sum(a.nbytes for a in own.static if isinstance(a, np.ndarray))
    assert one < 60 * (kept + 16 * 16 * 4), "memory of what has gone is used again"


def test_no_later_call_changes_a_result() -> None:
    own, rng = Small(update=False), np.random.default_rng(6)
    step = tape.compiled(own, static=own.static)
    results = [step(*batch(rng)) for _ in range(4)]
    values = [x.numpy().copy() for x in results]
    step(*batch(rng))
    assert [x.numpy().tobytes() for x in results] == [v.tobytes() for v in values]
    assert len({v.tobytes() for v in values}) == 4


def test_arguments_static_arrays_and_views_of_both_are_results_as_copies() -> None:
    w, v = tape.parameter(np.arange(6.0).reshape(2, 3)), np.arange(3.0)
    own = tape.compiled(
        lambda x: {"x": x, "part": x[1:], "w": w, "T": [w.T, v, None], "Var": Var(x, tape.cpu)}, static=[w, v]
    )
    made = []
    for k in range(4):
        x = np.arange(3.0) + k
        got = own(x)
        made.append((got, x.copy()))
        x[:] = 9
    for got, x in made:
        assert got["x"].tolist() == got["Var"].numpy().tolist() == x.tolist() and got["part"].tolist() == x[1:].tolist()
        assert got["w"].numpy().tolist() == w.data.tolist() and got["T"][0].numpy().tolist() == w.data.T.tolist()
        assert (
            got["T"][0].data.strides == w.data.T.strides and got["T"][1].tolist() == v.tolist() and got["T"][2] is None
        )
        assert not any(
            np.shares_memory(a, b) for a in (got["w"].data, got["T"][0].data, got["T"][1]) for b in (w.data, v)
        )


def test_a_step_that_returns_other_containers_for_other_shapes_does_so_in_a_replay() -> None:
    own = tape.compiled(lambda x: [tape.array(x)] if len(x) > 2 else (tape.array(x),))
    for n in (2, 3) * 4:
        assert type(own(np.ones(n))) is (list if n > 2 else tuple)


@pytest.mark.parametrize("update", [False, True])
def test_each_allocation_of_a_recording_that_fails_leaves_everything_as_it_was(update: bool) -> None:
    own, rng = Small(update=update), np.random.default_rng(5)
    args = batch(rng)
    own(*args)
    failed = 0
    for attempt in hooks.attempts():
        before, step = own.state(), tape.compiled(own, static=own.static)
        step(*args)  # warmed up
        before = own.state()
        with attempt:
            step(*args)
        failed += attempt.failed
        assert not attempt.failed or own.state() == before
    assert failed >= 100


def test_each_allocation_of_a_replay_that_fails_leaves_every_gradient_as_it_was() -> None:
    own, rng = Small(update=False), np.random.default_rng(5)
    args = batch(rng)
    step = tape.compiled(own, static=own.static)

    def some_gone() -> list[bytes]:
        own.parameters[0].grad = own.parameters[2].grad = None
        return own.state()

    for _ in range(3):
        some_gone()
        step(*args)
    replays, failed = step.stats.replayed, 0
    for attempt in hooks.attempts():
        before = some_gone()
        with attempt:
            step(*args)
        failed += attempt.failed
        assert not attempt.failed or own.state() == before
    assert failed >= 2 and step.stats.replayed > replays
    assert all(now != was for now, was in zip(own.state()[-4:], before[-4:], strict=True)), "the last one added"


# ---------------------------------------------------------------- what cannot be recorded


def test_work_that_a_replay_would_not_repeat_is_refused_with_the_reason() -> None:
    p, x = tape.parameter(np.ones((2, 2))), np.ones((2, 2))
    kept: list[Any] = []
    assert "cannot read values" in refused(lambda a: float((tape.array(a) * p).sum().numpy()), x, static=[p])
    given = np.ones((2, 2))
    assert "as an argument, or in static=" in refused(lambda a: tape.array(given) * tape.array(a), x)
    assert "as an argument, or in static=" in refused(lambda a: Var(given, tape.cpu) * tape.array(a), x)
    assert "as an argument, or in static=" in refused(lambda a: tape.array(a) * p, x)
    assert "as an argument, or in static=" in refused(lambda a: tape.array(a) * (given + 1), x)
    assert "may depend on values" in refused(lambda a: tape.array(a) * given.sum(), x)
    assert "as an argument, or in static=" in refused(lambda a: given, x)
    assert "which no recorded operation made" in refused(lambda a: 0.5, x)
    with pytest.raises(RuntimeError, match="the next replay overwrites them"):
        tape.compiled(lambda a: kept.append(tape.array(a) * p), static=[p])(x)
    assert "sparse" in refused(
        lambda i: tape.backward([tape.embedding(p, tape.array(i)).sum(), (p * p).sum()]),
        np.array([0, 1, 1]),
        static=[p],
    )


def test_a_write_of_numpy_through_a_handle_is_recorded() -> None:
    def into_data(a: NDArray, w: Any, v: NDArray) -> None:
        tape.backward((tape.array(a) @ w).sum())
        w.data -= 0.1 * w.grad
        w.grad = None

    def into_grad(a: NDArray, w: Any, v: NDArray) -> None:
        tape.backward((tape.array(a) @ w).sum())
        w.grad *= 0.5

    def another_grad(a: NDArray, w: Any, v: NDArray) -> None:
        tape.backward((tape.array(a) @ w).sum())
        w.grad = w.grad * 0.5

    def into_result(a: NDArray, w: Any, v: NDArray) -> Var:
        y = tape.array(a) @ w
        y.data[0] = 0
        return y

    def into_gradient(a: NDArray, w: Any, v: NDArray) -> Var:
        y = (tape.array(a) @ w).sum()
        [g] = tape.grad(y, [w])
        g *= 0.5
        tape.update(np.subtract, [w, g], [w])
        return y

    def of_an_argument(a: NDArray, w: Any, v: NDArray) -> Var:
        halves = np.split(a * 2 - a.mean(0), 2)
        tape.update(lambda x, v: np.add(v, x, out=v), [a.max()], [v])
        return tape.array(halves[1]) @ w + a.sum(1)[:2].reshape(2, 1)

    for step in (into_data, into_grad, another_grad, into_result, into_gradient, of_an_argument):
        rng = np.random.default_rng(11)
        (w, v), (w_, v_) = ((tape.parameter(np.ones((3, 2))), np.zeros(1)) for _ in range(2))
        own = tape.compiled(lambda a, w=w, v=v, step=step: step(a, w, v), static=[w, v])
        for _ in range(5):
            x = rng.normal(size=(4, 3))
            got, want = own(x), step(x, w_, v_)
            assert got is want is None or got.numpy().tobytes() == want.numpy().tobytes(), step
            assert w.data.tobytes() == w_.data.tobytes() and v.tobytes() == v_.tobytes(), step
            assert (w.grad is None) == (w_.grad is None) and (w.grad is None or w.grad.tobytes() == w_.grad.tobytes())
        assert own.last is not None and own.last.did == "replayed", step


def test_an_argument_that_the_step_writes_is_written_and_the_step_runs_as_it_is() -> None:
    def doubles(a: NDArray) -> Var:
        a *= 2
        return tape.array(a) + 1

    own = tape.compiled(doubles)
    with pytest.warns(RuntimeWarning, match="doubles runs without a recording: it writes into operand 0"):
        for k in range(4):
            x = np.full(2, float(k))
            assert own(x).numpy().tolist() == [2.0 * k + 1] * 2 and x.tolist() == [2.0 * k] * 2
    assert own.last is not None and own.last.did == "raw"


def test_a_write_of_numpy_alone_is_refused_and_changes_nothing() -> None:
    w, v, x = tape.parameter(np.ones((3, 2))), np.ones(2), np.ones((4, 3))
    whole = np.ones(4)

    def into_static(a: NDArray) -> None:
        tape.backward((tape.array(a) @ w).sum())
        v[0] = 3

    def into_a_view(a: NDArray) -> None:
        whole[:2] += 1

    def other_data(a: NDArray) -> None:
        w.data = w.data * 2.0

    def other_grad(a: NDArray) -> None:
        w.grad = np.ones((3, 2))

    given = [w, v, whole]
    assert "no replay repeats what NumPy alone writes" in refused(into_static, x, static=given)
    assert "no replay repeats what NumPy alone writes" in refused(into_a_view, x, static=given)
    assert "puts another array into static[0].data" in refused(other_data, x, static=given)
    assert "as an argument, or in static=" in refused(other_grad, x, static=given)
    assert w.grad is None and isinstance(w.data, np.ndarray) and w.data.tolist() == [[1, 1]] * 3
    assert v.tolist() == [1, 1] and whole.tolist() == [1] * 4
    assert v.flags.writeable and whole.flags.writeable and w.data.flags.writeable


def test_a_thread_whose_step_has_a_parameter_that_another_one_records_is_refused() -> None:
    w, begun, done = tape.parameter(np.ones(3)), threading.Event(), threading.Event()

    def slow(a: NDArray) -> Var:
        y = tape.array(a) * w
        begun.set()
        done.wait()
        return y

    read, write = (tape.compiled(fn, static=[w]) for fn in (slow, lambda a: tape.update(np.add, [w, a], [w])))
    other = threading.Thread(target=read, args=(np.ones(3),))
    other.start()
    begun.wait()
    try:
        with pytest.raises(fanin.CaptureError, match="another thread is in a call of a step of this parameter"):
            write(np.ones(3))
    finally:
        done.set()
        other.join()
    write(np.ones(3))
    assert w.data.tolist() == [2, 2, 2] and w.data.flags.writeable


def test_a_static_array_that_cannot_be_written_stays_so() -> None:
    v = np.ones(3)
    v.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match=r"writes writable arrays|read-only"):
        tape.compiled(lambda: tape.update(np.negative, [v], [Var(v, tape.cpu)]), static=[v])()
    step = tape.compiled(lambda a: tape.array(a) * tape.array(v), static=[v])
    assert step(np.arange(3.0)).numpy().tolist() == step(np.arange(3.0)).numpy().tolist() == [0, 1, 2]
    assert not v.flags.writeable


def test_values_that_a_recording_would_freeze_are_refused(tmp_path: Any) -> None:
    x, rows = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    mapped = np.memmap(tmp_path / "rows", dtype="f8", mode="w+", shape=(4, 3))
    made, values = "as an argument, or in static=", "may depend on values"
    assert made in refused(lambda a: tape.array(mapped[:2]) * tape.array(a), x)
    assert made in refused(lambda a: tape.array([rows[0], rows[1]]) * tape.array(a), x)
    assert made in refused(lambda a: tape.array([rows.mean(), 1.0, 2.0]) * tape.array(a), x)
    assert values in refused(lambda a: tape.mul(tape.array(a), rows.mean()), x)
    assert values in refused(lambda a: tape.total(tape.array(a), None, rows.mean()), x)
    assert values in refused(lambda a: tape.gathered(tape.array(a), mapped[0].astype(int)), x)


def test_values_that_are_equal_and_not_the_same_make_recordings_of_their_own() -> None:
    whole = np.arange(3)
    calls = [
        (1.0, 0.0), (1.0, -0.0), (1.0, (0.0,)), (1.0, (-0.0,)), (whole, (2,)), (whole, (2.0,)),
        (whole, ((2,),)), (whole, ((2.0,),)), (1.0, float("nan")),
    ]  # fmt: skip

    def scaled(x: Any, by: Any) -> Var:
        while isinstance(by, tuple):
            by = by[0]
        return tape.array(x) * by

    step = tape.compiled(scaled)
    for did in ("warmed", "recorded", "replayed"):
        for x, by in calls:
            want, got = scaled(x, by).numpy(), step(x, by).numpy()
            assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())
            assert step.last is not None and step.last.did == did


def test_a_step_is_recorded_again_if_a_parameter_has_another_shape_at_the_same_address() -> None:
    w, x = tape.parameter(np.arange(9.0).reshape(3, 3)), np.arange(3.0).reshape(1, 3)
    step = tape.compiled(lambda a: tape.array(a) @ w, static=[w])
    for _ in range(3):
        step(x)
    w.data = w.data.T
    for did in ("warmed", "recorded", "replayed"):
        assert step(x).numpy().tobytes() == (tape.array(x) @ w).numpy().tobytes()
        assert step.last is not None and step.last.did == did


def test_an_argument_that_repeats_itself_is_copied_in() -> None:
    step = tape.compiled(lambda a: tape.array(a) * 2.0)
    for k in range(4):
        x = np.broadcast_to(np.arange(3.0) + k, (4, 3))
        assert step(x).numpy().tolist() == (x * 2).tolist()


def test_a_batch_of_nothing_is_recorded() -> None:
    w = tape.parameter(np.ones((3, 2)))

    def train(a: NDArray) -> list[Var]:
        y = tape.array(a) @ w * 2.0
        tape.backward(y.sum())
        return [y, y.sum()]

    step = tape.compiled(train, static=[w])
    for n in (0, 4) * 4:
        assert [y.shape for y in step(np.ones((n, 3)))] == [(n, 2), ()]
    assert w.grad.tolist() == [[32, 32]] * 3 and step.stats.replayed >= 2


def test_an_argument_that_lies_in_what_the_step_writes_is_refused() -> None:
    v = np.ones(4)

    def grow(a: NDArray) -> Var:
        tape.update(lambda p: np.add(p, 1, out=p), [], [Var(v, tape.cpu)])
        return tape.array(a) * 2.0

    step = tape.compiled(grow, static=[v])
    assert step(np.ones(2)).numpy().tolist() == [2, 2]
    for k in (2.0, 3.0):
        with pytest.raises(ValueError, match="operands 1 and 0 share memory; the function writes into operand 1") as e:
            step(v[:2])
        assert "operand 0 is argument 0, operand 1 is static[0]" in e.value.__notes__[-1]
        assert v.tolist() == [k] * 4
        assert step(np.ones(2)).numpy().tolist() == [2, 2]


def test_a_pass_of_several_workers_is_recorded_whole() -> None:
    def train(ws: list[Var], x: NDArray) -> Var:
        hs = [tape.tanh(tape.array(x) @ w) for w in ws]
        loss = sum(((h @ w).sum() for h, w in zip(hs[1:], ws[1:], strict=True)), (hs[0] @ ws[0]).sum())
        fanin.backward(tape.roots_of(loss, None, False), workers=4)
        return loss

    def parameters() -> list[Var]:
        rng = np.random.default_rng(12)
        return [tape.parameter(rng.normal(size=(4, 4))) for _ in range(6)]

    rng = np.random.default_rng(13)
    for _ in range(5):
        eager, own = parameters(), parameters()
        step = tape.compiled(lambda x, own=own: train(own, x), static=own)
        for _ in range(6):
            x = rng.normal(size=(4, 4))
            assert train(eager, x).numpy().tobytes() == step(x).numpy().tobytes()
            assert [w.grad.tobytes() for w in eager] == [w.grad.tobytes() for w in own]


def test_bad_arguments_are_named() -> None:
    p = tape.parameter(np.ones(2))
    step = tape.compiled(lambda x: tape.array(x) * 2)
    with pytest.raises(TypeError, match=r"argument 0 is <Var .*: a parameter belongs in static="):
        step(p)
    with pytest.raises(TypeError, match="argument 0: expected an ndarray"):
        step([1, 2])
    with pytest.raises(TypeError, match=r"static\[1\]: expected a Var or an ndarray on the CPU"):
        tape.compiled(step, static=[p, 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"compiled: a step that yields .* GraphTree\.pipeline"):
        tape.compiled(lambda x: (yield x))
    assert step.last is None
    p.grad = np.ones(2)
    p.grad.flags.writeable = False
    adds = tape.compiled(lambda x: tape.backward((tape.array(x) * p).sum()), static=[p])
    with pytest.raises(fanin.CaptureError, match=r"\.grad of .* is a read-only ndarray: expected a writable ndarray"):
        adds(np.ones(2))
    assert p.grad.tolist() == [1, 1]


def test_an_error_in_the_step_leaves_arrays_gradients_and_recordings_as_they_were() -> None:
    own, rng, fail = Small(), np.random.default_rng(8), [True, False, False, False]

    def step(*args: NDArray) -> Var:
        loss = own(*args)
        if fail.pop(0):
            raise KeyError("half-way")
        return loss

    compiled, args, before = tape.compiled(step, static=own.static), batch(rng), own.state()
    with pytest.raises(KeyError):
        compiled(*args)
    assert own.state() == before
    assert compiled.stats.nodes == compiled.stats.warmed == 0
    eager = Small()
    for _ in range(3):
        same(eager, compiled, own, args)
    assert compiled.stats.replayed == 1


def test_a_kernel_that_raises_in_a_replay_leaves_the_gradients_and_the_recording() -> None:
    p = tape.parameter(np.ones(2))

    def careful(x: NDArray, out: NDArray) -> None:
        if x[0] > 5:
            raise ValueError("too large")
        out[...] = x

    def step(x: NDArray) -> None:
        [y] = tape.custom("careful", lambda a: [tape.run(careful, a)], [tape.array(x)], lambda g, need: g)
        tape.backward((p * y).sum())

    compiled = tape.compiled(step, static=[p])
    want = 0.0
    for x in (1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0, 9.0, 1.0):  # in a warm-up, a recording, a replay
        if x == 9:
            with pytest.raises(ValueError, match="too large"):
                compiled(np.full(2, x))
        else:
            compiled(np.full(2, x))
            want += x
        assert p.grad.tolist() == [want, want]
    assert compiled.stats.replayed >= 1


@pytest.mark.parametrize("writes", [False, True])
def test_a_static_array_that_keeps_moving_is_copied_or_the_step_runs_as_it_is(writes: bool) -> None:
    p = tape.parameter(np.ones(2))

    def step(x: NDArray) -> Var:
        if writes:
            tape.update(np.add, [p, x], [p])
        return tape.array(x) * p

    own, kept = tape.compiled(step, static=[p], limit=3), []
    with pytest.warns(RuntimeWarning, match="runs without a recording" if writes else "copies operand 1 from now on"):
        for k in range(8):
            p.data = np.full(2, float(k))
            kept.append(p.data)
            assert own(np.ones(2)).numpy().tolist() == [k + float(writes)] * 2
    assert own.last is not None and own.last.did == ("raw" if writes else "replayed")


def test_without_memory_a_step_runs_eagerly_and_warns() -> None:
    own = tape.compiled(lambda x: tape.array(x) * 2.0, memory=1 << 12)
    for _ in range(3):
        assert own(np.ones(1000)).numpy().tolist() == [2.0] * 1000
    assert own.last is not None and own.last.did == "raw" and "no room" in str(own.last.reason)


def test_a_step_may_be_a_part_of_another() -> None:
    p = tape.parameter(np.full(2, 3.0))
    inner = tape.compiled(lambda x: x * p, static=[p])
    outer = tape.compiled(lambda x: inner(tape.array(x)) + 1, static=[p])
    for x in (1.0, 2.0, 3.0):
        assert outer(np.full(2, x)).numpy().tolist() == [3 * x + 1] * 2
    assert (inner.last, outer.stats.replayed) == (None, 1)


def test_threads_may_call_one_step() -> None:
    p = tape.parameter(np.ones(4))

    def step(x: NDArray) -> Var:
        y = tape.array(x)
        tape.backward((p * y).sum())
        return y * 2

    compiled, wrong = tape.compiled(step, static=[p]), list[float]()

    def call(value: float) -> None:
        for _ in range(50):
            if compiled(np.full(4, value)).numpy()[0] != 2 * value:
                wrong.append(value)

    threads = [threading.Thread(target=call, args=(float(i),)) for i in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert p.grad[0] == 50 * (1 + 2 + 3 + 4)


def test_a_kernel_cannot_call_its_own_step() -> None:
    own: list[Any] = []
    v = np.ones(2)

    def kernel(x: NDArray, out: NDArray) -> None:
        if x[0] > 1:
            own[0](x.copy())
        out += x

    own.append(tape.compiled(lambda x: tape.update(kernel, [x], [v]), static=[v]))
    for _ in range(3):
        own[0](np.ones(2))
    with pytest.raises(RuntimeError, match="cannot be called by one of its own kernels"):
        own[0](np.full(2, 2.0))
    own[0](np.ones(2))
    assert v.tolist() == [5, 5]


@pytest.mark.parametrize("number", [2.0, 3])
def test_a_number_to_begin_with_is_recorded(number: float) -> None:
    p, q = tape.parameter(np.ones(3)), tape.parameter(np.ones(3))

    def step(x: NDArray, p: Var) -> Var:
        y = (p * tape.array(x)).sum()
        tape.backward(y, [number])
        return y

    compiled = tape.compiled(lambda x: step(x, p), static=[p])
    for i in range(4):  # without a gradient, and with one: warmed up, recorded, replayed
        x = np.full(3, i + 1.0)
        assert compiled(x).numpy() == step(x, q).numpy() and p.grad.tobytes() == q.grad.tobytes()
    assert compiled.stats.replayed == 1


def test_an_array_to_begin_with_is_given_to_the_step_or_made_outside() -> None:
    p = tape.parameter(np.ones(3))

    def step(x: NDArray, *seed: NDArray) -> Var:
        y = (p * tape.array(x)).sum()
        tape.backward(y, seed or [np.array(2.0)])
        return y

    assert "as an argument, or in static=" in refused(step, np.ones(3), static=[p])
    compiled = tape.compiled(step, static=[p])
    p.grad = None
    for i in range(4):
        compiled(np.ones(3), np.array(2.0 + i))
    assert p.grad.tolist() == [2 + 3 + 4 + 5] * 3 and compiled.stats.replayed == 1


@pytest.mark.parametrize("debug", [False, True])
def test_with_debug_what_a_replay_does_not_write_is_not_a_number(debug: bool) -> None:
    calls: list[int] = []

    def once(a: NDArray, out: NDArray) -> None:
        if not calls:
            out[...] = a
        calls.append(1)

    def step(x: NDArray) -> Any:
        return tape.custom("once", lambda a: [tape.run(once, a)], [tape.array(x)], lambda g, need: g)

    compiled = tape.compiled(step)
    with fanin.set_options(debug=debug):
        for turn in range(4):
            [y] = compiled(np.ones(2))
            assert np.isnan(y.numpy()).all() == (debug and turn > 1)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "c8"])
@pytest.mark.parametrize("fn", [np.add, np.subtract, np.multiply, np.maximum, np.negative, np.tanh, np.sqrt, np.abs])
def test_a_ufunc_is_replayed_with_its_own_bits_however_its_arrays_lie(fn: np.ufunc, dtype: str) -> None:
    rng = np.random.default_rng(9)
    every = rng.normal(0, 3, (4, 2, 6, 10)).astype(dtype)
    base = every.copy()
    whole = base.reshape(-1)
    places: list[tuple[Any, Any, Any]] = [
        (base[0, 0], base[0, 1], base[1, 0]),  # without gaps
        (base[0, 0, :, ::2], base[0, 1, :, ::2], base[1, 0, :, ::2]),  # with gaps
        (base[0, 0, 0], base[0, 1], base[1, 0]),  # broadcast
        (base[0, 0].T, base[0, 1].T, base[1, 0].T),
        (whole[:60], whole[200:260], whole[:60]),  # in place
        (whole[:60], whole[200:260], whole[7:67]),  # half over what is read
        (base[0, 0], 3, base[1, 0]),
        (base[0, 0], 0.5, base[1, 0]),
        (base[0, 0, :0], base[0, 1, :0], base[1, 0, :0]),
    ]
    done = 0
    for one, two, out in places:
        reads = (one, two)[: fn.nin]
        own = tape.compiled(lambda reads=reads, out=out: tape.update(fn, reads, [out]), static=[base])
        with np.errstate(all="ignore"), suppress(TypeError):  # where NumPy has no such loop
            base[:] = every
            fn(*reads, out=out)
            want = base.tobytes()
            for _ in range(3):
                base[:] = every
                own()
                assert base.tobytes() == want
            assert own.last is not None and own.last.did == "replayed"
            done += 1
    if fn in (np.add, np.subtract, np.multiply, np.maximum):
        assert done >= 8


def test_a_kernel_with_a_name_that_utf8_cannot_encode_is_recorded() -> None:
    def twice(a: Any, out: Any) -> None:
        out[...] = 2 * a

    for fn in (twice, np.negative):
        x, y = np.ones(3), np.zeros(3)
        own = tape.compiled(lambda x=x, y=y, fn=fn: tape.update(fn, [x], [y], "a name\udc80"), static=[x, y])
        for _ in range(3):
            y[:] = 0
            own()
            assert y.tolist() == [2.0 if fn is twice else -1.0] * 3


def test_a_step_needs_no_collection_of_cycles() -> None:
    kept: list[weakref.ref[Any]] = []

    def arguments(i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = np.full(3, float(i))
        kept.append(weakref.ref(x))
        return [((x,), {}), ((x, 2.0), {}), ((), {"x": x}), (({"a": x},), {})][i // 5]

    step = tape.compiled(lambda x, scale=1.0: tape.array(x["a"] if isinstance(x, dict) else x) * scale)
    gc.collect()
    gc.disable()
    try:
        did = []
        for i in range(20):
            args, named = arguments(i)
            assert step(*args, **named).numpy().tolist() == [i * (2.0 if 5 <= i < 10 else 1.0)] * 3
            did.append(step.last.did)
            del args, named
    finally:
        gc.enable()
    assert did == ["warmed", "recorded", "replayed", "replayed", "replayed"] * 4
    assert not [x for x in kept if x() is not None]


def test_each_call_makes_a_new_result_if_it_has_no_arrays() -> None:
    step = tape.compiled(lambda x: {"none": None, "list": []})
    for _ in range(4):
        made = step(np.ones(2))
        assert made == {"none": None, "list": []}
        made["more"] = 1
        made["list"].append(2)


def test_an_empty_view_of_an_argument_is_a_result() -> None:
    step = tape.compiled(lambda x: (x[:0], x[:, 3:]))
    for _ in range(3):
        one, two = step(np.ones((2, 3)))
        assert (one.shape, two.shape) == ((0, 3), (2, 0))


def test_a_parameter_may_be_given_twice() -> None:
    w = tape.parameter(np.ones(2))

    def train(x: Any) -> Any:
        loss = (tape.array(x) * w).sum()
        tape.backward(loss)
        tape.update(lambda g, p: np.subtract(p, g, out=p), [w.grad], [w])
        w.grad = None
        return loss

    step = tape.compiled(train, static=[w, w])
    assert [float(step(np.ones(2)).numpy()) for _ in range(4)] == [2.0, 0.0, -2.0, -4.0]
