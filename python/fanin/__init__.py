"""fanin: the input buffer of an autograd engine.

The gradient of a value that is used more than once is a sum. `add_n` sums arrays in one pass; `InputBuffer` takes
gradients from any thread and any stream, sums them in an order that does not depend on their arrival, and inserts
exactly the stream waits that are needed.

>>> import fanin, numpy as np
>>> buf = fanin.InputBuffer(2)
>>> buf.add(0, np.array([1.0, 2.0]))
>>> buf.add(0, np.array([0.5, 0.5]))
>>> buf.take()
[array([1.5, 2.5]), None]
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from . import sim
from ._core import (
    GraphTree,
    InputBuffer,
    Leaf,
    Node,
    add_n,
    backward,
    grad,
    trim,
    walk,
)
from ._files import get_include
from ._graphs import draw, free
from ._overlap import Overlaps, Verdict, overlap, overlaps, overlaps_itself
from ._trace.recording import trace
from ._version import __version__
from .errors import CaptureError, DeviceError, DeviceOutOfMemoryError, DTypeError, RaceError, StreamMismatchWarning
from .options import Counters, counters, set_options
from .slots import Slot, Sparse, Stats, Zero, clip_norm, global_norm
from .streams import Event, Stream, current_stream, devices, info, stream

__all__ = [
    "CaptureError",
    "Counters",
    "DTypeError",
    "DeviceError",
    "DeviceOutOfMemoryError",
    "Event",
    "GraphTree",
    "InputBuffer",
    "Leaf",
    "Node",
    "Overlaps",
    "RaceError",
    "Slot",
    "Sparse",
    "Stats",
    "Stream",
    "StreamMismatchWarning",
    "Verdict",
    "Zero",
    "__version__",
    "add_n",
    "backward",
    "clip_norm",
    "counters",
    "current_stream",
    "devices",
    "draw",
    "free",
    "get_include",
    "global_norm",
    "grad",
    "info",
    "overlap",
    "overlaps",
    "overlaps_itself",
    "set_options",
    "sim",
    "stream",
    "trace",
    "trim",
    "walk",
]

_LATER = (
    "analysis",
    "descriptors",
    "tape",
    "torch",
)  # modules of the package that are imported when they are first asked for


def __getattr__(name: str) -> ModuleType:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in _LATER if name != "torch" or importlib.util.find_spec("torch"))])
