"""A backward pass: every sum of gradients in it is an input buffer."""

import numpy as np

import fanin
from fanin import tape

rng = np.random.default_rng(0)
x, target = rng.normal(size=(64, 8)), rng.normal(size=(64, 1))
start = rng.normal(size=(8, 8)) / 3


def loss_of(w, v, x, target):
    h = tape.tanh(x @ w)
    h = h + tape.tanh(h @ w)  # w is used twice: its gradient is a sum, and so is that of h
    d = h @ v - target
    return (d * d).mean()


# On the CPU.
w, v = tape.parameter(start, name="w"), tape.parameter(np.ones((8, 1)) / 8, name="v")
for step in range(101):
    loss = loss_of(w, v, tape.array(x), tape.array(target))
    w.grad = v.grad = None
    tape.backward(loss)
    for p in (w, v):
        tape.update(lambda g, p: np.subtract(p, 0.2 * g, p), [p.grad], [p])
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.numpy():.4f}")

# A Hessian-vector product: the pass records itself, and its result is differentiated again.
loss = loss_of(w, v, tape.array(x), tape.array(target))
[slope] = tape.grad(loss, [w], create_graph=True)
direction = np.ones((8, 8)) / 8
[product] = tape.grad((slope * direction).sum(), [w])
nearby = tape.parameter(w.numpy() + 1e-6 * direction)
[other] = tape.grad(loss_of(nearby, v, tape.array(x), tape.array(target)), [nearby])
print("curvature, and by a finite difference:", np.allclose(product, (other - slope.numpy()) / 1e-6, atol=1e-5))

# The same on two streams of a simulated device, one for each half of the data.
with fanin.sim.Machine(devices=1) as m, fanin.set_options(warn_stream_mismatch=False):
    [d0] = tape.devices(m)
    there = tape.parameter(w.numpy(), d0, "w"), tape.parameter(v.numpy(), d0, "v")
    losses = []
    for half in (slice(0, 32), slice(32, 64)):
        with fanin.stream(m.stream()):
            losses.append(loss_of(*there, tape.array(x[half], d0), tape.array(target[half], d0)) * 0.5)
    tape.backward(losses)
    w.grad = None
    tape.backward(loss_of(w, v, tape.array(x), tape.array(target)))
    print("the same gradient on two streams:", np.allclose(there[0].grad.numpy(), w.grad), "| races:", m.races)
