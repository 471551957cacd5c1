"""What torch.compile splits into partitions, written as pipelines: each situation by hand, beside NumPy, with the
number of recordings that it needs. On the simulated device, on the CUDA backend over the fake driver, and on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from kit.graph_trees import launch, scaled, tree_on

Body = Generator[Any, Any, Any]


def values(x: Any) -> Any:
    return np.asarray(x.numpy())


def made_of(m: Any, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function of any number of operands that allocates one array and fills it by one kernel."""

    def f(*operands: Any) -> Any:
        y = m.empty(operands[0].shape, operands[0].dtype)
        launch(m, kernel, list(operands), [y])
        return y

    f.__name__ = name
    return f


def added(a: Any, b: Any, out: Any) -> None:
    np.add(a, b, out=out)


def plus(n: float) -> Callable[..., Any]:
    return lambda a, out: np.add(a, n, out=out)


def replayed(step: Any) -> bool:
    return {did for _, did in step.last} == {"replayed"}


def test_an_array_that_the_host_makes_goes_back_to_the_device_and_there_are_two_recordings(m: Any) -> None:
    tree = tree_on(m)

    def before(x: Any, y: Any) -> Any:
        return made_of(m, "", plus(1))(x), made_of(m, "", plus(1))(y)

    def host(x1: Any, y1: Any) -> Any:
        return x1, y1, values(y1) + 1  # an ndarray

    def after(x1: Any, y1: Any, y_host: Any) -> Any:
        return made_of(m, "", lambda a, b, c, out: np.copyto(out, a + b + c))(x1, y1, y_host)

    step = tree.pipeline([before, host, after])
    rng = np.random.default_rng(0)
    for _ in range(5):
        x, y = rng.standard_normal((2, 6))
        assert values(step(m.array(x), m.array(y))).tolist() == ((x + 1) + (y + 1) + (y + 1 + 1)).tolist()
    assert replayed(step) and tree.stats.nodes == 2


def test_a_host_number_that_two_kernels_read_is_copied_in_and_needs_no_second_recording(m: Any) -> None:
    tree = tree_on(m)

    def both(x: Any, y: Any, number: Any) -> Any:
        return made_of(m, "", added)(x, number), made_of(m, "", added)(y, number)

    def body(x: Any, y: Any) -> Body:
        total = yield first(x)
        return second(x, y, m.array(np.array(float(total[0]) + 1)))

    first, second = tree.function(scaled(m, 2)), tree.function(both)
    step = tree.pipeline(body)
    for i in range(5):
        x, y = np.full(3, float(i)), np.full(3, 10.0 + i)
        one, two = step(m.array(x), m.array(y))
        assert values(one).tolist() == [3.0 * i + 1] * 3 and values(two).tolist() == [3.0 * i + 11] * 3
    assert replayed(step) and tree.stats.nodes == 2


def test_a_number_on_the_host_that_the_host_part_writes_is_that_of_its_own_step(m: Any) -> None:
    """A running count in host memory, of which each step gives the device a copy."""
    tree = tree_on(m)
    count = np.zeros(())

    def host(y: Any) -> Any:
        count[...] += values(y)[0]
        return y, count

    step = tree.pipeline([scaled(m, 1), host, made_of(m, "sum", added)])
    want = 0.0
    for i in range(6):
        want += i
        assert values(step(m.array(np.full(2, float(i))))).tolist() == [i + want] * 2
    assert count == want and replayed(step)


def test_a_copy_to_the_host_and_back_is_a_step_of_one_kernel(m: Any) -> None:
    tree = tree_on(m)
    step = tree.pipeline([lambda x: x, lambda x: values(x).copy(), made_of(m, "same", plus(0))])
    for i in range(4):
        x = np.arange(3.0) + i
        assert values(step(m.array(x))).tolist() == x.tolist()
    assert step.last[-1] == ("same", "replayed")
    assert [(r.function, r.kernels) for r in tree.recordings] == [("<lambda>", 0), ("same", 1)]


