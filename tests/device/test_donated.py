"""The simulated device names each use of memory that was donated to a buffer, with both places."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from kit import hooks

pytestmark = pytest.mark.core

N = 8


@pytest.fixture
def m() -> Iterator[Machine]:
    with Machine(1) as machine:
        yield machine


def nothing(*_: Any) -> None:
    pass


def line() -> int:
    """The caller's line."""
    frame = inspect.currentframe()
    assert frame and frame.f_back
    return frame.f_back.f_lineno


USES: dict[str, tuple[Callable[[Machine, Any, Any], object], str]] = {
    "kernel that writes": (lambda m, s, x: m.launch(s, nothing, writes=[x], name="mul"), "'mul' .*writes memory"),
    "kernel that reads": (lambda m, s, x: m.launch(s, nothing, reads=[x], name="mul"), "'mul' .*reads memory"),
    "view": (lambda m, s, x: m.launch(s, nothing, writes=[x[2:4]], name="mul"), "'mul' .*writes memory"),
    "read": (lambda m, s, x: x.numpy(), "the host .*reads memory"),
    "add": (lambda m, s, x: fanin.InputBuffer(1).add(0, x, stream=s), "the host .*reads memory"),
    "second donation": (lambda m, s, x: fanin.InputBuffer(1).add(0, x, stream=s, donate=True), "the host .* memory"),
    "add_many": (lambda m, s, x: fanin.InputBuffer(1).add_many([0], [x], stream=s), "the host .*reads memory"),
    "sparse": (
        lambda m, s, x: fanin.InputBuffer(1).add(
            0, fanin.Sparse("coo", (m.array(np.arange(N).reshape(1, N), 0), x), (N,)), stream=s
        ),
        "the host .*reads memory",
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("many", [False, True])
def test_a_use_of_donated_memory_is_named_with_both_places(m: Machine, use: str, many: bool) -> None:
    s, x = m.stream(0), m.array(np.ones(N), 0)
    buf = fanin.InputBuffer(1)
    if many:
        buf.add_many([0], [x], stream=s, donate=True)
    else:
        buf.add(0, x, stream=s, donate=True)
    at = line() - (3 if many else 1)
    call, words = USES[use]
    with pytest.raises(fanin.RaceError, match=rf"{words} that was donated at test_donated\.py:{at} \(donate=True\)"):
        call(m, s, x)
    assert m.races == 1


def test_memory_that_the_sum_so_far_is_in_stays_donated(m: Machine) -> None:
    """A use after the sum is ordered as requested, and wrong all the same."""
    s, x = m.stream(0), m.array(np.ones(N), 0)
    with fanin.stream(s):
        buf = fanin.InputBuffer(1, budget=0)
        buf.add(0, x, stream=s, donate=True)
        buf.add(0, m.array(np.ones(N), 0), stream=s)
        assert buf.counters.in_place == 1
        with pytest.raises(fanin.RaceError, match="was donated"):
            m.launch(s, nothing, writes=[x])


def test_a_kernel_in_a_graph_is_judged_at_each_launch(m: Machine) -> None:
    s, x = m.stream(0), m.array(np.ones(N), 0)
    m.begin_capture(s)
    m.launch(s, nothing, writes=[x], name="mul")
    graph = m.end_capture(s)
    m.launch_graph(graph, s)
    buf = fanin.InputBuffer(1)
    buf.add(0, x, stream=s, donate=True)
    with pytest.raises(fanin.RaceError, match=r"'mul' .*writes memory that was donated"):
        m.launch_graph(graph, s)


def test_a_write_that_another_thread_makes_after_the_add_is_found_in_some_order() -> None:
    def scenario(m: Machine) -> Any:
        s, x = m.stream(0), m.array(np.ones(N), 0)
        buf = fanin.InputBuffer(1)
        writes = m.spawn(lambda: m.launch(s, nothing, writes=[x], name="late"))
        gives = m.spawn(lambda: buf.add(0, x, stream=s, donate=True))
        m.join()
        return writes, gives

    report = fanin.sim.explore(scenario)
    assert not report.ok and "'late'" in str(report) and "was donated" in str(report)


def test_an_add_by_another_thread_after_the_donation_is_found_in_some_order() -> None:
    def scenario(m: Machine) -> Any:
        s, x = m.stream(0), m.array(np.ones(N), 0)
        one, two = fanin.InputBuffer(1), fanin.InputBuffer(1)
        keeps = m.spawn(lambda: one.add(0, x, stream=s))
        gives = m.spawn(lambda: two.add(0, x, stream=s, donate=True))
        m.join()
        return keeps, gives

    report = fanin.sim.explore(scenario)
    assert not report.ok and "was donated" in str(report)


def sums(m: Machine, s: Any, x: Any, buf: Any) -> None:
    """A sum into the donated memory, which take() returns."""
    buf.add(0, m.array(np.ones(N), 0), stream=s)
    total = buf.take(slot=0)
    m.launch(s, nothing, writes=[total])
    assert total.numpy().tolist() == [2.0] * N


def handed_through(m: Machine, s: Any, x: Any, buf: Any) -> None:
    assert buf.take(slot=0) is x
    m.launch(s, nothing, writes=[x])


def read_by_snapshot(m: Machine, s: Any, x: Any, buf: Any) -> None:
    m.launch(s, nothing, reads=[buf[0]])


def beside(m: Machine, s: Any, x: Any, buf: Any) -> None:
    whole = m.array(np.ones(2 * N), 0)
    buf.add(0, whole[::2], stream=s, donate=True)
    m.launch(s, nothing, writes=[whole[1::2]])


def used_again(m: Machine, s: Any, x: Any, buf: Any) -> None:
    """Memory that was freed and allocated anew."""
    buf.add(0, m.array(np.ones(N), 0), stream=s, donate=True)
    buf.take()
    for _ in range(20):
        m.launch(s, nothing, writes=[m.array(np.ones(N), 0)])


def refused(m: Machine, s: Any, x: Any, buf: Any) -> None:
    y = m.array(np.ones(N + 1), 0)
    calls: tuple[Callable[[], object], ...] = (
        lambda: buf.add(0, y, stream=s, donate=True),
        lambda: buf.add_many([0, 0], [m.array(np.ones(N), 0), y], stream=s, donate=True),
    )
    for call in calls:
        with pytest.raises(ValueError, match="shape"):
            call()
    m.launch(s, nothing, writes=[y])


def summed_elsewhere(m: Machine, s: Any, x: Any, buf: Any) -> None:
    """The sum is wider, so that the donated memory has no part in it after take()."""
    y = m.array(np.ones(N, "float16"), 0)
    wide = fanin.InputBuffer([fanin.Slot(accumulate="float64")])
    for one in (y, m.array(np.ones(N, "float16"), 0)):
        wide.add(0, one, stream=s, donate=True)
    assert wide.take(slot=0) is not y
    m.launch(s, nothing, writes=[y])


def converted(m: Machine, s: Any, x: Any, buf: Any) -> None:
    """The slot keeps a conversion, so that the donated memory is free after the add."""
    narrow, rows = m.array(np.ones(N, "float32"), 0), m.array(np.ones((3, N)), 0)
    slots = fanin.InputBuffer([fanin.Slot((N,), dtype="float64")] * 2)
    slots.add(0, narrow, stream=s, donate=True)
    slots.add_many([0, 1], [rows, narrow], stream=s, donate=True)
    m.launch(s, nothing, writes=[narrow, rows])
    assert [total.numpy().tolist() for total in slots.take()] == [[4.0] * N, [1.0] * N]


def test_a_buffer_ends_its_own_donations_alone(m: Machine) -> None:
    """An array that another buffer holds as an alias comes back from that one, and stays donated."""
    s, x = m.stream(0), m.array(np.ones(N), 0)
    with fanin.stream(s):
        alias, owner = fanin.InputBuffer(1), fanin.InputBuffer(1)
        alias.add(0, x, stream=s)
        owner.add(0, x, stream=s, donate=True)
        assert alias.take(slot=0) is x
        with pytest.raises(fanin.RaceError, match="was donated"):
            m.launch(s, nothing, writes=[x])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("budget", [0, None])
def test_a_failed_fold_ends_a_donation_once(budget: Any, many: bool) -> None:
    """What is donated again after the failure stays donated when the poisoned slot is cleared."""
    poisoned = 0
    for fail in range(12):
        with Machine(1) as m:
            s, x = m.stream(0), m.array(np.ones(N), 0)
            failed, owner = fanin.InputBuffer(1, budget=budget), fanin.InputBuffer(1)
            with fanin.stream(s):
                failed.add(0, m.array(np.ones(N), 0), stream=m.stream(0))
                hooks.fail_call(m, fail)
                with contextlib.suppress(fanin.DeviceError):
                    if many:
                        failed.add_many([0, 0], [x, m.array(np.ones(N), 0)], stream=s, donate=True)
                    else:
                        failed.add(0, x, stream=s, donate=True)
                    failed.take()
                hooks.fail_call(m, -1)
                try:
                    owner.add(0, x, stream=s, donate=True)
                except fanin.RaceError:  # the slot has it until clear()
                    failed.clear()
                    owner.add(0, x, stream=s, donate=True)
                    poisoned += 1
                failed.clear()
                del failed
                with pytest.raises(fanin.RaceError, match="was donated"):
                    m.launch(s, nothing, writes=[x])
    assert 0 < poisoned < 12


def sparse(m: Machine) -> tuple[Any, Any]:
    return m.array(np.arange(N).reshape(1, N), 0), m.array(np.ones(N), 0)


def summed_sparse(m: Machine, s: Any, x: Any, buf: Any) -> None:
    """Sparse gradients are summed into new memory, and so each donated one is free after the fold."""
    one, two, eager = sparse(m), sparse(m), fanin.InputBuffer(1, budget=0)
    for parts in (one, two):
        eager.add(0, fanin.Sparse("coo", parts, (N,)), stream=s, donate=True)
    m.launch(s, nothing, writes=[*one, *two])


def cleared(m: Machine, s: Any, x: Any, buf: Any) -> None:
    buf.clear()
    m.launch(s, nothing, writes=[x])


def dropped(m: Machine, s: Any, x: Any, buf: Any) -> None:
    y, other = m.array(np.ones(N), 0), fanin.InputBuffer(1)
    other.add(0, y, stream=s, donate=True)
    del other
    m.launch(s, nothing, writes=[y])


def before(m: Machine, s: Any, x: Any, buf: Any) -> None:
    y = m.array(np.ones(N), 0)
    m.launch(s, nothing, writes=[y], name="before")
    buf.add(0, y, stream=s, donate=True)
    buf.take()


NO_USES = [
    sums,
    handed_through,
    read_by_snapshot,
    beside,
    used_again,
    refused,
    summed_elsewhere,
    converted,
    summed_sparse,
    cleared,
    dropped,
    before,
]


@pytest.mark.parametrize("use", NO_USES)
def test_accesses_that_do_not_use_donated_memory_are_not_reported(m: Machine, use: Callable[..., None]) -> None:
    s = m.stream(0)
    with fanin.stream(s):
        buf, x = fanin.InputBuffer(1), m.array(np.ones(N), 0)
        buf.add(0, x, stream=s, donate=True)
        use(m, s, x, buf)
    assert m.races == 0


def test_an_add_that_fails_at_one_array_of_a_gradient_donates_none_of_them(m: Machine) -> None:
    s, (indices, values) = m.stream(0), sparse(m)
    owner, buf = fanin.InputBuffer(1), fanin.InputBuffer(1)
    owner.add(0, indices, stream=s, donate=True)
    with pytest.raises(fanin.RaceError, match="was donated"):
        buf.add(0, fanin.Sparse("coo", (indices, values), (N,)), stream=s, donate=True)
    m.launch(s, nothing, writes=[values])
    assert m.races == 1
