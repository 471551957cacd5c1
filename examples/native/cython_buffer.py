"""A fanin buffer in Cython, filled by two threads that do not hold the GIL while they add.

python examples/native/cython_buffer.py
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from building import compiled

if importlib.util.find_spec("Cython") is None:
    print("this example needs Cython, which is not installed")
    sys.exit(0)

with tempfile.TemporaryDirectory() as folder:
    source = Path(folder, "cython_buffer.c")
    pyx = Path(__file__).with_suffix(".pyx")
    subprocess.run([sys.executable, "-m", "cython", "-3", str(pyx), "-o", str(source)], check=True)
    Buffer = compiled(str(source)).Buffer

buffer = Buffer()
x = np.full(4, 0.5)
threads = [threading.Thread(target=lambda: [buffer.add(x) for _ in range(1000)]) for _ in range(2)]
for t in threads:
    t.start()
for t in threads:
    t.join()
print("2000 gradients of two threads:", buffer.take())
print("nothing is left:", buffer.take())
try:
    buffer.add(np.ones(3))
    buffer.add(np.ones(4))
except ValueError as error:
    print("ValueError:", error)
