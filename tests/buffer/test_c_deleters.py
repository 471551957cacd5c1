"""The C API: deleters, release functions and finalizers of others, and the locks that their caller has."""

from __future__ import annotations

import ctypes as ct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kit import c_api
from kit.c_api import Buffer, Value, api

F = np.dtype("f4")


def inside(name: str) -> Callable[..., Any]:
    """A function of the table that is called with the interpreter's lock, as an extension calls it."""
    result, *arguments = c_api.FUNCTIONS[name]
    return ct.PYFUNCTYPE(*(arguments if result == "py" else [result, *arguments]))(getattr(c_api.table, name))


def test_a_finalizer_of_python_may_wait_for_a_thread_that_uses_the_buffer() -> None:
    b, one, counts = Buffer(1, budget=c_api.EAGER), np.ones(4, F), []

    def use() -> None:
        counts.append(b.counters()["adds"])

    def end() -> None:
        other = threading.Thread(target=use)
        other.start()
        other.join()

    x, v, view = np.ones(4, F), Value(), c_api.view(one)
    weakref.finalize(x, end)
    assert api.of_python(x, ct.byref(v)) == 0
    del x
    b.add(0, v)
    api.drop(ct.byref(v))
    add = inside("buffer_add")
    assert add(b.at, 0, ct.byref(view), None, None) == c_api.OK  # sums, and drops the ndarray
    assert counts == [2]
    assert b.take(0).tolist() == [2] * 4
