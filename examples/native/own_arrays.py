"""An array type of one's own in C++, summed by a fanin buffer.

python examples/native/own_arrays.py
"""

from __future__ import annotations

import numpy as np
from building import compiled

cpp = compiled("own_arrays.cpp", "-std=c++17")

got, same, total = cpp.run(100)
want = np.zeros((2, 3))
for k in range(100, 0, -1):
    want += 1.0 / k
print("a sum of 100 matrices:", got.shape, "the same bits as one after the other:", (got == want).all())
print("the sum of one is its own memory:", same, total)
try:
    cpp.refused()
except ValueError as error:
    print("ValueError:", error)
