"""The C API keeps its binary interface: sizes and offsets are as recorded, and extensions of version 1 still run.

tests/c/abi.json is the record. `python tests/package/test_c_abi.py` appends what is new; it refuses to change a line.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node
from kit import c_api, c_nodes
from kit.prepared import run_prepared
from kit.support import TEST_C, cache_dir, compiler, emptied, extension

pytestmark = pytest.mark.core

HEADER = Path(fanin.get_include()) / "fanin.h"
RECORD = TEST_C / "abi.json"
FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
LANGUAGES = {"C11": ["-x", "c", "-std=c11"], "C++17": ["-x", "c++", "-std=c++17"]}

STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\n\} \1;", re.DOTALL)
ENUM = re.compile(r"typedef enum (\w+) \{(.*?)\n\} \1;", re.DOTALL)


def fields_of(body: str) -> list[str]:
    """The names that a struct's body declares, in order; macros are what the counters' list makes of them."""
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    if "FANIN_COUNTERS(" in body:
        return ["struct_size", *c_api.COUNTERS]
    body = re.sub(r"^\s*#.*$", "", body, flags=re.MULTILINE)
    names = []
    for line in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        pointer = re.search(r"\(\*(\w+)\)\(", line)
        names += [pointer[1]] if pointer else re.findall(r"(\w+)(?:\[\w+\])?(?=,|$)", line)
    return names


def names_of(text: str) -> dict[str, Any]:
    """What a header declares: fields of structs, members of enums, numbers."""
    enums = {name: re.findall(r"(FANIN_\w+) =", body) for name, body in ENUM.findall(text)}
    numbers = re.findall(r"^#define (FANIN_\w+) +\(?[\dU]", text, re.MULTILINE)
    return {
        "structs": {name: fields_of(body) for name, body in STRUCT.findall(text)},
        "numbers": [*(n for names in enums.values() for n in names), *numbers],
    }


def layout_of(header: Path, language: str) -> dict[str, Any]:
    """Sizes, offsets and numbers of a header, as its compiler has them."""
    return {of: dict(names) for of, names in compiled(header, header.read_text(), language).items()}


@functools.cache
def compiled(header: Path, text: str, language: str) -> dict[str, Any]:
    names = names_of(text)
    lines = ["#include <fanin.h>", "#include <stdio.h>", "int main(void)", "{"]
    for name, fields in names["structs"].items():
        lines.append(f'printf("{name} - %zu 0\\n", sizeof({name}));')
        for f in fields:
            lines.append(f'printf("{name} {f} %zu %zu\\n", offsetof({name}, {f}), sizeof((({name} *)0)->{f}));')
    lines += [f'printf("number {n} %llu 0\\n", (unsigned long long){n});' for n in names["numbers"]]
    lines += ["return 0;", "}"]
    folder = cache_dir() / f"abi-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        source, program = folder / "probe.c", folder / "probe"
        source.write_text("\n".join(lines) + "\n")
        cc = compiler() if language == "C11" else [os.environ.get("CXX", "c++")]
        if not cc or not shutil.which(cc[0]):
            pytest.skip(f"no compiler of {language}")
        command = [*cc, *FLAGS, *LANGUAGES[language], f"-I{header.parent}", str(source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, env=emptied())
        assert done.returncode == 0, done.stderr
        out = subprocess.run([str(program)], capture_output=True, text=True, check=True, env=emptied()).stdout
    finally:
        shutil.rmtree(folder)
    found: dict[str, Any] = {}
    for line in out.splitlines():
        of, name, at, size = line.split()
        found.setdefault(of, {})[name] = [int(at), int(size)]
    return found


def broken(found: dict[str, Any], record: dict[str, Any], grows: bool = False) -> list[str]:
    """What of a record a layout does not keep; with `grows`, structs may be longer than recorded."""
    wrong = []
    for of, names in record.items():
        for name, was in names.items():
            now = found.get(of, {}).get(name)
            longer = grows and name == "-" and now and now[0] >= was[0]
            if now != was and not longer:
                wrong.append(f"{of}.{name}: recorded {was}, found {now}")
    if not grows:
        wrong += [f"{of}.{n} is not recorded" for of in found for n in found[of] if n not in record.get(of, {})]
    return wrong


@pytest.mark.parametrize("language", LANGUAGES)
def test_sizes_offsets_and_numbers_are_as_recorded(language: str) -> None:
    record = json.loads(RECORD.read_text())
    assert len(record["fanin_api"]) > 20 and broken(layout_of(HEADER, language), record) == []


def test_version_1_is_the_beginning_of_this_one() -> None:
    """But for fanin_value.reserved and fanin_api.reserved, which were to be 0 and have names now."""
    now, was = layout_of(HEADER, "C11"), layout_of(TEST_C / "v1" / "fanin.h", "C11")
    for of in ("fanin_value", "fanin_api"):
        assert was[of].pop("reserved")[1] == 4
    for number in ("FANIN_API_VERSION",):
        was["number"].pop(number)
    same = {of for of in was if "struct_size" not in was[of] and of not in ("number", "fanin_api")}
    assert broken(now, was, grows=True) == [] and all(now[of]["-"] == was[of]["-"] for of in same)


PLANTED = {
    "two entries of the table swapped": (
        ("    void (*drop)(fanin_value *v);", "    void (*dropped)(fanin_value *v);"),
        "fanin_api.drop: recorded",
    ),
    "an entry in the middle": (
        ("    void (*share)(", "    void (*early)(void);\n    void (*share)("),
        "fanin_api.share: recorded",
    ),
    "a wider field": (("    int64_t slot, key;", "    int32_t slot, key;"), "fanin_failure.slot: recorded"),
    "another number": (("FANIN_ERR_RACE = 9", "FANIN_ERR_RACE = 90"), "number.FANIN_ERR_RACE: recorded"),
    "another flag": (("FANIN_ADD_COPY 4u", "FANIN_ADD_COPY 8u"), "number.FANIN_ADD_COPY: recorded"),
    "a new field": (("    int32_t has_bad;", "    int32_t has_bad, worse;"), "fanin_stats.worse is not recorded"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_change_of_the_header_is_found(what: str, tmp_path: Path) -> None:
    (old, new), sentence = PLANTED[what]
    text = HEADER.read_text()
    assert text.count(old) == 1
    (tmp_path / "fanin.h").write_text(text.replace(old, new))
    wrong = broken(layout_of(tmp_path / "fanin.h", "C11"), json.loads(RECORD.read_text()))
    assert any(w.startswith(sentence) for w in wrong), wrong


def test_the_tests_structs_are_those_of_the_header() -> None:
    found = layout_of(HEADER, "C11")
    for of, struct in (
        ("fanin_failure", c_api.Failure),
        ("fanin_value", c_api.Value),
        ("fanin_tensor", c_api.Tensor),
        ("fanin_managed", c_api.Managed),
        ("fanin_stream", c_api.Stream),
        ("fanin_slot", c_api.Slot),
        ("fanin_buffer_options", c_api.BufferOptions),
        ("fanin_add_options", c_api.AddOptions),
        ("fanin_gradient", c_api.Gradient),
        ("fanin_take_options", c_api.TakeOptions),
        ("fanin_stats", c_api.Stats),
        ("fanin_counters", c_api.Counters),
        ("fanin_edge", c_api.Edge),
        ("fanin_root", c_api.Root),
        ("fanin_pass_options", c_api.PassOptions),
        ("fanin_machine_options", c_api.MachineOptions),
        ("fanin_kernel", c_api.Kernel),
        ("fanin_api", c_api.Table),
    ):
        names = {name for name, _ in struct._fields_} & set(found[of])
        assert len(names) >= len(found[of]) - 3
        for name in names:
            field = getattr(struct, name)
            assert found[of][name] == [field.offset, field.size], f"{of}.{name}"
    assert c_api.table.version == 2 and c_api.table.size == found["fanin_api"]["-"][0]
    assert all(getattr(c_api.table, name) for name in c_api.FUNCTIONS), "an entry of the table is NULL"


# Extensions that were built against another version


@pytest.fixture(scope="module")
def old() -> ModuleType:
    """tests/c/nodes.c as its author built it for version 1: nothing in it was recompiled since."""
    return extension("nodes", [TEST_C / "nodes.c"], "-O2", f"-I{TEST_C / 'v1'}")


def test_an_extension_of_version_1_runs(old: ModuleType) -> None:
    for what in (c_nodes.SCALE, c_nodes.IN_PLACE):
        w = Leaf(np.zeros(16, np.float32))
        fanin.backward([(old.many(100, w, what, -1.0, True), 0, np.arange(16, dtype=np.float32))])
        assert w.grad.tolist() == list(range(16))
    w, before = Leaf(np.zeros(4)), old.counts()[1]
    fanin.backward([(old.node(old.function(c_nodes.WRAP, 1, 1), ((w, 0),)), 0, np.ones(4))])
    assert w.grad.tolist() == [0, 1, 2, 3] and old.counts()[1] == before + 1
    with pytest.raises(ValueError, match=r"^Mul: \.{400}"):  # an error of 512 bytes, filled to its end
        text = old.function(c_nodes.FAIL, 1, 1, 1.0, c_nodes.VALUE, "endless")
        fanin.backward([(Node(text, edges=[(w, 0)], name="Mul"), 0, np.ones(4))])
    with pytest.raises(ValueError, match="axis 1: expected a non-negative extent"):
        fanin.backward([(old.node(old.function(c_nodes.FRESH, 1, 1, 1.0, 13), ((w, 0),)), 0, np.ones(4))])


MOVED = """
import numpy as np, fanin, sys
from pathlib import Path
from kit.support import TEST_C, extension
c = extension("nodes", [TEST_C / "nodes.c"], *sys.argv[1:])
w = fanin.Leaf(np.zeros(16, np.float32))
fanin.backward([(c.many(3, w, 0, -1.0, True), 0, np.arange(16, dtype=np.float32))])
assert w.grad.tolist() == list(range(16)), "wrong"
"""


def test_an_extension_of_a_table_that_was_reordered_does_not_run(tmp_path: Path) -> None:
    """The planted change: `share` is at the place of `like`; the program of the test above must find it."""
    text = (TEST_C / "v1" / "fanin.h").read_text()
    moved = text.replace("(*like)(", "(*SWAP)(").replace("(*share)(", "(*like_)(").replace("(*SWAP)(", "(*share_)(")
    moved = moved.replace(
        "fanin_status (*share_)(const fanin_value *v, fanin_value *out, fanin_error *err);",
        "void (*share)(const fanin_value *v, fanin_value *out);",
    ).replace(
        "void (*like_)(const fanin_value *v, fanin_value *out);",
        "fanin_status (*like)(const fanin_value *v, fanin_value *out, fanin_error *err);",
    )
    (tmp_path / "fanin.h").write_text(moved)
    assert run_prepared(MOVED, "-O2", f"-I{TEST_C / 'v1'}").returncode == 0
    assert run_prepared(MOVED, "-O0", f"-I{tmp_path}", check=False).returncode != 0


def test_an_extension_of_a_later_version_gets_an_import_error(tmp_path: Path) -> None:
    later = HEADER.read_text().replace("#define FANIN_API_VERSION 2", "#define FANIN_API_VERSION 3")
    (tmp_path / "fanin.h").write_text(later)
    with pytest.raises(ImportError, match=r"built for version 3 of fanin's C API.*has version 2: upgrade fanin"):
        extension("nodes", [TEST_C / "nodes.c"], "-O0", f"-I{tmp_path}")


DLPACK = """
#define DLPACK_MAJOR_VERSION 1
#define DLPACK_MINOR_VERSION 1
#include <stdint.h>
typedef struct { uint32_t major, minor; } DLPackVersion;
typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct { void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape, *strides;
    uint64_t byte_offset; } DLTensor;
