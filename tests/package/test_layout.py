"""The layout of the C core: which file may include which, the names that the library exports, and how it is linked.

Each checker is a function that takes a tree (or a file) and returns sentences, one for each error; each has
a planted fault that it must find.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.support import CSRC, ROOT, cache_dir, compiler, core_file, emptied, sanitizer
from kit.tree import (
    INCLUDE,
    Edge,
    Elf,
    between_folders,
    c_edges,
    circles,
    compile_objects,
    folder_of,
    inside,
    python_edges,
)

pytestmark = pytest.mark.tools

#: The rungs, each folder with its height. A folder includes itself and folders before it.
LADDER = {"base": 0, "array": 1, "device": 2, "buffer": 3, "engine": 4, "graph": 4, "analysis": 4, "py": 5}
SAID = "base < array < device < buffer < {engine, graph, analysis} < py"
#: The same of the rooms of py/.
ROOMS = {"base": 0, "device": 1, "arrays": 2, "buffer": 3, "engine": 4, "graph": 4, "sim": 4, "analysis": 4, "api": 5}
ROOMS["module"] = 6
ROOMS_SAID = "py: base < device < arrays < buffer < {engine, graph, sim, analysis} < api < module"

PYTHON_HEADERS = re.compile(r"Python\.h|structmember\.h|frameobject\.h|datetime\.h|(numpy|cpython|internal)/.*")


# Includes


MADE = re.compile(r"device/kernels/embedded\.h|py/declared/\w+\.h")  # by the build


def in_a_room(path: Path) -> bool:
    """In a room, or in its folder for what needs the simulated machine (py/api/sim), or for what names the others."""
    *folders, _ = path.parts[1:]
    return bool(folders) and folders[0] in ROOMS and folders[1:] in ([], ["sim"], ["table"])


def broken_rooms(here: Path, there: Path) -> list[str]:
    """What one file of py/ may not need of another."""
    a, b = here.parts[1], there.parts[1]
    if not in_a_room(there) or a == b or ROOMS[b] < ROOMS[a]:
        return []
    return [f"{here}: {a}/ may not use {there}: {ROOMS_SAID}"]


def broken_includes(csrc: Path) -> list[str]:
    """What the `#include` lines under `csrc` do that the ladder does not allow."""
    wrong: list[str] = []
    for path in sorted(p for p in csrc.glob("**/*") if p.suffix in (".c", ".h", ".inc", ".cu")):
        here = path.relative_to(csrc)
        if len(here.parts) == 1 or here.parts[0] not in LADDER:
            wrong.append(f"{here}: stands in no folder of the ladder: {SAID}")
            continue
        rung = here.parts[0]
        height = LADDER[rung]
        if rung == "py" and not in_a_room(here):
            wrong.append(f"{here}: stands in no room: {ROOMS_SAID}")
            continue
        for quoted, angled in INCLUDE.findall(path.read_text()):
            if PYTHON_HEADERS.fullmatch(quoted or angled):
                if rung != "py":
                    wrong.append(f"{here}: {rung}/ may not include {quoted or angled}: only py/ knows Python")
                elif here.suffix == ".c" and angled == "Python.h":
                    wrong.append(f"{here}: includes Python.h itself: py/base/py.h is the one header with Python.h")
                continue
            if not quoted:
                if (csrc / angled).is_file():
                    wrong.append(f'{here}: <{angled}> is our own: write "{angled}", that who includes whom is seen')
                continue
            target = Path(quoted)
            if target.parts[0] == ".." or target.parts[0] not in LADDER or len(target.parts) < 2:
                wrong.append(f'{here}: "{quoted}" is not written from csrc/ on, as in "array/dtype.h"')
                continue
            there = target.parts[0]
            if there == rung == "py" and not MADE.fullmatch(quoted):
                wrong += broken_rooms(here, target)
            if there == "py" and rung != "py":
                wrong.append(f"{here}: {rung}/ may not include py/: nothing includes py/ ({SAID})")
            elif there != rung and LADDER[there] >= height:
                wrong.append(f"{here}: {rung}/ may not include {there}/: {SAID}")
            elif rung == "buffer" and there == "device" and len(target.parts) > 2:
                wrong.append(f"{here}: buffer/ may not include {quoted}: of device/ it sees device/*.h and no backend")
            if not MADE.fullmatch(quoted) and not (csrc / target).exists():
                wrong.append(f'{here}: "{quoted}" does not exist')
    return wrong


def test_a_folder_includes_only_folders_before_it() -> None:
    assert list(CSRC.glob("**/*.c")), "csrc/ has no C files"
    assert not broken_includes(CSRC)


PLANTED_INCLUDES = {
    "device/x.c": (
        '#include "buffer/buffer.h"\n',
        f"device/x.c: device/ may not include buffer/: {SAID}",
    ),
    "base/x.h": ('#  include "array/dtype.h"\n', f"base/x.h: base/ may not include array/: {SAID}"),
    "array/x.c": ("#include <Python.h>\n", "array/x.c: array/ may not include Python.h: only py/ knows Python"),
    "buffer/n.c": (
        "#include <numpy/arrayobject.h>\n",
        "buffer/n.c: buffer/ may not include numpy/arrayobject.h: only py/ knows Python",
    ),
    "buffer/x.c": (
        '#include "device/sim/sim.h"\n',
        "buffer/x.c: buffer/ may not include device/sim/sim.h: of device/ it sees device/*.h and no backend",
    ),
    "buffer/y.c": (
        '#include "py/base/py.h"\n',
        f"buffer/y.c: buffer/ may not include py/: nothing includes py/ ({SAID})",
    ),
    "py/base/x.c": (
        "#include <Python.h>\n",
        "py/base/x.c: includes Python.h itself: py/base/py.h is the one header with Python.h",
    ),
    "py/base/y.c": ('#include "py.h"\n', 'py/base/y.c: "py.h" is not written from csrc/ on, as in "array/dtype.h"'),
    "py/w.c": ('#include "py/base/py.h"\n', f"py/w.c: stands in no room: {ROOMS_SAID}"),
    "py/base/w.c": (
        '#include "py/buffer/x.h"\n',
        f"py/base/w.c: base/ may not use py/buffer/x.h: {ROOMS_SAID}",
    ),
    "py/sim/w.c": (
        '#include "py/engine/x.h"\n',
        f"py/sim/w.c: sim/ may not use py/engine/x.h: {ROOMS_SAID}",
    ),
    "py/base/z.c": (
        '#include "../base/mem.h"\n',
        'py/base/z.c: "../base/mem.h" is not written from csrc/ on, as in "array/dtype.h"',
    ),
    "array/z.c": ('#include "base/nowhere.h"\n', 'array/z.c: "base/nowhere.h" does not exist'),
    "device/y.c": (
        "#include <buffer/buffer.h>\n",
        'device/y.c: <buffer/buffer.h> is our own: write "buffer/buffer.h", that who includes whom is seen',
    ),
    "array/w.c": ('#include "buffer/buffer.h"\n', f"array/w.c: array/ may not include buffer/: {SAID}"),
    "util/x.h": ("", f"util/x.h: stands in no folder of the ladder: {SAID}"),
}


@pytest.mark.parametrize("where", PLANTED_INCLUDES)
def test_a_planted_include_is_found(where: str, tmp_path: Path) -> None:
    for name in ("base/mem.h", "array/dtype.h", "device/device.h", "device/sim/sim.h", "buffer/buffer.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    (tmp_path / "buffer/buffer.h").write_text('#include <stdio.h>\n#include "device/device.h"\n')
    for name in ("base/py.h", "buffer/x.h", "engine/x.h"):
        (tmp_path / "py" / name).parent.mkdir(parents=True)
        (tmp_path / "py" / name).write_text("#include <Python.h>\n#include <numpy/arrayobject.h>\n")
    assert broken_includes(tmp_path) == []
    line, sentence = PLANTED_INCLUDES[where]
    (tmp_path / where).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / where).write_text(line)
    assert broken_includes(tmp_path) == [sentence]


# Symbols


def wrong_symbols(path: Path) -> list[str]:
    """What a library exports beside its init function, and what of ours it wants and has not."""
    elf = Elf(path)
    wrong = [f"{name} is exported: only PyInit__core may be" for name in sorted(elf.exported() - {"PyInit__core"})]
    if "PyInit__core" not in elf.exported():
        wrong.append("PyInit__core is not exported")
    wrong += [f"{name} is used but defined nowhere" for name in sorted(elf.wanted()) if name.startswith("fan_")]
    return wrong


def without_prefix(obj: Path) -> list[str]:
    """Global names that an object file defines without our prefix."""
    return sorted(name for name in Elf(obj).defines() if not name.startswith("fan_") and name != "PyInit__core")


def compiled(csrc: Path, cache: Path) -> dict[str, Path]:
    """Every source's object file: only its names are read."""
    if not compiler():
        pytest.skip("no C compiler: set CC")
    if sys.platform != "linux":
        pytest.skip("object files are read as ELF, which is Linux's")
    return compile_objects(csrc, compiler(), cache)


