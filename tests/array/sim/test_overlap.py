"""Which arrays share memory: `overlap`, `overlaps`, `overlaps_itself`, compared with NumPy's exact answer and with the
addresses themselves.
"""

from __future__ import annotations

import array
import itertools
import math
import mmap
import pickle
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import fanin
from kit.hostile import IS_COPIED, Producer, never, once
from kit.sample import sizes

pytestmark = pytest.mark.core
Array = np.ndarray[Any, Any]
SEED = 20261121


def address(x: Array, index: tuple[int, ...]) -> int:
    """Where an element lies."""
    start: int = x.__array_interface__["data"][0]
    return start + sum(i * s for i, s in zip(index, x.strides, strict=True))


def is_proof(x: Array, y: Array, witness: Any) -> bool:
    """Whether two elements, one of each, share a byte."""
    i, j = witness
    inside = all(0 <= k < n for k, n in zip(i + j, x.shape + y.shape, strict=True))
    way = address(x, i) - address(y, j)
    return inside and -x.itemsize < way < y.itemsize


def judged(x: Array, y: Array) -> bool:
    """Compares fanin's answer with NumPy's, and its proof with the addresses."""
    v = fanin.overlap(x, y)
    assert bool(v) == np.shares_memory(x, y), (x.shape, x.strides, y.shape, y.strides)
    assert v.kind == ("overlap" if v else "disjoint") and v.reason is None
    assert is_proof(x, y, v.witness) if v else v.witness is None
    return bool(v)


# ---------------------------------------------------------------- the verdict


SLICES = st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.none() | st.integers(1, 4) | st.integers(-4, -1))
DTYPES = ("u1", "<i2", ">f4", "c16", "V3", "S5", [("a", "u1"), ("b", "<f8")])


def view(x: Array, index: list[slice], order: list[int], kind: str) -> Array:
    """One of the views that people make."""
    x = x.transpose([i for i in order if i < x.ndim])[tuple(index[: x.ndim])]
    if kind == "bytes" and x.ndim and x.strides[-1] == x.itemsize:
        return x.view("u1")
    if kind == "real" and x.dtype.kind == "c":
        return x.imag
    if kind == "wide":
        return np.broadcast_to(x, (2, *x.shape))
    return x.ravel()[:3] if kind == "element" else x


