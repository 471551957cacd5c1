"""Ctrl-C at any place of a call that records leaks nothing: no array locked, no recording on the thread."""

from __future__ import annotations

import math
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from kit.sample import sizes

pytestmark = pytest.mark.core
COUNTS = sizes(60, 5000)


class Interrupt(BaseException):
    """In the place of a KeyboardInterrupt, which would end the run of the tests."""


@contextmanager
def raising() -> Iterator[None]:
    def handle(*_: object) -> None:
        raise Interrupt

    # One that comes in a callback of the garbage collector is lost there; pytest's hook would keep it, and with it the
    # arrays of its frames.
    before, hook = signal.signal(signal.SIGALRM, handle), sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)


class Training:
    """A step of a parameter and its speed; each call records."""

    def __init__(self) -> None:
        self.w, self.speed = tape.parameter(np.full((3, 2), 0.5)), np.zeros((3, 2))

    def arrays(self) -> list[Any]:
        return [self.w.data, self.speed]

    def state(self) -> list[bytes]:
        return [x.tobytes() for x in (*self.arrays(), *([] if self.w.grad is None else [self.w.grad]))]


class InStep(Training):
    def __init__(self) -> None:
        super().__init__()
        self.step = tape.compiled(self.plain, static=[self.w, self.speed], memory=1 << 16)

    def call(self, x: Any) -> None:
        for _ in range(2):  # warmed up, recorded
            self.step(x)

    def plain(self, x: Any) -> Any:
        loss = tape.tanh(tape.array(x) @ self.w).sum()
        tape.backward(loss)
        tape.update(lambda g, w, v: np.subtract(w, g, out=w), [self.w.grad], [self.w, self.speed])
        self.w.grad = None
        return loss


class InTree(Training):
    def __init__(self) -> None:
        super().__init__()
        self.tree = fanin.GraphTree("cpu", memory=1 << 16)
        self.function = self.tree.function(self.plain, roles=("copy", "static", "static"))

    def plain(self, x: Any, w: Any, speed: Any) -> Any:
        p = tape.Var(w, tape.cpu)
        p.edge = fanin.Leaf(w), 0
        loss = tape.tanh(tape.Var(x, tape.cpu) @ p).sum()
        [g] = tape.grad(loss, [p])
        speed += g
        w -= speed
        return loss.data

    def call(self, x: Any) -> None:
        for _ in range(2):  # warmed up, recorded
            with self.tree.step():
                self.function(x, self.w.data, self.speed)


def run(make: Callable[[], Any], count: int) -> tuple[int, int]:
    rng, x = random.Random(7), np.ones((4, 3))
    interrupted = whole = 0
    usual = math.inf
    plain = InStep()
    after = [plain.state()]  # of a step as it is: after no call, one, two
    for _ in range(2):
        plain.plain(x)
        after.append(plain.state())
    for _ in range(5):
        start = time.perf_counter()
        make().call(x)
        usual = min(usual, time.perf_counter() - start)
    with raising():
        for i in range(50 * count):  # more where the machine is so busy that no alarm came within a call
            if i >= count and interrupted:
                break
            own = make()
            states = [own.state()] if make is InTree else after
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, rng.uniform(0, 1.2 * usual)))
                own.call(x)
                whole += 1
            except Interrupt:
                interrupted += 1
            finally:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:  # it came between the call and the end of the timer
                    interrupted += 1
            assert all(a.flags.writeable for a in own.arrays()), i
            assert (tape._here.back, tape._here.name) == (False, "kernel"), i
            assert not fanin._core.cpu_wants_handles(), i
            if make is InStep:
                assert all(type(a) is np.ndarray for a in own.arrays()), i
                assert own.state() in states, i
            for _ in range(3):
                own.call(x)
            assert all(np.isfinite(a).all() for a in own.arrays()), i
    return interrupted, whole


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("make", [InStep, InTree])
def test_an_interrupt_of_a_call_that_records_leaks_nothing(make: Callable[[], Any], count: int) -> None:
    interrupted, whole = run(make, count)
    print(f"{make.__name__}: {interrupted} calls were interrupted, {whole} were not")
    assert interrupted > 0
