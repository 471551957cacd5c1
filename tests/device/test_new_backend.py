"""A new backend is a folder and one line: `null_backend` is planted in a copy of the tree, built, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = "csrc/py/device/backends.h"
USED = """
import numpy as np
import fanin
from fanin import _core

assert fanin.devices() == ["cpu", "null:0"], fanin.devices()
a, b = (_core.device_array("null:0", np.arange(6.0).reshape(2, 3) * k, False) for k in (1, 10))
buf = fanin.InputBuffer([fanin.Slot((2, 3), "float64", device="null:0")])
buf.add(0, a)
buf.add(0, b)
(total,) = buf.take()
assert total.device == "null:0", total
assert np.array_equal(total.numpy(), np.arange(6.0).reshape(2, 3) * 11), total.numpy()
s = fanin.current_stream("null:0")
assert s == fanin.Stream("null:0", 1) and s.record().query()
for refused in (lambda: fanin.Stream("null:0", 7), lambda: fanin.current_stream("null:1"), lambda: a.__dlpack__()):
    try:
        refused()
    except (ValueError, BufferError) as e:
        assert "null:" in str(e), e
    else:
        raise AssertionError("not refused")
print("used")
"""


@pytest.mark.slow  # compiles the tree
def test_a_new_backend_is_its_folder_and_one_line_of_the_registry(tmp_path: Path) -> None:
    for name in ("csrc", "python", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    shutil.copytree(Path(__file__).with_name("null_backend"), tmp_path / "csrc/device/null")
    registry = tmp_path / REGISTRY
    lines = registry.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.strip() == "X(sim)")
    lines.insert(at, "    X(null)             \\\n")
    registry.write_text("".join(lines))
    env = {**os.environ, "FANIN_DEV": "1", "PYTHONPATH": str(tmp_path / "python")}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tmp_path, env=env, check=True)
    done = subprocess.run([sys.executable, "-c", USED], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "used", done.stderr
