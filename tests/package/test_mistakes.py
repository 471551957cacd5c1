"""Messages for calls with a mistake: which argument, what was expected, what was given, what to write instead."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from kit.support import emptied

G = np.ones(2)


def node(fn: Callable[..., Any] = lambda g: g, name: str = "mul") -> tuple[fanin.Leaf[Any], fanin.Node]:
    leaf: fanin.Leaf[Any] = fanin.Leaf(np.zeros(2), name="w")
    return leaf, fanin.Node(fn, edges=[(leaf, 0)], name=name)


def two_edges(n: fanin.Node) -> fanin.Node:
    return fanin.Node(lambda g: None, edges=[(n, 0), (n, 0)])


# Arguments in the wrong place

ORDER: list[tuple[Callable[[Any], object], str]] = [
    (lambda n: fanin.backward([(n, G)]), "backward: root 0: slot: .*numpy.ndarray: give (node, slot, gradient)"),
    (lambda n: fanin.backward([(n, np.array(0))]), "slot: .*numpy.ndarray: give (node, slot, gradient)"),
    (lambda n: fanin.backward([(n, np.array(0), G)]), "slot: .*numpy.ndarray: give (node, slot, gradient)"),
    (lambda n: fanin.backward([(n, 1.0)]), "slot: expected an integer, got a float: give (node, slot, gradient)"),
    (lambda n: fanin.grad([(n, G)], [n]), "grad: root 0: slot: .*: give (node, slot, gradient)"),
    (lambda n: fanin.walk([(n, G)]), "walk: root 0: slot: .*: give (node, slot, gradient)"),
    (lambda n: fanin.backward([[n, 0, G]]), "root 0: .*got a list: give a tuple"),
    (lambda n: fanin.backward([n], [G]), "input 0: .*a gradient stands beside its root"),
    (lambda n: fanin.backward(G), "roots: expected a sequence of (node, slot, gradient)"),
    (lambda n: fanin.backward(np.array(1.0)), "roots: expected a sequence of (node, slot, gradient)"),
    (lambda n: fanin.InputBuffer(1).add(G, 0), "slot: .*numpy.ndarray: the slot comes first, as in add(slot, grad"),
    (lambda n: fanin.InputBuffer(1).add(np.array(0), G), "slot: .*numpy.ndarray: the slot comes first"),
    (lambda n: fanin.InputBuffer(1).add_many([G], [0]), "slot: .*the slot comes first, as in add_many(slots, grad"),
    (lambda n: fanin.InputBuffer(1).take(0), "stream: .*got the number 0: .*for the sum of one slot, take(slot=0)"),
    (lambda n: fanin.InputBuffer(1).take([G]), "stream: .*got a list: for arrays to sum into, take(out=..)"),
    (lambda n: fanin.InputBuffer(1).take(slot=np.array(0)), "slot: expected an integer, got a numpy.ndarray"),
    (lambda n: fanin.InputBuffer(1).add(0, G, key=G), "key: expected an integer, got a numpy.ndarray"),
    (lambda n: fanin.add_n(G, G), "add_n() takes its arrays as one sequence, got 2 .*: add_n([a, b])"),
    (
        lambda n: fanin.Node(len, edges=(n, 0)),
        "edges: expected a sequence of edges, got the edge .*: give [(node, slot)]",
    ),
    (lambda n: fanin.Node(len, edges=[n]), "edge 0: .*: give [(node, slot)]"),
    (lambda n: fanin.Node(len, edges=n), "edges: expected a sequence, got a fanin.Node: give [(node, slot)]"),
    (lambda n: fanin.Node(len, edges=[(n, G)]), "slot of an edge: expected an integer, got a numpy.ndarray"),
    (lambda n: fanin.Node(len, edges=(G, 0)), "arrays and tensors are no nodes; fanin.Leaf(array) makes one"),
    (lambda n: fanin.Node(len, [(n, 0)]), "Node: inputs: .*got a list: edges are given by name, Node(fn, edges="),
    (lambda n: fanin.backward(3), "roots: expected a sequence of (node, slot, gradient), .*, got an int"),
    (lambda n: fanin.backward(np.float32(3)), "roots: expected a sequence of (node, slot, gradient)"),
    (lambda n: fanin.backward({n: G}), "roots: expected a sequence of (node, slot, gradient), .*, got a dict"),
    (lambda n: fanin.grad([(n, 0, G)], {n}), "inputs: expected a sequence of a fanin.Leaf, .*, got a set"),
    (lambda n: fanin.backward(n), "backward: roots: expected a sequence, got one root: give [(node, slot, gradient)]"),
    (lambda n: fanin.grad([(n, 0, G)], n), "grad: inputs: expected a sequence, got one input: give [leaf]"),
    (lambda n: fanin.sim.Machine().stream("main"), "got 'main': a name is given as name='main'"),
    (lambda n: fanin.backward([(two_edges(n), 0, G)]), "expected a tuple of 2, got None: does it lack a return?"),
]


def words(text: str) -> str:
    """A pattern: parts of a text in their order, each as it is, with `.*` between them."""
    return ".*".join(map(re.escape, text.split(".*")))


@pytest.mark.parametrize(("call", "text"), ORDER, ids=[text[:60] for _, text in ORDER])
def test_an_argument_in_the_place_of_another_is_a_type_error_that_shows_the_right_call(
    call: Callable[[Any], object], text: str
) -> None:
    with pytest.raises(TypeError, match=words(text)):
        call(node()[1])


def test_a_numpy_integer_is_a_slot() -> None:
    w, n = node()
    fanin.backward([(n, np.int64(0), G)])
    assert w.grad.tolist() == [1, 1]


def test_the_error_of_another_index_is_passed_on() -> None:
    class Broken:
        def __index__(self) -> int:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fanin.InputBuffer(1).add(Broken(), G)  # type: ignore[arg-type]


@pytest.mark.partners
def test_graphs_of_torch_are_led_to_fanin_torch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, requires_grad=True)
    for call in (fanin.backward, fanin.walk, lambda roots: fanin.grad(roots, [x])):
        for roots in ([x.sum()], [(x.sum(), 0, G)], x.sum(), x):
            with pytest.raises(TypeError, match=r"fanin\.torch\.backward\(tensors\) runs the graph of torch tensors"):
                call(roots)


# A function without `return`


def warned(fn: Callable[..., Any], debug: bool = True, **how: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found, fanin.set_options(debug=debug):
        warnings.simplefilter("always")
        for _ in range(2):
            fanin.backward([(node(fn)[1], 0, G)], **how)
    return found


def test_a_function_without_return_is_warned_of_once_under_debug() -> None:
    def pull(g: Any) -> None:
        g * 2

    assert not warned(pull, debug=False)
    (one,) = warned(pull)
    assert one.category is RuntimeWarning and (one.filename, one.lineno) == (__file__, pull.__code__.co_firstlineno)
    assert str(one.message).startswith("mul: its function returned None for every gradient")


def test_a_function_that_returns_a_gradient_or_whose_gradients_are_not_all_needed_is_not_warned_of() -> None:
    assert not warned(lambda g: g)
    a, b = (fanin.Leaf(np.zeros(2)) for _ in range(2))
    with warnings.catch_warnings(), fanin.set_options(debug=True):
        warnings.simplefilter("error")
        fanin.backward([(fanin.Node(lambda g: (g, None), edges=[(a, 0), (b, 0)]), 0, G)])
        fanin.backward([(fanin.Node(lambda g: (None, None), edges=[(a, 0), (b, 0)]), 0, G)], inputs=[a])
        fanin.backward([(fanin.Node(lambda g: (None, None), edges=[(a, 0), None]), 0, G)])
    assert a.grad.tolist() == [1, 1] and b.grad is None


# Two machines


def test_a_stream_of_another_machine_is_called_so() -> None:
    with fanin.sim.Machine() as m, fanin.sim.Machine() as other:
        x, s, far = m.array(G), m.stream(), other.stream()
        buf = fanin.InputBuffer(1)
        buf.add(0, x)
        for call in (
            lambda: fanin.InputBuffer(1).add(0, x, stream=far),
            lambda: buf.take(far),
            lambda: s.wait(far),
            lambda: m.event().record(far),
            lambda: m.launch(far, len),
            lambda: m.begin_capture(far),
            lambda: m.end_capture(far),
            lambda: x.record_stream(far),
            lambda: fanin.Node(len, slots=[x], stream=far),
            lambda: fanin.overlap(x, other.array(G)),
        ):
            with pytest.raises((ValueError, TypeError), match="another machine"):
                call()


def test_a_race_names_the_caller_of_a_helper_that_launches_with_a_stack_level() -> None:
    def launch(m: fanin.sim.Machine, s: Any, x: Any, level: int) -> None:
        m.launch(s, lambda r, w: None, [x], [x], stacklevel=level)

    def lines(level: int) -> set[str]:
        with pytest.raises(fanin.RaceError) as e, fanin.sim.Machine() as m:
            x, one, two = m.array(G), m.stream(), m.stream()
            m.synchronize()
            launch(m, one, x, level)
            launch(m, two, x, level)
        return set(re.findall(r"test_mistakes\.py:(\d+)", str(e.value)))

    first = lines.__code__.co_firstlineno
    assert lines(1) == {str(launch.__code__.co_firstlineno + 1)}
    assert lines(2) == {str(first + 4), str(first + 5)}
    with pytest.raises(ValueError, match="launch: stacklevel: expected an integer of at least 1, got 0"):
        lines(0)


# Reports of pytest


def modules_with_functions() -> dict[str, str]:
    """The modules of the package that have functions, and their sources; not the commands, and not the suite for other
    engines, whose tests are what a report is about.
    """
    found = {"fanin": fanin.__file__ or ""}
    for m in pkgutil.walk_packages(fanin.__path__, "fanin.", onerror=lambda name: None):
        path = Path(fanin.__path__[0], *m.name.split(".")[1:])
        found[m.name] = str(path / "__init__.py" if m.ispkg else path.with_suffix(".py"))
    apart = ("fanin.cli", "fanin.conformance", "fanin.__main__")
    sources = {name: Path(file) for name, file in found.items() if not name.startswith(apart)}
    trees = {name: file.read_text() for name, file in sources.items() if file.is_file()}
    return {
        name: text
        for name, text in trees.items()
        if any(isinstance(x, ast.FunctionDef | ast.Lambda) for x in ast.walk(ast.parse(text)))
    }


@pytest.mark.tools
def test_every_module_hides_its_frames_in_reports_of_pytest() -> None:
    found = modules_with_functions()
    assert len(found) > 60, "nothing was read"
    assert [name for name, text in found.items() if "\n__tracebackhide__ = True" not in text] == []


REPORTED = """
import numpy as np, fanin
def test_options(): fanin.set_options(threads=0)
def test_clip(): fanin.clip_norm(fanin.InputBuffer(1), [], 1.0)
def test_launch():
    with fanin.sim.Machine() as m: m.launch(None, None)
def test_in_a_function(): fanin.analysis.functionalize(lambda x: 1 / 0, [np.ones(2)])(np.ones(2))
def test_tape(): fanin.tape.backward(3)
"""


def test_a_report_of_pytest_has_no_frame_of_fanin(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(REPORTED)
    home = Path(fanin.__path__[0])
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=emptied({"PYTHONPATH": str(home.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
    )
    assert "5 failed" in done.stdout, done.stdout
    assert done.stdout.count("test_it.py:") >= 5 and str(home) not in done.stdout and "python/fanin" not in done.stdout
