"""For testers of engines built on fanin: a pytest plugin.

    pytest_plugins = ["fanin.testing.plugin"]         # in the top conftest.py, or: pytest -p fanin.testing.plugin

    def test_double(sim_machine):                     # a fresh fanin.sim.Machine, entered
        ...

    @pytest.mark.explore(limit=500)                   # the test is run under every order of its host threads
    def test_two_producers(sim_machine):
        sim_machine.spawn(...)

`fanin.conformance` is a suite that other engines run on their own buffer.
"""
