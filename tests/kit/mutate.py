"""Mutants of the C core, and of some Python: one line is changed, and a test must fail.

    python tests/kit/mutate.py --seed 1 --minutes 60                draws, judges and prints verdicts
    python tests/kit/mutate.py --seed 1 --folders engine py/buffer  .. of these folders alone
    python tests/kit/mutate.py --folders python/fanin/dist          .. of Python modules
    python tests/kit/mutate.py --folders array/rows.c --near        .. of one file, and runs the likely tests alone
    python tests/kit/mutate.py --seed 1 --verdicts FILE             .. adds the verdicts to FILE, and skips those in it
    python tests/kit/mutate.py --seed 1 -- tests/laws               .. with other tests after the likely ones
    python tests/kit/mutate.py --seed 1 --list                      prints what the seed draws

The seed draws the mutants: another operator, a constant, a condition, a statement that is left out, two arguments that
change places. Each is planted in a copy of the tree, whose build compiles the changed file alone; then pytest runs
until the first failure: the likely tests first, of these the fastest first. A mutant whose object code is that of the
original cannot be noticed; one that does not compile is no mutant.

A mutant dies where pytest ends with status 1 (a test failed), where a signal ends the test process, or where the tests
do not end; the verdict names which. Before the first mutant the tests run once without one, on the same machine: all
must pass. The tests of a mutant do not end where they take FACTOR times the processor time that they took then, or
where STILL looks in a row find no thread that runs or waits for a processor. Neither is a time of day: on a busy
machine both come later. Any other status (2 interrupted, 3 an internal error, 4 a wrong option, 5 no test) decides
nothing about the mutant and ends the run with a message. So does a test that killed a mutant and also fails in the
unchanged tree, where all of them run at the end.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import math
import operator
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("analysis", "array", "base", "buffer", "device", "engine", "graph", "py")
PYTHON = ("python/fanin/dist", "python/fanin/graph")
PUBLIC = "python/fanin/include"
COPIED = (
    "csrc",
    "python",
    "tests",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "CHANGELOG.md",
    "docs",
    "examples",
    "benchmarks",
)

#: The first tests that are run, by the beginning of a file's path, without csrc/: those likely to notice a fault there.
#: All entries that match are used, the first lines first.
NEAR = {
    "array/exact": ["array/test_exact.py", "array/sim/test_exact_sparse.py", "buffer/sim/test_exact_buffer.py"]
    + ["array/sim/test_sums.py"],
    "array/superacc": ["array/test_exact.py", "buffer/sim/test_exact_buffer.py"],
    "array/extents": ["buffer/test_out.py", "spec/test_aliasing.py", "array/sim/test_overlap.py"],
    "array/layout": ["graph/test_recorded_layout.py", "analysis/test_functionalize.py"],
    "analysis/snapshot": ["analysis/test_functionalize.py", "analysis/test_collect.py"],
    "array/overlap": ["array/sim/test_overlap.py", "graph/test_recorded_layout.py"],
    "array/equation": ["array/sim/test_overlap.py"],
    "array/sparse": ["array/sim/test_exact_sparse.py", "buffer/test_kinds.py", "spec/test_values.py"],
    "array/convert": ["spec/test_values.py", "buffer/test_kinds.py", "array/sim/test_sums.py"],
    "array/reduce": ["device/test_cuda_values.py"],
    "array/": ["array/sim/test_sums.py", "buffer/test_out.py", "spec/test_values.py", "spec/test_aliasing.py"]
    + ["laws/test_laws.py"],
    "base/pool": ["buffer/test_pool.py", "array/sim/test_sums.py"],
    "base/keys": ["buffer/sim/test_keys.py", "spec/test_ledger.py"],
    "base/trace": ["cli/sim/test_trace.py", "buffer/sim/test_explain.py"],
    "base/thread": ["isolated/parts/test_fork.py"],
    "base/workers": ["isolated/parts/test_fork.py", "array/sim/test_sums.py", "engine/sim/test_workers.py"],
    "base/clock": ["sim/test_sim.py", "sim/test_explore.py"],
    "base/": ["buffer/test_pool.py", "buffer/test_threads.py", "buffer/test_interrupt.py", "array/sim/test_sums.py"],
    "device/cuda": ["device/test_cuda.py", "device/test_cuda_edges.py", "device/test_cuda_values.py"]
    + ["interop/sim/test_exchange_cuda.py", "spec/sim/test_streams_on_cuda.py", "device/parts/test_threads_cuda.py"],
    "device/capture": ["graph/test_capture.py", "graph/test_capture_table.py"],
    "device/sim/capture": ["graph/test_capture.py", "graph/test_capture_table.py"],
    "device/sim/graph": ["graph/test_capture.py", "graph/test_capture_table.py"],
    "device/sim/recording": ["graph/test_capture.py", "graph/test_capture_table.py"],
    "device/sim/explore": ["sim/test_explore.py"],
    "device/sim/race": ["sim/test_brute_force.py", "spec/sim/test_streams_on_sim.py"],
    "device/sim/host_sched": ["sim/test_explore.py", "sim/test_host_order.py", "sim/test_explore_law.py"],
    "device/sim/thread": ["sim/test_explore.py", "sim/test_host_order.py", "sim/test_sim_threads.py"],
    "device/sim/call": ["sim/test_explore.py", "sim/test_explore_law.py"],
    "device/memory": ["sim/test_sim_memory.py", "buffer/sim/test_many.py"],
    "device/sim/memory": ["sim/test_sim_memory.py"],
    "device/cpu/": ["graph/test_graph_trees_cpu.py"],
    "device/cuda/run": ["buffer/sim/test_many.py"],
    "device/batch": ["buffer/sim/test_many.py", "buffer/sim/test_batches.py", "spec/sim/test_streams_on_sim.py"]
    + ["buffer/test_kinds.py", "device/test_cuda.py"],
    "device/sim/": ["sim/test_sim.py", "device/test_streams.py", "sim/test_host_order.py"]
    + ["graph/test_capture.py", "sim/test_explore.py"],
    "device/": ["sim/test_sim.py", "device/test_streams.py", "device/test_cuda.py", "graph/test_capture.py"]
    + [
        "sim/test_sim_arrays.py",
        "sim/test_sim_threads.py",
        "device/test_cuda_values.py",
        "buffer/sim/test_batches.py",
    ],
    "buffer/fold_exact": ["buffer/sim/test_exact_buffer.py", "array/sim/test_exact_sparse.py"],
    "buffer/fold_sparse": ["buffer/test_kinds.py", "spec/test_aliasing.py"],
    "buffer/fold_partial": ["buffer/test_partial.py"],
    "array/patch": ["buffer/test_partial.py"],
    "array/exact_weighted": ["buffer/test_weights.py"],
    "buffer/weights": ["buffer/test_weights.py", "buffer/test_take_over.py"],
    "array/rows": ["buffer/test_add_rows.py"],
    "buffer/fold": ["spec/test_accumulate.py", "spec/test_values.py", "spec/test_aliasing.py"]
    + ["buffer/sim/test_keys.py"],
    "buffer/stats": ["buffer/test_stats.py", "buffer/sim/test_stats_devices.py"],
    "buffer/target": ["buffer/sim/test_target.py"],
    "buffer/add": [
        "buffer/parts/test_doors.py",
        "buffer/sim/test_many.py",
        "spec/test_ledger.py",
        "buffer/sim/test_keys.py",
    ]
    + ["buffer/test_stats.py", "graph/test_capture_table.py", "buffer/sim/test_batches.py"],
    "buffer/list": [
        "buffer/sim/test_keys.py",
        "buffer/parts/test_doors.py",
        "buffer/test_out.py",
        "buffer/sim/test_budget_auto.py",
        "buffer/sim/test_many.py",
    ]
    + ["buffer/test_stats.py"],
    "buffer/batch": ["buffer/sim/test_batches.py", "buffer/sim/test_many.py", "faults/test_device_calls.py"],
    "buffer/explain": ["buffer/sim/test_explain.py", "capi/test_c_buffer.py"],
    "buffer/take": ["buffer/sim/test_take_one.py", "buffer/test_out.py", "spec/test_aliasing.py"]
    + ["buffer/test_stats.py", "buffer/sim/test_stats_devices.py", "buffer/sim/test_many.py"]
    + ["buffer/parts/test_doors.py"],
    "buffer/budget": ["buffer/sim/test_budget_auto.py", "faults/test_allocations.py"],
    "buffer/life": ["isolated/parts/test_fork.py"],
    "buffer/value": ["spec/test_aliasing.py", "interop/sim/test_exchange_rows.py"],
    "buffer/sync": ["spec/test_stream_rules.py", "spec/sim/test_streams_on_sim.py"],
    "buffer/accum": ["spec/test_accum_rules.py"],
    "buffer/plan": ["spec/test_stream_rules.py", "buffer/sim/test_explain.py"],
    "buffer/order": ["spec/sim/test_streams_on_sim.py", "graph/test_capture.py", "spec/sim/test_streams_on_cuda.py"]
    + ["graph/test_capture_table.py"],
    "buffer/": ["spec/test_accumulate.py", "spec/test_ledger.py", "buffer/test_kinds.py", "buffer/test_out.py"]
    + [
        "buffer/test_budget.py",
        "buffer/sim/test_target.py",
        "buffer/sim/test_errors.py",
        "spec/sim/test_streams_on_sim.py",
    ]
    + ["laws/test_laws.py", "laws/parts/test_ways.py"],
    "engine/leaf": ["engine/test_leaf_rules.py", "engine/sim/test_leaf_grad.py", "engine/test_create_graph.py"]
    + ["engine/sim/test_leaf_circles.py"],
    "engine/explain": ["engine/test_detect_and_explain.py"],
    "engine/workers": ["engine/sim/test_workers.py"],
    "engine/pass": [
        "engine/test_large_graphs.py",
        "engine/sim/test_workers.py",
        "engine/sim/test_captured_passes.py",
    ]
    + ["engine/sim/test_streams.py", "engine/sim/test_stream_graphs.py"],
    "engine/collect": ["engine/test_large_graphs.py"],
    "engine/ready": ["engine/test_large_graphs.py"],
    "engine/": ["engine/test_engine_rules.py", "engine/test_bad_graphs.py", "engine/test_turned_on_itself.py"]
    + ["engine/test_random_passes.py", "engine/test_detect_and_explain.py", "faults/test_engine_allocations.py"],
    "graph/verify": ["graph/test_graph_tree_verify.py"],
    "graph/pool": ["graph/test_graph_tree_traps.py", "graph/test_graph_tree_failures.py"],
    "graph/record": ["graph/test_graph_tree_captures.py", "graph/test_graph_tree_failures.py"],
    "graph/": ["graph/test_graph_trees.py", "graph/test_graph_trees_cpu.py", "graph/test_graph_tree_traps.py"]
    + ["graph/test_graph_tree_rows.py", "graph/test_graph_tree_failures.py", "graph/test_graph_trees_cuda.py"],
    "py/arrays/facts": ["interop/test_exchange_dlpack.py", "engine/test_engine_rules.py", "array/sim/test_overlap.py"],
    "py/arrays/overlap": ["array/sim/test_overlap.py"],
    "py/analysis": ["graph/test_recorded_layout.py", "analysis/test_functionalize.py"],
    "py/arrays/region": [
        "array/sim/test_overlap.py",
        "graph/test_recorded_layout.py",
        "analysis/test_functionalize.py",
    ],
    "py/arrays/dlpack_export": ["interop/sim/test_exchange_cuda.py"],
    "device/sim/work": ["sim/test_sim_memory.py"],
    "py/arrays/dlpack": ["interop/test_exchange_dlpack.py", "interop/sim/test_exchange_rows.py"],
    "py/arrays/exchange": ["interop/test_exchange_dlpack.py", "interop/sim/test_exchange_cuda.py"],
    "py/arrays/export": ["interop/test_exchange_dlpack.py", "interop/sim/test_exchange_rows.py"],
    "py/arrays/import": [
        "interop/sim/test_exchange_rows.py",
        "interop/test_exchange_dlpack.py",
        "buffer/test_kinds.py",
    ],
    "py/arrays/library": [
        "interop/sim/test_exchange_rows.py",
        "interop/sim/test_exchange_cuda.py",
        "tape/sim/test_tape.py",
    ],
    "py/device/cuda": ["device/test_cuda.py", "device/test_cuda_edges.py"],
    "py/sim/machine": ["sim/test_sim.py", "sim/test_sim_memory.py", "sim/test_explore.py", "graph/test_capture.py"]
    + ["graph/test_capture_table.py", "sim/test_explore_law.py"],
    "py/sim/kernel": ["sim/test_sim.py", "sim/test_explore.py", "sim/test_host_order.py"],
    "py/device/stream": ["device/test_streams.py", "sim/test_sim.py", "device/test_cuda.py"],
    "py/device/event": ["device/test_streams.py", "sim/test_sim.py"],
    "py/arrays/array": ["sim/test_sim.py", "sim/test_sim_memory.py", "interop/test_exchange_dlpack.py"],
    "py/module/trace": ["cli/sim/test_trace.py"],
    "py/buffer/target": ["buffer/sim/test_target.py"],
    "py/module/options": ["package/test_public.py", "array/sim/test_sums.py", "buffer/test_pool.py"],
    "py/buffer/": [
        "buffer/parts/test_doors.py",
        "buffer/sim/test_keys.py",
        "buffer/test_stats.py",
        "buffer/sim/test_explain.py",
    ]
    + [
        "spec/test_accumulate.py",
        "spec/test_ledger.py",
        "buffer/test_declared_slots.py",
        "buffer/test_error_fields.py",
    ],
    "py/buffer/buffer": ["buffer/parts/test_doors.py", "buffer/test_budget.py"],
    "py/buffer/add_many": ["buffer/sim/test_many.py"],
    "py/buffer/slots": ["buffer/test_kinds.py", "buffer/sim/test_refusals.py"],
    "py/buffer/take": ["buffer/parts/test_doors.py", "buffer/sim/test_many.py", "buffer/test_out.py"],
    "py/buffer/add_n": ["array/sim/test_sums.py", "buffer/test_out.py"],
    "py/engine/leaf": ["engine/test_leaf_rules.py", "engine/sim/test_leaf_grad.py", "engine/sim/test_leaf_circles.py"]
    + ["engine/test_create_graph.py", "engine/test_bad_graphs.py", "engine/sim/test_streams.py"]
    + ["faults/test_engine_allocations.py"],
    "engine/order": ["engine/test_order.py"],
    "py/engine/walk": ["engine/test_engine_rules.py", "engine/test_bad_graphs.py"],
    "py/engine/explain": ["engine/test_detect_and_explain.py", "engine/test_bad_graphs.py"],
    "py/engine/node": ["engine/test_engine_rules.py", "engine/test_bad_graphs.py", "engine/sim/test_streams.py"]
    + ["engine/test_turned_on_itself.py", "faults/test_engine_allocations.py"],
    "py/engine/hooks": ["engine/test_engine_rules.py", "engine/test_leaf_rules.py", "engine/test_bad_graphs.py"]
    + ["engine/test_turned_on_itself.py", "faults/test_engine_allocations.py"],
    "py/engine/pass": ["engine/test_engine_rules.py", "engine/test_bad_graphs.py", "engine/sim/test_workers.py"],
    "py/engine/carry": ["engine/sim/test_workers.py"],
    "py/graph/": ["graph/test_graph_trees.py", "graph/test_graph_trees_cpu.py", "graph/test_graph_tree_traps.py"]
    + ["graph/test_graph_tree_failures.py", "graph/test_graph_tree_captures.py", "graph/test_graph_tree_rows.py"],
    "py/graph/cpu_kernel": [
        "graph/test_graph_trees_cpu.py",
        "graph/test_graph_tree_traps.py",
        "tape/parts/test_compiled.py",
    ],
    "py/engine/c_": ["capi/test_c_nodes.py"],
    "py/arrays/frontend": ["capi/test_c_nodes.py", "buffer/test_interrupt.py"],
    "py/base/errors": ["buffer/test_interrupt.py"],
    "py/arrays/objects": ["capi/test_c_nodes.py", "buffer/parts/test_doors.py"],
    "py/api/": [
        "capi/test_c_buffer.py",
        "capi/test_c_wrong_calls.py",
        "capi/sim/test_c_and_python.py",
        "capi/test_c_engine.py",
        "capi/sim/test_c_machine.py",
    ],
    "python/fanin/dist/": ["dist/test_sums.py", "dist/test_reducer.py", "dist/test_bad_input.py", "dist/test_seeing.py"]
    + [
        "dist/test_windows.py",
        "dist/test_law_of_ranks.py",
        "dist/test_explored_ranks.py",
        "cli/parts/test_demo_ranks.py",
    ]
    + ["dist/test_ranks_on_streams.py"],
    "python/fanin/graph/": [
        "graph/test_graph_trees.py",
        "graph/test_graph_trees_cpu.py",
        "graph/test_graph_tree_traps.py",
    ]
    + ["graph/test_graph_tree_failures.py", "graph/test_graph_tree_rows.py", "graph/test_graph_tree_verify.py"]
    + ["tape/parts/test_compiled.py"],
    "py/": ["buffer/test_kinds.py", "buffer/sim/test_errors.py", "buffer/sim/test_refusals.py", "buffer/test_cycles.py"]
    + ["buffer/sim/test_take_one.py", "interop/test_exchange_dlpack.py", "interop/sim/test_exchange_cuda.py"],
}
#: .. and the programs tests/c/test_*.c, by the same rule.
NEAR_IN_C = {
    "array/patch": ["patch"],
    "array/rows": ["patch"],
    "array/sum": ["sum"],
    "array/window": ["window"],
    "array/reduce": ["sum"],
    "array/exact": ["exact"],
    "array/superacc": ["exact"],
    "array/sparse": ["sparse"],
    "array/overlap": ["overlap"],
    "array/equation": ["overlap"],
    "array/convert": ["convert"],
    "array/dtype": ["dtype"],
    "array/": ["array", "extents", "block"],
    "base/": ["keys", "trace", "workers", "mem", "thread", "clock", "fork", "status", "pool"],
    "buffer/": ["buffer", "plan"],
    "device/cpu/": ["cpu_recording"],
    "engine/leaf": ["leaf"],
    "engine/ready": ["ready"],
    "graph/": ["graph_call", "graph_pool"],
    "device/sim/capture": ["capture"],
    "device/sim/explore": ["explore"],
    "device/sim/call": ["explore"],
    "device/sim/race": ["order", "sim_oracles"],
    "device/sim/thread": ["sim_threads"],
    "device/sim/host_sched": ["sim_threads", "explore"],
    "device/sim/": ["sim"],
    "device/": ["device"],
}
#: What is run last.
THEN = [f"tests/{t}" for t in ["buffer", "spec", "laws", "device", "graph", "interop", "array", "faults", "c"]]
#: What is put in the place of what: whole words or operators with blanks around, so that nothing in a type or a comment
#: is meant.
SWAPS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    " - ": " + ",
    " * ": " + ",
    " / ": " * ",
    " % ": " / ",
    " << ": " >> ",
    " >> ": " << ",
    " & ": " | ",
    " | ": " & ",
    "++": "--",
    "--": "++",
    " += ": " -= ",
    " -= ": " += ",
    "true": "false",
    "false": "true",
    "continue;": "break;",
    "break;": "continue;",
}
PYTHON_SWAPS = {
    " and ": " or ",
    " or ": " and ",
    " is not ": " is ",
    " is None": " is not None",
    " not in ": " in ",
    "True": "False",
    "False": "True",
    " // ": " * ",
}
PYTHON_CONDITION = re.compile(r"^(\s+(?:el)?if )(.*)(:)$")
PYTHON_CALL = re.compile(r"^\s+(?!return\b|yield\b|raise\b|assert\b)[A-Za-z_][\w.]*(\(.*\)| ([-+*|&]?=) [^\[({]*)$")
CALL = re.compile(r"^\s+(?!return\b|else\b|case\b|goto\b)[A-Za-z_][\w>.\-\[\]]*(\(.*\)|( [|&+-]?= ).*);$")
PAIR = re.compile(r"\(([a-z_]\w*), ([a-z_]\w*)\)")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
CONDITION = re.compile(r"^(\s+(?:else )?if )(\(.*\))(.*)$")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old.strip()} -> {self.new.strip() or '(left out)'}"


def variants(line: str, python: bool = False) -> Iterator[str]:
    """All that may be made of one line of C, or of Python."""
    code = line.partition("  #" if python else "/*")[0]
    for old, new in (SWAPS | PYTHON_SWAPS if python else SWAPS).items():
        for at in (m.start() for m in re.finditer(re.escape(old), code)):
            yield line[:at] + new + line[at + len(old) :]
    for m in NUMBER.finditer(code):
        yield line[: m.start()] + str(int(m[1]) + 1) + line[m.end() :]
    for m in PAIR.finditer(code):
        yield line[: m.start()] + f"({m[2]}, {m[1]})" + line[m.end() :]
    if condition := (PYTHON_CONDITION if python else CONDITION).match(code.rstrip()):
        yield f"{condition[1]}{'not ' * python}({'!' * (not python)}{condition[2]}){condition[3]}"
    if (PYTHON_CALL if python else CALL).match(code.rstrip()):
        yield re.sub(r"\S.*", "pass" if python else ";", line)


def lines_of_c(text: str) -> Iterator[tuple[int, str]]:
    """The lines that may be changed, with their numbers: those of functions, but for comments, messages and asserts."""
    inside, comment = False, False
    for n, line in enumerate(text.splitlines(), 1):
        code = line.strip()
        comment = (comment or code.startswith("/*")) and "*/" not in code
        inside = line.startswith("{") or (inside and not line.startswith("}"))
        kept = code.startswith(("#", "/*", "*", "fan_fail(", '"')) or "assert(" in code or "FAN_FAULT(" in code
        if inside and not comment and not kept and not code.endswith("\\"):
            yield n, line


def lines_of_python(text: str) -> Iterator[tuple[int, str]]:
    """The same of a Python module: the lines of statements in functions, but for docstrings and what raises."""
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            numbers |= {n for x in node.body for n in range(x.lineno, (x.end_lineno or x.lineno) + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise | ast.Constant | ast.JoinedStr):
            one = isinstance(node, ast.Constant) and node.lineno == node.end_lineno
            numbers -= set() if one else set(range(node.lineno, (node.end_lineno or 0) + 1))
    for n, line in enumerate(text.splitlines(), 1):
        if n in numbers and not line.strip().startswith(("#", '"', 'f"', "assert ", "def ")):
            yield n, line


@functools.cache
def candidates(root: Path = ROOT) -> tuple[Mutant, ...]:
    """Every mutant that there is, in the order of the tree."""
    paths = [p for f in FOLDERS for p in (root / "csrc" / f).glob("**/*.c")]
    paths += [p for f in PYTHON for p in (root / f).glob("**/*.py")]
    return tuple(
        Mutant(str(path.relative_to(root)), n, line, new)
        for path in sorted(paths)
        for python in [path.suffix == ".py"]
        for n, line in (lines_of_python if python else lines_of_c)(path.read_text())
        for new in dict.fromkeys(variants(line, python))
        if new != line
    )


def folder_of(m: Mutant, among: Sequence[str] = FOLDERS) -> str | None:
    """The one of the folders, below csrc/ or of Python, that the mutant is in, or of the files that it is of."""
    return next((f for f in among if f"{m.file}/".startswith((f"csrc/{f}/", f"{f}/"))), None)


def drawn(seed: int, count: int, root: Path = ROOT, among: Sequence[str] = FOLDERS) -> list[Mutant]:
    """The first `count` mutants of a seed, no line twice, each of the folders with its share. A change of one line of
    the core moves few others of the draw.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    folders: dict[str, list[tuple[bytes, Mutant]]] = {}
    for m in candidates(root):
        if (folder := folder_of(m, among)) is None:
            continue
        same = m.file, m.old, m.new
        seen[same] += 1
        rank = hashlib.sha256(repr((seed, *same, seen[same])).encode()).digest()
        folders.setdefault(folder, []).append((rank, m))
    total = sum(map(len, folders.values()))
    found: list[Mutant] = []
    queues: dict[str, list[Mutant]] = {}
    for folder, ranked in folders.items():
        lines: dict[tuple[str, int], Mutant] = {}
        for _, m in sorted(ranked, key=operator.itemgetter(0)):
            lines.setdefault((m.file, m.line), m)
        queues[folder] = list(lines.values())
    taken = dict.fromkeys(folders, 0)
    while len(found) < min(count, sum(map(len, queues.values()))):
        left = [f for f in folders if taken[f] < len(queues[f])]
        folder = max(left, key=lambda f: len(folders[f]) / total / (taken[f] + 0.5))
        found.append(queues[folder][taken[folder]])
        taken[folder] += 1
    return found


