"""The fake driver does what a real one may do: it waits where CUDA may wait, breaks captures that CUDA may break, gives
handles out again, tells of errors late. Each of these once hid a defect of the backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin
from fanin.testing import FakeDriver
from kit import hooks

pytestmark = pytest.mark.core


# Blocks of threads


def summed_stats(driver: FakeDriver, x: Any) -> fanin.Stats:
    s = driver.stream()
    buf = fanin.InputBuffer(1, stats=True, stream=s)
    for _ in range(2):
        buf.add(0, driver.array(x), stream=s)
    buf.take()
    found = buf.stats(0)
    assert found is not None
    return found


def test_statistics_need_the_barriers_of_their_kernels(driver: FakeDriver) -> None:
    """Which run as on a GPU: without the barriers the threads of a block add up what is not there yet."""
    x = np.arange(5000.0)
    right = float(np.sum((2 * x) ** 2))
    assert summed_stats(driver, x).sumsq == pytest.approx(right, rel=1e-12)
    driver._lib.fanFakeBarriers(0)
    try:
        assert summed_stats(driver, x).sumsq != pytest.approx(right, rel=1e-3)
    finally:
        driver._lib.fanFakeBarriers(1)


# Errors that come late


def odd(driver: FakeDriver, n: int = 64) -> Any:
    """Numbers that begin 4 bytes behind a multiple of 16."""
    return driver.array(np.ones(n + 1, "f4"))[1:]


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
def test_an_access_off_its_size_loses_the_context_when_it_runs(driver: FakeDriver) -> None:
    """As on a GPU: the launch is fine, and whoever waits for it hears of it."""
    driver.world.device_is_lost()
    s = driver.stream()
    xs = [odd(driver) for _ in range(2)]
    out = driver.empty(64, "f4")
    hooks.fault("CUDA_ALWAYS_WIDE")
    try:
        fanin.add_n(xs, out=out)
    finally:
        hooks.fault(None)
    s.record()  # nothing has run: nothing is known
    with pytest.raises(fanin.DeviceError, match=r"CUDA_ERROR_MISALIGNED_ADDRESS \(716\)") as e:
        out.numpy()
    assert e.value.code == 716
    with pytest.raises(fanin.DeviceError, match=r"cuda:0 is lost since an earlier failure: .*\(716\)"):
        s.record()


def test_what_lies_off_16_bytes_is_summed_in_pieces_that_fit(driver: FakeDriver) -> None:
    """The control: the backend asks where its operands lie."""
    for dtype in ("f4", "f2", "u1", "c8"):
        for stats in (False, True):
            xs = [driver.array(np.ones(71, dtype))[1:] for _ in range(3)]
            buf = fanin.InputBuffer(1, stats=stats)
            for x in xs:
                buf.add(0, x)
            assert buf.take()[0].numpy().tolist() == [3] * 70


@pytest.mark.parametrize("code", [226, 721, 810, 911])
def test_a_code_after_which_a_process_must_end_loses_the_device_and_its_first_cause_is_kept(
    driver: FakeDriver, code: int
) -> None:
    driver.world.device_is_lost()
    s = driver.stream()
    driver.fail(0, code, call="EventRecord", sticky=True)
    with pytest.raises(fanin.DeviceError, match="The device is lost to this process"):
        s.record()
    calls = driver.calls()
    with pytest.raises(
        fanin.DeviceError, match=rf"cuda:0 is lost since an earlier failure: cuEventRecord .*\({code}\)"
    ):
        s.synchronize()
    assert driver.calls() == calls
