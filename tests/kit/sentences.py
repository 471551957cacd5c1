"""One sentence a line, so that a diff of a page can be read: writes Markdown anew where it is otherwise.

    python tests/kit/sentences.py README.md docs/*.md

Tables, code, headings and comments stay as they are. No word changes: only where lines end.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: The end of a sentence, and the beginning of another.
END = re.compile(r"(?<=[.!?])([)\"*_]*)\s+(?=[\"(\[*]*[A-Z\x01])")
#: What ends in a dot and is no sentence.
SHORT = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|etc|resp)\.|\.\.|\b[A-Z]\.|\bD\d+\.)[)\"*_]*$")
#: What would be something else at the beginning of a line.
MARK = re.compile(r"[-*+] |\d+[.)] |#|>|\||```")
ITEM = re.compile(r"(\s*)([-*+] |\d+[.)] |> )?")


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; text in backticks, links and brackets counts as one word."""
    words: list[str] = []

    def hide(match: re.Match[str]) -> str:
        words.append(match[0])
        return f"\x01{len(words) - 1}\x02"

    text = re.sub(r"`+[^`]*`+|\]\([^)]*\)|<[^>]*>", hide, text)
    found, start = [], 0
    for match in END.finditer(text):
        if not SHORT.search(text[: match.end(1)]) and not MARK.match(text, match.end()):
            found.append(text[start : match.end(1)])
            start = match.end()
    return [re.sub("\x01(\\d+)\x02", lambda m: words[int(m[1])], s) for s in [*found, text[start:]]]


def stays(line: str) -> bool:
    """A line that is no paragraph: blank, a heading, a table, HTML, a rule."""
    return (
        not line.strip() or line.strip().startswith(("#", "|", "<")) or bool(re.fullmatch(r"\s*(-{3,}|={3,})\s*", line))
    )


def paragraph(lines: list[str]) -> tuple[list[str], int]:
    """The paragraph or item that begins the lines, one sentence a line, and how many lines it was."""
    head = ITEM.match(lines[0])
    assert head
    quote = head[2] == "> "
    indent = head[1] + (head[2] or "")
    text, n = [lines[0][len(indent) :].strip()], 1
    for line in lines[1:]:
        item = ITEM.match(line)
        if stays(line) or line.strip().startswith("```") or (item and item[2] and not (quote and item[2] == "> ")):
            break
        text.append(re.sub(r"^>\s?", "", line.strip()) if quote else line.strip())
        n += 1
    first, *others = sentences(" ".join(text))
    return [indent + first, *((indent if quote else " " * len(indent)) + other for other in others)], n


def one_a_line(text: str) -> str:
    """A page of Markdown with one sentence a line."""
    lines, out, at, fenced = text.split("\n"), [], 0, False
    while at < len(lines):
        line = lines[at]
        if line.strip().startswith("```"):
            fenced = not fenced
        comment = line.strip().startswith("<!--") and "-->" not in line
        if comment:
            while "-->" not in lines[at]:
                out.append(lines[at])
                at += 1
        if fenced or comment or stays(lines[at]) or line.strip().startswith("```"):
            out.append(lines[at])
            at += 1
        else:
            made, n = paragraph(lines[at:])
            out += made
            at += n
    return "\n".join(out)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        if path.suffix != ".md":
            sys.exit(f"{name} is no Markdown")
        path.write_text(one_a_line(path.read_text()))
