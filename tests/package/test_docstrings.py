"""Every public name has a docstring that begins with a sentence, and its examples run."""

from __future__ import annotations

import ast
import doctest
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
import fanin.audit
from fanin import _core
from kit import core_names


def public() -> Iterator[tuple[str, Any]]:
    """The public names, and the methods and properties of the public classes, with what they name."""
    for name in fanin.__all__:
        o = getattr(fanin, name)
        if isinstance(o, str):
            continue
        yield f"fanin.{name}", o
        if isinstance(o, type):
            for key, member in vars(o).items():
                if not key.startswith("_") and (callable(member) or inspect.isdatadescriptor(member)):
                    yield f"fanin.{name}.{key}", member
    for name in fanin.sim.__all__:
        yield f"fanin.sim.{name}", getattr(fanin.sim, name)
    for name in fanin.audit.__all__:
        yield f"fanin.audit.{name}", getattr(fanin.audit, name)
    for name in fanin.analysis.__all__:
        if callable(getattr(fanin.analysis, name)):
            yield f"fanin.analysis.{name}", getattr(fanin.analysis, name)


PUBLIC = dict(public())


def exempt(name: str, o: Any) -> bool:
    """The docstring of a dataclass describes its fields."""
    return isinstance(o, types.MemberDescriptorType)


@pytest.mark.tools
@pytest.mark.core
@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_begins_with_a_sentence(name: str) -> None:
    o = PUBLIC[name]
    if exempt(name, o):
        return
    text = inspect.getdoc(o) or ""
    first = text.partition("\n\n")[0].strip()
    assert first.endswith((".", ":")), f"{name}: its docstring does not begin with a sentence: {first!r}"


@pytest.mark.parametrize("name", PUBLIC)
def test_its_examples_run(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, {"fanin": fanin, "np": np}, name, None, 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


def test_a_planted_wrong_example_is_found() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "planted", None, 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert "Expected:\n    3\nGot:\n    2\n" in "".join(said)


@pytest.mark.tools
def test_the_main_names_have_an_example() -> None:
    for name in ("add_n", "InputBuffer", "Slot", "Sparse", "Zero", "stream", "set_options", "counters"):
        assert ">>>" in (inspect.getdoc(getattr(fanin, name)) or ""), name
    assert ">>>" in (fanin.__doc__ or "")


@pytest.mark.core
def test_no_module_is_shadowed_by_a_name_of_the_package() -> None:
    import pkgutil

    modules = {m.name for m in pkgutil.iter_modules(fanin.__path__)}
    for name in modules & set(dir(fanin)):
        assert inspect.ismodule(getattr(fanin, name)), (
            f"fanin.{name} is a module and a {type(getattr(fanin, name)).__name__}"
        )


@pytest.mark.core
def test_the_build_installed_the_declarations_of_the_core() -> None:
    built = Path(fanin.__file__).with_name("_core.pyi").read_text()
    assert built == core_names.SIGNATURES.read_text(), "built of other sources: build again"


@pytest.mark.tools
@pytest.mark.core
def test_everything_public_in_the_stub_file_has_a_docstring() -> None:
    found: dict[str, str | None] = {}
    for node in ast.parse(core_names.SIGNATURES.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in core_names.public():
            found[node.name] = ast.get_docstring(node)
            for one in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
                    key = f"{node.name}.{one.name}"
                    made = getattr(getattr(_core, node.name), one.name, None)  # a method in Python has its own
                    found[key] = found.get(key) or ast.get_docstring(one) or made.__doc__  # of the first overload
    assert {name for name, doc in found.items() if not doc} == set()
    assert len(found) > 70
    assert (found["InputBuffer.add"] or "").split() == (inspect.getdoc(fanin.InputBuffer.add) or "?").split()
