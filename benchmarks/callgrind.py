"""Instructions, functions and files of small calls, as valgrind's callgrind counts them.

    python -m benchmarks.callgrind [--torch] [--details] [FILE]

One Python runs under callgrind; between two marks it does the same thing many times. Numbers are instructions for each
time without those of the empty loop. They do not depend on the machine's load, only on the builds of Python, NumPy and
fanin. On a build with debug information (FANIN_DEV=1) a second table counts the functions of csrc that each call
enters, and their files: how many places a reader opens to follow it. Inlined functions are not counted. `--details`
adds the instructions of each function, `--files` the names of the files.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import fanin
from fanin import _core
from fanin.graph import GraphTree

from .timing import machine

TIMES = 1000
LEAST = 0.01  # of all instructions: functions with fewer are listed together
SLOTS = 100

Work = Callable[[int], None]


def lives() -> dict[str, Work]:
    """What is counted, TIMES times each. A name in brackets is preparation."""
    a, b = np.ones(16, "f4"), np.ones(16, "f4")
    eight = [np.ones(16, "f4") for _ in range(8)]
    buf = fanin.InputBuffer(1, budget=float("inf"))
    full = fanin.InputBuffer(1, budget=0)
    exact, long = fanin.InputBuffer(1, budget=0, accumulate="exact"), np.ones(4096, "f4")
    two_long = [np.random.default_rng(k).standard_normal(4096, "f4") for k in range(2)]
    many, slots, gradients = fanin.InputBuffer(SLOTS), list(range(SLOTS)), [np.ones(16, "f4") for _ in range(SLOTS)]
    add, take, make = buf.add, buf.take, fanin.InputBuffer
    transposed = [np.ones((8, 4), "f4").T for _ in range(2)]
    gapped = [np.ones((4, 9), "f4")[:, :8] for _ in range(2)]
    every_second = [np.ones((8, 16), "f4")[::2, ::2] for _ in range(2)]
    declared = fanin.InputBuffer([fanin.Slot(shape=(16,), dtype="f4")])

    def loop(times: int) -> None:
        for _ in range(times):
            pass

    def one_add(times: int) -> None:
        for _ in range(times):
            add(0, a)

    def one_keyed_add(times: int) -> None:
        for k in range(times):
            add(0, a, key=k)

    def one_weighted_add(times: int) -> None:
        for _ in range(times):
            add(0, a, weight=3.0)

    def weighted_adds_and_take(times: int) -> None:
        for _ in range(times):
            add(0, a, weight=3.0)
            add(0, b, weight=5.0)
            take()

    def weighted_mean(times: int) -> None:
        for _ in range(times):
            add(0, a, weight=3.0)
            add(0, b, weight=5.0)
            take(mean=True)

    def add_into_sum(times: int) -> None:
        for _ in range(times):
            full.add(0, a)

    def add_into_exact_sum(times: int) -> None:
        for _ in range(times):
            exact.add(0, long)

    def exact_means(times: int) -> None:
        for _ in range(times):
            fanin.add_n(two_long, accumulate="exact", scale=1 / 3)

    def add_and_take(times: int) -> None:
        for _ in range(times):
            add(0, a)
            take()

    def life(times: int) -> None:
        for _ in range(times):
            one = make(1)
            one.add(0, a)
            one.add(0, b)
            one.take()

    def add_n(times: int) -> None:
        for _ in range(times):
            fanin.add_n(eight)

    def add_many(times: int) -> None:
        for _ in range(times // SLOTS):
            many.add_many(slots, gradients)
            many.add_many(slots, gradients)
            many.take()

    def adds_and_take(x: np.ndarray, y: np.ndarray) -> Work:
        def work(times: int) -> None:
            for _ in range(times):
                add(0, x)
                add(0, y)
                take()

        return work

    def declared_add_and_take(times: int) -> None:
        for _ in range(times):
            declared.add(0, a)
            declared.take()

    def numpy_add(times: int) -> None:
        for _ in range(times):
            np.add(a, b, out=b)

    def numpy_fresh(times: int) -> None:
        for _ in range(times):
            a + b

    def clear(_: int) -> None:
        buf.clear()

    works: dict[str, Work] = {
        "an empty loop": loop,
        "buf.add(0, a)": one_add,
        "(clear)": clear,
        "buf.add(0, a, key=k)": one_keyed_add,
        "(clear again)": clear,
        "(clear after keys)": clear,
        "buf.add(0, a, weight=w)": one_weighted_add,
        "(clear after weights)": clear,
        "buf.add(0, a), budget=0": add_into_sum,
        "buf.add of 4,096 numbers, exact, budget=0": add_into_exact_sum,
        "add_n of 2 x 4,096 numbers, exact, scale=1/3": exact_means,
        "buf.add, buf.take()": add_and_take,
        "buf.add twice, buf.take()": adds_and_take(a, b),
        "buf.add(weight=) twice, buf.take()": weighted_adds_and_take,
        "buf.add(weight=) twice, buf.take(mean=True)": weighted_mean,
        "InputBuffer(1), add twice, take, drop": life,
        "add_n of 8 arrays": add_n,
        f"a slot of two add_many of {SLOTS} and take": add_many,
        "buf.add twice, buf.take(), transposed": adds_and_take(*transposed),
        "buf.add twice, buf.take(), rows with gaps": adds_and_take(*gapped),
        "buf.add twice, buf.take(), gaps along two axes": adds_and_take(*every_second),
        "buf.add, buf.take(), declared": declared_add_and_take,
        "np.add(a, b, out=b)": numpy_add,
        "a + b": numpy_fresh,
    }
    if "--torch" in sys.argv:
        import torch

        x, y = torch.ones(16), torch.ones(16)

        def torch_add(times: int) -> None:
            for _ in range(times):
                add(0, x)

        def torch_adds_and_take(times: int) -> None:
            for _ in range(times):
                add(0, x)
                add(0, y)
                take()

        works |= {
            "(clear once more)": clear,
            "buf.add of a tensor": torch_add,
            "(clear again once more)": clear,
            "buf.add of a tensor twice, buf.take()": torch_adds_and_take,
        }
    return works


def calls() -> dict[str, Callable[[], object]]:
    """The single calls whose functions and files are counted. A name in brackets is preparation."""
    a, m = np.ones(16, "f4"), np.ones((8, 4), "f4")
    gapped = [np.ones((4, 9), "f4")[:, :8] for _ in range(2)]
    every_second = [np.ones((8, 16), "f4")[::2, ::2] for _ in range(2)]
    buf = fanin.InputBuffer(1, budget=float("inf"))

    leaf = fanin.Leaf(a)
    node = fanin.Node(lambda g: g, edges=[(leaf, 0)])
    graph = [(fanin.Node(lambda g: (g, g), edges=[(fanin.Node(lambda g: g, edges=[(node, 0)]), 0), (node, 0)]), 0, a)]
    tree = GraphTree("cpu")
    half = tree.function(lambda x: x * 0.5, roles=["copy"])

    def add(x: np.ndarray) -> Callable[[], object]:
        return lambda: buf.add(0, x)

    for _ in range(3):
        with tree.step():
            half(a)
    step = tree.step()

    return {
        "buf.add(0, a), 16 floats": add(a),
        "(a second add)": add(a.copy()),
        "buf.take() of two such": buf.take,
        "buf.add(0, m.T), float32 (4, 8)": add(m.T),
        "(a second add of m.T)": add(m.copy().T),
        "buf.take() of two transposed": buf.take,
        "buf.add(0, x[:, :8]), float32 (4, 8) with gaps": add(gapped[0]),
        "(a second add with gaps)": add(gapped[1]),
        "buf.take() of two with gaps": buf.take,
        "buf.add(0, x[::2, ::2]), float32 (4, 8), gaps along two axes": add(every_second[0]),
        "(a second add with gaps along two axes)": add(every_second[1]),
        "buf.take() of two with gaps along two axes": buf.take,
        "backward of 3 nodes and a leaf": lambda: fanin.backward(graph, keep_graph=True),
        "(a step begins)": step.__enter__,
        "a replay of a graph tree's function on the CPU": lambda: half(a),
        "(the step ends)": lambda: step.__exit__(None, None, None),
    }


def inner() -> None:
    """Under callgrind: everything once to be warm, then each between two marks."""
    mark, works, single = _core.build_info, lives(), calls()
    for work in works.values():
        work(TIMES)
    for work in works.values():
        mark()
        work(TIMES)
    for call in single.values():
        call()
    for call in single.values():
        mark()
        call()
    mark()


def lines_of(dump: Path) -> Iterator[tuple[str, str, str, int]]:
    """(library, file, function, instructions) of each line of cost of a dump, callees' costs left out."""
    names: dict[str, str] = {}
    function = library = file = ""
    of_callee = False
    for line in dump.read_text().splitlines():
        if match := re.match(r"(c?)(fn|ob|fl|fi|fe)=(\(\d+\))(?: (.*))?$", line):
            callee, kind, number, name = match.groups()
            kind = "fl" if kind in ("fi", "fe") else kind
            if name:
                names[kind + number] = Path(name).name if kind == "ob" else name
            if callee:
                continue
            if kind == "ob":
                library = names[kind + number].partition(".")[0]
            elif kind == "fn":
                function = names[kind + number]
            elif line.startswith("fl"):
                file = names[kind + number]
        elif re.match(r"c(fi|fl)=(\(\d+\))(?: (.*))?$", line):
            match = re.match(r"c(fi|fl)=(\(\d+\))(?: (.*))?$", line)
            if match and match.group(3):
                names["fl" + match.group(2)] = match.group(3)
        elif line.startswith("calls="):
            of_callee = True
        elif re.match(r"[+*\-\d]\S* \d+$", line):
            if not of_callee:
                yield library, file, function, int(line.split()[1])
            of_callee = False


