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

In a shell, `fanin demo` trains a network on simulated streams, and `fanin info` shows what is installed. The tutorial
and the reference are in the folder `docs` of the sources, whose address `pip show fanin` prints. Modules:
`fanin.sharing` (shared memory), `fanin.torch`, `fanin.dist` (ranks), `fanin.sim` (simulated machines), `fanin.graph`
(graph trees), `fanin.tape` (differentiable operations), `fanin.analysis` and `fanin.descriptors` (writes and aliases),
`fanin.audit` (training loops), `fanin.testing` (a pytest plugin), `fanin.conformance` (laws for other engines).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from . import _array as _array  # completes a type of the core
from . import _engine as _engine
from ._core import InputBuffer, Leaf, Node, add_n, backward, grad, trim, walk
from ._files import get_include
from ._graphs import draw, free
from ._order import order
from ._trace.recording import trace
from ._version import __version__
from .errors import (
    CaptureError,
    DeviceError,
    DeviceOutOfMemoryError,
    DTypeError,
    PeerError,
    RaceError,
    StreamMismatchWarning,
)
from .options import Counters, counters, set_options
from .partial import Diagonal, Partial, add_rows
from .sharing import overlap
from .slots import Slot, Sparse, Stats, Zero, clip_norm, global_norm
from .streams import Event, Stream, current_stream, devices, info, stream

if TYPE_CHECKING:
    from . import sim
    from ._trace.compare import compare
    from .graph import GraphTree

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = [
    "CaptureError",
    "Counters",
    "DTypeError",
    "DeviceError",
    "DeviceOutOfMemoryError",
    "Diagonal",
    "Event",
    "GraphTree",
    "InputBuffer",
    "Leaf",
    "Node",
    "Partial",
    "PeerError",
    "RaceError",
    "Slot",
    "Sparse",
    "Stats",
    "Stream",
    "StreamMismatchWarning",
    "Zero",
    "__version__",
    "add_n",
    "add_rows",
    "backward",
    "clip_norm",
    "compare",
    "counters",
    "current_stream",
    "devices",
    "draw",
    "free",
    "get_include",
    "global_norm",
    "grad",
    "info",
    "order",
    "overlap",
    "set_options",
    "sim",
    "stream",
    "trace",
    "trim",
    "walk",
]

#: Parts of the package that the rest does without. A copy of fanin may lack their folders.
PARTS = ("analysis", "audit", "dist", "graph", "sim", "torch")
#: Modules that are imported at their first use.
_LATER = (*PARTS, "conformance", "descriptors", "tape", "testing")
_MOVED = dict.fromkeys(("Overlaps", "Verdict", "overlaps", "overlaps_itself"), "fanin.sharing")
#: Names and their parts, or the modules that have them.
_OF_PARTS = {"GraphTree": "graph", "compare": "_trace.compare", "descriptors": "analysis"}


def _need(part: str, name: str) -> None:
    """Raise ModuleNotFoundError for a name whose part this copy lacks."""
    if not importlib.util.find_spec(f"{__name__}.{part}"):
        raise ModuleNotFoundError(
            f"fanin.{name} needs fanin.{part}, which this copy of fanin does not have", name=f"{__name__}.{part}"
        )


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it is {_MOVED[name]}.{name}")
    if name not in _LATER and name not in _OF_PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    part = _OF_PARTS.get(name, name)
    if part in PARTS:
        _need(part, name)
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{part}"), name)
    return found


def __dir__() -> list[str]:
    needs = {name: [f"{__name__}.{_OF_PARTS.get(name, name)}"] for name in (*_LATER, *_OF_PARTS)}
    needs["torch"].append("torch")
    every = {*__all__, *_LATER, "sharing"}
    return sorted(name for name in every if all(map(importlib.util.find_spec, needs.get(name, ()))))
