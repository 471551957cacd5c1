"""Two threads of C fill one buffer, without the interpreter.

python examples/native/two_threads.py
"""

from __future__ import annotations

import numpy as np
from building import compiled

c = compiled("two_threads.c", "-pthread")

got = c.sum(1000)
chain = np.float32(0)
for k in range(1000):
    for number in (0, 1):
        chain += np.float32(number + 1) / np.float32(k + 1)
print("2000 gradients of two threads:", got.dtype, got.shape, got[0])
print("the same bits as one after the other:", got[0] == chain)
print("whichever thread is faster:", all((c.sum(1000) == got).all() for _ in range(20)))

try:
    c.sum(-1)
except ValueError as error:
    print("ValueError:", error)