def copy_of(root: Path, to: Path) -> Path:
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, to / name)
    return to


def object_code(tree: Path, file: str) -> bytes | None:
    """What the file compiles to, without names of lines; None where it does not."""
    if file.endswith(".py"):
        with contextlib.suppress(SyntaxError):
            return ast.dump(ast.parse((tree / file).read_text())).encode()
        return None
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "a.o")
        cc = shlex.split(os.environ.get("CC", "cc")) + [
            "-std=c11",
            "-O2",
            "-g0",
            "-DNDEBUG",
            "-D_GNU_SOURCE",
            "-w",
            "-fPIC",
            "-ffp-contract=off",
            "-fno-math-errno",
        ]
        made = out.parent / "declared"
        if file.startswith("csrc/py/"):
            subprocess.run([sys.executable, str(tree / "csrc/py/declare.py"), str(made)], check=True)
        includes = [f"-I{x}" for x in ("csrc", made, PUBLIC, sysconfig.get_paths()["include"], np.get_include())]
        done = subprocess.run([*cc, *includes, "-c", file, "-o", str(out)], cwd=tree, capture_output=True, check=False)
        return out.read_bytes() if done.returncode == 0 else None


def plant(tree: Path, m: Mutant) -> None:
    path = tree / m.file
    lines = path.read_text().splitlines(keepends=True)
    assert lines[m.line - 1].rstrip("\n") == m.old, f"{m} is not there"
    lines[m.line - 1] = m.new + "\n"
    path.write_text("".join(lines))


