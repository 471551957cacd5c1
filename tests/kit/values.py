"""What the tests of values share: dtypes, arrays of every layout, and what it means that two results are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from reference import buffer as reference

Array = np.ndarray[Any, np.dtype[Any]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
INTEGERS = [np.dtype(f"{k}{n}") for k in ("int", "uint") for n in (8, 16, 32, 64)]
LOW = [np.dtype(np.float16), BFLOAT16, E4M3, E5M2]
FLOATS = [*LOW, np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
DTYPES = [np.dtype(bool), *INTEGERS, *FLOATS, *COMPLEX]
PLAIN = [d for d in DTYPES if d not in LOW]


def bits(x: Any) -> bytes:
    """The elements' bytes in C order, every NaN the same."""
    a: Array = np.ascontiguousarray(x)
    if a.dtype.kind == "c":
        a = a.reshape(-1).view(a.real.dtype)
    word = a.reshape(-1).view(np.dtype(f"u{a.dtype.itemsize}")).copy()
    if a.dtype.kind == "f" or a.dtype in LOW:
        with np.errstate(all="ignore"):
            word[np.asarray(a.astype(np.float64) != a.astype(np.float64)).reshape(-1)] = 2 ** (8 * a.dtype.itemsize) - 1
    return word.tobytes()


def show(x: Any) -> tuple[Any, ...]:
    """Everything that a caller can observe of a result except its identity and memory: results are equal if these are.

    Sparse results are compared as what they add up to, index by index: D12 leaves open when duplicates are added.
    """
    if x is None:
        return ("undefined",)
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        return "Python", type(x).__name__, bits(np.array(x)).hex()
    if isinstance(x, np.generic | np.ndarray) and not (x.dtype in DTYPES and x.dtype.isnative):
        return "object", type(x).__name__, repr(x)  # of a dtype that is not summed
    if isinstance(x, np.generic):
        return "NumPy scalar", x.dtype.name, bits(x).hex()
    if isinstance(x, np.ndarray) and x.dtype != np.object_ and not isinstance(x, np.ma.MaskedArray):
        return "array", type(x).__name__, x.dtype.name, x.shape, bits(x).hex()
    if hasattr(x, "format") and (hasattr(x, "parts") or hasattr(x, "tocoo")):
        dtype = np.asarray(x.parts[-1] if hasattr(x, "parts") else x.data).dtype
        found = {index: bits(np.asarray(value, dtype)).hex() for index, value in added_up(x).items()}
        return "sparse", type(x).__name__, x.format, tuple(x.shape), dtype.name, found
    if type(x).__name__ == "Zero":
        return "zero", tuple(x.shape), reference.dtype_of(x.dtype).name
    return "object", type(x).__name__, repr(x)


def stored(x: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(index, value) of each stored number of a sparse gradient, in its order, by the plainest of loops."""
    parts = x.parts if hasattr(x, "parts") else None
    if x.format in ("dia", "lil", "dok"):
        x = x.tocoo()
    if x.format == "coo":
        indices, values = parts or (np.stack(x.coords), x.data)
        for n in range(len(values)):
            value = np.asarray(values[n])
            for inside in np.ndindex(value.shape):
                yield (*map(int, indices[:, n]), *inside), value[inside]
        return
    pointers, minors, values = parts or (x.indptr, x.indices, x.data)
    h, w = values.shape[1:] or (1, 1)
    for major in range(len(pointers) - 1):
        for n in range(pointers[major], pointers[major + 1]):
            row, column = (minors[n], major) if x.format in ("csc", "bsc") else (major, minors[n])
            for inside in np.ndindex(h, w):
                value = np.asarray(values[n])
                yield (int(row) * h + inside[0], int(column) * w + inside[1]), value.reshape(h, w)[inside]


def added_up(x: Any) -> dict[tuple[int, ...], Any]:
    """index -> sum of what is stored there, one after the other."""
    found: dict[tuple[int, ...], Any] = {}
    with np.errstate(all="ignore"):
        for index, value in stored(x):
            found[index] = (
                (found[index] | value if value.dtype == bool else found[index] + value) if index in found else value
            )
    return dict(sorted(found.items()))


def same(a: Any, b: Any) -> bool:
    return show(a) == show(b)
