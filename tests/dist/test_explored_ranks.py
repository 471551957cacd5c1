"""Every order in which the threads of two and three ranks may act: one outcome, no deadlock; and planted faults."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core, dist
from fanin.dist import frames, sums
from fanin.dist import reducer as reducer_module
from fanin.dist.group import Call, Group
from fanin.dist.layout import Level
from fanin.dist.plans import Plan
from fanin.dist.reducer import Reducer
from fanin.dist.sums import ExactSum, Sum
from fanin.dist.threads import World
from fanin.sim import Machine, Report, explore
from kit.sample import sizes

pytestmark = pytest.mark.threads


def on_ranks(machine: Machine, n: int, fn: Callable[[Group], Any], nodes: int = 1) -> list[Any]:
    """Return the result of fn(group) on each rank. Ranks and their sending threads are threads of the machine."""
    ranks = machine.spawn(partial(dist.threads, nodes=nodes, timeout=None), n, fn)
    machine.join()
    return ranks.result


def failing(g: Any) -> Any:
    raise ZeroDivisionError("planted")


def roots(group: Group, leaves: list[fanin.Leaf], fails: bool, turned: bool = False) -> list[Any]:
    """Make a node for each leaf. The newest one runs first; `turned`: rank 1 makes them in another order."""
    made = []
    order = list(enumerate(leaves))
    for i, w in order[::-1] if turned and group.rank == 1 else order:
        fn = failing if fails and i == 0 else lambda g: g
        made.append((fanin.Node(fn, edges=[(w, 0)], name=f"N{i}"), 0, np.full(w.array.shape, 1 + group.rank, "f4")))
    return made


def passes(
    group: Group,
    buckets: int,
    fails: int | None = None,
    inputs: int | None = None,
    turned: bool = False,
    order: Any = None,
    after: bool = False,
    mean: bool = False,
) -> Any:
    """Run a pass over a bucket for each leaf, and `after` it one more. Return the end of each and the gradients."""
    size = 3 if len(set(group.nodes)) == 1 else 1024  # in two levels every rank owns elements
    leaves = [fanin.Leaf(np.zeros(size, "f4"), name=f"w{i}") for i in range(buckets)]
    reducer = Reducer(leaves, group, bucket_bytes=1, missing="skip", order=order, mean=mean)
    seen: list[Any] = []
    for turn in range(1 + after):
        only: dict[str, Any] = {"inputs": leaves[-1:]} if inputs == group.rank else {}
        if mean:
            only["weight"] = (1, 3)[group.rank]
        try:
            fanin.backward(
                roots(group, leaves, fails == group.rank and turn == 0, turned),
                reducer=reducer,
                **only,
            )
            seen.append("ended")
        except Exception as e:
            seen.append((type(e).__name__, getattr(e, "rank", None)))
    return seen, [None if w.grad is None else set(w.grad.tolist()) for w in leaves]


def expected(
    n: int, buckets: int, fails: int | None = None, inputs: int | None = None, after: bool = False, mean: bool = False
) -> Any:
    """The outcome of `passes` on each rank."""
    first = [
        "ended" if fails is None else ("ZeroDivisionError", None) if r == fails else ("PeerError", fails)
        for r in range(n)
    ]
    good = (fails is None) + after
    each = [(1.0 + r) * ((1, 3)[r] / 4 if mean else 1) for r in range(n)]
    every, without = (sum(each[r] for r in range(n) if r not in (left,)) for left in (None, inputs))
    grads = [{good * (every if i == buckets - 1 else without)} if good else None for i in range(buckets)]
    return [([one, *["ended"] * after], grads) for one in first]


@pytest.fixture(autouse=True)
def a_thread_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of buckets that are not small, so that there are orders to explore."""
    monkeypatch.setattr(reducer_module, "SMALL", 0)


