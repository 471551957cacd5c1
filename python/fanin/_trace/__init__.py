"""Traces of the buffer's work, their pictures, and the sentences of `explain`."""
