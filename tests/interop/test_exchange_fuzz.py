"""Thousands of DLPack tensors drawn from the edges: each is summed as NumPy reads it, or refused; and each deleter runs
exactly once.

A tensor whose numbers are sound but which points outside the memory that it has is a forged pointer: no check can find
it, and none is made here.
"""

from __future__ import annotations

import gc
import math
import os
import random
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.hostile import Producer

pytestmark = pytest.mark.core

BLOCK = (np.arange(4096) % 96).astype(np.uint8)  # no bytes of which a NaN could be made
CODES = {
    (2, 32): "f4",
    (2, 64): "f8",
    (0, 8): "i1",
    (0, 64): "i8",
    (1, 16): "u2",
    (6, 8): "?",
    (5, 64): "c8",
    (2, 16): "f2",
}
EXTENTS = [1, 1, 2, 2, 3, 3, 4, 0, 7, -1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]
STRIDES = [1, 1, 2, 3, 4, 0, -1, -2, 12, 2**31, 2**60, 2**61, 2**63 - 1, -(2**63)]
OFFSETS = [0, 0, 0, 8, 1, 3, 512, 2**31, 2**63 - 1, 2**63, 2**64 - 1]


def draw(r: random.Random) -> dict[str, Any]:
    """The fields of a tensor, honest for the most part."""

    def mostly(honest: Any, *others: Any) -> Any:
        return honest if r.random() < 0.9 else r.choice(others)

    code, bits = r.choice(list(CODES))
    ndim = r.choice([0, 1, 1, 2, 2, 3])
    sane = r.random() < 0.6
    extents, strides = (EXTENTS[:9], STRIDES[:9]) if sane else (EXTENTS, STRIDES)
    return {
        "versioned": r.random() < 0.7,
        "version": mostly((1, r.choice([0, 1, 3, 99])), (0, 1), (2, 0), (2**32 - 1, 0)),
        "flags": r.choice([0, 0, 1, 2, 3, 4, 2**64 - 1]),
        "name": mostly("", "dltensor2", "used_dltensor", None),
        "device": mostly((1, 0), (3, 0), (2, 0), (1, -1), (99, 1)),
        "said": mostly((1, 0), (3, 0), (2, 0), (1, 7)),
        "ndim": mostly(ndim, -1, 65, 2**31 - 1, -(2**31)),
        "shape": mostly([r.choice(extents) for _ in range(ndim)], None),
        "strides": r.choice([None, [r.choice(strides) for _ in range(ndim)], [r.choice(strides) for _ in range(ndim)]]),
        "dtype": mostly(
            (code, bits, 1), (code, bits, 0), (code, bits, 2), (3, 64, 1), (2, 80, 1), (17, 4, 1), (255, 255, 65535)
        ),
        "data": mostly(BLOCK.ctypes.data + r.choice([0, 2048, 2048]), None),
        "offset": r.choice(OFFSETS[:7] if sane else OFFSETS),
        "deleter": mostly("", None),
    }


def view(how: dict[str, Any]) -> Any:
    """The values as NumPy reads them; None if the tensor must be refused; NotImplemented for a forged pointer."""
    ndim, shape, strides, (code, bits, lanes) = how["ndim"], how["shape"], how["strides"], how["dtype"]
    named = how["name"] == ""
    if not named or (how["versioned"] and how["version"][0] != 1):
        return None
    if how["device"] != how["said"] and (how["device"][0] != how["said"][0] or how["device"][1] < 0):
        return None
    if how["device"][0] not in (1, 3) or how["device"][1] < 0 or how["said"][0] not in (1, 3):
        return None
    if (code, bits) not in CODES or lanes != 1 or not 0 <= ndim <= 64 or (ndim and shape is None):
        return None
    dtype = np.dtype(CODES[code, bits])
    shape = shape or []
    if len(shape) != ndim or any(n < 0 for n in shape):
        return None if any(n < 0 for n in shape) or ndim > len(shape) else NotImplemented
    if math.prod(n for n in shape if n) * dtype.itemsize >= 2**63:
        return None
    if 0 in shape:
        return np.zeros(shape, dtype)
    if strides is None:
        steps = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(ndim)]
    else:
        # The stride of an axis with one element means nothing.
        steps = [s * dtype.itemsize if n > 1 else 0 for n, s in zip(shape, strides, strict=True)]
    if how["data"] is None or how["offset"] >= 2**63 or any(not -(2**63) <= s < 2**63 for s in steps):
        return None
    lo = sum(min(0, (n - 1) * s) for n, s in zip(shape, steps, strict=True))
    hi = sum(max(0, (n - 1) * s) for n, s in zip(shape, steps, strict=True)) + dtype.itemsize
    first = how["data"] + how["offset"]
    if lo < -(2**63) or hi >= 2**63 or hi - lo >= 2**63 or first + lo < 0 or first + hi >= 2**64 or first >= 2**64:
        return None
    inside = first - BLOCK.ctypes.data
    if inside + lo < 0 or inside + hi > BLOCK.size:
        return NotImplemented
    return np.ndarray(tuple(shape), dtype, BLOCK.data, inside, tuple(steps))


@pytest.mark.parametrize("seed", [int(os.environ.get("FANIN_SEED", "0"))])
def test_every_tensor_is_summed_or_refused_and_given_back_once(seed: int) -> None:
    r, seen = random.Random(seed), dict.fromkeys(("summed", "refused", "forged"), 0)
    print(f"FANIN_SEED={seed}")
    kept, buf = BLOCK.copy(), fanin.InputBuffer(1)
    gc.collect()
    before = hooks.memory()[0]
    for _ in range(int(os.environ.get("FANIN_FUZZ", "6000"))):
        how = draw(r)
        expected = view(how)
        if expected is NotImplemented:
            seen["forged"] += 1
            continue
        p = Producer(**how)
        try:
            buf.add(0, p)
            assert expected is not None, how
            if expected.size > 10_000:  # expanded: the sum would be large, and would test nothing more
                expected = expected[tuple(slice(0, 0) for _ in expected.shape)]
                buf.clear()
                buf.add(0, expected)
            (result,) = buf.take(writable=True)
            assert result.shape == expected.shape, how
            assert result.dtype == expected.dtype, how
            same = expected.view("u1") != 0 if expected.dtype == "?" else expected
            assert result.tobytes() == same.tobytes(), how
            seen["summed"] += 1
        except (BufferError, ValueError, TypeError) as e:
            buf.clear()
            assert expected is None, (how, e)
            seen["refused"] += 1
        taken = bool(p.requests) and how["name"] == ""
        assert p.deleted == (1 if taken and how["deleter"] == "" else 0), how
    del result
    assert hooks.memory()[0] == before
    assert np.array_equal(BLOCK, kept)
    assert min(seen.values()) > 100, f"one outcome is hardly seen: {seen}"