def built(tree: Path) -> bool:
    env = {
        **os.environ,
        "FANIN_DEV": "1",
        "CC": os.environ.get("CC", "cc") + " -w",  # a mutant may be warned of
    }
    return (
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=tree,
            env=env,
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


#: Pytest's arguments, and the limit of processor seconds; None: no limit.
Command = tuple[list[str], float | None]
#: The tests of a mutant may take so many times the processor time that they take without it.
FACTOR = 10
#: If no thread of the tests runs, or is ready to run, in this many checks in a row, they wait for one another.
STILL = 30
#: .. and they may take so many processor seconds from one check to the next: a thread that waits wakes up now and then
#: to see whether a signal has come.
IDLE = 0.03
#: The seconds between two checks.
PAUSE = 1.0


def busy(session: int) -> tuple[bool, float]:
    """Whether a thread of a session's processes runs or is to run, and the processor seconds of all that live."""
    runs, ticks = False, 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[3]) == session:
                ticks += sum(map(int, words[11:15]))
                runs |= any(
                    t.read_text().rpartition(")")[2].split()[0] in "RD" for t in stat.parent.glob("task/*/stat")
                )
    return runs, ticks / os.sysconf("SC_CLK_TCK")


def pytest_in(tree: Path, *args: str, cpu: float | None = None) -> tuple[int | None, str]:
    """Pytest's status and output; None where no thread ran any more. A process that takes more processor seconds than
    `cpu` ends by SIGXCPU.
    """
    path = os.pathsep.join([str(tree / "python"), str(Path(__file__).parent)])  # the latter has processor_times
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    env["FANIN_TEST_CACHE"] = str(tree / "built-c")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *args]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if cpu is not None:
            soft = math.ceil(cpu)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 5))

    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, cwd=tree, env=env, stdout=said, stderr=said, text=True, preexec_fn=limited, start_new_session=True
        ) as process,
    ):
        still, used = 0, 0.0
        while (status := process.poll()) is None and still < STILL:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=PAUSE)
                continue
            runs, now = busy(process.pid)
            still = 0 if runs or now > used + IDLE else still + 1
            used = now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        return status, said.read()


