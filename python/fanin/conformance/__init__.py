"""A suite of laws for buffers of gradients and for engines, which other engines run on their own:

    pytest -p fanin.testing.plugin --pyargs fanin.conformance --fanin-buffer mypkg:make_buffer -k test_buffer
    pytest -p fanin.testing.plugin --pyargs fanin.conformance --fanin-engine mypkg:make_engine -k test_engine

`make_buffer(n)` returns a buffer of n slots with `add(slot, gradient)` and `take() -> list`. `make_engine()` returns an
object with `leaf(array)`, `op(value, pullback, inputs)`, `backward(root, gradient)` and `grad(leaf)`, as
`fanin.conformance.engines.Fanin` has them. Laws about features that are missing (`key=`, `expect`, `clear`,
`buf[slot]`, `stream=`, the parts that an attribute `lacks` names) are skipped with a reason.

Without an option the suite runs on fanin's own buffer and engine.
"""
