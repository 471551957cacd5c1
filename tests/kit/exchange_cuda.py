"""Stand-ins of GPU libraries by name, for the tests of exchange on the fake driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import fanin
from fanin import _core
from fanin._interop import torch
from fanin._interop.classes import TABLE, TORCH
from kit import standins
from kit.standins import DLArray, InterfaceArray, Library, installed, table_array


@contextlib.contextmanager
def torch_like(library: Library, table: bool) -> Iterator[type[Any]]:
    """torch's class: its table is registered with the core, and removed at the end."""
    with installed("torch", standins.torch(library, table=table)) as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "quicken", lambda: None)
        if _core.table_known(getattr(module.Tensor, TABLE, None), TORCH):
            _core.read_by_table(module.Tensor, TORCH, True)
        try:
            yield module.Tensor
        finally:
            _core.table_known(None, TORCH)
            _core.read_by_table(module.Tensor, -1, False)


@contextlib.contextmanager
def like(name: str, library: Library) -> Iterator[type[Any]]:
    """The class of arrays of a library of this name."""
    if name == "dlpack":
        yield DLArray
    elif name == "legacy":
        yield standins.LegacyArray
    elif name == "table":
        yield table_array(library)
    elif name.startswith("torch"):
        with torch_like(library, name == "torch") as made:
            yield made
    elif name == "cupy":
        with installed("cupy", standins.cupy(library)) as module:
            yield module.ndarray
    else:
        with installed("numba", standins.numba(library)) as module, fanin.set_options(raw_addresses=True):
            yield module.DeviceNDArray


def ready_on(x: Any, s: fanin.Stream) -> None:
    """Numba's arrays name the stream on which they are ready."""
    if isinstance(x, InterfaceArray):
        x.ready = s.handle


def values(x: Any, s: fanin.Stream) -> Any:
    """What is read on `s`, of a library's array or of ours."""
    if isinstance(x, standins.Array):
        return x.read(s)
    with fanin.stream(s):
        return x.numpy().tolist()
