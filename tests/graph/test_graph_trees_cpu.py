"""Graph trees on the CPU, with ndarrays: buffers, passes and the tape in a function are recorded; other work is an
error. The other files have the behaviour that all devices share; test_graph_tree_orders.py has NumPy functions.
"""

from __future__ import annotations

import gc
import inspect
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core, tape
from kit import hooks
from kit.sample import sizes

pytestmark = pytest.mark.core


def tree_here(**more: Any) -> fanin.GraphTree:
    return fanin.GraphTree("cpu", **{"memory": 1 << 16, **more})


def did(f: Any) -> str:
    return str(f.last.did)


def test_a_small_operation_of_one_layout_runs_without_the_interpreter() -> None:
    """A replay of it allows no thread switch, and calls nothing of Python's: it makes no object."""
    with tree_here() as tree:
        f = tree.function(lambda x, out: np.add(x, 1.5, out=out), roles=("static", "static"))
        x, out = np.ones(4), np.zeros(4)
        for i in range(4):
            x[:] = i
            with tree.step():
                assert f(x, out) is out
            assert out.tolist() == [i + 1.5] * 4
        assert did(f) == "replayed"


def test_nothing_runs_while_a_function_is_recorded() -> None:
    seen: list[Any] = []
    with tree_here() as tree:

        def adds(x: Any, g: Any) -> None:
            g += x
            if not fail:
                return
            seen.append(g)
            raise KeyError("late")

        f, g, fail = tree.function(adds, roles=("copy", "accumulate")), np.zeros(2), False
        with tree.step():
            f(np.ones(2), g)
        fail = True
        for _ in range(2):
            with tree.step(), pytest.raises(KeyError):
                f(np.ones(2), g)
        assert g.tolist() == [1.0, 1.0] and len(seen) == 2
        seen.clear()
        fail = False
        for _ in range(3):
            with tree.step():
                f(np.ones(2), g)
        assert did(f) == "replayed" and g.tolist() == [4.0, 4.0]


# ---- what is refused


BAD: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "reads": (lambda x: x.numpy(), fanin.CaptureError, "cannot read values on the host"),
    "reads by asarray": (lambda x: np.asarray(x * 2), fanin.CaptureError, "cannot read values on the host"),
    "an array of outside": (lambda x: x + OUTSIDE, fanin.CaptureError, "f: add touches memory that is neither"),
    "written outside": (
        lambda x: (np.add(x, 1, out=OUTSIDE), x * 2)[1],
        fanin.CaptureError,
        "f: add touches memory that is neither",
    ),
    "an ndarray of its own": (
        lambda x: x * np.ones(3),
        fanin.CaptureError,
        "f: multiply touches memory that is neither",
    ),
    "gives an ndarray": (lambda x: np.ones(3), TypeError, "f: output 0 is a numpy.ndarray: .* returns arrays on cpu"),
    "of values": (
        lambda x: np.nonzero(x)[0],
        TypeError,
        "np.nonzero: of arrays of a graph tree ufuncs can be recorded",
    ),
    "places of values": (lambda x: np.where(x > 0)[0], TypeError, "np.where: of arrays of a graph tree ufuncs can be"),
    "at places": (lambda x: np.add.at(x, [0], 1), TypeError, "np.add: f.at and where="),
    "a mask": (lambda x: np.add(x, 1, where=x > 0), TypeError, "np.add: f.at and where="),
    "a mask of its own": (lambda x: np.add(x, 1, out=x * 1, where=MASK), TypeError, "np.add: f.at and where="),
    "out= by name": (
        lambda x: np.sum(x, out=x[:1]),
        TypeError,
        r"np.sum: with out= ufuncs alone .*out\[...\] = np.sum\(",
    ),
    "out= by place": (
        lambda x: np.sum(x, None, None, x[0]),
        TypeError,
        "np.sum: with out= ufuncs alone can be recorded",
    ),
    "out= of a method": (lambda x: x.clip(0, 1, x), TypeError, "np.clip: with out= ufuncs alone can be recorded"),
    "a shape of values": (
        lambda x: np.tile(x, x),
        TypeError,
        "np.tile: reps decides the shape .* pass them as operands",
    ),
    "a shape of some values": (
        lambda x: np.tile(x, (2, np.argmax(x))),
        TypeError,
        "np.tile: reps decides the shape of what is recorded",
    ),
    "a width of values": (
        lambda x: np.pad(x, x),
        TypeError,
        "np.pad: pad_width decides the shape of what is recorded",
    ),
    "several results": (
        lambda x: np.average(x, returned=True),
        TypeError,
        "np.average: it gives several results, a tuple, and one array can be recorded",
    ),
    "overwritten by a median": (lambda x: np.median(x, overwrite_input=True), ValueError, "read-only"),
    "overwritten NaNs": (lambda x: np.nan_to_num(x, copy=False), ValueError, "read-only"),
    "so often": (lambda x: x.repeat(repeats=x), TypeError, "np.repeat: repeats decides the shape of what is recorded"),
    "a method that nobody has": (
        lambda x: x.summ(),
        AttributeError,
        "'fanin.sim.Array' object has no attribute 'summ'\n",
    ),
    "a method of values": (
        lambda x: x.nonzero(),
        AttributeError,
        r"'nonzero': of an ndarray's methods .* \(all, any, .*numpy",
    ),
    "places of an array": (
        lambda x: x[x.argsort()],
        TypeError,
        r"an array of a graph tree is indexed by .*np.take\(x, pl",
    ),
    "one value": (lambda x: x[0].item(), fanin.CaptureError, "cannot read values on the host"),
    "a list": (lambda x: np.add(x, [1.0, 2.0, 3.0]), TypeError, r"add: reads\[1\]: a kernel on the CPU reads arrays"),
    "a view given away": (lambda x: np.from_dlpack(x), BufferError, "memory of a graph tree ends with its step"),
    "an exact sum": (lambda x: fanin.add_n([x, x], accumulate="exact"), fanin.CaptureError, "an exact sum cannot be"),
    "a sparse sum": (lambda x: of_sparse(x), fanin.CaptureError, "sparse gradients cannot be recorded"),
    "a kernel that keeps its view": (lambda x: keeps_a_view(x), RuntimeError, "kernel 'keeps' kept its argument 0"),
    "a kernel that fails": (lambda x: fails(x), KeyError, "in the kernel"),
}
OUTSIDE = np.ones(3)
MASK = np.array([True, False, True])
KEPT: list[Any] = []


