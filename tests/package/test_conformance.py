"""fanin.conformance finds what it is for: each law has a planted fault that breaks it; and docs/conformance.md has what
the suite finds.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.conformance import test_buffer, test_engine
from kit.c_api import ConformingBuffer
from kit.engines import Dict, DictBuffer, Pullback, Value, plus
from kit.sample import every
from kit.support import ROOT

spec = importlib.util.spec_from_file_location("conformance_page", ROOT / "docs" / "conformance.py")
assert spec and spec.loader
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)

# Buffers with one fault each


class Buffer:
    """fanin's own buffer, with methods that a fault replaces."""

    make: Callable[[int], Any] = fanin.InputBuffer

    def __init__(self, n: int) -> None:
        self.n, self.own = n, type(self).make(n)

    def __getitem__(self, slot: int) -> Any:
        return self.own[slot]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def add(self, slot: int, g: Any, *, key: int | None = None, stream: Any = None) -> None:
        self.own.add(slot, g, key=key, stream=stream)

    def take(self, stream: Any = None) -> list[Any]:
        return self.own.take(stream)


class FoldsFromTheEnd(Buffer):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.parts: list[tuple[int, Any]] = []

    def add(self, slot: int, g: Any) -> None:  # type: ignore[override]
        self.parts.append((slot, g))

    def take(self, stream: Any = None) -> list[Any]:
        while self.parts:
            self.own.add(*self.parts.pop())
        return self.own.take()


class IgnoresKeys(Buffer):
    def add(self, slot: int, g: Any, *, key: int | None = None, stream: Any = None) -> None:
        self.own.add(slot, g, stream=stream)


