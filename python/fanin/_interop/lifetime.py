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
    """What keeps the memory of x alive, and not x itself; None where nothing is known that does."""
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
    """x, which was used on these streams, leaves us: its memory may be used again only when they have passed. torch's
    allocator is told of its own streams; else a second hold on the memory is kept, which goes when x does.
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