def costs(dump: Path) -> Counter[str]:
    """Instructions by function, itself alone, of one dump."""
    found: Counter[str] = Counter()
    for library, _, function, n in lines_of(dump):
        found[f"{function} ({library})"] += n
    return found


def entered(dump: Path) -> set[tuple[str, str]]:
    """The functions of csrc that a dump entered, each with its file."""
    return {
        (file.rpartition("csrc/")[2], function)
        for _, file, function, n in lines_of(dump)
        if "csrc/" in file and n and "build_info" not in function
    }


def table(name: str, cost: Counter[str], loop: float, details: bool) -> list[str]:
    """The cost of one piece of work, and that of its functions."""
    whole = sum(cost.values())
    lines = [f"{whole / TIMES - loop:8.0f}  {name}"]
    rest = whole
    for function, n in cost.most_common() if details else ():
        if n < LEAST * whole:
            break
        lines.append(f"            {n / TIMES:8.1f}  {n / whole:5.1%}  {function}")
        rest -= n
    return [*lines, f"            {rest / TIMES:8.1f}  {rest / whole:5.1%}  all others", ""] if details else lines


def main() -> None:
    works, single = list(lives()), list(calls())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        words = [
            "valgrind",
            "--tool=callgrind",
            "--dump-instr=no",
            "--dump-before=*build_info*",
            f"--callgrind-out-file={out}",
            sys.executable,
            "-m",
            "benchmarks.callgrind",
            "--inner",
            *(w for w in sys.argv[1:] if w == "--torch"),
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        # Dump n ends at mark n; what comes before the first mark is warming up.
        counted = {name: costs(Path(f"{out}.{k + 2}")) for k, name in enumerate(works)}
        # The last mark of the works ends with the warming up of the single calls.
        roads = {name: entered(Path(f"{out}.{k + 2 + len(works)}")) for k, name in enumerate(single)}
    here = machine()
    lines = [
        f"{here['date'][:10]}, {here['cpu']} (under valgrind: no AVX-512), Python {here['python']}, NumPy "
        f"{here['versions']['numpy']}, fanin {here['versions']['fanin']}, {here['build']} build",
        "Instructions of each time" + (", and of its functions alone" if "--details" in sys.argv else ""),
        "",
    ]
    loop = sum(counted["an empty loop"].values()) / TIMES
    for name, cost in counted.items():
        if not name.startswith("("):
            lines += table(name, cost, 0 if name == "an empty loop" else loop, "--details" in sys.argv)
    if any(roads.values()):
        lines += ["", "Functions and files of csrc entered by one call", ""]
    for name, road in roads.items():
        if road and not name.startswith("("):
            files = sorted({file for file, _ in road})
            lines.append(f"{len(road):5} functions, {len(files):3} files  {name}")
            if "--files" in sys.argv:
                lines += [f"        {f}: {' '.join(sorted(fn for file, fn in road if file == f))}" for f in files]
    text = "\n".join(lines) + "\n"
    print(text)
    if files := [w for w in sys.argv[1:] if not w.startswith("--")]:
        Path(files[0]).write_text(text)


if __name__ == "__main__":
    inner() if "--inner" in sys.argv else main()
