"""A function of a graph tree gives NumPy's bits and dtypes, call for call: operators, methods and functions of all
dtypes, with signed zeros, infinities and NaNs among the values.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

import fanin
from kit.sample import sizes

pytestmark = pytest.mark.core
DTYPES = ("?", "i1", "i8", "u4", "f2", "f4", "f8", "c8", "c16")

OPERATORS = [f"x {op} {y}" for op in ("+", "-", "*", "/", "//", "%", "**", "<", "==", "&", "|")
             for y in ("y", "2", "1.5", "x")]  # fmt: skip
POWERS = [f"x ** {e}" for e in ("2", "2.0", "-1", "-1.0", "0.5", "0", "1", "3", "0.0", "1j", "-2")]
IN_PLACE = [f"into(x, lambda a: a.__i{op}__({y}))" for op in ("add", "mul", "pow") for y in ("2", "0.5", "y")]
FUNCTIONS = [
    *(f"np.{f}(x)" for f in ("negative", "abs", "sign", "sqrt", "square", "exp", "tanh", "conj", "isnan", "floor",
                             "reciprocal", "positive", "logical_not", "ptp", "median", "diff", "flip", "tril", "cumsum",
                             "nansum", "nanmax", "nan_to_num", "argsort", "sort", "copy", "squeeze")),
    *(f"x.{f}(axis={axis})" for f in ("sum", "mean", "max", "argmin", "prod", "std", "all", "any")
      for axis in (None, 0, 1)),
    "np.ravel(x) + x[0, 0]",
    "np.average(x)", "np.average(x, weights=w)", "np.average(x, axis=1, weights=w[0])", "np.average(w, weights=w)",
    "np.dot(x, y.T)", "x @ y.T", "np.where(x > 0, x, y)", "np.clip(x, 0, 1)", "np.outer(x, y)", "np.take(x, w - 1, 0)",
    "np.take_along_axis(x, w - 1, 0)", "np.partition(x, w[0, 0])", "np.choose(w % 2, [x, y])", "x.T + y.T",
    "np.einsum('ij,kj->ik', x, y)", "np.concatenate([x, y], 1)", "np.stack([x, y])", "np.tile(x, 2)", "x.astype('f8')",
    "np.pad(x, 1)", "np.roll(x, 1)", "np.repeat(x, 2, 0)", "np.cross(x[:, :3], y[:, :3])", "np.interp(y, w[0], w[0])",
    "np.searchsorted(w[0], x)", "np.linalg.norm(x)", "np.percentile(x, 30)", "np.kron(x, y)", "np.trace(x)",
]  # fmt: skip
EVERY = list(itertools.product([*OPERATORS, *POWERS, *IN_PLACE, *FUNCTIONS], DTYPES))


def into(x: Any, change: Any) -> Any:
    a = x.copy()
    made = change(a)
    return x if made is NotImplemented else a


def value(rng: np.random.Generator, dtype: str) -> Any:
    x = rng.integers(-3, 4, (3, 4)).astype("f8") * rng.choice([1, 0.7])
    if np.dtype(dtype).kind in "fc":
        x[0, :2] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], 2)
    made = x.astype(dtype) if np.dtype(dtype).kind != "u" else abs(x).astype(dtype)
    if made.dtype.kind == "c":
        made.imag = rng.choice([0.0, -0.0, 1.0, -2.0], (3, 4))
    return made


@pytest.mark.parametrize("size", sizes(120, len(EVERY)))
def test_a_recorded_call_gives_the_bits_and_the_dtype_of_numpy(size: int) -> None:
    rng = np.random.default_rng(5)
    picked = [EVERY[i] for i in rng.permutation(len(EVERY))[:size]]
    calls = refused = 0
    for text, dtype in picked:
        fn = eval(f"lambda x, y, w: {text}", {"np": np, "into": into})
        with np.errstate(all="ignore"), warnings.catch_warnings(), fanin.GraphTree("cpu", memory=1 << 16) as tree:
            warnings.simplefilter("ignore")
            f = tree.function(fn)
            for _ in range(4):
                x, y, w = value(rng, dtype), value(rng, dtype), rng.integers(1, 3, (3, 4))
                try:
                    want = np.asarray(fn(x.copy(), y, w))
                except Exception as e:
                    with tree.step(), pytest.raises((type(e), TypeError, ValueError)):
                        f(x, y, w)
                    refused += 1
                    continue
                with tree.step():
                    made = f(x, y, w)
                    got = made if isinstance(made, np.ndarray) else made.numpy()
                assert (got.dtype, got.shape) == (want.dtype, want.shape), (text, dtype)
                assert got.tobytes() == want.tobytes(), (text, dtype, x, got, want)
                calls += 1
            assert f.last is None or f.last.did in ("replayed", "raw"), (text, dtype, f.last)
    print(f"{calls} calls with NumPy's bits, {refused} refused by both")
    assert calls > size and refused > 0
