"""InputBuffer.target: a producer that adds into the slot by itself."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from kit import hooks
from kit.at import until_at
from kit.sample import sizes

pytestmark = pytest.mark.core


def one(dtype: Any = "float32", budget: Any = None, **more: Any) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot(shape=(3,), dtype=dtype, **more)], budget=budget, name="w")


G = np.float32([1, 2, 3])


@pytest.mark.parametrize("budget", [0, None])
def test_targets_and_gradients_sum_in_key_order(budget: Any) -> None:
    rng = np.random.default_rng(1)
    parts = rng.standard_normal((6, 3)).astype(np.float32)
    whole = parts[0].copy()
    for p in parts[1:]:
        whole += p
    for order in ([0, 1, 2, 3, 4, 5], [5, 1, 0, 3, 2, 4], [2, 1, 0, 5, 4, 3]):
        buf = one(budget=budget)
        for k in order:
            if k % 2:
                buf.add(0, parts[k], key=k)
            else:
                with buf.target(0, key=k) as out:
                    assert (
                        isinstance(out, np.ndarray)
                        and out.dtype == np.float32
                        and out.shape == (3,)
                        and out.flags.writeable
                    )
                    out += parts[k]
        np.testing.assert_array_equal(buf.take()[0].view(np.uint32), whole.view(np.uint32))


def test_the_running_sum_is_lent_where_it_is_next() -> None:
    buf = one()
    addresses = []
    for k in range(4):
        with buf.target(0, key=k) as out:
            addresses.append(out.ctypes.data)
            assert out.tolist() == (k * G).tolist()
            out += G
    assert len(set(addresses)) == 1
    assert buf.counters.in_place == 3 and buf.counters.adds == 4
    (sum_,) = buf.take()
    assert sum_.tolist() == (4 * G).tolist() and sum_.ctypes.data == addresses[0]


def test_a_sum_that_is_lent_again_is_so_by_no_rule() -> None:
    """An earlier target's producer has a view of it: A6 forbids writing it (D34)."""
    buf = one(budget=0)
    with buf.target(0) as kept:
        kept += G
    assert "A6" not in buf.explain(0)
    with buf.target(0) as out:
        out += G
    assert buf.counters.in_place == 1
    assert kept.tolist() == (2 * G).tolist(), "whoever keeps what was lent sees what is added later"
    assert buf.explain(0).splitlines()[-1] == "Rules that decided so far: S3 (docs/rules.md)."
    buf.add(0, G)
    assert buf.explain(0).splitlines()[-1] == "Rules that decided so far: S3, A7 (docs/rules.md)."


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_donated_sum_is_lent(order: Any) -> None:
    """D34: its caller has given it away, so that the sum is made in it."""
    buf = fanin.InputBuffer([np.empty((2, 3), np.float32)], budget=0)
    mine = np.ones((2, 3), np.float32, order=order)
    buf.add(0, mine, donate=True)
    for k in range(3):
        with buf.target(0) as out:
            assert out.ctypes.data == mine.ctypes.data and out.strides == mine.strides
            assert out.tolist() == (mine * 0 + 1 + k).tolist()
            out += 1
        buf.add(0, np.zeros((2, 3), np.float32))
    (sum_,) = buf.take()
    assert sum_.ctypes.data == mine.ctypes.data and sum_.tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("why", ["dtype", "parked", "kept", "gaps"])
def test_a_donated_array_that_is_no_running_sum_is_not_lent(why: str) -> None:
    dtype = np.float16 if why == "dtype" else np.float32
    buf = fanin.InputBuffer([np.empty((2, 3), dtype)], budget=1 << 20 if why == "parked" else 0)
    mine = np.ones((2, 6), dtype)[:, ::2] if why == "gaps" else np.ones((2, 3), dtype)
    buf.add(0, mine, donate=why != "kept")
    if why == "parked":
        buf.add(0, mine.copy())
    with buf.target(0) as out:
        assert not out.any() and out.ctypes.data != mine.ctypes.data
        out += 1
    assert mine.tolist() == [[1.0] * 3] * 2 or why == "gaps"
    assert buf.take()[0].tolist() == [[3.0 if why == "parked" else 2.0] * 3] * 2


