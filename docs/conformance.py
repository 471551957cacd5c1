# ruff: noqa: E501  (the text of a page has a sentence a line)
"""Writes conformance.md: what fanin.conformance finds of fanin and of other engines. It takes some minutes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests"), str(ROOT)]


class Subject(NamedTuple):
    title: str
    factory: str
    package: str | None = None  #: The distribution whose version the page has


SUBJECTS = {
    "buffer": [
        Subject("fanin", "fanin:InputBuffer"),
        Subject("fanin.h", "kit.c_api:ConformingBuffer"),
        Subject("reference", "kit.engines:ReferenceBuffer"),
        Subject("dict of +=", "kit.engines:DictBuffer"),
    ],
    "engine": [
        Subject("fanin", "fanin.conformance.engines:Fanin"),
        Subject("reference", "kit.engines:Reference"),
        Subject("dict of +=", "kit.engines:Dict"),
        Subject("torch", "kit.engines:Torch", "torch"),
        Subject("Paddle", "kit.engines:Paddle", "paddlepaddle"),
        Subject("HIPS autograd", "kit.engines:Hips", "autograd"),
        Subject("MyGrad", "kit.engines:MyGrad", "mygrad"),
        Subject("tinygrad", "kit.engines:Tinygrad", "tinygrad"),
        Subject("micrograd", "kit.engines:Micrograd", "micrograd"),
        Subject("DeZero", "kit.engines:DeZero", "dezero"),
        Subject("edugrad", "kit.engines:Edugrad", "edugrad"),
        Subject("SmallPebble", "kit.engines:SmallPebble", "smallpebble"),
    ],
}

#: An engine that the page shows, and that a test runs.
EXAMPLE = """\
import itertools

import numpy as np


class Value:
    numbers = itertools.count()

    def __init__(self, array, pullback=None, inputs=()):
        self.shape, self.pullback, self.inputs = array.shape, pullback, inputs
        self.number, self.grad = next(Value.numbers), None

    def accepts(self, g):
        if np.shape(g) != self.shape:
            raise ValueError(f"expected a gradient of shape {self.shape}, got {np.shape(g)}")
        return g


class Engine:
    lacks = {"threads": "written for one thread"}

    def leaf(self, array):
        return Value(array)

    def op(self, value, pullback, inputs):
        return Value(value, pullback, inputs)

    def backward(self, root, gradient):
        sums, leaves = {root: root.accepts(gradient)}, {}
        while sums:
            value = max(sums, key=lambda v: v.number)  # all that use it have run
            g = sums.pop(value)
            if value.pullback is None:
                leaves[value] = g
                continue
            for x, part in zip(value.inputs, value.pullback(g), strict=True):
                if part is not None:
                    part = x.accepts(part)
                    sums[x] = sums[x] + part if x in sums else part
        for leaf, g in leaves.items():  # at the end: an error before leaves each leaf as it was
            leaf.grad = np.array(g) if leaf.grad is None else leaf.grad + g

    def grad(self, leaf):
        return leaf.grad
"""

TEXT = """# Conformance

For authors of engines, and for those who choose one.
`fanin.conformance` is a suite of laws for buffers of gradients and for engines: you name a function that makes yours, and pytest says which laws it keeps.

## What the suite calls

An engine has four methods.
Its values are objects of its own, which the suite only passes back to it.

| method | what it does |
|---|---|
| `leaf(array)` | returns a value whose gradient is kept |
| `op(value, pullback, inputs)` | returns the value that an operation made of the values `inputs`; `value` is its array. In a pass `pullback(g)` gets the gradient of the result and returns a sequence with one gradient for each input; None is "undefined" |
| `backward(root, gradient)` | runs a pass from the value `root`, whose gradient is given |
| `grad(leaf)` | returns the gradient of a leaf as something that NumPy can read, or None |

With a parameter `stream=`, `op` gets the stream on which the pullback runs, and the laws about streams are checked, too.

A buffer has n slots, numbered from 0, in which gradients are summed.

