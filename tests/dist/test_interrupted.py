"""Ctrl-C, and threads that cannot start, at every line of a reduced pass: nothing of it is left."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core, dist
from fanin.dist import reducer as reducer_module
from fanin.dist.group import Group, Use
from fanin.dist.reducer import Reducer
from fanin.dist.threads import ThreadEngine, World
from kit.ctrl_c import raised_at
from kit.sample import sizes

pytestmark = pytest.mark.core

PACKAGE = str(Path(fanin.__file__).parent)
OURS = (f"{PACKAGE}/dist/", f"{PACKAGE}/_interop/torch_leaves.py", f"{PACKAGE}/torch/")


def alone() -> Group:
    return Group(ThreadEngine(World(1), 0), timeout=None)


def is_idle(reducer: Reducer) -> None:
    """Returns when the sending thread, if there is one, has nothing else to do."""
    if reducer._sender._begun:
        over = _core.EventCount()
        reducer._sender.put(over.advance)
        over.wait(1)


def passes(w: Any, reducer: Reducer) -> None:
    root = [(w, 0, np.ones(3))]
    fanin.backward(root, reducer=reducer)
    with reducer.accumulate(3):
        fanin.backward(root)
    fanin.backward(root, reducer=reducer)


def folds(w: Any, reducer: Reducer) -> None:
    root = [(w, 0, np.ones(3))]
    for _ in range(3):
        with reducer.accumulate():
            fanin.backward(root)
    fanin.backward(root, reducer=reducer)


def calls(w: Any, reducer: Reducer) -> None:
    reducer.group.barrier()
    fanin.backward([(w, 0, np.ones(3))], reducer=reducer)
    dist.add_n([np.ones(3)], reducer.group)
    reducer.norm()


def weighed(w: Any, reducer: Reducer) -> None:
    """Of a mean: every gradient is one, so that a weight without its term, or a term without its weight, is found."""
    root = [(w, 0, np.ones(3))]
    fanin.backward(root, reducer=reducer, weight=2)
    w.grad = None
    with reducer.accumulate(3, weight=4):
        fanin.backward(root)
    with reducer.at(5, weight=3):
        fanin.backward(root)


#: The sum of the next pass, with the contributions of before that were complete.
BEFORE: dict[Any, tuple[int, ...]] = {weighed: (1,), folds: (1, 2, 3, 4)}

#: Every so manieth line: a prime, so that it meets the lines of repeated calls at different places.
STEP = 7


def interrupted(work: Callable[[Any, Reducer], None], options: dict[str, Any], step: int) -> tuple[int, int, int]:
    """Raise KeyboardInterrupt at each `step`-th line of `work`, and check what is left of it. Return the number of
    lines, of groups that were closed, and of groups that were not.
    """
    closed = whole = n = 0
    came = "not yet"
    while came:
        w = fanin.Leaf(np.zeros(3), name="w")
        group = alone()
        reducer = Reducer([w], group, **options)
        came = raised_at(n, lambda work=work, w=w, reducer=reducer: work(w, reducer), OURS)
        w.grad = None
        fanin.backward([(w, 0, np.ones(3))])
        assert w.grad is not None and w.grad.tolist() == [1, 1, 1], came
        is_idle(reducer)
        if group.closed is None:
            group.barrier()
            w.grad = None
            if reducer._unentered:  # it came between accumulate() and its with, as if there were none
                with pytest.raises(RuntimeError, match="never entered"):
                    fanin.backward([(w, 0, np.ones(3))], reducer=reducer)
            fanin.backward([(w, 0, np.ones(3))], reducer=reducer)
            sums = reducer.shards[0] if reducer._options.into == "shard" else w.grad
            assert sums.tolist()[0] in BEFORE.get(work, (1, 2)), came
            whole += 1
        else:
            assert "interrupted" in group.closed or "KeyboardInterrupt" in group.closed, came
            closed += 1
        alone().barrier()
        fanin.backward([(w, 0, np.ones(3))], reducer=Reducer([w], alone()))
        n += step
    return n, closed, whole


def by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread sends, as it does of buckets that are not small."""
    monkeypatch.setattr(reducer_module, "SMALL", 0)