def scenario(machine: Machine, n: int, buckets: int, nodes: int = 1, **options: Any) -> Any:
    outcome = on_ranks(machine, n, lambda group: passes(group, buckets, **options), nodes)
    facts = {k: v for k, v in options.items() if k not in ("turned", "order")}
    assert outcome == expected(n, buckets, **facts)
    return outcome


def explored(n: int, buckets: int, limit: int = 4000, **options: Any) -> Report:
    return explore(partial(scenario, n=n, buckets=buckets, **options), limit=limit)


#: (ranks, buckets, options, orders that there are at least)
SCENES: list[tuple[int, int, dict[str, Any], int]] = [
    (1, 2, {}, 3),
    (1, 2, {"order": "exact"}, 3),
    (1, 2, {"fails": 0, "after": True}, 3),
    (2, 1, {}, 8),
    (2, 2, {}, 20),
    (2, 2, {"turned": True}, 10),
    (2, 2, {"order": "exact"}, 10),
    (2, 1, {"mean": True}, 8),
    (2, 2, {"mean": True, "order": "exact"}, 10),
    (2, 2, {"mean": True, "inputs": 1}, 5),
    (2, 2, {"fails": 1}, 5),
    (2, 2, {"inputs": 1}, 5),
    (2, 1, {"fails": 1, "after": True}, 5),
]
LARGE: list[tuple[int, int, dict[str, Any], int]] = [
    (2, 3, {}, 40),
    (2, 3, {"fails": 0, "inputs": 1}, 10),
    (2, 2, {"fails": 1, "after": True}, 50),
    (3, 1, {}, 50),
    (3, 1, {"fails": 2, "inputs": 1}, 20),
    (3, 2, {}, 100),
    (3, 2, {"fails": 2, "inputs": 1}, 30),
]


#: A sample of SCENES; the others have the mark full.
SAMPLE = (SCENES[0], SCENES[1])


@pytest.mark.parametrize(
    ("n", "buckets", "options", "least"),
    [pytest.param(*scene, marks=() if scene in SAMPLE else pytest.mark.full) for scene in SCENES],
)
def test_every_order_of_ranks_has_one_outcome(n: int, buckets: int, options: dict[str, Any], least: int) -> None:
    report = explored(n, buckets, **options)
    assert report.ok and report.runs >= least, report


@pytest.mark.parametrize("options", [{}, {"fails": 0}, {"fails": 1, "after": True}, {"order": "exact"}])
def test_every_order_of_ranks_with_a_small_bucket_has_one_outcome(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer_module, "SMALL", 1 << 16)
    assert explored(2, 1, **options).ok


TWO_LEVELS = {"nodes": 2, "order": "exact"}
CHAIN = {"nodes": 2, "order": "key"}


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (2, {}),
        (3, {}),
        (3, {"fails": 2, "inputs": 1}),
        (4, TWO_LEVELS),
        (4, {**TWO_LEVELS, "fails": 2, "inputs": 1}),
        (4, CHAIN),
        (4, {**CHAIN, "fails": 2, "inputs": 1}),
    ],
)
@pytest.mark.parametrize("size", sizes(3, 100))
def test_some_orders_of_more_ranks_have_one_outcome(n: int, options: dict[str, Any], size: int) -> None:
    report = explore(partial(scenario, n=n, buckets=1, **options), limit=size, samples=size)
    assert not report.failed and (report.complete or report.runs >= size), str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "buckets", "options", "least"), LARGE)
def test_every_order_of_more_ranks_and_buckets_has_one_outcome(
    n: int, buckets: int, options: dict[str, Any], least: int
) -> None:
    report = explored(n, buckets, **options)
    assert report.ok and report.runs >= least, report


