"""Mutants of the C core: one line is changed, and a test must notice.

    python tests/kit/mutate.py --seed 1 --count 30                      which survive the tests below
    python tests/kit/mutate.py --seed 1 --count 30 -- -x -q tests       .. those of another pytest command

A mutant is drawn by the seed: an operator, a constant, a condition, a statement that is left out, two arguments that
change places. It is planted in a copy of the tree, compiled as the tree is, and the tests are run until the first
failure, those that are likely to notice first. One whose object code is that of the original changes nothing and is
told apart; so is one that does not compile. What survives is listed with its line: it is to get a test, or a verdict in
docs/proof.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("base", "array", "device", "buffer", "py")
COPIED = (
    "csrc",
    "python",
    "tests",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "CHANGELOG.md",
    "docs",
    "examples",
    "benchmarks",
)

#: The first tests that are run, by folder: those that fail most often for a fault there.
FIRST = {
    "base": ["tests/c/test_c.py", "tests/buffer/test_pool.py"],
    "array": [
        "tests/array/test_sums.py",
        "tests/array/test_exact.py",
        "tests/array/test_exact_sparse.py",
        "tests/array/test_overlap.py",
        "tests/buffer/test_stats.py",
    ],
    "device": [
        "tests/device/test_sim.py",
        "tests/device/test_explore.py",
        "tests/device/test_streams.py",
        "tests/device/test_cuda.py",
    ],
    "buffer": [
        "tests/buffer/test_take_one.py",
        "tests/buffer/test_out.py",
        "tests/buffer/test_budget.py",
        "tests/buffer/test_target.py",
        "tests/buffer/test_many.py",
    ],
    "py": [
        "tests/buffer/test_kinds.py",
        "tests/buffer/test_errors.py",
        "tests/buffer/test_refusals.py",
        "tests/interop/test_exchange_dlpack.py",
        "tests/device/test_cuda.py",
        "tests/interop/test_exchange_cuda.py",
    ],
}
#: .. and before them, by the beginning of a file's path below csrc/.
NEAR = {
    "array/equation": ["tests/array/test_overlap.py"],
    "array/exact": ["tests/array/test_exact.py"],
    "array/extents": ["tests/buffer/test_out.py", "tests/c/test_c.py -k extents"],
    "array/layout": ["tests/graph/test_recorded_layout.py"],
    "array/overlap": ["tests/array/test_overlap.py", "tests/graph/test_recorded_layout.py"],
    "array/sparse": ["tests/array/test_exact_sparse.py", "tests/buffer/test_kinds.py", "tests/c/test_c.py -k sparse"],
    "device/cuda": ["tests/device/test_cuda.py", "tests/device/test_cuda_edges.py"],
    "device/capture": ["tests/graph/test_capture.py", "tests/graph/test_capture_table.py"],
    "device/sim/capture": ["tests/graph/test_capture.py", "tests/graph/test_capture_table.py"],
    "device/sim/explore": ["tests/device/test_explore.py"],
    "device/sim/race": ["tests/c/test_c.py -k order", "tests/device/test_sim.py"],
    "py/overlap": ["tests/array/test_overlap.py"],
    "py/verdict": ["tests/array/test_overlap.py"],
    "py/snapshot": ["tests/analysis/test_functionalize.py"],
    "py/layout": ["tests/graph/test_recorded_layout.py"],
    "py/region": ["tests/graph/test_recorded_layout.py", "tests/analysis/test_functionalize.py"],
}
THEN = [
    "tests/spec",
    "tests/laws",
    "tests/buffer/test_kinds.py",
    "tests/buffer/test_errors.py",
    "tests/buffer/test_out.py",
    "tests/c/test_c.py",
]

#: What is put in the place of what: whole words or operators with blanks around, so that nothing in a type or a comment
#: is meant.
SWAPS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    " - ": " + ",
    " * ": " + ",
    " / ": " * ",
    " % ": " / ",
    " << ": " >> ",
    " >> ": " << ",
    " & ": " | ",
    " | ": " & ",
    "++": "--",
    "--": "++",
    " += ": " -= ",
    " -= ": " += ",
    "true": "false",
    "false": "true",
    "continue;": "break;",
    "break;": "continue;",
}
CALL = re.compile(r"^\s+(?!return\b|else\b|case\b|goto\b)[A-Za-z_][\w>.\-\[\]]*(\(.*\)|( [|&+-]?= ).*);$")
PAIR = re.compile(r"\(([a-z_]\w*), ([a-z_]\w*)\)")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
CONDITION = re.compile(r"^(\s+(?:else )?if )(\(.*\))(.*)$")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old.strip()} -> {self.new.strip() or '(left out)'}"


def variants(line: str) -> Iterator[str]:
    """All that may be made of one line of C."""
    code = line.partition("/*")[0]
    for old, new in SWAPS.items():
        for at in (m.start() for m in re.finditer(re.escape(old), code)):
            yield line[:at] + new + line[at + len(old) :]
    for m in NUMBER.finditer(code):
        yield line[: m.start()] + str(int(m[1]) + 1) + line[m.end() :]
    for m in PAIR.finditer(code):
        yield line[: m.start()] + f"({m[2]}, {m[1]})" + line[m.end() :]
    if condition := CONDITION.match(code.rstrip()):
        yield f"{condition[1]}(!{condition[2]}){condition[3]}"
    if CALL.match(code.rstrip()):
        yield re.sub(r"\S.*", ";", line)


@functools.cache
def candidates(root: Path = ROOT) -> tuple[Mutant, ...]:
    """Every mutant that there is, in the order of the tree."""
    found = []
    for path in sorted(p for f in FOLDERS for p in (root / "csrc" / f).glob("**/*.c") if p.name != "ptx.c"):
        inside, comment = False, False
        for n, line in enumerate(path.read_text().splitlines(), 1):
            text = line.strip()
            comment = (comment or text.startswith("/*")) and "*/" not in text
            inside = line.startswith("{") or (inside and not line.startswith("}"))
            if (
                not inside
                or comment
                or text.startswith(("#", "/*", "*", "assert(", "fan_fail(", '"'))
                or text.endswith("\\")
                or "assert(" in text
                or "FAN_FAULT(" in text
            ):
                continue
            found += [
                Mutant(str(path.relative_to(root)), n, line, new)
                for new in dict.fromkeys(variants(line))
                if new != line
            ]
    return tuple(found)


def drawn(seed: int, count: int, root: Path = ROOT) -> list[Mutant]:
    """As many of them, by the seed; no line twice."""
    everything = list(candidates(root))
    random.Random(seed).shuffle(everything)
    lines: dict[tuple[str, int], Mutant] = {}
    for m in everything:
        lines.setdefault((m.file, m.line), m)
        if len(lines) == count:
            break
    return list(lines.values())


def copy_of(root: Path, to: Path) -> Path:
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, to / name)
    return to


def object_code(tree: Path, file: str) -> bytes | None:
    """What the file compiles to, without names of lines; None where it does not."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "a.o")
        cc = shlex.split(os.environ.get("CC", "cc")) + [
            "-std=c11",
            "-O2",
            "-g0",
            "-DNDEBUG",
            "-D_GNU_SOURCE",
            "-w",
            "-fPIC",
            "-ffp-contract=off",
            "-fno-math-errno",
        ]
        includes = ["-Icsrc", f"-I{sysconfig.get_paths()['include']}", f"-I{np.get_include()}"]
        done = subprocess.run([*cc, *includes, "-c", file, "-o", str(out)], cwd=tree, capture_output=True, check=False)
        return out.read_bytes() if done.returncode == 0 else None


