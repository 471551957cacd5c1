"""If any allocation fails, each contribution is released once, not too early and not twice, and a second try gives the
sum.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from kit import hooks
from kit.standins import Offered

pytestmark = pytest.mark.core

N = 6


class CountedLoans:
    """Memory of another library, with DLPack alone: counts how often each loan of it came back."""

    def __init__(self, a: Any) -> None:
        self.a, self.shape, self.strides, self.dtype, self.ndim = a, a.shape, a.strides, a.dtype, a.ndim
        self.address, self.device_id, self.memory = a.ctypes.data, 0, a
        self.library: Any = types.SimpleNamespace(held={})
        self.loans: list[Offered] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: Any) -> Any:
        self.loans.append(Offered(self, device_type=1))  # type: ignore[arg-type]
        return self.loans[-1].capsule()


class Word:
    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Word) -> Word:
        return Word(self.text + other.text)


class Owner:
    """What an array's memory belongs to."""

    def __init__(self, a: Any) -> None:
        self.a = a
        self.__array_interface__ = a.__array_interface__


def values(k: int, dtype: Any = "f4", shape: Any = (N,)) -> Any:
    return (np.arange(np.prod(shape)) + k + 1).astype(dtype).reshape(shape)


def large(k: int) -> Any:
    return np.full(1 << 18, k + 1, "f4")  # summed in recycled memory


def sparse(k: int, form: str = "csr") -> Any:
    return sp.coo_array((values(k, shape=(3,)), ([0, 2, 1], [1, k % 3, 0])), (3, 3)).asformat(form)


#: What producers give, by how the buffer takes it.
KINDS: dict[str, Callable[[int], Any]] = {
    "plain": values,
    "memory of an owner": lambda k: np.asarray(Owner(values(k))),
    "plain, in Fortran order": lambda k: np.asfortranarray(values(k, shape=(2, 3))),
    "backwards": lambda k: values(k)[::-1],
    "with gaps": lambda k: values(k, shape=(2 * N,))[::2],
    "expanded": lambda k: np.broadcast_to(values(k, shape=(1,)), (N,)),
    "float16": lambda k: values(k, "f2"),
    "bfloat16": lambda k: values(k, ml_dtypes.bfloat16),
    "integers": lambda k: values(k, "i4"),
    "bool": lambda k: values(k, "?"),
    "complex": lambda k: values(k, "c8"),
    "several dtypes": lambda k: values(k, ("f2", "i4", "f8")[k % 3]),
    "large": large,
    "lent": lambda k: CountedLoans(values(k)),
    "lent, with gaps": lambda k: CountedLoans(values(k, shape=(2 * N,))[::2]),
    "CSR": sparse,
    "COO": lambda k: sparse(k, "coo"),
    "sparse and dense": lambda k: sparse(k) if k % 2 else values(k, shape=(3, 3)),
    "zeros": lambda k: fanin.Zero((N,), "float32") if k % 2 else values(k),
    "undefined": lambda k: None if k % 2 else values(k),
    "numbers": lambda k: np.float32(k + 1.5),
    "objects": lambda k: Word(chr(97 + k)),
}

#: What the buffer does with it.
SLOTS: dict[str, Callable[[], Any]] = {
    "parked": lambda: fanin.InputBuffer(2),
    "a running sum": lambda: fanin.InputBuffer(2, budget=0),
    "bounded": lambda: fanin.InputBuffer(2, budget=3 * 4 * N),
    "exact": lambda: fanin.InputBuffer([fanin.Slot(accumulate="exact")] * 2),
    "exact, a running sum": lambda: fanin.InputBuffer([fanin.Slot(accumulate="exact")] * 2, budget=0),
    "converted": lambda: fanin.InputBuffer([fanin.Slot(dtype="complex128")] * 2, budget=0),
    "rounded": lambda: fanin.InputBuffer([fanin.Slot(accumulate="float64")] * 2, budget=0),
    "statistics": lambda: fanin.InputBuffer(2, budget=0, stats=True),
    "combined": lambda: fanin.InputBuffer([fanin.Slot(combine=lambda a, b: a + b)] * 2),
}

#: How a producer adds: the options of its k-th of n contributions.
ADDS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "as they come": lambda k, n: {},
    "by keys, the last first": lambda k, n: {"key": n - 1 - k},
    "donated": lambda k, n: {"donate": True},
    "copied": lambda k, n: {"copy": True},
}


def take_into(buf: Any) -> Any:
    out = np.zeros_like(np.asarray(buf[0]))
    return buf.take(out=[out, None])[0] is out and out


def target(buf: Any) -> Any:
    with buf.target(0) as t:
        t += 1
    return buf.take()


#: How a slot ends.
ENDS: dict[str, Callable[[Any], Any]] = {
    "take": lambda buf: buf.take(),
    "take one, writable": lambda buf: buf.take(slot=0, writable=True),
    "take, scaled": lambda buf: buf.take(scale=2),
    "read, then taken": lambda buf: (buf[0], buf.take()),
    "into an array": take_into,
    "a target": target,
    "clear": lambda buf: buf.clear(),
    "dropped": lambda buf: None,
}


