"""tape.compiled: a step recorded once on the CPU gives, replayed, the bits that the same step gives as it is."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin._interop.protocols import NDArray
from fanin.cli import demo
from fanin.sim import Machine, explore
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
    assert (step.stats.recordings, step.stats.replays, step.stats.raw) == (1, 5, 0)


def test_a_step_is_recorded_anew_when_shapes_dtypes_layouts_or_plain_values_change() -> None:
    eager, own, rng = Small(), Small(), np.random.default_rng(4)
    step = tape.compiled(own, static=own.static)
    first, labels, rate = batch(rng)
    for args, reason in [
        ((first, labels, rate), "it was never recorded"),
        ((first[:8], labels[:8], rate), "argument 0 is an array (8, 8)"),
        ((np.asfortranarray(first), labels, rate), "argument 0 is an array (12, 8) of float32 with strides (4, 48)"),
        ((first.astype("f8"), labels, rate), "argument 0 is an array (12, 8) of float64"),
    ]:
        same(eager, step, own, args)
        assert step.last is not None
        assert step.last.did == "recorded"
        assert reason in step.last.reason
        same(eager, step, own, args)
        assert step.last.did == "replayed"
    same(eager, step, own, (first, labels, rate))
    assert step.last is not None
    assert step.last.did == "replayed"  # the first one fits again
    scaled = tape.compiled(lambda x, by: tape.array(x) * by)
    assert scaled(np.ones(2), 2.0).numpy().tolist() == [2, 2]
    assert scaled(np.ones(2), 3.0).numpy().tolist() == [3, 3]
    assert scaled.last == tape.Outcome("recorded", "argument 1 is 3.0, was 2.0")


def test_a_parameter_that_gets_another_array_is_recorded_anew() -> None:
    p = tape.parameter(np.ones(3))
    step = tape.compiled(lambda x: tape.array(x) * p, static=[p])
    assert step(np.ones(3)).numpy().tolist() == [1, 1, 1]
    p.data = np.full(3, 5.0)
    assert step(np.ones(3)).numpy().tolist() == [5, 5, 5]
    assert step.last == tape.Outcome("recorded", "static 0 lies elsewhere")
    p.data[:] = 6  # in place: nothing to record
    assert step(np.ones(3)).numpy().tolist() == [6, 6, 6]
    assert step.last is not None
    assert step.last.did == "replayed"


@pytest.mark.rule("L8", "L5")
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_gradients_of_k_calls_add_up_in_place_as_those_of_backward_do(k: int) -> None:
    eager, own, rng = Small(update=False), Small(update=False), np.random.default_rng(k)
    step = tape.compiled(own, static=own.static)
    for turn in range(3):
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
        assert step.stats.recordings == (1 if k == 1 else 2), turn


def test_the_demos_network_trains_to_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    digits = demo.Digits(rng)
    start = demo.initial(rng)
    eager, own = (demo.Net(start, demo.Spread(None), sparse=False) for _ in range(2))
    step = demo.recorded(own)
    batches = digits.batches(rng)
    for i in range(4):
        d, t = next(batches)
        d, t = (d[:16], t[:16]) if i == 2 else (d[:32], t[:32])
        rate = np.array(0.1 / (i + 1), "f4")
        assert float(demo.train_step(eager)(d, t, rate).numpy()) == float(step(d, t, rate).numpy())
        for name, p in eager.parameters.items():
            assert p.data.tobytes() == own.parameters[name].data.tobytes(), name
            assert eager.speed[name].tobytes() == own.speed[name].tobytes(), name
    assert (step.stats.recordings, step.stats.replays) == (2, 2)


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


@pytest.mark.parametrize("name", [
    "KERNEL_NOT_REPLAYED", "BLOCK_GIVEN_TWICE", "LEAF_ADOPTS", "RECORDS_ANYTHING", "FITS_ANYTHING"
])  # fmt: skip
def test_the_programs_find_a_planted_fault(name: str) -> None:
    hooks.fault(name)
    try:
        with pytest.raises((AssertionError, fanin.CaptureError)):
            if name == "LEAF_ADOPTS":
                adopted()
            elif name == "RECORDS_ANYTHING":
                frozen()
            elif name == "FITS_ANYTHING":
                fitted()
            else:
                programs(range(25))
    finally:
        hooks.fault(None)
    programs(range(5))


def frozen() -> None:
    """An array that NumPy made in the step, which a replay would show as it was: it must not come that far."""
    step = tape.compiled(lambda x: tape.array(x) * (x + 1))
    with suppress(fanin.CaptureError):
        step(np.ones(2))
        assert step(np.full(2, 3.0)).numpy().tolist() == [12, 12], "the values of another call"


def fitted() -> None:
    """Arguments of another shape, which NumPy would broadcast into the memory of the recording."""
    step = tape.compiled(lambda x: tape.array(x) * 2.0)
    for n in (3, 1, 3):
        assert step(np.full(n, 2.0)).numpy().tolist() == [4.0] * n


# ---------------------------------------------------------------- memory


def adopted() -> None:
    """L8: two leaves that get one array, which lies in a recording's memory, and are added to."""

    def step(x: NDArray) -> None:
        for _ in range(2):
            tape.backward(((p + q) * tape.array(x)).sum())

    p, q = (tape.parameter(np.ones(3)) for _ in range(2))
    tape.compiled(step, static=[p, q])(np.full(3, 2.0))
    assert p.grad.tolist() == q.grad.tolist() == [4, 4, 4]


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


