"""For testers of engines built on fanin: a pytest plugin and a CUDA driver for tests.

    pytest_plugins = ["fanin.testing.plugin"]        # in the top conftest.py, if the plugin is not installed

    def test_double(sim_machine):                     # a fresh fanin.sim.Machine, entered
        ...

    @pytest.mark.explore(limit=500)                   # the test is run under every order of its host threads
    def test_two_producers(sim_machine):
        sim_machine.spawn(...)

    driver = fanin.testing.FakeDriver()               # the CUDA backend without a GPU
    with fanin.testing.use_driver(driver): ...

`fanin.conformance` is a suite that other engines run on their own buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .driver import FakeDriver, fake_library, use_driver

__all__ = ["FakeDriver", "fake_library", "use_driver"]


def __getattr__(name: str) -> object:
    if name in __all__:  # the plugin must not import fanin before a test needs it
        from . import driver

        return getattr(driver, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
