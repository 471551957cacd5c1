"""Buffers whose gradients and sums are on "cuda:0", of the fake driver or of a GPU, with ndarrays outside: for the
suite fanin.conformance.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fanin
from fake_cuda import FakeDriver, use_driver
from fanin import _core
from kit.world import Driver

used: list[Any] = []  # to the end of the process


@functools.cache
def device(real: bool) -> Any:
    """The one device of this process."""
    driver = None if real else FakeDriver(1)
    used.append(use_driver(driver))
    used[0].__enter__()
    return Driver() if real else driver


class CudaBuffer:
    """fanin.InputBuffer, copying to the device and back; each add comes from a stream of its own."""

    real = False

    def __init__(self, slots: int) -> None:
        self.driver = device(self.real)
        self.consumer = self.driver.stream()
        self.buffer = fanin.InputBuffer(slots, stream=self.consumer)
        self.sent: list[tuple[Any, Any]] = []

    def add(self, slot: int, gradient: Any, *, key: int | None = None) -> None:
        if isinstance(gradient, np.ndarray):
            self.sent.append((_core.device_array("cuda:0", gradient, False), gradient))
            gradient = self.sent[-1][0]
        self.buffer.add(slot, gradient, key=key, stream=self.driver.stream())

    def back(self, x: Any) -> Any:
        """The ndarray that was added, where x is the very array that was made of it; else x's values."""
        return (
            next((sent for on, sent in self.sent if on is x), None)
            if any(on is x for on, _ in self.sent)
            else x.numpy()
        )

    def expect(self, slot: int, n: int) -> None:
        self.buffer.expect(slot, n)

    def ready(self, slot: int) -> bool:
        return self.buffer.ready(slot)

    def clear(self) -> None:
        self.buffer.clear()

    def take(self) -> list[Any]:
        with fanin.stream(self.consumer):
            made = [x if x is None else self.back(x) for x in self.buffer.take()]
        self.sent.clear()
        assert self.driver.races == 0, self.driver.race
        return made


class GpuBuffer(CudaBuffer):
    """The same on a GPU."""

    real = True