| method | what it does |
|---|---|
| `make_buffer(n)` | returns an empty buffer of n slots |
| `add(slot, g)` | adds a gradient to a slot, or, for None, nothing. With `key=` the sum is in the order of the keys; with `stream=` the gradient is ready on that stream |
| `take()` | returns the list of all sums, None for a slot without one, and empties the buffer. With `stream=` the sums are ready on that stream |
| `buffer[slot]` | optional: the sum so far, which later adds do not change |
| `expect(slot, n)`, `ready(slot)`, `clear()` | optional: the number of contributions that a slot awaits; whether they have come; empties the buffer |

A law about an optional part is skipped where the part is missing.
An attribute `lacks`, a dict, names the parts for which there is no call, each with its reason: `"threads"` (calls belong to one thread), `"streams"` (arrays are not on the simulated machine), and of engines `"accumulate"` (passes do not add up in a leaf), `"undefined"` (a pullback may not return None), `"arrays"` (gradients may not be read-only or broadcast).

## An engine that keeps each law it can

Save it as `my_engine.py`:

```python
%(example)s```

Then run the suite in that folder:

```
python -m pytest -p fanin.testing.plugin --pyargs fanin.conformance --fanin-engine my_engine:Engine -k test_engine
```

The laws about threads and streams are skipped with their reasons (`-rs` shows them), and all others hold.
For a buffer, it is `--fanin-buffer mypkg:make_buffer -k test_buffer`.
`fanin.conformance.engines` is fanin's own engine as the suite calls it.

## What a law costs, and why it is a law

A law states what fanin does.
"Costs" is what an engine pays to keep the law; "without it" is what goes wrong in a training that has no such law.

%(reasons)s

## What the suite finds

