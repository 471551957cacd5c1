"""Random operations on random operands, right and wrong ones: beside NumPy forward and finite differences backward."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.tape import Var
from kit import sample

Rng = np.random.Generator
FLOATS = ("float16", "float32", "float64")
TOLERANCE = {"float16": 2e-2, "float32": 2e-4, "float64": 1e-5}
KINDS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}


@dataclass
class Case:
    """An operation of the tape, the same in NumPy, the values of its parameters, and the error that is due."""

    name: str
    ours: Callable[..., Var]
    theirs: Callable[..., Any]
    values: list[Any]
    error: type[Exception] | None = None


def number(rng: Rng, shape: tuple[int, ...], dtype: str) -> Any:
    """Values away from zero, where relu bends."""
    size = rng.uniform(0.1, 1.5, shape) * rng.choice([-1, 1], shape)
    return np.asarray(size).astype(dtype)


def shape_of(rng: Rng, most: int = 3) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.choice([0, 1, 2, 3], rng.integers(0, most + 1), p=[0.06, 0.24, 0.35, 0.35]))


def broadcasting(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to it, or with it; seldom one that does not."""
    other = [1 if rng.random() < 0.3 else n for n in shape]
    if rng.random() < 0.3:
        other = other[rng.integers(0, len(other) + 1) :]
    if rng.random() < 0.1:
        other = [*other, 4]
    return tuple(other)


def no_number(rng: Rng, shape: tuple[int, ...]) -> Any:
    filled = np.ones(shape)
    kinds = [None, "1.5", b"1", filled.astype(object), filled.astype("U"), np.ma.array(filled), filled.astype("M8[s]"),
             np.zeros(shape, [("a", "f8")]), {1}, object()]  # fmt: skip
    return kinds[rng.integers(len(kinds))]


def operand(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, Any, type[Exception] | None]:
    """An operand beside a value of a dtype; what NumPy is given in its place; the error that is due."""
    if rng.random() < 0.15:
        return no_number(rng, shape), None, TypeError
    own = rng.choice(["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", "complex64"])
    x = (rng.integers(-3, 4, shape) if own[0] == "i" else rng.integers(0, 4, shape)).astype(own)
    if own[0] in "fc":
        x = number(rng, shape, str(own))
    if own in ("int64", "uint64") and rng.random() < 0.3:
        x = x + np.asarray(2**40 if dtype.kind in "iu" else 2**10, x.dtype)
    error: type[Exception] | None = None
    if KINDS[x.dtype.kind] > KINDS[dtype.kind]:
        error = TypeError
    elif dtype.kind in "iu" and x.dtype.kind in "iu" and x.size:
        limits = np.iinfo(dtype)
        if int(x.min()) < limits.min or int(x.max()) > limits.max:
            error = OverflowError
    given = x
    form = rng.integers(4)
    if form == 1 and x.size and own in ("bool", "int64", "float64"):
        given = x.tolist()
        if not x.shape:  # a Python number is as NumPy takes it
            given = x[()]
    elif form == 2 and not x.shape:
        given = x[()]
    elif form == 3 and x.shape:
        given = np.asfortranarray(x)
    return given, None if error else x.astype(dtype), error


def binary(rng: Rng) -> Case:
    sign, ours, theirs = [
        ("add", lambda a, b: a + b, np.add),
        ("sub", lambda a, b: a - b, np.subtract),
        ("mul", lambda a, b: a * b, np.multiply),
    ][rng.integers(3)]
    shape = shape_of(rng)
    dtype = str(rng.choice(FLOATS))
    a, other = number(rng, shape, dtype), broadcasting(rng, shape)
    fits = True
    try:
        np.broadcast_shapes(shape, other)
    except ValueError:
        fits = False
    if rng.random() < 0.4:
        b = number(rng, other, str(rng.choice(FLOATS)))
        return Case(sign, ours, theirs, [a, b], None if fits else ValueError)
    if rng.random() < 0.2:  # a constant of integers, beside which much does not fit
        whole = rng.integers(0, 3, shape).astype(rng.choice(["int8", "uint8", "int32", "bool"]))
        x, y, error = operand(rng, other, whole.dtype)
        there = tape.array(whole)
        if whole.dtype == bool and sign == "sub" and not error:
            error = TypeError  # NumPy has no such operator
        left = rng.random() < 0.5
        one = np.ones((), "float64")
        if not fits and not error:
            error = ValueError
        return Case(
            f"{sign} of {whole.dtype}",
            (lambda w: ours(x, there) * w) if left else (lambda w: ours(there, x) * w),
            (lambda w: theirs(y, whole) * w) if left else (lambda w: theirs(whole, y) * w),
            [one],
            error,
        )
    x, y, error = operand(rng, other, a.dtype)
    if not fits and not error:
        error = ValueError
    if rng.random() < 0.5:
        return Case(sign, lambda w: ours(w, x), lambda w: theirs(w, y), [a], error)
    return Case(sign, lambda w: ours(x, w), lambda w: theirs(y, w), [a], error)