def forward_and_backward(m: Any, tree: Any, **of_backward: Any) -> tuple[Any, Any, Any]:
    """y = w * x, then a host number of it, then z = y * that; and the gradient of w, by hand."""
    times = made_of(m, "forward", lambda a, b, out: np.multiply(a, b, out=out))
    head = made_of(m, "head", lambda a, s, out: np.multiply(a, s, out=out))

    def backward(x: Any, scale: Any, g: Any) -> None:
        launch(m, lambda a, s, out: np.add(out, a * s, out=out), [x, scale], [g])

    return (
        tree.function(times, roles=("auto", "static")),
        tree.function(head),
        tree.function(backward, roles=("auto", "auto", "accumulate"), **of_backward),
    )


@pytest.mark.parametrize("calls", [True, False], ids=["called", "never called"])
def test_a_forward_of_two_pieces_and_its_backward_are_three_recordings(m: Any, calls: bool) -> None:
    """Where the backward piece is not called, nothing waits for it, and the next step is replayed."""
    tree = tree_on(m)
    forward, head, backward = forward_and_backward(m, tree)
    w, g = m.array(np.full(4, 2.0)), m.array(np.zeros(4))

    def body(x: Any) -> Body:
        y = forward(x, w)
        biggest = yield y
        scale = m.array(np.array(float(np.max(biggest))))
        z = head(y, scale)
        if calls:
            backward(x, scale, g)
        return z

    step = tree.pipeline(body)
    want = np.zeros(4)
    for i in range(6):
        x = np.arange(4.0) + i
        scale = np.max(2.0 * x)
        assert values(step(m.array(x))).tolist() == (2.0 * x * scale).tolist()
        want += x * scale if calls else 0
    assert g.numpy().tolist() == want.tolist()
    assert replayed(step) and tree.stats.nodes == (3 if calls else 2)


def test_a_piece_that_is_not_recorded_leaves_the_others_recorded(m: Any) -> None:
    """The backward piece runs plainly, as it has one kernel; the forward pieces are replayed."""
    tree = tree_on(m)
    forward, head, backward = forward_and_backward(m, tree, min_kernels=9)
    w, g = m.array(np.full(4, 2.0)), m.array(np.zeros(4))

    def body(x: Any) -> Body:
        y = forward(x, w)
        first = yield y
        scale = m.array(np.array(float(first[0])))
        backward(x, scale, g)
        return head(y, scale)

    step = tree.pipeline(body)
    want = np.zeros(4)
    for i in range(6):
        x = np.arange(4.0) + i
        want += x * (2.0 * x[0])
        assert values(step(m.array(x))).tolist() == (2.0 * x * (2.0 * x[0])).tolist()
    assert g.numpy().tolist() == want.tolist()
    assert [did for _, did in step.last] == ["replayed", "raw", "replayed"]


def test_a_host_scalar_that_the_forward_used_is_the_same_one_in_the_backward(m: Any) -> None:
    """A parameter on the host is used by a host part; its gradient is made there from what the device kept."""
    tree = tree_on(m)
    scale, grad = np.array(3.0), np.zeros(())
    first = tree.function(scaled(m, 2))
    last = tree.function(made_of(m, "last", added))

    def body(x: Any) -> Body:
        y = first(x)
        total = float(np.sum((yield y)))
        z = last(y, m.array(np.array(total * scale)))
        grad[...] += total * len(np.asarray((yield z)))  # d sum(z) / d scale
        return z

    step = tree.pipeline(body)
    want = 0.0
    for i in range(5):
        x = np.full(3, float(i))
        assert values(step(m.array(x))).tolist() == (2 * x + 2 * x.sum() * 3.0).tolist()
        want += 2 * x.sum() * 3
    assert grad == want and scale == 3.0 and replayed(step)


def test_sizes_times_pieces_are_the_recordings(m: Any) -> None:
    tree = tree_on(m)
    step = tree.pipeline([scaled(m, 2), lambda y: (y, values(y) + 1), made_of(m, "sum", added)])
    for n in (3, 4, 7, 3, 7, 4):
        for i in range(3):
            x = np.arange(float(n)) + i
            assert values(step(m.array(x))).tolist() == (4 * x + 1).tolist()
    assert tree.stats.nodes == 3 * 2 and replayed(step)