def of_sparse(x: Any) -> Any:
    sparse = fanin.Sparse("coo", (np.zeros((1, 1), np.int64), x[:1]), (3,))
    return fanin.add_n([sparse, sparse])


def keeps_a_view(x: Any) -> Any:
    y = np.empty_like(x)
    _core.cpu_launch(lambda a, out: KEPT.append(a[1:]), "keeps", (x,), (y,))
    return y


def fails(x: Any) -> Any:
    def kernel(a: Any) -> None:
        raise KeyError("in the kernel")

    _core.cpu_launch(kernel, "fails", (x,), ())
    return x * 2


@pytest.mark.parametrize("name", BAD)
def test_code_that_cannot_be_recorded_is_refused_and_the_tree_is_unchanged(name: str) -> None:
    fn, error, words = BAD[name]
    calls: list[int] = []

    def f(x: Any) -> Any:
        calls.append(1)
        return fn(x) if len(calls) > 1 else x * 2

    with tree_here() as tree:
        g, good = tree.function(f), tree.function(lambda x: x * 3)
        x = np.arange(3.0)
        for _ in range(3):
            with tree.step():
                good(x)
        with tree.step():
            y = good(x)
            g(x)
        for _ in range(2):
            with tree.step():
                y = good(x)
                before = tree._recordings(), tree.stats.in_use
                with pytest.raises(error, match=words):
                    g(x)
                assert (tree._recordings(), tree.stats.in_use) == before
                assert y.numpy().tolist() == [0, 3, 6] and good(y).numpy().tolist() == [0, 9, 18]
        assert x.tolist() == [0, 1, 2] and OUTSIDE.tolist() == [1, 1, 1]
        assert _core.cpu_wants_handles() is False
    KEPT.clear()