def matmul(rng: Rng) -> Case:
    n, k, m = (int(i) for i in rng.integers(0, 4, 3))
    dtype = str(rng.choice(FLOATS))
    a = number(rng, (n, k), dtype)
    right = (k, m) if rng.random() < 0.8 else shape_of(rng)
    x, y, error = operand(rng, right, a.dtype)
    bad = right[:1] != (k,) or len(right) != 2
    numeric = not isinstance(x, np.ma.MaskedArray) and np.asarray(x).dtype.kind in KINDS
    if bad and (not error or numeric):  # shapes are checked before dtypes
        error = ValueError
    return Case("matmul", lambda w: w @ x, lambda w: w @ y, [a], error)


def unary(rng: Rng) -> Case:
    shape = shape_of(rng)
    a = number(rng, shape, str(rng.choice(FLOATS)))
    axes = tuple(int(i) for i in rng.permutation(len(shape)))
    mixed = tuple(i - len(shape) if rng.random() < 0.5 else i for i in axes)
    some = mixed[: rng.integers(0, len(mixed) + 1)]
    wide = (2, *shape)
    ops: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        ("neg", lambda w: -w, lambda w: -w),
        ("tanh", tape.tanh, np.tanh),
        ("relu", tape.relu, lambda w: np.maximum(w, 0)),
        ("reshape", lambda w: w.reshape(-1), lambda w: w.reshape(-1)),
        ("transpose", lambda w: tape.transpose(w, mixed), lambda w: w.transpose(mixed)),
        ("sum", lambda w: w.sum(some), lambda w: w.sum(some)),
        ("mean", lambda w: w.mean(some), lambda w: mean(w, some)),
        ("expand", lambda w: tape.expand(w, wide) * 1, lambda w: np.broadcast_to(w, wide) * 1),
        ("two uses", lambda w: w * w + w * 2 - w, lambda w: w * w + w * 2 - w),
    ]
    name, ours, theirs = ops[rng.integers(len(ops))]
    return Case(name, ours, theirs, [a])


def mean(x: Any, axes: Any) -> Any:
    n = int(np.prod([x.shape[i] for i in axes]))
    total = x.sum(axes, np.float32 if x.dtype == np.float16 else None)
    return (total * (1 / n if n else np.nan)).astype(x.dtype)