@pytest.mark.parametrize("step", sizes(STEP, 1))
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("work", "options"),
    [
        (passes, {}),
        (calls, {"into": "shard"}),
        (weighed, {"mean": True}),
        (folds, {"order": "rank"}),
        pytest.param(passes, {"order": "exact", "stats": True}, marks=pytest.mark.full),
        pytest.param(calls, {}, marks=pytest.mark.full),
    ],
)
def test_after_ctrl_c_at_any_line_a_plain_pass_is_right_and_groups_work_or_are_closed(
    work: Callable[[Any, Reducer], None],
    options: dict[str, Any],
    small: bool,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not small:
        by_thread(monkeypatch)
    n, closed, whole = interrupted(work, options, step)
    print(n, "lines:", closed, "groups closed,", whole, "open")
    assert n > 400 and min(closed, whole) > 20, (n, closed, whole)


def left_diverted(state: Any, error: BaseException) -> None:
    """As `_State.give_up`, but the leaves' sums go to the buckets for ever."""
    state.reducer.group.interrupted(error)


def left_inside(state: Any, keep: bool) -> None:
    """As `_Pass.release`, but the thread stays inside the group."""
    state.reducer._passing = False
    state.reducer._reset(keep)
    reducer_module._inside.set(None)


def left_with_terms(state: Any, keep: bool) -> None:
    """As `_Pass.release`, but the contributions of the pass stay, as those of the next one."""
    state.reducer._passing = False
    reducer_module._inside.set(None)
    Use._end(state, None)


def ended_early(state: Any, error: BaseException | None) -> None:
    """As `_State._end`, but it is over before it has undone anything, so that a second call does nothing."""
    if not state.over and state.is_ours():
        state.over = True
        state.finish(error)
        state.release(True)


def left_with_weights(reducer: Any, keep: bool = True) -> None:
    """As `Reducer._reset`, but the weights of the pass count in the next mean."""
    reducer._error, reducer._failed, reducer._key, reducer._weight = None, None, None, None
    for bucket in reducer._buckets:
        bucket.reset(keep)


@pytest.mark.parametrize("fault", [left_diverted, left_inside, left_with_terms, ended_early, left_with_weights])
def test_what_a_pass_leaves_behind_is_found_by_the_sample(
    fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        left_diverted: (reducer_module._State, "give_up"),
        ended_early: (reducer_module._State, "_end"),
        left_with_weights: (reducer_module.Reducer, "_reset"),
    }
    by_thread(monkeypatch)
    monkeypatch.setattr(*places.get(fault, (reducer_module._Pass, "release")), fault)
    work, options = (weighed, {"mean": True}) if fault is left_with_weights else (passes, {})
    found: list[BaseException] = []

    def search() -> None:
        """On a thread of its own, because the fault may leave its thread inside a group."""
        try:
            interrupted(work, options, STEP)
        except (AssertionError, RuntimeError, ValueError) as e:
            found.append(e)

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    print(found)
    assert len(found) == 1


def test_a_pass_whose_thread_cannot_start_fails_on_every_rank_and_the_next_one_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def no_start(thread: threading.Thread) -> None:
        if thread.name == "fanin.dist" and failing:
            failing.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    def rank(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(3), name="w")
        reducer = Reducer([w], group)
        error = ""
        try:
            fanin.backward([(w, 0, np.ones(3))], reducer=reducer)
        except RuntimeError as e:
            error = str(e)
        fanin.backward([(w, 0, np.ones(3))])
        plain = w.grad.tolist()
        w.grad = None
        group.barrier()
        fanin.backward([(w, 0, np.ones(3))], reducer=reducer)
        return error, plain, w.grad.tolist()

    by_thread(monkeypatch)
    failing = [True]
    monkeypatch.setattr(threading.Thread, "start", no_start)
    found = dist.threads(2, rank, timeout=None)
    assert [rest for _, *rest in found] == [[[1, 1, 1], [2, 2, 2]]] * 2
    own, others = sorted((error for error, *_ in found), key=len)
    assert own == "can't start new thread" and own in others


# ---------------------------------------------------------------- torch


def torch_passes(p: Any, reducer: Reducer) -> None:
    with reducer:
        p.sum().backward()
    with reducer.accumulate():
        p.sum().backward()
    with reducer:
        p.sum().backward()


def torch_block(p: Any, reducer: Reducer) -> None:
    for _ in range(2):
        with fanin.torch.accumulate([p], group=reducer.group):
            p.sum().backward()
            p.sum().backward()


def torch_last_pass(p: Any, reducer: Reducer) -> None:
    with fanin.torch.accumulate([p], group=reducer.group) as block:
        p.sum().backward()
        with block.last():
            p.sum().backward()


def torch_weights(p: Any, reducer: Reducer) -> None:
    with fanin.torch.accumulate([p], group=reducer.group, mean=True) as block:
        with block.weight(2):
            p.sum().backward()
        with block.at(1, weight=3).last():
            p.sum().backward()


@pytest.mark.partners
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("work", [torch_passes, torch_block, torch_last_pass, torch_weights])
def test_after_ctrl_c_at_any_line_a_plain_pass_of_torch_is_right(
    work: Callable[[Any, Reducer], None], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    if not small:
        by_thread(monkeypatch)
    for n in itertools.count():
        p = torch.nn.Parameter(torch.zeros(3))
        loss = p.sum()
        group = alone()
        reducer = Reducer([p], group)
        came = raised_at(n, lambda work=work, p=p, reducer=reducer: work(p, reducer), OURS)
        p.grad = None
        loss.backward()
        assert p.grad.tolist() == [1, 1, 1], came
        is_idle(reducer)
        alone().barrier()
        p.grad = None
        with Reducer([p], alone()):
            p.sum().backward()
        assert p.grad.tolist() == [1, 1, 1], came
        p.grad = None
        with fanin.torch.accumulate([p], mean=True) as block, block.weight(4):
            p.sum().backward()
        assert p.grad.tolist() == [1, 1, 1], came
        if not came:
            break
    assert n > 20


#: Instructions of CPython after which a signal's handler runs.
CHECKED = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}


def raised_after(n: int, files: tuple[str, ...], fn: Callable[[], object]) -> str:
    """Call `fn`; raise KeyboardInterrupt at the n-th place in these files where CPython may run a signal's handler,
    after a call in the midst of a line too. Return the place, or "" if there are fewer.
    """
    left = itertools.count(n, -1)
    came: list[str] = []
    before: dict[FrameType, str] = {}

    def instruction(frame: FrameType, event: str, argument: object) -> Any:
        if event != "opcode" or came:
            return instruction
        code = frame.f_code
        checked = before.get(frame) in CHECKED
        before[frame] = dis.opname[code.co_code[frame.f_lasti]]
        if checked and next(left) == 0:
            came.append(f"{code.co_filename}:{frame.f_lineno}, before instruction {frame.f_lasti}")
            raise KeyboardInterrupt(came[0])
        return instruction

    def call(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return instruction

    traced = sys.gettrace()
    sys.settrace(call)
    try:
        fn()
    except KeyboardInterrupt as e:
        assert e.args == tuple(came)
    finally:
        sys.settrace(traced)
    return came[0] if came else ""


def one_by_one(register: Callable[[Any, Any], Any], nodes: list[Any], collectors: list[Any]) -> Iterator[Any]:
    """As `map`, in Python."""
    for node, collect in zip(nodes, collectors, strict=True):
        handle = register(node, collect)
        yield handle


@pytest.mark.partners
@pytest.mark.parametrize("works", [True, False])
def test_ctrl_c_between_a_hook_and_its_handle_leaves_no_collector(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """works: False: with a planted fault, a registration in Python."""
    torch = pytest.importorskip("torch")
    leaves = pytest.importorskip("fanin._interop.torch_leaves")
    if not works:
        monkeypatch.setattr(leaves, "map", one_by_one, raising=False)
    files = (leaves.__file__, torch.utils.hooks.__file__, torch.autograd.function.__file__, __file__)
    places, lost = set(), 0
    for n in itertools.count():
        made = [torch.zeros(3, requires_grad=True) for _ in range(2)]
        taken: list[Any] = []

        def collect(gradients: Any, taken: list[Any] = taken) -> Any:
            taken.append(gradients)
            return (None,)

        taking = leaves.Taking("Reducer", made, ["a", "b"])
        came = raised_after(n, files, lambda taking=taking, collect=collect: taking.begin([collect, collect]))
        taking.end()
        (made[0] + 2 * made[1]).sum().backward()
        right = taken == [] and [p.grad.tolist() for p in made if p.grad is not None] == [[1, 1, 1], [2, 2, 2]]
        lost += not right
        assert right or not works, came
        with fanin.torch.accumulate(made):  # no parameter is taken
            pass
        places.add(came.partition(",")[0])
        if not came:
            break
    print(n, "places:", lost, "lost")
    assert n > 25 and any(torch.utils.hooks.__file__ in place for place in places)
    assert works or lost >= 2


class Bucket:
    """The only bucket of a pass, as DDP gives it to a hook."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def buffer(self) -> Any:
        return self.x

    def parameters(self) -> list[Any]:
        return [self.x]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@pytest.mark.partners
def test_after_ctrl_c_at_any_line_of_a_hook_of_ddp_the_next_pass_is_right() -> None:
    torch = pytest.importorskip("torch")
    ranks = pytest.importorskip("fanin.dist.torch_ranks")

    def summed(hook: Any, group: Group, p: Any) -> Any:
        futures: list[Any] = []

        def as_ddp(g: Any) -> None:
            """At the end of its pass DDP waits for its buckets."""
            futures.append(hook(group, Bucket(g.clone())))
            torch.autograd.Variable._execution_engine.queue_callback(futures[-1].wait)

        handle = p.register_hook(as_ddp)
        try:
            p.sum().backward()
        finally:
            handle.remove()
        return futures[-1].wait().tolist()

    n, came = -1, "not yet"
    while came:
        n += 1
        group, hook, p = alone(), fanin.torch.ddp_hook(scale=1), torch.zeros(3, requires_grad=True)
        fn = partial(summed, hook, group, p)
        came = raised_at(n, lambda fn=fn: (fn(), fn()), (ranks.__file__, f"{PACKAGE}/dist/sender.py"))
        assert fn() == [1, 1, 1], came
        over = _core.EventCount()
        ranks._sender(group).put(over.advance)
        over.wait(1)
        group.barrier()
    assert n > 40
