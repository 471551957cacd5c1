"""A node whose function is in C: compiled against fanin.h, run between nodes in Python.

    python examples/15_c_nodes.py

Between two functions in C no Python object is made or called; functions in Python get ndarrays.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np

import fanin


def compiled(source: Path, folder: str) -> ModuleType:
    """The extension; setuptools would do the same, with include_dirs=[fanin.get_include()]."""
    cc = os.environ.get("CC", "cc").split()
    if not shutil.which(cc[0]):
        print("this example needs a C compiler: set CC")
        sys.exit(0)
    out = Path(folder, f"c_nodes{sysconfig.get_config_var('EXT_SUFFIX')}")
    link = ["-shared", "-fPIC"] if sys.platform != "darwin" else ["-bundle", "-undefined", "dynamic_lookup"]
    include = [f"-I{sysconfig.get_path('include')}", f"-I{fanin.get_include()}"]
    subprocess.run([*cc, "-O2", *link, *include, str(source), "-o", str(out)], check=True)
    loader = importlib.machinery.ExtensionFileLoader("c_nodes", str(out))
    spec = importlib.util.spec_from_loader("c_nodes", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


with tempfile.TemporaryDirectory() as folder:
    c = compiled(Path(__file__).with_suffix(".c"), folder)

w = fanin.Leaf(np.zeros(3), name="w")
a, b = np.array([1.0, 2.0, 3.0]), np.array([10.0, 10.0, 0.0])
by_a = fanin.Node(c.times(a), edges=[(w, 0)], name="by a")  # y = a * w
by_b = fanin.Node(c.times(b), edges=[(by_a, 0)], name="by b")  # z = b * y
fanin.backward([(by_b, 0, np.ones(3))], keep_graph=True)
print("C behind C:", w.grad)

twice = fanin.Node(lambda g: g * 2, edges=[(by_b, 0)], name="twice")  # Python before C
fanin.backward([(twice, 0, np.ones(3)), (by_a, 0, np.ones(3))], keep_graph=True)
print("and Python before them:", w.grad)

try:
    fanin.backward([(by_b, 0, np.ones(4))])
except ValueError as error:
    print("ValueError:", error, "|", error.__notes__[0].split(":")[0].split(" (")[0])
