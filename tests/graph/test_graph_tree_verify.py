"""GraphTree(verify=n): the first n replays of a recording run the function as it is beside them, and every bit that
differs is an error that names the array.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.graph_trees import did, launch, tree_on
from kit.sample import sizes

pytestmark = pytest.mark.core

RATE = 0.5
Step = Callable[[Any, Any, Any], Any]


def scale_into(m: Any, x: Any, w: Any, factor: float) -> Any:
    """w += 1, and a new array x * w * factor."""
    y = m.empty(x.shape, x.dtype)
    launch(m, lambda b: np.add(b, 1, out=b), [], [w])
    launch(m, lambda a, b, out: np.multiply(a * b, factor, out=out), [x, w], [y])
    return y


class Trainer:
    """A function that counts its own steps."""

    def __init__(self, m: Any) -> None:
        self.m, self.steps = m, 0

    def step(self, x: Any, w: Any, g: Any) -> Any:
        self.steps += 1
        return scale_into(self.m, x, w, 1 / self.steps)


def of_closure(m: Any) -> tuple[Step, Callable[[], None]]:
    rate = 0.5

    def step(x: Any, w: Any, g: Any) -> Any:
        return scale_into(m, x, w, rate)

    def change() -> None:
        nonlocal rate
        rate = 0.25

    return step, change


def of_global(m: Any) -> tuple[Step, Callable[[], None]]:
    def change() -> None:
        globals()["RATE"] = 0.25

    return lambda x, w, g: scale_into(m, x, w, RATE), change


def of_branch(m: Any) -> tuple[Step, Callable[[], None]]:
    flag = np.array([1.0])

    def step(x: Any, w: Any, g: Any) -> Any:
        if flag[0] > 0:
            launch(m, lambda a, out: np.add(out, a, out=out), [x], [g])
        return scale_into(m, x, w, 1.0)

    return step, lambda: flag.fill(-1.0)


def of_table_and_number(m: Any) -> tuple[Step, Callable[[], None]]:
    averages, rate = np.array([1.0]), 0.5

    def step(x: Any, w: Any, g: Any) -> Any:
        return scale_into(m, x, w, rate * averages[0])

    def change() -> None:
        nonlocal rate
        averages[0], rate = 2.0, 0.125

    return step, change


def of_dropout(m: Any) -> tuple[Step, Callable[[], None]]:
    rng = np.random.default_rng(0)
    return lambda x, w, g: scale_into(m, x, w, float(rng.random())), lambda: None


def of_random_state(m: Any) -> tuple[Step, Callable[[], None]]:
    return lambda x, w, g: scale_into(m, x, w, float(np.random.random())), lambda: None


def of_nan_bits(m: Any) -> tuple[Step, Callable[[], None]]:
    bits = [np.array([0x7FF8000000000001]).view("f8")[0]]
    return lambda x, w, g: scale_into(m, x, w, bits[0]), lambda: bits.__setitem__(0, -bits[0])


#: What a replay does not do again: the function, what changes, the words of the array, those of the cause.
UNSEEN: dict[str, tuple[Callable[[Any], tuple[Step, Callable[[], None]]], str, str]] = {
    "a number of a closure": (of_closure, "output 0", "rate was 0.5 .* and is 0.25 now"),
    "a global": (of_global, "output 0", "RATE was 0.5 .* and is 0.25 now"),
    "a branch on data": (of_branch, r"operand 2 \(accumulate\)", "flag has other values now"),
    "an array and a number": (
        of_table_and_number,
        "output 0",
        "rate was 0.5 .* and is 0.125 now, the ndarray averages has other values now",
    ),
    "a step counter": (lambda m: (Trainer(m).step, lambda: None), "output 0", r"self.steps was 1 .* and is \d now"),
    "dropout": (of_dropout, "output 0", "rng has drawn random numbers"),
    "dropout by NumPy's own state": (of_random_state, "output 0", "np.random has drawn random numbers"),
    "bits of a NaN": (of_nan_bits, "output 0", r"bits was \[.*nan\]|depends on something that is no operand"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_work_that_a_replay_does_not_repeat_is_found_and_named(m: Any, name: str) -> None:
    globals()["RATE"] = 0.5
    made, where, why = UNSEEN[name]
    step, change = made(m)
    tree = tree_on(m, verify=4)
    f = tree.function(step, roles=("copy", "static", "accumulate"))
    x, w, g = (m.array(np.full(3, v)) for v in (1.0, 2.0, 3.0))
    for _ in range(2):
        with tree.step():
            f(x, w, g)
    change()
    before = w.numpy().tolist(), g.numpy().tolist()
    for _ in range(6):  # later calls are checked too: a finding is kept
        with tree.step(), pytest.raises(fanin.CaptureError, match=rf"{f.name}: .*{where} differs.*{why}"):
            f(x, w, g)
        m.synchronize()
        assert (w.numpy().tolist(), g.numpy().tolist()) == before
    assert did(f) == "recorded"
    globals()["RATE"] = 0.5


def test_without_verify_the_same_functions_are_silently_wrong(m: Any) -> None:
    """What verify= is for: this test fails when one of them is refused by other means."""
    step, change = of_closure(m)
    tree = tree_on(m)
    f = tree.function(step, roles=("copy", "static", "accumulate"))
    x, w, g = (m.array(np.zeros(3)) for _ in range(3))
    for _ in range(2):
        with tree.step():
            f(x, w, g)
    change()
    with tree.step():
        f(x, w, g)
        assert did(f) == "replayed"


def test_a_function_that_is_right_runs_beside_its_first_replays_and_then_no_more(m: Any) -> None:
    runs: list[int] = []

    def step(x: Any, w: Any, g: Any) -> Any:
        runs.append(1)
        y = scale_into(m, x, w, 3.0)
        launch(m, lambda a, out: np.add(out, a, out=out), [y], [g])
        return y, None, w, [][:0] or y[1:]

    tree = tree_on(m, verify=3)
    f = tree.function(step, roles=("copy", "static", "accumulate"), keep=(True, False, False, False))
    w, g, kept = m.array(np.zeros(3)), m.array(np.zeros(3)), []
    want = 0.0
    for i in range(1, 9):
        with tree.step():
            y, none, same, part = f(m.array(np.full(3, float(i))), w, g)
            want += 3.0 * i * i
            assert none is None and same is w and y.numpy().tolist() == [3.0 * i * i] * 3
            assert part.numpy().tolist() == [3.0 * i * i] * 2
            kept.append(y)
        m.synchronize()
        assert w.numpy().tolist() == [float(i)] * 3 and g.numpy().tolist() == [want] * 3
        assert len(runs) == min(i, 2 + 3)
    assert did(f) == "replayed" and tree.stats.replayed == 6 and tree.stats.raw == 0
    assert [y.numpy()[0] for y in kept] == [3.0 * i * i for i in range(1, 9)]


def test_each_recording_is_verified_of_its_own(m: Any) -> None:
    factor = [2.0]

    def times(x: Any) -> Any:
        y = m.empty(x.shape, x.dtype)
        k = factor[0]
        launch(m, lambda a, out: np.multiply(a, k, out=out), [x], [y])
        return y

    tree = tree_on(m, verify=1)
    f = tree.function(times)
    for n in (2, 5):
        factor[0] = 2.0
        for _ in range(2):
            with tree.step():
                f(m.array(np.ones(n)))
        factor[0] = 3.0
        with tree.step(), pytest.raises(fanin.CaptureError, match="output 0 differs in"):
            f(m.array(np.ones(n)))
    factor[0] = 2.0
    for n in (2, 5):
        with tree.step():
            assert f(m.array(np.ones(n))).numpy().tolist() == [2.0] * n
        assert did(f) == "replayed"


def test_another_number_of_outputs_and_another_shape_are_differences(m: Any) -> None:
    mode = ["one"]

    def step(x: Any) -> Any:
        y = m.empty(x.shape, x.dtype)
        launch(m, lambda a, out: np.copyto(out, a), [x], [y])
        return {"one": lambda: y, "two": lambda: (y, y), "short": lambda: y[1:], "none": lambda: None}[mode[0]]()

    tree = tree_on(m, verify=2)
    f = tree.function(step)
    x = m.array(np.ones(3))
    for _ in range(2):
        with tree.step():
            f(x)
    for now, words in {
        "two": "returns 2 outputs now, and returned 1",
        "none": "returns 0 outputs now, and returned 1",
        "short": r"output 0 is .*\(2,\).* now, and was .*\(3,\)",
    }.items():
        mode[0] = now
        with tree.step(), pytest.raises(fanin.CaptureError, match=words):
            f(x)
    mode[0] = "one"
    with tree.step():
        assert f(x).numpy().tolist() == [1.0] * 3 and did(f) == "replayed"


def test_an_exception_of_the_function_passes_and_its_operands_are_as_before(m: Any) -> None:
    fails = [False]

    def step(x: Any, w: Any) -> Any:
        y = scale_into(m, x, w, 1.0)
        if fails[0]:
            raise KeyError("now")
        return y

    tree = tree_on(m, verify=2)
    f = tree.function(step, roles=("copy", "static"))
    x, w = m.array(np.ones(3)), m.array(np.zeros(3))
    for _ in range(2):
        with tree.step():
            f(x, w)
    fails[0] = True
    for _ in range(3):
        with tree.step(), pytest.raises(KeyError, match="now"):
            f(x, w)
        m.synchronize()
        assert w.numpy().tolist() == [2.0] * 3
    fails[0] = False
    with tree.step():
        assert f(x, w).numpy().tolist() == [3.0] * 3 and did(f) == "replayed"


def test_operands_that_share_memory_and_outputs_of_the_step_are_restored(m: Any) -> None:
    whole = m.array(np.arange(6.0))

    def first(x: Any) -> Any:
        y = m.empty(x.shape, x.dtype)
        launch(m, lambda a, out: np.add(a, 1, out=out), [x], [y])
        return y

    def second(y: Any, one: Any, two: Any) -> Any:
        launch(m, lambda a: np.multiply(a, 2, out=a), [], [one])
        launch(m, lambda a, b: np.add(b, a[:1], out=b), [y], [two])
        launch(m, lambda a: np.add(a, 1, out=a), [], [y])
        return y

    tree = tree_on(m, verify=2)
    f, g = tree.function(first), tree.function(second, roles=("auto", "static", "static"))
    want = np.arange(6.0)
    for i in range(6):
        with tree.step():
            y = f(m.array(np.full(3, float(i))))
            z = g(y, whole[:4], whole[2:])
            want[:4] *= 2
            want[2:] += i + 1
            assert z.numpy().tolist() == [i + 2.0] * 3 == y.numpy().tolist()
        m.synchronize()
        assert whole.numpy().tolist() == want.tolist(), did(g)
    assert did(f) == did(g) == "replayed" and tree.stats.raw == 0


@pytest.mark.parametrize("verify", [0, 3])
def test_calls_on_different_streams_wait_for_each_other(m: Any, verify: int) -> None:
    """The function runs on the caller's stream after the tree's work, and the replay after that."""
    if m.place() == "cpu":
        pytest.skip("the CPU has no streams")
    tree = tree_on(m, verify=verify)
    f = tree.function(lambda x, w: scale_into(m, x, w, 2.0), roles=("auto", "static"))
    g = tree.function(lambda x, w: scale_into(m, x, w, 3.0), roles=("auto", "static"))
    a, b = m.stream(), m.stream()
    w = m.array(np.zeros(3))
    for _ in range(2 + verify):  # its replays wait for nothing on the host from then on
        with tree.step():
            f(m.array(np.full(3, 1.0)), w)
    m.synchronize()
    w_ = w.numpy()[0]
    for i in range(1, 7):
        with tree.step():
            with fanin.stream(a):
                y = f(m.array(np.full(3, 1.0)), w)
            with fanin.stream(b):
                z = g(y, w)
                assert z.numpy().tolist() == [(w_ + 2.0 * i - 1) * 2.0 * (w_ + 2.0 * i) * 3.0] * 3
        m.synchronize()
    assert did(f) == did(g) == "replayed"


def test_a_function_within_a_function_runs_as_a_part_of_it(m: Any) -> None:
    tree = tree_on(m, verify=3)
    inner = tree.function(lambda x, w: scale_into(m, x, w, 2.0), roles=("auto", "static"))
    outer = tree.function(lambda x, w: inner(inner(x, w), w), roles=("copy", "static"))
    w = m.array(np.zeros(3))
    for i in range(6):
        with tree.step():
            assert outer(m.array(np.ones(3)), w).numpy().tolist() == [(2.0 * i + 1) * 2.0 * (2.0 * i + 2) * 2.0] * 3
    assert did(outer) == "replayed"


def test_a_static_array_that_the_function_has_by_its_own_name_is_written_once() -> None:
    w = np.zeros(3)

    def step(x: Any, _: Any) -> Any:
        np.add(w, x, out=w)
        return x * w

    with fanin.GraphTree("cpu", verify=3) as tree:
        f = tree.function(step, roles=("copy", "static"))
        for i in range(1, 8):
            with tree.step():
                assert f(np.ones(3), w).numpy().tolist() == [float(i)] * 3
            assert w.tolist() == [float(i)] * 3
        assert did(f) == "replayed"


def test_a_branch_on_a_static_array_is_found() -> None:
    w = np.zeros(3)

    def step(x: Any, a: Any) -> Any:
        if w[0] < 2:
            a += 1
        return x * a

    with fanin.GraphTree("cpu", verify=3) as tree:
        f = tree.function(step, roles=("copy", "static"))
        for _ in range(2):
            with tree.step():
                f(np.ones(3), w)
        with tree.step(), pytest.raises(fanin.CaptureError, match=r"output 0 differs in 3 of 3 elements"):
            f(np.ones(3), w)
        assert w.tolist() == [2.0] * 3


def test_a_kernel_that_is_not_replayed_is_found(m: Any) -> None:
    """A planted fault of the CPU's recorder."""
    if not isinstance(m.place(), str) or m.place() != "cpu":
        pytest.skip("the fault is of the CPU's")
    with fanin.GraphTree("cpu", verify=2) as tree:
        f, w = tree.function(lambda x, w: np.add(w, x, out=w), roles=("copy", "static")), np.zeros(3)
        for _ in range(2):
            with tree.step():
                f(np.ones(3), w)
        hooks.fault("KERNEL_NOT_REPLAYED")
        try:
            with tree.step(), pytest.raises(fanin.CaptureError, match="output 0 differs"):
                f(np.ones(3), w)
        finally:
            hooks.fault(None)
        assert w.tolist() == [2.0] * 3


