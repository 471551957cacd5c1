"""Memory is the oracle: an array with other references is never written, for every kind and every way to add it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from kit.sample import every

pytestmark = pytest.mark.core
Array = np.ndarray[Any, Any]
f32 = np.float32
BUDGETS = (0, 24, None, math.inf)


def ones(*shape: int) -> Array:
    return np.ones(shape, f32)


def read_only(x: Array) -> Array:
    view = x[:]
    view.flags.writeable = False
    return view


def unaligned(memory: Array) -> Array:
    memory.view(np.uint8)[1:25] = ones(6).view(np.uint8)
    return memory.view(np.uint8)[1:25].view(f32).reshape(2, 3)


def mapped(folder: Path) -> Array:
    made = np.memmap(folder / "x", f32, "w+", shape=(2, 3))
    made[...] = 1
    return made


#: what it is -> the memory that must stay as it is, and a (2, 3) gradient of ones in it
HELD: dict[str, tuple[Callable[[Path], Array], Callable[[Array], Array]]] = {
    "an array": (lambda _: ones(2, 3), lambda m: m),
    "an array in the other order": (lambda _: ones(3, 2), lambda m: m.T),
    "a view": (lambda _: ones(6, 9), lambda m: m[1:3, 2:5]),
    "a reshaped view": (lambda _: ones(6), lambda m: m.reshape(2, 3)),
    "a view with gaps": (lambda _: ones(4, 6), lambda m: m[::2, ::2]),
    "a view that runs backwards": (lambda _: ones(2, 3), lambda m: m[::-1, ::-1]),
    "what was broadcast": (lambda _: ones(3), lambda m: np.broadcast_to(m, (2, 3))),
    "an array that overlaps itself": (lambda _: ones(4), lambda m: np.lib.stride_tricks.as_strided(m, (2, 3), (4, 4))),
    "a read-only view": (lambda _: ones(2, 3), read_only),
    "memory of a bytearray": (lambda _: np.frombuffer(bytearray(ones(6).tobytes()), f32), lambda m: m.reshape(2, 3)),
    "unaligned memory": (lambda _: ones(7), unaligned),
    "a memmap": (mapped, lambda m: m),
    "a part of a complex array": (lambda _: np.ones((2, 3), np.complex64), lambda m: m.real),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: a folder for each test takes as long as the test."""
    return tmp_path_factory.mktemp("held")


@pytest.fixture(params=list(HELD))
def held(request: pytest.FixtureRequest, folder: Path) -> tuple[Array, Array]:
    """(memory, gradient)."""
    make, gradient = HELD[request.param]
    memory = make(folder)
    return memory, gradient(memory)


@pytest.mark.rule("A6", "A7")
@pytest.mark.parametrize(("budget", "keyed"), every(3, list(product(BUDGETS, (False, True)))))
def test_a_referenced_gradient_is_never_written(
    make_buffer: Any, held: tuple[Array, Array], budget: Any, keyed: bool
) -> None:
    memory, g = held
    before = memory.tobytes()
    csr = sp.csr_array(np.full((2, 3), 7, f32))
    others: list[Any] = [np.full((2, 3), 7, f32), np.broadcast_to(f32(7), (2, 3)), csr, g]
    for other, first in product(others, (True, False)):
        b = make_buffer(1, budget=budget)
        for key, x in enumerate([g, other, other] if first else [other, g, other, g]):
            b.add(0, x, key=key if keyed else None)
        dense = other.toarray() if other is csr else np.array(other)
        expected = (1 + 2 * dense if first else 2 * dense + 2).tolist()
        assert b[0].tolist() == expected
        assert memory.tobytes() == before
        result = b.take()[0]
        assert result.tolist() == expected
        assert memory.tobytes() == before
        if result.flags.writeable:
            result[...] = 0
        assert memory.tobytes() == before, "and the result does not lie in it"


@pytest.mark.rule("A6", "A14")
@pytest.mark.parametrize("how", [{"writable": True}, {"scale": 1}, {"scale": 2}], ids=str)
def test_a_single_gradient_that_options_of_take_change_is_not_written(
    make_buffer: Any, held: tuple[Array, Array], how: Any
) -> None:
    memory, g = held
    before = memory.tobytes()
    b = make_buffer(1)
    b.add(0, g)
    result = b.take(**how)[0]
    if result.flags.writeable or "writable" in how:
        result[...] = 5
    assert memory.tobytes() == before


@pytest.mark.rule("A6", "A14")
def test_a_reusable_donated_gradient_is_handed_to_a_writing_consumer(make_buffer: Any) -> None:
    memory = ones(4, 6)
    overlapping = np.lib.stride_tricks.as_strided(memory, (2, 3), (4, 4))
    for g, handed in (
        (overlapping, False),
        (np.broadcast_to(memory[0], (2, 6)), False),
        (read_only(memory), False),
        (memory[::2, ::2], False),
        (memory.T, True),
        (memory, True),
    ):
        b = make_buffer(1)
        b.add(0, g, donate=True)
        (result,) = b.take(writable=True)
        assert (result is g) == handed
        assert result.tolist() == g.tolist()
        assert handed or not np.shares_memory(result, memory)
        before = result.copy()
        result[0, 0] += 1
        before[0, 0] += 1
        assert result.tolist() == before.tolist(), "one element was written, and one changed"
        memory[...] = 1