@pytest.mark.slow
@pytest.mark.parametrize(("buckets", "options"), [(1, {}), (2, {"fails": 3, "inputs": 1}), (1, {"after": True})])
@pytest.mark.parametrize("levels", [TWO_LEVELS, CHAIN])
def test_many_orders_of_two_levels_have_one_outcome(
    levels: dict[str, Any], buckets: int, options: dict[str, Any]
) -> None:
    report = explored(4, buckets, limit=300, **levels, **options)
    assert not report.failed and report.runs >= 150, str(report)


# ---------------------------------------------------------------- plans of buckets


def planned(machine: Machine, prepare: Callable[[Group, Reducer], None], buckets: int = 1) -> Any:
    """Two passes, of which the second has plans, and two more; the third begins as `prepare` says."""

    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(3, "f4"), name=f"w{i}") for i in range(buckets)]
        reducer = Reducer(leaves, group, bucket_bytes=1)
        seen = []
        for turn in range(4):
            if turn == 2:
                prepare(group, reducer)
            for w in leaves:
                w.grad = None
            fanin.backward([(w, 0, np.full(3, 1 + group.rank, "f4")) for w in leaves], reducer=reducer)
            seen.append([float(w.grad[0]) for w in leaves])
        return seen, reducer._buckets[0].is_planned

    outcome = on_ranks(machine, 2, rank)
    assert outcome == [([[3.0] * buckets] * 4, True)] * 2, outcome
    return outcome


def of_other_sizes(machine: Machine) -> Any:
    """Each rank has the plans of two reducers, and they run other ones."""

    def rank(group: Group) -> Any:
        both = []
        for size in (3, 4):
            w = fanin.Leaf(np.zeros(size, "f4"), name="w")
            both.append((w, Reducer([w], group)))
            for _ in range(2):
                fanin.backward([(w, 0, np.ones(size, "f4"))], reducer=both[-1][1])
        w, reducer = both[group.rank]
        try:
            fanin.backward([(w, 0, np.ones(w.array.shape, "f4"))], reducer=reducer)
        except fanin.PeerError as e:
            return e.rank
        return w.grad.tolist()

    outcome = on_ranks(machine, 2, rank)
    assert outcome == [1, 1], outcome
    return outcome


def forgets(group: Group, reducer: Reducer) -> None:
    """Rank 1 has the plan of no bucket any more."""
    for bucket in reducer._buckets if group.rank == 1 else ():
        bucket.plan = None


def goes_another_way(group: Group, reducer: Reducer) -> None:
    """Rank 1 has the plan of a large sum, as if it had another threshold."""
    plan = reducer._buckets[0].plan
    assert plan is not None and plan.plain is not None and plan.plain.way == frames.ALL
    if group.rank == 1:
        plan.plain.sends = []
        plan.plain.prepare = partial(prepare_large, plan.plain)  # type: ignore[method-assign]


def prepare_large(plan: Plan, group: Group) -> None:
    real, frames.whole_of = frames.whole_of, lambda ranks: 0
    rooms, group._room = group._room, 0
    try:
        Plan.prepare(plan, group)
    finally:
        frames.whole_of, group._room = real, rooms
    assert plan.way == frames.HEAD


PREPARED = (lambda group, reducer: None, forgets, goes_another_way)


@pytest.mark.parametrize("prepare", PREPARED)
@pytest.mark.parametrize("buckets", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("size", sizes(30, 300))
def test_planned_buckets_have_one_outcome_in_every_order(prepare: Any, buckets: int, size: int) -> None:
    report = explore(partial(planned, prepare=prepare, buckets=buckets), limit=size, samples=size)
    assert not report.failed, str(report)


@pytest.mark.parametrize("size", sizes(30, 300))
def test_reducers_of_other_sizes_are_an_error_in_every_order(size: int) -> None:
    report = explore(of_other_sizes, limit=size, samples=size)
    assert not report.failed, str(report)


def test_a_bucket_whose_plan_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "ALIKE", 0)
    assert explore(of_other_sizes, limit=5, samples=5).failed
    assert explore(partial(planned, prepare=goes_another_way), limit=5, samples=5).failed


