"""Which test files a selection of marks (`pytest -m`) leaves out as a whole, read from their text."""

from __future__ import annotations

import re

#: The marks of a file: a line of its own, or a list with an entry a line.
FILE_MARKS = re.compile(r"^pytestmark = (\[\n(?:    .*\n)*\]|.*)$", re.MULTILINE)


def left_out(text: str, selection: str) -> bool:
    """Whether the marks of a test file exclude all of its tests from a selection like "core and not slow".

    A selection that is more than words joined by "and" excludes no file.
    """
    terms = [term.split() for term in selection.split(" and ")]
    if not all(words[:-1] in ([], ["not"]) and words[-1].isidentifier() for words in terms if words):
        return False
    unwanted = {words[1] for words in terms if len(words) == 2}
    marks = {mark for statement in FILE_MARKS.findall(text) for mark in re.findall(r"pytest\.mark\.(\w+)", statement)}
    return not unwanted.isdisjoint(marks)