def test_a_size_that_is_read_on_the_host_selects_the_recording_of_the_next_piece(m: Any) -> None:
    """How many elements are positive is known when the kernel has run; each number of them is a recording."""
    tree = tree_on(m)
    signs = tree.function(made_of(m, "signs", lambda a, out: np.copyto(out, a > 0)))
    double = tree.function(scaled(m, 2))

    def body(x: Any) -> Body:
        kept = (yield signs(x)) > 0
        if not kept.any():
            return None  # no piece of no elements
        return double(m.array(values(x)[kept]))

    step = tree.pipeline(body)
    lists = [[1, -1, 2], [-1, -1, 5], [-1, -1, -1], [1, 2, 3]]
    for _ in range(3):
        for one in lists:
            x = np.array(one, np.float64)
            got = step(m.array(x))
            positive = x[x > 0]
            assert (got is None) == (len(positive) == 0)
            if got is not None:
                assert values(got).tolist() == (2 * positive).tolist()
    assert sorted(r.function for r in tree.recordings) == ["signs", "times_2", "times_2", "times_2"]


def test_two_host_parts_among_device_work_make_three_recordings_however_many_kernels_stand_between(m: Any) -> None:
    tree = tree_on(m)

    def begin(x: Any) -> Any:
        return scaled(m, 2)(made_of(m, "", plus(10))(x))

    def middle(y: Any) -> Any:
        z = made_of(m, "", plus(1))(y)
        u = made_of(m, "", lambda a, out: np.copyto(out, (a + 1) * 2))(z)
        return made_of(m, "", lambda a, out: np.copyto(out, 2 * a + 1))(u)

    def on_host(y: Any) -> Any:
        return (values(y) + 1) * 2

    step = tree.pipeline([begin, on_host, middle, on_host, made_of(m, "end", plus(1))])
    for i in range(4):
        x = np.arange(4.0) + i
        y = ((x + 10) * 2 + 1) * 2
        want = (2 * ((y + 1 + 1) * 2) + 1 + 1) * 2 + 1
        assert values(step(m.array(x))).tolist() == want.tolist()
    assert replayed(step) and tree.stats.nodes == 3


def test_a_host_part_that_fills_an_array_of_the_step_gives_it_to_later_pieces_and_to_the_result(m: Any) -> None:
    tree = tree_on(m)

    def begin(x: Any) -> Any:
        return scaled(m, 3)(x), m.empty(x.shape, x.dtype)

    def host(y: Any, filled: Any) -> Any:
        launch(m, lambda a, out: np.sin(a, out=out), [y], [filled])
        return y, filled

    def end(y: Any, filled: Any) -> Any:
        return made_of(m, "", lambda a, b, out: np.divide(a + b, 3, out=out))(y, filled), filled

    step = tree.pipeline([begin, host, end])
    for i in range(5):
        x = np.linspace(-1, 1, 5) + i
        result, filled = step(m.array(x))
        assert values(filled).tolist() == np.sin(3 * x).tolist()
        assert values(result).tolist() == ((3 * x + np.sin(3 * x)) / 3).tolist()
    assert replayed(step)


def test_what_a_host_part_and_a_later_piece_both_read_lives_until_the_later_one(m: Any) -> None:
    """Freed too early, its memory would be that of the arrays between."""
    tree = tree_on(m)

    def pair(x: Any) -> Any:
        return made_of(m, "", plus(1))(x), made_of(m, "", plus(2))(x)

    def between(x0: Any, x1: Any) -> Any:
        return x0, x1, made_of(m, "", plus(1))(x0), made_of(m, "", plus(1))(x1)

    def host(x0: Any, x1: Any, y0: Any, y1: Any) -> Any:
        return values(x0) + values(x1) + values(y0) + values(y1), x0, x1

    def end(y: Any, x0: Any, x1: Any) -> Any:
        scratch = made_of(m, "", plus(100))(y)
        launch(m, plus(0), [scratch], [scratch])
        return made_of(m, "", lambda a, b, c, out: np.copyto(out, a + b + c))(y, x0, x1)

    step = tree.pipeline([pair, lambda *both: both, between, host, end])
    for i in range(5):
        x = np.arange(3.0) + i
        x0, x1 = x + 1, x + 2
        want = (x0 + x1 + (x0 + 1) + (x1 + 1)) + x0 + x1
        assert values(step(m.array(x))).tolist() == want.tolist()
    assert replayed(step)


