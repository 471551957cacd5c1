"""Several threads and one buffer: nothing is lost, nothing is counted twice, bits stay what they are."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = [pytest.mark.core, pytest.mark.threads]


def run(*workers: Any) -> None:
    """Starts all at once, and raises what any of them raised."""
    start, errors = threading.Barrier(len(workers)), []

    def work(fn: Any) -> None:
        start.wait()
        try:
            fn()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(fn,)) for fn in workers]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.rule("A15", "A16")
@pytest.mark.parametrize("slots", [1, 64])
@pytest.mark.parametrize("budget", [0, 1000, None])
def test_two_threads_add_a_hundred_thousand_times_and_the_sum_is_exact(slots: int, budget: Any) -> None:
    n = 100_000 if budget is None and not fanin.info()["build"].startswith(("address", "thread")) else 5_000
    buf = fanin.InputBuffer(slots, budget=budget)

    def producer(first: int) -> None:
        one = np.full(2, first, np.int64)
        for i in range(n):
            buf.add(i % slots, one)

    run(lambda: producer(1), lambda: producer(1 << 32))
    total = sum(int(x[0]) for x in buf.take())
    assert total == n * (1 + (1 << 32))
    assert buf.counters.adds == 2 * n


@pytest.mark.rule("A15")
def test_keyed_sums_have_the_same_bits_for_every_order_of_threads() -> None:
    rng = np.random.default_rng(0)
    terms = [rng.standard_normal(300).astype(np.float32) * 10.0 ** float(rng.integers(-6, 6)) for _ in range(32)]
    expected = np.zeros(0)
    for i, x in enumerate(terms):
        expected = x.copy() if i == 0 else expected + x
    for round_ in range(20):
        buf = fanin.InputBuffer(1, budget=[0, 5_000, None][round_ % 3])

        def producer(keys: Any, buf: fanin.InputBuffer = buf) -> None:
            for k in keys:
                buf.add(0, terms[k], key=k)

        order = rng.permutation(32).tolist()
        halves = order[:16], order[16:]
        run(functools.partial(producer, halves[0]), functools.partial(producer, halves[1]))
        assert buf.take()[0].tobytes() == expected.tobytes()


@pytest.mark.rule("A16")
def test_of_two_threads_with_one_key_exactly_one_wins() -> None:
    for _ in range(200):
        buf, refused = fanin.InputBuffer(1), []

        def producer(buf: fanin.InputBuffer = buf, refused: list[str] = refused) -> None:
            try:
                buf.add(0, np.ones(3), key=7)
            except ValueError as e:
                refused.append(str(e))

        run(producer, producer)
        assert len(refused) == 1
        assert buf.take()[0].tolist() == [1, 1, 1]


def test_concurrent_takes_return_each_added_gradient_once() -> None:
    buf, n, taken = fanin.InputBuffer(3), 3_000, []
    done = threading.Event()

    def producer() -> None:
        for i in range(n):
            buf.add(i % 3, np.ones(1, np.int64))

    def consumer() -> None:
        while not done.is_set():
            taken.extend(int(x[0]) for x in buf.take() if x is not None)

    def both() -> None:
        run(producer, producer)
        done.set()

    run(both, consumer, consumer)
    taken.extend(int(x[0]) for x in buf.take() if x is not None)
    assert sum(taken) == 2 * n


def test_a_combine_that_calls_back_into_its_own_slot_gets_an_error() -> None:
    refusals: list[str] = []

    def combine(old: Any, new: Any) -> Any:
        for what in (buf.take, buf.clear, lambda: buf[0], lambda: buf.add(0, "late")):
            try:
                what()
            except RuntimeError as e:
                refusals.append(str(e))
        return old + new

    buf = fanin.InputBuffer([fanin.Slot(combine=combine)])
    buf.add(0, "a")
    buf.add(0, "b")
    assert buf.take() == ["ab"]
    assert len(refusals) == 4
    assert all("slot 0" in text for text in refusals)


def test_a_planted_lost_update_is_found() -> None:
    """The checks above must fail for a `+=` that reads, is interrupted, and writes."""
    total, both_have_read = {"n": 0}, threading.Barrier(2)

    def racy() -> None:
        seen = total["n"]
        both_have_read.wait()
        total["n"] = seen + 1

    run(racy, racy)
    assert total["n"] != 2
