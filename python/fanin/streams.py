"""Streams and devices by name, and what this build has.

    with fanin.stream(s):          # s is the current stream of its device, on this thread
        buf.add(0, gradient)       # so the producer's stream is s

A stream is a queue of a device; an event is a point in it. Both come from `fanin.sim.Machine`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _core
from ._version import __version__

__all__ = ["Event", "Info", "Stream", "current_stream", "devices", "info", "stream"]

Stream = _core.Stream
Event = _core.Event


@contextmanager
def stream(s: Stream) -> Iterator[Stream]:
    """Make `s` the current stream of its device, on this thread, until the block ends.

    Wherever a stream is missing (rules S4, S5, S11), the current one of the device is taken. TypeError for
    what is no stream.

    >>> import fanin
    >>> with fanin.sim.Machine() as m:
    ...     with fanin.stream(m.stream(device=1)) as s:
    ...         fanin.current_stream("sim:1") == s
    True
    """
    _core.stream_push(s)
    try:
        yield s
    finally:
        _core.stream_pop(s)


def current_stream(device: str) -> Stream | None:
    """The current stream of a device on this thread: the innermost `with fanin.stream(s)`, else its legacy default.

    None for devices without streams.

    >>> import fanin
    >>> print(fanin.current_stream("cpu"))
    None
    """
    return _core.current_stream(device)


def devices() -> list[str]:
    """The names of the devices at hand: the CPU, CUDA's, and those of the simulated machine entered on this thread.

    The first call looks for a CUDA driver; without one, or without a GPU, there is none: `info` says why.

    >>> import fanin
    >>> with fanin.sim.Machine(devices=2):
    ...     [name for name in fanin.devices() if not name.startswith("cuda")]
    ['cpu', 'sim:0', 'sim:1']
    """
    cuda = range(len(_core.cuda_info().get("devices", ())))
    return ["cpu", *(f"cuda:{i}" for i in cuda), *(f"sim:{i}" for i in range(_core.sim_devices()))]


def _cuda_words() -> str:
    """One line about the CUDA driver: what it has, or why there is none."""
    found = _core.cuda_info()
    if "why" in found:
        return f"built in, not to be used here: {found['why']}"
    version = f"CUDA {found['version'] // 1000}.{found['version'] % 1000 // 10}"
    words = [f"built in; driver {found['path']}, {version}"]
    words += [f"cuda:{i} is {name}" for i, name in enumerate(found["devices"])] or ["no device"]
    words += [f"without {name} (its driver has no {call})" for name, call in found["missing"].items()]
    return ", ".join(words)


class Info(dict[str, Any]):
    """What `info` found: a dict that prints one line for each entry."""

    def __str__(self) -> str:
        width = max(map(len, self))
        lines = []
        for key, value in self.items():
            if isinstance(value, dict):
                value = "; ".join(f"{name}: {words}" for name, words in value.items())
            lines.append(f"{key:<{width}}  {value}")
        return "\n".join(lines)

    __repr__ = __str__


def info() -> Info:
    """What is here, what was built in, and why something is missing.

    >>> import fanin
    >>> fanin.info()["fanin"] == fanin.__version__
    True
    """
    import numpy

    return Info(
        fanin=__version__,
        python=f"{platform.python_version()} ({sys.implementation.name})",
        platform=f"{platform.system()} {platform.machine()}",
        numpy=numpy.__version__,
        **_core.build_info(),
        sums=f"{_core.get_options()['isa']}, threads: {_core._test_team()[0]}",
        backends={
            "cpu": "built in",
            "sim": "built in: with fanin.sim.Machine(): ..",
            "cuda": _cuda_words(),
        },
        devices=", ".join(devices()),
        pool=f"{_core.pool()['pool_bytes']} bytes kept for large results, at most {_core.get_options()['pool_bytes']}",
    )
