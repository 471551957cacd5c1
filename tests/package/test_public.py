"""Public names are in the documented modules, and name them as their module; private ones have an underscore."""

from __future__ import annotations

import enum
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import fanin
from fanin import descriptors as d
from fanin.analysis import InputAliasInfo
from kit.prepared import NUMPY, run_prepared

pytestmark = pytest.mark.core

#: The modules that users import, and those in which the names of `fanin` are made.
PUBLIC = {"analysis", "audit", "cli", "conformance", "descriptors", "dist", "graph", "sharing", "sim", "tape"}
PUBLIC |= {"testing", "torch"}
NOUNS = {"errors", "options", "partial", "slots", "streams"}


@pytest.mark.tools
def test_a_private_module_has_an_underscore() -> None:
    found = {m.name for m in pkgutil.iter_modules(fanin.__path__) if not m.name.startswith("_")}
    assert found == PUBLIC | NOUNS


def not_public(module: ModuleType) -> Iterator[str]:
    """The public classes of a module that name a private one, or one that has them not."""
    for name in module.__all__:
        o = getattr(module, name)
        if not inspect.isclass(o):
            continue
        home = o.__module__
        if any(part.startswith("_") for part in home.split(".")):
            yield f"{module.__name__}.{name} says that it is of {home}"
        elif getattr(importlib.import_module(home), o.__qualname__, None) is not o:
            yield f"{module.__name__}.{name} says that it is of {home}, which has it not"


@pytest.mark.parametrize("module", [fanin, fanin.sim, d, fanin.analysis], ids=lambda m: m.__name__)
def test_a_public_class_names_the_module_where_it_is_found(module: ModuleType) -> None:
    assert list(not_public(module)) == []


def test_a_class_that_names_another_module_is_found() -> None:
    planted = ModuleType("planted")
    hidden = type("Hidden", (), {"__module__": "fanin._sim.machine"})
    lost = type("Lost", (), {"__module__": "fanin.sim"})
    planted.__dict__.update(__all__=["Hidden", "Lost"], Hidden=hidden, Lost=lost)
    assert list(not_public(planted)) == [
        "planted.Hidden says that it is of fanin._sim.machine",
        "planted.Lost says that it is of fanin.sim, which has it not",
    ]


@pytest.mark.parametrize(
    ("value", "module"),
    [
        (fanin.Slot(3, "float32", name="w"), "fanin.slots"),
        (fanin.Zero(3, "float32"), "fanin.slots"),
        (fanin.sim.Clock(1.0, 2.0), "fanin.sim"),
        (d.GradAOTOutput(d.PlainAOTInput(0)), "fanin.descriptors"),
        (InputAliasInfo(), "fanin.analysis.records"),
        (fanin.counters(), "fanin.options"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_a_pickle_names_public_modules_alone(value: Any, module: str) -> None:
    text = pickle.dumps(value, 0)
    assert f"{module}\n".encode() in text and b"fanin._" not in text
    assert pickle.loads(text) == value


@pytest.mark.parametrize("name", ["Overlaps", "Verdict", "overlaps", "overlaps_itself"])
def test_a_name_that_moved_is_no_attribute_and_its_error_has_the_new_place(name: str) -> None:
    assert not hasattr(fanin, name) and name not in dir(fanin)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': it is fanin\.sharing\.{name}$"):
        getattr(fanin, name)
    assert name in fanin.sharing.__all__ and fanin.overlap is fanin.sharing.overlap


def test_help_leads_to_the_demo_the_docs_and_every_public_module() -> None:
    text = inspect.getdoc(fanin) or ""
    assert all(word in text for word in ("`fanin demo`", "`docs`", *(f"`fanin.{name}`" for name in PUBLIC - {"cli"})))


def test_every_public_module_is_an_attribute_that_is_imported_at_its_first_use() -> None:
    names = sorted(PUBLIC - {"cli", "torch"})
    code = (
        "import sys, fanin; print([n for n in ('testing', 'conformance') if f'fanin.{n}' in sys.modules],"
        f" [getattr(fanin, n).__name__ for n in {names}] == [f'fanin.{{n}}' for n in {names}],"
        f" {{*{names}}} <= {{*dir(fanin)}})"
    )
    assert run_prepared(code, imports=NUMPY).stdout.strip() == "[] True True"


def test_importing_fanin_imports_no_library_but_numpy_and_draws_nothing() -> None:
    late = ["analysis", "descriptors", "tape", "torch", "cli", "_trace.plot", "_svg"]
    others = ["torch", "jax", "scipy"]
    code = f"import sys, fanin; print([m for m in {[f'fanin.{m}' for m in late] + others} if m in sys.modules])"
    assert run_prepared(code, imports=NUMPY).stdout.strip() == "[]"


#: Classes of which users write their own, and what a call returns, which nobody sets up.
OPEN = {"dist.Engine", "dist.Pending", "sim.Machine", "sim.Thread", "tape.Compiled", "tape.Op", "tape.Var", "tape.at"}
OPEN |= {"analysis.Functionalized", "analysis.Pure", "dist.RanksTrace"}


def written_over(module: ModuleType) -> Iterator[str]:
    """The public classes whose instances take an attribute with the name of a method, and so lose the method."""
    for name, o in vars(module).items():
        place = f"{module.__name__.removeprefix('fanin.')}.{name}"
        if not inspect.isclass(o) or not o.__module__.startswith(("fanin", "planted")) or name.startswith("_"):
            continue
        if issubclass(o, (BaseException, enum.Enum)) or place in OPEN:
            continue
        if o.__dictoffset__ and o.__setattr__ is object.__setattr__:
            yield place


@pytest.mark.parametrize("name", sorted(PUBLIC - {"cli", "torch"}))
def test_an_attribute_with_the_name_of_a_method_is_refused(name: str) -> None:
    """`group.skip = 3`, where a call was meant, must not be silent."""
    assert list(written_over(importlib.import_module(f"fanin.{name}"))) == []


@pytest.mark.partners
def test_an_attribute_with_the_name_of_a_method_is_refused_beside_torch() -> None:
    torch = pytest.importorskip("torch")
    import fanin.torch

    assert list(written_over(fanin.torch)) == []
    p = torch.nn.Parameter(torch.ones(2))
    with fanin.torch.accumulate([("p", p)], mean=True) as block, pytest.raises(AttributeError, match="weight"):
        block.weight = 3  # type: ignore[method-assign,assignment]


def test_a_class_whose_methods_can_be_written_over_is_found() -> None:
    planted = ModuleType("planted")
    loose = type("Loose", (), {"__module__": "planted", "weight": lambda self: None})
    planted.__dict__.update(Loose=loose)
    assert list(written_over(planted)) == ["planted.Loose"]