#: A test module that raises while it is collected fails; without this pytest calls that an interrupt, status 2.
HOW = ["-x", "--continue-on-collection-errors"]


def killer(tree: Path, commands: list[Command]) -> str | None:
    """The test that found the mutant, followed by ": signal N" or ": no end" if no assertion failed. None: the mutant
    survives. Each command has its limit of processor seconds. RuntimeError where a status of pytest's is no answer.
    """
    for command, cpu in commands:
        status, said = pytest_in(tree, *HOW, *command, cpu=cpu)
        if status == 0:
            continue
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.M)
        begun = re.findall(r"^(tests/\S+::\w+(?:\[.*?\](?=\s|$))?)", said, re.M)
        at = begun[-1] if begun else command[0]
        if status is None:
            return f"{at}: no end, no thread runs"
        if status == -signal.SIGXCPU:
            return f"{at}: no end in {FACTOR} times the processor time without a mutant"
        if status < 0:
            return f"{at}: signal {-status}"
        if status == 1 and failed:
            return failed[1]
        raise RuntimeError(
            f"pytest {shlex.join(command)} ended with status {status}, which is no verdict:\n{said[-2000:]}"
        )
    return None


@dataclass(frozen=True)
class Times:
    """The processor seconds of tests without a mutant: of all that comes before the first, and of each argument."""

    start: float
    tests: dict[str, float]

    @classmethod
    def of(cls, tree: Path, tests: Sequence[str]) -> Times:
        """Measures folders, modules and single tests in the tree as it is, where all must pass."""
        if not tests:
            return cls(0, {})
        report = tree / "processor-times"
        status, said = pytest_in(tree, *HOW, "-p", "processor_times", f"--processor-times={report}", *tests)
        if status != 0:
            sys.exit(f"the tests do not pass without a mutant:\n{said[-4000:]}")
        first, *lines = report.read_text().splitlines()
        seconds = dict.fromkeys(tests, 0.0)
        for line in lines:
            took, _, test = line.partition("\t")
            of = max((t for t in tests if test == t or test.startswith((f"{t}::", f"{t}/"))), key=len)
            seconds[of] += float(took)
        return cls(float(first), seconds)

    def limit(self, tests: Sequence[str]) -> float:
        """How many processor seconds these of the tests may take with a mutant."""
        return FACTOR * (self.start + sum(self.tests[test] for test in tests))


