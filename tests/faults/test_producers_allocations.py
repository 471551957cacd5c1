"""Each allocation of the walk over a graph of torch's, and of the hooks of its producers, fails once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fanin import _core
from kit import hooks

testcapi = pytest.importorskip("_testcapi", reason="this Python has no _testcapi, which makes its allocations fail")
torch = pytest.importorskip("torch")
ft = pytest.importorskip("fanin.torch")

pytestmark = pytest.mark.partners

N = 5  # gradients that meet
BFLOAT16 = torch.bfloat16


class Node:
    """A node of a graph: what the walk reads of one of torch's."""

    def __init__(self, *next_functions: tuple[Any, int]) -> None:
        self.next_functions = next_functions


def graph(width: int) -> tuple[Node, Node]:
    """A root, and a leaf to which so many nodes lead."""
    leaf = Node((None, 0))
    return Node(*((Node((leaf, 0), (leaf, 1)), 0) for _ in range(width))), leaf


class PythonAttempt:
    """`with attempt:` runs its block while one of Python's allocations fails; Python's error or torch's ends it."""

    def __init__(self, n: int) -> None:
        self.n, self.failed = n, False

    def __enter__(self) -> None:
        testcapi.set_nomemory(self.n, self.n + 1)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        testcapi.remove_mem_hooks()
        self.failed = kind in (MemoryError, torch.OutOfMemoryError)
        return self.failed


def python_attempts(well: int) -> Iterator[PythonAttempt]:
    """Python's first allocation fails, the second ..: until so many attempts in turn went well."""
    went = 0
    for n in range(100_000):
        attempt = PythonAttempt(n)
        yield attempt
        went = 0 if attempt.failed else went + 1
        if went == well:
            return
    raise AssertionError("allocations still fail")


def failures(attempts: Iterator[Any], width: int) -> int:
    """Walk a graph once in each attempt: how many failed. Each of the others finds every place and edge."""
    root, leaf = graph(width)
    failed = 0
    for attempt in attempts:
        found: Any = None
        with attempt:
            found = _core._fan_ins([(root, 0)], 2, 0)
        failed += attempt.failed
        if not attempt.failed:
            nodes, several = found
            assert len(nodes) == width + 2
            assert {key: len(edges) for key, edges in several.items()} == {(leaf, 0): width, (leaf, 1): width}
    return failed


def test_a_walk_without_memory_of_the_core_is_a_memory_error() -> None:
    blocks = hooks.blocks()
    assert failures(hooks.attempts(), 300) > 10  # the table and each list grow several times
    assert hooks.blocks() == blocks


def test_a_walk_finds_the_places_of_many_gradients_alone_and_the_nodes_of_large_graphs() -> None:
    root, leaf = graph(5)
    single = Node()
    both = [(Node((root, 0), (single, 0)), 0), (single, 0)]
    found = {(leaf, i): [(n, i) for n, _ in root.next_functions[::-1]] for i in (0, 1)}  # the last one is read first
    assert _core._fan_ins(both, 3, 9) == (None, found)
    nodes, several = _core._fan_ins(both, 2, 8)
    assert nodes == {both[0][0], root, leaf, single, *(n for n, _ in root.next_functions)}
    assert several[single, 0] == [(None, 1), (both[0][0], 1)]
    assert gc.isenabled()


class Numbered:
    """A producer, and the number that torch gave it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _sequence_nr(self) -> int:
        return self.number


def test_producers_are_in_the_order_of_their_numbers_and_edges() -> None:
    first, last = Numbered(1), Numbered(2)
    slots = [[(first, 1), (last, 0), (first, 0)], [(None, 1), (last, 1)]]
    nodes, layout = _core._in_order(slots, [None, first])
    assert nodes == [last, first]
    numbers = memoryview(layout).cast("i").tolist()
    assert numbers == [0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 2, 0, 1, 1, 0, 1, 0, 1, 1]


def test_an_order_without_memory_is_a_memory_error_and_leaks_nothing() -> None:
    nodes = [Numbered(i) for i in range(30)]
    slots: list[list[tuple[Any, int]]] = [[(n, 0) for n in nodes], [(n, 1) for n in nodes]]
    blocks, failed = hooks.blocks(), 0
    for attempts in (hooks.attempts(), python_attempts(12)):
        for attempt in attempts:
            found: Any = None
            with attempt:
                found = _core._in_order(slots, [])
            failed += attempt.failed
            if not attempt.failed:
                assert found[0] == nodes[::-1]
    assert failed > 4
    assert hooks.blocks() == blocks
    gc.collect()
    del nodes, slots, found
    assert not [x for x in gc.get_objects() if type(x) is Numbered]


class Handle:
    """What torch's handle of a hook has."""

    def __init__(self, hooks: Any, number: int) -> None:
        self.hooks_dict_ref, self.id = (lambda: hooks), number