def test_one_function_in_two_places_of_a_step_has_a_recording_for_each(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))

    def body(x: Any) -> Body:
        y = double(x)
        yield y
        return double(y)

    step = tree.pipeline(body)
    for i in range(5):
        assert values(step(m.array(np.full(2, float(i))))).tolist() == [4.0 * i] * 2
    assert replayed(step)
    assert [(r.function, r.parent) for r in tree.recordings] == [("times_2", None), ("times_2", 0)]


def test_functions_that_steps_call_in_different_orders_have_a_recording_for_each_path(m: Any) -> None:
    tree = tree_on(m)
    double, triple = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))

    def body(x: Any, first: Any, second: Any) -> Body:
        y = first(x)
        yield y
        return second(y)

    step = tree.pipeline(body)
    for i in range(12):
        pair = (double, triple) if i % 2 else (triple, double)
        assert values(step(m.array(np.full(2, float(i))), *pair)).tolist() == [6.0 * i] * 2
    assert replayed(step)
    paths = sorted((r.function, r.parent is None) for r in tree.recordings)
    assert paths == [("times_2", False), ("times_2", True), ("times_3", False), ("times_3", True)]


def test_a_piece_without_operands_is_recorded_and_its_step_reads_it(m: Any) -> None:
    tree = tree_on(m)

    def ones() -> Any:
        y = m.empty((3,), np.float64)
        launch(m, lambda out: out.fill(1.0), [], [y])
        return y

    step = tree.pipeline([ones, lambda y: (y, values(y) * 4), made_of(m, "sum", added)])
    for _ in range(4):
        assert values(step()).tolist() == [5.0] * 3
    assert replayed(step)


def test_a_piece_that_overwrites_what_an_earlier_piece_read_does_so_after_it(m: Any) -> None:
    """The weight is read by the first piece, written by the last, and read again in the next step."""
    tree = tree_on(m)
    w = m.array(np.ones(3))
    read = tree.function(made_of(m, "read", lambda a, b, out: np.multiply(a, b, out=out)), roles=("auto", "static"))

    def write(w: Any, y: Any) -> None:
        launch(m, lambda a, out: np.add(out, a, out=out), [y], [w])

    written = tree.function(write, roles=("static", "auto"))

    def body(x: Any) -> Body:
        y = read(x, w)
        yield y
        written(w, y)
        return y

    step = tree.pipeline(body)
    want = np.ones(3)
    for i in range(6):
        x = np.full(3, 0.5 + i)
        y = x * want
        want = want + y
        assert values(step(m.array(x))).tolist() == y.tolist()
        assert w.numpy().tolist() == want.tolist()
    assert replayed(step)


def test_an_operand_that_a_piece_returns_as_it_is_is_the_callers_own(m: Any) -> None:
    tree = tree_on(m)
    w = m.array(np.arange(3.0))
    both = tree.function(lambda w, x: (w, made_of(m, "", added)(w, x)), roles=("static", "auto"))

    def body(x: Any) -> Body:
        same, y = both(w, x)
        yield y
        launch(m, plus(1), [same], [same])
        return y

    step = tree.pipeline(body)
    for i in range(5):
        assert values(step(m.array(np.zeros(3)))).tolist() == [k + i for k in range(3)]
        assert w.numpy().tolist() == [k + i + 1.0 for k in range(3)]
    assert replayed(step)


def test_an_operand_of_another_device_is_refused_by_name_and_the_next_step_works(a_world: Callable[..., Any]) -> None:
    m = a_world("sim", 2, seed=7)
    tree = tree_on(m)
    step = tree.pipeline([scaled(m, 2), lambda y: y, scaled(m, 3)])
    for i in range(4):
        with pytest.raises(ValueError, match="operand 0 lies on sim:1, but the graph tree is of sim:0"):
            step(m.array(np.ones(2), device=1))
        assert values(step(m.array(np.full(2, float(i))))).tolist() == [6.0 * i] * 2
    assert replayed(step)