class MixesSlots(Buffer):
    def add(self, slot: int, g: Any) -> None:  # type: ignore[override]
        self.own.add(slot // 2, g)


class CopiesTheOnlyOne(Buffer):
    def take(self, stream: Any = None) -> list[Any]:
        return [None if x is None else x.copy() for x in self.own.take()]


class ReusesItsResults(Buffer):
    def take(self, stream: Any = None) -> list[Any]:
        new = self.own.take()
        self.kept = getattr(self, "kept", new)
        for old, x in zip(self.kept, new, strict=True):
            old[...] = x
        return self.kept  # type: ignore[no-any-return]


class ShowsItsOwnSum(DictBuffer):
    def __getitem__(self, slot: int) -> Any:
        return self.sums[slot]


class KeepsWhatWasTaken(Buffer):
    def take(self, stream: Any = None) -> list[Any]:
        return [self.own[i] for i in range(self.n)]


class ZeroForUndefined(Buffer):
    def take(self, stream: Any = None) -> list[Any]:
        return [np.zeros(2) if x is None else x for x in self.own.take()]


class WrapsSlots(Buffer):
    def add(self, slot: int, g: Any) -> None:  # type: ignore[override]
        self.own.add(slot % self.n, g)


class ExpectsNothing(Buffer):
    def expect(self, slot: int, n: int) -> None:
        pass

    def ready(self, slot: int) -> bool:
        return True


class ClearsNothing(Buffer):
    def clear(self) -> None:
        pass


class SwallowsErrors(Buffer):
    def add(self, slot: int, g: Any) -> None:  # type: ignore[override]
        try:
            self.own.add(slot, g)
        except TypeError:
            pass


def wait_a_little() -> None:
    """Time in which the interpreter switches threads."""
    for _ in range(10_000):
        pass


class LosesUpdates(DictBuffer):
    lacks: Mapping[str, str] = {}

    def add(self, slot: int, g: Any) -> None:  # type: ignore[override]
        old = self.sums.get(slot)
        wait_a_little()
        self.sums[slot] = g if old is None else old + g


class WritesIntoTheFirst(DictBuffer):
    """Waits for each producer, and for nothing else that uses the first gradient."""

    def add(self, slot: int, g: Any, *, stream: Any = None) -> None:
        with fanin.stream(stream):
            if slot in self.sums:
                fanin.add_n([self.sums[slot], g], out=self.sums[slot])
            else:
                self.sums[slot] = g
        self.last = stream

    def take(self, stream: Any = None) -> list[Any]:
        stream.wait(self.last)
        return super().take()


BUFFERS: dict[type, Sequence[str]] = {
    FoldsFromTheEnd: ["a_sum_is_the_left_fold_in_the_order_of_arrival"],
    IgnoresKeys: [
        "the_order_of_arrival_does_not_matter_to_a_keyed_sum",
        "gaps_between_keys_are_skipped_at_take",
        "a_key_contributes_once",
        "keyed_and_unkeyed_do_not_mix",
        "a_keyed_sum_does_not_depend_on_threads",
    ],
    MixesSlots: ["slots_do_not_meet"],
    DictBuffer: [
        "what_the_caller_added_is_never_written",
        "one_array_sent_to_two_slots_stays_as_it_is",
        "shapes_are_never_broadcast_silently",
        "a_sum_of_several_streams_waits_for_each_producer",
        "a_single_contribution_waits_for_its_producer",
    ],
    CopiesTheOnlyOne: ["a_single_contribution_is_handed_through"],
    ReusesItsResults: ["a_sum_that_was_taken_is_not_changed_by_the_next_pass"],
    ShowsItsOwnSum: ["a_snapshot_is_not_changed_by_later_adds"],
    KeepsWhatWasTaken: ["a_taken_buffer_is_empty"],
    ZeroForUndefined: ["undefined_is_not_zero"],
    WrapsSlots: ["a_slot_that_is_not_there_is_an_error_and_changes_nothing"],
    ExpectsNothing: ["one_too_many_is_an_error_at_add_and_one_missing_at_take"],
    ClearsNothing: ["a_cleared_buffer_is_empty"],
    SwallowsErrors: ["what_is_no_array_is_an_error_and_changes_nothing"],
    LosesUpdates: ["each_contribution_of_several_threads_is_summed_once"],
    WritesIntoTheFirst: ["what_another_stream_still_reads_is_never_written"],
}

#: The same faults in front of a buffer of the C API.
OF_C = {f: type(f"{f.__name__}OfC", (f,), {"make": ConformingBuffer}) for f in BUFFERS if issubclass(f, Buffer)}
globals().update({made.__name__: made for made in OF_C.values()})

# Engines with one fault each


class InFloat32(Dict):
    def call(self, v: Value, g: Any) -> Sequence[Any]:
        return [np.asarray(p, np.float32) for p in super().call(v, g)]


class LastWins(Dict):
    def accumulate(self, sums: dict[Value, Any], x: Value, part: Any) -> None:
        sums[x] = part


class DepthFirst(Dict):
    """Each gradient is forwarded at once."""

    def backward(self, root: Value, gradient: Any) -> None:
        if root.pullback is None:
            root.grad = gradient if root.grad is None else root.grad + gradient
            return
        for x, part in zip(root.inputs, root.pullback(gradient), strict=True):
            self.backward(x, part)


class InListOrder(Dict):
    """Sums lists of gradients in an order of its own."""

    def order(self, parts: list[Any]) -> Any:
        raise NotImplementedError

    def accumulate(self, sums: dict[Value, Any], x: Value, part: Any) -> None:
        sums.setdefault(x, []).append(part)

    def call(self, v: Value, g: Any) -> Sequence[Any]:
        return super().call(v, self.order(g) if isinstance(g, list) else g)

    def grad(self, leaf: Value) -> Any:
        return self.order(leaf.grad)


class InPairs(InListOrder):
    def order(self, parts: list[Any]) -> Any:
        while len(parts) > 1:
            parts = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return parts[0]


class InAnyOrder(InListOrder):
    def order(self, parts: list[Any]) -> Any:
        return functools.reduce(np.add, random.sample(parts, len(parts)))


class RunsAll(Dict):
    """Runs every operation that was ever made, also on zeros."""

    def __init__(self) -> None:
        self.made: list[Value] = []

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Value], *, stream: Any = None) -> Value:
        self.made.append(super().op(value, pullback, inputs))
        return self.made[-1]

    def backward(self, root: Value, gradient: Any) -> None:
        for v in self.made:
            self.call(v, np.zeros(3))
        super().backward(root, gradient)


class ZeroForNone(Dict):
    def accumulate(self, sums: dict[Value, Any], x: Value, part: Any) -> None:
        super().accumulate(sums, x, np.zeros(3) if part is None else part)


class LeavesInPlace(Dict):
    def backward(self, root: Value, gradient: Any) -> None:
        leaves: dict[Value, Any] = {}
        for x in root.inputs:
            leaves[x], x.grad = x.grad, None
        super().backward(root, gradient)
        for x, old in leaves.items():
            if old is not None:
                old += x.grad
                x.grad = old


class ReplacesGradients(Dict):
    def backward(self, root: Value, gradient: Any) -> None:
        for x in root.inputs:
            x.grad = None
        super().backward(root, gradient)


