"""A suite of laws for buffers of gradients, which other engines run on their own:

    pytest -p fanin.testing.plugin --pyargs fanin.conformance --fanin-buffer mypkg:make_buffer

`make_buffer(n)` returns a buffer of n slots with `add(slot, gradient)` and `take() -> list`. Laws about features that a
buffer lacks (`key=`, `expect`, `clear`, `buf[slot]`) are skipped with a reason.
"""
