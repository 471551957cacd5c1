"""What a buffer of gradients promises, as a suite that other engines run on their own:

    pytest --pyargs fanin.conformance --fanin-buffer mypkg:make_buffer

`make_buffer(n)` gives a buffer of n slots with `add(slot, gradient)` and `take() -> list`. Laws about what a buffer
does not have (`key=`, `expect`, `clear`, `buf[slot]`) are skipped, and say so. It needs the plugin
`fanin.testing.plugin`.
"""
