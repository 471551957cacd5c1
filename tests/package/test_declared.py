"""core.pyi is the one declaration of the core: the built core has its names, kinds, defaults and docstrings, and one
parser names what is wrong with a call.
"""

from __future__ import annotations

import ast
import inspect
import runpy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from kit.core_names import SIGNATURES

pytestmark = pytest.mark.core

KIND = inspect.Parameter
declare = runpy.run_path(str(SIGNATURES.with_name("declare.py")))


def declared(text: str) -> Iterator[tuple[str, Any, Any, bool]]:
    """(name, what declare.py reads of it, what the core has, whether it is a method) of each with a docstring."""
    lines = text.splitlines()
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and hasattr(_core, node.name):
            holder = getattr(_core, node.name)
            for one in declare["read_all"](node.body, lines, True):
                if one.can == "call" and not one.name.startswith("__") and one.doc:
                    yield f"{node.name}.{one.name}", one, vars(holder)[one.name], True
    for one in declare["read_all"](tree.body, lines, False):
        if hasattr(_core, one.name) and one.doc:
            yield one.name, one, getattr(_core, one.name), False


def differences(text: str) -> list[str]:
    """Where the built core differs from these declarations."""
    wrong = []
    for name, one, built, method in declared(text):
        if not one.star:
            found = list(inspect.signature(built).parameters.values())[int(method) :]
            kinds = {KIND.POSITIONAL_ONLY: one.by_place_only, KIND.POSITIONAL_OR_KEYWORD: one.by_place}
            for p in found:
                place = kinds.get(p.kind, one.by_name)
                same = [q for q in place if q.name == p.name and (q.default is None) == (p.default is p.empty)]
                if not same:
                    wrong.append(f"{name}: {p}")
            if len(found) != len(one.all):
                wrong.append(f"{name}: {len(found)} parameters")
        if (inspect.getdoc(built) or "").split() != one.doc.split():
            wrong.append(f"{name}: its docstring")
    return wrong


def test_the_built_core_has_the_declared_parameters_and_docstrings() -> None:
    text = SIGNATURES.read_text()
    assert sum(1 for _ in declared(text)) > 100
    assert differences(text) == []


def test_a_planted_difference_of_a_declaration_is_found() -> None:
    text = SIGNATURES.read_text()
    assert differences(text.replace("def expect(self, slot: int, n: int)", "def expect(self, slot: int, m: int)")) == [
        "InputBuffer.expect: n"
    ]
    assert differences(text.replace("def ready(self, slot: int, /)", "def ready(self, slot: int = 0, /)")) == [
        "InputBuffer.ready: slot"
    ]
    assert differences(text.replace("Add one gradient to a slot.", "Add two.")) == ["InputBuffer.add: its docstring"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda b: fanin.backward([], retain_graph=True), r"no argument 'retain_graph': did you mean 'keep_graph'"),
        (lambda b: fanin.Leaf(np.zeros(2), mean=True), r"Leaf\(\) has no argument 'mean': weigh each pass, backward\("),
        (lambda b: fanin.backward([], mean=True), r"backward\(\) has no argument 'mean': weigh each pass"),
        (lambda b: b.add_many([0], [1.0], mean=True), r"add_many\(\) has no argument 'mean': give it to take$"),
        (lambda b: b.take(meen=True), r"take\(\) has no argument 'meen': did you mean 'mean'"),
        (lambda b: b.add(0, 1.0, coppy=True), r"add\(\) has no argument 'coppy': did you mean 'copy'\?"),
        (lambda b: b.add(0, 1.0, wholly_other=True), r"add\(\) has no argument 'wholly_other'$"),
        (lambda b: b.add(0, 1.0, gradient=2.0), r"add\(\) got 'gradient' twice"),
        (lambda b: b.add(gradient=2.0), r"add\(\) needs 'slot'"),
        (lambda b: b.add(0, 1.0, None), r"add\(\) takes slot and gradient by position, and the rest by name; got 3"),
        (lambda b: b.ready(slot=0), r"ready\(\) takes 'slot' by position, not by name"),
        (lambda b: b.ready(0, 1), r"ready\(\) takes slot by position; got 2"),
        (lambda b: b.expect(), r"expect\(\) needs 'slot'"),
        (lambda b: fanin.InputBuffer(1, budgte=0), r"InputBuffer\(\) has no argument 'budgte': did you mean 'budget'"),
        (lambda b: fanin.Node(), r"Node\(\) needs 'fn'"),
        (lambda b: type("Sub", (fanin.Node,), {})(name="n"), r"Node\(\) needs 'fn'"),
        (lambda b: fanin.Node(lambda g: g, 1, (), 4), r"Node\(\) takes fn, inputs and edges by position"),
        (lambda b: _core.read_by_table(3, -1, False), r"read_by_table\(\): type: expected a type, got an int"),
    ],
)
def test_the_parser_names_the_argument_and_what_was_expected(call: Callable[[Any], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(fanin.InputBuffer(2))


def test_arguments_by_name_and_by_position_mean_the_same() -> None:
    buf = fanin.InputBuffer(slots=2, budget=0)
    buf.add(gradient=np.ones(2), slot=1, key=3)
    buf.add(1, np.ones(2), key=4)
    assert [None if x is None else x.tolist() for x in buf.take(None)] == [None, [2.0, 2.0]]


@pytest.mark.tools
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "class A:\n    def f(self, a: int = 0, *, b: int) -> None: ...\n",
            "a required parameter after an optional one",
        ),
        (
            "class A:\n    @overload\n    def f(self, a: int) -> int: ...\n    @overload\n"
            "    def f(self, b: str) -> str: ...\n",
            "overloads differ in a and b",
        ),
    ],
)
def test_a_declaration_that_no_parser_can_read_ends_the_build(text: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        declare["headers"](text)
