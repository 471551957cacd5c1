"""Planted faults in Python modules: a rule's text is replaced, and a test must notice.

A mutant is a module, a text that occurs in it once, and its replacement. While it is planted, the module's names are
those of the changed source; afterwards they are the objects from before, so that no other test is affected. Tests that
must find the fault have to read names from the module (`descriptors.parse`), not keep them (`from fanin.descriptors
import parse`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

Check = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    module: str
    old: str
    new: str
    also: tuple[str, ...] = ()
    """Modules that hold names of the changed one, in the order in which they import each other."""

    def __str__(self) -> str:
        return f"{self.module}: {self.old.strip()[:70]!r} -> {self.new.strip()[:70]!r}"


def source_of(module: ModuleType) -> str:
    return Path(module.__file__ or "").read_text()


def changed(mutant: Mutant) -> str:
    """The source of its module, changed."""
    source = source_of(importlib.import_module(mutant.module))
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant}: the text stands there {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Within the block, the module is the changed one, and so it is for the modules that import it."""
    modules = [importlib.import_module(name) for name in (mutant.module, *mutant.also)]
    sources = [changed(mutant), *map(source_of, modules[1:])]
    kept = [dict(vars(m)) for m in modules]
    try:
        for module, source in zip(modules, sources, strict=True):
            exec(compile(source, module.__file__ or "", "exec"), vars(module))
        yield
    finally:
        for module, names in zip(modules, kept, strict=True):
            vars(module).clear()
            vars(module).update(names)


def notices(mutant: Mutant, checks: Iterable[Check]) -> str | None:
    """The name of the first check that fails while the fault is planted; None: it survives."""
    with planted(mutant):
        for check in checks:
            try:
                check()
            except (Exception, pytest.fail.Exception):  # what pytest.raises raises is no Exception
                return check.__name__
    return None


def survivors(mutants: Sequence[Mutant], checks: Sequence[Check]) -> list[str]:
    """The mutants that no check notices. The checks must pass as long as nothing is planted."""
    for check in checks:
        check()
    return [str(m) for m in mutants if notices(m, checks) is None]
