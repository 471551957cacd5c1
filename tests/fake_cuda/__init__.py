"""A CUDA driver for tests: the CUDA backend's own code, run where there is no GPU."""

from .driver import FakeDriver, fake_library, use_driver

__all__ = ["FakeDriver", "fake_library", "use_driver"]