def test_operands_are_ndarrays_of_known_dtypes_or_outputs() -> None:
    with tree_here() as tree, tree.step():
        f = tree.function(lambda x: x * 2, roles="static")
        with pytest.raises(fanin.DTypeError, match=r"operand 0 has dtype object, which cannot be recorded"):
            f(np.array([None]))
        with pytest.raises(TypeError, match=r"operand 0: its role static needs an array on cpu, got a matrix"):
            f(np.ones((1, 1)).view(np.matrix))
        with pytest.raises(TypeError, match="got a float"):
            f(1.0)
        read_only = np.ones(2)
        read_only.flags.writeable = False
        assert f(read_only).numpy().tolist() == [2, 2]
        adds = tree.function(lambda x: np.add(x, 1, out=x), roles="static")
        with pytest.raises(ValueError, match=r"add: writes\[0\] is read-only"):
            adds(read_only)
        assert f(np.ones((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("role", ["static", "accumulate"])
def test_a_write_of_numpy_alone_into_a_static_operand_is_refused_in_the_first_call(role: str) -> None:
    """By the operand's own name, or by a view of it; through the handle, and in kernels, it is recorded."""
    g, v = np.zeros(3), np.zeros(3)

    def by_name(x: Any, _: Any) -> None:
        g[:] = 1

    def by_a_view(x: Any, _: Any) -> None:
        g[1:] += 1

    def recorded(x: Any, handle: Any) -> None:
        handle += x
        np.add(v, x, out=v)
        fanin.add_n([x, v[:]], out=v[:])

    with tree_here() as tree:
        for bad in (by_name, by_a_view):
            for _ in range(2):
                with tree.step(), pytest.raises(fanin.CaptureError, match="no replay repeats what NumPy alone writes"):
                    tree.function(bad, roles=("copy", role))(np.ones(3), g)
                assert g.tolist() == [0, 0, 0] and g.flags.writeable
        f = tree.function(lambda x, a, _: recorded(x, a), roles=("copy", role, "static"))
        for _ in range(4):
            with tree.step():
                f(np.ones(3), g, v)
        assert did(f) == "replayed" and g.tolist() == [4, 4, 4] and v.tolist() == [8, 8, 8]
        assert g.flags.writeable and v.flags.writeable


def test_a_kernel_that_reads_grad_is_refused() -> None:
    leaf = fanin.Leaf(np.ones(2))

    def kernel(a: Any, out: Any) -> None:
        out[...] = a if leaf.grad is None else leaf.grad

    def f(x: Any) -> Any:
        y = np.empty_like(x)
        _core.cpu_launch(kernel, "own", (x,), (y,))
        return y

    with tree_here() as tree, tree.step(), pytest.raises(fanin.CaptureError, match=r"'own' reads \.grad of"):
        tree.function(f)(np.ones(2))


def test_arrays_are_split_into_views() -> None:
    with tree_here() as tree:
        f = tree.function(lambda x: tuple(y * 2 for y in (*np.split(x, 3), *np.array_split(x, 2, axis=-1),
                                                          *np.split(x, [2, 1], 1))))  # fmt: skip
        for k in range(4):
            x = np.arange(12.0).reshape(3, 4) + k
            want = (*np.split(x, 3), *np.array_split(x, 2, axis=-1), *np.split(x, [2, 1], 1))
            with tree.step():
                assert [y.numpy().tolist() for y in f(x)] == [(y * 2).tolist() for y in want]
        assert did(f) == "replayed"


def test_operations_of_the_tape_give_the_layout_of_numpy_and_so_its_bits() -> None:
    rng = np.random.default_rng(8)

    def body(x: Any, y: Any) -> Any:
        a, b = tape.Var(x, tape.cpu), tape.Var(y, tape.cpu)
        made = [a.T + b.T, tape.relu(a.T), tape.array(x.T), tape.softmax(a.T), tape.total(a.T, 0), a * y]
        return tuple(np.sum(m.data, axis=axis) for m in made for axis in (None, 0))

    with tree_here() as tree:
        f = tree.function(body)
        for _ in range(4):
            x, y = (rng.normal(size=(40, 30)).astype("f4") for _ in range(2))
            with tree.step():
                got = [z.numpy() for z in f(x, y)]
            assert [z.tobytes() for z in got] == [np.asarray(z).tobytes() for z in body(x, y)]
        assert did(f) == "replayed"


def test_sparse_gradients_of_the_tape_are_refused_in_the_first_call() -> None:
    def f(i: Any) -> None:
        p = tape.parameter([[1.0, 2.0]])
        tape.backward(tape.embedding(p, tape.Var(i, tape.cpu)).sum())

    with tree_here() as tree, tree.step(), pytest.raises(fanin.CaptureError, match=r"sparse.*use tape\.gathered"):
        tree.function(f)(np.zeros(2, "i8"))


def test_a_replay_refuses_a_read_only_array_that_it_would_write() -> None:
    """It lies where the array lay that the recording writes into."""

    def adds(x: Any, g: Any) -> None:
        g += x

    for role in ("static", "accumulate"):
        with tree_here() as tree:
            f, g = tree.function(adds, roles=("copy", role)), np.zeros(3)
            read_only = g.view()
            read_only.flags.writeable = False
            for k in range(4):
                with tree.step():
                    f(np.ones(3), g)
                assert g.tolist() == [k + 1.0] * 3
            for _ in range(2):
                with tree.step(), pytest.raises(ValueError, match="adds: operand 1 is read-only, and the function wri"):
                    f(np.ones(3), read_only)
            assert g.tolist() == [4.0] * 3
            with tree.step():
                f(g, g.copy()) if role == "static" else f(np.ones(3), g)
            with tree.step():
                f(read_only, np.zeros(3))
            assert tree.stats.replayed >= 2


def test_an_ndarray_on_a_tree_of_a_device_is_refused_as_before() -> None:
    said = pytest.raises(ValueError, match="operand 0 lies on sim:0, but the graph tree is of cpu")
    with fanin.sim.Machine() as m, fanin.GraphTree("cpu") as tree, tree.step(), said:
        tree.function(lambda x: x)(m.array(np.ones(2)))


def added_by_a_buffer(x: Any) -> Any:
    buf = fanin.InputBuffer(1)
    buf.add(0, x, key=0)
    buf.add(0, OUTSIDE, key=1)
    return buf.take()[0]


def begun_outside(x: Any) -> Any:
    leaf = fanin.Leaf(x)
    leaf.grad = x * 0
    fanin.backward([(leaf, 0, OUTSIDE)])
    return leaf.grad


OUTSIDES: dict[str, Callable[[Any], Any]] = {
    "by an operator": lambda x: x + OUTSIDE,
    "by np.arange": lambda x: x + np.arange(3),
    "by a function": lambda x: np.where(x > 0, x, OUTSIDE),
    "by an assignment": lambda x: np.full_like(x, OUTSIDE),
    "written": lambda x: np.add(x, 1, out=OUTSIDE),
    "a part": lambda x: x * OUTSIDE[1:2],
    "by a tensor": lambda x: (tape.array(OUTSIDE) + tape.array(x)).data,
    "by add_n": lambda x: fanin.add_n([x, OUTSIDE]),
    "by a buffer": added_by_a_buffer,
    "by a pass": begun_outside,
    "by a function within": lambda x: WITHIN[0](OUTSIDE),
    "an operand that is copied": lambda x: x + COPIED,
}
WITHIN: list[Any] = []
COPIED = np.ones(3)


@pytest.mark.parametrize("name", OUTSIDES)
def test_an_ndarray_of_outside_fails_in_the_first_call_as_in_the_second(name: str) -> None:
    with tree_here() as tree:
        WITHIN[:] = [tree.function(lambda x: x * 2)]
        f = tree.function(OUTSIDES[name])
        for _ in range(2):
            with (
                tree.step(),
                pytest.raises(fanin.CaptureError, match=r"<lambda>|begun_outside|added_by_a_buffer") as e,
            ):
                f(COPIED)
            assert "touches memory that is neither an operand nor allocated in the function's own" in str(e.value)
        assert OUTSIDE.tolist() == [1, 1, 1] and f.last is None
    WITHIN.clear()


def test_an_ndarray_that_is_a_static_operand_may_be_used_by_its_own_name() -> None:
    w, g = np.arange(3.0), np.zeros(3)

    def body(x: Any, *_: Any) -> Any:
        np.add(g, x, out=g)
        return fanin.add_n([x, w]) * w[1:2] + OUTSIDE[:0].sum()

    with tree_here() as tree:
        f = tree.function(body, roles=("copy", "static", "accumulate"))
        for k in range(4):
            with tree.step():
                assert f(np.full(3, float(k)), w, g).numpy().tolist() == [k, k + 1, k + 2]
        assert did(f) == "replayed" and g.tolist() == [6.0] * 3


RESHAPED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "of as many elements": (
        lambda x, at: np.concatenate([x, x], axis=at), np.ones((2, 2)),
        r"np.concatenate: .* \(4, 2\) float64 when it was recorded, and now \(2, 4\) float64",
    ),
    "of another axis": (
        lambda x, at: np.sum(x, axis=at), np.ones((2, 3)), r"np.sum: .* \(3,\) float64 when .* now \(2,\) float64"
    ),
    "of one element less": (
        lambda x, at: np.diff(x, n=at), np.ones(2), r"np.diff: .* \(2,\) float64 when .* now \(1,\) float64"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESHAPED)
def test_a_result_of_another_shape_than_recorded_is_an_error_that_names_the_function_and_both(name: str) -> None:
    """An operand of one element that decides a shape: it is a number when the kernel runs."""
    fn, x, words = RESHAPED[name]
    with tree_here() as tree:
        f = tree.function(fn)
        for _ in range(3):
            with tree.step():
                assert f(x, np.array(0)).numpy().tolist() == np.asarray(fn(x, 0)).tolist()
        assert did(f) == "replayed"
        with tree.step(), pytest.raises(fanin.CaptureError, match=words):
            f(x, np.array(1))
        with tree.step():
            assert f(x, np.array(0)).numpy().tolist() == np.asarray(fn(x, 0)).tolist()


def test_a_result_of_another_dtype_than_recorded_is_an_error_that_names_both() -> None:
    from fanin.graph import cpu_arrays

    out = np.zeros(3, "i8")
    with pytest.raises(fanin.CaptureError, match=r"np.f: .* \(3,\) int64 when .* now \(3,\) float64.*operand"):
        cpu_arrays.fill_recorded("np.f", out, np.ones(3))
    with pytest.raises(fanin.CaptureError, match=r"np.f: .* \(3,\) int64 when .* now \(1,\) int64"):
        cpu_arrays.fill_recorded("np.f", out, np.ones(1, "i8"))
    cpu_arrays.fill_recorded("np.f", out, [1, 2, 3])
    assert out.tolist() == [1, 2, 3]


# ---- handles outside of functions


def test_a_handle_gives_values_while_its_step_lasts_and_raises_from_then_on() -> None:
    uses: list[Callable[[Any], Any]] = [
        lambda y: y.numpy(), lambda y: np.asarray(y), lambda y: y + 1, lambda y: 1 - y, lambda y: np.sum(y),
        lambda y: y[1:], lambda y: y.T, lambda y: y @ y, lambda y: np.exp(y), lambda y: y > 0,
        lambda y: y.sum(), lambda y: y.astype("f4"), lambda y: y.copy(), lambda y: y.tolist(), lambda y: y.argsort(),
        lambda y: np.concatenate([y, y]), lambda y: fanin.add_n([y, y]), lambda y: list(y), lambda y: np.add(1, y),
    ]  # fmt: skip
    with tree_here() as tree:
        f = tree.function(lambda x: x * 2)
        for k in range(4):
            with tree.step():
                y = f(np.full(3, float(k)))
                view = y[:2]
                got = [use(y) for use in uses]
                assert type(got[2]) is np.ndarray and got[2].tolist() == [2.0 * k + 1] * 3
                assert got[4] == 6.0 * k and got[7] == 12.0 * k * k
                assert view.numpy().tolist() == [2.0 * k] * 2
            for use in uses:
                for stale in (y, view):
                    with pytest.raises(RuntimeError, match=rf"output of <lambda>.*step {k + 1}, which ended at"):
                        use(stale)


def test_ndarrays_methods_outside_of_functions_are_of_the_values() -> None:
    with tree_here() as tree:
        f = tree.function(lambda x: x * 2)
        for k in range(4):
            with tree.step():
                y = f(np.full((2, 3), float(k)))
                assert y.sum() == 12.0 * k and y[0, 0].item() == 2.0 * k and y.T.flatten().tolist() == [2.0 * k] * 6
                assert y.astype("i4").dtype == np.int32 and y.tolist() == [[2.0 * k] * 3] * 2
                mine = y.copy()
                y.fill(9)
                y[0, 0], y[0, 1] = 3.0, 1.0
                y.sort()
                assert y.numpy().tolist() == [[1.0, 3.0, 9.0], [9.0] * 3] and mine.tolist() == [[2.0 * k] * 3] * 2
                with pytest.raises(AttributeError, match=r"x\.numpy\(\) is an ndarray"):
                    y.partition(1)
                assert not hasattr(y, "detach") and not hasattr(y, "_private")
            for stale in ("fill", "sort", "copy"):
                with pytest.raises(RuntimeError, match="output of <lambda>"):
                    getattr(y, stale)(*([1] if stale == "fill" else []))
        assert did(f) == "replayed"


def test_methods_of_ndarrays_are_of_the_cpu_alone() -> None:
    with fanin.sim.Machine() as m:
        x = m.array(np.ones((2, 3)))
        for name in ("sum", "astype", "copy", "nonzero"):
            with pytest.raises(AttributeError, match=f"'fanin.sim.Array' object has no attribute '{name}'$"):
                getattr(x, name)
        with pytest.raises(
            TypeError, match=r"an array on a device is indexed by .* queue a kernel with Machine.launch"
        ):
            x[np.zeros(2, int)]
        with pytest.raises(ValueError, match="a copy is work for a stream"):
            x.T.reshape(-1)


def test_a_handle_is_converted_to_a_number_outside_of_functions() -> None:
    with tree_here() as tree:
        f = tree.function(lambda x: x * 2)
        for k in range(4):
            with tree.step():
                y = f(np.arange(3.0) + k)
                assert float(y[0]) == 2.0 * k and type(float(y[0])) is float
                assert int(y[1]) == 2 * k + 2 and type(int(y[1])) is int
                assert complex(y[1]) == 2.0 * k + 2 and bool(y[2]) is True
                for whole in (float, int, bool):
                    with pytest.raises((TypeError, ValueError), match=r"0-dim|size-1|length-1|single el|more than one"):
                        whole(y)
            with pytest.raises(RuntimeError, match="output of <lambda>"):
                float(y[0])


def test_asarray_without_a_copy_is_refused() -> None:
    """NumPy's contract of copy=False: a ValueError where a copy is needed."""
    with tree_here() as tree:
        f = tree.function(lambda x: x * 2)
        for _ in range(4):
            with tree.step():
                y = f(np.ones(3))
                with pytest.raises(ValueError, match=r"copy=False.*x\.numpy\(\)"):
                    y.__array__(copy=False)
                if np.__version__ >= "2":
                    with pytest.raises(ValueError, match="copy=False"):
                        np.asarray(y, copy=False)
                assert np.asarray(y, "f4").dtype == np.float32 == y.__array__("f4").dtype
                assert y.__array__(None, copy=True).tolist() == np.array(y, copy=True).tolist() == [2.0] * 3
                with pytest.raises(TypeError, match="__array__"):
                    y.__array__(what=1)


def test_a_function_can_be_referenced_weakly() -> None:
    with tree_here() as tree:
        f = tree.function(lambda x: x * 2)
        gone: list[int] = []
        ref = weakref.ref(f, lambda _: gone.append(1))
        assert ref() is f and weakref.WeakKeyDictionary({f: 1})[f] == 1
        del f
        gc.collect()
        assert ref() is None and gone == [1]


def test_the_out_argument_of_each_function_is_listed() -> None:
    from fanin.graph import cpu_arrays

    asked = 0
    for f in cpu_arrays.FUNCTIONS:
        try:
            names = list(inspect.signature(f).parameters.values())  # type: ignore[arg-type]
        except ValueError:  # of a builtin, before NumPy 2.4
            continue
        places = [i for i, p in enumerate(names) if p.name == "out" and p.kind is not p.KEYWORD_ONLY]
        assert places == [at for g, at in cpu_arrays.OUT_AT.items() if g is f], f
        asked += len(places)
    assert asked >= 15


def test_values_that_were_read_are_copies() -> None:
    with tree_here() as tree:
        f = tree.function(lambda x: x * 2)
        taken = []
        for k in range(4):
            with tree.step():
                y = f(np.full(3, float(k)))
                taken += [(k, y.numpy()), (k, np.asarray(y)), (k, y + 0), (k, np.array(y))]
        assert all(a.tolist() == [2.0 * k] * 3 for k, a in taken)


def test_a_write_of_numpy_into_a_copy_of_values_is_an_error() -> None:
    writes: list[Callable[[Any], Any]] = [
        lambda y: np.copyto(y, 9.0, where=MASK), lambda y: np.put(y, [0], 5.0), lambda y: np.putmask(y, MASK, 5.0),
        lambda y: np.cumsum(y, out=y), lambda y: np.sum(np.ones((2, 3)), axis=0, out=y),
    ]  # fmt: skip
    with tree_here() as tree:
        f = tree.function(lambda x: x * 2)
        for _ in range(4):
            with tree.step():
                y = f(np.ones(3))
                for write in writes:
                    with pytest.raises(ValueError, match="read-only"):
                        write(y)
                np.add(y, 1, out=y, where=MASK)
                assert y.numpy().tolist() == [3.0, 2.0, 3.0]
                for view in (np.reshape(y, (3, 1)), *np.split(y, 3)):
                    view[...] = 7.0
                y.numpy()[0] = 8.0
                assert y.numpy().tolist() == [3.0, 2.0, 3.0]


def test_with_debug_the_memory_of_an_ended_path_is_poisoned() -> None:
    for debug in (False, True):
        with fanin.set_options(debug=debug), tree_here() as tree:
            f = tree.function(lambda x: x * 2)
            uninitialized = tree.function(lambda x: np.empty_like(x), key=lambda x: debug)
            for _ in range(3):
                with tree.step():
                    f(np.ones(3))
                with tree.step():
                    y = uninitialized(np.ones(3))
                    assert np.isnan(y.numpy()).all() == debug or not debug
            assert did(uninitialized) == "replayed"


def test_an_output_that_is_kept_is_memory_of_its_own() -> None:
    kept = []
    with tree_here() as tree:
        f = tree.function(lambda x: (x * 2, x * 3), keep=(True, False))
        for k in range(5):
            with tree.step():
                kept.append(f(np.full(2, float(k)))[0])
    assert [y.numpy().tolist() for y in kept] == [[2.0 * k] * 2 for k in range(5)]


# ---- the engine and the tape


def test_a_pass_backward_in_a_function_adds_into_the_callers_gradient() -> None:
    def step(x: Any, w: Any, grad: Any) -> Any:
        leaf = fanin.Leaf(w)
        leaf.grad = grad
        node = fanin.Node(lambda g: (g * x, g * 2 * x), edges=[(leaf, 0), (leaf, 0)])
        y = x * w
        fanin.backward([(node, 0, y)])
        assert leaf.grad is grad or leaf.grad.address == grad.address
        return y

    with tree_here() as tree:
        f = tree.function(step, roles=("copy", "static", "accumulate"))
        w, grad, want = np.arange(3.0) + 1, np.zeros(3), np.zeros(3)
        for k in range(6):
            x = np.full(3, float(k))
            want += 3 * x * x * w
            with tree.step():
                assert f(x, w, grad).numpy().tolist() == (x * w).tolist()
            assert grad.tolist() == want.tolist(), (k, did(f))
        assert did(f) == "replayed" and tree.stats.nodes == 1


def test_a_recorded_step_of_the_tape_gives_the_bits_of_the_eager_step() -> None:
    rng = np.random.default_rng(3)

    def step(x: Any, w: Any, b: Any, gw: Any, gb: Any) -> Any:
        params = [tape.Var(v, tape.cpu) for v in (w, b)]
        for p, g in zip(params, (gw, gb), strict=True):
            p.edge = fanin.Leaf(p.data), 0
            p.grad = g
        loss = (tape.tanh(tape.Var(x, tape.cpu) @ params[0] + params[1]) * 0.5).mean()
        tape.backward(loss)
        for p in params:
            tape.update(lambda g, v: np.subtract(v, 0.1 * g, out=v), [p.grad], [p])
        return loss.data

    def fresh() -> list[Any]:
        return [np.linspace(-1, 1, 12, dtype="f4").reshape(3, 4), np.zeros(4, "f4"),
                np.zeros((3, 4), "f4"), np.zeros(4, "f4")]  # fmt: skip

    with tree_here() as tree:
        f = tree.function(step, roles=("copy", "static", "static", "accumulate", "accumulate"))
        ours, plain = fresh(), fresh()
        for _ in range(6):
            x = rng.standard_normal((5, 3)).astype("f4")
            with tree.step():
                got = f(x, *ours).numpy()
            want = np.asarray(step(x, *plain))
            assert got.tobytes() == want.tobytes(), did(f)
            assert [a.tobytes() for a in ours] == [a.tobytes() for a in plain]
        assert did(f) == "replayed" and tree.stats.nodes == 1


def test_a_compiled_step_in_a_function_is_a_part_of_that() -> None:
    compiled = tape.compiled(lambda x: tape.tanh(x) * 2.0)
    with tree_here() as tree:
        f = tree.function(lambda x: compiled(tape.Var(x, tape.cpu)).data)
        for k in range(4):
            x = np.full(3, float(k))
            with tree.step():
                assert f(x).numpy().tolist() == (np.tanh(x) * 2.0).tolist()
        assert did(f) == "replayed" and compiled.last is None


def test_an_operation_that_draws_random_numbers_draws_once_in_each_call() -> None:
    rng, draws = np.random.default_rng(0), []

    def noisy(x: Any) -> Any:
        draws.append(x.shape)
        return x + rng.standard_normal(x.shape)

    op = tape.Op("noisy", noisy, lambda g, x: g)
    want = np.random.default_rng(0)
    with tree_here() as tree:
        f = tree.function(lambda x: op(tape.Var(x, tape.cpu)).data)
        for k in range(5):
            with tree.step():
                assert np.array_equal(f(np.zeros(3)).numpy(), want.standard_normal(3)), did(f)
            assert len(draws) == k + 1
        assert did(f) == "replayed"


def test_a_constant_of_the_tape_is_of_numbers_or_of_an_operand() -> None:
    with tree_here() as tree:
        f = tree.function(lambda x: (tape.array([1.0, 2.0]) + tape.array(x)).data)
        g = tree.function(lambda x: (tape.array(OUTSIDE[:2]) + tape.array(x)).data)
        for k in range(4):
            with tree.step():
                assert f(np.full(2, float(k))).numpy().tolist() == [1.0 + k, 2.0 + k]
        with tree.step(), pytest.raises(fanin.CaptureError, match="touches memory that is neither an operand"):
            g(np.ones(2))


def test_a_ufunc_that_takes_its_result_by_name_alone_is_recorded_without_a_warning() -> None:
    with tree_here() as tree, warnings.catch_warnings():
        warnings.simplefilter("error")
        f = tree.function(np.maximum, roles=("copy", "copy"))
        x = np.arange(6.0).reshape(2, 3)
        for k in range(4):
            with tree.step():
                assert f(x - k, np.arange(3.0)).numpy().tolist() == np.maximum(x - k, np.arange(3.0)).tolist()


# ---- memory


def test_peak_memory_is_that_of_the_largest_shape_and_nothing_is_left_after_close() -> None:
    before = blocks()
    with tree_here() as tree:
        f = tree.function(lambda x: np.tanh(x) * 2)
        for _ in range(3):
            for n in range(1, 11):
                with tree.step():
                    f(np.ones(64 * n))
        assert did(f) == "replayed" and tree.stats.high_water <= 3 * 640 * 8
    del f, tree
    assert blocks() == before


def blocks() -> int:
    gc.collect()
    fanin.trim()
    return hooks.blocks()


def test_a_tree_drops_copied_operands_and_at_its_end_all_others() -> None:
    alive: list[weakref.ref[Any]] = []

    def array() -> Any:
        made = np.ones(3)
        alive.append(weakref.ref(made))
        return made

    tree = tree_here()
    f = tree.function(lambda x, w: np.sum(x * w), roles=("copy", "static"))
    w = array()
    for _ in range(4):
        with tree.step():
            f(array(), w)
    gc.collect()
    assert [r() is not None for r in alive] == [True] + [False] * 4
    del w
    tree.close()
    del f, tree
    gc.collect()
    assert [r() for r in alive] == [None] * 5


def test_a_steady_call_with_ndarrays_allocates_only_for_its_arguments() -> None:
    counts = {}
    with tree_here() as tree:
        for n in (1, 8):
            f = tree.function(lambda *xs: xs[0], roles="static")
            operands = [np.ones(4) for _ in range(n)]
            for _ in range(6):
                with tree.step():
                    before = hooks.memory()[1]
                    f(*operands)
                    counts[n] = hooks.memory()[1] - before
            assert did(f) == "replayed"
    assert counts == {1: 1, 8: 8}


def scene() -> list[Any]:
    values = []

    def layer(x: Any, w: Any, g: Any) -> Any:
        y = np.tanh(x + w)
        y[0] = 2.0
        g += np.sum(y * y, axis=0)
        buf = fanin.InputBuffer(1)
        for k, part in enumerate((y, w, y * 2)):
            buf.add(0, part, key=k)
        return buf.take()[0], np.where(y > w, y, w)

    with tree_here() as tree:
        f = tree.function(layer, roles=("copy", "static", "accumulate"), keep=(True, False))
        w, g = np.ones((2, 3)), np.zeros(3)
        for k in range(4):
            with tree.step():
                values += [a.numpy().tolist() for a in f(np.full((2, 3), float(k)), w, g)]
        values.append(g.tolist())
    return values


def test_each_allocation_fails_once_and_nothing_is_lost() -> None:
    want, failures = scene(), 0
    gc.collect()
    before = blocks()
    for attempt in hooks.attempts(well=40):
        with attempt:
            assert scene() == want, attempt.n
        failures += attempt.failed
    assert failures > 60 and scene() == want
    assert blocks() == before


@pytest.mark.filterwarnings("ignore:.*runs again and again:RuntimeWarning")
def test_threads_may_call_at_once() -> None:
    wrong: list[Any] = []
    with tree_here() as tree:
        f = tree.function(lambda x, w: np.where(np.sum(x, axis=0) > 0, x @ w, 0.0), roles=("copy", "static"))
        w = np.eye(3)

        def work(k: int) -> None:
            for i in range(50):
                with tree.step():
                    y = f(np.full((2, 3), float(k + i + 1)), w)
                    if y.numpy().tolist() != [[float(k + i + 1)] * 3] * 2:
                        wrong.append((k, i))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        stats = tree.stats
        assert stats.warmed + stats.recorded + stats.replayed == 200 and stats.raw == 0


# ---- random functions


def random_function(rng: random.Random) -> Callable[..., Any]:
    """Some operations one after the other, as ordinary code for every kind of array that takes NumPy's functions."""
    plan = [(rng.randrange(10), rng.random(), rng.random()) for _ in range(rng.randint(1, 8))]

    def f(x: Any, w: Any, g: Any) -> Any:
        made = [x, w]
        for what, one, two in plan:
            a, b = made[int(one * len(made))], made[int(two * len(made))]
            if what == 0:
                made.append(np.add(a, b))
            elif what == 1:
                made.append(a * 2 - b)
            elif what == 2:
                made.append(np.tanh(a))
            elif what == 3:
                made.append(fanin.add_n([a, b, a]))
            elif what == 4:
                made.append(np.sum(a, axis=0) + b)
            elif what == 5:
                made.append(np.where(a > b, a, b))
            elif what == 6:
                made.append(a[::-1] + b)
            elif what == 7:
                y = np.zeros_like(a)
                y += b
                y[1:] = a[1:]
                made.append(y)
            elif what == 8:
                y = a.T.copy().reshape(4, 3).T + b.mean(axis=0).clip(-1, 1)
                y[0].fill(0.5)
                made.append(y.round(3).astype(a.dtype))
            else:
                buf = fanin.InputBuffer(1)
                buf.add(0, a, key=1)
                buf.add(0, b, key=0)
                made.append(buf.take()[0])
        g += made[-1]
        w *= 0.5
        return made[-1] * 1, made[len(made) // 2] + 1

    return f


def check_random(seed: int) -> int:
    rng, values = random.Random(seed), np.random.default_rng(seed)
    replays = 0
    with tree_here() as tree:
        for _ in range(2):
            fn = random_function(rng)
            f = tree.function(fn, roles=("copy", "static", "accumulate"))
            w, g = values.standard_normal((3, 4)), np.zeros((3, 4))
            w_, g_ = w.copy(), g.copy()
            for _ in range(5):
                x = values.standard_normal((3, 4))
                with tree.step():
                    got = [y.numpy() for y in f(x, w, g)]
                want = fn(x, w_, g_)
                for a, b in zip([*got, w, g], [*want, w_, g_], strict=True):
                    assert a.tobytes() == b.tobytes(), (seed, did(f))
                replays += did(f) == "replayed"
    return replays


@pytest.mark.parametrize("count", sizes(20, 60))
def test_random_functions_give_the_bits_of_numpy(count: int) -> None:
    with fanin.set_options(debug=True):
        replays = sum(check_random(seed) for seed in range(count))
    print(replays, "replays")
    assert replays >= 5 * count


@pytest.mark.slow
def test_ten_thousand_random_functions_give_the_bits_of_numpy() -> None:
    with fanin.set_options(debug=True):
        assert sum(check_random(seed) for seed in range(1000, 6000)) >= 25_000


def test_a_planted_fault_is_found_by_random_functions() -> None:
    hooks.fault("KERNEL_NOT_REPLAYED")
    try:
        with pytest.raises((AssertionError, RuntimeError)):
            for seed in range(20):
                check_random(seed)
    finally:
        hooks.fault(None)


def test_a_method_that_raises_keeps_none_of_its_arguments() -> None:
    class Axis:
        pass

    kept: list[Any] = []

    def fails(x: Any) -> None:
        kept.append(x + 1)
        raise ZeroDivisionError

    with tree_here() as tree, tree.step():
        for x in (np.ones(3), np.arange(3)):
            with pytest.raises(ZeroDivisionError):
                tree.function(fails)(x)
    for dead in kept:
        for call in (np.min, np.add.reduce):
            axis = Axis()
            gone = weakref.ref(axis)
            with pytest.raises(RuntimeError, match="in a call that failed"):
                call(dead, axis=axis)
            del axis
            assert gone() is None
