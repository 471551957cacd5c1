"""The real libraries on a real GPU, as tests/interop/sim/test_exchange_cuda.py has it on stand-ins. Skipped where
there is none.
"""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import gpu

import fanin
from fanin import _core

pytestmark = [pytest.mark.partners, pytest.mark.gpu]

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)


def slow(value: float, n: int = 1 << 20) -> Any:
    """A tensor that is there late: its stream sleeps first."""
    x = torch.empty(n, device="cuda")
    torch.cuda._sleep(20_000_000)
    return x.fill_(value)


@pytest.mark.parametrize("explicit", [False, True])
def test_gradients_of_torchs_streams_are_summed_when_they_are_there(explicit: bool) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    buf = fanin.InputBuffer(1, stream=torch.cuda.current_stream())
    for k, s in enumerate(streams):
        with torch.cuda.stream(s):
            g = slow(2.0**k)
            if not explicit:
                buf.add(0, g, key=k)
        if explicit:
            buf.add(0, g, key=k, stream=s)
        del g
    [total] = buf.take()
    assert type(total) is torch.Tensor and total.is_cuda
    assert torch.equal(total, torch.full_like(total, 15))


def test_results_are_of_torchs_caching_allocator() -> None:
    xs = [torch.ones(1 << 20, device="cuda") for _ in range(2)]
    before = torch.cuda.memory_allocated()
    total = fanin.add_n(xs)
    assert torch.cuda.memory_allocated() - before >= total.nbytes
    assert torch.equal(total, xs[0] + xs[1])


def test_a_tensor_that_is_handed_through_keeps_its_memory_for_its_consumer() -> None:
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        g = slow(3)
    buf = fanin.InputBuffer(1, stream=consumer)
    buf.add(0, g, stream=producer)
    [same] = buf.take()
    assert same is g
    with torch.cuda.stream(consumer):
        torch.cuda._sleep(50_000_000)
        seen = same.sum()
    del g, same
    with torch.cuda.stream(producer):
        again = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]  # would be given the same memory
    consumer.synchronize()
    assert seen.item() == 3 * (1 << 20) and len(again) == 4


def test_conjugate_tensors_are_resolved() -> None:
    x = torch.arange(4, device="cuda").to(torch.complex64) * 1j
    assert torch.equal(fanin.add_n([x.conj(), x.conj()]), 2 * x.conj())


def test_our_array_goes_to_torch_and_back() -> None:
    x = _core.device_array("cuda:0", torch.arange(6.0).numpy(), False)
    t = torch.from_dlpack(x)
    assert t.is_cuda and t.tolist() == [0, 1, 2, 3, 4, 5]
    assert t.data_ptr() == x.address
    assert torch.as_tensor(x, device="cuda").tolist() == t.tolist()  # by __cuda_array_interface__


def test_streams_are_the_same_both_ways() -> None:
    s = torch.cuda.Stream()
    with fanin.stream(s) as ours:
        assert ours.handle == s.cuda_stream and ours == fanin.Stream("cuda:0", s.cuda_stream)
    assert ours.__cuda_stream__() == (0, s.cuda_stream)


def test_adds_and_a_take_inside_torchs_graph_are_replayed() -> None:
    """On streams that are forked from the captured one and joined by the take; replays follow their inputs."""
    xs = [torch.full((1 << 14,), float(k + 1), device="cuda") for k in range(8)]
    streams = [torch.cuda.Stream() for _ in range(4)]

    def total() -> Any:
        return gpu.from_four_streams(xs, streams, torch.cuda.current_stream())

    total()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = total()
    for more in (0, 10):
        for x in xs:
            x.add_(more)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, 36 + 8 * more))
    del graph, out
    torch.cuda.synchronize()


def test_torchs_own_streams_have_odd_ids_and_external_ones_have_not() -> None:
    """By which fanin decides whether it may pass one to torch."""
    s = torch.cuda.Stream()
    assert s.stream_id & 1 and torch.cuda.current_stream().stream_id in (0, torch.cuda.current_stream().stream_id | 1)
    assert not torch.cuda.ExternalStream(s.cuda_stream).stream_id & 1


def test_sums_over_ranks_are_made_on_the_device_and_ready_on_each_ranks_stream() -> None:
    def rank(group: fanin.dist.Group) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = slow(1.0 + group.rank)
            total = fanin.dist.add_n([x, x], group, "key")
            x.fill_(100)
            return total.is_cuda, total.unique().tolist(), group.counters.on_device

    assert fanin.dist.threads(3, rank) == [(True, [12.0], 1)] * 3