def test_a_planted_fault_of_verify_is_found(m: Any) -> None:
    def counted() -> Any:
        tree = tree_on(m, verify=2)
        f = tree.function(lambda x, w: scale_into(m, x, w, 0.0), roles=("copy", "static"))
        w = m.array(np.zeros(3))
        for _ in range(4):
            with tree.step():
                f(m.array(np.ones(3)), w)
        return w.numpy().tolist()

    assert counted() == [4.0] * 3
    hooks.fault("TREE_VERIFY_TWICE")
    try:
        with pytest.raises((AssertionError, fanin.CaptureError)):
            assert counted() == [4.0] * 3
    finally:
        hooks.fault(None)


@pytest.mark.parametrize("verify", [-1, 1 << 31])
def test_verify_is_a_number_of_replays(verify: int) -> None:
    with pytest.raises(ValueError, match="verify: expected a number of replays"):
        fanin.GraphTree("cpu", verify=verify)


def random_calls(m: Any, seed: int, verify: int) -> Iterator[list[float]]:
    """Functions one after the other in steps of changing shape: the results of each call, and the state."""
    rng = random.Random(seed)
    tree = tree_on(m, verify=verify)
    ops = (np.subtract, np.minimum, np.maximum)

    def made(k: int) -> Any:
        plan = [(rng.choice(ops), rng.randrange(3)) for _ in range(rng.randint(1, 4))]

        def body(x: Any, w: Any, g: Any) -> Any:
            y = m.empty(x.shape, x.dtype)
            launch(m, lambda a, out: np.copyto(out, a), [x], [y])
            for op, at in plan:
                to = (y, w, g)[at]
                launch(m, lambda a, out, op=op: op(out, a, out=out), [(w, g, y)[at]], [to])
            return y if k else (y, w)

        return tree.function(body, roles=("auto", "static", "accumulate"))

    fs = [made(k) for k in range(3)]
    state = {n: (m.array(np.full(n, 0.5)), m.array(np.full(n, 0.25))) for n in (2, 3)}
    for i in range(30):
        n = rng.choice((2, 3))
        w, g = state[n]
        with tree.step():
            for f in rng.sample(fs, 2):
                y = f(m.array(np.full(n, float(i))), w, g)
                m.synchronize()
                y = y[0] if isinstance(y, tuple) else y
                yield [*y.numpy().tolist(), *w.numpy().tolist(), *g.numpy().tolist(), did(f) == "replayed"]


