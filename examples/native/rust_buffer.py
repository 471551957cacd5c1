"""Two threads of Rust fill one fanin buffer; bindgen reads fanin.h.

python examples/native/rust_buffer.py
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from building import needs

import fanin

rustc, bindgen = needs("rustc"), needs("bindgen")
get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
api = ctypes.c_void_p(get(fanin._core._C_API, b"fanin._core._C_API"))

with tempfile.TemporaryDirectory() as folder:
    made, library = Path(folder, "fanin.rs"), Path(folder, "rust_buffer.so")
    names = ["--allowlist-type", "fanin_.*", "--allowlist-var", "FANIN_.*", "--no-layout-tests"]
    subprocess.run([bindgen, f"{fanin.get_include()}/fanin.h", *names, "-o", str(made)], check=True)
    subprocess.run(
        [rustc, "-O", "--edition=2021", "--crate-type=cdylib", str(Path(__file__).with_suffix(".rs"))]
        + ["-o", str(library)],
        env={**os.environ, "FANIN_RS": str(made)},
        check=True,
    )
    rust = ctypes.CDLL(str(library))  # its calls do not hold the GIL
rust.fill.restype = ctypes.c_bool


def fill(steps: int, one: int, two: int) -> np.ndarray:
    out, text = np.zeros(max(one, two), "f4"), ctypes.create_string_buffer(1024)
    sizes = ctypes.c_size_t(one), ctypes.c_size_t(two)
    if not rust.fill(api, ctypes.c_int64(steps), *sizes, ctypes.c_void_p(out.ctypes.data), text):
        raise ValueError(text.value.decode())
    return out


got = fill(1000, 8, 8)
chain = np.float32(0)
for k in range(1000):
    for number in (0, 1):
        chain += np.float32(number + 1) / np.float32(k + 1)
print("2000 gradients of two threads:", got[0], "the same bits as one after the other:", got[0] == chain)
try:
    fill(1, 3, 4)
except ValueError as error:
    print("ValueError: of two shapes:", "expected a gradient of shape" in str(error))