def test_a_replay_allocates_nothing_by_the_core_and_a_recording_goes_with_its_step() -> None:
    gc.collect()
    before, _, _ = hooks.memory()
    own, rng = Small(), np.random.default_rng(5)
    step = tape.compiled(own, static=own.static)
    args = batch(rng)
    for _ in range(3):
        step(*args)
    _, made, _ = hooks.memory()
    for _ in range(5):
        step(*args)
    assert hooks.memory()[1] == made
    del step, own
    gc.collect()
    assert hooks.memory()[0] <= before + 8  # parked buffers of the frontend


def test_ten_shapes_take_the_memory_of_each_and_ten_calls_no_more_than_one() -> None:
    own, rng = Small(), np.random.default_rng(5)
    step = tape.compiled(own, static=own.static)
    step(*batch(rng, 16))
    one = step.stats.bytes
    for _ in range(10):
        step(*batch(rng, 16))
    assert step.stats.bytes == one
    kept = sum(a.nbytes for a in own.static if isinstance(a, np.ndarray))
    assert one < 40 * (kept + 16 * 16 * 4), "memory of what has gone is used again"


def test_what_a_caller_gets_is_changed_by_no_later_call() -> None:
    own, rng = Small(update=False), np.random.default_rng(6)
    step = tape.compiled(own, static=own.static)
    results = [step(*batch(rng)) for _ in range(4)]
    values = [x.numpy().copy() for x in results]
    step(*batch(rng))
    assert [x.numpy().tobytes() for x in results] == [v.tobytes() for v in values]
    assert len({v.tobytes() for v in values}) == 4


@pytest.mark.parametrize("update", [False, True])
def test_each_allocation_of_a_recording_that_fails_leaves_everything_as_it_was(update: bool) -> None:
    own, rng = Small(update=update), np.random.default_rng(5)
    args = batch(rng)
    own(*args)
    failed = 0
    for attempt in hooks.attempts():
        before, step = own.state(), tape.compiled(own, static=own.static)
        with attempt:
            step(*args)
        failed += attempt.failed
        assert not attempt.failed or (own.state() == before and step.stats.recordings == 0)
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
    replays, failed = step.stats.replays, 0
    for attempt in hooks.attempts():
        before = some_gone()
        with attempt:
            step(*args)
        failed += attempt.failed
        assert not attempt.failed or own.state() == before
    assert failed >= 2 and step.stats.replays > replays
    assert all(now != was for now, was in zip(own.state()[-4:], before[-4:], strict=True)), "the last one added"


# ---------------------------------------------------------------- what cannot be recorded


def test_what_a_replay_would_not_do_again_is_refused_with_the_reason() -> None:
    p, x = tape.parameter(np.ones((2, 2))), np.ones((2, 2))
    kept: list[Any] = []
    assert "cannot read values" in refused(lambda a: float((tape.array(a) * p).sum().numpy()), x, static=[p])
    assert "made by NumPy alone" in refused(lambda a: tape.array(a + 1) * p, x, static=[p])
    assert "may depend on values" in refused(lambda a: tape.array(a.sum()) * p, x, static=[p])
    given = np.ones((2, 2))
    assert "no argument of the step, nor in static=" in refused(lambda a: tape.array(given) * tape.array(a), x)
    assert "as an argument, or in static=" in refused(lambda a: Var(given, tape.cpu) * tape.array(a), x)
    assert "neither allocated in the recording nor an operand" in refused(lambda a: tape.array(a) * p, x)
    assert "neither allocated in the recording nor an operand" in refused(lambda a: tape.array(a) * (a + 1), x)
    assert "which no recorded operation made" in refused(lambda a: a + 1, x)
    assert "which no recorded operation made" in refused(lambda a: 0.5, x)
    assert "outlived it" in refused(lambda a: kept.append(tape.array(a) * p), x, static=[p])
    assert "writes into argument 0" in refused(
        lambda a: tape.update(np.negative, [p], [Var(a, tape.cpu)]), x, static=[p]
    )
    assert "sparse" in refused(
        lambda i: tape.backward([tape.embedding(p, tape.array(i)).sum(), (p * p).sum()]),
        np.array([0, 1, 1]),
        static=[p],
    )