@pytest.fixture(scope="module")
def objects() -> dict[str, Path]:
    return compiled(CSRC, cache_dir())


@pytest.fixture
def built() -> Path:
    path = core_file()
    assert path, "fanin._core is not built: pip install -e ."
    if path.read_bytes()[:6] != b"\x7fELF\x02\x01":
        pytest.skip("the library is not a 64-bit little-endian ELF file")
    return path


def test_the_library_exports_its_init_function_alone(built: Path) -> None:
    if sanitizer():
        pytest.skip(f"built with -fsanitize={sanitizer()}, which adds names of its own")
    assert wrong_symbols(built) == []


def test_every_global_name_bears_the_prefix(objects: dict[str, Path]) -> None:
    found = {name: names for name, obj in objects.items() if (names := without_prefix(obj))}
    assert not found, f"names that are neither static nor begin with fan_: {found}"


def test_a_planted_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text(
        "int fan_good = 1; static int hidden = 2; int planted_data = 3; int planted_zero;\n"
        "static int inner(void) { return hidden; }\n"
        "int fan_fine(void) { return inner(); }\nint planted_function(void) { return fan_fine(); }\n"
    )
    assert without_prefix(compiled(tmp_path, tmp_path)["x.c"]) == [
        "planted_data",
        "planted_function",
        "planted_zero",
    ]


