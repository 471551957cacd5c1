"""Memory by DLPack: first an object's device, then its memory."""

from __future__ import annotations

import operator

from .. import _core
from .classes import named
from .protocols import Exporter
from .records import Capsule, refuse
from .streams import ready_on
from .tables import table_of

#: Names of DLPack device types that no backend reads, for messages.
DEVICES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI", 18: "Trainium"}


def is_host(kind: int) -> bool:
    """Whether the host reads memory of a DLPack device type."""
    return _core.backend_of_dlpack(kind) == "cpu"


def device_of(x: Exporter) -> tuple[int, int]:
    """The result of `__dlpack_device__` as two ints."""
    said = x.__dlpack_device__()
    try:
        kind, index = said
        return operator.index(kind), operator.index(index)
    except (TypeError, ValueError):
        refuse(TypeError, f"{named(x)}: __dlpack_device__(): expected (device type, device id), got {said!r:.80}")


def capsule_of(x: Exporter, writes: int, ready: _core.Stream | None = None) -> Capsule:
    """A DLPack capsule of x: first its device, then its memory."""
    kind, index = -1, 0
    backend: str | None = "cpu"
    how: dict[str, object] = {}
    if hasattr(type(x), "__dlpack_device__"):
        kind, index = device_of(x)
        backend = _core.backend_of_dlpack(kind)
        if backend is None:
            where = f"{DEVICES[kind]} device {index}" if kind in DEVICES else f"device ({kind}, {index})"
            refuse(BufferError, f"{named(x)} is on {where}; expected memory of the host or of a CUDA device")
        if backend != "cpu":
            handle = ready_on(x, index, ready)
            table = table_of(type(x))
            if table is not None:
                return Capsule(_core.table_take(table, x), kind, index, writes)
            how["stream"] = handle
    try:
        capsule = x.__dlpack__(max_version=(1, 3), **how)
    except TypeError as e:
        # Older producers lack the keyword. A TypeError from inside the call is theirs.
        if e.__traceback__ is not None and e.__traceback__.tb_next is not None:
            raise
        capsule = x.__dlpack__(**how)
    return Capsule(capsule, kind, index if backend != "cpu" else 0, writes)