def test_a_plan_of_a_bucket_without_what_its_headers_said_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest and its size are those of any other."""
    real = frames.Head.write
    monkeypatch.setattr("fanin.dist.plans.digest", lambda *facts: "00" * 16)
    monkeypatch.setattr(frames.Head, "write", lambda self: real(self._replace(body=0)))
    assert explore(of_other_sizes, limit=5, samples=5).failed


def test_a_rank_that_goes_on_where_another_has_forgotten_the_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the header of the other rank for the head of a plan."""
    real = Call._heads

    def full(self: Call, message: Any) -> Any:
        messages, heads = real(self, message)
        return messages, [h._replace(kind=frames.FULL) for h in heads]

    monkeypatch.setattr(Call, "_heads", full)
    assert explore(partial(planned, prepare=forgets), limit=5, samples=5).failed


# ---------------------------------------------------------------- planted faults


def test_buckets_that_are_sent_as_they_become_ready_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, put = Reducer.__init__, Reducer._put
    ready: weakref.WeakKeyDictionary[Any, tuple[list[Any], Any]] = weakref.WeakKeyDictionary()

    def made(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        ready[self] = [], _core.EventCount()

    def noted(self: Any, bucket: Any, i: int, gradient: Any, owned: bool) -> None:
        put(self, bucket, i, gradient, owned)
        buckets, some = ready[self]
        buckets.append(bucket)
        some.advance()

    def in_order_of_readiness(self: Any, number: int) -> None:
        buckets, some = ready[self]
        for k in range(len(self._buckets)):
            some.wait(k + 1)
            bucket = buckets[k]
            with Call(self.group, self._name, number, bucket.number, self.group.timeout) as call:
                self._sum(call, bucket)

    monkeypatch.setattr(Reducer, "__init__", made)
    monkeypatch.setattr(Reducer, "_put", noted)
    monkeypatch.setattr(Reducer, "_send", in_order_of_readiness)
    assert not explored(2, 2, limit=4).failed, "both ranks have the same order"
    report = explored(2, 2, limit=4, turned=True)
    assert report.failed and report.errors == report.runs


def anew(machine: Machine) -> Any:
    """Rank 1 makes its group anew after a pass: a header then has another pass number."""

    def rank(group: Group) -> Any:
        dist.add_n([np.ones(2)], group)
        second = Group(group._engine, timeout=None) if group.rank == 1 else group
        try:
            return dist.add_n([np.ones(2)], second)
        except fanin.PeerError as e:
            return str(e)

    outcome = on_ranks(machine, 2, rank)
    assert all("rank 1 is at call add_n, pass 1" in x and "rank 0 at call add_n, pass 2" in x for x in outcome)
    return outcome


def test_a_header_without_pass_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explore(anew).ok
    begin = Call.__init__

    def without(self: Call, *args: Any) -> None:
        begin(self, *args)
        self.at["pass"] = 0

    monkeypatch.setattr(Call, "__init__", without)
    report = explore(anew)
    assert report.failed


def test_a_failed_rank_that_sends_no_header_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reducer._send

    def silent(self: Any, number: int) -> None:
        if self._until(self._buckets[-1]) is None:
            real(self, number)

    monkeypatch.setattr(Reducer, "_send", silent)
    monkeypatch.setattr(World, "leave", lambda *args: None)  # it does not leave the group either
    report = explored(2, 1, limit=2, fails=1)
    assert report.deadlocks == report.runs > 0


def test_a_failed_rank_that_sends_its_buckets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed rank sends its buckets as if the pass had ended well."""
    real = Reducer._until

    def ignoring(self: Any, bucket: Any) -> None:
        real(self, bucket)

    monkeypatch.setattr(Reducer, "_until", ignoring)
    assert explore(partial(scenario, n=2, buckets=2, fails=1), stop_at_first=True).failed


@pytest.mark.full
def test_a_rank_alone_that_sums_a_bucket_before_its_gradients_have_come_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients that are kept as they are, and copied ones. Without the wait no count orders the two threads, so the
    search must not leave orders out.
    """

    def some(order: Any) -> Report:
        return explore(partial(scenario, n=1, buckets=2, order=order), limit=200, reduce=False)

    for order in (None, "exact"):
        assert not some(order).failed and some(order).runs >= 20
    monkeypatch.setattr(Reducer, "_until", lambda self, bucket: None)
    for order in (None, "exact"):
        report = some(order)
        assert report.failed and report.errors and report.deadlocks == 0, report


def wider(machine: Machine, n: int) -> Any:
    """Sums of float16 in float32, of a pass in accumulate() and one that sends a bucket for each leaf. float16 does not
    have the sum of rank 0.
    """

    def rank(group: Group) -> Any:
        leaves = [fanin.Leaf(np.zeros(3, "f2"), name=f"w{i}") for i in range(2)]
        reducer = Reducer(leaves, group, bucket_bytes=1, order="rank")
        first, last = [(4096.0, 1.0), (-4096.0, 0.0)][group.rank]
        with reducer.accumulate():
            fanin.backward([(w, 0, np.full(3, first, "f2")) for w in leaves])
        fanin.backward([(w, 0, np.full(3, last, "f2")) for w in leaves], reducer=reducer)
        return [w.grad.tolist() for w in leaves]

    outcome = on_ranks(machine, n, rank)
    assert outcome == [[[1.0 if n == 2 else 4096.0] * 3] * 2] * n, outcome
    return outcome


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full)])
def test_every_order_of_sums_that_are_wider_than_their_terms_has_one_outcome(n: int) -> None:
    report = explore(partial(wider, n=n), limit=4000)
    assert report.ok and report.runs >= 3, report