def test_zeros_are_lent_where_it_is_not() -> None:
    buf = one(budget=0)
    mine = G.copy()
    buf.add(0, mine, key=0)
    with buf.target(0, key=1) as out:  # the sum so far is the caller's array
        assert out.tolist() == [0, 0, 0]
        out += G
    assert mine.tolist() == G.tolist()
    with buf.target(0, key=3) as out:  # key 2 is missing
        assert out.tolist() == [0, 0, 0]
        out += G
    with buf.target(0, key=2) as out:
        assert out.tolist() == [0, 0, 0]  # key 3 is parked
    assert buf.take()[0].tolist() == (3 * G).tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32", "int16", "complex64", "bool"])
def test_it_is_in_the_accumulation_dtype_and_rounds_once(dtype: str) -> None:
    buf = one(dtype)
    acc = {"float16": "float32"}.get(dtype, dtype)
    with buf.target(0) as out:
        assert out.dtype == acc
        out[...] = 1
    with buf.target(0) as out:
        if dtype == "float16":
            out += np.float32(2**-12)  # lost in float16, not in float32
    with buf.target(0) as out:
        if dtype == "float16":
            out += np.float32(2**-11 - 2**-12)
    buf.add(0, np.zeros(3, dtype))
    (sum_,) = buf.take()
    assert sum_.dtype == dtype
    assert sum_.tolist() == ([1.0] * 3 if dtype == "float16" else np.ones(3, dtype).tolist())
    buf = one("float16")
    with buf.target(0) as out:
        out[...] = 1
    for _ in range(4):
        with buf.target(0) as out:
            out += np.float32(2**-12)
    assert buf.take()[0].tolist() == [1 + 2**-10] * 3


def test_no_other_gradient_is_summed_into_a_lent_target() -> None:
    buf = one(budget=0)
    kept = []
    for _ in range(2):
        with buf.target(0) as out:
            out += G
            kept.append(out)
    buf.add(0, G)
    assert kept[0].tolist() == (2 * G).tolist()
    (sum_,) = buf.take(writable=True)
    assert sum_.tolist() == (3 * G).tolist() and not np.shares_memory(sum_, kept[0])
    with buf.target(0) as out:
        out += G
    (sum_,) = buf.take(writable=True)
    assert not np.shares_memory(sum_, out)


def test_zeros_are_dropped_if_the_body_raises() -> None:
    buf = one()
    buf.expect(0, 1)
    gc.collect()
    with pytest.raises(ZeroDivisionError), buf.target(0, key=0) as out:
        out += G
        1 / 0
    assert not buf.ready(0)
    with buf.target(0, key=0) as out:
        out += G
    assert buf.ready(0) and buf.take()[0].tolist() == G.tolist()


def test_a_slot_is_poisoned_if_the_body_raises_with_the_running_sum() -> None:
    buf = one()
    with buf.target(0) as out:
        out += G
    with pytest.raises(ZeroDivisionError), buf.target(0) as out:
        out[0] = 7
        1 / 0
    for call in (lambda: buf.add(0, G), buf.take, lambda: buf[0], lambda: buf.target(0).__enter__()):
        with pytest.raises(RuntimeError, match=r"w: slot 0: poisoned until clear\(\): the body of target\(\) failed"):
            call()
    assert (
        buf.explain(0)
        == "w: slot 0: it is poisoned until clear() empties it: the body of target() failed while it had the"
        " running sum"
    )
    buf.clear()
    assert buf.take() == [None]


@pytest.mark.rule("S15")
@pytest.mark.parametrize("fails", [False, True])
def test_a_sum_for_another_device_has_a_new_event_after_a_body_that_ends_well(fails: bool) -> None:
    with Machine(2) as m:
        buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float64", device="sim:0")], stream=m.stream(1), budget=0)
        p = m.stream()
        for _ in range(2):
            buf.add(0, m.array(np.ones(2)), stream=p)
        before = buf.counters.events
        with pytest.raises(KeyError) if fails else contextlib.nullcontext(), buf.target(0, stream=p) as x:
            assert x.shape == (2,)
            if fails:
                raise KeyError
        assert buf.counters.events - before == (not fails)


