"""Graph trees on the simulated device, on the CUDA backend over the fake driver, and on the CPU: what a call does,
what it refuses, what is ended when (rules T).
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import sim
from kit import hooks
from kit.graph_trees import did, launch, scaled, tree_on
from kit.pictures import Read, outside

STREAMS = pytest.mark.parametrize("m", ["sim", "fake"], indirect=True)  # where there are some


def wait(s: Any, for_: Any) -> None:
    if s is not None:  # the CPU has none
        s.wait(for_)


# ---- the life of a function ----


def test_a_function_is_warmed_then_recorded_then_replayed(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    seen = []
    for i in range(4):
        with tree.step():
            y = double(m.array(np.full(3, float(i))))
            assert y.numpy().tolist() == [2.0 * i] * 3
            seen.append((did(double), double.last.node))
    assert seen == [("warmed", None), ("recorded", 0), ("replayed", 0), ("replayed", 0)]


def test_an_output_of_the_step_is_read_in_place_and_other_operands_are_copied(m: Any) -> None:
    tree = tree_on(m)
    double, triple = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))
    for i in range(4):
        with tree.step():
            assert triple(double(m.array(np.full(3, float(i))))).numpy().tolist() == [6.0 * i] * 3
    assert (did(double), did(triple)) == ("replayed", "replayed")
    assert tree.stats.nodes == 2


def test_a_branch_is_recorded_where_the_other_one_was_and_needs_no_more_memory(m: Any) -> None:
    tree = tree_on(m)
    a, b, c = (tree.function(scaled(m, k)) for k in (2, 3, 5))
    for i in range(8):
        with tree.step():
            y = a(m.array(np.arange(64.0) + i))
            z = (b if i % 2 else c)(y)
            assert z.numpy().tolist() == ((np.arange(64.0) + i) * (6 if i % 2 else 10)).tolist()
    assert (did(a), did(b), did(c)) == ("replayed",) * 3
    reaches = {function: reaches for _, _, function, _, reaches, *_ in tree._recordings()}
    assert reaches["times_3"] == reaches["times_5"]
    assert tree.stats.high_water == 2 * 512  # x and y of A, then z, where x was
    assert tree.stats.restored >= 1


def test_ten_shapes_need_the_memory_of_the_largest(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    for _ in range(3):
        for n in range(1, 11):
            with tree.step():
                assert double(m.array(np.ones(64 * n))).numpy().tolist() == [2.0] * 64 * n
    assert did(double) == "replayed"
    assert tree.stats.nodes == 10
    assert tree.stats.high_water == 2 * 640 * 8


def test_operands_that_are_no_arrays_and_keys_have_recordings_of_their_own(m: Any) -> None:
    tree = tree_on(m)

    def power(x: Any, n: int) -> Any:
        y = m.empty(x.shape, x.dtype)
        launch(m, lambda a, b: np.power(a, n, out=b), [x], [y])
        return y

    by_value, mode = tree.function(power), [1]
    by_key = tree.function(lambda x: power(x, mode[0]), key=lambda x: mode[0])
    for _ in range(3):
        for n in (1, 2, 3):
            mode[0] = n
            with tree.step():
                assert by_value(m.array(np.full(2, 3.0)), n).numpy().tolist() == [3.0**n] * 2
            with tree.step():
                assert by_key(m.array(np.full(2, 3.0))).numpy().tolist() == [3.0**n] * 2
    assert (did(by_value), did(by_key)) == ("replayed", "replayed")
    assert tree.stats.nodes == 6
    with tree.step(), pytest.raises(TypeError, match=r"power: arguments that are no arrays.*hashable"):
        by_value(m.array(np.ones(2)), [])


def test_outputs_come_as_the_function_gave_them(m: Any) -> None:
    tree = tree_on(m)
    double = scaled(m, 2)

    def several(x: Any, w: Any) -> Any:
        y = double(x)
        return [y, y[1:], None, w, w[:1], x]

    f = tree.function(several, roles=("copy", "static"))
    w = m.array(np.array([7.0, 8.0]))
    for i in range(4):
        x = m.array(np.full(3, float(i)))
        with tree.step():
            y, tail, nothing, same, part, again = f(x, w)
            assert nothing is None and same is w and again is x
            assert y.numpy().tolist() == [2.0 * i] * 3 and tail.numpy().tolist() == [2.0 * i] * 2
            assert part.numpy().tolist() == [7.0]
            assert tail.address == y.address + 8
    assert did(f) == "replayed"
    nothing_given = tree.function(lambda x: None)
    for _ in range(3):
        with tree.step():
            assert nothing_given(m.array(np.ones(1))) is None


# ---- roles ----


def test_a_static_operand_is_read_in_place(m: Any) -> None:
    tree = tree_on(m)
    f = tree.function(scaled(m, 2), roles="static")
    w = m.array(np.ones(3))
    for i in range(4):
        launch(m, lambda a, i=i: a.fill(i), [], [w])
        with tree.step():
            assert f(w).numpy().tolist() == [2.0 * i] * 3
    assert did(f) == "replayed"


def test_a_static_operand_that_moves_is_recorded_beside_it_and_at_last_copied(m: Any) -> None:
    """Where kernels of others can be recorded, nothing shows that they do not write it: the function runs as it is."""
    tree = tree_on(m, limit=2)
    f = tree.function(scaled(m, 2), roles="static")
    seen, kept, copied = [], [], m.kind != "fake"
    words = (
        "times_2 copies operand 0 from now on"
        if copied
        else "foreign kernels may write into it, so it cannot be copied"
    )
    with pytest.warns(RuntimeWarning, match=words) as warned:
        for i in range(8):
            kept.append(m.array(np.full(3, float(i))))
            with tree.step():
                assert f(kept[-1]).numpy().tolist() == [2.0 * i] * 3
                seen.append(did(f))
                if i in (2, 3):
                    assert "operand 0 at 0x" in f.explain() and "T14" in f.last.rules
                if i == 4 and copied:
                    assert "it keeps moving, and is copied from now on" in f.last.reason
    assert seen == [
        "warmed",
        *["recorded"] * (4 if copied else 3),
        *["replayed" if copied else "raw"] * (3 + (not copied)),
    ]
    assert len(warned) == 1


def test_strict_trees_refuse_a_static_operand_that_moves(m: Any) -> None:
    tree = tree_on(m, strict=True)
    f = tree.function(scaled(m, 2), roles="static")
    w, v = m.array(np.ones(3)), m.array(np.ones(3))
    for _ in range(3):
        with tree.step():
            f(w)
    with tree.step(), pytest.raises(ValueError, match=r"times_2: operand 0 is static, and lies at 0x.*recorded at 0x"):
        f(v)
    with tree.step():
        f(w)
    assert did(f) == "replayed"


def test_an_accumulated_operand_is_the_callers_array_and_adds_up_over_replays(m: Any) -> None:
    tree = tree_on(m)

    def grad(x: Any, g: Any) -> None:
        launch(m, lambda a, b, out: np.add(a, b, out=out), [x, g], [g])

    f = tree.function(grad, roles=("copy", "accumulate"))
    g = m.array(np.zeros(3))
    for i in range(6):
        with tree.step():
            f(m.array(np.full(3, float(i))), g)
    assert did(f) == "replayed" and g.numpy().tolist() == [15.0] * 3


def test_an_accumulated_operand_is_no_memory_of_the_tree_and_overlaps_nothing(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    f = tree.function(lambda x, g: None, roles=("static", "accumulate"))
    x = m.array(np.ones(4))
    with tree.step():
        with pytest.raises(ValueError, match=r"operand 1 is added into .* memory of the graph tree"):
            f(x, double(x))
        with pytest.raises(ValueError, match="operands 1 and 0 share memory, and operand 1 is added into"):
            f(x[:3], x[2:])
        f(x[:2], x[2:])


def test_k_micro_batches_over_several_streams_give_the_bits_of_the_sequential_sum(m: Any) -> None:
    rng = np.random.default_rng(5)
    for k in (1, 2, 3, 8):
        for streams in (1, 2, 8):
            side = [m.stream() for _ in range(streams)]
            tree = tree_on(m)

            def micro(*operands: Any, side: list[Any] = side) -> None:
                *xs, g = operands
                here, buf = m.current_stream(), fanin.InputBuffer(1, name="micro")
                for i, x in enumerate(xs):
                    s = side[i % len(side)]
                    wait(s, here)
                    y = m.empty(x.shape, x.dtype)
                    launch(m, lambda a, b: np.multiply(a, a, out=b), [x], [y], s)
                    buf.add(0, y, key=i, stream=s)
                    wait(here, s)
                (total,) = buf.take(stream=here)
                launch(m, lambda a, b, out: np.add(b, a, out=out), [total, g], [g], here)

            f = tree.function(micro, roles=("copy",) * k + ("accumulate",))
            want, g = np.zeros(16, np.float32), m.array(np.zeros(16, np.float32))
            for _ in range(4):
                xs = [rng.standard_normal(16).astype(np.float32) for _ in range(k)]
                with tree.step():
                    f(*(m.array(x) for x in xs), g)
                total = xs[0] * xs[0]
                for x in xs[1:]:
                    total = total + x * x
                want = want + total
            assert did(f) == "replayed", (k, streams)
            assert g.numpy().tobytes() == want.tobytes(), (k, streams)
            tree.close()


# ---- what lives and what has ended ----


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_handle_of_an_ended_step_raises_in_every_state_and_so_do_its_views(m: Any, steps: int) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    for _ in range(steps):
        with tree.step():
            y = double(m.array(np.ones(4)))
            view = y[1:]
            assert view.numpy().tolist() == [2.0] * 3
    want = (
        rf"output of times_2, made at test_graph_trees.py:\d+ in step {steps}, which ended at test_graph_trees.py:\d+"
    )
    uses: list[Callable[[], Any]] = [
        y.numpy,
        view.numpy,
        lambda: y[0],
        lambda: view.reshape(3, 1),
        lambda: y.T,
        lambda: y.broadcast_to(2, 4),
        lambda: fanin.InputBuffer(1).add(0, y),
        lambda: fanin.add_n([y, y]),
        lambda: fanin.add_n([again, again], out=view),
        lambda: y.__dlpack__(),
        lambda: view.__cuda_array_interface__,
    ]
    again = m.array(np.ones(3))
    if m.kind == "sim":  # a launch by the driver's own means is none of ours
        uses += [lambda: launch(m, lambda a: None, [y], []), lambda: launch(m, lambda a: None, [], [view])]
    for use in uses:
        with pytest.raises(RuntimeError, match=want):
            use()
    with tree.step(), pytest.raises(RuntimeError, match="times_2: operand 0: this is an output of times_2"):
        double(y)
    with tree.step():
        again = double(m.array(np.ones(4)))
        with pytest.raises(RuntimeError, match=want):
            y.numpy()
        assert again.numpy().tolist() == [2.0] * 4


def test_gradients_parked_in_a_buffer_when_its_step_ends_are_not_summed(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    buf = fanin.InputBuffer(1, budget=1 << 20)
    for _ in range(3):
        with tree.step():
            buf.add(0, double(m.array(np.ones(4))))
            buf.add(0, m.array(np.ones(4)))
        with pytest.raises(RuntimeError, match="output of times_2"):
            buf.take()
        buf.clear()


def test_an_output_that_is_kept_outlives_the_step(m: Any) -> None:
    tree = tree_on(m)
    one = tree.function(scaled(m, 2), keep=True)
    double = scaled(m, 2)
    both = tree.function(lambda x: (double(x), double(x)), keep=(True, False))
    kept = []
    for i in range(5):
        with tree.step():
            x = m.array(np.full(4, float(i)))
            kept.append(one(x))
            first, second = both(x)
            kept.append(first)
        with pytest.raises(RuntimeError, match="keep=True copies outputs"):
            second.numpy()
    assert [k.numpy().tolist() for k in kept] == [[2.0 * i] * 4 for i in range(5) for _ in range(2)]


def test_two_outputs_that_live_at_once_never_share_bytes(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    with pytest.warns(RuntimeWarning, match="times_2 runs again and again in one step"):
        for _ in range(3):
            with tree.step():
                ys = [double(m.array(np.full(4, float(i)))) for i in range(5)]
                assert [y.numpy().tolist() for y in ys] == [[2.0 * i] * 4 for i in range(5)]
    assert did(double) == "replayed"


def test_a_path_without_referenced_outputs_ends_within_its_step(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2), keep=True)
    seen = []
    for _ in range(3):
        with tree.step():
            for k in range(3):
                double(m.array(np.full(4, float(k))))
                seen.append(did(double))
    assert seen == ["warmed", "recorded", *["replayed"] * 7]
    assert tree.stats.nodes == 1


def test_a_step_of_another_tree_is_refused_within_a_step_and_steps_of_one_nest(m: Any) -> None:
    one, other = tree_on(m), tree_on(m)
    double = one.function(scaled(m, 2))
    with one.step():
        with pytest.raises(RuntimeError, match="a step of another graph tree is open"), other.step():
            pass
        with one.step():
            y = double(m.array(np.ones(2)))
        assert y.numpy().tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="output of times_2"):
        y.numpy()
    with other.step():
        pass


def test_a_call_outside_of_a_step_is_refused(m: Any) -> None:
    double = tree_on(m).function(scaled(m, 2))
    with pytest.raises(RuntimeError, match=r"times_2 is called outside of a step.*with tree.step\(\)"):
        double(m.array(np.ones(2)))
    assert double.last is None


# ---- bodies that go wrong ----


def record_of(m: Any, tree: Any, f: Any, *operands: Any) -> None:
    """The call that records: the second step."""
    with tree.step():
        f(*operands)
    assert did(f) == "warmed"
    before = tree._recordings()
    in_use = tree.stats.in_use
    with tree.step():
        f(*operands)
    raise AssertionError((before, in_use))


def test_an_output_that_is_an_operand_is_copied_where_it_is_kept(m: Any) -> None:
    """In every state: also where the function runs as it is."""
    tree = tree_on(m)
    f = tree.function(lambda x, w: (x, w, w[1:]), roles=("copy", "static"), keep=True)
    some = tree.function(lambda x, w: (x, w), roles=("copy", "static"), keep=(False, True))
    outer = tree.function(lambda x, w: some(x, w)[1], roles=("copy", "static"))
    w = m.array(np.arange(3.0))
    for i in range(4):
        x = m.array(np.full(3, float(i)))
        with tree.step():
            kept = f(x, w)
            assert all(k is not x and k is not w and k.address not in (x.address, w.address) for k in kept), did(f)
            mine, copy = some(x, w)
            assert mine is x and copy is not w and copy.address != w.address, did(some)
            assert outer(x, w).address != w.address, did(outer)
        launch(m, lambda a: a.__iadd__(1.0), [], [w])
        m.synchronize()
        assert kept[0].numpy().tolist() == [i] * 3
        assert kept[1].numpy().tolist() == copy.numpy().tolist() == [i, i + 1, i + 2]
        assert kept[2].numpy().tolist() == [i + 1, i + 2]
    assert did(f) == did(some) == "replayed"


def test_stats_count_the_memory_of_outputs_while_they_live_in_every_state(m: Any) -> None:
    tree = tree_on(m)
    f, g = tree.function(scaled(m, 2)), tree.function(scaled(m, 3))
    x = m.array(np.ones(100))
    for _ in range(4):
        with tree.step():
            y = f(x)
            assert tree.stats.in_use == 1024, did(f)
            z = g(y)
            assert tree.stats.in_use == 2048, did(g)
            del z, y
    assert did(f) == did(g) == "replayed"
    with tree.step():
        y = f(x)
        del y
        assert tree.stats.in_use == 0
        y = f(x)
    assert tree.stats.in_use == 0 and y.shape == (100,)


BAD: dict[str, tuple[Callable[[Any, dict[str, Any]], Callable[..., Any]], type[Exception], str]] = {}
NEED_STREAMS: set[str] = set()


def bad(error: type[Exception], words: str, streams: bool = False) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        BAD[make.__name__] = (make, error, words)
        NEED_STREAMS.update({make.__name__} if streams else ())
        return make

    return register


@bad(fanin.CaptureError, "stream", streams=True)
def synchronizes(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        y = scaled(m, 2)(x)
        m.current_stream().synchronize()
        return y

    return f


@bad(fanin.CaptureError, "read")
def reads_on_the_host(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        y = scaled(m, 2)(x)
        y.numpy()
        return y

    return f


@bad(fanin.CaptureError, "f cannot be recorded: .*join", streams=True)
def forgets_a_join(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    s = m.stream()

    def f(x: Any) -> Any:
        y = m.empty(x.shape, x.dtype)
        s.wait(m.current_stream())
        launch(m, lambda a, b: np.multiply(a, 2, out=b), [x], [y], s)
        if out.setdefault("calls", 0) == 0:
            m.current_stream().wait(s)
        out["calls"] += 1
        return y

    return f


@bad(fanin.CaptureError, "f: work on stream .* is not part of the recording", streams=True)
def works_on_a_stream_that_it_did_not_fork(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    s, mine = m.stream(), m.array(np.ones(4))

    def f(x: Any) -> Any:
        if out.setdefault("calls", 0):
            with fanin.stream(s):
                fanin.add_n([mine], out=mine)
        out["calls"] += 1
        return scaled(m, 2)(x)

    return f


@bad(KeyError, "half-way")
def raises_half_way(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        y = scaled(m, 2)(x)
        if out.setdefault("calls", 0):
            raise KeyError("half-way")
        out["calls"] += 1
        return y

    return f


@bad(ValueError, "f returned 2 outputs, and 1 before")
def changes_its_number_of_outputs(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        y = scaled(m, 2)(x)
        out["calls"] = out.setdefault("calls", 0) + 1
        return y if out["calls"] == 1 else (y, y)

    return f


@bad(ValueError, "f: output 0 is not its own")
def returns_what_is_not_its_own(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    mine = m.array(np.ones(4))

    def f(x: Any) -> Any:
        out["calls"] = out.setdefault("calls", 0) + 1
        return scaled(m, 2)(x) if out["calls"] == 1 else mine

    return f


@bad(TypeError, r"f: output 0 is a float: a function of a graph tree returns arrays on (cpu|\w+:0)")
def returns_no_array(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        out["calls"] = out.setdefault("calls", 0) + 1
        return scaled(m, 2)(x) if out["calls"] == 1 else 1.0

    return f


@bad(fanin.CaptureError, "f: .* touches memory that is neither an operand nor")
def reads_what_is_no_operand(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    mine = m.array(np.ones(4))

    def f(x: Any) -> Any:
        return fanin.add_n([x, mine])

    return f


@bad(fanin.CaptureError, "f: .* touches memory that is neither an operand nor")
def writes_what_is_no_operand(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    mine = m.array(np.ones(4))

    def f(x: Any) -> Any:
        fanin.add_n([x, x], out=mine)
        return scaled(m, 2)(x)

    return f


@bad(fanin.CaptureError, r"f: (a copy from the host to \w+:0 would run once|copy touches memory that is neither)")
def allocates_from_elsewhere(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        if out.setdefault("calls", 0):
            m.array(np.ones(4))
        out["calls"] += 1
        return scaled(m, 2)(x)

    return f


@bad(RuntimeError, "f: a reference keeps 32 bytes that the function allocated and did not return")
def keeps_what_it_made(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        y = scaled(m, 2)(x)
        if out.setdefault("calls", 0):
            out["kept"] = scaled(m, 3)(y)
        out["calls"] += 1
        return y

    return f


@bad(ValueError, "f: output 0 is a view of operand 0, which is copied")
def returns_a_part_of_what_is_copied(m: Any, out: dict[str, Any]) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        return x[1:]

    return f


@pytest.mark.parametrize(
    ("m", "name"),
    [(kind, name) for name in sorted(BAD) for kind in ("sim", "fake", "cpu")[: 2 if name in NEED_STREAMS else 3]],
    indirect=["m"],
)
def test_a_body_that_raises_leaves_the_tree_unchanged_and_nothing_captured(m: Any, name: str) -> None:
    make, error, words = BAD[name]
    tree = tree_on(m)
    out: dict[str, Any] = {}
    body = make(m, out)
    body.__name__ = "f"
    good, f = tree.function(scaled(m, 3)), tree.function(body)
    x = m.array(np.ones(4))
    for _ in range(3):
        with tree.step():
            y = good(x)
    with tree.step():
        y = good(x)
        f(y) if name == "returns_a_part_of_what_is_copied" else f(x)
        assert did(f) == "warmed"
    for _ in range(2):
        with tree.step():
            y = good(x)
            before, used = tree._recordings(), tree.stats.in_use
            with pytest.raises(error, match=words) as caught:
                f(x)
            if error is KeyError:
                assert any("nothing was recorded" in note for note in caught.value.__notes__)
            after = tree._recordings()
            assert (after, tree.stats.in_use) == (before, used)
            assert y.numpy().tolist() == [3.0] * 4
            other = good(y)  # .. and continues from there
            assert other.numpy().tolist() == [9.0] * 4
            del caught
        if "kept" in out:
            with pytest.raises(RuntimeError, match="in a call that failed"):
                out["kept"].numpy()
    launch(m, lambda: None, [], [])  # nothing is captured
    m.synchronize()


def test_a_body_that_raises_during_warm_up_leaves_the_tree_unchanged(m: Any) -> None:
    tree = tree_on(m)
    kept: list[Any] = []

    def body(x: Any) -> Any:
        kept.append(scaled(m, 2)(x))
        raise KeyError("at once")

    f, good = tree.function(body), tree.function(scaled(m, 3))
    x = m.array(np.ones(4))
    for i in range(5):
        with tree.step():
            y = good(x)
            used = tree.stats.in_use
            with pytest.raises(KeyError):
                f(x)
            assert tree.stats.in_use == used or i >= 2  # after a replay the block table is of another time
            assert good(y).numpy().tolist() == [9.0] * 4
            with pytest.raises(RuntimeError, match="in a call that failed"):
                kept.pop().numpy()


def test_a_function_that_writes_a_copied_operand_runs_eagerly_and_warns_once(m: Any) -> None:
    tree = tree_on(m)

    one = m.array(np.ones(3))

    def inc(one: Any, x: Any) -> None:
        fanin.add_n([x, one], out=x)

    f = tree.function(inc, roles=("static", "copy"))
    x = m.array(np.zeros(3))
    seen = []
    with pytest.warns(RuntimeWarning, match="inc runs without a recording: it writes into operand 1") as warned:
        for _ in range(5):
            with tree.step():
                f(one, x)
                seen.append(did(f))
    assert seen == ["warmed", "raw", "raw", "raw", "raw"] and len(warned) == 1
    assert "T6" in f.last.rules and "operand 1" in f.last.reason
    assert x.numpy().tolist() == [5.0] * 3


def test_a_leaf_never_adopts_memory_of_the_tree(m: Any) -> None:
    tree = tree_on(m)
    leaf = fanin.Leaf(m.array(np.zeros(4)))

    def backward(x: Any) -> None:
        y = scaled(m, 2)(x)
        fanin.backward([(fanin.Node(lambda g: g, edges=[(leaf, 0)]), 0, y)])

    f = tree.function(backward)
    x = m.array(np.ones(4))
    with fanin.set_options(warn_stream_mismatch=False), tree.step():
        with pytest.raises(RuntimeError, match="a leaf without a gradient keeps the array"):
            f(x)
        with pytest.raises(RuntimeError, match="in a call that failed"):
            leaf.grad.numpy()


def test_a_leaf_outside_takes_a_copy_of_an_output(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    for i in range(4):
        leaf = fanin.Leaf(m.array(np.zeros(4)))
        node = fanin.Node(lambda g: g, edges=[(leaf, 0)])
        with tree.step():
            y = double(m.array(np.full(4, float(i))))
            fanin.backward([(node, 0, y)])
            grad = leaf.grad
            at = grad.ctypes.data if isinstance(grad, np.ndarray) else grad.address
            assert at != y.address
            del y
        assert (grad if isinstance(grad, np.ndarray) else grad.numpy()).tolist() == [2.0 * i] * 4


# ---- threads, streams, ends ----


def test_any_thread_may_call_and_a_handle_is_refused_on_another_thread_after_its_step(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    raised: list[BaseException] = []
    for i in range(6):
        box: list[Any] = []

        def work(i: int = i, box: list[Any] = box) -> None:
            with m.on_this_thread(), tree.step():
                box.append(double(m.array(np.full(4, float(i)))))
                assert box[0].numpy().tolist() == [2.0 * i] * 4

        def look(box: list[Any] = box) -> None:
            try:
                box[0].numpy()
            except RuntimeError as e:
                raised.append(e)

        for task in (work, look):
            thread = threading.Thread(target=task)
            thread.start()
            thread.join()
    assert did(double) == "replayed" and len(raised) == 6


@STREAMS
def test_a_caller_on_another_stream_is_waited_for_before_and_waits_after(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2), roles="static")
    x = m.array(np.zeros(4))
    s = m.stream()
    for i in range(5):
        with fanin.stream(s), tree.step():
            launch(m, lambda a, i=i: a.fill(i), [], [x])
            y = double(x)
            z = m.empty((4,), np.float64)
            launch(m, lambda a, b: np.add(a, 1, out=b), [y], [z])
            assert z.numpy().tolist() == [2.0 * i + 1] * 4
    assert m.races == 0


@STREAMS
def test_an_output_used_on_another_stream_is_waited_for_before_its_memory_is_used_again(m: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    s = m.stream()
    zs = []
    for i in range(5):
        with tree.step():
            y = double(m.array(np.full(4, float(i))))
            z = m.empty((4,), np.float64)
            s.wait(m.current_stream())
            y.record_stream(s)
            launch(m, lambda a, b: np.add(a, 1, out=b), [y], [z], s)
            zs.append(z)
            del y
    m.synchronize()
    m.current_stream().wait(s)
    assert [z.numpy()[0] for z in zs] == [2.0 * i + 1 for i in range(5)]
    assert m.races == 0


def test_a_function_called_within_another_or_within_a_capture_is_part_of_that(m: Any) -> None:
    tree = tree_on(m)
    inner = tree.function(scaled(m, 2))
    outer = tree.function(lambda x: inner(inner(x)))
    for i in range(4):
        with tree.step():
            assert outer(m.array(np.full(2, float(i)))).numpy().tolist() == [4.0 * i] * 2
            assert (did(inner), inner.last.reason) == ("raw", "it is called by a function of the same tree") or i > 1
    assert did(outer) == "replayed" and tree.stats.nodes == 1


@pytest.mark.parametrize("kind", ["sim", "fake"])
def test_after_close_nothing_is_left_and_calls_raise(kind: str, a_world: Callable[..., Any]) -> None:
    m = a_world(kind, 1, seed=7, memory=1 << 20)
    blocks = []
    for _ in range(4):
        double = a_tree_was_closed(m)
        m.empty(700_000, "u1")  # the device has its memory again
        m.synchronize()
        del double
        gc.collect()
        m.empty(1)
        fanin.trim()
        blocks.append(hooks.blocks())
    assert blocks[1] == blocks[2] == blocks[3]  # a machine keeps its streams, a driver those of trees


def a_tree_was_closed(m: Any) -> Any:
    """A function of it."""
    tree = tree_on(m, memory=1 << 19)
    double = tree.function(scaled(m, 2))
    for _ in range(3):
        with tree.step():
            y = double(m.array(np.ones(4)))
    with pytest.raises(fanin.DeviceOutOfMemoryError, match=r"524288 of 1048576 in use|out of memory"):
        m.empty(700_000, "u1")
    with pytest.raises(RuntimeError, match="cannot be closed while a step is open"), tree.step():
        tree.close()
    tree.close()
    tree.close()
    assert tree.closed and tree.stats.nodes == 0 and tree.stats.bytes == 0
    with pytest.raises(RuntimeError, match="output of times_2"):
        y.numpy()
    with pytest.raises(RuntimeError, match="the graph tree is closed"), tree.step():
        pass
    return double


def test_errors_for_bad_arguments_name_the_valid_ones(m: Any) -> None:
    tree = tree_on(m)
    with pytest.raises(ValueError, match='roles are "auto", "copy", "static" and "accumulate", not \'statik\''):
        tree.function(scaled(m, 2), roles="statik")
    with pytest.raises(TypeError, match="expected a function of arrays"):
        tree.function(3)  # type: ignore[arg-type]
    f = tree.function(scaled(m, 2), roles=("static",))
    with tree.step():
        with pytest.raises(TypeError, match="times_2: got 2 operands, but roles= has 1"):
            f(m.array(np.ones(2)), m.array(np.ones(2)))
        with pytest.raises(TypeError, match=r"operand 0: its role static needs an array .* got a (numpy.ndarray|list)"):
            f([1.0, 1.0] if m.kind == "cpu" else np.ones(2))
        with pytest.raises(TypeError, match="pass operands by position"):
            f(x=m.array(np.ones(2)))
    with sim.Machine() as other, pytest.raises(ValueError, match="operand 0 lies on sim:0, but the graph tree is of"):
        f(other.array(np.ones(2)))
    with pytest.raises(ValueError, match="memory is a number of bytes"):
        fanin.GraphTree(m.place(), memory=3)


def test_a_tree_may_be_queried_within_a_body_and_by_other_threads_at_that_time(m: Any) -> None:
    tree = tree_on(m)
    seen: list[Any] = []

    def ask() -> None:
        seen.append((tree.stats, repr(tree), tree._recordings(), tree.closed))

    def body(x: Any) -> Any:
        ask()
        with pytest.raises(RuntimeError, match="a step cannot begin in a function of its graph tree"), tree.step():
            pass
        with pytest.raises(RuntimeError, match="cannot be closed"):
            tree.close()
        tree.function(scaled(m, 2))  # .. and dropped
        asking = threading.Thread(target=ask)
        asking.start()  # it waits for the end of the call
        threads.append(asking)
        return scaled(m, 2)(x)

    threads: list[threading.Thread] = []
    f = tree.function(body)
    for _ in range(3):
        with tree.step():
            f(m.array(np.ones(2)))
    for thread in threads:
        thread.join()
    assert did(f) == "replayed" and len(seen) == 4


# ---- reports ----


def test_a_launch_of_a_recording_has_a_line_and_a_slice_in_the_trace(m: Any, tmp_path: Any) -> None:
    tree = tree_on(m)
    double = tree.function(scaled(m, 2))
    with fanin.trace() as t:
        for _ in range(4):
            with tree.step():
                double(m.array(np.ones(4)))
    lines = [line for line in t.lines if line.label.startswith("replay of")]
    assert [line.label for line in lines] == ["replay of times_2, recording 0"] * 3
    assert len({line.stream for line in lines}) == 1 and lines[0].bytes == 32
    times = [(line.start_us, line.end_us) for line in lines]
    if m.kind == "sim":  # on its clock, one after the other
        assert all(start < end for start, end in times)
        assert all(one[1] <= next_[0] for one, next_ in itertools.pairwise(times))
    t.save(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text().count('"name": "replay of times_2, recording 0"') == 3


def test_a_tree_is_drawn_with_a_bar_for_each_recording(m: Any, tmp_path: Any) -> None:
    tree = tree_on(m)
    a, b, c = (tree.function(scaled(m, k)) for k in (2, 3, 5))
    for i in range(6):
        with tree.step():
            y = a(m.array(np.ones(4)))
            z = (b if i % 2 else c)(y)
    made = tree.plot(tmp_path / "tree.svg")
    assert (tmp_path / "tree.svg").read_text() == made and tree._repr_svg_() == made._repr_svg_()
    picture = Read(made)
    assert outside(picture) == []
    said = [text for text in picture.texts() if ", owns " in text]
    want = [(n, f, owns, replays) for n, _, f, owns, _, replays, *_ in tree._recordings()]
    assert len(want) == 3 and len(said) == 3
    for text, (node, function, owns, replays) in zip(said, want, strict=True):
        assert text.startswith(f"{node}: {function}, owns {owns} B, shares ")
        assert text.endswith(f" B, replayed {replays} times")
    assert picture.texts()[0].startswith(f"3 recordings, {tree.stats.replayed} replays")
    on_path = {bar.attrib["fill"] for bar in picture.shapes("owns")}
    assert len(on_path) == 2 and z is not None
    with pytest.raises(ValueError, match=r"GraphTree\.plot: expected a file name that ends in \.svg, got .*tree\.png"):
        tree.plot(tmp_path / "tree.png")
    tree.close()
    assert tree._repr_svg_() is None


# ---- costs, and what runs short ----


def test_a_steady_call_allocates_nothing_of_its_own(m: Any) -> None:
    """As much as the waits and the launch of the simulated device, for all operands."""
    tree = tree_on(m)

    def nothing(*operands: Any) -> Any:
        launch(m, lambda *a: None, [], [])
        return operands[0]

    counts = {}
    caller = m.current_stream()  # another reference, as its library would have
    for n in (1, 32):
        f = tree.function(nothing, roles="static")
        operands = [m.array(np.ones(1)) for _ in range(n)]
        for _ in range(6):
            with tree.step():
                m.synchronize()
                before = hooks.memory()[1]
                f(*operands)
                counts[n] = hooks.memory()[1] - before
        assert did(f) == "replayed"
    if m.kind == "cpu":
        assert counts == {1: 0, 32: 0}
        return
    s, t = m.stream(), m.stream()
    m.begin_capture(s)
    m.launch(s, lambda *a: None, reads=[], writes=[])
    graph = m.end_capture(s)
    direct = 0
    for _ in range(6):
        m.synchronize()
        before = hooks.memory()[1]
        s.wait(t)
        m.launch_graph(graph, s)
        t.wait(s)
        direct = hooks.memory()[1] - before
    assert counts[1] == counts[32] == direct and caller