# Circles


def all_circles(in_c: list[Edge], in_python: list[Edge]) -> list[str]:
    """A sentence for each circle: of the files of a folder, of folders, of Python's files."""
    folders = sorted({folder_of(e.here) for e in in_c})
    found = {f"csrc/{folder}": circles(inside(in_c, folder)) for folder in folders}
    found |= {"csrc": circles(between_folders(in_c)), "python": circles(in_python)}
    return [f"{where}: {s}" for where, said in found.items() for s in said]


def test_neither_files_nor_folders_form_a_circle(objects: dict[str, Path]) -> None:
    """Read from the `#include` lines and from what objects call of others; of Python's files from their imports."""
    in_c, in_python = c_edges(CSRC, objects), python_edges(ROOT / "python" / "fanin")
    assert len(in_c) > 500 and len(in_python) > 100, "nothing was read"
    assert not all_circles(in_c, in_python)


def broken_calls(edges: list[Edge]) -> list[str]:
    """Calls between rooms of py/ that the ladder does not allow; a declaration by hand hides them from the includes."""
    between = [e for e in edges if e.here.startswith("py/") and e.there.startswith("py/")]
    return [f"{e.why}: {ROOMS_SAID}" for e in between if broken_rooms(Path(e.here), Path(e.there))]


def test_a_subfolder_of_py_calls_only_those_before_it(objects: dict[str, Path]) -> None:
    edges = c_edges(CSRC, objects)
    assert len([e for e in edges if e.here.startswith("py/") and "calls" in e.why]) > 200, "nothing was read"
    assert not broken_calls(edges)


