"""How many steps the lines of the C sources hold: `python tests/kit/density.py [FOLDER ..]`.

A line of code is one that is left without comments and preprocessor lines. In 1,000 of them are counted: conditional
operators; statements with two or more of them; statements with three or more `&&` or `||`; declarations that
initialize two or more variables. A table of a macro is no statement.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|->|\+\+|--|<<=|>>=|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|\S")
COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", re.MULTILINE)
PARENTHESES = re.compile(r"\([^()]*\)|\{[^{}]*\}")
WORD = re.compile(r"\b(if|for|while|switch|else|do)\b")
LONE_MACRO = re.compile(r"[A-Z_]+(?=\([^;]*?\)\s*[\w}])")  # called as a statement, without a semicolon
QUALIFIERS = r"\s*(?:const |static |unsigned |struct )*"
INITIALIZED = re.compile(QUALIFIERS + r"[a-z_]\w*(?: \**| \*+)[a-z_]\w*(?:\[\w*\])? = [^,;]*,.*=")


@dataclass(frozen=True)
class Density:
    """What the sources of a folder hold."""

    lines: int
    tokens: int
    conditional: int  # operators
    several: int  # statements with two or more of these
    heavy: int  # statements with three or more && or ||
    packed: int  # declarations with two or more initializers

    def in_1000(self, n: int) -> float:
        return 1000 * n / max(self.lines, 1)

    def __str__(self) -> str:
        return (
            f"{self.lines} lines, {self.tokens / max(self.lines, 1):.2f} tokens a line; in 1,000 lines"
            f" {self.in_1000(self.conditional):.1f} ?:, {self.in_1000(self.several):.1f} statements with several,"
            f" {self.in_1000(self.heavy):.1f} of three and more && or ||, {self.in_1000(self.packed):.1f} packed"
            " declarations"
        )


def bare(text: str) -> str:
    """A source without comments, texts and preprocessor lines."""

    def blank(found: re.Match[str]) -> str:
        what = found[0]
        return '""' if what[0] == '"' else "0" if what[0] == "'" else "\n" * what.count("\n") or " "

    return DIRECTIVE.sub("", COMMENT.sub(blank, text))


def flat(statement: str) -> str:
    """A statement without the text in parentheses and braces, three deep."""
    for _ in range(3):
        statement = PARENTHESES.sub("", statement)
    return statement


def density(texts: list[str]) -> Density:
    """Of sources, given as their texts."""
    lines = tokens = conditional = several = heavy = packed = 0
    for text in map(bare, texts):
        lines += sum(1 for line in text.splitlines() if line.strip())
        tokens += len(TOKEN.findall(text))
        for statement in re.findall(r"[^;{}]+[;{}]", text):
            marks = statement.count("?")
            conditional += marks
            several += marks >= 2
            heavy += len(re.findall(r"&&|\|\|", statement)) >= 3
            packed += INITIALIZED.match(flat(statement)) is not None
    return Density(lines, tokens, conditional, several, heavy, packed)


def of_folder(folder: Path) -> Density:
    """Of all C files below a folder."""
    return density([path.read_text() for ending in "ch" for path in sorted(folder.rglob(f"*.{ending}"))])


def blanked(text: str) -> str:
    """A source with blanks for comments and preprocessor lines and zeros for texts: each place stays where it is."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "0" if found[0][0] in "\"'" else " ", found[0])

    return DIRECTIVE.sub(blank, COMMENT.sub(blank, text))


def after_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def after_brackets(text: str, at: int) -> int:
    """Where the bracket that opens at `at` has been closed."""
    depth = 0
    while True:
        depth += (text[at] in "({[") - (text[at] in ")}]")
        at += 1
        if depth == 0:
            return at


def after_head(text: str, word: re.Match[str]) -> int:
    """Where the body of an `if`, a loop or an `else` may begin: after the word or its condition."""
    if word[1] in ("else", "do"):
        return word.end()
    return after_brackets(text, after_space(text, word.end()))


def after_statement(text: str, at: int) -> int:
    """Where the statement ends that begins at `at`."""
    if text[at] == "{":
        return after_brackets(text, at)
    word = WORD.match(text, at)
    if word:
        end = after_statement(text, after_space(text, after_head(text, word)))
        following = WORD.match(text, after_space(text, end))
        if word[1] == "do":
            return text.index(";", end) + 1
        if word[1] == "if" and following and following[1] == "else":
            return after_statement(text, after_space(text, following.end()))
        return end
    macro = LONE_MACRO.match(text, at)
    if macro:
        return after_brackets(text, macro.end())
    while text[at] != ";":
        at = after_brackets(text, at) if text[at] in "({[" else at + 1
    return at + 1


def without_braces(source: str) -> list[int]:
    """The lines of `if`, `else` and loops whose body takes several lines, comments included, and has no braces."""
    text, lines = blanked(source), []
    for word in WORD.finditer(text):
        head = after_head(text, word)
        body = after_space(text, head)
        chained = word[1] == "else" and text.startswith("if", body)
        if text[body] in "{;" or chained:
            continue
        if text.count("\n", head, after_statement(text, body)) > 1:
            lines.append(text.count("\n", 0, word.start()) + 1)
    return lines


if __name__ == "__main__":
    for name in sys.argv[1:] or ["csrc"]:
        print(f"{name}: {of_folder(Path(name))}")
