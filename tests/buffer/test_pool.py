"""The memory of large results is kept for the next ones: no fresh pages, no aliases, bounded, and freed on
request.
"""

from __future__ import annotations

import math
import os
import threading

import numpy as np
import pytest

import fanin
from fanin import _core
from kit import hooks
from kit.prepared import run_prepared
from kit.support import sanitizer

pytestmark = pytest.mark.core

N = 3 << 18  #: elements of a float32 array of 3 MiB


def page(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0] >> 12


def terms(n: int = 2, value: float = 1.0) -> list[np.ndarray]:
    return [np.full(N, value + k, np.float32) for k in range(n)]


def hits_and_misses() -> tuple[int, int]:
    c = fanin.counters()
    return c.pool_hits, c.pool_misses


def test_a_large_result_is_memory_of_the_core_and_is_used_again() -> None:
    fanin.trim()
    a = terms()
    first = fanin.add_n(a)
    assert not first.flags.owndata
    assert first.base is not None
    at = page(first)
    hits, misses = hits_and_misses()
    view = first[5:]
    del first
    second = fanin.add_n(a)  # the view keeps the memory
    assert page(second) != at
    assert hits_and_misses() == (hits, misses + 1)
    del view
    third = fanin.add_n(a)
    assert page(third) == at
    assert hits_and_misses() == (hits + 1, misses + 1)
    assert np.array_equal(second, a[0] + a[1])
    assert np.array_equal(third, second)


def test_memory_of_results_of_a_buffer_is_recycled_too() -> None:
    fanin.trim()
    a = terms(3)
    buf = fanin.InputBuffer(2)
    for _ in range(2):
        hits, misses = hits_and_misses()
        for slot in range(2):
            for g in a:
                buf.add(slot, g)
        one, two = buf.take()
        assert page(one) != page(two)
        assert np.array_equal(one, two)
        del one, two
    assert hits_and_misses() == (hits + 2, misses)


