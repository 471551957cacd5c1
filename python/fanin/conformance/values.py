"""Arrays, and what the laws of buffers and of engines have in common."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fanin._interop.protocols import NDArray


def some(seed: int, n: int = 3, shape: tuple[int, ...] = (4, 5), dtype: str = "float32") -> list[NDArray]:
    """n arrays whose sum depends on the order of its additions, if the dtype allows."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-4, 5, (n, *shape))
    values = rng.standard_normal((n, *shape)) * scale
    if dtype == "bool":
        return list(values > 0)
    if dtype.startswith("int"):
        return list(rng.integers(-100, 100, (n, *shape)).astype(dtype))
    return list(values.astype(dtype))


def left_fold(arrays: list[NDArray]) -> NDArray:
    return functools.reduce(np.add, arrays[1:], arrays[0])


def same_bits(a: object, b: object) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def needs(buffer: object, *names: str) -> None:
    missing = [name for name in names if not hasattr(buffer, name)]
    if missing:
        pytest.skip(f"this buffer has no {', '.join(missing)}")


def has_part(subject: object, part: str) -> None:
    """Skip the law if the buffer or engine has no such part, for the reason that it gives."""
    reason = getattr(subject, "lacks", {}).get(part)
    if reason:
        pytest.skip(reason)


def takes(method: Callable[..., object], name: str) -> bool:
    """Whether a method has a parameter of this name, as far as it can be inspected."""
    try:
        known = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return True
    return name in known or any(p.kind is p.VAR_KEYWORD for p in known.values())


def at_once(*work: Callable[[], object]) -> None:
    """Run functions, each on a thread of its own, which the interpreter switches as often as it can."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(work))

    def run(one: Callable[[], object]) -> None:
        try:
            gate.wait()
            one()
        except BaseException as e:
            errors.append(e)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(one,)) for one in work]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def late(machine: Any, stream: Any, value: NDArray) -> Any:
    """An array of the simulated device 0, which a kernel on `stream` fills."""
    x = machine.empty(value.shape, value.dtype)
    machine.launch(stream, lambda v: np.copyto(v, value), writes=[x], name="produce")
    return x


def seen(machine: Any, stream: Any, x: Any) -> NDArray:
    """The values of an array, as work on `stream` reads them."""
    found: list[NDArray] = []
    machine.launch(stream, lambda v: found.append(v.copy()), reads=[x], name="consume")
    machine.synchronize()
    return found[0]
