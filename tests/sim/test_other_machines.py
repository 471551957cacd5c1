"""Errors over two simulated machines, whose devices have the same names, name the object of the other machine."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import fanin
from fanin.sim import Machine

pytestmark = pytest.mark.core

OTHER = "sim:0 of another machine"


def taken(a: Machine, b: Machine) -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, a.array(np.ones(2)))
    buf.take(slot=0, out=b.array(np.ones(2)))


def added(a: Machine, b: Machine) -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, a.array(np.ones(2)))
    buf.add(0, b.array(np.ones(2)))


def consumed(a: Machine, b: Machine) -> None:
    buf = fanin.InputBuffer(1, stream=b.stream())
    buf.add(0, a.array(np.ones(2)))


def tree(a: Machine, b: Machine) -> None:
    with b:
        x = b.array(np.ones(2))
    with a:
        made = fanin.GraphTree("sim:0", memory=1 << 16)
        double = made.function(lambda x: fanin.add_n([x, x]))
        with made.step():
            double(x)


def node(a: Machine, b: Machine) -> None:
    x = a.array(np.ones(2))
    with fanin.stream(b.stream()):
        last = fanin.Node(lambda g: g)
    fanin.backward([(fanin.Node(lambda g: g, edges=[(last, 0)]), 0, x)])


@pytest.mark.parametrize("call", [taken, added, consumed, tree, node])
def test_an_error_over_two_machines_names_both(call: Callable[[Machine, Machine], None]) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(OTHER)):
        call(Machine(), Machine())


def test_an_error_over_two_devices_of_one_machine_names_only_the_devices() -> None:
    m, buf = Machine(devices=2), fanin.InputBuffer(1)
    buf.add(0, m.array(np.ones(2)))
    with pytest.raises(ValueError, match=r"out= is on sim:1, the sum on sim:0$"):
        buf.take(slot=0, out=m.array(np.ones(2), 1))
