"""Every public call with wrong arguments (kit/wrong.py): the error is of a lawful type, in words of ours, and names the
call or the argument; nothing is taken that the annotation does not allow. And faults that this must find.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from kit import wrong


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, Callable[[], wrong.Call]]]:
    with Machine() as m:
        yield wrong.calls(m)


def test_wrong_arguments_get_an_error_of_ours_that_names_the_call_or_the_argument(
    calls: dict[str, Callable[[], wrong.Call]],
) -> None:
    found = [fault for make in calls.values() for fault in wrong.faults(make)]
    assert len(calls) > 80 and found == []


@pytest.mark.partners
def test_wrong_arguments_of_fanin_torch_get_such_errors() -> None:
    pytest.importorskip("torch")
    with Machine() as m:
        made = wrong.calls(m, torch=True)
        assert len(made) >= 3 and [fault for make in made.values() for fault in wrong.faults(make)] == []


#: Public functions without parameters, those whose parameters are strings or paths of pictures, and those that a part
#: of the table calls under another name.
APART = {
    *("counters", "devices", "get_include", "info", "trim", "overlap"),
    *("sim.scenario", "sim.scenarios"),
    *("dist.gather_trace", "analysis.alias_plot"),
    # of finished graphs, made by other calls
    *("analysis.create_graph_signature", "analysis.create_joint_signature", "analysis.create_synthetic_base_metadata"),
    *("analysis.remove_dupe_metadata", "descriptors.candidates", "descriptors.outputs_and_tangents"),
    *("descriptors.plain_outputs_and_tangents",),
}


def public_functions() -> set[str]:
    found = set()
    for name in ("", "sharing", "sim", "graph", "dist", "analysis", "descriptors"):
        module = importlib.import_module(f"fanin.{name}" if name else "fanin")
        for one in module.__all__:
            o = getattr(module, one)
            if callable(o) and not inspect.isclass(o):
                found.add(f"{name}.{one}" if name else one)
    return found


def test_every_public_function_is_in_the_table(calls: dict[str, Callable[[], wrong.Call]]) -> None:
    assert public_functions() - {*calls} - APART == set()
    assert public_functions() >= APART


#: Methods without parameters, and those of arrays, whose arguments are as NumPy's.
METHODS_APART = {
    *("InputBuffer.clear", "Stream.record", "Stream.synchronize", "Event.query", "Event.synchronize"),
    *("GraphTree.close", "GraphTree.plot", "GraphTree.step", "GraphTree.warm_again"),
    *("Machine.clock", "Machine.join", "Machine.step", "Machine.synchronize", "Machine.spawn"),
    *("Machine.begin_capture", "Machine.end_capture", "Machine.launch_graph"),  # in a capture: tests/sim
}


def test_every_method_of_the_main_classes_is_in_the_table(calls: dict[str, Callable[[], wrong.Call]]) -> None:
    classes = (fanin.InputBuffer, fanin.Leaf, fanin.Node, fanin.Stream, fanin.Event, fanin.GraphTree, Machine)
    methods = {
        f"{c.__name__}.{name}"
        for c in classes
        for name in dir(c)
        if not name.startswith("_") and callable(inspect.getattr_static(c, name))
    }
    assert methods - {*calls} - METHODS_APART == set()
    assert methods >= METHODS_APART


# Faults


def planted(fn: Callable[..., Any], annotation: str = "int", **valid: Any) -> list[str]:
    def make() -> wrong.Call:
        parameters = {"n": inspect.Parameter("n", inspect.Parameter.POSITIONAL_OR_KEYWORD)}
        return wrong.Call("planted", fn, {"n": 1, **valid}, {"n": annotation}, parameters)

    return wrong.faults(make)


def planted_with_the_text_of_numpy(n: Any) -> object:
    return [1, 2][n] if isinstance(n, np.ndarray) else fanin.InputBuffer(n)


def refuse_all_but(n: Any, error: Exception) -> None:
    if type(n) is not int:
        raise error


FAULTS: list[tuple[Callable[[Any], object], str]] = [
    (planted_with_the_text_of_numpy, "NumPy's text"),
    (lambda n: np.zeros(2)[n] if n is not None else refuse_all_but(n, TypeError("planted: n")), "NumPy's text"),
    (lambda n: range(n), "Python's text"),
    (lambda n: refuse_all_but(n, TypeError("expected something else")), "names neither the call nor an argument"),
    (lambda n: refuse_all_but(n, TypeError("planted: n: see fanin._core.add")), "an internal name"),
    (lambda n: refuse_all_but(n, TypeError("planted: n: fan_add refuses it")), "an internal name"),
    (lambda n: refuse_all_but(n, AttributeError("planted: n")), "of no lawful type"),
    (lambda n: refuse_all_but(n, SystemError("planted: n")), "of no lawful type"),
    (lambda n: None, "is taken, though the annotation is int"),
]


@pytest.mark.parametrize(("fn", "said"), FAULTS, ids=[f"{i} {said}" for i, (_, said) in enumerate(FAULTS)])
def test_a_planted_fault_is_found(fn: Callable[[Any], object], said: str) -> None:
    assert any(said in fault for fault in planted(fn)), planted(fn)


def test_a_call_without_a_fault_has_none() -> None:
    def planted(n: int) -> None:
        if type(n) is not int:
            raise TypeError(f"planted: n: expected an int, got a {type(n).__name__}")

    def make() -> wrong.Call:
        return wrong.call_of("planted", planted, {"n": 1}, {})

    assert wrong.faults(make) == []


def test_an_error_about_the_number_of_arguments_that_does_not_name_the_call_is_found() -> None:
    def make() -> wrong.Call:
        return wrong.call_of("planted", lambda n: refuse_all_but(n, TypeError("planted: n")), {"n": 1}, {})

    assert any("does not say which call" in fault for fault in wrong.faults(make))