@pytest.mark.rule("A6", "A7")
@pytest.mark.parametrize("budget", BUDGETS)
def test_one_array_sent_to_two_slots_is_not_written_by_either(make_buffer: Any, budget: Any) -> None:
    """z = x + y sends one array to both, and its node forgets it at once."""
    b = make_buffer(2, budget=budget)
    x, y = ones(4), 2 * ones(4)

    def backward_of_plus() -> None:
        g = 10 * ones(4)
        b.add(0, g)
        b.add(1, g)

    backward_of_plus()
    b.add(0, x)
    b.add(1, y)
    b.add(0, x)
    first, second = b.take()
    assert (first.tolist(), second.tolist()) == ([12] * 4, [12] * 4)
    assert (x.tolist(), y.tolist()) == ([1] * 4, [2] * 4)
    first[:] = 0
    assert second.tolist() == [12] * 4


@pytest.mark.rule("A6", "A7", "A14")
@pytest.mark.parametrize("budget", BUDGETS)
def test_one_array_in_two_slots_alone_in_one_of_them(make_buffer: Any, budget: Any) -> None:
    b = make_buffer(2, budget=budget)

    def send() -> None:
        g = ones(4)
        b.add(0, g)
        b.add(1, g)

    send()
    b.add(0, ones(4))
    first, second = b.take()
    assert first.tolist() == [2] * 4
    assert second.tolist() == [1] * 4
    assert not np.may_share_memory(first, second)


@pytest.mark.rule("A6", "A7")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_gradient_whose_base_lives_on_is_not_written(make_buffer: Any, budget: Any) -> None:
    memory = ones(10)
    b = make_buffer(1, budget=budget)
    b.add(0, memory[2:6])  # no reference to the view is left, but the memory still has another owner
    b.add(0, ones(4))
    b.add(0, memory[4:8])
    assert b.take()[0].tolist() == [3] * 4
    assert memory.tolist() == [1] * 10


@pytest.mark.rule("A6")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_gradient_with_only_a_weak_reference_is_not_written(make_buffer: Any, budget: Any) -> None:
    import weakref

    b = make_buffer(1, budget=budget)
    g: Any = ones(4)
    weak = weakref.ref(g)
    b.add(0, g)
    del g
    b.add(0, ones(4))
    again = weak()
    assert again is None or again.tolist() == [1] * 4
    assert b.take()[0].tolist() == [2] * 4
    assert again is None or again.tolist() == [1] * 4


@pytest.mark.rule("A6")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_same_array_twice_is_twice_its_value(make_buffer: Any, budget: Any) -> None:
    x = np.arange(4, dtype=f32)
    for donate in (False, True):
        b = make_buffer(1, budget=budget)
        for _ in range(3):
            b.add(0, x, donate=donate)
        assert b.take()[0].tolist() == [0, 3, 6, 9]
        x[:] = np.arange(4)


@pytest.mark.rule("A14")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_copied_gradient_may_be_changed_at_once(make_buffer: Any, lib: Any, budget: Any) -> None:
    b = make_buffer(5, budget=budget)
    x, m = ones(4), sp.csr_array(np.eye(2, dtype=f32))
    s = lib.Sparse("coo", (np.array([[0, 1]]), ones(2)), (2,))
    for i, g in enumerate((x, x, m, s, np.broadcast_to(x[:1], (4,)))):
        b.add(i, g, copy=True)
        if i == 1:
            b.add(i, x, copy=True)
    x[:] = 7
    m.data[:] = 7
    s.parts[0][:] = 0
    s.parts[1][:] = 7
    one, two, sparse, mine, wide = b.take()
    assert one.tolist() == [1] * 4
    assert two.tolist() == [2] * 4
    assert sparse.toarray().tolist() == [[1, 0], [0, 1]]
    assert type(mine) is lib.Sparse
    assert [np.asarray(p).tolist() for p in mine.parts] == [[[0, 1]], [1, 1]]
    assert wide.tolist() == [1] * 4


@pytest.mark.rule("A14")
def test_a_parted_buffer_keeps_no_gradient(make_buffer: Any) -> None:
    """After take and clear the buffer holds no reference to what was added."""
    import gc
    import weakref

    b = make_buffer(2)
    seen = []
    for end in ("take", "clear"):
        for slot in (0, 1, 1):
            x: Any = ones(4)
            seen.append(weakref.ref(x))
            b.add(slot, x)
            del x
        b.take() if end == "take" else b.clear()
    gc.collect()
    assert [w() for w in seen] == [None] * 6


@pytest.mark.rule("A5", "A7")
@pytest.mark.parametrize("budget", BUDGETS)
def test_parts_of_sparse_gradients_are_never_written(make_buffer: Any, budget: Any) -> None:
    made: list[Any] = [
        sp.coo_array((ones(3), ([0, 0, 1], [2, 2, 1])), shape=(2, 3)),
        sp.csr_array((ones(3), [2, 2, 1], [0, 2, 3]), shape=(2, 3)),
        sp.csc_array((ones(3), [1, 0, 0], [0, 0, 1, 3]), shape=(2, 3)),
        sp.bsr_array((ones(1, 2, 3), [0], [0, 1]), shape=(2, 3)),
        sp.dia_array(np.eye(2, 3, dtype=f32)),
    ]

    def parts(x: Any) -> list[bytes]:
        names = ("data", "indices", "indptr", "row", "col", "offsets")
        return [np.asarray(getattr(x, n)).tobytes() for n in names if hasattr(x, n)]

    before = [parts(x) for x in made]
    for x, y in product([*made, ones(2, 3)], repeat=2):
        b = make_buffer(1, budget=budget)
        for g in (x, y, x):
            b.add(0, g)
        result = b.take()[0]
        dense = [g.toarray() if hasattr(g, "toarray") else g for g in (x, y, x, result)]
        assert dense[3].tolist() == (dense[0] + dense[1] + dense[2]).tolist()
        (result if type(result) is np.ndarray else result.data)[...] = 9
        assert [parts(m) for m in made] == before
