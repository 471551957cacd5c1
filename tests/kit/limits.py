"""Limits in seconds in the sources of tests: a busy machine can reach each of them, so a test has none.

Only the runner ends a test that hangs. A function here reads Python by `ast`, and the Python that is inside strings,
and returns what it finds as sentences.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Calls that end, delay or measure by a clock, by the last part of their name.
CLOCKS = {
    "alarm": "ends the process by a clock",
    "setitimer": "sends a signal by a clock",
    "sigtimedwait": "waits for some seconds",
    "dump_traceback_later": "ends the process by a clock",
    "sleep": "waits for some seconds",
    "_sleep": "waits for some seconds",
    "Timer": "calls a function after some seconds",
    "monotonic": "reads a clock",
    "monotonic_ns": "reads a clock",
    "perf_counter": "reads a clock",
    "perf_counter_ns": "reads a clock",
    "process_time": "reads a clock",
    "process_time_ns": "reads a clock",
    "thread_time": "reads a clock",
    "thread_time_ns": "reads a clock",
    "clock_gettime": "reads a clock",
}

#: Methods whose first argument, where it is a number, is a number of seconds ..
FIRST = {"join": 0, "wait": 0, "result": 0, "exception": 0, "communicate": 1}
#: .. but for objects made by a call of these.
COUNTED = ("EventCount", "Counts")

#: Calls that have a limit unless they are given timeout=None.
LIMITED = ("dist.threads", "Group")

#: Keywords that are a number of seconds.
KEYWORDS = ("timeout", "timeout_s", "deadline", "limit_s", "stuck_after")

#: What a string shows that is Python with a limit inside and does not parse.
INSIDE = re.compile(r"\balarm\(|\bsleep\(|\btimeout=(?!None\b)[\w.]+|\.(?:wait|join)\(\d|\bRLIMIT_CPU\b")

#: The same for C.
IN_C = re.compile(r"\b(alarm|setitimer|sleep|usleep|nanosleep|clock_gettime|pthread_cond_timedwait|clock)\s*\(")


class Limit(NamedTuple):
    """One place, with the names of the functions and classes around it."""

    line: int
    where: str
    text: str


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.expr) -> str:
    """The name that an object is reached by: `counts` of counts[k], `done` of self.done."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return _name(node)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


class _Reader(ast.NodeVisitor):
    def __init__(self, tree: ast.AST, depth: int) -> None:
        self.depth = depth
        self.around: list[str] = []
        self.found: list[Limit] = []
        self.numbers: set[str] = set()
        self.counted: set[str] = set()
        self.docs: set[int] = set()
        for node in ast.walk(tree):
            self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        """Names that hold numbers or counts, and which strings are documentation."""
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {_root(t) for target in targets for t in getattr(target, "elts", [target])}
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int | float):
                self.numbers |= names
            if any(isinstance(x, ast.Call) and _name(x.func) in COUNTED for x in ast.walk(node.value)):
                self.counted |= names
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            self.docs.add(id(node.value))

    def _add(self, node: ast.AST, text: str) -> None:
        self.found.append(Limit(getattr(node, "lineno", 1), ".".join(self.around), text))

    def _is_number(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int | float) and not isinstance(node.value, bool)
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        return isinstance(node, ast.Name) and node.id in self.numbers

    def _is_limited(self, called: ast.expr) -> bool:
        """Whether it has a limit by default."""
        return _name(called) in ("threads", "Group") and ast.unparse(called) in LIMITED

    def _inside(self, node: ast.expr, text: str) -> None:
        """A string that is Python, or shows that it is."""
        if self.depth > 2 or id(node) in self.docs:
            return
        try:
            inner = ast.parse(text)
        except (SyntaxError, ValueError):
            for match in INSIDE.finditer(text):
                self._add(node, f"a string has {match[0]}")
            return
        if all(isinstance(x, ast.Expr) and not isinstance(x.value, ast.Call) for x in inner.body):
            return
        reader = _Reader(inner, self.depth + 1)
        reader.visit(inner)
        for limit in reader.found:
            self._add(node, f"line {limit.line} of a string: {limit.text}")

    def _scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.around.append(node.name)
        self.generic_visit(node)
        self.around.pop()

    visit_ClassDef = _scope

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)  # type: ignore[arg-type]
        for argument, default in pairs:
            if argument.arg in KEYWORDS and default is not None and self._is_number(default):
                self._add(node, f"{node.name} has a limit by default: {argument.arg}={ast.unparse(default)}")
        names = {_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
        if "given" in names and "settings" not in names:
            self._add(node, f"{node.name} is @given without @settings(deadline=None)")
        self._scope(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, given = _name(node.func), {keyword.arg for keyword in node.keywords}
        for keyword in node.keywords:
            if keyword.arg in KEYWORDS and not _is_none(keyword.value):
                self._add(node, f"{name} has a limit: {keyword.arg}={ast.unparse(keyword.value)}")
        if "timeout" not in given and self._is_limited(node.func):
            self._add(node, f"{name} has a limit by default: expected timeout=None")
        if name == "settings" and not given & {"deadline", None}:
            self._add(node, "settings has no deadline=None, and the default is a limit")
        if name in CLOCKS and isinstance(node.func, ast.Attribute | ast.Name):
            self._add(node, f"{name} {CLOCKS[name]}")
        if name == "time" and isinstance(node.func, ast.Attribute) and _name(node.func.value) == "time":
            self._add(node, "time reads a clock")
        if name == "setrlimit" and "RLIMIT_CPU" in ast.unparse(node):
            self._add(node, "setrlimit ends the process by a clock")
        at = FIRST.get(name)
        if at is not None and isinstance(node.func, ast.Attribute) and len(node.args) > at:
            of = node.func.value
            if self._is_number(node.args[at]) and _root(of) not in self.counted:
                self._add(node, f"{name} has a limit: {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "(" in node.value:
            self._inside(node, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [x.value if isinstance(x, ast.Constant) else "_" for x in node.values]
        text = "".join(map(str, parts))
        if "(" in text:
            self._inside(node, text)
        for part in node.values:
            if not isinstance(part, ast.Constant):
                self.visit(part)


def in_python(text: str) -> list[Limit]:
    """The limits of a Python source."""
    tree = ast.parse(text)
    reader = _Reader(tree, 0)
    reader.visit(tree)
    return reader.found


def in_c(text: str) -> list[Limit]:
    """The calls of a C source that wait for some seconds or read a clock; comments are not read."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    found = []
    for number, line in enumerate(code.splitlines(), 1):
        for match in IN_C.finditer(line):
            found.append(Limit(number, "", f"{match[1]} waits for some seconds or reads a clock"))
    return found


def of_tree(root: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, Limit]]:
    """The limits of all sources in these folders, each with its file's path from `root`."""
    for folder in folders:
        for path in sorted(Path(root, folder).rglob("*.[pc][yh]*")) + sorted(Path(root, folder).rglob("*.[ch]")):
            if path.suffix not in (".py", ".c", ".h") or "__pycache__" in path.parts:
                continue
            read = in_python if path.suffix == ".py" else in_c
            for limit in read(path.read_text()):
                yield path.relative_to(root).as_posix(), limit
