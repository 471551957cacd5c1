"""Leaves on a device with streams, and a transport with a queue of its own, as NCCL has: packing, sending and unpacking
race in no order, and each wait that is left out is found.

Arrays are copied where `fanin.dist` copies CUDA tensors; the transport waits where torch's NCCL group does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.dist import layout, reducer
from fanin.dist.group import Group
from fanin.dist.layout import Leaf
from fanin.dist.reducer import Reducer
from fanin.dist.threads import ThreadEngine, World, _Operation
from fanin.sim import Array, Machine, Report, explore
from kit.sample import sizes

pytestmark = pytest.mark.threads

#: The waits of the transport, and the purpose of each.
WAITS = {
    "queue for copy": "the queue waits until the message is on the device",
    "queue for peer": "the receiver's queue waits until the sender's message is on the device",
    "caller for queue": "the stream of the caller waits for the queue before the message is copied to the host",
}


class QueuedEngine(ThreadEngine):
    """Messages of arrays travel on a queue of the device; those of headers as between threads.

    A sender keeps its message until all ranks have copied theirs to the host.
    """

    def __init__(self, world: World, rank: int, machine: Machine, without: str) -> None:
        super().__init__(world, rank)
        self.machine, self.without = machine, without
        self.caller, self.queue = machine.stream(), machine.stream()

    def _message(self, raw: Any) -> tuple[Any, Any]:
        """Return the message on the device, and an event that the queue records after its copy."""
        made = self.machine.empty(len(raw), "uint8")
        self.machine.launch(
            self.caller, lambda to: to.__setitem__(slice(None), raw), writes=[made], name="copy to device"
        )
        if self.without != "queue for copy":
            self.queue.wait(self.caller.record())
        return made, self.queue.record()

    def all_to_all(self, sends: Any, receives: Any) -> _Operation:
        made = {id(x): self._message(x) for x in sends if len(x)}

        def read(posted: list[Any]) -> None:
            """Copy each message on the queue; then to the host."""
            for messages, place in zip(posted, receives, strict=True):
                if not len(place):
                    continue
                message, event = messages[self.rank]
                got = self.machine.empty(len(place), "uint8")
                if self.without != "queue for peer":
                    self.queue.wait(event)
                self.machine.launch(
                    self.queue, lambda a, b: b.__setitem__(slice(None), a), reads=[message], writes=[got], name="send"
                )
                if self.without != "caller for queue":
                    self.caller.wait(self.queue.record())
                with fanin.stream(self.caller):
                    place[:] = got.numpy()

        return _Operation(self, [made.get(id(x)) for x in sends], read)


@pytest.fixture(autouse=True)
def _device_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a simulated device are copied as CUDA tensors are: to the host, and to the device of the leaf."""
    leaf_of, wrapped = layout.leaf_of, layout.wrapped
    machines: list[Machine] = []
    real = Machine.__enter__

    def enter(self: Machine) -> Machine:
        machines[:] = [self]
        return real(self)

    def spec(x: Any, name: str) -> Leaf:
        return Leaf(name, tuple(x.shape), str(x.dtype)) if isinstance(x, Array) else leaf_of(x, name)

    def to_host(x: Any) -> Any:
        return x.numpy() if isinstance(x, Array) else x

    def like(raw: Any, dtype: str, x: Any) -> Any:
        made = wrapped(raw, dtype, None)
        return machines[0].array(made) if isinstance(x, Array) else made

    monkeypatch.setattr(Machine, "__enter__", enter)
    monkeypatch.setattr(reducer, "leaf_of", spec)
    monkeypatch.setattr(reducer, "host", to_host)
    monkeypatch.setattr(layout, "wrapped", like)


def trained(group: Group, machine: Machine, buckets: int, order: Any, turns: int) -> list[Any]:
    """A pass over a node on one stream and a leaf on another, for each bucket; the sums."""
    leaves, roots = [], []
    for i in range(buckets):
        stream, own = machine.stream(), machine.stream()
        w = fanin.Leaf(machine.array(np.zeros(300, "f4")), name=f"w{i}", stream=own)

        def double(g: Any, stream: Any = stream) -> Any:
            made = machine.empty(300, "float32")
            machine.launch(stream, lambda a, b: np.multiply(a, 2, out=b), reads=[g], writes=[made], name="double")
            return made

        with fanin.stream(stream):
            g = machine.empty(300, "float32")
            machine.launch(stream, lambda to: to.fill(1 + group.rank), writes=[g], name="fill")
            roots.append((fanin.Node(double, edges=[(w, 0)], name=f"N{i}"), 0, g))
        leaves.append(w)
    made = Reducer(leaves, group, order=order, bucket_bytes=1)
    with fanin.stream(machine.stream()):
        for _ in range(turns):
            fanin.backward(roots, reducer=made, keep_graph=True)
        return [w.grad.numpy().tolist() for w in leaves]


def scenario(machine: Machine, n: int, buckets: int, without: str, order: Any, turns: int) -> Any:
    world = World(n)

    def rank(r: int) -> Any:
        group = Group(QueuedEngine(world, r, machine, without), timeout=None)
        try:
            return trained(group, machine, buckets, order, turns)
        finally:
            group.close()

    threads = [machine.spawn(rank, r, name=f"rank {r}") for r in range(n)]
    machine.join()
    sums = [t.result for t in threads]
    assert sums == [[[2.0 * turns * n * (n + 1) / 2] * 300] * buckets] * n
    return sums


#: With a wait left out, one of so many orders, or of as many at random, has a race.
SAMPLE = 4


def explored(
    n: int, buckets: int, without: str = "", order: Any = "key", turns: int = 1, limit: int = SAMPLE, **options: Any
) -> Report:
    run: Callable[[Machine], Any] = partial(scenario, n=n, buckets=buckets, without=without, order=order, turns=turns)
    with fanin.set_options(warn_stream_mismatch=False):
        return explore(run, limit=limit, samples=limit, devices=1, **options)


@pytest.mark.parametrize("limit", sizes(SAMPLE, 20))
@pytest.mark.parametrize(
    ("n", "buckets", "order"),
    [
        *[(2, 1, "key"), (2, 1, "exact")],
        *(pytest.param(*scene, marks=pytest.mark.full) for scene in [(2, 2, "key"), (3, 1, "exact")]),
    ],
)
def test_packing_sending_and_unpacking_race_in_no_order(n: int, buckets: int, order: str, limit: int) -> None:
    report = explored(n, buckets, order=order, turns=2, limit=limit)
    assert not report.failed and report.runs >= limit, str(report)


@pytest.mark.parametrize("without", WAITS)
def test_each_wait_of_the_transport_that_is_left_out_is_a_race(without: str) -> None:
    report = explored(2, 1, without, stop_at_first=True)
    assert report.races > 0, WAITS[without]


@pytest.mark.parametrize("word", ["S9.record", "S12.mark", "S13.mark", "S18.wait"])
def test_a_wait_that_the_pass_leaves_out_between_a_node_and_the_copy_of_its_gradient_is_a_race(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Machine.__enter__

    def enter(self: Machine) -> Machine:
        self.leave_out(word)
        return real(self)

    monkeypatch.setattr(Machine, "__enter__", enter)
    assert explored(2, 1, turns=2, stop_at_first=True).races > 0
