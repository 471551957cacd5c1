"""How long the memory of a gradient lives: until the streams that used it have passed (docs/rules.md, Lifetime)."""

from __future__ import annotations

import sys
import weakref

import numpy as np

from .. import _core
from ..slots import Sparse
from .classes import has_parts, is_torch, package_of
from .streams import NO_SYNC, torch_keeps, torch_stream
from .torch import strided_parts


def memory_of(x: object) -> object:
    """An object that keeps the memory of x alive without x itself; None if none is known."""
    package = package_of(x)
    if package == "cupy":
        return x.data.mem  # type: ignore[attr-defined]  # as all of CuPy's arrays have it
    if package == "numba":
        return x.gpu_data  # type: ignore[attr-defined]
    export = getattr(x, "__dlpack__", None)
    if not hasattr(type(x), "__dlpack__") or export is None:
        return None
    before = sys.getrefcount(x)
    capsule = export(stream=NO_SYNC)
    return capsule if sys.getrefcount(x) == before else None


def leaving(x: object, index: int, streams: list[_core.Stream]) -> None:
    """Protect the memory of x, which these streams used, when x returns to the caller: it may be reused only after
    them. torch's allocator gets torch's own streams; for others a second reference to the memory is kept until x is
    gone.
    """
    if isinstance(x, Sparse) or has_parts(x):
        for part in x.parts if isinstance(x, Sparse) else type(x).__fanin_parts__(x):
            if not isinstance(part, np.ndarray | _core.Array):
                leaving(part, index, streams)
        return
    owners: list[object]
    if is_torch(x):
        others = [s for s in streams if not torch_keeps(s)]
        for tensor in strided_parts(x):
            for s in streams:
                if s not in others:
                    tensor.record_stream(torch_stream(s))
        owners, streams = [t.detach() for t in strided_parts(x)] if others else [], others
    else:
        owners = [owner for owner in [memory_of(x)] if owner is not None]
    if owners:
        weakref.finalize(x, list, [_core.hold_for(owner, streams) for owner in owners]).atexit = False
