"""What the docstrings show passes mypy, as a user's code does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fanin

GOOD = """
import fanin, numpy as np
from fanin import Slot, Sparse, Zero

a: tuple[int, ...] | None = Slot(shape=3).shape
Slot(3, "float32"), Slot((3, 4)), Slot([2]), Slot(np.int64(3)), Slot(shape=np.ones((2, 2)).shape, name="w")
b: tuple[int, ...] = Zero(4, "float32").shape
c: tuple[int, ...] = Sparse("coo", [np.array([[2]]), np.array([1.0])], 4).shape
buf = fanin.InputBuffer([Slot(shape=3, name="bias"), Slot(combine=lambda a, b: a | b)], budget="auto")
for total in buf:
    print(total)
with fanin.trace() as t:
    buf.take()
for line in t:
    print(line.kind)
tree = fanin.GraphTree("cpu")
@tree.function
def norm(x: fanin.sim.Array, y: fanin.sim.Array) -> fanin.sim.Array:
    y[...] = (-x @ x.T).sum(axis=0, keepdims=True) + 2 * np.exp(x.astype("float32", casting="same_kind"))
    y += abs(x) > 0
    y.sort(kind="stable")
    z: fanin.sim.Array = y.copy("F").ravel("K")
    return z
with fanin.sim.Machine() as m:
    for row in m.array(np.ones((2, 3))):
        print(row.shape)
"""

BAD = """
from fanin import Slot
Slot(shape="3")
Slot(shape=3.5)
Slot(shapes=3)
"""


#: A user's small project, which mypy --strict accepts without an annotation of Any.
PROJECT = {
    "engine.py": """
from __future__ import annotations
from collections.abc import Sequence
import fanin, numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

class Linear:
    def __init__(self, w: Floats) -> None:
        self.w, self.leaf = w, fanin.Leaf(w, name="w")

    def __call__(self, x: Floats, after: fanin.Node | fanin.Leaf) -> fanin.Node:
        def pullback(g: Floats) -> Sequence[Floats]:
            return (g @ self.w.T, x.T @ g)
        return fanin.Node(pullback, edges=[(after, 0), (self.leaf, 0)], name="linear")

def step(layer: Linear, x: Floats) -> Floats:
    fanin.backward([(layer(x, fanin.Leaf(x)), 0, np.ones((2, 3)))])
    g: Floats = layer.leaf.grad
    return g
""",
    "streams.py": """
import fanin, numpy as np
from fanin.sim import Machine, explore

def scenario(m: Machine) -> None:
    buf = fanin.InputBuffer(1, stream=m.stream())
    def producer() -> None:
        s = m.stream()
        x = m.empty((2, 3), "float32")
        m.launch(s, lambda v: v.fill(1), writes=[x])
        buf.add(0, x, stream=s)
    m.spawn(producer)
    m.join()
    reveal_type(m.array(np.ones(3)))
    reveal_type(m.array(fanin.Sparse("coo", [np.array([[2]]), np.array([1.0])], 4)))

report = explore(scenario, limit=10)
reveal_type(report.ok)
reveal_type(fanin.add_n([np.ones(3), np.ones(3)]))
reveal_type(report.replay())
x = np.ones(3)
reveal_type(fanin.Leaf(x).grad)
reveal_type(fanin.Leaf(x, grad_dtype="float64").grad)

def of_device(m: Machine, leaf: fanin.Leaf) -> None:
    reveal_type(fanin.Leaf(m.array(x)).grad.device)
    reveal_type(leaf.grad)
""",
}
REVEALED = [
    "fanin._core.Array",
    "fanin.slots.Sparse",
    "bool",
    "numpy.ndarray",
    "object",
    "numpy.ndarray",
    "Any",
    "str",
    "Any",
]


@pytest.mark.tools
def test_a_users_project_passes_mypy_strict(tmp_path: Path) -> None:
    """Outside the checkout, where mypy finds fanin by py.typed and its stub, and with a fault that it finds."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    for name, code in PROJECT.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "wrong.py").write_text("import fanin\nfanin.Leaf(name=3, arrays=1)\nfanin.InputBuffer(1).add('a', 1)\n")
    (site,) = {Path(fanin.__file__).parents[1]}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "."],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(site)},
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("/", ".."))]
    notes = [line.partition("Revealed type is ")[2] for line in lines if "Revealed" in line]
    assert len(notes) == len(REVEALED) and all(a in b for a, b in zip(REVEALED, notes, strict=True)), done.stdout
    errors = [line for line in lines if "error:" in line]
    assert errors and all(line.startswith("wrong.py:") for line in errors), done.stdout
    assert {line.split(":")[1] for line in errors} == {"2", "3"}, done.stdout


def mypy(code: str, folder: Path) -> list[str]:
    pytest.importorskip("mypy", reason="mypy is not installed")
    file = folder / "users.py"
    file.write_text(code)
    words = [
        "--strict",
        "--no-error-summary",
        "--follow-imports=silent",
        "--cache-dir",
        str(folder / "cache"),
        str(file),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], capture_output=True, text=True, cwd=Path(fanin.__file__).parents[1]
    )
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if "users.py" in line and " error: " in line]


@pytest.mark.tools
def test_correct_user_code_passes_mypy_and_wrong_code_does_not(tmp_path: Path) -> None:
    found = mypy(GOOD + BAD, tmp_path)
    wrong = GOOD.count("\n") + BAD.count("\n")
    assert [int(line.split(":")[1]) for line in found] == [wrong - 2, wrong - 1, wrong], found


def test_a_shape_of_one_axis_may_be_a_number() -> None:
    assert fanin.Slot(shape=3).shape == fanin.Slot(shape=(3,)).shape == fanin.Slot(shape=np.int64(3)).shape == (3,)
    assert fanin.Zero(4, "float32").shape == (4,)
    assert fanin.Sparse("coo", [np.array([[2]]), np.array([1.0])], 4).shape == (4,)
    for shape in ("3", 3.5, (1.5,)):
        with pytest.raises(TypeError, match="expected a shape"):
            fanin.Slot(shape=shape)  # type: ignore[arg-type]