Not each engine promises each law, so that a "no" is a difference, not a defect.
A "yes": the law held in all cases of this run.
A "no": it did not in at least one.
A "-": there is no call for it, for the reason below the table.
The adapters of `tests/kit/engines.py` call the engines of others as authors of new operations do.
The column `fanin.h` is [the C API](c-api.md): a buffer that is made, filled and taken by its table alone.
`python docs/conformance.py` writes this page; an engine of another package runs in a process of its own, and a law in which that process dies is a "no".
"""

#: Of each law: what it costs, and what goes wrong without it.
REASONS = {
    "buffer": {
        "a_sum_is_the_left_fold_in_the_order_of_arrival": (
            "nothing: one pass over the terms adds them in that order",
            "another order of additions rounds differently, so that two runs cannot be compared bit by bit",
        ),
        "the_order_of_arrival_does_not_matter_to_a_keyed_sum": (
            "a sort by key, and memory for terms that arrived before their turn",
            "threads and streams arrive in another order in each run, and the bits change with it",
        ),
        "gaps_between_keys_are_skipped_at_take": (
            "nothing",
            "an edge that gives no gradient has a key as well, and the sum would wait for it",
        ),
        "slots_do_not_meet": ("nothing", "the gradients of two operands are mixed"),
        "what_the_caller_added_is_never_written": (
            "a new array for the first sum of two, unless nothing else holds the first term",
            "an in-place += changes an array that the caller, or another operation, still reads",
        ),
        "one_array_sent_to_two_slots_stays_as_it_is": (
            "the same new array",
            "z = x + y gives one array to both; the sum for x is then in the gradient of y",
        ),
        "a_single_contribution_is_handed_through": (
            "nothing; it saves a copy",
            "most slots get one gradient, and each is copied for nothing",
        ),
        "a_sum_that_was_taken_is_not_changed_by_the_next_pass": (
            "memory of a result is used again only when nothing holds the result",
            "a .grad that was kept changes under its owner",
        ),
        "a_snapshot_is_not_changed_by_later_adds": (
            "a copy, if the snapshot is still held at the next add",
            "a value that was logged or compared is no longer what it was",
        ),
        "a_taken_buffer_is_empty": ("nothing", "the next pass begins with the sums of the one before"),
        "undefined_is_not_zero": (
            "one state more for each slot",
            "memory and a kernel for each zero; and an operation that no gradient reaches runs all the same",
        ),
        "a_slot_that_is_not_there_is_an_error_and_changes_nothing": (
            "one comparison",
            "slot -1 is the last one in Python: the gradient goes to another operand",
        ),
        "shapes_are_never_broadcast_silently": (
            "one comparison of shapes",
            "(3, 1) and (3,) add up to (3, 3): a wrong gradient without an error",
        ),
        "a_key_contributes_once": (
            "a look-up among the keys of the slot",
            "an edge that runs twice counts twice, without an error",
        ),
        "keyed_and_unkeyed_do_not_mix": (
            "one flag for each slot",
            "a term without a key has no place in the order, so that the bits depend on its arrival again",
        ),
        "one_too_many_is_an_error_at_add_and_one_missing_at_take": (
            "one counter for each slot",
            "a lost or doubled gradient is a wrong sum without an error",
        ),
        "a_cleared_buffer_is_empty": ("nothing", "after an error the next pass begins with what the failed one left"),
        "what_is_no_array_is_an_error_and_changes_nothing": (
            "a look-up of the type",
            "the error comes at take, far from the operation that caused it",
        ),
        "each_contribution_of_several_threads_is_summed_once": (
            "a lock, held while a term is recorded and not while terms are summed",
            "two threads read the same old sum, and one contribution is lost",
        ),
        "a_keyed_sum_does_not_depend_on_threads": (
            "the lock and the sort",
            "the bits change from run to run",
        ),
        "a_sum_of_several_streams_waits_for_each_producer": (
            "an event for a producer's newest work, and a wait for each stream other than the sum's",
            "the sum reads memory that is not written yet; right on most days",
        ),
        "a_single_contribution_waits_for_its_producer": (
            "one event and one wait, if the streams differ",
            "the consumer reads memory that is not written yet",
        ),
        "what_another_stream_still_reads_is_never_written": (
            "a new array for the sum, where the first term has another reader",
            "that reader sees half of a sum",
        ),
    },
    "engine": {
        "a_chain_composes_its_pullbacks": ("nothing", "gradients are wrong, or have another dtype"),
        "a_value_that_is_used_twice_gets_the_sum": ("one addition", "the last use replaces the others"),
        "one_operation_may_use_a_value_twice": ("one addition", "x * x has half of its gradient"),
        "each_pullback_gets_the_whole_sum": (
            "a pullback waits until all uses of its result have run",
            "a pullback runs on a part of its gradient; for one that is not linear in g the result is wrong",
        ),
        "a_sum_is_a_left_fold_in_some_order": (
            "sums in pairs or in parallel are not allowed; one addition after the other",
            "the rounding of a sum depends on how many threads or blocks it was cut into",
        ),
        "a_graph_that_is_built_again_gives_the_same_bits": (
            "an order that the graph determines: a key for each edge",
            "a run cannot be repeated, and a bug cannot be found by comparing bits",
        ),
        "each_pullback_runs_once_after_those_that_use_its_result": (
            "a count of the uses of each value, before the pass",
            "work is repeated, or runs too early",
        ),
        "a_ladder_of_diamonds_takes_one_call_each": (
            "the same count",
            "30 diamonds take 2**30 calls instead of 30",
        ),
        "a_chain_may_be_deeper_than_the_stack": (
            "a queue instead of recursion; also where graphs are freed",
            "a recurrent network of some thousand steps ends the process",
        ),
        "what_the_root_does_not_depend_on_is_not_run": (
            "a walk over the graph before the pass",
            "parts of the model that took no part run, and fail or cost time",
        ),
        "undefined_adds_nothing": (
            "one state more for each gradient",
            "zeros are allocated and added; a frozen branch runs",
        ),
        "one_array_for_two_inputs_stays_as_it_is": (
            "a new array for the first sum of two, unless nothing else holds the first term",
            "the gradient of x is added into that of y",
        ),
        "what_a_pullback_returned_is_never_written": (
            "the same new array",
            "a constant that a pullback keeps and returns is another one in the next pass",
        ),
        "the_gradient_that_a_pass_begins_with_is_never_written": (
            "the same new array",
            "a vector that serves for several passes is changed by the first",
        ),
        "the_gradients_of_two_leaves_share_no_memory": (
            "a copy for a leaf, if the engine does not own the array alone",
            "clipping or scaling one gradient in place changes the other",
        ),
        "a_gradient_may_be_read_only_or_broadcast": (
            "a check of flags before a sum is made in place",
            "an expanded zero is written as if it had its full size, or an error comes from deep inside",
        ),
        "passes_add_up": ("one addition for each leaf", "micro-batches replace each other"),
        "a_second_pass_over_a_graph_is_right_or_refused": (
            "a flag for each operation, or the sums of a pass apart from the graph",
            "the second pass begins with the sums of the first and counts them twice",
        ),
        "a_pass_may_begin_inside_a_pullback": (
            "the state of a pass in an object, not in globals",
            "checkpointing and second derivatives mix the sums of two passes",
        ),
        "the_error_of_a_pullback_reaches_the_caller": (
            "one object to carry it; none may be lost between threads",
            "the caller cannot catch the error by its type, or sees none",
        ),
        "no_leaf_is_left_half_summed": (
            "leaves are written at the end, or when all their uses have run",
            "after an error that is caught, a leaf holds part of a gradient, and the next step uses it",
        ),
        "a_wrong_number_of_gradients_is_an_error": (
            "one comparison",
            "the last inputs get no gradient, and the model does not learn there",
        ),
        "a_gradient_of_another_shape_is_an_error": (
            "one comparison of shapes",
            "NumPy broadcasts it, and the error appears in the optimizer, or never",
        ),
        "a_first_gradient_of_another_shape_is_an_error": (
            "one comparison of shapes",
            "the loss is not the one that was meant",
        ),
        "passes_of_several_threads_are_independent": (
            "the state of a pass in an object; locks where graphs meet",
            "two passes share sums",
        ),
        "each_pass_of_several_threads_is_summed_once": (
            "a lock for each leaf",
            "one of two passes is lost",
        ),
        "a_sum_of_several_streams_waits_for_each_producer": (
            "an event for each producer and a wait for each stream other than the sum's",
            "the sum reads memory that is not written yet; right on most days",
        ),
        "a_gradient_that_is_handed_on_waits_for_its_producer": (
            "one event and one wait, if the streams differ",
            "the next operation reads memory that is not written yet",
        ),
    },
}

DIED = ("no", "the process died")
REPORT = '{"law":'  #: How a line of `Collector.report` begins

NOT_MEASURED = """## Not measured