def test_sums_of_ranks_that_travel_in_the_dtype_of_their_terms_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "accumulation", lambda dtype: dtype)
    report = explore(partial(wider, n=2), limit=5, samples=5)
    assert report.errors == report.runs > 0, report


@pytest.mark.full
def test_an_error_that_is_read_before_the_pass_has_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are closed before the end of the pass is noted: the sender may take a failed pass for a good one."""

    def wrong(self: Any, error: BaseException | None) -> None:
        self._passing, self._error = False, error
        for bucket in self._buckets:
            if bucket.closed.value < self._turn:
                bucket.closed.advance()
        self._ended.advance()

    monkeypatch.setattr(Reducer, "_pass_ended", wrong)
    real = Reducer._send

    def send(self: Any, number: int) -> None:
        """The sender does not wait for the end of the pass."""
        for bucket in self._buckets:
            failed = self._until(bucket)
            with Call(self.group, self._name, number, bucket.number, self.group.timeout) as call:
                if failed is not None:
                    call.meet({}, failure={"text": f": {failed}", "leaf": None})
                self._sum(call, bucket)

    assert explored(2, 2, fails=1).ok, "the header of the pass's end has the error, too"
    monkeypatch.setattr(Reducer, "_send", send)
    report = explored(2, 2, fails=1)
    assert report.failed and report.errors < report.runs, "in some orders alone"
    del real


def exact(machine: Machine, nodes: int = 1) -> Any:
    """Three terms on two ranks, or five on those of two nodes, of which one has bits below all bits of the others. Each
    rank owns elements.
    """

    def rank(group: Group) -> Any:
        which = ((-1.0,), (1.0, 2.0**-60), (), (3.0, -3.0))[group.rank]
        terms = [np.arange(1, 1025) * np.float64(x) for x in which]
        return dist.add_n(terms, group, order="exact")

    outcome = on_ranks(machine, 2 * nodes, rank, nodes)
    assert all((x == np.arange(1, 1025) * 2.0**-60).all() for x in outcome), outcome
    return outcome


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_exact_sum_has_one_outcome_in_every_order(nodes: int) -> None:
    assert explore(partial(exact, nodes=nodes)).ok


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_window_that_is_not_widened_is_found(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _core.window_add

    def narrow(window: Any, arrays: Any) -> None:
        """Bits below 2**-52 are lost."""
        real(window, tuple(np.round(x * 2.0**52) / 2.0**52 for x in arrays))

    monkeypatch.setattr(_core, "window_add", narrow)
    assert explore(partial(exact, nodes=nodes)).failed


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_all_gather_before_the_shard_is_rounded_is_found(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sum.exact

    def late(self: Sum, i: int, segment: Any, own: Any, levels: Any) -> None:
        real(self, i, segment, own, levels)
        rounded = own.copy()
        own[:] = 0  # the message has the numbers from before the rounding
        start = self.call.start

        def then(operation: str, *args: Any, **more: Any) -> Any:
            result = start(operation, *args, **more)
            own[:] = rounded
            return result

        self.call.start = then  # type: ignore[method-assign]

    monkeypatch.setattr(Sum, "exact", late)
    assert explore(partial(exact, nodes=nodes)).failed


def test_sums_that_travel_back_inside_nodes_before_those_of_other_nodes_are_there_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fanin.dist.sums.reversed", lambda levels: levels, raising=False)
    assert explore(exact).ok, "one level has one order"
    assert explore(partial(exact, nodes=2)).failed


def test_an_owner_without_the_terms_of_its_own_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(self: ExactSum, owner: int) -> None:
        for _ in self.windows(owner):
            pass

    monkeypatch.setattr(ExactSum, "keep", dropped)
    assert explore(exact).ok, "in one level nothing is kept"
    assert explore(partial(exact, nodes=2)).failed


def test_sums_of_a_node_in_another_order_than_its_messages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner makes its own windows last, so it reads the messages of its node out of order."""
    real = ExactSum.pack

    def last(self: ExactSum, level: Any, rank: int, received: bool = False) -> Any:
        mine = level.team.index(rank)
        order = [k for k in range(len(level.team)) if k != mine] + [mine]
        turned = Level(tuple(level.team[k] for k in order), tuple(level.shards[k] for k in order))
        made = real(self, turned if received else level, rank, received)
        return [made[order.index(k)] for k in range(len(order))] if received else made

    monkeypatch.setattr(ExactSum, "pack", last)
    assert explore(partial(exact, nodes=2)).failed