def test_a_planted_call_to_a_higher_room_is_found(tmp_path: Path) -> None:
    for name, text in {
        "base/x.c": "int fan_add(void);\nint fan_x(void);\nint fan_x(void) { return fan_add(); }\n",
        "buffer/add.c": "int fan_add(void);\nint fan_add(void) { return 1; }\n",
        "engine/y.c": "int fan_add(void);\nint fan_y(void);\nint fan_y(void) { return fan_add(); }\n",
    }.items():
        (tmp_path / "py" / name).parent.mkdir(parents=True)
        (tmp_path / "py" / name).write_text(text)
    assert broken_calls(c_edges(tmp_path, compiled(tmp_path, tmp_path))) == [
        f"py/base/x.c calls fan_add of py/buffer/add.c: {ROOMS_SAID}"
    ]


#: Files that may use the simulator, by its headers or its functions; all others use the tables of device/backend.h.
ITS_USERS = re.compile(r"(device/sim|py/sim|py/api/sim)/")
ITS_ENTRY = "calls fan_sim_entry of"  # the one line of the registry


def users_of_the_simulator(edges: list[Edge]) -> list[str]:
    """A sentence for each file that uses device/sim and may not."""
    users = [e for e in edges if e.there.startswith("device/sim/") and not ITS_USERS.match(e.here)]
    return [
        f"{e.why}: it may use the simulator through device/backend.h alone" for e in users if ITS_ENTRY not in e.why
    ]


def test_the_simulator_is_used_through_the_table_of_a_backend(objects: dict[str, Path]) -> None:
    edges = c_edges(CSRC, objects)
    assert len([e for e in edges if e.there.startswith("device/sim/")]) > 50, "nothing was read"
    assert [e.here for e in edges if ITS_ENTRY in e.why] == ["py/device/backends"]
    assert not users_of_the_simulator(edges)


def test_a_planted_use_of_the_simulator_is_found(tmp_path: Path) -> None:
    for name, text in {
        "device/sim/sim.h": "int fan_sim_run(void);\n",
        "device/sim/sim.c": '#include "device/sim/sim.h"\nint fan_sim_run(void) { return 1; }\nint fan_sim_entry;\n',
        "py/sim/x.c": '#include "device/sim/sim.h"\nint fan_x(void);\nint fan_x(void) { return fan_sim_run(); }\n',
        "py/device/backends.c": "extern int fan_sim_entry;\nint *fan_entries(void) { return &fan_sim_entry; }\n",
        "py/base/py.h": '#include "device/sim/sim.h"\n',
        "engine/y.c": "int fan_sim_run(void);\nint fan_y(void);\nint fan_y(void) { return fan_sim_run(); }\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(users_of_the_simulator(c_edges(tmp_path, compiled(tmp_path, tmp_path)))) == [
        "engine/y.c calls fan_sim_run of device/sim/sim.c: it may use the simulator through device/backend.h alone",
        "py/base/py.h includes device/sim/sim.h: it may use the simulator through device/backend.h alone",
    ]


def planted_tree(csrc: Path, **texts: str) -> list[str]:
    """The circles of a small csrc/ of the files base/x.c and so on, with what is planted in them."""
    whole = {
        "base_low_h": "typedef int fan_low;\nfan_low fan_low_get(void);\n",
        "base_low_c": '#include "base/low.h"\nfan_low fan_low_get(void) { return 1; }\n',
        "base_high_c": '#include "base/low.h"\nint fan_high(void);\nint fan_high(void) { return fan_low_get(); }\n',
        "array_a_h": "int fan_a(void);\n",
        "array_a_c": '#include "array/a.h"\n#include "base/low.h"\nint fan_a(void) { return fan_low_get(); }\n',
        **texts,
    }
    for name, text in whole.items():
        folder, file, kind = name.split("_")
        (csrc / folder).mkdir(exist_ok=True)
        (csrc / folder / f"{file}.{kind}").write_text(text)
    return all_circles(c_edges(csrc, compiled(csrc, csrc)), [])