@pytest.mark.parametrize("count", sizes(3, 8))
def test_random_programs_pass_and_give_the_same_with_verify_as_without(m: Any, count: int) -> None:
    replays = 0
    for seed in range(count):
        rows = list(random_calls(m, seed, 2))
        assert rows == list(random_calls(m, seed, 0)), seed
        replays += sum(int(row[-1]) for row in rows)
    print(replays, "replays")
    assert replays >= 25 * count


def scene() -> list[Any]:
    with fanin.GraphTree("cpu", memory=1 << 16, verify=2) as tree:
        f = tree.function(lambda x, w: (np.tanh(x + w), np.add(w, 1, out=w)), roles=("copy", "static"))
        w, seen = np.ones((2, 3)), []
        for k in range(4):
            with tree.step():
                seen.append(f(np.full((2, 3), float(k)), w)[0].numpy().tolist())
        return [*seen, w.tolist()]


def test_each_allocation_fails_once_and_nothing_is_lost() -> None:
    want, failures = scene(), 0
    gc.collect()
    fanin.trim()
    before = hooks.blocks()
    for attempt in hooks.attempts(well=40):
        with attempt:
            assert scene() == want, attempt.n
        failures += attempt.failed
    gc.collect()
    fanin.trim()
    assert failures > 40 and scene() == want
    gc.collect()
    fanin.trim()
    assert hooks.blocks() == before