def test_an_abandoned_target_is_a_failed_one() -> None:
    buf = one()

    def body() -> Any:
        with buf.target(0) as out:
            out += G
            yield

    step = body()
    next(step)
    del step
    gc.collect()
    assert buf.take() == [None]
    target = buf.target(0)
    target.__enter__()
    del target
    gc.collect()
    assert buf.take() == [None]


def test_calls_from_within_are_refused_or_wait() -> None:
    buf = one()
    with buf.target(0) as out:
        buf.add(0, G)  # scratch: others go on
        out += G
    with buf.target(0) as out:
        assert out.tolist() == [0, 0, 0]  # two are parked
    buf = one()
    with buf.target(0) as out:
        out += G
    with buf.target(0) as out:
        out += G
        with pytest.raises(RuntimeError, match="from within"):
            buf.take()
        with pytest.raises(RuntimeError, match="from within"):
            buf[0]
        buf.add(0, G)
        with buf.target(0) as other:
            assert not np.shares_memory(out, other)
            other += G
    assert buf.take()[0].tolist() == (4 * G).tolist()


@pytest.mark.threads
def test_a_take_waits_for_the_running_sum() -> None:
    buf = one()
    with buf.target(0) as out:
        out += G
    taken: list[Any] = []
    entered, go = threading.Event(), threading.Event()

    def produce() -> None:
        with buf.target(0) as out:
            entered.set()
            go.wait()
            out += G

    producer = threading.Thread(target=produce)
    producer.start()
    entered.wait()

    def take() -> None:
        taken.extend(buf.take())

    taker = threading.Thread(target=take)
    taker.start()
    until_at(taker, "buf.take()")
    assert taker.is_alive() and not taken
    go.set()
    producer.join()
    taker.join()
    assert taken[0].tolist() == (2 * G).tolist()


def test_a_key_that_is_lent_has_contributed() -> None:
    buf = one(budget=0)
    buf.expect(0, 3)
    for k in range(2):
        buf.add(0, G, key=k)
    with buf.target(0, key=2) as out:
        assert not buf.ready(0)
        out += G
        with pytest.raises(ValueError, match="A16"):
            buf.add(0, G, key=2)
    assert buf.ready(0) and buf.take()[0].tolist() == (3 * G).tolist()


@pytest.mark.threads
def test_targets_do_not_deadlock() -> None:
    buf = fanin.InputBuffer([np.empty(3, np.float32)] * 2, budget=0)
    for i in (0, 1):
        buf.add(i, G)
        buf.add(i, G)
    taken: list[Any] = []

    def take() -> None:
        taken.extend(buf.take())

    taker = threading.Thread(target=take)
    with buf.target(1) as out:
        taker.start()
        until_at(taker, "buf.take()")
        try:
            buf.add(0, G)  # the take may have slot 0, and waits for slot 1
        except RuntimeError as e:
            assert "from within" in str(e)
        out += G
    taker.join()
    assert taken[1].tolist() == (3 * G).tolist()


def test_statistics_of_a_lent_target() -> None:
    for bad in range(4):
        buf = fanin.InputBuffer([fanin.Slot(shape=(3,), dtype="float32")], stats=True, budget=0)
        for k in range(4):
            with buf.target(0, key=k) as out:
                out += np.float32([1, np.inf, 1]) if k >= bad else G
        buf.take()
        assert buf.stats(0).first_bad_key == bad