def test_hooks_are_removed_by_their_handles_also_those_that_are_gone() -> None:
    of_node = {1: "ours", 2: "the user's", 3: "ours"}
    handles = [Handle(of_node, 1), Handle(None, 5), Handle(of_node, 3), Handle(of_node, 9)]
    _core._remove_hooks(handles)
    assert of_node == {2: "the user's"} and handles == []
    with pytest.raises(AttributeError, match="hooks_dict_ref"):
        _core._remove_hooks([object()])


def test_a_walk_without_memory_of_python_is_a_memory_error_and_leaks_nothing() -> None:
    gc.collect()
    assert failures(python_attempts(40), 40) > 20
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Node]


class Producers:
    """The hooks of one pass, called as torch calls them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.gradients = [torch.randn(40).to(BFLOAT16) for _ in range(N)]
        self.arrived: list[int] = []
        self.begin()

    def begin(self) -> None:
        self.sums = ft.fan_ins._Sums([ft.fan_ins._FanIn("leaf", (40,), BFLOAT16, True, False, N)], None, b"", False)
        sums = self.sums
        sums.task[0] = 7
        lock = threading.Lock()
        self.lock = lock
        self.hooks = _core._producers(
            sums.buffer, sums.task, lambda: 7, sums.coming, sums.kept, sums.places, torch.empty_like, sums.buffer.add,
            sums.buffer.take, lock.acquire, lock.release, self.arrive, [((0, 0, k, BFLOAT16),) for k in range(N)],
        )  # fmt: skip

    def arrive(self, slot: int, key: int, gradient: Any) -> Any:
        self.arrived.append(key)
        return self.sums.arrive(slot, key, gradient)

    def run(self) -> Any:
        """The memory that torch keeps: the sum."""
        made = [hook((g,), (g,)) for hook, g in zip(self.hooks, self.gradients, strict=True)]
        assert [one[0] is None for one in made] == [False] + [True] * (N - 1)
        return made[0][0]


def expected(producers: Producers) -> Any:
    wide = producers.gradients[0].float()
    for g in producers.gradients[1:]:
        wide = wide + g.float()
    return wide.to(BFLOAT16)


def test_the_hooks_sum_plain_gradients_themselves() -> None:
    producers = Producers()
    for _ in range(2):  # torch's table is read in the first pass
        producers.begin()
        producers.arrived.clear()
        assert torch.equal(producers.run(), expected(producers))
    assert producers.arrived == [] and producers.sums.coming == [0] and not producers.sums.places


def test_hooks_without_memory_of_the_core_are_memory_errors_and_the_next_pass_is_right() -> None:
    producers = Producers()
    producers.run()
    failed = 0
    for attempt in hooks.attempts(well=8):
        total = None
        with attempt:
            producers.begin()
            total = producers.run()
        failed += attempt.failed
        assert not producers.lock.locked()
        if not attempt.failed:
            assert torch.equal(total, expected(producers))
        producers.sums.end()
        assert not producers.sums.places
    assert failed > 3


def test_a_hook_without_memory_of_python_is_a_memory_error_and_the_lock_is_free() -> None:
    producers = Producers()
    producers.run()
    failed = 0
    for attempt in python_attempts(12):
        producers.begin()
        hook, g = producers.hooks[0], producers.gradients[0]
        places = producers.sums.places
        with attempt:
            hook((g,), (g,))
        failed += attempt.failed
        assert not producers.lock.locked()
        if attempt.failed:
            assert producers.sums.kept[0] <= 1 and len(places) <= 1
        producers.sums.end()
    assert failed > 0


def test_a_pass_without_memory_of_the_core_is_a_memory_error_and_the_next_one_is_right() -> None:
    torch.manual_seed(0)
    xs = torch.randn(40, 60).to(BFLOAT16)
    w = torch.ones(60, dtype=BFLOAT16, requires_grad=True)

    def grad() -> Any:
        w.grad = None
        ft.backward(sum((w * x).sum() for x in xs))
        return w.grad

    right = grad().clone()
    failed = 0
    for attempt in hooks.attempts(well=2):
        with attempt:
            grad()
        failed += attempt.failed
        assert torch.equal(grad(), right)
    assert failed > 5
