"""The structure of the sources, read from the files alone: which file includes, calls and imports which, and in which
cycles. The tests of the layout use it.

Each function takes a folder (or a text) and returns values or sentences, so that a test can pass a small wrong tree.
"""

from __future__ import annotations

import ast
import atexit
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


# Objects


class Elf:
    """A reader for the parts of a 64-bit little-endian ELF file that this module needs; it needs no tool."""

    def __init__(self, path: Path) -> None:
        self.data = data = path.read_bytes()
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path.name} is not a 64-bit little-endian ELF file")
        phoff, shoff = struct.unpack_from("<QQ", data, 32)
        phsize, phnum, shsize, shnum = struct.unpack_from("<HHHH", data, 54)
        #: (type, flags) of the program headers
        self.segments = [struct.unpack_from("<II", data, phoff + i * phsize) for i in range(phnum)]
        #: (name, type, flags, addr, offset, size, link, info, align, entsize) of the sections
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + i * shsize) for i in range(shnum)]

    def text(self, table: int, at: int) -> str:
        start = self.sections[table][4] + at
        return self.data[start : self.data.index(b"\0", start)].decode()

    def symbols(self, kind: int) -> list[tuple[str, int, int, int, int]]:
        """(name, binding, type, visibility, section index); kind 2 is .symtab, kind 11 is .dynsym."""
        out = []
        for section in self.sections:
            if section[1] == kind:
                for at in range(section[4], section[4] + section[5], 24):
                    name, info, other, index = struct.unpack_from("<IBBH", self.data, at)
                    out.append((self.text(section[6], name), info >> 4, info & 15, other & 3, index))
        return out

    def exported(self) -> set[str]:
        return {name for name, binding, _, _, index in self.symbols(11) if binding in (1, 2) and index}

    def wanted(self) -> set[str]:
        return {name for name, binding, _, _, index in self.symbols(11) if binding and not index}

    def defines(self) -> set[str]:
        """The global names that an object file defines: functions and data."""
        return {
            name
            for name, binding, kind, _, index in self.symbols(2)
            if binding in (1, 2) and index and kind in (0, 1, 2, 6, 10)
        }

    def uses(self) -> set[str]:
        """The names that an object file calls or reads and has not."""
        return {name for name, binding, _, _, index in self.symbols(2) if binding in (1, 2) and not index and name}

    def dynamic(self) -> dict[int, int]:
        for section in self.sections:
            if section[1] == 6:
                return dict(struct.iter_unpack("<qQ", self.data[section[4] : section[4] + section[5]]))
        return {}


def c_files(csrc: Path) -> list[Path]:
    """Sources and headers."""
    return sorted(p for p in csrc.glob("**/*") if p.suffix in (".c", ".h", ".inc", ".cu"))


def included(path: Path, csrc: Path) -> list[Path]:
    """The files of the tree that a file includes, as it writes them: in angles, too, the compiler finds them."""
    found = (csrc / (quoted or angled) for quoted, angled in INCLUDE.findall(path.read_text()))
    return [name for name in found if name.is_file()]


def closure(path: Path, csrc: Path) -> list[Path]:
    """The file and all that it includes, directly or through others."""
    seen: dict[Path, None] = {path: None}
    for one in iter_growing(seen):
        for other in included(one, csrc):
            seen.setdefault(other)
    return list(seen)


def iter_growing(seen: dict[Path, None]) -> Iterator[Path]:
    """What is in the dict, with what is put into it on the way."""
    done = 0
    while done < len(seen):
        yield list(seen)[done]
        done += 1


def kept(cache: Path, key: Iterable[str | bytes], suffix: str, make: Callable[[Path], None]) -> Path:
    """The file in `cache` named by a hash of `key`; `make` writes it if it is missing."""
    text = hashlib.sha256()
    for part in key:
        text.update((part.encode() if isinstance(part, str) else part) + b"\0")
    out = cache / f"{text.hexdigest()[:32]}{suffix}"
    if not out.exists():
        partial = out.with_name(f"{out.name}.{os.getpid()}.part")
        make(partial)
        partial.replace(out)
    return out


