"""Pipelines: steps of several recorded pieces, with parts on the host between them that run in each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .. import _core
from .._checks import integer, sequence
from .._words import note, type_of
from .trees import DID, FunctionStats

if TYPE_CHECKING:
    from .._core import GraphFunction, GraphTree

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: The words of a call's outcome, by the number that the core lists.
OUTCOMES = tuple(DID)


@dataclass(frozen=True)
class Stop:
    """A host part of a pipeline made of a list returns it to end the step early: `result` is the call's result."""

    result: object = None


def made(tree: GraphTree, parts: object, min_kernels: object = 0) -> Pipeline:
    """GraphTree.pipeline."""
    kernels = integer("pipeline: min_kernels", min_kernels, 0)
    if inspect.isgeneratorfunction(parts):
        if kernels:
            raise ValueError(
                "pipeline: min_kernels= is for the pieces of a list: give it to the functions that the generator"
                " function calls, tree.function(fn, min_kernels=..)"
            )
        return Pipeline(tree, parts, (), Stop)
    if callable(parts):
        raise TypeError(
            f"pipeline: expected a generator function, which yields outputs where the host reads them, or a list of"
            f" pieces and host parts in turn, got {type_of(parts)} without a yield"
        )
    given = sequence("pipeline: parts", parts, "pieces and host parts in turn")
    if not given:
        raise ValueError("pipeline: expected a list of pieces and host parts in turn, got an empty one")
    return Pipeline(tree, None, tuple([_part(tree, i, part, kernels) for i, part in enumerate(given)]), Stop)


