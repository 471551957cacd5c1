"""The whole input buffer in plain NumPy: the description that can be run, and (`numbers`) what numbers do."""

from .buffer import InputBuffer, Slot, Sparse, Zero

__all__ = ["InputBuffer", "Slot", "Sparse", "Zero"]
