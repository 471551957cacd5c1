"""`fanin.torch.accumulate`, a block of eight passes backward, beside the same passes in plain torch: time, also of the
mean of the passes and of one with weights, and the peak of memory of steps whose optimizer runs leaf by leaf in the
last pass (`block.last`).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .timing import Result, Work, at_most, measure, peer, pinned

PASSES = 8
PLAIN, OURS = "plain torch", "fanin.torch.accumulate"
MEAN, WEIGHED = "fanin.torch.accumulate, mean=True", "fanin.torch.accumulate, mean=True, block.weight(n)"
LAST = "fanin.torch.accumulate, last(step)"


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
    """All sides: of one network, so that its memory is the same; each begins with no gradients."""
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

    def mean() -> None:
        for p in own:
            p.grad = None
        with fanin.torch.accumulate(own, mean=True):
            passes()

    def weighed() -> None:
        for p in own:
            p.grad = None
        with fanin.torch.accumulate(own, mean=True) as block:
            for k in range(PASSES):
                with block.weight(3 + k):
                    model(x).sum().backward()

    return {PLAIN: plain, OURS: ours, MEAN: mean, WEIGHED: weighed}


# Three steps, in a process of its own: the peak of its memory beyond that of its parameters. Nothing is recycled, and
# large blocks of malloc go back to the system at once.
STEPS = """
import gc
import torch
import fanin.torch
fanin.set_options(pool_bytes=0)
torch.set_num_threads(1)
def resident(what):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(what + ":"))
own = [torch.nn.Parameter(torch.randn({n}, {n}).mul(0.03).to(torch.{dtype})) for _ in range({layers})]
x = torch.randn(8, {n}).to(torch.{dtype})
def one_pass():
    y = x
    for p in own:
        y = y @ p
    y.square().mean().backward()
def plain():
    for _ in range({passes}):
        one_pass()
    every.step()
    every.zero_grad()
def ours():
    with fanin.torch.accumulate(own):
        for _ in range({passes}):
            one_pass()
    every.step()
    every.zero_grad()
def last():
    with fanin.torch.accumulate(own) as block:
        for _ in range({passes} - 1):
            one_pass()
        with block.last(lambda p: each[p].step()):
            one_pass()
every = torch.optim.SGD(own, lr=0.01)
each = {{p: torch.optim.SGD([p], lr=0.01) for p in own}}
one_pass()
every.zero_grad()
gc.collect()
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")
for _ in range(3):
    {side}()
print(resident("VmHWM") - before)
"""


def peaks(quick: bool) -> Iterator[Result]:
    """MB at the peak of three steps; nothing if the system does not report it."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return
    n, layers, times = (512, 8, 1) if quick else (1024, 12, 3)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    for dtype in ("float32", "bfloat16"):
        for passes in (1, 4):
            seen: dict[str, list[float]] = {PLAIN: [], OURS: [], LAST: []}
            for _ in range(times):
                for name, side in zip(seen, ("plain", "ours", "last"), strict=True):
                    code = STEPS.format(n=n, layers=layers, dtype=dtype, passes=passes, side=side)
                    done = subprocess.run(
                        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
                    )
                    seen[name].append(float(done.stdout))
            middle = {name: max(statistics.median(all_), 0.1) for name, all_ in seen.items()}
            least = {name: max(min(all_), 0.1) for name, all_ in seen.items()}
            yield {
                "title": f"peak memory of steps of {passes} passes, {layers} x {n} x {n}, {dtype}, nothing recycled",
                "unit": "MB",
                "base": PLAIN,
                "rounds": times,
                "rows": {
                    name: {
                        "min": least[name],
                        "median": middle[name],
                        "ratio": middle[PLAIN] / middle[name],
                        "ratio_of_minima": least[PLAIN] / least[name],
                        "rounds": times,
                    }
                    for name in seen
                },
                "absent": [],
                "targets": [],
            }


def results(quick: bool) -> Iterator[Result]:
    """us for each block of eight passes, forward and backward; MB at the peak of a step."""
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
                    targets=[at_most(1.15, OURS, PLAIN), at_most(1.02, MEAN, OURS)],
                )
        if torch is not None:
            yield from peaks(quick)
    finally:
        if torch is not None:
            torch.set_num_threads(threads)
