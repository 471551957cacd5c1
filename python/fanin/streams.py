"""Streams and devices by name, and the features of this build.

    with fanin.stream(s):          # s is the current stream of its device, on this thread
        buf.add(0, gradient)       # so the producer's stream is s

A stream is a queue of a device; an event is a point in it. `fanin.sim.Machine` makes simulated ones. A CUDA stream is
an existing one: `fanin.Stream("cuda:0", handle)`, or a `torch.cuda.Stream`, a `cupy.cuda.Stream` or any object with
`__cuda_stream__`.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _core
from ._interop.protocols import StreamLike
from ._interop.streams import foreign
from ._version import __version__
from ._words import counted, type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["Event", "Info", "Stream", "current_stream", "devices", "info", "stream"]

Stream = _core.Stream
Event = _core.Event


@contextmanager
def stream(s: StreamLike) -> Iterator[Stream]:
    """Make `s` the current stream of its device, on this thread, until the block ends.

    A missing stream (rules S4, S5, S11) is the current one of the device: the innermost of these blocks, else the
    current stream of the library that owns the gradient, else the legacy default stream. TypeError if `s` is no stream.

    >>> import fanin
    >>> with fanin.sim.Machine() as m:
    ...     with fanin.stream(m.stream(device=1)) as s:
    ...         fanin.current_stream("sim:1") == s
    True
    """
    ours = s if type(s) is Stream else foreign(s)
    _core.stream_push(ours)
    try:
        yield ours
    finally:
        _core.stream_pop(ours)


def current_stream(device: str) -> Stream | None:
    """Return the current stream of a device on this thread: the innermost `with fanin.stream(s)`, else the legacy
    default.

    For a gradient that another library owns, that library's current stream comes before the legacy default. A device
    without streams has None.

    >>> import fanin
    >>> print(fanin.current_stream("cpu"))
    None
    """
    if not isinstance(device, str):
        raise TypeError(f'current_stream: expected a device\'s name, as in "cpu" or "sim:0", got {type_of(device)}')
    return _core.current_stream(device)


def devices() -> list[str]:
    """Return the names of the available devices: the CPU, CUDA's, and those of the simulated machine entered on this
    thread.

    The first call opens the CUDA driver; `info` explains why there are no CUDA devices.

    >>> import fanin
    >>> with fanin.sim.Machine(devices=2):
    ...     [name for name in fanin.devices() if not name.startswith("cuda")]
    ['cpu', 'sim:0', 'sim:1']
    """
    return _core.devices()


class Info(dict[str, Any]):
    """The result of `info`: a dict of data, ready for JSON, that prints as a table.

    The table is as wide as `COLUMNS` or the terminal says, else 80 columns.
    """

    def __str__(self) -> str:
        from shutil import get_terminal_size
        from textwrap import TextWrapper

        cuda, kernels, pool = self["backends"]["cuda"], self["kernels"], self["pool"]
        if "why" in cuda:
            driver = [f"built in, not usable here: {cuda['why']}"]
        else:
            driver = [f"built in; driver {cuda['driver']}, CUDA {cuda['version']}"]
            driver += [f"cuda:{i} is {name}" for i, name in enumerate(cuda["devices"])] or ["no device"]
            driver += [f"without {name} (its driver has no {call})" for name, call in cuda["missing"].items()]
        made = f"{', '.join(kernels['machine_code'])} and PTX for {kernels['ptx']}, by nvcc {kernels['nvcc']}"
        if kernels["nvcc"] is None:
            made = "none built in: NVRTC or nvcc compiles them when a device is first used"
        limit = "any number" if pool["limit"] is None else pool["limit"]
        words = {
            **self,
            "python": f"{self['python']} ({self['implementation']})",
            "sums": f"{self['sums']['isa']}, {counted(self['sums']['threads'], 'thread')}",
            "backends": f"cpu: built in; sim: built in, with fanin.sim.Machine(): ..; cuda: {', '.join(driver)}",
            "kernels": "; ".join([made, *(f"{device} has {image}" for device, image in kernels["loaded"].items())]),
            "devices": ", ".join(self["devices"]),
            "pool": f"{pool['bytes']} bytes kept for large results, at most {limit}",
        }
        del words["implementation"]
        width = max(map(len, words))
        columns = max(get_terminal_size().columns, 2 * width)
        wrap = TextWrapper(columns, subsequent_indent=" " * (width + 2), break_on_hyphens=False, break_long_words=False)
        return "\n".join(wrap.fill(f"{key:<{width}}  {value}") for key, value in words.items())

    __repr__ = __str__


def info() -> Info:
    """Return the versions, features and devices of this installation, and why something is missing.

    `sums` has the instruction set and the threads of large sums. `backends` has `available` for each; CUDA's has its
    driver, devices and missing features, or `why` there is none. `kernels` has the images of the CUDA kernels in this
    build, and those that each device in use has `loaded`. `pool` has the bytes kept for large results, and the limit
    (None: none).

    >>> import fanin
    >>> fanin.info()["fanin"] == fanin.__version__, fanin.info()["backends"]["cpu"]
    (True, {'available': True})
    """
    import numpy

    limit, found = _core.get_options()["pool_bytes"], _core.cuda_info()
    machine_code, _, rest = _core.kernels_made().partition(" and PTX for ")
    ptx, _, nvcc = rest.partition(", by nvcc ")
    cuda: dict[str, object] = {"available": False, "why": found.get("why"), "code": found.get("code")}
    if "why" not in found:
        cuda = {
            "available": bool(found["devices"]),
            "driver": found["path"],
            "version": f"{found['version'] // 1000}.{found['version'] % 1000 // 10}",
            "devices": list(found["devices"]),
            "missing": dict(found["missing"]),
        }
    return Info(
        fanin=__version__,
        python=platform.python_version(),
        implementation=sys.implementation.name,
        platform=f"{platform.system()} {platform.machine()}",
        numpy=numpy.__version__,
        **_core.build_info(),
        sums={"isa": _core.get_options()["isa"], "threads": _core.workers()},
        backends={"cpu": {"available": True}, "sim": {"available": True}, "cuda": cuda},
        kernels={
            "machine_code": machine_code.split(", ") if machine_code else [],
            "ptx": ptx or None,
            "nvcc": nvcc or None,
            "loaded": dict(found.get("kernels", {})),
        },
        devices=devices(),
        pool={"bytes": _core.counters().pool_bytes, "limit": None if limit == math.inf else int(limit)},
    )
