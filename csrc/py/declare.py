"""Writes the C headers that declare the public names of the core, from core.pyi.

    python csrc/py/declare.py FOLDER

core.pyi is the one declaration of each class, method, property and function: its typed signature and its docstring are
written there as normal Python; for_tests.pyi is the same for functions of a development build. For each class C this
writes FOLDER/py/declared/C.h, for each C file f that a line `# f.c` names f.h with the functions after that line, and
docs.h with the docstrings of the exceptions. A header has the docstrings, the tables of names that fan_parse reads, and
the PyMethodDef and PyGetSetDef rows; a C file includes it after its functions, which are called

    noun_method, noun_get_property, noun_set_property, noun_new     noun: the last word of the class, in lower case
    function                                                       for a function of the module

and take (self, values): borrowed, in the order of the parameters, NULL where the caller gave none. A method without
parameters has CPython's METH_NOARGS signature, one with `*args` METH_VARARGS's, one with a single required parameter
METH_O's. A comment at the end of a signature adds to it:

    # step    a step of explored schedules (py/base/step.c)
    # fast    a C function noun_method_fast reads the arguments first, and may return the result
    # python  the method is Python, put on the type when fanin is imported; its docstring is there
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

SIGNATURES = Path(__file__).with_name("core.pyi")
#: Declarations of a development build.
FOR_TESTS = Path(__file__).with_name("for_tests.pyi")

#: What fan_parse checks by itself, by annotation: py/base/args.h, fan_decl.kinds.
KINDS = {"NDArray": "a", "bytearray": "b", "dict": "d", "list": "l", "str": "s", "tuple": "t", "type": "c", "bool": "f"}
KINDS["bool | None"] = "F"


@dataclass
class Parameter:
    name: str
    kind: str  # of KINDS, or "o"
    default: str | None  # as in the signature; None: required


@dataclass
class Callable:
    """A function, a method, a property (`get`, `set`), or a class as it is called ("__new__")."""

    name: str
    by_place_only: list[Parameter] = field(default_factory=list)
    by_place: list[Parameter] = field(default_factory=list)
    by_name: list[Parameter] = field(default_factory=list)
    star: str = ""  # the name of *args
    stars: str = ""  # of **kwargs
    doc: str = ""
    words: set[str] = field(default_factory=set)  # of its comment
    can: str = "call"  # "get", "set"

    @property
    def all(self) -> list[Parameter]:
        return [*self.by_place_only, *self.by_place, *self.by_name]

    def signature(self, first: str) -> str:
        """What inspect.signature reads; `first` is "$self" of a method."""
        parts = [first] if first else []
        parts += [shown(p) for p in self.by_place_only]
        if self.by_place_only or (first and not self.all and not self.star):
            parts.append("/")
        parts += [shown(p) for p in self.by_place]
        if self.by_name or self.star:
            parts.append(f"*{self.star}")
        parts += [shown(p) for p in self.by_name]
        return ", ".join([*parts, f"**{self.stars}"] if self.stars else parts)


def shown(p: Parameter) -> str:
    return p.name if p.default is None else f"{p.name}={p.default}"


def kind_of(annotation: ast.expr | None) -> str:
    """The kind of `tuple[..]`, `str` and the like."""
    head = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return KINDS.get(ast.unparse(head), "o") if head else "o"


def parameters(args: list[ast.arg], defaults: list[ast.expr | None]) -> list[Parameter]:
    return [
        Parameter(a.arg, kind_of(a.annotation), ast.unparse(d) if d else None)
        for a, d in zip(args, defaults, strict=True)
    ]


def read(node: ast.FunctionDef, lines: list[str], method: bool) -> Callable:
    a, made = node.args, Callable(node.name, doc=ast.get_docstring(node) or "")
    places = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(places) - len(a.defaults)) + [*a.defaults]
    only = len(a.posonlyargs)
    made.by_place_only = parameters(places[:only], defaults[:only])
    made.by_place = parameters(places[only:], defaults[only:])
    made.by_name = parameters(a.kwonlyargs, a.kw_defaults)
    made.star, made.stars = a.vararg.arg if a.vararg else "", a.kwarg.arg if a.kwarg else ""
    if method:
        del (made.by_place_only or made.by_place)[0]
    head = lines[node.lineno - 1 : max(node.lineno, node.body[0].lineno - (1 if made.doc else 0))]
    words = [w for line in head for w in re.findall(r"\w+", line.partition("  # ")[2])]
    made.words = set(words) & {"step", "fast", "python"}
    for decorator in node.decorator_list:
        text = ast.unparse(decorator)
        if text == "property":
            made.can = "get"
        elif text.endswith((".setter", ".deleter")):
            made.can = "set"
    return made


def merged(first: Callable, other: Callable) -> Callable:
    """Of two overloads: their parameters are the same; one is optional if any overload has a default for it."""
    for p, q in zip(first.all, other.all, strict=True):
        if p.name != q.name:
            raise SystemExit(f"core.pyi: {first.name}: overloads differ in {p.name} and {q.name}")
        if p.default is None:
            p.default = q.default
    return first


def read_all(body: list[ast.stmt], lines: list[str], method: bool) -> list[Callable]:
    made: dict[tuple[str, bool], Callable] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            one = read(node, lines, method)
            key = (one.name, one.can == "set")
            made[key] = merged(made[key], one) if key in made and one.can == "call" else made.get(key, one)
    return list(made.values())


def documented(signature: str, doc: str) -> str:
    text = json.dumps(doc, ensure_ascii=False)[1:-1].replace("\\n", '\\n"\n    "')
    return f'    "{signature}\\n--\\n\\n"\n    "{text}"'


def row_of(c: Callable, call: str, first: str) -> tuple[list[str], str]:
    """(what comes before the rows, the row) of a function or a method; `call`: its C function."""
    doc = documented(f"{c.name}({c.signature(first)})", c.doc) if c.doc else "    NULL"
    step = "STEP_" if "step" in c.words else ""
    if c.star or not c.all:
        flags = ["METH_NOARGS", "METH_VARARGS", "", "METH_VARARGS | METH_KEYWORDS"][bool(c.star) + 2 * bool(c.stars)]
        if step and c.stars:
            raise SystemExit(f"core.pyi: {c.name}: a step has no **kwargs")
        before = [f"FAN_STEP_ONE({call})"] if step else []
        function = f"{call}_step" if step else call
        if not c.stars:  # without a cast, so the compiler checks the function's type
            return before, f'    {{"{c.name}", {function}, {flags},\n{doc}}},'
        before.append(f'_Static_assert(_Generic(&{call}, PyCFunctionWithKeywords: 1, default: 0), "type of {call}");')
        return before, f'    {{"{c.name}", (PyCFunction)(void (*)(void)){function}, {flags},\n{doc}}},'
    before = [declaration(c, call, c.name), door_of(c, call)]
    if step:
        before.append(f"FAN_STEP_FAST({call})")
    function = f"{call}_step" if step else f"{call}_door"
    return before, (
        f'    {{"{c.name}", (PyCFunction)(void (*)(void)){function}, METH_FASTCALL | METH_KEYWORDS,\n{doc}}},'
    )


def declaration(c: Callable, call: str, name: str) -> str:
    required = sum(p.default is None for p in c.all)
    if any(p.default is None for p in c.all[required:]) or any(p.default is None for p in c.by_name):
        raise SystemExit(f"core.pyi: {name}: a required parameter after an optional one, or by name alone")
    names = ", ".join(f'"{p.name}"' for p in c.all)
    kinds = "".join(p.kind for p in c.all)
    kinds = f'"{kinds}"' if kinds.strip("o") else "NULL"
    return (
        f"static const char *const {call}_names[] = {{{names}}};\n"
        f'static const fan_decl {call}_decl = {{"{name}", {call}_names, {kinds}, {len(c.all)}, '
        f"{len(c.by_place_only)}, {len(c.by_place_only) + len(c.by_place)}, {required}}};"
    )


def door_of(c: Callable, call: str) -> str:
    one = len(c.all) == 1 and c.all[0].default is None
    shape = "FAST" if "fast" in c.words else "ONE" if one else "ANY"
    return f"FAN_DOOR_{shape}({call})" if one and shape == "ONE" else f"FAN_DOOR_{shape}({call}, {len(c.all)})"


#: Functions of the C type that are no rows, and the macro that makes steps of them.
SLOTS = {"__repr__": "REPR", "__next__": "REPR", "__getitem__": "ONE"}


def class_header(node: ast.ClassDef, lines: list[str]) -> str:
    noun = re.findall(r"[A-Z][a-z]*|[a-z]+", node.name)[-1].lower()
    before: list[str] = []
    methods: list[str] = []
    getset: dict[str, list[str]] = {}
    doc, signature = ast.get_docstring(node) or "", ""
    for c in read_all(node.body, lines, method=True):
        bare = c.name.strip("_")
        if "python" in c.words:
            continue
        if c.name in ("__new__", "__init__"):
            signature = f"{node.name}({c.signature('')})"
            if c.all:
                fast = "fast" in c.words
                before.append(declaration(c, f"{noun}_new", node.name))
                before.append(f"FAN_DOOR_NEW{'_FAST' * fast}({noun}_new, {len(c.all)})")
                if "step" in c.words:
                    before.append(f"FAN_STEP_VECTOR({noun}_new, {noun}_new{'_fast' * fast}_vector)")
        elif c.can == "get":
            call = f"{noun}_get_{bare}"
            if "step" in c.words:
                before.append(f"FAN_STEP_GET({call})")
                call += "_step"
            text = json.dumps(c.doc, ensure_ascii=False).replace("\\n", '\\n"\n     "') if c.doc else "NULL"
            getset[c.name] = [f'    {{"{c.name}", {call}, ', "NULL", f",\n     {text}, NULL}},"]
        elif c.can == "set":
            call = f"{noun}_set_{bare}"
            if "step" in c.words:
                before.append(f"FAN_STEP_SET({call})")
                call += "_step"
            getset[c.name][1] = call
        elif c.name in SLOTS:
            if "step" in c.words:
                before.append(f"FAN_STEP_{SLOTS[c.name]}({noun}_{bare})")
        elif c.name in ROWS or not c.name.startswith("__"):
            first, row = row_of(c, f"{noun}_{bare}", "$self")
            before += first
            methods.append(row)
    text = documented(signature, doc) if signature else "    " + json.dumps(doc, ensure_ascii=False)
    if not signature:
        text = text.replace("\\n", '\\n"\n    "')
    made = [f"static const char {noun}_doc[] =\n{text};", *before]
    if methods:
        made += [f"static PyMethodDef {noun}_methods[] = {{", *methods, "    {NULL, NULL, 0, NULL}};"]
    if getset:
        made += [f"static PyGetSetDef {noun}_getset[] = {{", *("".join(parts) for parts in getset.values())]
        made.append("    {NULL, NULL, NULL, NULL, NULL}};")
    return "\n".join(made)


#: Special methods that are rows, not slots of the C type.
ROWS = {"__enter__", "__exit__", "__reduce__", "__reduce_ex__", "__dlpack__", "__dlpack_device__", "__cuda_stream__"}
ROWS |= {"__array__", "__array_ufunc__", "__array_function__", "__complex__"}


def functions_header(file: str, functions: list[Callable]) -> str:
    before: list[str] = []
    rows: list[str] = []
    for c in functions:
        first, row = row_of(c, c.name.strip("_"), "")
        before += first
        rows.append(row)
    return "\n".join([*before, f"PyMethodDef fan_{file}_functions[] = {{", *rows, "    {NULL, NULL, 0, NULL}};"])


def headers(text: str) -> dict[str, str]:
    """The headers by their names."""
    lines, tree = text.splitlines(), ast.parse(text)
    made: dict[str, str] = {}
    files = [(n, m[1]) for n, line in enumerate(lines, 1) if (m := re.fullmatch(r"# (?:(\w+)\.c|-----.*)", line))]
    grouped: dict[str, list[ast.stmt]] = {}
    errors: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            here = [file for n, file in files if n < node.lineno]
            if here and here[-1]:
                grouped.setdefault(here[-1], []).append(node)
        elif isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Warning")):
            doc = json.dumps(ast.get_docstring(node) or "", ensure_ascii=False)
            errors.append(f"#define FAN_DOC_{node.name} {doc}")
        elif isinstance(node, ast.ClassDef):
            made[node.name.strip("_")] = class_header(node, lines)
    for file, nodes in grouped.items():
        made[file] = functions_header(file, read_all(nodes, lines, method=False))
    made["docs"] = "\n".join(errors)
    return made


def write(folder: Path) -> list[Path]:
    """Write the headers that differ from what is there; return all of them."""
    made = []
    texts = headers(FOR_TESTS.read_text()) | headers(SIGNATURES.read_text())
    for name, text in texts.items():
        path = folder / "py" / "declared" / f"{name}.h"
        text = f"/* {name}: made by csrc/py/declare.py of csrc/py/core.pyi. */\n{text}\n"
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        made.append(path)
    return made


if __name__ == "__main__":
    write(Path(sys.argv[1]))
