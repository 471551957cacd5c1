"""Ctrl-C: long work on the host ends where it is, and the buffer is as it was."""

from __future__ import annotations

import sys

import pytest

from kit.prepared import run_prepared

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

#: 2^50 elements in eight bytes: what reads them all does not end.
COMMON = r"""
import os
import signal
import sys
import threading
import numpy as np
import fanin

def huge(*shape, dtype=np.float64):
    return np.broadcast_to(np.ones((1,) * len(shape), dtype), shape)

def csr(shape, values, indices, pointers):
    import scipy.sparse
    m = scipy.sparse.csr_array(shape)
    m.data, m.indices, m.indptr = values, indices, pointers
    return m

inside = 0
def hear(signum, frame):
    # One may be heard where the lambda begins; the second is heard by the call that it makes.
    global inside
    # In a function of the package, or a cached property of it, that the lambda calls.
    while frame is not None and any(name in frame.f_code.co_filename for name in ("fanin", "functools")):
        frame = frame.f_back
    inside += frame is not None and frame.f_code.co_name == "<lambda>"
    if inside == 2:
        inside = 0
        raise KeyboardInterrupt

# What Ctrl-C does, at every 5 ms of the process's own time: a signal whose handler raises. One that another process
# sent in answer to the last could come while that is still heard, each time, a thousand deep.
signal.signal(signal.SIGPROF, hear)
signal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)

def interrupted(work):
    try:
        work()
    except KeyboardInterrupt:
        return
    raise AssertionError("it ended by itself")

def interrupted_by_another(work):
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = threading.Event()
    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
    other = threading.Thread(target=interrupt)
    other.start()
    def held():
        sys.setswitchinterval(1000)  # from here on it runs where the interpreter is left to it
        begun.set()
        work()
    interrupted(held)
    sys.setswitchinterval(0.005)
    other.join()

small = np.arange(4.0)
N = 1 << 50
"""

#: It hashes twice.
HASH_OF_A_TAKE = "a hash of a take"

CASES = {
    "which of many arrays share memory": """
flat = np.zeros(100_000, "i1")
views = [flat[i % 2 :: 2 * (50 + i % 15_000)] for i in range(15_000)]
interrupted(lambda: fanin.sharing.overlaps(views, budget=float("inf")))
few = fanin.sharing.overlaps(views[:1000])
assert few.exact and len(few.components) == 2
m = np.zeros((2, 40_000), "i1")
pieces = [m[0, i % 997 * 2 + 1 :: 2] for i in range(20_000)]
found = fanin.sharing.overlaps([m[:, i] for i in range(0, 40_000, 2)] + pieces)
interrupted(lambda: found.pairs)
assert found.exact
""",
    "a sum over axes": """
buf = fanin.InputBuffer([fanin.Slot(shape=(4,))])
buf.add(0, small)
g = huge(N >> 2, 4)
interrupted(lambda: buf.add(0, g))
assert buf.take()[0].tolist() == small.tolist()
""",
    "a sum to one number": """
buf = fanin.InputBuffer([fanin.Slot(shape=())])
g = huge(N)
interrupted(lambda: buf.add(0, g))
assert buf.take() == [None]
""",
    "an exact sum over axes": """
buf = fanin.InputBuffer([fanin.Slot(shape=(4,), accumulate="exact")])
buf.add(0, small)
g = huge(N >> 2, 4, dtype=np.float32)
interrupted(lambda: buf.add(0, g))
assert buf.take()[0].tolist() == small.tolist()
""",
    "a hash": """
fanin.set_options(debug=True)
buf = fanin.InputBuffer(1)
g = huge(N >> 25, 1 << 25)
interrupted(lambda: buf.add(0, g))
buf.add(0, small)
assert buf.take()[0].tolist() == small.tolist()
""",
    "statistics": """
buf = fanin.InputBuffer(1, stats=True)
g = huge(N >> 25, 1 << 25)
buf.add(0, g)
interrupted(lambda: buf.take())
interrupted(lambda: buf.take())
assert "1 parked" in repr(buf), repr(buf)
""",
    "statistics, by another thread": """
buf = fanin.InputBuffer(1, stats=True)
buf.add(0, huge(N))
interrupted_by_another(lambda: buf.take())
assert "1 parked" in repr(buf), repr(buf)
""",
    "a hash, by another thread": """
fanin.set_options(debug=True)
buf = fanin.InputBuffer(1)
g = huge(N)
interrupted_by_another(lambda: buf.add(0, g))
assert buf.take() == [None]
""",
    HASH_OF_A_TAKE: """
fanin.set_options(debug=True)
buf = fanin.InputBuffer(1)
g = huge(1 << 28)  # 2 GiB to hash: longer than twice the time between two looks, on any machine
signal.setitimer(signal.ITIMER_PROF, 0)
buf.add(0, g)
signal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)
interrupted(lambda: buf.take())
signal.setitimer(signal.ITIMER_PROF, 0)
assert "1 parked" in repr(buf), repr(buf)
fanin.set_options(debug=False)
assert buf.take()[0] is g
""",
    "an add_many": """
buf = fanin.InputBuffer([fanin.Slot(), fanin.Slot(shape=(4,))])
g = [small, huge(N >> 2, 4)]
interrupted(lambda: buf.add_many([0, 1], g))
buf.add(1, small)
assert buf.take()[0] is None
""",
    "the indices of a CSR gradient": """
buf = fanin.InputBuffer(1)
g = csr((3, 3), huge(N), np.broadcast_to(np.zeros(1, np.int64), (N,)), np.array([0, N, N, N]))
interrupted(lambda: buf.add(0, g))
assert buf.take() == [None]
""",
    "the pointers of a CSR gradient": """
buf = fanin.InputBuffer(1)
g = csr((1, 3), np.ones(0), np.zeros(0, np.int64), np.broadcast_to(np.zeros(1, np.int64), (N + 1,)))
g._shape = (N, 3)
interrupted(lambda: buf.add(0, g))
assert buf.take() == [None]
""",
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.full if what == HASH_OF_A_TAKE else ()) for what in CASES]
)
def test_ctrl_c_ends_long_work_and_nothing_is_lost(what: str) -> None:
    if "CSR" in what:
        pytest.importorskip("scipy")
    code = COMMON + CASES[what] + 'signal.setitimer(signal.ITIMER_PROF, 0)\nprint("usable", flush=True)\n'
    done = run_prepared(code, check=False)
    assert (done.returncode, done.stdout) == (0, "usable\n"), done.stderr
