"""Two producer threads, on one slot and on many, beside a lock and +=.

A pass is so many adds by each of two threads, and the sums. Each thread is there before the pass and waits for its
start. Of every pass the sums are checked: nothing is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

import fanin

from .common import size_text
from .timing import Result, at_least, cores, measure, pinned


class Pair:
    """Two threads that do the same work once for each call."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.over, self.gate = work, False, threading.Barrier(3)
        for _ in range(2):
            threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            self.gate.wait()
            if self.over:
                return
            try:
                self.work()
            except BaseException:
                self.gate.abort()  # the pass fails instead of waiting for ever
                raise
            self.gate.wait()

    def __call__(self) -> None:
        self.gate.wait()
        self.gate.wait()

    def end(self) -> None:
        self.over = True
        self.gate.wait()


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Order = list[tuple[int, Floats]]  # of slots and gradients


def under_one_lock(order: Order, sums: dict[int, Floats]) -> Callable[[], None]:
    lock = threading.Lock()

    def fill() -> None:
        for k, g in order:
            with lock:
                if k in sums:
                    sums[k] += g
                else:
                    sums[k] = g.copy()

    return fill


def under_a_lock_each(order: Order, sums: dict[int, Floats], slots: int) -> Callable[[], None]:
    locks = [threading.Lock() for _ in range(slots)]

    def fill() -> None:
        for k, g in order:
            with locks[k]:
                if k in sums:
                    sums[k] += g
                else:
                    sums[k] = g.copy()

    return fill


def into_buffer(order: Order, buf: fanin.InputBuffer) -> Callable[[], None]:
    def fill() -> None:
        for k, g in order:
            buf.add(k, g)

    return fill


def one(slots: int, size: int, adds: int, where: str, quick: bool) -> Result:
    """us for each pass."""
    gradients = [np.ones(size // 4, "f4") for _ in range(64)]
    order = [(k % slots, gradients[k % 61]) for k in range(adds)]
    buf = fanin.InputBuffer(slots, budget=float("inf") if size * adds < 1 << 28 else None)
    sums: dict[int, Floats] = {}
    pairs = [
        Pair(into_buffer(order, buf)),
        Pair(under_one_lock(order, sums)),
        Pair(under_a_lock_each(order, sums, slots)),
    ]

    def through() -> None:
        pairs[0]()
        checked(buf.take())

    def locked(pair: Pair) -> Callable[[], None]:
        def pass_() -> None:
            sums.clear()
            pair()
            checked([sums[k] for k in range(slots)])

        return pass_

    def checked(every: list[Floats]) -> None:
        if sum(float(x[0]) for x in every) != 2 * adds:
            raise AssertionError("a gradient was lost")

    work = {
        "a lock and +=": locked(pairs[1]),
        "a lock for each slot and +=": locked(pairs[2]),
        "buf.add, buf.take": through,
    }
    names = ("a lock and +=", "a lock for each slot and +=")
    one = measure(
        f"two threads, {adds} adds each of {size_text(size)} to {slots} slot{'s' * (slots > 1)}, cores {where}",
        work,
        base=names[0],
        unit="us",
        targets=[at_least(3, "buf.add, buf.take", *names)],
        rounds=2 if quick else 25,
    )
    for pair in pairs:
        pair.end()
    return one


def results(quick: bool) -> Iterator[Result]:
    """Small and larger gradients."""
    with pinned(min(2, len(cores()))) as where:
        for slots in (1, 64):
            yield one(slots, 64, 64 if quick else 20_000, where, quick)
            yield one(slots, 64 << 10, 64 if quick else 1000, where, quick)
