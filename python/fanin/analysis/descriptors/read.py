"""Descriptors from their text: `parse` and `candidates`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Literal

from ..._words import type_of
from .kinds import (
    INPUTS,
    OUTPUTS,
    AOTInput,
    AOTOutput,
    Descriptor,
    NestingError,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTInput,
    SubclassSizeAOTOutput,
    SubclassStrideAOTInput,
    SubclassStrideAOTOutput,
    ViewBaseAOTInput,
)

Sides = tuple[type[AOTInput], type[AOTOutput]]
Kind = Literal["input", "output"] | type[Descriptor] | None

SIDES: dict[str | None, type[Descriptor]] = {None: Descriptor, "input": AOTInput, "output": AOTOutput}

DEEPEST = 100
"""How deep the text of a descriptor may be nested."""

INT = r"(0|[1-9][0-9]{0,999})"
STR = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""

#: The kinds whose short form begins with a word, by that word; the rest of the form is the same for all of these.
BY_WORD: dict[str, list[type[Descriptor]]] = {}
for _kind in (*INPUTS, *OUTPUTS):
    if _word := re.match(r"self\.\w+|\w+", _kind._form):
        BY_WORD.setdefault(_word[0], []).append(_kind)

ATTRIBUTES: Sides = (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)
PIECES: dict[str, Sides] = {
    "size": (SubclassSizeAOTInput, SubclassSizeAOTOutput),
    "stride": (SubclassStrideAOTInput, SubclassStrideAOTOutput),
}
BY_NAME: dict[str, type[Descriptor]] = {kind.__name__: kind for kind in (*INPUTS, *OUTPUTS)}


def parse(text: str, kind: Kind = None) -> AOTInput | AOTOutput:
    """Return the descriptor whose `expr()` or `repr` the text is.

    `expr()` may be ambiguous: tokens and dummies have one name on both sides, and `args[0]._base` is a base or an
    attribute of that name. Then use `kind`, or a `repr`.

    Parameters
    ----------
    text : str
        An `expr()` or a `repr`.
    kind : "input", "output", or a class
        The descriptor must be of this side, or an instance of this class.

    Raises
    ------
    ValueError
        No descriptor prints the text, or several do (they are listed; `candidates` returns them).
    TypeError
        The text is no str.

    Examples
    --------
    >>> from fanin import descriptors as d
    >>> d.parse("__output_tangent(output[1])")
    TangentAOTInput(output=PlainAOTOutput(idx=1))
    >>> d.parse("__forward_token0", kind="output")
    ForwardTokenAOTOutput(idx=0)
    >>> d.parse("args[0]._base")
    Traceback (most recent call last):
    ValueError: parse: 'args[0]._base' may be ViewBaseAOTInput(...) or SubclassGetAttrAOTInput(...): choose one by ...
    >>> d.parse("args[0]._base", kind=d.ViewBaseAOTInput).base_of
    PlainAOTInput(idx=0)
    """
    base = SIDES.get(kind) if kind is None or isinstance(kind, str) else kind
    if not (isinstance(base, type) and issubclass(base, Descriptor)):
        raise ValueError(f'parse: kind must be "input", "output", None or a class of descriptors, got {kind!r}')
    every = candidates(text)
    found = [d for d in every if isinstance(d, base)]
    if len(found) == 1:
        return found[0]
    if not found:
        wanted = kind.__name__ if isinstance(kind, type) else kind
        raise ValueError(f"parse: {text!r:.200} is no {wanted}: it is {' or '.join(map(repr, every))}")
    ways = 'kind="input", kind="output", or kind=<class>'
    raise ValueError(
        f"parse: {text!r:.200} may be {' or '.join(map(repr, found))}: choose one by {ways}, or pass its repr"
    )


def candidates(text: str) -> tuple[AOTInput | AOTOutput, ...]:
    """Return all descriptors whose `expr()` or `repr` the text is: at least one, inputs first.

    ValueError, with the position of the first invalid character, if no descriptor prints the text; TypeError if it is
    no str.

    >>> from fanin import descriptors as d
    >>> [type(x).__name__ for x in d.candidates("__dummy3")]
    ['DummyAOTInput', 'DummyAOTOutput']
    """
    if not isinstance(text, str):
        raise TypeError(f"parse: expected the text of a descriptor, got {type_of(text)}")
    text = text.strip()
    every = Reader(text).whole()
    found = [d for d in every if text in (d.expr(), repr(d))]
    if not found:
        ways = " or ".join(dict.fromkeys(x for d in every for x in (d.expr(), repr(d))))
        raise ValueError(
            f"parse: {text!r:.200} is the expr() or repr of no descriptor: what it means is printed as {ways:.400}"
        )
    return tuple(sorted(found, key=lambda d: (isinstance(d, AOTOutput), isinstance(d, SubclassGetAttrAOTInput), d)))  # type: ignore[arg-type]


def sided(kinds: Sides, d: Descriptor) -> type[Descriptor]:
    """Of a pair of kinds the one on the side of `d`."""
    return kinds[0] if isinstance(d, AOTInput) else kinds[1]


class Reader:
    """Reads a text from left to right, with several candidate descriptors until all but one are ruled out."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.refusal: NestingError | None = None  # why the last one was ruled out

    def whole(self) -> list[Descriptor]:
        found = self.written() if re.match(r"\w*AOT(Input|Output)\b", self.text) else self.short()
        if self.at != len(self.text):
            raise self.stopped("the end")
        if not found:
            raise ValueError(f"parse: {self.text!r:.200} breaks a rule: {self.refusal}") from None
        return found

    def stopped(self, wanted: str) -> ValueError:
        found = self.text[self.at : self.at + 20] or "the end"
        return ValueError(
            f"parse: {self.text!r:.200} is the expr() or repr of no descriptor: at {self.at} expected {wanted}, found"
            f" {found!r}"
        )

    def take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def need(self, pattern: str, wanted: str) -> str:
        found = self.take(pattern)
        if not found:
            raise self.stopped(wanted)
        return found[found.re.groups and 1]

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"parse: {self.text[:40]!r}.. is nested deeper than {DEEPEST}")

    def make(self, kinds: Iterable[type[Descriptor]], *fields: object) -> list[Descriptor]:
        """The descriptors of these kinds with these fields that are valid."""
        made = []
        for kind in kinds:
            try:
                made.append(kind(*fields))
            except NestingError as e:
                self.refusal = e
        return made

    # expr()

    def short(self) -> list[Descriptor]:
        found = self.atom()
        while self.take(r"\."):
            self.deeper()
            word = self.need(r"([^\W\d]\w*)", "the name of an attribute, size(..) or stride(..)")
            if word in PIECES and self.take(r"\("):
                axis = int(self.need(INT, "an axis"))
                self.need(r"\)", "')'")
                found = [new for d in found for new in self.make((sided(PIECES[word], d),), d, axis)]
            else:
                bases = [new for d in found for new in self.make((ViewBaseAOTInput,), d)] if word == "_base" else []
                found = bases + [new for d in found for new in self.make((sided(ATTRIBUTES, d),), d, word)]
        return found

    def atom(self) -> list[Descriptor]:
        start = self.at
        word = self.need(
            r"(self\.\w+|[a-z_]+)", "args[..], output[..], self.get_parameter(..), or a word that begins with __"
        )
        kinds = BY_WORD.get(word)
        if kinds is None:
            self.at = start
            raise self.stopped("a word that descriptors print")
        fields: list[object] = [None]  # of each candidate: the field, where the kind has one
        for part in re.findall(r"\{.*?\}|[^{}]", kinds[0]._form.removeprefix(word)):
            if part == "{idx}":
                fields = [int(self.need(INT, "a position" if word in ("args", "output") else "a number"))]
            elif part == "{target!r}":
                fields = [self.name()]
            elif part[0] == "{":
                self.deeper()
                fields = [*self.short()]
            else:
                self.need(re.escape(part), repr(part))
        return [new for x in fields for new in self.make(kinds, *(() if x is None else (x,)))]

    # repr

    def written(self) -> list[Descriptor]:
        self.deeper()
        name = self.need(r"(\w+)", "a class")
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, 1)
            raise ValueError(f"parse: no descriptor is called {name}" + (f": is it {near[0]}?" if near else ""))
        kind = BY_NAME[name]
        self.need(r"\(", "'('")
        values: list[object] = []
        for i, f in enumerate(f for f in dataclasses.fields(kind) if f.repr):
            self.need(rf"{', *' if i else ''}{f.name} *= *", f"{', ' if i else ''}{f.name}=")
            values.append(self.value(f.name))
        self.need(r"\)", "')'")
        self.depth -= 1
        return [] if [] in values else self.make((kind,), *(v[0] if isinstance(v, list) else v for v in values))

    def value(self, name: str) -> object:
        if name == "idx":
            return int(self.need(INT, "a number"))
        if name in ("target", "attr"):
            return self.name()
        return self.written()

    def name(self) -> str:
        """A name in quotes."""
        start = self.at
        quoted = self.need(STR, "a name in quotes")
        try:
            return str(ast.literal_eval(quoted))
        except (SyntaxError, ValueError):
            self.at = start
            raise self.stopped("a name in quotes as repr() gives it") from None
