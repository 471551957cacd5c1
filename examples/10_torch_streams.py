"""Gradients of a torch model from several producers, streams on a GPU and threads elsewhere, are summed by keys and
compared with torch's own engine. Needs torch.
"""

import contextlib
import sys
import threading

import fanin

try:
    import torch
except ImportError:
    print("this example needs torch, which is not installed")
    sys.exit(0)

PRODUCERS = 6
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(device)
parameters = list(model.parameters())
parts = torch.randn(PRODUCERS, 16, 32, device=device)


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def produce(buf: fanin.InputBuffer, key: int) -> None:
    """One producer's gradients, each ready on the stream that is torch's current one here."""
    gradients = torch.autograd.grad(loss(parts[key]), parameters)
    buf.add_many(range(len(gradients)), gradients, keys=[key] * len(gradients))


def on_stream(buf: fanin.InputBuffer, key: int) -> None:
    """On a GPU each producer has a stream of its own."""
    stream: contextlib.AbstractContextManager = contextlib.nullcontext()
    if device.type == "cuda":
        stream = torch.cuda.stream(torch.cuda.Stream())
        stream.stream.wait_stream(torch.cuda.current_stream())
    with stream:
        produce(buf, key)


def summed(order: list[int]) -> list[torch.Tensor]:
    """The sums, ready on the caller's stream; the producers start in this order."""
    consumer = torch.cuda.current_stream() if device.type == "cuda" else None
    buf = fanin.InputBuffer(len(parameters), stream=consumer, name="model")
    threads = [threading.Thread(target=on_stream, args=(buf, key)) for key in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return buf.take()


ours = summed(list(range(PRODUCERS)))
again = summed(list(reversed(range(PRODUCERS))))

sum(loss(x) for x in parts).backward()  # torch's engine: one backward pass through all parts
for (name, p), a, b in zip(model.named_parameters(), ours, again, strict=True):
    print(
        f"{name:9} close to torch's engine: {torch.allclose(a, p.grad, rtol=1e-5, atol=1e-7)}; the same bits again:"
        f" {torch.equal(a, b)}"
    )