def commands_of(m: Mutant, likely: Times, others: Times, rest: Sequence[str]) -> list[Command]:
    """The likely tests, the fastest first, then the others; each with its limit of processor seconds. The slower half
    of the likely ones is a command of its own, so that it is not collected where the other half ends it.
    """
    first = sorted(near(m.file), key=likely.tests.__getitem__)
    half = (len(first) + 1) // 2
    parts = [(part, likely.limit(part)) for part in (first[:half], first[half:]) if part]
    return [*parts, (list(rest), others.limit(rest))] if rest else parts


def fail_anyway(tree: Path, killers: set[str]) -> list[str]:
    """Those of the tests that killed mutants which also fail in the tree as it is."""
    test_of = {k: re.sub(": (signal|no end).*", "", k) for k in sorted(killers)}
    if killer(tree, [([*dict.fromkeys(test_of.values())], None)]) is None:
        return []
    return [k for k, test in test_of.items() if killer(tree, [([test], None)]) is not None]


def near(file: str) -> list[str]:
    """The likely tests of a file, as pytest's arguments."""
    path = file.removeprefix("csrc/")
    python = [f"tests/{t}" for start, tests in NEAR.items() if path.startswith(start) for t in tests]
    programs = next((names for start, names in NEAR_IN_C.items() if path.startswith(start)), [])
    c = [f"tests/c/test_c.py::test_a_c_program_passes_its_checks[test_{name}.c]" for name in programs]
    return [*dict.fromkeys(c + python)]