| engine | why |
|---|---|
| VibeTensor (NVlabs/vibetensor at d444fa4) | builds with CUDA alone: without it, its `CMakeLists.txt` ends with "CUDA is mandatory"; PyPI has no package |
| JAX, MLX | they derive whole functions; there is no graph that the suite could build operation by operation |
| TensorFlow | its tape could be a subject; not tried |
| Chainer 7.8.1 | cannot be imported with NumPy 2 (it reads `np.sctypes`) |
| nnabla | has no package for Python 3.11 or later |
| neograd 0.0.4 | makes arrays of Python objects of all results, whose bits cannot be compared |
| ClumsyGrad 0.2.1 | converts every array to float32 |
| minitorch 0.1.0 | installs a module called `torch`, which hides the real one, and none of its own name |
| needle, candle | PyPI has other projects, or none, under these names |

No other buffer of gradients was found that can be called apart from its engine: torch's `InputBuffer` is C++ without a binding.
"""


def sentence(law: str) -> str:
    return law.replace("_", " ")


def law_of(nodeid: str) -> str:
    return nodeid.partition("::test_")[2].partition("[")[0]


class Collector:
    """A pytest plugin that keeps, of each law, "yes", "no" or "-", and the first message."""

    def __init__(self, reports: bool) -> None:
        self.found: dict[str, tuple[str, str]] = {}
        self.reports = reports  # to another process, as it goes

    def report(self, law: str) -> None:
        """Print the law that runs now, and what was found before."""
        if self.reports:
            print(json.dumps({"law": law, "found": self.found}), flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.report(law_of(nodeid))

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.tbstyle = "native"  # of a traceback the last line alone is kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        law = law_of(report.nodeid)
        if report.failed:
            new = ("no", str(report.longrepr).strip().splitlines()[-1])
        elif report.skipped:
            new = ("-", str(report.longrepr[-1]).removeprefix("Skipped: "))  # type: ignore[index]
        elif report.when == "call":
            new = ("yes", "")
        else:
            return
        if self.found.get(law, ("yes",))[0] != "no":
            self.found[law] = new


def outcomes(kind: str, factory: str, select: str = "", reports: bool = False) -> dict[str, tuple[str, str]]:
    """Of each law, in the order of the suite: "yes", "no" or "-", and the first message."""
    collector = Collector(reports)
    quiet = [word for plugin in ("cacheprovider", "terminal", "faulthandler") for word in ("-p", f"no:{plugin}")]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        pytest.main(
            [*quiet, "-p", "fanin.testing.plugin", "-c", os.devnull, "--rootdir", folder, "--capture=no"]
            + [
                "--pyargs",
                f"fanin.conformance.test_{kind}",
                f"--fanin-{kind}={factory}",
                *(["-k", select] if select else []),
            ],
            plugins=[collector],
        )
    collector.report("")
    return collector.found


def measured(kind: str, factory: str) -> dict[str, tuple[str, str]]:
    """The same, in a process of its own: a law in which that dies is a "no", and the others run in a new one."""
    died: list[str] = []
    while True:
        select = " and ".join(f"not test_{law}" for law in died)
        command = [sys.executable, "-W", "ignore", __file__, kind, factory, select]
        done = subprocess.run(command, capture_output=True, text=True)
        said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(REPORT)]
        if not said or said[-1]["law"] in died:
            raise RuntimeError(f"{factory}: the suite did not run: {done.stderr[-2000:]}")
        if done.returncode == 0:
            found = said[-1]["found"]
            return {law: DIED if law in died else (found[law][0], found[law][1]) for law in REASONS[kind]}
        died.append(said[-1]["law"])


def reasons_table(kind: str) -> str:
    """The table of what each law costs, and why it is one."""
    rows = [f"| {sentence(law)} | {cost} | {why} |" for law, (cost, why) in REASONS[kind].items()]
    return "\n".join([f"### {kind.title()}s", "", "| law | costs | without it |", "|---|---|---|", *rows])


def main() -> None:
    lines = [TEXT % {"example": EXAMPLE, "reasons": "\n\n".join(map(reasons_table, REASONS))}]
    for kind, subjects in SUBJECTS.items():
        results = [measured(kind, s.factory) if s.package else outcomes(kind, s.factory) for s in subjects]
        lines += [f"### Laws of {kind}s", ""]
        lines += [f"| law | {' | '.join(s.title for s in subjects)} |", "|---" * (1 + len(subjects)) + "|"]
        lines += [f"| {sentence(law)} | {' | '.join(r[law][0] for r in results)} |" for law in results[0]]
        versions = [f"{s.title} {version(s.package).partition('+')[0]}" for s in subjects if s.package]
        if versions:
            lines += ["", f"Versions: {', '.join(versions)}."]
        lines += ["", "Laws for which there is no call:", ""]
        for subject, result in zip(subjects, results, strict=True):
            reasons = {reason: None for outcome, reason in result.values() if outcome == "-"}
            if reasons:
                lines.append(f"- {subject.title}: {'; '.join(reasons)}.")
        died = [
            f"{s.title}, {sentence(law)}"
            for s, r in zip(subjects, results, strict=True)
            for law, found in r.items()
            if found == DIED
        ]
        if died:
            lines += ["", f"Laws in which the process died: {'; '.join(died)}."]
        lines.append("")
        print(kind, {s.title: sum(o == "yes" for o, _ in r.values()) for s, r in zip(subjects, results, strict=True)})
    lines.append(NOT_MEASURED)
    (ROOT / "docs" / "conformance.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        kind, factory, select = sys.argv[1:]
        module, _, name = factory.partition(":")
        make = getattr(importlib.import_module(module), name)
        make(*[1] * (kind == "buffer"))  # an engine that cannot be made is an error, and no row of "no"
        outcomes(kind, factory, select, reports=True)
    else:
        main()