def test_a_tree_without_circles_is_well(tmp_path: Path) -> None:
    assert planted_tree(tmp_path) == []


@pytest.mark.parametrize("angles", [False, True])
def test_a_planted_circle_of_includes_is_found(angles: bool, tmp_path: Path) -> None:
    """low and high need no function of each other, but each uses the other's types; -I csrc finds <both>, too."""
    high = {
        "base_high_h": '#include "base/low.h"\ntypedef fan_low fan_high_t;\nint fan_high(void);\n',
        "base_high_c": '#include "base/high.h"\nint fan_high(void) { return fan_low_get(); }\n',
    }
    assert planted_tree(tmp_path, **high) == []
    knows = '#include "base/high.h"\nfan_low fan_low_get(void) { return (fan_high_t)1; }\n'
    if angles:
        knows = knows.replace('"base/high.h"', "<base/high.h>")
    assert planted_tree(tmp_path, **high, base_low_c=knows) == [
        "csrc/base: base/high -> base/low -> base/high is a circle: base/high.h includes base/low.h; base/low.c "
        "includes base/high.h"
    ]


def test_a_planted_circle_of_calls_is_found(tmp_path: Path) -> None:
    """Neither file includes the other: a declaration by hand is enough for a call."""
    calls = "int fan_high(void);\nint fan_low_get(void) { return fan_high(); }\n"
    assert planted_tree(tmp_path, base_low_c=calls) == [
        "csrc/base: base/high -> base/low -> base/high is a circle: base/high.c includes base/low.h; base/low.c "
        "calls fan_high of base/high.c"
    ]


def test_a_planted_circle_of_folders_is_found(tmp_path: Path) -> None:
    calls = "int fan_a(void);\nint fan_high(void) { return fan_a(); }\n"
    assert planted_tree(tmp_path, base_high_c=calls) == [
        "csrc: array -> base -> array is a circle: array/a.c includes base/low.h; base/high.c calls fan_a of array/a.c"
    ]


def test_a_planted_circle_of_imports_is_found(tmp_path: Path) -> None:
    package = tmp_path / "fanin"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .inner import f\n")
    (package / "inner/__init__.py").write_text("from .low import f\n")
    (package / "inner/low.py").write_text("from .. import other\ndef f(): ...\n")
    (package / "other.py").write_text("import fanin.nowhere, os\n")
    assert all_circles([], python_edges(package)) == []
    (package / "other.py").write_text("def g():\n    from .inner.low import f\n")
    assert all_circles([], python_edges(package)) == [
        "python: fanin/inner/low -> fanin/other -> fanin/inner/low is a circle: fanin/inner/low.py imports "
        "fanin/other.py in line 1; fanin/other.py imports fanin/inner/low.py in line 2"
    ]


# The link


def linked(folder: Path, text: str, *flags: str) -> Path:
    """A shared library of one C file; linked without what a distribution's compiler adds unasked."""
    if not compiler():
        pytest.skip("no C compiler: set CC")
    source, out = folder / "lib.c", folder / "lib.so"
    source.write_text(text)
    command = [*compiler(), "-shared", "-fPIC", "-fvisibility=hidden", *flags, str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=emptied())
    if done.returncode != 0:
        pytest.skip(f"this linker cannot plant the fault: {done.stderr.splitlines()[-1:]}")
    return out


SHOW = '__attribute__((visibility("default"))) '