def test_what_numpy_alone_writes_in_a_step_is_refused_and_everything_is_as_it_was() -> None:
    rng = np.random.default_rng(11)
    w, x = tape.parameter(rng.normal(size=(3, 2))), rng.normal(size=(4, 3))

    def after_backward(change: Callable[[Any], object]) -> Callable[[NDArray], None]:
        def step(a: NDArray) -> None:
            tape.backward((tape.array(a) @ w).sum())
            change(w)

        return step

    def into_data(w: Any) -> None:
        w.data -= 0.1 * w.grad

    def into_grad(w: Any) -> None:
        w.grad *= 0.5

    def another_grad(w: Any) -> None:
        w.grad = w.grad * 0.5

    def into_argument(a: NDArray) -> Var:
        a *= 2
        return tape.array(a) @ w

    def into_result(a: NDArray) -> Var:
        y = tape.array(a) @ w
        y.data[:] = 0
        return y

    def into_constant(a: NDArray) -> Var:
        y = tape.array([1.0, 2.0])
        y.data[:] = 3
        return tape.array(a) @ w * y

    def into_gradient(a: NDArray) -> Var:
        y = (tape.array(a) @ w).sum()
        [g] = tape.grad(y, [w])
        g *= 0.5
        tape.update(np.subtract, [w, g], [w])
        return y

    was, given = w.data.copy(), x.copy()
    by_numpy = "what NumPy alone writes in a step, no replay would write again"
    assert by_numpy in refused(after_backward(into_data), x, static=[w])
    assert by_numpy in refused(after_backward(into_grad), x, static=[w])
    assert "made by NumPy alone in .grad of" in refused(after_backward(another_grad), x, static=[w])
    assert by_numpy in refused(into_argument, x, static=[w])
    assert by_numpy in refused(into_result, x, static=[w])
    assert by_numpy in refused(into_constant, x, static=[w])
    assert by_numpy in refused(into_gradient, x, static=[w])
    assert w.grad is None
    assert w.data.tobytes() == was.tobytes() and w.data.flags.writeable
    assert x.tobytes() == given.tobytes() and x.flags.writeable


def test_two_threads_may_record_steps_of_the_same_parameters() -> None:
    w, begun, done = tape.parameter(np.ones(3)), threading.Event(), threading.Event()

    def slow(a: NDArray) -> Var:
        y = tape.array(a) * w
        begun.set()
        done.wait()
        return y

    def train(a: NDArray) -> None:
        tape.update(np.add, [w, a], [w])

    read, write = tape.compiled(slow, static=[w]), tape.compiled(train, static=[w])
    other = threading.Thread(target=read, args=(np.ones(3),))
    other.start()
    begun.wait()
    write(np.ones(3))
    assert not w.data.flags.writeable  # the other records yet
    done.set()
    other.join()
    write(np.ones(3))
    assert w.data.tolist() == [3, 3, 3] and w.data.flags.writeable


def test_a_static_array_that_cannot_be_written_stays_so() -> None:
    v = np.ones(3)
    v.flags.writeable = False
    with pytest.raises(fanin.CaptureError, match="which have to be arrays that can be written"):
        tape.compiled(lambda: tape.update(np.negative, [v], [Var(v, tape.cpu)]), static=[v])()
    step = tape.compiled(lambda a: tape.array(a) * tape.array(v), static=[v])
    assert step(np.arange(3.0)).numpy().tolist() == step(np.arange(3.0)).numpy().tolist() == [0, 1, 2]
    assert not v.flags.writeable


