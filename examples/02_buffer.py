"""A buffer: what a node of an autograd engine keeps while gradients come in."""

import numpy as np

import fanin

# Two slots: a weight of shape (2, 3) and a bias of shape (3,).
buf = fanin.InputBuffer([np.zeros((2, 3)), fanin.Slot(shape=(3,), dtype="float64", name="bias")], name="linear")
buf.expect(0, 2)

# Three edges end here. Keys are their numbers: the sum does not depend on the order of arrival.
buf.add(0, np.full((2, 3), 0.5), key=1)
buf.add(1, np.ones((4, 3)), key=0)  # a broadcast bias: its gradient is summed to the slot's shape
print("ready:", buf.ready(0), "| so far:", buf[0].tolist())
buf.add(0, np.ones((2, 3)), key=0)
print("ready:", buf.ready(0))
print(buf.explain(0))

weight, bias = buf.take()
print(weight.tolist(), bias.tolist())

# An error is raised at once, and nothing has changed.
buf.add(0, weight, key=0)
for slot, gradient, key in [(0, np.ones((3, 2)), 1), (0, weight, 0), (1, np.ones(3, complex), 0), (2, weight, 0)]:
    try:
        buf.add(slot, gradient, key=key)
    except (ValueError, IndexError) as e:
        print(f"{type(e).__name__}: {e}")