@cache
def declared(csrc: Path) -> Path:
    """A folder with the headers that the build makes of csrc/py/core.pyi."""
    folder = Path(tempfile.mkdtemp(prefix="fanin-declared-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([sys.executable, str(csrc / "py/declare.py"), str(folder)], check=True)
    return folder


def compiler_output(cc: list[str], csrc: Path, *flags: str) -> str:
    """The compiler's output with these flags and those of a release build; a failure is an AssertionError."""
    import numpy

    command = [*cc, "-std=c11", *flags, f"-I{csrc}", "-DNPY_TARGET_VERSION=NPY_1_25_API_VERSION"]
    command += [
        f"-isystem{s}"
        for s in (sysconfig.get_path("include"), numpy.get_include(), csrc.parent / "python/fanin/include")
    ]
    command += [f"-I{declared(csrc)}"] if (csrc / "py/core.pyi").exists() else []
    unset = {"LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "CCACHE_BASEDIR"}  # the last shortens paths in its messages
    env = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run(
        [*command, '-DFAN_BUILD="names"'], capture_output=True, text=True, env={**env, "LC_ALL": "C"}, cwd=csrc
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stderr


def compile_objects(csrc: Path, cc: list[str], cache: Path) -> dict[str, Path]:
    """Source ("buffer/fold.c") -> its object file, of all under `csrc`: built fast and without warnings, for its names.

    An object is kept in `cache` under a hash of all that went into it. Release code: without FAN_TEST.
    """
    flags = ["-O0", "-w", "-fPIC"]

    def one(source: Path) -> Path:
        made = [p.read_bytes() for p in (csrc / "py").glob("*.py*")]
        key = [*cc, *flags, str(source), *made, *(p.read_bytes() for p in closure(source, csrc))]
        return kept(
            cache, key, ".o", lambda out: void(compiler_output(cc, csrc, *flags, "-c", str(source), "-o", str(out)))
        )

    sources = [p for p in c_files(csrc) if p.suffix == ".c"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip((str(s.relative_to(csrc)) for s in sources), pool.map(one, sources), strict=True))


def void(_: object) -> None: ...


# Circles


@dataclass(frozen=True)
class Edge:
    """One thing needs another, and why: "fold.c includes buffer/slot.h"."""

    here: str
    there: str
    why: str


def nodes_of(csrc: Path, objects: Mapping[str, Path]) -> dict[str, str]:
    """File -> the node that it belongs to. x.h and x.c are one ("buffer/fold"), where x.h declares what x.c defines;
    a header of structs alone, or of functions of other files, is its own node ("buffer/slot.h").
    """
    node = {}
    for path in c_files(csrc):
        name = str(path.relative_to(csrc))
        node[name] = name if path.suffix in (".h", ".cu", ".inc") else name[:-2]
    for name, obj in objects.items():
        header = name[:-2] + ".h"
        if header in node:
            words = set(re.findall(r"\w+", without_comments((csrc / header).read_text())))
            if Elf(obj).defines() & words:
                node[header] = name[:-2]
    return node


def c_edges(csrc: Path, objects: Mapping[str, Path]) -> list[Edge]:
    """Which file of csrc/ needs which: from the `#include` lines, and from the symbols that objects use and define."""
    node = nodes_of(csrc, objects)
    edges = []
    for name in node:
        for other in included(csrc / name, csrc):
            there = str(other.relative_to(csrc))
            if there in node and node[there] != node[name]:
                edges.append(Edge(node[name], node[there], f"{name} includes {there}"))
    symbols = {name: Elf(obj) for name, obj in objects.items()}
    owners: dict[str, list[str]] = {}
    for name, elf in symbols.items():
        for symbol in elf.defines():
            owners.setdefault(symbol, []).append(name)
    for name, elf in symbols.items():
        for symbol in sorted(elf.uses()):
            for owner in owners.get(symbol, ()):
                edges.append(Edge(node[name], node[owner], f"{name} calls {symbol} of {owner}"))
    return [e for e in edges if e.here != e.there]


def folder_of(node: str) -> str:
    return node.rpartition("/")[0]


def inside(edges: Iterable[Edge], folder: str) -> list[Edge]:
    """The edges between files of one folder."""
    return [e for e in edges if folder_of(e.here) == folder == folder_of(e.there)]


def between_folders(edges: Iterable[Edge]) -> list[Edge]:
    """The edges between folders, each with the first reason for it."""
    found: dict[tuple[str, str], Edge] = {}
    for e in edges:
        pair = folder_of(e.here), folder_of(e.there)
        if pair[0] != pair[1]:
            found.setdefault(pair, Edge(*pair, e.why))
    return list(found.values())


def components(edges: Iterable[Edge]) -> list[set[str]]:
    """The sets of two or more in which each needs each (Tarjan, without recursion)."""
    graph: dict[str, list[str]] = {}
    for e in edges:
        graph.setdefault(e.here, []).append(e.there)
        graph.setdefault(e.there, [])
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in graph:
        if root in number:
            continue
        number[root] = low[root] = len(number)
        stack.append(root)
        work = [(root, iter(graph[root]))]
        while work:
            here, rest = work[-1]
            for there in rest:
                if there not in number:
                    number[there] = low[there] = len(number)
                    stack.append(there)
                    work.append((there, iter(graph[there])))
                    break
                if there in stack:
                    low[here] = min(low[here], number[there])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[here])
                if low[here] == number[here]:
                    at = stack.index(here)
                    found.append(set(stack[at:]))
                    del stack[at:]
    return [c for c in found if len(c) > 1]


def shortest_circle(edges: Iterable[Edge], members: set[str]) -> list[Edge]:
    """A shortest way from one of the members back to itself."""
    out: dict[str, dict[str, Edge]] = {m: {} for m in sorted(members)}
    for e in edges:
        if e.here in members and e.there in members:
            out[e.here].setdefault(e.there, e)
    best: list[Edge] = []
    for start in out:
        came: dict[str, Edge] = {}
        row = [start]
        while row and start not in came:
            following = []
            for here in row:
                for there, e in out[here].items():
                    if there not in came:
                        came[there] = e
                        following.append(there)
            row = following
        way, at = [], start
        while at in came and (not way or at != start):
            way.append(came[at])
            at = came[at].here
        if way and (not best or len(way) < len(best)):
            best = way[::-1]
    return best


def circles(edges: Iterable[Edge]) -> list[str]:
    """A sentence for each set of things that need each other in a circle."""
    edges = list(edges)
    said = []
    for members in components(edges):
        way = shortest_circle(edges, members)
        names = [e.here for e in way] + [way[0].here]
        more = sorted(members - set(names))
        said.append(
            f"{' -> '.join(names)} is a circle: {'; '.join(e.why for e in way)}"
            + (f" (in circles with them: {', '.join(more)})" if more else "")
        )
    return sorted(said)


def python_edges(package: Path) -> list[Edge]:
    """Which file of a package imports which, anywhere in a file, functions and `if TYPE_CHECKING` included. A node is a
    file without its suffix, as in "fanin/analysis/records".
    """
    found = (p for p in package.glob("**/*.py*") if p.suffix in (".py", ".pyi"))
    files = {p.relative_to(package.parent).with_suffix("").as_posix(): p for p in found}
    edges = []
    for name, path in sorted(files.items()):
        if path.suffix == ".pyi":  # the types of a library: it is imported, and imports nothing that way
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for candidates in imported(node, name.split("/")[:-1]):
                there = next((f for c in candidates for f in (c, f"{c}/__init__") if f in files), name)
                if there != name:
                    edges.append(Edge(name, there, f"{name}.py imports {there}.py in line {node.lineno}"))
    return edges


def imported(node: ast.AST, folder: list[str]) -> Iterator[tuple[str, ...]]:
    """For each name of an import statement the paths that it may mean: `from .a import b` is a/b, or else a."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.name.replace(".", "/"),)
    elif isinstance(node, ast.ImportFrom):
        base = folder[: len(folder) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        for alias in node.names:
            yield "/".join([*base, alias.name]), "/".join(base)


# Plans

#: Where rules and plans are made: elsewhere they are carried out.
RULE_FILES = ("buffer/sync", "buffer/accum", "buffer/plan", "buffer/rules", "device/capture_rule")
#: The one of them that makes its plans of the others'.
COMPOSED = "buffer/plan"

STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\n\} \1;", re.DOTALL)
FIELD = re.compile(r"(\w+)(\[[^\]]*\])?(\s*:\s*\d+)?\s*(?=[,;])")


def plan_structs(headers: Iterable[str]) -> set[str]:
    """The structs that functions declared in these texts return by value: the plans, and what lies in them."""
    text = "\n".join(without_comments(h) for h in headers)
    structs = dict(STRUCT.findall(text))
    todo = [name for name in structs if re.search(rf"^(?:static inline )?{name} \w+\(", text, re.MULTILINE)]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [other for other in structs if re.search(rf"\b{other} (?!\*)\w", structs[name])]
    return found


def watched(text: str, structs: set[str]) -> tuple[str, set[str]]:
    """A header in which the compiler warns of each use of a plan's field, and those fields: "fan_sync_add.record"."""
    fields: set[str] = set()

    def struct(match: re.Match[str]) -> str:
        name, body = match[1], match[2]
        if name not in structs:
            return match[0]

        def field(one: re.Match[str]) -> str:
            fields.add(f"{name}.{one[1]}")
            return f'{one[0]} __attribute__((deprecated("{name}.{one[1]}")))'

        return f"typedef struct {name} {{{FIELD.sub(field, body)}\n}} {name};"

    return STRUCT.sub(struct, without_comments(text, strings=True)), fields


def reads(text: str, line: int, field: str) -> bool:
    """Whether the statement that begins in this line reads `x.field`, and does not only write it."""
    rest = "\n".join(text.split("\n")[line - 1 :])
    end = re.search(r"[;{}]\s*$", rest, re.MULTILINE)
    uses = re.finditer(
        rf"(?:\.|->){field}\b(?:\[[^\]]*\])?+(?!\s*(?:=(?!=)|[|&+^-]=|\+\+|--))", rest[: end.end() if end else None]
    )
    return any(True for _ in uses)


def plan_fields(csrc: Path, cc: list[str], cache: Path) -> dict[str, set[str]]:
    """Each field of the plans, as in "fan_sync_add.record", with the files that read it. Those that make plans do not
    count; buffer/plan, which makes its own of the others', counts for theirs.

    The compiler finds the struct of each field: it warns of each use in a copy of the headers.
    """
    headers = [p for name in RULE_FILES if (p := csrc / f"{name}.h").exists()]
    structs = plan_structs(p.read_text() for p in headers)
    texts = {p.relative_to(csrc): watched(p.read_text(), structs) for p in headers}
    key = "\0".join(text for text, _ in texts.values())
    folder = cache / f"watched-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    for name, (text, _) in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    users = [p for p in c_files(csrc) if p.suffix == ".c" and set(closure(p, csrc)) & set(headers)]
    makers = {name for name in RULE_FILES if name != COMPOSED}
    users = [p for p in users if p.relative_to(csrc).as_posix()[:-2] not in makers]
    composed = csrc / f"{COMPOSED}.h"
    own = plan_structs([composed.read_text()]) if composed.exists() else set()
    readers: dict[str, set[str]] = {field: set() for _, fields in texts.values() for field in fields}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for path, said in zip(users, pool.map(lambda p: uses_in(p, csrc, cc, cache, folder), users), strict=True):
            text = without_comments(path.read_text())
            for line, name in said:
                if path.stem == Path(COMPOSED).stem and name.partition(".")[0] in own:
                    continue  # a file that makes a plan does not carry it out
                if reads(text, line, name.partition(".")[2]):
                    readers[name].add(path.relative_to(csrc).as_posix())
    return readers


def uses_in(path: Path, csrc: Path, cc: list[str], cache: Path, folder: Path) -> set[tuple[int, str]]:
    """(line, field) of each use of a watched field in a file."""
    flags = [f"-I{folder}", "-fsyntax-only", "-Wdeprecated-declarations", "-fmax-errors=1", str(path)]
    key = [*cc, *flags, *(p.read_bytes() for p in closure(path, csrc))]
    said = kept(cache, key, ".said", lambda out: void(out.write_text(compiler_output(cc, csrc, *flags)))).read_text()
    own = re.findall(rf"^{re.escape(str(path))}:(\d+):\d+: warning: .*deprecated: (\w+\.\w+)", said, re.MULTILINE)
    return {(int(line), name) for line, name in own}


def facts_never_set(csrc: Path) -> list[str]:
    """The facts that a rule reads (the fields of the structs that it is passed) and that nothing under `csrc` decides:
    to copy a field of the same name from another struct is not to decide it.
    """
    headers = [p for name in RULE_FILES if (p := csrc / f"{name}.h").exists()]
    texts = {p.relative_to(csrc).as_posix(): without_comments(p.read_text()) for p in headers}
    structs = {name: (file, body) for file, text in texts.items() for name, body in STRUCT.findall(text)}
    read = {n for text in texts.values() for n in re.findall(r"\bconst (\w+) \*\w+[,)]", text) if n in structs}
    sources = [without_comments(p.read_text()) for p in c_files(csrc)]
    written: set[str] = set()
    for text in sources:
        for name, value in re.findall(r"(?:\.|->)(\w+)(?:\[[^\]]*\])?\s*[|&]?=(?!=)\s*([^;,}]*)", text):
            if not re.fullmatch(rf"[\w.>-]*(?:\.|->){name}", value.strip()):
                written.add(name)
    return [
        f"{structs[name][0]}: {name}.{field[1]} is read and never set"
        for name in sorted(read)
        for field in FIELD.finditer(structs[name][1])
        if field[1] not in written
    ]


def rule_bits_set(csrc: Path) -> list[str]:
    """Where a rule's bit is put into a word of rules outside the files that decide. To read one (`rules & FAN_A(6)`)
    is not to set it.
    """
    wrong = []
    for path in c_files(csrc):
        name = path.relative_to(csrc).as_posix()
        if name.rpartition(".")[0] not in RULE_FILES:
            for at, line in enumerate(without_comments(path.read_text()).split("\n"), 1):
                for bit in re.finditer(r"FAN_[SA]\([^()]*\)", line):
                    if not re.search(r"(?<!&)&\s*\(?(?:FAN_[SA]\(\w+\)\s*\|\s*)*$", line[: bit.start()]):
                        wrong.append(f"{name}:{at}: {bit[0]} is set here: only {', '.join(RULE_FILES)} decide")
    return wrong


# Whose bytes meet

_ORDER = r"(?<![<>=-])(?:<=|>=|<|>)(?![<>=])"
_PLACE = r"(?:\bdata\b|\(uintptr_t\)\s*\w+)"
_TERM = r"(?:[\w.]|\[[^\]]*\])+"
#: Two places in memory compared by order, or the end of a run of bytes with what follows it.
_MEETS = re.compile(
    rf"{_PLACE}(?:\)|\s*\+\s*{_TERM})*\s*{_ORDER}"
    rf"|{_ORDER}\s*(?:\([\w *]+\))?[\w.\[\]() +-]*?{_PLACE}"
    rf"|{_TERM}\s*\+\s*\w*bytes\s*{_ORDER}"
    rf"|{_ORDER}\s*{_TERM}\s*\+\s*[\w.]*bytes"
)


def places_compared(csrc: Path) -> list[str]:
    """Where code checks by itself whether bytes overlap, in the buffer and above it: only array/extents may."""
    wrong = []
    for path in c_files(csrc):
        name = path.relative_to(csrc).as_posix()
        if not name.startswith(("array/", "base/")):
            for at, line in enumerate(without_comments(path.read_text()).split("\n"), 1):
                if not line.startswith("#") and (place := _MEETS.search(line.replace("->", "."))):
                    wrong.append(f"{name}:{at}: {place[0].strip()!r}: array/extents says whose bytes meet")
    return wrong


# Text


@dataclass(frozen=True)
class Function:
    """A function: its file, name, first line, and how many lines it has, without its docstring."""

    file: str
    name: str
    line: int
    lines: int


def c_functions(text: str, file: str = "") -> list[Function]:
    """The functions of a C file: those whose body begins with a `{` at the left, and those of one line."""
    found, lines = [], without_comments(text).split("\n")
    head, opened = 0, -1
    for at, line in enumerate(lines):
        if opened < 0 and (whole := re.match(r"[\w\s*]*?(\w+)\s*\(.*\{.*\}$", line)):
            found.append(Function(file, whole[1], at + 1, 1))
            head = at + 1
        elif opened < 0 and line == "{":
            declared = re.sub(r"__attribute__\(\([^;{}]*?\)\)", "", "\n".join(lines[head:at]))
            name = re.match(r"[\w\s*]*?(\w+)\s*\(", declared)
            if name:
                opened = at
        elif opened >= 0 and line.startswith("}"):
            found.append(Function(file, name[1] if name else "?", head + 1, at - head + 1))
            opened = -1
        if opened < 0 and (not line.strip() or line.startswith(("}", "#")) or line.rstrip().endswith((";", "\\"))):
            head = at + 1
    return found


def without_comments(text: str, *, strings: bool = False) -> str:
    """C without its comments and, unless `strings`, without what strings hold; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        if found.startswith("/"):
            return re.sub(r"[^\n]", " ", found)
        return found if strings else found[0] + found[-1]

    return re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", blank, text, flags=re.DOTALL)


# Names


def used_in_one_file_alone(objects: Mapping[str, Path]) -> dict[str, str]:
    """Global name -> the source that defines it and is alone in knowing it: such a name is static, or dead."""
    symbols = {name: Elf(obj) for name, obj in objects.items()}
    used = set().union(*(elf.uses() for elf in symbols.values()))
    return {symbol: name for name, elf in symbols.items() for symbol in elf.defines() - used}