class KeepsSums(Dict):
    """As micrograd: sums of operations stay until they are set to zero."""

    def backward(self, root: Value, gradient: Any) -> None:
        root.grad = gradient if root.grad is None else root.grad + gradient
        found, stack = {root}, [root]
        while stack:
            new = [x for x in stack.pop().inputs if x not in found]
            found.update(new)
            stack += new
        for v in sorted(found, key=lambda v: -v.number):
            for x, part in zip(v.inputs, () if v.pullback is None else v.pullback(v.grad), strict=True):
                x.grad = part if x.grad is None else x.grad + part


class OnePassAtATime(Dict):
    """It remembers one operation that runs, not one for each pass."""

    lacks: Mapping[str, str] = {}

    def call(self, v: Value, g: Any) -> Sequence[Any]:
        self.now = v
        parts = super().call(v, g)
        wait_a_little()
        if self.now is not v:
            return [p * 2 for p in parts]
        return parts


class SwallowsErrorsOfPullbacks(Dict):
    def call(self, v: Value, g: Any) -> Sequence[Any]:
        try:
            return super().call(v, g)
        except Exception:
            return [g for _ in v.inputs]


class LosesPasses(Dict):
    lacks: Mapping[str, str] = {}

    def backward(self, root: Value, gradient: Any) -> None:
        [leaf] = root.inputs
        old = leaf.grad
        wait_a_little()
        assert root.pullback is not None
        [g] = root.pullback(gradient)
        leaf.grad = g if old is None else plus(old, g)


ENGINES: dict[type, Sequence[str]] = {
    InFloat32: ["a_chain_composes_its_pullbacks"],
    LastWins: ["a_value_that_is_used_twice_gets_the_sum", "one_operation_may_use_a_value_twice"],
    DepthFirst: [
        "each_pullback_gets_the_whole_sum",
        "each_pullback_runs_once_after_those_that_use_its_result",
        "a_ladder_of_diamonds_takes_one_call_each",
        "a_chain_may_be_deeper_than_the_stack",
    ],
    InPairs: ["a_sum_is_a_left_fold_in_some_order"],
    InAnyOrder: ["a_graph_that_is_built_again_gives_the_same_bits"],
    RunsAll: ["what_the_root_does_not_depend_on_is_not_run"],
    ZeroForNone: ["undefined_adds_nothing"],
    Dict: [
        "one_array_for_two_inputs_stays_as_it_is",
        "what_a_pullback_returned_is_never_written",
        "the_gradient_that_a_pass_begins_with_is_never_written",
        "a_gradient_may_be_read_only_or_broadcast",
        "a_wrong_number_of_gradients_is_an_error",
        "a_gradient_of_another_shape_is_an_error",
        "a_first_gradient_of_another_shape_is_an_error",
        "a_sum_of_several_streams_waits_for_each_producer",
        "a_gradient_that_is_handed_on_waits_for_its_producer",
    ],
    LeavesInPlace: ["the_gradients_of_two_leaves_share_no_memory"],
    ReplacesGradients: ["passes_add_up"],
    KeepsSums: ["a_second_pass_over_a_graph_is_right_or_refused", "no_leaf_is_left_half_summed"],
    OnePassAtATime: ["a_pass_may_begin_inside_a_pullback", "passes_of_several_threads_are_independent"],
    SwallowsErrorsOfPullbacks: ["the_error_of_a_pullback_reaches_the_caller"],
    LosesPasses: ["each_pass_of_several_threads_is_summed_once"],
}


def laws(module: Any) -> list[str]:
    return [name.removeprefix("test_") for name in vars(module) if name.startswith("test_")]


@pytest.mark.parametrize("faulty", [*BUFFERS, *every(4, [*OF_C.values()]), *ENGINES], ids=lambda t: t.__name__)
def test_a_planted_fault_breaks_its_laws(faulty: type) -> None:
    fault = faulty.__base__ if faulty in OF_C.values() else faulty
    kind, want = ("buffer", BUFFERS[fault]) if fault in BUFFERS else ("engine", ENGINES[faulty])
    module = "kit.engines" if faulty in (Dict, DictBuffer) else "package.test_conformance"
    found = page.outcomes(kind, f"{module}:{faulty.__name__}", " or ".join(want))
    assert [law for law in want if found[law][0] != "no"] == [], found


def test_each_law_has_a_fault_that_it_finds() -> None:
    assert set(laws(test_buffer)) == {law for broken in BUFFERS.values() for law in broken}
    assert set(laws(test_engine)) == {law for broken in ENGINES.values() for law in broken}


# The page