typedef struct DLManagedTensorVersioned { DLPackVersion version; void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self); uint64_t flags; DLTensor dl_tensor; }
    DLManagedTensorVersioned;
#include <fanin.h>
fanin_tensor *use(DLTensor *t, DLManagedTensorVersioned *m, fanin_managed **out);
fanin_tensor *use(DLTensor *t, DLManagedTensorVersioned *m, fanin_managed **out)
{
    *out = m;
    return t;
}
"""


@pytest.mark.parametrize("language", LANGUAGES)
def test_with_dlpack_h_before_it_the_tensors_are_its_own(language: str, tmp_path: Path) -> None:
    cc = compiler() if language == "C11" else [os.environ.get("CXX", "c++")]
    if not cc or not shutil.which(cc[0]):
        pytest.skip(f"no compiler of {language}")
    (tmp_path / "x.c").write_text(DLPACK)
    command = [*cc, *FLAGS, *LANGUAGES[language], f"-I{HEADER.parent}", "-c", "x.c", "-o", "x.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=emptied())
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    layout = layout_of(HEADER, "C11")
    old_record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if lines := [w for w in broken(layout, old_record, grows=True) if "number.FANIN_API_VERSION" not in w]:
        sys.exit("\n".join(lines))
    lines = (f"{json.dumps(of)}: {json.dumps(names)}" for of, names in layout.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
