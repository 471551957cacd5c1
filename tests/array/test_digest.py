"""Digests of arrays depend on dtype, shape and every element at its place, and on nothing else (G2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from fanin import _core
from kit import hooks

pytestmark = [pytest.mark.core, pytest.mark.rule("G2")]

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
          "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2"]  # fmt: skip
SIZES = (0, 1, 3, 127, 128, 129, 5000, 140_000)


def digest(x: Any) -> int:
    with fanin.trace(digests=True) as t:
        fanin.InputBuffer(1).add(0, x)
    return next(line.digest for line in t.lines if line.kind == "digest")


def numbers(dtype: str, n: int) -> Any:
    values = np.random.default_rng(n).permutation(n) % 251 - 100
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def layouts(a: Any) -> Iterator[Any]:
    """The same elements in other memory."""
    yield a.copy()
    gaps = np.zeros(2 * a.size, a.dtype)
    gaps[::2] = a
    yield gaps[::2]
    yield a[::-1].copy()[::-1]
    raw = bytearray(a.nbytes + 1)
    shifted = np.frombuffer(raw, np.uint8)[1:].view(a.dtype)
    shifted[...] = a
    yield shifted


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_of_the_elements_whatever_their_memory(dtype: str) -> None:
    isas = [isa for isa in ("sse2", "avx2", "avx512") if isa_here(isa)]
    for n in SIZES:
        a = numbers(dtype, n)
        found = {digest(x) for x in layouts(a)}
        for isa in isas:
            with fanin.set_options(isa=isa):
                found.add(digest(a))
        for threads in (1, 3):
            with fanin.set_options(threads=threads):
                found.add(digest(a))
        assert len(found) == 1 and 0 not in found, n


def isa_here(isa: str) -> bool:
    try:
        with fanin.set_options(isa=isa):
            return True
    except ValueError:
        return False


def faults_of_place() -> list[str]:
    """What digests overlook of places, shapes and dtypes; planted faults must show up here."""
    wrong = []
    for dtype, n in itertools.product(DTYPES, (2, 64, 300, 70_000)):
        a = numbers(dtype, n)
        for i, j in ((0, 1), (0, n - 1), (n // 2, n - 1), (n // 3, min(n - 1, n // 3 + 32))):
            b = a.copy()
            b[i], b[j] = a[j], a[i]
            if b.tobytes() != a.tobytes() and digest(a) == digest(b):
                wrong.append(f"place: {dtype}, {n}: {i} and {j} swapped")
    a = numbers("float32", 24)
    for one, two in itertools.combinations(((24,), (4, 6), (6, 4), (1, 24), (24, 1), (2, 3, 4)), 2):
        if digest(a.reshape(one)) == digest(a.reshape(two)):
            wrong.append(f"shape: {one} and {two}")
    views = ["float32", "int32", "uint32"]
    for one, two in itertools.combinations(views, 2):
        if digest(a.view(one)) == digest(a.view(two)):
            wrong.append(f"dtype: {one} and {two}")
    if digest(np.zeros(0, "float32")) == digest(np.zeros(0, "float64")):
        wrong.append("dtype: of nothing")
    return wrong


def test_a_digest_depends_on_place_shape_and_dtype() -> None:
    assert faults_of_place() == []


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("name", ["DIGEST_WITHOUT_PLACE", "DIGEST_WITHOUT_SHAPE", "DIGEST_WITHOUT_DTYPE"])
def test_a_digest_that_ignores_one_of_them_is_found(name: str) -> None:
    hooks.fault(name)
    try:
        assert any(x.startswith(name.rpartition("_")[2].lower()) for x in faults_of_place())
    finally:
        hooks.fault(None)


def test_one_bit_anywhere_changes_the_digest() -> None:
    a = np.random.default_rng(1).standard_normal(700)
    seen = {digest(a)}
    for bit in range(0, 64 * a.size, 61):
        b = a.copy()
        b.view("u8")[bit // 64] ^= np.uint64(1 << bit % 64)
        seen.add(digest(b))
    assert len(seen) == 1 + len(range(0, 64 * a.size, 61))


def test_signs_of_two_elements_do_not_cancel() -> None:
    a = np.random.default_rng(2).standard_normal(64)
    for i, j in itertools.combinations(range(64), 2):
        b = a.copy()
        b[[i, j]] *= -1
        assert digest(b) != digest(a), (i, j)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128", *DTYPES[-3:]])
def test_all_nans_are_one_and_no_number_is_a_nan(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    part = {"complex64": np.dtype("f4"), "complex128": np.dtype("f8")}.get(dtype, kind)
    bits = f"u{part.itemsize}"
    nans, others = [], []
    with np.errstate(invalid="ignore"):  # a signaling NaN
        for raw in interesting(part):
            (nans if np.isnan(raw.view(part).astype("f8")) else others).append(raw)
    of = [digest(np.array([raw] * (kind.itemsize // part.itemsize), bits).view(kind)) for raw in nans]
    assert len(nans) > 1 and len(set(of)) == 1
    rest = {digest(np.array([raw] * (kind.itemsize // part.itemsize), bits).view(kind)) for raw in others}
    assert len(rest) == len(others) and of[0] not in rest


def interesting(part: Any) -> list[Any]:
    """Bits of a dtype near its infinities, its largest and smallest numbers, with both signs."""
    word = np.dtype(f"u{part.itemsize}")
    if part.itemsize < 2:
        return list(np.arange(256, dtype=word))
    inf = int(np.array(np.inf, part).view(word))
    some = {0, 1, 2, inf - 1, inf, inf + 1, inf | 1, inf + (inf & -inf) // 2, int(np.array(1, part).view(word))}
    top = 1 << (8 * part.itemsize - 1)
    return [word.type(x) for x in sorted(some | {x | top for x in some} | {top - 1, 2 * top - 1})]


def test_zeros_of_both_signs_and_forms_differ() -> None:
    dense, zero = np.zeros(3), fanin.Zero((3,), "float64")
    assert len({digest(dense), digest(-dense), digest(zero), digest(fanin.Zero((3,), "float32"))}) == 4
    eye = np.eye(3)
    forms = [sp.coo_array(eye), sp.csr_array(eye), sp.csc_array(eye), eye]
    assert len({digest(x) for x in forms}) == 4
    assert digest(sp.coo_array(eye)) == digest(sp.coo_array(eye))
    other = sp.coo_array(eye)
    other.data[2] = 2
    assert digest(other) != digest(sp.coo_array(eye))


def test_expanded_arrays_have_the_digest_of_their_elements() -> None:
    assert digest(np.broadcast_to(np.float32(3), (3, 4))) == digest(np.full((3, 4), 3, "f4"))


@pytest.mark.rule("W1")
def test_a_weight_is_a_part_of_the_digest() -> None:
    def weighted(**how: Any) -> int:
        with fanin.trace(digests=True) as t:
            fanin.InputBuffer(1).add(0, np.ones(3), **how)
        return next(line.digest for line in t.lines if line.kind == "digest")

    assert len({weighted(), weighted(weight=2.0), weighted(weight=2.5), weighted(weight=-2.0)}) == 4
    assert weighted(weight=2.0) == weighted(weight=2.0)


@pytest.mark.rule("P1")
def test_the_place_of_a_partial_gradient_is_a_part_of_the_digest() -> None:
    def partial(at: Any, shape: Any = (6,)) -> int:
        with fanin.trace(digests=True) as t:
            fanin.InputBuffer([fanin.Slot(shape=shape)]).add(0, fanin.Partial(np.ones(2), at, shape))
        return next(line.digest for line in t.lines if line.kind == "digest")

    places = [slice(0, 2), slice(1, 3), slice(0, 4, 2), slice(3, 1, -1)]
    assert len({*(partial(at) for at in places), partial(slice(0, 2), (7,)), digest(np.ones(2))}) == 6
    assert partial(slice(0, 2)) == partial(slice(0, 2))


def test_numbers_and_undefined_contributions() -> None:
    assert digest(2.5) == digest(2.5) != digest(2.0)
    with fanin.trace(digests=True) as t:
        w = fanin.Leaf(np.zeros(2), name="w")
        fanin.backward([(fanin.Node(lambda g: None, edges=[(w, 0)]), 0, np.ones(2))])
    undefined = [line for line in t.lines if line.kind == "digest" and line.label == "None"]
    assert [line.how for line in undefined] == ["c", "s"] and not any(line.digest for line in undefined)


def test_a_trace_without_digests_has_no_line_of_them() -> None:
    with fanin.trace() as outer, fanin.trace(digests=True) as inner:
        fanin.add_n([np.ones(2)] * 2)
    assert [line.kind for line in outer.lines if line.kind == "digest"] == []
    assert [line.kind for line in inner.lines if line.kind == "digest"] == ["digest"] * 3
    assert not _core.Trace(3).lines()


def test_a_line_of_a_digest_reads_as_a_sentence() -> None:
    with fanin.trace(digests=True) as t:
        fanin.InputBuffer(1).add(0, np.ones(3), key=4)
    text = str(next(line for line in t.lines if line.kind == "digest"))
    assert text == f"digest cpu  contribution {digest(np.ones(3)):016x}  float64 (3,)  slot 0, key 4"