def table(kind: str) -> dict[str, dict[str, str]]:
    """The cells of docs/conformance.md by subject and law."""
    text = (ROOT / "docs" / "conformance.md").read_text()
    lines = re.split(r"^##", text.split(f"### Laws of {kind}s", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    head, _, *rows = [[c.strip() for c in x.strip("|").split("|")] for x in lines.splitlines() if x.startswith("|")]
    return {subject: {row[0]: row[i] for row in rows} for i, subject in enumerate(head) if i}


def test_the_page_has_every_law_and_every_subject() -> None:
    for kind, module in (("buffer", test_buffer), ("engine", test_engine)):
        cells = table(kind)
        assert list(cells) == [s.title for s in page.SUBJECTS[kind]]
        for subject in cells.values():
            assert list(subject) == [page.sentence(law) for law in laws(module)]


def compared(kind: str, title: str) -> None:
    [subject] = [s for s in page.SUBJECTS[kind] if s.title == title]
    found = (page.measured if subject.package else page.outcomes)(kind, subject.factory)
    assert {page.sentence(law): outcome for law, (outcome, _) in found.items()} == table(kind)[title]


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        *[("fanin", "buffer"), ("fanin", "engine"), ("fanin.h", "buffer"), ("reference", "buffer")],
        *[("dict of +=", "buffer"), ("dict of +=", "engine")],
        pytest.param("reference", "engine", marks=pytest.mark.full),  # plain Python takes two seconds
    ],
)
def test_the_page_has_what_the_suite_finds(kind: str, title: str) -> None:
    compared(kind, title)
    if title.startswith("fanin"):
        assert set(table(kind)[title].values()) == {"yes"}


def test_the_handle_of_an_input_buffer_holds_every_law() -> None:
    found = page.outcomes("buffer", "kit.c_api:conforming_handle")
    assert len(found) == len(laws(test_buffer)) and {outcome for outcome, _ in found.values()} == {"yes"}, found


@pytest.mark.partners
@pytest.mark.parametrize("subject", [s for s in page.SUBJECTS["engine"] if s.package], ids=lambda s: s.title)
def test_the_page_has_what_the_suite_finds_of_others(subject: Any) -> None:
    """Of those that are installed, in the version of the page."""
    try:
        found = importlib.metadata.version(subject.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{subject.title} is not installed")
    [versions] = re.findall(r"^Versions: (.*)\.$", (ROOT / "docs" / "conformance.md").read_text(), re.MULTILINE)
    if f"{subject.title} {found.partition('+')[0]}" not in versions.split(", "):
        pytest.skip(f"{subject.title} {found} is installed, which is not the page's version")
    compared("engine", subject.title)


class Dies(Dict):
    """The process ends in one law: it begins a second pass over a graph."""

    def backward(self, root: Value, gradient: Any) -> None:
        if root.grad is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        root.grad = gradient
        super().backward(root, gradient)


def test_a_law_in_which_the_process_dies_is_a_no_and_the_others_are_found() -> None:
    found = page.measured("engine", "package.test_conformance:Dies")
    law = "a_second_pass_over_a_graph_is_right_or_refused"
    assert [one for one, outcome in found.items() if outcome == page.DIED] == [law] and found[law][0] == "no"
    assert found["a_chain_composes_its_pullbacks"][0] == "yes" and list(found) == laws(test_engine)


def test_an_engine_that_cannot_be_made_is_an_error_of_the_page() -> None:
    with pytest.raises(RuntimeError, match="the suite did not run"):
        page.measured("engine", "package.test_conformance")


def test_each_law_has_its_cost_and_its_reason_on_the_page() -> None:
    for kind, module in (("buffer", test_buffer), ("engine", test_engine)):
        assert list(page.REASONS[kind]) == laws(module)
        assert page.reasons_table(kind) in (ROOT / "docs" / "conformance.md").read_text()


def test_the_example_of_the_page_keeps_each_law_for_which_it_has_a_call(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "conformance.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [command] = re.findall(r"^python (-m pytest .* my_engine:Engine .*)$", text, re.MULTILINE)
    assert code == page.EXAMPLE and sum(map(bool, code.splitlines())) <= 35
    (tmp_path / "my_engine.py").write_text(code)
    words = [*command.split(), "-p", "no:cacheprovider", "-q"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    counted = re.search(r"^(\d+) passed, (\d+) skipped", done.stdout, re.MULTILINE)
    assert counted and int(counted[1]) >= 33 and int(counted[2]) == 8, "threads and streams alone are skipped"