def seen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [seen(one) for one in x]
    if isinstance(x, Word):
        return x.text
    if isinstance(x, CountedLoans):
        return f"lent: {x.a.tolist()}"
    if sp.issparse(x):
        return str(x.toarray().tolist())
    if isinstance(x, np.ndarray):
        return (str(x.dtype), hash(x.tobytes()) if x.nbytes > 4096 else str(x.tolist()))
    return repr(x)


def steps(buf: Any, gradients: list[Any], add: str, end: str) -> Iterator[Callable[[], Any]]:
    for k, g in enumerate(gradients):
        how = ADDS[add](k, len(gradients))
        yield lambda g=g, how=how: buf.add(0, g, **how)  # type: ignore[misc]
    yield lambda: ENDS[end](buf)


def play(slot: str, gradients: list[Any], add: str, end: str, fail: int, count: int) -> tuple[Any, int]:
    """Runs the steps, of which allocation `fail` fails, and `count` in all (-1: all from there on, until the step has
    ended); a step that was refused is done again. What they gave, and how many were refused.
    """
    refused, gave = 0, []
    buf = SLOTS[slot]()
    hooks.fail_at(fail, count)
    try:
        for step in steps(buf, gradients, add, end):
            value = attempt(step)
            if value == "MemoryError":
                hooks.fail_at(-1, 0)
                refused += 1
                value = attempt(step)
            gave.append(value)
    finally:
        hooks.fail_at(-1, 0)
    return gave, refused


def attempt(step: Callable[[], Any]) -> Any:
    try:
        return seen(step())
    except MemoryError:
        return "MemoryError"
    except Exception as e:  # refused by name, each time
        return f"{type(e).__name__}: {e}"


def owners(g: Any) -> list[Any]:
    """A contribution, and what its memory belongs to."""
    if sp.issparse(g):
        return [g, *(getattr(g, part) for part in ("data", "indices", "indptr") if hasattr(g, part))]
    return [one for one in (g, getattr(g, "base", None)) if one is not None]


def counts(gradients: list[Any]) -> list[int]:
    return [sys.getrefcount(one) for g in gradients for one in owners(g)]


def check_loans(gradients: list[Any]) -> int:
    loans = 0
    for g in gradients:
        if isinstance(g, CountedLoans):
            assert [loan.deleted for loan in g.loans] == [1] * len(g.loans), "loans that came back not once"
            loans += len(g.loans)
            g.loans.clear()
    return loans


PROGRAMS = [*itertools.product((1, 2, 5), ADDS, ENDS)]


def cases(slot: str, every: bool) -> Iterator[tuple[str, int, str, str]]:
    """Every program for every kind of gradient, or one for each kind, another for each slot."""
    for i, kind in enumerate(KINDS):
        some = PROGRAMS if every else [PROGRAMS[(37 * i + 11 * [*SLOTS].index(slot)) % len(PROGRAMS)]]
        for n, add, end in some:
            yield kind, n, add, end


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slot", SLOTS)
def test_a_failure_in_the_middle_releases_each_contribution_once(slot: str, every: bool) -> None:
    tried = refusals = loans = 0
    for kind, n, add, end in cases(slot, every):
        expected = play(slot, [KINDS[kind](k) for k in range(n)], add, end, -1, 0)[0]
        blocks = hooks.memory()[0]
        for fail in range(400):
            met = hooks.memory()[2]
            for count in (1, -1):
                gradients = [KINDS[kind](k) for k in range(n)]
                before = counts(gradients)
                gave, refused = play(slot, gradients, add, end, fail, count)
                what = f"{kind}, {n} of them, {add}, {end}: allocation {fail} of {count}"
                loans += check_loans(gradients)
                assert gave == expected, what
                assert counts(gradients) == before, what
                refusals += refused
                tried += 1
            if hooks.memory()[2] == met:
                break
        else:
            pytest.fail("400 allocations in one case")
        del gradients
        if hooks.memory()[0] != blocks:
            gc.collect()
        assert hooks.memory()[0] == blocks, f"{kind}, {n} of them, {add}, {end}: something is left"
    print(f"{slot}: {tried} programs, {refusals} steps refused, {loans} loans back")
    assert refusals > 20 and loans > 20


def test_a_double_or_missing_release_is_found() -> None:
    g, lent = values(0), CountedLoans(values(0))
    before = counts([g])
    kept = g
    assert counts([g]) != before
    del kept
    assert counts([g]) == before
    buf = fanin.InputBuffer(1)
    buf.add(0, lent)
    with pytest.raises(AssertionError, match="not once"):
        check_loans([lent])
    buf.take()
    [loan] = lent.loans
    loan.deleted += 1
    with pytest.raises(AssertionError, match="not once"):
        check_loans([lent])
