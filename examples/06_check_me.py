"""Scenarios for `fanin check examples/06_check_me.py`: two that are right, and one with a race that only some orders
show.
"""

import numpy as np

import fanin


@fanin.sim.scenario
def keyed_sums_in_any_order(m):
    """Two producers on host threads and streams of their own."""
    consumer = m.stream()
    buf = fanin.InputBuffer(1, stream=consumer)

    def produce(key):
        stream, g = m.stream(), m.empty(4, "float32")
        m.launch(stream, lambda out: out.fill(key + 0.1), writes=[g], name=f"produce {key}")
        buf.add(0, g, key=key, stream=stream)

    for key in range(2):
        m.spawn(produce, key)
    m.join()
    [total] = buf.take()
    with fanin.stream(consumer):
        return total.numpy()


@fanin.sim.scenario(limit=200)
def a_pass_may_be_cleared(m):
    buf = fanin.InputBuffer(1)
    m.spawn(buf.add, 0, np.ones(2))
    m.spawn(buf.clear)
    m.join()
    buf.clear()
    return buf.take()


@fanin.sim.scenario
def scratch_memory_is_shared(m):
    """The bug: two producers write to one array, and nothing orders them but luck."""
    scratch, ready = m.empty(4), []

    def produce(value):
        stream = m.stream()
        for event in ready:  # wait for the other one if it was here before; if it is here right now, neither waits
            stream.wait(event)
        m.launch(stream, lambda out: out.fill(value), writes=[scratch], name=f"write {value}")
        ready.append(stream.record())

    for value in (1.0, 2.0):
        m.spawn(produce, value)
    m.join()
