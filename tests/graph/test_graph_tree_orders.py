"""Arrays of graph trees on the CPU: what NumPy's functions give of them, in which order they read and lay them, and
what they do not do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.graph import cpu_arrays
from kit.support import ROOT

pytestmark = pytest.mark.core

Function = Callable[[Any], Any]

#: How an array of three axes lies, as views of one that lies in C's order.
LAYOUTS: dict[str, Function] = {
    "in C's order": lambda x: x,
    "in Fortran's": lambda x: x.T,
    "in another": lambda x: x.transpose(1, 0, 2),
    "with gaps": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1, :, ::-1],
    "backwards, in another": lambda x: x[:, ::-1].transpose(2, 0, 1),
    "of one axis": lambda x: x[1, :, 2],
    "without axes": lambda x: x[1, 1, 1],
    "with axes of one": lambda x: x[:1, :, 1:2].T,
}
ORDERS = ("C", "F", "A", "K")
COPIES: dict[str, Callable[[Any], Function]] = {
    "np.ravel": lambda o: lambda x: np.ravel(x, o),
    "ravel": lambda o: lambda x: x.ravel(order=o),
    "flatten": lambda o: lambda x: x.flatten(o),
    "np.copy": lambda o: lambda x: np.copy(x, order=o),
    "copy": lambda o: lambda x: x.copy(o),
    "astype": lambda o: lambda x: x.astype(np.float32, o, "same_kind", False),
    "astype without a copy": lambda o: lambda x: x.astype(x.dtype, order=o, copy=False),
    "np.reshape": lambda o: lambda x: np.reshape(x, (-1, 1) if o != "K" else -1, order=o.replace("K", "C")),
}


def recorded(f: Function, x: Any) -> Any:
    """What it gives in a replay."""
    tree = fanin.GraphTree("cpu")
    step = tree.function(f)
    for _ in range(3):
        with tree.step():
            out = step(x).numpy()
    assert step.last.did == "replayed"
    return out


@pytest.mark.parametrize("what", COPIES)
def test_copies_in_each_order_are_those_of_numpy(what: str) -> None:
    full = np.arange(24.0).reshape(2, 3, 4)
    for (_, lie), order in itertools.product(LAYOUTS.items(), ORDERS):

        def of(x: Any, lie: Function = lie, order: str = order) -> Any:
            return COPIES[what](order)(lie(x + 0))

        want, got = of(full), recorded(of, full)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert np.array_equal(got, want), (what, lie(full).strides, order)


@pytest.mark.parametrize("order", ORDERS)
def test_copies_lie_in_memory_as_numpys_do(order: Any) -> None:
    full = np.arange(24.0).reshape(2, 3, 4)
    steps: list[Any] = []

    def of(x: Any) -> Any:
        for lie in LAYOUTS.values():
            y = lie(x + 0)
            made = [y.copy(order), np.copy(y, order), y.astype(np.float32, order)]
            steps.append([[s for s, n in zip(z.strides, z.shape, strict=True) if n > 1] for z in made])
        return x + 0

    of(full)
    want = steps.copy()
    steps.clear()
    recorded(of, full)
    assert steps[: len(want)] == want


@pytest.mark.parametrize("how", [{}, {"kind": "stable"}, {"axis": 0, "kind": "heapsort"}, {"axis": 1}], ids=str)
def test_sort_takes_the_arguments_of_numpys(how: dict[str, Any]) -> None:
    def of(x: Any) -> Any:
        y = -x
        y.sort(**how)
        return y

    x = np.array([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert np.array_equal(recorded(of, x), of(x))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "a ufunc": lambda x, w: np.tanh(x),
    "operators": lambda x, w: (x + w) * 2 - x / 3 + 1,
    "reflected operators": lambda x, w: 2 * (1 - x) + 3 / (w + 5),
    "unary operators": lambda x, w: abs(-x) + +w,
    "powers and remainders": lambda x, w: x**2 + x % 3 + x // 2,
    "common powers": lambda x, w: abs(x) ** 0.5 + x**-1 + x**2.0 + w**3 + 2.0**x,
    "a product": lambda x, w: x @ w.T,
    "a product of a vector": lambda x, w: x @ w[0],
    "broadcasting": lambda x, w: x + w[:1],
    "a comparison": lambda x, w: np.where(x > w, x, w),
    "comparisons": lambda x, w: (x <= w) | (x == w) if False else np.logical_or(x <= w, x != w),
    "a reduction": lambda x, w: np.add.reduce(x, axis=0),
    "a sum": lambda x, w: np.sum(x * w, axis=1, keepdims=True),
    "a sum of all": lambda x, w: np.sum(x * w),
    "a mean": lambda x, w: np.mean(x, axis=0) + np.max(w),
    "a softmax": lambda x, w: np.exp(x) / np.sum(np.exp(x), axis=-1, keepdims=True),
    "a cast": lambda x, w: np.add(x, w, dtype=np.float32),
    "two results": lambda x, w: np.divmod(x, w + 2)[1],
    "integers": lambda x, w: np.argmax(x, axis=1) + 1,
    "an einsum": lambda x, w: np.einsum("ij,kj->ik", x, w),
    "a concatenation": lambda x, w: np.concatenate([x, w, x * 2]),
    "a stack": lambda x, w: np.stack((x, w), axis=1),
    "views": lambda x, w: (x.reshape(-1)[::2] * 2)[1:] + x.T[0, :1],
    "a view that repeats itself": lambda x, w: np.multiply(x[0].broadcast_to(3, 4), 2),
    "written in place": lambda x, w: in_place(x, w),
    "written by parts": lambda x, w: by_parts(x, w),
    "views by functions": lambda x, w: np.reshape(x, (4, 3)) + np.transpose(w) + np.broadcast_to(x[0, :3], (4, 3)),
    "another dtype": lambda x, w: np.add(x, w).astype("f4"),
    "another dtype by a function": lambda x, w: astype(x + w, "f4"),
    "methods that reduce": lambda x, w: (
        (x * w).sum(axis=1, keepdims=True) + x.mean() - w.max(0).min() + x.std(1)[:, None]
    ),
    "a product of all": lambda x, w: x.prod(axis=0) + w.var(0) + x.cumsum(1)[0],
    "methods that choose": lambda x, w: x.clip(-1, 1).dot(w.T).round(2).take(x.argmax(axis=1) % 3, 1),
    "methods that test": lambda x, w: np.where((x > w).any(axis=0), x, w) + (w < 9).all(),
    "methods that copy": lambda x, w: x.T.copy().flatten() + w.T.reshape(-1) + x.T.ravel(),
    "methods that give views": lambda x, w: x[:, :1].squeeze(1) + w.swapaxes(0, 1)[0] + x[:, :1].squeeze(),
    "methods that write": lambda x, w: written_by_methods(x, w),
    "methods of both": lambda x, w: x.repeat(2, axis=0)[:3] + w.argsort(axis=1) + w.conj().trace(),
    "functions of methods": lambda x, w: (
        np.ravel(x.T) + np.copy(w.T).T.ravel() + np.squeeze(w[:1]).sum() + np.tile(x[0], 3)
    ),
    "a copy in place": lambda x, w: np.swapaxes(np.round(np.repeat(x, 2, 0), 1), 0, 1) + w.T[:, :1],
    "a norm": lambda x, w: x / np.linalg.norm(w, axis=1, keepdims=True),
    "an accumulation": lambda x, w: np.add.accumulate(x, axis=1),
    "an outer product": lambda x, w: np.multiply.outer(x[0], w[0]),
    "bits": lambda x, w: np.where(((x > 0) & (w > 0)) | ~(x > w) ^ True, x, w),
    "bits of integers": lambda x, w: bits(x.astype("i8"), w.astype("i8")),
    "bits in place": lambda x, w: bits_in_place(x.astype("i8"), w.astype("i8")),
    "divmod": lambda x, w: divmod(x, w + 3)[0] + divmod(2, w + 3)[1],
    "filled with a number": lambda x, w: np.full_like(x, 3) + np.full_like(w, 2.5, dtype="f4"),
    "filled with an array": lambda x, w: np.full_like(x, w[0]),
    "padded": lambda x, w: np.pad(x, 1) + np.pad(w, ((1, 1), (0, 2)), mode="edge"),
    "stacked by rows": lambda x, w: np.vstack([x, w[0]]) + np.hstack((x[:, :2], w[:, 2:])).sum(),
    "stacked by columns": lambda x, w: np.column_stack([x, w[:, 0]])[:, 1:] * np.dstack([x, w])[..., 1],
    "axes added and moved": lambda x, w: np.moveaxis(np.expand_dims(x, 0), 0, 1)[:, 0] + np.rollaxis(w.T, 1),
    "axes at least": lambda x, w: np.atleast_3d(x)[:, :, 0] + np.atleast_2d(w[0]) + np.atleast_1d(x[0, 0]),
    "triangles": lambda x, w: np.triu(x, 1) + np.tril(w) + np.diagonal(x)[0] + np.rot90(w[:3, :3])[:, :1],
    "turned over": lambda x, w: np.flipud(x) + np.fliplr(w) + np.rot90(x[:, :3]).T[:, :1],
    "order statistics": lambda x, w: np.median(x, axis=0) + np.quantile(w, 0.25, axis=0) + np.percentile(x, 90),
    "averages": lambda x, w: np.average(x, axis=0, weights=w[:, 0] ** 2 + 1) + np.ptp(w, axis=0),
    "without NaNs": lambda x, w: np.nan_to_num(np.nansum(x, axis=0) + np.nanmean(w) + np.nanmax(x) + np.nanstd(w)),
    "counts": lambda x, w: np.count_nonzero(x > w, axis=0) + np.isclose(x, w) * 1,
    "choices": lambda x, w: np.select([x > 1, w > 0], [x, w], 0.5) + np.take_along_axis(x, np.argsort(w, 1), 1),
    "places": lambda x, w: np.searchsorted(np.sort(x[0]), w) + np.interp(x, np.sort(w[0]), w[1]),
    "partly sorted": lambda x, w: np.partition(x, 2, axis=1)[:, 2] + np.argpartition(w, 1, axis=1)[:, 1],
    "products of vectors": lambda x, w: np.kron(x, w)[:3, :4] + np.vdot(x, w) + np.convolve(x[0], w[0])[:4],
    "cross products": lambda x, w: np.cross(x[:, :3], w[:, :3]) + np.correlate(x[0], w[0]),
    "a clip": lambda x, w: np.clip(x, -1, 1),
    "fanin.add_n": lambda x, w: fanin.add_n([x, w, x]),
    "fanin.add_n from the end": lambda x, w: fanin.add_n([x[::-1], w[::-1, ::-1], x[:, ::-1]]),
    "of a buffer": lambda x, w: of_a_buffer(x, w),
}


def bits(x: Any, w: Any) -> Any:
    return ((x & 3) | (1 << (w & 7)) | (x >> 1)) ^ (~w << 2)


def bits_in_place(x: Any, w: Any) -> Any:
    y = x + 0
    y &= 7
    y |= 8
    y ^= w
    y <<= 1
    y >>= 2
    return y


def in_place(x: Any, w: Any) -> Any:
    y = np.zeros_like(x)
    y += x
    y *= w
    np.subtract(y, 1, out=y)
    return y


def by_parts(x: Any, w: Any) -> Any:
    y = np.empty_like(x)
    y[:2] = w[:2]
    y[2:] = 7
    np.copyto(y[0], x[0])
    return y


def written_by_methods(x: Any, w: Any) -> Any:
    y = x.copy()
    y[0].fill(3)
    y.conj()[1] = 4
    y.conjugate()[1, 0] = 5  # what is not complex is itself
    y.sort()
    z = (w + y).astype("f4", copy=False)
    z.T.sort(0)
    return z.astype(z.dtype, copy=False)


def astype(x: Any, dtype: Any) -> Any:
    return np.astype(x, dtype) if hasattr(np, "astype") else x.astype(dtype)


def of_a_buffer(x: Any, w: Any) -> Any:
    buf = fanin.InputBuffer(1)
    for k, part in enumerate((x, w, x * 2)):
        buf.add(0, part, key=k)
    return buf.take()[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_numpys_result_in_every_state(name: str) -> None:
    fn, rng = OPERATIONS[name], np.random.default_rng(7)
    w = rng.standard_normal((3, 4))
    for dtype in (np.float64, np.float32):
        with fanin.GraphTree("cpu") as tree:
            f, w_ = tree.function(fn, roles=("copy", "static")), w.astype(dtype)
            for i in range(5):
                x = rng.standard_normal((3, 4)).astype(dtype)
                with tree.step():
                    y = f(x, w_)
                    want = np.asarray(fn(FREE(x), w_) if name.startswith("a view that") else fn(x, w_))
                    assert (y.dtype, y.shape) == (want.dtype, want.shape)
                    assert y.numpy().tobytes() == want.tobytes(), (f.last.did, i)
            assert f.last.did == "replayed"


class FREE(np.ndarray):
    """An ndarray with the view that handles have."""

    def __new__(cls, x: Any) -> Any:
        return np.asarray(x).view(cls)

    def broadcast_to(self, *shape: int) -> Any:
        return np.broadcast_to(np.asarray(self), shape)


ORDERED: dict[str, Callable[..., Any]] = {
    "of a transposed array": lambda x, w: np.sum(x.T * 2.0),
    "over an axis": lambda x, w: np.mean(np.exp(x.T), axis=0),
    "of two orders": lambda x, w: np.sum(x.T + w.reshape(50, 40)) + np.sum(w.reshape(50, 40) + x.T),
    "of a choice": lambda x, w: np.sum(np.where(x.T > 0, x.T, 0.5)),
    "of zeros and more": lambda x, w: np.sum(np.zeros_like(x.T) + x.T),
    "of repeated rows": lambda x, w: np.sum(x.T + w[0, :40]) + np.cumsum(x.T * w[0, :40])[-1],
    "backwards": lambda x, w: np.sum(x.T[::-1] * 3.0),
    "of an einsum": lambda x, w: np.sum(np.einsum("ij->ji", x) * 3.0),
}


@pytest.mark.parametrize("name", ORDERED)
def test_results_lie_as_numpys_so_that_their_sums_are_added_in_the_same_order(name: str) -> None:
    fn, rng = ORDERED[name], np.random.default_rng(11)
    for flip in (np.ascontiguousarray, np.asfortranarray):
        with fanin.GraphTree("cpu") as tree:
            f, w = tree.function(fn, roles=("copy", "static")), rng.standard_normal((40, 50))
            for _ in range(4):
                x = flip(rng.standard_normal((40, 50)))
                with tree.step():
                    assert f(x, w).numpy().tobytes() == np.asarray(fn(x, w)).tobytes(), f.last.did
            assert f.last.did == "replayed"


def test_places_that_are_an_operand_are_taken_of_an_axis_of_one() -> None:
    with fanin.GraphTree("cpu") as tree:
        f = tree.function(lambda x, at: (np.take(x, at, axis=0), np.add.reduceat(x, at, axis=0)))
        for k in range(4):
            x, at = np.full((1, 3), float(k)), np.zeros(2, int)
            with tree.step():
                taken, sums = f(x, at)
                assert taken.numpy().tolist() == x[at].tolist() == sums.numpy().tolist()
        assert f.last.did == "replayed"


REFUSED: dict[str, tuple[Function, type[Exception], str]] = {
    "a list": (
        lambda y: y.__setitem__(..., [1.0, 2.0]),
        TypeError,
        r"got a list: pass np.asarray\(x\) to the function",
    ),
    "a tuple": (
        lambda y: y.fill((1, 2)),
        TypeError,
        r"got a tuple: pass np.asarray\(x\) to the function as an operand",
    ),
    "a str": (lambda y: y.__setitem__(0, "a"), TypeError, "reads arrays on the CPU and numbers, got a str"),
    "float": (
        lambda y: float(y[0]),
        TypeError,
        r"is not made a Python number: .* or read x.numpy\(\).item\(\) outside .*\(tree.pipeline\)",
    ),
    "int": (lambda y: int(y[0]), TypeError, "is not made a Python number"),
    "an order": (lambda y: np.ravel(y, "Z"), ValueError, r"order must be one of 'C', 'F', 'A', or 'K' \(got 'Z'\)"),
    "an order of reshape": (lambda y: np.reshape(y, 2, order="K"), ValueError, "order must be one of 'C', 'F', or 'A'"),
    "a cast": (lambda y: y.astype(int, casting="safe"), TypeError, "Cannot cast array data .* to the rule 'safe'"),
    "an argument": (lambda y: np.ravel(y, foo=1), TypeError, r"ravel\(\) got an unexpected keyword argument 'foo'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_refusal_of_an_unrecorded_function_names_the_callers_call(what: str) -> None:
    call, kind, text = REFUSED[what]
    tree = fanin.GraphTree("cpu")
    step = tree.function(lambda x: call(x + 0))
    with tree.step(), pytest.raises(kind, match=text) as e:
        step(np.ones(2))
    assert "lambda" not in e.value.args[0]


def test_the_error_for_a_device_number_that_numpy_reads_names_the_read() -> None:
    with fanin.sim.Machine() as m:
        x = m.array(np.ones(()))
        for number in (float, int):
            with pytest.raises(TypeError, match=r"^converting an array on a device is work .* x\.numpy\(\)$"):
                number(x)


def test_the_stubs_name_every_method_that_is_recorded() -> None:
    text = (fanin.__file__ or "").replace("__init__.py", "_core.pyi")
    with open(text) as f:
        stubs = f.read().split("\nclass _OfNumPy:\n")[1].split("\nclass ")[0]
    assert [name for name in cpu_arrays.METHODS if f"    def {name}(" not in stubs] == []


def test_the_page_names_every_function_that_can_be_recorded() -> None:
    text = (ROOT / "docs/graph-trees.md").read_text()
    named = re.findall(r"`([\w.]+)`", text.split("\nThe functions: ")[1].split("\n")[0])
    functions = {name_of(f) for f in cpu_arrays.FUNCTIONS} | {"astype"}  # which NumPy has since 2.1
    assert named == sorted(functions) and len(named) >= 70


def name_of(f: Any) -> str:
    name = {"amax": "max", "amin": "min", "round_": "round"}.get(f.__name__, f.__name__)
    return f"linalg.{name}" if f is np.linalg.norm else name
