"""Parts of a value in a recorded step, and on the simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fanin import tape
from fanin.sim import Machine
from fanin.tape import Var


def loss_of(w: Var, a: Any) -> Var:
    first, _, last = tape.split(w, 3)
    loss = (w[::-2, 1:] * w[::2, :3]).sum() + (tape.diagonal(w) * 2).sum() + (first * a).sum()
    loss = loss + (last * last).sum() + (tape.concatenate([w[0], w[1]]) * 3).sum()
    return loss + (tape.take(w, 2) * -0.0).sum()


@pytest.mark.rule("P2")
def test_a_recorded_step_gives_the_bits_of_the_step_as_it_is() -> None:
    rng = np.random.default_rng(0)
    plain, recorded = (tape.parameter(np.arange(24.0).reshape(6, 4) / 10) for _ in range(2))

    def step(w: Var, x: Any) -> Var:
        w.grad = None
        loss = loss_of(w, tape.array(x))
        tape.backward(loss)
        return loss

    compiled = tape.compiled(lambda x: step(recorded, x), static=[recorded])
    for _ in range(5):
        x = rng.standard_normal((2, 4))
        assert step(plain, x).numpy() == compiled(x).numpy()
        assert np.asarray(plain.grad).tobytes() == np.asarray(recorded.grad).tobytes()
    assert compiled.last is not None and compiled.last.did == "replayed"


@pytest.mark.rule("P2", "P5")
def test_a_simulated_device_gives_the_bits_of_the_host() -> None:
    x, a = np.random.default_rng(1).standard_normal((6, 4)), np.ones((2, 4))
    w = tape.parameter(x)
    tape.backward(loss_of(w, tape.array(a)))
    with Machine() as m:
        device, _ = tape.devices(m)
        there = tape.parameter(x, device)
        tape.backward(loss_of(there, tape.array(a, device)))
        got = there.grad.numpy().copy()
        del there
    assert np.asarray(w.grad).tobytes() == got.tobytes()
