"""Window sums from Python: exact, in any order and any tree of merges, and refused by name where they do not fit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from kit import hooks
from kit.values import bits

pytestmark = pytest.mark.core

DTYPES = ["float16", "float32", "float64", "complex64", "complex128"]


def drawn(rng: np.random.Generator, n: int, dtype: str) -> Any:
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-8, 8, n)
    return (x + 1j * rng.standard_normal(n)).astype(dtype) if "complex" in dtype else x.astype(dtype)


def packed(window: object) -> Any:
    room = np.empty(_core.window_room(window), np.uint8)
    return room[: _core.window_pack(window, room)].copy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_rounds_to_the_exact_sum_for_every_tree_of_merges(dtype: str) -> None:
    rng = np.random.default_rng(3)
    terms = [drawn(rng, 1000, dtype) for _ in range(6)]
    expected = fanin.add_n(terms, accumulate="exact", scale=1 / 3)
    for cut in range(7):
        one, two = (_core.window_new(dtype, 1000) for _ in range(2))
        _core.window_add(one, tuple(terms[:cut]))
        for x in terms[cut:]:
            _core.window_add(two, (x,))
        message = packed(two)
        assert _core.window_merge_packed(one, message) == len(message)
        out = np.empty(1000, dtype)
        _core.window_round(one, out, 1 / 3)
        assert bits(out) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_are_read_one_after_another(dtype: str) -> None:
    rng = np.random.default_rng(4)
    sizes = [512, 256, 1300]
    terms = [[drawn(rng, n, dtype) for n in sizes] for _ in range(2)]
    sent, owned = ([_core.window_new(dtype, n) for n in sizes] for _ in range(2))
    for windows, one in zip((sent, owned), terms, strict=True):
        for window, x in zip(windows, one, strict=True):
            _core.window_add(window, (x,))
    rest = np.concatenate([packed(w) for w in sent])
    for k, window in enumerate(owned):
        rest = rest[_core.window_merge_packed(window, rest) :]
        out = np.empty(sizes[k], dtype)
        _core.window_round(window, out, None)
        assert bits(out) == bits(fanin.add_n([terms[0][k], terms[1][k]], accumulate="exact"))
    assert not len(rest)


def test_terms_of_every_layout_and_library_of_numpy_are_added() -> None:
    a = np.arange(12.0, dtype="f4").reshape(3, 4)
    window = _core.window_new("float32", 12)
    _core.window_add(window, (a.T, np.asfortranarray(a).T, a.astype("f2").T))
    out = np.empty((4, 3), "f4")
    _core.window_round(window, out, None)
    assert np.array_equal(out, 3 * a.T)


def message(n: int = 8) -> Any:
    return np.zeros(n, np.uint8)


#: (a call with a window of 300 float32, the class, words of the message)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda w: _core.window_new("int32", 3), ValueError, "real or complex float"),
    (lambda w: _core.window_new(None, 3), ValueError, "real or complex float"),
    (lambda w: _core.window_new("float32", -1), ValueError, "-1"),
    (lambda w: _core.window_new("float32", 2**62), ValueError, "more than memory can hold"),
    (lambda w: _core.window_add(w, (np.ones(299, "f4"),)), ValueError, "300 elements, got 299"),
    (lambda w: _core.window_add(w, (np.ones(300, "c8"),)), ValueError, "cannot add an array of complex64"),
    (lambda w: _core.window_add(w, (np.ones(300, "f4"), np.ones((3, 100), "f4"))), ValueError, "one shape"),
    (lambda w: _core.window_add(w, (None,)), TypeError, "dense array on the CPU"),
    (lambda w: _core.window_add(w, (np.ones(300, "M8[s]"),)), ValueError, "datetime"),
    (lambda w: _core.window_add(7, ()), ValueError, "PyCapsule"),
    (lambda w: _core.window_pack(w, message()), BufferError, "writable bytes, got 8"),
    (lambda w: _core.window_pack(w, np.zeros(99, "i4")), TypeError, "uint8"),
    (lambda w: _core.message_new(-1), ValueError, "-1"),
    (lambda w: _core.window_merge_packed(w, message(7)), ValueError, "malformed"),
    (lambda w: _core.window_merge_packed(w, message(24)[1:]), ValueError, "aligned"),
    (lambda w: _core.window_round(w, np.empty(300, "c8"), None), ValueError, "complex64"),
    (lambda w: _core.window_round(w, np.empty(300, "i4"), None), ValueError, "int32"),
    (lambda w: _core.window_round(w, np.empty(300, "f4"), 1j), ValueError, "real number"),
    (lambda w: _core.window_round(w, np.empty(300, "f4"), "x"), TypeError, "scale"),
    (lambda w: _core.window_round(w, np.empty(299, "f4"), None), ValueError, "300 elements"),
    (lambda w: _core.window_round(w, np.broadcast_to(np.float32(0), 300), None), BufferError, "read-only"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_arrays_and_bytes_that_do_not_fit_are_refused_by_name_and_add_nothing(
    call: Any, kind: type[Exception], words: str
) -> None:
    window = _core.window_new("float32", 300)
    _core.window_add(window, (np.full(300, 0.5, "f4"),))
    with pytest.raises(kind, match=words):
        call(window)
    out = np.empty(300, "f4")
    _core.window_round(window, out, None)
    assert (out == 0.5).all()


@pytest.mark.threads
def test_a_window_lets_other_threads_run_and_refuses_those_that_use_it() -> None:
    n = 1 << 22
    window, x = _core.window_new("float32", n), np.ones(n, "f4")
    refused, ended = 0, threading.Event()

    def adds() -> None:
        for _ in range(5):
            try:
                _core.window_add(window, (x,))
            except RuntimeError:
                continue
        ended.set()

    worker = threading.Thread(target=adds)
    worker.start()
    while not ended.is_set():
        try:
            _core.window_room(window)
        except RuntimeError as e:
            assert "another thread uses it" in str(e)
            refused += 1
    worker.join()
    assert refused > 0


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="allocations fail in development builds alone")
def test_each_allocation_may_fail_and_nothing_is_added() -> None:
    narrow, wide = np.full(600, 1.0, "f4"), np.full(600, 2.0**-60, "f4")
    failed = 0
    for attempt in hooks.attempts():
        window, other = _core.window_new("float32", 600), _core.window_new("float32", 600)
        _core.window_add(window, (narrow,))
        _core.window_add(other, (wide,))
        sent = packed(other)
        out = np.empty(600, "f4")
        with attempt:
            _core.window_merge_packed(window, sent)  # the words become wider
            _core.window_add(window, (wide,))
        _core.window_round(window, out, None)
        failed += attempt.failed
        _core.window_add(window, (-narrow,))
        _core.window_round(window, out, 2.0**60)
        assert out[0] in (0, 1, 2, 3) and (out == out[0]).all()
    assert failed >= 3