def test_a_planted_export_is_found(built: Path, tmp_path: Path) -> None:
    init = SHOW + "int PyInit__core(void) { return 0; }\n"
    assert wrong_symbols(linked(tmp_path, init)) == []
    assert wrong_symbols(linked(tmp_path, init + SHOW + "int fan_shown(void) { return 1; }\n")) == [
        "fan_shown is exported: only PyInit__core may be"
    ]
    assert wrong_symbols(linked(tmp_path, "int nothing;\n")) == ["PyInit__core is not exported"]
    wants = "int fan_missing(void);\n" + SHOW + "int PyInit__core(void) { return fan_missing(); }\n"
    assert wrong_symbols(linked(tmp_path, wants)) == ["fan_missing is used but defined nowhere"]


# Hardening

DT_RPATH, DT_RUNPATH, DT_FLAGS, DT_FLAGS_1, DT_BIND_NOW, DT_TEXTREL = 15, 29, 30, 0x6FFFFFFB, 24, 22
PT_GNU_STACK, PT_GNU_RELRO, EXECUTABLE = 0x6474E551, 0x6474E552, 1


def not_hardened(path: Path) -> list[str]:
    """Which promises of the link are not kept: NOW, RELRO, no RUNPATH, no executable stack, no text relocations."""
    elf = Elf(path)
    dynamic, wrong = elf.dynamic(), []
    now = DT_BIND_NOW in dynamic or dynamic.get(DT_FLAGS, 0) & 8 or dynamic.get(DT_FLAGS_1, 0) & 1
    if not now:
        wrong.append("symbols are bound late: -z now is missing")
    if PT_GNU_RELRO not in {kind for kind, _ in elf.segments}:
        wrong.append("relocations stay writable: -z relro is missing")
    if DT_RPATH in dynamic or DT_RUNPATH in dynamic:
        wrong.append("it has an RPATH or RUNPATH")
    stack = [flags for kind, flags in elf.segments if kind == PT_GNU_STACK]
    if not stack or stack[0] & EXECUTABLE:
        wrong.append("the stack is executable: -z noexecstack is missing")
    if DT_TEXTREL in dynamic or dynamic.get(DT_FLAGS, 0) & 4:
        wrong.append("it has text relocations")
    return wrong


def test_the_library_is_linked_hardened(built: Path) -> None:
    if sanitizer():
        pytest.skip(f"built with -fsanitize={sanitizer()}: no hardening is promised")
    assert not_hardened(built) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("-Wl,-z,lazy",), "symbols are bound late: -z now is missing"),
        (("-Wl,-z,norelro", "-Wl,-z,now"), "relocations stay writable: -z relro is missing"),
        (("-Wl,-rpath,/nowhere",), "it has an RPATH or RUNPATH"),
        (("-Wl,-z,execstack",), "the stack is executable: -z noexecstack is missing"),
    ],
)
def test_a_planted_weakness_is_found(flags: tuple[str, ...], sentence: str, built: Path, tmp_path: Path) -> None:
    text = "#include <stdlib.h>\n" + SHOW + 'int PyInit__core(void) { return abs(atoi("1")); }\n'
    good = ("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack")
    assert not_hardened(linked(tmp_path, text, *good)) == []
    kept = tuple(g for g in good if not ("now" in g and "lazy" in flags[0]))
    assert not_hardened(linked(tmp_path, text, *kept, *flags)) == [sentence]


def test_readelf_agrees_with_the_reader(built: Path) -> None:
    """The reader above is the project's own: if binutils are installed, their output is compared."""
    if not shutil.which("readelf") or not shutil.which("nm"):
        pytest.skip("no readelf or nm here")

    def ask(*words: str) -> str:
        done = subprocess.run([*words, str(built)], capture_output=True, text=True, env=emptied(), check=True)
        return done.stdout

    assert {line.split()[-1].split("@")[0] for line in ask("nm", "-D", "--defined-only").splitlines()} == (
        Elf(built).exported()
    )
    headers = ask("readelf", "-dlW")
    assert ("GNU_RELRO" in headers) == (PT_GNU_RELRO in {kind for kind, _ in Elf(built).segments})
    assert ("RUNPATH" in headers) == (DT_RUNPATH in Elf(built).dynamic())
