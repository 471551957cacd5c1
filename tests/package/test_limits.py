"""No test has a limit in seconds: a busy machine reaches each of them. Only the runner ends a test that hangs.

The checker is tests/kit/limits.py; each kind of limit is planted here.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest

import fanin
import fanin.sim
from kit.limits import in_c, in_python, of_tree
from kit.support import ROOT

pytestmark = pytest.mark.tools

FOLDERS = ("tests", "python/fanin/testing", "python/fanin/conformance")

#: What is no limit that a busy machine can reach: file, the names around it, why. "" is the module, or all of a C file.
ALLOWED = {
    ("tests/kit/mutate.py", "pytest_in.limited"): "a mutant may loop: the limit is its verdict",
    ("tests/kit/mutate.py", "pytest_in"): "seconds count in which no thread of the mutant runs or is to run",
    ("tests/kit/mutate.py", "main"): "prints how long it took, and stops where its user gave minutes",
    ("tests/c/proof.c", ""): "a fault that is hunted may loop: the limit, of its own time, is its verdict",
    ("tests/buffer/test_interrupt.py", ""): "the timer sends Ctrl-C to long work, again and again, and ends nothing",
    ("tests/buffer/test_interrupt.py", "test_ctrl_c_ends_long_work_and_nothing_is_lost"): "switches that timer off",
    ("tests/tape/graph/test_interrupts.py", "run"): "the timer sends Ctrl-C to a call, about as long as one takes",
    ("tests/array/parts/test_float_modes.py", "interrupted"): "the timer sends a signal to a sum, and ends nothing",
    ("tests/device/test_nvrtc.py", ""): "a child that a planted fault leaves alive ends by itself in the end",
    ("tests/kit/bad_ranks.py", ""): "a wrong limit, which is refused",
    ("tests/dist/test_sums.py", "test_a_time_limit_is_a_positive_number_of_seconds_or_none.rank"): "wrong limits",
    ("tests/dist/test_sums.py", "test_the_time_limit_of_a_group_that_is_there_is_set_anew"): "one rank waits for none",
    ("tests/dist/test_sums.py", "test_the_time_limit_of_a_group_that_is_there_is_set_anew.rank"): "the same",
    (
        "tests/dist/test_sums.py",
        "test_a_rank_that_is_late_is_named_after_the_time_limit_and_closes_the_group.rank",
    ): "waits for the limit's error, however late it comes",
    (
        "tests/dist/test_sums.py",
        "test_a_reducer_made_before_a_time_limit_has_it_too.rank",
    ): "waits for the limit's error, however late it comes",
    ("tests/dist/test_ends_at_messages.py", "on_threads"): "a test gives None, or waits for the limit's error",
    ("tests/dist/test_ends_at_messages.py", "late"): "waits for the limit's error, however late it comes",
    (
        "tests/dist/test_ends_at_messages.py",
        "test_a_rank_that_tells_the_others_nothing_is_found",
    ): "waits for the limit's error, however late it comes",
    (
        "tests/dist/test_sums.py",
        "test_a_call_without_a_limit_waits_without_one_and_the_others_as_long_as_the_group",
    ): "notes the limits, and waits without one",
    (
        "tests/sim/test_explore_law.py",
        "test_a_thread_that_waits_for_a_foreign_lock_is_reported_with_the_stacks",
    ): "waits for the limit's error, however late it comes",
    ("tests/dist/test_mpi.py", ""): "waits for the limit's error, however late it comes",
    ("tests/dist/test_gloo.py", "waits"): "waits for the limit's error, however late it comes",
    ("tests/dist/test_gloo.py", "without_answers"): "waits for the limit's error, however late it comes",
    ("tests/dist/test_gloo.py", "killed"): "kills a rank in a sum: any moment will do",
    (
        "tests/dist/test_survivors.py",
        "test_a_rank_that_does_not_come_is_left_out_at_the_time_limit_and_told_so_when_it_comes.rank",
    ): "waits for the limit, however late that comes: the other rank is there before",
    (
        "tests/dist/test_survivors.py",
        "test_groups_that_are_open_closed_by_the_rank_or_of_other_engines_are_refused.rank",
    ): "a wrong limit, which is refused",
    ("tests/dist/test_survivors.py", "killed_one_by_one"): "kills a rank in a sum: any moment will do",
    ("tests/dist/test_survivors.py", "killed_amid_an_attempt"): "waits for the limit's error, however late it comes",
    ("tests/dist/test_survivors.py", "wakes"): "waits for the limit's error, however late it comes",
    ("tests/dist/test_ddp.py", "late"): "waits for the limit's error, however late it comes",
    ("tests/dist/test_ddp.py", "shard_faults"): "waits for the limit's error, however late it comes",
    ("tests/dist/test_explored_ranks.py", "counting.counts"): "wait of a fanin._core.EventCount, for a number",
    (
        "tests/device/test_nvrtc.py",
        "test_a_process_that_is_killed_before_the_rename_leaves_nothing_that_is_read",
    ): "gives a file its age",
    ("tests/partners/test_gpu.py", "slow"): "work of a GPU that takes long",
    (
        "tests/partners/test_gpu.py",
        "test_a_tensor_that_is_handed_through_keeps_its_memory_for_its_consumer",
    ): "work of a GPU that takes long",
    (
        "tests/fanin_torch/test_torch_training.py",
        "test_of_two_threads_that_begin_a_block_for_one_parameter_one_is_refused.meanwhile",
    ): "lets another thread run to its end or to a lock that this one has; which of them is not judged",
    ("tests/c/test_order.c", ""): "prints how long a step takes",
    ("tests/c/test_sim.c", ""): "prints how long a step takes",
}


def test_no_test_has_a_limit_in_seconds() -> None:
    wrong, used = [], set()
    here = Path(__file__).relative_to(ROOT).as_posix()  # has those that are planted
    for file, limit in of_tree(ROOT, FOLDERS):
        if file == here:
            continue
        place = (file, limit.where)
        if place in ALLOWED:
            used.add(place)
        else:
            wrong.append(f"{file}:{limit.line}: {limit.where}: {limit.text}")
    assert not wrong, "\n".join(["a busy machine reaches these:", *wrong])
    assert set(ALLOWED) == used, f"nothing is there that is allowed: {sorted(set(ALLOWED) - used)}"


def test_a_search_for_orders_has_no_limit_in_seconds_here() -> None:
    """By default `explore` ends where a thread takes a minute for a step; tests/conftest.py changes the default."""
    for function in (fanin.sim.explore, fanin.sim.replay):
        assert inspect.signature(function).parameters["stuck_after"].default == math.inf


#: A line with a limit, and the same without.
PLANTED = {
    "a keyword": ("run(words, timeout=60)", "run(words, timeout=None)"),
    "a keyword that is a variable": ("run(words, timeout=limit)", "run(words)"),
    "a default": ("def run(words, timeout=60.0): pass", "def run(words, timeout=None): pass"),
    "a default of a keyword": ("def run(*words, timeout: float = 60): pass", "def run(*words, timeout=None): pass"),
    "a thread's end": ("thread.join(60)", "thread.join()"),
    "ranks": ("dist.threads(2, rank)", "dist.threads(2, rank, timeout=None)"),
    "a fraction": ("thread.join(0.1)", '" ".join(x)'),
    "an event": ("assert event.wait(60)", "event.wait()"),
    "an event, by a name": ("MEET = 60.0\nbarrier.wait(MEET)", "barrier = Barrier(2)\nbarrier.wait()"),
    "a product": ("event.wait(2 * 30)", "event.wait(other)"),
    "a count": ("counts = [Event() for _ in range(2)]\ncounts[0].wait(1)", "n = EventCount()\nn.wait(1)"),
    "a process": ("process.communicate(None, 60)", "process.communicate(None)"),
    "a future": ("future.result(60)", "future.result()"),
    "an alarm": ("signal.alarm(60)", "signal.signal(signal.SIGALRM, f)"),
    "a timer": ("signal.setitimer(signal.ITIMER_REAL, 60)", "signal.getitimer(signal.ITIMER_REAL)"),
    "a limit of the process": ("resource.setrlimit(resource.RLIMIT_CPU, (9, 9))", "resource.setrlimit(CORE, (0, 0))"),
    "a traceback that exits": ("faulthandler.dump_traceback_later(30, exit=True)", "faulthandler.dump_traceback()"),
    "a sleep": ("time.sleep(0.05)", "os.sched_yield()"),
    "a sleep by its name": ("from time import sleep\nsleep(1)", "from time import ctime\nctime()"),
    "a clock": ("began = time.monotonic()", "began = time.strftime('%Y')"),
    "the time of day": ("began = time.time()", "began = datetime.time()"),
    "hypothesis": ("@settings(max_examples=9)\n@given(x)\ndef f(x): pass", "@settings(deadline=None)\ndef f(): pass"),
    "hypothesis as it is": ("@given(x)\ndef f(x): pass", "@settings(deadline=None)\n@given(x)\ndef f(x): pass"),
    "a child's program": ('run("import time\\ntime.sleep(1)")', '"""Calls time.sleep(1)."""'),
    "a child's child": ("run(\"import os\\nos.system('time.sleep(1)')\")", "run(\"import os\\nos.system('ls')\")"),
    "half a program": ('run("def f():" + "\\n    thread.join(60)\\nelse")', 'run("    thread.join()\\nelse")'),
    "a program with a blank": ('run(f"x = {x}\\nevent.wait(20)")', 'run(f"x = {x}\\nevent.wait()")'),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_limit_is_found(what: str) -> None:
    bad, good = PLANTED[what]
    assert len(in_python(bad)) == 1, in_python(bad)
    assert in_python(good) == []


def test_a_planted_limit_in_c_is_found() -> None:
    bad = "int f(void)\n{\n    alarm(60);\n}\n"
    assert [limit.line for limit in in_c(bad)] == [3]
    assert in_c("/* alarm(60) */ int f(void); // sleep(1)\nint no_clock; int my_alarm(void);\n") == []
