"""`fanin.torch.accumulate`, a block of eight passes backward, beside the same passes in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .timing import Result, Work, at_most, measure, peer, pinned

PASSES = 8
PLAIN, OURS = "plain torch", "fanin.torch.accumulate"


def narrow(torch: Any, dtype: Any) -> tuple[Any, Any]:
    """Many small parameters: what each costs shows."""
    layers = [torch.nn.Linear(16, 16, dtype=dtype) for _ in range(60)]
    return torch.nn.Sequential(*layers), torch.ones(4, 16, dtype=dtype)


def digits(torch: Any, dtype: Any) -> tuple[Any, Any]:
    """A small network as people have it."""
    nn = torch.nn
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).to(dtype), torch.ones(32, 784, dtype=dtype)


def wide(torch: Any, dtype: Any) -> tuple[Any, Any]:
    """A few large parameters: the sums show."""
    layers = [torch.nn.Linear(512, 512, dtype=dtype) for _ in range(6)]
    return torch.nn.Sequential(*layers), torch.ones(8, 512, dtype=dtype)


KINDS: tuple[tuple[str, Callable[[Any, Any], tuple[Any, Any]], str], ...] = (
    ("60 x Linear(16), float32", narrow, "float32"),
    ("60 x Linear(16), bfloat16", narrow, "bfloat16"),
    ("an MLP of 784-256-128-10, float32", digits, "float32"),
    ("6 x Linear(512), float32", wide, "float32"),
)


def sides(torch: Any, make: Callable[[Any, Any], tuple[Any, Any]], dtype: str) -> Work:
    """Both sides: of one network, so that its memory is the same; each begins with no gradients."""
    import fanin.torch

    model, x = make(torch, getattr(torch, dtype))
    own = list(model.parameters())

    def passes() -> None:
        for _ in range(PASSES):
            model(x).sum().backward()

    def plain() -> None:
        for p in own:
            p.grad = None
        passes()

    def ours() -> None:
        for p in own:
            p.grad = None
        with fanin.torch.accumulate(own):
            passes()

    return {PLAIN: plain, OURS: ours}


def results(quick: bool) -> Iterator[Result]:
    """us for each block of eight passes, forward and backward."""
    torch = peer("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    try:
        if torch is not None:
            torch.set_num_threads(1)
        with pinned() as where:
            for title, make, dtype in KINDS if torch is not None else ():
                yield measure(
                    f"{PASSES} passes and their gradients' sums, {title}, core {where}",
                    sides(torch, make, dtype),
                    base=PLAIN,
                    unit="us",
                    rounds=3 if quick else 100,
                    targets=[at_most(1.15, OURS, PLAIN)],
                )
    finally:
        if torch is not None:
            torch.set_num_threads(threads)
