"""Fork, exit, Ctrl-C, and what ends late: each in a process of its own."""

from __future__ import annotations

import sys

import pytest

from kit import hooks
from kit.prepared import run_prepared

COMMON = """
import gc, os, signal, sys, threading, warnings
import numpy as np
import fanin
from kit.at import until_at
"""


def test_a_forked_child_can_use_its_own_buffers_and_those_of_its_parent() -> None:
    done = run_prepared(
        COMMON
        + """
warnings.simplefilter("ignore", DeprecationWarning)
buf = fanin.InputBuffer(1)
buf.add(0, np.ones(3))
for _ in range(20):
    child = os.fork()
    if child == 0:
        buf.add(0, np.ones(3))
        ok = buf.take()[0].tolist() == [2, 2, 2] and fanin.add_n([1, 2]) == 3
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
buf.add(0, np.ones(3))
print(buf.take()[0].tolist())
"""
    )
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]"


@pytest.mark.parametrize(
    "ending",
    [
        "gc.unfreeze()",  # all that was imported is collected at the end, as where nothing was frozen
        "sys.exit(0)",
        "os._exit(0)",
        "keep.append(keep)",
        (
            "begun = threading.Event();"
            " adds = lambda: [(buf.add(0, np.ones(3)), begun.set()) for _ in range(10**9)];"
            " threading.Thread(target=adds, daemon=True).start(); begun.wait()"
        ),
        "m = fanin.sim.Machine(devices=1); x = m.array(np.ones(4)); m.launch(m.stream(), lambda r: None, reads=[x])",
        "m = fanin.sim.Machine(devices=1); m.spawn(lambda: None)",
        "import atexit; atexit.register(lambda: buf.take())",
    ],
)
def test_the_process_ends_well_with_work_pending(ending: str) -> None:
    done = run_prepared(
        COMMON
        + f"""
keep = []
buf = fanin.InputBuffer(2)
buf.add(0, np.ones(3)); buf.add(0, np.ones(3)); buf.add(1, np.ones(2))
keep.append((buf, memoryview(np.ones(3))))
{ending}
"""
    )
    assert done.returncode == 0
    assert "Fatal" not in done.stderr


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="memory is counted in development builds alone: FANIN_DEV=1")
def test_an_abandoned_pass_in_a_reference_cycle_is_freed() -> None:
    done = run_prepared(
        COMMON
        + """
import weakref
from fanin import _core
class Holder:
    pass
gc.collect(); baseline = _core._test_memory()[0]
for _ in range(100):
    h = Holder()
    h.buf = fanin.InputBuffer([fanin.Slot(combine=lambda a, b, h=h: a)])
    class Grad:
        def __init__(self, h): self.h = h
        def __add__(self, other): return self
    h.buf.add(0, Grad(h)); h.buf.add(0, Grad(h))
    gone = weakref.ref(h)
del h, Grad
gc.collect()
assert gone() is None
assert _core._test_memory()[0] == baseline, (_core._test_memory()[0], baseline)
print("freed")
"""
    )
    assert done.stdout.strip() == "freed"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_a_wait_for_a_busy_slot() -> None:
    """The thread in the slot continues only after that; a second one sends the signal once the main thread waits."""
    code = (
        COMMON
        + """
inside, leave = threading.Event(), threading.Event()
def combine(a, b):
    inside.set(); leave.wait(); return a
buf = fanin.InputBuffer([fanin.Slot(combine=combine)])
buf.add(0, "a"); buf.add(0, "b")
t = threading.Thread(target=buf.take, daemon=True); t.start()
inside.wait()
def interrupt():
    until_at(threading.main_thread(), "buf.take()")
    os.kill(os.getpid(), signal.SIGINT)
def take():
    buf.take()
other = threading.Thread(target=interrupt); other.start()
try:
    take()
except KeyboardInterrupt:
    print("interrupted", leave.is_set())
leave.set(); t.join(); other.join()
assert buf.take() == [None]
print("usable")
"""
    )
    assert run_prepared(code).stdout.split() == ["interrupted", "False", "usable"]