def judge(tree: Path, m: Mutant, commands: list[Command]) -> str:
    """The verdict: "changes nothing", "does not compile", "survives", or the test that noticed it."""
    path = tree / m.file
    original, before = path.read_text(), object_code(tree, m.file)
    plant(tree, m)
    try:
        after = object_code(tree, m.file)
        if before is None:
            raise RuntimeError(f"{m.file} does not compile as it is")
        if after is None:
            return "does not compile"
        if after == before:
            return "changes nothing"
        if m.file.endswith(".c") and not built(tree):
            return "does not compile"
        return killer(tree, commands) or "survives"
    finally:
        path.write_text(original)


# Verdicts


def written(m: Mutant, verdict: str) -> str:
    """A line of a file of verdicts. It has no line number, which the next change of the file would make wrong."""
    return f"{m.file}: {m.old.strip()} -> {m.new.strip() or '(left out)'}  # {verdict}"


def judged(path: Path | None) -> dict[str, str]:
    """The verdicts of a file, by mutant."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return dict(x.rsplit("  # ", 1) for x in lines)


def word_of(verdict: str) -> str:
    """ "changes nothing", "does not compile", "survives" or "dies"."""
    return verdict if verdict in ("changes nothing", "does not compile", "survives") else "dies"


def main(args: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--count", type=int, default=200)
    parse.add_argument(
        "--folders", nargs="+", default=FOLDERS, help="draw from these folders or files alone, below csrc/ or of Python"
    )
    parse.add_argument("--minutes", type=float, default=float("inf"), help="no mutant is begun later")
    parse.add_argument("--verdicts", type=Path, help="a file: its mutants are skipped, new verdicts are added to it")
    parse.add_argument("--near", action="store_true", help="run the likely tests alone")
    parse.add_argument("--list", action="store_true", help="print what the seed draws, and the file's verdicts")
    parse.add_argument("tests", nargs="*", default=THEN, help="what runs after the likely tests")
    how = parse.parse_args(args)
    mutants, known = drawn(how.seed, how.count, among=how.folders), judged(how.verdicts)
    verdicts = {m: known.get(written(m, "").removesuffix("  # ")) for m in mutants}
    if how.list:
        for m, verdict in verdicts.items():
            print(m, f"  [{verdict}]" if verdict else "")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fanin-mutants-") as folder:
        tree = copy_of(ROOT, Path(folder))
        if not built(tree):
            sys.exit("the tree itself does not build")
        killers, rest = set(), [] if how.near else list(how.tests)
        todo = [m for m in mutants if verdicts[m] is None]
        likely = [*dict.fromkeys(t for m in todo for t in near(m.file))]
        times = Times.of(tree, likely), Times.of(tree, rest)
        for m in todo:
            if time.monotonic() - began > 60 * how.minutes:
                break
            try:
                verdict = judge(tree, m, commands_of(m, *times, rest))
            except RuntimeError as e:
                sys.exit(f"{m}: no verdict: {e}")
            verdicts[m] = verdict
            if word_of(verdict) == "dies":
                killers.add(verdict)
            if how.verdicts:
                with how.verdicts.open("a") as file:
                    file.write(written(m, verdict) + "\n")
            minutes = (time.monotonic() - began) / 60
            print(
                f"{minutes:5.1f} {word_of(verdict):16} {m}" + (f"   [{verdict}]" if word_of(verdict) == "dies" else ""),
                flush=True,
            )
        if killers and not built(tree):
            sys.exit("the tree itself does not build any more")
        if failing := fail_anyway(tree, killers):
            sys.exit(f"these fail without a mutant too, and what they killed has no verdict: {failing}")
    seen = Counter(word_of(v) for v in verdicts.values() if v is not None)
    print(
        f"seed {how.seed}: {seen.total()} of {len(mutants)} judged; of {seen['dies'] + seen['survives']} that can be"
        f" noticed {seen['dies']} die; {dict(seen)}"
    )
    return int(seen["survives"] > 0)


if __name__ == "__main__":
    sys.exit(main())
