"""A forked child: what was made before the fork may be used there, unless another thread was in it; then the child
gets an error, and does not wait for ever.
"""

from __future__ import annotations

import sys

import pytest

from kit.prepared import run_prepared

pytestmark = [pytest.mark.core, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork")]

HEAD = """
import gc, os, sys, threading, warnings
import numpy as np
import fanin

warnings.simplefilter("ignore", DeprecationWarning)  # Python's own on a fork with threads
inside, go = threading.Event(), threading.Event()

def child(f):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            f()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(buf):
    calls = {
        "add": lambda: buf.add(1, 1.5),
        "strided": lambda: buf.add(1, np.ones(2)[::-1]),
        "add_many": lambda: buf.add_many([1, 1], [1.5, 2.5]),
        "take": buf.take, "snapshot": lambda: buf[0],
        "ready": lambda: buf.ready(0), "explain": lambda: buf.explain(0),
        "expect": lambda: buf.expect(0, 3), "out": lambda: buf.take(out=[None] * len(buf)),
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as e:
            assert "another thread was in this buffer when the process was forked" in str(e), (name, e)
            assert str(e).startswith("grads: "), (name, e)
        else:
            raise AssertionError(name + " was not refused")

def usable(buf):
    for _ in range(2):
        buf.add(0, np.ones(2)); buf.add(0, np.ones(2)); buf.add(1, 1.5); buf.add(1, 2.5)
        two, four = buf.take()
        assert two.tolist() == [2, 2] and four == 4, (two, four)
"""
#: Children of a fork use the buffer while another thread is in it; then that thread continues.
CHILDREN = """
def drops_it():
    global buf
    other = buf
    del buf, other
    gc.collect()

assert child(in_child) == 0
assert child(drops_it) == 0
assert child(lambda: usable(fanin.InputBuffer(2))) == 0
go.set()
thread.join()
"""


@pytest.mark.parametrize("where", ["combine", "take", "add_many"])
def test_a_child_of_a_fork_while_another_thread_was_in_the_buffer_gets_an_error(where: str) -> None:
    code = (
        HEAD
        + f"where = {where!r}\n"
        + """
def combine(old, new):
    inside.set()
    go.wait()
    return old + new

slots = [fanin.Slot(combine=combine), fanin.Slot()]
buf = fanin.InputBuffer(slots, name="grads", budget=None if where == "take" else 0)

def enter():
    buf.add(0, "a") if where != "add_many" else buf.add_many([0, 1], ["a", 1.0])
    buf.add(0, "b") if where != "add_many" else buf.add_many([0, 1], ["b", 1.0])
    buf.take()

def also():
    buf.take()  # waits for the slot: nobody may wait for this one either

thread = threading.Thread(target=enter)
thread.start()
inside.wait()
waits = threading.Thread(target=also)
waits.start()

def in_child():
    refused(buf)
    gc.collect()
    buf.clear()
    go.set()
    buf.add(0, "x"); buf.add(0, "y"); buf.add(1, 4.0)
    assert buf.take() == ["xy", 4.0]

"""
        + CHILDREN
        + """
waits.join()
buf.take()
buf.add(1, 3.0)
assert buf.take()[1] == 3.0
print("done")
"""
    )
    assert run_prepared(code).stdout.strip() == "done"


def test_a_child_of_a_fork_while_no_thread_was_in_the_buffer_can_use_it() -> None:
    code = (
        HEAD
        + """
bufs = [fanin.InputBuffer(2, budget=b, stats=s) for b in (0, None) for s in (False, True)]
idle = threading.Thread(target=go.wait)
idle.start()
for buf in bufs:
    usable(buf)
    buf.add(0, np.ones(2))
    buf.add(1, 1.5)

def in_child():
    for buf in bufs:
        buf.add(0, np.ones(2))
        assert buf[0].tolist() == [2, 2]
        assert buf.take()[0].tolist() == [2, 2]
        usable(buf)
    grandchild = child(lambda: [usable(b) for b in bufs])
    assert grandchild == 0

assert child(in_child) == 0
for buf in bufs:
    assert buf.take()[0].tolist() == [1, 1]
    usable(buf)
go.set()
idle.join()
print("done")
"""
    )
    assert run_prepared(code).stdout.strip() == "done"


def test_a_thread_that_forks_within_its_own_sum_continues_in_the_child() -> None:
    code = (
        HEAD
        + """
answers = []

def combine(old, new):
    pid = os.fork()
    answers.append(pid)
    return old + new

buf = fanin.InputBuffer([fanin.Slot(combine=combine), fanin.Slot()], name="grads")
buf.add(0, "a")
buf.add(0, "b")
assert buf.take() == ["ab", None]
buf.add(1, 2.0)
assert buf.take() == [None, 2.0]
if answers == [0]:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(answers[0], 0)[1]) == 7
print("done")
"""
    )
    assert run_prepared(code).stdout.strip() == "done"


HOLD = """
def hold():
    with buf.target(0) as out:
        out += 1
        inside.set()
        go.wait()
        out += 2

thread = threading.Thread(target=hold)
thread.start()
inside.wait()
"""
ON = (
    CHILDREN
    + """
assert buf.take()[0].tolist() == [5, 5]
print("done")
"""
)


def test_a_child_of_a_fork_while_another_thread_adds_into_the_sum_by_a_target_gets_an_error() -> None:
    """The target is the slot's own sum: the child cannot find out how far the thread has written it."""
    code = (
        HEAD
        + """
buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float64"), fanin.Slot()], name="grads", budget=0)
for _ in range(2):
    buf.add(0, np.ones(2)[::-1])

def in_child():
    refused(buf)
    try:
        with buf.target(0):
            raise AssertionError("a second target was given")
    except RuntimeError as e:
        assert "another thread was in this buffer when the process was forked" in str(e), e
    gc.collect()
    buf.clear()
    with buf.target(0) as out:
        out += 5
    buf.add(1, 4.0)
    five, four = buf.take()
    assert five.tolist() == [5, 5] and four == 4, (five, four)
"""
        + HOLD
        + ON
    )
    assert run_prepared(code).stdout.strip() == "done"


def test_a_child_of_a_fork_while_another_thread_has_a_separate_target_continues_without_it() -> None:
    """The target is memory of its own, and comes to the slot at its end: there is none in the child."""
    code = (
        HEAD
        + """
buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float64"), fanin.Slot()], name="grads")
buf.add(0, np.full(2, 2.0))

def in_child():
    buf.add(0, np.ones(2))
    assert buf.take()[0].tolist() == [3, 3]
    usable(buf)
"""
        + HOLD
        + ON
    )
    assert run_prepared(code).stdout.strip() == "done"


def test_a_child_of_a_fork_within_a_target_of_its_own_thread_can_use_it() -> None:
    code = (
        HEAD
        + """
buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float64")], name="grads")
buf.add(0, np.ones(2))
with buf.target(0) as out:
    out += 1
    pid = os.fork()
    out += 2
total = buf.take()[0].tolist()
assert total == [4, 4], total
if pid == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("done")
"""
    )
    assert run_prepared(code).stdout.strip() == "done"


def test_a_function_of_a_graph_tree_that_forks_continues_in_the_child_with_its_threads() -> None:
    """A thread of the child that comes while the function runs waits for it, as it would in the parent."""
    code = (
        HEAD
        + """
from kit.at import until_at

tree = fanin.GraphTree("cpu")
x, pids, others, results = np.ones(3), [], [], []

@tree.function
def doubled(x):
    return np.multiply(x, 2)

def other():
    inside.set()
    bytes_ = tree.stats.bytes
    with tree.step():
        results.append((bytes_ >= 0, doubled(x).numpy().tolist()))

@tree.function
def forks(x):
    if not pids:
        pids.append(os.fork())
        if pids == [0]:
            others.append(threading.Thread(target=other))
            others[0].start()
            inside.wait()
            until_at(others[0], "bytes_ = tree.stats.bytes")
            assert others[0].is_alive() and not results
    return np.add(x, 1)

for _ in range(3):
    with tree.step():
        assert forks(x).numpy().tolist() == [2.0] * 3
for t in others:
    t.join()
    assert results == [(True, [2.0] * 3)], results
if pids == [0]:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
print("done")
"""
    )
    assert run_prepared(code).stdout.strip() == "done"