def test_memory_of_a_referenced_result_is_never_reused() -> None:
    rng = np.random.default_rng(5)
    held: list[tuple[float, np.ndarray]] = []
    a = terms(2, 0.0)
    for k in range(60):
        a[0][:] = k
        held.append((k + 1.0, fanin.add_n(a)))
        while len(held) > rng.integers(1, 6):
            held.pop(int(rng.integers(len(held))))
        assert len({page(x) for _, x in held}) == len(held)
        for want, x in held:
            assert x[0] == x[-1] == want
            assert (x[:: N // 97] == want).all()


def test_the_pool_keeps_its_limit_and_trim_frees_all() -> None:
    fanin.trim()
    with fanin.set_options(pool_bytes=7 << 20):
        results = [fanin.add_n(terms()) for _ in range(4)]
        while results:
            results.pop()
            assert fanin.counters().pool_bytes <= 7 << 20
        kept = fanin.counters().pool_bytes
        assert kept >= 6 << 20
        assert fanin.trim() == kept
        assert fanin.counters().pool_bytes == 0
        assert fanin.trim() == 0
    with fanin.set_options(pool_bytes=0):
        hits = fanin.counters().pool_hits
        for _ in range(3):
            fanin.add_n(terms())
        assert fanin.counters().pool_bytes == 0
        assert fanin.counters().pool_hits == hits


def test_lowering_the_limit_frees_memory_at_once() -> None:
    fanin.trim()
    for x in [fanin.add_n(terms()) for _ in range(3)]:
        del x
    assert fanin.counters().pool_bytes >= 6 << 20
    with fanin.set_options(pool_bytes=1000):
        assert fanin.counters().pool_bytes == 0


@pytest.mark.parametrize("wrong", [-1, -1.0, 0.5, math.nan, -math.inf, -(10**400)])
def test_a_limit_that_is_none_is_refused(wrong: float) -> None:
    before = _core.get_options()
    with pytest.raises(ValueError, match="pool_bytes: expected a non-negative whole number of bytes"):
        fanin.set_options(pool_bytes=wrong)
    assert _core.get_options() == before


@pytest.mark.parametrize("wrong", ["1", True, [1], 1j])
def test_a_limit_that_is_no_number_is_refused(wrong: object) -> None:
    before = _core.get_options()
    with pytest.raises(TypeError, match="pool_bytes: expected a number of bytes"):
        fanin.set_options(pool_bytes=wrong, budget=5)  # type: ignore[arg-type]
    assert _core.get_options() == before


def test_limits_are_returned_as_they_were_set() -> None:
    for limit in (0, 12345, 2**40, math.inf):
        with fanin.set_options(pool_bytes=limit):
            assert _core.get_options()["pool_bytes"] == limit
    with fanin.set_options(pool_bytes=10**400):
        assert _core.get_options()["pool_bytes"] == math.inf


FAULTS = """
import resource, sys
import numpy as np
import fanin

fanin.set_options(pool_bytes=int(sys.argv[1]))
n = 3 << 18
a = [np.ones(n, np.float32) for _ in range(3)]

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        fanin.add_n(a)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults(2)
print(first, faults(20), fanin.counters().pool_hits)
"""


def test_a_second_large_sum_faults_no_fresh_pages() -> None:
    if sanitizer():
        pytest.skip("a sanitizer's shadow memory has faults of its own")
    pages = 3 * (1 << 20) // os.sysconf("SC_PAGESIZE")
    kept = [int(x) for x in run_prepared(FAULTS, str(64 << 20)).stdout.split()]
    fresh = [int(x) for x in run_prepared(FAULTS, "0").stdout.split()]
    assert kept[2] == 21
    assert fresh[2] == 0
    assert kept[1] < pages // 4, "20 recycled results together"
    if fresh[1] < 20 * pages // 2:
        pytest.skip("this system backs 3 MiB with huge pages: faults tell nothing")


def test_memory_comes_back_to_the_system() -> None:
    code = """
import fanin, numpy as np
def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
a = [np.ones(4 << 20, np.float32)] * 2
fanin.set_options(pool_bytes=1 << 30)
results = [fanin.add_n(a) for _ in range(4)]
full = resident()
del results
assert resident() > full - (8 << 20)
assert fanin.trim() >= 64 << 20
assert resident() < full - (56 << 20), (resident(), full)
"""
    if sanitizer() or not os.path.exists("/proc/self/statm"):
        pytest.skip("asks /proc how much memory a plain process has")
    run_prepared(code)


@pytest.mark.threads
def test_threads_recycle_without_meeting() -> None:
    wrong: list[str] = []

    def work(me: int) -> None:
        a = terms(2, float(me))
        mine = []
        for k in range(12):
            mine.append(fanin.add_n(a))
            if k % 3 == 2:
                if any((x[::4099] != 2 * me + 1).any() for x in mine):
                    wrong.append(f"thread {me}, round {k}")
                mine.clear()
            if k % 5 == me % 5:
                fanin.trim()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_forked_child_recycles_what_its_parent_held() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    run_prepared("""
import os
import numpy as np
import fanin
a = [np.ones(3 << 18, np.float32)] * 2
fanin.add_n(a)
kept, hits = fanin.counters().pool_bytes, fanin.counters().pool_hits
assert kept
mine = fanin.add_n(a)
child = os.fork()
if child == 0:
    a[0][:] = 5
    x = fanin.add_n(a)
    del x
    x = fanin.add_n(a)
    ok = (x == 10).all() and (mine == 2).all() and fanin.counters().pool_hits > hits
    del x
    os._exit(0 if ok and fanin.trim() else 1)
assert os.waitpid(child, 0)[1] == 0
assert (mine == 2).all()
""")


def test_a_refused_allocation_leaves_the_pool_as_it_was() -> None:
    fanin.trim()
    a = terms()
    fanin.add_n(a)
    kept = fanin.counters().pool_bytes
    assert kept
    for skip in range(40):
        hooks.fail_at(skip)
        try:
            x = fanin.add_n(a)
        except MemoryError:
            continue
        finally:
            hooks.fail_at(-1)
        del x
        break
    assert skip > 1
    assert fanin.counters().pool_bytes == kept
    assert np.array_equal(fanin.add_n(a), a[0] + a[1])