def test_bad_calls() -> None:
    buf = fanin.InputBuffer(
        [fanin.Slot(shape=(3,), dtype="float32"), fanin.Slot(shape=(3,)), fanin.Slot(dtype="int8"), fanin.Slot()],
        name="w",
    )
    for slot in (1, 2, 3):
        with (
            pytest.raises(
                ValueError, match=rf"w: slot {slot}: target\(\) needs a slot that declares its shape and dtype"
            ),
            buf.target(slot),
        ):
            pass
    for call, kind in [
        (lambda: buf.target(), TypeError),
        (lambda: buf.target(4), IndexError),
        (lambda: buf.target(-1), IndexError),
        (lambda: buf.target("0"), TypeError),
        (lambda: buf.target(0, key=-1), ValueError),
        (lambda: buf.target(0, key=1.5), TypeError),
        (lambda: buf.target(0, stream=3.5), TypeError),
        (lambda: buf.target(0, 1), TypeError),
        (lambda: buf.target(0, keys=1), TypeError),
    ]:
        with pytest.raises(kind):
            call()
    with pytest.raises(ValueError, match="create_graph"):
        fanin.InputBuffer([G], create_graph=True).target(0)
    buf.add(0, G, key=4)
    with pytest.raises(ValueError, match="key 4"), buf.target(0, key=4):
        pass
    with pytest.raises(ValueError, match="with keys"), buf.target(0):
        pass
    target = buf.target(0, key=5)
    with pytest.raises(RuntimeError, match="not entered"):
        target.__exit__(None, None, None)
    with target:
        pass
    with pytest.raises(RuntimeError, match="once"):
        target.__enter__()
    assert buf.take()[0].tolist() == G.tolist()


def test_a_failed_allocation_of_a_target_changes_nothing() -> None:
    one().take()  # the next life of a buffer may be kept
    for n in range(100):
        gc.collect()
        blocks = hooks.memory()[0]
        buf = one()
        buf.add(0, G)
        hooks.fail_at(n, 1)
        try:
            with buf.target(0) as out:
                out += G
            done = True
        except MemoryError:
            done = False
        finally:
            hooks.fail_at(-1)
        out = None
        assert buf.take()[0].tolist() == ((2 if done else 1) * G).tolist()
        del buf
        gc.collect()
        assert hooks.memory()[0] <= blocks
        if done:
            assert n > 4
            break
    else:
        raise AssertionError("it never succeeded")


# On streams, checked by the simulated device


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("same", [True, False], ids=["on A", "elsewhere"])
def test_on_streams(seed: int, same: bool) -> None:
    with Machine(1, seed=seed) as m:
        c = m.stream()
        p = c if same else m.stream()
        buf = fanin.InputBuffer([fanin.Slot(shape=(3,), dtype="float16", device="sim:0")], stream=c)
        for _ in range(3):
            with buf.target(0, stream=p) as out:
                m.launch(p, lambda v: v.__iadd__(G), writes=[out], name="wgrad")
        (sum_,) = buf.take()
        m.synchronize()
        assert sum_.numpy().tolist() == (3 * G).tolist()
        assert buf.counters.in_place == (2 if same else 0)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("how", sizes({"limit": 40, "samples": 40}, {"limit": 300, "samples": 200}))
def test_no_order_of_producers_races(count: int, how: dict[str, int]) -> None:
    def scenario(m: Machine) -> Any:
        c = m.stream()
        buf = fanin.InputBuffer([fanin.Slot(shape=(3,), dtype="float32", device="sim:0")], stream=c)

        def produce(k: int) -> None:
            p = c if k == 0 else m.stream()
            with buf.target(0, key=k, stream=p) as out:
                m.launch(p, lambda v: v.__iadd__(G * (k + 1)), writes=[out], name=f"wgrad{k}")

        for k in range(count):
            m.spawn(produce, k)
        m.join()
        (sum_,) = buf.take()
        m.synchronize()
        return sum_.numpy().tolist()

    report = fanin.sim.explore(scenario, **how)
    assert report.error is None, report


def across_devices(m: Machine) -> None:
    c, a = m.stream(device=1), m.stream(device=0)
    buf = fanin.InputBuffer([fanin.Slot(shape=(3,), dtype="float32", device="sim:0")], stream=c)
    for _ in range(2):
        with buf.target(0, stream=a) as out:
            m.launch(a, lambda v: v.__iadd__(G), writes=[out], name="wgrad")
    assert buf.counters.in_place == 1
    (sum_,) = buf.take()
    m.launch(c, lambda v: None, reads=[sum_], name="consume")


def test_the_end_of_a_direct_one_is_recorded() -> None:
    with Machine(2) as m:
        across_devices(m)
    with pytest.raises(fanin.RaceError, match="wgrad"), Machine(2) as m:
        m.leave_out("S15.record")
        across_devices(m)
