"""A simulated device: work runs late, and a wait that is missing is found."""

import numpy as np

import fanin


def two_producers(machine):
    """Two streams each make a gradient; a third one uses the sum."""
    first, second, consumer = (machine.stream() for _ in range(3))
    buf = fanin.InputBuffer(1, stream=consumer, name="gradients")
    for stream, value in [(first, 1.0), (second, 2.0)]:
        gradient = machine.empty(4)
        machine.launch(stream, lambda out, value=value: out.fill(value), writes=[gradient], name=f"make {value}")
        buf.add(0, gradient, stream=stream)
    [total] = buf.take()
    result = machine.empty(4)
    machine.launch(consumer, lambda x, out: np.multiply(x, 10, out), [total], [result], name="use")
    with fanin.stream(consumer):
        return result.numpy()


# With the waits of the rules, every schedule gives the same result.
for schedule in ("seeded", "lifo", "round robin"):
    with fanin.sim.Machine(schedule=schedule) as m:
        print(f"{schedule}: {two_producers(m)}")

# Without one of them, the machine names both sides and what is missing, whatever order it happened to pick.
with fanin.sim.Machine() as m:
    m.leave_out("S12.wait")  # the sum waits for the later gradients' producers
    try:
        two_producers(m)
    except fanin.RaceError as e:
        print(f"RaceError: {e}")
