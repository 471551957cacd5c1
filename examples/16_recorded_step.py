"""A training step that is recorded once and replayed: the same bits, without nodes and buffers."""

import numpy as np

from fanin import tape

rng = np.random.default_rng(0)
x, target = rng.normal(size=(64, 8)), rng.normal(size=(64, 1))
start = rng.normal(size=(8, 8)) / 3


def network():
    """Parameters, and a step of their training."""
    w, v = tape.parameter(start, name="w"), tape.parameter(np.ones((8, 1)) / 8, name="v")

    def train(x, target, rate):
        h = tape.tanh(tape.array(x) @ w)
        h = h + tape.tanh(h @ w)  # w is used twice: its gradient is a sum
        d = h @ v - tape.array(target)
        loss = (d * d).mean()
        tape.backward(loss)
        for p in (w, v):
            tape.update(lambda g, rate, p: np.subtract(p, rate * g, p), [p.grad, rate], [p])
            p.grad = None
        return loss

    return [w, v], train


as_it_is, train = network()
parameters, recorded = network()
step = tape.compiled(recorded, static=parameters)

for i in range(60):
    n = 64 if i < 40 else 32  # other shapes: another recording
    rate = np.array(0.2 / (1 + i / 20))  # an array: a number would be part of the recording
    expected, loss = train(x[:n], target[:n], rate), step(x[:n], target[:n], rate)
    assert expected.numpy() == loss.numpy()
    if step.last.did != "replayed":
        print(f"step {i:2}: {step.last.did}: {step.last.reason}")

print("the same bits:", all((p.data == q.data).all() for p, q in zip(parameters, as_it_is, strict=True)))
print(step.stats.recorded, "recordings,", step.stats.replayed, "replays")