VIEWS = st.tuples(
    st.lists(SLICES, min_size=3, max_size=3),
    st.permutations(range(3)),
    st.sampled_from(["", "", "bytes", "real", "wide"]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from(DTYPES), VIEWS, VIEWS)
def test_two_views_of_one_array_have_numpys_exact_answer(shape: list[int], dtype: Any, one: Any, two: Any) -> None:
    x = np.zeros(shape, dtype)
    judged(view(x, *one), view(x, *two))


@pytest.mark.parametrize("count", sizes(1_500, 6_000))
def test_random_strides_have_numpys_answer_and_both_answers_are_common(count: int) -> None:
    rng = np.random.default_rng(SEED)
    memory = np.zeros(4096, "u1")
    seen: Counter[bool] = Counter()
    for _ in range(count):
        both = []
        for item in rng.choice([1, 2, 3, 8, 16], 2):
            axes = rng.integers(0, 5)
            shape, strides = rng.integers(1, 5, axes), rng.integers(-60, 61, axes)
            start = np.frombuffer(memory, f"V{item}", 1, int(rng.integers(2000, 2060)))
            both.append(as_strided(start, shape, strides))
        seen[judged(both[0], both[1])] += 1
    assert min(seen.values()) > count / 4, f"seed {SEED}: {seen}"


def elements(x: Array) -> list[int]:
    return sorted(address(x, i) for i in itertools.product(*map(range, x.shape)))


@pytest.mark.parametrize("count", sizes(1_500, 6_000))
def test_an_array_overlaps_itself_where_two_elements_share_a_byte(count: int) -> None:
    rng = np.random.default_rng(SEED)
    memory = np.zeros(4096, "u1")
    seen: Counter[bool] = Counter()
    for _ in range(count):
        item, axes = int(rng.choice([1, 2, 4, 8])), rng.integers(0, 5)
        x = as_strided(
            np.frombuffer(memory, f"V{item}", 1, 2000), rng.integers(1, 5, axes), rng.integers(-50, 51, axes)
        )
        v = fanin.sharing.overlaps_itself(x)
        at = elements(x)
        assert bool(v) == any(b - a < item for a, b in itertools.pairwise(at)), (x.shape, x.strides, item)
        if v:
            assert v.witness[0] != v.witness[1] and is_proof(x, x, v.witness)
        seen[bool(v)] += 1
    assert min(seen.values()) > count / 6, f"seed {SEED}: {seen}"


M = np.zeros((6, 9))
F = np.zeros(12, "f4")

#: what it is -> (one, other, do they overlap)
CASES: dict[str, tuple[Any, Any, bool]] = {
    "row windows of the same columns": (M[0:4, 0:4], M[2:6, 0:4], True),
    "row windows of neighbouring columns": (M[0:4, 0:4], M[2:6, 4:8], False),
    "columns": (M[:, 0], M[:, 1], False),
    "a column and a row": (M[:, 0], M[3], True),
    "step slices": (M.ravel()[::2], M.ravel()[1::2], False),
    "steps that meet": (M.ravel()[::2], M.ravel()[1::3], True),
    "two dtypes on one memory": (F[0:8], F.view("i1")[8:40], True),
    "two dtypes beside each other": (F[0:8], F.view("i1")[32:], False),
    "real and imaginary parts": (np.zeros(3, "c8").real, np.zeros(3, "c8").imag, False),
    "a stride of 0": (np.broadcast_to(M[2, 3:4], (5, 5)), M[:, 3], True),
    "a stride of 0 beside it": (np.broadcast_to(M[2, 3:4], (5, 5)), M[:, 4], False),
    "transposed": (M.T[2:4], M[:, 3:], True),
    "backwards": (M[::-1, 0], M[5:, 0], True),
    "no axes": (M[2, 3, ...], M[2], True),
    "empty": (M[2:2], M, False),
    "empty, strangely strided": (as_strided(M, (0, 3), (2**60, 1)), M, False),
    "an axis of extent 1 with a strange stride": (as_strided(M, (1, 9), (2**62, 8)), M[0], True),
    "no bytes in an element": (np.zeros(4, "V0"), np.zeros(4, "V0"), False),
    "the same array": (M, M, True),
    "arrays of their own": (M, np.zeros((6, 9)), False),
    "fields of a record": (np.zeros(3, [("a", "i4"), ("b", "i4")])["a"], M, False),
}


@pytest.mark.parametrize("name", CASES)
def test_common_slices_are_judged_exactly(name: str) -> None:
    x, y, overlap = CASES[name]
    assert judged(x, y) == judged(y, x) == overlap


def test_fields_of_one_record_array_are_disjoint_and_share_with_the_whole() -> None:
    r = np.zeros((3, 4), [("a", "i4"), ("b", "i8"), ("c", "u1", (3,))])
    assert not judged(r["a"], r["b"]) and not judged(r["b"], r["c"]) and judged(r["c"], r) and judged(r["a"], r[1])


def test_halves_of_complex_numbers_are_disjoint() -> None:
    z = np.zeros((4, 5), "c16")
    assert not judged(z.real, z.imag) and judged(z.real, z) and not judged(z[:2].real, z[2:])


def test_pairs_of_many_views_are_found_in_every_combination() -> None:
    """Blocks of one matrix, every second of them: NumPy's exact answer for each pair."""
    m = np.zeros((6, 7), "i2")
    views = [m[r : r + 3 : s, c : c + 3 : t] for r in range(4) for c in range(5) for s in (1, 2) for t in (1, 2)]
    seen = Counter(judged(x, y) for x, y in itertools.combinations(views[::2], 2))
    assert min(seen.values()) > 150, seen


def bad_pair(offset: int) -> tuple[Array, Array]:
    """Two arrays that need an exponential search (the memory is only reserved)."""
    memory = np.empty(300_000_000, "i1")
    return as_strided(memory, (1049,) * 3, (36674, 61119, 85569)), as_strided(
        memory[offset:], (1049,) * 2, (12223, 12224)
    )


def test_a_pair_that_defeats_a_search_is_decided_within_the_budget_and_unknown_below_it() -> None:
    x, y = bad_pair(64023025)
    assert fanin.overlap(x, y) == fanin.overlap(x, y, budget=math.inf)
    assert fanin.overlap(x, y).kind == "disjoint"
    v = fanin.overlap(x, y, budget=2**20)
    assert v.kind == "unknown" and v and v.witness is None and "budget" in v.reason
    assert "unknown: too hard" in repr(v)
    found = fanin.sharing.overlaps([x, np.zeros(3), y], budget=0)
    assert found.pairs == found.unknown == ((0, 2),) and found.components == ((0, 2),)
    found = fanin.sharing.overlaps([x, np.zeros(3), y])
    assert found.pairs == found.unknown == found.components == ()


def test_threads_run_while_a_hard_pair_is_decided() -> None:
    x, y = bad_pair(64023025)
    with_it, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            with_it[0] += 1

    other = threading.Thread(target=count)
    other.start()
    before = with_it[0]
    fanin.overlap(x, y)
    after = with_it[0]
    stop.set()
    other.join()
    assert after > before


@pytest.mark.parametrize("stride", [2**61, -(2**40), -(2**63)])
def test_an_extent_too_large_to_count_is_unknown(stride: int) -> None:
    x = as_strided(np.zeros(1, "u1"), (300,), (stride,))
    v = fanin.overlap(x, M)
    assert v.kind == "unknown" and v and "farther" in v.reason
    assert fanin.sharing.overlaps_itself(x).kind == "unknown"
    assert not fanin.overlap(x, np.zeros(0))
    assert fanin.sharing.overlaps([x, M, F]).components == ((0, 1, 2),)


# ---------------------------------------------------------------- verdicts as values


def test_verdicts_are_values() -> None:
    v, w, d = fanin.overlap(M, M), fanin.overlap(M, M), fanin.overlap(M, F)
    assert v == w and hash(v) == hash(w) and v != d and v != 1 and d is fanin.overlap(F, M)
    assert (
        repr(v) == "<fanin.sharing.Verdict: overlap, at (0, 0) and (0, 0)>"
        and repr(d) == "<fanin.sharing.Verdict: disjoint>"
    )
    with pytest.raises(AttributeError):
        v.kind = "disjoint"  # type: ignore[misc]
    with pytest.raises(TypeError):
        type(v)()
    assert pickle.loads(pickle.dumps(v)) == v
    with pytest.raises(TypeError):
        fanin.sharing.Overlaps()


# ---------------------------------------------------------------- lists


def joined(pairs: Any, n: int) -> list[tuple[int, ...]]:
    """The components of a graph, of two or more, by following its edges."""
    near: dict[int, set[int]] = {i: {i} for i in range(n)}
    for i, j in pairs:
        both = near[i] | near[j]
        for k in both:
            near[k] = both
    return sorted({tuple(sorted(c)) for c in near.values() if len(c) > 1})


def agree(views: list[Array]) -> fanin.sharing.Overlaps:
    """Compares a list's answers with those of its pairs."""
    found = fanin.sharing.overlaps(views)
    pairs = [(i, j) for i, j in itertools.combinations(range(len(views)), 2) if np.shares_memory(views[i], views[j])]
    assert list(found.pairs) == pairs
    assert list(found.components) == joined(pairs, len(views))
    assert list(found.indices) == sorted({i for p in pairs for i in p})
    assert found.unknown == () and len(found) == len(views)
    return found


def parent_views(rng: Any, n: int) -> list[Array]:
    """n views of a few kinds of two parents."""
    m, v = np.zeros((12, 16), "f4"), np.zeros((4, 3, 5), "i2")
    out = []
    for kind in rng.integers(0, 7, n):
        i, j, k = rng.integers(0, 12), rng.integers(0, 16), rng.integers(1, 5)
        out.append(
            [
                m[i],
                m[:, j],
                m[i : i + k, j : j + k],
                m.ravel()[i * 16 + j :: k],
                v[:, i % 3],
                v[..., j % 5].T,
                m[::-k, j % 4 :: 4],
            ][kind]
        )
    return out


def test_a_list_has_the_answers_of_its_pairs() -> None:
    rng = np.random.default_rng(SEED)
    sizes: Counter[bool] = Counter()
    for n in [0, 1, 2, *rng.integers(3, 50, 80)]:
        found = agree(parent_views(rng, n))
        sizes[len(found.components) > 1] += 1
    assert min(sizes.values()) > 10, f"seed {SEED}: {sizes}"


def steps(n: int) -> list[Array]:
    x = np.zeros(7 * n)
    return [x[i::n] for i in range(n)]


def matrices(n: int) -> list[Array]:
    """Columns of ten matrices that lie in one flat buffer."""
    flat = np.zeros(30 * n)
    return [c for k in range(10) for c in flat[3 * k * n : 3 * (k + 1) * n].reshape(3, n).T]


def heads(n: int) -> list[Array]:
    q = np.zeros((2, 3, 3, n, 4))
    return [q[:, :, k, h] for k in range(3) for h in range(n)]


#: what people cut one array into -> n pieces, disjoint
CUTS: dict[str, Callable[[int], list[Array]]] = {
    "pieces": lambda n: list(np.zeros((n, 8))),
    "columns": lambda n: list(np.zeros((5, n)).T),
    "blocks": lambda n: [b for rows in np.split(np.zeros((4 * n, 12)), n) for b in np.split(rows, 3, axis=1)],
    "step slices": steps,
    "heads of a packed projection": heads,
    "columns of matrices in a flat buffer": matrices,
    "halves of complex columns": lambda n: [p for c in np.zeros((4, n), "c8").T for p in (c.real, c.imag)],
    "three-dimensional blocks": lambda n: [
        b for x in np.split(np.zeros((2 * n, 4, 6)), n) for y in np.split(x, 2, 1) for b in np.split(y, 3, 2)
    ],
}


@pytest.mark.parametrize("name", CUTS)
def test_pieces_of_one_array_are_disjoint_unless_another_array_spans_them(name: str) -> None:
    views = CUTS[name](30)
    found = agree(views)
    assert found.pairs == found.components == found.indices == ()
    parent = views[0].base
    spanned = agree([*views, parent])
    assert spanned.components == (tuple(range(len(views) + 1)),)
    assert agree([views[0], *views]).components == ((0, 1),)


def beside_rows(n: int, rows: Callable[[int], Any]) -> list[Array]:
    """Every second column of a matrix, and as many pieces of four of its rows that lie in the other columns."""
    m = np.zeros((8, n), "f4")
    return [m[:, i] for i in range(0, n, 2)] + [m[i % 4, 1::2][rows(i)] for i in range(n // 2)]


#: how the halves of the rows are cut -> which elements, by number
HALVES: dict[str, Callable[[int, Any], Callable[[int], Any]]] = {
    "whole": lambda n, rng: lambda i: slice(None),
    "random": lambda n, rng: lambda i: slice(int(rng.integers(n // 4)), n // 2 - int(rng.integers(n // 4))),
    "ascending": lambda n, rng: lambda i: slice(0, 1 + i),
    "descending": lambda n, rng: lambda i: slice(i, None),
    "every k-th": lambda n, rng: lambda i: slice(0, None, int(rng.integers(1, 4))),
}


@pytest.mark.parametrize("name", HALVES)
def test_columns_beside_pieces_of_rows_have_the_answers_of_their_pairs(name: str) -> None:
    rng = np.random.default_rng(SEED)
    for n in (8, 40, 160):
        views = beside_rows(n, HALVES[name](n, rng))
        for order in (np.arange(len(views)), rng.permutation(len(views))):
            assert agree([views[i] for i in order]).exact


@pytest.mark.parametrize("name", HALVES)
def test_columns_beside_pieces_of_rows_need_no_search_for_each_pair(name: str) -> None:
    """Of 20 000 arrays: `exact` shows that the searches for components, a twentieth of the pairs, did not run out."""
    views = beside_rows(20_000, HALVES[name](20_000, np.random.default_rng(SEED)))
    found = fanin.sharing.overlaps(views)
    assert found.exact and len(found.components) >= 4
    assert {i % 4 for c in found.components for i in c[:1]} == {0, 1, 2, 3}


def test_components_are_inexact_if_their_searches_run_out() -> None:
    """Two combs of unlike steps: no order of them shows that the even and the odd ones share nothing."""
    flat = np.zeros(400_000, "i1")
    views = [flat[i % 2 :: 2 * (50 + i)] for i in range(6000)]
    few, all_of_them = fanin.sharing.overlaps(views), fanin.sharing.overlaps(views, budget=math.inf)
    assert (few.exact, all_of_them.exact) == (False, True)
    assert "at most" in repr(few) and "at most" not in repr(all_of_them)
    assert [len(c) for c in all_of_them.components] == [3000, 3000]
    assert set(all_of_them.indices) <= set(few.indices)


@pytest.mark.parametrize("name", CUTS)
def test_thousands_of_pieces_are_one_call(name: str) -> None:
    """All pairs would be a hundred million and more."""
    views = CUTS[name](5000)
    assert fanin.sharing.overlaps(views).indices == ()
    assert fanin.sharing.overlaps(views).pairs == ()
    assert len(fanin.sharing.overlaps([*views, views[0].base]).pairs) == len(views)
    assert fanin.sharing.overlaps([views[0].base, *views]).components == (tuple(range(len(views) + 1)),)


def test_components_do_not_need_the_pairs() -> None:
    """20 000 windows that all meet, 20 000 times the same array."""
    windows = list(sliding_window_view(np.zeros(40_000), 20_001))
    assert fanin.sharing.overlaps(windows).components == (tuple(range(20_000)),)
    assert fanin.sharing.overlaps([M] * 20_000).components == (tuple(range(20_000)),)


def test_a_list_has_an_answer_for_each_pair_and_no_reference_to_an_array() -> None:
    class Kept(np.ndarray[Any, Any]):
        pass

    x = np.zeros((3, 4)).view(Kept)
    gone = weakref.ref(x)
    found = fanin.sharing.overlaps([x, x[1]])
    del x
    assert gone() is None
    assert found.pairs == ((0, 1),)
    assert found.verdict(0, 1).witness == ((1, 0), (0,))
    assert repr(found) == "<fanin.sharing.Overlaps of 2 arrays: 2 share memory, in 1 component>"
    for bad in ((0, 2), (2, 0), (-1, 0)):
        with pytest.raises(IndexError, match="verdict"):
            found.verdict(*bad)
    with pytest.raises(TypeError):
        found.verdict(0, True)


# ---------------------------------------------------------------- what is an array


def test_every_object_with_host_memory_is_an_array() -> None:
    raw = bytearray(64)
    floats = array.array("d", [0.0] * 8)
    page = mmap.mmap(-1, 4096)
    x = np.frombuffer(raw, "u1")
    for memory, y in ((raw, x), (floats, np.frombuffer(floats)), (page, np.frombuffer(page, "u1"))):
        assert fanin.overlap(memory, y[3:5]).witness == ((3,), (0,))
        assert not fanin.overlap(memory, M)
        assert not fanin.overlap(memoryview(memory)[2:6:2], y[3:4]) and fanin.overlap(memoryview(memory)[2:6:2], y[4:5])
    scalar = np.float64(3)
    assert fanin.overlap(scalar, scalar) and not fanin.overlap(scalar, np.float64(3))
    objects = np.array([[], {}, None], dtype=object)
    assert fanin.overlap(objects, objects[1:]).witness == ((1,), (0,)) and not fanin.overlap(objects[:1], objects[1:])


def test_subclasses_are_accepted_as_arrays() -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    for x in (np.zeros((3, 4)).view(Mine), np.zeros(4).view(np.recarray), np.zeros(4, "V3").view(np.recarray)):
        assert fanin.overlap(x, x[1:]) and not fanin.overlap(x[:1], x[1:])


def test_arrays_of_a_simulated_device_are_compared_by_their_addresses() -> None:
    with fanin.sim.Machine(devices=2) as m:
        x, y = m.array(np.zeros((3, 4))), m.array(np.zeros((3, 4)))
        assert fanin.overlap(x, x) and not fanin.overlap(x, y)
        there = m.array(np.zeros(3), device=1)
        with pytest.raises(
            ValueError, match=r"^overlaps: array 2 is on sim:1, array 0 on sim:0: expected arrays of one device"
        ):
            fanin.sharing.overlaps([x, y, there])
        with pytest.raises(ValueError, match=r"^overlap: array 1 is on the host, array 0 on sim:0"):
            fanin.overlap(x, np.zeros(3))


class Dlpack:
    """Gives its memory by DLPack alone, and counts the capsules."""

    def __init__(self, x: Array, device: tuple[int, int] = (1, 0)) -> None:
        self.x, self.device, self.given = x, device, 0

    def __dlpack__(self, **how: Any) -> Any:
        self.given += 1
        if np.lib.NumpyVersion(np.__version__) < "2.1.0":
            how.pop("max_version", None)
        return self.x.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_a_dlpack_capsule_is_consumed_and_deleted() -> None:
    class Kept(np.ndarray[Any, Any]):
        pass

    x = np.zeros((4, 5)).view(Kept)
    d = Dlpack(x)
    assert fanin.overlap(d, x[2:]).witness == ((2, 0), (0, 0))
    assert not fanin.overlap(Dlpack(x[:, 1:2]), x[:, 2:])
    assert fanin.sharing.overlaps([d, x, d]).components == ((0, 1, 2),)
    assert d.given == 3
    gone = weakref.ref(x)
    del x, d
    assert gone() is None, "a capsule was not given back"


#: objects that are no single array in memory -> the text of the error
NO_ARRAYS: dict[str, tuple[Any, str]] = {
    "None": (None, "a NoneType is no array in memory; expected an ndarray"),
    "a number": (3.0, "a float is no array in memory"),
    "a list": ([1.0, 2.0], "a list is no array in memory"),
    "text": ("abc", "a str is no array in memory"),
    "SciPy's sparse": (
        sp.csr_array(np.eye(3)),
        "a scipy.csr_array is sparse and has several memories; expected one array: give its parts",
    ),
    "our sparse": (fanin.Sparse("coo", (np.array([[0]]), np.array([1.0])), (2,)), "a fanin.Sparse is sparse"),
    "masked": (np.ma.ones(3), "a MaskedArray has two memories; expected one array: give its .data or its .mask"),
    "a zero": (fanin.Zero((3,), "float32"), "a fanin.Zero is no array"),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_an_object_that_is_no_single_array_is_refused_by_its_place(name: str) -> None:
    bad, words = NO_ARRAYS[name]
    with pytest.raises(TypeError, match=r"^overlap: array 1: ") as e:
        fanin.overlap(M, bad)
    assert words in str(e.value)
    with pytest.raises(TypeError, match=r"^overlaps: array 2: ") as e:
        fanin.sharing.overlaps([M, F, bad])
    assert words in str(e.value)
    with pytest.raises(TypeError, match=r"^overlaps_itself: ") as e:
        fanin.sharing.overlaps_itself(bad)
    assert words in str(e.value)


@pytest.mark.parametrize("bad", [3, M, "ab", b"ab", None], ids=repr)
def test_an_object_that_is_no_sequence_of_arrays_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^overlaps: expected a sequence of arrays, got "):
        fanin.sharing.overlaps(bad)


def test_the_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"overlap\(\) missing 1 required positional argument"):
        fanin.overlap(M)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'exact'"):
        fanin.overlap(M, M, exact=True)  # type: ignore[call-arg]
    for bad, kind in ((-1, ValueError), (0.5, ValueError), ("1", TypeError), (True, TypeError)):
        for call in (lambda b: fanin.overlap(M, M, budget=b), lambda b: fanin.sharing.overlaps([], budget=b)):
            with pytest.raises(kind, match="budget"):
                call(bad)
    assert fanin.sharing.overlaps(iter([M, M])).pairs == ((0, 1),)


class Liar:
    """A producer whose capsules are not what they should be."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule


def test_an_invalid_or_consumed_capsule_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a capsule"):
        fanin.overlap(M, Liar(3))
    used = M.__dlpack__()
    np.from_dlpack(Liar(used))
    with pytest.raises(BufferError, match="consumed already"):
        fanin.overlap(M, Liar(used))


#: a producer whose capsule is consumed and refused -> the exception, and its text
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a copy": ({"flags": IS_COPIED}, TypeError, "this Producer exports a copy"),
    "another version": ({"version": (2, 0)}, BufferError, "DLPack version 2.0"),
    "too many axes": ({"ndim": 65, "shape": [1] * 65, "strides": None}, ValueError, "65 axes"),
    "axes without a shape": ({"ndim": 2, "shape": None}, ValueError, "no shape"),
    "a negative extent": ({"shape": [-3]}, ValueError, "must not be negative"),
    "bits that are no bytes": ({"dtype": (0, 4, 1)}, TypeError, "no memory whose bytes can be compared"),
    "no address": ({"data": None}, TypeError, "no memory whose bytes can be compared"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_capsule_is_deleted_once(name: str) -> None:
    how, kind, words = REFUSED[name]
    p = Producer(**how)
    with once(p), pytest.raises(kind, match=f"^overlap: array 1: .*{words}"):
        fanin.overlap(M, p)


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_is_deleted_once(versioned: bool) -> None:
    x = np.zeros((4, 6))
    p = Producer(x[1:3], versioned=versioned)
    with once(p):
        assert fanin.overlap(x[:, 2], p).witness == ((1,), (0, 2))
    q = Producer(x, name="other", versioned=versioned)
    with never(q), pytest.raises(BufferError, match="neither"):
        fanin.overlap(M, q)
    far = Producer(x[:, 0], strides=[2**62], versioned=versioned)
    with once(far):
        assert fanin.overlap(x, far).kind == "unknown"
    plain = Producer(x, strides=None, versioned=versioned)
    with once(plain):
        assert fanin.overlap(x[3], plain).witness == ((0,), (3, 0))
    later = Producer(x, offset=48, shape=[2, 6], versioned=versioned)
    with once(later):
        assert not fanin.overlap(later, x[0])


def test_tensors_on_another_device_are_compared_with_each_other_alone() -> None:
    """Their memory cannot be read here, and need not be."""

    def there(data: int, device: int = 0) -> Producer:
        return Producer(np.zeros((4, 2), "f4"), data=data, device=(2, device), said=(2, device))

    one, two, three = there(0x7000_0000_0000), there(0x7000_0000_0010), there(0x7000_0000_0020)
    with once(one, two):
        assert fanin.overlap(one, two).witness == ((2, 0), (0, 0))
    with once(three):
        assert fanin.sharing.overlaps([there(0x7000_0000_0000), three]).pairs == ()
    with pytest.raises(
        ValueError,
        match=(
            r"overlap: array 1 is on DLPack's device \(2, 1\), array 0 on DLPack's device \(2, 0\): expected arrays"
            r" of one"
        ),
    ):
        fanin.overlap(there(0x7000_0000_0000), there(0x7000_0000_0000, 1))
    with pytest.raises(ValueError, match="array 1 is on the host"):
        fanin.overlap(there(0x7000_0000_0000), M)


@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")
def test_an_array_that_changes_while_others_are_read_causes_no_crash() -> None:
    """A producer's __dlpack__ is Python's code and may do anything to the list and to the arrays in it."""
    x = np.zeros((4, 6))
    given: list[Any] = [x, None]

    class Meddler(Dlpack):
        def __dlpack__(self, **how: Any) -> Any:
            given.clear()
            x.shape = (2, 2, 2, 3)
            return super().__dlpack__(**how)

    given[1] = Meddler(x)
    found = fanin.sharing.overlaps(given)
    assert found.pairs == ((0, 1),) and len(found.verdict(0, 1).witness[0]) == 2


class Placed:
    """An array of nothing at a place: where it lies is all there is."""

    def __init__(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "data": (start, False),
        }


def test_work_is_bounded_as_memory_is() -> None:
    """20 axes of extent 5: the tables of long steps would fit the budget of memory and take a minute."""

    def far_apart(seed: int, step: int) -> Any:
        draw = random.Random(seed)
        strides = tuple(step + draw.randrange(-1000, 1000) for _ in range(20))
        return np.asarray(Placed((1 << 40) + draw.randrange(1 << 20), (5,) * 20, strides))

    hard = [far_apart(seed, 1 << 24) for seed in range(16)]
    verdict = fanin.overlap(hard[0], hard[1])
    assert verdict.kind == "unknown" and "memory and time" in str(verdict.reason)
    found = fanin.sharing.overlaps(hard)
    assert found.components == (tuple(range(16)),) and len(found.unknown) == len(found.pairs) == 120
    assert not found.exact
    assert fanin.overlap(far_apart(0, 1 << 13), far_apart(1, 1 << 13)).kind == "overlap"
    one = np.asarray(Placed(1 << 40, (1049,) * 3, (36674, 61119, 85569)))
    two = np.asarray(Placed((1 << 40) + 64023025, (1049,) * 2, (12223, 12224)))
    assert fanin.overlap(one, two).kind == "disjoint" and fanin.overlap(one, two, budget=1000).kind == "unknown"


def test_no_pair_is_listed_to_find_undecided_ones_if_all_arrays_have_one_step() -> None:
    x = np.zeros((400, 500), "f4")
    found = fanin.sharing.overlaps([*x, *x.T, x[:100, 10:20], x])
    assert found.unknown == () and "_made" not in vars(found)
    assert len(found.pairs) == 400 * 500 + 900 + 1 + 100 + 10
    two_steps = fanin.sharing.overlaps([*x, *x.T, x[:, ::2]])
    assert two_steps.unknown == () and "_made" in vars(two_steps)


def test_no_pair_is_undecided_if_none_is_checked() -> None:
    draw = random.Random(SEED)
    easy = Counter[bool]()
    for _ in range(300):
        step = draw.randrange(1, 1 << 40)
        pieces = [np.asarray(Placed((1 << 40) + draw.randrange(64), (2,), (step + draw.choice((0, 0, 0, 1)),)))]
        pieces += [np.asarray(Placed((1 << 40) + draw.randrange(64), (draw.randrange(1, 9),), (step,)))]
        if draw.random() < 0.1:
            pieces.append(np.asarray(Placed(1 << 40, (2,), (1 << 62,))))  # farther than can be counted
        found = fanin.sharing.overlaps(pieces, budget=0)
        looked_at = found._pairs()[1]
        assert found.unknown == looked_at
        easy[found._easy] += 1
    assert min(easy[False], easy[True]) > 30, easy


@pytest.mark.parametrize("apart", [0, 1 << 45])
def test_many_arrays_in_any_order_have_the_pairs_of_the_sorted_ones(apart: int) -> None:
    """So many are sorted by digits; some lie far from the others, so that there are many digits."""
    n, draw = 20_000, random.Random(apart)
    starts = [(1 << 40) + 8 * i + (apart if i > n // 2 else 0) for i in range(n)]
    pieces = [np.asarray(Placed(start, (draw.choice([8, 8, 8, 9]),), (1,))) for start in starts]
    order = list(range(n))
    draw.shuffle(order)
    meet = [i for i in range(n - 1) if starts[i] + pieces[i].size > starts[i + 1]]
    assert len(meet) > n // 8
    found = fanin.sharing.overlaps([pieces[i] for i in order])
    place = {i: k for k, i in enumerate(order)}
    assert found.pairs == tuple(sorted(tuple(sorted((place[i], place[i + 1]))) for i in meet))
    assert fanin.sharing.overlaps(pieces).pairs == tuple((i, i + 1) for i in meet)


def test_iterating_a_result_iterates_its_pairs() -> None:
    x = np.zeros(10)
    found = fanin.sharing.overlaps([x[:4], x[2:6], x[6:], x[5:7]])
    assert [(i, j) for i, j in found] == list(found) == list(found.pairs) == [(0, 1), (1, 3), (2, 3)]
    assert len(found) == 4 and (1, 3) in found and (0, 3) not in found
    assert list(fanin.sharing.overlaps([])) == list(fanin.sharing.overlaps([x, np.zeros(3)])) == []


@pytest.mark.threads
def test_threads_that_read_the_pairs_at_once_get_one_list() -> None:
    store, seen = np.zeros(2000), 0
    for _ in range(5):
        found, start = fanin.sharing.overlaps([store[i : i + 500] for i in range(500)]), threading.Barrier(3)

        def ask(found: Any = found, start: threading.Barrier = start) -> Any:
            start.wait()
            return found.pairs

        with ThreadPoolExecutor(3) as pool:
            lists = [x.result() for x in [pool.submit(ask) for _ in range(3)]]
        assert all(x is lists[0] for x in lists) and found.unknown == ()
        seen += len(lists[0])
    assert seen == 5 * 500 * 499 // 2


def test_comparing_verdicts_leaks_nothing() -> None:
    x = np.zeros(8)
    one, two = fanin.overlap(x[:4], x[2:]), fanin.overlap(x[:4], x[2:])
    before = sys.getallocatedblocks()
    for _ in range(5000):
        assert one == two
    assert sys.getallocatedblocks() - before < 1000


def test_a_sum_is_written_into_interleaved_axes_unless_two_elements_share_bytes() -> None:
    memory = np.zeros(8)
    term, interleaved = np.arange(6.0).reshape(3, 2), as_strided(memory, (3, 2), (16, 24))
    assert fanin.add_n([term, term], out=interleaved) is interleaved
    assert memory.tolist() == [0, 0, 4, 2, 8, 6, 0, 10]
    with pytest.raises(BufferError, match=r"can be written.*overlaps itself"):
        fanin.add_n([term, term], out=as_strided(memory, (3, 2), (8, 16)))