class Pipeline(_core.CorePipeline):
    """A step of several recorded pieces, made by `GraphTree.pipeline`.

    A call outside of a step is a step of its own, and its results are copies in memory of their own; inside of a step
    of its tree it is a part of that, and its results are outputs. One thread may call it at a time.
    """

    __slots__ = (
        "_known",
        "name",
    )

    name: str  #: in messages: of its generator function, or of its pieces

    def __init__(
        self,
        tree: GraphTree,
        body: Callable[..., Generator[Any, Any, Any]] | None,
        parts: tuple[Any, ...],
        stop: type,
    ) -> None:
        pieces: list[GraphFunction[..., Any]] = [*parts[::2]]
        self.name = " -> ".join(f.name for f in pieces) if body is None else getattr(body, "__name__", "pipeline")
        self._known = dict.fromkeys(pieces)  # the pieces, in order; of a generator function, of their first calls

    # ---- for the core

    def _changed(self) -> None:
        """The last call had other pieces than the one before."""
        self._known.update(dict.fromkeys(f for f, _ in _listed(self._calls)))

    def _note(self, e: BaseException, begun: int, own: int) -> None:
        """Name the place in an exception of a call; `begun`: the step had begun; `own`: it ends with the call."""
        if begun:
            self._changed()
            note(e, f"raised in {self._place()} of the pipeline {self.name}{'; the step has ended' if own else ''}")
        else:
            note(e, f"{self.name} is a pipeline: its host parts run in each call, so it is no part of a recording")

    def _refuse(self, mine: int) -> NoReturn:
        """Another call runs; `mine`: of this thread."""
        if mine:
            raise RuntimeError(
                f"the pipeline {self.name} is called by {self._place()} of its own: a step cannot begin again before it"
                " has ended; make another pipeline of the same functions"
            )
        raise RuntimeError(
            f"the pipeline {self.name} runs on another thread, in {self._place()}: let threads call it in turn, under a"
            " lock, or make a pipeline for each of them"
        )

    def _place(self) -> str:
        """Where the call is, or where it failed."""
        done = _listed(self._calls)
        if not done:
            return "the part before the first piece"
        function, outcome = done[-1]
        if outcome is None:
            return f"piece {len(done) - 1} ({function.name})"
        return f"the host part after piece {len(done) - 1} ({function.name})"

    def _values(self, x: Any) -> Any:
        """The values of what a generator yielded, if it is no single output."""
        kind = type(x)
        if kind is _core.Array:
            values = x.numpy()
            values.flags.writeable = False
            return values
        if kind is tuple or kind is list:
            return kind([None if one is None else self._values(one) for one in x])
        if kind is dict:
            return {k: None if one is None else self._values(one) for k, one in x.items()}
        if isinstance(x, np.ndarray | np.generic):
            raise TypeError(
                f"{self.name}: got {type_of(x)} from a yield, whose values are on the host already: yield outputs of"
                " pieces alone"
            )
        raise TypeError(
            f"{self.name}: a yield gives outputs of pieces, which the host reads: an array on {self._tree.device}, or a"
            f" tuple, list or dict of them, not {type_of(x)}"
        )

    def _given(self, out: Any) -> Any:
        """What a host part returned, as operands: NumPy's arrays and floating-point numbers are copied in."""
        if type(out) is tuple or type(out) is list:
            return tuple([self._given(x) for x in out])
        x = np.array(out) if isinstance(out, np.inexact) else out
        if self._tree.device != "cpu" and isinstance(x, np.ndarray):
            return _core.device_array(self._tree.device, x, False)
        return x

    def _kept(self, result: Any) -> Any:
        """The results of a step of its own: outputs are copied, each once."""
        return _kept(self._tree, result, {})

    # ---- for its user

    @property
    def pieces(self) -> tuple[GraphFunction[..., Any], ...]:
        """The functions of its pieces: of a list in its order, else in the order of their first calls."""
        return tuple(self._known)

    @property
    def stats(self) -> tuple[FunctionStats, ...]:
        """Figures of each piece, in the order of `pieces`."""
        return tuple([f.stats for f in self._known])

    @property
    def last(self) -> tuple[tuple[str, str], ...]:
        """The pieces of the last call, in order: each one's name, and "warmed", "recorded", "replayed" or "raw"; the
        last is "failed" if it raised.
        """
        return tuple([(f.name, "failed" if k is None else OUTCOMES[k]) for f, k in _listed(self._calls)])

    def explain(self) -> str:
        """What each piece of the last call did, and why: a line each."""
        done = _listed(self._calls)
        if not done:
            return f"{self.name} has not been called yet"
        latest = {f: i for i, (f, _) in enumerate(done)}
        lines = [f"{self.name}: {len(done)} piece{'s' * (len(done) != 1)}"]
        for i, (f, outcome) in enumerate(done):
            what = f"{f.name} {DID['failed' if outcome is None else OUTCOMES[outcome]]}"
            lines.append(f"piece {i}: {f.explain() if latest[f] == i and outcome is not None else what}")
        return "\n".join(lines)

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind it as a method, as functions are."""
        return self if owner is None else MethodType(self, owner)

    def __repr__(self) -> str:
        return f"<fanin.graph.Pipeline {self.name} on {self._tree.device}>"


# ---- parts


def _part(tree: GraphTree, i: int, part: Any, min_kernels: int) -> Any:
    """A piece, in an even place, as a function of the tree; or a host part."""
    of_tree = isinstance(part, _core.GraphFunction)
    if i % 2:
        if of_tree:
            raise TypeError(
                f"pipeline: part {i} is {part.name}, a function of the tree, in the place of a host part: pieces and"
                " host parts are in turn, [piece, host, piece, ..]; two pieces without a host part between them are one"
            )
        _check_callable(i, part, "a host part, a function of outputs")
        return part
    if not of_tree:
        _check_callable(i, part, "a piece, a function of arrays")
        return tree.function(part, min_kernels=min_kernels)
    if part._tree is not tree:
        raise ValueError(f"pipeline: part {i} ({part.name}) is a function of another graph tree")
    return part


def _check_callable(i: int, part: Any, what: str) -> None:
    runs_later = inspect.isgeneratorfunction(part) or inspect.iscoroutinefunction(part)
    if not callable(part) or runs_later:
        got = "a generator function or coroutine" if runs_later else type_of(part)
        raise TypeError(f"pipeline: part {i}: expected {what}, got {got}")


# ---- values


def _kept(tree: GraphTree, x: Any, copies: dict[int, Any]) -> Any:
    """A result of a step of its own: outputs are copied, each once."""
    kind = type(x)
    if kind is _core.Array:
        if id(x) not in copies:
            copies[id(x)] = tree._copied(x)
        return copies[id(x)]
    if kind is tuple or kind is list:
        return kind([_kept(tree, one, copies) for one in x])
    if kind is dict:
        return {k: _kept(tree, one, copies) for k, one in x.items()}
    return x


def _listed(calls: list[Any]) -> list[tuple[GraphFunction[..., Any], int | None]]:
    """The functions that were called, each with its outcome; None: it raised, or runs."""
    done: list[tuple[GraphFunction[..., Any], int | None]] = []
    for one in calls:
        if type(one) is int:
            done[-1] = done[-1][0], one
        else:
            done.append((one, None))
    return done