def plant(tree: Path, m: Mutant) -> None:
    path = tree / m.file
    lines = path.read_text().splitlines(keepends=True)
    assert lines[m.line - 1].rstrip("\n") == m.old, f"{m} is not there"
    lines[m.line - 1] = m.new + "\n"
    path.write_text("".join(lines))


def built(tree: Path) -> bool:
    env = {
        **os.environ,
        "FANIN_DEV": "1",
        "FANIN_NVCC": "0",
        "CC": os.environ.get("CC", "cc") + " -w",
    }  # a mutant may be warned of
    return (
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=tree,
            env=env,
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


def killer(tree: Path, commands: list[list[str]], limit: float) -> str | None:
    """The tests that noticed; None: it survives. What does not end in time is noticed, too."""
    env = {**os.environ, "PYTHONPATH": str(tree / "python")}
    for command in commands:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *command],
                cwd=tree,
                env=env,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(command)}: no end in {limit:.0f} s"
        if done.returncode not in (0, 5):
            failed = re.search(r"^FAILED (\S+)", done.stdout, re.M)
            return failed[1] if failed else f"{' '.join(command)}: ended with {done.returncode}"
    return None


def judge(tree: Path, m: Mutant, rest: list[str], limit: float) -> str:
    """ "changes nothing", "does not compile", "survives", or who noticed it."""
    path = tree / m.file
    original, before = path.read_text(), object_code(tree, m.file)
    plant(tree, m)
    try:
        after = object_code(tree, m.file)
        if after is None or before is None:
            return "does not compile"
        if after == before:
            return "changes nothing"
        if not built(tree):
            return "does not compile"
        _, folder, name = m.file.split("/", 2)
        near = [t for start, tests in NEAR.items() if f"{folder}/{name}".startswith(start) for t in tests]
        return killer(tree, [t.split() for t in dict.fromkeys([*near, *FIRST[folder]])] + [rest], limit) or "survives"
    finally:
        path.write_text(original)


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--count", type=int, default=30)
    parse.add_argument("--limit", type=float, default=300.0, help="seconds for one run of tests")
    parse.add_argument("--minutes", type=float, default=float("inf"), help="no mutant is begun later")
    parse.add_argument("--json", type=Path, help="where the verdicts are written")
    parse.add_argument("--list", action="store_true", help="only say which are drawn")
    parse.add_argument("tests", nargs="*", default=THEN, help="what is run after the likely ones")
    how = parse.parse_args()
    mutants = drawn(how.seed, how.count)
    if how.list:
        print(*mutants, sep="\n")
        return 0
    seen: Counter[str] = Counter()
    verdicts = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fanin-mutants-") as folder:
        tree = copy_of(ROOT, Path(folder))
        if not built(tree):
            sys.exit("the tree itself does not build")
        for m in mutants:
            if time.monotonic() - began > 60 * how.minutes:
                break
            verdict = judge(tree, m, how.tests, how.limit)
            word = verdict if verdict in ("changes nothing", "does not compile", "survives") else "dies"
            seen[word] += 1
            verdicts.append({**asdict(m), "verdict": verdict})
            print(f"{word:16} {m}" + (f"   [{verdict}]" if word == "dies" else ""), flush=True)
            if how.json:
                how.json.write_text(json.dumps(verdicts, indent=1))
    changed = seen["dies"] + seen["survives"]
    print(
        f"seed {how.seed}: {sum(seen.values())} mutants; of {changed} that change anything {seen['dies']} die;"
        f" {dict(seen)}"
    )
    return int(seen["survives"] > 0)


if __name__ == "__main__":
    sys.exit(main())