def test_what_would_be_frozen_in_a_recording_is_refused(tmp_path: Any) -> None:
    x, rows = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    mapped = np.memmap(tmp_path / "rows", dtype="f8", mode="w+", shape=(4, 3))
    made, values = "made by NumPy alone", "may depend on values"
    assert made in refused(lambda a: tape.array(mapped[:2]) * tape.array(a), x)
    assert made in refused(lambda a: tape.array([rows[0], rows[1]]) * tape.array(a), x)
    assert made in refused(lambda a: tape.array([a.mean(), 1.0, 2.0]) * tape.array(a), x)
    assert values in refused(lambda a: tape.mul(tape.array(a), a.mean()), x)
    assert values in refused(lambda a: tape.total(tape.array(a), None, a.mean()), x)
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
        return tape.array(np.asarray(x) if isinstance(x, np.ndarray) else float(x)) * by

    step = tape.compiled(scaled)
    for again in (False, True):
        for x, by in calls:
            want, got = scaled(x, by).numpy(), step(x, by).numpy()
            assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())
            assert step.last is not None and step.last.did == ("replayed" if again else "recorded")


def test_a_parameter_seen_in_another_shape_at_the_same_place_is_recorded_anew() -> None:
    w, x = tape.parameter(np.arange(9.0).reshape(3, 3)), np.arange(3.0).reshape(1, 3)
    step = tape.compiled(lambda a: tape.array(a) @ w, static=[w])
    step(x)
    w.data = w.data.T
    assert step(x).numpy().tobytes() == (tape.array(x) @ w).numpy().tobytes()
    assert step.last == tape.Outcome("recorded", "static 0 lies there in another layout")


def test_an_argument_that_repeats_itself_is_copied_in() -> None:
    step = tape.compiled(lambda a: tape.array(a) * 2.0)
    for k in range(3):
        x = np.broadcast_to(np.arange(3.0) + k, (4, 3))
        assert step(x).numpy().tolist() == (x * 2).tolist()


def test_a_batch_of_nothing_is_recorded() -> None:
    w = tape.parameter(np.ones((3, 2)))

    def train(a: NDArray) -> list[Var]:
        y = tape.array(a) @ w * 2.0
        tape.backward(y.sum())
        return [y, y.sum()]

    step = tape.compiled(train, static=[w])
    for n in (0, 4, 0, 4):
        assert [y.shape for y in step(np.ones((n, 3)))] == [(n, 2), ()]
    assert w.grad.tolist() == [[16, 16]] * 3


def test_an_argument_that_lies_in_what_the_step_writes_is_refused() -> None:
    v = np.ones(4)

    def grow(a: NDArray) -> Var:
        tape.update(lambda p: np.add(p, 1, out=p), [], [Var(v, tape.cpu)])
        return tape.array(a) * 2.0

    step = tape.compiled(grow, static=[v])
    with pytest.raises(fanin.CaptureError, match="argument 0 lies in a static array, which 'update' writes"):
        step(v[:2])
    assert v.tolist() == [1] * 4
    assert step(np.ones(2)).numpy().tolist() == [2, 2]
    with pytest.raises(fanin.CaptureError, match="argument 0 lies in a static array"):
        step(v[:2])
    assert v.tolist() == [2] * 4


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
        for _ in range(4):
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
    with pytest.raises(TypeError, match="argument 0: expected an ndarray"):
        step(np.float32(1))
    with pytest.raises(TypeError, match=r"static\[1\]: expected a Var or an ndarray on the CPU"):
        tape.compiled(step, static=[p, 3])  # type: ignore[list-item]
    assert step.last is None


def test_an_error_in_the_step_leaves_arrays_gradients_and_recordings_as_they_were() -> None:
    own, rng, fail = Small(), np.random.default_rng(8), [True, False, False]

    def step(*args: NDArray) -> Var:
        loss = own(*args)
        if fail.pop(0):
            raise KeyError("half-way")
        return loss

    compiled, args, before = tape.compiled(step, static=own.static), batch(rng), own.state()
    with pytest.raises(KeyError):
        compiled(*args)
    assert own.state() == before
    assert compiled.stats.recordings == 0
    eager = Small()
    for _ in range(2):
        same(eager, compiled, own, args)
    assert compiled.stats.replays == 1


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
    for x, grad in [(1.0, 1.0), (2.0, 3.0)]:
        compiled(np.full(2, x))
        assert p.grad.tolist() == [grad, grad]
    with pytest.raises(ValueError, match="too large"):
        compiled(np.full(2, 9.0))
    assert p.grad.tolist() == [3, 3]
    compiled(np.full(2, 1.0))
    assert p.grad.tolist() == [4, 4]