def halves(rng: Rng) -> Case:
    rows, cut = int(rng.integers(0, 5)), int(rng.integers(1, 4))
    a = number(rng, (rows, *shape_of(rng, 1)), "float64")
    return Case(
        "split", lambda w: tape.split(w, cut)[-1] * 3, lambda w: w[len(w) - len(w) // cut :] * 3, [a],
        ValueError if rows % cut else None,
    )  # fmt: skip


def lookup(rng: Rng) -> Case:
    rows = int(rng.integers(1, 4))
    table = number(rng, (rows, *shape_of(rng, 2)), str(rng.choice(FLOATS)))
    index = rng.integers(0, rows, shape_of(rng, 2)).astype(rng.choice(["int8", "uint8", "int32", "int64", "uint64"]))
    error: type[Exception] | None = None
    given: Any = index
    wrong = rng.random()
    if wrong < 0.1:
        given, error = no_number(rng, index.shape), TypeError
    elif wrong < 0.2:
        given, error = index.astype(rng.choice(["bool", "float64"])), TypeError
    elif wrong < 0.3 and index.size:
        given, error = index.astype("int64") - rows, IndexError
    elif wrong < 0.4 and index.size:
        given, error = index + np.asarray(rows, index.dtype), IndexError
    elif wrong < 0.6 and index.size:
        given = index.tolist()
    elif wrong < 0.8:
        given = tape.array(index)
    op = tape.embedding if rng.random() < 0.5 else tape.gathered
    return Case("rows", lambda t: op(t, given), lambda t: t[index], [table], error)


def losses(rng: Rng) -> Case:
    n, classes = int(rng.integers(0, 4)), int(rng.integers(1, 4))
    z = number(rng, (n, classes), str(rng.choice(FLOATS)))
    labels = rng.integers(0, classes, n)
    given: Any = labels
    error: type[Exception] | None = None
    wrong = rng.random()
    if wrong < 0.15 and n:
        given, error = labels - classes, IndexError
    elif wrong < 0.3:
        given, error = labels.astype(rng.choice(["bool", "float32"])), TypeError
    elif wrong < 0.4:
        given, error = rng.integers(0, classes, n + 1), ValueError

    def theirs(z: Any) -> Any:
        z = z - z.max(1, keepdims=True)
        z = z - np.log(np.exp(z).sum(1, keepdims=True))
        total = -z[np.arange(n), labels].sum()
        return total / n if n else total * np.nan

    return Case("cross entropy", lambda w: tape.cross_entropy(w, given), theirs, [z], error)


MAKERS = [binary, binary, binary, matmul, unary, unary, halves, lookup, losses]


def host(g: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(g, fanin.Sparse):
        made = np.zeros(shape)
        np.add.at(made, tuple(g.parts[0]), np.asarray(g.parts[1], "f8"))
        return made
    return np.asarray(g, "f8")


def check(case: Case, rng: Rng) -> str:
    """ "right" or "refused"; AssertionError for anything else."""
    parameters = [tape.parameter(v) for v in case.values]
    if case.error:
        with pytest.raises(case.error):
            case.ours(*parameters)
        return "refused"
    y, wanted = case.ours(*parameters), np.asarray(case.theirs(*case.values))
    assert y.dtype == wanted.dtype
    assert y.shape == wanted.shape
    if case.name == "matmul":  # BLAS adds in an order that depends on the layout
        assert np.allclose(y.numpy(), wanted, TOLERANCE[str(y.dtype)])
    else:
        assert np.array_equal(y.numpy(), wanted, equal_nan=True)
    seed = np.asarray(rng.normal(size=y.shape))
    if y.dtype.kind != "f":
        return "right"
    tape.backward(y, [seed])
    recorded = tape.grad(y, parameters, [seed], create_graph=True)
    wide = [v.astype("f8") for v in case.values]
    coarsest = max(TOLERANCE[str(v.dtype)] for v in case.values)
    for i, (value, p) in enumerate(zip(case.values, parameters, strict=True)):
        assert p.grad.shape == value.shape
        assert np.allclose(host(p.grad, value.shape), host(recorded[i].numpy(), value.shape), coarsest, coarsest)
        step = rng.normal(size=value.shape) * 1e-6
        sides = [case.theirs(*wide[:i], wide[i] + s * step, *wide[i + 1 :]) for s in (1, -1)]
        slope = ((sides[0] - sides[1]) * seed).sum() / 2e-6
        got = (host(p.grad, value.shape) * step).sum() / 1e-6
        if np.isnan(slope):
            continue  # of nothing
        assert got == pytest.approx(slope, rel=coarsest, abs=coarsest * 10)
    return "right"


@pytest.mark.parametrize("count", sample.sizes(400, 40_000))
def test_random_operations_are_right_or_refused(count: int) -> None:
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for seed in range(count):
        rng = np.random.default_rng([17, seed])
        case = MAKERS[rng.integers(len(MAKERS))](rng)
        try:
            found[check(case, rng), case.name.partition(" of ")[0]] += 1
        except BaseException as e:
            e.add_note(f"seed {seed}: {case}")
            raise
    names = {name for _, name in found}
    right = sum(n for (what, _), n in found.items() if what == "right")
    refused = count - right
    print(f"{right} right, {refused} refused: {dict(found)}")
    assert right > count / 3
    assert refused > count / 8
    assert all(found["right", name] for name in names)
    assert all(found["refused", name] for name in ("add", "sub", "mul", "matmul", "split", "rows", "cross entropy"))