def test_a_node_that_is_summed_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second level adds the contributions of the first one again."""
    monkeypatch.setattr(ExactSum, "end", lambda self: None)
    assert explore(partial(exact, nodes=2), stop_at_first=True).failed


def disagree(machine: Machine) -> Any:
    """Rank 1 gets other nodes than the other ranks."""

    def rank(group: Group) -> Any:
        mine = Group(group._engine, nodes=[0, 1, 0, 1] if group.rank == 1 else 2, timeout=None)
        try:
            return dist.add_n([np.ones(1024)], mine, "exact").tolist()
        except fanin.PeerError as e:
            return str(e)

    outcome = on_ranks(machine, 4, rank)
    assert all("rank 1 is at" in x and "nodes 1 of 0+1 of 1" in x for x in outcome), outcome
    return outcome


def test_ranks_that_disagree_on_nodes_have_an_error_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explore(disagree).ok
    monkeypatch.setattr(sys.modules[Group.__init__.__module__], "shortly", lambda nodes: "")
    assert explore(disagree, stop_at_first=True).failed, "a header without nodes"


# ---------------------------------------------------------------- the search itself


def counting(machine: Machine) -> Any:
    """Two threads count, one reads the number, so that its result depends on the order, and one waits."""
    a, b = _core.EventCount(), _core.EventCount()

    def counts(one: Any, other: Any) -> int:
        one.advance()
        other.wait(1)
        return 0

    def reads() -> int:
        return a.value * 2 + b.value

    threads = [machine.spawn(counts, a, b), machine.spawn(counts, b, a), machine.spawn(reads)]
    machine.join()
    return [t.result for t in threads]


@pytest.mark.full
def test_the_search_has_the_outcomes_of_all_orders_of_counts() -> None:
    less, every = explore(counting), explore(counting, reduce=False, limit=100_000)
    assert less.complete and every.complete and less.runs < every.runs
    assert (
        {tuple(r) for r in less.results}
        == {tuple(r) for r in every.results}
        == {  # type: ignore[arg-type]
            (0, 0, x) for x in range(4)
        }
    )


def test_waits_that_commute_have_one_order() -> None:
    def chain(machine: Machine) -> Any:
        counts = [_core.EventCount() for _ in range(4)]

        def turn(k: int) -> int:
            if k:
                counts[k].wait(1)
            for other in counts[k + 1 : k + 2]:
                other.advance()
            return k

        threads = [machine.spawn(turn, k) for k in range(4)]
        machine.join()
        return [t.result for t in threads]

    report = explore(chain)
    assert report.ok and report.runs == 1


def test_a_number_that_no_thread_reaches_is_a_deadlock_and_an_end_is_not() -> None:
    def waits(machine: Machine, ends: bool) -> Any:
        count = _core.EventCount()
        thread = machine.spawn(count.wait, 2)
        machine.spawn(count.end if ends else count.advance)
        machine.join()
        return thread.result

    report = explore(partial(waits, ends=False))
    assert report.deadlocks == report.runs > 0
    assert explore(partial(waits, ends=True)).results == (False,)


def test_a_collection_as_a_wait_begins_loses_no_advance() -> None:
    class Cycle:
        def __init__(self, count: Any) -> None:
            self.count, self.me = count, self

        def __del__(self) -> None:
            assert self.count.value < 2  # a step, after which another thread may run

    def scene(machine: Machine) -> Any:
        count, before = _core.EventCount(), gc.get_threshold()

        def waits() -> bool:
            gc.disable()
            Cycle(count)
            gc.set_threshold(1)  # the next object collects: one that the wait makes
            gc.enable()
            reached = bool(count.wait(1))
            gc.set_threshold(*before)
            return reached

        thread = machine.spawn(waits)
        machine.spawn(count.advance)
        machine.join()
        return thread.result

    report = explore(scene)
    assert report.ok and report.results == (True,)


def test_an_advance_orders_the_work_before_it_before_the_work_after_the_wait() -> None:
    def two(machine: Machine, waits: bool) -> Any:
        count, x = _core.EventCount(), machine.empty(4)
        s, t = machine.stream(), machine.stream()

        def first() -> None:
            machine.launch(s, lambda x: x.fill(1), writes=[x])
            s.synchronize()
            count.advance()

        def second() -> None:
            if waits:
                count.wait(1)
            machine.launch(t, lambda x: x.fill(2), writes=[x])

        machine.spawn(first)
        machine.spawn(second)
        machine.join()
        return x

    assert explore(partial(two, waits=True)).ok
    assert explore(partial(two, waits=False)).races > 0


def test_the_promise_of_apart_leaves_orders_of_host_memory_out() -> None:
    def sums_in(machine: Machine, apart: bool) -> Any:
        outs = [np.zeros(2), np.zeros(2)]
        threads = [
            machine.spawn(partial(fanin.add_n, [np.ones(2)], out=out), apart=k if apart else None)
            for k, out in enumerate(outs)
        ]
        machine.join()
        return [t.result for t in threads]

    assert explore(partial(sums_in, apart=False)).runs == 2
    assert explore(partial(sums_in, apart=True)).runs == 1
    with pytest.raises(ValueError, match="apart: expected a non-negative number, got -1"), Machine() as m:
        m.spawn(print, apart=-1)