def test_beyond_the_limit_a_step_runs_as_it_is_and_says_so() -> None:
    step = tape.compiled(lambda x, by: tape.array(x) * by, limit=3)
    for by in range(6):
        assert step(np.ones(2), float(by)).numpy().tolist() == [by, by]
    assert step.last == tape.Outcome("raw", "it was recorded 3 times (limit=), and argument 1 is 5.0, was 4.0")
    assert (step.stats.recordings, step.stats.raw) == (3, 3)


def test_a_step_may_be_a_part_of_another() -> None:
    p = tape.parameter(np.full(2, 3.0))
    inner = tape.compiled(lambda x: x * p, static=[p])
    outer = tape.compiled(lambda x: inner(tape.array(x)) + 1, static=[p])
    for x in (1.0, 2.0):
        assert outer(np.full(2, x)).numpy().tolist() == [3 * x + 1] * 2
    assert (inner.stats.recordings, outer.stats.replays) == (0, 1)


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


def test_replays_of_two_threads_over_the_same_parameters_give_the_same_in_every_order() -> None:
    def scenario(m: Machine) -> tuple[object, ...]:
        p = tape.parameter(np.ones(3))

        def step(x: NDArray) -> Var:
            y = (p * tape.array(x)).sum()
            tape.backward(y)
            return y

        steps = [tape.compiled(step, static=[p]) for _ in range(2)]
        for compiled in steps:
            for _ in range(2):  # without a gradient, and with one
                compiled(np.zeros(3))

        def call(compiled: Any, value: float) -> float:
            return float(compiled(np.full(3, value)).numpy())

        threads = [m.spawn(call, compiled, value) for compiled, value in zip(steps, (1.0, 2.0), strict=True)]
        m.join()
        assert [compiled.stats.raw for compiled in steps] == [0, 0]
        return (*(t.result for t in threads), p.grad.tobytes())

    report = explore(scenario, limit=300, samples=50)
    assert report.ok and report.runs > 1, (report, report.error)
    assert report.results == ((3.0, 6.0, np.full(3, 3.0).tobytes()),)


@pytest.mark.parametrize("number", [2.0, 3])
def test_a_number_to_begin_with_is_recorded(number: float) -> None:
    p, q = tape.parameter(np.ones(3)), tape.parameter(np.ones(3))

    def step(x: NDArray, p: Var) -> Var:
        y = (p * tape.array(x)).sum()
        tape.backward(y, [number])
        return y

    compiled = tape.compiled(lambda x: step(x, p), static=[p])
    for i in range(4):
        x = np.full(3, i + 1.0)
        assert compiled(x).numpy() == step(x, q).numpy() and p.grad.tobytes() == q.grad.tobytes()
    assert compiled.stats.replays == 2


def test_an_array_to_begin_with_is_given_to_the_step_or_made_outside() -> None:
    p = tape.parameter(np.ones(3))

    def step(x: NDArray, *seed: NDArray) -> Var:
        y = (p * tape.array(x)).sum()
        tape.backward(y, seed or [np.array(2.0)])
        return y

    assert "made by NumPy alone" in refused(step, np.ones(3), static=[p])
    compiled = tape.compiled(step, static=[p])
    p.grad = None
    for i in range(3):
        compiled(np.ones(3), np.array(2.0 + i))
    assert p.grad.tolist() == [2 + 3 + 4] * 3 and compiled.stats.replays == 1


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
        for turn in range(3):
            [y] = compiled(np.ones(2))
            assert np.isnan(y.numpy()).all() == (debug and turn > 0)


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
        recording = tape._Recording()
        recording.operand(base)
        base[:] = every
        work = partial(tape.record, recording, fn, "kernel", reads, (out,))
        with np.errstate(all="ignore"), suppress(TypeError):  # where NumPy has no such loop
            recording(work)
            first = base.copy()
            base[:] = every
            fn(*reads, out=out)
            assert base.tobytes() == first.tobytes()
            base[:] = every
            fanin._core.recording_replay(recording.core, ((), (), ()), (), (), ())
            assert base.tobytes() == first.tobytes()
            done += 1
    if fn in (np.add, np.subtract, np.multiply, np.maximum):
        assert done >= 8


def test_a_kernel_whose_name_utf8_cannot_say_is_recorded() -> None:
    def twice(a: Any, out: Any) -> None:
        out[...] = 2 * a

    for fn in (twice, np.negative):
        recording, x, y = tape._Recording(), np.ones(3), np.zeros(3)
        for operand in (x, y):
            recording.operand(operand)
        recording(partial(tape.record, recording, fn, "a name\udc80", (x,), (y,)))
        assert y.tolist() == [2.0 if fn is twice else -1.0] * 3
